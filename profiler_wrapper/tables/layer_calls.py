"""Make a row of every call of a layer."""

from __future__ import annotations

from collections import Counter

import numpy as np

from profiler_wrapper.place.calls import CallTree
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.timed_events import TimedEvents
from profiler_wrapper.tables.call_rows import LayerCall
from profiler_wrapper.tables.memory.calls import CallMemory
from profiler_wrapper.tables.memory.events import NEVER
from profiler_wrapper.trace.arrays import at, sum_by_key
from profiler_wrapper.trace.recording import Int16, Int64, Recording


def layer_calls(placed: Placed, memory: CallMemory) -> tuple[LayerCall, ...]:
    """One row per call, in the order they began."""
    calls, spans, steps = placed.calls, placed.recording.spans, placed.steps
    time_ns, first, last, device = _cost(placed.recording, calls, placed.charges)
    begins, ends = spans.start_ns[calls.span], spans.end_ns[calls.span]
    step_of = steps.place_of(begins).tolist()
    bytes_of = {name: values.tolist() for name, values in memory.items()}
    seen: Counter[tuple[int, str]] = Counter()
    rows = []
    for i, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        phase = placed.attribution.place(span).phase
        ran_on_device = placed.charges.basis == "device" and first[i] != NEVER
        rows.append(
            LayerCall(
                layer=placed.tree.layers[layer].name,
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


def _cost(recording: Recording, calls: CallTree, charges: TimedEvents) -> tuple[Int64, Int64, Int64, Int16]:
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
