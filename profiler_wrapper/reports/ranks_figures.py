"""A job of many ranks as heat maps: who takes longer than its like, for what, and in which block."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.ranks.model import Float, Int, RanksReport
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.ranks_rows import (
    Mesh,
    beyond_typical,
    binned,
    column_firsts,
    culprits,
    layers_beyond,
    mesh,
)
from profiler_wrapper.reports.ranks_use import USE_IN, draw_use, unknown_uses, uses_of_ranks
from profiler_wrapper.reports.span_colors import CULPRIT
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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
