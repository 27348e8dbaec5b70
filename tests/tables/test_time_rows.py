"""Rows per layer, class, backend and step, and the laws that hold between them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from any_traces import traces, training_step, wild_traces
from invariants import OF_TIME, broken
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.trace.recording import Category, Recording
from recordings import MAIN, Trace, analyse


def test_a_training_step_by_hand() -> None:
    result = analyse(training_step().recording())
    times = {(row.layer, row.phase): (row.self_time_ns, row.time_ns) for row in result.layers}
    assert times == {
        ("Net", "forward"): (10, 510),
        ("Net", "backward"): (0, 1500),
        ("attn", "forward"): (400, 400),
        ("attn", "backward"): (1000, 1000),
        ("mlp", "forward"): (100, 100),
        ("mlp", "backward"): (500, 500),
        ("", "optimizer"): (50, 50),
        ("", "other"): (7, 7),
    }
    assert (result.time.total_ns, result.time.unattributed_ns, result.time.coverage) == (2067, 0, 1.0)
    assert [(r.layer, r.phase, r.backend, r.kernels, r.time_ns) for r in result.attention] == [
        ("attn", "forward", "flash", ("flash_fwd_kernel",), 400),
        ("attn", "backward", "flash", ("flash_bwd_kernel",), 1000),
    ]
    attention = {(row.layer, row.phase): row.attention_ns for row in result.layers if row.attention_ns}
    assert attention == {
        ("Net", "forward"): 400,
        ("Net", "backward"): 1000,
        ("attn", "forward"): 400,
        ("attn", "backward"): 1000,
    }
    assert result.time.exposed_communication_ns == 200  # [1800, 2000]
    assert {(row.layer, row.phase): row.exposed_communication_ns for row in result.layers if row.communication_ns} == {
        ("Net", "backward"): 200,
        ("mlp", "backward"): 200,
    }
    assert result.time.busy_ns == 510 + 400 + 1057
    step, rest = result.steps
    assert (step.step, step.time_ns, step.span_ns, step.attention_ns) == (4, 2060, 1000, 1400)
    assert step.phases_ns == {"forward": 510, "backward": 1500, "optimizer": 50}
    assert (rest.step, rest.time_ns) == (None, 7)
    assert {(row.class_name, row.phase): (row.time_ns, row.count) for row in result.classes} == {
        ("attention", "forward"): (400, 1),
        ("attention", "backward"): (1000, 1),
        ("gemm", "forward"): (100, 1),
        ("gemm", "backward"): (200, 1),
        ("communication", "backward"): (300, 1),
        ("elementwise", "forward"): (10, 1),
        ("optimizer", "optimizer"): (50, 1),
        ("copy", "other"): (7, 1),
    }


def test_calls_are_counted_where_a_layer_is_entered() -> None:
    trace = training_step().mark("mlp", 220, 230)
    calls = {(row.layer, row.phase): row.calls for row in analyse(trace.recording()).layers}
    assert calls["mlp", "forward"] == 2
    assert calls["mlp", "backward"] is None
    assert calls["", "optimizer"] is None


def test_a_layer_that_costs_nothing_has_its_row() -> None:
    result = analyse(training_step().mark("dropout", 205, 210).recording())
    (row,) = result.rows("dropout")
    assert (row.self_time_ns, row.calls) == (0, 1)


def test_calls_of_layers_with_their_place_in_time() -> None:
    trace = training_step().kernel("gemm", 5000, 5010, launched=140, device=1)
    found = {call.layer: call for call in analyse(trace.recording()).calls}
    assert list(found) == ["Net", "attn", "mlp"]
    mlp = found["mlp"]
    assert (mlp.start_ns, mlp.end_ns, mlp.time_ns, mlp.step, mlp.index) == (110, 200, 110, 4, 0)
    assert (mlp.device, mlp.device_start_ns, mlp.device_end_ns) == (0, 1400, 5010)
    assert found["Net"].time_ns == 520


def test_a_call_on_the_second_device_says_so() -> None:
    trace = Trace().mark("a", 0, 10).kernel("x", 100, 110, launched=5).mark("b", 20, 30)
    found = analyse(trace.kernel("y", 120, 130, launched=25, device=1).recording()).calls
    assert [(call.layer, call.device) for call in found] == [("a", 0), ("b", 1)]


def test_calls_come_in_order_of_time_whatever_their_thread() -> None:
    trace = Trace().mark("a", 50, 60).mark("b", 0, 10, thread=9).mark("c", 100, 110).op("aten::mm", 1, 2, thread=9)
    assert [call.layer for call in analyse(trace.recording()).calls] == ["b", "a", "c"]


def test_a_kernel_without_a_launch_is_in_no_step() -> None:
    result = analyse(training_step().kernel("stray", 500, 511, correlation=77777).recording())
    assert [(step.step, step.time_ns) for step in result.steps] == [(4, 2060), (None, 18)]


def test_a_backward_run_inside_a_layers_forward_is_no_part_of_that_call() -> None:
    trace = Trace().mark(".", 0, 1000).mark("a", 10, 50).op("aten::mm", 20, 30, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 100, 200, number=1, thread=MAIN).op("aten::mm", 110, 150)
    trace.mark("a", 160, 190).op("aten::mm", 170, 180)
    net, first, again = analyse(trace.recording()).calls
    assert (net.time_ns, first.time_ns, again.time_ns) == (10, 10, 30)  # the node is an op: its time counts
    assert (first.phase, again.phase) == ("forward", "recompute")


# --- laws ---


@settings(max_examples=80, deadline=None)
@given(traces())
def test_nothing_is_lost_or_counted_twice_and_exposed_is_what_nothing_runs_beside(trace: Trace) -> None:
    recording = trace.recording()
    result = analyse(recording)
    assert broken(result, OF_TIME) == []
    spans = recording.spans
    assert result.time.total_ns == int(spans.duration_ns[recording.device_mask].sum())
    busy = sum(len(running(recording, device)) for device in (0, 1))
    assert result.time.busy_ns == busy
    exposed = sum(
        len(running(recording, device, communicating=True) - running(recording, device, communicating=False))
        for device in (0, 1)
    )
    assert result.time.exposed_communication_ns == exposed


def running(recording: Recording, device: int, *, communicating: bool | None = None) -> set[int]:
    """The instants at which something runs on a device."""
    spans = recording.spans
    chosen = np.flatnonzero(recording.device_mask & (spans.device == device))
    return {
        instant
        for i in chosen.tolist()
        if communicating is None or ("nccl" in recording.name_of(i)) is communicating
        for instant in range(spans.start_ns[i], spans.start_ns[i] + spans.duration_ns[i])
    }


def test_training_step_is_conserved() -> None:
    assert broken(analyse(training_step().recording())) == []


@settings(max_examples=150, deadline=None)
@given(wild_traces())
def test_no_trace_is_too_wild(trace: Trace) -> None:
    recording = trace.op("aten::mm", 0, 1, thread=4).recording()
    result = analyse(recording, track=["aten::mm", len])
    assert broken(result, OF_TIME) == []
    found = place_events(recording)
    assert sum(found.cpu_ns.tolist()) == covered_by_ops(recording, set(found.tree.layer_of_span))


def covered_by_ops(recording: Recording, marks: set[int]) -> int:
    """Instants of each thread at which an op runs that is no mark."""
    spans = recording.spans
    ops = [i for i in np.flatnonzero(spans.category == Category.CPU_OP).tolist() if i not in marks]
    end = spans.end_ns
    return len({(int(spans.lane[i]), instant) for i in ops for instant in range(spans.start_ns[i], end[i])})
