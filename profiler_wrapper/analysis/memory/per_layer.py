"""What each call of a layer finds, needs and leaves behind, from the allocator's own events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.model import CATEGORIES
from profiler_wrapper.analysis.steps import optimizer_calls
from profiler_wrapper.trace.owned import Holding
from profiler_wrapper.trace.recording import Bool, Int8, Int32, Int64, Recording
from profiler_wrapper.units import file_size

if TYPE_CHECKING:
    from profiler_wrapper.analysis.calls import CallTree


# --------------------------------------------------------------------------------------------------
# What the model and its optimizers are known to hold, as columns on the trace's clock; and who lay where, when.

_OTHER = CATEGORIES.index("other")
_NUMBER = re.compile(r"[0-9]{1,19}")  # as many digits as 64 bits hold


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """The tensors of one device that holdings tell: one entry per moment and tensor, in order of time."""

    moment_ns: Int64  # shape (moments,)
    moment: Int32  # per entry: index of its moment
    address: Int64
    size_bytes: Int64
    category: Int8  # index into CATEGORIES
    name: Int32  # index into `names`
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what is not known, and why

    def __len__(self) -> int:
        return len(self.address)

    @property
    def time_ns(self) -> Int64:
        """Per entry: when it was told."""
        return self.moment_ns[self.moment]


def told_of(recording: Recording, holdings: Sequence[Holding], device: str) -> Told:
    """What `holdings` tell of `device` ("cpu", "cuda:0"), on the clock of `recording`."""
    base_ns = _clock_base_ns(recording.metadata.get("baseTimeNanoseconds", 0))
    notes: tuple[str, ...] = ()
    if base_ns is None and holdings:
        notes = (
            "what the model and its optimizers held is left out, because the trace does not tell when its clock "
            "begins: its baseTimeNanoseconds is no number of nanoseconds",
        )
    ordered = sorted(holdings, key=lambda holding: holding.time_ns) if base_ns is not None else []
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for i, holding in enumerate(ordered):
        for tensor in holding.tensors.get(device, ()):
            category = CATEGORIES.index(tensor.category) if tensor.category in CATEGORIES else _OTHER
            name = names.setdefault(tensor.name, len(names))
            rows.append((i, tensor.address, tensor.size_bytes, category, name))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Told(
        np.array([holding.time_ns - (base_ns or 0) for holding in ordered], dtype=np.int64),
        columns[:, 0].astype(np.int32),
        columns[:, 1],
        columns[:, 2],
        columns[:, 3].astype(np.int8),
        columns[:, 4].astype(np.int32),
        tuple(names),
        notes,
    )


def _clock_base_ns(told: object) -> int | None:
    """The unix time at which a trace's clock begins; None for what is none."""
    if isinstance(told, str):
        told = int(told) if _NUMBER.fullmatch(told) else None
    if isinstance(told, float):
        told = int(told) if told.is_integer() else None
    if not isinstance(told, int) or isinstance(told, bool):
        return None
    return told if 0 <= told <= np.iinfo(np.int64).max else None


class EventsByAddress:
    """Which event was the last at an address before some event. Events are given by their place in time."""

    def __init__(self, address: Int64) -> None:
        self._events = len(address)
        self._addresses, rank = np.unique(address, return_inverse=True)
        self._order = np.argsort(rank, kind="stable")
        self._keys = rank[self._order] * (self._events + 1) + self._order

    def last_before(self, address: Int64, event: Int64) -> Int64:
        """Per query: the last event at `address` whose place is below `event`; -1 for none."""
        return self._at(address, event, -1)

    def first_from(self, address: Int64, event: Int64) -> Int64:
        """Per query: the first event at `address` whose place is `event` or above; -1 for none."""
        return self._at(address, event, 0)

    def _at(self, address: Int64, event: Int64, step: int) -> Int64:
        found = np.full(len(address), -1, dtype=np.int64)
        if not self._events or not len(address):
            return found
        rank = np.minimum(np.searchsorted(self._addresses, address), len(self._addresses) - 1)
        place = np.searchsorted(self._keys, rank * (self._events + 1) + event) + step
        inside = (place >= 0) & (place < self._events)
        event_found = self._order[np.where(inside, place, 0)]
        same = inside & (self._addresses[rank] == address)
        same &= self._keys[np.where(inside, place, 0)] // (self._events + 1) == rank
        found[same] = event_found[same]
        return found


# --------------------------------------------------------------------------------------------------
# What was allocated before the recording began, and when it went.
#
# Holdings tell of it by address. An accelerator's allocator writes an event when such a block is freed. On a
# CPU torch writes none, so the moment is found by what follows it.

_NEVER = np.iinfo(np.int64).max
_GRADS = CATEGORIES.index("grads")
_GRANULE = 512  # bytes: the caching allocators of accelerators give out multiples of it


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """Blocks that were there when the recording began.

    What is told is there once an address. What only a free tells of may be there again and again at one
    address: it was freed, given out unseen and freed once more.
    """

    address: Int64
    size_bytes: Int64
    category: Int8  # index into CATEGORIES; `other` for what only its free tells of
    name: Int32  # index into Told.names; -1 for none
    outside_bytes: int = 0  # told, but beyond what the allocator had given out: cut off the sizes

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True, eq=False)
class MissingFrees:
    """Frees that nothing tells of, in order: before which event each belongs, and what it frees."""

    event: Int64
    time_ns: Int64
    address: Int64
    size_bytes: Int64  # positive


def blocks_before(
    time_ns: Int64, address: Int64, size_bytes: Int64, told: Told, *, given_out_bytes: int | None
) -> Before:
    """What was there, from what is told and from frees of what was never allocated.

    `given_out_bytes`: what the allocator of an accelerator says it had given out by then; what is told takes
    no more than that. None where it says nothing.
    """
    index = EventsByAddress(address)
    seen = np.searchsorted(time_ns, told.time_ns, side="right")
    was_there = np.flatnonzero(index.last_before(told.address, seen) < 0)
    addresses, first = np.unique(told.address[was_there], return_index=True)
    entries = was_there[first]
    sizes = told.size_bytes[entries].copy()
    first_event = index.first_from(addresses, np.zeros(len(addresses), dtype=np.int64))
    freed = (first_event >= 0) & (size_bytes[first_event] < 0) if len(size_bytes) else np.zeros(0, dtype=np.bool_)
    sizes[freed] = -size_bytes[first_event[freed]]
    unknown = np.setdiff1d(frees_of_unknown(address, size_bytes), first_event[freed])
    outside = 0
    if given_out_bytes is not None:
        sizes, outside = _within(addresses, sizes, freed, given_out_bytes + int(size_bytes[unknown].sum()))
    return Before(
        np.concatenate([addresses, address[unknown]]),
        np.concatenate([sizes, -size_bytes[unknown]]),
        np.concatenate([told.category[entries], np.full(len(unknown), _OTHER, dtype=np.int8)]),
        np.concatenate([told.name[entries], np.full(len(unknown), -1, dtype=np.int32)]),
        outside,
    )


def _within(address: Int64, size_bytes: Int64, freed: Bool, room: int) -> tuple[Int64, int]:
    """(what storages take of the `room` bytes that an allocator had given out, what lies outside of these).

    The storages are in order of their addresses. Those that are `freed` were surely given out, with their size.
    Bytes that others share count once. One that begins a block takes all of it, up to the next storage; others
    are slices of a block, or another allocator's. Where the room is too small, first what begins no block is
    cut, then the largest.
    """
    ends = np.minimum(address.astype(np.uint64) + size_bytes.astype(np.uint64), _NEVER).astype(np.int64)
    covered = np.maximum.accumulate(np.append(np.int64(0), ends))[:-1]
    sizes = np.where(freed, size_bytes, np.maximum(ends - np.maximum(address, covered), 0))
    begins_block = (address % _GRANULE == 0) & (address >= covered)
    free_behind = np.maximum(np.append(address[1:], _NEVER)[: len(address)] - ends, 0)
    padding = np.where(begins_block & ~freed, np.minimum(-sizes % _GRANULE, free_behind), 0)
    taken = sum(sizes.tolist())  # numbers that a file tells: their sum may not fit into 64 bits
    if taken + int(padding.sum()) <= room:
        return sizes + padding, 0
    outside, excess = 0, taken - room
    for i in np.lexsort((-sizes, begins_block, freed)).tolist():
        if excess <= 0 or freed[i]:
            break
        cut = min(excess, int(sizes[i]))
        sizes[i] -= cut
        excess -= cut
        outside += cut
    return sizes, outside


def sizes_of_frees(time_ns: Int64, address: Int64, size_bytes: Int64, chosen: Bool, told: Told) -> tuple[Int64, Bool]:
    """(sizes, known): frees on a CPU of what was told to be there have the size that was told.

    `known` is False for a free of what nobody told and no event before it allocated. Both are per event; only the
    `chosen` ones are looked at.
    """
    members = np.flatnonzero(chosen)
    at, sizes, known = address[members], size_bytes.copy(), np.ones(len(address), dtype=np.bool_)
    unknown = frees_of_unknown(at, size_bytes[members])
    known[members[unknown]] = False
    if len(told) and len(members):
        index = EventsByAddress(at)
        seen = np.searchsorted(time_ns[members], told.time_ns, side="right")
        was_there = np.flatnonzero(index.last_before(told.address, seen) < 0)
        addresses, first = np.unique(told.address[was_there], return_index=True)
        event = index.first_from(addresses, np.zeros(len(addresses), dtype=np.int64))
        freed = (event >= 0) & np.isin(event, unknown)
        sizes[members[event[freed]]] = -told.size_bytes[was_there[first[freed]]]
        known[members[event[freed]]] = True
    return sizes, known


def frees_of_unknown(address: Int64, size_bytes: Int64) -> Int64:
    """The frees of what no event before them allocated."""
    order = np.argsort(address, kind="stable")
    known = np.zeros(len(address), dtype=np.bool_)
    known[order[1:]] = (address[order[1:]] == address[order[:-1]]) & (size_bytes[order[:-1]] > 0)
    return np.flatnonzero((size_bytes < 0) & ~known)


def missing_frees(
    time_ns: Int64, address: Int64, size_bytes: Int64, told: Told, before: Before, zero_grad_ends_ns: Int64
) -> MissingFrees:
    """The frees that a CPU's trace does not have.

    A block that was there went, at the latest, when its address or a part of it is allocated again, when a
    tensor of the same name and category was made anew, and at the last moment of holdings, where that lacks
    it; a gradient already when the first `zero_grad` ends after which it is no longer told. A block that
    was allocated in the recording went when its address is allocated again.
    """
    end = len(time_ns)
    index = EventsByAddress(address)
    first_event = index.first_from(before.address, np.zeros(len(before), dtype=np.int64))
    open_ended = np.flatnonzero((first_event < 0) | (size_bytes[first_event] > 0)) if end else np.arange(len(before))
    open_ended = open_ended[before.name[open_ended] >= 0]
    gone, gone_ns = _gone(time_ns, address, size_bytes, told, before, open_ended, index, zero_grad_ends_ns)
    went = gone_ns < _NEVER
    again = _allocated_over(address, size_bytes)
    previous = index.last_before(address[again], again)
    events = np.concatenate([gone[went], again])
    times = np.concatenate([gone_ns[went], time_ns[again]])
    order = np.lexsort((times, events))
    return MissingFrees(
        events[order],
        times[order],
        np.concatenate([before.address[open_ended[went]], address[again]])[order],
        np.concatenate([before.size_bytes[open_ended[went]], size_bytes[previous]])[order],
    )


def _allocated_over(address: Int64, size_bytes: Int64) -> Int64:
    """Allocations at an address where another one has not been freed."""
    order = np.argsort(address, kind="stable")
    first, second = order[:-1], order[1:]
    over = (address[first] == address[second]) & (size_bytes[first] > 0) & (size_bytes[second] > 0)
    return np.sort(second[over])


def _gone(
    time_ns: Int64,
    address: Int64,
    size_bytes: Int64,
    told: Told,
    before: Before,
    blocks: Int64,
    index: EventsByAddress,
    zero_grad_ends_ns: Int64,
) -> tuple[Int64, Int64]:
    """Per block: (before which event it went, when); `_NEVER` for one that stays."""
    count = len(blocks)
    event = np.full(count, len(time_ns), dtype=np.int64)
    when = np.full(count, _NEVER, dtype=np.int64)
    place = {int(block): i for i, block in enumerate(blocks)}

    def earlier(i: int, at_event: int, at_ns: int) -> None:
        if at_ns < when[i] or (at_ns == when[i] and at_event < event[i]):
            event[i], when[i] = at_event, at_ns

    by_address = {int(before.address[block]): i for block, i in place.items()}
    last_told = np.full(count, -1, dtype=np.int64)  # index of the moment that tells of it last
    seen = np.searchsorted(time_ns, told.time_ns, side="right")
    made_by = index.last_before(told.address, seen)
    names = {(int(before.category[b]), int(before.name[b])): i for b, i in place.items()}
    columns = (told.moment, told.address, told.category, told.name, made_by, seen)
    successors: list[tuple[int, int, int]] = []  # block, event, moment
    for moment, at, category, name, made, number in zip(*(c.tolist() for c in columns), strict=True):
        block = by_address.get(at, -1)
        if block >= 0 and made < 0:
            last_told[block] = moment
            continue
        block = names.get((category, name), -1)
        if block >= 0 and moment > last_told[block]:
            successors.append((block, made if made >= 0 else number, moment))
    for block, at_event, moment in successors:
        if moment > last_told[block]:
            at_ns = int(time_ns[at_event]) if at_event < len(time_ns) else int(told.moment_ns[moment])
            earlier(block, at_event, at_ns)
    for i, at_event in _overwritten(address, size_bytes, before, blocks):
        earlier(i, at_event, int(time_ns[at_event]))
    if len(told.moment_ns):
        last = len(told.moment_ns) - 1
        for i in np.flatnonzero(last_told < last).tolist():
            after = int(told.moment_ns[last_told[i]])
            if before.category[blocks[i]] == _GRADS:
                later = zero_grad_ends_ns[np.searchsorted(zero_grad_ends_ns, after) :]
                if len(later):
                    earlier(i, int(np.searchsorted(time_ns, later[0], side="right")), int(later[0]))
            last_ns = int(told.moment_ns[last])
            earlier(i, int(np.searchsorted(time_ns, last_ns, side="right")), last_ns)
    return event, when


def _overwritten(address: Int64, size_bytes: Int64, before: Before, blocks: Int64) -> list[tuple[int, int]]:
    """(block, event) of allocations that take bytes of what was there, the first per block."""
    if not len(blocks):
        return []
    order = np.argsort(before.address[blocks], kind="stable")
    starts = before.address[blocks][order]
    ends = starts + before.size_bytes[blocks][order]
    events = np.flatnonzero(size_bytes > 0)
    low = np.searchsorted(ends, address[events], side="right")
    high = np.searchsorted(starts, address[events] + size_bytes[events])
    first = np.full(len(blocks), len(address), dtype=np.int64)
    for event, begin, end in zip(*(c[low < high].tolist() for c in (events, low, high)), strict=True):
        first[begin:end] = np.minimum(first[begin:end], event)
    return [(int(order[i]), int(event)) for i, event in enumerate(first) if event < len(address)]


_STILL_ALIVE = np.iinfo(np.int64).max
_CPU = 0
_INDICES = 4096  # more than a kind of device has
_ACCELERATORS = (_CPU + 1) * _INDICES


class DeviceMemory(NamedTuple):
    """The memory events of one device, in time order.

    On a CPU the frees that a trace lacks are among them, on lane -1, see `memory_before`.
    """

    device: str  # "cpu", "cuda:0", ...; a CPU's allocator reserves nothing
    lane: Int32
    time_ns: Int64
    address: Int64
    size_bytes: Int64
    allocated: Int64  # after each event
    reserved: Int64
    allocated_at_start: int  # before the first event
    before: Before  # what is known of it
    told: Told
    notes: tuple[str, ...] = ()  # what is not known, and why


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallMemory:
    """Bytes per call of a layer."""

    entry_allocated: Int64
    exit_allocated: Int64
    entry_reserved: Int64 | None  # None on a CPU, where nothing is reserved
    exit_reserved: Int64 | None
    peak: Int64  # highest allocated from entry to exit
    retained: Int64  # allocated inside and kept for backward, see `_keeping_moments`; layers below included
    self_retained: Int64


def device_memory(
    recording: Recording, holdings: Sequence[Holding] = (), *, cpu_frees_unsure: bool = False
) -> DeviceMemory | None:
    """The memory events of the accelerator that has most allocated at its peak; of the CPU where there is none.

    An accelerator's allocator states what is allocated. On a CPU the stated total only counts what
    happened while some profile ran, so it is counted anew: what the events allocate, and what was
    there before, as far as `holdings` or a free tell of it. Differences are exact. So is what an
    accelerator has allocated in a trace that does not state it.

    `cpu_frees_unsure`: frees on a CPU of what the recording did not allocate may be of other blocks (see
    `RecordedTrace`), so only those of what `holdings` tell count, with the size that is told.

    None where the recording has no memory events.
    """
    memory = recording.memory
    if len(memory) == 0:
        return None
    keys = memory.device_type.astype(np.int64) * _INDICES + np.maximum(memory.device, 0)  # a CPU has index -1
    key, notes = _chosen_device(keys, memory.total_allocated_bytes)
    chosen = keys == key
    device = _device_name(key)
    told = told_of(recording, holdings, device)
    if device == "cpu":
        sizes, known = sizes_of_frees(memory.time_ns, memory.address, memory.size_bytes, chosen, told)
        memory = replace(memory, size_bytes=sizes)
        chosen &= known if cpu_frees_unsure else True
    time_ns, address, size_bytes = memory.time_ns[chosen], memory.address[chosen], memory.size_bytes[chosen]
    stated, reserved = memory.total_allocated_bytes[chosen], memory.total_reserved_bytes[chosen]
    is_stated = device != "cpu" and bool((stated >= 0).all())
    start = max(0, int(stated[0] - size_bytes[0]))
    before = blocks_before(time_ns, address, size_bytes, told, given_out_bytes=start if is_stated else None)
    events = _Events(memory.lane[chosen], time_ns, address, size_bytes)
    notes = (*notes, *told.notes)
    if is_stated:
        return DeviceMemory(device, *events, stated, reserved, start, before, told, notes)
    if device == "cpu":
        zero_grad_ends = np.sort(recording.spans.end_ns[optimizer_calls(recording, "zero_grad")])
        events = events.with_frees(missing_frees(time_ns, address, size_bytes, told, before, zero_grad_ends))
        reserved = np.zeros_like(events.size_bytes)
    start = int(before.size_bytes.sum())
    allocated = np.maximum(start + np.cumsum(events.size_bytes), 0)  # a file may free more than there was
    return DeviceMemory(device, *events, allocated, reserved, start, before, told, notes)


def _chosen_device(keys: Int64, total_allocated_bytes: Int64) -> tuple[int, tuple[str, ...]]:
    """The device to look at, and a note of other accelerators; `keys`: per event that of its device."""
    devices, counts = np.unique(keys, return_counts=True)
    if devices[-1] < _ACCELERATORS:
        return int(devices[-1]), ()
    accelerators = [i for i, key in enumerate(devices.tolist()) if key >= _ACCELERATORS]
    peaks = {i: int(total_allocated_bytes[keys == devices[i]].max()) for i in accelerators}
    ordered = sorted(accelerators, key=lambda i: (peaks[i], counts[i]), reverse=True)
    key, *others = (int(devices[i]) for i in ordered)
    if not others:
        return key, ()
    sizes = (file_size(max(0, peaks[i])) for i in ordered[1:])
    left_out = ", ".join(f"{_device_name(other)} ({size} at most)" for other, size in zip(others, sizes, strict=True))
    verb = "is" if len(others) == 1 else "are"
    return key, (f"memory is that of {_device_name(key)}; {left_out} {verb} not analysed",)


class _Events(NamedTuple):
    lane: Int32
    time_ns: Int64
    address: Int64
    size_bytes: Int64

    def with_frees(self, frees: MissingFrees) -> _Events:
        at = frees.event
        return _Events(
            np.insert(self.lane, at, -1),
            np.insert(self.time_ns, at, frees.time_ns),
            np.insert(self.address, at, frees.address),
            np.insert(self.size_bytes, at, -frees.size_bytes),
        )


def _device_name(key: int) -> str:
    return device_name(*divmod(key, _INDICES))


def device_name(device_type: int, index: int) -> str:
    """`"cuda:0"` for a c10::DeviceType and an index; a CPU has none."""
    if device_type == _CPU:
        return "cpu"
    names = {1: "cuda", 6: "fpga", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 20: "device"}
    return f"{names.get(device_type, 'device')}:{index}"


def freed_at(memory: DeviceMemory) -> Int64:
    """Per event: the index of the event that frees what it allocated; a huge number for never.

    What is allocated where another block has not been freed shows that that one is gone.
    """
    freed = np.full(len(memory.time_ns), _STILL_ALIVE, dtype=np.int64)
    order = np.argsort(memory.address, kind="stable")
    first, second = order[:-1], order[1:]
    pairs = (memory.address[first] == memory.address[second]) & (memory.size_bytes[first] > 0)
    freed[first[pairs]] = second[pairs]
    return freed


def call_memory(recording: Recording, calls: CallTree, memory: DeviceMemory, node_starts_ns: Int64) -> CallMemory:
    """Memory of every call, in the order of `calls`; `node_starts_ns`: when autograd nodes began, ascending."""
    spans = recording.spans
    start, end = spans.start_ns[calls.span], spans.end_ns[calls.span]
    entry = np.searchsorted(memory.time_ns, start) - 1  # the last event before the call
    leave = np.searchsorted(memory.time_ns, end, side="right") - 1
    allocated = np.concatenate([[memory.allocated_at_start], memory.allocated])
    reserved = np.concatenate([memory.reserved[:1], memory.reserved])
    self_retained, retained = _retained(recording, calls, memory, node_starts_ns)
    return CallMemory(
        entry_allocated=allocated[entry + 1],
        exit_allocated=allocated[leave + 1],
        entry_reserved=None if memory.device == "cpu" else reserved[entry + 1],
        exit_reserved=None if memory.device == "cpu" else reserved[leave + 1],
        peak=_highest(allocated, entry + 1, leave + 1),
        retained=retained,
        self_retained=self_retained,
    )


def _highest(values: Int64, first: Int64, last: Int64) -> Int64:
    """Per interval of places, both ends included, the highest value."""
    if len(first) == 0:
        return np.empty(0, dtype=np.int64)
    padded = np.append(values, values[-1])
    bounds = np.column_stack([first, last + 1]).ravel()
    highest: Int64 = np.maximum.reduceat(padded, bounds)[::2]
    return highest


def _keeping_moments(recording: Recording, calls: CallTree, node_starts_ns: Int64) -> Int64:
    """Per call, the instant at which what it allocated and is alive counts as retained.

    That is when the outermost forward around it ends; where a backward follows, it is when that begins
    or the same outermost layer is entered again: outputs that nobody kept are gone by that time.
    """
    spans = recording.spans
    outermost = np.arange(len(calls))
    next_entry = np.full(len(calls), _STILL_ALIVE, dtype=np.int64)
    last_entry: dict[int, int] = {}
    for i, (above, layer) in enumerate(zip(calls.parent.tolist(), calls.layer.tolist(), strict=True)):
        if above >= 0:
            outermost[i] = outermost[above]
            continue
        if layer in last_entry:
            next_entry[last_entry[layer]] = spans.start_ns[calls.span[i]]
        last_entry[layer] = i
    end = spans.end_ns[calls.span]
    nodes = np.append(node_starts_ns, _STILL_ALIVE)
    backward = nodes[np.searchsorted(nodes, end)]
    moment: Int64 = np.where(backward < _STILL_ALIVE, np.minimum(backward, next_entry), end)[outermost]
    return moment


def _retained(
    recording: Recording, calls: CallTree, memory: DeviceMemory, node_starts_ns: Int64
) -> tuple[Int64, Int64]:
    """(own, with layers below) bytes that each call leaves behind."""
    freed = freed_at(memory)
    moment = _keeping_moments(recording, calls, node_starts_ns)
    last_before = np.searchsorted(memory.time_ns, moment, side="right") - 1
    innermost = _call_at(recording, calls, memory)
    allocations = np.flatnonzero((memory.size_bytes > 0) & (innermost >= 0))
    call = innermost[allocations]
    alive = freed[allocations] > last_before[call]
    own = np.zeros(len(calls), dtype=np.int64)
    np.add.at(own, call[alive], memory.size_bytes[allocations[alive]])
    total = own.copy()
    for i in range(len(calls) - 1, -1, -1):
        if calls.parent[i] >= 0:
            total[calls.parent[i]] += total[i]
    return own, total


def _call_at(recording: Recording, calls: CallTree, memory: DeviceMemory) -> Int64:
    """Per memory event, the innermost call around it on its thread; -1 for none."""
    spans = recording.spans
    found = np.full(len(memory.time_ns), -1, dtype=np.int64)
    for lane in np.unique(spans.lane[calls.span]).tolist():
        on_lane = np.flatnonzero(spans.lane[calls.span] == lane)
        times, innermost = _timeline(spans.start_ns[calls.span[on_lane]], spans.end_ns[calls.span[on_lane]], on_lane)
        events = np.flatnonzero(memory.lane == lane)
        place = np.searchsorted(np.array(times), memory.time_ns[events], side="right") - 1
        found[events] = np.where(place >= 0, np.array(innermost)[place], -1)
    return found


def _timeline(start: Int64, end: Int64, calls: Int64) -> tuple[list[int], list[int]]:
    """Instants at which the innermost call of a thread changes, and the call from there on."""
    times: list[int] = []
    innermost: list[int] = []
    stack: list[tuple[int, int]] = []  # (end, call)

    def close_until(limit: int) -> None:
        while stack and stack[-1][0] <= limit:
            ended, _ = stack.pop()
            times.append(ended)
            innermost.append(stack[-1][1] if stack else -1)

    for begin, finish, call in zip(start.tolist(), end.tolist(), calls.tolist(), strict=True):
        close_until(begin)
        stack.append((finish, call))
        times.append(begin)
        innermost.append(call)
    close_until(_STILL_ALIVE)
    return times, innermost
