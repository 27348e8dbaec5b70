"""What was allocated before the recording began, and when it went.

Holdings tell of it by address. An accelerator's allocator writes an event when such a block is freed. On a
CPU torch writes none, so the moment is found by what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES
from profiler_wrapper.analysis.memory_told import EventsByAddress, Told
from profiler_wrapper.recording.recording import Bool, Int8, Int32, Int64

_NEVER = np.iinfo(np.int64).max
_GRADS = CATEGORIES.index("grads")
_OTHER = CATEGORIES.index("other")
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
