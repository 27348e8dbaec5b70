"""Every entry of every layer: when it ran, what it cost, what memory it found and left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.events import NEVER, DeviceMemory, freed_at
from profiler_wrapper.analysis.model import LayerCall, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int16, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """Entries of layers in the order they began; `parent` is the entry around one on its thread."""

    span: Int64
    layer: Int32
    parent: Int32  # index of the enclosing call, -1 for none
    call_of_span: Int32  # per span of the recording: the innermost call around it; -1 for none
    outermost: Int64  # the spans of calls outside of all others, and of backward

    def __len__(self) -> int:
        return len(self.span)


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


def find_calls(tree: LayerTree, nesting: Nesting, start_ns: Int64, node_of: Int32) -> CallTree:
    """The calls of a recording. What an autograd node runs belongs to calls only inside that node."""
    is_entry = np.zeros(len(node_of), dtype=np.bool_)
    is_entry[list(tree.layer_of_span)] = True
    entries = nesting.order[is_entry[nesting.order]]
    entries = entries[np.argsort(start_ns[entries], kind="stable")]
    is_node = node_of == np.arange(len(node_of))
    near = nearest(nesting.parent, is_entry | is_node)
    call_at = np.full(len(node_of) + 1, -1, dtype=np.int32)  # the last one is for "none"
    call_at[entries] = np.arange(len(entries))
    parent = call_at[nearest_above(nesting.parent, near)[entries]]
    layer = np.array([tree.layer_of_span[span] for span in entries.tolist()], dtype=np.int32)
    return CallTree(entries, layer, parent, call_at[near], entries[(parent < 0) & (node_of[entries] < 0)])


def layer_calls(found: Attributed, memory: CallMemory | None) -> tuple[LayerCall, ...]:
    """One row per call, in the order they began."""
    calls, spans, tree = found.calls, found.recording.spans, found.tree
    time_ns, attention_ns, first, last, device = _cost(found.recording, calls, found.charges)
    begins, ends = spans.start_ns[calls.span], spans.end_ns[calls.span]
    step_of = found.steps.place_of(begins).tolist()
    seen: Counter[tuple[int, str]] = Counter()
    rows = []
    for i, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        phase = found.attribution.place(span).phase
        index = seen[layer, phase]
        seen[layer, phase] += 1
        ran_on_device = found.charges.basis == "device" and first[i] != NEVER
        rows.append(
            LayerCall(
                layer=tree.layers[layer].name,
                phase=phase,
                step=found.steps.number[step_of[i]] if step_of[i] >= 0 else None,
                index=index,
                start_ns=int(begins[i]),
                end_ns=int(ends[i]),
                device_start_ns=int(first[i]) if ran_on_device else None,
                device_end_ns=int(last[i]) if ran_on_device else None,
                device=int(device[i]) if ran_on_device else None,
                time_ns=int(time_ns[i]),
                attention_ns=int(attention_ns[i]),
                entry_allocated_bytes=_at(memory, "entry_allocated", i),
                exit_allocated_bytes=_at(memory, "exit_allocated", i),
                entry_reserved_bytes=_at(memory, "entry_reserved", i),
                exit_reserved_bytes=_at(memory, "exit_reserved", i),
                peak_bytes=_at(memory, "peak", i),
                retained_bytes=_at(memory, "retained", i),
            )
        )
    return tuple(rows)


def _at(memory: CallMemory | None, name: str, call: int) -> int | None:
    values: Int64 | None = None if memory is None else getattr(memory, name)
    return None if values is None else int(values[call])


def _cost(recording: Recording, calls: CallTree, charges: Charges) -> tuple[Int64, Int64, Int64, Int64, Int16]:
    """Per call, layers below included: time, attention time, first start and last end of its events, first device."""
    spans = recording.spans
    time_ns, attention_ns = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64)
    first, last = np.full(len(calls), NEVER, np.int64), np.full(len(calls), -NEVER, np.int64)
    launched = charges.cpu_span >= 0
    call = np.full(len(charges), -1, dtype=np.int64)
    call[launched] = calls.call_of_span[charges.cpu_span[launched]]
    inside = np.flatnonzero(call >= 0)
    np.add.at(time_ns, call[inside], charges.time_ns[inside])
    attention = inside[charges.backend[inside] >= 0]
    np.add.at(attention_ns, call[attention], charges.time_ns[attention])
    start = spans.start_ns[charges.span[inside]]
    np.minimum.at(first, call[inside], start)
    np.maximum.at(last, call[inside], start + spans.duration_ns[charges.span[inside]])
    device = np.full(len(calls), -1, np.int16)
    device[call[inside][::-1]] = spans.device[charges.span[inside]][::-1]  # in order of start: the first one stays
    for i in range(len(calls) - 1, -1, -1):  # a call begins after the one around it
        above = calls.parent[i]
        if above >= 0:
            time_ns[above] += time_ns[i]
            attention_ns[above] += attention_ns[i]
            if first[i] < first[above]:
                first[above], device[above] = first[i], device[i]
            last[above] = max(last[above], last[i])
    return time_ns, attention_ns, first, last, device


# --------------------------------------------------------------------------------------------------
# Memory of each call, from the allocator's own events.


def call_memory(found: Attributed, memory: DeviceMemory) -> CallMemory:
    """Memory of every call, in the order of `Attributed.calls`."""
    spans, calls = found.recording.spans, found.calls
    start, end = spans.start_ns[calls.span], spans.end_ns[calls.span]
    entry = np.searchsorted(memory.time_ns, start)  # 0: before the first event
    leave = np.searchsorted(memory.time_ns, end, side="right")
    allocated = np.concatenate([[memory.allocated_at_start], memory.allocated])
    reserved = None if memory.device == "cpu" else np.concatenate([memory.reserved[:1], memory.reserved])
    self_retained, retained = _retained(found, memory)
    return CallMemory(
        entry_allocated=allocated[entry],
        exit_allocated=allocated[leave],
        entry_reserved=None if reserved is None else reserved[entry],
        exit_reserved=None if reserved is None else reserved[leave],
        peak=_highest(allocated, entry, leave),
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


def _keeping_moments(found: Attributed) -> Int64:
    """Per call, the instant at which what it allocated and is alive counts as retained.

    That is when the outermost forward around it ends; where a backward follows, it is when that begins
    or the same outermost layer is entered again: outputs that nobody kept are gone by that time.
    """
    spans, calls = found.recording.spans, found.calls
    outermost = np.arange(len(calls))
    next_entry = np.full(len(calls), NEVER, dtype=np.int64)
    last_entry: dict[int, int] = {}
    for i, (above, layer) in enumerate(zip(calls.parent.tolist(), calls.layer.tolist(), strict=True)):
        if above >= 0:
            outermost[i] = outermost[above]
            continue
        if layer in last_entry:
            next_entry[last_entry[layer]] = spans.start_ns[calls.span[i]]
        last_entry[layer] = i
    end = spans.end_ns[calls.span]
    nodes = np.append(np.sort(spans.start_ns[found.attribution.is_node]), NEVER)
    backward = nodes[np.searchsorted(nodes, end)]
    moment: Int64 = np.where(backward < NEVER, np.minimum(backward, next_entry), end)[outermost]
    return moment


def _retained(found: Attributed, memory: DeviceMemory) -> tuple[Int64, Int64]:
    """(own, with layers below) bytes that each call leaves behind."""
    calls, nesting = found.calls, found.nesting
    last_before = np.searchsorted(memory.time_ns, _keeping_moments(found), side="right") - 1
    call_of_entry = np.full(len(nesting.parent) + 1, -1, dtype=np.int32)  # the last one is for "none"
    call_of_entry[calls.span] = np.arange(len(calls))
    entered = nearest(nesting.parent, call_of_entry[:-1] >= 0)
    allocations = np.flatnonzero((memory.size_bytes > 0) & (memory.lane >= 0))
    made_ns = memory.time_ns[allocations]
    span = innermost_around(nesting, found.recording.spans, memory.lane[allocations], made_ns, made_ns + 1)
    call = np.where(span >= 0, call_of_entry[entered[span]], -1)
    allocations, call = allocations[call >= 0], call[call >= 0]
    alive = freed_at(memory)[allocations] > last_before[call]
    own = np.zeros(len(calls), dtype=np.int64)
    np.add.at(own, call[alive], memory.size_bytes[allocations[alive]])
    total = own.copy()
    for i in range(len(calls) - 1, -1, -1):
        if calls.parent[i] >= 0:
            total[calls.parent[i]] += total[i]
    return own, total


# --------------------------------------------------------------------------------------------------
# Time per layer, phase and step.


def step_of_charges(charges: Charges, steps: Steps) -> Int64:
    """Per charge the place of the step that launched it; -1 for none, as for what has no launch."""
    place = steps.place_of(charges.launch_ns)
    place[charges.cpu_span < 0] = -1
    return place


def layer_step_times(found: Attributed) -> Mapping[tuple[int, Phase], tuple[int, ...]]:
    """Nanoseconds of each (layer, phase) that has time, layers below included, in each step."""
    places, charges, steps = found.attribution.places, found.charges, found.steps
    spent = np.zeros((len(places), len(steps) + 1), dtype=np.int64)  # the last column is for no step
    np.add.at(spent, (charges.place, step_of_charges(charges, steps)), charges.time_ns)
    row_of: dict[tuple[int, Phase], int] = {}
    from_place, to_row = [], []
    for index in np.flatnonzero(spent.any(axis=1)).tolist():
        place = places[index]
        if place.layer == UNKNOWN:
            continue
        chain = found.tree.layers[place.layer].ancestors if place.layer >= 0 else (NO_LAYER,)
        for layer in chain:
            from_place.append(index)
            to_row.append(row_of.setdefault((layer, place.phase), len(row_of)))
    table = np.zeros((len(row_of), len(steps)), dtype=np.int64)
    np.add.at(table, to_row, spent[from_place, :-1])
    return {key: tuple(times) for key, times in zip(row_of, table.tolist(), strict=True)}


# --------------------------------------------------------------------------------------------------
# The ops of a recording: which spans they are, which of them calls which, what runs in each.


@dataclass(frozen=True, slots=True, eq=False)
class OpSpans:
    """Ops in file order: autograd nodes too, but no layer marks. Indices below are into `span`."""

    span: Int64  # index into Recording.spans
    op_of: Int32  # per span of the recording: the innermost op around it, or itself; -1 for none
    around: Int32  # per op: the op that calls it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


def find_ops(recording: Recording, parent: Int32, tree: LayerTree) -> OpSpans:
    """The ops of `recording`; `parent`: per span the span around it."""
    is_op: Bool = recording.spans.category == Category.CPU_OP
    if tree.source == "marks":
        is_op[list(tree.layer_of_span)] = False
    span = np.flatnonzero(is_op)
    place = np.full(len(is_op) + 1, -1, dtype=np.int32)  # the last one is for "none"
    place[span] = np.arange(len(span), dtype=np.int32)
    near = nearest(parent, is_op)
    return OpSpans(span, place[near], place[nearest_above(parent, near)[span]])


def with_called(ops: OpSpans, own: Int64) -> Int64:
    """Per op the sum of `own` over it and all that it calls; `own` becomes that."""
    depth, above = (ops.around >= 0).astype(np.int32), ops.around.copy()
    while (further := above >= 0).any():  # each round looks twice as far
        depth[further] += depth[above[further]]
        above[further] = above[above[further]]
    del above, further
    by_depth = np.argsort(depth, kind="stable").astype(np.int32)
    bounds = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
    for level in range(len(bounds) - 2, -1, -1):
        members = by_depth[bounds[level] : bounds[level + 1]]
        np.add.at(own, ops.around[members], own[members])
    return own


def called_by_same_key(ops: OpSpans, key: Int32) -> Bool:
    """Per op: whether one with the same key calls it, directly or not."""
    found = np.zeros(len(ops), dtype=np.bool_)
    doubtful, above = np.arange(len(ops)), ops.around
    while True:  # one caller up each round
        called = above >= 0
        doubtful, above = doubtful[called], above[called]
        if not len(doubtful):
            return found
        same = key[above] == key[doubtful]
        found[doubtful[same]] = True
        doubtful, above = doubtful[~same], ops.around[above[~same]]
