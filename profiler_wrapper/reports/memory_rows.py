"""Memory at the borders of the layers in time order, as numbers. No drawing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from profiler_wrapper.analysis.model import Analysis, LayerCall
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.reports.plot_rows import LayerBar, mib
from profiler_wrapper.units import MIB

_MOST_POINTS = 400  # of a course with a point a call


@dataclass(frozen=True)
class MemoryPoint:
    """Allocated memory as one layer is entered or left."""

    layer: str
    phase: Phase
    entry_mib: float
    exit_mib: float
    reserved_mib: float | None
    peak_mib: float | None


@dataclass(frozen=True)
class MemoryCourse:
    """Memory at the borders of the layers, in time order."""

    points: list[MemoryPoint]
    step: int | None  # the step they are of
    why_step: str = ""  # and why of that one
    means: bool = False  # means over all calls, in model order
    passes: bool = False  # a point is one pass through all layers: there are too many calls for one each


def memory_course(analysis: Analysis, bars: Sequence[LayerBar]) -> MemoryCourse:
    """Each layer's entry and exit in time order: of one typical step, or else the means over all calls.

    The typical step is the one of the middle time. Without calls (a result read from its file)
    the means per layer stand in, in model order.
    """
    shown = {bar.layer for bar in bars}
    known = [call for call in analysis.calls if call.layer in shown and call.exit_allocated_bytes is not None]
    step, why = _typical_step(analysis, {call.step for call in known})
    calls = sorted((call for call in known if step is None or call.step == step), key=lambda call: call.start_ns)
    points = [point for call in calls if (point := _point(call))]
    if len(points) > _MOST_POINTS:
        return MemoryCourse(_passes(points), step, why, passes=True)
    if points:
        return MemoryCourse(points, step, why)
    means = [
        MemoryPoint(bar.layer, "forward", bar.entry_mib, bar.exit_mib, bar.reserved_mib, bar.peak_mib)
        for bar in bars
        if bar.entry_mib is not None and bar.exit_mib is not None
    ]
    return MemoryCourse(means, None, means=True)


def _passes(points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """One point for each pass through the layers; a pass ends where a layer comes again."""
    groups: list[list[MemoryPoint]] = []
    seen: set[str] = set()
    for point in points:
        if not groups or point.layer in seen:
            groups.append([])
            seen = set()
        groups[-1].append(point)
        seen.add(point.layer)
    return [_pass(number, group) for number, group in enumerate(groups)]


def _pass(number: int, points: Sequence[MemoryPoint]) -> MemoryPoint:
    peaks = [point.peak_mib for point in points if point.peak_mib is not None]
    return MemoryPoint(
        layer=f"pass.{number}",
        phase=points[0].phase,
        entry_mib=points[0].entry_mib,
        exit_mib=points[-1].exit_mib,
        reserved_mib=points[-1].reserved_mib,
        peak_mib=max(peaks, default=None),
    )


def _typical_step(analysis: Analysis, known: Collection[int | None]) -> tuple[int | None, str]:
    """The step of the middle time among those in `known`, None if none is; and why that one."""
    rows = [row for row in analysis.steps if row.step is not None and row.step in known]
    rows.sort(key=lambda row: row.time_ns)
    if not rows:
        return None, ""
    return rows[len(rows) // 2].step, "the only one" if len(rows) == 1 else f"of median time among {len(rows)}"


def _point(call: LayerCall) -> MemoryPoint | None:
    if call.entry_allocated_bytes is None or call.exit_allocated_bytes is None:
        return None
    return MemoryPoint(
        layer=call.layer,
        phase=call.phase,
        entry_mib=call.entry_allocated_bytes / MIB,
        exit_mib=call.exit_allocated_bytes / MIB,
        reserved_mib=mib(call.exit_reserved_bytes or None),  # a CPU has no reserved memory, and says 0
        peak_mib=mib(call.peak_bytes),
    )


def why_no_memory(analysis: Analysis) -> str:
    """The reason as a clause, from the warnings where one names it."""
    for warning in analysis.warnings:
        what, because, reason = warning.partition(", because ")
        if because and "memory" in what.lower():
            return reason.rstrip(". ")
    return "the trace holds no allocation events inside layers (profile_memory=True records them)"
