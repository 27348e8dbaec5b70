"""One trace as rows of the span table: steps, phases, layers and collectives of a rank.

On a CPU-only trace phases are what the training threads do: ops one after another with the same phase are one span. On
a trace of a device they are what its compute streams do, and data loading is the CPU's, beside it. A long gap in which
a collective runs is none of a phase: it is that collective's.
"""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.analysis.ranks.layer_spans import layer_rows
from profiler_wrapper.analysis.ranks.span_rows import COMPUTE_THREAD, Row, steps_of
from profiler_wrapper.analysis.ranks.trace_collectives import cpu_collectives, device_collectives
from profiler_wrapper.analysis.ranks.trace_cpu import cpu_pieces, garbage_rows
from profiler_wrapper.analysis.ranks.trace_device import LASTING, device_pieces, with_device_time
from profiler_wrapper.analysis.ranks.trace_phases import phases
from profiler_wrapper.analysis.ranks.trace_threads import main_thread
from profiler_wrapper.analysis.ranks.trace_waits import waits_within, without_waits

_BESIDE_DEVICE = ("data", "checkpoint")  # of the CPU, which a device waits for


def trace_rows(found: Attributed) -> list[Row]:
    """The rows of an attributed recording, whose times are its own."""
    steps = steps_of(found)
    on_device = found.charges.basis == "device"
    collectives = device_collectives(found, steps) if on_device else cpu_collectives(found, steps)
    beside = [row for row in collectives if row.depth == 0]
    starts = np.array([row.start_ns for row in beside], dtype=np.int64)
    waits = union(starts, starts + np.array([row.duration_ns for row in beside], dtype=np.int64))
    within = waits_within(found)
    on_cpu = phases(cpu_pieces(found, steps), waits, thread=main_thread(found))
    garbage = garbage_rows(found, steps, on_cpu)
    if on_device:
        compute = phases(device_pieces(found, steps), waits, thread=COMPUTE_THREAD, lasting=LASTING)
        rows = [*with_device_time(found, compute), *(row for row in on_cpu if row.kind in _BESIDE_DEVICE)]
        garbage = [row._replace(depth=0, parent=None) for row in garbage]
    else:
        rows = without_waits((row for row in on_cpu if row.kind != "communication"), within)
        at_top = {row.start_ns for row in on_cpu if row.kind == "communication"}
        collectives = [row._replace(depth=0, parent=None) if row.start_ns in at_top else row for row in collectives]
    return [*steps.rows(), *collectives, *rows, *garbage, *layer_rows(found, steps, within)]
