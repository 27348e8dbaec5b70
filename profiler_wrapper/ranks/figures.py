"""What is drawn of a job of many ranks: heat maps of who takes longer than others for what, the timeline, the page."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.model import Float, Int, LayerTimes
from profiler_wrapper.ranks.report import RanksReport, layers_over_ranks
from profiler_wrapper.ranks.text import memory_unit
from profiler_wrapper.ranks.timeline import LAYER, Bars, Timeline, drawn_steps, read_timeline
from profiler_wrapper.ranks.times import comparable, typical
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.figures import PHASE_COLORS, SPLIT_COLORS
from profiler_wrapper.reports.page import page_text
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.tables.statistics import mean, median, outliers
from profiler_wrapper.trace.spans import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


# --------------------------------------------------------------------------------------------------
# The colours of kinds of spans: phases as in every picture; waiting is pale, so that who does not wait stands out.
#
# Told apart with any colour vision: those of Okabe and Ito, "Color Universal Design" (2008), where they have one.

_COLORS = {
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
SPAN_COLORS: Mapping[str, str] = {**_COLORS, **{kind: _COLORS["other"] for kind in KINDS[1:] if kind not in _COLORS}}
NAMED_COLOR = "#C00000"  # marks whom the verdict names


_WIDTH_IN = 14.0  # of all pictures of many ranks
MOST_COLUMNS = 256  # of a heat map; more ranks are put together
_FEW_CELLS, _FEW_RANKS = 160, 16  # up to here the numbers stand in them
_ROW_IN, _USE_IN = 0.26, 1.9  # of a row, and of the bars of memory or MFU
_LEAST_SHARE = 0.05  # of a step: a difference of less never gets the darkest colour
_WHOLE_MODEL = 0.9  # of the time of all other layers: a layer with so much is the model itself
_BLOCK = re.compile(r"(?:(?!\d+\.)[^.]*\.)+\d+")  # its name ends in its first number: `model.layers.3`


# --- What heat maps show, as plain numbers ---


class HeatMap(NamedTuple):
    """Milliseconds per step: of ranks beyond what is typical, or of two of their coordinates."""

    title: str
    across: str  # what the columns are: "rank", or a coordinate
    down: str
    ranks: Int  # the first of each column, or numbers of its coordinate
    rows: tuple[str, ...]
    values_ms: Float  # (rows, columns); nan: not known, or no such rank
    least_ms: float = 0.0  # a difference of less never gets the darkest colour
    named: tuple[tuple[int, int], ...] = ()  # (row, column) of the ranks that the verdict names, of coordinates

    @property
    def is_difference(self) -> bool:
        return self.across == "rank"


def heat_maps(report: RanksReport) -> list[HeatMap]:
    """Ranks by kinds of time, by blocks of the model, and the mesh where it is known."""
    own = report.own
    used = [at for at in range(len(own.kinds)) if np.nansum(np.abs(own.self_ns[:, :, at])) > 0]
    blocks, of_blocks = layers_beyond(report)
    least_ms = _LEAST_SHARE * float(np.nan_to_num(median(own.wall_ns.reshape(-1)))) / 1e6
    kinds = [own.kinds[at] for at in used]
    found = []
    for title, names, values, least in (
        ("Self time beyond that of the typical rank", kinds, beyond_typical(report)[:, used], least_ms),
        ("Forward and backward of blocks beyond that of others", blocks, of_blocks, least_ms / max(1, len(blocks))),
    ):
        if names:
            firsts, cells = binned(values, MOST_COLUMNS)
            ranks = own.ranks[firsts]
            found.append(HeatMap(f"{title}, ms per step", "rank", "", ranks, tuple(names), cells.T, least))
    return [*found, *_mesh(report)]


def _mesh(report: RanksReport) -> list[HeatMap]:
    """Own work over data parallel rank and pipeline stage; nothing where a job has not both, nor several stages.

    The rest of the coordinates are averaged.
    """
    own = report.own
    stages, dp = np.unique(own.stages), report.coordinates.get("dp")
    if len(stages) < 2 and (dp is None or "tp" not in report.coordinates):
        return []
    across, columns_of = ("stage", own.stages) if len(stages) > 1 else ("tp", report.coordinates["tp"])
    within = np.array([np.sum(own.stages[:at] == stage) for at, stage in enumerate(own.stages)])  # its stage
    down, rows_of = ("dp", dp) if dp is not None else ("rank in stage", within)
    rows, columns = np.unique(rows_of), np.unique(columns_of)
    work = mean(report.steady.self_ns.sum(axis=2)) / 1e6
    cells = [[float(mean(work[(rows_of == row) & (columns_of == column)])) for column in columns] for row in rows]
    of_named = np.flatnonzero(np.isin(own.ranks, sorted(report.named_ranks)))
    named = {(int(rows.searchsorted(rows_of[at])), int(columns.searchsorted(columns_of[at]))) for at in of_named}
    title, names = "Self time of a step over the mesh, ms per step", tuple(map(str, rows.tolist()))
    return [HeatMap(title, across, down, columns, names, np.array(cells), named=tuple(sorted(named)))]


def beyond_typical(report: RanksReport) -> Float:
    """What each rank takes longer than the typical one, (R, K) in ms per step: the mean over steps; nan: not known.

    Compared with the ranks of its stage; where one rank is all of it, or the verdict names a stage, with all ranks.
    """
    own = report.steady
    times = own.self_ns
    groups = comparable(own)
    if report.verdict.verdict == "stage" or all(len(group) < 2 for group in groups):
        groups = [np.arange(len(own.ranks))]
    beyond = np.full(times.shape, np.nan)
    for group in groups:
        beyond[:, group] = times[:, group] - typical(times[:, group], axis=1)[:, None]
    return mean(beyond) / 1e6


def blocks(layers: LayerTimes) -> list[int]:
    """Places of the layers that make up the model without counting anything twice.

    Those are its numbered blocks, and of what is in none of them the layers that hold no other.
    """
    names = layers.layers
    within = {name: {name[:at] for at, letter in enumerate(name) if letter == "."} for name in names}
    holders = set().union(*within.values())
    numbered = {name for name in names if _BLOCK.fullmatch(name)}
    if len(numbered) < 2:
        numbered = set()
    found = [
        at for at, name in enumerate(names) if name in numbered or (name not in holders and not within[name] & numbered)
    ]
    total = np.nansum(layers.self_ns, axis=(0, 2))
    whole = total[found].sum()
    return [at for at in found if "." in names[at] or len(found) == 1 or total[at] < _WHOLE_MODEL * (whole - total[at])]


def layers_beyond(report: RanksReport) -> tuple[list[str], Float]:
    """Names of blocks and what each takes longer on a rank than on the others that have it, (R, L) in ms per step."""
    layers, ranks = report.layers, report.own.ranks
    if layers is None or not len(layers.layers):
        return [], np.zeros((len(ranks), 0))
    places = blocks(layers)
    times = layers.all_phases_ns[:, places]
    beyond = np.full((len(ranks), len(places)), np.nan)
    shared = np.isfinite(times).sum(axis=0) > 1
    beyond[np.searchsorted(ranks, layers.ranks)] = np.where(shared, times - typical(times, axis=0), np.nan)
    return [layers.layers[place] for place in places], beyond / 1e6


def column_firsts(count: int, most: int) -> Int:
    """The first of so many rows that each of at most `most` columns holds."""
    return np.arange(0, count, max(1, -(-count // most)))


def binned(values: Float, most: int) -> tuple[Int, Float]:
    """Rows put together to at most `most`: (first row of each, the value in it that is farthest from 0).

    So one that stands out of thousands still shows.
    """
    firsts = column_firsts(len(values), most)
    highest, lowest = np.fmax.reduceat(values, firsts), np.fmin.reduceat(values, firsts)
    return firsts, np.where(highest >= -lowest, highest, lowest)


# --- The picture of heat maps ---


def draw_heat_map(report: RanksReport, path: str | os.PathLike[str]) -> None:
    """Writes the PNG: ranks by kinds of time, by blocks of the model, and the mesh where it is known."""
    with figures.own_style():
        if not np.nansum(report.own.self_ns) > 0:
            figures.say(path, report.run, "No rank has a step that takes time.")
            return
        figures.save(heat_map_figure(report), path)


def heat_map_figure(report: RanksReport) -> Figure:
    """The figure; axes are kinds, then blocks and mesh where there are any, then memory and MFU where known."""
    maps, uses = heat_maps(report), []
    if report.peak_bytes is not None:
        size, unit = memory_unit(report.peak_bytes)
        uses.append(("Peak memory allocated", unit, report.peak_bytes / size, "highest"))
    if report.mfu is not None:
        uses.append(("MFU", "%", 100 * report.mfu, "lowest"))
    heights = [1.1 + _ROW_IN * max(2, min(len(one.rows), 32)) for one in maps] + [_USE_IN] * len(uses)
    figure = _figure(report, 1.0 + sum(heights))
    all_axes = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    firsts = column_firsts(len(report.own.ranks), MOST_COLUMNS)
    for shown in maps:
        _draw_map(figure, all_axes.pop(0), report, shown, firsts)
    for (name, unit, values, shown_one), axes in zip(uses, all_axes, strict=True):
        _draw_use(axes, name, unit, values, shown_one, firsts)
        _name_ranks(axes, report, firsts)
    return figure


def _draw_use(axes: Axes, name: str, unit: str, values: Float, shown: str, firsts: Int) -> None:
    """A bar for each column of ranks; those of outliers among them are red, a line is at the median."""
    heights = (np.fmax if shown == "highest" else np.fmin).reduceat(values, firsts)
    known = np.flatnonzero(np.isfinite(heights))
    far = known[list(outliers(heights[known].tolist()))]
    colors = [NAMED_COLOR if at in far else "#7C8794" for at in range(len(firsts))]
    axes.bar(range(len(firsts)), heights, width=0.86 if len(firsts) <= 128 else 1.0, color=colors)
    middle = float(np.nanmedian(values))
    axes.axhline(middle, color=figures.INK, linewidth=0.9, linestyle="--")
    axes.set_xlim(-0.5, len(firsts) - 0.5)
    axes.set_ylim(0, max(1.15 * float(np.nanmax(heights)), 1e-9))
    figures.prepare(axes, ylabel=unit)
    several = f" ({firsts[1]} ranks a column: the {shown})" if len(firsts) < len(values) else ""
    figures.entitle(axes, f"{name}, {unit}: median {middle:.3g}{several}", pad=14)


def _draw_map(figure: Figure, axes: Axes, report: RanksReport, shown: HeatMap, firsts: Int) -> None:
    from matplotlib.patches import Rectangle

    values, title = shown.values_ms, shown.title
    if shown.is_difference:
        high = max(float(np.nanmax(np.abs(values), initial=0.0)), shown.least_ms) or 1.0
        low, least = -high, high / 20
        dark = np.abs(values) > 0.62 * high
        _name_ranks(axes, report, firsts)
        if len(firsts) < len(report.own.ranks):
            title += f" ({firsts[1]} ranks a column: the one farthest from 0)"
    else:
        high, least = float(np.nanmax(values)), 0.0
        low = min(float(np.nanmin(values)), 0.5 * high)
        dark = values < low + 0.6 * (high - low)
        _name_places(axes.xaxis, list(map(str, shown.ranks)), 32, [])
        axes.set_xlabel("pipeline stage" if shown.across == "stage" else shown.across, fontsize=figures.FONT_SIZE)
        axes.set_ylabel("data parallel" if shown.down == "dp" else shown.down, fontsize=figures.FONT_SIZE)
    axes.set_facecolor("#ECECEC")  # where nothing is known
    colors = "RdBu_r" if shown.is_difference else "viridis"
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high)
    _name_places(axes.yaxis, [_literal(name) for name in shown.rows], 32, [])
    if values.size <= _FEW_CELLS and (values.shape[1] <= _FEW_RANKS or not shown.is_difference):
        for row, column in np.argwhere(np.isfinite(values) & (np.abs(values) >= least)).tolist():
            value, color = float(values[row, column]), "white" if dark[row, column] else figures.INK
            text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=figures.FONT_SIZE - 2, color=color)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=figures.FONT_SIZE - 2)
    bar.set_label("ms", fontsize=figures.FONT_SIZE - 2)
    figures.entitle(axes, title, pad=14)
    for row, column in shown.named:
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=NAMED_COLOR, linewidth=3, gid="named"))


def _name_ranks(axes: Axes, report: RanksReport, firsts: Int) -> None:
    """Numbers below the columns, red of those that the verdict names; `firsts`: the place of each one's first rank."""
    ranks = report.own.ranks
    columns = np.split(np.isin(ranks, sorted(report.named_ranks)), firsts[1:])
    # The first rank of a column, or the one in it that is named.
    labels = [str(ranks[first + column.argmax()]) for first, column in zip(firsts, columns, strict=True)]
    _name_places(axes.xaxis, labels, 32, [at for at, column in enumerate(columns) if column.any()])
    axes.set_xlabel("rank", fontsize=figures.FONT_SIZE)


def _name_places(axis: Axis, names: Sequence[str], most: int, marked: Sequence[int]) -> None:
    """Names along an axis, as many as can be read: those that are marked, in red, and others between them."""
    apart = -(-len(names) // most)
    kept = marked[:: -(-len(marked) // 16)] if apart > 1 and marked else marked
    between = (at for at in range(0, len(names), apart) if all(abs(at - one) >= apart for one in kept))
    places = sorted({*kept, *between})
    axis.set_ticks(places, [names[at] for at in places], fontsize=figures.FONT_SIZE - 1)
    for at, label in zip(places, axis.get_ticklabels(), strict=True):
        if at in marked:
            label.set_color(NAMED_COLOR)
            label.set_fontweight("bold")


def _figure(report: RanksReport, height_in: float) -> Figure:
    """An empty one; the verdict is its title, in red where somebody is to blame."""
    figure = figures.new_figure(100, height_in=height_in)
    figure.set_figwidth(_WIDTH_IN)
    text = shorten(clean(report.verdict.sentence, unicode=True), 330, ellipsis="…")
    title = figures.literal(textwrap.fill(text, int(10.4 * _WIDTH_IN)))
    color = figures.INK if report.verdict.verdict == "none" else NAMED_COLOR
    figure.suptitle(title, fontsize=figures.FONT_SIZE + 2, fontweight="bold", color=color, x=0.01, ha="left")
    return figure


def _literal(name: str) -> str:
    """A name that fits beside a picture."""
    return figures.literal(shorten(clean(name, unicode=True), 40))


# --- A job of many ranks as a timeline: a lane for each rank, what it did in a few steps ---

PIXELS = 3000  # what lies closer together than a picture this wide shows is drawn as one
_FRAME, _BAND = 1.8, 0.13


def draw_timeline(
    report: RanksReport, database: Database, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None
) -> None:
    """Writes the PNG: a lane for each rank, what it did in three steps that are like most, by aligned clocks.

    `ranks` are those of the lanes; None: all, or of many those that tell most.
    """
    drawn = read_timeline(report, database, ranks, pixels=PIXELS)
    with figures.own_style():
        if not drawn.steps:
            figures.say(path, report.run, "No span of these ranks lies in these steps.")
            return
        figures.save(timeline_figure(report, drawn), path)


def timeline_figure(report: RanksReport, drawn: Timeline) -> Figure:
    """The figure; of its one axes, x is milliseconds and y the place of a rank in the lanes."""
    count = len(drawn.ranks)
    figure = _figure(report, 1.6 + lane_in(count) * max(3, count))
    axes = figure.subplots()
    marked = [place for place, rank in enumerate(drawn.ranks) if rank in report.named_ranks]
    _name_places(axes.yaxis, drawn.lanes, 64, marked)
    for place in marked:
        axes.axhspan(place - 0.5, place + 0.5, color=NAMED_COLOR, alpha=_BAND, linewidth=0, zorder=0, gid="named")
    least_us = max((float((one.starts_us + one.lengths_us).max()) for one in drawn.bars), default=0.0) / PIXELS
    for above, one in enumerate(drawn.bars):
        _draw_bars(axes, one, least_us, count, zorder=1.5 + 0.1 * above)
    for step, begin_us in zip(drawn.steps, drawn.begins_us, strict=True):
        axes.axvline(begin_us / 1e3, color=figures.INK, linewidth=0.9, linestyle=":", zorder=6)
        transform = axes.get_xaxis_transform()
        axes.text(begin_us / 1e3, 1.005, f" step {step}", transform=transform, fontsize=figures.FONT_SIZE - 1)
    axes.set_ylim(count - 0.5, -0.5)
    axes.margins(x=0.005)
    axes.autoscale_view(scaley=False)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    axes.set_xlabel(f"ms, {drawn.clocks}", fontsize=figures.FONT_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(drawn.drawn, loc="left", fontsize=figures.FONT_SIZE, pad=38)
    _legend(axes, report, drawn)
    return figure


def lane_in(lanes: int) -> float:
    """Inches of a lane: of many it is thin, so that the picture stays one."""
    return max(0.02, min(0.5, 14 / lanes))


def _draw_bars(axes: Axes, bars: Bars, least_us: float, lanes: int, *, zorder: float) -> None:
    """Bars of one kind, or frames. Thin lanes touch, so that no pattern of gaps is seen."""
    from matplotlib.collections import PolyCollection

    framed, thin = bars.kind == LAYER, lanes > 64
    half = 0.5 if thin else 0.4
    left = bars.starts_us / 1e3
    right = left + np.maximum(bars.lengths_us, 0 if framed else least_us) / 1e3
    low, high = bars.lanes - half, bars.lanes + half
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    collection = PolyCollection(
        list(corners),
        facecolors="none" if framed else SPAN_COLORS[bars.kind],
        edgecolors=NAMED_COLOR if framed else "none",
        linewidths=_FRAME if framed else 0,
        antialiaseds=not thin,
        zorder=zorder,
    )
    collection.set_gid(bars.kind)
    axes.add_collection(collection)


def _legend(axes: Axes, report: RanksReport, drawn: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds = {one.kind for one in drawn.bars}
    names = {"waiting": "waiting for others", "gc": "garbage collection"}
    if not drawn.waiting_known:
        names["communication"] = "communication, with waiting"
    handles = [
        Patch(facecolor=color, label=names.get(kind, kind)) for kind, color in SPAN_COLORS.items() if kind in kinds
    ]
    if LAYER in kinds and report.verdict.layer is not None:
        name = _literal(report.verdict.layer)
        handles.append(Patch(facecolor="none", edgecolor=NAMED_COLOR, linewidth=_FRAME, label=name))
    if report.verdict.cause in ("late collective", "other") and report.verdict.rank is not None:
        handles.append(Patch(facecolor=NAMED_COLOR, alpha=_BAND, label=f"rank {report.verdict.rank} in no span"))
    axes.legend(  # above the names of steps: it stands off its corner by its pad
        handles=handles, loc="lower left", bbox_to_anchor=(-0.018, 1.0), borderaxespad=1.7, columnspacing=1.4, ncols=12,
        frameon=False, fontsize=figures.FONT_SIZE - 1,
    )  # fmt: skip


# --- The page of a job of many ranks: one HTML file that opens from disk, in the frame of a run's page ---

_MOST_PAGE_LANES = 64
_MOST_PAGE_BARS = 100_000  # two megabytes
_LAYER = ("layer", "kind", "ranks", "quickest_ms", "slowest_ms", "slowest_rank", "outliers", "beyond_ms")
_STEP_PIXELS = 1500  # what lies closer together than a screen shows of one step is one bar


def write_ranks_page(
    report: RanksReport,
    database: Database,
    path: Path,
    *,
    ranks: Sequence[int] | None = None,
    trace_href: str | None = None,
) -> None:
    """Writes the page, whose scripts read `RanksReport.to_dict`, and what is drawn.

    `ranks` are those of the timeline, at most 64; None: all, or of many those that tell most. `trace_href` is where
    the Chrome trace lies, relative to the page.
    """
    own = report.own
    layers = sorted(layers_over_ranks(report.layers), key=lambda row: -row["beyond_ms"])
    data = {
        "page": {
            "kind": "ranks",
            "title": report.run,
            "machine": "",
            "rank": f"{len(own.ranks):,} ranks",
            "steps_in_words": f"{len(own.steps):,} steps, {report.spans:,} spans",
            "colors": {"kind": {**SPAN_COLORS, "culprit": NAMED_COLOR}},
            "trace_href": trace_href,
        },
        "summary": {"verdict": report.verdict.sentence},
        "warnings": [f"{row.what}: {row.reason}" for row in report.missing],
        "job": report.to_dict(),
        "named": sorted(report.named_ranks),
        "timeline": _page_timeline(report, database, ranks),
        "heat": [_plain(one) | {"is_difference": one.is_difference} for one in heat_maps(report)],
        "over_ranks": [
            {name: row[name] for name in _LAYER}
            | {"median_ms": row["typical_ms"], "spread_ms": row["typical_deviation_ms"]}
            for row in layers[:2000]
        ],
    }
    path.write_text(page_text(data), encoding="utf-8")


def _page_timeline(report: RanksReport, database: Database, ranks: Sequence[int] | None) -> dict[str, Any]:
    """The bars of all steps, in whole microseconds, as fine as the page has room for; and which steps it opens at."""
    steps = report.own.steps.tolist()
    pixels = _STEP_PIXELS * len(steps)
    while True:
        timeline = read_timeline(report, database, ranks, pixels=pixels, most=_MOST_PAGE_LANES, steps=steps)
        if pixels <= _STEP_PIXELS or sum(len(bars.lanes) for bars in timeline.bars) <= _MOST_PAGE_BARS:
            break
        pixels //= 2
    bars = [
        {
            "kind": one.kind,
            "lanes": one.lanes.tolist(),
            "starts_us": np.round(one.starts_us).astype(int).tolist(),
            "lengths_us": np.ceil(one.lengths_us).astype(int).tolist(),
        }
        for one in timeline.bars
    ]
    return {**_plain(timeline._replace(bars=[])), "bars": bars, "opens_at": drawn_steps(report)}


def _plain(value: Any) -> Any:
    """JSON types for the page; of what is drawn six digits, None where it is not known."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (Timeline, HeatMap)):
        without = ("least_ms", "named") if isinstance(value, HeatMap) and value.is_difference else ("least_ms",)
        return {name: _plain(item) for name, item in value._asdict().items() if name not in without}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
