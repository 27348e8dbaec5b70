"""One row per op and phase: its own time, with what it calls, and the laws that hold."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given, settings

from any_traces import training_step, wild_traces
from lines_run import lines_run
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.model import OperatorRow
from profiler_wrapper.tables.views.operators import NO_OP, operator_rows
from profiler_wrapper.trace.recording import Recording
from recordings import AUTOGRAD, MAIN, Trace


def rows_of(recording: Recording) -> tuple[OperatorRow, ...]:
    return operator_rows(place_events(recording), {})


def one(rows: tuple[OperatorRow, ...], op: str, phase: str = "forward") -> OperatorRow:
    (row,) = (row for row in rows if (row.op, row.phase) == (op, phase))
    return row


def linear() -> Trace:
    """`linear` calls `t` and `addmm`; it launches a copy itself, `addmm` two kernels."""
    trace = Trace().mark("fc", 0, 200).op("aten::linear", 10, 100)
    trace.op("aten::t", 20, 30).op("aten::addmm", 40, 90)
    trace.kernel("gemm", 300, 340, launched=50).kernel("splitKreduce", 340, 345, launched=60)
    return trace.kernel("Memcpy DtoD", 345, 352, launched=95)


def test_own_time_and_time_with_what_it_calls() -> None:
    rows = rows_of(linear().recording())
    found = {row.op: (row.self_time_ns, row.time_ns, row.device_events, row.calls) for row in rows}
    assert found == {"aten::linear": (7, 52, 1, 1), "aten::addmm": (45, 45, 2, 1), "aten::t": (0, 0, 0, 1)}
    cpu = {row.op: (row.self_cpu_time_ns, row.cpu_time_ns) for row in rows}
    assert cpu == {"aten::linear": (30, 90), "aten::addmm": (50, 50), "aten::t": (10, 10)}
    assert [row.op for row in rows] == ["aten::addmm", "aten::linear", "aten::t"]  # the most expensive first
    assert one(rows, "aten::addmm").layers == one(rows, "aten::t").layers == ("fc",)
    assert [row.class_name for row in rows] == ["gemm", "gemm", "other"]  # a view computes nothing
    assert [row.tensor_core_eligible for row in rows] == [True, True, False]


def test_an_op_that_calls_itself_counts_once() -> None:
    trace = Trace().op("aten::sum", 0, 100).op("aten::sum", 10, 90).op("aten::copy_", 20, 80).op("aten::sum", 30, 40)
    trace.kernel("reduce_kernel", 200, 203, launched=35).kernel("copy_kernel", 210, 220, launched=50)
    trace.op("aten::sum", 100, 110).kernel("reduce_kernel", 230, 231, launched=105)
    row = one(rows_of(trace.recording()), "aten::sum", "other")
    assert (row.calls, row.self_time_ns, row.time_ns) == (4, 4, 14)
    assert (row.self_cpu_time_ns, row.cpu_time_ns) == (20 + 20 + 10 + 10, 110)


def test_the_same_op_on_two_threads_is_not_inside_itself() -> None:
    trace = Trace().op("aten::sum", 0, 100).op("aten::sum", 10, 90, thread=9)
    row = one(rows_of(trace.recording()), "aten::sum", "other")
    assert (row.calls, row.cpu_time_ns) == (2, 180)


def test_where_ops_cross_only_a_caller_holds_what_is_in_it() -> None:
    trace = Trace().op("aten::sum", 0, 100).op("aten::mm", 10, 120).op("aten::sum", 20, 90)
    rows = rows_of(trace.recording())
    assert one(rows, "aten::mm", "other").cpu_time_ns == 110
    row = one(rows, "aten::sum", "other")
    assert (row.self_cpu_time_ns, row.cpu_time_ns) == (80, 80)  # the inner one is called by `mm`, which no `sum` calls


def test_time_on_tensor_cores_is_that_of_kernels_that_use_them() -> None:
    trace = Trace().op("aten::mm", 0, 50).op("aten::add", 60, 70).op("aten::t", 80, 90)
    trace.kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 100, 140, launched=10)
    trace.kernel("ampere_sgemm_128x64_tn", 140, 170, launched=20)
    trace.kernel("my_own_kernel", 170, 175, launched=30).kernel("my_own_kernel", 175, 180, launched=65)
    rows = rows_of(trace.recording())
    assert {row.op: row.tensor_core_time_ns for row in rows} == {"aten::mm": 40, "aten::add": None, "aten::t": None}


def test_phases_are_apart() -> None:
    rows = rows_of(training_step().recording())
    assert one(rows, "aten::mm").self_time_ns == 100
    node = one(rows, "autograd::engine::evaluate_function: MmBackward0", "backward")
    assert (node.self_time_ns, node.layers, node.class_name) == (500, ("mlp",), "communication")
    outside = {row.phase: (row.self_time_ns, row.calls) for row in rows if row.op == NO_OP}
    assert outside == {"optimizer": (50, 0), "other": (7, 0)}
    assert sum(row.self_time_ns for row in rows) == 2067


def test_kernels_without_a_launch_have_no_op() -> None:
    trace = linear().kernel("gemm", 0, 5, correlation=4711)
    row = one(rows_of(trace.recording()), NO_OP, "other")
    assert (row.self_time_ns, row.time_ns, row.device_events, row.calls, row.cpu_time_ns) == (5, 5, 1, 0, 0)
    assert row.layers == ()


def test_on_a_cpu_the_time_is_that_of_the_cpu() -> None:
    trace = Trace().mark("fc", 0, 100).op("aten::linear", 10, 50).op("aten::addmm", 20, 40).op("aten::relu", 60, 70)
    rows = rows_of(trace.recording())
    assert all((row.self_time_ns, row.time_ns) == (row.self_cpu_time_ns, row.cpu_time_ns) for row in rows)
    assert all((row.device_events, row.tensor_core_time_ns) == (0, None) for row in rows)
    times = {row.op: (row.self_time_ns, row.time_ns) for row in rows}
    assert times == {"aten::linear": (20, 40), "aten::addmm": (20, 20), "aten::relu": (10, 10)}


def test_what_a_mark_inside_an_op_takes_the_op_takes() -> None:
    trace = Trace().mark("a", 0, 40).op("aten::mm", 10, 20, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 100, 200, number=1).mark("a", 120, 180, thread=AUTOGRAD)
    trace.op("aten::mm", 130, 140, thread=AUTOGRAD)
    rows = rows_of(trace.recording())
    node = one(rows, "autograd::engine::evaluate_function: MmBackward0", "backward")
    assert (node.self_time_ns, node.time_ns) == (90, 100)
    assert one(rows, "aten::mm", "recompute").self_time_ns == 10


def test_layers_are_those_with_most_of_its_time() -> None:
    trace, now = Trace(), 0
    for layer in range(7):
        trace.mark(f"blocks.{layer}", now, now + 20).op("aten::mm", now + 5, now + 15)
        trace.kernel("gemm", 1000 + 100 * layer, 1010 + 100 * layer + layer, launched=now + 7)
        now += 30
    assert one(rows_of(trace.recording()), "aten::mm").layers == tuple(f"blocks.{i}" for i in (6, 5, 4, 3, 2))


def test_shapes_are_those_that_were_found() -> None:
    rows = operator_rows(place_events(linear().recording()), {"aten::addmm": ("[2, 3] x [3, 4]",)})
    assert {row.op: row.shapes for row in rows} == {
        "aten::addmm": ("[2, 3] x [3, 4]",),
        "aten::linear": (),
        "aten::t": (),
    }


# --- laws ---


def plain_rows(recording: Recording) -> dict[tuple[str, str], Counter[str]]:
    """What the rows should say, op by op and event by event."""
    found = place_events(recording)
    marks = set(found.tree.layer_of_span) if found.tree.source == "marks" else set()
    spans, places = recording.spans, found.attribution

    def ops_around(span: int) -> list[int]:
        around = []
        while span >= 0:
            if spans.category[span] == 0 and span not in marks:
                around.append(span)
            span = int(found.nesting.parent[span])
        return around

    def key(span: int) -> tuple[str, str]:
        return recording.name_of(span), places.place(span).phase

    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for span in np.flatnonzero(spans.category == 0).tolist():
        if span not in marks:
            sums[key(span)]["calls"] += 1

    def give(span: int, phase: str, time_ns: int, own: str, total: str, events: str) -> None:
        around = ops_around(span) if span >= 0 else []
        first = key(around[0]) if around else (NO_OP, phase)
        sums[first][own] += time_ns
        sums[first][events] += 1
        for each in {key(op) for op in around} or {first}:
            sums[each][total] += time_ns

    for span, time_ns in enumerate(found.cpu_ns.tolist()):
        if time_ns:
            give(span, places.place(span).phase, time_ns, "self_cpu_time_ns", "cpu_time_ns", "")
    charges = found.charges
    if charges.basis == "device":
        for i in range(len(charges)):
            phase = places.places[charges.place[i]].phase
            give(int(charges.cpu_span[i]), phase, int(charges.time_ns[i]), "self_time_ns", "time_ns", "device_events")
    else:
        for counted in sums.values():
            counted["self_time_ns"], counted["time_ns"] = counted["self_cpu_time_ns"], counted["cpu_time_ns"]
    return sums


FIELDS = ("calls", "self_time_ns", "time_ns", "self_cpu_time_ns", "cpu_time_ns", "device_events")


@settings(max_examples=150, deadline=None)
@given(wild_traces())
def test_every_event_and_every_nanosecond_has_its_op(trace: Trace) -> None:
    recording = trace.op("aten::mm", 0, 1, thread=4).recording()
    found, rows = place_events(recording), operator_rows(place_events(recording), {})
    expected = plain_rows(recording)
    assert {(row.op, row.phase): {name: getattr(row, name) for name in FIELDS} for row in rows} == {
        key: {name: counted[name] for name in FIELDS} for key, counted in expected.items()
    }
    assert sum(row.self_time_ns for row in rows) == int(found.charges.time_ns.sum())
    assert sum(row.self_cpu_time_ns for row in rows) == int(found.cpu_ns.sum())


def test_many_ops_take_no_more_python_than_few() -> None:
    lines = []
    for count in (500, 2000):
        trace, now = Trace(), 0
        for i in range(count):
            trace.op("aten::linear", now, now + 90).op("aten::addmm", now + 10, now + 80)
            trace.kernel("gemm", now, now + 50, launched=now + 20, thread=MAIN)
            now += 100 + i % 3
        found = place_events(trace.recording())
        assert one(operator_rows(found, {}), "aten::linear", "other").time_ns == 50 * count
        lines.append(lines_run(lambda: operator_rows(found, {})))  # noqa: B023
    assert lines[0] == lines[1] < 1000
