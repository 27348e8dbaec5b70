"""Fourteen numbers of a run: in the events of the page, its tables, its panel, the printed table and `result.json`.

Of each, `result.json` is the measure; all others are right to the last digit that they show.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from browser import Page
from page_tables import UNITS, Opener, figures_of, read_number, show, table_of
from page_traces import DDP, QWEN, RESNET, TIMESFORMER, V100, events_of, with_events, within
from profiler_wrapper.reports.describe import has_like_steps, step_count
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.tables.timeline_columns import Timeline
from shared_traces import needs_traces
from timeline_rows import rows

pytestmark = pytest.mark.full

Told = Iterator[tuple[str, float, float]]  # what; its value in µs, bytes, FLOPs or of 1; how far it may be off
FOURTEEN = {
    "total", "step", "busy", "layer forward", "layer backward", "attention", "headline", "peak", "retained", "FLOPs",
    "MFU", "kernel", "exposed communication", "idle",
}  # fmt: skip


def layer_of(result: ProfileResult) -> str:
    """The outermost layer with most time; `""` where no layer is known."""
    outermost = [row for row in result.layers if row.layer and row.depth == 0]
    return max(outermost, key=lambda row: row.time_ns).layer if outermost else ""


def kernel_of(data: dict[str, Any]) -> str:
    times: dict[str, float] = defaultdict(float)
    for row in data["kernels"]:
        times[row["name"]] += row["time_us"]
    return max(times, key=lambda name: times[name])


def by_json(result: ProfileResult, layer: str, kernel: str) -> Told:
    data, steps = to_dict(result), step_count(result)
    overview, memory, use = data["overview"], data["memory"], data["utilization"]
    wall_us = sum(step["span_us"] for step in overview["steps"])
    yield "total", data["time"]["total_us"] / steps, 0
    yield "step", wall_us / len(overview["steps"]), 0
    yield "busy", 1 - overview["gaps_us"] / wall_us, 0
    yield "idle", overview["gaps_us"] / len(overview["steps"]), 0
    of_layer = [row for row in data["layers"] if row["layer"] == layer]
    for row in of_layer:
        if row["phase"] in ("forward", "backward"):
            yield f"layer {row['phase']}", row["time_us"] / steps, 0
    attention = [row["attention_by_backend_us"] for row in data["layers"] if row["parent"] is None]
    if any(attention):
        yield "attention", sum(sum(times.values()) for times in attention) / steps, 0
    if memory.get("peak"):
        yield "peak", memory["peak"]["allocated_bytes"], 0
    if kept := [row["retained_bytes"] for row in of_layer if row["retained_bytes"] is not None]:
        yield "retained", sum(kept), 0
    if (flops := [row["flops_per_step"] for row in of_layer]) and None not in flops:
        yield "FLOPs", sum(flops) * (1 if has_like_steps(result) else len(overview["steps"])), 0
    if use and use["mfu"] is not None:
        yield "MFU", use["mfu"], 0
    yield "kernel", sum(row["time_us"] for row in data["kernels"] if row["name"] == kernel) / steps, 0
    if data["time"]["exposed_communication_us"]:
        yield "exposed communication", data["time"]["exposed_communication_us"] / steps, 0


def by_events(made: Timeline, result: ProfileResult, layer: str, kernel: str) -> Told:
    """The sums that the page has of all steps, in whole nanoseconds."""
    found, steps = rows(made, "sums"), step_count(result)

    def time_us(counts: Any) -> float:
        return sum(row["time_ns"] for row in found if counts(row)) / 1000 / steps

    yield "total", time_us(lambda row: True), 1e-3
    yield "kernel", time_us(lambda row: row["name"] == kernel), 1e-3
    is_below = within(layer)
    for phase in ("forward", "backward"):
        if value_us := time_us(lambda row, phase=phase: is_below(row) and row["phase"] == phase):
            yield f"layer {phase}", value_us, 1e-3
    idle = [step.idle_ns for step in made.steps if step.drawn]
    if len(idle) == len(result.overview.steps) and None not in idle:  # type: ignore[union-attr]
        yield "idle", sum(idle) / 1000 / len(idle), 1e-3  # type: ignore[arg-type]


def by_tables(page: Page, layer: str, kernel: str) -> Told:
    """Tables and figures of the places."""
    show(page, "step")
    figures = figures_of(page, "step")
    for label, text in figures.items():
        for begin, what in (("Step time", "step"), ("Busy", "busy"), ("MFU", "MFU"), ("Peak memory", "peak")):
            if label.startswith(begin) and text != "–":
                yield what, *read_number(text)
    if found := re.search(r"Device idle ([\d.,]+ \S+)", page.text("#where")):
        yield "idle", *read_number(found[1])
    show(page, "layers")
    table = table_of(page, "Layers")
    yield "total", *read_number(table.total["time"], table.units["time"])
    if table.total.get("attention"):
        yield "attention", *read_number(table.total["attention"], table.units["attention"])
    for row in table.rows:
        if row["label"] == layer:
            for key, what in (
                ("forward", "layer forward"), ("backward", "layer backward"), ("retained", "retained"),
                ("flops", "FLOPs"),
            ):  # fmt: skip
                if row.get(key) not in (None, "", "–"):
                    yield what, *read_number(row[key], table.units[key])
    show(page, "kernels", "kernel")
    kernels = table_of(page, "Kernels by Kernel", level=1)
    yield "kernel", *read_number(kernels.rows[0]["time_us"], kernels.units["time_us"])
    if page.evaluate("page.data.time.exposed_communication_us"):
        show(page, "kernels", "communication")
        (exposed,) = [text for label, text in figures_of(page, "kernels").items() if label.startswith("Exposed")]
        yield "exposed communication", *read_number(exposed)


def by_panel(page: Page, layer: str, kernel: str) -> Told:
    """What is selected, told beside the place."""
    text = ""
    if layer:
        page.evaluate(f"location.hash = '#layers?select=' + encodeURIComponent({'layer:' + layer!r})")
        page.wait("document.querySelector('#panel h2')")
        text = page.text("#panel")
    for words, what in (
        (r"forward\t", "layer forward"), (r"backward\t", "layer backward"), (r"Retained\n", "retained"),
        (r"FLOPs [^\n]*\n", "FLOPs"),
    ):  # fmt: skip
        if found := re.search(rf"^{words}([\d.,]+ \S+)", text, re.MULTILINE):
            yield what, *read_number(found[1])
    page.evaluate(f"location.hash = '#kernels?select=' + encodeURIComponent({'kernel:' + kernel!r})")
    page.wait("document.querySelector('#panel[aria-label=\"Selected kernel\"] h2')")
    (time,) = re.findall(r"^Time [^\n]*\n([\d.,]+ \S+),", page.text("#panel"), re.MULTILINE)
    yield "kernel", *read_number(time)


def printed_number(text: str, unit: str) -> tuple[float, float]:
    return float(text) * UNITS[unit], 0.5001 * 10.0 ** -len(text.partition(".")[2]) * UNITS[unit]


def by_print(result: ProfileResult, layer: str) -> Told:
    """The table of a terminal."""
    text = console_table(result, rows=60, width=300)
    for words, what, unit in (
        (r"device time ([\d.]+) ms", "total", "ms"), (r"step takes ([\d.]+) ms", "step", "ms"),
        (r"device busy ([\d.]+) %(?! of the trace)", "busy", "%"),
        (r"communication ([\d.]+) ms", "exposed communication", "ms"),
        (r"^MFU ([\d.]+) %", "MFU", "%"), (r"^memory: peak ([\d.]+) MiB", "peak", "MiB"),
    ):  # fmt: skip
        if found := re.search(words, text, re.MULTILINE):
            yield what, *printed_number(found[1], unit)
    lines = text.split("\n")
    heads, units = (
        (lines[at] for at in (1, 2))
        if lines[1].startswith("layer ")
        else next((line, lines[i + 1]) for i, line in enumerate(lines) if line.startswith("layer "))
    )
    ends = {match[0]: match.end() for match in re.finditer(r"\S+", heads)}
    unit_at = {match.end(): match[0] for match in re.finditer(r"\S+", units)}
    for line in lines:
        for column, what in (
            ("forward", "layer forward"), ("backward", "layer backward"), ("retained", "retained"), ("work", "FLOPs"),
        ):  # fmt: skip
            if line.split("  ")[0] == layer and column in ends and (cell := line[: ends[column]].rsplit(" ", 1)[-1]):
                yield what, *printed_number(cell, unit_at[ends[column]])
        if line.startswith("TOTAL") and "attention" in ends and (cell := line[: ends["attention"]].rsplit(" ", 1)[-1]):
            yield "attention", *printed_number(cell, unit_at[ends["attention"]])


def by_headline(page: Page) -> Told:
    """The share that the first line says, and the row of the bar that it leads to."""
    show(page, "step")
    (share,) = re.findall(r"(\d[\d.]*) %", page.text(".big"))
    page.click(".big a")
    page.wait("document.querySelector('.made-of')")
    if page.evaluate("page.data.summary.headline.about") == "idle":
        (row,) = re.findall(r"Device idle [\d.,]+ \S+ ([\d.]+) %", page.text("#where"))
    else:
        shares = [float(text) for text in re.findall(r"([\d.]+) %", page.text(".made-of section"))]
        row = str(min(shares, key=lambda one: abs(one - float(share))))
    yield "headline", *printed_number(row, "%")
    yield "headline", *printed_number(share, "%")


@needs_traces
@pytest.mark.parametrize("name", [QWEN, RESNET, V100, TIMESFORMER, DDP])
def test_fourteen_numbers(opened: Opener, name: str) -> None:
    result = with_events(name)
    layer, kernel = layer_of(result), kernel_of(to_dict(result))
    page = opened(result)
    expected = {what: value for what, value, _ in by_json(result, layer, kernel)}
    views = {
        "events": by_events(events_of(name), result, layer, kernel),
        "tables": by_tables(page, layer, kernel),
        "panel": by_panel(page, layer, kernel),
        "print": by_print(result, layer),
        "headline": by_headline(page),
    }
    wrong, told = [], defaultdict[str, set[str]](set)
    for view, numbers in views.items():
        for what, value, off in numbers:
            told[what].add(view)
            measure = expected.setdefault(what, value)
            if abs(value - measure) > off + 1e-9 * measure:
                wrong.append(f"{what}: {measure} in result.json, {value} +- {off} by {view}")
    assert not wrong, "\n".join(wrong)
    assert set(told) <= FOURTEEN
    for what in expected:
        assert what == "headline" or len(told[what]) >= 2, (what, told[what])
