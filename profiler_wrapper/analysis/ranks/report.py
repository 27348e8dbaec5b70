"""The report on a job of many ranks, from its spans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from profiler_wrapper.analysis.ranks.accounting import account
from profiler_wrapper.analysis.ranks.clocks import align, fit, write_table
from profiler_wrapper.analysis.ranks.loading import LoadedSpans
from profiler_wrapper.analysis.ranks.meetings import meet
from profiler_wrapper.analysis.ranks.model import Float, Int, Missing, OwnTimes, RanksReport, Replay
from profiler_wrapper.analysis.ranks.queries import (
    Basis,
    arrivals,
    communication,
    layer_times,
    own_times,
    prepare,
)
from profiler_wrapper.analysis.ranks.replay import what_if
from profiler_wrapper.analysis.ranks.scores import score
from profiler_wrapper.analysis.ranks.verdict import judge
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.recording.span_database import Database
from profiler_wrapper.recording.span_files import ranges
from profiler_wrapper.recording.store import RESULT_FILE

_PLACES = ("dp", "tp", "cp", "ep", "pp")
_MOSTLY = 0.9  # of compute spans that have a device's time, so that it counts instead of the CPU's
_NAMED_RANKS = 8
_MOST_RESULTS = 512  # result.json that are read for memory and MFU


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
    basis, meetings = _basis(loaded), meet(database)
    own = own_times(database, basis=basis, meetings=meetings)
    if not len(own.steps):
        raise EmptyRecording(
            f"{loaded.run}: no span belongs to a step. Tell the timer the step, or record whole steps."
        )
    arrived = arrivals(database, meetings=meetings)
    layers = layer_times(database, basis=basis)
    replayed = what_if(database, align=None if clocks is None else partial(align, clocks))
    replay = replayed if isinstance(replayed, Replay) else None
    told = _of_ranks(database, own.ranks)
    peak_bytes, mfu = _of_results(loaded.root, own.ranks)
    missing = [Missing(what=gap.what, reason=gap.reason, rank=gap.rank) for gap in loaded.missing]
    missing += steps_missing(own)
    verdict = judge(own, arrived, layers, replay)
    return RanksReport(
        run=loaded.run,
        verdict=replace(verdict, evidence=(*verdict.evidence, *loaded.notes)),
        own=own,
        accounting=account(own),
        scores=score(own),
        arrivals=arrived,
        layers=layers,
        replay=replay,
        coordinates=_coordinates(told, len(own.ranks)),
        hosts=_hosts(told),
        world_size=loaded.world_size,
        communication=communication(database, meetings=meetings),
        clocks=clocks,
        peak_bytes=peak_bytes,
        mfu=mfu,
        missing=tuple(missing),
        spans=int(database.execute("SELECT count(*) FROM spans").fetchone()[0]),
    )


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
            what=f"steps {ranges(own.steps[~known[:, place]].tolist())} of rank {int(own.ranks[place])}",
            reason=_why_missing(known[:, place]),
            rank=int(own.ranks[place]),
        )
        for place in places.tolist()
    ]


def _why_missing(known: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    there = np.flatnonzero(known)
    if not len(there):
        return "it has no step at all"
    if known[: there[-1] + 1].all():
        return "its spans end earlier than the others'"
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


def _of_results(root: Path, ranks: Int) -> tuple[Float | None, Float | None]:
    """Peak memory in bytes and MFU of each rank, as its result.json has them; None where none does."""
    files = {_rank_of(file): file for file in sorted(root.glob(f"rank*/{RESULT_FILE}"))[:_MOST_RESULTS]}
    peak, mfu = np.full(len(ranks), np.nan), np.full(len(ranks), np.nan)
    for place, rank in enumerate(ranks.tolist()):
        if rank not in files:
            continue
        try:
            result = json.loads(files[rank].read_bytes())
            peak[place], mfu[place] = _peak_of(result), _mfu_of(result)
        except (OSError, ValueError, AttributeError, TypeError):
            continue  # what is wrong with it is said by `load`, which reads all of it
    return (peak if np.isfinite(peak).any() else None), (mfu if np.isfinite(mfu).any() else None)


def _rank_of(file: Path) -> int:
    digits = file.parent.name.removeprefix("rank").split("_")[0]
    return int(digits) if digits.isdecimal() else -1


def _peak_of(result: Mapping[str, Any]) -> float:
    memory = result.get("memory")
    peak = memory.get("peak") if isinstance(memory, Mapping) else None
    return _number(peak.get("allocated_bytes") if isinstance(peak, Mapping) else None)


def _mfu_of(result: Mapping[str, Any]) -> float:
    utilization = result.get("utilization")
    return _number(utilization.get("mfu") if isinstance(utilization, Mapping) else None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan
