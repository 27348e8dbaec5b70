"""Memory over time as numbers: as many points as a picture can show, phases, and the peak of each step. No drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.memory_model import MemoryTimeline, MemoryUse
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.recording.recording import Int64


@dataclass(frozen=True, eq=False)
class Course:
    """What is held from each of some times on, until the next."""

    time_ns: Int64  # shape (points,)
    bytes_by_category: Int64  # shape (categories, points)
    reserved_bytes: Int64 | None  # shape (points,)
    is_thinned: bool  # a point is the highest of a stretch of time


@dataclass(frozen=True)
class StepPeak:
    """The highest allocated in a step."""

    step: int
    time_ns: int
    total_bytes: int


@dataclass(frozen=True)
class PhaseSpan:
    """A phase from its begin to the next one's."""

    phase: Phase | None  # None: several, each too short to be seen
    start_ns: int
    end_ns: int


def course(timeline: MemoryTimeline, *, most: int) -> Course:
    """Every event, or if there are more than `most`, the highest in each of so many equal stretches of time.

    Maxima stay, and are as wide as a stretch; where nothing happens it is what the last event left.
    """
    times, by_category, reserved = timeline.time_ns, timeline.bytes_by_category, timeline.reserved_bytes
    if len(times) <= most:
        return Course(times, by_category, reserved, is_thinned=False)
    edges_ns = np.linspace(int(times[0]), int(times[-1]) + 1, most + 1).astype(np.int64)
    bounds = np.searchsorted(times, edges_ns)
    events: list[int] = []
    starts_ns: list[int] = []
    highest_reserved: list[int] = []
    for i in range(most):
        first, end = int(bounds[i]), int(bounds[i + 1])
        if first == end:  # nothing happens
            if bounds[i - 1] == first:
                continue  # nor did it before
            first -= 1
        events.append(first + int(timeline.total_bytes[first:end].argmax()))
        starts_ns.append(int(edges_ns[i]))
        if reserved is not None:
            highest_reserved.append(int(reserved[first:end].max()))
    return Course(
        np.array(starts_ns, dtype=np.int64),
        by_category[:, events],
        None if reserved is None else np.array(highest_reserved, dtype=np.int64),
        is_thinned=True,
    )


def step_peaks(use: MemoryUse) -> list[StepPeak]:
    """The highest moment of each step; a step goes on to the last of its moments."""
    ends: dict[int, int] = {}
    for moment in use.moments:
        if moment.step is not None:
            ends[moment.step] = max(moment.time_ns, ends.get(moment.step, moment.time_ns))
    times, total = use.timeline.time_ns, use.timeline.total_bytes
    found: list[StepPeak] = []
    first = 0
    for step, end_ns in sorted(ends.items(), key=lambda item: item[1]):
        last = int(np.searchsorted(times, end_ns, side="right"))
        if last > first:
            highest = first + int(total[first:last].argmax())
            found.append(StepPeak(step, int(times[highest]), int(total[highest])))
        first = max(first, last)
    return found


def phase_spans(
    phase_starts: Sequence[tuple[int, Phase]], *, begin_ns: int, end_ns: int, narrowest_ns: float
) -> list[PhaseSpan]:
    """The phases between two times, one after another; those too narrow to be seen share a span of no phase."""
    spans: list[PhaseSpan] = []
    nexts = [*(start_ns for start_ns, _ in phase_starts), end_ns][1:]
    for (start_ns, phase), next_ns in zip(phase_starts, nexts, strict=True):
        span = PhaseSpan(phase, max(start_ns, begin_ns), min(next_ns, end_ns))
        if span.end_ns <= span.start_ns:
            continue
        if spans and spans[-1].phase == phase:
            span = PhaseSpan(phase, spans.pop().start_ns, span.end_ns)
        spans.append(span)
    seen: list[PhaseSpan] = []
    for span in spans:
        narrow = span.end_ns - span.start_ns < narrowest_ns
        if narrow and seen and seen[-1].phase is None:
            seen[-1] = PhaseSpan(None, seen[-1].start_ns, span.end_ns)
        else:
            seen.append(PhaseSpan(None, span.start_ns, span.end_ns) if narrow else span)
    return seen
