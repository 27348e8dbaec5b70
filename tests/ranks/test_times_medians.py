"""Medians and deviations over ranks, some of which are not known."""

from __future__ import annotations

import statistics

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profiler_wrapper.ranks.times import largest
from profiler_wrapper.tables.statistics import mad, median

LENGTHS = st.floats(0, 1e9, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (5, 4), elements=LENGTHS | st.just(float("nan"))))
def test_medians_leave_out_what_is_not_known(values: np.ndarray) -> None:
    for column, found, most in zip(values.T, median(values), largest(values), strict=True):
        known = [value for value in column.tolist() if value == value]
        if known:
            assert found == statistics.median(known) and most == max(known)
        else:
            assert np.isnan(found) and np.isnan(most)


def test_deviation_is_that_of_normal_numbers() -> None:
    numbers = np.random.default_rng(0).normal(5, 3, 20_000)
    assert abs(mad(numbers) - 3) < 0.1
