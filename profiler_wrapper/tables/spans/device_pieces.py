"""What the compute streams of a device do, piece by piece, and how much of a time they are busy."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place.classes import COMMUNICATION
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.spans.phases import Pieces
from profiler_wrapper.tables.spans.row import Row, bounds, kinds_of_places
from profiler_wrapper.tables.spans.steps import Steps
from profiler_wrapper.trace.arrays import at, marked
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Category, Int64

_LEAST_OF_COMPUTE = 0.1  # of the busiest stream's time: a stream with less does not make the phases


def device_pieces(found: Placed, steps: Steps) -> Pieces:
    """What runs on the compute streams of the busiest device."""
    spans, charges = found.recording.spans, found.charges
    chosen = _computes(found)
    span, launch = charges.span[chosen], charges.cpu_span[chosen]
    kind = kinds_of_places(found)[charges.place[chosen]]
    makes_node = nearest(found.nesting.parent, marked(len(spans), found.attribution.forward_op))
    kind = np.where((kind == "") & (at(makes_node, launch, -1) >= 0), "forward", kind)
    return Pieces(spans.start_ns[span], spans.end_ns[span], kind, steps.windows.launched_in[chosen], kind)


def with_device_time(found: Placed, rows: list[Row]) -> list[Row]:
    """The same, each with the time of the compute streams' work that begins within it."""
    chosen = _computes(found)
    starts = found.recording.spans.start_ns[found.charges.span[chosen]]
    before = np.concatenate([[0], np.cumsum(found.charges.time_ns[chosen])])
    begins, ends = bounds(rows)
    busy = before[np.searchsorted(starts, ends)] - before[np.searchsorted(starts, begins)]
    return [row._replace(device_ns=time_ns) for row, time_ns in zip(rows, busy.tolist(), strict=True)]


def _computes(found: Placed) -> Int64:
    """The charges of streams that compute, in order of start; collectives left out."""
    spans, charges = found.recording.spans, found.charges
    candidates: Int64 = np.flatnonzero(charges.work != COMMUNICATION)
    if not len(candidates):
        return candidates
    lane = spans.lane[charges.span[candidates]]
    kernel = spans.category[charges.span[candidates]] == Category.KERNEL
    busy = np.bincount(lane, weights=np.where(kernel, charges.time_ns[candidates], 0))
    device = np.zeros(len(busy), dtype=np.int64)
    device[lane] = spans.device[charges.span[candidates]]
    most = int(np.argmax(busy))
    computing = (busy >= _LEAST_OF_COMPUTE * busy[most]) & (device == device[most])
    return np.asarray(candidates[computing[lane]])
