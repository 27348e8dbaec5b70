"""What counts as a difference: against tables of the distributions, and against noise whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.comparison import times
from profiler_wrapper.comparison.times import (
    UnitChange,
    UnitKey,
    common_factors,
    layer_shifts,
    other_load,
    row_shifts,
    series_change,
    step_spread,
    weighted_median,
)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_spread_of_a_step_is_its_standard_deviation(steps: int) -> None:
    times = np.random.default_rng(0).normal(0, 0.05, (4000, steps))
    assert step_spread(times, times + 1).mean() == pytest.approx(0.05, rel=0.2)  # of four: 15 % more
    assert np.isnan(step_spread(times[:, :1], times[:, :1])).all()


@pytest.mark.parametrize(("steps", "enough", "too_little"), [(5, 3.5, 2.5), (50, 14, 11)])
def test_the_rank_test_asks_for_nine_of_ten_pairs_of_few_steps_and_for_less_of_many(
    steps: int, enough: float, too_little: float
) -> None:
    side = np.arange(float(steps))
    shifts = row_shifts(np.array([side, side]), np.array([side + enough, side + too_little]))
    assert shifts.one_way.tolist() == [True, False]
    assert row_shifts(side[None, :1], side[None, :1]).one_way.tolist() == [True]  # one step has no ranks


def test_a_weighted_median_by_hand() -> None:
    assert weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0])) == 2.0
    assert weighted_median(np.array([3.0, 1.0]), np.array([9.0, 1.0])) == 3.0
    assert weighted_median(np.array([]), np.array([])) == 0.0


def test_what_all_layers_have_in_common_is_one_number_a_step() -> None:
    times = np.array([[10.0, 20, 10], [100, 200, 100], [7, 14, 7]])
    assert np.exp(common_factors(np.log(times), np.ones(3))) == pytest.approx([1, 2, 1])


def _times(random: np.random.Generator, base: np.ndarray, steps: int) -> np.ndarray:
    common, own = random.normal(0, 0.05, steps), random.normal(0, 0.03, (len(base), steps))
    return np.asarray(base[:, None] * np.exp(common + own))


@pytest.mark.parametrize("steps", [3, 5, 10])
def test_noise_alone_is_no_difference_among_hundreds_of_layers(steps: int) -> None:
    random = np.random.default_rng(steps)
    alarms = 0
    for _ in range(60):
        base = np.exp(random.normal(0, 1, 300))
        one, other = _times(random, base, steps), _times(random, base, steps)
        alarms += bool(layer_shifts(one, other, np.sqrt(base)).beyond_noise().any())
    assert alarms <= 1


def test_a_change_is_found_however_the_clock_went() -> None:
    random = np.random.default_rng(1)
    base = np.exp(random.normal(0, 1, 100))
    one, other = _times(random, base, 5), _times(random, base, 5) * np.array([1.0, 1.5, 1.0, 0.8, 1.0])
    other[17] *= 1.25
    shifts = layer_shifts(one, other, np.sqrt(base))
    assert np.flatnonzero(shifts.beyond_noise()).tolist() == [17]
    assert math.expm1(shifts.excess[17]) == pytest.approx(0.25, abs=0.08)


def test_runs_that_differ_by_more_than_their_steps_show_widen_every_error() -> None:
    random = np.random.default_rng(2)
    base = np.exp(random.normal(0, 1, 200))
    between = np.exp(random.normal(0, 0.2, 200))  # caches, addresses: the same in every step of a run
    one, other = _times(random, base, 5), _times(random, base * between, 5)
    shifts = layer_shifts(one, other, np.sqrt(base))
    assert not shifts.beyond_noise().any()
    assert np.median(shifts.error) > 3 * 0.03 * math.sqrt(2 / 5)


@pytest.mark.parametrize(("factor", "least"), [(1.0, 0.0), (1.24, 0.0), (1.26, math.log(1.26)), (0.7, -math.log(0.7))])
def test_on_a_cpu_whose_layers_all_changed_by_a_quarter_one_has_to_change_by_more(factor: float, least: float) -> None:
    assert other_load(math.log(factor)) == pytest.approx(least)
    steps = np.array([[10.0, 10.1, 9.9]] * 5)
    after = steps * factor * np.array([1.0, 1.0, 1.2, 1.5, 1.0])[:, None]
    assert np.flatnonzero(layer_shifts(steps, after, np.ones(5)).beyond_noise()).tolist() == [2, 3]
    whole = 10 * steps.sum(axis=0), 10 * steps.sum(axis=0) * factor
    on_cpu = layer_shifts(steps, after, np.ones(5), cpu_steps=whole).beyond_noise()
    assert np.flatnonzero(on_cpu).tolist() == ([3] if least else [2, 3])
    slower_steps = whole[0], whole[1] * 1.5  # in which the share of layer 3 is what it was
    assert not layer_shifts(steps, after, np.ones(5), cpu_steps=slower_steps).beyond_noise()[3]


def test_layers_that_do_other_work_are_judged_by_their_own_steps_alone() -> None:
    random = np.random.default_rng(4)
    base = np.exp(random.normal(0, 1, 200))
    between = np.exp(random.normal(0, 0.2, 200))
    between[9] = 1.3
    one, other = _times(random, base, 5), _times(random, base * between, 5)
    other_work = np.arange(200) == 9
    shifts = layer_shifts(one, other, np.sqrt(base), other_work=other_work)
    assert np.flatnonzero(shifts.beyond_noise()).tolist() == [9]


def test_one_step_a_side_takes_a_large_change() -> None:
    random = np.random.default_rng(3)
    base = np.exp(random.normal(0, 1, 60))
    one, other = _times(random, base, 1), _times(random, base, 1)
    other[5] *= 1.2
    assert not layer_shifts(one, other, np.sqrt(base)).beyond_noise().any()
    other[5] *= 2
    shifts = layer_shifts(one, other, np.sqrt(base))
    assert (shifts.known, np.flatnonzero(shifts.beyond_noise()).tolist()) == (False, [5])


def test_a_series_by_itself() -> None:
    alike = series_change(np.array([10.0, 10.2, 9.9, 10.1]), np.array([10.1, 10.0, 10.2, 9.9]))
    slower = series_change(np.array([10.0, 10.2, 9.9, 10.1]), np.array([11.9, 12.0, 12.2, 12.1]))
    unknown = series_change(np.array([10.0]), np.array([12.0]))
    assert (alike.beyond_noise, slower.beyond_noise, unknown.beyond_noise) == (False, True, False)
    assert math.expm1(slower.shift) == pytest.approx(0.2, abs=0.02)
    assert math.isnan(unknown.mean_error)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0.01, 100.0))
def test_the_other_way_round_is_the_opposite(units: int, a: int, b: int, seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    base = np.exp(random.normal(0, 2, units))
    one, other, weight = _times(random, base, a), scale * _times(random, base, b), np.sqrt(base)
    there, back = layer_shifts(one, other, weight), layer_shifts(other, one, weight)
    assert there.shift == pytest.approx(-back.shift)
    assert np.isfinite(there.error).all() and (there.error >= 0).all()


def test_siblings_of_which_only_the_whole_is_known_did_not_change_as_one() -> None:
    """Where no block by itself could be judged, nothing says that they changed alike."""
    fold = ("layers.0", "layers.1", "layers.2")
    tree = times._Tree((), {UnitKey(fold, None): UnitChange(0.5, 0.01, 3e6, True, 3e6, True, 9e6)})
    assert not tree._one_change(fold)
    alike = {UnitKey((layer,), None): UnitChange(0.5, 0.01, 1e6, True, 1e6, True, 3e6) for layer in fold}
    assert times._Tree((), tree._changes | alike)._one_change(fold)
