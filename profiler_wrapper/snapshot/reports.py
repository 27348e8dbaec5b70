"""What a memory snapshot says, as text for a terminal and a file, as JSON, and as a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.reports import figures
from profiler_wrapper.reports.text import aligned_lines, cells, clean, grid, shorten, whole_ones, wrap
from profiler_wrapper.snapshot.analyse import AllocatorReport, DeviceMemory, MemoryHistory, MemoryOwner, Place
from profiler_wrapper.trace.atomic import json_bytes
from profiler_wrapper.units import file_size, mebibytes, percent

WIDTH, LINES, _MOST_DEVICES = 100, 40, 4
_FULL_STACKS = 30  # of the largest owners


class _Room(NamedTuple):
    """How much is written."""

    width: int = 200
    unicode: bool = True
    pools: int = 1_000_000
    owners: int = 1_000_000
    now: int = 1_000_000  # owners at the time of the snapshot, where there is a history
    notes: int = 1_000_000


def console_text(report: AllocatorReport, *, unicode: bool = False, width: int = WIDTH) -> str:
    """Return at most 40 lines of at most `width` columns: one device in detail, the others in a line each.

    In detail: the one that ran out of memory, else the one that holds most.
    """
    room = _Room(width, unicode, pools=4, owners=8, now=5, notes=6)
    lines = [_title(report, room), *_details(report, report.devices[:1], room)]
    others = report.devices[1:]
    tail = [shorten(f"also {failure_line(one) or _held(one)}", width) for one in others[:_MOST_DEVICES]]
    if hidden := len(others) - len(tail):
        tail.append(f"({hidden} more devices; -o FILE has them all)")
    tail += _notes(report, room)
    return "\n".join([*lines[: LINES - len(tail)], *tail])


def full_text(report: AllocatorReport) -> str:
    """Return every device, row and note, and the whole stacks of the largest owners."""
    room = _Room()
    lines = [_title(report, room), *_details(report, report.devices, room)]
    for one in report.devices:
        when = f"cuda:{one.device}, at the peak" if one.history else "now"
        for owner in (one.history.peak if one.history else one).owners[:_FULL_STACKS]:
            name = owner_name(owner.place, unicode=True)
            lines += ["", f"{_mib(owner.size_bytes)} in {owner.blocks} blocks, {when}: {name}"]
            lines += [clean(f"    {frame.file}:{frame.line} {frame.name}", unicode=True) for frame in owner.stack]
    lines += [clean(f"setting {key}: {value}", unicode=True) for key, value in report.settings.items()]
    return "\n".join([*lines, *_notes(report, room), ""])


def failure_line(one: DeviceMemory) -> str:
    """Return what the last allocation that could not be met asked for, and what there was; "" where all were met."""
    if one.failure is None:
        return ""
    free, then = one.failure.device_free_bytes, one.failure.moment
    return (
        f"cuda:{one.device} ran out of memory: {_mib(one.failure.requested_bytes)} asked for, "
        f"{_mib(then.allocated_bytes)} allocated, {_mib(then.reserved_bytes)} reserved, "
        f"{_mib(free)}{'' if free is None else ' free'} on the device"
    )


def cure(one: DeviceMemory, report: AllocatorReport) -> str:
    """Return what to do about an allocation that could not be met; "" where none failed."""
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
    """Return `"[metadata] run/model.py:12 forward, in torch/nn/modules/linear.py:134 forward, from a.py:40 f"`."""
    stamped = f"[{place.metadata}] " if place.metadata else ""
    inside, caller = f", in {place.inside}" * bool(place.inside), f", from {place.caller}" * bool(place.caller)
    return clean(f"{stamped}{place.line}{inside}{caller}", unicode=unicode)


def _title(report: AllocatorReport, room: _Room) -> str:
    name, devices = shorten(clean(report.name, unicode=room.unicode), 50), len(report.devices)
    size = file_size(report.file_bytes)
    return f"Memory snapshot {name} ({size}), {devices} device{'s' * (devices != 1)} with memory"


def _details(report: AllocatorReport, devices: Sequence[DeviceMemory], room: _Room) -> Iterator[str]:
    if not devices:
        yield "No memory is held, and there is no history."
    for one in devices:
        for text in (failure_line(one), cure(one, report), _state(one)):
            yield from wrap(text, room.width, 2) if text else ()
        yield from _pool_table(one, room.pools)
        failure, history = one.failure, one.history
        if history is not None:
            title, then = "At the peak", history.worst
            if failure is not None:
                title = f"When {clean(failure.line)} asked for {_mib(failure.requested_bytes)} in vain"
            yield ""
            yield shorten(f"{title}: {_mib(then.allocated_bytes)} allocated (as asked for), by line", room.width)
            yield from _owner_table(then.owners, then.allocated_bytes, room, room.owners)
            yield from wrap(_peak_line(history), room.width, 2)
        if failure is None or history is None or failure.moment.state < history.entries:
            yield ""
            yield f"Now: {_mib(one.allocated_bytes)} in {one.blocks} blocks (as given), by the line that asked for them"
            yield from _owner_table(one.owners, one.allocated_bytes, room, room.now)


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
    peak, curve = history.peak, history.curve
    when = f"after entry {peak.state} of {history.entries}"
    if curve.time_us is not None and peak.time_us is not None:
        when += f", {(peak.time_us - int(curve.time_us[0])) / 1e6:.3f} s after the first"
    reserved = "not available" if curve.reserved_bytes is None else _mib(int(curve.reserved_bytes.max()))
    failed = f"; {history.failed} allocations failed" if history.failed > 1 else ""
    return f"Peak: {_mib(peak.allocated_bytes)} allocated {when}; most reserved: {reserved}{failed}"


def _owner_table(owners: Sequence[MemoryOwner], total: int, room: _Room, most: int) -> list[str]:
    """Bytes, blocks and name, a line each; of more than `most` owners, the last line is the sum of the rest."""
    if not owners:
        return ["  nothing"]
    rows = [(one.size_bytes, one.blocks, owner_name(one.place, unicode=room.unicode)) for one in owners]
    if rest := rows[most - 1 :] if len(rows) > most else []:
        rows[most - 1 :] = [(sum(row[0] for row in rest), sum(row[1] for row in rest), f"({len(rest)} more)")]
    numbers = [(f"  {mebibytes(size)} MiB", f"{percent(size, total):>5} %", f"{count}x") for size, count, _ in rows]
    heads = aligned_lines(numbers, ["right"] * 3, gap=1)
    return [f"{head}  {shorten(row[2], room.width - cells(head) - 2)}" for head, row in zip(heads, rows, strict=True)]


def _notes(report: AllocatorReport, room: _Room) -> list[str]:
    notes = [f"note: {clean(note, unicode=room.unicode)}" for note in report.notes]
    return whole_ones(notes, room.width, room.notes, "notes: -o FILE has them all")


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{mebibytes(size_bytes)} MiB"


def to_dict(report: AllocatorReport) -> dict[str, Any]:
    """Return what the JSON file holds."""
    plain = msgspec.to_builtins(report, enc_hook=lambda column: column.tolist())
    for device in plain["devices"]:
        moments = [device]
        if (history := device["history"]) is not None:
            moments += [history["peak"], *(failure["moment"] for failure in history["failures"])]
            del history["bands"]  # for the picture
        for moment in moments:
            moment["owners"] = [{**one.pop("place"), **one} for one in moment["owners"]]
    return {"schema_version": 1, **plain}


_NOTES, _LETTERS = 3, 118  # most notes below a picture; of a line of text in it
_REST, _FAILED = "#bbbbbb", "#D55E00"


def draw_snapshot(report: AllocatorReport, path: str | os.PathLike[str]) -> None:
    """Write a PNG: of the device that ran out, else of the fullest, what each line held over its history, in MiB."""
    title = f"Memory snapshot {shorten(report.name, 50)} ({file_size(report.file_bytes)})"
    one = next((one for one in report.devices if one.history), None)
    if one is None or one.history is None:
        figures.say(path, title, "There is no history of allocations to draw; the text says who holds what now.")
        return
    history, curve = one.history, one.history.curve
    if curve.time_us is None:
        unit, x = "entry of the history", curve.state.astype(np.float64)
    else:
        unit, x = "seconds since the first entry of the history", (curve.time_us - curve.time_us[0]) / 1e6
    colors = [color for color in figures.ROLE_COLORS if color != _FAILED]
    bands = [
        (f"{mebibytes(owner.size_bytes)} MiB  {owner_name(place, unicode=True)}", color, held)
        for (place, held), owner, color in zip(history.bands, history.worst.owners, colors, strict=False)
    ]
    rest = curve.allocated_bytes - sum(held for _, held in history.bands)
    if rest.any():
        bands.append(("all other lines", _REST, rest))
    notes = [fill(f"note: {note}", _LETTERS) for note in report.notes[:_NOTES]]
    height_in = 5.9 + 0.3 * (len(bands) + len(notes))
    with figures.picture(path, title, bars=60, height_in=height_in, foot="\n".join(notes)) as (axes,):
        figures.prepare(axes, ylabel="MiB", xlabel=unit)
        peak = x[np.searchsorted(curve.state, history.peak.state)], history.peak.allocated_bytes
        figures.draw_held(axes, x, bands, reserved_bytes=curve.reserved_bytes, peak=peak)
        if failed := [failure.moment.state for failure in history.failures]:
            at = x[np.searchsorted(curve.state, failed)]
            axes.vlines(at, 0, 1, _FAILED, transform=axes.get_xaxis_transform(), label="out of memory")
        said = failure_line(one) or f"cuda:{one.device}: allocated memory, as asked for, by line (sizes: at the peak)"
        figures.legend_above(axes, "\n".join(fill(text, _LETTERS) for text in (said, cure(one, report)) if text))


# By how the name of each ends, behind that of the snapshot.
SNAPSHOT_REPORTS: Mapping[str, Callable[[AllocatorReport, Path], object]] = {
    "_snapshot.txt": lambda report, path: path.write_bytes(full_text(report).encode("utf-8", "backslashreplace")),
    "_snapshot.json": lambda report, path: path.write_bytes(json_bytes(to_dict(report))),
    "_snapshot.png": draw_snapshot,
}
