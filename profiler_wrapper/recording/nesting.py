"""Who encloses whom on each CPU thread, and how much time is an event's own."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from profiler_wrapper.recording.columns import Bool, Int32, Int64


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
    order = np.lexsort((np.arange(len(lane)), -end_ns, start_ns, lane))
    found = [-1] * len(lane)
    crossing: set[int] = set()
    stack: list[int] = []
    stack_end: list[int] = []
    current_lane = -1
    lanes, starts, ends = lane[order].tolist(), start_ns[order].tolist(), end_ns[order].tolist()
    for i, event_lane, start, end in zip(order.tolist(), lanes, starts, ends, strict=True):
        if event_lane != current_lane:
            current_lane = event_lane
            stack.clear()
            stack_end.clear()
        while stack_end and stack_end[-1] <= start and (start < end or stack_end[-1] < start):
            stack_end.pop()
            stack.pop()
        if stack_end:
            if stack_end[-1] >= end:
                found[i] = stack[-1]
            else:
                crossing.add(event_lane)
                found[i] = next((stack[k] for k in range(len(stack) - 1, -1, -1) if stack_end[k] >= end), -1)
        stack.append(i)
        stack_end.append(end)
    return Nesting(order, np.array(found, dtype=np.int32), tuple(sorted(crossing)))


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
    covered: list[bool] = counts.tolist()
    parent = nesting.parent.tolist()
    for i in nesting.order[~counts[nesting.order]].tolist():
        covered[i] = parent[i] >= 0 and covered[parent[i]]
    own[~np.array(covered, dtype=np.bool_)] = 0
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
