"""Two pictures: time by layer and step, and memory by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.model import PHASES, Analysis
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import machine, per_step, rank_in_words, root_names, step_count, steps_in_words
from profiler_wrapper.reports.memory_rows import MemoryCourse, memory_course, why_no_memory
from profiler_wrapper.reports.plot_rows import (
    Averages,
    LayerBar,
    StepLines,
    averages,
    layer_bars,
    step_lines,
)
from profiler_wrapper.reports.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TRACKED = 10
_FEW = 60  # up to here lines carry a mark at each point


@figures.own_style()
def draw_time(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: time by layer (phases stacked, attention as a line), by step, and the tracked series.

    Below stand the average time of a block, that of its attention and their ratio.
    """
    bars = layer_bars(analysis)
    title = f"{_basis(analysis)} time by layer: {_what(analysis)}"
    if not bars or not analysis.time.total_ns:
        figures.say(path, title, _why_no_time(analysis))
        return
    lines, tracked = step_lines(analysis), _tracked(analysis)
    panels = 1 + bool(lines.steps) + bool(tracked)
    figure = figures.new_figure(len(bars), height_in=2.2 + 2.9 * panels)
    axes = figure.subplots(panels, 1, squeeze=False, height_ratios=[1.5, 1, 1][:panels])[:, 0]
    figures.head(figure, title)
    _draw_layers(axes[0], analysis, bars, figure.get_figwidth())
    if lines.steps:
        (_draw_one_step if len(lines.steps) == 1 else _draw_steps)(axes[1], lines)
    if tracked:
        _draw_tracked(axes[-1], tracked, lines.steps)
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
        _draw_retained(axes[1], retained, figure.get_figwidth())
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
    """The three numbers of the seed, what they are over, and what the bars leave out."""
    numbers = averages(analysis, bars)
    if numbers is None:
        return ""
    outside = analysis.time.total_ns / step_count(analysis) / 1e6 - sum(bar.time_ms for bar in bars)
    over = (
        f"per {numbers.what} (mean of {numbers.layers}), {per_step(analysis)}, all phases; "
        f"{_attention_note(numbers)}; beside the bars: {max(0.0, outside):.3f} ms"
    )
    return f"{'     '.join(_three_numbers(numbers))}\n{over}"


def _three_numbers(numbers: Averages) -> list[str]:
    texts = [f"Average Time: {numbers.average_ms:.3f} ms"]
    if numbers.flash or numbers.others:
        name = "FA" if numbers.flash else "Attention"
        texts.append(f"{name} Average Time: {numbers.attention_ms:.3f} ms")
        texts.append(f"{name} / Average Time Ratio: {numbers.ratio:.3f}")
    return texts


def _attention_note(numbers: Averages) -> str:
    flash, others = " + ".join(numbers.flash), " + ".join(numbers.others)
    if flash:
        return f"FA: attention by {flash}" + (f", without {others}" if others else "")
    return f"no FA: attention is {others}" if others else "no attention kernel seen"


def _draw_layers(axes: Axes, analysis: Analysis, bars: Sequence[LayerBar], width_in: float) -> None:
    """Stacked bars by phase, and over them a line of attention for each backend."""
    figures.prepare(axes, ylabel=f"ms {per_step(analysis)}")
    positions = list(range(len(bars)))
    bottom = [0.0] * len(bars)
    for phase in PHASES:
        heights = [bar.times_ms.get(phase, 0.0) for bar in bars]
        if not any(heights):
            continue
        axes.bar(positions, heights, 0.8, bottom, color=figures.PHASE_COLORS[phase], label=phase.replace("_", " "))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    backends = list(dict.fromkeys(backend for bar in bars for backend in bar.attention_ms))
    for color, backend in zip(figures.ATTENTION_COLORS * (len(backends) // 6 + 1), backends, strict=False):
        heights = [bar.attention_ms.get(backend, math.nan) for bar in bars]
        axes.plot(positions, heights, "-o", color=color, markersize=_mark_size(len(bars)), linewidth=1.4,
                  label=figures.literal(f"attention: {backend}"))  # fmt: skip
    figures.name_layers(axes, [bar.layer for bar in bars], width_in)
    axes.set_ylim(0, max(bottom) * 1.05 or 1)
    figures.legend_above(axes, f"Layers, mean of {steps_in_words(analysis)}")


def _mark_size(points: int) -> float:
    return 4.5 if points <= _FEW else 2.5


def _draw_one_step(axes: Axes, lines: StepLines) -> None:
    """A bar per phase, one for attention and one for the whole step."""
    times = {phase.replace("_", " "): times[0] for phase, times in lines.phases_ms.items()}
    times |= {"attention": lines.attention_ms[0]} if any(lines.attention_ms) else {}
    colors = [figures.PHASE_COLORS[phase] for phase in lines.phases_ms] + [figures.INK] * (
        len(times) - len(lines.phases_ms)
    )
    figures.prepare(axes, ylabel="")
    bars = axes.barh([*times, "all"], [*times.values(), lines.total_ms[0]], 0.7, color=[*colors, "#666666"])
    axes.bar_label(bars, fmt="%.3f ms", padding=4, fontsize=figures.FONT_SIZE - 1)
    axes.grid(visible=False)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=figures.FONT_SIZE)
    figures.legend_above(axes, f"Step {lines.steps[0]}")


def _draw_steps(axes: Axes, lines: StepLines) -> None:
    """A line per phase, one for attention and one for the whole step."""
    from matplotlib.ticker import MaxNLocator

    figures.prepare(axes, ylabel="ms")
    size = _mark_size(len(lines.steps))
    axes.plot(lines.steps, lines.total_ms, "-s", color="#666666", markersize=size, linewidth=1.6, label="all")
    for phase, times in lines.phases_ms.items():
        style = "--v" if phase == "accumulate_grad" else "-o"
        axes.plot(lines.steps, times, style, color=figures.PHASE_COLORS[phase], markersize=size,
                  label=phase.replace("_", " "))  # fmt: skip
    if any(lines.attention_ms):
        axes.plot(lines.steps, lines.attention_ms, ":D", color=figures.INK, markersize=size, label="attention")
    figures.from_zero(axes)
    axes.set_xlabel("step", fontsize=figures.FONT_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.03)
    figures.legend_above(axes, "Steps")


def _tracked(analysis: Analysis) -> dict[str, tuple[float | None, ...]]:
    """The tracked series that have any value."""
    known = {name: values for name, values in analysis.series.items() if any(v is not None for v in values)}
    return dict(list(known.items())[:_MOST_TRACKED])


def _draw_tracked(axes: Axes, tracked: dict[str, tuple[float | None, ...]], steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    figures.prepare(axes, ylabel="us, or own unit")
    by_step = all(len(values) == len(steps) for values in tracked.values())
    colors = [*figures.PHASE_COLORS.values(), *figures.ATTENTION_COLORS]
    for i, (name, values) in enumerate(tracked.items()):
        heights = [math.nan if value is None else value for value in values]
        places = steps if by_step else range(len(heights))
        axes.plot(places, heights, ("-o", "--s", ":D")[i % 3], color=colors[(i * 3) % len(colors)],
                  markersize=_mark_size(len(heights)), label=figures.literal(shorten(name, 40)))  # fmt: skip
    figures.from_zero(axes)
    axes.set_xlabel("step" if by_step else "iteration", fontsize=figures.FONT_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figures.legend_above(axes, "Tracked names")


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
        axes.plot(positions, peak, "v", color="#D55E00", markersize=_mark_size(len(points)), label="peak inside")
    if not all(map(math.isnan, reserved)):
        axes.plot(positions, reserved, "--", color="#666666", drawstyle="steps-mid", label="reserved")
    figures.name_layers(axes, [point.layer for point in points], width_in)
    step = "" if course.step is None else f" of step {course.step}"
    when = "means over all calls, in model order" if course.means else "in the order of the calls"
    where = "pass through the layers" if course.passes else "layer"
    figures.legend_above(axes, f"Memory at each {where}{step}, {when}")


def _memory_notes(analysis: Analysis, course: MemoryCourse) -> str:
    notes = []
    if all(point.reserved_mib is None for point in course.points):
        notes.append("reserved: not available")
    if analysis.time_basis == "cpu":
        notes.append("on a CPU only what was allocated while profiling counts")
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


def _draw_retained(axes: Axes, bars: Sequence[LayerBar], width_in: float) -> None:
    figures.prepare(axes, ylabel="MiB per call")
    heights = [bar.retained_mib or 0.0 for bar in bars]
    axes.bar(range(len(bars)), heights, 0.8, color=figures.PHASE_COLORS["forward"])
    axes.set_ylim(0, max(heights) * 1.05 or 1)
    figures.name_layers(axes, [bar.layer for bar in bars], width_in)
    figures.legend_above(axes, "Retained: allocated in the layer and kept for backward, mean per call")
