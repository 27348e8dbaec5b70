"""The page of a comparison: both sides in one HTML file that opens from disk, in the frame of a run's page."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.compare_model import Comparison
from profiler_wrapper.reports import page as frame
from profiler_wrapper.reports.compare_rows import folded_rows
from profiler_wrapper.reports.text import clean, shorten

_LONGEST_TITLE = 120
_VIEWS = ("view_changes.js", "view_rows.js", "view_classes.js")


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Writes the page, whole or not at all for the caller to see to.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(_html(comparison), encoding="utf-8")


def _html(comparison: Comparison) -> str:
    """The frame of a run's page with views of its own."""
    from markupsafe import Markup  # with jinja2, which who prints a table need not wait for

    data = _page_data(comparison)
    scripts = [(name, frame._source(name)) for name in frame._FIRST] + [(name, _source(name)) for name in _VIEWS]
    return frame._template().render(
        title=shorten(clean(data["page"]["title"], unicode=True), _LONGEST_TITLE, ellipsis="…"),
        style=Markup(frame._source("style.css")),
        data=Markup(frame.script_json(data)),
        plotly=Markup(frame._plotly()),
        scripts=[(name, Markup(frame._inside_script(source))) for name, source in scripts],
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
        "folded": [
            {
                "label": row.label,
                "phase": row.phase.replace("_", " "),
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


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath("compare_views").joinpath(name).read_text(encoding="utf-8")
