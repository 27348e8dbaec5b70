"""Two pictures: time by layer and step, and memory by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import generates, machine, per_step, rank_in_words, root_names
from profiler_wrapper.reports.followed import followed
from profiler_wrapper.reports.memory_rows import MemoryCourse, memory_course, why_no_memory
from profiler_wrapper.reports.plot_rows import Averages, LayerBar, averages, layer_bars, step_lines
from profiler_wrapper.reports.text import shorten
from profiler_wrapper.reports.time_panels import (
    draw_followed,
    draw_layers,
    draw_one_step,
    draw_steps,
    draw_unlike_steps,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_FOLLOWED = 10
_BACKWARD = ("backward", "recompute")


@figures.own_style()
def draw_time(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: time by layer (phases stacked, attention as a line), by step, and what is followed by name.

    Below stand the average time of a block, that of its attention and their ratio.
    """
    bars = layer_bars(analysis)
    title = f"{_basis(analysis)} time by layer: {_what(analysis)}"
    if not bars or not analysis.time.total_ns:
        figures.say(path, title, _why_no_time(analysis))
        return
    lines = step_lines(analysis)
    known = [one for one in followed(analysis) if one.known]
    # Times and the values of functions have no axis in common.
    groups = [group for is_time in (True, False) if (group := [one for one in known if one.is_time == is_time])]
    panels = 1 + bool(lines.steps) + len(groups)
    figure = figures.new_figure(len(bars), height_in=min(11.9, 2.2 + 2.9 * panels))
    axes = figure.subplots(panels, 1, squeeze=False, height_ratios=[1.5, 1, 1, 1][:panels])[:, 0]
    figures.head(figure, title)
    draw_layers(axes[0], analysis, bars, figure.get_figwidth())
    if lines.steps:
        one_step, unlike = len(lines.steps) == 1, generates(analysis)
        (draw_one_step if one_step else draw_unlike_steps if unlike else draw_steps)(axes[1], lines)
    for panel, group in zip(axes[panels - len(groups) :], groups, strict=True):
        draw_followed(panel, group[:_MOST_FOLLOWED], lines.steps)
    figure.supxlabel(figures.literal(caption(analysis, bars)), fontsize=figures.FONT_SIZE)
    figures.save(figure, path)


@figures.own_style()
def draw_memory(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: allocated, reserved and peak memory layer after layer, and what each layer retains, in MiB."""
    bars = layer_bars(analysis)
    course = memory_course(analysis, bars)
    title = f"{_basis(analysis)} memory by layer: {_what(analysis)}"
    if not course.points:
        figures.say(path, title, f"Memory by layer is not available, because {why_no_memory(analysis)}.")
        return
    retained = [bar for bar in bars if bar.retained_mib is not None]
    panels = 1 + bool(retained)
    figure = figures.new_figure(max(len(bars), len(course.points)), height_in=1.6 + 3.3 * panels)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figures.head(figure, title)
    _draw_course(axes[0], course, figure.get_figwidth())
    if retained:
        _draw_retained(axes[1], retained, figure.get_figwidth(), why_retained(analysis))
    if notes := _memory_notes(analysis, course):
        figure.supxlabel(figures.literal(notes), fontsize=figures.FONT_SIZE)
    figures.save(figure, path)


def _basis(analysis: Analysis) -> str:
    return "Device" if analysis.time_basis == "device" else "CPU"


def _what(analysis: Analysis) -> str:
    model = shorten(root_names(analysis) or "no layers", 48)
    where = shorten(machine(analysis), 40)
    return ", ".join(part for part in (f"{model} on {where}", rank_in_words(analysis)) if part)


def _why_no_time(analysis: Analysis) -> str:
    reasons = [f"{row.reason}: {row.time_ns / 1e6:.3f} ms" for row in analysis.unattributed]
    if not analysis.time.total_ns:
        return "No time was recorded, so there is nothing to draw."
    total = f"None of the {analysis.time.total_ns / 1e6:.3f} ms has a layer, so there is nothing to draw by layer."
    return "\n".join([total, *reasons])


def caption(analysis: Analysis, bars: Sequence[LayerBar]) -> str:
    """The three numbers of the seed, and what they are over."""
    numbers = averages(analysis, bars)
    if numbers is None:
        return ""
    what = f"per {shorten(numbers.what, 60)} (mean of {numbers.layers})"
    over = f"{what}, {per_step(analysis)}, all phases; {_attention_note(numbers)}"
    return f"{'     '.join(_three_numbers(numbers))}\n{over}"


def _three_numbers(numbers: Averages) -> list[str]:
    texts = [f"Average Time: {numbers.average_ms:.3f} ms"]
    if numbers.flash or numbers.others:
        name = "FA" if numbers.flash else "Attention"
        texts.append(f"{name} Average Time: {numbers.attention_ms:.3f} ms")
        if numbers.alike:  # a ratio over layers that are not alike says nothing
            texts.append(f"{name} / Average Time Ratio: {numbers.ratio:.3f}")
    return texts


def _attention_note(numbers: Averages) -> str:
    flash, others = " + ".join(numbers.flash), " + ".join(numbers.others)
    if flash:
        return f"FA: attention by {flash}" + (f", without {others}" if others else "")
    return f"no FA: attention is {others}" if others else "no attention kernel seen"


def _draw_course(axes: Axes, course: MemoryCourse, width_in: float) -> None:
    """Allocated from entry to exit of each layer; reserved and peak where they are known."""
    points = course.points
    figures.prepare(axes, ylabel="MiB")
    borders = [x for i in range(len(points)) for x in (i - 0.5, i + 0.5)]
    allocated = [size for point in points for size in (point.entry_mib, point.exit_mib)]
    positions = range(len(points))
    for phase in dict.fromkeys(point.phase for point in points if point.phase not in ("forward", "decode")):
        inside = [i for i, point in enumerate(points) if point.phase == phase]
        for first, last in _runs(inside):
            axes.axvspan(first - 0.5, last + 0.5, color=figures.PHASE_COLORS[phase], alpha=0.12, linewidth=0,
                         label=phase if first == inside[0] else None)  # fmt: skip
    axes.plot(
        borders, allocated, "-", color=figures.PHASE_COLORS["forward"], linewidth=1.8, label="allocated, entry to exit"
    )
    peak = [math.nan if point.peak_mib is None else point.peak_mib for point in points]
    reserved = [math.nan if point.reserved_mib is None else point.reserved_mib for point in points]
    if not all(map(math.isnan, peak)):
        axes.plot(positions, peak, "v", color="#D55E00", markersize=figures.mark_size(len(points)), label="peak inside")
    if not all(map(math.isnan, reserved)):
        axes.plot(positions, reserved, "--", color="#666666", drawstyle="steps-mid", label="reserved")
    figures.name_layers(axes, [point.layer for point in points], width_in)
    step = "" if course.step is None else f", step {course.step} ({course.why_step})"
    when = "means over all calls, in model order" if course.means else "in the order of the calls"
    where = "pass through the layers" if course.passes else "layer"
    figures.legend_above(axes, f"Memory at each {where}{step}, {when}")


def _memory_notes(analysis: Analysis, course: MemoryCourse) -> str:
    notes = []
    if all(point.reserved_mib is None for point in course.points):
        notes.append("reserved: not available")
    if analysis.time_basis == "cpu":
        notes.append("on a CPU, of what was there before only what model and optimizers held counts")
    return "; ".join(notes)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """`[0, 1, 4]` -> `[(0, 1), (4, 4)]`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _draw_retained(axes: Axes, bars: Sequence[LayerBar], width_in: float, why: str) -> None:
    figures.prepare(axes, ylabel="MiB per call")
    heights = [bar.retained_mib or 0.0 for bar in bars]
    figures.draw_bars(axes, heights, color=figures.PHASE_COLORS["forward"])
    axes.set_ylim(0, max(heights) * 1.05 or 1)
    figures.name_layers(axes, [bar.layer for bar in bars], width_in)
    figures.legend_above(axes, f"Retained: allocated in the layer and {why}, mean per call")


def why_retained(analysis: Analysis) -> str:
    """What memory that layers retain is for."""
    if any(row.phase in _BACKWARD for row in analysis.layers):
        return "kept for backward"
    return "alive after the forward (outputs, caches)"
