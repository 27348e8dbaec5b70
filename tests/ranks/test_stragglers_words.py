"""What the verdict says of a pipeline, whose step is replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler_wrapper.ranks.model import Replay
from profiler_wrapper.ranks.stragglers import diagnose
from simulated_jobs import QUIET, simulated

STEPS, RANKS, STAGES = 20, 4, 2


def replayed(share: float) -> Replay:
    """Of 1,000 ms a step, with 800 ms ideal."""
    return Replay(
        recorded_ns=1000e6 * STEPS,
        total_ns=1000e6 * STEPS,
        ideal_ns=800e6 * STEPS,
        slowdown=1.25,
        ms=share,
        mw=0.0,
        slowest_ranks=(),
        ranks=np.arange(RANKS),
        stages=np.arange(STAGES),
        share_of_rank=np.zeros(RANKS),
        share_of_stage=np.array([0.0, share]),
        slowdown_of_stage=np.ones(STAGES),
        steps=STEPS,
    )


def test_a_share_beyond_all_is_all() -> None:
    """More is gained than was lost: the other stage is quicker than the typical one that loss is counted against."""
    own = simulated("stage", seed=1, ranks=RANKS, stages=STAGES, stage=1, noise=QUIET)
    verdict = diagnose(own, replay=replayed(1.22))
    assert verdict.share == 1.22
    assert "244.0 ms shorter" in verdict.sentence, "1.22 of the 200 ms lost"
    assert "shorter, 100% of the lost time." in verdict.sentence


def test_a_share_within_all_is_a_plain_number() -> None:
    own = simulated("stage", seed=1, ranks=RANKS, stages=STAGES, stage=1, noise=QUIET)
    sentence = diagnose(own, replay=replayed(0.4)).sentence
    assert sentence.endswith("80.0 ms shorter, 40% of the lost time.")


def test_the_step_replayed_is_told_beside_the_step_recorded() -> None:
    own = simulated("stage", seed=1, ranks=RANKS, stages=STAGES, stage=1, noise=QUIET)
    own = replace(own, wall_ns=np.full(own.wall_ns.shape, 1035e6))
    verdict = diagnose(own, replay=replayed(0.4))
    assert "a step of 1,000.0 ms" in verdict.sentence
    told = [line for line in verdict.evidence if "replayed" in line]
    assert len(told) == 1 and "1,000.0 ms" in told[0] and "1,035.0 ms" in told[0]
    assert not any("replayed" in line for line in diagnose(own).evidence)
