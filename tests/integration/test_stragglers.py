"""Planted delays on real gloo processes are the verdict, and none is where none is planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import span_sums
from processes import run_in_processes
from profiler_wrapper.ranks.load import open_ranks
from profiler_wrapper.ranks.stragglers import diagnose
from profiler_wrapper.ranks.times import account, layer_times, match_collectives, prepare, self_times
from straggler_jobs import Plan, record_rows, record_timers, record_traces, said, verdict_of

RANKS = 4
ATTEMPTS = 3  # a busy machine makes stragglers of its own; benchmarks/injected_delays.py counts how often
PLANS = [
    Plan("none"),
    Plan("forward", rank=2),
    Plan("data", rank=1),
    Plan("layer", rank=3, block=2),
    Plan("late collective", rank=1),
    Plan("imbalance"),
    Plan("gc"),
    Plan("stage", stage=1, stages=2),
]
JOBS = [replace(plan, steps=10, delay_s=0.12) for plan in PLANS]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory):
    """Each job's directory, recorded by Timer, and its verdict; those that are wrong are run again."""
    found = {}
    for attempt in range(ATTEMPTS):
        folder = tmp_path_factory.mktemp(f"attempt{attempt}")
        left = [job for job in JOBS if job not in found or not said(job, found[job][1], RANKS)]
        if left:
            run_in_processes(record_timers, left, str(folder), world_size=RANKS)
        for at, job in enumerate(left):
            found[job] = folder / f"job{at}", verdict_of(folder / f"job{at}")
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.cause)
def test_timers_tell_what_was_planted(jobs, job: Plan) -> None:
    verdict = jobs[job][1]
    assert said(job, verdict, RANKS), (verdict.sentence, verdict.evidence)


def test_those_who_wait_are_told_as_waiting(jobs) -> None:
    """The planted delay is on one rank; the others have it as waiting, and each step is whole."""
    with open_ranks(jobs[JOBS[1]][0]) as (loaded, _):
        own = self_times(loaded.database)
    slow = own.ranks == 2
    forward = np.median(own.of("forward"), axis=0)
    assert forward[slow] - forward[~slow].max() > 60e6
    waiting = np.median(own.waiting_ns, axis=0)
    assert waiting[~slow].min() - waiting[slow] > 40e6
    assert np.allclose(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns, atol=1e3)
    held = account(own)
    assert np.abs(held.held_ns.sum(axis=2)[:, 0] - own.wall_ns.max(axis=1)).max() <= 1e3
    assert (held.holder[1:, 0, held.kinds.index("forward")] == 2).all()


def test_the_engine_adds_up_as_plain_python_does() -> None:
    """The same rows, through the database and without it."""
    plans = [Plan("forward", rank=1, steps=4), Plan("none", stages=2, steps=4)]
    found = run_in_processes(record_rows, plans, world_size=RANKS)
    for at, plan in enumerate(plans):
        rows = [row for of_rank in found for row in of_rank[at]]
        with span_sums.database_of(rows, stages=plan.stages) as database:
            prepare(database)
            own, arrived, layers = self_times(database), match_collectives(database), layer_times(database)
        by_hand = span_sums.self_times(rows, stages=plan.stages)
        assert own.ranks.tolist() == by_hand.ranks.tolist() and own.stages.tolist() == by_hand.stages.tolist()
        assert np.allclose(own.self_ns, by_hand.self_ns, atol=1) and np.allclose(
            own.waiting_ns, by_hand.waiting_ns, atol=1
        )
        also = diagnose(by_hand, span_sums.arrivals(rows), span_sums.layer_times(rows, stages=plan.stages))
        verdict = diagnose(own, arrived, layers)
        assert (verdict.verdict, verdict.rank, verdict.cause) == (also.verdict, also.rank, also.cause)


# By `ProfilerWrapper` alone, which tells a collection of garbage and finds the others in what torch records.
TRACED = [
    Plan("none"),
    Plan("late collective", rank=1),
    Plan("data", rank=2),
    Plan("gc"),
    Plan("stage", stage=1, stages=2),
    # DDP's all-reduce runs within backward, on a thread of gloo's.
    *(Plan(cause, rank=1, block=1, ddp=True) for cause in ("forward", "backward", "layer", "late collective")),
    *(Plan(cause, ddp=True) for cause in ("imbalance", "none")),
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory):
    """Each job's verdict from its traces; jobs whose verdict is wrong are run again."""
    found = {}
    left = [replace(plan, steps=10, delay_s=0.12) for plan in TRACED]
    for attempt in range(ATTEMPTS):
        folder = tmp_path_factory.mktemp(f"traces{attempt}")
        run_in_processes(record_traces, left, str(folder), world_size=RANKS)
        for at, job in enumerate(left):
            found[job.cause, job.ddp] = job, verdict_of(folder / f"job{at}")
        left = [job for job, verdict in found.values() if not said(job, verdict, RANKS)]
        if not left:
            break
    return found


@pytest.mark.parametrize("plan", TRACED, ids=lambda plan: plan.cause + (", DDP" if plan.ddp else ""))
def test_traces_tell_what_was_planted(traced, plan: Plan) -> None:
    job, verdict = traced[plan.cause, plan.ddp]
    assert said(job, verdict, RANKS), (verdict.sentence, verdict.evidence)


@pytest.mark.parametrize("ranks", [2, 4])
def test_three_timed_steps_of_ddp_name_the_rank_and_its_layer(tmp_path, ranks: int) -> None:
    """What `ProfilerWrapper` records if nobody asks for more. The others see the transfers that the slow rank hides."""
    job = Plan("layer", rank=1, block=1, ddp=True, steps=8, delay_s=0.05)
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        run_in_processes(record_traces, [job], str(folder), False, "auto", world_size=ranks)
        verdict = verdict_of(folder / "job0")
        if said(job, verdict, ranks):
            return
    pytest.fail(f"{verdict.sentence} {verdict.evidence}")
