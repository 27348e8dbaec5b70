"""A memory snapshot as text, JSON and a picture.

The JSON has the fields of `AllocatorReport` and of what it holds as keys (bytes; times in microseconds since 1970, null
where the file does not say). Other than these:

    an owner:   {line, inside, layer, caller, origin, metadata, size_bytes, blocks, largest_bytes,
                 stack[{file, line, name, source}]}, of a stack the 40 innermost frames
    a history:  the courses are curve{state[], time_us[] | null, allocated_bytes[], reserved_bytes[] | null}, the
                highest state of each of at most 1000 stretches; no bands

`allocated_bytes` of a device and its owners count what was given, those of a history what was asked for. State k is
that after k entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from profiler_wrapper.reports import figures
from profiler_wrapper.reports.text import aligned_lines, cells, clean, grid, shorten, whole_ones, wrap
from profiler_wrapper.snapshot.analyse import AllocatorReport, DeviceMemory, MemoryHistory, MemoryOwner, Place
from profiler_wrapper.trace.atomic import json_bytes
from profiler_wrapper.trace.recording import Int64
from profiler_wrapper.units import MIB, file_size, mebibytes, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH, LINES = 100, 40
_ROWS = {"pools": 4, "owners": 8, "now": 5, "devices": 4, "notes": 6}
_FULL_WIDTH, _FULL_ROWS = 200, 1_000_000
_FULL_STACKS = 30  # of the largest owners


def console_text(report: AllocatorReport, *, unicode: bool = False, width: int = WIDTH) -> str:
    """At most 40 lines of at most `width` columns: one device in detail, the others in a line each.

    In detail: the one that ran out of memory, else the one that holds most.
    """
    lines = [_title(report, unicode), *_details(report, report.devices[:1], unicode, width, _ROWS)]
    others = report.devices[1:]
    tail = [shorten(f"also {failure_line(one) or _held(one)}", width) for one in others[: _ROWS["devices"]]]
    hidden = len(others) - len(tail)
    tail += [f"({hidden} more devices; -o FILE has them all)"] if hidden else []
    tail += _notes(report, unicode, width, _ROWS["notes"])
    return "\n".join([*lines[: LINES - len(tail)], *tail])


def full_text(report: AllocatorReport) -> str:
    """Every device, row and note, and the whole stacks of the largest owners."""
    rows = dict.fromkeys(_ROWS, _FULL_ROWS)
    lines = [_title(report, True), *_details(report, report.devices, True, _FULL_WIDTH, rows)]
    for one in report.devices:
        when = f"cuda:{one.device}, at the peak" if one.history else "now"
        for owner in (one.history.peak if one.history else one).owners[:_FULL_STACKS]:
            name = owner_name(owner.place, unicode=True)
            lines += ["", f"{_mib(owner.size_bytes)} in {owner.blocks} blocks, {when}: {name}"]
            lines += [clean(f"    {frame.file}:{frame.line} {frame.name}", unicode=True) for frame in owner.stack]
    for key, value in report.settings.items():
        lines.append(f"setting {clean(key, unicode=True)}: {clean(value, unicode=True)}")
    return "\n".join([*lines, *_notes(report, True, _FULL_WIDTH, _FULL_ROWS), ""])


def failure_line(one: DeviceMemory) -> str:
    """What the last allocation that could not be met asked for, and what there was; "" where all were met."""
    if one.failure is None:
        return ""
    free, then = one.failure.device_free_bytes, one.failure.moment
    return (
        f"cuda:{one.device} ran out of memory: {_mib(one.failure.requested_bytes)} asked for, "
        f"{_mib(then.allocated_bytes)} allocated, {_mib(then.reserved_bytes)} reserved, "
        f"{_mib(free)}{'' if free is None else ' free'} on the device"
    )


def cure(one: DeviceMemory, report: AllocatorReport) -> str:
    """What to do about an allocation that could not be met; "" where none failed."""
    if one.failure is None or one.failure.moment.unallocated_bytes is None:
        return ""
    unused = _mib(one.failure.moment.unallocated_bytes)
    if not one.failure.fragmented:
        return f"Memory was full: only {unused} of what is reserved was unused. The owners below are what to lower."
    lost = f"Fragmentation: {unused} were reserved and unused, but in pieces or other pools"
    if report.settings.get("expandable_segments", "").lower() == "true":
        return f"{lost}, though expandable_segments is on."
    return f"{lost}. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def owner_name(place: Place, *, unicode: bool) -> str:
    """`"[metadata] run/model.py:12 forward, in torch/nn/modules/linear.py:134 forward, from run/train.py:40 main"`."""
    stamped = f"[{place.metadata}] " if place.metadata else ""
    inside, caller = f", in {place.inside}" * bool(place.inside), f", from {place.caller}" * bool(place.caller)
    return clean(f"{stamped}{place.line}{inside}{caller}", unicode=unicode)


def _title(report: AllocatorReport, unicode: bool) -> str:
    name, devices = shorten(clean(report.name, unicode=unicode), 50), len(report.devices)
    size = file_size(report.file_bytes)
    return f"Memory snapshot {name} ({size}), {devices} device{'s' * (devices != 1)} with memory"


def _details(
    report: AllocatorReport, devices: Sequence[DeviceMemory], unicode: bool, width: int, most: dict[str, int]
) -> Iterator[str]:
    if not devices:
        yield "No memory is held, and there is no history."
    for one in devices:
        for text in (failure_line(one), cure(one, report), _state(one)):
            yield from wrap(text, width, 2) if text else ()
        yield from _pool_table(one, most["pools"])
        failure, history = one.failure, one.history
        if history is not None:
            title, then = "At the peak", history.worst
            if failure is not None:
                title = f"When {clean(failure.line)} asked for {_mib(failure.requested_bytes)} in vain"
            yield ""
            yield shorten(f"{title}: {_mib(then.allocated_bytes)} allocated (as asked for), by line", width)
            yield from _owner_table(then.owners, then.allocated_bytes, width, most["owners"], unicode)
            yield from wrap(_peak_line(history), width, 2)
        if failure is None or history is None or failure.moment.state < history.entries:
            yield ""
            yield f"Now: {_mib(one.allocated_bytes)} in {one.blocks} blocks (as given), by the line that asked for them"
            yield from _owner_table(one.owners, one.allocated_bytes, width, most["now"], unicode)


def _held(one: DeviceMemory) -> str:
    return f"cuda:{one.device}: {_mib(one.allocated_bytes)} allocated of {_mib(one.reserved_bytes)} reserved"


def _state(one: DeviceMemory) -> str:
    """The device at the time of the snapshot."""
    text = f"cuda:{one.device} now: {_mib(one.reserved_bytes)} reserved = {_mib(one.allocated_bytes)} allocated"
    text += f" + {_mib(one.awaiting_free_bytes)} awaiting their free" if one.awaiting_free_bytes else ""
    text += f" + {_mib(one.free_bytes)} unused ({percent(one.free_bytes, one.reserved_bytes)} %; largest piece "
    return text + f"{_mib(one.largest_free_bytes)}); rounding up is {_mib(one.rounding_bytes)} of allocated"


def _pool_table(one: DeviceMemory, most: int) -> list[str]:
    header = ["segments", "stream", "pool", "count", "reserved MiB", "allocated", "unused", "largest unused"]
    rows = []
    for pool in one.pools[:most]:
        held = pool.allocated_bytes + pool.awaiting_free_bytes
        number = "default" if pool.pool == (0, 0) else f"{pool.pool[0]}.{pool.pool[1]}"
        sizes = map(mebibytes, (pool.reserved_bytes, held, pool.free_bytes, pool.largest_free_bytes))
        kind = f"{clean(pool.kind)}{', expandable' * pool.expandable}"
        rows.append([kind, str(pool.stream), number, str(pool.segments), *sizes])
    hidden = len(one.pools) - len(rows)
    return [*([""] if rows else []), *grid(header, rows).splitlines(), *([f"({hidden} more pools)"] if hidden else [])]


def _peak_line(history: MemoryHistory) -> str:
    when = f"after entry {history.peak.state} of {history.entries}"
    if history.time_us is not None and history.peak.time_us is not None:
        when += f", {(history.peak.time_us - int(history.time_us[0])) / 1e6:.3f} s after the first"
    reserved = _mib(int(history.reserved_bytes.max())) if history.reserved_bytes is not None else "not available"
    failed = f"; {history.failed} allocations failed" if history.failed > 1 else ""
    return f"Peak: {_mib(history.peak.allocated_bytes)} allocated {when}; most reserved: {reserved}{failed}"


def _owner_table(owners: Sequence[MemoryOwner], total: int, width: int, most: int, unicode: bool) -> list[str]:
    """Bytes, blocks and name, a line each; of more than `most` owners, the last line is the sum of the rest."""
    if not owners:
        return ["  nothing"]
    rows = [(one.size_bytes, one.blocks, owner_name(one.place, unicode=unicode)) for one in owners]
    if rest := rows[most - 1 :] if len(rows) > most else []:
        rows[most - 1 :] = [(sum(row[0] for row in rest), sum(row[1] for row in rest), f"({len(rest)} more)")]
    numbers = [(f"  {mebibytes(size)} MiB", f"{percent(size, total):>5} %", f"{count}x") for size, count, _ in rows]
    heads = aligned_lines(numbers, ["right"] * 3, gap=1)
    return [f"{head}  {shorten(row[2], width - cells(head) - 2)}" for head, row in zip(heads, rows, strict=True)]


def _notes(report: AllocatorReport, unicode: bool, width: int, most: int) -> list[str]:
    notes = [f"note: {clean(note, unicode=unicode)}" for note in report.notes]
    return whole_ones(notes, width, most, "notes: -o FILE has them all")


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{mebibytes(size_bytes)} MiB"


_CURVE_POINTS = 1000
_FRAMES = 40  # of a stack


def to_dict(report: AllocatorReport) -> dict[str, Any]:
    """What the file holds."""
    plain = msgspec.to_builtins(report, enc_hook=lambda _: None)  # arrays: see the curve
    for row, device in zip(plain["devices"], report.devices, strict=True):
        moments = [row]
        if (history := device.history) is not None:
            moments += [row["history"]["peak"], *(failure["moment"] for failure in row["history"]["failures"])]
            states = highest_states(history.allocated_bytes, _CURVE_POINTS)
            curve: dict[str, Any] = {"state": states.tolist()}
            for name in ("time_us", "allocated_bytes", "reserved_bytes"):
                course = getattr(history, name)
                curve[name] = None if course is None else course[states].tolist()
            row["history"] = {key: row["history"][key] for key in row["history"] if key not in (*curve, "bands")}
            row["history"]["curve"] = curve
        for moment in moments:
            moment["owners"] = [
                {**one.pop("place"), **one, "stack": one["stack"][:_FRAMES]} for one in moment["owners"]
            ]
    return {"schema_version": 1, **plain}


def highest_states(allocated_bytes: Int64, points: int) -> Int64:
    """At most `points` states in order, of each stretch the one with the most allocated, and the last."""
    states = len(allocated_bytes)
    if states <= points:
        return np.arange(states)
    edges = np.linspace(0, states, points, dtype=np.int64)
    highest = [first + allocated_bytes[first:last].argmax() for first, last in pairwise(edges)]
    return np.union1d(highest, [states - 1])


_POINTS = 3000  # of a curve: a screen has fewer columns
_NOTES, _NOTE_LETTERS = 3, 130
_WIDTH_BARS = 60  # of a figure
_HEIGHT_IN = 4.4  # of the axes
_NAME_LETTERS = 100
_TITLE_LETTERS = 118
_END = 0.02  # of the width: how long the last state is shown
_ABOVE = 1.2  # of the highest curve: room for what is written there
# Okabe and Ito's colours, and grey for the rest.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_REST, _FAILED = "#bbbbbb", "#D55E00"


@figures.own_style()
def draw_snapshot(report: AllocatorReport, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: of the device that ran out, else of the fullest, what each line held over its history.

    Sizes are MiB.
    """
    title = f"Memory snapshot {shorten(report.name, 50)} ({file_size(report.file_bytes)})"
    one = next((one for one in report.devices if one.history), None)
    if one is None or one.history is None:
        figures.say(path, title, "There is no history of allocations to draw; the text says who holds what now.")
        return
    notes = [fill(f"note: {note}", _NOTE_LETTERS) for note in report.notes[:_NOTES]]
    rows = len(one.history.bands) + len(notes)
    figure = figures.new_figure(_WIDTH_BARS, height_in=_HEIGHT_IN + 1.2 + 0.3 * rows)
    figures.head(figure, title)
    axes = figure.subplots()
    _draw_history(axes, one.history)
    said = failure_line(one) or f"cuda:{one.device}: allocated memory, as asked for, by line (sizes: at the peak)"
    figures.legend_above(axes, "\n".join(fill(text, _TITLE_LETTERS) for text in (said, cure(one, report)) if text))
    figures.foot(figure, "\n".join(notes), size=figures.FONT_SIZE - 1)
    figures.save(figure, path)


def _draw_history(axes: Axes, history: MemoryHistory) -> None:
    figures.prepare(axes, ylabel="MiB")
    if history.time_us is None:
        at, unit = np.arange(history.entries + 1, dtype=np.float64), "entry of the history"
    else:
        at, unit = (history.time_us - history.time_us[0]) / 1e6, "seconds since the first entry of the history"
    axes.set_xlabel(unit, fontsize=figures.FONT_SIZE)
    states = np.union1d(highest_states(history.allocated_bytes, _POINTS), [history.peak.state])
    x = np.append(at[states], at[-1] + (_END * (at[-1] - at[0]) or 1.0))
    states = np.append(states, states[-1])
    allocated, worst = history.allocated_bytes[states] / MIB, history.worst.state
    shown = [held[states] / MIB for _, held in history.bands]
    rest = allocated - sum(shown, np.zeros(len(states)))
    names = [f"{mebibytes(held[worst])} MiB  {owner_name(place, unicode=True)}" for place, held in history.bands]
    labels = [figures.literal(shorten(name, _NAME_LETTERS)) for name in names] + ["all other lines"] * bool(rest.any())
    colors = [*_COLORS[: len(shown)], _REST]
    axes.stackplot(x, *shown, rest, step="post", linewidth=0, colors=colors, labels=labels)
    axes.plot(x, allocated, color=figures.INK, linewidth=0.9, drawstyle="steps-post")
    top = history.peak.allocated_bytes / MIB
    axes.plot([at[history.peak.state]], [top], "v", color=figures.INK, markersize=7, zorder=5)
    if history.reserved_bytes is not None:
        held = history.reserved_bytes[states] / MIB
        axes.plot(x, held, "--", color="#555555", linewidth=1.3, drawstyle="steps-post", label="reserved")
        top = max(top, float(held.max()))
    for i, failure in enumerate(history.failures):
        label = None if i else "out of memory"
        axes.axvline(at[failure.moment.state], color=_FAILED, linewidth=1.6, label=label)
    axes.set_ylim(0, top * _ABOVE or 1)
    axes.set_xlim(x[0], x[-1])


# By how the name of each ends, behind that of the snapshot.
SNAPSHOT_REPORTS: Mapping[str, Callable[[AllocatorReport, Path], object]] = {
    "_snapshot.txt": lambda report, path: path.write_bytes(full_text(report).encode("utf-8", "backslashreplace")),
    "_snapshot.json": lambda report, path: path.write_bytes(json_bytes(to_dict(report))),
    "_snapshot.png": draw_snapshot,
}
