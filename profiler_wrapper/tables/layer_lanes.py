"""Make the lanes of layers in the Chrome trace, on the device's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.call_rows import LayerCall
from profiler_wrapper.trace.arrays import in_order
from profiler_wrapper.trace.lanes import LaneSpan
from profiler_wrapper.trace.nesting import nearest_above
from profiler_wrapper.trace.recording import Int64


def layer_lanes(placed: Placed, calls: Sequence[LayerCall]) -> list[LaneSpan]:
    """Spans of layers: forward and recompute call by call, backward as far as one layer ran on end.

    On a device a span goes from the first to the last event that the layer launched; on a CPU-only
    trace it is the time on the thread.
    """
    spans = []
    for call in calls:
        start, end = call.device_start_ns, call.device_end_ns
        if placed.charges.basis != "device":
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
    return [*spans, *_backward_lanes(placed, forward_starts)]


def _backward_lanes(placed: Placed, forward_starts: Int64) -> Iterator[LaneSpan]:
    """Neighbours in time with a common layer form one span of that layer, and of each above it.

    A span ends where a forward or a step begins.
    """
    layers, spans = placed.tree.layers, placed.recording.spans
    for device, span, places in _backward_events(placed):
        start = spans.start_ns[span]
        stretch = list(zip(np.searchsorted(forward_starts, start), placed.steps.place_of(start), strict=True))
        columns = (places.tolist(), start.tolist(), spans.end_ns[span].tolist(), stretch)
        open_runs: list[tuple[int, int]] = []  # (layer, start), from the root down
        open_stretch, last_end = None, 0
        for place, begin, finish, in_stretch in [*zip(*columns, strict=True), (-1, 0, 0, None)]:
            chain = placed.attribution.places[place].chain[::-1] if place >= 0 else ()
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


def _backward_events(placed: Placed) -> Iterator[tuple[int | None, Int64, Int64]]:
    """(device, events in time order, their places): of each device the backward stream busiest with layers.

    On a CPU-only trace, the outermost autograd nodes of each thread.
    """
    spans = placed.recording.spans
    attribution = placed.attribution
    backward, layer_of_place = attribution.in_phases("backward", "accumulate_grad"), attribution.layer_of_place
    charges = placed.charges
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
    node_around = nearest_above(placed.nesting.parent, placed.attribution.node_of)
    nodes = in_order(np.flatnonzero(placed.attribution.is_node & (node_around < 0)), spans.start_ns)
    for lane in dict.fromkeys(spans.lane[nodes].tolist()):
        here = nodes[spans.lane[nodes] == lane]
        yield None, here, attribution.place_of[here]
