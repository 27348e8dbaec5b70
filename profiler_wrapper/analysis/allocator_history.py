"""What the allocator's history says: how much was allocated after each entry, and what was alive at a moment.

Sizes of a history are those asked for; what is given is rounded up, and only for blocks alive at the end is it
known to how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.recording.snapshot_records import ACTIONS, NO_TEXT, UNKNOWN, AllocatorEvents, Segment

BEFORE = -1  # the number of the stack of what was allocated before the history and freed within it
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = (ACTIONS.index(name) for name in ACTIONS[:3])
_GAINS = [ACTIONS.index(name) for name in ("segment_alloc", "segment_map")]
_LOSSES = [ACTIONS.index(name) for name in ("segment_free", "segment_unmap")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetimes:
    """Every allocation that a history or its end knows, as columns. State k is that after k entries.

    Alive in the states `born` <= k < `died`.
    """

    born: Int64  # 0 for what was there before the first entry
    died: Int64  # number of entries + 1 for what is alive at the end
    size_bytes: Int64  # asked for
    stack: Int64  # BEFORE where it is not known
    text: Int64
    inconsistent: int  # entries and blocks that contradict one another

    def alive(self, state: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of them are alive in a state."""
        return (self.born <= state) & (state < self.died)

    def allocated(self, states: int) -> Int64:
        """Bytes alive in the states 0, 1, ..., `states` - 1."""
        change = np.zeros(states + 1, np.int64)
        np.add.at(change, self.born, self.size_bytes)
        np.subtract.at(change, np.minimum(self.died, states), self.size_bytes)
        return np.cumsum(change[:states])


class _Table:
    """Grows row by row."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []

    def add(self, *, born: int, died: int, size: int, stack: int, text: int) -> None:
        self.rows.append((born, died, size, stack, text))


def lifetimes(events: AllocatorEvents, segments: Iterable[Segment]) -> Lifetimes:
    """From the history of a device and its segments at the end.

    What is freed without having been allocated was there before; so was what is alive at the end and was never
    allocated. Memory is alive until its free is completed, unless such entries were not recorded.
    """
    end = len(events) + 1
    completes = bool((events.action == _FREE_COMPLETED).any())
    free = _FREE_COMPLETED if completes else _FREE_REQUESTED
    table, live, inconsistent = _Table(), dict[int, tuple[int, int, int, int]](), 0
    entries = zip(events.action.tolist(), events.address.tolist(), events.size_bytes.tolist(),
                  events.stack.tolist(), events.text.tolist(), strict=True)  # fmt: skip
    for state, (action, address, size, stack, text) in enumerate(entries, start=1):
        if action not in (_ALLOC, free):
            continue
        known = live.pop(address, None)
        if action == _ALLOC:
            live[address] = (state, size, stack, text)
            inconsistent += known is not None
        if known is not None:
            table.add(born=known[0], died=state, size=known[1], stack=known[2], text=known[3])
        elif action == free:
            table.add(born=0, died=state, size=size, stack=BEFORE, text=NO_TEXT)
    inconsistent += _add_alive(table, live, segments, end, completes=completes)
    born, died, size_bytes, stacks, texts = np.array(table.rows, np.int64).reshape(-1, 5).T.copy()
    return Lifetimes(
        born=born, died=died, size_bytes=size_bytes, stack=stacks, text=texts, inconsistent=inconsistent
    )  # fmt: skip


def _add_alive(
    table: _Table,
    live: dict[int, tuple[int, int, int, int]],
    segments: Iterable[Segment],
    end: int,
    *,
    completes: bool,
) -> int:
    """Adds what is alive at the end; returns how many allocations of the history are in no block, though not freed."""
    for segment in segments:
        for block in segment.blocks:
            if block.state == "free" or (block.state == "awaiting_free" and not completes):
                continue
            known = live.pop(block.address, None) if block.address != UNKNOWN else None
            born, size, stack, text = known or (0, block.requested_bytes, block.stack, block.text)
            table.add(born=born, died=end, size=size, stack=stack or block.stack, text=text or block.text)
    for born, size, stack, text in live.values():
        table.add(born=born, died=end, size=size, stack=stack, text=text)
    return len(live)


def reserved(events: AllocatorEvents, reserved_at_end: int) -> Int64 | None:
    """Bytes that the allocator holds of the device in the states 0, 1, ..., reckoned back from the end.

    None where that would be negative: the history is not that of these segments.
    """
    sign = np.isin(events.action, _GAINS).astype(np.int64) - np.isin(events.action, _LOSSES)
    change = np.concatenate([[0], np.cumsum(sign * events.size_bytes)])
    course: Int64 = reserved_at_end - change[-1] + change
    return course if course.min() >= 0 else None


def times_us(events: AllocatorEvents) -> Int64 | None:
    """When each entry was made, since 1970; None where they do not say, or where the clock went backwards."""
    known = len(events) > 0 and bool((events.time_us > 0).all()) and bool((np.diff(events.time_us) >= 0).all())
    return events.time_us if known else None


def grouped(keys: Int64, sizes: Int64, count: int) -> tuple[Int64, Int64]:
    """Bytes and number of rows by key, 0 <= key < `count`."""
    total = np.zeros(count, np.int64)
    np.add.at(total, keys, sizes)
    return total, np.bincount(keys, minlength=count).astype(np.int64)


def curves(lives: Lifetimes, group: Int64, chosen: Sequence[int], states: int) -> list[Int64]:
    """Bytes alive in each state of those whose group is each of `chosen`."""
    found = []
    for number in chosen:
        mine = group == number
        part = Lifetimes(
            born=lives.born[mine], died=lives.died[mine], size_bytes=lives.size_bytes[mine],
            stack=lives.stack[mine], text=lives.text[mine], inconsistent=0,
        )  # fmt: skip
        found.append(part.allocated(states))
    return found
