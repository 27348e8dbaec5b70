"""A memory snapshot as text, JSON and a picture.

Keys of the JSON (bytes; times in microseconds since 1970, null where the file does not say):

    {schema_version: 1, name, file_bytes, settings{}, notes[],
     devices[{device, reserved_bytes, allocated_bytes, awaiting_free_bytes, free_bytes, largest_free_bytes,
              rounding_bytes, blocks,
              pools[{pool, stream, kind, expandable, segments, reserved_bytes, allocated_bytes,
                     awaiting_free_bytes, free_bytes, largest_free_bytes}],
              owners[OWNER], layers[{layer, origin, size_bytes, blocks}],
              history: null | {entries, before_bytes, before_unknown_bytes, inconsistent, failed,
                               peak: MOMENT, failures[{requested_bytes, device_free_bytes, fragmented, line,
                                                       moment: MOMENT}],
                               curve{state[], time_us[] | null, allocated_bytes[], reserved_bytes[] | null}}}]}
    OWNER  = {line, inside, layer, caller, origin, metadata, size_bytes, blocks, largest_bytes,
              stack[{file, line, name, source}]}
    MOMENT = {state, time_us, allocated_bytes, reserved_bytes, owners[OWNER]}

`allocated_bytes` of a device and its owners count what was given, those of a history what was asked for. State k is
that after k entries; a curve has the highest state of each of at most 1000 stretches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict

from profiler_wrapper.reports import figures
from profiler_wrapper.reports.text import cells, clean, grid, shorten, wrap
from profiler_wrapper.snapshot.analyse import (
    AllocatorReport,
    DeviceMemory,
    MemoryHistory,
    MemoryOwner,
    Moment,
    Place,
)
from profiler_wrapper.trace.atomic import json_bytes
from profiler_wrapper.trace.recording import Int64
from profiler_wrapper.units import MIB, file_size, mebibytes, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# -- text -------------------------------------------------------------------------------------------

WIDTH, LINES = 100, 40
_ROWS = {"pools": 4, "owners": 8, "now": 5, "devices": 4, "notes": 3}
_FULL_WIDTH, _FULL_ROWS = 200, 1_000_000
_FULL_STACKS = 30  # of the largest owners


def console_text(report: AllocatorReport, *, unicode: bool = False, width: int = WIDTH) -> str:
    """At most 40 lines of at most `width` columns: one device in detail, the others in a line each.

    In detail: the one that ran out of memory, else the one that holds most.
    """
    lines = [_title(report, unicode), *_details(report.devices[:1], report, unicode, width, _ROWS)]
    others = report.devices[1 : 1 + _ROWS["devices"]]
    tail = [shorten(f"also {failure_line(other) or _held(other)}", width) for other in others]
    hidden = len(report.devices) - 1 - len(others)
    tail += [f"({hidden} more devices; -o FILE has them all)"] if hidden > 0 else []
    tail += _note_lines(report, unicode, width, _ROWS["notes"])
    return "\n".join([*lines[: LINES - len(tail)], *tail])


def full_text(report: AllocatorReport) -> str:
    """Every device, row and note, and the whole stacks of the largest owners."""
    rows = dict.fromkeys(_ROWS, _FULL_ROWS)
    lines = [_title(report, True), *_details(report.devices, report, True, _FULL_WIDTH, rows)]
    for one in report.devices:
        owners = one.history.peak.owners if one.history else one.owners
        lines += [*_whole_stacks(owners[:_FULL_STACKS], f"cuda:{one.device}, at the peak" if one.history else "now")]
    lines += [
        f"setting {clean(key, unicode=True)}: {clean(value, unicode=True)}" for key, value in report.settings.items()
    ]
    return "\n".join([*lines, *_note_lines(report, True, _FULL_WIDTH, _FULL_ROWS), ""])


def failure_line(one: DeviceMemory) -> str:
    """What the last allocation that could not be met asked for, and what there was; "" where all were met."""
    failure = one.failure
    if failure is None:
        return ""
    free = "unknown" if failure.device_free_bytes is None else f"{_mib(failure.device_free_bytes)} free"
    return (
        f"cuda:{one.device} ran out of memory: {_mib(failure.requested_bytes)} asked for, "
        f"{_mib(failure.moment.allocated_bytes)} allocated, {_mib(failure.moment.reserved_bytes)} reserved, "
        f"{free} on the device"
    )


def cure(one: DeviceMemory, report: AllocatorReport) -> str:
    """Why the last allocation failed, and what to do; "" where none failed."""
    failure = one.failure
    if failure is None or failure.unallocated_bytes is None:
        return ""
    unused = _mib(failure.unallocated_bytes)
    if not failure.fragmented:
        return f"Memory was full: only {unused} of what is reserved was unused. The owners below are what to lower."
    lost = f"Fragmentation: {unused} were reserved and unused, but in pieces or other pools"
    if report.settings.get("expandable_segments", "").lower() == "true":
        return f"{lost}, though expandable_segments is on."
    return f"{lost}. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def owner_name(place: Place, *, unicode: bool) -> str:
    """`"[metadata] run/model.py:12 forward, in torch/nn/modules/linear.py:134 forward, from run/train.py:40 main"`."""
    stamped = f"[{place.metadata}] " if place.metadata else ""
    parts = [place.line, f"in {place.inside}" if place.inside else "", f"from {place.caller}" if place.caller else ""]
    return clean(stamped + ", ".join(part for part in parts if part), unicode=unicode)


# -- parts ----------------------------------------------------------------------------------------


def _title(report: AllocatorReport, unicode: bool) -> str:
    name, devices = shorten(clean(report.name, unicode=unicode), 50), len(report.devices)
    size = file_size(report.file_bytes)
    return f"Memory snapshot {name} ({size}), {devices} device{'s' * (devices != 1)} with memory"


def _details(
    devices: Sequence[DeviceMemory], report: AllocatorReport, unicode: bool, width: int, most: dict[str, int]
) -> Iterator[str]:
    if not devices:
        yield "No memory is held, and there is no history."
    for one in devices:
        for text in (failure_line(one), cure(one, report), _state(one)):
            yield from wrap(text, width, 2) if text else ()
        yield from _pool_table(one, most["pools"])
        at_failure = one.failure
        if at_failure is not None:
            title = f"When {clean(at_failure.place.line)} asked for {_mib(at_failure.requested_bytes)} in vain"
            yield from _moment(title, at_failure.moment, width, most["owners"], unicode)
        elif one.history is not None:
            yield from _moment("At the peak", one.history.peak, width, most["owners"], unicode)
        if one.history is not None:
            yield from wrap(_peak_line(one.history), width, 2)
        if at_failure is None or one.history is None or at_failure.moment.state < one.history.entries:
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
    rows = [
        [
            f"{clean(pool.kind)}{', expandable' * pool.expandable}",
            str(pool.stream),
            "default" if pool.pool == (0, 0) else f"{pool.pool[0]}.{pool.pool[1]}",
            str(pool.segments),
            mebibytes(pool.reserved_bytes),
            mebibytes(pool.allocated_bytes + pool.awaiting_free_bytes),
            mebibytes(pool.free_bytes),
            mebibytes(pool.largest_free_bytes),
        ]
        for pool in one.pools[:most]
    ]
    if not rows:
        return []
    hidden = len(one.pools) - most
    return ["", *grid(header, rows).split("\n"), *([f"({hidden} more pools)"] if hidden > 0 else [])]


def _moment(title: str, moment: Moment, width: int, most: int, unicode: bool) -> Iterator[str]:
    yield ""
    yield shorten(f"{title}: {_mib(moment.allocated_bytes)} allocated (as asked for), by line", width)
    yield from _owner_table(moment.owners, moment.allocated_bytes, width, most, unicode)


def _peak_line(history: MemoryHistory) -> str:
    when = f"after entry {history.peak.state} of {history.entries}"
    if history.time_us is not None and history.peak.time_us is not None:
        when += f", {(history.peak.time_us - int(history.time_us[0])) / 1e6:.3f} s after the first"
    reserved = _mib(int(history.reserved_bytes.max())) if history.reserved_bytes is not None else "not available"
    failed = f"; {history.failed} allocations failed" if history.failed > 1 else ""
    return f"Peak: {_mib(history.peak.allocated_bytes)} allocated {when}; most reserved: {reserved}{failed}"


def _owner_table(owners: Sequence[MemoryOwner], total: int, width: int, most: int, unicode: bool) -> list[str]:
    """Bytes, blocks and name, a line each; of more than `most` owners, the last line is the sum of the rest."""
    rows = [(one.size_bytes, one.blocks, owner_name(one.place, unicode=unicode)) for one in owners]
    if not rows:
        return ["  nothing"]
    if len(rows) > most:
        rest = rows[most - 1 :]
        rows = [*rows[: most - 1], (sum(row[0] for row in rest), sum(row[1] for row in rest), f"({len(rest)} more)")]
    size_width = max(len(mebibytes(size)) for size, _, _ in rows)
    count_width = max(len(str(count)) for _, count, _ in rows)
    lines = []
    for size, count, name in rows:
        head = f"{mebibytes(size):>{size_width + 2}} MiB {percent(size, total):>5} % {count:>{count_width}}x  "
        lines.append(head + shorten(name, width - cells(head)))
    return lines


def _whole_stacks(owners: Sequence[MemoryOwner], when: str) -> Iterator[str]:
    for one in owners:
        yield ""
        yield f"{_mib(one.size_bytes)} in {one.blocks} blocks, {when}: {owner_name(one.place, unicode=True)}"
        yield from (clean(f"    {frame.file}:{frame.line} {frame.name}", unicode=True) for frame in one.frames)


def _note_lines(report: AllocatorReport, unicode: bool, width: int, most: int) -> list[str]:
    return [line for note in report.notes for line in wrap(f"note: {clean(note, unicode=unicode)}", width, 2)][:most]


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{mebibytes(size_bytes)} MiB"


# -- JSON -------------------------------------------------------------------------------------------

SCHEMA_VERSION = 1
_CURVE_POINTS = 1000
_FRAMES = 40  # of a stack


def to_dict(report: AllocatorReport) -> dict[str, Any]:
    """What the file holds."""
    return {"schema_version": SCHEMA_VERSION, **asdict(report), "devices": [_device(one) for one in report.devices]}


def highest_states(allocated_bytes: Int64, points: int) -> Int64:
    """At most `points` states in order, of each stretch the one with the most allocated, and the last."""
    states = len(allocated_bytes)
    if states <= points:
        return np.arange(states)
    edges = np.linspace(0, states, points, dtype=np.int64)
    highest = [int(first + allocated_bytes[first:last].argmax()) for first, last in pairwise(edges)]
    return np.array([*highest, states - 1] if highest[-1] != states - 1 else highest, np.int64)


def _device(one: DeviceMemory) -> dict[str, Any]:
    return asdict(one) | {
        "pools": [asdict(pool) for pool in one.pools],
        "owners": [_owner(owner) for owner in one.owners],
        "layers": layer_rows(one.owners),
        "history": _history(one.history) if one.history is not None else None,
    }


def _owner(owner: MemoryOwner) -> dict[str, Any]:
    row = asdict(owner)
    place, frames = row.pop("place"), row.pop("frames")
    return {**asdict(place), **row, "stack": [asdict(frame) for frame in frames[:_FRAMES]]}


def layer_rows(owners: Iterable[MemoryOwner]) -> list[dict[str, Any]]:
    """By the line of the innermost `forward`; what has none, by where it came from. Largest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in owners:
        layer, origin = one.place.layer if one.place.origin == "forward" else "", one.place.origin
        row = rows.setdefault((layer, origin), {"layer": layer, "origin": origin, "size_bytes": 0, "blocks": 0})
        row["size_bytes"] += one.size_bytes
        row["blocks"] += one.blocks
    return sorted(rows.values(), key=lambda row: -row["size_bytes"])


def _moment_row(moment: Moment) -> dict[str, Any]:
    return asdict(moment) | {"owners": [_owner(owner) for owner in moment.owners]}


def _history(history: MemoryHistory) -> dict[str, Any]:
    states = highest_states(history.allocated_bytes, _CURVE_POINTS)
    curves = {
        "time_us": None if history.time_us is None else history.time_us[np.maximum(states - 1, 0)],
        "allocated_bytes": history.allocated_bytes[states],
        "reserved_bytes": None if history.reserved_bytes is None else history.reserved_bytes[states],
    }
    names = ("entries", "before_bytes", "before_unknown_bytes", "inconsistent", "failed")
    return {
        **{name: getattr(history, name) for name in names},
        "peak": _moment_row(history.peak),
        "failures": [
            {
                "requested_bytes": failure.requested_bytes,
                "device_free_bytes": failure.device_free_bytes,
                "fragmented": failure.fragmented,
                "line": failure.place.line,
                "moment": _moment_row(failure.moment),
            }
            for failure in history.failures
        ],
        "curve": {
            "state": states.tolist(),
            **{name: None if curve is None else curve.tolist() for name, curve in curves.items()},
        },
    }


# -- picture ----------------------------------------------------------------------------------------

Float64 = np.ndarray[tuple[int], np.dtype[np.float64]]

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
    _draw_history(figure.subplots(), one, one.history, cure(one, report))
    if notes:
        figure.supxlabel(figures.literal("\n".join(notes)), fontsize=figures.FONT_SIZE - 1)
    figures.save(figure, path)


def _draw_history(axes: Axes, one: DeviceMemory, history: MemoryHistory, cured: str) -> None:
    figures.prepare(axes, ylabel="MiB")
    states = np.union1d(highest_states(history.allocated_bytes, _POINTS), [history.peak.state])
    x = _x(history, states)
    states, x = np.append(states, states[-1]), np.append(x, x[-1] + (_END * (x[-1] - x[0]) or 1.0))
    allocated = history.allocated_bytes[states] / MIB
    shown = [held[states] / MIB for _, held in history.bands]
    rest = allocated - sum(shown, np.zeros(len(states)))
    names = [
        f"{mebibytes(int(held[history.worst.state]))} MiB  {owner_name(place, unicode=True)}"
        for place, held in history.bands
    ]
    colors = [*_COLORS[: len(shown)], _REST]
    labels = [figures.literal(shorten(name, _NAME_LETTERS)) for name in names]
    labels += ["all other lines"] * bool(rest.any())
    axes.stackplot(x, *shown, rest, step="post", linewidth=0, colors=colors, labels=labels)
    axes.plot(x, allocated, color=figures.INK, linewidth=0.9, drawstyle="steps-post")
    top = history.peak.allocated_bytes / MIB
    if history.reserved_bytes is not None:
        held = history.reserved_bytes[states] / MIB
        axes.plot(x, held, "--", color="#555555", linewidth=1.3, drawstyle="steps-post", label="reserved")
        top = max(top, float(held.max()))
    for failure in history.failures:
        at = float(_x(history, np.array([failure.moment.state]))[0])
        label = "out of memory" if failure is history.failures[0] else None
        axes.axvline(at, color=_FAILED, linewidth=1.6, label=label)
    at = float(_x(history, np.array([history.peak.state]))[0])
    axes.plot([at], [history.peak.allocated_bytes / MIB], "v", color=figures.INK, markersize=7, zorder=5)
    axes.set_ylim(0, top * _ABOVE or 1)
    axes.set_xlim(x[0], x[-1])
    unit = "entry of the history" if history.time_us is None else "seconds since the first entry of the history"
    axes.set_xlabel(unit, fontsize=figures.FONT_SIZE)
    title = failure_line(one) or f"cuda:{one.device}: allocated memory, as asked for, by line (sizes: at the peak)"
    texts = [fill(text, _TITLE_LETTERS) for text in (title, cured) if text]
    figures.legend_above(axes, "\n".join(texts))


def _x(history: MemoryHistory, states: Int64) -> Float64:
    """Seconds since the first entry, else the number of the entry."""
    if history.time_us is None:
        return states.astype(np.float64)
    seconds: Float64 = (history.time_us[np.maximum(states - 1, 0)] - history.time_us[0]) / 1e6
    return seconds


# -- files ------------------------------------------------------------------------------------------


def snapshot_json(report: AllocatorReport) -> str:
    """As one text, without a newline at its end."""
    return json_bytes(to_dict(report)).decode().rstrip("\n")


# By how the name of each ends, behind that of the snapshot.
SNAPSHOT_REPORTS: Mapping[str, Callable[[AllocatorReport, Path], object]] = {
    "_snapshot.txt": lambda report, path: path.write_bytes(full_text(report).encode("utf-8", "backslashreplace")),
    "_snapshot.json": lambda report, path: path.write_bytes(json_bytes(to_dict(report))),
    "_snapshot.png": draw_snapshot,
}
