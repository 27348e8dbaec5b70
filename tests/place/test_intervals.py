"""Unions of intervals against sets of instants."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.place.intervals import union

INTERVALS = st.lists(
    st.tuples(st.integers(-20, 20), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


def columns(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def instants(intervals: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in intervals for instant in range(start, end)}


@settings(max_examples=100, deadline=None)
@given(INTERVALS)
def test_length_is_the_number_of_instants(intervals: list[tuple[int, int]]) -> None:
    found = union(*columns(intervals))
    assert found.length_ns == len(instants(intervals))
    assert (found.start_ns[1:] > found.end_ns[:-1]).all()


@settings(max_examples=100, deadline=None)
@given(INTERVALS, INTERVALS)
def test_overlap_is_the_number_of_common_instants(
    covering: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    overlap = union(*columns(covering)).overlap(*columns(asked))
    assert overlap.tolist() == [len(instants(covering) & instants([interval])) for interval in asked]


def test_two_streams() -> None:
    found = union(np.array([10, 0, 12, 30]), np.array([20, 5, 15, 31]))
    assert list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)) == [(0, 5), (10, 20), (30, 31)]
    assert found.length_ns == 16
    assert found.overlap(np.array([4, 21, 0]), np.array([12, 29, 31])).tolist() == [3, 0, 16]
