"""Events, slice by slice, into the columns of a Recording."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import compress, islice
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.categories import MODULE_PREFIX, OURS, UNKNOWN, category_code
from profiler_wrapper.recording.columns import (
    DEVICE_CATEGORIES,
    Bool,
    Category,
    FailedAllocation,
    ForwardBackwardFlows,
    Int64,
    Lane,
    MemoryEvents,
    Recording,
    Spans,
)
from profiler_wrapper.recording.decoding import Args, Event
from profiler_wrapper.recording.details_collector import COLLECTIVE_NAME, DetailsCollector
from profiler_wrapper.recording.device_details import PythonCalls
from profiler_wrapper.recording.numbers import NO_TIME, column, fitting, nanoseconds

_HOUR_NS = 3600 * 10**9
_ON_DEVICE = (*DEVICE_CATEGORIES, Category.DEVICE_ANNOTATION, Category.SYNC)
_CAT = attrgetter("cat")
_NAME = attrgetter("name")
_PHASE = attrgetter("ph")
_ARGS = attrgetter("args")
_LANE = attrgetter("pid", "tid")


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


_MODULE, _CALL, _PLAIN = range(3)  # python_function: of a module, a call that tells its line, any other
_TELLS_LINE = re.compile(r"\(\d+\): ")


class _PythonKinds(dict[str, int]):
    """What a `python_function` event is, by its name."""

    def __missing__(self, name: str) -> int:
        kind = _MODULE if name.startswith(MODULE_PREFIX) else _CALL if _TELLS_LINE.search(name) else _PLAIN
        self[name] = kind
        return kind


class _Columns:
    """Columns that grow by slices."""

    def __init__(self) -> None:
        self._slices: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)

    def add(self, **columns: npt.NDArray[Any]) -> None:
        for name, values in columns.items():
            self._slices[name].append(values)

    def take(self, name: str, dtype: type[np.generic] = np.int64) -> npt.NDArray[Any]:
        """The whole column; its slices are given up."""
        slices = self._slices.pop(name, [])
        return np.concatenate(slices) if slices else np.empty(0, dtype)


class Collector:
    """Takes decoded events and, in the end, gives the Recording."""

    def __init__(self) -> None:
        self.count = 0  # events seen
        self.kept: Bool = np.empty(0, np.bool_)  # of the spans added, once the recording is made
        self._names = _Numbers()
        self._lanes = _Numbers()
        self._cats = _Numbers()
        self._phases = _Numbers()
        self._code_list: list[int] = []
        self._collective_list: list[bool] = []
        self._skipped: Counter[str] = Counter()
        self._spans = _Columns()
        self._memory = _Columns()
        self._details = DetailsCollector()
        self._calls = _Columns()
        self._python_kind = _PythonKinds()
        self._flow_starts: dict[int | str, list[tuple[int, int]]] = defaultdict(list)
        self._flow_ends: list[tuple[int | str, int, int]] = []
        self._failures: list[FailedAllocation] = []
        self._warnings: list[str] = []

    def add(self, events: list[Event]) -> list[Event]:
        """Adds the next events of the file; returns those that became spans, in order."""
        self.count += len(events)
        cat = np.fromiter(map(self._cats.__getitem__, map(_CAT, events)), np.int32, len(events))
        phase = np.fromiter(map(self._phases.__getitem__, map(_PHASE, events)), np.int32, len(events))
        category = self._codes()[cat]
        is_span = (phase == self._phases["X"]) & (category >= 0)
        is_call = self._part_python(is_span, category == Category.MODULE, events)
        self._ask(is_span, category == UNKNOWN, events, _looks_like_a_launch)
        is_instant = (phase == self._phases["i"]) | (phase == self._phases["I"])
        self._add_failures(list(compress(events, is_instant.tolist())))
        self._ask(is_instant, is_instant, events, _is_memory)
        is_flow = (cat == self._cats["fwdbwd"]) & ((phase == self._phases["s"]) | (phase == self._phases["f"]))
        spans = list(compress(events, is_span.tolist()))
        self._add_spans(spans, category[is_span])
        self._add_memory(list(compress(events, is_instant.tolist())))
        self._add_flows(list(compress(events, is_flow.tolist())))
        self._add_calls(list(compress(events, is_call.tolist())))
        self._count_skipped(~(is_span | is_instant | is_flow | is_call), cat, phase)
        return spans

    @property
    def met_collectives(self) -> bool:
        """Whether some event told of a collective."""
        return self._details.met_collectives

    def _codes(self) -> npt.NDArray[np.int8]:
        """Category code by the number of a `cat`."""
        cats = list(self._cats)
        self._code_list += map(category_code, cats[len(self._code_list) :])
        return np.array(self._code_list, np.int8)

    def _part_python(self, is_span: Bool, is_python: Bool, events: list[Event]) -> Bool:
        """Clears from `is_span` the calls of plain functions; gives those of them that tell their line."""
        is_call = np.zeros(len(events), dtype=np.bool_)
        chosen = np.flatnonzero(is_span & is_python)
        if len(chosen):
            kind = self._python_kind
            kinds = np.array([kind[events[i].name] for i in chosen.tolist()], dtype=np.int8)
            is_span[chosen[kinds != _MODULE]] = False
            is_call[chosen[kinds == _CALL]] = True
        return is_call

    @staticmethod
    def _ask(chosen: Bool, doubtful: Bool, events: list[Event], question: Callable[[Event], bool]) -> None:
        """Clears from `chosen` the doubtful events whose answer is no."""
        for index in np.flatnonzero(chosen & doubtful).tolist():
            if not question(events[index]):
                chosen[index] = False

    def _count_skipped(self, skipped: Bool, cat: npt.NDArray[np.int32], phase: npt.NDArray[np.int32]) -> None:
        cats, phases = list(self._cats), list(self._phases)
        kinds, counts = np.unique(cat[skipped].astype(np.int64) << 32 | phase[skipped], return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            name = cats[kind >> 32]
            if category_code(name) != OURS:
                self._skipped[name or f"ph {phases[kind & 0xFFFFFFFF]}"] += count

    def _lanes_of(self, events: list[Event]) -> npt.NDArray[np.int32]:
        return np.fromiter(map(self._lanes.__getitem__, map(_LANE, events)), np.int32, len(events))

    def _add_spans(self, events: list[Event], category: npt.NDArray[np.int8]) -> None:
        if not events:
            return
        args = list(map(_ARGS, events))
        name = np.fromiter(map(self._names.__getitem__, map(_NAME, events)), np.int32, len(events))
        on_device = np.isin(category, _ON_DEVICE)
        device, stream, graph_node = _of_some(args, on_device, "device", "stream", "graph_node")
        self._fill_from_lane(events, on_device & ((device < 0) | (stream < 0)), device, stream)
        sequence, forward_thread = _of_some(args, category == Category.CPU_OP, "sequence", "forward_thread")
        self._details.add(args, category, self._tell_collectives()[name])
        self._spans.add(
            category=category,
            name=name,
            lane=self._lanes_of(events),
            start_ns=nanoseconds([event.ts for event in events]),
            duration_ns=nanoseconds([event.dur for event in events]),
            correlation=column(args, "correlation"),
            external_id=column(args, "external_id"),
            sequence=sequence,
            forward_thread=fitting(forward_thread, np.int32),
            device=fitting(device, np.int16),
            stream=fitting(stream, np.int32),
            graph=graph_node > 0,
        )

    def _tell_collectives(self) -> Bool:
        """By the number of a name: whether such a CPU event may tell of a collective."""
        names = list(islice(self._names, len(self._collective_list), None))
        self._collective_list += [COLLECTIVE_NAME.search(name) is not None for name in names]
        return np.array(self._collective_list, np.bool_)

    @staticmethod
    def _fill_from_lane(events: list[Event], missing: Bool, device: Int64, stream: Int64) -> None:
        """A device event that does not say its device and stream has them as its pid and tid."""
        for index in np.flatnonzero(missing):
            pid, tid = events[index].pid, events[index].tid
            if device[index] < 0 and isinstance(pid, int):
                device[index] = pid
            if stream[index] < 0 and isinstance(tid, int):
                stream[index] = tid

    def _add_calls(self, events: list[Event]) -> None:
        if not events:
            return
        self._calls.add(
            name=np.fromiter(map(self._names.__getitem__, map(_NAME, events)), np.int32, len(events)),
            lane=self._lanes_of(events),
            start_ns=nanoseconds([event.ts for event in events]),
            duration_ns=nanoseconds([event.dur for event in events]),
        )

    def _add_memory(self, events: list[Event]) -> None:
        if not events:
            return
        args = list(map(_ARGS, events))
        self._memory.add(
            time_ns=nanoseconds([event.ts for event in events]),
            lane=self._lanes_of(events),
            address=column(args, "address"),
            size_bytes=column(args, "size_bytes"),
            total_allocated_bytes=column(args, "total_allocated_bytes"),
            total_reserved_bytes=column(args, "total_reserved_bytes"),
            device_type=fitting(column(args, "device_type"), np.int8),
            device=fitting(column(args, "device_id"), np.int16),
        )

    def _add_failures(self, events: list[Event]) -> None:
        failed = [event for event in events if event.name == "[OutOfMemory]"]
        times = nanoseconds([event.ts for event in failed]).tolist()
        lanes = self._lanes_of(failed).tolist()
        self._failures += [
            FailedAllocation(time_ns, lane, event.args.size_bytes, event.args.device_type, event.args.device_id)
            for event, time_ns, lane in zip(failed, times, lanes, strict=True)
            if time_ns != NO_TIME
        ]

    def _add_flows(self, events: list[Event]) -> None:
        if not events:
            return
        lanes = self._lanes_of(events).tolist()
        times = nanoseconds([event.ts for event in events]).tolist()
        for event, lane, time_ns in zip(events, lanes, times, strict=True):
            if event.ph == "s":
                self._flow_starts[event.id].append((lane, time_ns))
            else:
                self._flow_ends.append((event.id, lane, time_ns))

    # --- the end ---

    def recording(self, *, path: str, metadata: Mapping[str, Any], complete: bool, warnings: list[str]) -> Recording:
        """All that was added. To be called once."""
        spans = self._finished_spans()
        memory = self._finished_memory()
        flows = self._finished_flows()
        return Recording(
            path=path,
            names=tuple(self._names),
            lanes=tuple(Lane(*lane) for lane in self._lanes),
            spans=spans,
            memory=memory,
            flows=flows,
            metadata=metadata,
            complete=complete,
            warnings=(*warnings, *self._warnings),
            skipped=dict(self._skipped),
            failed_allocations=tuple(sorted(self._failures)),
            details=self._details.details(self.kept, spans.correlation),
            python=self._finished_calls(),
            collectives=self._details.collectives(self.kept),
        )

    def _finished_spans(self) -> Spans:
        take = self._spans.take
        category, lane = take("category", np.int8), take("lane", np.int32)
        start, duration = take("start_ns"), take("duration_ns")
        launches = self._launches_only(category, lane)
        if not launches.all():
            self._skipped["unknown category on a device lane"] += int((~launches).sum())
        self.kept = self._sane_times(start, duration) & launches
        keep = self.kept if not self.kept.all() else slice(None)
        category[category == UNKNOWN] = Category.RUNTIME
        return Spans(
            category=category[keep],
            name=take("name", np.int32)[keep],
            lane=lane[keep],
            start_ns=start[keep],
            duration_ns=duration[keep],
            correlation=take("correlation")[keep],
            external_id=take("external_id")[keep],
            sequence=take("sequence")[keep],
            forward_thread=take("forward_thread", np.int32)[keep],
            device=take("device", np.int16)[keep],
            stream=take("stream", np.int32)[keep],
            graph=take("graph", np.bool_)[keep],
        )

    @staticmethod
    def _launches_only(category: npt.NDArray[np.int8], lane: npt.NDArray[np.int32]) -> Bool:
        """False for events of an unknown category on a lane of a device: they launch nothing."""
        device_lanes = np.unique(lane[np.isin(category, DEVICE_CATEGORIES)])
        launches: Bool = (category != UNKNOWN) | ~np.isin(lane, device_lanes)
        return launches

    def _sane_times(self, start: Int64, duration: Int64) -> Bool:
        """False for events without a time, or with a duration that CUPTI made up."""
        timed: Bool = start != NO_TIME
        if not timed.any():
            return timed
        trace_ns = int(start[timed].max()) - int(start[timed].min())
        sane: Bool = (duration >= 0) & (duration <= max(10 * trace_ns, _HOUR_NS))
        for good, what in ((timed, "no time"), (sane | ~timed, "a negative or impossible duration")):
            count = int((~good).sum())
            if count:
                self._skipped[what] += count
                self._warnings.append(f"{count} events with {what} were left out")
        sane &= timed
        return sane

    def _finished_calls(self) -> PythonCalls:
        take = self._calls.take
        start, duration = take("start_ns"), take("duration_ns")
        keep = self._sane_times(start, duration)
        return PythonCalls(
            name=take("name", np.int32)[keep],
            lane=take("lane", np.int32)[keep],
            start_ns=start[keep],
            duration_ns=duration[keep],
        )

    def _finished_memory(self) -> MemoryEvents:
        take = self._memory.take
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

    def _finished_flows(self) -> ForwardBackwardFlows:
        """Pairs the ends by id; an id that is used again pairs in order."""
        pairs = []
        used: Counter[int | str] = Counter()
        for identity, lane, time_ns in self._flow_ends:
            starts = self._flow_starts.get(identity, [])
            if used[identity] < len(starts):
                pairs.append((*starts[used[identity]], lane, time_ns))
                used[identity] += 1
        ends = sum(map(len, self._flow_starts.values())) + len(self._flow_ends)
        if ends != 2 * len(pairs):
            self._skipped["fwdbwd"] += ends - 2 * len(pairs)
        table = np.array(pairs, np.int64).reshape(-1, 4)
        return ForwardBackwardFlows(
            forward_lane=table[:, 0].astype(np.int32),
            forward_ns=table[:, 1].copy(),
            backward_lane=table[:, 2].astype(np.int32),
            backward_ns=table[:, 3].copy(),
        )


def _of_some(args: list[Args], chosen: Bool, *fields: str) -> list[Int64]:
    """Columns of what only the chosen events tell; -1 for the others."""
    members = list(compress(args, chosen.tolist()))
    columns = [np.full(len(args), -1, dtype=np.int64) for _ in fields]
    if members:
        for values, field in zip(columns, fields, strict=True):
            values[chosen] = column(members, field)
    return columns


def _is_memory(event: Event) -> bool:
    return event.name == "[memory]"


def _looks_like_a_launch(event: Event) -> bool:
    args = event.args
    return args.correlation >= 0 and args.device < 0 and args.stream < 0
