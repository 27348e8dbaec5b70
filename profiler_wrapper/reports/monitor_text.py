"""A monitored run as text: 100 columns, or as many as the terminal has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from profiler_wrapper.analysis.monitor_run import PERCENTILES, MonitorRun, Spread, Stretch
from profiler_wrapper.reports.text import clean, grid, shorten, wrap

WIDTH = 100

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
FEWEST_FOR_TAILS = 20  # steps or rows: of fewer the 95th percentile is but the largest
_MIDDLE = 50
_MANY_DECIMALS = 5  # of what is small, as rates on a CPU are
_WHAT = {
    "steps": "every step",
    "summary": "means over the log interval",
    "text": "rows of the log interval",
}
_MOST_STRETCHES = 3
_PEAK_LINES = 4
_SLOWEST = 3  # times the median: a single step that is worth a word


def monitor_text(run: MonitorRun, *, width: int = WIDTH) -> str:
    """The run, its numbers, and what stands out; only numbers may need more than `width` columns."""
    return "\n".join([*_title(run, width), "", _table(run), *_breakdown(run), *_wrapped(_remarks(run), width)])


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
        told = ", ".join(f"{name} {value / 1e12:.4g}" for name, value in peaks.items())
        yield from wrap(clean(f"peak, TFLOPS: {told} ({session.get('peak_source')})"), width, _PEAK_LINES)


def _table(run: MonitorRun) -> str:
    header = ["", "mean", "min", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = [
        [label, *_cells(run.spreads[name], factor, decimals, run.log.decimals.get(name))]
        for name, (label, factor, decimals) in _ROWS.items()
        if name in run.spreads
    ]
    return grid(header, rows)


def _cells(spread: Spread, factor: float, decimals: int, most: int | None) -> list[str]:
    """`most`: decimals that the file has."""
    shown = decimals if factor * abs(spread.mean) >= 0.1 else _MANY_DECIMALS
    shown = shown if most is None else min(shown, most)

    def cell(value: float) -> str:
        return f"{factor * value:.{shown}f}"

    tails_known = spread.count >= FEWEST_FOR_TAILS
    percentiles = [
        cell(value) if tails_known or percent == _MIDDLE else "-" for percent, value in spread.percentiles.items()
    ]
    return [cell(spread.mean), cell(spread.least), *percentiles, cell(spread.most)]


def _breakdown(run: MonitorRun) -> Iterator[str]:
    if run.breakdown:
        rows = [[name, f"{part.mean_ms:.3f}", f"{100 * part.share:.1f}"] for name, part in run.breakdown.items()]
        yield ""
        yield grid(["part of a step", "mean, ms", "share, %"], rows)
        yield ""


def counted(number: int, what: str) -> str:
    """`"1 step"`, `"2 steps"`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _slow(stretch: Stretch) -> str:
    some = "" if stretch.slow == stretch.timed else f"{stretch.slow} of "
    return f"slow: {some}steps {stretch.first} to {stretch.last} took {stretch.factor:.2f} times the median"


def _wrapped(remarks: Iterable[str], width: int) -> Iterator[str]:
    for remark in remarks:
        yield from wrap(remark, width, 2)


def _remarks(run: MonitorRun) -> Iterator[str]:
    times = run.spreads.get("step_time_ms")
    if run.log.kind == "steps" and times is not None and times.most > _SLOWEST * times.percentiles[50]:
        factor = times.most / times.percentiles[50]
        yield f"slowest: step {run.slowest_step} took {factor:.1f} times the median"
    for stretch in run.slow[:_MOST_STRETCHES]:
        yield _slow(stretch)
    if len(run.slow) > _MOST_STRETCHES:
        more = len(run.slow) - _MOST_STRETCHES
        yield f"slow: {more} more stretch{'es' if more > 1 else ''}"
    if run.memory_growth_gb is not None:
        yield f"memory grew all the way, by {run.memory_growth_gb:.2f} GB: is something kept from step to step?"
    if run.odd_losses:
        yield f"loss was NaN or infinite in {counted(len(run.odd_losses), 'step')}, first in step {run.odd_losses[0]}"
    mfu = run.spreads.get("mfu")
    if mfu is not None and mfu.mean > 1:
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
