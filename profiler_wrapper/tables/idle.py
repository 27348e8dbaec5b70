"""Device time in which nothing ran, charged to where the CPU was."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place.intervals import union
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.trace.arrays import at
from profiler_wrapper.trace.nesting import innermost_around
from profiler_wrapper.trace.recording import Int64


def idle_per_place(placed: Placed) -> Int64 | None:
    """Per place: nanoseconds between device events in which the launching thread was there.

    A gap belongs to the thread that launched what ended it. None without device events, and where some are not seen.
    """
    spans, charges = placed.recording.spans, placed.charges
    if charges.basis != "device" or placed.unseen_until_ns is not None or len(placed.lost_launches):
        return None
    idle = np.zeros(len(placed.attribution.places), dtype=np.int64)
    for device in np.unique(spans.device[charges.span]).tolist():
        here = np.flatnonzero(spans.device[charges.span] == device)
        start = spans.start_ns[charges.span[here]]
        busy = union(start, start + charges.time_ns[here])
        gap_start, gap_end = busy.end_ns[:-1], busy.start_ns[1:]
        ender = here[np.searchsorted(start, gap_end)]  # charges come in order of start
        lane = at(spans.lane, charges.cpu_span[ender], -1)
        for thread in np.unique(lane[lane >= 0]).tolist():
            _add_idle(placed, thread, gap_start[lane == thread], gap_end[lane == thread], idle)
    return idle


def _add_idle(placed: Placed, thread: int, gap_start: Int64, gap_end: Int64, idle: Int64) -> None:
    """Cut the gaps where the place of the thread changes and add the pieces to `idle`."""
    spans, nesting, place_of = placed.recording.spans, placed.nesting, placed.attribution.place_of
    members = nesting.order[spans.lane[nesting.order] == thread]
    around = at(place_of, nesting.parent[members], placed.attribution.outside)
    members = members[place_of[members] != around]  # the others change nothing
    cuts = np.unique(np.concatenate([gap_start, gap_end, spans.start_ns[members], spans.end_ns[members]]))
    left, right = cuts[:-1], cuts[1:]
    gap = np.searchsorted(gap_start, left, side="right") - 1
    inside = (gap >= 0) & (left < gap_end[np.maximum(gap, 0)])
    left, right = left[inside], right[inside]
    span = innermost_around(nesting, spans, np.full(len(left), thread, dtype=np.int32), left, left + 1)
    np.add.at(idle, at(place_of, span, placed.attribution.outside), right - left)
