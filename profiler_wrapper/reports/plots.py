"""Two pictures: time by layer and step, and memory by layer."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.memory.use import points_of
from profiler_wrapper.analysis.model import CATEGORIES, PHASES, Analysis, MemoryCategory, MemoryUse, Phase
from profiler_wrapper.analysis.statistics import split_number
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import (
    Followed,
    attention_backends,
    followed,
    has_like_steps,
    machine,
    outside_steps_ns,
    per_step,
    rank_in_words,
    root_names,
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
from profiler_wrapper.trace.recording import Int64
from profiler_wrapper.units import MIB, TIME_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# A picture of memory over time: the categories stacked, the phases below them, the peak and who holds it.

_WIDTH_BARS = 75  # a figure as wide as one of so many bars
_HEIGHT_IN = 6.6
_MOST_POINTS = 1500  # about one for each pixel
_WIDE_ENOUGH = 0.009  # of the width, for each letter of a phase's name
_MOST_NAMED_STEPS = 12
_OWNERS = 3
_LONGEST_OWNER = 90
_HEADROOM = 1.12  # for the names of the steps above their peaks
# What stays lies below what comes and goes.
_FROM_BELOW: tuple[MemoryCategory, ...] = (
    "params", "os_params", "os_state", "grads", "other", "communication", "activation", "workspace",
)  # fmt: skip
_RESERVED = figures.INK
# Greys, as colours stand for categories; distinct by their names and order.
_PHASE_GREYS: dict[Phase, str] = {
    "forward": "#ececec",
    "prefill": "#ececec",
    "decode": "#d6d6d6",
    "verify": "#c4c4c4",
    "backward": "#b8b8b8",
    "recompute": "#d6d6d6",
    "accumulate_grad": "#9f9f9f",
    "optimizer": "#848484",
    "other": "#f8f8f8",
}


@figures.own_style()
def draw_categories(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: what each category holds over time in MiB, reserved where known, the peak of each step.

    Below stand the peak and its largest owners.
    """
    use = analysis.memory_use
    title = f"Memory by category: {_what(analysis)}"
    if use is None or not len(use.timeline.time_ns):
        figures.say(path, title, f"Memory by category is not available, because {why_no_memory_use(analysis)}.")
        return
    figure = figures.new_figure(_WIDTH_BARS, height_in=_HEIGHT_IN)
    figures.head(figure, title)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[12, 1])
    _draw_stack(axes, use)
    _mark_steps(axes, use)
    axes.plot(_ms(use.peak.time_ns, use), use.peak.total_bytes / MIB, "v", color=_RESERVED, markersize=9,
              clip_on=False, zorder=5, label="peak")  # fmt: skip
    for phase in _draw_phases(strip, use):
        axes.fill_between([], [], color=_PHASE_GREYS[phase], label=f"phase {phase}")
    figures.from_zero(axes)
    axes.set_ylim(top=axes.get_ylim()[1] * _HEADROOM)
    figures.legend_above(axes, f"Allocated on {use.device}, stacked by category")
    figures.foot(figure, peak_text(use))
    figures.save(figure, path)


def peak_text(use: MemoryUse) -> str:
    """The peak, and on a line each the largest that hold it."""
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


def _ms(time_ns: int, use: MemoryUse) -> float:
    return (time_ns - use.begin_ns) / 1e6


def _draw_stack(axes: Axes, use: MemoryUse) -> None:
    """The last point is held a little longer, so that it can be seen."""
    figures.prepare(axes, ylabel="MiB")
    timeline, events = use.timeline, points_of(use, most=_MOST_POINTS)
    times_ms = (timeline.time_ns[events] - use.begin_ns) / 1e6
    begin_ms, last_ms = times_ms[[0, -1]].tolist()
    end_ms = last_ms + (0.01 * (last_ms - begin_ms) or 1.0)
    times_ms = np.append(times_ms, end_ms)

    def drawn(sizes_bytes: Int64) -> npt.NDArray[np.float64]:
        return np.append(sizes_bytes, sizes_bytes[-1]) / MIB

    below = np.zeros_like(events)
    held_by = dict(zip(CATEGORIES, timeline.bytes_by_category[:, events], strict=True))
    for name in _FROM_BELOW:
        held = held_by[name]
        if held.any():
            axes.fill_between(times_ms, drawn(below), drawn(below + held), step="post", color=CATEGORY_COLORS[name],
                              linewidth=0, label=category_name(name))  # fmt: skip
            below = below + held
    if len(events) == len(timeline.time_ns):
        axes.step(times_ms, drawn(below), where="post", color=figures.INK, linewidth=0.6)
    if timeline.reserved_bytes is not None:
        axes.step(times_ms, drawn(timeline.reserved_bytes[events]), "--", where="post", color=_RESERVED, linewidth=1.2,
                  label="reserved")  # fmt: skip
    axes.set_xlim(begin_ms, end_ms)


def _mark_steps(axes: Axes, use: MemoryUse) -> None:
    """A mark at the peak of each step, with its size where they are few."""
    times, total = use.timeline.time_ns, use.timeline.total_bytes
    peaks = []
    for step in use.steps:
        first, end = np.searchsorted(times, [step.start_ns, step.end_ns]).tolist()
        if end > first:
            event = first + int(total[first:end].argmax())
            peaks.append((step.number, _ms(int(times[event]), use), int(total[event]) / MIB))
    axes.plot([at_ms for _, at_ms, _ in peaks], [size for *_, size in peaks], "o",
              color="white", markeredgecolor=_RESERVED, markersize=figures.mark_size(len(peaks)), zorder=4,
              label="peak of a step" if peaks else None)  # fmt: skip
    for number, at_ms, size in peaks if len(peaks) <= _MOST_NAMED_STEPS else ():
        axes.annotate(f"step {number}: {size:.1f}", (at_ms, size), xytext=(0, 7), textcoords="offset points",
                      ha="center", zorder=6, fontsize=figures.FONT_SIZE - 1, bbox={"boxstyle": "round,pad=0.15",
                      "facecolor": "white", "edgecolor": "none", "alpha": 0.8})  # fmt: skip


def _draw_phases(axes: Axes, use: MemoryUse) -> list[Phase]:
    """A strip of greys; wide phases carry their names. Gives the phases that carry none anywhere."""
    starts, (begin_ns, end_ns) = use.timeline.phase_starts, use.timeline.time_ns[[0, -1]].tolist()
    ends = [*(start_ns for start_ns, _ in starts[1:]), end_ns]
    within = [
        (phase, max(start_ns, begin_ns), min(next_ns, end_ns))
        for (start_ns, phase), next_ns in zip(starts, ends, strict=False)
    ]
    spans = [(phase, _ms(first, use), (last - first) / 1e6) for phase, first, last in within if last > first]
    width_ms = max(1, end_ns - begin_ns) / 1e6
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    axes.set_xlabel("ms since the recording began", fontsize=figures.FONT_SIZE)
    phases = list(dict.fromkeys(phase for phase, *_ in spans))
    for phase in phases:
        places = [(at_ms, length_ms) for name, at_ms, length_ms in spans if name == phase]
        axes.broken_barh(places, (0, 1), facecolors=_PHASE_GREYS[phase], linewidth=0)
    named: set[Phase] = set()
    for phase, at_ms, length_ms in spans:
        if length_ms / width_ms > _WIDE_ENOUGH * len(phase):
            axes.text(at_ms + length_ms / 2, 0.47, phase, ha="center", va="center", fontsize=figures.FONT_SIZE - 1,
                      color="white" if phase == "optimizer" else figures.INK)  # fmt: skip
            named.add(phase)
    return [phase for phase in phases if phase not in named]


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


def averages(analysis: Analysis, bars: Sequence[LayerBar]) -> Averages | None:
    """The seed's three numbers over the sibling blocks that take most, or over all layers where there are no blocks."""
    groups: dict[str, list[LayerBar]] = defaultdict(list)
    for bar in bars:
        if bar.block:
            groups[split_number(bar.layer, left_open="*")[0]].append(bar)
    if not bars:
        return None
    costliest = max(groups, key=lambda name: sum(bar.time_ms for bar in groups[name]), default=None)
    over = list(bars) if costliest is None else groups[costliest]
    backends = list(attention_backends(analysis))
    flash = tuple(backend for backend in backends if _is_flash(analysis, backend))
    counted = flash or backends
    return Averages(
        layers=len(over),
        what="layer" if costliest is None else f"block of {costliest}" if len(groups) > 1 else "block",
        average_ms=sum(bar.time_ms for bar in over) / len(over),
        attention_ms=sum(bar.attention_ms.get(backend, 0.0) for bar in over for backend in counted) / len(over),
        flash=flash,
        others=tuple(backend for backend in backends if backend not in flash),
    )


def _is_flash(analysis: Analysis, backend: str) -> bool:
    """By its name, or, of an external library's, by the names of all its kernels."""
    if "flash" in backend.lower():
        return True
    kernels = [kernel for row in analysis.attention if row.backend == backend for kernel in row.kernels]
    return backend == "external" and bool(kernels) and all("flash" in kernel.lower() for kernel in kernels)


def step_lines(analysis: Analysis) -> StepLines:
    """The steps that have a number, in order."""
    rows = sorted((row for row in analysis.steps if row.step is not None), key=lambda row: row.step or 0)
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in rows)]
    return StepLines(
        steps=tuple(row.step for row in rows if row.step is not None),
        total_ms=tuple(row.time_ns / NS_PER_MS for row in rows),
        phases_ms={phase: tuple(row.phases_ns.get(phase, 0) / NS_PER_MS for row in rows) for phase in phases},
        attention_ms=tuple(row.attention_ns / NS_PER_MS for row in rows),
    )


# The panels of the time plot: layers, steps, and what is followed by name.

_GREY = "#999999"
_ALL = "#666666"
_MOST_STEPS_NAMED = 30
_HIGHEST_REST = 1.3  # what is not in the layers may be this much higher than the highest layer, else it is cut


def draw_layers(axes: Axes, analysis: Analysis, bars: Sequence[LayerBar], width_in: float) -> None:
    """Stacked bars by phase, over them a line of attention for each backend, and what no layer holds at the right."""
    figures.prepare(axes, ylabel=f"ms {per_step(analysis)}")
    bottom = _draw_stacked(axes, {phase: [bar.times_ms.get(phase, 0.0) for bar in bars] for phase in PHASES})
    backends = list(dict.fromkeys(backend for bar in bars for backend in bar.attention_ms))
    for color, backend in zip(figures.ATTENTION_COLORS * (len(backends) // 6 + 1), backends, strict=False):
        heights = [bar.attention_ms.get(backend, math.nan) for bar in bars]
        axes.plot(range(len(bars)), heights, "-o", color=color, markersize=figures.mark_size(len(bars)), linewidth=1.4,
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
    heights = [min(time_ms, top) for time_ms in times_ms]
    texts = [f"{time_ms:.3f}" + " \N{UPWARDS ARROW}" * (time_ms > top) for time_ms in times_ms]
    bars = axes.bar(places, heights, 0.8 * apart, color=_GREY)
    axes.bar_label(bars, texts, padding=2, fontsize=figures.FONT_SIZE - 3)


def _over(analysis: Analysis) -> str:
    """The title of the layers: what their times are over."""
    steps = step_numbers(analysis)
    if has_like_steps(analysis):
        return f"Layers, step {steps[0]}" if len(steps) == 1 else f"Layers, mean of {steps_in_words(analysis)}"
    outside_ns = outside_steps_ns(analysis)
    outside = f" and {outside_ns / 1e6:.3f} ms in no step" if outside_ns else ""
    return f"Layers, sum of {steps_in_words(analysis)}{outside}"


def _draw_stacked(axes: Axes, times_ms: Mapping[Phase, Sequence[float]]) -> list[float]:
    """A bar for each place, its phases on one another; how high the bars are."""
    bottom = [0.0] * max(map(len, times_ms.values()), default=0)
    for phase, heights in times_ms.items():
        if any(heights):
            figures.draw_bars(axes, heights, bottom, color=figures.PHASE_COLORS[phase], label=phase)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    return bottom


def draw_steps(axes: Axes, lines: StepLines) -> None:
    """Stacked bars by phase, over them marks of attention and of the whole step."""
    figures.prepare(axes, ylabel="ms")
    _draw_stacked(axes, lines.phases_ms)
    places, size = range(len(lines.steps)), figures.mark_size(len(lines.steps))
    axes.plot(places, lines.total_ms, "s", color=_ALL, markersize=size, label="all")
    if any(lines.attention_ms):
        shown = [time or math.nan for time in lines.attention_ms]
        axes.plot(places, shown, ":D", color=figures.INK, markersize=size, label="attention")
    figures.from_zero(axes)
    named = places[:: -(-len(places) // _MOST_STEPS_NAMED)]
    axes.set_xticks(named, [str(lines.steps[place]) for place in named])
    axes.set_xlim(-0.8, len(places) - 0.2)
    axes.set_xlabel("step", fontsize=figures.FONT_SIZE)
    figures.legend_above(axes, "Steps")


def draw_followed(axes: Axes, series: Sequence[Followed], steps: Sequence[int]) -> None:
    """A line for each of `series`, which are all times or all values of functions."""
    from matplotlib.ticker import MaxNLocator

    is_time = series[0].is_time
    figures.prepare(axes, ylabel="ms" if is_time else "own unit")
    by_step = all(len(one.values) == len(steps) for one in series)
    colors = [*figures.PHASE_COLORS.values(), *figures.ATTENTION_COLORS]
    for i, one in enumerate(series):
        heights = np.array(one.values, np.float64)  # None: not a number
        places = steps if by_step else range(len(heights))
        axes.plot(places, heights, ("-o", "--s", ":D")[i % 3], color=colors[(i * 3) % len(colors)],
                  markersize=figures.mark_size(len(heights)),
                  label=figures.literal(shorten(one.name, 40)))  # fmt: skip
    figures.from_zero(axes)
    axes.set_xlabel("step" if by_step else "entry", fontsize=figures.FONT_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.03)
    figures.legend_above(axes, "Followed by name" if is_time else "Followed by functions")


_MOST_FOLLOWED = 10
_BACKWARD = ("backward", "recompute")


@figures.own_style()
def draw_time(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: time by layer (phases stacked, attention as a line), by step, and what is followed by name.

    Below stand the average time of a block, that of its attention and their ratio.
    """
    bars = layer_bars(analysis)
    title = f"{TIME_NAMES[analysis.time_basis].capitalize()} by layer: {_what(analysis)}"
    if not bars or not analysis.time.total_ns:
        reasons = [f"{row.reason}: {row.time_ns / 1e6:.3f} ms" for row in analysis.unattributed]
        whole = f"None of the {analysis.time.total_ns / 1e6:.3f} ms has a layer, so there is nothing to draw by layer."
        nothing = "No time was recorded, so there is nothing to draw."
        figures.say(path, title, "\n".join([whole, *reasons]) if analysis.time.total_ns else nothing)
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
        draw_steps(axes[1], lines)
    for panel, group in zip(axes[panels - len(groups) :], groups, strict=True):
        draw_followed(panel, group[:_MOST_FOLLOWED], lines.steps)
    figures.foot(figure, caption(analysis, bars))
    figures.save(figure, path)


@figures.own_style()
def draw_memory(analysis: Analysis, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: allocated, reserved and peak memory layer after layer, and what each layer retains, in MiB.

    Means over all calls; layers are in model order.
    """
    bars = layer_bars(analysis)
    known = [bar for bar in bars if bar.entry_mib is not None and bar.exit_mib is not None]
    title = f"{'Device' if analysis.time_basis == 'device' else 'CPU'} memory by layer: {_what(analysis)}"
    if not known:
        figures.say(path, title, f"Memory by layer is not available, because {why_no_memory(analysis)}.")
        return
    retained = [bar for bar in bars if bar.retained_mib is not None]
    panels = 1 + bool(retained)
    figure = figures.new_figure(len(bars), height_in=1.6 + 3.3 * panels)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figures.head(figure, title)
    _draw_borders(axes[0], known, figure.get_figwidth())
    if retained:
        figures.prepare(axes[1], ylabel="MiB per call")
        heights = [bar.retained_mib or 0.0 for bar in retained]
        figures.draw_bars(axes[1], heights, color=figures.PHASE_COLORS["forward"])
        axes[1].set_ylim(0, max(heights) * 1.05 or 1)
        figures.name_layers(axes[1], [bar.layer for bar in retained], figure.get_figwidth())
        figures.legend_above(axes[1], f"Retained: allocated in the layer and {why_retained(analysis)}, mean per call")
    notes = ["reserved: not available"] * all(bar.reserved_mib is None for bar in known)
    if analysis.time_basis == "cpu":
        notes.append("on a CPU, of what was there before only what model and optimizers held counts")
    figures.foot(figure, "; ".join(notes))
    figures.save(figure, path)


def _what(analysis: Analysis) -> str:
    model = shorten(root_names(analysis) or "no layers", 48)
    where = shorten(machine(analysis), 40)
    return ", ".join(part for part in (f"{model} on {where}", rank_in_words(analysis)) if part)


def caption(analysis: Analysis, bars: Sequence[LayerBar]) -> str:
    """The three numbers of the seed, and what they are over."""
    numbers = averages(analysis, bars)
    if numbers is None:
        return ""
    on_device = analysis.time_basis == "device"
    texts = [f"Average Time: {numbers.average_ms:.3f} ms"]
    flash, others = " + ".join(numbers.flash), " + ".join(numbers.others)
    note = f"{'no FA: ' * on_device}attention is {others}" if others else "no attention kernel seen"
    if flash or others:
        name = "FA" if flash else "Attention"
        texts.append(f"{name} Average Time: {numbers.attention_ms:.3f} ms")
        if numbers.what != "layer":  # a ratio over layers that are not alike says nothing
            texts.append(f"{name} / Average Time Ratio: {numbers.ratio:.3f}")
    if flash:
        note = f"{'FA: ' * on_device}attention by {flash}" + (f", without {others}" if others else "")
    what = f"per {shorten(numbers.what, 60)} (mean of {numbers.layers})"
    if not on_device:
        texts = [f"{numbers.average_ms:.3f} ms"]
        if flash or others:
            texts = [f"attention {numbers.attention_ms:.3f} ms of {numbers.average_ms:.3f} ms"]
    return f"{'     '.join(texts)}\n{what}, {per_step(analysis)}, all phases; {note}"


def _draw_borders(axes: Axes, bars: Sequence[LayerBar], width_in: float) -> None:
    """Allocated from entry to exit of each layer; reserved and peak where they are known."""
    figures.prepare(axes, ylabel="MiB")
    places = range(len(bars))
    borders = [x for i in places for x in (i - 0.5, i + 0.5, math.nan)]  # a line each: model order is not that of time
    allocated = [size for bar in bars for size in (bar.entry_mib or 0.0, bar.exit_mib or 0.0, math.nan)]
    axes.plot(borders, allocated, "-", color=figures.PHASE_COLORS["forward"], linewidth=1.8,
              label="allocated, entry to exit")  # fmt: skip
    peak = [math.nan if bar.peak_mib is None else bar.peak_mib for bar in bars]
    reserved = [math.nan if bar.reserved_mib is None else bar.reserved_mib for bar in bars]
    if not all(map(math.isnan, peak)):
        axes.plot(places, peak, "v", color="#D55E00", markersize=figures.mark_size(len(bars)), label="peak inside")
    if not all(map(math.isnan, reserved)):
        axes.plot(places, reserved, "--", color="#666666", drawstyle="steps-mid", label="reserved")
    figures.name_layers(axes, [bar.layer for bar in bars], width_in)
    figures.legend_above(axes, "Memory at each layer, means over all calls, in model order")


def why_retained(analysis: Analysis) -> str:
    """What memory that layers retain is for."""
    if any(row.phase in _BACKWARD for row in analysis.layers):
        return "kept for backward"
    return "alive after the forward (outputs, caches)"
