"""When forward and backward that move together are more work, and when not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from profiler_wrapper.ranks.model import SelfTimes
from simulated_jobs import QUIET, Noise, diagnose, simulated

STEADY = Noise(burst=0, tail=0)


@pytest.mark.parametrize("cause", ["one long input", "imbalance"])
def test_another_rank_gets_more_work_in_each_step(cause: str) -> None:
    for seed in range(6):
        verdict = diagnose(simulated(cause, seed=seed, noise=STEADY))
        assert (verdict.verdict, verdict.cause, verdict.rank) == ("imbalance", "data imbalance", None)
        assert verdict.named_ranks == ()


def test_what_uneven_work_costs() -> None:
    """One rank of eight has 60 ms more in each step."""
    verdict = diagnose(simulated("one long input", seed=0, noise=QUIET))
    assert verdict.lost_ns == pytest.approx(60e6, rel=0.03)


def test_more_work_for_always_the_same_rank_is_that_rank() -> None:
    verdict = diagnose(simulated("compute", seed=0, rank=3, noise=STEADY))
    assert (verdict.verdict, verdict.cause, verdict.named_ranks) == ("rank", "compute", (3,))


def with_speed(seed: int) -> SelfTimes:
    """Another rank in each step does all that it does half again as long, the optimizer too: it gets no more work."""
    own = simulated(seed=seed, noise=QUIET)
    times = own.self_ns.copy()
    anyone = np.random.default_rng(seed).integers(0, 8, len(times))
    times[np.arange(len(times)), anyone] *= 1.5
    total = times.sum(axis=2)
    wall = np.broadcast_to(total.max(axis=1, keepdims=True), total.shape)
    return replace(own, self_ns=times, waiting_ns=wall - total, wall_ns=wall)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_slow_in_all_it_does_got_no_more_work(seed: int) -> None:
    assert "data imbalance" not in {one.cause for one in diagnose(with_speed(seed)).causes}


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_alone_that_is_long_by_turns_may_be_either(seed: int) -> None:
    verdict = diagnose(simulated("anyone's forward", seed=seed, noise=QUIET))
    assert (verdict.verdict, verdict.cause, verdict.rank) == ("imbalance", "forward", None)
    assert "is slower, or is given more: its forward takes longer" in verdict.sentence
    assert verdict.lost_ns is not None and 48e6 < verdict.lost_ns < 62e6  # a rank that is slow once is not counted


def test_large_jobs_are_uneven_by_chance_and_nobody_is_blamed() -> None:
    assert diagnose(simulated(seed=0, ranks=256, noise=STEADY)).verdict == "none"
