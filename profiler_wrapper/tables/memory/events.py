"""The allocator's events of one device, and the blocks that were there before the first of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from profiler_wrapper.place.optimizer_calls import optimizer_calls
from profiler_wrapper.tables.model import CATEGORIES
from profiler_wrapper.trace.recording import Bool, Int8, Int32, Int64, Recording
from profiler_wrapper.trace.run_file import Holding
from profiler_wrapper.units import file_size

NEVER = np.iinfo(np.int64).max
_CPU = 0  # c10::DeviceType
_INDICES = 4096  # more than a kind of device has
_GRANULE = 512  # bytes: the caching allocators of accelerators give out multiples of it
_OTHER, _GRADS = CATEGORIES.index("other"), CATEGORIES.index("grads")
_NUMBER = re.compile(r"[0-9]{1,19}")  # as many digits as 64 bits hold


class DeviceMemory(NamedTuple):
    """The memory events of one device, in time order.

    On a CPU the frees that a trace lacks are among them, on lane -1, see `_inferred_frees`.
    """

    device: str  # "cpu", "cuda:0", ...; a CPU's allocator reserves nothing
    lane: Int32
    time_ns: Int64
    address: Int64
    size_bytes: Int64
    allocated: Int64  # after each event
    reserved: Int64
    allocated_at_start: int  # before the first event
    before: PreExisting  # what is known of it
    known: KnownTensors
    notes: tuple[str, ...] = ()  # what is not known, and why

    @property
    def held(self) -> Int64:
        """Allocated before the first event, and after each."""
        return np.concatenate([[self.allocated_at_start], self.allocated])

    def highest(self, first: Int64, last: Int64) -> Int64:
        """Per interval of places in `held`, both ends included, the highest allocated."""
        if len(first) == 0:
            return np.empty(0, dtype=np.int64)
        padded = np.append(self.held, self.held[-1])  # same: no interval is behind the last
        return np.maximum.reduceat(padded, np.column_stack([first, last + 1]).ravel())[::2]


def device_memory(
    recording: Recording, holdings: Sequence[Holding] = (), *, cpu_frees_unsure: bool = False
) -> DeviceMemory | None:
    """The memory events of the accelerator that has most allocated at its peak; of the CPU where there is none.

    An accelerator's allocator states what is allocated. On a CPU the stated total only counts what
    happened while some profile ran, so it is counted anew: what the events allocate, and what was
    there before, as far as `holdings` or a free show it. Differences are exact. So is what an
    accelerator has allocated in a trace that does not state it.

    `cpu_frees_unsure`: frees on a CPU of what the recording did not allocate may be of other blocks (see
    `RecordedTrace`), so only those of what `holdings` list count, with the size that is listed.

    None where the recording has no memory events.
    """
    memory = recording.memory
    if len(memory) == 0:
        return None
    keys = memory.device_type.astype(np.int64) * _INDICES + np.maximum(memory.device, 0)  # a CPU has index -1
    key, notes = _chosen_device(keys, memory.total_allocated_bytes)
    device = device_name(*divmod(key, _INDICES))
    known = known_tensors(recording, holdings, device)
    chosen = np.flatnonzero(keys == key)
    size_bytes = memory.size_bytes[chosen]
    if device == "cpu":
        size_bytes, is_known = _sizes_of_frees(memory.time_ns[chosen], memory.address[chosen], size_bytes, known)
        if cpu_frees_unsure:
            chosen, size_bytes = chosen[is_known], size_bytes[is_known]
        if not len(chosen):
            return None
    lane, time_ns, address = memory.lane[chosen], memory.time_ns[chosen], memory.address[chosen]
    stated, reserved = memory.total_allocated_bytes[chosen], memory.total_reserved_bytes[chosen]
    notes = (*notes, *known.notes)
    if device != "cpu" and bool((stated >= 0).all()):
        start = max(0, int(stated[0] - size_bytes[0]))
        before = _pre_existing(time_ns, address, size_bytes, known, start)
        return DeviceMemory(device, lane, time_ns, address, size_bytes, stated, reserved, start, before, known, notes)
    before = _pre_existing(time_ns, address, size_bytes, known, None)
    if device == "cpu":
        zero_grad_ends_ns = np.sort(recording.spans.end_ns[optimizer_calls(recording, "zero_grad")])
        frees = _inferred_frees(time_ns, address, size_bytes, known, before, zero_grad_ends_ns)
        at = frees.event
        lane, time_ns = np.insert(lane, at, -1), np.insert(time_ns, at, frees.time_ns)
        address, size_bytes = np.insert(address, at, frees.address), np.insert(size_bytes, at, -frees.size_bytes)
        reserved = np.zeros_like(size_bytes)
        freed = np.where(before.freed < NEVER, before.freed + np.searchsorted(at, before.freed, side="right"), NEVER)
        freed[frees.block[frees.block >= 0]] = (at + np.arange(len(at)))[frees.block >= 0]
        before = replace(before, freed=freed)
    start = int(before.size_bytes.sum())
    allocated = np.maximum(start + np.cumsum(size_bytes), 0)  # a file may free more than there was
    return DeviceMemory(device, lane, time_ns, address, size_bytes, allocated, reserved, start, before, known, notes)


def _chosen_device(keys: Int64, total_allocated_bytes: Int64) -> tuple[int, tuple[str, ...]]:
    """The device to look at, and a note of other accelerators; `keys`: per event that of its device."""
    devices, counts = np.unique(keys, return_counts=True)
    peaks = [
        (int(total_allocated_bytes[keys == key].max()), count, key)
        for key, count in zip(devices.tolist(), counts.tolist(), strict=True)
        if key // _INDICES != _CPU
    ]
    if not peaks:
        return int(devices[-1]), ()
    (_, _, chosen), *others = sorted(peaks, key=lambda peak: (-peak[0], -peak[1], peak[2]))
    names = [f"{device_name(*divmod(key, _INDICES))} ({file_size(max(0, peak))} at most)" for peak, _, key in others]
    if not names:
        return chosen, ()
    verb = "is" if len(names) == 1 else "are"
    note = f"memory is that of {device_name(*divmod(chosen, _INDICES))}; {', '.join(names)} {verb} not analysed"
    return chosen, (note,)


def device_name(device_type: int, index: int) -> str:
    """`"cuda:0"` for a c10::DeviceType and an index; a CPU has none."""
    if device_type == _CPU:
        return "cpu"
    names = {1: "cuda", 6: "fpga", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 20: "device"}
    return f"{names.get(device_type, 'device')}:{index}"


def freed_at(memory: DeviceMemory) -> Int64:
    """Per event: the index of the event that frees what it allocated; `NEVER` for never.

    What is allocated where another block has not been freed shows that that one is gone.
    """
    freed = np.full(len(memory.time_ns), NEVER, dtype=np.int64)
    order = np.argsort(memory.address, kind="stable")
    first, second = order[:-1], order[1:]
    pairs = (memory.address[first] == memory.address[second]) & (memory.size_bytes[first] > 0)
    freed[first[pairs]] = second[pairs]
    return freed


class EventsByAddress:
    """Which event was the first at an address, or the last before some event. Events are given by their index."""

    def __init__(self, address: Int64) -> None:
        self._addresses, self._first, rank = np.unique(address, return_index=True, return_inverse=True)
        self._stride = len(address) + 1  # same (1 -> 0): the one before the next address's first is asked
        self._keys = np.sort(rank * self._stride + np.arange(len(address)))  # by address, then event

    def first(self, address: Int64) -> Int64:
        """Per address: its first event; -1 for none."""
        rank = np.searchsorted(self._addresses, address)
        same = np.append(self._addresses, -1)[rank] == address
        return np.where(same, np.append(self._first, -1)[rank], -1)

    def last_before(self, address: Int64, event: Int64) -> Int64:
        """Per query: the last event at `address` whose index is below `event`; -1 for none."""
        first = self.first(address)
        rank = np.searchsorted(self._addresses, address)
        at, last = np.divmod(
            np.append(self._keys, -1)[np.searchsorted(self._keys, rank * self._stride + event) - 1], self._stride
        )
        return np.where((first >= 0) & (at == rank), last, -1)


# --- What the model and its optimizers are known to hold, on the trace's clock ---


@dataclass(frozen=True, slots=True, eq=False)
class KnownTensors:
    """The tensors of one device that the run lists: one entry per moment and tensor, in order of time."""

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
        """Per entry: its moment."""
        return self.moment_ns[self.moment]


def known_tensors(recording: Recording, holdings: Sequence[Holding], device: str) -> KnownTensors:
    """What `holdings` list on `device` ("cpu", "cuda:0"), on the clock of `recording`."""
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
    return KnownTensors(
        np.array([holding.time_ns - (base_ns or 0) for holding in ordered], dtype=np.int64),
        columns[:, 0].astype(np.int32),
        columns[:, 1],
        columns[:, 2],
        columns[:, 3].astype(np.int8),
        columns[:, 4].astype(np.int32),
        tuple(names),
        notes,
    )


def _clock_base_ns(stated: object) -> int | None:
    """The unix time at which a trace's clock begins; None for what is none."""
    if isinstance(stated, str) and _NUMBER.fullmatch(stated):
        stated = int(stated)
    if isinstance(stated, float) and stated.is_integer():
        stated = int(stated)
    is_number = isinstance(stated, int) and not isinstance(stated, bool)
    return stated if is_number and 0 <= stated <= NEVER else None  # type: ignore[operator, return-value]


# --------------------------------------------------------------------------------------------------
# What was allocated before the recording began. An accelerator's allocator writes an event when such a block is freed.
# On a CPU torch writes none.


@dataclass(frozen=True, slots=True, eq=False)
class PreExisting:
    """Blocks that were there when the recording began.

    What is listed is there once an address. What only a free shows may be there again and again at one
    address: it was freed, given out unseen and freed once more.
    """

    address: Int64
    size_bytes: Int64
    category: Int8  # index into CATEGORIES; `other` for what only its free shows
    name: Int32  # index into KnownTensors.names; -1 for none
    freed: Int64  # index of the event that freed it; NEVER for none
    outside_bytes: int = 0  # listed, but beyond what the allocator had given out: cut off the sizes

    def __len__(self) -> int:
        return len(self.address)


def _listed_before(index: EventsByAddress, time_ns: Int64, known: KnownTensors) -> tuple[Int64, Int64]:
    """The entries of `known` that were there before all events, one an address; the first event there, -1 for none."""
    seen = np.searchsorted(time_ns, known.time_ns, side="right")
    entries = np.flatnonzero(index.last_before(known.address, seen) < 0)
    addresses, first = np.unique(known.address[entries], return_index=True)
    return entries[first], index.first(addresses)


def _pre_existing(
    time_ns: Int64, address: Int64, size_bytes: Int64, known: KnownTensors, given_out_bytes: int | None
) -> PreExisting:
    """What was there, from what is listed and from frees of what was never allocated.

    `given_out_bytes`: what the allocator of an accelerator says it had given out by then; what is listed takes
    no more than that. None where it says nothing.
    """
    entries, first_event = _listed_before(EventsByAddress(address), time_ns, known)
    sizes = known.size_bytes[entries].copy()
    freed = (first_event >= 0) & (size_bytes[first_event] < 0)
    sizes[freed] = -size_bytes[first_event[freed]]
    unknown = np.setdiff1d(frees_of_unknown(address, size_bytes), first_event[freed])
    outside = 0
    if given_out_bytes is not None:
        room = given_out_bytes + int(size_bytes[unknown].sum())
        sizes, outside = _within(known.address[entries], sizes, freed, room)
    return PreExisting(
        np.concatenate([known.address[entries], address[unknown]]),
        np.concatenate([sizes, -size_bytes[unknown]]),
        np.concatenate([known.category[entries], np.full(len(unknown), _OTHER, dtype=np.int8)]),
        np.concatenate([known.name[entries], np.full(len(unknown), -1, dtype=np.int32)]),
        # Where an address is allocated again, what was there had gone; on a CPU `_inferred_frees` may know it earlier.
        np.concatenate([np.where(first_event >= 0, first_event, NEVER), unknown]),
        outside,
    )


def _within(address: Int64, size_bytes: Int64, freed: Bool, room: int) -> tuple[Int64, int]:
    """(what storages take of the `room` bytes that an allocator had given out, what lies outside of these).

    The storages are in order of their addresses. Those that are `freed` were surely given out, with their size.
    Bytes that others share count once. One that begins a block takes all of it, up to the next storage; others
    are slices of a block, or another allocator's. Where the room is too small, first what begins no block is
    cut, then the largest.
    """
    ends = np.minimum(address.astype(np.uint64) + size_bytes.astype(np.uint64), NEVER).astype(np.int64)
    covered = np.maximum.accumulate(np.append(np.int64(0), ends))[:-1]
    sizes = np.where(freed, size_bytes, np.maximum(ends - np.maximum(address, covered), 0))
    begins_block = (address % _GRANULE == 0) & (address >= covered)
    free_behind = np.maximum(np.append(address[1:], NEVER)[: len(address)] - ends, 0)
    padding = np.where(begins_block & ~freed, np.minimum(-sizes % _GRANULE, free_behind), 0)
    taken = sum(sizes.tolist())  # numbers of a file: their sum may not fit into 64 bits
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


def _sizes_of_frees(time_ns: Int64, address: Int64, size_bytes: Int64, known: KnownTensors) -> tuple[Int64, Bool]:
    """(sizes, known), per event: frees on a CPU of what is listed from before have the size that is listed.

    The second is False for a free of what is not listed and no event before it allocated.
    """
    sizes, is_known = size_bytes.copy(), np.ones(len(address), dtype=np.bool_)
    unknown = frees_of_unknown(address, size_bytes)
    is_known[unknown] = False
    entries, event = _listed_before(EventsByAddress(address), time_ns, known)
    freed = np.isin(event, unknown)
    sizes[event[freed]] = -known.size_bytes[entries[freed]]
    is_known[event[freed]] = True
    return sizes, is_known


def frees_of_unknown(address: Int64, size_bytes: Int64) -> Int64:
    """The frees of what no event before them allocated."""
    order = np.argsort(address, kind="stable")
    known = np.zeros(len(address), dtype=np.bool_)
    known[order[1:]] = (address[order[1:]] == address[order[:-1]]) & (size_bytes[order[:-1]] > 0)
    return np.flatnonzero((size_bytes < 0) & ~known)


class _Frees(NamedTuple):
    """In order: before which event each belongs, and what it frees."""

    event: Int64
    time_ns: Int64
    address: Int64
    size_bytes: Int64  # positive
    block: Int64  # index into PreExisting; -1 for a block of the recording


def _inferred_frees(
    time_ns: Int64,
    address: Int64,
    size_bytes: Int64,
    known: KnownTensors,
    before: PreExisting,
    zero_grad_ends_ns: Int64,
) -> _Frees:
    """The frees that a CPU's trace does not have.

    A block from before the recording went, at the latest, when its address or a part of it is allocated again, and at
    the last moment of the inventory, where that lacks it; a gradient already when the first `zero_grad` ends after
    which it is no longer listed. A block of the recording went when its address is allocated again.
    """
    index = EventsByAddress(address)
    first_event = index.first(before.address)
    blocks = np.flatnonzero((before.name >= 0) & ((first_event < 0) | (size_bytes[first_event] > 0)))
    blocks = blocks[np.argsort(before.address[blocks], kind="stable")]
    starts, sizes = before.address[blocks], before.size_bytes[blocks]
    overwritten = _first_allocation_within(starts, starts + sizes, address, size_bytes)
    silent_ns = _no_longer_listed_ns(index, time_ns, known, starts, before.category[blocks], zero_grad_ends_ns)
    overwritten_ns = np.append(time_ns, NEVER)[overwritten]
    silent = np.searchsorted(time_ns, silent_ns, side="right")
    gone, gone_ns = np.where(overwritten_ns <= silent_ns, overwritten, silent), np.minimum(overwritten_ns, silent_ns)
    went = gone_ns < NEVER
    order = np.argsort(address, kind="stable")
    one, next_one = order[:-1], order[1:]
    over = (address[one] == address[next_one]) & (size_bytes[one] > 0) & (size_bytes[next_one] > 0)
    again = np.sort(next_one[over])
    previous = index.last_before(address[again], again)
    events = np.concatenate([gone[went], again])
    times = np.concatenate([gone_ns[went], time_ns[again]])
    order = np.lexsort((times, events))
    return _Frees(
        events[order],
        times[order],
        np.concatenate([starts[went], address[again]])[order],
        np.concatenate([sizes[went], size_bytes[previous]])[order],
        np.concatenate([blocks[went], np.full(len(again), -1)])[order],
    )


def _first_allocation_within(starts: Int64, ends: Int64, address: Int64, size_bytes: Int64) -> Int64:
    """Per interval of addresses, in their order: the first event that allocates some of it; their number for none."""
    first = np.full(len(starts), len(address), dtype=np.int64)
    events = np.flatnonzero(size_bytes > 0)
    low = np.searchsorted(ends, address[events], side="right")
    high = np.searchsorted(starts, address[events] + size_bytes[events])
    for event, begin, end in zip(*(c[low < high].tolist() for c in (events, low, high)), strict=True):
        first[begin:end] = np.minimum(first[begin:end], event)
    return first


def _no_longer_listed_ns(
    index: EventsByAddress,
    time_ns: Int64,
    known: KnownTensors,
    address: Int64,
    category: Int8,
    zero_grad_ends_ns: Int64,
) -> Int64:
    """Per block from before, in order of address: since when the inventory shows that it is gone; `NEVER` for none."""
    if not len(address):
        return address
    seen = np.searchsorted(time_ns, known.time_ns, side="right")
    block = np.minimum(np.searchsorted(address, known.address), len(address) - 1)
    # same (< -> <=): a block at the first event's address went with it
    lists = (address[block] == known.address) & (index.last_before(known.address, seen) < 0)
    last_listed = np.zeros(len(address), dtype=np.int64)  # index of a moment
    np.maximum.at(last_listed, block[lists], known.moment[lists])
    zero_grad = np.searchsorted(zero_grad_ends_ns, known.moment_ns[last_listed])
    zeroed_ns = np.where(category == _GRADS, np.append(zero_grad_ends_ns, NEVER)[zero_grad], NEVER)
    gone_ns = np.minimum(zeroed_ns, known.moment_ns[-1])
    return np.where(last_listed < len(known.moment_ns) - 1, gone_ns, NEVER)
