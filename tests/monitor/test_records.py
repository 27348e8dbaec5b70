"""Statistics of a run, against sums by hand and against numpy over all of its steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monitor_runs import GB, record
from profiler_wrapper.monitor.records import Interval, RunStatistics


def statistics(*records: object) -> RunStatistics:
    found = RunStatistics()
    for one in records:
        found.add(one)  # type: ignore[arg-type]
    return found


def test_a_mean_rate_is_all_work_over_all_time() -> None:
    found = statistics(record(1, step_time_s=1.0, tokens=100), record(2, step_time_s=3.0, tokens=100))
    assert found.rates.per_s("tokens") == 50.0  # the mean of both rates would be 66.7
    assert found.rates.step_time_s == 2.0


def test_a_step_that_does_not_tell_its_work_takes_no_time_from_those_that_do() -> None:
    found = statistics(record(1, step_time_s=1.0, tokens=100), record(2, step_time_s=9.0, tokens=None))
    assert found.rates.per_s("tokens") == 100.0
    assert found.rates.step_time_s == 5.0


def test_nothing_known_is_none() -> None:
    found = statistics(record(1, step_time_s=None, memory_bytes=None, peak_memory_bytes=None))
    assert found.steps == 1
    assert found.rates.per_s("tokens") is found.rates.tflops_per_gpu is found.rates.step_time_s is None
    assert [found.peak_memory_bytes, found.step_time_s, found.step_time_percentile(50)] == [None, None, None]


@pytest.mark.parametrize("time_s", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_went_wrong_is_in_no_mean(time_s: float) -> None:
    found = statistics(record(1, step_time_s=1.0), record(2, step_time_s=time_s))
    assert found.rates.step_time_s == 1.0


def test_extremes_are_those_of_single_steps_and_memory_counts_all_steps() -> None:
    found = statistics(
        record(1, step_time_s=1.0, world_size=2),
        record(2, step_time_s=4.0, world_size=2),
        record(3, step_time_s=9.0, world_size=2, profiled=True, peak_memory_bytes=7 * GB),
        record(4, step_time_s=None, world_size=2, peak_memory_bytes=6 * GB),
    )
    assert found.tflops_per_gpu is not None
    assert (found.tflops_per_gpu.least, found.tflops_per_gpu.most) == (0.25, 1.0)
    assert found.peak_memory_bytes == 7 * GB
    assert (found.steps, found.profiled_steps, found.rates.steps) == (4, 1, 2)
    assert found.totals["tokens"] == 40


def test_percentiles_are_right_within_half_a_percent_in_a_few_buckets() -> None:
    times = np.random.default_rng(0).lognormal(-1.5, 0.6, 20_000)
    found = statistics(*(record(step, step_time_s=float(time_s)) for step, time_s in enumerate(times)))
    for percent in (0.1, 5, 50, 95, 99, 99.9, 100):
        true = np.percentile(times, percent, method="inverted_cdf")
        assert found.step_time_percentile(percent) == pytest.approx(true, rel=0.0051)
    assert len(found._times) < 600


def test_an_interval_ends_at_multiples_even_if_steps_are_left_out() -> None:
    interval = Interval(10)
    ended = [step for step in (1, 5, 9, 11, 12, 20, 21, 45, 46, 3) if interval.add(record(step)) is not None]
    assert ended == [11, 20, 45, 3]
    assert interval.rest() is None


def test_what_a_row_tells_of_a_step_is_the_mean_of_the_same_steps() -> None:
    interval = Interval(4)
    parts = [{"data": 0.5, "forward": 0.5}, {"data": 1.0, "forward": 2.0}]
    interval.add(record(1, step_time_s=1.0, tokens=10, hardware_flops=3e12, breakdown_s=parts[0]))
    interval.add(record(2, step_time_s=9.0, tokens=70, profiled=True, breakdown_s={"data": 9.0}))
    interval.add(record(3, step_time_s=3.0, tokens=30, hardware_flops=None, breakdown_s=parts[1]))
    row = interval.add(record(4, step_time_s=None, tokens=90))
    assert row is not None
    assert (row.step_time_s, row.breakdown_s) == (2.0, {"data": 0.75, "forward": 1.25})
    assert [row.per_step(work) for work in ("tokens", "samples", "model_flops", "hardware_flops")] == [
        20,
        2,
        2e12,
        3e12,
    ]
    assert (row.tokens_per_s, row.record.tokens) == (10.0, 90)


def test_parts_that_one_step_of_a_row_does_not_tell_are_not_known() -> None:
    interval = Interval(2)
    interval.add(record(1, step_time_s=1.0, breakdown_s={"data": 1.0}))
    row = interval.add(record(2, step_time_s=1.0, breakdown_s=None))
    assert row is not None and row.breakdown_s is None
    interval.add(record(3, step_time_s=1.0, breakdown_s={"data": 1.0}))
    row = interval.add(record(4, step_time_s=1.0, breakdown_s={"data": 0.5, "other": 0.5}))
    assert row is not None and row.breakdown_s == {"data": 0.75, "other": 0.25}


def test_the_rest_of_an_interval_comes_once() -> None:
    interval = Interval(10)
    interval.add(record(11, step_time_s=1.0))
    interval.add(record(12, step_time_s=3.0))
    row = interval.rest()
    assert row is not None
    assert (row.record.step, row.steps, row.step_time_s, row.tokens_per_s) == (12, 2, 2.0, 5.0)
    assert interval.rest() is None
