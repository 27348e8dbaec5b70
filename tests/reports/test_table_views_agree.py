"""One quantity of one run has one number, whatever shows it: console, log, page, plot, CSV, compare, advice.

Of phases there are two: those of layers, and those of all work, what has no layer included.
"""

from __future__ import annotations

import csv
import io
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

import gpu_traces
import models
from browser import Page
from page_tables import Opener, figures_of, read_number, show, table_of
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.text import CLOCK, compare_csv, compare_text
from profiler_wrapper.reports.describe import step_count
from profiler_wrapper.reports.folding import layer_bars, rest_bars
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.plots import step_lines
from profiler_wrapper.reports.result_json import csv_text
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis
from profiling import result_of
from shared_traces import TRACES

PHASES = ("forward", "backward", "recompute", "accumulate_grad", "optimizer", "other")
RECORDED = ("v100_ddp_resnet.pt.trace.json.gz", "ddp_training_with_memory.pt.trace.json.gz")
UNIT_MS = {"s": 1000.0, "ms": 1.0, "µs": 0.001}

Numbers = dict[str, dict[str, tuple[float, float]]]  # quantity -> view -> ms, and how far off what is shown may be


@cache
def trained(directory: Path) -> Analysis:
    """Micro-batches in a step of which one is held up, so that mean, median and the slowest are far apart."""
    case = models.build("llama")
    with ProfilerWrapper(
        case.model, output_dir=directory, files=("result",), steps="2-6", enable_print_summary=False
    ) as prof:
        optimizer = models.optimizer_of(case.model)
        for step in range(7):
            models.train_step(case, case.model, optimizer, seed=step, accumulate=2)
            time.sleep(0.03 * (step == 4))
            prof.step()
    return result_of(prof)


@pytest.fixture(params=["a training run", RECORDED[0], pytest.param(RECORDED[1], marks=pytest.mark.full)])
def analysis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    if request.param == "a training run":
        return trained(tmp_path_factory.getbasetemp())
    if not (TRACES / request.param).is_file():
        pytest.skip("the recorded traces are not here")
    return gpu_traces.result(request.param)


def assert_agree(numbers: Numbers) -> None:
    """Every view of a quantity within what it rounds of the first one."""
    wrong = []
    for quantity, views in numbers.items():
        (first, (expected, _)), *rest = views.items()
        wrong += [
            f"{quantity}: {expected} by {first}, {value} by {view}"
            for view, (value, within) in rest
            if abs(value - expected) > within
        ]
    assert not wrong, "\n".join(wrong)


def test_texts_plots_tables_and_advice_agree(analysis: Analysis) -> None:
    numbers: Numbers = defaultdict(dict)
    for gather in (by_result, by_csv, by_console, by_log, by_plot, by_advice, by_compare):
        for quantity, value_ms, within in gather(analysis):
            numbers[quantity][gather.__name__] = (value_ms, within)
    assert len(numbers["step"]) >= 5
    assert len(numbers["total"]) >= 4 and len(numbers["optimizer"]) >= 4
    assert_agree(numbers)


@pytest.mark.full
def test_the_page_agrees(analysis: Analysis, opened: Opener) -> None:
    numbers: Numbers = defaultdict(dict)
    page = opened(analysis)
    for quantity, value_ms, within in (*by_result(analysis), *by_csv(analysis)):
        numbers[quantity]["result"] = (value_ms, within)
    for quantity, value_ms, within in by_page(page):
        assert quantity in numbers, quantity
        numbers[quantity]["page"] = (value_ms, within)
    assert "page" in numbers["step"] and "page" in numbers["total"] and "page" in numbers["all backward"]
    assert_agree(numbers)


# --- what each says: (quantity, ms per step, what its rounding hides) ------------------------------

Told = Iterator[tuple[str, float, float]]


def by_result(analysis: Analysis) -> Told:
    """The steps themselves."""
    assert analysis.overview is not None
    yield "step", fmean(step.span_ns for step in analysis.overview.steps) / 1e6, 0
    yield "total", analysis.time.total_ns / step_count(analysis) / 1e6, 0
    phases = dict.fromkeys((row.phase for row in analysis.classes), 0.0)
    for row in analysis.classes:
        phases[row.phase] += row.time_ns / step_count(analysis) / 1e6
    yield from ((f"all {phase}", time_ms, 1e-6) for phase, time_ms in phases.items())
    if analysis.time.exposed_communication_ns:
        yield "exposed", analysis.time.exposed_communication_ns / step_count(analysis) / 1e6, 0


def by_csv(analysis: Analysis) -> Told:
    steps, phases, layers = step_count(analysis), dict.fromkeys(PHASES, 0.0), defaultdict[str, float](float)
    for row in csv.DictReader(io.StringIO(csv_text(analysis))):
        phases[row["phase"]] += float(row["self_time_us"]) / 1000 / steps
        layers[row["layer"]] += float(row["time_us"]) / 1000 / steps
    yield from ((phase, time_ms, 1e-6) for phase, time_ms in phases.items() if time_ms)
    yield from ((f"layer {name}", time_ms, 1e-6) for name, time_ms in layers.items() if name)


def rounded(text: str) -> tuple[float, float]:
    """A number as it is printed, and how far it may be off: a column of larger numbers has fewer decimals."""
    return float(text), 0.51 * 10 ** -len(text.partition(".")[2])


def title_numbers(text: str) -> Told:
    for quantity, words in (
        ("step", "step takes"),
        ("total", "(?:wall time of ops|device time)"),
        ("exposed", "communication"),
    ):
        if found := re.search(rf"{words} ([\d.]+) ms", text):
            yield quantity, *rounded(found[1])


def by_console(analysis: Analysis) -> Told:
    """The columns of TOTAL, and the rows of layers that stand alone."""
    text = console_table(analysis, rows=60, width=240)
    yield from title_numbers(text)
    lines = text.split("\n")
    heading = next(line for line in lines if line.startswith("layer "))
    ends = {match[0]: match.end() for match in re.finditer(r"\S+", heading)}
    total = next(line for line in lines if line.startswith("TOTAL"))
    for phase in PHASES:
        if phase in ends and (cell := total[: ends[phase]].rsplit(" ", 1)[-1]):
            yield phase, *rounded(cell)
    roots = [row.layer for row in analysis.layers if row.depth == 0 and row.layer]
    for line in lines:
        name = line.split("  ")[0].strip()
        if name in roots:
            yield f"layer {name}", *rounded(line[: ends["total"]].rsplit(" ", 1)[-1])


def by_log(analysis: Analysis) -> Told:
    """Sums of the rows of the full table."""
    text = full_table(analysis)
    yield from title_numbers(text)
    lines = text.split("\n\n")[2].split("\n")
    heads = lines[0]
    at, begin, phases = heads.index("self") + len("self"), heads.index("phase"), dict.fromkeys(PHASES, (0.0, 0.0))
    for line in lines[1:]:
        phase, told = line[begin:at].split()[0], line[:at].rsplit(" ", 1)[-1]
        if phase in phases and told:
            time_ms, within_ms = rounded(told)
            phases[phase] = (phases[phase][0] + time_ms, phases[phase][1] + within_ms)
    yield from ((phase, time_ms, within_ms) for phase, (time_ms, within_ms) in phases.items() if within_ms)


def by_plot(analysis: Analysis) -> Told:
    lines, bars = step_lines(analysis), layer_bars(analysis)
    yield from ((f"all {phase}", fmean(times), 1e-6) for phase, times in lines.phases_ms.items())
    yield "total", sum(bar.time_ms for bar in bars) + sum(rest_bars(analysis, bars).values()), 0.0011
    yield from ((f"layer {bar.layer}", bar.time_ms, 1e-6) for bar in bars)
    if "optimizer" in (rest := rest_bars(analysis, bars)):
        yield "optimizer", rest["optimizer"], 1e-6


def by_advice(analysis: Analysis) -> Told:
    """Texts have three digits."""
    summary = analysis.summary
    yield "step", summary["comparable"]["step_us"] / 1000, 0.0001
    texts = [summary["verdict"], *(line for finding in summary["findings"] for line in finding["evidence"])]
    for text in texts:
        if found := re.search(r"a step (?:of|takes) ([\d.]+) (s|ms|µs)", text):
            value_ms = float(found[1]) * UNIT_MS[found[2]]
            yield "step", value_ms, 0.006 * value_ms
    for finding in summary["findings"]:
        if finding["id"] == "communication-bound":
            yield "exposed", finding["details"]["exposed_us"] / 1000, 1e-5 * finding["details"]["exposed_us"] / 1000


def by_compare(analysis: Analysis) -> Told:
    """With itself."""
    found = compare(analysis, analysis)
    time, clock = found.totals[0], found.total(CLOCK)
    assert (time.a, clock.a, time.change, clock.change) == (time.b, clock.b, 0, 0)
    assert time.a is not None and clock.a is not None
    yield "total", time.a / 1e6, 1e-6
    yield "step", clock.a / 1e6, 1e-6
    last = next(line for line in compare_text(found, width=200).split("\n") if line.startswith("TOTAL"))
    shown, within_ms = rounded(last.split()[1])
    assert shown == pytest.approx(time.a / 1e6, abs=within_ms)
    phases = dict.fromkeys(PHASES, 0.0)
    for row in csv.DictReader(io.StringIO(compare_csv(found))):
        if row["phase"]:
            phases[row["phase"]] += float(row["self_time_per_step_us_b"]) / 1000
    yield from ((phase, time_ms, 1e-6) for phase, time_ms in phases.items() if time_ms)


def by_page(page: Page) -> Told:
    show(page, "step")
    figures = figures_of(page, "step")
    for name, quantity in (("Step time", "step"), ("Device time", "total"), ("Wall time of ops", "total")):
        for label, text in figures.items():
            if label.startswith(name):
                value_us, _ = read_number(text)
                yield quantity, value_us / 1000, 0.0006 * value_us / 1000
    show(page, "layers")
    layers = table_of(page, "Layers")
    for phase in PHASES:
        if layers.total.get(phase):
            value_us, within_us = read_number(layers.total[phase], layers.units[phase])
            yield phase, value_us / 1000, within_us / 1000
    show(page, "kernels", "phase")
    table = table_of(page, "Kernels by Phase", level=1)
    for row in table.rows:
        value_us, within_us = read_number(row["time_us"], table.units["time_us"])
        yield f"all {row['name']}", value_us / 1000, within_us / 1000
    if page.evaluate("page.data.time.exposed_communication_us"):
        show(page, "kernels", "communication")
        (exposed,) = [text for label, text in figures_of(page, "kernels").items() if label.startswith("Exposed")]
        value_us, within_us = read_number(exposed)
        yield "exposed", value_us / 1000, within_us / 1000
