"""What a trace's events become as rows of the span table: phases, what is between them, collectives, garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.spans.row import Row
from profiler_wrapper.tables.spans.trace_rows import trace_rows
from profiler_wrapper.trace.marks import GARBAGE
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.recording import Category
from recordings import MAIN, Trace

MS = 1_000_000
GLOO = 3  # a thread of the backend's


def step(end: int = 100) -> Trace:
    """A step with a forward from 2 to 12 ms."""
    return (
        Trace()
        .annotation("ProfilerStep#0", 0, end * MS)
        .mark(".", 2 * MS, 12 * MS)
        .op("aten::mm", 3 * MS, 11 * MS, sequence=1)
    )


def backward(trace: Trace, start: int, end: int, number: int = 1) -> Trace:
    """On the thread that trains, as on a CPU."""
    return trace.node("MmBackward0", start * MS, end * MS, number=number, thread=MAIN)


def all_reduce(trace: Trace, start: int, end: int) -> Trace:
    return trace.annotation("gloo:all_reduce", start * MS, end * MS, thread=GLOO)


def rows_of(trace: Trace) -> list[Row]:
    return trace_rows(place_events(trace.recording()))


def phases(trace: Trace) -> list[tuple[str, float, float]]:
    """(kind, start, end) in ms of what lies at the top, but the step itself."""
    return sorted(
        (
            (row.kind, row.start_ns / MS, (row.start_ns + row.duration_ns) / MS)
            for row in rows_of(trace)
            if row.depth == 0 and row.kind != "step"
        ),
        key=lambda row: row[1:],
    )


def test_what_runs_in_no_event_after_a_phase_is_none_of_it() -> None:
    """A rank that sleeps between its backward and the all-reduce comes late to that; its backward is no longer."""
    trace = backward(step(), 20, 30).op("aten::cat", 80 * MS, 81 * MS).op("c10d::allreduce_", 81 * MS, 82 * MS)
    all_reduce(trace, 82, 90).annotation("Optimizer.step#SGD.step", 90 * MS, 95 * MS)
    assert phases(trace) == [
        ("forward", 2, 12),
        ("backward", 20, 30),
        ("other", 80, 81),
        ("communication", 81, 82),
        ("communication", 82, 90),
        ("optimizer", 90, 95),
    ]


def test_ops_that_nothing_names_go_on_with_a_phase_where_they_follow_at_once() -> None:
    trace = backward(step(), 20, 30).op("aten::cat", 30 * MS + 50_000, 31 * MS)
    assert phases(trace) == [("forward", 2, 12), ("backward", 20, 31)]


def test_what_lies_between_two_parts_of_a_phase_is_the_phases() -> None:
    """Backward sleeps in a hook, and computes something there that creates no gradients."""
    trace = backward(step(), 20, 30).op("aten::norm", 45 * MS, 46 * MS)
    assert phases(backward(trace, 60, 70)) == [("forward", 2, 12), ("backward", 20, 70)]


def test_a_collective_in_a_gap_of_a_phase_is_waited_for() -> None:
    trace = all_reduce(backward(step(), 20, 30), 35, 58)
    assert phases(backward(trace, 60, 70)) == [
        ("forward", 2, 12),
        ("backward", 20, 35),
        ("communication", 35, 58),
        ("backward", 58, 70),
    ]


@pytest.mark.parametrize("name", ["data", "get_batch", "DataLoading", "load batch"])
def test_a_block_named_as_timers_know_it_is_data_loading(name: str) -> None:
    trace = (
        Trace().annotation("ProfilerStep#0", 0, 100 * MS).annotation(name, 0, 9 * MS).op("aten::randn", 5 * MS, 6 * MS)
    )
    trace.mark(".", 10 * MS, 20 * MS).op("aten::mm", 11 * MS, 19 * MS, sequence=1)
    found = [row for row in rows_of(trace) if row.kind == "data"]
    assert [(row.name, row.start_ns, row.duration_ns) for row in found] == [(name, 0, 9 * MS)]
    assert phases(trace) == [("data", 0, 9), ("forward", 10, 20)]


def test_without_marks_too_a_named_block_is_what_its_name_says() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * MS)
    trace.annotation("data", 0, 9 * MS).op("aten::randn", 5 * MS, 6 * MS)
    trace.annotation("spatial block", 10 * MS, 20 * MS).op("aten::mm", 11 * MS, 19 * MS, sequence=1)
    assert phases(backward(trace, 20, 30)) == [("data", 0, 9), ("forward", 10, 20), ("backward", 20, 30)]


def test_a_block_named_backward_lasts_from_end_to_end_but_for_what_it_waits() -> None:
    trace = backward(step(), 20, 30).annotation("backward", 15 * MS, 60 * MS)
    assert phases(all_reduce(trace, 32, 58)) == [
        ("forward", 2, 12),
        ("backward", 15, 32),
        ("communication", 32, 58),
        ("backward", 58, 60),
    ]


def test_what_the_trace_knows_of_an_op_comes_before_the_name_of_a_block() -> None:
    """Megatron's "forward-backward" is around both."""
    trace = backward(step(), 20, 30).annotation("forward-backward", 1 * MS, 40 * MS)
    kinds = {kind: (start, end) for kind, start, end in phases(trace)}
    assert kinds["forward"] == (2, 12)
    assert kinds["backward"] == (20, 40)


def test_a_block_within_a_layer_is_the_layers() -> None:
    trace = step().annotation("data", 4 * MS, 6 * MS)
    assert phases(trace) == [("forward", 2, 12)]


def test_layers_have_rows_down_to_one_level_in_a_block_and_each_call_has_one() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * MS).mark(".", 2 * MS, 60 * MS)
    trace.mark("layers.0", 3 * MS, 30 * MS, kind="block").mark("layers.0.mlp", 4 * MS, 20 * MS)
    trace.mark("layers.0.mlp.up", 5 * MS, 15 * MS).mark("layers.0.mlp", 6 * MS, 14 * MS)  # calls itself
    trace.op("aten::mm", 7 * MS, 13 * MS, sequence=1)
    found = [(row.layer, row.kind, row.duration_ns // MS) for row in rows_of(trace) if row.layer is not None]
    assert sorted(found) == [("Net", "forward", 58), ("layers.0", "forward", 27), ("layers.0.mlp", "forward", 16)]


def test_garbage_is_told_wherever_it_is_collected() -> None:
    trace = step().annotation(GARBAGE, 5 * MS, 8 * MS).annotation(GARBAGE, 50 * MS, 70 * MS)
    found = [row for row in rows_of(trace) if row.kind == "gc"]
    assert [(row.start_ns, row.duration_ns, row.depth, row.step) for row in found] == [
        (5 * MS, 3 * MS, 1, 0),
        (50 * MS, 20 * MS, 1, 0),
    ]
    assert ("forward", 2, 12) in phases(trace)


def test_a_mark_of_garbage_takes_no_time_from_the_op_it_lies_in(tmp_path: Path) -> None:
    """It is written as layer marks are: an op by its category."""
    times = {}
    for marked in (False, True):
        trace = step()
        if marked:
            trace.op(GARBAGE, 5 * MS, 8 * MS)
        found = place_events(read(trace.write(tmp_path / "trace.json")))
        times[marked] = {
            found.recording.name_of(span): time_ns
            for span, time_ns in zip(found.charges.span.tolist(), found.charges.time_ns.tolist(), strict=True)
        }
    assert times[True] == times[False] == {"aten::mm": 8 * MS}


def test_overlap_of_a_collective_is_what_ops_run_beside_it() -> None:
    """All-reduce from 24 to 40: beside it backward until 30; not the call that began it, nor a layer's mark alone."""
    trace = backward(step(), 20, 30).op("c10d::allreduce_", 31 * MS, 33 * MS).mark("head", 34 * MS, 36 * MS)
    found = [row for row in rows_of(all_reduce(trace, 24, 40)) if row.kind == "communication"]
    assert {row.depth: row.overlapped_ns for row in found if row.thread == GLOO} == {0: 6 * MS}
    assert [row.overlapped_ns for row in found if row.thread != GLOO] == [None]


def test_overlap_on_a_device_is_compute_of_its_other_streams() -> None:
    trace = step().kernel("gemm", 3 * MS, 10 * MS, launched=3 * MS + 1)
    trace.op("c10d::allreduce_", 12 * MS, 13 * MS).kernel(
        "ncclDevKernel_AllReduce", 8 * MS, 20 * MS, launched=12 * MS + 1, stream=9
    )
    found = [row for row in rows_of(trace) if row.kind == "communication"]
    assert [(row.duration_ns, row.overlapped_ns) for row in found] == [(12 * MS, 2 * MS)]


def test_recorded_category_of_garbage_is_that_of_a_name(tmp_path: Path) -> None:
    recording = read(step().op(GARBAGE, 5 * MS, 8 * MS).write(tmp_path / "trace.json"))
    names = {
        recording.names[name]: category
        for name, category in zip(recording.spans.name.tolist(), recording.spans.category.tolist(), strict=True)
    }
    assert names[GARBAGE] == Category.ANNOTATION and names["aten::mm"] == Category.CPU_OP


def test_a_wait_within_a_layer_is_none_of_its_forward() -> None:
    """A collective ends at 50 ms while the layer's thread is in no op: it waited since the collective began."""
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * MS).mark(".", 2 * MS, 60 * MS)
    trace.op("aten::mm", 3 * MS, 11 * MS, sequence=1).op("aten::mm", 51 * MS, 59 * MS, sequence=2)
    assert phases(all_reduce(trace, 15, 50)) == [("forward", 2, 15), ("communication", 15, 50), ("forward", 50, 60)]


def test_a_wait_begins_when_the_last_op_has_ended() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * MS).mark(".", 2 * MS, 60 * MS)
    trace.op("aten::mm", 3 * MS, 11 * MS, sequence=1)
    assert phases(all_reduce(trace, 5, 50)) == [("forward", 2, 11), ("communication", 5, 50), ("forward", 50, 60)]


def test_what_runs_as_a_collective_ends_waits_for_none() -> None:
    """The op goes on beyond its end; and after 52 ms nothing ends though one runs."""
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * MS).mark(".", 2 * MS, 60 * MS)
    trace.op("aten::mm", 3 * MS, 52 * MS, sequence=1)
    assert phases(all_reduce(all_reduce(trace, 5, 50), 53, 70)) == [
        ("forward", 2, 60),
        ("communication", 5, 50),
        ("communication", 53, 70),
    ]


def test_a_node_that_calls_a_collective_waits_for_it() -> None:
    """As tensor parallel layers do, in a function of their own; one without such a call computes."""
    trace = step().node("ReduceBackward", 20 * MS, 60 * MS, number=1, thread=MAIN)
    trace.op("ReduceBackward", 21 * MS, 59 * MS).op("c10d::allreduce_", 22 * MS, 23 * MS)
    assert phases(all_reduce(trace, 24, 55)) == [
        ("forward", 2, 12),
        ("backward", 20, 24),
        ("communication", 24, 55),
        ("backward", 55, 60),
    ]
    trace = step().node("WorkBackward", 20 * MS, 60 * MS, number=1, thread=MAIN).op("WorkBackward", 21 * MS, 59 * MS)
    assert ("backward", 20, 60) in phases(all_reduce(trace, 24, 55))


@pytest.mark.parametrize(
    ("name", "dims", "types", "moved"),
    [
        ("gloo:all_reduce", [[10, 100]], ["c10::BFloat16"], 2000),
        ("gloo:broadcast", [[7], []], ["float", ""], 28),
        ("gloo:all_reduce", [[10]], ["SomethingNew"], None),
        ("gloo:all_gather", [[10]], ["float"], None),  # what it is given is not what it moves
        ("gloo:all_reduce", None, None, None),
    ],
)
def test_bytes_of_a_collective_on_a_cpu_are_those_of_its_input(
    tmp_path: Path, name: str, dims: Any, types: Any, moved: int | None
) -> None:
    path = all_reduce(step(), 20, 30).write(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    event = next(event for event in trace["traceEvents"] if event["name"] == "gloo:all_reduce")
    event["name"] = name
    event["args"] |= {} if dims is None else {"Input Dims": dims, "Input type": types}
    path.write_text(json.dumps(trace))
    found = place_events(read(path), shapes=read_with_shapes(path)[1])
    assert [row.bytes for row in trace_rows(found) if row.kind == "communication"] == [moved]
