"""Every entry of every layer: when it ran, what it cost, what memory it found and left, its lane in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.call_rows import LayerCall
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.events import NEVER, DeviceMemory, freed_at
from profiler_wrapper.analysis.statistics import at, in_order, marked, sum_by_key
from profiler_wrapper.trace.lanes import LaneSpan
from profiler_wrapper.trace.nesting import Nesting, depths, innermost_around, nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int16, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """Entries of layers in the order they began; `parent` is the entry around one on its thread."""

    span: Int32
    layer: Int32
    parent: Int32  # index of the enclosing call, -1 for none
    call_of_span: Int32  # per span of the recording: the innermost call around it; -1 for none
    outermost: Int32  # the spans of calls outside of all others, and of backward

    def __len__(self) -> int:
        return len(self.span)

    def with_below(self, own: Int64) -> Int64:
        """Per call the sum of `own` over it and all below it; `own` becomes that."""
        for call in range(len(own) - 1, -1, -1):  # a call begins after the one around it
            if self.parent[call] >= 0:
                own[self.parent[call]] += own[call]
        return own


# Bytes per call by the name of a field of `LayerCall`; on a CPU, which reserves nothing, without what is reserved.
CallMemory = Mapping[str, Int64]


def find_calls(tree: LayerTree, nesting: Nesting, start_ns: Int64, node_of: Int32) -> CallTree:
    """The calls of a recording. What an autograd node runs belongs to calls only inside that node."""
    is_entry = marked(len(node_of), tree.layer_of_span)
    entries = in_order(nesting.order[is_entry[nesting.order]], start_ns)
    is_node = node_of == np.arange(len(node_of))
    near = nearest(nesting.parent, is_entry | is_node)
    call_at = np.full(len(node_of) + 1, -1, dtype=np.int32)  # the last one is for "none"
    call_at[entries] = np.arange(len(entries))
    parent = call_at[nearest_above(nesting.parent, near)[entries]]
    layer = np.array([tree.layer_of_span[span] for span in entries.tolist()], dtype=np.int32)
    return CallTree(entries, layer, parent, call_at[near], entries[(parent < 0) & (node_of[entries] < 0)])


def layer_calls(attributed: Attributed, memory: CallMemory) -> tuple[LayerCall, ...]:
    """One row per call, in the order they began."""
    calls, spans, steps = attributed.calls, attributed.recording.spans, attributed.steps
    time_ns, first, last, device = _cost(attributed.recording, calls, attributed.charges)
    begins, ends = spans.start_ns[calls.span], spans.end_ns[calls.span]
    step_of = steps.place_of(begins).tolist()
    bytes_of = {name: values.tolist() for name, values in memory.items()}
    seen: Counter[tuple[int, str]] = Counter()
    rows = []
    for i, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        phase = attributed.attribution.place(span).phase
        ran_on_device = attributed.charges.basis == "device" and first[i] != NEVER
        rows.append(
            LayerCall(
                layer=attributed.tree.layers[layer].name,
                phase=phase,
                step=steps.number[step_of[i]] if step_of[i] >= 0 else None,
                index=seen[layer, phase],
                start_ns=int(begins[i]),
                end_ns=int(ends[i]),
                device_start_ns=int(first[i]) if ran_on_device else None,
                device_end_ns=int(last[i]) if ran_on_device else None,
                device=int(device[i]) if ran_on_device else None,
                time_ns=int(time_ns[i]),
                **{name: values[i] for name, values in bytes_of.items()},
            )
        )
        seen[layer, phase] += 1
    return tuple(rows)


def _cost(recording: Recording, calls: CallTree, charges: Charges) -> tuple[Int64, Int64, Int64, Int16]:
    """Per call, layers below included: time, first start and last end of its events, first device."""
    spans = recording.spans
    call = at(calls.call_of_span, charges.cpu_span, -1)
    inside = np.flatnonzero(call >= 0)
    call, span = call[inside], charges.span[inside]
    time_ns = sum_by_key(call, charges.time_ns[inside], len(calls))
    first, last = np.full(len(calls), NEVER), np.full(len(calls), -NEVER)
    np.minimum.at(first, call, spans.start_ns[span])
    np.maximum.at(last, call, spans.end_ns[span])
    device = np.full(len(calls), -1, np.int16)
    device[call[::-1]] = spans.device[span][::-1]  # in order of start: the first one stays
    for i in range(len(calls) - 1, -1, -1):  # a call begins after the one around it
        if (above := calls.parent[i]) >= 0:
            time_ns[above] += time_ns[i]
            if first[i] < first[above]:
                first[above], device[above] = first[i], device[i]
            last[above] = max(last[above], last[i])
    return time_ns, first, last, device


# --- When each layer ran: the spans that become lanes in the Chrome trace, on the device's time ---


def layer_lanes(attributed: Attributed, calls: Sequence[LayerCall]) -> list[LaneSpan]:
    """Spans of layers: forward and recompute call by call, backward as far as one layer ran on end.

    On a device a span goes from the first to the last event that the layer launched; on a CPU-only
    trace it is the time on the thread.
    """
    spans = []
    for call in calls:
        start, end = call.device_start_ns, call.device_end_ns
        if attributed.charges.basis != "device":
            start, end = call.start_ns, call.end_ns
        if start is None or end is None:
            continue  # nothing of it ran on the device
        lane = "recompute" if call.phase == "recompute" else "forward"
        arguments: dict[str, int | str] = {
            "phase": call.phase,
            "call": call.index + 1,  # viewers leave a 0 blank
            "self and below (us)": call.time_ns // 1000,
        }
        spans.append(LaneSpan(lane, call.layer, start, end - start, call.device, arguments))
    forward_starts = np.sort(np.array([span.start_ns for span in spans if span.lane == "forward"], dtype=np.int64))
    return [*spans, *_backward_lanes(attributed, forward_starts)]


def _backward_lanes(attributed: Attributed, forward_starts: Int64) -> Iterator[LaneSpan]:
    """Neighbours in time with a common layer form one span of that layer, and of each above it.

    A span ends where a forward or a step begins.
    """
    layers, spans = attributed.tree.layers, attributed.recording.spans
    for device, span, places in _backward_events(attributed):
        start = spans.start_ns[span]
        stretch = list(zip(np.searchsorted(forward_starts, start), attributed.steps.place_of(start), strict=True))
        columns = (places.tolist(), start.tolist(), spans.end_ns[span].tolist(), stretch)
        open_runs: list[tuple[int, int]] = []  # (layer, start), from the root down
        open_stretch, last_end = None, 0
        for place, begin, finish, in_stretch in [*zip(*columns, strict=True), (-1, 0, 0, None)]:
            chain = attributed.attribution.places[place].chain[::-1] if place >= 0 else ()
            kept = 0
            if in_stretch == open_stretch:
                while kept < min(len(chain), len(open_runs)) and open_runs[kept][0] == chain[kept]:
                    kept += 1
            for run_layer, run_start in reversed(open_runs[kept:]):
                name, time_ns = layers[run_layer].name, last_end - run_start
                yield LaneSpan("backward", name, run_start, time_ns, device, {"phase": "backward"})
            del open_runs[kept:]
            open_runs += [(below, max(begin, last_end)) for below in chain[kept:]]
            open_stretch, last_end = in_stretch, max(finish, last_end)


def _backward_events(attributed: Attributed) -> Iterator[tuple[int | None, Int64, Int64]]:
    """(device, events in time order, their places): of each device the backward stream busiest with layers.

    On a CPU-only trace, the outermost autograd nodes of each thread.
    """
    spans = attributed.recording.spans
    attribution = attributed.attribution
    backward, layer_of_place = attribution.in_phases("backward", "accumulate_grad"), attribution.layer_of_place
    charges = attributed.charges
    if charges.basis == "device":
        chosen = backward[charges.place]
        for device in np.unique(spans.device[charges.span[chosen]]).tolist():
            here = np.flatnonzero(chosen & (spans.device[charges.span] == device))
            streams, which = np.unique(spans.lane[charges.span[here]], return_inverse=True)
            has_layer = layer_of_place[charges.place[here]] >= 0  # collectives of several layers take long too
            in_layers = np.where(has_layer, charges.time_ns[here], 0)
            busiest = np.argmax(np.bincount(which, weights=in_layers, minlength=len(streams)))
            here = here[which == busiest]
            yield device, charges.span[here], charges.place[here]
        return
    node_around = nearest_above(attributed.nesting.parent, attributed.attribution.node_of)
    nodes = in_order(np.flatnonzero(attributed.attribution.is_node & (node_around < 0)), spans.start_ns)
    for lane in dict.fromkeys(spans.lane[nodes].tolist()):
        here = nodes[spans.lane[nodes] == lane]
        yield None, here, attribution.place_of[here]


# --- Memory of each call, from the allocator's own events ---


def call_memory(attributed: Attributed, memory: DeviceMemory) -> CallMemory:
    """Memory of every call, in the order of `Attributed.calls`.

    `retained_bytes` is allocated inside and kept for backward, see `_keeping_moments`; layers below included.
    """
    spans, calls = attributed.recording.spans, attributed.calls
    entry = np.searchsorted(memory.time_ns, spans.start_ns[calls.span])  # 0: before the first event
    leave = np.searchsorted(memory.time_ns, spans.end_ns[calls.span], side="right")
    self_retained, retained = _retained(attributed, memory)
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


def _keeping_moments(attributed: Attributed) -> Int64:
    """Per call, the instant at which what it allocated and is alive counts as retained.

    That is when the outermost forward around it ends; where a backward follows, it is when that begins
    or the same outermost layer is entered again: outputs that nobody kept are gone by that time.
    """
    spans, calls = attributed.recording.spans, attributed.calls
    next_entry = np.full(len(calls), NEVER, dtype=np.int64)
    last_entry: dict[int, int] = {}
    for i in np.flatnonzero(calls.parent < 0).tolist():
        layer = int(calls.layer[i])
        if layer in last_entry:
            next_entry[last_entry[layer]] = spans.start_ns[calls.span[i]]
        last_entry[layer] = i
    end = spans.end_ns[calls.span]
    nodes = np.append(np.sort(spans.start_ns[attributed.attribution.is_node]), NEVER)
    backward = nodes[np.searchsorted(nodes, end)]
    moment: Int64 = np.where(backward < NEVER, np.minimum(backward, next_entry), end)
    return moment[nearest(calls.parent, calls.parent < 0)]


def _retained(attributed: Attributed, memory: DeviceMemory) -> tuple[Int64, Int64]:
    """(own, with layers below) bytes that each call leaves behind."""
    calls, nesting = attributed.calls, attributed.nesting
    last_before = np.searchsorted(memory.time_ns, _keeping_moments(attributed), side="right") - 1
    call_of_entry = np.full(len(nesting.parent), -1, dtype=np.int32)
    call_of_entry[calls.span] = np.arange(len(calls))
    call_around = at(call_of_entry, nearest(nesting.parent, call_of_entry >= 0), -1)
    allocations = np.flatnonzero((memory.size_bytes > 0) & (memory.lane >= 0))
    made_ns = memory.time_ns[allocations]
    span = innermost_around(nesting, attributed.recording.spans, memory.lane[allocations], made_ns, made_ns + 1)
    call = at(call_around, span, -1)
    alive = (call >= 0) & (freed_at(memory)[allocations] > at(last_before, call, 0))
    own = sum_by_key(call[alive], memory.size_bytes[allocations[alive]], len(calls))
    return own, calls.with_below(own.copy())


# --- The ops of a recording: which spans they are, which of them calls which, what runs in each ---


@dataclass(frozen=True, slots=True, eq=False)
class OpSpans:
    """Ops in file order: autograd nodes too, but no layer marks. Indices below are into `span`."""

    span: Int32  # index into Recording.spans
    op_of: Int32  # per span of the recording: the innermost op around it, or itself; -1 for none
    around: Int32  # per op: the op that calls it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


def find_ops(recording: Recording, parent: Int32, tree: LayerTree) -> OpSpans:
    """The ops of `recording`; `parent`: per span the span around it."""
    is_op: Bool = recording.spans.category == Category.CPU_OP
    if tree.source == "marks":
        is_op[list(tree.layer_of_span)] = False
    span = np.flatnonzero(is_op).astype(np.int32)
    place = np.full(len(is_op) + 1, -1, dtype=np.int32)  # the last one is for "none"
    place[span] = np.arange(len(span), dtype=np.int32)
    near = nearest(parent, is_op)
    return OpSpans(span, place[near], place[nearest_above(parent, near)[span]])


def levels_of_calls(ops: OpSpans) -> list[Int32]:
    """The ops that no op calls, then those that these call, and so on."""
    depth = depths(ops.around)
    by_depth = np.argsort(depth, kind="stable").astype(np.int32)
    return np.split(by_depth, np.cumsum(np.bincount(depth, minlength=1))[:-1])


def with_called(ops: OpSpans, levels: list[Int32], own: Int64) -> Int64:
    """Per op the sum of `own` over it and all that it calls; `own` becomes that."""
    for members in reversed(levels[1:]):
        np.add.at(own, ops.around[members], own[members])
    return own


def called_by_same_key(around: Int32, key: Int32) -> Bool:
    """Per op or call: whether one with the same key calls it, directly or not; `around`: which one calls it, or -1."""
    found = np.zeros(len(around), dtype=np.bool_)
    doubtful, above = np.arange(len(around)), around
    while True:  # one caller up each round
        called = above >= 0
        doubtful, above = doubtful[called], above[called]
        if not len(doubtful):
            return found
        same = key[above] == key[doubtful]
        found[doubtful[same]] = True
        doubtful, above = doubtful[~same], around[above[~same]]
