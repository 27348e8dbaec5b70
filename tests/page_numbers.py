"""What the views of a page must say of any result, compared with its rows."""

from __future__ import annotations

import math

import pytest

from browser import Page
from page_tables import UNITS, show, table_named, table_of
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import has_like_steps, step_count
from profiler_wrapper.reports.memory import category_name
from profiler_wrapper.reports.roofline import roofline


def assert_first_views(page: Page, analysis: Analysis) -> None:
    """Summary, Layers and Overview open, fit the window, and say the same total as all else."""
    total = analysis.time.total_ns / 1000 / step_count(analysis)
    for view in ("summary", "overview", "layers"):
        show(page, view)
        assert "could not be shown" not in page.text(f"#view-{view}")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
    figures = dict(zip(page.texts("#view-summary .label"), page.texts("#view-summary .value"), strict=False))
    over = "per step" if has_like_steps(analysis) else "over the whole trace"
    shown = figures[f"{'Device time' if analysis.time_basis == 'device' else 'Wall time of ops'}, {over}"]
    assert shown == page.evaluate(f"page.format.us({total!r})")
    assert "✓" in page.text("#view-layers .sum")
    layers = "#view-layers .table"
    assert page.evaluate(f"(t => t.scrollWidth <= t.clientWidth)(document.querySelector('{layers} .scroller'))")
    heads = page.evaluate(f"[...document.querySelectorAll('{layers} th')].map(one => one.dataset.key)")
    unit = UNITS[page.texts(f"{layers} th .unit")[0].strip()]
    foot = dict(zip(heads, page.texts(f"{layers} tfoot td"), strict=True))
    assert float(foot["time"].replace(",", "")) * unit == pytest.approx(total, rel=1e-3, abs=0.001)
    backward = sum(row.self_time_ns for row in analysis.layers if row.phase == "backward")
    if backward:  # as the text table has it
        told = backward / 1000 / step_count(analysis)
        assert float(foot["backward"].replace(",", "")) * unit == pytest.approx(told, rel=1e-3, abs=0.001)
    if any(row.peak_bytes for row in analysis.layers):
        assert "peak" in heads
    classes = table_named(page, "overview", "Classes of work")
    by_class: dict[str, int] = {}
    for row in analysis.classes:
        by_class[row.class_name] = by_class.get(row.class_name, 0) + row.time_ns
    classes.assert_shows("time", [ns / 1000 / step_count(analysis) for ns in sorted(by_class.values(), reverse=True)])


def assert_numbers(page: Page, analysis: Analysis, drawn: set[str]) -> None:
    """What the tables say is what the rows say, of one step."""
    steps = step_count(analysis)
    show(page, "operators")
    page.click("#view-operators .segments [data-id=phase]")
    operators = table_of(page, "operators")
    rows = sorted(analysis.operators, key=lambda row: -row.self_time_ns)[: len(operators.rows)]
    assert len(operators.rows) == min(200, len(analysis.operators))
    operators.assert_shows("self_time_us", [row.self_time_ns / 1000 / steps for row in rows])
    operators.assert_shows("share", [row.self_time_ns / analysis.time.total_ns for row in rows])
    if "kernels" in drawn:
        show(page, "kernels")
        kernels = table_of(page, "kernels")
        dearest = sorted(analysis.kernels, key=lambda row: -row.time_ns)[: len(kernels.rows)]
        kernels.assert_shows("time_us", [row.time_ns / 1000 / steps for row in dearest])
        kernels.assert_shows("count", [row.count / steps for row in dearest])
        kernels.assert_shows("mean_us", [row.time_ns / 1000 / row.count for row in dearest])
    if "memory" in drawn:
        show(page, "memory")
        owners = table_named(page, "memory", "Who holds it")
        held = analysis.memory["peak"]["owners"]
        owners.assert_shows("bytes", [owner["bytes"] for owner in held[: len(owners.rows)]])
        assert owners.texts("category") == [category_name(owner["category"]) for owner in held[: len(owners.rows)]]
        assert_curve(page, analysis)
    if "communication" in drawn:
        show(page, "communication")
        collectives = table_named(page, "communication", "By layer")
        slowest = sorted(analysis.collectives, key=lambda row: -row.time_ns)[: len(collectives.rows)]
        collectives.assert_shows("time_us", [row.time_ns / 1000 / steps for row in slowest])
        together = table_named(page, "communication", "Collectives")
        sums = [value or 0.0 for value in together.numbers("time_us")]
        assert math.isclose(sum(sums), sum(row.time_ns for row in analysis.collectives) / 1000 / steps, rel_tol=0.01)
    if "waits" in drawn:
        show(page, "waits")
        waits = table_of(page, "waits")
        longest = sorted(analysis.synchronisations, key=lambda row: -row.wait_ns)[: len(waits.rows)]
        waits.assert_shows("wait_us", [row.wait_ns / 1000 / steps for row in longest])
    if "roofline" in drawn:
        show(page, "roofline")
        parts = table_named(page, "roofline", "Parts of the model")
        points = roofline(analysis).points[: len(parts.rows)]
        assert parts.texts("name") == [point.name for point in points]
        parts.assert_shows("time_us", [point.time_ns / 1000 for point in points])
        parts.assert_shows("flops_per_s", [point.flops_per_s for point in points])
        if any(point.roof_ns is not None for point in points):
            parts.assert_shows("of_roof", [point.of_roof for point in points])


def assert_curve(page: Page, analysis: Analysis) -> None:
    """The areas of the chart make what is allocated, and its highest point is the peak."""
    areas, line = page.evaluate(
        """(() => {
          const traces = document.querySelector("#view-memory .chart").data;
          const stacked = traces.filter(one => one.stackgroup);
          return [stacked[0].x.map((_, i) => stacked.reduce((sum, one) => sum + one.y[i], 0)),
                  traces.find(one => one.name === "allocated in all").y];
        })()"""
    )
    assert areas == pytest.approx(line, rel=1e-9, abs=1e-9)
    peak = analysis.memory["peak"]["allocated_bytes"]
    assert max(line) * (1 << 30 if peak >= 4 << 30 else 1 << 20) == pytest.approx(peak)
