"""Unions of time intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.recording.recording import Int64


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
        covered: Int64 = np.where(place > 0, before[last] + partial, 0)
        return covered

    def overlap(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Per given interval: how much of it the union covers."""
        return self.covered_before(end_ns) - self.covered_before(start_ns)


def union(start_ns: Int64, end_ns: Int64) -> Union:
    """The union of intervals given in any order."""
    if len(start_ns) == 0:
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(start_ns, kind="stable")
    starts, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    begins = np.concatenate([[True], starts[1:] > reach[:-1]])
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, len(starts) - 1)
    return Union(starts[first], reach[last])
