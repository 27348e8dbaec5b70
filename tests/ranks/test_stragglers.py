"""Verdicts on simulated jobs: every cause, many seeds, noise as machines have it; and when there is nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from profiler_wrapper.ranks.model import Arrivals, Replay, SelfTimes, Verdict
from profiler_wrapper.ranks.stragglers import diagnose
from profiler_wrapper.ranks.times import account, score
from simulated_jobs import QUIET, Noise, layer_times, simulated

SEEDS = range(30)
OF_A_RANK = {
    "forward": ("rank", "forward"),
    "backward": ("rank", "backward"),
    "compute": ("rank", "compute"),
    "optimizer": ("rank", "optimizer"),
    "other": ("rank", "other"),
    "data": ("data", "data loading"),
}
OF_NO_RANK = {
    "imbalance": ("imbalance", "data imbalance"),
    "one long input": ("imbalance", "data imbalance"),
    "anyone's forward": ("imbalance", "forward"),
    "anyone's data": ("data", "data loading"),
    "gc": ("gc", "garbage collection"),
    "none": ("none", "none"),
}


def answer(verdict: Verdict) -> tuple[str, str, int | None]:
    return verdict.verdict, verdict.cause, verdict.rank


def ranks_of(seed: int) -> int:
    return 4 if seed % 2 else 8


@pytest.mark.parametrize("cause", OF_A_RANK)
def test_a_slow_rank_and_its_cause(cause: str) -> None:
    slow = [seed // 2 % ranks_of(seed) for seed in SEEDS]
    found = [diagnose(simulated(cause, seed=seed, ranks=ranks_of(seed), rank=slow[seed])) for seed in SEEDS]
    right = [answer(one) == (*OF_A_RANK[cause], rank) for rank, one in zip(slow, found, strict=True)]
    assert np.mean(right) >= 0.95
    others = [one.rank for rank, one in zip(slow, found, strict=True) if one.rank not in (None, rank)]
    assert len(others) <= 1  # those that wait are not named


@pytest.mark.parametrize("cause", OF_NO_RANK)
def test_no_one_rank(cause: str) -> None:
    found = [answer(diagnose(simulated(cause, seed=seed, ranks=ranks_of(seed)))) for seed in SEEDS]
    assert np.mean([one == (*OF_NO_RANK[cause], None) for one in found]) >= 0.95


@pytest.mark.parametrize(("ranks", "stages"), [(4, 4), (4, 2), (8, 4), (8, 2)])
def test_a_slow_stage(ranks: int, stages: int) -> None:
    found = [diagnose(simulated("stage", seed=seed, ranks=ranks, stages=stages, stage=seed % stages)) for seed in SEEDS]
    right = [one.verdict == "stage" and one.stage == seed % stages for seed, one in zip(SEEDS, found, strict=True)]
    assert np.mean(right) >= 0.95


@pytest.mark.parametrize(("ranks", "stages"), [(4, 4), (8, 4), (8, 2)])
def test_stages_that_are_alike(ranks: int, stages: int) -> None:
    found = [diagnose(simulated(seed=seed, ranks=ranks, stages=stages)).verdict for seed in SEEDS]
    assert np.mean([one == "none" for one in found]) >= 0.95


def test_a_slow_rank_of_a_stage_is_no_slow_stage() -> None:
    found = [answer(diagnose(simulated("forward", seed=seed, ranks=8, stages=2, rank=seed % 8))) for seed in SEEDS]
    assert np.mean([one == ("rank", "forward", seed % 8) for seed, one in zip(SEEDS, found, strict=True)]) >= 0.95


@pytest.mark.parametrize(("cause", "where", "share"), [("stage", {"stage": 1}, 0.7), ("forward", {"rank": 3}, 0.6)])
def test_a_job_with_stages_has_the_shares_of_its_replay(cause: str, where: dict[str, int], share: float) -> None:
    own = simulated(cause, seed=1, ranks=8, stages=2, **where)
    shares = np.full(8, 0.1)
    shares[3] = 0.6
    replay = Replay(
        recorded_ns=1.4e9,
        total_ns=1.3e9,
        ideal_ns=1e9,
        slowdown=1.3,
        ms=0.7,
        mw=0.6,
        slowest_ranks=(3,),
        ranks=np.arange(8),
        stages=np.arange(2),
        share_of_rank=shares,
        share_of_stage=np.array([0.05, 0.7]),
        slowdown_of_stage=np.array([1.0, 1.2]),
        steps=10,
    )
    verdict = diagnose(own, replay=replay)
    assert (verdict.verdict, verdict.share) == ("stage" if cause == "stage" else "rank", share)
    assert verdict.lost_ns == pytest.approx(share * 0.3e9 / 10)
    assert (verdict.step_ns, verdict.ideal_ns) == (1.3e8, 1e8)


def test_two_slow_ranks_are_found_together() -> None:
    verdict = diagnose(simulated("two ranks", seed=1, rank=3))
    assert verdict.rank in (3, 4) and verdict.cause == "forward"
    assert any("as slow" in line and str(7 - verdict.rank) in line for line in verdict.evidence)


@pytest.mark.parametrize(("ranks", "steps", "most"), [(2, 5, 12), (8, 8, 20)])
def test_equal_ranks_of_few_steps_are_seldom_named(ranks: int, steps: int, most: int) -> None:
    """Of 200 jobs whose ranks are slow for a while, each as often as any: what disturbs a step disturbs the next."""
    named = 0
    for seed in range(200):
        job, random = simulated(seed=seed, ranks=ranks, steps=steps, noise=QUIET), np.random.default_rng(seed)
        level, slower = np.zeros(ranks), np.zeros((steps, ranks))
        for step in slower:
            level = 0.95 * level + random.normal(0, 1, ranks)
            step[:] = np.abs(level)
        own = job.self_ns.copy()
        computes = [job.kinds.index("forward"), job.kinds.index("backward")]
        own[:, :, computes] *= (1 + 0.12 * slower / slower.mean())[:, :, None]
        total = own.sum(axis=2)
        wall = np.broadcast_to(total.max(axis=1, keepdims=True), total.shape)
        named += diagnose(replace(job, self_ns=own, waiting_ns=wall - total, wall_ns=wall)).rank is not None
    assert named <= most


def test_large_jobs_have_no_straggler_by_chance() -> None:
    found = [diagnose(simulated(seed=seed, ranks=256)).verdict for seed in range(15)]
    assert found.count("none") >= 14


@pytest.mark.parametrize("seed", range(5))
def test_waiting_within_backward_is_not_taken_for_slowness(seed: int) -> None:
    """Nobody recorded communication: whoever is early waits in backward, and only the late rank's is its own."""
    known = simulated("forward", seed=seed, rank=2, noise=Noise(burst=0))
    own = known.self_ns.copy()
    own[:, :, known.kinds.index("backward")] += known.waiting_ns
    mixed = replace(known, self_ns=own, waiting_ns=np.zeros_like(known.waiting_ns), waiting_known=False)
    verdict = diagnose(mixed)
    assert answer(verdict) == ("rank", "forward", 2)
    assert any("no communication was recorded" in line for line in verdict.evidence)


def late(own: SelfTimes, rank: int) -> Arrivals:
    """One collective a step, to which one rank comes late by 60 ms."""
    steps, ranks = own.waiting_ns.shape
    return Arrivals(
        step=own.steps,
        name=("all_reduce",) * steps,
        shortest_rank=np.full(steps, rank),
        shorter_by_ns=np.full(steps, 6e7),
        ranks=own.ranks,
        times_last=(own.ranks == rank) * steps,
        late_ns=np.zeros(ranks),
    )


def test_late_to_a_collective_though_no_phase_is_longer() -> None:
    own = simulated("other", seed=3, rank=5)
    assert diagnose(own, late(own, 5)).cause == "late collective"
    assert diagnose(own, late(own, 2)).cause == "other"
    assert diagnose(simulated("forward", seed=3, rank=5), late(own, 5)).cause == "forward"


def test_a_layer_of_one_rank() -> None:
    own = simulated("forward", seed=4, rank=6)
    verdict = diagnose(own, None, layer_times(own, slow=3, ranks=(6,)))
    assert (verdict.verdict, verdict.rank, verdict.cause, verdict.layer) == (
        "rank",
        6,
        "slow layer",
        "model.layers.3.mlp",
    )


def test_slow_layers_all_alike_on_a_rank_are_no_slow_layer() -> None:
    own = simulated("forward", seed=4, rank=6)
    layers = layer_times(own)
    times = layers.self_ns.copy()
    times[6] *= 4
    verdict = diagnose(own, None, replace(layers, self_ns=times))
    assert (verdict.cause, verdict.layer) == ("forward", None)


def test_a_layer_of_all_ranks_beside_its_equals() -> None:
    own = simulated(seed=5)
    verdict = diagnose(own, None, layer_times(own, slow=2))
    assert (verdict.verdict, verdict.cause, verdict.layer) == ("stage", "slow layer", "model.layers.2.mlp")
    assert diagnose(own, None, layer_times(own)).verdict == "none"


def test_a_layer_of_a_slow_stage() -> None:
    own = simulated("stage", seed=5, stages=2, stage=1)
    verdict = diagnose(own, None, layer_times(own, slow=7, ranks=(4, 5, 6, 7)))
    assert (verdict.verdict, verdict.stage) == ("stage", 1)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_have_no_verdict(steps: int) -> None:
    verdict = diagnose(simulated("forward", seed=0, steps=max(1, steps)) if steps else _no_steps())
    assert verdict.verdict == "none" and verdict.confidence == "low"
    assert "too few" in verdict.sentence


def _no_steps() -> SelfTimes:
    own = simulated(seed=0, steps=1)
    return replace(
        own,
        steps=own.steps[:0],
        self_ns=own.self_ns[:0],
        waiting_ns=own.waiting_ns[:0],
        wall_ns=own.wall_ns[:0],
    )


def test_few_steps_lower_the_confidence_and_say_so() -> None:
    verdict = diagnose(simulated("forward", seed=0, steps=4, rank=3, noise=QUIET))
    assert answer(verdict) == ("rank", "forward", 3)
    assert verdict.confidence == "low"
    assert any("only 4 steps" in line for line in verdict.evidence)
    assert diagnose(simulated("forward", seed=0, steps=20, rank=3, noise=QUIET)).confidence == "high"


def test_one_rank_alone_is_no_straggler() -> None:
    verdict = diagnose(simulated(seed=0, ranks=1))
    assert verdict.verdict == "none" and "one rank" in verdict.sentence


def test_ranks_and_steps_that_are_missing() -> None:
    own = simulated("forward", seed=0, rank=3)
    times = own.self_ns.copy()
    times[:, 0] = np.nan  # never reported
    times[10:, 1] = np.nan  # killed
    times[5] = np.nan  # nobody has it
    verdict = diagnose(replace(own, self_ns=times))
    assert answer(verdict) == ("rank", "forward", 3)
    assert any("1 steps were not judged" in line for line in verdict.evidence)


def test_the_share_is_that_of_the_frame() -> None:
    verdict = diagnose(simulated("forward", seed=0, rank=3, noise=QUIET, delay_ms=60))
    assert verdict.share is not None and verdict.share > 0.95
    assert verdict.lost_ns is not None and 59e6 < verdict.lost_ns < 61e6
    assert verdict.step_ns is not None and verdict.ideal_ns is not None
    assert 59e6 < verdict.step_ns - verdict.ideal_ns < 62e6


def test_small_differences_are_not_named() -> None:
    assert diagnose(simulated("forward", seed=0, rank=3, noise=QUIET, delay_ms=1)).verdict == "none"


def test_a_large_job() -> None:
    """How long it takes is told by benchmarks/ranks_scale.py."""
    own = simulated("forward", seed=0, ranks=4096, steps=20, rank=1234, noise=QUIET)
    verdict = diagnose(own)
    account(own)
    score(own)
    assert answer(verdict) == ("rank", "forward", 1234)
