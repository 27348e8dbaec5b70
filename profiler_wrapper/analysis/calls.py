"""Every entry of every layer: when it ran, what it cost, what memory it found and left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN, Attribution
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.per_layer import CallMemory
from profiler_wrapper.analysis.model import LayerCall, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.trace.nesting import Nesting, nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int16, Int32, Int64, Recording

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """Entries of layers in the order they began; `parent` is the entry around one on its thread."""

    span: Int64
    layer: Int32
    parent: Int32  # index of the enclosing call, -1 for none
    call_of_span: Int32  # per span of the recording: the innermost call around it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


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
    return CallTree(
        entries,
        np.array([tree.layer_of_span[span] for span in entries.tolist()], dtype=np.int32),
        call_at[nearest_above(nesting.parent, near)[entries]],
        call_at[near],
    )


def layer_calls(
    recording: Recording,
    tree: LayerTree,
    calls: CallTree,
    attribution: Attribution,
    charges: Charges,
    steps: Steps,
    memory: CallMemory | None,
) -> tuple[LayerCall, ...]:
    """One row per call, in the order they began."""
    spans = recording.spans
    time_ns, attention_ns, first, last, device = _cost(recording, calls, charges)
    step_of = steps.place_of(spans.start_ns[calls.span]).tolist()
    seen: Counter[tuple[int, str]] = Counter()
    rows = []
    for i, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        phase = attribution.place(span).phase
        index = seen[layer, phase]
        seen[layer, phase] += 1
        ran_on_device = charges.basis == "device" and first[i] != _NEVER
        rows.append(
            LayerCall(
                layer=tree.layers[layer].name,
                phase=phase,
                step=steps.number[step_of[i]] if step_of[i] >= 0 else None,
                index=index,
                start_ns=int(spans.start_ns[span]),
                end_ns=int(spans.start_ns[span] + spans.duration_ns[span]),
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
    first, last = np.full(len(calls), _NEVER, np.int64), np.full(len(calls), -_NEVER, np.int64)
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
# Time per layer, phase and step.


def step_of_charges(charges: Charges, steps: Steps) -> Int64:
    """Per charge the place of the step that launched it; -1 for none, as for what has no launch."""
    place = steps.place_of(charges.launch_ns)
    place[charges.cpu_span < 0] = -1
    return place


def layer_step_times(
    tree: LayerTree, attribution: Attribution, charges: Charges, steps: Steps
) -> Mapping[tuple[int, Phase], tuple[int, ...]]:
    """Nanoseconds of each (layer, phase) that has time, layers below included, in each step."""
    places = attribution.places
    spent = np.zeros((len(places), len(steps) + 1), dtype=np.int64)  # the last column is for no step
    np.add.at(spent, (charges.place, step_of_charges(charges, steps)), charges.time_ns)
    row_of: dict[tuple[int, Phase], int] = {}
    from_place, to_row = [], []
    for index in np.flatnonzero(spent.any(axis=1)).tolist():
        place = places[index]
        if place.layer == UNKNOWN:
            continue
        chain = tree.layers[place.layer].ancestors if place.layer >= 0 else (NO_LAYER,)
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


def called_by_alike(ops: OpSpans, key: Int32) -> Bool:
    """Per op: whether one with the same key calls it, directly or not."""
    found = np.zeros(len(ops), dtype=np.bool_)
    doubtful, above = np.arange(len(ops)), ops.around
    while True:  # one caller up each round
        called = above >= 0
        doubtful, above = doubtful[called], above[called]
        if not len(doubtful):
            return found
        alike = key[above] == key[doubtful]
        found[doubtful[alike]] = True
        doubtful, above = doubtful[~alike], ops.around[above[~alike]]
