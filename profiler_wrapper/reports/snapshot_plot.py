"""A memory snapshot as a picture: who held memory over time, the peak, and what could not be had."""

from __future__ import annotations

import os
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.allocator_model import AllocatorReport, Band, DeviceMemory, MemoryHistory, MemoryOwner
from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.snapshot_json import highest_states
from profiler_wrapper.reports.snapshot_text import cure, failure_line, owner_name
from profiler_wrapper.reports.text import shorten
from profiler_wrapper.units import MIB, file_size, mebibytes, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Float64 = np.ndarray[tuple[int], np.dtype[np.float64]]

_POINTS = 3000  # of a curve: a screen has fewer columns
_BARS = 10
_DEVICES = 4
_NOTES, _NOTE_LETTERS = 3, 130
_WIDTH_BARS = 60  # of a figure
_NAME_LETTERS = 100
_TITLE_LETTERS = 118
_BAR_SHARE = 0.35  # of the width, for the longest bar: the rest is for names
_END = 0.02  # of the width: how long the last state is shown
_ABOVE = 1.2  # of the highest curve: room for what is written there
# Okabe and Ito's colours, and grey for the rest.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_REST, _FAILED = "#bbbbbb", "#D55E00"


@figures.own_style()
def draw_snapshot(report: AllocatorReport, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: for each device (at most 4) its history by owner, and the owners at its worst moment, in MiB."""
    title = f"Memory snapshot {shorten(report.name, 50)} ({file_size(report.file_bytes)})"
    devices = [one for one in report.devices if one.reserved_bytes or one.history][:_DEVICES]
    if not devices:
        figures.say(path, title, "No memory is held, and there is no history.")
        return
    panels = [panel for one in devices for panel in _panels(one)]
    heights = [4.4 if is_history else 0.6 + 0.27 * bars for _, is_history, bars in panels]
    figure = figures.new_figure(_WIDTH_BARS, height_in=0.9 + 0.3 * min(_NOTES, len(report.notes)) + sum(heights))
    figures.head(figure, title)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (one, is_history, _) in zip(axes, panels, strict=True):
        if is_history and one.history is not None:
            _draw_history(panel, one, one.history, cure(one, report))
        else:
            _draw_owners(panel, one)
    if report.notes:
        notes = "\n".join(fill(f"note: {note}", _NOTE_LETTERS) for note in report.notes[:_NOTES])
        figure.supxlabel(figures.literal(notes), fontsize=figures.FONT_SIZE - 1)
    figures.save(figure, path)


def _panels(one: DeviceMemory) -> list[tuple[DeviceMemory, bool, int]]:
    """What is drawn of a device: its history if it has one, then owners as so many bars."""
    bars = min(_BARS + 1, max(1, len(_worst(one)[1])))
    return [*([(one, True, 0)] if one.history is not None else []), (one, False, bars)]


def _worst(one: DeviceMemory) -> tuple[str, tuple[MemoryOwner, ...], int]:
    """The moment whose owners matter: the failure, else the peak, else now."""
    if one.failure is not None:
        moment = one.failure.moment
        return (
            f"when {mebibytes(one.failure.requested_bytes)} MiB could not be had",
            moment.owners,
            moment.allocated_bytes,
        )
    if one.history is not None:
        return "at the peak", one.history.peak.owners, one.history.peak.allocated_bytes
    return "now", one.owners, one.allocated_bytes


def _draw_history(axes: Axes, one: DeviceMemory, history: MemoryHistory, cured: str) -> None:
    figures.prepare(axes, ylabel="MiB")
    states = np.union1d(highest_states(history.allocated_bytes, _POINTS), [history.peak.state])
    x = _x(history, states)
    states, x = np.append(states, states[-1]), np.append(x, x[-1] + (_END * (x[-1] - x[0]) or 1.0))
    shown = [band.allocated_bytes[states] / MIB for band in history.bands]
    rest = (
        history.allocated_bytes[states] / MIB - np.sum(shown, axis=0)
        if shown
        else history.allocated_bytes[states] / MIB
    )
    axes.stackplot(x, *shown, rest, step="post", linewidth=0, colors=[*_COLORS[: len(shown)], _REST])
    if rest.max() > 0.0:
        axes.fill_between([], [], color=_REST, label="all other lines")  # the others' names are at the bars
    axes.plot(x, history.allocated_bytes[states] / MIB, color=figures.INK, linewidth=0.9, drawstyle="steps-post")
    top = history.peak.allocated_bytes / MIB
    if history.reserved_bytes is not None:
        held = history.reserved_bytes[states] / MIB
        axes.plot(x, held, "--", color="#555555", linewidth=1.3, drawstyle="steps-post", label="reserved")
        top = max(top, float(held.max()))
    for failure in history.failures:
        at = float(_x(history, np.array([failure.moment.state]))[0])
        axes.axvline(
            at, color=_FAILED, linewidth=1.6, label="out of memory" if failure is history.failures[0] else None
        )
    axes.set_ylim(0, top * _ABOVE or 1)
    axes.set_xlim(x[0], x[-1])
    axes.set_xlabel(_x_label(history), fontsize=figures.FONT_SIZE)
    _mark_peak(axes, history)
    texts = [fill(text, _TITLE_LETTERS) for text in (_history_title(one, history), cured) if text]
    figures.legend_above(axes, "\n".join(texts))


def _mark_peak(axes: Axes, history: MemoryHistory) -> None:
    at = float(_x(history, np.array([history.peak.state]))[0])
    left, right = axes.get_xlim()
    on_the_right = at > (left + right) / 2
    axes.plot([at], [history.peak.allocated_bytes / MIB], "v", color=figures.INK, markersize=7, zorder=5)
    axes.annotate(
        f"peak {mebibytes(history.peak.allocated_bytes)} MiB ",
        (at, history.peak.allocated_bytes / MIB),
        xytext=(-8 if on_the_right else 8, 9),
        textcoords="offset points",
        ha="right" if on_the_right else "left",
        fontsize=figures.FONT_SIZE,
        fontweight="bold",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.85, "linewidth": 0},
        zorder=6,
    )


def _history_title(one: DeviceMemory, history: MemoryHistory) -> str:
    if text := failure_line(one):
        return text
    return (
        f"cuda:{one.device}: allocated memory over time (as asked for), by the line that holds it (colours: see below)"
    )


def _x(history: MemoryHistory, states: Int64) -> Float64:
    """Seconds since the first entry, else the number of the entry."""
    if history.time_us is None:
        return states.astype(np.float64)
    seconds: Float64 = (history.time_us[np.maximum(states - 1, 0)] - history.time_us[0]) / 1e6
    return seconds


def _x_label(history: MemoryHistory) -> str:
    return "seconds since the first entry of the history" if history.time_us is not None else "entry of the history"


def _draw_owners(axes: Axes, one: DeviceMemory) -> None:
    when, owners, total = _worst(one)
    shown = owners[:_BARS]
    rows = [(owner.size_bytes, _name(owner, _NAME_LETTERS)) for owner in shown]
    if rest := owners[_BARS:]:
        rows.append((sum(owner.size_bytes for owner in rest), f"({len(rest)} more)"))
    colors = [*_colors(one, shown), *([_REST] if rest else [])]
    axes.barh(range(len(rows)), [size / MIB for size, _ in rows], 0.75, color=colors)
    for i, (size, name) in enumerate(rows):
        text = f"  {mebibytes(size)} MiB, {percent(size, total)} %:  {name}"
        axes.text(size / MIB, i, text, va="center", fontsize=figures.FONT_SIZE - 1)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xlim(0, max((size for size, _ in rows), default=0) / MIB / _BAR_SHARE or 1)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    title = f"cuda:{one.device}: who holds the {mebibytes(total)} MiB {when}"
    axes.set_title(figures.literal(title), loc="left", fontsize=figures.FONT_SIZE + 1, fontweight="bold", pad=8)


def _colors(one: DeviceMemory, owners: tuple[MemoryOwner, ...]) -> list[str]:
    """An owner has the colour of its band in the history."""
    bands = one.history.bands if one.history is not None else ()
    of_band = {(band.place, band.metadata): color for band, color in zip(bands, _COLORS, strict=False)}
    default = _REST if bands else _COLORS[0]
    return [of_band.get((owner.place, owner.metadata), default) for owner in owners]


def _name(owner: MemoryOwner | Band, letters: int) -> str:
    return figures.literal(shorten(owner_name(owner, unicode=True), letters))
