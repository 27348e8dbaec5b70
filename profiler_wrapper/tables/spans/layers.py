"""Layers of a trace as rows: each call forward and recomputed, and what backward took for each in a step."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place.classes import COMMUNICATION
from profiler_wrapper.place.intervals import Union
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.tables.ops import called_by_same_key
from profiler_wrapper.tables.spans.row import COMPUTE_THREAD, KIND_OF_PHASE, Row
from profiler_wrapper.tables.spans.steps import Steps
from profiler_wrapper.tables.spans.threads import collective_calls, outermost_of, thread_of
from profiler_wrapper.tables.views.collectives import is_collective_call
from profiler_wrapper.trace.arrays import at, in_order, sum_by_key
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64


def layer_rows(found: Placed, steps: Steps, waits: Union) -> list[Row]:
    """Rows of the layers that are kept: all but those more than one level inside a block.

    `duration_ns` is the CPU's, what is below a layer included; `device_ns` that of its kernels, collectives left out;
    `waits` are those of the training threads for other ranks, where no event shows them.
    """
    layers = found.tree.layers  # what is in a block has a parent
    kept = [layer.block in (-1, i) or layers[layer.parent].kind == "block" for i, layer in enumerate(layers)]
    return _call_rows(found, steps, kept, waits) + _backward_rows(found, steps, kept, waits)


def _call_rows(found: Placed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    calls, charges, spans, layers = found.calls, found.charges, found.recording.spans, found.tree.layers
    starts, ends = spans.start_ns[calls.span], spans.end_ns[calls.span]
    # Of the collectives that were called in it, on its thread, and of its waits for others.
    inside = np.flatnonzero(outermost_of(found, collective_calls(found)) & (calls.call_of_span >= 0))
    waiting = calls.with_below(sum_by_key(calls.call_of_span[inside], spans.duration_ns[inside], len(calls)))
    waiting += waits.overlap(starts, ends)
    launched_in = at(calls.call_of_span, charges.cpu_span, -1)
    launched = np.flatnonzero((launched_in >= 0) & (charges.work != COMMUNICATION))
    device = calls.with_below(sum_by_key(launched_in[launched], charges.time_ns[launched], len(calls)))
    again = called_by_same_key(calls.parent, calls.layer)  # the row of the call around it has its time already
    numbers = steps.numbers(steps.on_cpu.place_of(starts))
    columns = (calls.span, calls.layer, calls.parent, again, starts, ends - starts, device, waiting)
    each = zip(numbers, *(column.tolist() for column in columns), strict=True)
    depths: list[int] = []
    rows = []
    for step, span, layer, above, is_again, start, length, device_ns, waiting_ns in each:
        kind = KIND_OF_PHASE.get(found.attribution.place(span).phase, "")
        depths.append(depths[above] + 1 if above >= 0 else (1 if kind == "forward" else 2))
        if kind not in ("forward", "recompute") or not kept[layer] or is_again:
            continue
        rows.append(
            Row(
                step=step,
                name=layers[layer].name,
                kind=kind,
                start_ns=start,
                duration_ns=length,
                layer=layers[layer].name,
                device_ns=device_ns if charges.basis == "device" else None,
                waiting_ns=waiting_ns,
                depth=depths[-1],
                parent=layers[int(calls.layer[above])].name if above >= 0 else kind,
                thread=thread_of(found, int(spans.lane[span])),
            )
        )
    return rows


def _backward_rows(found: Placed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    """One row per layer and step: from its first node on, as long as its nodes took together."""
    spans, charges, layers, places = found.recording.spans, found.charges, found.tree.layers, found.attribution.places
    on_device = charges.basis == "device"
    outermost = outermost_of(found, found.attribution.is_node)
    nodes = in_order(np.flatnonzero(outermost), spans.start_ns)
    starts, (time, waiting) = spans.start_ns[nodes], _node_times(found, outermost, waits)
    work = np.flatnonzero(charges.work != COMMUNICATION) if on_device else np.empty(0, np.int64)
    step = np.concatenate([steps.on_cpu.place_of(starts), steps.windows.launched_in[work]])
    place = np.concatenate([found.attribution.place_of[nodes], charges.place[work]])
    start = np.concatenate([starts, charges.launch_ns[work]])
    amounts = np.zeros((3, len(step)), dtype=np.int64)
    amounts[:2, : len(nodes)], amounts[2, len(nodes) :] = (time[nodes], waiting[nodes]), charges.time_ns[work]
    # Each counts for all layers whose backward it is.
    chains = [one.chain if KIND_OF_PHASE.get(one.phase) == "backward" else () for one in places]
    part = np.repeat(np.arange(len(place)), np.array([len(chain) for chain in chains], dtype=np.int64)[place])
    layer = np.fromiter((layer for at_place in place.tolist() for layer in chains[at_place]), np.int64)
    _, first, of = np.unique(step[part] * len(layers) + layer, return_index=True, return_inverse=True)
    sums = [sum_by_key(of, amount[part], len(first)).tolist() for amount in amounts]
    columns = (steps.numbers(step[part[first]]), layer[first].tolist(), start[part[first]].tolist(), *sums)
    return [
        Row(
            step=number,
            name=layers[one].name,
            kind="backward",
            start_ns=start_ns,
            duration_ns=length,
            layer=layers[one].name,
            device_ns=device_ns if on_device else None,
            waiting_ns=waiting_ns,
            depth=len(layers[one].ancestors),
            parent=layers[layers[one].parent].name if layers[one].parent >= 0 else "backward",
            thread=COMPUTE_THREAD if on_device else None,
        )
        for number, one, start_ns, length, waiting_ns, device_ns in zip(*columns, strict=True)
        if kept[one]
    ]


def _node_times(found: Placed, outermost: Bool, waits: Union) -> tuple[Int64, Int64]:
    """Per outermost autograd node: its time without what it recomputes, and of that what are collectives and waits."""
    spans, calls, attribution = found.recording.spans, found.calls, found.attribution
    top = nearest(found.nesting.parent, outermost)
    lasts, waited = spans.duration_ns, waits.overlap(spans.start_ns, spans.end_ns)
    node_time, node_wait = np.where(outermost, lasts, 0), np.where(outermost, waited, 0)
    recomputed = attribution.in_phases("recompute")[attribution.place_of[calls.span]]
    # What is computed again has its time, and the waits in it.
    again = calls.span[recomputed & ~at(recomputed, calls.parent, False) & (top[calls.span] >= 0)]
    np.subtract.at(node_time, top[again], lasts[again])
    np.subtract.at(node_wait, top[again], waited[again])
    communicates = found.recording.named(lambda name: role_of(name) == Role.COLLECTIVE or is_collective_call(name))
    collective = outermost_of(found, communicates & (spans.category <= Category.ANNOTATION) & (top >= 0))
    np.add.at(node_wait, top[collective], lasts[collective])
    return node_time, node_wait
