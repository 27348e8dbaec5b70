"""Planted delays on gloo processes: the verdict by a clock that only they move, and where traces of them have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import span_sums
from once import Once
from processes import run_in_processes
from profiler_wrapper.ranks.account import KINDS, read_account
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.model import Arrivals
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.times import account, layer_times, match_collectives, prepare
from rank_traces import reduced_here
from straggler_jobs import (
    BLOCKS,
    MICROBATCHES,
    Delays,
    Plan,
    record_rows,
    record_timers,
    record_traces,
    said,
    verdict_of,
)

pytestmark = pytest.mark.full
RANKS = 4
PLANS = [
    Plan("none"),
    Plan("forward", rank=2),
    Plan("backward", rank=3),
    Plan("data", rank=1),
    Plan("layer", rank=3, block=2),
    Plan("layer everywhere", block=1),
    Plan("late collective", rank=1),
    Plan("imbalance"),
    Plan("anyone's forward"),
    Plan("gc"),
    Plan("none", stages=2),
    Plan("stage", stage=1, stages=2),
    Plan("forward", rank=1, stages=2),
    Plan("none", stages=4),
    Plan("stage", stage=2, stages=4),
]
JOBS = [replace(plan, steps=10, delay_s=0.12) for plan in PLANS]


def name_of(plan: Plan) -> str:
    return plan.cause + (f", {plan.stages} stages" if plan.stages > 1 else "") + (", DDP" if plan.ddp else "")


@pytest.fixture(scope="module")
def jobs(once: Once) -> dict[Plan, Path]:
    """Each job's directory, recorded by Timer. Only what is planned takes time."""

    def record(folder: Path) -> Path:
        run_in_processes(record_timers, JOBS, str(folder), False, True, world_size=RANKS)
        return folder

    folder = once("jobs by timers", record)
    return {job: folder / f"job{at}" for at, job in enumerate(JOBS)}


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_timers_tell_what_was_planted(jobs: dict[Plan, Path], job: Plan) -> None:
    verdict = verdict_of(jobs[job])
    assert said(job, verdict, RANKS), (verdict.sentence, verdict.evidence)
    if job.cause in ("forward", "backward", "data", "layer", "late collective") and job.stages == 1:
        # The first block's input asks for no gradient: the backward of three of four is slow.
        told = "113.0 ms would be 90.0" if job.cause == "backward" else "143.0 ms would be 120.0"
        assert f"a step of {told} ms shorter, 100 % of the lost time" in verdict.sentence


def test_those_who_wait_are_told_as_waiting(jobs: dict[Plan, Path]) -> None:
    """The planted delay is on one rank; the others have it as waiting, and each step is whole."""
    own = load_ranks(jobs[JOBS[1]]).own
    slow = own.ranks == 2
    assert own.steps.tolist() == list(range(10))
    assert (own.of("forward") == np.where(slow, 128e6, 8e6)).all()  # four blocks of 2 ms
    assert (own.of("backward") == 12e6).all() and (own.of("data") == 1e6).all()
    assert (own.waiting_ns == np.where(slow, 0, 120e6)).all()
    assert (own.wall_ns == 143e6).all()
    assert np.array_equal(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns)
    held = account(own)
    assert np.array_equal(held.held_ns.sum(axis=2)[:, 0], own.wall_ns.max(axis=1))
    assert (held.holder[:, 0, held.kinds.index("forward")] == 2).all()


def test_the_engine_adds_up_as_plain_python_does() -> None:
    """The same rows, through the database and without it."""
    plans = [Plan("forward", rank=1, steps=4), Plan("none", stages=2, steps=4)]
    found = run_in_processes(record_rows, plans, world_size=RANKS)
    for at, plan in enumerate(plans):
        rows = [row for of_rank in found for row in of_rank[at]]
        with span_sums.database_of(rows, stages=plan.stages) as database:
            prepare(database)
            own, arrived, layers = read_account(database, None), match_collectives(database), layer_times(database)
        by_hand = span_sums.self_times(rows, stages=plan.stages)
        assert own.ranks.tolist() == by_hand.ranks.tolist() and own.steps.tolist() == by_hand.steps.tolist()
        assert KINDS[: len(by_hand.kinds)] == by_hand.kinds
        assert np.allclose(own.own_ns[:, :, : len(by_hand.kinds)], by_hand.self_ns, atol=1)
        assert np.allclose(own.waiting_ns, by_hand.waiting_ns, atol=1)
        last, also = arrived, span_sums.arrivals(rows)
        assert last is not None and also is not None
        assert _last(last) == _last(also)
        assert np.allclose(last.late_ns, also.late_ns, atol=1)
        by_layer = span_sums.layer_times(rows)
        assert layers is not None and by_layer is not None and set(layers.layers) == set(by_layer.layers)


def _last(arrived: Arrivals) -> list[tuple[int, int]]:
    return sorted(zip(arrived.step.tolist(), arrived.shortest_rank.tolist(), strict=True))


# By `ProfilerWrapper` alone, which tells a collection of garbage and finds the others in what torch records. How often
# the verdict is right depends on what else the machine does: benchmarks/injected_delays.py counts it.
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
TRACED = [replace(plan, steps=4, delay_s=0.03, work_s=0.0) for plan in TRACED]
AUTO = Plan("layer", rank=1, block=1, ddp=True, steps=8, delay_s=0.03, work_s=0.0)


@pytest.fixture(scope="module")
def traced(once: Once) -> dict[Plan, RanksReport]:
    """What is said of each job's traces."""

    def record(folder: Path) -> dict[Plan, RanksReport]:
        run_in_processes(record_all_traces, str(folder), world_size=RANKS)
        with reduced_here():
            found = {plan: load_ranks(folder / "all" / f"job{at}") for at, plan in enumerate(TRACED)}
            return {**found, AUTO: load_ranks(folder / "auto" / "job0")}

    found: dict[Plan, RanksReport] = once("jobs by traces", record)
    return found


def record_all_traces(folder: str) -> None:
    record_traces(TRACED, f"{folder}/all")
    record_traces([AUTO], f"{folder}/auto", steps="auto")


def least_ns(plan: Plan) -> dict[str, np.ndarray]:
    """What each rank surely took in each step, (S, R) by kind: what was planted. A busy machine can only add."""
    least = {kind: np.zeros((plan.steps, RANKS)) for kind in ("data", "forward", "backward", "gc", "other")}
    for rank in range(RANKS):
        delays = Delays(plan, rank, RANKS)
        for step in range(plan.steps):
            least["data"][step, rank] = delays.of("data", step)
            least["forward"][step, rank] = delays.of("forward", step)
            least["forward"][step, rank] += delays.of("layer", step)
            # The first block's input asks for no gradient.
            least["backward"][step, rank] = delays.of("backward", step) * (BLOCKS - 1) / BLOCKS
            least["other"][step, rank] = delays.of("late", step)
            if plan.cause == "gc":
                least["gc"][step, rank] = plan.delay_s * (step % 2 == 0 and step // 2 % 2 == rank % 2)
    return {kind: seconds * 1e9 for kind, seconds in least.items()}


@pytest.mark.parametrize("plan", TRACED, ids=name_of)
def test_traces_have_it_where_it_was_planted(traced: dict[Plan, RanksReport], plan: Plan) -> None:
    own = traced[plan].own
    assert own.ranks.tolist() == list(range(RANKS))
    assert own.stages.tolist() == [rank * plan.stages // RANKS for rank in range(RANKS)]
    assert own.steps.tolist() == list(range(plan.steps))[-len(own.steps) :] and len(own.steps) >= 3
    assert np.array_equal(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns) and own.waiting_known
    for kind, least in least_ns(plan).items():
        assert (own.of(kind) >= least[own.steps]).all(), kind
    if plan.cause == "gc":
        assert ((own.of("gc")[1:] > 0) == (least_ns(plan)["gc"][own.steps][1:] > 0)).all()
    optimizer = own.of("optimizer") > 0
    # A busy machine lets gloo's thread say late that it is done: what DDP's all-reduce covers is not the optimizer's.
    assert (optimizer.any() if plan.ddp else optimizer.all()) and (own.of("data") > 0).all()


@pytest.mark.parametrize("plan", TRACED, ids=name_of)
def test_traces_have_the_collectives_of_all_ranks(traced: dict[Plan, RanksReport], plan: Plan) -> None:
    report = traced[plan]
    rows = {(row.name, row.group, row.size, row.instances) for row in report.communication}
    assert report.arrivals is not None
    steps = len(report.own.steps)
    if plan.stages > 1:
        assert ("send/recv", "", RANKS, steps * 2 * MICROBATCHES * 2) in rows  # both ways, of two pairs
    elif plan.ddp:
        assert ("all_reduce", "", RANKS, steps) in rows
    else:
        assert ("all_reduce", "0-3", RANKS, 2 * steps) in rows
    reduced = [step for step, name in zip(report.arrivals.step, report.arrivals.name, strict=True) if "reduce" in name]
    assert reduced == sorted(report.own.steps.tolist() * (1 if plan.ddp else 2))


@pytest.mark.parametrize("plan", TRACED, ids=name_of)
def test_traces_have_the_layers(traced: dict[Plan, RanksReport], plan: Plan) -> None:
    layers = traced[plan].layers
    assert layers is not None
    assert {str(block) for block in range(BLOCKS)} <= set(layers.layers)
    if plan.cause == "layer":
        forward = layers.self_ns[:, layers.layers.index(str(plan.block)), layers.kinds.index("forward")]
        assert forward[plan.rank] >= plan.delay_s * 1e9


def test_three_timed_steps_of_ddp_tell_the_layer_of_the_rank(traced: dict[Plan, RanksReport]) -> None:
    """What `ProfilerWrapper` records if nobody asks for more."""
    report = traced[AUTO]
    assert report.own.steps.tolist() == [2, 3, 4]
    assert report.layers is not None
    forward = report.layers.self_ns[AUTO.rank, report.layers.layers.index("1"), report.layers.kinds.index("forward")]
    assert forward >= AUTO.delay_s * 1e9
    assert (report.own.of("forward")[:, AUTO.rank] >= AUTO.delay_s * 1e9).all()
