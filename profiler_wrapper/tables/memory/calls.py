"""Measure the memory of each call of a layer by the allocator's own events."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.memory.events import NEVER, DeviceMemory, freed_at
from profiler_wrapper.trace.arrays import at, sum_by_key
from profiler_wrapper.trace.nesting import innermost_around, nearest
from profiler_wrapper.trace.recording import Int64

# Bytes per call by the name of a field of `LayerCall`; on a CPU, which reserves nothing, without what is reserved.
CallMemory = Mapping[str, Int64]


def call_memory(placed: Placed, memory: DeviceMemory) -> CallMemory:
    """Memory of every call, in the order of `Placed.calls`.

    `retained_bytes` is allocated inside and kept for backward, see `_retention_times`; layers below included.
    """
    spans, calls = placed.recording.spans, placed.calls
    entry = np.searchsorted(memory.time_ns, spans.start_ns[calls.span])  # 0: before the first event
    leave = np.searchsorted(memory.time_ns, spans.end_ns[calls.span], side="right")
    self_retained, retained = _retained(placed, memory)
    held = {
        "entry_allocated_bytes": memory.held[entry],
        "exit_allocated_bytes": memory.held[leave],
        "peak_bytes": memory.highest(entry, leave),
        "retained_bytes": retained,
        "self_retained_bytes": self_retained,
    }
    if memory.device != "cpu":
        reserved = np.concatenate([memory.reserved[:1], memory.reserved])
        held |= {"entry_reserved_bytes": reserved[entry], "exit_reserved_bytes": reserved[leave]}
    return held


def _retention_times(placed: Placed) -> Int64:
    """Per call, the instant at which what it allocated and is alive counts as retained.

    That is when the outermost forward around it ends; where a backward follows, it is when that begins
    or the same outermost layer is entered again: outputs that nobody kept are gone by that time.
    """
    spans, calls = placed.recording.spans, placed.calls
    next_entry = np.full(len(calls), NEVER, dtype=np.int64)
    last_entry: dict[int, int] = {}
    for i in np.flatnonzero(calls.parent < 0).tolist():
        layer = int(calls.layer[i])
        if layer in last_entry:
            next_entry[last_entry[layer]] = spans.start_ns[calls.span[i]]
        last_entry[layer] = i
    end = spans.end_ns[calls.span]
    nodes = np.append(np.sort(spans.start_ns[placed.attribution.is_node]), NEVER)
    backward = nodes[np.searchsorted(nodes, end)]
    moment: Int64 = np.where(backward < NEVER, np.minimum(backward, next_entry), end)
    return moment[nearest(calls.parent, calls.parent < 0)]


def _retained(placed: Placed, memory: DeviceMemory) -> tuple[Int64, Int64]:
    """(own, with layers below) bytes that each call leaves behind."""
    calls, nesting = placed.calls, placed.nesting
    last_before = np.searchsorted(memory.time_ns, _retention_times(placed), side="right") - 1
    call_of_entry = np.full(len(nesting.parent), -1, dtype=np.int32)
    call_of_entry[calls.span] = np.arange(len(calls))
    call_around = at(call_of_entry, nearest(nesting.parent, call_of_entry >= 0), -1)
    allocations = np.flatnonzero((memory.size_bytes > 0) & (memory.lane >= 0))
    made_ns = memory.time_ns[allocations]
    span = innermost_around(nesting, placed.recording.spans, memory.lane[allocations], made_ns, made_ns + 1)
    call = at(call_around, span, -1)
    alive = (call >= 0) & (freed_at(memory)[allocations] > at(last_before, call, 0))
    own = sum_by_key(call[alive], memory.size_bytes[allocations[alive]], len(calls))
    return own, calls.with_below(own.copy())
