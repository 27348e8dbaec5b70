"""Memory over time in as many points as a page can show, as plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES, MemoryTimeline, MemoryUse
from profiler_wrapper.recording.recording import Int64

_MOST_POINTS = 1500
_STRETCHES = 500  # of as many events each; the highest and the lowest of each are shown
_PAUSES = 400  # the longest ones: what is held in them is shown exactly
_MOST_PHASES = 1000  # where there are more, none can be told from the next


def memory_curve(use: MemoryUse) -> dict[str, Any]:
    """What is held from each of some times on, until the next: by category, which add up, and in all.

    Times are microseconds since `start_ns`, the begin of the recording on the trace's clock. Each point is
    what is held after one event. The highest in all, the highest reserved, the highest of each step and
    the highest and lowest of each stretch of events are among them. Categories that never hold anything
    are left out.
    """
    timeline = use.timeline
    begin_ns, end_ns = _bounds(use)
    events = points_of(use, most=_MOST_POINTS)
    reserved = timeline.reserved_bytes
    held = dict(zip(CATEGORIES, timeline.bytes_by_category, strict=True))
    phases = timeline.phase_starts if len(timeline.phase_starts) <= _MOST_PHASES else ()
    return {
        "start_ns": begin_ns,
        "end_us": (end_ns - begin_ns) / 1000,
        "events": len(timeline.time_ns),
        "time_us": _since(timeline.time_ns[events], begin_ns),
        "allocated_bytes": timeline.total_bytes[events].tolist(),
        "reserved_bytes": None if reserved is None else reserved[events].tolist(),
        "categories": {name: sizes[events].tolist() for name, sizes in held.items() if sizes.any()},
        "steps": [
            {"step": step.number, "start_us": (step.start_ns - begin_ns) / 1000, "end_us": (end - begin_ns) / 1000}
            for step in use.steps
            if (end := min(step.end_ns, end_ns)) > step.start_ns
        ],
        "phases": [{"phase": phase, "start_us": (start_ns - begin_ns) / 1000} for start_ns, phase in phases],
    }


def points_of(use: MemoryUse, *, most: int) -> Int64:
    """The events to show, ascending: all of them, or where there are more than `most`, those that matter."""
    timeline = use.timeline
    times, total = timeline.time_ns, timeline.total_bytes
    count = len(times)
    if count <= most:
        return np.arange(count)
    pauses = np.argpartition(np.diff(times), count - 1 - _PAUSES)[-_PAUSES:]
    room = most - _PAUSES - len(_marked(timeline))
    stretches = min(_STRETCHES, room // 2)
    bounds = np.linspace(0, count, stretches + 1).astype(np.int64)
    stretch = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    extremes = [first + int(find(total[first:end])) for first, end in stretch for find in (np.argmax, np.argmin)]
    chosen = np.unique(np.concatenate([_marked(timeline), pauses, extremes]))
    peaks = np.setdiff1d(_step_peaks(use), chosen)[: max(0, most - len(chosen))]
    return np.sort(np.concatenate([chosen, peaks])).astype(np.int64)


def _bounds(use: MemoryUse) -> tuple[int, int]:
    """Begin and end of the recording; where they are not told, of its memory events."""
    times = use.timeline.time_ns
    first, last = (int(times[0]), int(times[-1])) if len(times) else (0, 0)
    return (first if use.begin_ns is None else use.begin_ns), (last if use.end_ns is None else use.end_ns)


def _marked(timeline: MemoryTimeline) -> Int64:
    """The first and the last event, the highest allocated and the highest reserved."""
    total, reserved = timeline.total_bytes, timeline.reserved_bytes
    marked = [0, len(total) - 1, int(total.argmax())]
    return np.array(marked if reserved is None else [*marked, int(reserved.argmax())], dtype=np.int64)


def _step_peaks(use: MemoryUse) -> Int64:
    """The event after which most is held, in each step."""
    times, total = use.timeline.time_ns, use.timeline.total_bytes
    found = []
    for step in use.steps:
        first, end = np.searchsorted(times, [step.start_ns, step.end_ns]).tolist()
        if end > first:
            found.append(first + int(total[first:end].argmax()))
    return np.array(found, dtype=np.int64)


def _since(times_ns: Int64, begin_ns: int) -> list[float]:
    return [(time_ns - begin_ns) / 1000 for time_ns in times_ns.tolist()]
