"""Which forward op made an autograd node: by the `fwdbwd` arrow, else by number and thread."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict

import numpy as np

from profiler_wrapper.recording.columns import Category, Recording


class ForwardOps:
    """Finds the forward op of autograd nodes of one recording.

    A forward op and those inside it carry the number that the next node will get; the one that
    makes the node is the latest-starting among them. Numbers count per thread, and the profiler's
    own thread numbers are not the system's: the arrows tell which is which.
    """

    def __init__(self, recording: Recording) -> None:
        spans, flows = recording.spans, recording.flows
        forward = (spans.category == Category.CPU_OP) & (spans.sequence >= 0) & (spans.forward_thread <= 0)
        chosen = np.flatnonzero(forward)
        chosen = chosen[np.argsort(spans.start_ns[chosen], kind="stable")]
        self._ops: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self._lanes_of_number: dict[int, set[int]] = defaultdict(set)
        columns = (spans.lane, spans.sequence, spans.start_ns)
        for span, lane, number, start in zip(chosen.tolist(), *(c[chosen].tolist() for c in columns), strict=True):
            starts, ops = self._ops.setdefault((lane, number), ([], []))
            starts.append(start)
            ops.append(span)
            self._lanes_of_number[number].add(lane)
        ends = zip(flows.backward_lane.tolist(), flows.backward_ns.tolist(), strict=True)
        begins = zip(flows.forward_lane.tolist(), flows.forward_ns.tolist(), strict=True)
        self._arrows = dict(zip(ends, begins, strict=True))
        self._lane_of_thread = self._threads(recording)

    def _threads(self, recording: Recording) -> dict[int, int]:
        """The lane of each of the profiler's thread numbers, as far as arrows tell."""
        spans = recording.spans
        backward = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.forward_thread > 0))
        lanes: dict[int, int] = {}
        columns = (spans.forward_thread, spans.lane, spans.start_ns)
        for thread, lane, start in zip(*(c[backward].tolist() for c in columns), strict=True):
            arrow = self._arrows.get((lane, start))
            if arrow is not None:
                lanes.setdefault(thread, arrow[0])
        return lanes

    def find(self, number: int, forward_thread: int, ends: tuple[tuple[int, int], ...]) -> int:
        """The span of the forward op of the node with this number; -1 if it cannot be told.

        `ends`: (lane, start) of the node's events, the latest last; an arrow may end at any of them.
        """
        for end in ends:
            arrow = self._arrows.get(end)
            if arrow is not None:
                starts, ops = self._ops.get((arrow[0], number), ([], []))
                place = bisect_right(starts, arrow[1]) - 1
                if place >= 0:
                    return ops[place]
        lane = self._lane_of_thread.get(forward_thread)
        if lane is None or (lane, number) not in self._ops:
            lanes = self._lanes_of_number.get(number, set())
            if lane is not None or len(lanes) != 1:
                return -1
            (lane,) = lanes
        starts, ops = self._ops[lane, number]
        place = bisect_left(starts, ends[0][1]) - 1
        return ops[place] if place >= 0 else -1
