"""Three pictures: memory by category over time, time by layer and step, and memory by layer."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler_wrapper.place.names import PHASES, Phase
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import (
    Followed,
    attention_backends,
    followed,
    has_like_steps,
    model_in_words,
    outside_steps_ns,
    per_step,
    step_numbers,
    steps_in_words,
)
from profiler_wrapper.reports.figures import CATEGORY_COLORS
from profiler_wrapper.reports.folding import NS_PER_MS, LayerBar, layer_bars, rest_bars
from profiler_wrapper.reports.memory import (
    category_name,
    moment_in_words,
    owner_groups,
    why_no_memory,
    why_no_memory_use,
)
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.tables.memory.use import points_of
from profiler_wrapper.tables.model import CATEGORIES, Analysis, MemoryCategory, MemoryUse
from profiler_wrapper.tables.statistics import split_number
from profiler_wrapper.trace.recording import Float64
from profiler_wrapper.units import MIB, TIME_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# A picture of memory over time: the categories stacked, the phases below them, the peak and who holds it.

_MOST_POINTS = 1500  # about one for each pixel
_WIDE_ENOUGH = 0.009  # of the width, for each letter of a phase's name
_MOST_NAMED_STEPS = 12
_OWNERS = 3
_LONGEST_OWNER = 90
# What stays lies below what comes and goes.
_FROM_BELOW: tuple[MemoryCategory, ...] = (
    "params", "os_params", "os_state", "grads", "other", "communication", "activation", "workspace",
)  # fmt: skip
# Greys, as colours stand for categories; the forward's are light, those of the optimizer dark.
_PHASE_GREYS = dict(zip(("other", *PHASES[:-1]), np.linspace(0.97, 0.52, len(PHASES)).astype(str), strict=True))


def draw_categories(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Write a PNG: what each category holds over time in MiB, reserved where known, the peak of each step.

    Below stand the peak and its largest owners.
    """
    use = analysis.memory_use
    title = f"Memory by category: {model_in_words(analysis)}"
    if use is None or not len(use.timeline.time_ns):
        figures.say(path, title, f"Memory by category is not available, because {why_no_memory_use(analysis)}.")
        return
    timeline, events = use.timeline, points_of(use, most=_MOST_POINTS)
    held = dict(zip(CATEGORIES, timeline.bytes_by_category[:, events], strict=True))
    bands = [(category_name(name), CATEGORY_COLORS[name], held[name]) for name in _FROM_BELOW if held[name].any()]
    reserved = None if timeline.reserved_bytes is None else timeline.reserved_bytes[events]
    made = figures.picture(path, title, bars=75, height_in=6.6, ratios=(12, 1), share_x=True, foot=peak_text(use))
    with made as (axes, strip):
        figures.prepare(axes, ylabel="MiB")
        peak = _ms(use, use.peak.time_ns), use.peak.total_bytes
        figures.draw_held(axes, _ms(use, timeline.time_ns[events]), bands, reserved_bytes=reserved, peak=peak)
        _mark_steps(axes, use)
        for phase in _draw_phases(strip, use):
            axes.fill_between([], [], color=_PHASE_GREYS[phase], label=f"phase {phase}")
        figures.legend_above(axes, f"Allocated on {use.device}, stacked by category")


def peak_text(use: MemoryUse) -> str:
    """Return the peak, and on a line each the largest that hold it."""
    held, reserved = use.peak.total_bytes, use.peak.reserved_bytes
    text = f"Peak {moment_in_words(use)}".rstrip() + f": {held / MIB:.1f} MiB allocated"
    if reserved is not None:
        text += f", {reserved / MIB:.1f} MiB reserved ({(reserved - held) / MIB:.1f} MiB of it free)"
    lines = [f"{text}. Held by:"]
    groups = owner_groups(use.peak_owners)
    for group in groups[:_OWNERS]:
        who = shorten(clean(group.text, unicode=True), _LONGEST_OWNER)
        lines.append(f"{category_name(group.category)}: {who}, {group.size_bytes / MIB:.1f} MiB")
    if rest := sum(group.size_bytes for group in groups[_OWNERS:]):
        lines.append(f"{len(groups) - _OWNERS} more: {rest / MIB:.1f} MiB")
    return "\n".join(lines)


def _ms(use: MemoryUse, time_ns: Any) -> Any:
    """Return the milliseconds since the recording began, of one time or an array of them."""
    return (time_ns - use.begin_ns) / 1e6


def _mark_steps(axes: Axes, use: MemoryUse) -> None:
    """Mark the peak of each step, with its size where they are few."""
    times, total = use.timeline.time_ns, use.timeline.total_bytes
    within = [(step.number, slice(*np.searchsorted(times, [step.start_ns, step.end_ns]))) for step in use.steps]
    peaks = [(number, events.start + int(total[events].argmax())) for number, events in within if len(times[events])]
    places = [event for _, event in peaks]
    axes.plot(_ms(use, times[places]), total[places] / MIB, "o", color="white", markeredgecolor=figures.INK, zorder=4,
              markersize=figures.mark_size(len(peaks)), label="peak of a step" if peaks else None)  # fmt: skip
    white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0, "alpha": 0.8}
    for number, event in peaks if len(peaks) <= _MOST_NAMED_STEPS else ():
        size = int(total[event]) / MIB
        axes.annotate(f"step {number}: {size:.1f}", (_ms(use, times[event]), size), (0, 7), ha="center", zorder=6,
                      textcoords="offset points", bbox=white, fontsize=figures.FONT_SIZE - 1)  # fmt: skip


def _draw_phases(axes: Axes, use: MemoryUse) -> list[Phase]:
    """Draw a strip of greys in which wide phases carry their names; return the phases that carry none anywhere."""
    figures.prepare(axes, ylabel="", xlabel="ms since the recording began")
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    first_ns, last_ns = use.timeline.time_ns[[0, -1]].tolist()
    phases = [phase for _, phase in use.timeline.phase_starts]
    edges = _ms(use, np.clip([*(start_ns for start_ns, _ in use.timeline.phase_starts), last_ns], first_ns, last_ns))
    spans = [(phase, at, end - at) for phase, at, end in zip(phases, edges[:-1], edges[1:], strict=True) if end > at]
    drawn = list(dict.fromkeys(phase for phase, *_ in spans))
    for phase in drawn:
        places = [(at_ms, length_ms) for name, at_ms, length_ms in spans if name == phase]
        axes.broken_barh(places, (0, 1), facecolors=_PHASE_GREYS[phase], linewidth=0)
    least_ms = _WIDE_ENOUGH * (last_ns - first_ns) / 1e6  # for each letter
    wide = [span for span in spans if span[2] > least_ms * len(span[0])]
    for phase, at_ms, length_ms in wide:
        axes.text(at_ms + length_ms / 2, 0.47, phase, ha="center", va="center", fontsize=figures.FONT_SIZE - 1,
                  color="white" if float(_PHASE_GREYS[phase]) < 0.6 else figures.INK)  # fmt: skip
    return [phase for phase in drawn if all(phase != name for name, *_ in wide)]


# What stands under the time plot, and time per step, as numbers.


@dataclass(frozen=True)
class Averages:
    """What stands under the time plot, in ms per layer and step."""

    layers: int  # how many the averages are over
    what: str  # "block", "block of layers.*" where there are others, or "layer"
    average_ms: float
    attention_ms: float  # of FlashAttention where there is any, else of all attention
    flash: tuple[str, ...]  # backends that are FlashAttention
    others: tuple[str, ...]  # the other backends of attention

    @property
    def ratio(self) -> float:
        return self.attention_ms / self.average_ms if self.average_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class StepLines:
    """Time per step: one line a phase, one for attention."""

    steps: tuple[int, ...]
    total_ms: tuple[float, ...]
    phases_ms: Mapping[Phase, tuple[float, ...]]
    attention_ms: tuple[float, ...]


def averages(analysis: Analysis, bars: Sequence[LayerBar]) -> Averages:
    """Return the averages over the sibling blocks that take most, or over all layers where there are no blocks."""
    groups: dict[str, list[LayerBar]] = defaultdict(list)
    for bar in bars:
        if bar.block:
            groups[split_number(bar.layer, left_open="*")[0]].append(bar)
    of_all = ("", list(bars))
    siblings, over = max(groups.items(), key=lambda group: sum(bar.time_ms for bar in group[1]), default=of_all)
    backends = list(attention_backends(analysis))
    flash = tuple(backend for backend in backends if _is_flash(analysis, backend))
    counted = flash or backends
    return Averages(
        layers=len(over),
        what=("block" if len(groups) == 1 else f"block of {siblings}") if siblings else "layer",
        average_ms=sum(bar.time_ms for bar in over) / len(over),
        attention_ms=sum(bar.attention_ms.get(backend, 0.0) for bar in over for backend in counted) / len(over),
        flash=flash,
        others=tuple(backend for backend in backends if backend not in flash),
    )


def _is_flash(analysis: Analysis, backend: str) -> bool:
    """Return whether its name says so, or, of an external library's, the names of all its kernels."""
    if "flash" in backend.lower():
        return True
    kernels = [kernel for row in analysis.attention if row.backend == backend for kernel in row.kernels]
    return backend == "external" and bool(kernels) and all("flash" in kernel.lower() for kernel in kernels)


def step_lines(analysis: Analysis) -> StepLines:
    """Return the times of the steps that have a number, in order."""
    rows = sorted((row for row in analysis.steps if row.step is not None), key=lambda row: row.step or 0)
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in rows)]
    return StepLines(
        steps=tuple(row.step for row in rows if row.step is not None),
        total_ms=tuple(row.time_ns / NS_PER_MS for row in rows),
        phases_ms={phase: tuple(row.phases_ns.get(phase, 0) / NS_PER_MS for row in rows) for phase in phases},
        attention_ms=tuple(row.attention_ns / NS_PER_MS for row in rows),
    )


# The panels of the time plot: layers, steps, and what is followed by name.

_MOST_STEPS_NAMED = 30
_HIGHEST_REST = 1.3  # what is not in the layers may be this much higher than the highest layer, else it is cut
_MOST_FOLLOWED = 10


def draw_layers(axes: Axes, analysis: Analysis, bars: Sequence[LayerBar]) -> None:
    """Draw bars by phase, over them a line of attention for each backend, and what no layer holds at the right."""
    figures.prepare(axes, ylabel=f"ms {per_step(analysis)}")
    heights = _draw_stacked(axes, {phase: [bar.times_ms.get(phase, 0.0) for bar in bars] for phase in PHASES})
    backends = dict.fromkeys(name for bar in bars for name in bar.attention_ms)
    for backend, color in zip(backends, cycle(figures.ATTENTION_COLORS), strict=False):
        axes.plot([bar.attention_ms.get(backend, math.nan) for bar in bars], "-o", color=color, linewidth=1.4,
                  markersize=figures.mark_size(len(bars)), label=figures.literal(f"attention: {backend}"))  # fmt: skip
    rest = rest_bars(analysis, bars)
    places = figures.name_layers(axes, [bar.layer for bar in bars], beside=list(rest))
    most = max(rest.values(), default=0.0)
    highest = float(heights.max()) or most or 1.0
    top = 1.05 * max(highest, min(_HIGHEST_REST * highest, most))
    axes.set_ylim(0, top * (1.06 if rest else 1))
    # A grey bar for each, with its number; one that is too high is cut, and an arrow says so.
    texts = [f"{time_ms:.3f}" + " \N{UPWARDS ARROW}" * (time_ms > top) for time_ms in rest.values()]
    width = 0.8 * (places[1] - places[0] if len(places) > 1 else 1.0)
    grey = axes.bar(places, np.minimum(list(rest.values()), top), width, color="#999999")
    axes.bar_label(grey, texts, padding=2, fontsize=figures.FONT_SIZE - 3)
    figures.legend_above(axes, _over(analysis))


def _over(analysis: Analysis) -> str:
    """Return the title of the layers: what their times are over."""
    steps = step_numbers(analysis)
    if has_like_steps(analysis):
        return f"Layers, step {steps[0]}" if len(steps) == 1 else f"Layers, mean of {steps_in_words(analysis)}"
    outside_ns = outside_steps_ns(analysis)
    outside = f" and {outside_ns / 1e6:.3f} ms in no step" if outside_ns else ""
    return f"Layers, sum of {steps_in_words(analysis)}{outside}"


def _draw_stacked(axes: Axes, times_ms: Mapping[Phase, Sequence[float]]) -> Float64:
    """Draw a bar for each place, its phases on one another; return how high the bars are."""
    heights = np.zeros(max(map(len, times_ms.values()), default=0))
    for phase, times in times_ms.items():
        if any(times):
            figures.draw_bars(axes, times, heights, color=figures.PHASE_COLORS[phase], label=phase)
            heights = heights + times
    return heights


def draw_steps(axes: Axes, lines: StepLines) -> None:
    """Draw bars by phase, over them marks of attention and of the whole step."""
    figures.prepare(axes, ylabel="ms", xlabel="step")
    _draw_stacked(axes, lines.phases_ms)
    size = figures.mark_size(len(lines.steps))
    axes.plot(lines.total_ms, "s", color="#666666", markersize=size, label="all")
    if any(lines.attention_ms):
        shown = [time or math.nan for time in lines.attention_ms]
        axes.plot(shown, ":D", color=figures.INK, markersize=size, label="attention")
    figures.from_zero(axes)
    named = range(0, len(lines.steps), -(-len(lines.steps) // _MOST_STEPS_NAMED))
    axes.set_xticks(named, [str(lines.steps[place]) for place in named])
    axes.set_xlim(-0.8, len(lines.steps) - 0.2)
    figures.legend_above(axes, "Steps")


def draw_followed(axes: Axes, series: Sequence[Followed], steps: Sequence[int]) -> None:
    """Draw a line for each of `series`, which are all times or all values of functions."""
    from matplotlib.ticker import MaxNLocator

    is_time, by_step = series[0].is_time, all(len(one.values) == len(steps) for one in series)
    figures.prepare(axes, ylabel="ms" if is_time else "own unit", xlabel="step" if by_step else "entry")
    for i, one in enumerate(series[:_MOST_FOLLOWED]):
        heights = np.array(one.values, np.float64)  # None: not a number
        axes.plot(steps if by_step else range(len(heights)), heights, ("-o", "--s", ":D")[i % 3],
                  color=figures.ROLE_COLORS[i % len(figures.ROLE_COLORS)], markersize=figures.mark_size(len(heights)),
                  label=figures.literal(shorten(one.name, 40)))  # fmt: skip
    figures.from_zero(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.03)
    figures.legend_above(axes, "Followed by name" if is_time else "Followed by functions")


def draw_time(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Write a PNG: time by layer (phases stacked, attention as a line), by step, and what is followed by name.

    Below stand the average time of a block, that of its attention and their ratio.
    """
    bars = layer_bars(analysis)
    title = f"{TIME_NAMES[analysis.time_basis].capitalize()} by layer: {model_in_words(analysis)}"
    if not analysis.time.total_ns:
        figures.say(path, title, "No time was recorded, so there is nothing to draw.")
        return
    if not bars:
        reasons = [f"{row.reason}: {row.time_ns / 1e6:.3f} ms" for row in analysis.unattributed]
        whole = f"None of the {analysis.time.total_ns / 1e6:.3f} ms has a layer, so there is nothing to draw by layer."
        figures.say(path, title, "\n".join([whole, *reasons]))
        return
    lines = step_lines(analysis)
    known = [one for one in followed(analysis) if one.known]
    # Times and the values of functions have no axis in common.
    series = [group for is_time in (True, False) if (group := [one for one in known if one.is_time == is_time])]
    panels = 1 + bool(lines.steps) + len(series)
    ratios, height_in, foot = [1.5, 1, 1, 1][:panels], min(11.9, 2.2 + 2.9 * panels), caption(analysis, bars)
    with figures.picture(path, title, bars=len(bars), height_in=height_in, ratios=ratios, foot=foot) as all_axes:
        draw_layers(all_axes[0], analysis, bars)
        if lines.steps:
            draw_steps(all_axes[1], lines)
        for axes, group in zip(all_axes[panels - len(series) :], series, strict=True):
            draw_followed(axes, group, lines.steps)


def draw_memory(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Write a PNG: allocated, reserved and peak memory layer after layer, and what each layer retains, in MiB.

    Means over all calls; layers are in model order.
    """
    bars = layer_bars(analysis)
    known = [bar for bar in bars if bar.entry_mib is not None and bar.exit_mib is not None]
    title = f"{'Device' if analysis.time_basis == 'device' else 'CPU'} memory by layer: {model_in_words(analysis)}"
    if not known:
        figures.say(path, title, f"Memory by layer is not available, because {why_no_memory(analysis)}.")
        return
    retained = {bar.layer: bar.retained_mib for bar in bars if bar.retained_mib is not None}
    notes = ["reserved: not available"] * all(bar.reserved_mib is None for bar in known)
    if analysis.time_basis == "cpu":
        notes.append("on a CPU, of what was there before only what model and optimizers held counts")
    ratios, foot = [1] * (1 + bool(retained)), "; ".join(notes)
    height_in = 1.6 + 3.3 * len(ratios)
    with figures.picture(path, title, bars=len(bars), height_in=height_in, ratios=ratios, foot=foot) as (axes, *more):
        _draw_borders(axes, known)
        for below in more:
            figures.prepare(below, ylabel="MiB per call")
            figures.draw_bars(below, list(retained.values()), color=figures.PHASE_COLORS["forward"])
            figures.from_zero(below)
            figures.name_layers(below, list(retained))
            figures.entitle(below, f"Retained: allocated in the layer and {why_retained(analysis)}, mean per call")


def _draw_borders(axes: Axes, bars: Sequence[LayerBar]) -> None:
    """Draw what is allocated from entry to exit of each layer; reserved and peak where they are known."""
    figures.prepare(axes, ylabel="MiB")
    borders = [x for i in range(len(bars)) for x in (i - 0.5, i + 0.5, math.nan)]  # model order is not that of time
    allocated = [size for bar in bars for size in (bar.entry_mib, bar.exit_mib, math.nan)]
    axes.plot(borders, np.array(allocated, np.float64), color=figures.PHASE_COLORS["forward"], linewidth=1.8,
              label="allocated, entry to exit")  # fmt: skip
    peak = np.array([bar.peak_mib for bar in bars], np.float64)  # None: not a number
    reserved = np.array([bar.reserved_mib for bar in bars], np.float64)
    if np.isfinite(peak).any():
        axes.plot(peak, "v", color="#D55E00", markersize=figures.mark_size(len(bars)), label="peak inside")
    if np.isfinite(reserved).any():
        axes.plot(reserved, "--", color="#666666", drawstyle="steps-mid", label="reserved")
    figures.name_layers(axes, [bar.layer for bar in bars])
    figures.legend_above(axes, "Memory at each layer, means over all calls, in model order")


def why_retained(analysis: Analysis) -> str:
    """Return what memory that layers retain is for."""
    if any(row.phase in ("backward", "recompute") for row in analysis.layers):
        return "kept for backward"
    return "alive after the forward (outputs, caches)"


def caption(analysis: Analysis, bars: Sequence[LayerBar]) -> str:
    """Return the average time of a block, that of its attention and their ratio, and what they are over."""
    numbers, on_device = averages(analysis, bars), analysis.time_basis == "device"
    average, attention = f"{numbers.average_ms:.3f} ms", f"{numbers.attention_ms:.3f} ms"
    flash, others = " + ".join(numbers.flash), " + ".join(numbers.others)
    name, note = "FA" if flash else "Attention", "no attention kernel seen"
    if flash:
        note = f"{'FA: ' * on_device}attention by {flash}" + (f", without {others}" if others else "")
    elif others:
        note = f"{'no FA: ' * on_device}attention is {others}"
    seen = bool(flash or others)
    if on_device:
        head = f"Average Time: {average}" + f"     {name} Average Time: {attention}" * seen
        if seen and numbers.what != "layer":  # a ratio over layers that are not alike says nothing
            head += f"     {name} / Average Time Ratio: {numbers.ratio:.3f}"
    else:
        head = f"attention {attention} of {average}" if seen else average
    what = f"per {shorten(numbers.what, 60)} (mean of {numbers.layers})"
    return f"{head}\n{what}, {per_step(analysis)}, all phases; {note}"
