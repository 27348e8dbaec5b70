"""Find which forward op made an autograd node: by the `fwdbwd` arrow, else by number and thread."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

from profiler_wrapper.trace.recording import Category, Int32, Int64, Recording

_NO_END_NS = np.iinfo(np.int64).max


# What autograd makes for views that are written into in place, in an op that has made a node before: none has its own.
NODE_OF_A_VIEW = re.compile(r"(CopySlices|AsStridedBackward\d*)$")


class _Ops(NamedTuple):
    """Numbered forward ops of one thread, by number, then start."""

    numbers: memoryview[int]
    starts: memoryview[int]
    spans: memoryview[int]

    def latest(self, number: int, until_ns: int, *, or_before: bool) -> int:
        """The latest-starting op with this number, or the last before it, that starts up to `until_ns`; -1 for none."""
        last = bisect_right(self.numbers, number)
        first = bisect_left(self.numbers, self.numbers[last - 1] if or_before and last else number)
        place = bisect_right(self.starts, until_ns, first, last) - 1
        return self.spans[place] if place >= first else -1


class ForwardOps:
    """Finds the forward op of autograd nodes of one recording.

    A forward op and those inside it carry the number that the next node will get; the one that
    makes the node is the latest-starting among them. Numbers count per thread, and the profiler's
    own thread numbers are not the system's: the arrows tell which is which.
    """

    def __init__(self, recording: Recording) -> None:
        self._ops = _ops_of_threads(recording)
        flows = recording.flows
        ends = zip(flows.backward_lane.tolist(), flows.backward_ns.tolist(), strict=True)
        begins = zip(flows.forward_lane.tolist(), flows.forward_ns.tolist(), strict=True)
        self._arrows = dict(zip(ends, begins, strict=True))  # (lane, start) of a node's event -> of its forward op
        spans = recording.spans
        backward = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.forward_thread > 0))
        backward = backward[::-1]  # the first of each thread counts
        events = zip(spans.lane[backward].tolist(), spans.start_ns[backward].tolist(), strict=True)
        threads = zip(spans.forward_thread[backward].tolist(), map(self._arrows.get, events), strict=True)
        # The lane of each of the profiler's thread numbers, as far as arrows tell.
        self._lane_of_thread = {thread: arrow[0] for thread, arrow in threads if arrow is not None}

    def find(self, number: int, forward_thread: int, ends: tuple[tuple[int, int], ...], *, of_view: bool) -> int:
        """The span of the forward op of the node with this number; -1 if it cannot be told.

        `ends`: (lane, start) of the node's events, the latest last; an arrow may end at any of them. `of_view`: no op
        has its number, see `NODE_OF_A_VIEW`.
        """
        for end in ends:
            if (arrow := self._arrows.get(end)) is not None and arrow[0] in self._ops:
                found = self._ops[arrow[0]].latest(number, arrow[1], or_before=of_view)
                if found >= 0:
                    return found
        lane = self._lane_of_thread.get(forward_thread)
        if lane is None:
            lanes = [at for at, ops in self._ops.items() if ops.latest(number, _NO_END_NS, or_before=of_view) >= 0]
            lane = lanes[0] if len(lanes) == 1 else None
        if lane is None or lane not in self._ops:
            return -1
        return self._ops[lane].latest(number, ends[0][1] - 1, or_before=of_view)


def _ops_of_threads(recording: Recording) -> dict[int, _Ops]:
    spans = recording.spans
    chosen = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.sequence >= 0) & (spans.forward_thread <= 0))
    threads = {}
    for lane in np.unique(spans.lane[chosen]).tolist():
        ops = chosen[spans.lane[chosen] == lane]
        ops = ops[np.lexsort((spans.start_ns[ops], spans.sequence[ops]))]
        threads[lane] = _Ops(_view(spans.sequence[ops]), _view(spans.start_ns[ops]), _view(ops))
    return threads


def _view(column: Int64 | Int32) -> memoryview[int]:
    """A column whose entries come as Python integers, one at a time."""
    return memoryview(column)  # type: ignore[arg-type]
