"""Memory over time in few points: what matters stays, and at each point the categories make the total."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_traces import events, result
from memory_recordings import use_of
from profiler_wrapper.tables.memory.use import memory_curve
from profiler_wrapper.tables.model import StepTime
from recordings import Trace
from sample_memory import EVENT_NS, llama_memory, memory_of, training
from shared_traces import needs_traces

DDP = "ddp_training_with_memory.pt.trace.json.gz"


def assert_adds_up(curve: dict[str, Any]) -> None:
    columns = zip(*curve["categories"].values(), strict=True)
    assert [sum(column) for column in columns] == curve["allocated_bytes"]
    assert len(curve["time_us"]) == len(curve["allocated_bytes"])
    assert curve["time_us"] == sorted(curve["time_us"])
    assert json.loads(json.dumps(curve, allow_nan=False)) == curve


def test_a_curve_by_hand() -> None:
    trace = Trace()
    for step in range(2):
        t = 5000 + 1000 * step
        trace.annotation(f"ProfilerStep#{step + 3}", t, t + 1000).mark(".", t + 10, t + 200).mark("a", t + 20, t + 90)
        trace.op("aten::mm", t + 30, t + 40, sequence=step, forward_thread=0).memory(t + 35, 100, address=1)
        trace.node("MmBackward0", t + 300, t + 400, number=step).memory(t + 390, -100, address=1)
    curve = memory_curve(use_of(trace))  # which adds an op that begins at 1
    assert curve == {
        "start_ns": 1,
        "end_us": 6.999,
        "events": 4,
        "time_us": [5.034, 5.389, 6.034, 6.389],
        "allocated_bytes": [100, 0, 100, 0],
        "reserved_bytes": None,
        "categories": {"activation": [100, 0, 100, 0]},
        "steps": [
            {"step": 3, "start_us": 4.999, "end_us": 5.999},
            {"step": 4, "start_us": 5.999, "end_us": 6.999},
        ],
        "phases": [
            {"phase": "forward", "start_us": 5.009},
            {"phase": "backward", "start_us": 5.299},
            {"phase": "forward", "start_us": 6.009},
            {"phase": "backward", "start_us": 6.299},
        ],
    }
    assert_adds_up(curve)


def test_few_events_are_all_there() -> None:
    use = llama_memory(4)
    curve = memory_curve(use)
    assert len(curve["time_us"]) == curve["events"] == len(use.timeline.time_ns) < 1500
    assert curve["allocated_bytes"] == use.timeline.total_bytes.tolist()
    assert curve["reserved_bytes"] == use.timeline.reserved_bytes.tolist()  # type: ignore[union-attr]
    assert curve["start_ns"] == int(use.timeline.time_ns[0])
    assert_adds_up(curve)


def test_of_many_events_those_that_matter_stay() -> None:
    """Twelve steps of 40 blocks; in the third one brief allocation is higher than all else of that step."""
    run = training(40, steps=4)
    for step in range(6, 14):
        start = len(run.changes)
        run.brief("workspace", "", "aten::sort", "forward", (step + 1) << 34)
        for i in range(1200):
            run.brief("activation", "", "aten::mm", "forward", 1000 + i)
        run.point("after forward", step)
        assert len(run.changes) == start + 2402
    use = memory_of(run)
    times = use.timeline.time_ns
    steps = tuple(
        StepTime(step, int(times[event]) - 2401 * EVENT_NS, int(times[event]) + 1)
        for _, step, event in run.points
        if step is not None and step >= 6
    )
    use = replace(use, steps=steps)
    curve = memory_curve(use)
    assert curve["events"] == len(times) > 20_000
    assert 1000 < len(curve["time_us"]) <= 1500
    assert_adds_up(curve)
    assert max(curve["allocated_bytes"]) == use.peak.total_bytes == int(use.timeline.total_bytes.max())
    assert max(curve["reserved_bytes"]) == int(use.timeline.reserved_bytes.max())  # type: ignore[union-attr]
    shown = dict(zip(curve["time_us"], curve["allocated_bytes"], strict=True))
    for one in steps:
        inside = (times >= one.start_ns) & (times < one.end_ns)
        top = int(use.timeline.total_bytes[inside].max())
        start_us, end_us = ((t - curve["start_ns"]) / 1000 for t in (one.start_ns, one.end_ns))
        assert max(size for time, size in shown.items() if start_us <= time < end_us) == top
    # every stretch of as many events as a point stands for is bounded by what is shown of its neighbourhood
    total = use.timeline.total_bytes
    kept = np.searchsorted(times, [round(t * 1000) + curve["start_ns"] for t in curve["time_us"]])
    wide = -(-len(times) // 500)
    for first in range(0, len(times), wide):
        near = kept[(kept >= first - wide) & (kept < first + 2 * wide)]
        assert total[near].max() >= total[first : first + wide].max()
        assert total[near].min() <= total[first : first + wide].min()


def test_peaks_of_steps_shorter_than_a_stretch_stay() -> None:
    use = memory_of(training(40, steps=20))
    times, total = use.timeline.time_ns, use.timeline.total_bytes
    firsts = range(1000, len(times) - 1000, 1000)
    steps = tuple(StepTime(i, int(times[first]), int(times[first + 4])) for i, first in enumerate(firsts))
    curve = memory_curve(replace(use, steps=steps))
    shown = set(zip(curve["time_us"], curve["allocated_bytes"], strict=True))
    for first in firsts:
        top = first + int(total[first : first + 4].argmax())
        assert ((int(times[top]) - curve["start_ns"]) / 1000, int(total[top])) in shown
    assert len(steps) > 10
    assert len(curve["time_us"]) <= 1500


def test_the_highest_reserved_stays() -> None:
    use = memory_of(training(40, steps=20))
    reserved = np.full_like(use.timeline.total_bytes, 1 << 40)
    between = next(
        i
        for i in range(3000, 4000)
        if use.timeline.total_bytes[i - 1] < use.timeline.total_bytes[i] < use.timeline.total_bytes[i + 1]
    )
    reserved[between] += 5
    curve = memory_curve(replace(use, timeline=replace(use.timeline, reserved_bytes=reserved)))
    assert len(curve["time_us"]) < curve["events"]
    assert max(curve["reserved_bytes"]) == (1 << 40) + 5


def test_what_is_held_in_a_long_pause_is_exact() -> None:
    """Nothing happens for long after an event that is neither the highest nor the lowest around it."""
    run = training(40, steps=20)
    use = memory_of(run)
    at = len(run.changes) // 2
    while not use.timeline.total_bytes[at - 1] < use.timeline.total_bytes[at] < use.timeline.total_bytes[at + 1]:
        at += 1
    times = use.timeline.time_ns.copy()
    times[at + 1 :] += 10**12
    curve = memory_curve(replace(use, timeline=replace(use.timeline, time_ns=times)))
    assert len(curve["time_us"]) < curve["events"]
    gap = max(range(len(curve["time_us"]) - 1), key=lambda i: curve["time_us"][i + 1] - curve["time_us"][i])
    assert curve["allocated_bytes"][gap] == int(use.timeline.total_bytes[at])


def test_more_phases_than_can_be_told_apart_are_left_out() -> None:
    use = llama_memory(2)
    phases = tuple((int(use.timeline.time_ns[0]) + i, ("forward", "backward")[i % 2]) for i in range(1001))
    many = replace(use, timeline=replace(use.timeline, phase_starts=phases))  # type: ignore[arg-type]
    assert memory_curve(many)["phases"] == []
    assert len(memory_curve(use)["phases"]) == 9


@pytest.mark.full
@needs_traces
def test_the_curve_of_a_trace_is_that_of_a_sweep_through_its_json() -> None:
    analysis = result(DDP)
    curve, peak = analysis.memory["curve"], analysis.memory["peak"]
    assert_adds_up(curve)
    device = int(analysis.memory["device"].removeprefix("cuda:"))
    told = [e for e in events(DDP) if e.get("name") == "[memory]"]
    told = [e for e in told if (e["args"]["Device Type"], e["args"]["Device Id"]) == (1, device)]
    told.sort(key=lambda event: event["ts"])
    begin_us = curve["start_ns"] / 1000
    stated: dict[float, set[tuple[int, int]]] = {}
    for e in told:
        pair = (e["args"]["Total Allocated"], e["args"]["Total Reserved"])
        stated.setdefault(round(e["ts"] - begin_us, 3), set()).add(pair)
    assert curve["events"] == len(told)
    assert len(curve["time_us"]) <= 1500
    for time, allocated, reserved in zip(
        curve["time_us"], curve["allocated_bytes"], curve["reserved_bytes"], strict=True
    ):
        assert (allocated, reserved) in stated[round(time, 3)]
    assert max(curve["allocated_bytes"]) == peak["allocated_bytes"] == max(e["args"]["Total Allocated"] for e in told)
    assert max(curve["reserved_bytes"]) == peak["reserved_bytes"] == max(e["args"]["Total Reserved"] for e in told)
