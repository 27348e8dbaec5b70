"""What single views of the page need beside the rows of result.json, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import step_count
from profiler_wrapper.reports.kind_colors import KIND_COLORS, OTHER_KIND
from profiler_wrapper.reports.roofline_plot import HOW_TO_GET_PEAKS, not_shown
from profiler_wrapper.reports.roofline_points import Point, roofline

_NS_PER_US = 1000


def view_data(analysis: Analysis) -> dict[str, Any]:
    """JSON types only, by view. A view whose data cannot be made has `{"failed": why}`; the others have theirs."""
    return {name: _made(make, analysis) for name, make in _VIEWS.items()}


def _made(make: Callable[[Analysis], dict[str, Any]], analysis: Analysis) -> dict[str, Any]:
    try:
        return make(analysis)
    except Exception as error:  # one view is not worth the page
        return {"failed": f"{type(error).__name__}: {error}"}


def roofline_data(analysis: Analysis) -> dict[str, Any]:
    """Points as the roofline picture has them, times in microseconds, and the roofs above them."""
    what = roofline(analysis)
    return {
        "points": [_point(point) for point in what.points],
        "total_us": analysis.time.total_ns / step_count(analysis) / _NS_PER_US,
        "flops_per_s": what.flops_per_s,
        "bytes_per_s": what.bytes_per_s,
        "source": what.source,
        "not_shown": not_shown(what, analysis),
        "how": "" if what.flops_per_s else HOW_TO_GET_PEAKS,
        "colors": dict(KIND_COLORS),
        "other": OTHER_KIND,
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "kind": point.kind,
        "phase": point.phase,
        "time_us": point.time_ns / _NS_PER_US,
        "roof_us": None if point.roof_ns is None else point.roof_ns / _NS_PER_US,
        "flops": point.flops,
        "bytes_moved": point.bytes_moved,
        "flops_per_byte": point.intensity,
        "flops_per_s": point.flop_per_s,
        "of_roof": point.of_roof,
        "bound": point.bound,
        "why": point.why_no_roof,
    }


_VIEWS: dict[str, Callable[[Analysis], dict[str, Any]]] = {"roofline": roofline_data}
