"""Chrome trace -> Recording: any file that torch.profiler wrote, old or new, plain or gzipped."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from profiler_wrapper.errors import BrokenTrace, attempt
from profiler_wrapper.trace.durations import bound_durations
from profiler_wrapper.trace.events import ABSENT, EXPORT, Args, Event, Progress, TraceEvents, no_garbage_collection
from profiler_wrapper.trace.marks import GARBAGE, PREFIX
from profiler_wrapper.trace.processes import choose, find_processes, refuse_mixed
from profiler_wrapper.trace.recording import (
    DEVICE_CATEGORIES,
    MODULE_PREFIX,
    UNKNOWN,
    Bool,
    Category,
    CollectiveDetails,
    Configurations,
    DeviceDetails,
    FailedAllocation,
    ForwardBackwardFlows,
    Int8,
    Int32,
    Int64,
    Lane,
    MemoryEvents,
    PythonCalls,
    Recording,
    ShapeCollector,
    Shapes,
    Spans,
    category_code,
)

_T = TypeVar("_T")
_NO_TIME = int(np.iinfo(np.int64).min)
_LIMIT_US = (1 << 62) // 1000  # 146 years
_HOUR_NS = 3600 * 10**9
_LARGEST = 1 << 62  # of what counts as a number of things
_MOST_RANKS = 1 << 20
_LONGEST_KIND = 60
_DETAILS = "how kernels were launched, what copies moved and what collectives tell are"
_MODULE, _CALL, _PLAIN = range(3)  # python_function: of a module, a call with its line, any other
_NAMES_OF_MODELS = (MODULE_PREFIX, PREFIX, "ProfilerStep#", "Optimizer.", "autograd::engine::")
_HAS_LINE = re.compile(r"\(\d+\): ")

_CAT, _NAME, _PHASE, _ARGS, _TS, _DUR = map(attrgetter, ("cat", "name", "ph", "args", "ts", "dur"))
_LANE = attrgetter("pid", "tid")
_NO_SHAPES = dict.fromkeys(("dims", "types", "concrete", "old_dims", "strides"), ABSENT)
_GRID, _COLLECTIVE = attrgetter("grid"), attrgetter("collective")
_CONFIGURATION = attrgetter(
    "grid", "block", "registers", "shared_memory", "copied_bytes", "blocks_per_sm", "occupancy_percent"
)


def read(
    path: str | os.PathLike[str], *, process: int | str | None = None, progress: Progress | None = None
) -> Recording:
    """Reads a trace in slices; a torn file up to the tear, with `complete=False` and a warning.

    `process`: which one, by its pid, where the traces of several were put into one file. `progress` is called with how
    many bytes of the file have been read, of how many.

    Raises:
        BrokenTrace: the file is not a trace, or is malformed before its end; the message has the
            file, the byte offset and the cause. Or it holds several processes that cannot be told apart.
        OSError: the file is missing, a directory or unreadable.
        SeveralProcesses: it holds several, and none is chosen.
        WrongUse: there is no such process.
    """
    return _read(path, None, process, progress)[0]


def read_with_shapes(
    path: str | os.PathLike[str],
    wanted: Callable[[str], bool] | None = None,
    *,
    process: int | str | None = None,
    progress: Progress | None = None,
) -> tuple[Recording, Shapes]:
    """What `read` gives and raises, and shapes of ops by index of the span; with `wanted`, of ops of these names."""
    shapes = ShapeCollector(wanted)
    recording, kept = _read(path, shapes, process, progress)
    return recording, shapes.shapes(kept)


@no_garbage_collection()
def _read(
    path: str | os.PathLike[str], shapes: ShapeCollector | None, process: int | str | None, progress: Progress | None
) -> tuple[Recording, Bool]:
    """The recording, and which of the events that `shapes` was given are spans of it."""
    trace, collector = TraceEvents(path, progress), _Collector()
    for events in trace.slices():
        spans = collector.add(events)
        if shapes is not None:
            shapes.add(spans)
        del events, spans  # before the next are decoded, so that those take their place
    if trace.misfits:
        if not collector.count:
            raise BrokenTrace(
                f"{path}: byte 0: none of its {trace.misfits} entries is an event of a Chrome trace. {EXPORT}"
            )
        trace.warnings.append(f"{trace.misfits} entries of traceEvents could not be understood and were left out")
    return collector.finish(os.fspath(path), trace, process)


# --- what grows slice by slice ---


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number

    def of(self, things: Iterable[Any], count: int) -> Int32:
        """The numbers of `count` things."""
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class _Columns:
    """Columns that grow by slices, each in one piece of memory; -1 stands where a number does not fit."""

    def __init__(self, **dtypes: type[np.generic]) -> None:
        self._grown = {name: (np.dtype(dtype), bytearray()) for name, dtype in dtypes.items()}

    def add(self, **columns: npt.NDArray[Any]) -> None:
        """The next slice of every column."""
        for name, values in columns.items():
            dtype, grown = self._grown[name]
            if values.dtype != dtype and values.dtype.kind == "i":
                limits = np.iinfo(dtype)
                values = np.where((values < limits.min) | (values > limits.max), -1, values).astype(dtype)
            grown += values.tobytes()

    def take(self, name: str) -> npt.NDArray[Any]:
        """A whole column, which is given up."""
        dtype, grown = self._grown.pop(name)
        return np.frombuffer(grown, dtype)

    def peek(self, name: str) -> npt.NDArray[Any]:
        """A whole column, which stays: no slice can be added while it is held."""
        return np.frombuffer(self._grown[name][1], self._grown[name][0])

    def rest(self, chosen: Bool | Int64 | slice) -> dict[str, npt.NDArray[Any]]:
        """The chosen entries of all columns that are left."""
        return {name: self.take(name)[chosen] for name in list(self._grown)}


# --- numbers of a trace as integer columns, exactly ---


def _nanoseconds(events: Sequence[Event], time: Callable[[Event], int | float | Decimal]) -> Int64:
    """Microseconds as integer nanoseconds; _NO_TIME for what is not finite or beyond 146 years.

    A float below 2^43 is exact to the nanosecond that was printed, because its fraction is rounded
    apart from the whole.
    """
    try:
        if events and isinstance(time(events[0]), Decimal):
            return np.array([_exact_ns(time(event)) for event in events], np.int64)
        values = np.fromiter(map(time, events), np.float64, len(events))
    except OverflowError:  # a whole number beyond all floats
        return np.array([_exact_ns(time(event)) for event in events], np.int64)
    sane = np.abs(values) < _LIMIT_US  # False for NaN
    known = np.where(sane, values, 0)
    whole = known.astype(np.int64)
    times: Int64 = whole * 1000 + np.rint((known - whole) * 1000).astype(np.int64)
    times[~sane] = _NO_TIME
    return times


def _exact_ns(microseconds: int | float | Decimal) -> int:
    exact = Decimal(microseconds)
    return round(exact * 1000) if exact.is_finite() and abs(exact) < _LIMIT_US else _NO_TIME


def _column(items: Sequence[object], field: str) -> Int64:
    """`field` of every item, integers; unsigned ones beyond 2^63 (addresses) wrap."""
    values = attrgetter(field)
    try:
        return np.fromiter(map(values, items), np.int64, len(items))
    except OverflowError:
        return np.array([(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in map(values, items)], np.int64)


def _columns_of_some(args: list[Args], chosen: Bool, *fields: str) -> Iterator[Int64]:
    """Columns of what only the chosen events say; -1 for the others."""
    members = list(compress(args, chosen.tolist()))
    for field in fields:
        column = np.full(len(args), -1, dtype=np.int64)
        column[chosen] = _column(members, field)
        yield column


# --- events, slice by slice, into columns ---


class _Collector:
    """Takes decoded events and, in the end, gives the Recording."""

    def __init__(self) -> None:
        self.count = 0  # events seen
        self._names, self._lanes, self._phases = (_Numbers() for _ in range(3))
        self._python_kind = cache(_python_kind)
        self._unknown_ns: Counter[str] = Counter()  # by category that nobody knows: of events that are in no figure
        self._others: Counter[str] = Counter()  # events such as torch.profiler writes none, by kind
        self._of_ascend = False
        self._warnings: list[str] = []
        int64, int32, int16, int8 = np.int64, np.int32, np.int16, np.int8
        self._spans = _Columns(
            category=int8, name=int32, lane=int32, start_ns=int64, duration_ns=int64, correlation=int64,
            external_id=int32, sequence=int64, forward_thread=int32, device=int16, stream=int32, graph=np.bool_,
            configuration=int32,
        )  # fmt: skip
        self._calls = _Columns(name=int32, lane=int32, start_ns=int64, duration_ns=int64)
        self._memory = _Columns(
            time_ns=int64, lane=int32, address=int64, size_bytes=int64, total_allocated_bytes=int64,
            total_reserved_bytes=int64, device_type=int8, device=int16,
        )  # fmt: skip
        self._failures: list[FailedAllocation] = []
        self._flow_starts: dict[int | str, list[tuple[int, int]]] = defaultdict(list)
        self._flow_ends: list[tuple[int | str, int, int]] = []
        self._configurations = _Numbers()
        self._collectives: list[tuple[int, Args]] = []  # of spans in the order in which they were added
        self._span_count = 0
        self._rank: int | None = None  # of the process that is read, where the file holds several

    def add(self, events: list[Event]) -> list[Event]:
        """Adds the next events of the file; returns those that became spans, in order."""
        self.count += len(events)
        cats = _Numbers()  # of these events alone: a hostile file may have as many categories as events
        cat = cats.of(map(_CAT, events), len(events))
        phase = self._phases.of(map(_PHASE, events), len(events))
        category: Int8 = np.array(list(map(category_code, cats)), np.int8)[cat]
        has_duration = phase == self._phases["X"]
        old = cat == cats["Operator"]
        category[old] = [_category_of_old(event) for event in compress(events, old.tolist())]
        is_span = has_duration & (category >= 0)
        is_call = self._part_python(is_span, category, events)
        for index in np.flatnonzero(is_span & (category == UNKNOWN)).tolist():  # some do not look like a launch
            args = events[index].args
            is_span[index] = args.correlation >= 0 and args.device < 0 and args.stream < 0
        self._add_unknown(has_duration & ~is_span & ((category == UNKNOWN) | (cat == cats[""])), events)
        for kind, count in zip(self._phases, np.bincount(phase, minlength=len(self._phases)).tolist(), strict=True):
            self._others[f"events of phase {kind}"[:_LONGEST_KIND]] += count * (kind not in "XMiIsft")
        labels = (event.args.label for event in compress(events, (phase == self._phases["M"]).tolist()))
        self._of_ascend |= "async_npu" in cats or "Ascend Hardware" in labels
        is_memory = self._part_instants((phase == self._phases["i"]) | (phase == self._phases["I"]), events)
        is_flow = (cat == cats["fwdbwd"]) & ((phase == self._phases["s"]) | (phase == self._phases["f"]))
        spans = list(compress(events, is_span.tolist()))
        self._add_spans(spans, category[is_span])
        self._add_memory(list(compress(events, is_memory.tolist())))
        self._add_flows(list(compress(events, is_flow.tolist())))
        self._calls.add(**self._timed(list(compress(events, is_call.tolist()))))
        return spans

    def _part_python(self, is_span: Bool, category: Int8, events: list[Event]) -> Bool:
        """Clears from `is_span` the calls of plain functions; gives those of them that have their line."""
        is_call = np.zeros(len(events), dtype=np.bool_)
        chosen = np.flatnonzero(is_span & (category == Category.MODULE))
        if len(chosen):
            names = (events[index].name for index in chosen.tolist())
            kinds = np.fromiter(map(self._python_kind, names), np.int8, len(chosen))
            is_span[chosen] = kinds == _MODULE
            is_call[chosen] = kinds == _CALL
        return is_call

    def _add_unknown(self, chosen: Bool, events: list[Event]) -> None:
        unknown = list(compress(events, chosen.tolist()))
        for event, duration_ns in zip(unknown, _nanoseconds(unknown, _DUR).tolist(), strict=True):
            self._unknown_ns[event.cat or "(none)"] += max(0, duration_ns)
            self._others[f"events of {event.cat or f'no category, process {event.pid}'}"[:_LONGEST_KIND]] += 1

    def _part_instants(self, is_instant: Bool, events: list[Event]) -> Bool:
        """Adds the allocations that failed; gives which of the instants are allocations and frees."""
        names = [event.name for event in compress(events, is_instant.tolist())]
        is_memory = np.zeros(len(events), dtype=np.bool_)
        is_memory[is_instant] = [name == "[memory]" for name in names]
        if "[OutOfMemory]" in names:
            failed = [event for event in compress(events, is_instant.tolist()) if event.name == "[OutOfMemory]"]
            times, lanes = _nanoseconds(failed, _TS).tolist(), self._lanes_of(failed).tolist()
            self._failures += [
                FailedAllocation(time_ns, lane, event.args.size_bytes, event.args.device_type, event.args.device_id)
                for event, time_ns, lane in zip(failed, times, lanes, strict=True)
                if time_ns != _NO_TIME
            ]
        return is_memory

    def _lanes_of(self, events: list[Event]) -> Int32:
        return self._lanes.of(map(_LANE, events), len(events))

    def _timed(self, events: list[Event]) -> dict[str, npt.NDArray[Any]]:
        return {
            "name": self._names.of(map(_NAME, events), len(events)),
            "lane": self._lanes_of(events),
            "start_ns": _nanoseconds(events, _TS),
            "duration_ns": _nanoseconds(events, _DUR),
        }

    def _add_spans(self, events: list[Event], category: Int8) -> None:
        args = list(map(_ARGS, events))
        on_device = (category >= Category.KERNEL) & (category < UNKNOWN)
        device, stream, graph_node = _columns_of_some(args, on_device, "device", "stream", "graph_node")
        _fill_from_lane(events, on_device & ((device < 0) | (stream < 0)), device, stream)
        sequence, forward_thread = _columns_of_some(args, category == Category.CPU_OP, "sequence", "forward_thread")
        self._spans.add(
            category=category,
            **self._timed(events),
            correlation=_column(args, "correlation"),
            external_id=_column(args, "external_id"),
            sequence=sequence,
            forward_thread=forward_thread,
            device=device,
            stream=stream,
            graph=graph_node > 0,
            configuration=self._configurations_of(args, category),
        )

    def _configurations_of(self, args: Sequence[Args], category: Int8) -> Int32:
        """The number of the configuration of each of the next spans; -1 for those that are not launched.

        A call into a runtime has one where it says what it launches (ROCm). Collectives are gathered.
        """
        says = category == Category.RUNTIME
        for index, name in enumerate(map(_COLLECTIVE, args)):
            if name is not None and not says[index]:
                # What is undecoded keeps the slice alive that it was read from.
                details = msgspec.structs.replace(args[index], ranks=args[index].ranks.copy(), **_NO_SHAPES)
                self._collectives.append((self._span_count + index, details))
        self._span_count += len(args)
        says[says] = [grid is not None for grid in map(_GRID, compress(args, says.tolist()))]
        says |= (category >= Category.KERNEL) & (category <= Category.MEMSET)
        number = np.full(len(args), -1, dtype=np.int32)
        number[says] = self._configurations.of(map(_CONFIGURATION, compress(args, says.tolist())), int(says.sum()))
        return number

    def _add_memory(self, events: list[Event]) -> None:
        args = list(map(_ARGS, events))
        fields = ("address", "size_bytes", "total_allocated_bytes", "total_reserved_bytes", "device_type")
        self._memory.add(
            time_ns=_nanoseconds(events, _TS),
            lane=self._lanes_of(events),
            device=_column(args, "device_id"),
            **{field: _column(args, field) for field in fields},
        )

    def _add_flows(self, events: list[Event]) -> None:
        lanes, times = self._lanes_of(events).tolist(), _nanoseconds(events, _TS).tolist()
        for event, lane, time_ns in zip(events, lanes, times, strict=True):
            if event.ph == "s":
                self._flow_starts[event.id].append((lane, time_ns))
            else:
                self._flow_ends.append((event.id, lane, time_ns))

    # --- the end ---

    def finish(self, path: str, trace: TraceEvents, process: int | str | None) -> tuple[Recording, Bool]:
        """All that was added of a process, and which of the spans are kept. To be called once."""
        spans, configuration, kept = self._finished_spans(path, process)
        metadata = trace.metadata
        if self._rank is not None:  # what is said is of one of the files that were put together
            info = metadata.get("distributedInfo")
            metadata = {**metadata, "distributedInfo": {**(info if isinstance(info, dict) else {}), "rank": self._rank}}
        # What is said beside times is worth no recording: where it cannot be read it is left out, which is said.
        otherwise: tuple[DeviceDetails, tuple[CollectiveDetails, ...]] = DeviceDetails(), ()
        details, collectives = attempt(
            _DETAILS, lambda: self._finished_details(spans, configuration, kept), otherwise, self._warnings
        )
        start, duration = self._calls.take("start_ns"), self._calls.take("duration_ns")
        sane = self._sane_times(start, duration) & self._is_ours[self._calls.peek("lane")]
        calls = PythonCalls(start_ns=start[sane], duration_ns=duration[sane], **self._calls.rest(sane))
        unknown = self._unknown_ns.most_common()
        if said := ", ".join(f"{cat} {time_ns / 1e6:.3f} ms" for cat, time_ns in unknown if time_ns):
            self._warnings.append(f"events of categories that are not known are in no figure: {said}")
        recording = Recording(
            path=path,
            names=tuple(self._names),
            lanes=tuple(Lane(*lane) for lane in self._lanes),
            spans=spans,
            memory=self._finished_memory(),
            flows=self._finished_flows(),
            metadata=metadata,
            complete=trace.complete,
            warnings=(*trace.warnings, *self._warnings),
            failed_allocations=tuple(sorted(one for one in self._failures if self._is_ours[one.lane])),
            details=details,
            python=calls,
            collectives=collectives,
            no_profile=self._no_profile(),
        )
        return recording, kept

    def _no_profile(self) -> str:
        """What the file is, if it is none that torch.profiler wrote."""
        if self._of_ascend:
            return "a trace of Ascend's profiler, whose events of the NPU are not read: see it in MindStudio Insight."
        found = ", ".join(f"{kind} ({count})" for kind, count in self._others.most_common(5) if count)
        return f"no profile of torch.profiler: it holds {found}. {EXPORT}" if found and not self._span_count else ""

    def _finished_spans(self, path: str, process: int | str | None) -> tuple[Spans, Int32, Bool]:
        """The spans, the number of the configuration of each, and which of those that were added they are."""
        names = ("category", "name", "lane", "start_ns", "duration_ns", "device", "correlation")
        category, name, lane, start, duration, device, correlation = map(self._spans.take, names)
        # Events of an unknown category on a lane of a device launch nothing.
        device_lanes = np.unique(lane[np.isin(category, DEVICE_CATEGORIES)])
        stray = (category == UNKNOWN) & np.isin(lane, device_lanes)
        if stray.any():
            self._unknown_ns["on lanes of devices"] += int(np.maximum(duration[stray], 0).sum())
        lanes = [Lane(*one) for one in self._lanes]
        of_model = np.array([one.startswith(_NAMES_OF_MODELS) for one in self._names], np.bool_)[name]
        is_aten = np.array([one.startswith("aten::") for one in self._names], np.bool_)[name]
        try:
            found = find_processes(lanes, category, lane, device, correlation, of_model)
            ours, place = choose(path, found, process)
            self._is_ours = np.array([one.pid in ours.pids for one in lanes], np.bool_)
            kept = self._sane_times(start, duration) & ~stray & self._is_ours[lane]
            refuse_mixed(ours, category, name, lane, correlation, start, start + duration, kept, is_aten)
        except BrokenTrace as error:
            raise BrokenTrace(f"{path}: {error}") from error
        if len(found) > 1:
            self._rank = place if ours.rank is None else ours.rank
        duration, kept, notes = bound_durations(category, lane, device, correlation, start, duration, kept)
        self._warnings += notes
        keep = slice(None) if kept.all() else kept
        category[category == UNKNOWN] = Category.RUNTIME
        category[name == self._names.get(GARBAGE, -1)] = Category.ANNOTATION  # written as an op: see marks
        configuration = self._spans.take("configuration")[keep]
        spans = Spans(
            category=category[keep],
            name=name[keep],
            lane=_narrow(lane[keep]),
            start_ns=start[keep],
            duration_ns=duration[keep],
            device=_narrow(device[keep]),
            correlation=_narrow(correlation[keep]),
            **{name: _narrow(values) for name, values in self._spans.rest(keep).items()},
        )
        return spans, configuration, kept

    def _sane_times(self, start: Int64, duration: Int64) -> Bool:
        """False for events without a time, or with a duration that CUPTI made up."""
        timed: Bool = start != _NO_TIME
        if not timed.any():
            return timed
        trace_ns = int(start[timed].max()) - int(start[timed].min())
        sane: Bool = (duration >= 0) & (duration <= max(10 * trace_ns, _HOUR_NS))
        for good, what in ((timed, "no time"), (sane | ~timed, "a negative or impossible duration")):
            if count := int((~good).sum()):
                self._warnings.append(f"{count} events with {what} were left out")
        return sane & timed

    def _finished_details(
        self, spans: Spans, configuration: Int32, kept: Bool
    ) -> tuple[DeviceDetails, tuple[CollectiveDetails, ...]]:
        final = np.cumsum(kept) - 1
        collectives = (_collective(int(final[span]), args) for span, args in self._collectives if kept[span])
        return _launches(_table(list(self._configurations)), spans, configuration), tuple(collectives)

    def _finished_memory(self) -> MemoryEvents:
        time_ns = self._memory.take("time_ns")
        order = np.argsort(time_ns, kind="stable")
        order = order[(time_ns[order] != _NO_TIME) & self._is_ours[self._memory.peek("lane")[order]]]
        return MemoryEvents(time_ns=time_ns[order], **self._memory.rest(order))

    def _finished_flows(self) -> ForwardBackwardFlows:
        """Pairs the ends of arrows by id; an id that is used again pairs in order."""
        pairs = []
        used: Counter[int | str] = Counter()
        for identity, lane, time_ns in self._flow_ends:
            starts = [one for one in self._flow_starts.get(identity, ()) if self._is_ours[one[0]]]
            if self._is_ours[lane] and used[identity] < len(starts):
                pairs.append((*starts[used[identity]], lane, time_ns))
                used[identity] += 1
        table = np.array(pairs, np.int64).reshape(-1, 4)
        return ForwardBackwardFlows(
            forward_lane=table[:, 0].astype(np.int32),
            forward_ns=table[:, 1].copy(),
            backward_lane=table[:, 2].astype(np.int32),
            backward_ns=table[:, 3].copy(),
        )


def _narrow(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers of things in as few bytes as all of them fit in: a large trace has tens of millions."""
    if numbers.dtype.kind == "i" and len(numbers):
        low, high = numbers.min(), numbers.max()
        for dtype in (np.int16, np.int32):
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return numbers.astype(dtype, copy=False)
    return numbers


def _category_of_old(event: Event) -> Category:
    """That of an "Operator" of torch 1.8 to 1.10, which called `record_function` and `ProfilerStep` so too."""
    is_op = "::" in event.name or event.args.sequence >= 0 or event.name in ("detach", "detach_")
    return Category.CPU_OP if is_op else Category.ANNOTATION


def _python_kind(name: str) -> int:
    return _MODULE if name.startswith(MODULE_PREFIX) else _CALL if _HAS_LINE.search(name) else _PLAIN


def _fill_from_lane(events: list[Event], missing: Bool, device: Int64, stream: Int64) -> None:
    """A device event that does not say its device and stream has them as its pid and tid, if these are numbers.

    Larger ones than these are names, such as the hash of a stream's.
    """
    for index in np.flatnonzero(missing).tolist():
        for column, lane in ((device, events[index].pid), (stream, events[index].tid)):
            if column[index] < 0 and isinstance(lane, int) and 0 <= lane < 1 << 31:
                column[index] = lane


# --- what events say beside their time ---


def _launches(table: Configurations, spans: Spans, number: Int32) -> DeviceDetails:
    """A kernel that does not say how it was launched has it from its launch; `number`: of each configuration."""
    is_launch = spans.category == Category.RUNTIME
    span, launch = np.flatnonzero((number >= 0) & ~is_launch), np.flatnonzero((number >= 0) & is_launch)
    number, launch_number = number[span], number[launch]
    if len(launch):
        correlation = spans.correlation
        table, number = _with_launches(table, correlation[span], number, correlation[launch], launch_number)
    says = np.zeros(len(table), dtype=np.bool_)
    for name in Configurations.__dataclass_fields__:
        values = getattr(table, name)
        known = ~np.isnan(values) if values.dtype.kind == "f" else values >= 0
        says |= known.any(axis=1) if known.ndim > 1 else known
    chosen = says[number]
    return DeviceDetails(span=span[chosen], configuration=number[chosen], configurations=table)


def _with_launches(
    table: Configurations, correlation: Int64 | Int32, number: Int32, launched: Int64 | Int32, launch_number: Int32
) -> tuple[Configurations, Int32]:
    """The configurations with what only the launches of the events say, and the number of each event."""
    order = np.argsort(launched, kind="stable")
    place = np.minimum(np.searchsorted(launched[order], correlation), len(launched) - 1)
    joined = (launched[order][place] == correlation) & (correlation >= 0)
    by_launch = np.where(joined, launch_number[order][place], -1)
    pairs, inverse = np.unique(number * np.int64(len(table) + 1) + by_launch + 1, return_inverse=True)
    own, of_launch = pairs // (len(table) + 1), pairs % (len(table) + 1) - 1
    columns = {}
    for name in Configurations.__dataclass_fields__:
        values = getattr(table, name)
        mine, theirs = values[own], values[of_launch]
        # What a launch copies is said of a copy itself; the launch of a kernel has no such thing.
        missing = (np.isnan(mine) if mine.dtype.kind == "f" else mine < 0) & (name != "copied_bytes")
        from_launch = (of_launch >= 0).reshape(-1, *[1] * (mine.ndim - 1))
        columns[name] = np.where(missing & from_launch, theirs, mine)
    return Configurations(**columns), inverse.astype(np.int32)


# --- values as a trace has them, odd ones among them ---


def _table(rows: Sequence[tuple[Any, ...]]) -> Configurations:
    if not rows:
        return Configurations()
    grid, block, registers, shared_memory, copied, blocks_per_sm, occupancy = zip(*rows, strict=True)
    return Configurations(
        grid=np.array(list(map(_three, grid)), dtype=np.int64),
        block=np.array(list(map(_three, block)), dtype=np.int64),
        registers=np.array(list(map(_count, registers)), dtype=np.int64),
        shared_memory_bytes=np.array(list(map(_count, shared_memory)), dtype=np.int64),
        copied_bytes=np.array(list(map(_count, copied)), dtype=np.int64),
        blocks_per_sm=np.array(list(map(_amount, blocks_per_sm)), dtype=np.float64),
        occupancy=np.array(list(map(_amount, occupancy)), dtype=np.float64) / 100,
    )


def _amount(value: object) -> float:
    """A number that is finite and not negative; else NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        amount = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return amount if 0 <= amount < math.inf else math.nan


def _count(value: object) -> int:
    """A whole number that is not negative; else -1."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < _LARGEST else -1
    amount = _amount(value)
    return int(amount) if amount < _LARGEST and amount == int(amount) else -1


def _three(value: object) -> tuple[int, int, int]:
    """Three sizes; fewer are filled up with 1, other things give -1."""
    if isinstance(value, str):
        value = tuple(re.findall(r"-?[\w.]+", value))
    sizes = list(map(_count, value)) if isinstance(value, (tuple, list)) and 1 <= len(value) <= 3 else [-1]
    x, y, z = (-1, -1, -1) if min(sizes) < 0 else (*sizes, 1, 1)[:3]
    return (x, y, z)


def _collective(span: int, args: Args) -> CollectiveDetails:
    def known(value: object) -> int | None:
        return count if (count := _count(value)) >= 0 else None

    def text(value: object) -> str | None:
        return None if value is None or value == "" else str(value)

    return CollectiveDetails(
        span=span,
        name=text(args.collective) or "",
        in_elements=known(args.in_elements),
        out_elements=known(args.out_elements),
        dtype=text(args.dtype),
        group_size=known(args.group_size),
        group_name=text(args.group_name) or text(args.group_id),
        ranks=_ranks(args.ranks),
        sequence=known(args.collective_sequence),
    )


def _ranks(raw: msgspec.Raw) -> tuple[int, ...] | None:
    """The ranks of a group; None where they are cut short (`[0, 1, 2, ..., 63]`) or are none."""
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, str):
            value = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
    ranks = tuple(map(_count, value)) if isinstance(value, list) and 0 < len(value) <= _MOST_RANKS else (-1,)
    return None if min(ranks) < 0 else ranks
