"""The largest allocations, and what each op allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES
from profiler_wrapper.analysis.memory_use import begin_of, owned_memory
from profiler_wrapper.analysis.view_model import AllocationRow, OpMemoryRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.layer_memory import DeviceMemory
    from profiler_wrapper.analysis.memory_owned import OwnedMemory

_MOST_ALLOCATIONS = 500
_NEVER = np.iinfo(np.int64).max


def allocation_rows(
    found: Attributed, memory: DeviceMemory | None, *, owned: OwnedMemory | None = None
) -> tuple[AllocationRow, ...]:
    """The 500 largest allocations of the recording, the largest first, of equal ones the earliest.

    `owned`: the blocks of `memory`, where they are at hand.
    """
    if memory is None:
        return ()
    owned = owned or owned_memory(found, memory)
    blocks = owned.blocks
    begin_ns = begin_of(found.recording)
    made = np.flatnonzero(~blocks.before)  # in order of time
    largest = made[np.argsort(-blocks.size_bytes[made], kind="stable")[:_MOST_ALLOCATIONS]]
    freed_ns = np.append(memory.time_ns, -1)[blocks.freed[largest]]
    return tuple(
        AllocationRow(
            size_bytes=int(blocks.size_bytes[block]),
            allocated_ns=int(memory.time_ns[blocks.made[block]]) - begin_ns,
            released_ns=released - begin_ns if blocks.freed[block] < blocks.events else None,
            layer=owned.layers[owned.layer[block]],
            op=blocks.ops[blocks.op[block]],
            phase=owned.phases[blocks.place[block]],
            category=CATEGORIES[owned.categories.category[block]],
        )
        for block, released in zip(largest.tolist(), freed_ns.tolist(), strict=True)
    )


def op_memory_rows(
    found: Attributed, memory: DeviceMemory | None, *, owned: OwnedMemory | None = None
) -> tuple[OpMemoryRow, ...]:
    """What each op allocated, most bytes first; the sums over them are those of all allocation events.

    `owned`: the blocks of `memory`, where they are at hand.
    """
    if memory is None:
        return ()
    owned = owned or owned_memory(found, memory)
    blocks = owned.blocks
    made = np.flatnonzero(~blocks.before)
    op, sizes = blocks.op[made], blocks.size_bytes[made]
    freed_ns = np.append(memory.time_ns, _NEVER)[blocks.freed[made]]
    ends_ns = np.append(found.recording.spans.end_ns, _NEVER)  # the last for what no op made
    kept = freed_ns > ends_ns[blocks.maker[made]]
    count = np.bincount(op, minlength=len(blocks.ops))
    allocated, kept_bytes, largest = (np.zeros(len(blocks.ops), dtype=np.int64) for _ in range(3))
    np.add.at(allocated, op, sizes)
    np.add.at(kept_bytes, op[kept], sizes[kept])
    np.maximum.at(largest, op, sizes)
    rows = [
        OpMemoryRow(
            op=blocks.ops[i],
            allocations=int(count[i]),
            allocated_bytes=int(allocated[i]),
            kept_bytes=int(kept_bytes[i]) if blocks.ops[i] else None,
            largest_bytes=int(largest[i]),
        )
        for i in np.flatnonzero(count).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allocated_bytes, row.op)))
