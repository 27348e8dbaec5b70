"""Who encloses whom on each CPU thread, and how much time is an event's own."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.trace.recording import Bool, Int32, Int64, PythonCalls, Spans

if TYPE_CHECKING:
    pass

Events = Spans | PythonCalls
_ROUNDING_NS = 2  # by which neighbours may overlap that a file rounds
_MOST_APART = 1000  # groups of events that are swept at a time, as lists: these take ten times the memory of columns


class Nesting(NamedTuple):
    """The forest that events of CPU threads form."""

    order: Int32  # indices by lane, then start; an enclosing event before what it encloses
    parent: Int32  # per event: the latest-starting event of its lane that encloses it fully, or -1
    crossing_lanes: tuple[int, ...]  # lanes on which an event ends inside another that started before it


def nest(lane: Int32, start_ns: Int64, end_ns: Int64, *, slack_ns: int = 0) -> Nesting:
    """Find the parent of every event.

    Events may cross (an annotation and a Python frame do): only full enclosure makes a parent. Of
    two events with the same extent the one that comes first in the file is the outer one. Such as cross by `slack_ns`
    at most make no lane one of `crossing_lanes`.
    """
    order = np.lexsort((-end_ns, start_ns, lane)).astype(np.int32)
    lanes, ends = lane[order], end_ns[order]
    above = np.arange(-1, len(order) - 1, dtype=np.int32)  # places in `order`; the one before is the first guess
    wrong = np.arange(len(order), dtype=np.int32)
    while len(wrong):  # what a wrong guess has tried in vain encloses neither: take over its guess
        wrong = wrong[above[wrong] >= 0]
        guess = above[wrong]
        other_lane = lanes[guess] != lanes[wrong]
        above[wrong[other_lane]] = -1
        wrong = wrong[~other_lane & (ends[guess] < ends[wrong])]
        above[wrong] = above[above[wrong]]
    parent = np.empty(len(order), dtype=np.int32)
    parent[order] = np.where(above >= 0, order[above], -1)
    return Nesting(order, parent, _crossing_lanes(lanes, start_ns[order], ends, above, slack_ns))


def nest_chosen(events: Events, chosen: Bool) -> Nesting:
    """The nesting of the chosen events, as if there were no others."""
    index = np.flatnonzero(chosen).astype(np.int32)
    local = nest(events.lane[index], events.start_ns[index], events.end_ns[index])
    parent = np.full(len(events), -1, dtype=np.int32)
    parent[index] = np.where(local.parent >= 0, index[local.parent], -1)
    return Nesting(index[local.order], parent, local.crossing_lanes)


def depths(parent: Int32) -> Int32:
    """Per event how many are around it; `parent`: of which it is straight inside, -1 for none."""
    depth, above = (parent >= 0).astype(np.int32), parent.copy()
    while (further := above >= 0).any():  # each round looks twice as far
        depth[further] += depth[above[further]]
        above[further] = above[above[further]]
    return depth


def rows_of_lanes(lane: Int32, start_ns: Int64, end_ns: Int64) -> tuple[Int32, Int32]:
    """(`Nesting.order`, a row of its lane per event): below what encloses it, and no two of a row overlap.

    Where events of a lane cross, each has the first row that is free.
    """
    found = nest(lane, start_ns, end_ns, slack_ns=_ROUNDING_NS)
    row = depths(found.parent)
    for one in found.crossing_lanes:
        members = found.order[lane[found.order] == one]
        columns = (members, found.parent[members], start_ns[members] + _ROUNDING_NS, end_ns[members])
        taken_until: list[int] = []  # per row
        for event, around, start, end in zip(*(column.tolist() for column in columns), strict=True):
            place = int(row[around]) + 1 if around >= 0 else 0
            while place < len(taken_until) and taken_until[place] > start:
                place += 1
            taken_until[place : place + 1] = [end]
            row[event] = place
    return found.order, row


def _crossing_lanes(lane: Int32, start_ns: Int64, end_ns: Int64, above: Int32, slack_ns: int) -> tuple[int, ...]:
    """Lanes with an event that ends inside a later one: then two neighbours below one parent overlap."""
    siblings = np.argsort(above, kind="stable")
    before, after = siblings[:-1], siblings[1:]
    by_ns = np.minimum(end_ns[before] - start_ns[after], end_ns[after] - end_ns[before])
    overlap = (above[before] == above[after]) & (lane[before] == lane[after]) & (by_ns > slack_ns)
    return tuple(np.unique(lane[before[overlap]]).tolist())


def crossed(start_ns: Int64, end_ns: Int64, others_start_ns: Int64, others_end_ns: Int64) -> Bool:
    """Per interval: whether one of the others overlaps it and neither holds the other."""
    by_start, by_end = np.argsort(others_start_ns), np.argsort(others_end_ns)
    starts, ends = others_start_ns[by_start], others_end_ns[by_end]
    found = np.zeros(len(start_ns), dtype=np.bool_)
    for i, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        begun_inside = by_start[np.searchsorted(starts, start, side="right") : np.searchsorted(starts, end)]
        ended_inside = by_end[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, end)]
        found[i] = (others_end_ns[begun_inside] > end).any() or (others_start_ns[ended_inside] < start).any()
    return found


def nearest(parent: Int32, chosen: Bool) -> Int32:
    """Per event: itself, else the innermost event around it, that is `chosen`; -1 for none."""
    near = np.where(chosen, np.arange(len(parent), dtype=np.int32), parent)
    unsettled = np.flatnonzero((near >= 0) & ~chosen).astype(np.int32)
    while len(unsettled):  # each round looks twice as far
        unsettled = unsettled[~chosen[near[unsettled]]]
        near[unsettled] = near[near[unsettled]]
        unsettled = unsettled[near[unsettled] >= 0]
    return near


def nearest_above(parent: Int32, near: Int32) -> Int32:
    """Per event: what `nearest` found for the event around it; -1 where there is none."""
    above: Int32 = near[parent]
    above[parent < 0] = -1
    return above


def innermost_around(nesting: Nesting, events: Events, lane: Int32, start_ns: Int64, end_ns: Int64) -> Int32:
    """Per interval of a lane the innermost of the nested events that holds it, both ends included; -1 for none."""
    ends, lanes = events.end_ns, events.lane[nesting.order]
    found = np.full(len(lane), -1, dtype=np.int32)
    for one in np.unique(lane).tolist():
        there = nesting.order[np.searchsorted(lanes, one) : np.searchsorted(lanes, one, side="right")]
        asked = np.flatnonzero(lane == one)
        last = np.searchsorted(events.start_ns[there], start_ns[asked], side="right") - 1
        asked, last = asked[last >= 0], last[last >= 0]
        around = there[last]
        while len(asked):
            inside = ends[around] >= end_ns[asked]
            found[asked[inside]] = around[inside]
            asked, around = asked[~inside], nesting.parent[around[~inside]]
            asked, around = asked[around >= 0], around[around >= 0]
    return found


def self_time(
    nesting: Nesting, lane: Int32, start_ns: Int64, duration_ns: Int64, *, counts: Bool, takes: Bool | None = None
) -> Int64:
    """Per event, the nanoseconds in which it is the innermost of its lane; 0 for one that takes none.

    Only instants inside at least one event that `counts` are given out, to events that count and to
    those that only take. So the sum over a lane is the length of the union of events that count,
    also where events cross: each instant goes to the live event that started last.
    """
    takes = counts if takes is None else takes | counts
    around = nearest_above(nesting.parent, nearest(nesting.parent, takes))
    own = np.where(takes, duration_ns, 0)
    inner = takes & (around >= 0)
    np.subtract.at(own, around[inner], duration_ns[inner])
    del around, inner
    own[nearest(nesting.parent, counts) < 0] = 0
    for crossing_lane in nesting.crossing_lanes:
        members = nesting.order[(lane[nesting.order] == crossing_lane) & takes[nesting.order]]
        starts, ends = start_ns[members], start_ns[members] + duration_ns[members]
        apart = np.flatnonzero(starts[1:] >= np.maximum.accumulate(ends)[:-1]) + 1  # nothing lasts over these places
        for piece in np.split(np.arange(len(members)), apart[::_MOST_APART]):
            columns = (starts[piece], ends[piece], counts[members[piece]])
            own[members[piece]] = _innermost_sweep(*(column.tolist() for column in columns))
    return own


def _innermost_sweep(starts: list[int], ends: list[int], counts: list[bool]) -> list[int]:
    """Own time of the events of one lane, given in nesting order, crossings allowed."""
    own = [0] * len(starts)
    boundaries = sorted({*starts, *ends})
    live: list[int] = []  # a heap of negated places: the last in nesting order on top
    counting_until = boundaries[0] if boundaries else 0  # some live event counts up to here
    upcoming = 0
    for left, right in pairwise(boundaries):
        while upcoming < len(starts) and starts[upcoming] == left:
            heapq.heappush(live, -upcoming)
            if counts[upcoming]:
                counting_until = max(counting_until, ends[upcoming])
            upcoming += 1
        while live and ends[-live[0]] <= left:
            heapq.heappop(live)
        if live and left < counting_until:
            own[-live[0]] += right - left
    return own


def outermost(parent: Int32, near: Int32, is_border: Bool | None = None) -> Int32:
    """Per event the outermost of what `nearest` finds around it, up to the next border; -1 for none."""
    above = nearest_above(parent, near)
    found: Int32 = near.copy()
    members = np.flatnonzero(found >= 0)
    while len(members):
        further = above[found[members]]
        moves = further >= 0
        if is_border is not None:
            moves &= ~is_border[found[members]] & ~is_border[further]
        members, further = members[moves], further[moves]
        found[members] = further
    return found
