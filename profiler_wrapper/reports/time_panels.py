"""The panels of the time plot: layers, steps, and what is followed by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.phase import PHASES
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import has_like_steps, outside_steps_ns, per_step, step_numbers, steps_in_words
from profiler_wrapper.reports.followed import Followed
from profiler_wrapper.reports.plot_rows import LayerBar, StepLines, rest_bars
from profiler_wrapper.reports.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "#999999"
_ALL = "#666666"
_HIGHEST_REST = 1.3  # what is not in the layers may be this much higher than the highest layer, else it is cut


def draw_layers(axes: Axes, analysis: Analysis, bars: Sequence[LayerBar], width_in: float) -> None:
    """Stacked bars by phase, over them a line of attention for each backend, and what no layer holds at the right."""
    figures.prepare(axes, ylabel=f"ms {per_step(analysis)}")
    positions = list(range(len(bars)))
    bottom = [0.0] * len(bars)
    for phase in PHASES:
        heights = [bar.times_ms.get(phase, 0.0) for bar in bars]
        if not any(heights):
            continue
        figures.draw_bars(axes, heights, bottom, color=figures.PHASE_COLORS[phase], label=phase.replace("_", " "))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    backends = list(dict.fromkeys(backend for bar in bars for backend in bar.attention_ms))
    for color, backend in zip(figures.ATTENTION_COLORS * (len(backends) // 6 + 1), backends, strict=False):
        heights = [bar.attention_ms.get(backend, math.nan) for bar in bars]
        axes.plot(positions, heights, "-o", color=color, markersize=figures.mark_size(len(bars)), linewidth=1.4,
                  label=figures.literal(f"attention: {backend}"))  # fmt: skip
    rest = rest_bars(analysis, bars)
    places = figures.name_layers(axes, [bar.layer for bar in bars], width_in, beside=list(rest))
    highest = max(bottom) or max(rest.values(), default=0.0) or 1.0
    top = 1.05 * max(highest, min(_HIGHEST_REST * highest, max(rest.values(), default=0.0)))
    axes.set_ylim(0, top * (1.06 if rest else 1))
    _draw_rest(axes, list(rest.values()), places, top)
    figures.legend_above(axes, _over(analysis))


def _draw_rest(axes: Axes, times_ms: Sequence[float], places: Sequence[float], top: float) -> None:
    """A grey bar for each, with its number; one that is too high is cut, and an arrow says so."""
    apart = places[1] - places[0] if len(places) > 1 else 1.0
    for place, time_ms in zip(places, times_ms, strict=True):
        axes.bar(place, min(time_ms, top), 0.8 * apart, color=_GREY)
        text = f"{time_ms:.3f}" + (" \N{UPWARDS ARROW}" if time_ms > top else "")
        axes.annotate(text, (place, min(time_ms, top)), xytext=(0, 2), textcoords="offset points", ha="center",
                      va="bottom", fontsize=figures.FONT_SIZE - 3)  # fmt: skip


def _over(analysis: Analysis) -> str:
    """The title of the layers: what their times are over."""
    steps = step_numbers(analysis)
    if has_like_steps(analysis):
        return f"Layers, step {steps[0]}" if len(steps) == 1 else f"Layers, mean of {steps_in_words(analysis)}"
    outside_ns = outside_steps_ns(analysis)
    outside = f" and {outside_ns / 1e6:.3f} ms in no step" if outside_ns else ""
    return f"Layers, sum of {steps_in_words(analysis)}{outside}"


def draw_one_step(axes: Axes, lines: StepLines) -> None:
    """A bar per phase, one for attention and one for the whole step."""
    times = {phase.replace("_", " "): times[0] for phase, times in lines.phases_ms.items()}
    times |= {"attention": lines.attention_ms[0]} if any(lines.attention_ms) else {}
    colors = [figures.PHASE_COLORS[phase] for phase in lines.phases_ms] + [figures.INK] * (
        len(times) - len(lines.phases_ms)
    )
    figures.prepare(axes, ylabel="")
    bars = axes.barh([*times, "all"], [*times.values(), lines.total_ms[0]], 0.7, color=[*colors, _ALL])
    axes.bar_label(bars, fmt="%.3f ms", padding=4, fontsize=figures.FONT_SIZE - 1)
    axes.grid(visible=False)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=figures.FONT_SIZE)
    figures.legend_above(axes, f"Step {lines.steps[0]}")


def draw_steps(axes: Axes, lines: StepLines) -> None:
    """A line per phase, one for attention and one for the whole step."""
    figures.prepare(axes, ylabel="ms")
    size = figures.mark_size(len(lines.steps))
    axes.plot(lines.steps, lines.total_ms, "-s", color=_ALL, markersize=size, linewidth=1.6, label="all")
    for phase, times in lines.phases_ms.items():
        style = "--v" if phase == "accumulate_grad" else "-o"
        axes.plot(lines.steps, times, style, color=figures.PHASE_COLORS[phase], markersize=size,
                  label=phase.replace("_", " "))  # fmt: skip
    if any(lines.attention_ms):
        axes.plot(lines.steps, lines.attention_ms, ":D", color=figures.INK, markersize=size, label="attention")
    _finish_steps(axes, "Steps")


def draw_unlike_steps(axes: Axes, lines: StepLines) -> None:
    """Marks alone, since no step is like the one before it; what a step does not have has no mark."""
    figures.prepare(axes, ylabel="ms")
    size = figures.mark_size(len(lines.steps)) + 1.5
    for i, (phase, times) in enumerate(lines.phases_ms.items()):
        axes.plot(lines.steps, _without_zeros(times), "osv^"[i % 4], color=figures.PHASE_COLORS[phase],
                  markersize=size, label=phase.replace("_", " "))  # fmt: skip
    if any(lines.attention_ms):
        axes.plot(lines.steps, _without_zeros(lines.attention_ms), "D", color=figures.INK, markersize=size - 2,
                  label="attention")  # fmt: skip
    _finish_steps(axes, f"{len(lines.steps)} steps in all")


def _without_zeros(times: Sequence[float]) -> list[float]:
    return [time or math.nan for time in times]


def _finish_steps(axes: Axes, title: str, xlabel: str = "step") -> None:
    from matplotlib.ticker import MaxNLocator

    figures.from_zero(axes)
    axes.set_xlabel(xlabel, fontsize=figures.FONT_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.03)
    figures.legend_above(axes, title)


def draw_followed(axes: Axes, series: Sequence[Followed], steps: Sequence[int]) -> None:
    """A line for each of `series`, which are all times or all values of functions."""
    is_time = series[0].is_time
    figures.prepare(axes, ylabel="ms" if is_time else "own unit")
    by_step = all(len(one.values) == len(steps) for one in series)
    colors = [*figures.PHASE_COLORS.values(), *figures.ATTENTION_COLORS]
    for i, one in enumerate(series):
        heights = [math.nan if value is None else value for value in one.values]
        places = steps if by_step else range(len(heights))
        axes.plot(places, heights, ("-o", "--s", ":D")[i % 3], color=colors[(i * 3) % len(colors)],
                  markersize=figures.mark_size(len(heights)),
                  label=figures.literal(shorten(one.name, 40)))  # fmt: skip
    title = "Followed by name" if is_time else "Followed by functions"
    _finish_steps(axes, title, "step" if by_step else "entry")
