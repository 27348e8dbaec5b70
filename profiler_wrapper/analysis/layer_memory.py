"""What each call of a layer finds, needs and leaves behind, from the allocator's own events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.recording.columns import Bool, Int32, Int64, MemoryEvents, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.layer_calls import CallTree

_STILL_ALIVE = np.iinfo(np.int64).max
_CPU = 0


class DeviceMemory(NamedTuple):
    """The memory events of one device, in time order."""

    device: str  # "cpu", "cuda:0", ...; a CPU's allocator reserves nothing
    lane: Int32
    time_ns: Int64
    address: Int64
    size_bytes: Int64
    allocated: Int64  # after each event
    reserved: Int64

    @property
    def allocated_at_start(self) -> int:
        """Allocated before the first event."""
        return int(self.allocated[0] - self.size_bytes[0]) if len(self.allocated) else 0


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


def device_memory(recording: Recording) -> DeviceMemory | None:
    """The memory events of the device that has most of them, an accelerator before the CPU.

    None where the recording has no memory events.
    """
    memory = recording.memory
    if len(memory) == 0:
        return None
    keys = memory.device_type.astype(np.int64) * 4096 + np.maximum(memory.device, 0)  # a CPU has index -1
    candidates, counts = np.unique(keys, return_counts=True)
    accelerated = candidates >= 4096
    if accelerated.any():
        candidates, counts = candidates[accelerated], counts[accelerated]
    key = int(candidates[np.argmax(counts)])
    chosen = keys == key
    return DeviceMemory(
        _device_name(key),
        memory.lane[chosen],
        memory.time_ns[chosen],
        memory.address[chosen],
        memory.size_bytes[chosen],
        _running_total(memory, chosen, on_cpu=key < 4096),
        memory.total_reserved_bytes[chosen],
    )


def _device_name(key: int) -> str:
    device_type, index = divmod(key, 4096)
    if device_type == _CPU:
        return "cpu"
    names = {1: "cuda", 6: "fpga", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 20: "device"}
    return f"{names.get(device_type, 'device')}:{index}"


def _running_total(memory: MemoryEvents, chosen: Bool, *, on_cpu: bool) -> Int64:
    """Allocated after each event.

    An accelerator's allocator states it. On a CPU the stated total only counts what happened while
    some profile ran, so it is counted anew: what the events allocate, and what was there before, as
    far as one of them frees it. Differences are exact.
    """
    if not on_cpu:
        return memory.total_allocated_bytes[chosen]
    size = memory.size_bytes[chosen]
    first, second = _neighbours(memory.address[chosen])
    allocated_before = size < 0
    allocated_before[second[size[first] > 0]] = False
    return np.cumsum(size) - int(size[allocated_before].sum())


def freed_at(memory: DeviceMemory) -> Int64:
    """Per event: the index of the event that frees what it allocated; a huge number for never."""
    freed = np.full(len(memory.time_ns), _STILL_ALIVE, dtype=np.int64)
    first, second = _neighbours(memory.address)
    pairs = (memory.size_bytes[first] > 0) & (memory.size_bytes[second] < 0)
    freed[first[pairs]] = second[pairs]
    return freed


def _neighbours(address: Int64) -> tuple[Int64, Int64]:
    """Pairs of events that follow one another at one address."""
    order = np.argsort(address, kind="stable")
    same = address[order[:-1]] == address[order[1:]]
    return order[:-1][same], order[1:][same]


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

    That is when the outermost forward around it ends; where a backward begins before the same
    outermost layer is entered again, it is then: outputs that nobody kept are gone by that time.
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
    moment: Int64 = np.where(backward < next_entry, backward, end)[outermost]
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
