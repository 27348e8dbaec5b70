"""Gathers, slice by slice, the events of a moment: allocations, allocations that failed, and the arrows to backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter

import numpy as np

from profiler_wrapper.recording.decoding import Event
from profiler_wrapper.recording.growing import Columns, Interned
from profiler_wrapper.recording.numbers import NO_TIME, column, fitting, nanoseconds
from profiler_wrapper.recording.recording import FailedAllocation, ForwardBackwardFlows, MemoryEvents

_ARGS = attrgetter("args")


class MemoryCollector:
    """Takes `[memory]` and `[OutOfMemory]` instants."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._columns = Columns()
        self._failures: list[FailedAllocation] = []

    def add(self, events: list[Event]) -> None:
        """The next allocations and frees."""
        if not events:
            return
        args = list(map(_ARGS, events))
        self._columns.add(
            time_ns=nanoseconds([event.ts for event in events]),
            lane=self._interned.lanes_of(events),
            address=column(args, "address"),
            size_bytes=column(args, "size_bytes"),
            total_allocated_bytes=column(args, "total_allocated_bytes"),
            total_reserved_bytes=column(args, "total_reserved_bytes"),
            device_type=fitting(column(args, "device_type"), np.int8),
            device=fitting(column(args, "device_id"), np.int16),
        )

    def add_failures(self, failed: list[Event]) -> None:
        """The next allocations that could not be met."""
        if not failed:
            return
        times = nanoseconds([event.ts for event in failed]).tolist()
        lanes = self._interned.lanes_of(failed).tolist()
        self._failures += [
            FailedAllocation(time_ns, lane, event.args.size_bytes, event.args.device_type, event.args.device_id)
            for event, time_ns, lane in zip(failed, times, lanes, strict=True)
            if time_ns != NO_TIME
        ]

    def failures(self) -> tuple[FailedAllocation, ...]:
        """All that failed, in order of time."""
        return tuple(sorted(self._failures))

    def memory(self) -> MemoryEvents:
        """All that was added, in order of time. To be called once."""
        take = self._columns.take
        time_ns = take("time_ns")
        order = np.argsort(time_ns, kind="stable")
        order = order[time_ns[order] != NO_TIME]
        return MemoryEvents(
            time_ns=time_ns[order],
            lane=take("lane", np.int32)[order],
            address=take("address")[order],
            size_bytes=take("size_bytes")[order],
            total_allocated_bytes=take("total_allocated_bytes")[order],
            total_reserved_bytes=take("total_reserved_bytes")[order],
            device_type=take("device_type", np.int8)[order],
            device=take("device", np.int16)[order],
        )


class FlowCollector:
    """Takes the ends of `fwdbwd` arrows."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._starts: dict[int | str, list[tuple[int, int]]] = defaultdict(list)
        self._ends: list[tuple[int | str, int, int]] = []

    def add(self, events: list[Event]) -> None:
        """The next ends."""
        if not events:
            return
        lanes = self._interned.lanes_of(events).tolist()
        times = nanoseconds([event.ts for event in events]).tolist()
        for event, lane, time_ns in zip(events, lanes, times, strict=True):
            if event.ph == "s":
                self._starts[event.id].append((lane, time_ns))
            else:
                self._ends.append((event.id, lane, time_ns))

    def flows(self) -> tuple[ForwardBackwardFlows, int]:
        """Pairs the ends by id; an id that is used again pairs in order. Also how many ends have no other."""
        pairs = []
        used: Counter[int | str] = Counter()
        for identity, lane, time_ns in self._ends:
            starts = self._starts.get(identity, [])
            if used[identity] < len(starts):
                pairs.append((*starts[used[identity]], lane, time_ns))
                used[identity] += 1
        ends = sum(map(len, self._starts.values())) + len(self._ends)
        table = np.array(pairs, np.int64).reshape(-1, 4)
        flows = ForwardBackwardFlows(
            forward_lane=table[:, 0].astype(np.int32),
            forward_ns=table[:, 1].copy(),
            backward_lane=table[:, 2].astype(np.int32),
            backward_ns=table[:, 3].copy(),
        )
        return flows, ends - 2 * len(pairs)
