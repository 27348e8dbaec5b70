"""What the compute streams of a device do, piece by piece, and how much of a time they are busy."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.ranks.span_rows import Row, Steps
from profiler_wrapper.analysis.ranks.trace_cpu import made_nodes
from profiler_wrapper.analysis.ranks.trace_phases import Piece, kind_of_phase
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Category, Int64

LASTING = ("forward", "backward", "recompute", "optimizer")  # a device waits between kernels for the CPU
_COMMUNICATION = classes.CLASSES.index("communication")
_LEAST_OF_COMPUTE = 0.1  # of the busiest stream's time: a stream with less does not make the phases


def device_pieces(found: Attributed, steps: Steps) -> list[Piece]:
    """What runs on the compute streams of the busiest device."""
    spans, charges = found.recording.spans, found.charges
    chosen = _computes(found)
    kinds = [kind_of_phase(place.phase) for place in found.attribution.places]
    start, end = spans.start_ns[charges.span[chosen]], spans.end_ns[charges.span[chosen]]
    makes_node = np.zeros(len(spans), dtype=np.bool_)
    makes_node[made_nodes(found)] = True
    launch = charges.cpu_span[chosen]
    forward = (launch >= 0) & (nearest(found.nesting.parent, makes_node)[launch] >= 0)
    columns = (start, end, charges.place[chosen], forward)
    numbers = steps.numbers_of_charges(chosen)
    return [
        Piece(begin, stop, kinds[place] or ("forward" if in_forward else ""), number, "")
        for (begin, stop, place, in_forward), number in zip(
            zip(*(column.tolist() for column in columns), strict=True), numbers, strict=True
        )
    ]


def with_device_time(found: Attributed, rows: list[Row]) -> list[Row]:
    """The same, each with the time of the compute streams' work that begins within it."""
    chosen = _computes(found)
    starts = found.recording.spans.start_ns[found.charges.span[chosen]]
    before = np.concatenate([[0], np.cumsum(found.charges.time_ns[chosen])])
    begins = np.array([row.start_ns for row in rows], dtype=np.int64)
    ends = begins + np.array([row.duration_ns for row in rows], dtype=np.int64)
    busy = before[np.searchsorted(starts, ends)] - before[np.searchsorted(starts, begins)]
    return [row._replace(device_ns=time_ns) for row, time_ns in zip(rows, busy.tolist(), strict=True)]


def _computes(found: Attributed) -> Int64:
    """The charges of streams that compute, in order of start; collectives left out."""
    spans, charges = found.recording.spans, found.charges
    candidates: Int64 = np.flatnonzero(charges.work != _COMMUNICATION)
    if not len(candidates):
        return candidates
    lane = spans.lane[charges.span[candidates]]
    kernel = spans.category[charges.span[candidates]] == Category.KERNEL
    busy = np.bincount(lane, weights=np.where(kernel, charges.time_ns[candidates], 0))
    device = np.zeros(len(busy), dtype=np.int64)
    device[lane] = spans.device[charges.span[candidates]]
    most = int(np.argmax(busy))
    computing = (busy >= _LEAST_OF_COMPUTE * busy[most]) & (device == device[most])
    chosen: Int64 = candidates[computing[lane]]
    return chosen
