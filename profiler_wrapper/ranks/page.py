"""The page of a job of many ranks: one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.figures import CULPRIT, SPAN_COLORS, steps_in_words, telling_ranks, what_is_drawn
from profiler_wrapper.ranks.lanes import (
    clocks_in_words,
    drawn_steps,
    is_aligned,
    lane_bars,
    lane_spans,
    waiting_is_known,
)
from profiler_wrapper.ranks.model import Float, RanksReport
from profiler_wrapper.ranks.rows import (
    beyond_typical,
    binned,
    chosen_ranks,
    culprits,
    holders,
    layers_beyond,
    layers_over_ranks,
    mesh,
)
from profiler_wrapper.reports.page import packaged_source, page_text

_FOLDER = "ranks_views"
_VIEWS = (
    "marks.js", "view_summary.js", "view_timeline.js", "view_heat_maps.js", "view_ranks.js", "view_communication.js",
    "view_layers.js",
)  # fmt: skip
_MOST_LANES = 256  # that a browser draws in a moment
_MOST_COLUMNS = 256  # of a heat map, so that one shows; more ranks are put together
_MOST_LAYERS = 2000
_PIXELS = 1500  # what lies closer together than a screen shows is one bar


def write_ranks_page(
    report: RanksReport,
    database: Database,
    path: Path,
    *,
    ranks: Sequence[int] | None = None,
    trace_href: str | None = None,
) -> None:
    """Writes the page, whole or not at all for the caller to see to.

    Args:
        ranks: in the timeline, at most 256; None: all, or of many those that tell most.
        trace_href: where the Chrome trace lies, relative to the page.

    Raises:
        OSError: the file cannot be written.
    """
    views = [("parts.js", packaged_source("page", "parts.js"))]
    views += [(name, packaged_source(_FOLDER, name)) for name in _VIEWS]
    path.write_text(page_text(page_data(report, database, ranks=ranks, trace_href=trace_href), views), encoding="utf-8")


def page_data(
    report: RanksReport, database: Database, *, ranks: Sequence[int] | None = None, trace_href: str | None = None
) -> dict[str, Any]:
    """What the page's scripts read, JSON types only: `RanksReport.to_dict`, and what is drawn."""
    own = report.own
    return {
        "page": {
            "title": report.run,
            "machine": "",
            "rank": f"{len(own.ranks):,} ranks",
            "steps_in_words": f"{len(own.steps):,} steps, {report.spans:,} spans",
            "colors": {"kind": {**SPAN_COLORS, "culprit": CULPRIT}},
            "trace_href": trace_href,
        },
        "summary": {"verdict": report.verdict.sentence},
        "warnings": [f"{row.what}: {row.reason}" for row in report.missing],
        "job": report.to_dict(),
        "named": sorted(culprits(report)),
        "timeline": _timeline(report, database, ranks),
        "heat": _heat_maps(report),
        "over_ranks": [
            {**{name: getattr(row, name) for name in row.__slots__}, "beyond_ms": row.beyond_ms}
            for row in layers_over_ranks(report)[:_MOST_LAYERS]
        ],
    }


def _timeline(report: RanksReport, database: Database, ranks: Sequence[int] | None) -> dict[str, Any]:
    """Lanes and what is drawn in them: of each kind the lanes, starts and lengths in microseconds, undermost first."""
    steps = drawn_steps(report)
    ranks = telling_ranks(report, steps) if ranks is None else list(ranks)
    if len(ranks) > _MOST_LANES:
        ranks = [rank for rank in chosen_ranks(report, _MOST_LANES) if rank in set(ranks)]
    spans = lane_spans(database, ranks, steps, layer=report.verdict.layer).on_one_axis(is_aligned=is_aligned(report))
    steps = np.unique(spans.step).tolist()
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    staged = len(set(stages.values())) > 1
    lanes = [f"rank {rank}" + (f", stage {stages.get(rank, 0)}" if staged else "") for rank in ranks]
    found: dict[str, Any] = {
        "ranks": ranks,
        "lanes": lanes,
        "steps": steps,
        "drawn": f"{what_is_drawn(report, ranks, steps)}; {steps_in_words(report, steps)}",
        "clocks": clocks_in_words(report, spans),
        "waiting_known": waiting_is_known(spans),
        "begins_us": [],
        "held": [],
        "bars": [],
    }
    if not len(spans.rank):
        return found
    first = int(spans.start_ns.min())
    gap_ns = float((spans.start_ns + spans.duration_ns).max() - first) / _PIXELS
    found["bars"] = [
        {
            "kind": bars.kind,
            "lanes": bars.lane.tolist(),
            "starts_us": _numbers((bars.start_ns - first) / 1000),
            "lengths_us": _numbers((bars.end_ns - bars.start_ns) / 1000),
        }
        for bars in lane_bars(spans, ranks, gap_ns, named=culprits(report))
    ]
    found["begins_us"] = [_number((begin - first) / 1000) for begin in spans.step_begins_ns().values()]
    for step, rank in holders(report, steps).items():
        extent = spans.extent_ns(rank, step)
        if rank in ranks and extent is not None:
            start, length = (extent[0] - first) / 1000, (extent[1] - extent[0]) / 1000
            found["held"].append({"lane": ranks.index(rank), "start_us": start, "length_us": length})
    return found


def _heat_maps(report: RanksReport) -> list[dict[str, Any]]:
    """Each with its rows, columns and values in ms: (rows, columns)."""
    own = report.own
    beyond = beyond_typical(report)
    used = [at for at in range(len(own.kinds)) if np.nansum(np.abs(own.own_ns[:, :, at])) > 0]
    layers, of_layers = layers_beyond(report)
    found = []
    for title, rows, values in (
        ("Own time beyond that of the typical rank", [own.kinds[at] for at in used], beyond[:, used]),
        ("Forward and backward of blocks beyond that of others", layers, of_layers),
    ):
        if rows:
            firsts, cells = binned(values, _MOST_COLUMNS)
            columns = own.ranks[firsts].tolist()
            found.append(_heat_map(title, "rank", "", columns, rows, cells.T, is_difference=True))
    grid = mesh(report)
    if grid is not None:
        rows = [str(row) for row in grid.rows.tolist()]
        title, columns = "Own time of a step over the mesh", grid.columns.tolist()
        found.append(_heat_map(title, grid.across, grid.down, columns, rows, grid.own_ms, is_difference=False))
        found[-1]["named"] = [list(cell) for cell in grid.named]
    return found


def _heat_map(
    title: str,
    across: str,
    down: str,
    columns: Sequence[int],
    rows: Sequence[str],
    values: Float,
    *,
    is_difference: bool,
) -> dict[str, Any]:
    return {
        "title": f"{title}, ms per step",
        "across": across,
        "down": down,
        "ranks": list(columns),
        "rows": list(rows),
        "values_ms": [[_number(value) for value in row] for row in values.tolist()],
        "is_difference": is_difference,
    }


def _numbers(values: Float) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
