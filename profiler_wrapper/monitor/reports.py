"""A monitored run as text, and as a picture with one panel below the other over the steps."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.monitor.read import PARTS, PERCENTILES, Column, MonitorRun, Spread
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.text import clean, grid, shorten, wrap
from profiler_wrapper.terminal import WIDTH_OF_FILES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- A monitored run as text: 100 columns, or as many as the terminal has ---

# Column of the log -> what it is called, what it is multiplied by, decimals.
_ROWS = {
    "step_time_ms": ("step time, ms", 1.0, 1),
    "TFLOPS_per_GPU": ("TFLOPS/GPU", 1.0, 2),
    "TFLOPS_total": ("TFLOPS, all", 1.0, 2),
    "mfu": ("MFU, %", 100.0, 2),
    "hfu": ("HFU, %", 100.0, 2),
    "tokens_per_sec": ("tokens/s", 1.0, 0),
    "samples_per_sec": ("samples/s", 1.0, 1),
    "memory_GB": ("memory, GB", 1.0, 2),
    "peak_memory_GB": ("peak memory, GB", 1.0, 2),
    "loss": ("loss", 1.0, 4),
    "grad_norm": ("gradient norm", 1.0, 4),
}
_COLUMNS = ("mean", "min", *(f"p{percent}" for percent in PERCENTILES), "max")
FEWEST_FOR_TAILS = 20  # steps or rows: of fewer the 95th percentile is but the largest
_MANY_DECIMALS = 5  # of what is small, as rates on a CPU are
_WHAT = {"steps": "every step", "summary": "means over the log interval", "text": "rows of the log interval"}
_MOST_STRETCHES = 3
_PEAK_LINES = 4
_SLOWEST = 3  # times the median: a single step that is worth a word


def monitor_text(run: MonitorRun, *, width: int = WIDTH_OF_FILES) -> str:
    """The run, its numbers, and what stands out; only numbers may need more than `width` columns."""
    remarks = [line for remark in _remarks(run) for line in wrap(remark, width)]
    return "\n".join([*_title(run, width), "", _table(run), *_breakdown(run), *remarks])


def monitor_title(run: MonitorRun) -> str:
    """`run of 2024-01-29 10:30:00 on NVIDIA H100 80GB HBM3, 8 ranks`."""
    session = run.log.session
    title = f"run of {_readable(str(session.get('start_time') or run.log.first_time))}"
    if session.get("device_name"):
        title += f" on {session['device_name']}"
    if session.get("world_size"):
        title += f", {session['world_size']} rank{'s' if session['world_size'] != 1 else ''}"
    return clean(title)


def _readable(stamp: str) -> str:
    """`20240129_103000` -> `2024-01-29 10:30:00`; others stay."""
    match = re.fullmatch(r"(\d{4})(\d\d)(\d\d)_(\d\d)(\d\d)(\d\d)", stamp)
    return stamp if match is None else "{}-{}-{} {}:{}:{}".format(*match.groups())


def _title(run: MonitorRun, width: int) -> Iterator[str]:
    log, session = run.log, run.log.session
    yield shorten(monitor_title(run), width)
    steps = f"steps {run.first_step} to {run.last_step}, {_WHAT[log.kind]}"
    if log.first_time:
        steps += f", from {log.first_time} to {log.last_time}"
    yield shorten(clean(steps), width)
    yield shorten(clean(f"log {log.path}"), width)
    peaks = session.get("peak_flops_per_s")
    if isinstance(peaks, dict) and peaks:
        peak_list = ", ".join(f"{name} {value / 1e12:.4g}" for name, value in peaks.items())
        yield from wrap(clean(f"peak, TFLOPS: {peak_list} ({session.get('peak_source')})"), width, _PEAK_LINES)


def _table(run: MonitorRun) -> str:
    rows = [
        [label, *_cells(run.spreads[name], factor, decimals)]
        for name, (label, factor, decimals) in _ROWS.items()
        if name in run.spreads
    ]
    return grid(["", *_COLUMNS], rows)


def _cells(spread: Spread, factor: float, decimals: int) -> list[str]:
    shown = decimals if factor * abs(spread["mean"]) >= 0.1 else _MANY_DECIMALS
    tails = {f"p{percent}" for percent in PERCENTILES} - {"p50"} if spread["count"] < FEWEST_FOR_TAILS else set()
    return ["-" if name in tails else f"{factor * spread[name]:.{shown}f}" for name in _COLUMNS]


def _breakdown(run: MonitorRun) -> Iterator[str]:
    if run.breakdown:
        rows = [[name, f"{part['mean_ms']:.3f}", f"{100 * part['share']:.1f}"] for name, part in run.breakdown.items()]
        yield ""
        yield grid(["part of a step", "mean, ms", "share, %"], rows)
        yield ""


def counted(number: int, what: str) -> str:
    """`"1 step"`, `"2 steps"`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _remarks(run: MonitorRun) -> Iterator[str]:
    times = run.spreads.get("step_time_ms")
    if run.log.kind == "steps" and times is not None and times["max"] > _SLOWEST * times["p50"]:
        factor = times["max"] / times["p50"]
        yield f"slowest: step {run.slowest_step} took {factor:.1f} times the median"
    for stretch in run.slow[:_MOST_STRETCHES]:
        some = "" if stretch.slow == stretch.timed else f"{stretch.slow} of "
        yield f"slow: {some}steps {stretch.first} to {stretch.last} took {stretch.factor:.2f} times the median"
    if (more := len(run.slow) - _MOST_STRETCHES) > 0:
        yield f"slow: {more} more stretch{'es' if more > 1 else ''}"
    if run.memory_growth_gb is not None:
        yield f"memory grew all the way, by {run.memory_growth_gb:.2f} GB: is something kept from step to step?"
    if run.bad_losses:
        yield f"loss was NaN or infinite in {counted(len(run.bad_losses), 'step')}, first in step {run.bad_losses[0]}"
    mfu = run.spreads.get("mfu")
    if mfu is not None and mfu["mean"] > 1:
        yield "MFU is over 100 %: is the peak that of this device and type, and are the FLOPs counted once?"
    if run.profiled:
        were = "was profiled, and is" if run.profiled == 1 else "were profiled, and are"
        yield f"{counted(run.profiled, 'step')} {were} in no time or rate"
    for warning in run.log.warnings:
        yield clean(f"warning: {warning}")
    if run.log.kind != "text" or "memory_GB" in run.spreads:
        yield "GB are 2^30 bytes; TFLOPS are 10^12 model FLOPs per second"
    if run.log.session.get("memory_kind") and "memory_GB" in run.spreads:
        yield clean(f"memory: {run.log.session['memory_kind']}")


MOST_POINTS = 1200  # beside one another; more steps are drawn as a median within the least and the most
WIDTH_BARS = 62
PANEL_IN = 1.75

_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999"
_BEYOND = 2.5  # times the 99th percentile: what is higher is cut, and said
_SHOWN_SLOW = 5  # stretches that are shaded
_PART_COLORS = dict(zip(PARTS, (_ORANGE, _BLUE, "#56B4E9", _PINK, _GREY), strict=True))


def groups(values: Column) -> Column:
    """A row for each point that is drawn: a value, or so many after one another that there are at most MOST_POINTS."""
    together = -(-len(values) // MOST_POINTS)
    return np.pad(values, (0, -len(values) % together), constant_values=np.nan).reshape(-1, together)


def draw_monitor(run: MonitorRun, path: str | os.PathLike[str]) -> None:
    """Writes the PNG: TFLOPS, MFU, tokens/s, step time with its percentiles and parts, memory, loss.

    What is not known is left out.

    Raises:
        OSError: it cannot be written.
    """
    with figures.own_style():
        panels = [
            draw for names, draw in _PANELS if any(name in run.spreads or name in run.breakdown for name in names)
        ]
        if not panels:
            figures.say(path, monitor_title(run), "No time, rate or memory of any step is known.")
            return
        figure = figures.new_figure(WIDTH_BARS, height_in=1.0 + PANEL_IN * len(panels))
        figures.head(figure, monitor_title(run))
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        steps = run.log.columns["iteration"]
        if (np.diff(steps) < 0).any():  # they begin anew
            steps = np.arange(1.0, len(steps) + 1)
        for axes, draw in zip(all_axes, panels, strict=True):
            draw(axes, run, steps)
            for stretch in run.slow[:_SHOWN_SLOW]:
                axes.axvspan(steps[stretch.first_row], steps[stretch.last_row], color=_ORANGE, alpha=0.12, linewidth=0)
        _finish(all_axes[-1], run, steps)
        figures.save(figure, path)


def _undisturbed(run: MonitorRun, name: str) -> Column:
    columns = run.log.columns
    return np.where(columns["profiled"] == 0, columns[name], np.nan)


def _draw_course(axes: Axes, steps: Column, values: Column, color: str, label: str) -> None:
    points, at = groups(values), groups(steps)[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of points of which nothing is known
        middle, least, most = (take(points, axis=1) for take in (np.nanmedian, np.nanmin, np.nanmax))
    if len(at) < len(steps):
        axes.fill_between(at, least, most, color=color, alpha=0.25, linewidth=0)
    lonely = np.isfinite(values).sum() <= 40
    axes.plot(at, middle, "-o" if lonely else "-", color=color, linewidth=1.2, markersize=3.5, label=label)


def _draw_numbers(
    name: str, title: str, ylabel: str, color: str, *, factor: float = 1.0, form: str = "{:.4g}", tails: bool = False
) -> Callable[..., None]:
    """Of a panel with one number: its course, and lines at its median and mean or, with `tails`, percentiles."""
    lines = [("p50", "median", figures.INK, "--"), ("mean", "mean over time", figures.INK, ":")]
    if tails:
        lines = [("p50", "p50", figures.INK, "--"), ("p95", "p95", _ORANGE, "-."), ("p99", "p99", "#D55E00", ":")]

    def draw(axes: Axes, run: MonitorRun, steps: Column) -> None:
        figures.prepare(axes, ylabel=ylabel)
        spread = run.spreads[name]
        _draw_course(axes, steps, factor * _undisturbed(run, name), color, _each(run))
        for key, label, line_color, style in lines:
            if not (tails and key != "p50" and spread["count"] < FEWEST_FOR_TAILS):
                value = factor * spread[key]
                axes.axhline(value, color=line_color, linewidth=1.2, linestyle=style, zorder=1.5,
                             label=f"{label} {form.format(value)}")  # fmt: skip
        _cut(axes, spread, factor, f"at most {factor * spread['max']:,.4g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        figures.legend_above(axes, title)

    return draw


def _each(run: MonitorRun) -> str:
    what, together = "step" if run.log.kind == "steps" else "row", len(run.log) / MOST_POINTS
    return f"each {what}" if together <= 1 else f"of {together:.3g} {what}s each"


def _draw_parts(axes: Axes, run: MonitorRun, steps: Column) -> None:
    """One on top of the other; of many steps the means of as many."""
    figures.prepare(axes, ylabel="ms")
    values = {name: _undisturbed(run, name) for name in PARTS}
    known = np.logical_or.reduce([np.isfinite(times) for times in values.values()])
    counts = np.nansum(groups(known.astype(np.float64)), axis=1)
    counts[counts == 0] = np.nan
    firsts = groups(steps)[:, 0]
    edges = _edges(firsts, steps[-1])
    below = np.zeros(len(firsts))
    for name, part in run.breakdown.items():
        top = below + np.nansum(groups(values[name]), axis=1) / counts
        label = f"{name} {part['mean_ms']:.3g} ms, {100 * part['share']:.0f} %"
        axes.stairs(top, edges, baseline=below, fill=True, color=_PART_COLORS[name], label=label)
        below = top
    _cut(axes, run.spreads["step_time_ms"], 1.0, "a step")
    figures.legend_above(axes, "Parts of a step: mean, and share of its time")


def _edges(firsts: Column, last: float) -> Column:
    """Between the steps that are shown."""
    if len(firsts) < 2:
        return np.array([firsts[0] - 0.5, last + 0.5])
    return np.concatenate(
        [[1.5 * firsts[0] - 0.5 * firsts[1]], (firsts[1:] + firsts[:-1]) / 2, [max(last, firsts[-1]) + 0.5]]
    )


def _draw_memory(axes: Axes, run: MonitorRun, steps: Column) -> None:
    figures.prepare(axes, ylabel="GB (2^30 bytes)")
    kind = str(run.log.session.get("memory_kind") or "")
    now = "allocated" if kind.startswith("allocated") else "now"
    for name, color, label in (("memory_GB", _GREEN, now), ("peak_memory_GB", _GREY, "peak so far")):
        if name in run.spreads:
            most = run.spreads[name]["max"]
            _draw_course(axes, steps, run.log.columns[name], color, f"{label}, at most {most:.4g}")
    figures.from_zero(axes)
    title = f"Memory ({kind})" if kind and now == "now" else "Memory"
    if run.memory_growth_gb is not None:
        title += f": grew all the way, by {run.memory_growth_gb:.3g} GB"
    figures.legend_above(axes, title)


def _draw_loss(axes: Axes, run: MonitorRun, steps: Column) -> None:
    figures.prepare(axes, ylabel="loss")
    _draw_course(axes, steps, run.log.columns["loss"], _PINK, "loss")
    if run.bad_losses:
        places = steps[run.log.columns["bad_loss"] == 1]
        axes.plot(places, [0.04] * len(places), "x", color="#D55E00", transform=axes.get_xaxis_transform(),
                  label=f"NaN or infinite, {counted(len(places), 'time')}")  # fmt: skip
    figures.legend_above(axes, "Loss")


def _cut(axes: Axes, spread: Spread, factor: float, beyond: str) -> None:
    """From 0 on; a few steps that are far above all others, such as the first, do not flatten them."""
    figures.from_zero(axes)
    usual = factor * spread["p99"]
    if factor * spread["max"] > _BEYOND * usual > 0:
        axes.set_ylim(0, 1.3 * usual)
        axes.annotate(f"beyond the axis: {beyond}", (0.995, 0.95), xycoords="axes fraction", ha="right", va="top",
                      fontsize=figures.FONT_SIZE - 2)  # fmt: skip


def _finish(axes: Axes, run: MonitorRun, steps: Column) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    notes = ["step"]
    if len(steps) > MOST_POINTS:
        notes.append("lines: medians of as many steps, bands: their least and most")
    if run.slow:
        notes.append("shaded: slow stretches")
    if run.profiled:
        notes.append(f"{run.profiled} profiled {'step' if run.profiled == 1 else 'steps'} left out")
    axes.set_xlabel("; ".join(notes), fontsize=figures.FONT_SIZE)


# What is drawn where one of the columns, or a part, is known.
_PANELS: tuple[tuple[Sequence[str], Callable[..., None]], ...] = (
    (["TFLOPS_per_GPU"], _draw_numbers("TFLOPS_per_GPU", "TFLOPS per GPU", "TFLOPS", _BLUE)),
    (["mfu"], _draw_numbers("mfu", "MFU", "% of the peak", _PINK, factor=100.0, form="{:.1f}")),
    (["tokens_per_sec"], _draw_numbers("tokens_per_sec", "Tokens per second", "tokens/s", _GREEN, form="{:,.0f}")),
    (["step_time_ms"], _draw_numbers("step_time_ms", "Step time", "ms", _BLUE, form="{:.4g} ms", tails=True)),
    (PARTS, _draw_parts),
    (["memory_GB", "peak_memory_GB"], _draw_memory),
    (["loss"], _draw_loss),
)
