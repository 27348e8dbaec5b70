"""The graph of dependencies: by hand, and against the simulator, which computes the same job and shares no code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.account import KINDS, Account
from profiler_wrapper.ranks.graph import BEGIN, NOTHING, Change, Graph, NoGraph, build
from rank_accounts import MS, account_of, account_of_job, meet, row
from rank_causes import Cause, Job, Planted
from rank_causes import Change as Slower
from rank_jobs import Noise, Operation, draw
from rank_layouts import LAYOUTS, Shape
from rank_layouts import build as program_of

STEPS = 6
ALL_EDGES = ("data", "hosts", "tensor", "interleaved")  # layouts in which spans tell all that is waited for
SHAPES = {
    "data": Shape(layout="data", replicas=8, layers=3),
    "hosts": Shape(layout="hosts", replicas=8, layers=3, ranks_of_host=4),
    "ddp": Shape(layout="ddp", replicas=8, layers=4),
    "fsdp": Shape(layout="fsdp", replicas=8, layers=4, prefetch=2),
    "tensor": Shape(layout="tensor", replicas=4, tensor=2, layers=4),
    "pipeline": Shape(layout="pipeline", replicas=1, stages=4, microbatches=8),
    "interleaved": Shape(layout="interleaved", replicas=2, stages=2, chunks=2, microbatches=4),
    "pipeline_data": Shape(layout="pipeline_data", replicas=4, stages=2, microbatches=6),
}
assert set(SHAPES) == set(LAYOUTS)


def job_of(shape: Shape, noise: float = 0.05) -> Job:
    program = program_of(shape)
    level = Noise(of_an_operation=noise, of_a_rank=noise / 10, of_a_step=noise / 10)
    lengths, transfers = draw(program, STEPS, level, np.random.default_rng(8))
    return Job(shape=shape, program=program, steps=STEPS, lengths=lengths, transfers=transfers)


def slower(job: Job, kind: str, ranks: list[int], milliseconds: float) -> Cause:
    """Milliseconds more in each operation of that kind."""
    amount = np.zeros((STEPS, job.shape.ranks))
    amount[:, ranks] = 1

    def touches(operation: Operation) -> bool:
        return operation.kind == kind

    changes = (Slower(touches, amount, 0.0, milliseconds),)
    return Cause(planted=Planted(kind="phase", ranks=tuple(ranks)), changes=changes)


def less(account: Account, kind: str, milliseconds: Mapping[int, float]) -> Change:
    """Each row of work of that kind and those ranks takes so much less."""
    rank = account.points.rank[account.work.point]
    rows = np.flatnonzero((account.work.kind == KINDS.index(kind)) & np.isin(rank, list(milliseconds)))
    return Change(rows, np.array([milliseconds[int(rank[at])] * MS for at in rows]))


def gain_ms(graph: Graph, *changes: Change) -> list[float]:
    end, *others = graph.ends([NOTHING, *changes])
    return [round(float(end - other) / MS, 3) for other in others]


# --- by hand ---


def three_ranks(*forward: int) -> Account:
    """Forward of each, an all-reduce of 10 ms, an optimizer of 5."""
    met = max(forward)
    rows = []
    for rank, length in enumerate(forward):
        rows += [
            row(rank, 0, "step", 0, met + 15),
            row(rank, 0, "forward", 0, length),
            meet(rank, 0, length, met + 10),
            row(rank, 0, "optimizer", met + 10, met + 15),
        ]
    return account_of(rows)


def test_of_two_slow_ranks_at_one_meeting_the_slower_one_alone_costs() -> None:
    account = three_ranks(10, 40, 55)
    graph = build(account)
    assert graph.ends([NOTHING]).tolist() == [70 * MS]
    alone = less(account, "forward", {1: 30}), less(account, "forward", {2: 45})
    assert gain_ms(graph, *alone, less(account, "forward", {1: 30, 2: 45})) == [0, 15, 45]


def test_the_critical_path_is_that_of_the_last_rank() -> None:
    account = three_ranks(10, 40, 55)
    graph = build(account)
    path = graph.path(NOTHING, graph.times([NOTHING])[:, 0])
    assert graph.source[path[0]] == BEGIN and graph.target[path[-1]] == graph.end
    assert graph.rank[path[0]] == 2
    assert graph.weight_ns[path].tolist() == [55 * MS, 15 * MS]


def test_a_transfer_that_is_shorter_shortens_the_job() -> None:
    account = three_ranks(10, 40, 55)
    graph = build(account)
    edges = np.flatnonzero(graph.instance >= 0)
    assert graph.transfer_ns[edges].tolist() == [10 * MS] * 3
    change = Change(NOTHING.rows, NOTHING.less_ns, edges, np.full(len(edges), 4.0 * MS))
    assert gain_ms(graph, change) == [4]


def test_what_is_queued_behind_another_begins_when_that_one_ends() -> None:
    """Two all-reduces of 30 ms on a stream, launched at 20 and 40; nothing but the queue holds the second one."""
    rows = []
    for rank in (0, 1):
        rows += [
            row(rank, 0, "step", 0, 90),
            row(rank, 0, "backward", 0, 20),
            meet(rank, 0, 20, 50, thread=2),
            row(rank, 0, "backward", 20, 40),
            meet(rank, 0, 50, 80, thread=2, sequence=1),
            row(rank, 0, "optimizer", 80, 90),
        ]
    account = account_of(rows)
    graph = build(account)
    assert graph.ends([NOTHING]).tolist() == [90 * MS]
    first = account.work.point[account.work.kind == KINDS.index("backward")].min()
    assert first == 0, "the first backward comes before the first launch"
    rank = account.points.rank[account.work.point]
    backward = account.work.kind == KINDS.index("backward")
    of_first = [np.flatnonzero(backward & (rank == one))[:1] for one in (0, 1)]
    of_second = [np.flatnonzero(backward & (rank == one))[1:] for one in (0, 1)]
    changes = [Change(np.concatenate(rows), np.full(2, 10.0 * MS)) for rows in (of_first, of_second)]
    assert gain_ms(graph, *changes) == [10, 0]


def test_a_sender_goes_on_and_a_receiver_waits_for_it() -> None:
    rows = []
    for step, (sent, asked) in enumerate(((20, 80), (20, 70), (20, 50), (70, 20), (70, 30), (60, 10))):
        begin, got = 100 * step, max(asked, sent) + 4
        rows += [
            row(0, step, "step", begin, begin + 100),
            row(0, step, "forward", begin, begin + sent),
            meet(0, step, begin + sent, begin + sent + 1, name="send", group="0-1"),
            row(0, step, "optimizer", begin + sent + 1, begin + 100),
            row(1, step, "step", begin, begin + 100),
            row(1, step, "data", begin, begin + asked),
            meet(1, step, begin + asked, begin + got, name="recv", group="0-1"),
            row(1, step, "optimizer", begin + got, begin + 100),
        ]
    account = account_of(rows)
    graph = build(account)
    assert graph.ends([NOTHING]).tolist() == [600 * MS]
    # The receiver's data alone: it is last in both, and the sender does not wait for it.
    assert gain_ms(graph, less(account, "data", {1: 10})) == [0]
    # The sender never waits; the receiver gains as much in the last three steps, where it waits for what was sent.
    assert gain_ms(graph, less(account, "forward", {0: 10})) == [60]
    assert gain_ms(graph, less(account, "forward", {0: 10}), less(account, "optimizer", {0: 10})) == [60, 50]


def test_one_forward_one_backward_by_hand() -> None:
    """Two stages, two microbatches: forward 10, backward 20, a transfer 1, the norm 1, optimizer 5: 98 ms a step.

    The first stage computes F0 F1 B0 B1 from 0 to 92, the second F0 B0 F1 B1 from 11 to 71. On the path are F0 of the
    first stage, all of the second stage, and B1 of the first one from 72 to 92.
    """
    shape = Shape(layout="pipeline", replicas=1, stages=2, microbatches=2)
    job = job_of(shape, 0.0)
    sizes = {"forward-compute": 10.0, "backward-compute": 20.0, "optimizer": 5.0}
    for number, operation in enumerate(job.program.operations):
        job.lengths[number][:] = sizes.get(operation.name, 0.0)
    for values in job.transfers:
        values[:] = 1.0
    account = account_of_job(job)
    graph = build(account)
    assert graph.ends([NOTHING]).tolist() == [98 * STEPS * MS]
    changes = [less(account, kind, {stage: 1}) for kind in ("forward", "backward") for stage in (0, 1)]
    # One millisecond of each operation.
    assert gain_ms(graph, *changes) == [1 * STEPS, 2 * STEPS, 1 * STEPS, 2 * STEPS]


def test_what_waits_for_itself_is_no_graph() -> None:
    """Rank 0 has the syncs in one order, rank 1 in the other."""
    rows = []
    for rank, order in enumerate((("one", "other"), ("other", "one"))):
        rows += [meet(rank, 0, 10 * at, 10 * at + 10, name=name) for at, name in enumerate(order)]
    with pytest.raises(NoGraph, match=r"3 of 10 .* depend on one another in a circle"):
        build(account_of(rows))


# --- against the simulator ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_replayed_end_is_the_recorded_one(layout: str) -> None:
    job = job_of(SHAPES[layout])
    graph = build(account_of_job(job))
    (end,) = graph.ends([NOTHING])
    assert end / MS == pytest.approx(job.played.step_ms[0] * STEPS, rel=1e-3)


@pytest.mark.parametrize("kind", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_slow_phase_the_end_is_that_of_the_simulator(layout: str, kind: str) -> None:
    """The slow rank's operations lose what was planted on each, no more is told; half of a step at most."""
    job = job_of(SHAPES[layout])
    slow = 5 if job.shape.ranks > 5 else 2
    count = sum(each.kind == kind and slow in job.program.roles[each.role].tolist() for each in job.program.operations)
    job.causes = (slower(job, kind, [slow], 24.0 / count),)
    account = account_of_job(job)
    graph = build(account)
    (cause,) = job.truth.causes
    work = account.work
    rank = account.points.rank[work.point]
    rows = np.flatnonzero((work.kind == KINDS.index(kind)) & (account.ranks[rank] == slow))
    # A row of work is what lies between two points: of all that was computed there, each has its share.
    whole = work.ns[rows].sum()
    change = Change(rows, work.ns[rows] * (24.0 * STEPS * MS / whole))
    (gain,) = gain_ms(graph, change)
    near = max(0.5, 0.05 * cause.gain_ms)
    assert gain / STEPS >= cause.gain_ms - near
    if layout in ALL_EDGES:
        assert gain / STEPS <= cause.gain_ms + near
    else:  # a rank that is slow is not seen to wait where it would if it were not: no edge says so
        assert gain / STEPS <= min(24.0, 1.5 * cause.gain_ms) + near


def test_an_account_without_points_ends_at_once() -> None:
    account = account_of([row(0, 0, "step", 0, 50), row(0, 0, "forward", 0, 50)])
    graph = build(account)
    assert graph.ends([NOTHING]).tolist() == [50 * MS]
    assert gain_ms(graph, less(account, "forward", {0: 20})) == [20]
    assert graph.ends([]).tolist() == []
