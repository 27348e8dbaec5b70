"""The report on a job of many ranks, from its spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from profiler_wrapper.analysis.ranks.clocks import align, fit, write_table
from profiler_wrapper.analysis.ranks.communication import (
    arrivals,
    communication,
    match_collectives,
    prepare,
    with_reasons,
)
from profiler_wrapper.analysis.ranks.model import Bool, Int, Missing, OwnTimes, RanksReport, Replay
from profiler_wrapper.analysis.ranks.rank_results import results_of
from profiler_wrapper.analysis.ranks.replay import what_if
from profiler_wrapper.analysis.ranks.sources import LoadedSpans
from profiler_wrapper.analysis.ranks.stragglers import OUTSIDE, judge, named_evidence, named_spans, with_name
from profiler_wrapper.analysis.ranks.times import (
    MANY_STEPS,
    Basis,
    account,
    judged_times,
    layer_times,
    own_times,
    score,
    subtract_transfer_waiting,
    with_waiting_of_one,
)
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.recording.database import Database
from profiler_wrapper.recording.rank_numbers import ranges
from profiler_wrapper.recording.store import RUN_FILE

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
    basis, matched = _basis(loaded), match_collectives(database)
    own = with_waiting_of_one(subtract_transfer_waiting(own_times(database, basis=basis, matched=matched)))
    if not len(own.steps):
        raise EmptyRecording(f"{loaded.run}: no span belongs to a step. {_how_steps_are_told(loaded)}")
    judged = judged_times(own)
    arrived = arrivals(database, matched=matched)
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
        communication=with_reasons(communication(database, matched=matched)),
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
