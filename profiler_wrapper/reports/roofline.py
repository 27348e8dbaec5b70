"""The roofline: how fast each part of the model works, against the most that the device can do."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler_wrapper.place.names import FORWARD_PHASES, Phase
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.columns import scale_of
from profiler_wrapper.reports.describe import (
    flop_rate,
    main_dtypes,
    model_in_words,
    per_step,
    step_count,
    use_lines,
)
from profiler_wrapper.reports.figures import KIND_COLORS, OTHER_KIND
from profiler_wrapper.reports.folding import own_communication
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.tables.model import Analysis, Bound, LayerRow
from profiler_wrapper.tables.statistics import sum_if_all_known
from profiler_wrapper.tables.work.roofline import peak_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# What the roofline plot shows, as numbers: parts of the model in each phase, and the roofs above them. No drawing.

_NUMBER = re.compile(r"(?:^|(?<=[._]))\d+(?=\.|$)")  # of a layer among its like, as a part of its name
_LEAST_TIME = 0.004  # of all points; shorter ones are left out
# By the key of a column: the field of what a layer does itself.
_OWN_WORK = {
    "flops": "self_causal_flops_per_step",
    "bytes_moved": "self_bytes_moved_per_step",
    "roof": "self_roof_time_per_step_ns",
    "memory_roof": "self_memory_roof_time_per_step_ns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Like layers in one phase: all `.mlp` of a model's blocks in the backward. Of as many steps as the times are."""

    name: str
    kind: str
    phase: Phase
    time_ns: float
    flops: int | None  # without what a causal mask hides
    bytes_moved: int | None
    roof_ns: int | None
    bound: Bound | None
    flops_per_byte: float | None  # None where either is not known or 0, as the next two
    flops_per_s: float | None
    of_roof: float | None  # the share of its time that it needs at the roof
    why: str  # what is not known of its work, so that there is no roof; "" where all is


@dataclass(frozen=True, slots=True)
class Roofline:
    """Points, the longest first, and the roofs: FLOP/s by type of number, the highest first, and bytes a second."""

    points: tuple[Point, ...]
    flops_per_s: dict[str, float]
    bytes_per_s: float | None
    source: str


def roofline(analysis: Analysis) -> Roofline:
    """Return what each layer does itself, without those below it; like ones of all blocks are one part."""
    layers = {row.layer: row for row in analysis.layers if row.layer}
    own_communication_ns = own_communication(analysis)
    parts: dict[tuple[Phase, str, str, str], list[LayerRow]] = defaultdict(list)
    for row in analysis.layers:
        if row.self_time_ns and (row.layer or row.phase == "optimizer"):
            block, inside = _place(row, layers)
            above = inside.rpartition(".")[0] if block else inside
            parts[row.phase, block, above, row.class_name].append(row)
    scale = scale_of(analysis)
    points = []
    for (phase, *_), rows in parts.items():
        sums = {key: sum_if_all_known(getattr(row, name) for row in rows) for key, name in _OWN_WORK.items()}
        spent_ns = sum(row.self_time_ns - own_communication_ns[row.layer, phase] for row in rows)
        values = scale.of({**sums, "time": spent_ns})
        unknown = [name for name, key in (("FLOPs", "flops"), ("bytes", "bytes_moved")) if values[key] is None]
        no_roof = f"{' and '.join(unknown)} not known" if unknown else "no peak of its type"
        points.append(
            Point(
                name=_part_name(rows, layers),
                kind=_kind(rows[0], layers),
                phase=phase,
                time_ns=values["time"],
                flops=values["flops"],
                bytes_moved=values["bytes_moved"],
                roof_ns=values["roof"],
                bound=values["bound"],
                flops_per_byte=values["intensity"],
                flops_per_s=values["rate"],
                of_roof=values["of_roof"],
                why="" if values["roof"] is not None else no_roof,
            )
        )
    total_ns = sum(point.time_ns for point in points)
    long_enough = [point for point in points if point.time_ns > _LEAST_TIME * total_ns]
    peaks = analysis.utilization.peaks if analysis.utilization is not None else None
    roofs = {dtype: peak for dtype in main_dtypes(analysis) if peaks and (peak := peak_of(peaks, dtype))}
    return Roofline(
        points=tuple(sorted(long_enough, key=lambda point: -point.time_ns)),
        flops_per_s=dict(sorted(roofs.items(), key=lambda entry: -entry[1])),
        bytes_per_s=None if peaks is None else peaks.bandwidth_bytes_per_s,
        source="" if peaks is None else peaks.source,
    )


def _place(row: LayerRow, layers: Mapping[str, LayerRow]) -> tuple[str, str]:
    """Return the class of the block that a layer is in, and its name there: `"mlp.experts.*.gate_proj"`."""
    block: LayerRow | None = row
    while block is not None and block.kind != "block":
        block = layers.get(block.parent or "")
    inside = row.layer.removeprefix(block.layer).lstrip(".") if block else row.layer
    return block.class_name if block else "", _NUMBER.sub("*", inside)


def _part_name(rows: Sequence[LayerRow], layers: Mapping[str, LayerRow]) -> str:
    """Return `"mlp.act_fn"`, `"self_attn: 4 Linear"` of layers of one class below one, `"self_attn itself"`."""
    first = rows[0]
    block, inside = _place(first, layers)
    if not block:
        short = first.layer.rpartition(".")[2] or first.phase
        return short if len(rows) == 1 else f"{first.class_name} x{len(rows)}"
    paths = {_place(row, layers)[1] for row in rows}
    above = inside.rpartition(".")[0]
    name = inside if len(paths) == 1 else f"{above}: {len(paths)} {first.class_name}".removeprefix(": ")
    several = len({row.class_name for row in layers.values() if row.kind == "block"}) > 1
    of = f" of {block}" if several and name else ""
    itself = " itself" if any(row.parent == first.layer for row in layers.values()) else ""
    return f"{name or block}{itself}{of}"


def _kind(row: LayerRow, layers: Mapping[str, LayerRow]) -> str:
    """Return its own kind, else that of the nearest layer above that has one."""
    if not row.layer:
        return row.phase
    while row.kind == "other" and (above := layers.get(row.parent or "")):
        row = above
    return row.kind


HOW_TO_GET_PEAKS = (
    "no roofs: what this device can do is not known. Measure it: profiler-wrapper peaks --measure "
    "-o peaks.json, then ProfilerWrapper(peaks='peaks.json') or analyze --peaks peaks.json"
)
_MOST_BARS = 24
_LONGEST_NAME = 30
_BEYOND = 1.02  # of the roof: more is no noise
_SMALLEST, _LARGEST = 40.0, 700.0  # marks, in square points
_LONGEST_NOTE = 140  # a line of it
_MOST_NOT_SHOWN = 3  # parts, by name
_GAP = 4.0  # points between a mark and its name
# Where the name of a mark stands, across and up, and how it is set there.
_BESIDE = ((1, 0, "left", "center"), (0, 1, "center", "bottom"), (0, -1, "center", "top"), (-1, 0, "right", "center"))
_MARKERS = {"forward": "o", "prefill": "o", "decode": "D", "verify": "D", "backward": "s", "recompute": "^"}


def applies(analysis: Analysis) -> bool:
    """Return whether there is a layer whose FLOPs are known."""
    return any(row.flops_per_step for row in analysis.layers)


def draw_roofline(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Write a PNG: parts of the model below the roofs of the device; then the time of each, and that at the roof."""
    what, title = roofline(analysis), f"Roofline: {model_in_words(analysis)}"
    drawn = [point for point in what.points if point.flops_per_byte is not None and point.flops_per_s is not None]
    if not drawn:
        figures.say(path, title, "No part of the model has both FLOPs and bytes that are known.")
        return
    bars = [point for point in what.points if point.of_roof is not None][:_MOST_BARS]
    heights_in = [5.6, 0.9 + 0.27 * len(bars)] if bars else [5.6]
    notes = use_lines(analysis, _LONGEST_NOTE) if what.flops_per_s else textwrap.wrap(HOW_TO_GET_PEAKS, _LONGEST_NOTE)
    notes += textwrap.wrap(not_shown(what, analysis), _LONGEST_NOTE)
    height_in, foot = sum(heights_in) + 0.6, "\n".join(notes)
    with figures.picture(path, title, bars=61, height_in=height_in, ratios=heights_in, foot=foot) as (axes, *more):
        for below in more:
            _draw_bars(below, bars, analysis)
        _draw_roofs(axes, what, drawn)


def not_shown(what: Roofline, analysis: Analysis) -> str:
    """Return the parts that have no place under a roof, the longest first, with their shares of the time and why."""
    left_out = [point for point in what.points if point.why] if what.flops_per_s else []
    if not left_out:
        return ""
    total_ns = analysis.time.total_ns / step_count(analysis)
    parts = [
        f"{clean(point.name, unicode=True)}{'' if point.phase == point.name else f' ({point.phase})'}, "
        f"{100 * point.time_ns / total_ns:.1f} % of the time, {point.why}"
        for point in left_out[:_MOST_NOT_SHOWN]
    ]
    if len(left_out) > _MOST_NOT_SHOWN:
        rest_ns = sum(point.time_ns for point in left_out[_MOST_NOT_SHOWN:])
        parts.append(f"{len(left_out) - _MOST_NOT_SHOWN} more, {100 * rest_ns / total_ns:.1f} %")
    ops = list(dict.fromkeys(row.op for row in (*analysis.untold_bytes, *analysis.uncounted)))
    because = f" (no rule for {shorten(clean(', '.join(ops)), 60)})" if ops else ""
    return f"not shown: {'; '.join(parts)}{because}"


def _draw_roofs(axes: Axes, what: Roofline, points: Sequence[Point]) -> None:
    """Draw the points, the larger the more time, below the roofs; the figure is laid out with all else in it."""
    figures.prepare(
        axes,
        ylabel="FLOP/s (what a causal mask hides left out)",
        xlabel="FLOPs per byte moved (each input of an op read once, each output written once)",
    )
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    across, up = np.array([(point.flops_per_byte, point.flops_per_s) for point in points], np.float64).T
    times_ns = np.array([point.time_ns for point in points])
    sizes = np.maximum(_SMALLEST, _LARGEST * times_ns / times_ns.max())
    roofs = list(what.flops_per_s.values())
    ridges = [peak / what.bytes_per_s for peak in roofs] if what.bytes_per_s else []
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(*across, *ridges) / 4, max(*across, *ridges) * 6)
    axes.set_ylim(min(*up, *roofs) / 4, max(*up, *roofs) * 2.5)
    for dtype, peak in what.flops_per_s.items():
        _draw_roof(axes, dtype, peak, what.bytes_per_s)
    for x, y, size, point in zip(across, up, sizes, points, strict=True):  # the longest first: short ones lie on top
        _scatter(axes, x, y, size, point.phase, KIND_COLORS.get(point.kind, OTHER_KIND))
    for phase in dict.fromkeys(point.phase for point in points):
        _scatter(axes, [], [], 64, phase, figures.INK, label=phase)
    for kind in dict.fromkeys(point.kind if point.kind in KIND_COLORS else "other" for point in points):
        _scatter(axes, [], [], 64, "forward", KIND_COLORS.get(kind, OTHER_KIND), label=kind)
    # Nothing is above the roofs: at the upper left the legend hides no point.
    axes.legend(loc="upper left" if roofs else "best", fontsize=figures.FONT_SIZE - 1, ncols=2)
    figures.entitle(axes, "How fast each part works (like layers together; the larger, the more time)")
    figure = figures.figure_of(axes)
    figure.draw_without_rendering()  # where texts stand is known from here on
    figure.set_layout_engine("none")
    _name_points(axes, list(zip(across, up, np.sqrt(sizes) / 2, map(_name, points), strict=True)))


def _scatter(axes: Axes, x: Any, y: Any, size: float, phase: Phase, color: str, **more: Any) -> None:
    """Mark a phase: those of the forward filled, the others by their edge."""
    more |= {"marker": _MARKERS.get(phase, "X"), "facecolor": color if phase in FORWARD_PHASES else "white"}
    axes.scatter(x, y, size, edgecolor=color, linewidth=1.8, alpha=0.85, zorder=3, **more)


def _draw_roof(axes: Axes, dtype: str, peak: float, bytes_per_s: float | None) -> None:
    (left, right), bandwidth = axes.get_xlim(), bytes_per_s or math.inf
    x = np.array([left, max(left, peak / bandwidth), right])
    axes.plot(x, np.minimum(peak, x * bandwidth), color=figures.INK, linewidth=1.6, zorder=2)
    names = [(f"{flop_rate(peak)} {dtype}".rstrip(), (right, peak))]
    if x[1] > left:
        middle = math.sqrt(max(left, axes.get_ylim()[0] / bandwidth) * x[1])
        names.append((f"{bandwidth / 1e9:.4g} GB/s", (middle, middle * bandwidth)))
    for name, place in names:
        axes.annotate(name, place, (-4, 4), textcoords="offset points", ha="right", va="bottom",
                      fontsize=figures.FONT_SIZE)  # fmt: skip


def _name_points(axes: Axes, points: Sequence[tuple[float, float, float, str]]) -> None:
    """Write names (x and y in the data, the radius of the mark in points, the name), the most important first.

    One that would lie on a mark, a text or the legend wherever it stands is left out.
    """
    from matplotlib.transforms import Bbox

    pixels = axes.figure.dpi / 72
    taken = [text.get_window_extent() for text in (*axes.texts, axes.get_legend()) if text is not None]
    for x, y, radius, _ in points:
        centre, around = axes.transData.transform((x, y)), radius * pixels
        taken.append(Bbox([centre - around, centre + around]))
    inside = axes.get_window_extent()
    for x, y, radius, name in points:
        for across, up, ha, va in _BESIDE:
            offset = across * (radius + _GAP), up * (radius + _GAP)
            text = axes.annotate(name, (x, y), offset, textcoords="offset points", ha=ha, va=va, zorder=4,
                                 fontsize=figures.FONT_SIZE - 1)  # fmt: skip
            box = text.get_window_extent()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def _name(point: Point) -> str:
    return figures.literal(shorten(clean(point.name, unicode=True), _LONGEST_NAME))


def _draw_bars(axes: Axes, points: Sequence[Point], analysis: Analysis) -> None:
    """Draw the time of each part, and in it that which it needs at the roof."""
    times = [point.time_ns / 1e6 for point in points]
    at_roof = [(point.roof_ns or 0) / 1e6 for point in points]
    total_ms = analysis.time.total_ns / step_count(analysis) / 1e6
    beyond = any((point.of_roof or 0) > _BEYOND for point in points)
    said = "; over 100 %: what is in a cache needs no memory, or the roof is too low" * beyond
    shown = f"these are {sum(times):.3f} of {total_ms:.3f} ms"
    figures.prepare(axes, ylabel="", xlabel=f"ms {per_step(analysis)}; {shown}{said}")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    places = range(len(points))
    axes.barh(places, times, 0.72, color="#c9c9c9", label="time")
    axes.barh(places, at_roof, 0.36, color="#0072B2", label="time at the roof")
    for place, point, time_ms, roof_ms in zip(places, points, times, at_roof, strict=True):
        share = 100 * (point.of_roof or 0)
        text = f" {share:.0f} % of the roof, bound by {point.bound}" if share >= 1 else f" {share:.1f} % of the roof"
        axes.text(max(time_ms, roof_ms), place, text, va="center", fontsize=figures.FONT_SIZE - 2)
    names = [_name(point) + (f", {point.phase}" if point.phase != point.name else "") for point in points]
    axes.set_yticks(places, names, fontsize=figures.FONT_SIZE - 1)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max(*times, *at_roof))
    figures.legend_above(axes, "How long each part takes, and how long it would take at the roof")
