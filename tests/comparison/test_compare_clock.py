"""The step on the clock in a comparison: till the CPU and the devices are done, as in every report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.text import CLOCK
from profiler_wrapper.reports.describe import step_time_in_words
from profiler_wrapper.tables.model import Analysis
from recordings import Trace, analyse

US = 1000


def run_ahead(kernel_us: int, *, steps: int = 4) -> Analysis:
    """Steps of 100 us on the CPU, each with a kernel of `kernel_us`: the device is what a step waits for."""
    trace, device_free = Trace(), 0
    for step in range(steps):
        begin = step * 100 * US
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 100 * US)
        trace.mark(".", begin, begin + 90 * US, class_name="Net")
        start = max(device_free, begin + 20 * US)
        device_free = start + kernel_us * US
        trace.op("aten::mm", begin + 10 * US, begin + 30 * US)
        trace.kernel("gemm_kernel", start, device_free, launched=begin + 15 * US)
    return analyse(trace.recording())


def without_ends(analysis: Analysis) -> Analysis:
    return replace(analysis, overview=None)


def test_a_step_ends_when_its_device_does() -> None:
    found = compare(run_ahead(300), run_ahead(450))
    clock = found.total(CLOCK)
    assert run_ahead(300).step_times_ns == (320 * US, 300 * US, 300 * US, 300 * US)  # the CPU alone: 100 us each
    assert (clock.a, clock.b) == (pytest.approx(305 * US), pytest.approx(455 * US))  # the means
    assert clock.decision == "slower"
    assert "step takes 0.305 ms (0.300-0.320)" in step_time_in_words(run_ahead(300))
    assert not any(CLOCK in note for note in found.notes)


def test_where_a_side_does_not_say_when_its_devices_end_the_clock_is_not_known() -> None:
    clock = compare(without_ends(run_ahead(300)), run_ahead(450)).total(CLOCK)
    assert (clock.a, clock.b, clock.decision) == (None, pytest.approx(455 * US), "not judged")


def test_a_side_without_steps_has_no_time_of_a_step() -> None:
    whole = replace(without_ends(run_ahead(300)), steps=())
    clock = compare(whole, run_ahead(450)).total(CLOCK)
    assert clock.a is None and clock.b == pytest.approx((470 + 3 * 450) * US / 4)
    assert (clock.change, clock.decision) == (None, "not judged")
