"""What the places of a page must say of any result, compared with its rows."""

from __future__ import annotations

from collections import Counter

import pytest

from browser import Page
from page_tables import PLACES, assert_reads, assert_said, figures_of, read_number, show, table_of
from profiler_wrapper.reports.describe import has_like_steps, step_count
from profiler_wrapper.reports.memory import category_name
from profiler_wrapper.reports.roofline import roofline
from profiler_wrapper.tables.model import Analysis


def largest(times_ns: Counter[str], analysis: Analysis) -> list[float]:
    """In µs per step, the largest first."""
    return [ns / 1000 / step_count(analysis) for ns in sorted(times_ns.values(), reverse=True)]


def summed(pairs: object) -> Counter[str]:
    found = Counter[str]()
    for name, time_ns in pairs:  # type: ignore[attr-defined]
        found[name] += time_ns
    return found


def assert_first_places(page: Page, analysis: Analysis) -> None:
    """Every place opens, fits the window, and says the same total as all else."""
    total = analysis.time.total_ns / 1000 / step_count(analysis)
    for place in PLACES:
        show(page, place)
        assert_said(page, place)
    show(page, "step")
    name = "Device time" if analysis.time_basis == "device" else "Wall time of ops"
    steps = [row.time_ns / 1000 for row in analysis.steps if row.step is not None]
    if has_like_steps(analysis):
        assert_reads(figures_of(page, "step")[f"{name}, per step"], total)
    elif steps:
        assert_reads(figures_of(page, "step")[f"{name} launched in a step"], sum(steps) / len(steps))
    else:
        assert_reads(figures_of(page, "step")[f"{name}, over the whole trace"], total)
    show(page, "layers")
    assert "✓" in page.text("#view-layers .sum")
    assert page.evaluate("(t => t.scrollWidth <= t.clientWidth)(document.querySelector('#view-layers .scroller'))")
    layers = table_of(page, "Layers")
    assert_reads(layers.total["time"], total, layers.units["time"])
    backward = sum(row.self_time_ns for row in analysis.layers if row.phase == "backward")
    if backward:  # as the text table has it
        assert_reads(layers.total["backward"], backward / 1000 / step_count(analysis), layers.units["backward"])
    if any(row.peak_bytes for row in analysis.layers):
        assert "peak" in layers.units
    for by, key in (("phase", "phase"), ("class", "class_name")):
        if by == "phase" or analysis.kernels:
            show(page, "kernels", by)
            table = table_of(page, f"Kernels by {by.capitalize()}", level=1)
            table.assert_shows(
                "time_us", largest(summed((getattr(row, key), row.time_ns) for row in analysis.classes), analysis)
            )


def assert_numbers(page: Page, analysis: Analysis, drawn: set[str]) -> None:
    """What the tables say is what the rows say, of one step."""
    steps = step_count(analysis)
    if "op" in drawn:
        show(page, "kernels", "op")
        times = largest(summed((row.op, row.self_time_ns) for row in analysis.operators), analysis)
        operators = table_of(page, "Operators")
        operators.assert_shows("self_time_us", times)
        operators.assert_shows("share", [us / (analysis.time.total_ns / 1000 / steps) for us in times])
    if "kernel" in drawn and analysis.kernels:
        show(page, "kernels", "kernel")
        kernels = table_of(page, "Kernels by Kernel")
        keys = [(f"{row.name}\0{row.class_name}", row) for row in analysis.kernels]
        times_ns, counts = (
            summed((key, row.time_ns) for key, row in keys),
            summed((key, row.count) for key, row in keys),
        )
        kernels.assert_shows("time_us", largest(times_ns, analysis))
        dearest = sorted(times_ns, key=lambda key: -times_ns[key])
        if len(set(times_ns.values())) == len(times_ns):  # else their order is not known
            kernels.assert_shows("count", [counts[key] / steps for key in dearest])
            kernels.assert_shows("mean_us", [times_ns[key] / 1000 / counts[key] for key in dearest])
    if "communication" in drawn:
        show(page, "kernels", "communication")
        together = table_of(page, "Collectives")
        of = ("collective", "group", "group_size", "dtype")
        kinds = summed(("\0".join(str(getattr(row, key)) for key in of), row.time_ns) for row in analysis.collectives)
        together.assert_shows("time_us", largest(kinds, analysis))
    if "waits" in drawn and analysis.synchronisations:
        show(page, "kernels", "waits")
        longest = sorted(analysis.synchronisations, key=lambda row: -row.wait_ns)
        table_of(page, "Waits of the CPU").assert_shows("wait_us", [row.wait_ns / 1000 / steps for row in longest])
    if "roofline" in drawn:
        show(page, "kernels", "roofline")
        parts = table_of(page, "Parts of the model")
        points = sorted(roofline(analysis).points, key=lambda point: -point.time_ns)
        assert parts.texts("name")[:3] == [point.name for point in points][:3]
        parts.assert_shows("time_us", [point.time_ns / 1000 for point in points])
        if "flops_per_s" in parts.units:
            parts.assert_shows("flops_per_s", [point.flops_per_s for point in points])
        if "of_roof" in parts.units:
            parts.assert_shows("of_roof", [point.of_roof for point in points])
    if analysis.memory.get("peak"):
        show(page, "memory")
        owners, held = table_of(page, "Who holds the memory at the peak"), analysis.memory["peak"]["owners"]
        owners.assert_shows("bytes", [owner["bytes"] for owner in held])
        assert owners.texts("category") == [category_name(owner["category"]) for owner in held[: len(owners.rows)]]
        assert_curve(page, analysis)


def assert_curve(page: Page, analysis: Analysis) -> None:
    """Categories make what is allocated, at each moment that is told, and the curve names the peak."""
    assert_reads(page.text(".memory-curve .reading").split(": ")[-1], analysis.memory["peak"]["allocated_bytes"])
    lines = page.evaluate(
        "[...document.querySelectorAll('.memory-curve .unseen tbody tr')]"
        ".map(row => [...row.cells].slice(2).map(one => one.textContent))"
    )
    assert lines
    for allocated, *categories in (list(map(read_number, line)) for line in lines):
        within = allocated[1] + sum(off for _, off in categories)
        assert sum(value for value, _ in categories) == pytest.approx(allocated[0], abs=within)
