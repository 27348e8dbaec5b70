"""Who encloses whom on each CPU thread, and how much time is an event's own."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from profiler_wrapper.recording.columns import Bool, Int32, Int64

_AT_ONCE = 1 << 16  # events as Python numbers at a time: a big trace would need gigabytes of them


class Nesting(NamedTuple):
    """The forest that events of CPU threads form."""

    order: Int64  # indices by lane, then start; an enclosing event before what it encloses
    parent: Int32  # per event: the latest-starting event of its lane that encloses it fully, or -1
    crossing_lanes: tuple[int, ...]  # lanes on which an event ends inside another that started before it


def nest(lane: Int32, start_ns: Int64, end_ns: Int64) -> Nesting:
    """Find the parent of every event.

    Events may cross (an annotation and a Python frame do): only full enclosure makes a parent. Of
    two events with the same extent the one that comes first in the file is the outer one.
    """
    order = np.lexsort((-end_ns, start_ns, lane))
    parent = np.full(len(lane), -1, dtype=np.int32)
    crossing: set[int] = set()
    stack: list[int] = []
    stack_end: list[int] = []
    current_lane = -1
    for first in range(0, len(order), _AT_ONCE):
        chunk = order[first : first + _AT_ONCE]
        found = [-1] * len(chunk)
        columns = (chunk, lane[chunk], start_ns[chunk], end_ns[chunk])
        for place, (i, event_lane, start, end) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if event_lane != current_lane:
                current_lane = event_lane
                stack.clear()
                stack_end.clear()
            while stack_end and stack_end[-1] <= start and (start < end or stack_end[-1] < start):
                stack_end.pop()
                stack.pop()
            if stack_end:
                if stack_end[-1] >= end:
                    found[place] = stack[-1]
                else:
                    crossing.add(event_lane)
                    found[place] = next((stack[k] for k in range(len(stack) - 1, -1, -1) if stack_end[k] >= end), -1)
            stack.append(i)
            stack_end.append(end)
        parent[chunk] = found
    return Nesting(order, parent, tuple(sorted(crossing)))


def nearest(parent: Int32, chosen: Bool) -> Int32:
    """Per event: itself, else the innermost event around it, that is `chosen`; -1 for none."""
    near = np.where(chosen, np.arange(len(parent), dtype=np.int32), parent)
    unsettled = np.flatnonzero((near >= 0) & ~chosen)
    while len(unsettled):  # each round looks twice as far
        unsettled = unsettled[~chosen[near[unsettled]]]
        near[unsettled] = near[near[unsettled]]
        unsettled = unsettled[near[unsettled] >= 0]
    return near


def nearest_above(parent: Int32, near: Int32) -> Int32:
    """Per event: what `nearest` found for the event around it; -1 where there is none."""
    return np.where(parent >= 0, near[parent], np.int32(-1))


def self_time(lane: Int32, start_ns: Int64, end_ns: Int64, counts: Bool) -> Int64:
    """Per event, the nanoseconds in which it is the innermost of its lane.

    Only instants inside at least one event that `counts` are given out, so the sum over a lane is
    the length of the union of those, also where events cross: each instant goes to the live event
    that started last.
    """
    nesting = nest(lane, start_ns, end_ns)
    duration = end_ns - start_ns
    own: Int64 = duration.copy()
    children = np.flatnonzero(nesting.parent >= 0)
    np.subtract.at(own, nesting.parent[children], duration[children])
    own[nearest(nesting.parent, counts) < 0] = 0
    for crossing_lane in nesting.crossing_lanes:
        members = nesting.order[lane[nesting.order] == crossing_lane]
        own[members] = _innermost_sweep(start_ns[members].tolist(), end_ns[members].tolist(), counts[members].tolist())
    return own


def _innermost_sweep(starts: list[int], ends: list[int], counts: list[bool]) -> list[int]:
    """Own time of the events of one lane, given in nesting order, crossings allowed."""
    own = [0] * len(starts)
    boundaries = sorted({*starts, *ends})
    live: list[int] = []  # a heap of negated places: the last in nesting order on top
    counting_until = boundaries[0] if boundaries else 0  # some live event counts up to here
    upcoming = 0
    for left, right in zip(boundaries, boundaries[1:], strict=False):
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
