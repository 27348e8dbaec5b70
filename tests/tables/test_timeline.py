"""The timeline: which events are drawn and how they hang together, gaps and their causes, sums that lose nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.timeline import timeline
from profiler_wrapper.tables.timeline_columns import CAUSES, Timeline
from profiler_wrapper.trace.nesting import rows_of_lanes
from recordings import AUTOGRAD, Trace
from timeline_rows import rows

LAUNCHES, WAITS, LOADS, PYTHON, COMMUNICATES, NOTHING, ITSELF = CAUSES
LOADING = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def made(trace: Trace, *, run: dict[str, Any] | None = None, **asked: int) -> Timeline:
    found = place_events(trace.recording(), run=run)
    return timeline(found, layer_calls(found, {}), **asked)


def idle_step() -> Trace:
    """One step with a gap for each of five causes."""
    trace = Trace().annotation("ProfilerStep#3", 0, 100_000).mark("layers.0", 1_000, 49_500)
    trace.op("aten::mm", 2_000, 12_000).kernel("gemm", 20_000, 30_000, launched=11_000)
    trace.op("aten::item", 31_000, 48_000).launch(32_000, 47_000, name="cudaStreamSynchronize")
    trace.op("aten::add", 48_000, 49_000).kernel("add", 50_000, 51_000, launched=48_500)
    trace.annotation(LOADING, 52_000, 66_000)
    trace.op("aten::relu", 66_000, 67_000).kernel("relu", 70_000, 71_000, launched=66_500)
    trace.annotation("my block", 71_500, 88_000)
    trace.op("aten::sum", 88_000, 89_000).kernel("sum", 90_000, 91_000, launched=88_500)
    return trace.op("aten::tanh", 89_200, 89_900).kernel("tanh", 105_000, 106_000, launched=89_500, stream=8)


def test_each_gap_has_what_the_cpu_did_meanwhile() -> None:
    found = made(idle_step())
    keys = ("start_ns", "duration_ns", "cause", "op", "layer", "phase", "step", "device")
    assert [tuple(row[key] for key in keys) for row in rows(found, "gaps")] == [
        (0, 20_000, LAUNCHES, "aten::mm", "layers.0", "forward", 0, 0),
        (30_000, 20_000, WAITS, "cudaStreamSynchronize", "layers.0", "forward", 0, 0),
        (51_000, 19_000, LOADS, LOADING, None, "other", 0, 0),
        (71_000, 19_000, PYTHON, "my block", None, "other", 0, 0),
        (91_000, 14_000, ITSELF, "aten::tanh", None, "other", 0, 0),
    ]
    named = [found.names[found.events["name"][event]] for event in found.gaps["event"].tolist()]
    assert named == ["aten::mm", "cudaStreamSynchronize", LOADING, "my block", "aten::tanh"]
    (step,) = found.steps
    assert (step.number, step.start_ns, step.end_ns, step.idle_ns) == (3, 0, 106_000, 92_000)
    assert found.own_names == {found.names.index("my block")}


def test_a_thread_that_waits_for_ranks_and_one_that_shows_nothing() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 60_000).op("aten::mm", 1_000, 2_000)
    trace.kernel("gemm", 1_500, 10_000, launched=1_200)
    trace.annotation("gloo:all_reduce", 10_500, 30_000)
    trace.op("aten::add", 30_000, 31_000).kernel("add", 30_500, 35_000, launched=30_200)
    trace.op("aten::mul", 54_000, 55_000, thread=AUTOGRAD)
    trace.kernel("mul", 54_500, 60_000, launched=54_200, thread=AUTOGRAD)
    causes = [(row["start_ns"], row["cause"], row["op"]) for row in rows(made(trace), "gaps")]
    assert causes == [
        (0, PYTHON, None),
        (10_000, COMMUNICATES, "gloo:all_reduce"),
        (35_000, NOTHING, None),
    ]


def test_short_gaps_count_and_are_not_listed() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 40_000_000)
    trace.op("aten::mm", 0, 40).kernel("a", 0, 20_000_000, launched=0).kernel("b", 20_009_999, 29_000_000, launched=20)
    trace.kernel("c", 29_010_000, 40_000_000, launched=30)
    found = made(trace)
    assert found.gaps["duration_ns"].tolist() == [10_000]
    assert found.steps[0].idle_ns == 19_999


def test_no_gaps_where_kernels_are_lost() -> None:
    trace = idle_step().launch(95_000, 95_100, correlation=99)
    found = made(trace)
    assert (len(found.gaps["start_ns"]), found.steps[0].idle_ns) == (0, None)
    assert found.note.startswith("idle stretches are not drawn")


def test_kernels_lead_to_launches_and_nodes_to_their_forward() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).mark("layers.0", 1, 40)
    trace.op("aten::mm", 5, 20, sequence=4).kernel("gemm", 30, 50, launched=10)
    trace.node("MmBackward0", 60, 80, number=4).op("MmBackward0", 61, 79, thread=AUTOGRAD, sequence=4, forward_thread=1)
    trace.kernel("gemm_backward", 82, 95, launched=70, thread=AUTOGRAD)
    found = rows(made(trace), "events")
    at = {row["name"]: i for i, row in enumerate(found)}
    kernel, node = found[at["gemm_backward"]], found[at["autograd::engine::evaluate_function: MmBackward0"]]
    assert (found[kernel["launch"]]["name"], found[kernel["launch"]]["start_ns"]) == ("cudaLaunchKernel", 70)
    assert (kernel["lane"], kernel["layer"], kernel["phase"], kernel["class"]) == (
        "stream 7", "layers.0", "backward", "gemm",
    )  # fmt: skip
    assert node["forward"] == at["aten::mm"]
    assert [row["name"] for row in found if row["forward"] is not None] == [node["name"]]
    assert [row["depth"] for row in found if row["lane"] == "main thread"] == [0, 1, 2, 3]
    assert [row["name"] for row in found if row["lane"] == "main thread"] == [
        "ProfilerStep#0", "layers.0", "aten::mm", "cudaLaunchKernel",
    ]  # fmt: skip
    lanes = {"layers": ["layers.0"] * 2, "phases": ["forward", "backward"]}
    for lane, names in lanes.items():
        assert [row["name"] for row in found if row["lane"] == lane] == names
    assert {row["phase"] for row in found if row["lane"] == "backward, thread 2"} == {"backward"}


def test_a_call_that_launches_nothing_is_where_it_lies() -> None:
    trace = Trace().mark("layers.0", 0, 40).op("aten::mm", 5, 30).launch(6, 7, name="cudaGetDevice")
    (call,) = [
        row for row in rows(made(trace.kernel("k", 12, 20, launched=10)), "events") if row["name"] == "cudaGetDevice"
    ]
    assert (call["layer"], call["phase"], call["depth"]) == ("layers.0", "forward", 2)


def test_on_a_cpu_sums_are_of_ops_by_self_time() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).mark("layers.0", 10, 90)
    trace.op("aten::linear", 20, 80).op("aten::mm", 30, 60)
    found = made(trace)
    assert not found.device
    assert not len(found.gaps["start_ns"])
    sums = {(row["name"], row["layer"], row["class"]): (row["time_ns"], row["count"]) for row in rows(found, "sums")}
    assert sums == {("aten::linear", "layers.0", "gemm"): (30, 1), ("aten::mm", "layers.0", "gemm"): (30, 1)}
    events = rows(found, "events")
    assert {row["name"]: row["class"] for row in events if row["class"]} == {"aten::linear": "gemm", "aten::mm": "gemm"}
    assert [(lane.kind, lane.device) for lane in found.lanes] == [
        ("layers", None), ("phases", None), ("thread", None),
    ]  # fmt: skip


def test_a_trace_without_steps_is_one() -> None:
    found = made(Trace().op("aten::mm", 5, 30).kernel("k", 12, 40, launched=10))
    assert [tuple(step) for step in found.steps] == [(None, 0, 35, True, False, 7)]
    assert found.sums["step"].tolist() == [0]


# --- which steps are drawn


def steps_of(lengths: list[int], ops: int = 1) -> Trace:
    """A step after the other, each with ops and kernels of 10 ns."""
    trace, begin = Trace(), 0
    for number, length in enumerate(lengths):
        trace.annotation(f"ProfilerStep#{number}", begin, begin + length)
        for i in range(ops):
            at = begin + 20 * i
            trace.op("aten::mm", at, at + 10).kernel("gemm", at + 5, at + 15, launched=at + 2)
        begin += length
    return trace


def drawn(found: Timeline) -> list[int | None]:
    return [step.number for step in found.steps if step.drawn]


def test_all_steps_are_drawn_where_they_fit() -> None:
    found = made(steps_of([100] * 30))
    assert (len(drawn(found)), found.note) == (30, "")


def test_else_the_median_the_slowest_and_the_first_like_the_median() -> None:
    lengths = [500, 100, 101, 102, 100, 900, *[103] * 20]
    found = made(steps_of(lengths), most_events=100)
    assert drawn(found) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [step.number for step in found.steps if step.slowest] == [5]
    assert found.note == "12 of 26 steps are here; all: the trace file"
    # Steps are as all have them, and begin where the first that is drawn does.
    assert (found.origin_ns, found.steps[0].start_ns, found.steps[1].start_ns) == (500, -500, 0)
    assert len(found.sums["step"]) == 26
    assert set(found.events["step"].tolist()) == {*range(1, 13)}


def test_never_more_than_fit() -> None:
    assert made(steps_of([100] * 30), most_events=7).note == "1 of 30 steps is here; all: the trace file"
    least = made(steps_of([100] * 30), most_events=3).note
    assert least == "1 of 30 steps, of it the 3 longest of 4 events are here; all: the trace file"
    found = made(steps_of([100] * 30), most_events=15)  # 4 events a step, with its own
    assert len(drawn(found)) == 3
    assert len([row for row in rows(found, "events") if row["lane"] not in ("layers", "phases")]) == 12


def test_of_one_step_that_is_too_large_the_longest_events() -> None:
    found = made(steps_of([1000], ops=20), most_events=41)
    assert found.note == "the 41 longest of 61 events are here; all: the trace file"
    events = rows(found, "events")
    assert Counter(row["name"] for row in events if row["lane"] != "phases") == {
        "ProfilerStep#0": 1, "aten::mm": 20, "gemm": 20,
    }  # fmt: skip
    assert all(row["launch"] is None for row in events)
    assert found.sums["count"].tolist() == [20]


def test_a_step_that_does_not_count_is_not_drawn() -> None:
    found = made(steps_of([100] * 3), run={"timed_steps": [0, 2]})
    assert drawn(found) == [0, 2]
    assert set(found.events["step"].tolist()) == {0, 1}
    assert found.sums["count"].tolist() == [1, 1]


# --- rows of a lane


def test_no_two_events_of_a_row_overlap() -> None:
    start = np.array([0, 5, 12, 30, 40, 0, 50], np.int64)
    end = np.array([10, 15, 25, 60, 45, 3, 70], np.int64)
    order, row = rows_of_lanes(np.array([0, 0, 0, 0, 0, 1, 0], np.int32), start, end)
    assert order.tolist() == [0, 1, 2, 3, 4, 6, 5]
    assert row.tolist() == [0, 1, 0, 0, 1, 0, 1]


def test_neighbours_that_a_file_rounds_share_a_row() -> None:
    lane = np.zeros(3, np.int32)
    _, row = rows_of_lanes(lane, np.array([0, 99, 200], np.int64), np.array([101, 200, 300], np.int64))
    assert row.tolist() == [0, 0, 0]


def test_a_phase_goes_on_in_what_communicates_alone() -> None:
    """By hand: an all-reduce of backward between two kernels of the optimizer, and one that computing hides."""
    trace = Trace().annotation("ProfilerStep#0", 0, 100_000).annotation("Optimizer.step#SGD.step", 40_000, 90_000)
    trace.op("aten::mm", 500, 900, sequence=1).node("MmBackward0", 1_000, 30_000, number=1)
    trace.op("MmBackward0", 1_500, 29_000, thread=AUTOGRAD, sequence=1, forward_thread=1)
    trace.kernel("gemm", 10_000, 20_000, launched=2_000, thread=AUTOGRAD)
    trace.kernel("ncclDevKernel_AllReduce", 12_000, 18_000, launched=3_000, thread=AUTOGRAD, stream=9)
    trace.kernel("ncclDevKernel_AllReduce", 21_000, 62_000, launched=5_000, thread=AUTOGRAD, stream=9)
    trace.kernel("add", 20_000, 22_000, launched=41_000).kernel("add", 62_000, 64_000, launched=42_000)
    phases = [row for row in rows(made(trace), "events") if row["lane"] == "phases"]
    assert [(row["phase"], row["start_ns"], row["duration_ns"]) for row in phases] == [
        ("backward", 10_000, 10_000),
        ("optimizer", 20_000, 2_000),
        ("backward", 22_000, 40_000),
        ("optimizer", 62_000, 2_000),
    ]
