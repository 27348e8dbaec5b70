"""A picture of memory over time: the categories stacked, the phases below them, the peak and who holds it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.memory_model import CATEGORIES, MemoryCategory, MemoryUse
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.describe import machine, rank_in_words, root_names
from profiler_wrapper.reports.memory_colors import CATEGORY_COLORS
from profiler_wrapper.reports.memory_owners import owner_groups
from profiler_wrapper.reports.memory_timeline import Course, course, phase_spans, step_peaks
from profiler_wrapper.reports.memory_tree import moment_in_words, why_no_memory_use
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_BARS = 75  # a figure as wide as one of so many bars
_HEIGHT_IN = 6.6
_MOST_POINTS = 1500  # about one for each pixel
_NARROWEST_PHASE = 1 / 700  # of the width
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
_HATCH = "#b8b8b8"
# Greys, as colours stand for categories; told apart by their names and order.
_PHASE_GREYS: dict[Phase, str] = {
    "forward": "#ececec",
    "prefill": "#ececec",
    "decode": "#d6d6d6",
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
    model = shorten(root_names(analysis) or "no layers", 48)
    where = ", ".join(part for part in (shorten(machine(analysis), 40), rank_in_words(analysis)) if part)
    title = f"Memory by category: {model} on {where}"
    if use is None or not len(use.timeline.time_ns):
        figures.say(path, title, f"Memory by category is not available, because {why_no_memory_use(analysis)}.")
        return
    figure = figures.new_figure(_WIDTH_BARS, height_in=_HEIGHT_IN)
    figures.head(figure, title)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[12, 1])
    begin_ns = int(use.timeline.time_ns[0])
    points = course(use.timeline, most=_MOST_POINTS)
    _draw_stack(axes, points, begin_ns)
    _mark_steps(axes, use, begin_ns)
    axes.plot(_ms(use.peak.time_ns, begin_ns), use.peak.total_bytes / MIB, "v", color=_RESERVED, markersize=9,
              clip_on=False, zorder=5, label="peak")  # fmt: skip
    for phase in _draw_phases(strip, use, begin_ns):
        axes.fill_between([], [], color=_PHASE_GREYS[phase], label=f"phase {phase.replace('_', ' ')}")
    figures.from_zero(axes)
    axes.set_ylim(top=axes.get_ylim()[1] * _HEADROOM)
    figures.legend_above(axes, f"Allocated on {use.device}, stacked by category")
    figure.supxlabel(figures.literal(peak_text(use)), fontsize=figures.FONT_SIZE)
    figures.save(figure, path)


def peak_text(use: MemoryUse) -> str:
    """The peak, and on a line each the largest that hold it."""
    peak = use.peak
    when = f" {moment_in_words(use)}".rstrip()
    lines = [f"Peak{when}: {peak.total_bytes / MIB:.1f} MiB allocated{_fragmentation(use)}. Held by:"]
    groups = owner_groups(use.peak_owners)
    for group in groups[:_OWNERS]:
        who = shorten(clean(group.text, unicode=True), _LONGEST_OWNER)
        lines.append(f"{group.category}: {who}, {group.size_bytes / MIB:.1f} MiB")
    if rest := sum(group.size_bytes for group in groups[_OWNERS:]):
        lines.append(f"{len(groups) - _OWNERS} more: {rest / MIB:.1f} MiB")
    return "\n".join(lines)


def _fragmentation(use: MemoryUse) -> str:
    reserved = use.peak.reserved_bytes
    if reserved is None:
        return ""
    return f", {reserved / MIB:.1f} MiB reserved ({(reserved - use.peak.total_bytes) / MIB:.1f} MiB of it free)"


def _ms(time_ns: int, begin_ns: int) -> float:
    return (time_ns - begin_ns) / 1e6


def _draw_stack(axes: Axes, points: Course, begin_ns: int) -> None:
    """The last point is held a little longer, so that it can be seen."""
    figures.prepare(axes, ylabel="MiB")
    times_ms = (points.time_ns - begin_ns) / 1e6
    end_ms = 1.01 * float(times_ms[-1]) or 1.0
    times_ms = np.append(times_ms, end_ms)

    def drawn(sizes_bytes: Int64) -> npt.NDArray[np.float64]:
        return np.append(sizes_bytes, sizes_bytes[-1]) / MIB

    below = np.zeros_like(points.time_ns)
    held_by = dict(zip(CATEGORIES, points.bytes_by_category, strict=True))
    for name in _FROM_BELOW:
        held = held_by[name]
        if held.any():
            axes.fill_between(times_ms, drawn(below), drawn(below + held), step="post", color=CATEGORY_COLORS[name],
                              linewidth=0, label=name.replace("_", " "))  # fmt: skip
            below = below + held
    if not points.is_thinned:
        axes.step(times_ms, drawn(below), where="post", color=figures.INK, linewidth=0.6)
    if points.reserved_bytes is not None:
        axes.step(times_ms, drawn(points.reserved_bytes), "--", where="post", color=_RESERVED, linewidth=1.2,
                  label="reserved")  # fmt: skip
    axes.set_xlim(0.0, end_ms)


def _mark_steps(axes: Axes, use: MemoryUse, begin_ns: int) -> None:
    """A mark at the peak of each step, with its size where they are few."""
    peaks = step_peaks(use)
    axes.plot([_ms(peak.time_ns, begin_ns) for peak in peaks], [peak.total_bytes / MIB for peak in peaks], "o",
              color="white", markeredgecolor=_RESERVED, markersize=figures.mark_size(len(peaks)), zorder=4,
              label="peak of a step" if peaks else None)  # fmt: skip
    if len(peaks) > _MOST_NAMED_STEPS:
        return
    for peak in peaks:
        axes.annotate(f"step {peak.step}: {peak.total_bytes / MIB:.1f}", (_ms(peak.time_ns, begin_ns),
                      peak.total_bytes / MIB), xytext=(0, 7), textcoords="offset points", ha="center", zorder=6,
                      fontsize=figures.FONT_SIZE - 1, bbox={"boxstyle": "round,pad=0.15", "facecolor": "white",
                      "edgecolor": "none", "alpha": 0.8})  # fmt: skip


def _draw_phases(axes: Axes, use: MemoryUse, begin_ns: int) -> list[Phase]:
    """A strip of greys; wide phases carry their names. Gives the phases that carry none anywhere."""
    end_ns = int(use.timeline.time_ns[-1])
    width_ns = max(1, end_ns - begin_ns)
    spans = phase_spans(
        use.timeline.phase_starts, begin_ns=begin_ns, end_ns=end_ns, narrowest_ns=width_ns * _NARROWEST_PHASE
    )
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    axes.set_xlabel("ms since the first allocation that was recorded", fontsize=figures.FONT_SIZE)
    for phase in dict.fromkeys(span.phase for span in spans):
        places = [(_ms(s.start_ns, begin_ns), (s.end_ns - s.start_ns) / 1e6) for s in spans if s.phase == phase]
        grey = _PHASE_GREYS[phase] if phase else "white"
        axes.broken_barh(places, (0, 1), facecolors=grey, edgecolor=_HATCH, linewidth=0, hatch=None if phase else "///")
    named: set[Phase] = set()
    for span in spans:
        name = span.phase.replace("_", " ") if span.phase else "short phases"
        if (span.end_ns - span.start_ns) / width_ns > _WIDE_ENOUGH * len(name):
            axes.text(_ms((span.start_ns + span.end_ns) // 2, begin_ns), 0.47, name, ha="center", va="center",
                      fontsize=figures.FONT_SIZE - 1, color="white" if span.phase == "optimizer" else figures.INK,
                      bbox=None if span.phase else {"boxstyle": "square,pad=0.1", "facecolor": "white",
                                                    "edgecolor": "none"})  # fmt: skip
            named |= {span.phase} if span.phase else set()
    return [phase for phase in dict.fromkeys(span.phase for span in spans) if phase and phase not in named]
