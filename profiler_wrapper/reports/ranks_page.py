"""The page of a job of many ranks: one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiler_wrapper.analysis.ranks.model import Float, RanksReport
from profiler_wrapper.recording.span_database import Database
from profiler_wrapper.recording.span_table import KINDS
from profiler_wrapper.reports.page_frame import packaged_source, page_text
from profiler_wrapper.reports.ranks_rows import (
    beyond_typical,
    binned,
    chosen_ranks,
    culprits,
    layers_beyond,
    layers_over_ranks,
    mesh,
)
from profiler_wrapper.reports.ranks_spans import LaneSpans, drawn_steps, lane_spans, merged
from profiler_wrapper.reports.span_colors import CULPRIT, SPAN_COLORS, WAITING

_FOLDER = "ranks_views"
_VIEWS = (
    "marks.js", "view_summary.js", "view_timeline.js", "view_heat_maps.js", "view_ranks.js", "view_communication.js",
    "view_layers.js",
)  # fmt: skip
_MOST_LANES = 32
_MOST_COLUMNS = 1024  # of a heat map; more ranks are put together
_MOST_LAYERS = 2000
_PIXELS = 1500  # what lies closer together than a screen shows is one bar


def write_ranks_page(report: RanksReport, database: Database, path: Path, *, trace_href: str | None = None) -> None:
    """Writes the page, whole or not at all for the caller to see to.

    `trace_href`: where the Chrome trace lies, relative to the page.

    Raises:
        OSError: the file cannot be written.
    """
    views = [("parts.js", packaged_source("page", "parts.js"))]
    views += [(name, packaged_source(_FOLDER, name)) for name in _VIEWS]
    path.write_text(page_text(page_data(report, database, trace_href=trace_href), views), encoding="utf-8")


def page_data(report: RanksReport, database: Database, *, trace_href: str | None = None) -> dict[str, Any]:
    """What the page's scripts read, JSON types only: `RanksReport.to_dict`, and what is drawn."""
    own = report.own
    return {
        "page": {
            "title": report.run,
            "machine": "",
            "rank": f"{len(own.ranks):,} ranks",
            "steps_in_words": f"{len(own.steps):,} steps, {report.spans:,} spans",
            "colors": {"kind": {**SPAN_COLORS, "waiting": WAITING, "culprit": CULPRIT}},
            "trace_href": trace_href,
        },
        "summary": {"verdict": report.verdict.sentence},
        "warnings": [f"{row.what}: {row.reason}" for row in report.missing],
        "job": report.to_dict(),
        "named": sorted(culprits(report)),
        "timeline": _timeline(report, database),
        "heat": _heat_maps(report),
        "over_ranks": [
            {**{name: getattr(row, name) for name in row.__slots__}, "beyond_ms": row.beyond_ms}
            for row in layers_over_ranks(report)[:_MOST_LAYERS]
        ],
    }


def _timeline(report: RanksReport, database: Database) -> dict[str, Any]:
    """Lanes and what is drawn in them: of each kind the lanes, starts and lengths in microseconds."""
    ranks, steps = chosen_ranks(report, _MOST_LANES), drawn_steps(report)
    spans = lane_spans(database, ranks, steps, layer=report.verdict.layer)
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    staged = len(set(stages.values())) > 1
    lanes = [f"rank {rank}" + (f", stage {stages[rank]}" if staged else "") for rank in ranks]
    found: dict[str, Any] = {"ranks": ranks, "lanes": lanes, "steps": steps, "begins_us": [], "bars": []}
    if not len(spans.rank):
        return found
    first = int(spans.start_ns.min())
    gap_ns = float((spans.start_ns + spans.duration_ns).max() - first) / _PIXELS
    lane_of = {rank: lane for lane, rank in enumerate(ranks)}
    of_kinds = [(kind, spans.kind == place) for place, kind in enumerate(KINDS)]
    nested = ("communication", "gc", "checkpoint", "data", "recompute")
    for kind, chosen in of_kinds:
        if kind not in nested:
            chosen = chosen & (spans.depth == 0)
        found["bars"] += _bars(spans, chosen, kind, lane_of, first, gap_ns)
    if report.verdict.layer is not None:
        marked = spans.is_marked & np.isin(spans.rank, sorted(culprits(report)))
        found["bars"] += _bars(spans, marked, "layer", lane_of, first, gap_ns)
    at = np.searchsorted(report.own.steps, steps)
    found["begins_us"] = [_number((_median(row) - first) / 1000) for row in report.own.begin_ns[at]]
    return found


def _bars(
    spans: LaneSpans, chosen: np.ndarray[Any, Any], kind: str, lane_of: dict[int, int], first: int, gap_ns: float
) -> list[dict[str, Any]]:
    lanes: list[int] = []
    starts: list[float] = []
    lengths: list[float] = []
    for rank in np.unique(spans.rank[chosen]).tolist():
        mine = chosen & (spans.rank == rank)
        start, end = merged(spans.start_ns[mine], (spans.start_ns + spans.duration_ns)[mine], gap_ns)
        lanes += [lane_of[rank]] * len(start)
        starts += ((start - first) / 1000).tolist()
        lengths += ((end - start) / 1000).tolist()
    return [{"kind": kind, "lanes": lanes, "starts_us": starts, "lengths_us": lengths}] if lanes else []


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


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
