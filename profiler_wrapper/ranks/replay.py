"""What the job would take if its operations took what is typical of their kind, and how much of that is whose.

"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): S = T / T_ideal (its equation 1);
M_W is the share of T - T_ideal that goes away with the slowest 3 % of workers typical (5), M_S the same with the last
stage typical (section 5.2). Typical is the mean of what computes and the median of what moves data, over all ranks and
steps. The dependencies are those of our own graph, and what lies between operations is one of them.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from profiler_wrapper.ranks.account import KINDS
from profiler_wrapper.ranks.excess import Job
from profiler_wrapper.ranks.graph import NOTHING, Change
from profiler_wrapper.ranks.model import COMPUTE, Bool, Float, Int, Replay

SLOWEST: Final = 0.03  # of the workers, in M_W
_LEAST_LOST: Final = 1e-6  # of T, below which there is nothing to share out
_MOST_SINGLES: Final = 16  # ranks that are replayed by themselves, which takes a replay each


def what_if(job: Job) -> Replay | str:
    """The replay of a job, or why there is none."""
    account = job.account
    if len(account.ranks) < 2:
        return "one rank alone waits for no other"
    if not job.ordered:
        return "what waits for what is a circle"
    if not job.measured:
        return "no communication of several ranks is in the table: what ranks wait for is not known"
    if not account.own_ns[:, :, [KINDS.index(kind) for kind in COMPUTE]].any():
        return "no forward or backward is in the table"
    less, edges, edges_less = _beyond_work(job), *_beyond_transfers(job)
    rank_of_work, rank_of_edge = job.rank_of_work, job.graph.rank[edges]
    count = len(account.ranks)

    def typical(chosen: Bool) -> Change:
        """These ranks (R,) as is typical, the others as recorded."""
        rows, moved = np.flatnonzero(chosen[rank_of_work]), chosen[rank_of_edge]
        return Change(rows, less[rows], edges[moved], edges_less[moved])

    nobody, everybody = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
    ranks = _by_slowness(job, less, edges, edges_less)
    slowest = ranks[: math.ceil(round(SLOWEST * count, 6))]
    stages = np.unique(job.stages)
    chosen = [everybody, np.isin(np.arange(count), slowest), *(job.stages == stage for stage in stages)]
    chosen += [np.arange(count) == rank for rank in ranks[:_MOST_SINGLES]]
    total, ideal, *without = job.graph.ends([typical(each) for each in (nobody, *chosen)]).tolist()
    lost = total - ideal if total - ideal > _LEAST_LOST * total else math.nan
    shares = (total - np.array(without)) / lost
    share_of_rank = np.full(count, np.nan)
    share_of_rank[ranks[:_MOST_SINGLES]] = shares[1 + len(stages) :]
    notes = [f"shares of the lost time are of the {_MOST_SINGLES} slowest ranks of {count}"][: count > _MOST_SINGLES]
    notes += ["with one stage, its share is all by definition"][: len(stages) == 1]
    return Replay(
        total_ns=total,
        ideal_ns=ideal,
        slowdown=total / ideal,
        ms=float(shares[len(stages)]),
        mw=float(shares[0]),
        slowest_ranks=tuple(account.ranks[slowest].tolist()),
        ranks=account.ranks,
        stages=stages,
        share_of_rank=share_of_rank,
        share_of_stage=shares[1 : 1 + len(stages)],
        steps=len(account.steps),
        notes=tuple(notes),
    )


def _beyond_work(job: Job) -> Float:
    """(W,) what each row of work is longer than is typical of its operation; shorter is below 0.

    Each forward and backward is an operation; of other kinds all that a rank has of it in a step is one.
    """
    account, work = job.account, job.account.work
    number = np.where(np.isin(work.kind, [KINDS.index(kind) for kind in COMPUTE]), work.number, 0)
    shape = len(account.ranks), len(account.steps), len(KINDS), int(number.max(initial=0)) + 1
    place = np.ravel_multi_index((job.rank_of_work, work.step, work.kind, number), shape)
    operations, of = np.unique(place, return_inverse=True)
    length = np.bincount(of, weights=work.ns)
    kind = operations // shape[3] % shape[2]
    typical = np.bincount(kind, weights=length, minlength=len(KINDS)) / np.maximum(
        1, np.bincount(kind, minlength=len(KINDS))
    )
    return np.asarray(work.ns * (1 - typical[work.kind] / length[of]))


def _beyond_transfers(job: Job) -> tuple[Int, Float]:
    """The edges that are transfers, and what each is longer than is typical of its name."""
    syncs, graph = job.account.syncs, job.graph
    edges = np.flatnonzero(graph.instance >= 0)
    name = np.unique(job.label_names, return_inverse=True)[1][syncs.label[syncs.of]]
    typical = np.zeros(len(job.label_names))
    for one in np.unique(name[syncs.waits]):
        typical[one] = np.median(syncs.transfer_ns[(name == one) & syncs.waits])
    return edges, graph.transfer_ns[edges] - typical[name[graph.instance[edges]]]


def _by_slowness(job: Job, less: Float, edges: Int, edges_less: Float) -> Int:
    """Indices of ranks: first those that are longest beyond what is typical, on the critical path as recorded."""
    path = job.graph.path(NOTHING, job.graph.times([NOTHING])[:, 0])
    on_path = np.isin(job.graph.edge_of_work, path)
    count = len(job.account.ranks)
    beyond = np.bincount(job.rank_of_work[on_path], weights=less[on_path], minlength=count)
    moved = np.isin(edges, path)
    beyond += np.bincount(job.graph.rank[edges[moved]], weights=edges_less[moved], minlength=count)
    return np.argsort(-beyond, kind="stable")
