"""The roofline: how fast each part of the model works, against the most that the device can do."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import (
    flop_rate,
    machine,
    per_step,
    rank_in_words,
    root_names,
    step_count,
    use_lines,
)
from profiler_wrapper.reports.kind_colors import KIND_COLORS, OTHER_KIND
from profiler_wrapper.reports.point_labels import Named, name_points
from profiler_wrapper.reports.roofline_points import Point, Roofline, roofline
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_GET_PEAKS = (
    "no roofs: what this device can do is not known. Measure it: python -m profiler_wrapper peaks --measure "
    "-o peaks.json, then ProfilerWrapper(peaks='peaks.json') or analyze --peaks peaks.json"
)
_WIDTH_IN, _ROOF_IN, _BAR_IN = 12.0, 5.6, 0.27
_MOST_BARS = 24
_LONGEST_NAME = 30
_BEYOND = 1.02  # of the roof: more is no noise
_SMALLEST, _LARGEST = 40.0, 700.0  # marks, in square points
_LONGEST_NOTE = 150  # a line of it
_MOST_NOT_SHOWN = 3  # parts, by name

_MARKERS = {"forward": "o", "prefill": "o", "decode": "D", "backward": "s", "recompute": "^"}


def applies(analysis: Analysis) -> bool:
    """Whether there is a layer whose FLOPs are known."""
    return any(row.flops_per_step for row in analysis.layers)


@figures.own_style()
def draw_roofline(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: parts of the model below the roofs of the device; then the time of each, and that at the roof."""
    what = roofline(analysis)
    parts = [root_names(analysis), machine(analysis), rank_in_words(analysis)]
    title = f"Roofline: {', '.join(shorten(clean(part, unicode=True), 60) for part in parts if part)}"
    drawn = [point for point in what.points if point.intensity is not None and point.flop_per_s is not None]
    if not drawn:
        figures.say(path, title, "No part of the model has both FLOPs and bytes that are known.")
        return
    bars = [point for point in what.points if point.of_roof is not None][:_MOST_BARS]
    height = _ROOF_IN + (0.9 + _BAR_IN * len(bars) if bars else 0.0)
    figure = figures.new_figure(0, height_in=height + 0.6)
    figure.set_figwidth(_WIDTH_IN)
    ratios = [_ROOF_IN, 0.9 + _BAR_IN * len(bars)] if bars else [1.0]
    axes = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    figures.head(figure, title)
    _draw_roofs(axes[0], what, drawn)
    if bars:
        _draw_bars(axes[1], bars, analysis)
    notes = use_lines(analysis, _LONGEST_NOTE) if what.flops_per_s else textwrap.wrap(HOW_TO_GET_PEAKS, _LONGEST_NOTE)
    notes += textwrap.wrap(not_shown(what, analysis), _LONGEST_NOTE)
    if notes:
        figure.supxlabel(figures.literal("\n".join(notes)), fontsize=figures.FONT_SIZE - 1)
    figure.draw_without_rendering()  # sizes of texts are known from here on
    figure.set_layout_engine("none")
    radii = [math.sqrt(size) / 2 for size in _sizes(drawn)]
    name_points(
        axes[0], [Named(*_place(point), radius, _name(point)) for point, radius in zip(drawn, radii, strict=True)]
    )
    figures.save(figure, path)


def not_shown(what: Roofline, analysis: Analysis) -> str:
    """The parts that have no place under a roof, the longest first, each with its share of the time and why."""
    left_out = [point for point in what.points if point.why_no_roof] if what.flops_per_s else []
    if not left_out:
        return ""
    total_ns = analysis.time.total_ns / step_count(analysis)
    told = [
        f"{clean(point.name, unicode=True)}{'' if point.phase == point.name else f' ({point.phase})'}, "
        f"{100 * point.time_ns / total_ns:.1f} % of the time, {point.why_no_roof}"
        for point in left_out[:_MOST_NOT_SHOWN]
    ]
    if len(left_out) > _MOST_NOT_SHOWN:
        rest_ns = sum(point.time_ns for point in left_out[_MOST_NOT_SHOWN:])
        told.append(f"{len(left_out) - _MOST_NOT_SHOWN} more, {100 * rest_ns / total_ns:.1f} %")
    ops = list(dict.fromkeys(row.op for row in (*analysis.untold_bytes, *analysis.uncounted)))
    because = f" (no rule for {shorten(clean(', '.join(ops)), 60)})" if ops else ""
    return f"not shown: {'; '.join(told)}{because}"


# --- the roofs ----------------------------------------------------------------------------------


def _draw_roofs(axes: Axes, what: Roofline, points: Sequence[Point]) -> None:
    figures.prepare(axes, ylabel="FLOP/s (what a causal mask hides left out)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte moved (each input of an op read once, each output written once)")
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    _set_limits(axes, what, points)
    for dtype, peak in what.flops_per_s.items():
        _draw_roof(axes, dtype, peak, what.bytes_per_s)
    sizes = _sizes(points)
    for point, size in zip(points, sizes, strict=True):  # the longest first, so that short ones lie on top
        color = KIND_COLORS.get(point.kind, OTHER_KIND)
        axes.scatter(
            *_place(point),
            s=size,
            marker=_MARKERS.get(point.phase, "X"),
            facecolor=color if point.phase in ("forward", "prefill", "decode") else "white",
            edgecolor=color,
            linewidth=1.8,
            alpha=0.85,
            zorder=3,
        )
    _legend(axes, points, roofs=bool(what.flops_per_s))


def _sizes(points: Sequence[Point]) -> list[float]:
    """The area of each mark in square points, by its time."""
    longest = max(point.time_ns for point in points)
    return [max(_SMALLEST, _LARGEST * point.time_ns / longest) for point in points]


def _set_limits(axes: Axes, what: Roofline, points: Sequence[Point]) -> None:
    """Room for all points, and for the ridge of the highest roof."""
    across = [point.intensity for point in points if point.intensity]
    up = [point.flop_per_s for point in points if point.flop_per_s]
    if what.flops_per_s and what.bytes_per_s:
        across += [peak / what.bytes_per_s for peak in what.flops_per_s.values()]
    up += list(what.flops_per_s.values())
    axes.set_xlim(min(across) / 4, max(across) * 6)
    axes.set_ylim(min(up) / 4, max(up) * 2.5)


def _draw_roof(axes: Axes, dtype: str, peak: float, bytes_per_s: float | None) -> None:
    left, right = axes.get_xlim()
    low, _ = axes.get_ylim()
    ridge = peak / bytes_per_s if bytes_per_s else left
    axes.plot([max(left, ridge), right], [peak, peak], color=figures.INK, linewidth=1.6, zorder=2)
    name = f"{flop_rate(peak)} {dtype}".rstrip()
    axes.annotate(
        name, (right, peak), (-4, 4), textcoords="offset points", ha="right", va="bottom", fontsize=figures.FONT_SIZE
    )
    if bytes_per_s and ridge > left:
        start = max(left, low / bytes_per_s)
        axes.plot([start, ridge], [start * bytes_per_s, peak], color=figures.INK, linewidth=1.6, zorder=2)
        at = math.sqrt(start * ridge)
        axes.annotate(
            f"{bytes_per_s / 1e9:.4g} GB/s",
            (at, at * bytes_per_s),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=figures.FONT_SIZE,
        )


def _legend(axes: Axes, points: Sequence[Point], *, roofs: bool) -> None:
    from matplotlib.lines import Line2D

    phases = list(dict.fromkeys(point.phase for point in points))
    kinds = list(dict.fromkeys(point.kind if point.kind in KIND_COLORS else "other" for point in points))
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=_MARKERS.get(phase, "X"),
            markersize=8,
            markerfacecolor=figures.INK if phase in ("forward", "prefill", "decode") else "white",
            markeredgecolor=figures.INK,
            label=phase,
        )
        for phase in phases
    ]
    handles += [
        Line2D([], [], linestyle="", marker="o", markersize=8, color=KIND_COLORS.get(kind, OTHER_KIND), label=kind)
        for kind in kinds
    ]
    # Nothing is above the roofs: at the upper left the legend hides no point.
    axes.legend(handles=handles, loc="upper left" if roofs else "best", fontsize=figures.FONT_SIZE - 1, ncols=2)
    axes.set_title(
        "How fast each part works (like layers together; the larger, the more time)",
        loc="left",
        fontsize=figures.FONT_SIZE + 1,
        fontweight="bold",
        pad=8,
    )


def _place(point: Point) -> tuple[float, float]:
    return point.intensity or 0.0, point.flop_per_s or 0.0


def _name(point: Point) -> str:
    return figures.literal(shorten(clean(point.name, unicode=True), _LONGEST_NAME))


# --- the times ----------------------------------------------------------------------------------


def _draw_bars(axes: Axes, points: Sequence[Point], analysis: Analysis) -> None:
    """Per part its time, and in it that which it needs at the roof."""
    figures.prepare(axes, ylabel="")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    places = range(len(points))
    times = [point.time_ns / 1e6 for point in points]
    at_roof = [(point.roof_ns or 0) / 1e6 for point in points]
    axes.barh(places, times, 0.72, color="#c9c9c9", label="time")
    axes.barh(places, at_roof, 0.36, color="#0072B2", label="time at the roof")
    for place, point, time_ms, roof_ms in zip(places, points, times, at_roof, strict=True):
        share = 100 * (point.of_roof or 0)
        text = f" {share:.0f} % of the roof, bound by {point.bound}" if share >= 1 else f" {share:.1f} % of the roof"
        axes.text(max(time_ms, roof_ms), place, text, va="center", fontsize=figures.FONT_SIZE - 2)
    names = [_name(point) + (f", {point.phase}" if point.phase != point.name else "") for point in points]
    axes.set_yticks(list(places), names, fontsize=figures.FONT_SIZE - 1)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max(*times, *at_roof))
    total_ms = analysis.time.total_ns / step_count(analysis) / 1e6
    beyond = "; over 100 %: what is in a cache needs no memory, or the roof is too low"
    said = beyond if any((point.of_roof or 0) > _BEYOND for point in points) else ""
    axes.set_xlabel(f"ms {per_step(analysis)}; these are {sum(times):.3f} of {total_ms:.3f} ms{said}")
    figures.legend_above(axes, "How long each part takes, and how long it would take at the roof")
