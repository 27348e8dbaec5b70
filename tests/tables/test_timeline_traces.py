"""The timeline of recorded traces of GPUs: its sums lose nothing, its gaps and events are the steps, its links fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from gpu_traces import attributed_trace, names_of_traces, result
from profiler_wrapper.place.intervals import union
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.timeline import timeline
from profiler_wrapper.tables.timeline_columns import Timeline
from profiler_wrapper.tables.views.kernels import OTHERS
from shared_traces import needs_traces
from timeline_rows import rows

pytestmark = needs_traces
every_trace = pytest.mark.parametrize("name", names_of_traces(largest=pytest.mark.full))


def of_trace(name: str, **asked: int) -> Timeline:
    found = attributed_trace(name)
    return timeline(found, layer_calls(found, {}), **asked)


def summed(found: Timeline, *keys: str) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for row in rows(found, "sums"):
        total[tuple(row[key] for key in keys)] += row["time_ns"]
    return total


@every_trace
def test_sums_lose_nothing(name: str) -> None:
    found, known = of_trace(name, most_events=500), result(name)
    assert int(found.sums["time_ns"].sum()) == known.time.total_ns
    layers = Counter({(row.layer or None, row.phase): row.self_time_ns for row in known.layers if row.self_time_ns})
    by_layer = summed(found, "layer", "phase")
    assert {key: time for key, time in by_layer.items() if key[0] != "?" and time} == dict(layers)
    assert sum(time for key, time in by_layer.items() if key[0] == "?") == known.time.unattributed_ns
    classes = {(row.class_name, row.phase): row.time_ns for row in known.classes}
    assert summed(found, "class", "phase") == classes
    kernels: Counter[Any] = Counter()
    for kernel in known.kernels:
        kernels[kernel.name,] += kernel.time_ns
    if found.device and (OTHERS,) not in kernels:
        assert summed(found, "name") == kernels
    steps = {row.step: row.time_ns for row in known.steps if row.time_ns}
    if [step.number for step in found.steps] != [None]:
        numbers = [*(step.number for step in found.steps), None]
        assert {numbers[-1 if i is None else i]: time for (i,), time in summed(found, "step").items() if time} == steps


@every_trace
def test_gaps_and_events_of_a_step_are_the_step(name: str) -> None:
    found, known = of_trace(name), result(name)
    streams = np.isin(found.events["lane"], [i for i, lane in enumerate(found.lanes) if lane.kind == "stream"])
    start = found.events["start_ns"][streams]
    busy = union(start, start + found.events["duration_ns"][streams])
    idle = [step.idle_ns for step in found.steps]
    unknown = known.overview is not None and known.overview.gaps_ns is None
    if unknown or attributed_trace(name).captured_kernels:
        assert set(idle) == {None}
        return
    for i, step in enumerate(found.steps):
        here = found.gaps["step"] == i
        covered = int(busy.overlap(*(np.array([edge], np.int64) for edge in (step.start_ns, step.end_ns)))[0])
        assert step.idle_ns is not None
        assert covered + step.idle_ns == step.end_ns - step.start_ns
        listed = found.gaps["duration_ns"][here]
        assert listed.sum() <= step.idle_ns
        assert listed.min(initial=10_000) >= min(10_000, (step.end_ns - step.start_ns) // 2000)
        begins, ends = found.gaps["start_ns"][here], (found.gaps["start_ns"] + found.gaps["duration_ns"])[here]
        assert not busy.overlap(begins, ends).any()
        assert (begins >= step.start_ns).all()
        assert (ends <= step.end_ns).all()
    assert known.overview is not None
    assert sum(filter(None, idle)) == known.overview.gaps_ns


@every_trace
def test_events_hang_together(name: str) -> None:
    found = of_trace(name)
    events = {key: column.astype(np.int64) for key, column in found.events.items()}
    order = np.lexsort((-events["duration_ns"], events["start_ns"], events["lane"]))
    assert (order == np.arange(len(order))).all()
    kind = np.array([lane.kind for lane in found.lanes])[events["lane"]]
    launched = np.flatnonzero(events["launch"] >= 0)
    launch = events["launch"][launched]
    assert (kind[launched] == "stream").all()
    assert (kind[launch] == "thread").all()
    assert (events["start_ns"][launch] <= events["start_ns"][launched]).all()
    nodes = np.flatnonzero(events["forward"] >= 0)
    made_by = events["forward"][nodes]
    assert (kind[nodes] == "thread").all()
    assert (kind[made_by] == "thread").all()
    assert (events["start_ns"][made_by] < events["start_ns"][nodes]).all()
    made_in = {PHASES[i] for i in np.unique(events["phase"][made_by]).tolist()}
    assert made_in <= {"forward", "recompute", "other"}  # a loss is in no layer
    # Of one row of a lane no two overlap, but for what files round.
    row = np.lexsort((events["start_ns"], events["depth"], events["lane"]))
    same = (np.diff(events["lane"][row]) == 0) & (np.diff(events["depth"][row]) == 0)
    end = (events["start_ns"] + events["duration_ns"])[row]
    assert (end[:-1][same] <= events["start_ns"][row][1:][same] + 2).all()
    assert [lane.levels for lane in found.lanes] == [
        int(events["depth"][events["lane"] == i].max()) + 1 for i in range(len(found.lanes))
    ]
    assert sum(lane.main for lane in found.lanes) == 1
