"""Everything that may slow a job: ranks, hosts, stages, links, layers, steps; and what the operations of each lose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from profiler_wrapper.ranks.account import KINDS
from profiler_wrapper.ranks.excess import (
    COMPUTES,
    ERRORS,
    LEAST_SHARE_OF_STEP,
    NEARLY,
    QUICKER,
    WITHOUT,
    Excess,
    Job,
    excess_of,
    hits,
    losses,
    mean_step_ns,
)
from profiler_wrapper.ranks.graph import NOTHING, Change, change_of, together
from profiler_wrapper.ranks.model import COMPUTE, Bool, Float, Int
from profiler_wrapper.tables.statistics import OPEN, split_number

TIED: Final = 0.7  # of the slowest rank's excess: as slow, within the noise of few steps
DATA_SHARE_OF_STEP: Final = 0.1  # loading of data that takes more of every step is worth a word, though all do it
_MOST_SINGLES: Final = 6  # ranks asked for by themselves, of each set of kinds: those with most on the critical path
_FEWEST_SIBLINGS: Final = 3
_FEWEST_TO_COMPARE: Final = 8
_MOST_PEERS: Final = 16  # ranks whose layers are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An X: what it is, and what a step would be shorter without its excess."""

    # "rank", "ranks" (as slow, by the same kinds), "tied" (as slow, by other kinds), "host", "stage", "link", "group",
    # "unrecorded", "all", "uneven", "turns", "background"
    what: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]  # indices; empty: all
    change: Change
    steps: Bool  # (S,) that it hits
    excess_ns: float = 0.0  # in these
    typical_ns: float = 0.0  # what its like takes
    label: int = -1  # of a link or group
    stage: int | None = None
    host: str | None = None
    layer: str | None = None
    gain_ns: float = 0.0  # per step
    known_steps: float = 1.0  # in which it was recorded

    @property
    def size(self) -> tuple[int, int]:
        """The smaller of two X that gain as much is named."""
        return (len(self.ranks) or 1 << 30, 0 if self.what == "background" else len(self.kinds))


def suspects_of(job: Job, excess: Excess, less: Float, recorded: Float) -> list[Suspect]:
    """All of them; `less`: the losses by that excess, `recorded`: when each node of the graph comes."""
    if len(job.account.ranks) < 2:  # nobody waits for it
        return []
    path, always = job.graph.path(NOTHING, recorded), excess_of(job, excess)
    return [
        *_of_ranks(job, excess, less, path),
        *_of_ranks(job, always, losses(job, always), path),
        *_of_stages(job),
        *_of_syncs(job, recorded),
        *_of_all(job),
        *_beside(job),
        *_uneven(job),
        *_layers(job),
    ]


_KIND_SETS: Final = (
    *((kind,) for kind in KINDS if kind not in ("communication",)),
    ("recompute", "backward"),
    COMPUTES,
    tuple(kind for kind in KINDS if kind != "communication"),
)


def _of_ranks(job: Job, excess: Excess, less: Float, path: Int) -> Iterator[Suspect]:
    """Ranks, those as slow together, and hosts: in one kind, in what they compute, in all."""
    account, work, rank = job.account, job.account.work, job.rank_of_work
    on_path = np.isin(job.graph.edge_of_work, path)
    shape = excess.mean_ns.shape
    bound = np.bincount(
        rank[on_path] * shape[1] + work.kind[on_path], weights=less[on_path], minlength=shape[0] * shape[1]
    )
    bound = bound.reshape(shape)
    per_step = excess.per_step_ns
    known = np.isfinite(account.wall_ns) & job.judged[:, None]
    hosts = _host_numbers(job)
    seen: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()

    def suspect(what: str, kinds: tuple[str, ...], members: Int, part: Float | float = 1.0) -> Suspect | None:
        if (
            what == "ranks"
            and job.hosts[members[0]]
            and np.array_equal(members, np.flatnonzero(hosts == hosts[members[0]]))
        ):
            what = "host"
        places = [KINDS.index(kind) for kind in kinds]
        there = tuple(
            kind for kind, place in zip(kinds, places, strict=True) if (excess.mean_ns[members, place] > 0).any()
        )
        key = tuple(members.tolist()), there
        if not there or key in seen:
            return None
        seen.add(key)
        each, in_steps = per_step[:, places].sum(axis=1), np.asarray(excess.hit[:, :, places].any(axis=2))
        here = in_steps[:, members].any(axis=1, keepdims=True)
        apart = (in_steps & ~here).sum(axis=0) > in_steps.sum(axis=0) / 2
        # So it is with many by turns: chance.
        if (apart & (each > each[members].max() / 2)).sum() > QUICKER * len(each):
            return None
        chosen = np.isin(rank, members) & np.isin(work.kind, places)
        beyond = (excess.hit[:, members][:, :, places] * excess.mean_ns[members][:, places]).sum(axis=(1, 2))
        hit = np.asarray(beyond > beyond.max() / 2)  # not those with a little of another kind alone
        return Suspect(
            what=what,
            kinds=there,
            ranks=key[0],
            change=change_of(less, chosen, part),
            steps=hit,
            excess_ns=float((excess.mean_ns[members][:, places]).sum(axis=1).mean()),
            stage=int(job.stages[members[0]]),
            host=job.hosts[members[0]] if what == "host" else None,
            known_steps=int(known[:, members].any(axis=1).sum()),
        )

    for kinds in _KIND_SETS:
        places = [KINDS.index(kind) for kind in kinds]
        order = np.argsort(-bound[:, places].sum(axis=1), kind="stable")[:_MOST_SINGLES]
        of_kinds = per_step[:, places].sum(axis=1)
        for one in order.tolist():
            if of_kinds[one] <= 0:
                continue
            if found := suspect("rank", kinds, np.array([one])):
                yield found
            in_steps = np.asarray(excess.hit[:, :, places].any(axis=2))
            both = (in_steps & in_steps[:, [one]]).sum(axis=0)
            tied = (of_kinds >= TIED * of_kinds[one]) & (TIED * of_kinds <= of_kinds[one])
            tied &= both > (in_steps | in_steps[:, [one]]).sum(axis=0) / 2
            large = per_step[:, places] > (1 - NEARLY) * of_kinds[:, None]
            same = tied & (large == large[one]).all(axis=1)  # by the same kinds
            for what, chosen in (("ranks", same), ("tied", tied)):
                peers = np.flatnonzero(chosen)
                if 1 < len(peers) <= len(hosts) / 2 and (found := suspect(what, kinds, peers)):
                    yield found
            members = np.flatnonzero(hosts == hosts[one])
            if 1 < len(members) < len(hosts):
                common = np.quantile(per_step[members], QUICKER, axis=0, method="lower")  # what nearly all of them have
                part = np.nan_to_num(np.minimum(1.0, common[None, :] / per_step))
                if found := suspect("host", kinds, members, part[rank, work.kind]):
                    yield found
        turns = excess.hit[job.judged][:, :, places].any(axis=2)
        by_turns = np.asarray(turns.any(axis=0) & ~turns.all(axis=0))
        if set(kinds) <= set(COMPUTES) and by_turns.sum() > 2:
            yield Suspect(
                what="turns",
                kinds=kinds,
                ranks=(),
                change=change_of(less, by_turns[rank] & np.isin(work.kind, places)),
                steps=np.asarray(excess.hit[:, by_turns][:, :, places].any(axis=(1, 2))),
                known_steps=int(job.judged.sum()),
            )


def _host_numbers(job: Job) -> Int:
    """A number for each host; ranks whose host is not known, or which are all on one, have one of their own."""
    names, number = np.unique(job.hosts, return_inverse=True)
    alone = len(names) + np.arange(len(job.hosts))
    return alone if len(names) < 2 else np.where(np.array(job.hosts) == "", alone, number)


def _of_stages(job: Job) -> Iterator[Suspect]:
    """Stages whose typical rank computes longer than that of the others; and hosts, of which all ranks do."""
    if len(np.unique(job.stages)) < 2:
        return
    yield from _of_parts(job, "stage", job.stages, 0.5)
    if all(job.hosts) and len(set(job.hosts)) > 1:
        yield from _of_parts(job, "host", _host_numbers(job), QUICKER)


def _of_parts(job: Job, what: str, parts: Int, quantile: float) -> Iterator[Suspect]:
    """Parts of a job, one of each rank (R,), with what this quantile of their ranks computes longer than in others."""
    account, numbers = job.account, np.unique(parts)
    own = np.where(job.judged[:, None, None], account.own_ns, np.nan)
    members = [np.flatnonzero(parts == number) for number in numbers]
    typical = {
        kind: np.stack([np.nanmedian(own[:, each, kind], axis=1) for each in members], axis=1)
        for kind in map(KINDS.index, COMPUTES)
        if np.nansum(own[:, :, kind])
    }
    for place, mine in enumerate(members):
        beyond: dict[int, tuple[Bool, float]] = {}
        for kind, times in typical.items():
            like = np.nanmedian(np.delete(times, place, axis=1), axis=1)
            taken = np.nanquantile(own[:, mine, kind], quantile, axis=1)
            hit, mean, _ = hits(taken - like, taken)
            if hit.any():
                beyond[kind] = hit, mean
        if beyond and len(mine) < len(parts):
            change, steps = _shortened(job, mine, beyond)
            yield Suspect(
                what=what,
                kinds=tuple(KINDS[kind] for kind in beyond),
                ranks=tuple(mine.tolist()),
                change=change,
                steps=steps,
                excess_ns=sum(mean for _, mean in beyond.values()),
                stage=int(job.stages[mine[0]]) if what == "stage" else None,
                host=job.hosts[mine[0]] if what == "host" else None,
                known_steps=int(job.judged.sum()),
            )


def _shortened(job: Job, members: Int, beyond: Mapping[int, tuple[Bool, Float | float]]) -> tuple[Change, Bool]:
    """The work of some ranks, each kind in its steps by so many nanoseconds a step, (S, R) or one; and these steps."""
    work, rank = job.account.work, job.rank_of_work
    mine = np.isin(rank, members)
    less = np.zeros(len(work.ns))
    steps = np.zeros(len(job.account.steps), dtype=bool)
    for kind, (hit, ns) in beyond.items():
        rows = np.flatnonzero(mine & (work.kind == kind) & hit[work.step])
        at = work.step[rows], rank[rows]
        whole = job.account.own_ns[:, :, kind]
        less[rows] = work.ns[rows] * np.minimum(1.0, np.broadcast_to(ns, whole.shape)[at] / np.maximum(whole[at], 1.0))
        steps |= hit
    return change_of(less), steps


def _of_syncs(job: Job, recorded: Float) -> Iterator[Suspect]:
    """Links and groups whose transfers take longer than those of their like.

    A link is a pair of ranks, whatever it carries. Where ranks are not recorded, the last arrival may be one of theirs:
    then the transfer seems the shorter the later the recorded ranks come.
    """
    syncs, graph, steps = job.account.syncs, job.graph, len(job.account.steps)
    count = np.bincount(syncs.of[syncs.waits], minlength=len(syncs.label))
    if not count.any():
        return
    transfer = np.bincount(
        syncs.of[syncs.waits], weights=syncs.transfer_ns[syncs.waits], minlength=len(syncs.label)
    ) / np.maximum(1, count)
    size = np.bincount(syncs.of, minlength=len(syncs.label))
    full = np.zeros(int(syncs.label.max()) + 1, dtype=np.int64)
    np.maximum.at(full, syncs.label, size)
    whole = (size == full[syncs.label]) & (count > 0)
    labels = np.unique(syncs.label[count > 0]).tolist()
    by_step = np.full((len(full), steps), np.nan)
    members: dict[int, tuple[int, ...]] = {}
    order = np.argsort(syncs.label[syncs.of], kind="stable")
    firsts = np.searchsorted(syncs.label[syncs.of][order], np.arange(len(full) + 1))
    number = np.bincount(syncs.label * steps + syncs.step, weights=whole, minlength=len(full) * steps)
    sums = np.bincount(syncs.label * steps + syncs.step, weights=transfer * whole, minlength=len(full) * steps)
    number, sums = number.reshape(-1, steps), sums.reshape(-1, steps)
    usual = np.array([np.median(row[row > 0]) if (row > 0).any() else 0 for row in number])
    known = (number > 0) & job.judged
    by_step[known] = (sums / np.maximum(1, number) * usual[:, None])[known]
    for label in labels:
        members[label] = tuple(np.unique(syncs.rank[order[firsts[label] : firsts[label + 1]]]).tolist())
    of_edge = np.where(graph.instance >= 0, syncs.of[graph.instance], -1)
    edges = np.flatnonzero(of_edge >= 0)
    label_of_edge = syncs.label[of_edge[edges]]
    by_edge = np.argsort(label_of_edge, kind="stable")
    bounds = np.searchsorted(label_of_edge[by_edge], np.arange(len(full) + 1))
    same: dict[tuple[str, int], list[int]] = {}
    for label in labels:
        same.setdefault((job.label_names[label], int(full[label])), []).append(label)
    means = np.full(len(full), np.nan)
    for label in labels:
        if np.isfinite(by_step[label]).any():
            means[label] = np.nanmean(by_step[label])
    links: dict[tuple[int, ...], list[Suspect]] = {}
    for label in labels:
        peers = [other for other in same[job.label_names[label], int(full[label])] if np.isfinite(means[other])]
        if not np.isfinite(means[label]):
            continue
        if len(peers) > 1:
            quick = np.array(peers)[np.argsort(means[peers])[: max(1, round(QUICKER * len(peers)))]]
            like = float(means[quick].mean())
        else:
            like = float(np.nanquantile(by_step[label], QUICKER))
        mine = syncs.label == label
        greatest = max(full[other] for other in labels if job.label_names[other] == job.label_names[label])
        everyone = greatest == len(job.account.ranks)
        unseen = job.absent and (full[label] < greatest or everyone)
        if unseen and full[label] < greatest:
            complete = [other for other in labels if job.label_names[other] == job.label_names[label]]
            like = float(np.nanmean([means[other] for other in complete if full[other] == greatest]))
        elif unseen:
            unseen = _unseen(recorded[1 : 1 + len(mine)][mine], transfer[mine])
            like = float(np.nanmin(by_step[label])) if unseen else like
        hit, mean, factor = hits(by_step[label] - like, by_step[label])
        if not hit.any() or factor >= 1:
            continue
        if len(peers) == 1 and not unseen and not _stands_apart(by_step[label], hit, mean):
            continue
        recorded_in = np.isfinite(job.account.wall_ns[:, members[label]]).all(axis=1)
        own = edges[by_edge[bounds[label] : bounds[label + 1]]]
        own = own[hit[syncs.step[of_edge[own]]] & whole[of_edge[own]]]
        found = Suspect(
            what="unrecorded" if unseen else "link" if full[label] == 2 else "group",
            kinds=("communication",),
            ranks=members[label],
            change=Change(NOTHING.rows, NOTHING.less_ns, own, graph.transfer_ns[own] * (1 - factor)),
            steps=hit,
            excess_ns=mean,
            typical_ns=like,
            label=label,
            known_steps=int((recorded_in & job.judged).sum()),
        )
        yield found
        if found.what == "link":
            links.setdefault(members[label], []).append(found)
    for both in links.values():
        if len(both) > 1:
            yield replace(
                max(both, key=lambda one: one.excess_ns),
                change=together([one.change for one in both]),
                steps=np.logical_or.reduce([one.steps for one in both]),
                excess_ns=sum(one.excess_ns for one in both),
                typical_ns=sum(one.typical_ns for one in both),
            )


def _stands_apart(times: Float, hit: Bool, mean: float) -> bool:
    """Whether some steps (S,) are so much above the others that these are what is typical.

    They are where nearly all of one are above nearly all of the others; what most steps take is typical itself, unless
    it began or ended once.
    """
    known = np.isfinite(times)
    slow, others = hit[known], times[~hit & known]
    if not len(others) or (slow.sum() > len(others) + 1 and np.count_nonzero(np.diff(slow)) > 1):
        return False
    return bool(np.quantile(times[hit], 1 - NEARLY) - np.quantile(others, NEARLY) >= mean / 2)


def _unseen(begin: Float, transfer: Float) -> bool:
    """Whether the later the recorded ranks come to a communication, the sooner it ends: they wait for another."""
    order = np.argsort(begin)
    begin, transfer = begin[order], transfer[order]
    local = np.diff(begin) - transfer[:-1]  # since the one before ended
    left = transfer[1:]
    if len(local) < _FEWEST_TO_COMPARE or not np.std(local) > 0:
        return False
    return float(np.cov(local, left)[0, 1] / np.var(local, ddof=1)) < -0.5


def _of_all(job: Job) -> Iterator[Suspect]:
    """What all ranks do alike, in the steps in which even the quicker ranks take longer than in others."""
    account = job.account
    own = np.where(job.judged[:, None, None], account.own_ns, np.nan)
    everyone = np.arange(len(account.ranks))
    for kinds in (*((kind,) for kind in KINDS if kind not in ("communication", *COMPUTES)), COMPUTES):
        places = [KINDS.index(kind) for kind in kinds]
        times = own[:, :, places].sum(axis=2)
        if not np.nansum(times):
            continue
        if kinds[0] in WITHOUT:
            hit = np.nan_to_num(times).max(axis=1) > 0
            beyond: dict[int, tuple[Bool, Float | float]] = {places[0]: (hit, np.inf)}
            mean = float(np.nan_to_num(times).max(axis=1)[hit].mean()) if hit.any() else 0.0
        else:
            usual = np.nanquantile(times, QUICKER, axis=1, method="lower")
            level = float(np.nanquantile(usual, QUICKER))
            hit, mean, _ = hits(usual - level, usual)
            if kinds == ("data",) and level >= DATA_SHARE_OF_STEP * mean_step_ns(job):
                hit, mean = np.isfinite(usual), level
                beyond = {places[0]: (hit, np.inf)}  # without any
            elif not hit.any() or hit[np.isfinite(usual)].all():
                continue
            else:
                beyond = {}
                for place in places:
                    of_kind = np.nanmedian(own[:, :, place], axis=1)
                    in_hit, in_rest = np.nanmean(of_kind[hit]), np.nanmean(of_kind[~hit])
                    if in_hit - in_rest > LEAST_SHARE_OF_STEP * mean:  # as little is nobody's, here as elsewhere
                        # What is longer differs more, too.
                        beyond[place] = hit, own[:, :, place] * (1 - in_rest / in_hit)
        change, steps = _shortened(job, everyone, beyond)
        yield Suspect(
            what="all",
            kinds=tuple(KINDS[place] for place in beyond),
            ranks=(),
            change=change,
            steps=steps,
            excess_ns=mean,
            known_steps=int(job.judged.sum()),
        )


def _beside(job: Job) -> Iterator[Suspect]:
    """What computes longer in the steps in which something else runs beside it."""
    account = job.account
    runs = account.beside.any(axis=1) & job.judged
    rest = job.judged & ~runs
    if not runs.any() or rest.sum() < 2:
        return
    places = [KINDS.index(kind) for kind in COMPUTES]
    found: dict[int, Float] = {}  # rank -> by how much each kind is longer
    for rank in range(len(account.ranks)):
        own = account.own_ns[:, rank][:, places]
        inside, outside = own[runs & np.isfinite(own[:, 0])], own[rest & np.isfinite(own[:, 0])]
        if len(outside) < 2 or not len(inside):
            continue
        beyond = inside.mean(axis=0) - outside.mean(axis=0)
        by_chance = float(np.std(outside.sum(axis=1))) * (1 / len(inside) + 1 / len(outside)) ** 0.5
        if beyond.sum() > ERRORS * by_chance:
            found[rank] = beyond
    most = max((float(beyond.sum()) for beyond in found.values()), default=0.0)
    found = {rank: beyond for rank, beyond in found.items() if beyond.sum() > most / 2}
    if found:
        each = [
            _shortened(
                job, np.array([rank]), {kind: (runs, ns) for kind, ns in zip(places, beyond.tolist(), strict=True)}
            )
            for rank, beyond in found.items()
        ]
        yield Suspect(
            what="background",
            kinds=COMPUTES,
            ranks=tuple(found) if len(found) <= len(account.ranks) / 2 else (),
            change=together([change for change, _ in each]),
            steps=runs,
            excess_ns=most,
            known_steps=int(job.judged.sum()),
        )


def _uneven(job: Job) -> Iterator[Suspect]:
    """Work that is uneven: forward and backward of a rank are longer in the same steps.

    What they have in common is taken for it: each step of a rank is beyond the typical one by what both say, so that
    their noise, which they do not share, is not. What the optimizer has in common with them is the rank's speed.
    """
    account = job.account
    own = np.where(job.judged[:, None, None], account.own_ns, np.nan)
    ahead = own[:, :, KINDS.index("forward")]
    behind = own[:, :, KINDS.index("backward")] + own[:, :, KINDS.index("recompute")]
    optimizer = own[:, :, KINDS.index("optimizer")]
    more, longest = np.zeros(ahead.shape), np.zeros(len(ahead))
    for stage in np.unique(job.stages):
        mine = np.flatnonzero(job.stages == stage)
        mine = mine[(np.nansum(ahead[:, mine], axis=0) > 0) & (np.nansum(behind[:, mine], axis=0) > 0)]
        if len(mine) < 2:
            continue
        whole = ahead[:, mine] + behind[:, mine]
        is_more = np.zeros(whole.shape, dtype=bool)
        for quantile in (QUICKER, 0.5):  # then of those that are not known to have more
            one, other, both = (
                _beyond_usual(times, is_more, quantile) for times in (ahead[:, mine], behind[:, mine], whole)
            )
            known = np.isfinite(one) & np.isfinite(other)
            cov, var = np.cov(one[known], other[known])[0, 1], np.var(both[known])
            by_chance = np.std(one[known]) * np.std(other[known]) / known.sum() ** 0.5
            if np.nansum(speed := optimizer[:, mine]) > 0:
                cov -= max(0.0, np.cov(both[known], speed[known] / np.nanmean(speed))[0, 1])
            if not cov > ERRORS * by_chance:
                is_more[:] = False
                break
            is_more = known & (both > ERRORS * max(0.0, var - cov) ** 0.5)
        lost = np.where(is_more, whole * both / (1 + both), 0.0)
        most = lost.max(axis=1)
        first = np.unique(lost.argmax(axis=1)[job.judged & (most > most[job.judged].mean() / 2)])
        if len(first) > min(len(mine), int(job.judged.sum())) / 2:  # else few ranks are ever first: they are slower
            more[:, mine] = np.where(is_more, both, 0.0)
            longest = np.maximum(longest, most)
    if longest[job.judged].sum() < LEAST_SHARE_OF_STEP * mean_step_ns(job) * job.judged.sum():
        return
    work, rank = account.work, job.rank_of_work
    chosen = np.isin(work.kind, [KINDS.index(kind) for kind in COMPUTE])
    beyond = more[work.step, rank]
    less = np.where(chosen, work.ns * beyond / (1 + beyond), 0.0)
    yield Suspect(
        what="uneven",
        kinds=COMPUTE,
        ranks=(),
        change=change_of(less),
        steps=np.asarray(job.judged & (longest > longest[job.judged].mean() / 2)),
        known_steps=int(job.judged.sum()),
    )


def _beyond_usual(times: Float, is_more: Bool, quantile: float) -> Float:
    """(S, R) by which share each is beyond what its rank usually takes, and all ranks in the step."""
    usual = np.where(is_more, np.nan, times)
    share = times / np.nanquantile(usual, quantile, axis=0) - 1
    usual = np.where(is_more, np.nan, share)
    return np.asarray(share - np.nanquantile(usual, quantile, axis=1, keepdims=True, method="lower"))


def _layers(job: Job) -> Iterator[Suspect]:
    """Blocks that take longer than their siblings on all ranks."""
    layers, account = job.layers, job.account
    if layers is None or not layers.self_ns.size:
        return
    times = np.nan_to_num(layers.self_ns)  # (R, L, K)
    quick = np.nanquantile(layers.self_ns, QUICKER, axis=0)  # (L, K): of the quicker ranks, too
    blocks: dict[str, list[int]] = {}
    for place, name in enumerate(layers.layers):
        pattern, number = split_number(name)
        if number is not None and OPEN in pattern:
            blocks.setdefault(pattern, []).append(place)
    for siblings in blocks.values():
        if len(siblings) < _FEWEST_SIBLINGS:
            continue
        whole = np.nan_to_num(quick[siblings]).sum(axis=1)
        place = int(whole.argmax())
        others = np.delete(whole, place)
        if whole[place] - np.median(others) < ERRORS * float(np.std(others)):
            continue
        usual = np.nan_to_num(np.median(np.delete(quick[siblings], place, axis=0), axis=0))
        beyond = np.maximum(np.nan_to_num(quick[siblings[place]]) - usual, 0.0)
        there = np.flatnonzero(times[:, siblings[place]].sum(axis=1) > 0)
        members = np.searchsorted(account.ranks, layers.ranks[there])
        places = [KINDS.index(kind) for kind in layers.kinds]
        phases = account.own_ns[:, members][:, :, places].sum(axis=2)
        phases = np.where(job.judged, np.nanquantile(phases, QUICKER, axis=1, method="lower"), np.nan)
        hit = hits(phases - np.nanquantile(phases, 0.1), phases)[0]
        names = [layers.layers[sibling] for sibling in siblings]
        if not hit.any() or _beyond_siblings(job, names, place, there, job.judged & ~hit) > beyond.sum() / 2:
            hit = job.judged  # in the other steps, too
        own = account.own_ns[:, :, places]
        less = beyond * own / np.nanmean(own[hit][:, members], axis=(0, 1))
        each = {kind: (hit, less[:, :, at]) for at, kind in enumerate(places) if beyond[at] > 0}
        change, steps = _shortened(job, members, each)
        yield Suspect(
            what="all",
            kinds=tuple(kind for kind, ns in zip(layers.kinds, beyond.tolist(), strict=True) if ns > 0),
            ranks=(),
            change=change,
            steps=steps,
            excess_ns=float(beyond.sum()),
            typical_ns=float(usual.sum()),
            layer=names[place],
            known_steps=int(job.judged.sum()),
        )


def _beyond_siblings(job: Job, names: list[str], place: int, there: Int, steps: Bool) -> float:
    """What one of some layers takes longer than the typical one of them, in some steps and ranks; inf: not known."""
    if job.layers is None or job.layer_means is None or not steps.any():
        return np.inf
    ranks = job.layers.ranks[there[:_MOST_PEERS]].tolist()
    means = job.layer_means(ranks, job.account.steps[steps])
    times = np.zeros(len(names))
    for (_, layer, _), ns in means.items():
        if layer in names:
            times[names.index(layer)] += ns / len(ranks)
    return float(times[place] - np.median(np.delete(times, place)))


def with_layer(job: Job, one: Suspect) -> Suspect:
    """The layer that is most of it, where it is one: of a rank against others, of all against other steps."""
    if job.layer_means is None or one.layer is not None or not set(one.kinds) & set(COMPUTE) or len(one.ranks) > 1:
        return one
    if one.what not in ("rank", "all"):
        return one
    account = job.account
    if one.what == "rank":
        rank = one.ranks[0]
        peers = np.flatnonzero((job.stages == job.stages[rank]) & (np.arange(len(job.stages)) != rank))[:_MOST_PEERS]
        peers_steps = one.steps
        chosen = [rank]
    else:
        peers = np.arange(len(account.ranks))[:_MOST_PEERS]
        chosen = peers.tolist()
        peers_steps = job.judged & ~one.steps
    if not len(peers) or not peers_steps.any():
        return one
    there = job.layer_means([int(account.ranks[at]) for at in chosen], account.steps[one.steps])
    usual = job.layer_means([int(account.ranks[at]) for at in peers], account.steps[peers_steps])

    def by_layer(found: dict[tuple[int, str, str], float]) -> dict[str, float]:
        values: dict[str, dict[int, float]] = {}
        for (rank, layer, kind), ns in found.items():
            if kind in one.kinds or kind == "recompute":
                of = values.setdefault(layer, {})
                of[rank] = of.get(rank, 0.0) + ns
        return {layer: float(np.median(list(of.values()))) for layer, of in values.items()}

    like = by_layer(usual)
    beyond = {layer: ns - like.get(layer, ns) for layer, ns in by_layer(there).items()}
    parts = [layer for layer in beyond if not _holds_most(layer, beyond)]
    most = [layer for layer in parts if beyond[layer] >= TIED * one.excess_ns]
    if not most:
        return one
    deepest = max(most, key=lambda layer: (layer.count("."), beyond[layer]))
    return replace(one, layer=deepest)


def _holds_most(layer: str, layers: Collection[str]) -> bool:
    """The root, or what holds most of the layers: no one layer."""
    within = sum(other.startswith(f"{layer}.") for other in layers)
    return len(layers) > 1 and (within > (len(layers) - 1) / 2 or ("." not in layer and layer[:1].isupper()))
