"""Scores of ranks: beside the quickest of their stage, and beside their own best."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.ranks.times import score
from span_tables import times_of_ranks


def steady(levels: list[float], steps: int = 12) -> np.ndarray:
    return np.tile(np.array(levels, dtype=float), (steps, 1))[:, :, None]


def test_half_as_quick_is_a_half_and_flagged() -> None:
    found = score(times_of_ranks(steady([100, 200, 125])), window=3)
    assert found.relative.tolist() == [[1.0, 0.5, 0.8]] * 4
    assert found.individual.tolist() == [[1.0, 1.0, 1.0]] * 4
    assert found.flagged_relative.tolist() == [False, True, False]
    assert found.first_steps.tolist() == [0, 3, 6, 9]


def test_ranks_of_other_stages_are_not_beside_them() -> None:
    found = score(times_of_ranks(steady([100, 300]), stages=[0, 1]), window=3)
    assert found.relative.tolist() == [[1.0, 1.0]] * 4


def test_a_rank_that_grows_slower_is_beside_its_best() -> None:
    own = steady([100, 100])
    own[6:, 1] = 200
    found = score(times_of_ranks(own), window=2)
    assert found.individual[:, 1].tolist() == [1, 1, 1, 0.5, 0.5, 0.5]
    assert found.flagged_individual.tolist() == [False, True]


def test_two_windows_are_not_flagged() -> None:
    own = steady([100, 100])
    own[4:8, 1] = 200
    assert not score(times_of_ranks(own), window=2).flagged_relative.any()


def test_one_long_step_of_a_window_is_nothing() -> None:
    own = steady([100, 100])
    own[1::3, 1] = 5000
    found = score(times_of_ranks(own), window=3)
    assert found.relative[:, 1].tolist() == [1.0] * 4


def test_what_is_not_known_has_no_score() -> None:
    own = steady([100, 200])
    own[:, 0] = np.nan
    found = score(times_of_ranks(own), window=3)
    assert np.isnan(found.relative[:, 0]).all()
    assert found.relative[:, 1].tolist() == [1.0] * 4
    assert not found.flagged_relative.any()


def test_windows_follow_the_steps() -> None:
    assert score(times_of_ranks(steady([1, 1], steps=1))).window == 1
    assert score(times_of_ranks(steady([1, 1], steps=20))).window == 3
    long = score(times_of_ranks(steady([1, 1], steps=5000)))
    assert long.window == 50 and len(long.first_steps) == 100
    assert score(times_of_ranks(np.zeros((0, 2, 1)))).relative.shape == (0, 2)
