"""Lost time, against the same by brute force, and what must hold of any job."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from profiler_wrapper.analysis.statistics import mad, median
from profiler_wrapper.ranks.lost_time import Cost, ideal_steps, recurs
from profiler_wrapper.ranks.times import largest
from span_tables import times_of_ranks

LENGTHS = st.floats(0, 1e9, allow_nan=False)


def ideal_by_hand(own: np.ndarray, stages: list[int], step: int, rank: int) -> float:
    """Of one rank in one step: the typical length of each kind among its stage's ranks."""
    peers = [other for other in range(own.shape[1]) if stages[other] == stages[rank]]
    total = 0.0
    for kind in range(own.shape[2]):
        of_peers = own[step, peers, kind].tolist()
        total += min(of_peers) if len(peers) == 2 else statistics.median(of_peers)
    return total


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_frame_is_as_by_hand(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3, 4, 6]))
    own = data.draw(arrays(np.float64, (3, ranks, 3), elements=LENGTHS))
    stages = [0] * ranks if ranks < 4 else data.draw(st.sampled_from([[0] * ranks, [0, 0] + [1] * (ranks - 2)]))
    found = ideal_steps(times_of_ranks(own, stages=stages))
    gains = found.gain_of_each_rank()
    for step in range(3):
        totals = [float(own[step, rank].sum()) for rank in range(ranks)]
        ideals = [ideal_by_hand(own, stages, step, rank) for rank in range(ranks)]
        assert np.isclose(found.step_ns[step], max(totals))
        of_stages = [ideals[stages.index(stage)] for stage in sorted(set(stages))]
        assert np.isclose(found.ideal_ns[step], min(max(totals), statistics.fmean(of_stages)))
        for rank in range(ranks):
            without = [min(total, ideals[rank]) if other == rank else total for other, total in enumerate(totals)]
            assert np.isclose(gains[step, rank], max(totals) - max(without), atol=1e-3)
            assert np.isclose(found.gain_of_ranks(np.array([rank]))[step], gains[step, rank], atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (4, 5, 3), elements=LENGTHS))
def test_nobody_gains_more_than_is_lost(own: np.ndarray) -> None:
    found = ideal_steps(times_of_ranks(own))
    room = found.lost_ns + 1e-3
    assert (found.lost_ns >= 0).all()
    assert (found.gain_of_each_rank() <= room[:, None]).all()
    assert (found.gain_of_ranks(np.arange(5)) <= room).all()
    for kind in ("data", "forward"):
        gain = found.gain_of_kind(kind)
        assert (gain >= 0).all()


def test_equal_ranks_lose_nothing() -> None:
    found = ideal_steps(times_of_ranks(np.full((3, 4, 2), 7.0)))
    assert found.lost_ns.tolist() == [0, 0, 0]


def test_one_slow_rank_is_all_of_the_loss() -> None:
    own = np.full((3, 4, 2), 10.0)
    own[:, 2, 1] = 50
    found = ideal_steps(times_of_ranks(own))
    assert found.lost_ns.tolist() == [40, 40, 40]
    assert found.gain_of_each_rank()[:, 2].tolist() == [40, 40, 40]
    assert found.gain_of_kind("forward").tolist() == [40, 40, 40]
    assert found.gain_of_kind("data").tolist() == [0, 0, 0]


def test_two_slow_ranks_gain_only_together() -> None:
    own = np.full((3, 6, 1), 10.0)
    own[:, [1, 4], 0] = 50
    found = ideal_steps(times_of_ranks(own))
    assert not found.gain_of_each_rank().any()
    assert found.gain_of_ranks(np.array([1, 4])).tolist() == [40, 40, 40]


def test_a_slow_stage_is_beside_the_mean_of_all() -> None:
    own = np.full((3, 6, 1), 10.0)
    own[:, 2:4] = 40
    found = ideal_steps(times_of_ranks(own, stages=[0, 0, 1, 1, 2, 2]))
    assert found.ideal_ns.tolist() == [20, 20, 20]
    assert found.gain_of_stage(1).tolist() == [20, 20, 20]
    assert not found.gain_of_stage(0).any()
    assert not found.gain_of_each_rank().any()


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


@pytest.mark.parametrize(
    ("hit", "typical_gain", "is_so"),
    [
        ("1000" * 6, 0.01, True),
        ("10000" * 6, 0.5, False),  # a fifth of the steps
        ("10" * 8 + "0" * 8, 0.5, False),  # not in the last third
        ("1" * 12 + "0" * 4, 0.5, False),  # once, for long
        ("0" + "1" * 23, 0.01, True),  # nearly always
        ("1111", 0.2, True),
        ("1111", 0.19, False),
        ("1110", 0.5, False),
    ],
)
def test_a_cost_recurs_by_the_steps_that_it_hits(hit: str, typical_gain: float, is_so: bool) -> None:
    steps = np.array([step == "1" for step in hit])
    cost = Cost(gain_ns=steps.astype(float), share=0.5, typical_share=0.5, typical_gain=typical_gain, hit=steps)
    assert recurs(cost) is is_so
