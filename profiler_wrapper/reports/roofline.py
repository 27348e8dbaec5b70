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

from profiler_wrapper.analysis.model import FORWARD_PHASES, Analysis, Bound, LayerRow, Phase
from profiler_wrapper.analysis.statistics import sum_if_all_known
from profiler_wrapper.analysis.work.roofline import peak_of
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.columns import scale_of
from profiler_wrapper.reports.describe import (
    flop_rate,
    machine,
    main_dtypes,
    per_step,
    rank_in_words,
    root_names,
    step_count,
    use_lines,
)
from profiler_wrapper.reports.figures import KIND_COLORS, OTHER_KIND
from profiler_wrapper.reports.folding import own_communication
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Names beside the points of a plot that lie on nothing else.

_GAP = 4.0  # points between a mark and its name
# How a name is set on each side of its mark.
_BESIDE = {
    (1, 0): ("left", "center"),
    (0, 1): ("center", "bottom"),
    (0, -1): ("center", "top"),
    (-1, 0): ("right", "center"),
}


def name_points(axes: Axes, points: Sequence[tuple[float, float, float, str]]) -> None:
    """Names (x and y in the data, the radius of the mark in points, the name), the most important first.

    One that would lie on a mark, a text or the legend wherever it stands is left out. The figure must have been laid
    out, and must not be laid out again.
    """
    from matplotlib.transforms import Bbox

    pixels = axes.figure.dpi / 72
    taken = [text.get_window_extent() for text in (*axes.texts, axes.get_legend()) if text is not None]
    for x, y, radius, _ in points:
        centre, around = axes.transData.transform((x, y)), radius * pixels
        taken.append(Bbox([centre - around, centre + around]))
    inside = axes.get_window_extent()
    for x, y, radius, name in points:
        apart = radius + _GAP
        for (across, up), (ha, va) in _BESIDE.items():
            text = axes.annotate(name, (x, y), (across * apart, up * apart), textcoords="offset points", ha=ha, va=va,
                                 fontsize=figures.FONT_SIZE - 1, zorder=4)  # fmt: skip
            box = text.get_window_extent()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


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
    """What each layer does itself, without the layers below it; like ones of all blocks are one part."""
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
    """The class of the block that a layer is in, and its name there: `"mlp.experts.*.gate_proj"`."""
    block: LayerRow | None = row
    while block is not None and block.kind != "block":
        block = layers.get(block.parent or "")
    inside = row.layer.removeprefix(block.layer).lstrip(".") if block else row.layer
    return block.class_name if block else "", _NUMBER.sub("*", inside)


def _part_name(rows: Sequence[LayerRow], layers: Mapping[str, LayerRow]) -> str:
    """`"mlp.act_fn"`, `"self_attn: 4 Linear"` of the layers of one class below one, `"self_attn itself"`."""
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
    """Its own kind, else that of the nearest layer above that has one."""
    if not row.layer:
        return row.phase
    while row.kind == "other" and (above := layers.get(row.parent or "")):
        row = above
    return row.kind


HOW_TO_GET_PEAKS = (
    "no roofs: what this device can do is not known. Measure it: profiler-wrapper peaks --measure "
    "-o peaks.json, then ProfilerWrapper(peaks='peaks.json') or analyze --peaks peaks.json"
)
_WIDTH_IN, _ROOF_IN, _BAR_IN = 12.0, 5.6, 0.27
_MOST_BARS = 24
_LONGEST_NAME = 30
_BEYOND = 1.02  # of the roof: more is no noise
_SMALLEST, _LARGEST = 40.0, 700.0  # marks, in square points
_LONGEST_NOTE = 150  # a line of it
_MOST_NOT_SHOWN = 3  # parts, by name

_MARKERS = {"forward": "o", "prefill": "o", "decode": "D", "verify": "D", "backward": "s", "recompute": "^"}


def applies(analysis: Analysis) -> bool:
    """Whether there is a layer whose FLOPs are known."""
    return any(row.flops_per_step for row in analysis.layers)


@figures.own_style()
def draw_roofline(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: parts of the model below the roofs of the device; then the time of each, and that at the roof."""
    what = roofline(analysis)
    parts = [root_names(analysis), machine(analysis), rank_in_words(analysis)]
    title = f"Roofline: {', '.join(shorten(clean(part, unicode=True), 60) for part in parts if part)}"
    drawn = [point for point in what.points if point.flops_per_byte is not None and point.flops_per_s is not None]
    if not drawn:
        figures.say(path, title, "No part of the model has both FLOPs and bytes that are known.")
        return
    bars = [point for point in what.points if point.of_roof is not None][:_MOST_BARS]
    heights = [_ROOF_IN, 0.9 + _BAR_IN * len(bars)] if bars else [_ROOF_IN]
    figure = figures.new_figure(0, height_in=sum(heights) + 0.6)
    figure.set_figwidth(_WIDTH_IN)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    figures.head(figure, title)
    _draw_roofs(axes[0], what, drawn)
    if bars:
        _draw_bars(axes[1], bars, analysis)
    notes = use_lines(analysis, _LONGEST_NOTE) if what.flops_per_s else textwrap.wrap(HOW_TO_GET_PEAKS, _LONGEST_NOTE)
    notes += textwrap.wrap(not_shown(what, analysis), _LONGEST_NOTE)
    figures.foot(figure, "\n".join(notes), size=figures.FONT_SIZE - 1)
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)  # sizes of texts are known from here on
    figure.set_layout_engine("none")
    radii = [math.sqrt(size) / 2 for size in _sizes(drawn)]
    name_points(
        axes[0], [(*_coordinates(point), radius, _name(point)) for point, radius in zip(drawn, radii, strict=True)]
    )
    figures.save(figure, path)


def not_shown(what: Roofline, analysis: Analysis) -> str:
    """The parts that have no place under a roof, the longest first, each with its share of the time and why."""
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
    figures.prepare(axes, ylabel="FLOP/s (what a causal mask hides left out)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte moved (each input of an op read once, each output written once)")
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    _set_limits(axes, what, points)
    for dtype, peak in what.flops_per_s.items():
        _draw_roof(axes, dtype, peak, what.bytes_per_s)
    for point, size in zip(points, _sizes(points), strict=True):  # the longest first, so that short ones lie on top
        axes.scatter(*_coordinates(point), s=size, linewidth=1.8, alpha=0.85, zorder=3,
                     **_mark(point.phase, KIND_COLORS.get(point.kind, OTHER_KIND)))  # fmt: skip
    _legend(axes, points, roofs=bool(what.flops_per_s))


def _mark(phase: Phase, color: str) -> dict[str, Any]:
    """How a phase is marked: those of the forward filled, the others by their edge."""
    filled = color if phase in FORWARD_PHASES else "white"
    return {"marker": _MARKERS.get(phase, "X"), "facecolor": filled, "edgecolor": color}


def _sizes(points: Sequence[Point]) -> list[float]:
    """The area of each mark in square points, by its time."""
    longest = max(point.time_ns for point in points)
    return [max(_SMALLEST, _LARGEST * point.time_ns / longest) for point in points]


def _set_limits(axes: Axes, what: Roofline, points: Sequence[Point]) -> None:
    """Room for all points, and for the ridge of the highest roof."""
    across, up = map(list, zip(*map(_coordinates, points), strict=True))
    if what.flops_per_s and what.bytes_per_s:
        across += [peak / what.bytes_per_s for peak in what.flops_per_s.values()]
    up += what.flops_per_s.values()
    axes.set_xlim(min(across) / 4, max(across) * 6)
    axes.set_ylim(min(up) / 4, max(up) * 2.5)


def _draw_roof(axes: Axes, dtype: str, peak: float, bytes_per_s: float | None) -> None:
    left, right = axes.get_xlim()
    low, _ = axes.get_ylim()
    ridge = peak / bytes_per_s if bytes_per_s else left
    line: dict[str, Any] = {"color": figures.INK, "linewidth": 1.6, "zorder": 2}
    axes.plot([max(left, ridge), right], [peak, peak], **line)
    names = [(f"{flop_rate(peak)} {dtype}".rstrip(), right, peak)]
    if bytes_per_s and ridge > left:
        start = max(left, low / bytes_per_s)
        middle = math.sqrt(start * ridge)
        axes.plot([start, ridge], [start * bytes_per_s, peak], **line)
        names.append((f"{bytes_per_s / 1e9:.4g} GB/s", middle, middle * bytes_per_s))
    for name, x, y in names:
        axes.annotate(name, (x, y), (-4, 4), textcoords="offset points", ha="right", va="bottom",
                      fontsize=figures.FONT_SIZE)  # fmt: skip


def _legend(axes: Axes, points: Sequence[Point], *, roofs: bool) -> None:
    from matplotlib.lines import Line2D

    def shown(label: str, marker: str, fill: str, edge: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, markersize=8, markerfacecolor=fill, markeredgecolor=edge,
                      label=label)  # fmt: skip

    phases = dict.fromkeys(point.phase for point in points)
    kinds = dict.fromkeys(point.kind if point.kind in KIND_COLORS else "other" for point in points)
    handles = [shown(phase, *_mark(phase, figures.INK).values()) for phase in phases]
    handles += [shown(kind, "o", color, color) for kind in kinds if (color := KIND_COLORS.get(kind, OTHER_KIND))]
    # Nothing is above the roofs: at the upper left the legend hides no point.
    axes.legend(handles=handles, loc="upper left" if roofs else "best", fontsize=figures.FONT_SIZE - 1, ncols=2)
    figures.entitle(axes, "How fast each part works (like layers together; the larger, the more time)")


def _coordinates(point: Point) -> tuple[float, float]:
    return point.flops_per_byte or 0.0, point.flops_per_s or 0.0


def _name(point: Point) -> str:
    return figures.literal(shorten(clean(point.name, unicode=True), _LONGEST_NAME))


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
