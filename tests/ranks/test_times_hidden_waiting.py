"""Waiting that no span tells of: what a rank did itself is found again in phases at whose meetings it waited."""

from __future__ import annotations

import numpy as np
import pytest

from profiler_wrapper.ranks.model import SELF_KINDS, Float, SelfTimes
from profiler_wrapper.ranks.times import steady_times, subtract_estimated_waiting
from simulated_jobs import diagnose

STEPS, RANKS = 12, 4
MS = 1e6
MEETINGS = {"some": [True, True, False, True], "all": [True] * 4, "none": [False] * 4}
CAUSES = [("data", "data loading"), ("forward", "forward"), ("other", None)]


def truth(**extra: tuple[int, float]) -> dict[str, Float]:
    """Milliseconds (S, R) that ranks work, phase by phase, with a little chance; `extra`: phase -> rank, what more."""
    chance = np.random.default_rng(7)
    own = {
        kind: typical + chance.uniform(0, 0.5, (STEPS, RANKS))
        for kind, typical in (("other", 1.0), ("data", 2.0), ("forward", 30.0), ("backward", 50.0), ("optimizer", 4.0))
    }
    for kind, (rank, more) in extra.items():
        own[kind][:, rank] += more
    return own


def measured(own: dict[str, Float], *, meets_early: list[bool], known: bool = False) -> SelfTimes:
    """What timers see of it: `other` and data, then a forward at whose begin some ranks wait for all, as they do in
    DDP's broadcast of buffers, and a backward at whose end all wait for all. `known`: that second wait is measured."""
    seen = {kind: times.copy() for kind, times in own.items()}
    begin = own["other"] + own["data"]
    start = np.where(meets_early, begin.max(axis=1, keepdims=True), begin)
    seen["forward"] += start - begin
    end = start + own["forward"] + own["backward"]
    waited = end.max(axis=1, keepdims=True) - end
    if not known:
        seen["backward"] += waited
    times = np.zeros((STEPS, RANKS, len(SELF_KINDS)))
    for kind, value in seen.items():
        times[:, :, SELF_KINDS.index(kind)] = value * MS
    waiting = waited * MS if known else np.zeros((STEPS, RANKS))
    return SelfTimes(
        ranks=np.arange(RANKS),
        stages=np.zeros(RANKS, dtype=np.int64),
        steps=np.arange(STEPS),
        self_ns=times,
        waiting_ns=waiting,
        wall_ns=times.sum(axis=2) + waiting,
        waiting_known=known,
    )


@pytest.mark.parametrize("meets_early", MEETINGS.values(), ids=MEETINGS)
@pytest.mark.parametrize(("kind", "cause"), CAUSES, ids=["data", "forward", "other"])
def test_own_times_are_found_again(kind: str, cause: str | None, meets_early: list[bool]) -> None:
    own = truth(**{kind: (1, 120.0)})
    job = measured(own, meets_early=meets_early)
    found = subtract_estimated_waiting(job)
    assert np.allclose(found.self_ns.sum(axis=2) + found.waiting_ns, job.wall_ns, rtol=1e-12), "no time comes or goes"
    for phase, times in own.items():
        # What chance makes of a phase may be taken for waiting, for at most as long as it lasts.
        assert np.abs(found.of(phase) / MS - times).max() < 2.5, phase
    verdict = diagnose(found)
    assert verdict.rank == 1, verdict.sentence
    assert cause is None or verdict.cause == cause, verdict.sentence


def test_where_waiting_was_measured_none_is_estimated() -> None:
    job = measured(truth(forward=(1, 120.0)), meets_early=[True] * 4, known=True)
    found = steady_times(job)
    assert np.array_equal(found.self_ns, job.self_ns) and np.array_equal(found.waiting_ns, job.waiting_ns)


def test_work_that_makes_up_for_less_work_before_it_is_no_waiting() -> None:
    """Each rank has its own share of forward and backward, but none is level with the last: nobody waited."""
    own = truth()
    own["forward"] += np.array([0.0, 40.0, 0.0, 0.0])
    own["backward"] += np.array([15.0, 0.0, 15.0, 15.0])
    job = measured(own, meets_early=[False] * 4, known=True)
    found = subtract_estimated_waiting(job)
    assert np.abs(found.of("backward") / MS - own["backward"]).max() < 1.0


@pytest.mark.parametrize("ahead_of", [("backward", "optimizer"), ("optimizer",)], ids=["backward", "optimizer"])
def test_a_wait_behind_a_phase_that_no_span_covers(ahead_of: tuple[str, ...]) -> None:
    """Ranks meet at a barrier, or where the loss is read, between two phases."""
    own = truth(forward=(2, 9.0))
    before = sum(times for phase, times in own.items() if phase not in ahead_of)
    seen = own | {"other": own["other"] + before.max(axis=1, keepdims=True) - before}
    job = measured(seen, meets_early=[False] * 4)
    verdict = diagnose(steady_times(job))
    assert (verdict.rank, verdict.cause) == (2, "forward"), verdict.sentence
