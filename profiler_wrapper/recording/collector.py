"""Events, slice by slice, into the columns of a Recording."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.attempt import attempt
from profiler_wrapper.recording.decoding import Args, Event
from profiler_wrapper.recording.details_collector import DetailsCollector
from profiler_wrapper.recording.growing import Columns, Interned, Numbers
from profiler_wrapper.recording.instants import FlowCollector, MemoryCollector
from profiler_wrapper.recording.marks import GARBAGE
from profiler_wrapper.recording.numbers import NO_TIME, column, fitting, nanoseconds
from profiler_wrapper.recording.recording import (
    DEVICE_CATEGORIES,
    MODULE_PREFIX,
    OURS,
    UNKNOWN,
    Bool,
    Category,
    CollectiveDetails,
    DeviceDetails,
    Int64,
    Lane,
    PythonCalls,
    Recording,
    Spans,
    category_code,
)

_T = TypeVar("_T")
_HOUR_NS = 3600 * 10**9
_DETAILS = "how kernels were launched, what copies moved and what collectives tell are"
_CAT = attrgetter("cat")
_NAME = attrgetter("name")
_PHASE = attrgetter("ph")
_ARGS = attrgetter("args")


_MODULE, _CALL, _PLAIN = range(3)  # python_function: of a module, a call that tells its line, any other
_TELLS_LINE = re.compile(r"\(\d+\): ")


class _PythonKinds(dict[str, int]):
    """What a `python_function` event is, by its name."""

    def __missing__(self, name: str) -> int:
        kind = _MODULE if name.startswith(MODULE_PREFIX) else _CALL if _TELLS_LINE.search(name) else _PLAIN
        self[name] = kind
        return kind


class Collector:
    """Takes decoded events and, in the end, gives the Recording."""

    def __init__(self) -> None:
        self.count = 0  # events seen
        self.kept: Bool = np.empty(0, np.bool_)  # of the spans added, once the recording is made
        self._interned = Interned()
        self._cats = Numbers()
        self._phases = Numbers()
        self._code_list: list[int] = []
        self._skipped: Counter[str] = Counter()
        self._untold_ns: Counter[str] = Counter()  # by category that nobody knows: of events that are in no figure
        self._spans = Columns()
        self._details: DetailsCollector | None = DetailsCollector(self._interned.names)  # None: it failed
        self._calls = Columns()
        self._python_kind = _PythonKinds()
        self._memory = MemoryCollector(self._interned)
        self._flows = FlowCollector(self._interned)
        self._warnings: list[str] = []

    def add(self, events: list[Event]) -> list[Event]:
        """Adds the next events of the file; returns those that became spans, in order."""
        self.count += len(events)
        cat = self._cats.of(map(_CAT, events), len(events))
        phase = self._phases.of(map(_PHASE, events), len(events))
        category = self._codes()[cat]
        is_span = (phase == self._phases["X"]) & (category >= 0)
        is_call = self._part_python(is_span, category == Category.MODULE, events)
        self._keep_launches(is_span, category == UNKNOWN, events)
        is_unknown = (category == UNKNOWN) | (cat == self._cats[""])
        self._add_untold((phase == self._phases["X"]) & is_unknown & ~is_span, events)
        is_memory = self._part_instants((phase == self._phases["i"]) | (phase == self._phases["I"]), events)
        is_flow = (cat == self._cats["fwdbwd"]) & ((phase == self._phases["s"]) | (phase == self._phases["f"]))
        spans = list(compress(events, is_span.tolist()))
        self._add_spans(spans, category[is_span])
        self._memory.add(list(compress(events, is_memory.tolist())))
        self._flows.add(list(compress(events, is_flow.tolist())))
        self._add_calls(list(compress(events, is_call.tolist())))
        self._count_skipped(~(is_span | is_memory | is_flow | is_call), cat, phase)
        return spans

    @property
    def met_collectives(self) -> bool:
        """Whether some event told of a collective."""
        return self._details is not None and self._details.met_collectives

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
    def _keep_launches(is_span: Bool, doubtful: Bool, events: list[Event]) -> None:
        """Clears from `is_span` the doubtful events that do not look like calls that launch something."""
        for index in np.flatnonzero(is_span & doubtful).tolist():
            args = events[index].args
            if args.correlation < 0 or args.device >= 0 or args.stream >= 0:
                is_span[index] = False

    def _add_untold(self, chosen: Bool, events: list[Event]) -> None:
        untold = list(compress(events, chosen.tolist()))
        durations = nanoseconds([event.dur for event in untold]).tolist() if untold else ()
        for event, duration in zip(untold, durations, strict=True):
            self._untold_ns[event.cat or "(none)"] += max(0, duration)

    def _part_instants(self, is_instant: Bool, events: list[Event]) -> Bool:
        """Adds the allocations that failed; gives which of the instants are allocations and frees."""
        is_memory = np.zeros(len(events), dtype=np.bool_)
        if is_instant.any():
            instants = list(compress(events, is_instant.tolist()))
            names = list(map(_NAME, instants))
            is_memory[is_instant] = [name == "[memory]" for name in names]
            if "[OutOfMemory]" in names:
                self._memory.add_failures([event for event in instants if event.name == "[OutOfMemory]"])
        return is_memory

    def _count_skipped(self, skipped: Bool, cat: npt.NDArray[np.int32], phase: npt.NDArray[np.int32]) -> None:
        cats, phases = list(self._cats), list(self._phases)
        kinds, counts = np.unique(cat[skipped].astype(np.int64) << 32 | phase[skipped], return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            name = cats[kind >> 32]
            if category_code(name) != OURS:
                self._skipped[name or f"ph {phases[kind & 0xFFFFFFFF]}"] += count

    def _add_spans(self, events: list[Event], category: npt.NDArray[np.int8]) -> None:
        if not events:
            return
        args = list(map(_ARGS, events))
        name = self._interned.names_of(events)
        on_device = (category >= Category.KERNEL) & (category < UNKNOWN)
        device, stream, graph_node = _of_some(args, on_device, "device", "stream", "graph_node")
        self._fill_from_lane(events, on_device & ((device < 0) | (stream < 0)), device, stream)
        sequence, forward_thread = _of_some(args, category == Category.CPU_OP, "sequence", "forward_thread")
        self._ask_details(lambda details: details.add(args, category, name), None)
        self._spans.add(
            category=category,
            name=name,
            lane=self._interned.lanes_of(events),
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

    def _ask_details(self, ask: Callable[[DetailsCollector], _T], otherwise: _T) -> _T:
        """What is told beside times is worth no recording: where that fails it is left out, and a warning says so."""
        details = self._details
        if details is None:
            return otherwise
        failed: list[str] = []
        told = attempt(_DETAILS, lambda: ask(details), otherwise, failed)
        if failed:
            self._details = None
            self._warnings += failed
        return told

    @staticmethod
    def _fill_from_lane(events: list[Event], missing: Bool, device: Int64, stream: Int64) -> None:
        """A device event that does not say its device and stream has them as its pid and tid, if these are numbers.

        Larger ones than these are names, such as the hash of a stream's.
        """
        for index in np.flatnonzero(missing):
            pid, tid = events[index].pid, events[index].tid
            if device[index] < 0 and isinstance(pid, int) and 0 <= pid < 1 << 31:
                device[index] = pid
            if stream[index] < 0 and isinstance(tid, int) and 0 <= tid < 1 << 31:
                stream[index] = tid

    def _add_calls(self, events: list[Event]) -> None:
        if not events:
            return
        self._calls.add(
            name=self._interned.names_of(events),
            lane=self._interned.lanes_of(events),
            start_ns=nanoseconds([event.ts for event in events]),
            duration_ns=nanoseconds([event.dur for event in events]),
        )

    # --- the end ---

    def recording(self, *, path: str, metadata: Mapping[str, Any], complete: bool, warnings: list[str]) -> Recording:
        """All that was added. To be called once."""
        spans = self._finished_spans()
        flows, lonely_ends = self._flows.flows()
        if lonely_ends:
            self._skipped["fwdbwd"] += lonely_ends
        none: tuple[CollectiveDetails, ...] = ()
        collectives = self._ask_details(lambda told: told.collectives(self.kept), none)
        details = self._ask_details(lambda told: told.details(self.kept, spans.correlation), DeviceDetails())
        calls = self._finished_calls()
        told = ", ".join(f"{cat} {time_ns / 1e6:.3f} ms" for cat, time_ns in self._untold_ns.most_common() if time_ns)
        if told:
            self._warnings.append(f"events of categories that are not known are in no figure: {told}")
        return Recording(
            path=path,
            names=tuple(self._interned.names),
            lanes=tuple(Lane(*lane) for lane in self._interned.lanes),
            spans=spans,
            memory=self._memory.memory(),
            flows=flows,
            metadata=metadata,
            complete=complete,
            warnings=(*warnings, *self._warnings),
            skipped=dict(self._skipped),
            failed_allocations=self._memory.failures(),
            details=details,
            python=calls,
            collectives=collectives,
        )

    def _finished_spans(self) -> Spans:
        take = self._spans.take
        category, lane = take("category", np.int8), take("lane", np.int32)
        start, duration = take("start_ns"), take("duration_ns")
        launches = self._launches_only(category, lane)
        if not launches.all():
            self._skipped["unknown category on a device lane"] += int((~launches).sum())
            self._untold_ns["on lanes of devices"] += int(np.maximum(duration[~launches], 0).sum())
        self.kept = self._sane_times(start, duration) & launches
        keep = self.kept if not self.kept.all() else slice(None)
        category[category == UNKNOWN] = Category.RUNTIME
        name = take("name", np.int32)
        category[name == self._interned.names.get(GARBAGE, -1)] = Category.ANNOTATION  # written as an op: see marks
        return Spans(
            category=category[keep],
            name=name[keep],
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


def _of_some(args: list[Args], chosen: Bool, *fields: str) -> list[Int64]:
    """Columns of what only the chosen events tell; -1 for the others."""
    if chosen.all():
        return [column(args, field) for field in fields]
    members = list(compress(args, chosen.tolist()))
    columns = [np.full(len(args), -1, dtype=np.int64) for _ in fields]
    if members:
        for values, field in zip(columns, fields, strict=True):
            values[chosen] = column(members, field)
    return columns
