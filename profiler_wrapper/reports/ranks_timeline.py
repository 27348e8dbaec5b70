"""A job of many ranks as a timeline: a lane for each rank, what it did in a few steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.recording.database import Database
from profiler_wrapper.recording.rank_numbers import ranges
from profiler_wrapper.recording.span_table import KINDS
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.ranks_figures import WIDTH_IN, verdict_title
from profiler_wrapper.reports.ranks_lanes import LAYER, Bars, lane_bars, waiting_is_known
from profiler_wrapper.reports.ranks_rows import chosen_ranks, culprits, holders
from profiler_wrapper.reports.ranks_spans import LaneSpans, clocks_in_words, drawn_steps, is_aligned, lane_spans
from profiler_wrapper.reports.span_colors import CULPRIT, SPAN_COLORS
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 32
_TALLEST_IN = 30.0
_FEW_LANES, _MANY_LANES = 12, 64
_PIXELS = 3000  # what lies closer together than a picture this wide shows is drawn as one
_MOST_LABELS = 64
_FRAME, _BAND = 1.8, 0.13
_STEP_PT, _LEGEND_PT = 14, 20  # heights above the axes


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
    shown = drawn_steps(report) if steps is None else list(steps)
    lanes = telling_ranks(report, shown) if ranks is None else list(ranks)
    spans = lane_spans(database, lanes, shown, layer=report.verdict.layer).on_one_axis(is_aligned=is_aligned(report))
    with figures.own_style():
        if not len(spans.rank):
            figures.say(path, report.run, "No span of these ranks lies in these steps.")
            return
        figures.save(timeline_figure(report, spans, lanes, np.unique(spans.step).tolist()), path)


def timeline_figure(report: RanksReport, spans: LaneSpans, lanes: Sequence[int], steps: Sequence[int]) -> Figure:
    """The figure; of its one axes, x is milliseconds and y the place of a rank in `lanes`."""
    figure = figures.new_figure(100, height_in=1.6 + lane_in(len(lanes)) * max(3, len(lanes)))
    figure.set_figwidth(WIDTH_IN)
    verdict_title(figure, report)
    axes = figure.subplots()
    first = int(spans.start_ns.min())
    gap_ns = float((spans.start_ns + spans.duration_ns).max() - first) / _PIXELS
    named = culprits(report)
    for place, rank in enumerate(lanes):
        if rank in named:
            axes.axhspan(place - 0.5, place + 0.5, color=CULPRIT, alpha=_BAND, linewidth=0, zorder=0, gid="culprit")
    bars = lane_bars(spans, lanes, gap_ns, named=named)
    for above, one in enumerate(bars):
        _draw(axes, one, first, gap_ns, len(lanes), zorder=1.5 + 0.1 * above)
    _mark_steps(axes, spans, first)
    held = _mark_holders(axes, report, spans, lanes, first)
    _name_lanes(axes, report, lanes)
    _finish(axes, report, spans, lanes, steps)
    _legend(axes, report, {one.kind for one in bars}, waiting_is_known(spans), held)
    return figure


def telling_ranks(report: RanksReport, steps: Sequence[int]) -> list[int]:
    """The ranks of the lanes where nobody chose them: all, or those of many that tell most; a slow stage's together."""
    ranks = chosen_ranks(report, MOST_LANES, also=holders(report, steps).values())
    if report.verdict.verdict != "stage":
        return ranks
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    return sorted(ranks, key=lambda rank: (stages[rank], rank))


def lane_in(lanes: int) -> float:
    """Inches of a lane: of many it is thin, so that the picture stays one."""
    if lanes <= _FEW_LANES:
        return min(0.5, max(0.32, 3.2 / lanes))
    return 0.22 if lanes <= _MANY_LANES else max(0.02, min(0.22, _TALLEST_IN / lanes, 0.22 * _MANY_LANES / lanes))


def _draw(axes: Axes, bars: Bars, first: int, gap_ns: float, lanes: int, *, zorder: float) -> None:
    """Bars of one kind, or frames. Thin lanes touch, so that no pattern of gaps is seen."""
    from matplotlib.collections import PolyCollection

    framed, thin = bars.kind == LAYER, lanes > _MANY_LANES
    half = 0.5 if thin else 0.4
    left = (bars.start_ns - first) / 1e6
    right = left + np.maximum(bars.end_ns - bars.start_ns, 0 if framed else gap_ns) / 1e6
    low, high = bars.lane - half, bars.lane + half
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    collection = PolyCollection(
        list(corners),
        facecolors="none" if framed else SPAN_COLORS[bars.kind],
        edgecolors=CULPRIT if framed else "none",
        linewidths=_FRAME if framed else 0,
        antialiaseds=not thin,
        zorder=zorder,
    )
    collection.set_gid(bars.kind)
    axes.add_collection(collection)


def _mark_steps(axes: Axes, spans: LaneSpans, first: int) -> None:
    """A line where each step begins."""
    for step, begin_ns in spans.step_begins_ns().items():
        at = (begin_ns - first) / 1e6
        axes.axvline(at, color=figures.INK, linewidth=0.9, linestyle=":", zorder=6)
        axes.annotate(
            f"step {step}",
            (at, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, 3),
            textcoords="offset points",
            fontsize=figures.FONT_SIZE - 1,
        )


def _mark_holders(axes: Axes, report: RanksReport, spans: LaneSpans, lanes: Sequence[int], first: int) -> bool:
    """Where another rank holds up each step: a frame around that rank's step."""
    drawn = False
    for step, rank in holders(report, np.unique(spans.step).tolist()).items():
        extent = spans.extent_ns(rank, step)
        if rank in lanes and extent is not None:
            begin, end = extent
            axes.broken_barh(
                [((begin - first) / 1e6, (end - begin) / 1e6)],
                (list(lanes).index(rank) - 0.47, 0.94),
                facecolor="none",
                edgecolor=CULPRIT,
                linewidth=_FRAME,
                zorder=7,
                gid="holder",
            )
            drawn = True
    return drawn


def _name_lanes(axes: Axes, report: RanksReport, lanes: Sequence[int]) -> None:
    """Names at the left, so many as can be read; of those that are named always."""
    named = culprits(report)
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    staged = len(set(stages.values())) > 1
    apart = -(-len(lanes) // _MOST_LABELS)
    marked = [place for place, rank in enumerate(lanes) if rank in named]
    marked = marked[:: -(-len(marked) // 16)] if apart > 1 and marked else marked
    places = [
        place
        for place in range(len(lanes))
        if place in marked or (place % apart == 0 and all(abs(place - one) >= apart for one in marked))
    ]
    labels = [f"rank {lanes[place]}" + (f", stage {stages.get(lanes[place], 0)}" if staged else "") for place in places]
    axes.set_yticks(places, labels, fontsize=figures.FONT_SIZE - 1)
    if len(lanes) > _MANY_LANES and marked:
        at_the_right = axes.get_yaxis_transform()
        axes.plot([1.0] * len(marked), marked, "<", color=CULPRIT, transform=at_the_right, clip_on=False, gid="culprit")
    for place, label in zip(places, axes.get_yticklabels(), strict=True):
        if lanes[place] in named:
            label.set_color(CULPRIT)
            label.set_fontweight("bold")


def _finish(axes: Axes, report: RanksReport, spans: LaneSpans, lanes: Sequence[int], steps: Sequence[int]) -> None:
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.margins(x=0.005)
    axes.autoscale_view(scaley=False)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    axes.set_xlabel(f"ms, {clocks_in_words(report, spans)}", fontsize=figures.FONT_SIZE)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    title = f"{what_is_drawn(report, lanes, steps)}; {steps_in_words(report, steps)}"
    axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE, pad=_STEP_PT + _LEGEND_PT + 4)


def what_is_drawn(report: RanksReport, lanes: Sequence[int], steps: Sequence[int]) -> str:
    """Of which ranks there are lanes."""
    count = len(report.own.ranks)
    if len(lanes) >= count:
        return f"All {count:,} ranks" if count > 1 else "One rank"
    by_us = list(lanes) == telling_ranks(report, steps)
    staged = "some of each stage, " if len(np.unique(report.own.stages)) > 1 else ""
    why = f": those named or suspected, {staged}others evenly spread" if by_us else ""
    return f"{len(lanes):,} of {count:,} ranks{why}"


def steps_in_words(report: RanksReport, steps: Sequence[int]) -> str:
    of = f"{len(steps)} of {len(report.own.steps):,}"
    return f"step{'s' if len(steps) > 1 else ''} {ranges(steps)} ({of})"


def _legend(axes: Axes, report: RanksReport, kinds: set[str], waiting_known: bool, held: bool) -> None:
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    order = [kind for kind in (*KINDS[1:6], "waiting", *KINDS[6:]) if kind in kinds]
    names = {"waiting": "waiting for others", "gc": "garbage collection"}
    if not waiting_known:
        names["communication"] = "communication, with waiting"
    handles = [Patch(facecolor=SPAN_COLORS[kind], label=names.get(kind, kind)) for kind in order]
    if LAYER in kinds and report.verdict.layer is not None:
        name = figures.literal(shorten(clean(report.verdict.layer, unicode=True), 40))
        handles.append(Patch(facecolor="none", edgecolor=CULPRIT, linewidth=_FRAME, label=name))
    if report.verdict.cause in ("late collective", "other") and report.verdict.rank is not None:
        label = f"rank {report.verdict.rank} in no span"
        handles.append(Patch(facecolor=CULPRIT, alpha=_BAND, label=label))
    if held:
        label = "longest of its step"
        handles.append(Patch(facecolor="none", edgecolor=CULPRIT, linewidth=_FRAME, label=label))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.005, 1.0),
        bbox_transform=axes.transAxes + ScaledTranslation(0, _STEP_PT / 72, axes.figure.dpi_scale_trans),
        borderaxespad=0.2,
        columnspacing=1.4,
        ncols=12,
        frameon=False,
        fontsize=figures.FONT_SIZE - 1,
    )
