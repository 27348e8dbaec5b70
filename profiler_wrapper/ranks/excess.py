"""What each rank and kind takes beyond its like, in which steps, and what its operations would lose without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from profiler_wrapper.ranks.account import KINDS, Account
from profiler_wrapper.ranks.graph import Graph
from profiler_wrapper.ranks.model import BETWEEN, COMPUTE, Bool, Float, Int, LayerTimes
from profiler_wrapper.ranks.times import largest
from profiler_wrapper.tables.statistics import MAD_TO_SIGMA, mean

LEAST_SHARE_OF_STEP: Final = 0.02  # a gain below it is nobody's
NEARLY: Final = 0.9  # of the greatest gain: the smallest X with as much is named
QUICKER: Final = 0.25  # of the ranks of a role are its like: where half of them are slow, these are not
ERRORS: Final = 3.0  # standard errors of a mean that are more than chance
_FEW: Final = 6.0  # steps, of which an error is known little: about as Student's t, which is twice as far out for six
WITHOUT: Final = ("gc", "checkpoint")  # what a step can do without: their like takes no time
_NO_SPAN: Final = ("other", BETWEEN)  # where a rank has none of it, it took no time for it
COMPUTES: Final = (*COMPUTE, "optimizer")


LayerMeans = Callable[[Sequence[int], Int], dict[tuple[int, str, str], float]]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An account with its graph, and where its ranks are."""

    account: Account
    graph: Graph
    judged: Bool  # (S,) steps
    stages: Int  # (R,)
    hosts: tuple[str, ...]  # (R,) "" where not known
    label_names: tuple[str, ...] = ()
    label_groups: tuple[str, ...] = ()
    measured: bool = True  # False: nobody is seen to meet, so all do at the end of each step
    ordered: bool = True  # False: when ranks meet within a step is not known
    absent: bool = False  # ranks of the job are not recorded
    layers: LayerTimes | None = None
    layer_means: LayerMeans | None = None  # (ranks, steps) -> ns a step of (rank, layer, kind)

    @property
    def rank_of_work(self) -> Int:
        """(W,) index"""
        return self.account.points.rank[self.account.work.point]


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """What each rank and kind takes beyond its like. Axes: S steps, R ranks, K kinds."""

    hit: Bool  # (S, R, K) steps in which it does
    mean_ns: Float  # (R, K) over these

    @property
    def per_step_ns(self) -> Float:
        """(R, K) over all steps."""
        return np.asarray(self.mean_ns * self.hit.mean(axis=0))


def mean_step_ns(job: Job) -> float:
    """The mean step on the clock, from begin to begin: of ranks with as many steps as any, the longest."""
    whole = (job.account.wall_ns + np.nan_to_num(job.account.own_ns[:, :, KINDS.index(BETWEEN)]))[job.judged]
    steps = np.isfinite(whole).sum(axis=0)
    return float(np.nan_to_num(largest(mean(whole[:, steps == steps.max(initial=0)]))))


def excess_of(job: Job, in_some: Excess | None = None) -> Excess:
    """Each rank and kind against the quicker ranks of its role: of its stage in what it computes, else of all.

    `in_some`: what they are in some steps, so that what they are in all steps, these and others, is asked for.
    """
    of = hits if in_some is None else in_all_steps
    account = job.account
    own = np.where(job.judged[:, None, None], account.own_ns, np.nan)
    hit = np.zeros(own.shape, dtype=bool)
    mean = np.zeros(own.shape[1:])
    least_ns = LEAST_SHARE_OF_STEP * mean_step_ns(job) / len(KINDS)  # with as little of each kind a rank is nobody
    for kind, name in enumerate(KINDS):
        if name == "communication" or not np.nansum(own[:, :, kind]):
            continue
        roles = np.zeros_like(job.stages) if name in ("data", *WITHOUT) else job.stages
        for role in np.unique(roles):
            members = np.flatnonzero(roles == role)
            if name not in _NO_SPAN:
                members = members[np.nansum(own[:, members, kind], axis=0) > 0]
            if not len(members):
                continue
            times = own[:, members, kind]
            like = np.zeros(len(times)) if name in WITHOUT else like_of(times)
            for at, rank in enumerate(members.tolist()):
                if in_some is not None and not in_some.mean_ns[rank, kind]:
                    continue
                found = of(times[:, at] - like, times[:, at])
                if found[0].mean() * found[1] < least_ns:
                    continue
                hit[:, rank, kind], mean[rank, kind], _ = found
    return Excess(hit, mean)


def like_of(times: Float) -> Float:
    """(S,) what is typical of the quicker half of several (S, M) in each step, of two or three the quickest.

    Where half of them are slow, the others are still like one another; the very quickest are so by chance.
    """
    means = np.nanmean(times, axis=0)
    order = np.argsort(np.where(np.isfinite(means), means, np.inf), kind="stable")
    count = len(order)
    middle = order[count // 8 : max(1, 3 * count // 8 + (count > 3))]  # about the first quartile
    like = np.fmin(np.nanmean(times[:, middle], axis=1), np.nanmedian(times, axis=1))  # each may be slow once
    return np.asarray(np.where(np.isfinite(like), like, np.nanmean(like)))


Hits = tuple[Bool, float, float]


def hits(beyond: Float, times: Float) -> Hits:
    """The steps (S,) in which something is beyond its like, its mean excess there, and what is left of it without that.

    Those with more than half of the mean excess of all that have as much; nearly all steps are all.
    """
    known = np.isfinite(beyond)
    nothing = np.zeros(len(beyond), dtype=bool)
    if not known.any() or not np.nanmax(beyond) > 0:
        return nothing, 0.0, 1.0
    level = float(np.nanmax(beyond))
    for _ in range(3):
        hit = known & (beyond > level / 2)
        level = float(beyond[hit].mean())
    if hit.sum() == 1 and known.sum() > 2:  # once is chance, and tells nothing of the others
        return hits(np.where(hit, np.nan, beyond), times)
    others = float(np.median(beyond[known & ~hit])) if (known & ~hit).any() else level
    if hit.sum() >= NEARLY * known.sum() or beyond[known].mean() >= NEARLY * level or others > level / 4:
        hit = known
        level = float(beyond[hit].mean())
    count = int(hit.sum())
    rest = known & ~hit
    # Steps that are chosen by their times have to stand out by themselves, not in the mean.
    error = float(np.std(beyond[rest])) if rest.any() else float(np.std(beyond[hit])) / count**0.5
    if level < ERRORS * error * (1 + _FEW / known.sum()):
        return nothing, 0.0, 1.0
    whole = float(times[hit].mean())
    return hit, level, max(0.0, 1 - level / whole) if whole > 0 else 1.0


def in_all_steps(beyond: Float, times: Float) -> Hits:
    """The same of what is beyond its like in all steps, and far beyond in some: by how much it is in the others."""
    known = np.isfinite(beyond)
    nothing = np.zeros(len(beyond), dtype=bool), 0.0, 1.0
    rest = known & ~hits(beyond, times)[0]
    if not rest.any() or rest.sum() == known.sum():
        return nothing
    level, whole = float(np.median(beyond[rest])), float(np.median(times[known]))
    error = MAD_TO_SIGMA * float(np.median(np.abs(beyond[rest] - level))) / float(rest.sum()) ** 0.5
    if level < ERRORS * error or not 0 < level < whole:
        return nothing
    return known, level, 1 - level / whole


def losses(job: Job, excess: Excess) -> Float:
    """(W,) what each row of work loses if its rank and kind are as their like.

    Of several operations of a kind in a step each loses in proportion to what it is beyond its like itself.
    """
    work, rank = job.account.work, job.rank_of_work
    hit = excess.hit[work.step, rank, work.kind]
    whole = job.account.own_ns[work.step, rank, work.kind]
    less = np.where(hit, work.ns * np.minimum(1.0, excess.mean_ns[rank, work.kind] / np.maximum(whole, 1.0)), 0.0)
    ranks, kinds = excess.mean_ns.shape
    number = work.number
    count = int(number.max(initial=0)) + 1
    if count == 1:
        return less
    place = (rank * kinds + work.kind) * count + number
    judged = job.judged[work.step]
    times = np.bincount(place, weights=work.ns * judged, minlength=ranks * kinds * count)
    known = (np.isfinite(job.account.wall_ns) & job.judged[:, None]).sum(axis=0)
    mean = times.reshape(ranks, kinds, count) / np.maximum(1, known)[:, None, None]  # 0 where a rank has fewer
    bounds = np.searchsorted(rank, np.arange(ranks + 1))
    for one, kind in np.argwhere(excess.mean_ns > 0).tolist():
        rows = np.arange(bounds[one], bounds[one + 1])
        rows = rows[(work.kind[rows] == kind) & hit[rows]]
        usual = np.median(mean[job.stages == job.stages[one], kind], axis=0)
        steps = max(1, len(np.unique(work.step[rows])))
        own = np.bincount(number[rows], weights=work.ns[rows], minlength=count) / steps
        beyond = np.maximum(own - usual, 0.0)
        if beyond.sum() > 0:
            share = excess.mean_ns[one, kind] * beyond / beyond.sum() / np.maximum(own, 1.0)
            less[rows] = work.ns[rows] * np.minimum(share[number[rows]], 1.0)
    return less
