"""Verdicts on jobs given as self times: every cause, many seeds, noise as machines have it; and when there is nothing.

What the sentences say of each kind is in test_verdict_words.py, jobs with their spans in test_verdict_simulated.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from profiler_wrapper.ranks.model import SelfTimes, Verdict
from profiler_wrapper.ranks.times import account, score
from simulated_jobs import MS, QUIET, Noise, diagnose, layer_times, simulated

SEEDS = range(20)
# Without times at which half of the ranks are slow: those are causes, of some steps.
STEADY = Noise(burst=0)
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
    found = [
        diagnose(simulated(cause, seed=seed, ranks=ranks_of(seed), rank=slow[seed], noise=STEADY)) for seed in SEEDS
    ]
    right = [answer(one) == (*OF_A_RANK[cause], rank) for rank, one in zip(slow, found, strict=True)]
    assert np.mean(right) >= 0.95
    others = [one.rank for rank, one in zip(slow, found, strict=True) if one.rank not in (None, rank)]
    assert len(others) <= 1  # those that wait are not named


@pytest.mark.parametrize("cause", OF_NO_RANK)
def test_no_one_rank(cause: str) -> None:
    found = [answer(diagnose(simulated(cause, seed=seed, ranks=ranks_of(seed), noise=STEADY))) for seed in SEEDS]
    assert np.mean([one == (*OF_NO_RANK[cause], None) for one in found]) >= 0.95


@pytest.mark.parametrize(("ranks", "stages"), [(4, 4), (4, 2), (8, 4), (8, 2)])
def test_a_slow_stage(ranks: int, stages: int) -> None:
    found = [
        diagnose(simulated("stage", seed=seed, ranks=ranks, stages=stages, stage=seed % stages, noise=STEADY))
        for seed in SEEDS
    ]
    right = [one.verdict == "stage" and one.stage == seed % stages for seed, one in zip(SEEDS, found, strict=True)]
    assert np.mean(right) >= 0.95


@pytest.mark.parametrize(("ranks", "stages"), [(4, 4), (8, 4), (8, 2)])
def test_stages_that_are_alike(ranks: int, stages: int) -> None:
    alike = replace(STEADY, of_a_stage=0.002, of_a_rank=0.002, tail=0.0)
    found = [diagnose(simulated(seed=seed, ranks=ranks, stages=stages, noise=alike)).verdict for seed in SEEDS]
    assert np.mean([one == "none" for one in found]) >= 0.95


def test_a_slow_rank_of_a_stage_is_no_slow_stage() -> None:
    found = [
        answer(diagnose(simulated("forward", seed=seed, ranks=8, stages=2, rank=seed % 8, noise=STEADY)))
        for seed in SEEDS
    ]
    assert np.mean([one == ("rank", "forward", seed % 8) for seed, one in zip(SEEDS, found, strict=True)]) >= 0.95


def test_ranks_that_are_as_slow_are_named_together() -> None:
    """Each alone gains nothing, as the other holds the job."""
    verdict = diagnose(simulated("two ranks", seed=1, rank=3, noise=QUIET))
    assert (verdict.verdict, verdict.cause, verdict.rank) == ("rank", "forward", 3)
    assert verdict.named_ranks == (3, 4) and verdict.lost_ns == pytest.approx(60e6, abs=1e6)
    alone = [one.lost_ns for one in verdict.suspects if one.named_ranks in ((3,), (4,))]
    assert alone and max(alone) < 1e6


@pytest.mark.parametrize("cause", ["backward", "compute"])
def test_one_step_that_takes_far_longer_hides_none_of_the_others(cause: str) -> None:
    own = simulated(cause, seed=0, rank=5, noise=QUIET)
    times = own.self_ns.copy()
    times[7, 5, own.kinds.index("backward")] += 140e6
    verdict = diagnose(replace(own, self_ns=times))
    assert answer(verdict) == ("rank", cause, 5)
    assert verdict.lost_ns == pytest.approx(60e6, rel=0.06), "the step that stands out is no matter of the others"
    assert (verdict.first_step, verdict.last_step) == (0, 19)


def test_a_rank_that_is_slow_by_turns_is_named_for_its_steps_alone() -> None:
    """Another rank in each step: whoever is named is so for steps in which it was slow, and costs what they cost."""
    for seed in range(8):
        own = simulated("anyone's forward", seed=seed, noise=QUIET)
        forward = own.of("forward") / MS
        verdict = diagnose(own)
        if verdict.rank is not None:
            mine = np.flatnonzero(forward[:, verdict.rank] > 50)
            (cause,) = verdict.causes[:1]
            assert cause.steps == len(mine) and (cause.first_step, cause.last_step) == (mine[0], mine[-1])
            assert verdict.lost_ns == pytest.approx(60e6 * len(mine) / 20, abs=1e6)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 5), (8, 8)])
def test_a_few_steps_tell_of_themselves_alone(ranks: int, steps: int) -> None:
    """Ranks that are slow for a while, each as often as any: whoever is named was slow in these steps, by that much."""
    for seed in range(20):
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
        verdict = diagnose(replace(job, self_ns=own, waiting_ns=wall - total, wall_ns=wall))
        assert verdict.confidence != "high"
        if verdict.named_ranks and verdict.lost_ns is not None:
            named = list(verdict.named_ranks)
            others = np.delete(total, named, axis=1).max(axis=1)
            assert 0 < verdict.lost_ns <= (total.max(axis=1) - others).mean() * 1.1
            assert total[:, named].mean() > total.mean()


def test_large_jobs_have_no_straggler_by_chance() -> None:
    found = [diagnose(simulated(seed=seed, ranks=256, noise=STEADY)).verdict for seed in range(6)]
    assert found == ["none"] * 6


def test_a_layer_of_all_ranks_beside_its_equals() -> None:
    own = simulated("all", seed=5, noise=QUIET)
    verdict = diagnose(own, layer_times(own, slow=2))
    assert (verdict.verdict, verdict.cause, verdict.layer) == ("stage", "slow layer", "model.layers.2")
    assert verdict.named_ranks == () and verdict.lost_ns == pytest.approx(60e6, rel=0.03)
    assert diagnose(own, layer_times(own)).verdict == "none"


def test_a_layer_of_a_slow_stage() -> None:
    own = simulated("stage", seed=5, stages=2, stage=1)
    verdict = diagnose(own, layer_times(own, slow=7, ranks=(4, 5, 6, 7)))
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


def test_few_steps_lower_the_confidence() -> None:
    verdict = diagnose(simulated("forward", seed=0, steps=4, rank=3, noise=QUIET))
    assert answer(verdict) == ("rank", "forward", 3)
    assert verdict.confidence == "low"
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
