"""The page of a comparison: both sides in one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiler_wrapper.comparison.model import Comparison
from profiler_wrapper.comparison.text import folded_rows
from profiler_wrapper.comparison.verdict import decision_words, place_of, work_words
from profiler_wrapper.reports.page import packaged_source, page_text
from profiler_wrapper.reports.result_json import NS_PER_US, to_plain

_VIEWS = ("view_changes.js", "view_rows.js", "view_classes.js")


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Writes the page, whole or not at all for the caller to see to.

    Raises:
        OSError: the file cannot be written.
    """
    views = [("page", "parts.js"), *(("compare_views", name) for name in _VIEWS)]
    scripts = [(name, packaged_source(folder, name)) for folder, name in views]
    path.write_text(page_text(_page_data(comparison), scripts), encoding="utf-8")


def _page_data(comparison: Comparison) -> dict[str, Any]:
    """What the page's scripts read: `Comparison.to_dict` with what the frame asks for."""
    steps = " and ".join(
        f"{steps} step{'s' if steps > 1 else ''}" for steps in (comparison.steps_a, comparison.steps_b)
    )
    return {
        "page": {"title": f"{comparison.name_b} against {comparison.name_a}", "machine": "", "steps_in_words": steps},
        "summary": {"verdict": comparison.verdict},
        "warnings": list(comparison.notes),
        "comparison": comparison.to_dict(),
        "decisions": [decision_words(total) for total in comparison.totals],
        "work": [
            {"place": place_of(one.layer, one.phase), "words": work_words(one, comparison.time_basis)}
            for one in comparison.work
        ],
        "folded": [
            to_plain(row)
            | {
                "phase": "" if row.phase == row.label else row.phase.replace("_", " "),
                "difference_us": row.difference_ns / NS_PER_US,
            }
            for row in folded_rows(comparison)
        ],
    }
