"""Layers as spans: each call forward and recomputed, and what backward took for each in a step."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.collective_names import is_collective_call
from profiler_wrapper.analysis.intervals import Union
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.phase import FORWARD_PHASES
from profiler_wrapper.analysis.ranks.span_rows import COMPUTE_THREAD, Row, Steps
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Category, Int64

_COMMUNICATION = classes.CLASSES.index("communication")
_BACKWARD = ("backward", "accumulate_grad")


def layer_rows(found: Attributed, steps: Steps, waits: Union) -> list[Row]:
    """Rows of the layers that are kept: all but those more than one level inside a block.

    `duration_ns` is the CPU's, what is below a layer included; `device_ns` that of its kernels, collectives left out.

    Args:
        waits: of the training threads for other ranks, where no event shows them.
    """
    kept = kept_layers(found.tree)
    return _call_rows(found, steps, kept, waits) + _backward_rows(found, steps, kept, waits)


def kept_layers(tree: LayerTree) -> list[bool]:
    """Per layer whether it has rows."""
    kept = []
    for i, layer in enumerate(tree.layers):
        above = tree.layers[layer.parent] if layer.parent >= 0 else None
        in_block = layer.block >= 0 and layer.block != i
        kept.append(not in_block or layer.parent == layer.block or (above is not None and above.kind == "block"))
    return kept


def _call_rows(found: Attributed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    calls, spans, tree = found.calls, found.recording.spans, found.tree
    waiting, device = _waiting(found, waits), _device_time(found)
    numbers = steps.numbers(spans.start_ns[calls.span])
    depth = np.zeros(len(calls), dtype=np.int64)
    rows = []
    for i, (span, layer, above) in enumerate(
        zip(calls.span.tolist(), calls.layer.tolist(), calls.parent.tolist(), strict=True)
    ):
        phase = found.attribution.place(span).phase
        kind = "forward" if phase in FORWARD_PHASES else phase
        depth[i] = depth[above] + 1 if above >= 0 else (1 if kind == "forward" else 2)
        if kind not in ("forward", "recompute") or not kept[layer] or _again(found, i):
            continue
        name = tree.layers[layer].name
        rows.append(
            Row(
                step=numbers[i],
                name=name,
                kind=kind,
                start_ns=int(spans.start_ns[span]),
                duration_ns=int(spans.duration_ns[span]),
                layer=name,
                device_ns=None if device is None else int(device[i]),
                waiting_ns=int(waiting[i]),
                depth=int(depth[i]),
                parent=tree.layers[int(calls.layer[above])].name if above >= 0 else kind,
                thread=_thread(found, span),
            )
        )
    return rows


def _again(found: Attributed, call: int) -> bool:
    """Whether a call lies in another of the same layer, whose row has its time already."""
    layer, above = int(found.calls.layer[call]), int(found.calls.parent[call])
    while above >= 0 and int(found.calls.layer[above]) != layer:
        above = int(found.calls.parent[above])
    return above >= 0


def _waiting(found: Attributed, waits: Union) -> Int64:
    """Per call the time of the collectives that were called in it, on its thread, and of its waits for others."""
    calls, spans, parent = found.calls, found.recording.spans, found.nesting.parent
    collective = np.array([is_collective_call(name) for name in found.recording.names], dtype=np.bool_)
    is_collective = collective[spans.name] & (spans.category <= Category.ANNOTATION)
    outermost = np.flatnonzero(is_collective & (nearest_above(parent, nearest(parent, is_collective)) < 0))
    time = np.zeros(len(calls), dtype=np.int64)
    inside = outermost[calls.call_of_span[outermost] >= 0]
    np.add.at(time, calls.call_of_span[inside], spans.duration_ns[inside])
    within: Int64 = waits.overlap(spans.start_ns[calls.span], spans.end_ns[calls.span])
    return _with_below(time, calls.parent.tolist()) + within


def _device_time(found: Attributed) -> Int64 | None:
    """Per call the time of the kernels launched in it; None of a trace without a device."""
    calls, charges = found.calls, found.charges
    if charges.basis != "device":
        return None
    launched = np.flatnonzero((charges.cpu_span >= 0) & (charges.work != _COMMUNICATION))
    call = calls.call_of_span[charges.cpu_span[launched]]
    time = np.zeros(len(calls), dtype=np.int64)
    np.add.at(time, call[call >= 0], charges.time_ns[launched[call >= 0]])
    return _with_below(time, calls.parent.tolist())


def _with_below(time: Int64, parent: list[int]) -> Int64:
    for i in range(len(parent) - 1, -1, -1):  # a call begins after the one around it
        if parent[i] >= 0:
            time[parent[i]] += time[i]
    return time


def _backward_rows(found: Attributed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    """One row per layer and step: from its first node on, as long as its nodes took together."""
    spans, tree, attribution = found.recording.spans, found.tree, found.attribution
    first: dict[tuple[int | None, int], int] = {}
    length: dict[tuple[int | None, int], int] = defaultdict(int)
    waiting: dict[tuple[int | None, int], int] = defaultdict(int)
    device: dict[tuple[int | None, int], int] = defaultdict(int)
    own, waited = _node_times(found, waits)
    nodes = np.array(sorted(own), dtype=np.int64)
    for node, step in zip(nodes.tolist(), steps.numbers(spans.start_ns[nodes]), strict=True):
        place = attribution.place(node)
        if place.layer < 0 or place.phase not in _BACKWARD:
            continue
        start = int(spans.start_ns[node])
        for layer in tree.layers[place.layer].ancestors:
            key = (step, layer)
            first[key] = min(first.get(key, start), start)
            length[key] += own[node]
            waiting[key] += waited.get(node, 0)
    on_device = found.charges.basis == "device"
    if on_device:
        chosen = np.flatnonzero(found.charges.work != _COMMUNICATION)
        columns = (chosen.tolist(), steps.numbers_of_charges(chosen), found.charges.place[chosen].tolist())
        for charge, step, at in zip(*columns, strict=True):
            place = attribution.places[at]
            if place.layer < 0 or place.phase not in _BACKWARD:
                continue
            for layer in tree.layers[place.layer].ancestors:
                key = (step, layer)
                first.setdefault(key, int(found.charges.launch_ns[charge]))
                device[key] += int(found.charges.time_ns[charge])
    thread = COMPUTE_THREAD if on_device else None
    return [
        Row(
            step=step,
            name=tree.layers[layer].name,
            kind="backward",
            start_ns=start,
            duration_ns=length[step, layer],
            layer=tree.layers[layer].name,
            device_ns=device[step, layer] if on_device else None,
            waiting_ns=waiting[step, layer],
            depth=len(tree.layers[layer].ancestors),
            parent=tree.layers[tree.layers[layer].parent].name if tree.layers[layer].parent >= 0 else "backward",
            thread=thread if thread is not None else None,
        )
        for (step, layer), start in sorted(first.items(), key=lambda item: (item[1], item[0][1]))
        if kept[layer]
    ]


def _node_times(found: Attributed, waits: Union) -> tuple[dict[int, int], dict[int, int]]:
    """Per outermost autograd node: its time without what it recomputes, and of that what are collectives and waits."""
    spans, parent, attribution = found.recording.spans, found.nesting.parent, found.attribution
    is_node = attribution.is_node
    nodes = np.flatnonzero(is_node & (nearest_above(parent, nearest(parent, is_node)) < 0))
    own = dict(zip(nodes.tolist(), spans.duration_ns[nodes].tolist(), strict=True))
    top = nearest(parent, np.isin(np.arange(len(spans)), nodes))
    calls = found.calls
    recomputed = {i for i, span in enumerate(calls.span.tolist()) if attribution.place(span).phase == "recompute"}
    for call in recomputed:
        if int(calls.parent[call]) in recomputed:
            continue
        span = int(calls.span[call])
        if int(top[span]) in own:
            own[int(top[span])] -= int(spans.duration_ns[span])
    roles = np.array(
        [role_of(name) == Role.COLLECTIVE or is_collective_call(name) for name in found.recording.names], dtype=np.bool_
    )
    collective = roles[spans.name] & (spans.category <= Category.ANNOTATION) & (top >= 0)
    outermost = np.flatnonzero(collective & (nearest_above(parent, nearest(parent, collective)) < 0))
    within = waits.overlap(spans.start_ns[nodes], spans.end_ns[nodes])
    waited: dict[int, int] = defaultdict(int, zip(nodes.tolist(), within.tolist(), strict=True))
    for call in recomputed:  # the waits in what is computed again are that's
        span = int(calls.span[call])
        if int(calls.parent[call]) not in recomputed and int(top[span]) in waited:
            begin, end = spans.start_ns[[span]], spans.end_ns[[span]]
            waited[int(top[span])] -= int(waits.overlap(begin, end)[0])
    for span in outermost.tolist():
        waited[int(top[span])] += int(spans.duration_ns[span])
    return own, waited


def _thread(found: Attributed, span: int) -> int | None:
    tid = found.recording.lanes[int(found.recording.spans.lane[span])].tid
    return tid if isinstance(tid, int) else None
