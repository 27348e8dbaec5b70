"""Events of a layer and its time in each step."""

from __future__ import annotations

import numpy as np

from lines_run import lines_run
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.time_rows import layer_rows
from recordings import AUTOGRAD, Trace, analyse


def two_steps() -> Trace:
    """Two steps of two layers, backward on its own thread, and a kernel after the last step."""
    trace = Trace()
    for begin, factor in ((0, 1), (1000, 3)):
        trace.annotation(f"ProfilerStep#{7 + begin // 1000}", begin, begin + 900)
        trace.mark(".", begin, begin + 300).mark("mlp", begin + 10, begin + 200)
        trace.op("aten::mm", begin + 20, begin + 60, sequence=begin + 1, forward_thread=0)
        trace.kernel("gemm", begin + 400, begin + 400 + 10 * factor, launched=begin + 30)
        trace.kernel("gemm", begin + 500, begin + 500 + factor, launched=begin + 250)
        trace.node("MmBackward0", begin + 600, begin + 700, number=begin + 1)
        trace.kernel("gemm", begin + 700, begin + 700 + 20 * factor, launched=begin + 650, thread=AUTOGRAD)
    return trace.mark("mlp", 1950, 1980).kernel("gemm", 2000, 2005, launched=1960)


def test_time_of_each_step_by_hand() -> None:
    rows = {(row.layer, row.phase): row for row in analyse(two_steps().recording()).layers}
    assert {key: row.step_times_ns for key, row in rows.items()} == {
        ("Net", "forward"): (11, 33),
        ("mlp", "forward"): (10, 30),
        ("Net", "backward"): (20, 60),
        ("mlp", "backward"): (20, 60),
        ("", "other"): (0, 0),  # idle alone
    }
    assert rows["mlp", "forward"].time_ns == 45  # 5 of them after the last step


def test_events_by_hand() -> None:
    trace = two_steps().kernel("empty", 3000, 3000, launched=120).kernel("stray", 0, 3, correlation=12345)
    result = analyse(trace.recording())
    assert {(row.layer, row.phase): row.self_events for row in result.layers} == {
        ("Net", "forward"): 2,
        ("mlp", "forward"): 4,  # one of no length among them
        ("Net", "backward"): 0,
        ("mlp", "backward"): 2,
        ("", "other"): 0,
    }
    assert [row.count for row in result.unattributed] == [1]


def test_without_steps_there_are_no_times_of_steps() -> None:
    trace = Trace().op("aten::mm", 0, 10).kernel("gemm", 20, 30, launched=5)
    assert [row.step_times_ns for row in analyse(trace.recording()).layers] == []  # no layer: unattributed
    trace = Trace().annotation("Optimizer.step#SGD.step", 10, 20).kernel("gemm", 30, 35, launched=12)
    rows = analyse(trace.recording()).layers + analyse(trace.mark("a", 0, 5).recording()).layers
    assert {row.step_times_ns for row in rows} == {(5,), (0,)}


def test_a_step_that_was_left_out_has_no_column() -> None:
    result = analyse(two_steps().recording(), run={"timed_steps": [8]})
    assert [row.step for row in result.steps if row.step is not None] == [8]
    assert {(row.layer, row.phase): row.step_times_ns for row in result.layers}["mlp", "forward"] == (30,)


def test_a_step_that_an_exception_ended_counts_nowhere() -> None:
    """Step 8 is not among the whole ones: what is left is what step 7 alone gives, and the kernel after both."""
    whole, cut = analyse(two_steps().recording()), analyse(two_steps().recording(), run={"timed_steps": [7]})
    rows = {(row.layer, row.phase): (row.calls, row.time_ns) for row in cut.layers}
    assert rows["Net", "forward"] == (1, 11 + 5) and rows["mlp", "forward"] == (2, 10 + 5)
    assert rows["Net", "backward"][1] == 20 and cut.time.total_ns == 11 + 20 + 5
    (product,) = [row for row in cut.operators if row.op == "aten::mm"]
    assert product.calls == 1 and product.device_events == 1
    assert "step 8 did not end: what it did counts in no time and no call" in cut.warnings
    assert not any("did not end" in warning for warning in whole.warnings)


def test_on_a_cpu_events_are_ops() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 100).mark(".", 0, 50).mark("a", 5, 40)
    trace.op("aten::linear", 10, 30).op("aten::mm", 12, 28).op("aten::add", 42, 45)
    rows = analyse(trace.recording()).layers
    assert {row.layer: (row.self_events, row.step_times_ns) for row in rows} == {"Net": (1, (23,)), "a": (2, (20,))}


def test_python_grows_with_layers_and_hardly_with_steps() -> None:
    few, steps, layers = (lines_of_rows(*sizes) for sizes in ((1, 10), (10, 10), (10, 20)))
    assert steps < 1.5 * few
    assert layers < 2.1 * steps


def lines_of_rows(steps: int, layers: int) -> int:
    """Lines that the rows of so many layers take, each with nine layers of one op of 10 ns below it."""
    trace = Trace()
    for step in range(steps):
        begin = step * 100_000
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 99_000)
        trace.mark(".", begin, begin + 99_000)
        for layer in range(layers):
            start = begin + 900 * layer + 10
            trace.mark(f"layers.{layer}", start, start + 890)
            for child in range(9):
                at = start + 90 * child + 5
                trace.mark(f"layers.{layer}.m{child}", at, at + 80).op("aten::mm", at + 10, at + 20)
    found = place_events(trace.recording())
    classes = np.zeros(len(found.charges), dtype=np.int64)
    times = {row.step_times_ns for row in layer_rows(found, classes, {}) if row.layer == "Net"}
    assert times == {(90 * layers,) * steps}
    return lines_run(lambda: layer_rows(found, classes, {}))
