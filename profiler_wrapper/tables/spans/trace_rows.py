"""One trace as rows of the span table: steps, phases, layers, collectives."""

from __future__ import annotations

from profiler_wrapper.place.intervals import union
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.spans.collectives import cpu_collectives, device_collectives
from profiler_wrapper.tables.spans.cpu_pieces import cpu_pieces, garbage_rows
from profiler_wrapper.tables.spans.device_pieces import device_pieces, with_device_time
from profiler_wrapper.tables.spans.layers import layer_rows
from profiler_wrapper.tables.spans.phases import OF_CPU, phases
from profiler_wrapper.tables.spans.row import COMPUTE_THREAD, LASTING_ON_DEVICE, Row, bounds
from profiler_wrapper.tables.spans.steps import steps_of
from profiler_wrapper.tables.spans.threads import main_thread
from profiler_wrapper.tables.spans.waits import waits_within_events, without_waits


def trace_rows(found: Placed) -> list[Row]:
    """The rows of an attributed recording, whose times are its own."""
    steps = steps_of(found)
    on_device = found.charges.basis == "device"
    collectives = device_collectives(found, steps) if on_device else cpu_collectives(found, steps)
    collective_times = union(*bounds([row for row in collectives if row.depth == 0]))
    waits = waits_within_events(found)
    on_cpu = phases(cpu_pieces(found, steps), steps, collective_times, thread=main_thread(found))
    garbage = garbage_rows(found, steps)
    if on_device:
        pieces = device_pieces(found, steps)
        compute = phases(pieces, steps, collective_times, thread=COMPUTE_THREAD, lasting=LASTING_ON_DEVICE)
        rows = [*with_device_time(found, compute), *(row for row in on_cpu if row.kind in OF_CPU)]
    else:
        rows = without_waits((row for row in on_cpu if row.kind != "communication"), waits)
        at_top = {row.start_ns for row in on_cpu if row.kind == "communication"}
        collectives = [row._replace(depth=0) if row.start_ns in at_top else row for row in collectives]
    return [*steps.rows(), *collectives, *rows, *garbage, *layer_rows(found, steps, waits)]
