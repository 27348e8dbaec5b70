"""The page of a comparison: both sides in one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiler_wrapper.comparison.model import Comparison
from profiler_wrapper.comparison.text import folded_rows
from profiler_wrapper.comparison.verdict import decision_words, place_of, work_words
from profiler_wrapper.reports.page import packaged_source, page_text

_FOLDER = "compare_views"
_VIEWS = ("view_changes.js", "view_rows.js", "view_classes.js")


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Writes the page, whole or not at all for the caller to see to.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(_html(comparison), encoding="utf-8")


def _html(comparison: Comparison) -> str:
    """The frame of a run's page with views of its own."""
    return page_text(
        _page_data(comparison),
        (
            ("parts.js", packaged_source("page", "parts.js")),
            *((name, packaged_source(_FOLDER, name)) for name in _VIEWS),
        ),
    )


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
            {
                "label": row.label,
                "phase": "" if row.phase == row.label else row.phase.replace("_", " "),
                "a_us": None if row.a_ns is None else row.a_ns / 1000,
                "b_us": None if row.b_ns is None else row.b_ns / 1000,
                "difference_us": row.difference_ns / 1000,
                "retained_a": row.retained_a,
                "retained_b": row.retained_b,
                "flops_a": row.flops_a,
                "flops_b": row.flops_b,
                "slower": list(row.slower),
                "faster": list(row.faster),
                "members": row.members,
            }
            for row in folded_rows(comparison)
        ],
    }
