"""When each layer ran: the spans that become lanes in the Chrome trace, on the device's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.model import LayerCall, Phase
from profiler_wrapper.trace.lanes import LaneSpan
from profiler_wrapper.trace.nesting import nearest_above
from profiler_wrapper.trace.recording import Int64

_BACKWARD: tuple[Phase, ...] = ("backward", "accumulate_grad")


def layer_lanes(found: Attributed, calls: Sequence[LayerCall]) -> list[LaneSpan]:
    """Spans of layers: forward and recompute call by call, backward as far as one layer ran on end.

    On a device a span goes from the first to the last event that the layer launched; on a CPU-only
    trace it is the time on the thread.
    """
    on_device = found.charges.basis == "device"
    spans = list(_of_calls(calls, on_device=on_device))
    forward_starts = np.sort(np.array([span.start_ns for span in spans if span.lane == "forward"], dtype=np.int64))
    return [*spans, *_of_backward(found, forward_starts)]


def _of_calls(calls: Sequence[LayerCall], *, on_device: bool) -> Iterator[LaneSpan]:
    for call in calls:
        start, end = (call.device_start_ns, call.device_end_ns) if on_device else (call.start_ns, call.end_ns)
        if start is None or end is None:
            continue  # nothing of it ran on the device
        lane = "recompute" if call.phase == "recompute" else "forward"
        arguments: dict[str, int | str] = {
            "phase": call.phase,
            "call": call.index + 1,  # viewers leave a 0 blank
            "self and below (us)": call.time_ns // 1000,
        }
        yield LaneSpan(lane, call.layer, start, end - start, call.device, arguments)


def _of_backward(found: Attributed, forward_starts: Int64) -> Iterator[LaneSpan]:
    """Neighbours in time with a common layer form one span of that layer, and of each above it.

    A span ends where a forward or a step begins.
    """
    tree = found.tree
    for device, span, layer in _backward_events(found):
        start = found.recording.spans.start_ns[span]
        end = start + found.recording.spans.duration_ns[span]
        stretch = list(zip(np.searchsorted(forward_starts, start), found.steps.place_of(start), strict=True))
        open_runs: list[tuple[int, int]] = []  # (layer, start), from the root down
        open_stretch, last_end = None, 0
        for event_layer, begin, finish, in_stretch in zip(
            layer.tolist(), start.tolist(), end.tolist(), stretch, strict=True
        ):
            chain = tree.layers[event_layer].ancestors[::-1] if event_layer >= 0 else ()
            kept = 0
            if in_stretch == open_stretch:
                while kept < min(len(chain), len(open_runs)) and open_runs[kept][0] == chain[kept]:
                    kept += 1
            for run_layer, run_start in reversed(open_runs[kept:]):
                yield _backward_span(tree.layers[run_layer].name, run_start, last_end, device)
            del open_runs[kept:]
            open_runs += [(below, max(begin, last_end)) for below in chain[kept:]]
            open_stretch, last_end = in_stretch, max(finish, last_end)
        for run_layer, run_start in reversed(open_runs):
            yield _backward_span(tree.layers[run_layer].name, run_start, last_end, device)


def _backward_span(name: str, start_ns: int, end_ns: int, device: int | None) -> LaneSpan:
    return LaneSpan("backward", name, start_ns, end_ns - start_ns, device, {"phase": "backward"})


def _backward_events(found: Attributed) -> Iterator[tuple[int | None, Int64, Int64]]:
    """(device, events in time order, their layers): of each device the backward stream busiest with layers.

    On a CPU-only trace, the outermost autograd nodes of each thread.
    """
    spans = found.recording.spans
    attribution = found.attribution
    backward, layer_of_place = attribution.in_phases(*_BACKWARD), attribution.layer_of_place
    charges = found.charges
    if charges.basis == "device":
        chosen = backward[charges.place]
        for device in np.unique(spans.device[charges.span[chosen]]).tolist():
            here = np.flatnonzero(chosen & (spans.device[charges.span] == device))
            streams, which = np.unique(spans.lane[charges.span[here]], return_inverse=True)
            layers = layer_of_place[charges.place[here]]
            in_layers = np.where(layers >= 0, charges.time_ns[here], 0)  # collectives of several layers take long too
            busiest = np.argmax(np.bincount(which, weights=in_layers, minlength=len(streams)))
            here, layers = here[which == busiest], layers[which == busiest]
            yield device, charges.span[here], layers
        return
    node_around = nearest_above(found.nesting.parent, found.attribution.node_of)
    nodes = np.flatnonzero(found.attribution.is_node & (node_around < 0))
    nodes = nodes[np.argsort(spans.start_ns[nodes], kind="stable")]
    for lane in dict.fromkeys(spans.lane[nodes].tolist()):
        here = nodes[spans.lane[nodes] == lane]
        yield None, here, layer_of_place[found.attribution.place_of[here]]
