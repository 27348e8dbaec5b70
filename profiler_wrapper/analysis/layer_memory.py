"""What each call of a layer finds, needs and leaves behind, from the allocator's own events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.memory_before import Before, MissingFrees, blocks_before, missing_frees, sizes_of_frees
from profiler_wrapper.analysis.memory_told import Told, told_of
from profiler_wrapper.analysis.optimizer_calls import optimizer_calls
from profiler_wrapper.recording.owned import Holding
from profiler_wrapper.recording.recording import Int32, Int64, Recording
from profiler_wrapper.units import file_size

if TYPE_CHECKING:
    from profiler_wrapper.analysis.layer_calls import CallTree

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
