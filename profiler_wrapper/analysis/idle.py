"""Device time in which nothing ran, charged to where the CPU was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.recording.nesting import Nesting
from profiler_wrapper.recording.recording import Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def idle_per_place(found: Attributed) -> Int64 | None:
    """Per place: nanoseconds between device events in which the launching thread was there.

    A gap belongs to the thread that launched what ended it. None without device events, and where some are not seen.
    """
    recording, nesting, attribution, charges = found.recording, found.nesting, found.attribution, found.charges
    if charges.basis != "device" or found.unseen_until_ns is not None:
        return None
    idle = np.zeros(len(attribution.places), dtype=np.int64)
    spans = recording.spans
    for device in np.unique(spans.device[charges.span]).tolist():
        here = np.flatnonzero(spans.device[charges.span] == device)
        start = spans.start_ns[charges.span[here]]
        busy = union(start, start + charges.time_ns[here])
        gap_start, gap_end = busy.end_ns[:-1], busy.start_ns[1:]
        ender = here[np.searchsorted(start, gap_end)]  # charges come in order of start
        cpu_span = charges.cpu_span[ender]
        lane = np.where(cpu_span >= 0, spans.lane[np.maximum(cpu_span, 0)], -1)
        for thread in np.unique(lane[lane >= 0]).tolist():
            _charge(recording, nesting, attribution, thread, gap_start[lane == thread], gap_end[lane == thread], idle)
    return idle


def _charge(
    recording: Recording,
    nesting: Nesting,
    attribution: Attribution,
    thread: int,
    gap_start: Int64,
    gap_end: Int64,
    idle: Int64,
) -> None:
    """Cut the gaps where the place of the thread changes and add the pieces up."""
    times, places = _places_over_time(recording, nesting, attribution, thread)
    cuts = np.unique(np.concatenate([gap_start, gap_end, times]))
    left, right = cuts[:-1], cuts[1:]
    gap = np.searchsorted(gap_start, left, side="right") - 1
    inside = (gap >= 0) & (left < gap_end[np.maximum(gap, 0)])
    at = np.searchsorted(times, left[inside], side="right") - 1
    np.add.at(idle, places[at], (right - left)[inside])


def _places_over_time(
    recording: Recording, nesting: Nesting, attribution: Attribution, thread: int
) -> tuple[Int64, Int64]:
    """Instants at which the place of a thread changes, and the place from there on."""
    spans = recording.spans
    place_of, outside = attribution.place_of, attribution.outside
    around = np.where(nesting.parent >= 0, place_of[nesting.parent], np.int32(outside))
    members = nesting.order[spans.lane[nesting.order] == thread]
    members = members[place_of[members] != around[members]]  # the others change nothing
    times: list[int] = [np.iinfo(np.int64).min]
    places: list[int] = [outside]
    stack: list[tuple[int, int]] = []

    def close_until(limit: int) -> None:
        while stack and stack[-1][0] <= limit:
            ended, _ = stack.pop()
            times.append(max(ended, times[-1]))
            places.append(stack[-1][1] if stack else outside)

    ends = (spans.start_ns + spans.duration_ns)[members].tolist()
    starts, own = spans.start_ns[members].tolist(), place_of[members].tolist()
    for place, start, end in zip(own, starts, ends, strict=True):
        close_until(start)
        if not stack or stack[-1][1] != place:
            times.append(max(start, times[-1]))
            places.append(place)
        stack.append((end, place))
    close_until(np.iinfo(np.int64).max)
    return np.array(times, dtype=np.int64), np.array(places, dtype=np.int64)
