"""Model FLOPs and hardware FLOPs of a step, and their share of the peak, worked out on paper."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.place.step_windows import step_windows
from profiler_wrapper.tables.model import Analysis, Utilization
from profiler_wrapper.tables.work.peaks import VARIABLE, peaks_of
from profiler_wrapper.tables.work.roofline import peaks_of_run, share_of_peak
from recordings import AUTOGRAD, Trace
from shaped_trace import PEAKS, analysed, matrices, product, shapes_of, work_of

MM = {"aten::mm": product()}  # 1024 FLOPs: 100 ns at the peak


def steps(*spans: tuple[int, int]) -> Trace:
    """Steps on the CPU, with a product in each."""
    trace = Trace()
    for number, (start, end) in enumerate(spans):
        trace.annotation(f"ProfilerStep#{number}", start, end).mark(".", start, end - 1)
        trace.op("aten::mm", start + 1, start + 11)
    return trace


def used(found: Analysis) -> Utilization:
    assert found.utilization is not None
    return found.utilization


def test_mfu_is_the_flops_of_a_step_at_the_peak_over_its_time() -> None:
    use = used(analysed(steps((0, 1000), (1000, 1700), (1700, 3000)), MM))
    assert use.step_time_ns == 1000  # the mean of 1000, 700, 1300
    assert (use.model_flops_per_step, use.hardware_flops_per_step) == (1024, 1024)
    assert (use.mfu, use.hfu, use.causal_mfu, use.causal_hfu) == pytest.approx((0.1,) * 4, rel=1e-12)
    assert use.peaks == PEAKS


def test_every_type_counts_at_its_own_peak() -> None:
    trace = steps((0, 1000)).op("aten::_int_mm", 20, 30).op("aten::bmm", 40, 50)
    shapes = MM | {
        "aten::_int_mm": matrices("signed char", "signed char"),
        "aten::bmm": matrices("c10::BFloat16", "c10::BFloat16"),
    }
    use = used(analysed(trace, shapes))
    assert use.model_flops_per_step == 3 * 1024
    assert use.mfu == pytest.approx((100 + 25 + 50) / 1000, rel=1e-12)


def test_what_is_recomputed_counts_for_the_hardware_alone() -> None:
    """Within a backward node, a forward that runs under a layer's mark again."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).mark(".", 0, 200).mark("fc", 5, 190)
    trace.op("aten::mm", 10, 60, sequence=7, forward_thread=0).node("MmBackward0", 300, 900, number=7)
    trace.mark("fc", 310, 500, thread=AUTOGRAD).op("aten::mm", 320, 400, thread=AUTOGRAD)
    trace.op("aten::relu", 410, 420, thread=AUTOGRAD)  # where the recompute stops
    trace.op("aten::mm", 600, 700, thread=AUTOGRAD)
    found = analysed(trace, MM)
    use = used(found)
    assert {row.phase for row in found.flops} == {"forward", "recompute", "backward"}
    assert (use.model_flops_per_step, use.hardware_flops_per_step) == (2 * 1024, 3 * 1024)
    assert (use.mfu, use.hfu) == pytest.approx((0.2, 0.3), rel=1e-12)


def test_over_one_is_reported_as_it_is_and_the_warning_names_likely_causes() -> None:
    low = replace(PEAKS, flops_per_s={"float32": 1.024e9})
    found = analysed(steps((0, 500)), MM, peaks=low)
    assert used(found).mfu == pytest.approx(2.0, rel=1e-12)
    (warning,) = [text for text in found.warnings if "MFU" in text]
    assert warning.startswith("MFU is 200.0 %. Likely the peak is of another device or type")
    assert "0.001024 TFLOP/s float32 (by hand)" in warning


@pytest.mark.parametrize(("took", "told"), [(50, "the whole at 200 % and 1 more"), (200, "")])
def test_a_layer_that_is_faster_than_the_roof_is_called_out(took: int, told: str) -> None:
    """Also where the step as a whole is far from it."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).mark("fc", 0, 90).op("aten::mm", 1, 20)
    found = analysed(trace.kernel("gemm", 100, 100 + took, launched=5), MM)
    assert used(found).mfu == pytest.approx(0.1)
    warned = [warning for warning in found.warnings if "faster than the roof" in warning]
    assert [told in warning for warning in warned] == [True] * bool(told)


def test_a_servers_steps_are_alike_where_each_decodes() -> None:
    trace = Trace()
    for start, name in ((0, "step[DECODE bs=8]"), (1000, "step[DECODE bs=8]")):
        trace.annotation(name, start, start + 1000).mark("fc", start, start + 90).op("aten::mm", start + 1, start + 20)
    assert used(analysed(trace, MM)).mfu == pytest.approx(0.1)
    mixed = trace.annotation("step[EXTEND bs=1]", 2000, 3000).mark("fc", 2000, 2090).op("aten::mm", 2001, 2020)
    assert analysed(mixed, MM).utilization is None


def test_with_ops_of_unknown_flops_there_is_no_share() -> None:
    found = analysed(steps((0, 1000)).op("aten::bmm", 20, 30), MM)
    use = used(found)
    assert (use.mfu, use.hfu, use.model_flops_per_step, use.hardware_flops_per_step) == (None,) * 4
    assert any(text.startswith("MFU is not available, because the FLOPs of some ops") for text in found.warnings)


def test_with_a_type_of_unknown_peak_there_is_no_share() -> None:
    found = analysed(steps((0, 1000)), {"aten::mm": product("double")})
    assert (used(found).mfu, used(found).model_flops_per_step) == (None, 1024)
    assert any(text == "MFU is not available, because no peak is known for float64" for text in found.warnings)


def test_without_a_step_that_ends_there_is_no_share() -> None:
    found = analysed(Trace().mark(".", 0, 100).op("aten::mm", 10, 20), MM)
    assert used(found).mfu is None
    assert any(text == "MFU is not available, because no step has a begin and an end" for text in found.warnings)


def test_without_products_there_is_nothing_to_say() -> None:
    found = analysed(Trace().mark(".", 0, 100).op("aten::relu", 10, 20), {})
    assert found.utilization is None


# --- the time of a step -------------------------------------------------------------------------


def times(trace: Trace) -> list[int]:
    return list(step_windows(place_events(trace.recording())).step_times_ns)


def test_a_step_on_a_cpu_takes_from_its_begin_to_its_end() -> None:
    assert times(steps((0, 1000), (1000, 1700), (1900, 2000))) == [1000, 700, 100]


def ahead() -> Trace:
    """The CPU launches in 100 ns what takes the device 1000."""
    trace = steps((0, 100), (100, 200), (200, 300))
    for step in range(3):
        trace.kernel("gemm", 1000 * step + 50, 1000 * step + 1050, launched=100 * step + 5)
    return trace


def test_a_step_ends_when_the_device_is_done_with_it() -> None:
    assert times(ahead()) == [1050, 1000, 1000]


def test_a_step_ends_when_the_cpu_is_done_with_it() -> None:
    trace = steps((0, 1000), (1000, 2000))
    for step in range(2):
        trace.kernel("gemm", 1000 * step + 50, 1000 * step + 80, launched=1000 * step + 20)
    assert times(trace) == [1000, 1000]


def test_what_was_launched_before_the_first_step_is_none_of_its_time() -> None:
    trace = Trace().op("aten::mm", 0, 5).kernel("gemm", 10, 400, launched=2)
    trace.annotation("ProfilerStep#1", 100, 200).op("aten::mm", 110, 120).kernel("gemm", 400, 900, launched=112)
    assert times(trace) == [500]
    trace.kernel("of another stream", 50, 450, stream=8)  # no launch in the trace
    assert times(trace) == [450]


def test_mfu_of_a_busy_device_is_that_of_the_devices_time() -> None:
    use = used(analysed(ahead(), MM))
    assert use.step_time_ns == 1017  # the mean of 1050, 1000, 1000
    assert use.mfu == pytest.approx(100 / 1017, rel=1e-12)


def test_several_devices_have_their_peaks_together() -> None:
    trace = ahead()
    trace.kernel("gemm", 60, 70, launched=7, device=1)
    use = used(analysed(trace, MM))
    assert use.devices == 2
    assert use.mfu == pytest.approx(50 / 1017, rel=1e-12)


# --- types that float32 is multiplied in --------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "run", "dtype", "mfu"),
    [
        ("ampere_sgemm_128x64_tn", {}, "float32", 0.1),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", {}, "tfloat32", 0.025),
        ("cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4", {}, "tfloat32", 0.025),
        ("nvjet_sss_128x256_64x4", {"float32_matmul_precision": "high"}, "tfloat32", 0.025),
        ("nvjet_sss_128x256_64x4", {"float32_matmul_precision": "highest"}, "float32", 0.1),
    ],
)
def test_float32_counts_in_the_type_that_the_device_multiplies(
    kernel: str, run: dict[str, str], dtype: str, mfu: float
) -> None:
    trace = steps((0, 1000)).kernel(kernel, 50, 900, launched=5)
    found = analysed(trace, MM, run=run)
    assert {row.dtype for row in found.flops} == {dtype}
    assert used(found).mfu == pytest.approx(mfu, rel=1e-12)


def test_a_device_without_tfloat32_multiplies_float32() -> None:
    flops = {"tfloat32": 1024}
    plain = replace(PEAKS, flops_per_s={"float32": 1.024e10})
    assert share_of_peak(flops, plain, time_ns=1000) == pytest.approx(0.1, rel=1e-12)


def test_on_a_cpu_float32_stays_what_it_is() -> None:
    found = analysed(steps((0, 1000)), MM, run={"float32_matmul_precision": "high"})
    assert {row.dtype for row in found.flops} == {"float32"}


# --- work of a step, and which peaks ------------------------------------------------------------


def found_of(trace: Trace) -> Placed:
    return place_events(trace.recording(), shapes=shapes_of(trace, MM))


def test_the_work_of_a_step_is_the_mean_over_steps() -> None:
    work = work_of(found_of(steps((0, 100), (100, 200)).op("aten::mm", 50, 60)))
    assert work.model_flops_by_dtype == work.hardware_flops_by_dtype == {"float32": 1536}
    assert work.causal_model_flops_by_dtype == work.causal_hardware_flops_by_dtype == {"float32": 1536}
    assert (work.model_flops, work.hardware_flops) == (1536, 1536)
    assert work.uncounted == ()


def test_the_work_of_a_step_names_ops_that_tell_nothing() -> None:
    work = work_of(found_of(steps((0, 100)).op("aten::bmm", 20, 30)))
    assert (work.hardware_flops, work.uncounted) == (1024, ("aten::bmm",))


def test_peaks_are_those_given_then_those_of_the_run_then_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    name = "NVIDIA H100 80GB HBM3"
    told = {"device": name, "peaks": asdict(PEAKS)}
    assert peaks_of_run(told, given=None, on_device=True)[0] == PEAKS
    given, _ = peaks_of_run(told, given=5, on_device=True)
    assert given is not None
    assert given.flops("bfloat16") == 5e12
    assert peaks_of_run({"device": name}, given=None, on_device=True)[0] == peaks_of(name)
    assert peaks_of_run({"device": name}, given=None, on_device=False)[0] is None  # times are the CPU's
    monkeypatch.setenv(VARIABLE, "7")
    from_environment, _ = peaks_of_run(told, given=None, on_device=True)
    assert from_environment is not None
    assert from_environment.flops("bfloat16") == 7e12


def test_peaks_of_a_run_that_are_not_what_was_written_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(WrongUse, match="not what was written"):
        peaks_of_run({"peaks": {"device": 3}}, given=None, on_device=False)
