"""Transfers are as long for all ranks that do the same; what a rank sees beyond that it waits."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.ranks.model import SELF_KINDS, SelfTimes
from profiler_wrapper.ranks.stragglers import diagnose
from profiler_wrapper.ranks.times import subtract_transfer_waiting

MS = 1e6


def job(transfers: list[list[float]], *, forward: list[float], stages: list[int] | None = None) -> SelfTimes:
    """Milliseconds of transfers (S, R), and of a forward (R,) that is the same in all steps."""
    seen = np.array(transfers, dtype=float) * MS
    own = np.zeros((*seen.shape, len(SELF_KINDS)))
    own[:, :, SELF_KINDS.index("communication")] = seen
    own[:, :, SELF_KINDS.index("forward")] = np.array(forward) * MS
    ranks = seen.shape[1]
    return SelfTimes(
        ranks=np.arange(ranks),
        stages=np.array(stages or [0] * ranks),
        steps=np.arange(len(seen)),
        self_ns=own,
        waiting_ns=np.zeros(seen.shape),
        wall_ns=own.sum(axis=2),
    )


def test_what_others_see_beyond_the_least_is_waiting() -> None:
    found = subtract_transfer_waiting(job([[90, 60, 95], [40, 60, 50]], forward=[3, 50, 3]))
    assert (found.of("communication") / MS).tolist() == [[60, 60, 60], [40, 40, 40]]
    assert (found.waiting_ns / MS).tolist() == [[30, 0, 35], [0, 20, 10]]
    assert np.array_equal(found.self_ns.sum(axis=2) + found.waiting_ns, found.wall_ns)


def test_stages_have_their_own_and_a_missing_step_stays_missing() -> None:
    found = subtract_transfer_waiting(job([[9, 5, np.nan, 20]], forward=[1, 1, 1, 1], stages=[0, 0, 1, 1]))
    assert np.array_equal(found.of("communication") / MS, [[5, 5, np.nan, 20]], equal_nan=True)


def test_a_slow_rank_hides_transfers_behind_its_work_and_is_named_all_the_same() -> None:
    """It computes for 50 ms more; meanwhile 40 to 50 ms of transfers run, that the others see with nothing beside."""
    steps = [[112, 58, 97, 99], [97, 58, 112, 96], [99, 59, 97, 112]]
    own = job(steps, forward=[3, 53, 3, 4])
    verdict = diagnose(subtract_transfer_waiting(own))
    assert (verdict.verdict, verdict.cause, verdict.rank) == ("rank", "forward", 1)
