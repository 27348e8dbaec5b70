"""The report on a job of many ranks, from its spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.ranks.clocks import align, fit, write_table
from profiler_wrapper.ranks.database import Database, LoadedSpans
from profiler_wrapper.ranks.model import Bool, Float, Int, Missing, OwnTimes, RanksReport, Replay
from profiler_wrapper.ranks.replay import what_if
from profiler_wrapper.ranks.stragglers import OUTSIDE, judge, named_evidence, named_spans, with_name
from profiler_wrapper.ranks.times import (
    MANY_STEPS,
    Basis,
    account,
    communication,
    layer_times,
    match_collectives,
    own_times,
    prepare,
    score,
    steady_times,
    subtract_transfer_waiting,
    with_waiting_of_one,
)
from profiler_wrapper.trace.run_directory import RESULT_FILE, RUN_FILE
from profiler_wrapper.trace.spans import ranges

# --------------------------------------------------------------------------------------------------
# Peak memory and MFU of each rank, as its result.json has them; where they are not known, why.

_MOST_RESULTS = 4096  # that are read
_MOST_REASONS = 4
_NO_FILES = "no rank has a result.json: ProfilerWrapper writes them, timers and span tables alone do not"


class _Peak(msgspec.Struct):
    allocated_bytes: int | None = None


class _Memory(msgspec.Struct):
    peak: _Peak | None = None


class _Utilization(msgspec.Struct):
    mfu: float | None = None


class _Result(msgspec.Struct):
    memory: _Memory | None = None
    utilization: _Utilization | None = None
    warnings: list[str] = []


class RankResults(NamedTuple):
    """What the results of ranks say of them; None where none says anything."""

    peak_bytes: Float | None  # (R,) the highest allocated
    mfu: Float | None  # (R,) 0 to 1
    peak_unknown: str | None  # why it is not known, of all ranks or of which; None: it is, of all
    mfu_unknown: str | None


def results_of(root: Path, ranks: Int) -> RankResults:
    """Reads `rank<k>*/result.json` below `root`; what is wrong with one is a reason, and no error."""
    files = {_rank_of(file): file for file in root.glob(f"rank*/{RESULT_FILE}")}
    peak, mfu = np.full(len(ranks), np.nan), np.full(len(ranks), np.nan)
    why_peak: dict[str, list[int]] = {}
    why_mfu: dict[str, list[int]] = {}
    for place, rank in enumerate(ranks.tolist()):
        result = _read(files.get(rank)) if place < _MOST_RESULTS else f"only the first {_MOST_RESULTS} are read"
        if isinstance(result, str):
            why_peak.setdefault(result, []).append(rank)
            why_mfu.setdefault(result, []).append(rank)
            continue
        if result.memory and result.memory.peak and result.memory.peak.allocated_bytes is not None:
            peak[place] = result.memory.peak.allocated_bytes
        else:
            why_peak.setdefault("no allocation was recorded", []).append(rank)
        if result.utilization and result.utilization.mfu is not None:
            mfu[place] = result.utilization.mfu
        else:
            why_mfu.setdefault(_why_no_mfu(result), []).append(rank)
    if not files.keys() & set(ranks.tolist()):
        return RankResults(None, None, _NO_FILES, _NO_FILES)
    return RankResults(
        peak if np.isfinite(peak).any() else None,
        mfu if np.isfinite(mfu).any() else None,
        _in_words(why_peak, len(ranks)),
        _in_words(why_mfu, len(ranks)),
    )


def _rank_of(file: Path) -> int:
    digits = file.parent.name.removeprefix("rank").split("_")[0]
    return int(digits) if digits.isdecimal() else -1


def _read(file: Path | None) -> _Result | str:
    if file is None:
        return f"no {RESULT_FILE}"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Result)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{RESULT_FILE} cannot be read ({type(error).__name__})"


def _why_no_mfu(result: _Result) -> str:
    """What the result itself says of it."""
    said = next((warning for warning in result.warnings if warning.startswith("MFU is not available")), None)
    if said is not None:
        return said.partition("because ")[2] or said
    if result.utilization is None:
        return "the FLOPs of a step are not known"
    return "no peak of the device is known: give peaks="


def _in_words(reasons: dict[str, list[int]], count: int) -> str | None:
    if not reasons:
        return None
    if len(reasons) == 1 and sum(map(len, reasons.values())) == count:
        return next(iter(reasons))
    told: Sequence[tuple[str, list[int]]] = sorted(reasons.items(), key=lambda item: -len(item[1]))
    words = [f"{_whose(ranks)}: {reason}" for reason, ranks in told[:_MOST_REASONS]]
    return "; ".join(words) + (f"; and {len(told) - _MOST_REASONS} more reasons" if len(told) > _MOST_REASONS else "")


def _whose(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


_PLACES = ("dp", "tp", "cp", "ep", "pp")
_MOSTLY = 0.9  # of compute spans that have a device's time, so that it counts instead of the CPU's
_NAMED_RANKS = 8
_UNTIMED = "what it does there has no span: time it too; `Timer(gc=True)` tells collections of garbage"


def ranks_report(loaded: LoadedSpans) -> RanksReport:
    """Everything that is said of a job: who is slow, who waits for whom, what it costs, and what is missing.

    Raises:
        EmptyRecording: no span belongs to a step.
    """
    database = loaded.database
    prepare(database)
    clocks = fit(database) if loaded.has_clocks else None
    if clocks is not None:
        write_table(database, clocks)
    basis, arrived = _basis(loaded), match_collectives(database)
    own = with_waiting_of_one(subtract_transfer_waiting(own_times(database, basis=basis)))
    if not len(own.steps):
        raise EmptyRecording(f"{loaded.run}: no span belongs to a step. {_how_steps_are_told(loaded)}")
    judged = steady_times(own)
    layers = layer_times(database, basis=basis)
    replayed = what_if(database, align=None if clocks is None else partial(align, clocks))
    replay = replayed if isinstance(replayed, Replay) else None
    told = _of_ranks(database, own.ranks)
    results = results_of(loaded.root, own.ranks)
    missing = [Missing(what=gap.what, reason=gap.reason, rank=gap.rank) for gap in loaded.missing]
    missing += steps_missing(own)
    verdict = judge(own, arrived, layers, replay)
    named = named_spans(database, judged)
    verdict = with_name(verdict, named)
    evidence = [*verdict.evidence, *named_evidence(named, verdict.step_ns or np.inf), *_hints(loaded, judged)]
    if OUTSIDE in verdict.sentence and loaded.from_timers and not judged.of("gc").any():
        evidence.append(_UNTIMED)
    return RanksReport(
        run=loaded.run,
        verdict=replace(verdict, evidence=(*evidence, *loaded.notes)),
        own=own,
        judged=judged,
        accounting=account(judged),
        scores=score(judged),
        arrivals=arrived,
        layers=layers,
        replay=replay,
        replay_unknown=None if isinstance(replayed, Replay) else replayed.reason,
        coordinates=_coordinates(told, len(own.ranks)),
        hosts=_hosts(told),
        world_size=loaded.world_size,
        communication=communication(database),
        clocks=clocks,
        peak_bytes=results.peak_bytes,
        mfu=results.mfu,
        peak_unknown=results.peak_unknown,
        mfu_unknown=results.mfu_unknown,
        missing=tuple(missing),
        named_spans=named,
        spans=int(database.execute("SELECT count(*) FROM spans").fetchone()[0]),
    )


def _how_steps_are_told(loaded: LoadedSpans) -> str:
    if loaded.from_timers:
        return "No name of a span comes again, which would tell them. Call `global_timer.step()` once a step."
    return "Record whole steps, with `step()` after each; a table of spans needs a column `step`."


def _hints(loaded: LoadedSpans, judged: OwnTimes) -> list[str]:
    """What would tell more."""
    if len(judged.steps) >= MANY_STEPS:
        return []
    if loaded.from_timers:
        return [f"{MANY_STEPS} steps tell more: let the timer run on"]
    if any(loaded.root.glob(f"rank*/{RUN_FILE}")):
        return [f'{MANY_STEPS} steps tell more: record them by ProfilerWrapper(..., steps="5-{4 + MANY_STEPS}")']
    return []


def _basis(loaded: LoadedSpans) -> Basis:
    """The device's time, where timers measured it; spans of a device's trace are its time already."""
    if not loaded.from_timers:
        return "cpu"
    share = loaded.database.execute(
        "SELECT avg((device_ns IS NOT NULL)::INTEGER) FROM spans WHERE kind IN ('forward', 'backward') AND depth = 0"
    ).fetchone()[0]
    return "device" if share is not None and share >= _MOSTLY else "cpu"


def steps_missing(own: OwnTimes) -> list[Missing]:
    """Steps that not all ranks have: those in which a rank is missing are told of it."""
    known = np.isfinite(own.wall_ns)
    lacking = ~known.all(axis=0)
    if not lacking.any():
        return []
    places = np.flatnonzero(lacking)
    if len(places) > _NAMED_RANKS:
        told = ranges(own.ranks[places].tolist())
        worst = int((~known[:, places]).sum(axis=0).max())
        return [
            Missing(
                what=f"steps of {len(places)} ranks: {told}", reason=f"others have steps that they lack, up to {worst}"
            )
        ]
    return [
        Missing(
            what=f"{_steps(own.steps[~known[:, place]].tolist())} of rank {int(own.ranks[place])}",
            reason=_why_missing(own.steps, known[:, place]),
            rank=int(own.ranks[place]),
        )
        for place in places.tolist()
    ]


def _steps(numbers: list[int]) -> str:
    return f"step{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _why_missing(steps: Int, known: Bool) -> str:
    there = np.flatnonzero(known)
    if not len(there):
        return "it has no step at all"
    last = int(steps[there[-1]])
    if known[: there[-1] + 1].all():
        return f"its spans end with step {last}, earlier than the others': it did not finish, or lost its last lines"
    if known[there[0] :].all():
        return "its spans begin later than the others'"
    return "the others have them"


# --- ranks ---


def _of_ranks(database: Database, ranks: Int) -> list[Mapping[str, Any]]:
    """What is told of each rank, in their order."""
    names = [row[0] for row in database.execute("DESCRIBE ranks").fetchall()]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in database.execute("SELECT * FROM ranks").fetchall()}
    return [rows.get(rank, {}) for rank in ranks.tolist()]


def _coordinates(told: list[Mapping[str, Any]], count: int) -> dict[str, Int]:
    found = {}
    for name in _PLACES:
        values = [rank.get(name) for rank in told]
        if any(value is not None for value in values):
            found[name] = np.array([-1 if value is None else int(value) for value in values], dtype=np.int64)
    assert all(len(values) == count for values in found.values())
    return found


def _hosts(told: list[Mapping[str, Any]]) -> tuple[str, ...]:
    hosts = tuple(str(rank.get("host") or "") for rank in told)
    return hosts if any(hosts) else ()
