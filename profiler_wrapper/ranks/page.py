"""The page of a job of many ranks: one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.figures import NAMED_COLOR, SPAN_COLORS, HeatMap, heat_maps
from profiler_wrapper.ranks.model import RanksReport
from profiler_wrapper.ranks.report import layers_over_ranks
from profiler_wrapper.ranks.timeline import chosen_ranks, drawn_steps, read_timeline, telling_ranks
from profiler_wrapper.reports.page import packaged_source, page_text

_FOLDER = "ranks_views"
_VIEWS = (
    "marks.js", "view_summary.js", "view_timeline.js", "view_heat_maps.js", "view_ranks.js", "view_communication.js",
    "view_layers.js",
)  # fmt: skip
_MOST_LANES = 256  # that a browser draws in a moment
_MOST_LAYERS = 2000
_LAYER = ("layer", "kind", "ranks", "quickest_ms", "slowest_ms", "slowest_rank", "outliers", "beyond_ms")
_PIXELS = 1500  # what lies closer together than a screen shows is one bar


def write_ranks_page(
    report: RanksReport,
    database: Database,
    path: Path,
    *,
    ranks: Sequence[int] | None = None,
    trace_href: str | None = None,
) -> None:
    """Writes the page.

    `ranks` are those of the timeline, at most 256; None: all, or of many those that tell most. `trace_href` is where
    the Chrome trace lies, relative to the page.
    """
    views = [("parts.js", packaged_source("page", "parts.js"))]
    views += [(name, packaged_source(_FOLDER, name)) for name in _VIEWS]
    path.write_text(page_text(page_data(report, database, ranks=ranks, trace_href=trace_href), views), encoding="utf-8")


def page_data(
    report: RanksReport, database: Database, *, ranks: Sequence[int] | None = None, trace_href: str | None = None
) -> dict[str, Any]:
    """What the page's scripts read, JSON types only: `RanksReport.to_dict`, and what is drawn."""
    own = report.own
    layers = sorted(layers_over_ranks(report.layers), key=lambda row: -row["beyond_ms"])
    return {
        "page": {
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
        "timeline": _timeline(report, database, ranks),
        "heat": [_heat_map(one) for one in heat_maps(report)],
        "over_ranks": [
            {name: row[name] for name in _LAYER}
            | {"median_ms": row["typical_ms"], "spread_ms": row["typical_deviation_ms"]}
            for row in layers[:_MOST_LAYERS]
        ],
    }


def _timeline(report: RanksReport, database: Database, ranks: Sequence[int] | None) -> dict[str, Any]:
    """Lanes and what is drawn in them: of each kind the lanes, starts and lengths in microseconds, undermost first."""
    steps = drawn_steps(report)
    ranks = telling_ranks(report) if ranks is None else list(ranks)
    if len(ranks) > _MOST_LANES:
        ranks = [rank for rank in chosen_ranks(report, _MOST_LANES) if rank in set(ranks)]
    drawn = read_timeline(report, database, ranks, steps, pixels=_PIXELS)
    return {
        "ranks": drawn.lanes,
        "lanes": drawn.names,
        "steps": drawn.steps,
        "drawn": drawn.drawn,
        "clocks": drawn.clocks,
        "waiting_known": drawn.waiting_known,
        "begins_us": [_short(begin / 1000) for begin in drawn.begins_ns.values()],
        "bars": [
            {
                "kind": bars.kind,
                "lanes": bars.lane.tolist(),
                "starts_us": [_short(start) for start in (bars.start_ns / 1000).tolist()],
                "lengths_us": [_short(length) for length in ((bars.end_ns - bars.start_ns) / 1000).tolist()],
            }
            for bars in drawn.bars
        ],
    }


def _heat_map(shown: HeatMap) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": shown.title,
        "across": shown.across,
        "down": shown.down,
        "ranks": shown.columns.tolist(),
        "rows": shown.rows,
        "values_ms": [[_short(value) for value in row] for row in shown.values_ms.tolist()],
        "is_difference": shown.is_difference,
    }
    return found if shown.is_difference else found | {"named": shown.named}


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
