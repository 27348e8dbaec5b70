"""Bytes that layers move and the time at their roof, in recordings whose numbers are worked out on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler_wrapper.place.names import LAUNCHED_BEFORE
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.trace.recording import OpShapes
from recordings import Trace
from shaped_trace import PEAKS, addition, analysed, matrices, product

MM, ADD = {"aten::mm": product()}, {"aten::add": addition()}


def row(found: Analysis, layer: str, phase: str = "forward") -> LayerRow:
    (one,) = [one for one in found.layers if (one.layer, one.phase) == (layer, phase)]
    return one


def roof(one: LayerRow) -> tuple[int | None, ...]:
    """Bytes, time at the roof, of it in ops that bytes bound, time of all FLOPs at the peak."""
    return (
        one.bytes_moved_per_step,
        one.roof_time_per_step_ns,
        one.memory_roof_time_per_step_ns,
        one.peak_time_per_step_ns,
    )


def two_layers() -> Trace:
    """A product in one layer, two additions in another, one in the root."""
    trace = Trace().mark(".", 0, 1000).mark("a", 10, 300).op("aten::mm", 20, 220)
    trace.mark("b", 400, 800).op("aten::add", 410, 500).op("aten::add", 510, 600)
    return trace.op("aten::add", 810, 900)


def test_an_op_takes_at_the_roof_the_longer_of_its_flops_and_its_bytes() -> None:
    found = analysed(two_layers(), MM | ADD)
    assert roof(row(found, "a")) == (768, 100, 0, 100)
    assert roof(row(found, "b")) == (2 * 768, 2 * 50, 2 * 50, 0)
    assert (row(found, "a").bound, row(found, "b").bound) == ("compute", "memory")


def test_a_layer_holds_what_is_below_it() -> None:
    found = analysed(two_layers(), MM | ADD)
    net = row(found, "Net")
    assert roof(net) == (4 * 768, 100 + 3 * 50, 3 * 50, 100)
    assert (net.self_bytes_moved_per_step, net.self_roof_time_per_step_ns) == (768, 50)
    assert net.bound == "memory"  # 150 of 250 ns


def test_what_layers_do_themselves_adds_up_to_the_whole() -> None:
    trace = two_layers().node("MmBackward0", 20, 90, number=77).op("aten::mm", 30, 60, thread=2)
    found = analysed(trace, MM | ADD)
    (lost,) = found.unattributed
    assert (lost.bytes_moved_per_step, lost.roof_time_per_step_ns) == (768, 100)
    own = [(one.self_bytes_moved_per_step, one.self_roof_time_per_step_ns) for one in found.layers]
    assert sum(size or 0 for size, _ in own) + 768 == 5 * 768
    assert sum(time or 0 for _, time in own) + 100 == 2 * 100 + 3 * 50


def test_a_product_of_unknown_size_and_no_known_layer_leaves_the_time_at_the_roof_of_such_unknown() -> None:
    """It takes 1 ns of 900, so that bytes are known as well as they need to be."""
    trace = two_layers().node("MmBackward0", 1000, 1900, number=77).op("aten::mm", 1100, 1400, thread=2)
    (lost,) = analysed(trace.op("aten::bmm", 1500, 1501, thread=2), MM | ADD).unattributed
    assert (lost.bytes_moved_per_step, lost.roof_time_per_step_ns) == (768, None)


def test_numbers_are_those_of_a_step() -> None:
    trace = Trace()
    for step in range(3):
        start = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", start, start + 1000).mark(".", start, start + 900)
        trace.op("aten::mm", start + 10, start + 200)
    assert roof(row(analysed(trace, MM), "Net")) == (768, 100, 0, 100)


def test_what_a_causal_mask_hides_takes_no_time_at_the_roof_but_counts_at_the_peak() -> None:
    dims = [1, 1, 64, 8]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    shapes = OpShapes(
        dims=(dims, dims, dims, [], [], [], []),
        types=("float",) * 3 + ("Scalar",) * 4,
        concrete=("", "", "", "0.", "True", "", ""),
    )
    trace = Trace().mark(".", 0, 90_000).op(name, 10, 80_000)
    net = row(analysed(trace, {name: shapes}), "Net")
    flops = 2 * 64 * 64 * (8 + 8)
    assert (net.flops_per_step, net.causal_flops_per_step) == (flops, flops // 2)
    assert net.peak_time_per_step_ns == flops / 10.24
    assert net.roof_time_per_step_ns == flops / 10.24 / 2


def test_without_peaks_bytes_alone_are_known_and_one_warning_says_what_to_do() -> None:
    found = analysed(two_layers(), MM | ADD, peaks=None)
    assert roof(row(found, "a")) == (768, None, None, None)
    assert row(found, "a").bound is None
    (warning,) = [text for text in found.warnings if "peak" in text]
    assert "PROFILER_WRAPPER_PEAK_TFLOPS" in warning
    assert "peaks --measure" in warning


def test_without_a_bandwidth_the_roof_is_not_known_but_the_peak_is() -> None:
    found = analysed(two_layers(), MM | ADD, peaks=replace(PEAKS, bandwidth_bytes_per_s=None))
    assert roof(row(found, "a")) == (768, None, None, 100)
    assert [warning for warning in found.warnings if "bandwidth" in warning] == [
        "no memory bandwidth is known of this device: give bandwidth=<GB/s> for the time at the roof"
    ]


def test_of_what_was_launched_before_the_trace_no_work_is_known() -> None:
    trace = two_layers().kernel("early_gemm", 0, 40).kernel("gemm", 300, 400, launched=30)
    (early,) = analysed(trace, MM | ADD).unattributed
    assert (early.reason, early.time_ns) == (LAUNCHED_BEFORE, 40)
    assert (early.flops_per_step, early.bytes_moved_per_step, early.roof_time_per_step_ns) == (None, None, None)


def test_a_type_without_a_peak_leaves_its_layers_unknown() -> None:
    found = analysed(two_layers(), {"aten::mm": product("double")} | ADD)
    assert roof(row(found, "a")) == (2 * 768, None, None, None)
    assert roof(row(found, "b")) == (2 * 768, 100, 100, 0)
    assert roof(row(found, "Net"))[1:] == (None, None, None)


def test_ops_that_tell_no_bytes_are_listed_and_leave_a_layer_that_they_fill_unknown() -> None:
    trace = two_layers().op("mine::thing", 610, 700)
    found = analysed(trace, MM | ADD)
    (untold,) = found.untold_bytes
    assert (untold.op, untold.layers, untold.count, untold.time_per_step_ns) == ("mine::thing", ("b",), 1, 90)
    assert roof(row(found, "a")) == (768, 100, 0, 100)
    assert roof(row(found, "b"))[:3] == (None, None, None)
    assert row(found, "Net").bytes_moved_per_step is None
    percent = f"{100 * 90 / found.time.total_ns:.1f}"  # of no more than all
    told = f"no rule tells them ({percent} % of the time in steps with shapes; the log lists these ops)"
    assert f"bytes moved of layers with mine::thing: {told}" in found.warnings


def test_a_trifle_that_tells_no_bytes_is_left_out_and_listed() -> None:
    found = analysed(two_layers().op("mine::rms_norm", 610, 611), MM | ADD)  # 1 of 181 ns in b, of 471 in all
    assert [one.op for one in found.untold_bytes] == ["mine::rms_norm"]
    assert roof(row(found, "b")) == (2 * 768, 100, 100, 0)


def test_a_product_of_which_no_flops_are_told_leaves_the_roof_unknown() -> None:
    nothing = OpShapes(dims=([], []), types=("", ""), concrete=("", ""))
    trace = two_layers().op("aten::bmm", 610, 611)
    found = analysed(trace, MM | ADD | {"aten::bmm": nothing})
    assert roof(row(found, "b"))[1:] == (None, None, None)
    assert roof(row(found, "a")) == (768, 100, 0, 100)


def test_a_product_takes_its_own_type_to_the_roof() -> None:
    trace = Trace().mark(".", 0, 1000).op("aten::mm", 10, 200).op("aten::_int_mm", 210, 400)
    found = analysed(
        trace, {"aten::mm": product("c10::BFloat16"), "aten::_int_mm": matrices("signed char", "signed char")}
    )
    # bfloat16: 1024 / 20.48 = 50 ns; int8: 25 ns; bytes: 3 * 64 * 2, and 2 * 64 read and 64 * 4 written
    assert roof(row(found, "Net")) == (384 + 384, 75, 0, 75)


@pytest.mark.parametrize(("roof_ns", "memory_ns", "bound"), [(100, 51, "memory"), (100, 50, "compute"), (0, 0, None)])
def test_bound_is_what_makes_up_more(roof_ns: int, memory_ns: int, bound: str | None) -> None:
    one = row(analysed(two_layers(), MM | ADD), "a")
    assert replace(one, roof_time_per_step_ns=roof_ns, memory_roof_time_per_step_ns=memory_ns).bound == bound
