"""One question: if X had been as its like, how much shorter would a step be?

X is a phase of a rank, a rank, a host, a stage, a layer, a link or a group, or what all ranks do in some steps. Each of
its operations loses X's mean excess over its like, taken over the steps that it hits; what the job gains is read off
the graph. What is named is the smallest X with nearly the greatest gain, then the same again without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from profiler_wrapper.ranks.excess import (
    ERRORS,
    LEAST_SHARE_OF_STEP,
    NEARLY,
    WITHOUT,
    Job,
    excess_of,
    losses,
    mean_step_ns,
)
from profiler_wrapper.ranks.graph import NOTHING, Change, change_of, together
from profiler_wrapper.ranks.model import Float
from profiler_wrapper.ranks.suspects import Suspect, suspects_of, with_layer

_MOST_CAUSES: Final = 3
_MOST_REPLAYED: Final = 24  # X, each time: those that may gain most
_AT_ONCE: Final = 4
_ANYONE: Final = ("uneven", "turns")  # another rank in each step


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Who slows a job: causes, each without those before it; and what all together cost, per step."""

    causes: tuple[Suspect, ...]
    suspects: tuple[Suspect, ...]  # each by itself, the greatest gain first
    step_ns: float  # on the clock
    lost_ns: float
    error: float  # of the graph: how far syncs begin from where it has them, the 95th percentile, of a step


def ask(job: Job) -> Answer:
    """The causes of a job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is typical of nothing is not known: nan
        return _answer(job)


def _answer(job: Job) -> Answer:
    graph = job.graph
    excess = excess_of(job)
    less = losses(job, excess)
    recorded = graph.times([NOTHING])[:, 0]
    step_ns = mean_step_ns(job)
    suspects = [_where_all_are(job, one) for one in suspects_of(job, excess, less, recorded)]
    everything = together([*(one.change for one in suspects if one.what not in _ANYONE), change_of(less)])
    least_ns, chance_ns = LEAST_SHARE_OF_STEP * step_ns, _chance(job, everything)
    # What recorded ranks wait for others that are not may follow from any cause: it is asked for without that.
    unseen = [one for one in suspects if one.what == "unrecorded"]
    suspects = [one for one in suspects if one.what != "unrecorded"]
    base = together([NOTHING, *(one.change for one in unseen)])
    as_it_was, without_all, end = graph.ends([NOTHING, everything, base]).tolist()
    lost = (as_it_was - without_all) / max(1, int(job.judged.sum()))
    first = _replayed(job, suspects, base, 0.0, 0.0, share=0.0)
    rest = [one for one in suspects if one.what not in (*_ANYONE, "tied")]
    fixed = _in_turn(job, rest, base, least_ns, chance_ns)
    if not fixed:  # nobody gains anything alone
        fixed = _in_turn(job, [one for one in suspects if one.what == "tied"], base, least_ns, chance_ns)
    anyone = [one for one in first if one.what in _ANYONE]
    greatest = max((one.gain_ns for one in anyone), default=0.0)
    near = (one for one in anyone if one.gain_ns >= NEARLY * greatest)
    uneven = min(near, key=lambda one: (one.what != "uneven", len(one.kinds)), default=None)
    several = 0.0 if uneven is None or uneven.what == "uneven" else NEARLY * sum(one.gain_ns for one in fixed)
    if uneven is not None and uneven.gain_ns >= max(least_ns, chance_ns, several):
        # Another rank in each step, where no single X has nearly as much. What is not uneven work for sure has to be as
        # much as several X, and counts by what it gains beside the first.
        without = together([base, *(one.change for one in fixed[:1] if several)])
        ends = graph.ends([without, together([without, uneven.change])])
        beside = _with_gain(uneven, float(ends[0] - ends[1]))
        if not fixed or NEARLY * beside.gain_ns > fixed[0].gain_ns:
            fixed = [uneven, *_in_turn(job, rest, together([base, uneven.change]), least_ns, chance_ns)]
    if unseen:
        most = max(unseen, key=lambda one: one.excess_ns)
        most = _with_gain(replace(most, change=base), as_it_was - end)
        first.append(most)
        if most.gain_ns >= least_ns:
            fixed = sorted([*fixed, most], key=lambda one: -one.gain_ns)
    causes = [with_layer(job, one) for one in fixed]
    layers = {(one.ranks, one.kinds): one.layer for one in causes}
    named = [one.what for one in causes]
    first = [one for one in first if one.what not in _ANYONE or one.what in named]  # they hold what others are
    each = (replace(one, layer=layers.get((one.ranks, one.kinds), one.layer)) for one in _each_once(first))
    order = sorted(each, key=lambda one: -one.gain_ns)
    lost = max([lost, *(one.gain_ns for one in causes[:1])])
    return Answer(tuple(causes), tuple(order), step_ns, lost, _error(job, recorded, step_ns))


def _each_once(suspects: Sequence[Suspect]) -> Iterator[Suspect]:
    """Of the same ranks, or the same communication, the smallest with nearly as much as any."""
    same: dict[tuple[object, ...], list[Suspect]] = {}
    for one in suspects:
        key = (one.ranks, one.label) if one.ranks else (one.what, () if one.what in _ANYONE else one.kinds, one.layer)
        same.setdefault(key, []).append(one)
    for each in same.values():
        if (smallest := _smallest(each, 0.0)) is not None:
            yield smallest


def _error(job: Job, recorded: Float, step_ns: float) -> float:
    """How far the time from a sync to the next one of its name is from that of the graph, 95th percentile."""
    syncs = job.account.syncs
    if not job.measured or not job.ordered:
        return 0.0 if job.ordered else 1.0
    order = np.lexsort((syncs.begin_ns, syncs.label))
    same = np.diff(syncs.label[order]) == 0
    there, found = (np.diff(times[order])[same] for times in (syncs.begin_ns, recorded[1 : 1 + len(order)]))
    return float(np.percentile(np.abs(there - found), 95)) / step_ns if len(there) and step_ns > 0 else 0.0


def _where_all_are(job: Job, one: Suspect) -> Suspect:
    """An X in the steps that all ranks have, if it hits any: what a rank waits for one that is cut, nothing tells."""
    account = job.account
    whole = np.isfinite(account.wall_ns).all(axis=1) & job.judged
    hit = one.steps & whole
    if not hit.any() or whole[job.judged].all():
        return one
    rows, less_ns, edges, edges_less_ns = one.change
    kept = whole[account.work.step[rows]]
    moved = whole[account.syncs.step[account.syncs.of[job.graph.instance[edges]]]]
    change = Change(rows[kept], less_ns[kept], edges[moved], edges_less_ns[moved])
    known = one.known_steps * float(hit.sum() / one.steps[job.judged].sum())  # as many of it as it hits there
    return replace(one, change=change, known_steps=known)


def _with_gain(one: Suspect, gain_ns: float) -> Suspect:
    return replace(one, gain_ns=gain_ns / max(1.0, one.known_steps))


def _replayed(
    job: Job, suspects: Sequence[Suspect], base: Change, least_ns: float, chance_ns: float, *, share: float
) -> list[Suspect]:
    """Those that gain this much, and this share of the greatest, or more, with what they gain beside `base`.

    What an X takes of the critical path is the most that it can gain, so only some have to be replayed.
    """
    graph = job.graph
    on_path = np.zeros(len(graph.source), dtype=bool)
    times = graph.times([base])[:, 0]
    on_path[graph.path(base, times)] = True

    def most(one: Suspect) -> float:
        rows, less_ns, edges, edges_less_ns = one.change
        taken = less_ns[on_path[graph.edge_of_work[rows]]].sum() + edges_less_ns[on_path[edges]].sum()
        return float(taken) / max(1, one.known_steps)

    bounds = [most(one) for one in suspects]
    order = sorted(range(len(suspects)), key=lambda place: -bounds[place])[:_MOST_REPLAYED]
    found: list[Suspect] = []
    end = times[graph.end]
    for first in range(0, len(order), _AT_ONCE):
        chosen = [place for place in order[first : first + _AT_ONCE] if bounds[place] > 0]
        greatest = max((one.gain_ns for one in found), default=0.0)
        if not chosen or bounds[chosen[0]] < max(least_ns, share * greatest):
            break
        without = graph.ends([together([base, suspects[place].change]) for place in chosen])
        each = [_with_gain(suspects[place], gain) for place, gain in zip(chosen, (end - without).tolist(), strict=True)]
        found += [one for one in each if one.gain_ns >= _least(job, one, least_ns, chance_ns)]
    return found


def _in_turn(job: Job, suspects: Sequence[Suspect], base: Change, least_ns: float, chance_ns: float) -> list[Suspect]:
    """The one with the greatest gain, then that with the greatest gain without it, and so on."""
    causes: list[Suspect] = []
    while len(causes) < _MOST_CAUSES and suspects:
        found = _replayed(job, suspects, base, least_ns, chance_ns, share=NEARLY)
        if not found:
            break
        # The smallest X with nearly the greatest gain; not one that gains it elsewhere: both would gain more.
        greatest = max(found, key=lambda one: one.gain_ns)
        near = [one for one in found if one.gain_ns >= NEARLY * greatest.gain_ns]
        end, *both = job.graph.ends([base, *(together([base, greatest.change, one.change]) for one in near)])
        same = [
            one
            for one, end_without in zip(near, both, strict=True)
            if NEARLY * _with_gain(greatest, float(end - end_without)).gain_ns <= greatest.gain_ns
        ]
        chosen = min(same, key=lambda one: (one.size, -one.gain_ns))
        suspects = [one for one in suspects if one.change is not chosen.change]
        base = together([base, chosen.change])
        causes.append(chosen)
    return causes


def _chance(job: Job, everything: Change) -> float:
    """What may be gained by chance, per step, where steps are chosen by their times: by how they differ otherwise."""
    syncs = job.account.syncs
    ends = np.full(len(job.judged), -1.0)
    np.maximum.at(ends, syncs.step, job.graph.times([everything])[1 : 1 + len(syncs.step), 0])
    lengths = np.diff(ends[(ends >= 0) & job.judged])
    return ERRORS * float(np.std(lengths)) / float(max(1, len(lengths))) ** 0.5 if len(lengths) > 1 else 0.0


def _least(job: Job, one: Suspect, least_ns: float, chance_ns: float) -> float:
    by_times = one.steps[job.judged].sum() < NEARLY * min(one.known_steps, job.judged.sum())
    return max(least_ns, chance_ns) if by_times and not set(one.kinds) <= set(WITHOUT) else least_ns


def _smallest(found: Sequence[Suspect], least_ns: float) -> Suspect | None:
    greatest = max((one.gain_ns for one in found), default=0.0)
    if greatest < least_ns or greatest <= 0:
        return None
    return min((one for one in found if one.gain_ns >= NEARLY * greatest), key=lambda one: (one.size, -one.gain_ns))
