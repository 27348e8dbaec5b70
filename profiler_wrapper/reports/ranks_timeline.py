"""A job of many ranks as a timeline: a lane for each rank, what it did in a few steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.recording.span_database import Database
from profiler_wrapper.recording.span_table import KINDS
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.ranks_figures import verdict_title
from profiler_wrapper.reports.ranks_rows import chosen_ranks, culprits
from profiler_wrapper.reports.ranks_spans import LaneSpans, drawn_steps, lane_spans, merged
from profiler_wrapper.reports.span_colors import CULPRIT, SPAN_COLORS
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 32
_LANE_IN = 0.3
_PIXELS = 3000  # what lies closer together than a picture this wide shows is drawn as one


def draw_timeline(
    report: RanksReport,
    database: Database,
    path: str | os.PathLike[str],
    *,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """Writes the PNG: a lane for each rank, what it did in a few steps, by aligned clocks.

    Args:
        ranks: of the lanes; None: all, or of many those that tell most.
        steps: that are drawn; None: three that are like most.

    Raises:
        OSError: it cannot be written.
    """
    lanes = chosen_ranks(report, MOST_LANES) if ranks is None else list(ranks)
    shown = drawn_steps(report) if steps is None else list(steps)
    spans = lane_spans(database, lanes, shown, layer=report.verdict.layer)
    with figures.own_style():
        if not len(spans.rank):
            figures.say(path, report.run, "No span of these ranks lies in these steps.")
            return
        figures.save(timeline_figure(report, spans, lanes, shown), path)


def timeline_figure(report: RanksReport, spans: LaneSpans, lanes: Sequence[int], steps: Sequence[int]) -> Figure:
    """The figure; of its one axes, x is milliseconds and y the place of a rank in `lanes`."""
    figure = figures.new_figure(100, height_in=2.0 + _LANE_IN * max(3, len(lanes)))
    verdict_title(figure, report)
    axes = figure.subplots()
    first = int(spans.start_ns.min())
    gap_ns = float((spans.start_ns + spans.duration_ns).max() - first) / _PIXELS
    named = culprits(report)
    used: set[str] = set()
    for place, rank in enumerate(lanes):
        mine = spans.of_rank(rank)
        if rank in named:
            axes.axhspan(place - 0.5, place + 0.5, color=CULPRIT, alpha=0.13, linewidth=0, zorder=0, gid="culprit")
        for kind in KINDS[1:]:
            used |= {kind} if _draw_kind(axes, mine, kind, place, first, gap_ns) else set()
        if rank in named and mine.is_marked.any():
            _outline(axes, mine, place, first, gap_ns)
    _mark_steps(axes, report, steps, first)
    _finish_timeline(axes, report, lanes, steps, used)
    return figure


def _draw_kind(axes: Axes, spans: LaneSpans, kind: str, place: int, first: int, gap_ns: float) -> bool:
    """Draws a rank's spans of one kind; what lies within others, or is short, above them."""
    chosen = spans.kind == KINDS.index(kind)
    if kind not in ("communication", "gc", "checkpoint", "data", "recompute"):
        chosen &= spans.depth == 0
    if not chosen.any():
        return False
    if kind == "communication":  # beside the main thread it shows where nothing else runs
        above = spans.on_main & (spans.depth > 0)
        parts = [(chosen & ~above, 1.5), (chosen & above, 4.0)]
    else:
        parts = [(chosen, 5.0 if kind == "gc" else 3.0 if kind in ("data", "checkpoint", "recompute") else 2.0)]
    for part, height in parts:
        start, end = merged(spans.start_ns[part], (spans.start_ns + spans.duration_ns)[part], gap_ns)
        ranges = [
            ((low - first) / 1e6, max(high - low, gap_ns) / 1e6)
            for low, high in zip(start.tolist(), end.tolist(), strict=True)
        ]
        if ranges:
            axes.broken_barh(
                ranges, (place - 0.38, 0.76), facecolor=SPAN_COLORS[kind], linewidth=0, zorder=height, gid=kind
            )
    return True


def _outline(axes: Axes, spans: LaneSpans, place: int, first: int, gap_ns: float) -> None:
    """A frame around the layer that the verdict names."""
    part = spans.is_marked
    start, end = merged(spans.start_ns[part], (spans.start_ns + spans.duration_ns)[part], 3 * gap_ns)
    ranges = [((low - first) / 1e6, (high - low) / 1e6) for low, high in zip(start.tolist(), end.tolist(), strict=True)]
    axes.broken_barh(
        ranges, (place - 0.38, 0.76), facecolor="none", edgecolor=CULPRIT, linewidth=1.8, zorder=6, gid="layer"
    )


def _mark_steps(axes: Axes, report: RanksReport, steps: Sequence[int], first: int) -> None:
    """A line where each step begins: at the median over ranks."""
    own = report.own
    places = {step: at for at, step in enumerate(own.steps.tolist())}
    for step in steps:
        begins = own.begin_ns[places[step]] if step in places else np.zeros(0)
        begins = begins[np.isfinite(begins)]
        if len(begins):
            at = (float(np.median(begins)) - first) / 1e6
            axes.axvline(at, color=figures.INK, linewidth=0.9, linestyle=":", zorder=6)
            axes.text(
                at,
                1.005,
                f" step {step}",
                transform=axes.get_xaxis_transform(),
                fontsize=figures.FONT_SIZE - 1,
                va="bottom",
            )


def _finish_timeline(
    axes: Axes, report: RanksReport, lanes: Sequence[int], steps: Sequence[int], used: set[str]
) -> None:
    from matplotlib.patches import Patch

    named = culprits(report)
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    staged = len(set(stages.values())) > 1
    labels = [f"rank {rank}" + (f", stage {stages.get(rank, 0)}" if staged else "") for rank in lanes]
    axes.set_yticks(range(len(lanes)), labels, fontsize=figures.FONT_SIZE - 1)
    for rank, label in zip(lanes, axes.get_yticklabels(), strict=True):
        if rank in named:
            label.set_color(CULPRIT)
            label.set_fontweight("bold")
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.margins(x=0.005)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    axes.set_xlabel(
        "ms, clocks aligned" if report.clocks is not None and report.clocks.source != "none" else "ms",
        fontsize=figures.FONT_SIZE,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [Patch(facecolor=SPAN_COLORS[kind], label=_legend(kind)) for kind in KINDS if kind in used]
    layer = report.verdict.layer
    if layer is not None and named:
        name = shorten(clean(layer, unicode=True), 40)
        handles.append(Patch(facecolor="none", edgecolor=CULPRIT, linewidth=1.8, label=figures.literal(name)))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.4 / (0.6 + _LANE_IN * max(3, len(lanes)))),
        ncols=10,
        frameon=False,
        fontsize=figures.FONT_SIZE - 1,
    )
    if len(lanes) < len(report.own.ranks):
        title = f"{len(lanes)} of {len(report.own.ranks)} ranks: those that are named or suspected, some of each stage"
        axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE, pad=20)


def _legend(kind: str) -> str:
    return "communication, with waiting" if kind == "communication" else kind
