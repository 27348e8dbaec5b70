"""A job of many ranks as heat maps: who takes longer than its like, for what, and in which block."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.lanes import (
    LAYER,
    Bars,
    LaneSpans,
    clocks_in_words,
    drawn_steps,
    is_aligned,
    lane_bars,
    lane_spans,
    waiting_is_known,
)
from profiler_wrapper.ranks.model import Float, Int, RanksReport
from profiler_wrapper.ranks.rows import (
    Mesh,
    beyond_typical,
    binned,
    chosen_ranks,
    column_firsts,
    culprits,
    holders,
    layers_beyond,
    mesh,
)
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.figures import PHASE_COLORS, SPLIT_COLORS
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.trace.spans import KINDS, ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


# --------------------------------------------------------------------------------------------------
# The colours of kinds of spans: phases as in every picture; waiting is pale, so that who does not wait stands out.
#
# Told apart with any colour vision: those of Okabe and Ito, "Color Universal Design" (2008), where they have one.

SPAN_COLORS: Mapping[str, str] = {
    "data": SPLIT_COLORS["dataloader"],
    "forward": PHASE_COLORS["forward"],
    "recompute": PHASE_COLORS["recompute"],
    "backward": PHASE_COLORS["backward"],
    "communication": "#56B4E9",  # the transfer, where that is known
    "waiting": "#E3E3E3",  # for others, within communication
    "optimizer": PHASE_COLORS["optimizer"],
    "gc": "#000000",
    "checkpoint": SPLIT_COLORS["memcpy"],
    "other": PHASE_COLORS["other"],
}
CULPRIT = "#C00000"  # marks whom the verdict names


# --------------------------------------------------------------------------------------------------
# How much of its device each rank uses: peak memory and MFU, as bars beside the heat maps.

USE_IN = 1.9  # the height of its axes
_BAR = "#7C8794"
_GIB, _MIB = 2**30, 2**20


class Use(NamedTuple):
    """One number of each rank."""

    name: str
    unit: str
    values: Float  # (R,) in the unit; nan: not known
    is_worse: str  # "high" or "low": which of several ranks a column shows


def uses_of_ranks(report: RanksReport) -> list[Use]:
    """Peak memory and MFU, as far as any rank's is known."""
    found = []
    if report.peak_bytes is not None:
        size, unit = (_GIB, "GiB") if np.nanmax(report.peak_bytes) >= _GIB / 2 else (_MIB, "MiB")
        found.append(Use("Peak memory allocated", unit, report.peak_bytes / size, "high"))
    if report.mfu is not None:
        found.append(Use("MFU", "%", 100 * report.mfu, "low"))
    return found


def unknown_uses(report: RanksReport) -> str:
    """What is not known of them, and why; empty where all is."""
    if report.peak_unknown is not None and report.peak_unknown == report.mfu_unknown:
        return f"Peak memory and MFU are not known: {report.peak_unknown}"
    told = [("Peak memory", report.peak_unknown), ("MFU", report.mfu_unknown)]
    return "; ".join(f"{what} is not known: {why}" for what, why in told if why is not None)


def draw_use(axes: Axes, use: Use, firsts: Int, marked: Sequence[int]) -> None:
    """A bar for each column of ranks; those that hold a rank that is named are red, a line is at the median."""
    parts = np.split(use.values, firsts[1:])
    pick = np.max if use.is_worse == "high" else np.min
    heights = [float(pick(part[np.isfinite(part)])) if np.isfinite(part).any() else np.nan for part in parts]
    colors = [CULPRIT if at in set(marked) else _BAR for at in range(len(firsts))]
    axes.bar(range(len(firsts)), heights, width=0.86 if len(firsts) <= 128 else 1.0, color=colors, gid=use.name)
    middle = float(np.nanmedian(use.values))
    axes.axhline(middle, color=figures.INK, linewidth=0.9, linestyle="--")
    axes.set_xlim(-0.5, len(firsts) - 0.5)
    axes.set_ylim(0, max(1.15 * float(np.nanmax(heights)), 1e-9))
    axes.set_ylabel(use.unit, fontsize=figures.FONT_SIZE)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    each = int(firsts[1]) if len(firsts) > 1 else 1
    title = f"{use.name}, {use.unit}: median {middle:.3g}"
    if each > 1:
        title += f" ({each} ranks a column: the {use.is_worse}est)"
    axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE + 1, fontweight="bold", pad=14)


WIDTH_IN = 14.0  # of all pictures of many ranks
MOST_COLUMNS = 256  # of a heat map; more ranks are put together
_MOST_BLOCKS = 64
_FEW_CELLS, _FEW_RANKS = 160, 16  # up to here the numbers stand in them
_ROW_IN = 0.26
_LETTERS = 110
_LEAST_SHARE = 0.05  # of a step: a difference of less never gets the darkest colour
_BLANK = "#ECECEC"


def draw_heat_map(report: RanksReport, path: str | os.PathLike[str]) -> None:
    """Writes the PNG: ranks by kinds of time, by blocks of the model, and the mesh where it is known.

    Raises:
        OSError: it cannot be written.
    """
    with figures.own_style():
        if not len(report.own.ranks):
            figures.say(path, report.run, "No rank has a step.")
            return
        figures.save(heat_map_figure(report), path)


def heat_map_figure(report: RanksReport) -> Figure:
    """The figure; axes are kinds, then blocks and mesh where there are any, then memory and MFU where known."""
    kinds, of_kinds = _kinds(report)
    blocks, of_blocks = layers_beyond(report)
    blocks, of_blocks = _most_telling(blocks, of_blocks)
    grid, uses = mesh(report), uses_of_ranks(report)
    rows = [len(kinds), *([len(blocks)] if blocks else []), *([len(grid.rows)] if grid else [])]
    heights = [1.1 + _ROW_IN * max(2, min(count, 32)) for count in rows] + [USE_IN] * len(uses)
    figure = figures.new_figure(100, height_in=1.0 + sum(heights))
    figure.set_figwidth(WIDTH_IN)
    verdict_title(figure, report)
    all_axes = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    title = "Own time beyond that of the typical rank, ms per step"
    _heat(figure, all_axes.pop(0), report, kinds, of_kinds, title)
    if blocks:
        title = "Forward and backward of blocks beyond that of others, ms per step"
        _heat(figure, all_axes.pop(0), report, blocks, of_blocks, title, parts=len(blocks))
    if grid:
        _draw_mesh(figure, all_axes.pop(0), grid)
    for use, axes in zip(uses, all_axes, strict=True):
        firsts = column_firsts(len(report.own.ranks), MOST_COLUMNS)
        draw_use(axes, use, firsts, marked_columns(report, firsts))
        _name_ranks(axes, report, firsts)
    if unknown := unknown_uses(report):
        figure.supxlabel(
            figures.literal(shorten(unknown, 2 * _LETTERS)), fontsize=figures.FONT_SIZE - 1, x=0.01, ha="left"
        )
    return figure


def _step_ms(report: RanksReport) -> float:
    known = report.own.wall_ns[np.isfinite(report.own.wall_ns)]
    return float(np.median(known)) / 1e6 if len(known) else 0.0


def _kinds(report: RanksReport) -> tuple[list[str], Float]:
    """Kinds that a step has, and what ranks take longer for each."""
    beyond, own = beyond_typical(report), report.own
    used = [at for at in range(len(own.kinds)) if np.nansum(np.abs(own.own_ns[:, :, at])) > 0]
    return [own.kinds[at] for at in used], beyond[:, used]


def _most_telling(names: list[str], values: Float) -> tuple[list[str], Float]:
    """At most so many rows, in the order that they have: those that differ most."""
    if len(names) <= _MOST_BLOCKS:
        return names, values
    widest = np.nan_to_num(np.abs(values)).max(axis=0)
    kept = np.sort(np.argsort(-widest, kind="stable")[:_MOST_BLOCKS])
    return [names[at] for at in kept.tolist()], values[:, kept]


def _heat(
    figure: Figure, axes: Axes, report: RanksReport, names: Sequence[str], values: Float, title: str, *, parts: int = 1
) -> None:
    firsts, cells = binned(values, MOST_COLUMNS)
    widest = max(float(np.nanmax(np.abs(cells), initial=0.0)), _LEAST_SHARE * _step_ms(report) / parts) or 1.0
    axes.set_facecolor(_BLANK)
    image = axes.imshow(cells.T, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-widest, vmax=widest)
    _name_ranks(axes, report, firsts)
    _name_rows(axes, [shorten(clean(name, unicode=True), 40) for name in names])
    if cells.size <= _FEW_CELLS and len(cells) <= _FEW_RANKS:
        _write_numbers(axes, cells.T, lambda value: abs(value) > 0.62 * widest, least=widest / 20)
    else:
        _tell_largest(axes, cells.T, least=_LEAST_SHARE * _step_ms(report) / parts)
    _color_bar(figure, axes, image)
    each = int(firsts[1] - firsts[0]) if len(firsts) < len(values) else 1
    if each > 1:
        title += f" ({each} ranks a column: the one farthest from 0)"
    axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE + 1, fontweight="bold", pad=14)


def _color_bar(figure: Figure, axes: Axes, image: AxesImage) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=figures.FONT_SIZE - 2)
    bar.set_label("ms", fontsize=figures.FONT_SIZE - 2)


def _tell_largest(axes: Axes, cells: Float, *, least: float) -> None:
    """The number of the cell that is highest, beside it, where that is much."""
    known = np.where(np.isfinite(cells), cells, -np.inf)
    row, column = np.unravel_index(int(known.argmax()), cells.shape)
    if not known[row, column] >= max(least, 1e-9):
        return
    is_right = column < 0.8 * cells.shape[1]
    axes.annotate(
        f"+{_short(float(known[row, column]))} ms",
        (float(column) + (0.5 if is_right else -0.5), float(row)),
        xytext=(5 if is_right else -5, 0),
        textcoords="offset points",
        ha="left" if is_right else "right",
        va="center",
        fontsize=figures.FONT_SIZE,
        fontweight="bold",
        color=CULPRIT,
        gid="largest",
    )


def marked_columns(report: RanksReport, firsts: Int) -> list[int]:
    """Columns with a rank that the verdict names; `firsts`: the place of the first rank of each column."""
    named = np.isin(report.own.ranks, sorted(culprits(report)))
    places = np.searchsorted(firsts, np.flatnonzero(named), side="right") - 1
    return [int(place) for place in np.unique(places)]


def _name_ranks(axes: Axes, report: RanksReport, firsts: Int) -> None:
    """Numbers below the columns; a red mark above those that the verdict names."""
    from matplotlib.transforms import ScaledTranslation

    ranks = report.own.ranks
    apart = max(1, len(firsts) // 32)
    named = np.isin(ranks, sorted(culprits(report)))
    marked = marked_columns(report, firsts)
    ticks = [at for at in range(0, len(firsts), apart) if all(abs(at - one) >= apart for one in marked[:4])]
    ticks = sorted({*ticks, *marked[:4]})
    labels = [_rank_label(ranks, firsts, at, named) for at in ticks]
    axes.set_xticks(ticks, labels, fontsize=figures.FONT_SIZE - 1)
    for at, label in zip(ticks, axes.get_xticklabels(), strict=True):
        if at in marked:
            label.set_color(CULPRIT)
            label.set_fontweight("bold")
    axes.set_xlabel("rank", fontsize=figures.FONT_SIZE)
    if not marked:
        return  # a line without points, in these units, takes the layout's room from everything
    size = 8 if len(marked) < 20 else 4
    lift = ScaledTranslation(0, 6 / 72, axes.figure.dpi_scale_trans)
    upper = axes.get_xaxis_transform() + lift  # columns as x; 6 points above the axes as y
    axes.plot(
        marked, [1.0] * len(marked), "v", color=CULPRIT, markersize=size, clip_on=False, transform=upper, gid="culprit"
    )


def _rank_label(ranks: Int, firsts: Int, column: int, named: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    """The first rank of a column, or the one in it that is named."""
    end = int(firsts[column + 1]) if column + 1 < len(firsts) else len(ranks)
    inside = np.flatnonzero(named[int(firsts[column]) : end])
    return str(int(ranks[int(firsts[column]) + (int(inside[0]) if len(inside) else 0)]))


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    apart = max(1, -(-len(names) // 32))
    ticks = range(0, len(names), apart)
    labels = [figures.literal(names[at]) for at in ticks]
    axes.set_yticks(list(ticks), labels, fontsize=figures.FONT_SIZE - 1)


def _write_numbers(axes: Axes, cells: Float, is_dark, *, least: float) -> None:  # type: ignore[no-untyped-def]
    for row, column in np.argwhere(np.isfinite(cells)).tolist():
        value = float(cells[row, column])
        if abs(value) < least:
            continue
        color = "white" if is_dark(value) else figures.INK
        axes.text(column, row, _short(value), ha="center", va="center", fontsize=figures.FONT_SIZE - 2, color=color)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def _draw_mesh(figure: Figure, axes: Axes, grid: Mesh) -> None:
    from matplotlib.patches import Rectangle

    least, most = float(np.nanmin(grid.own_ms)), float(np.nanmax(grid.own_ms))
    axes.set_facecolor(_BLANK)
    image = axes.imshow(
        grid.own_ms, aspect="auto", interpolation="nearest", cmap="viridis", vmin=min(least, 0.5 * most), vmax=most
    )
    every = max(1, len(grid.columns) // 32)
    axes.set_xticks(
        range(0, len(grid.columns), every),
        [str(one) for one in grid.columns[::every].tolist()],
        fontsize=figures.FONT_SIZE - 1,
    )
    _name_rows(axes, [str(one) for one in grid.rows.tolist()])
    axes.set_xlabel({"stage": "pipeline stage"}.get(grid.across, grid.across), fontsize=figures.FONT_SIZE)
    axes.set_ylabel({"dp": "data parallel"}.get(grid.down, grid.down), fontsize=figures.FONT_SIZE)
    if grid.own_ms.size <= _FEW_CELLS:
        floor = min(least, 0.5 * most)
        _write_numbers(axes, grid.own_ms, lambda value: value < floor + 0.6 * (most - floor), least=0.0)
    _color_bar(figure, axes, image)
    title = "Own time of a step over the mesh, ms"
    axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE + 1, fontweight="bold", pad=8)
    for row, column in grid.named:
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=CULPRIT, linewidth=3, gid="culprit"))


def verdict_title(figure: Figure, report: RanksReport) -> None:
    """The verdict as the title of a figure, in red where somebody is to blame."""
    text = shorten(clean(report.verdict.sentence, unicode=True), 3 * _LETTERS, ellipsis="…")
    letters = int(10.4 * figure.get_figwidth())
    lines = textwrap.wrap(text, letters) or [""]
    color = figures.INK if report.verdict.verdict == "none" else CULPRIT
    figure.suptitle(
        figures.literal("\n".join(lines)),
        fontsize=figures.FONT_SIZE + 2,
        fontweight="bold",
        color=color,
        x=0.01,
        ha="left",
    )


# --------------------------------------------------------------------------------------------------
# A job of many ranks as a timeline: a lane for each rank, what it did in a few steps.

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
