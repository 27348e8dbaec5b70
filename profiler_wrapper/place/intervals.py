"""Unions of time intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.trace.recording import Bool, Int64


class Union(NamedTuple):
    """Disjoint intervals in order."""

    start_ns: Int64
    end_ns: Int64

    @property
    def length_ns(self) -> int:
        """Total length."""
        return int((self.end_ns - self.start_ns).sum())

    def covered_before(self, time_ns: Int64) -> Int64:
        """Per instant: the length of the union that lies before it."""
        if len(self.start_ns) == 0:
            return np.zeros(len(time_ns), dtype=np.int64)
        lengths = self.end_ns - self.start_ns
        before = np.concatenate([[0], np.cumsum(lengths)])
        place = np.searchsorted(self.start_ns, time_ns, side="right")
        last = np.maximum(place - 1, 0)
        partial = np.clip(time_ns - self.start_ns[last], 0, lengths[last])
        return np.where(place > 0, before[last] + partial, 0)

    def overlap(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Per given interval: how much of it the union covers."""
        return self.covered_before(end_ns) - self.covered_before(start_ns)


def union(start_ns: Int64, end_ns: Int64) -> Union:
    """The union of intervals given in any order."""
    if len(start_ns) == 0:
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(start_ns, kind="stable")
    starts, reach = start_ns[order], end_ns[order]
    np.maximum.accumulate(reach, out=reach)
    del order
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    last = np.append(first[1:] - 1, len(starts) - 1)
    return Union(starts[first], reach[last])


def uncovered(busy: Union, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64, Bool]:
    """Begin and end of what `busy` leaves of each interval, and whether it ends where `busy` goes on."""
    pieces = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))]
    for begin, end in zip(start_ns, end_ns, strict=True):
        first = int(np.searchsorted(busy.end_ns, begin, side="right"))
        last = int(np.searchsorted(busy.start_ns, end, side="left"))
        starts = np.maximum(np.append(begin, busy.end_ns[first:last]), begin)
        ends = np.minimum(np.append(busy.start_ns[first:last], end), end)
        real = starts < ends
        pieces.append((starts[real], ends[real], (np.arange(len(ends)) < len(ends) - 1)[real]))
    left, right, goes_on = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return left, right, goes_on
