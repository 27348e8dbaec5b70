"""Which forward op made an autograd node: by the `fwdbwd` arrow, else by number and thread."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

from profiler_wrapper.recording.recording import Category, ForwardBackwardFlows, Int32, Int64, Recording


class _Ops(NamedTuple):
    """Numbered forward ops of one thread, by number, then start."""

    numbers: memoryview[int]
    starts: memoryview[int]
    spans: memoryview[int]

    def latest(self, number: int, until_ns: int) -> int:
        """The latest-starting op with this number that starts up to `until_ns`; -1 for none."""
        first, last = bisect_left(self.numbers, number), bisect_right(self.numbers, number)
        place = bisect_right(self.starts, until_ns, first, last) - 1
        return self.spans[place] if place >= first else -1

    def has(self, number: int) -> bool:
        """Whether an op has this number."""
        place = bisect_left(self.numbers, number)
        return place < len(self.numbers) and self.numbers[place] == number


class _Arrows(NamedTuple):
    """`fwdbwd` arrows that end on one thread, by where they end."""

    ends: memoryview[int]
    forward_lanes: memoryview[int]
    forward_starts: memoryview[int]


class ForwardOps:
    """Finds the forward op of autograd nodes of one recording.

    A forward op and those inside it carry the number that the next node will get; the one that
    makes the node is the latest-starting among them. Numbers count per thread, and the profiler's
    own thread numbers are not the system's: the arrows tell which is which.
    """

    def __init__(self, recording: Recording) -> None:
        self._ops = _ops_of_threads(recording)
        self._arrows = _arrows_of_threads(recording.flows)
        self._lane_of_thread = self._threads(recording)

    def _threads(self, recording: Recording) -> dict[int, int]:
        """The lane of each of the profiler's thread numbers, as far as arrows tell."""
        spans = recording.spans
        backward = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.forward_thread > 0))
        lanes: dict[int, int] = {}
        for thread in np.unique(spans.forward_thread[backward]).tolist():
            members = backward[spans.forward_thread[backward] == thread]
            for span in members:
                arrow = self._arrow((int(spans.lane[span]), int(spans.start_ns[span])))
                if arrow is not None:
                    lanes[thread] = arrow[0]
                    break
        return lanes

    def _arrow(self, end: tuple[int, int]) -> tuple[int, int] | None:
        """(lane, start) of the forward op whose arrow ends here."""
        arrows = self._arrows.get(end[0])
        if arrows is None:
            return None
        place = bisect_right(arrows.ends, end[1]) - 1
        if place < 0 or arrows.ends[place] != end[1]:
            return None
        return arrows.forward_lanes[place], arrows.forward_starts[place]

    def find(self, number: int, forward_thread: int, ends: tuple[tuple[int, int], ...]) -> int:
        """The span of the forward op of the node with this number; -1 if it cannot be told.

        `ends`: (lane, start) of the node's events, the latest last; an arrow may end at any of them.
        """
        for end in ends:
            arrow = self._arrow(end)
            if arrow is not None and arrow[0] in self._ops:
                found = self._ops[arrow[0]].latest(number, arrow[1])
                if found >= 0:
                    return found
        lane = self._lane_of_thread.get(forward_thread)
        if lane is None:
            lanes = [lane for lane, ops in self._ops.items() if ops.has(number)]
            lane = lanes[0] if len(lanes) == 1 else None
        if lane is None or lane not in self._ops:
            return -1
        return self._ops[lane].latest(number, ends[0][1] - 1)


def _ops_of_threads(recording: Recording) -> dict[int, _Ops]:
    spans = recording.spans
    forward = (spans.category == Category.CPU_OP) & (spans.sequence >= 0) & (spans.forward_thread <= 0)
    chosen = np.flatnonzero(forward)
    threads = {}
    for lane in np.unique(spans.lane[chosen]).tolist():
        ops = chosen[spans.lane[chosen] == lane]
        ops = ops[np.lexsort((spans.start_ns[ops], spans.sequence[ops]))]
        threads[lane] = _Ops(_view(spans.sequence[ops]), _view(spans.start_ns[ops]), _view(ops))
    return threads


def _arrows_of_threads(flows: ForwardBackwardFlows) -> dict[int, _Arrows]:
    threads = {}
    for lane in np.unique(flows.backward_lane).tolist():
        chosen = np.flatnonzero(flows.backward_lane == lane)
        chosen = chosen[np.argsort(flows.backward_ns[chosen], kind="stable")]
        threads[lane] = _Arrows(
            _view(flows.backward_ns[chosen]), _view(flows.forward_lane[chosen]), _view(flows.forward_ns[chosen])
        )
    return threads


def _view(column: Int64 | Int32) -> memoryview[int]:
    """A column whose entries come as Python integers, one at a time."""
    return memoryview(column)  # type: ignore[arg-type]
