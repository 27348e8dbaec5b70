"""A memory snapshot as text: short for a terminal, and in full for a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profiler_wrapper.analysis.allocator_model import (
    AllocatorReport,
    Band,
    DeviceMemory,
    FailedAllocation,
    LayerMemory,
    MemoryHistory,
    MemoryOwner,
    Moment,
)
from profiler_wrapper.reports.text import cells, clean, grid, shorten, wrap
from profiler_wrapper.units import file_size, mebibytes, percent

WIDTH, LINES = 100, 40
_ROWS = {"pools": 4, "owners": 8, "now": 5, "layers": 5, "devices": 4, "notes": 3}
_FULL_WIDTH, _FULL_ROWS = 200, 1_000_000
_FULL_STACKS = 30  # of the largest owners


def console_text(report: AllocatorReport, *, unicode: bool = False, width: int = WIDTH) -> str:
    """At most 40 lines of at most `width` columns: one device in detail, the others in a line each.

    In detail: the one that ran out of memory, else the one that holds most.
    """
    lines = [*_title(report, unicode), *_details(report.devices[:1], report, unicode, width, _ROWS)]
    others = report.devices[1 : 1 + _ROWS["devices"]]
    tail = [shorten(f"also {failure_line(other) or _held(other)}", width) for other in others]
    hidden = len(report.devices) - 1 - len(others)
    tail += [f"({hidden} more devices; -o FILE has them all)"] if hidden > 0 else []
    tail += _note_lines(report, unicode, width, _ROWS["notes"])
    return "\n".join([*lines[: LINES - len(tail)], *tail])


def full_text(report: AllocatorReport) -> str:
    """Every device, row and note, and the whole stacks of the largest owners."""
    rows = dict.fromkeys(_ROWS, _FULL_ROWS)
    lines = [*_title(report, True), *_details(report.devices, report, True, _FULL_WIDTH, rows)]
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
    if report.expandable:
        return f"{lost}, though expandable_segments is on."
    return f"{lost}. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def owner_name(owner: MemoryOwner | Band, *, unicode: bool) -> str:
    """`"train.py:12 main < torch/nn/modules/linear.py:134 forward [text it was stamped with]"`."""
    place = owner.place
    parts = [place.line, f"in {place.inside}" if place.inside else "", f"from {place.caller}" if place.caller else ""]
    stamped = f"[{owner.metadata}] " if owner.metadata else ""
    return clean(stamped + ", ".join(part for part in parts if part), unicode=unicode)


# -- parts ----------------------------------------------------------------------------------------


def _title(report: AllocatorReport, unicode: bool) -> list[str]:
    devices = len(report.devices)
    name = shorten(clean(report.name, unicode=unicode), 50)
    return [
        f"Memory snapshot {name} ({file_size(report.file_bytes)}), {devices} device{'s' * (devices != 1)} with memory"
    ]


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
            yield from _moment(_failure_title(at_failure), at_failure.moment, width, most["owners"], unicode)
        elif one.history is not None:
            yield from _moment("At the peak", one.history.peak, width, most["owners"], unicode)
        if one.history is not None:
            yield from wrap(_peak_line(one.history), width, 2)
        if at_failure is None or one.history is None or at_failure.moment.state < one.history.entries:
            yield from _now(one, width, most["now"], unicode)
        yield from _layer_table(one.layers, one.allocated_bytes, width, most["layers"], unicode)


def _now(one: DeviceMemory, width: int, most: int, unicode: bool) -> Iterator[str]:
    yield ""
    yield f"Now: {_mib(one.allocated_bytes)} in {one.blocks} blocks (as given), by the line that asked for them"
    yield from _owner_table(one.owners, one.allocated_bytes, width, most, unicode)


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
    return ["", *grid(header, rows).split("\n"), *_hidden(len(one.pools) - most, "pools")]


def _failure_title(failure: FailedAllocation) -> str:
    return f"When {clean(failure.place.line)} asked for {_mib(failure.requested_bytes)} in vain"


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
    shown = owners[:most] if len(owners) <= most else owners[: most - 1]
    rows = [(one.size_bytes, one.blocks, owner_name(one, unicode=unicode)) for one in shown]
    rest = owners[len(shown) :]
    if rest:
        rows.append((sum(one.size_bytes for one in rest), sum(one.blocks for one in rest), f"({len(rest)} more)"))
    return _share_table(rows, total, width)


def _layer_table(layers: Sequence[LayerMemory], total: int, width: int, most: int, unicode: bool) -> list[str]:
    if not any(one.layer for one in layers):
        return []
    shown = layers[:most] if len(layers) <= most else layers[: most - 1]
    rows = [(one.size_bytes, one.blocks, clean(one.layer, unicode=unicode) or f"({one.origin})") for one in shown]
    rest = layers[len(shown) :]
    if rest:
        rows.append((sum(one.size_bytes for one in rest), sum(one.blocks for one in rest), f"({len(rest)} more)"))
    return [
        "",
        "Now, by layer: the innermost `forward` (like layers share their line)",
        *_share_table(rows, total, width),
    ]


def _share_table(rows: Sequence[tuple[int, int, str]], total: int, width: int) -> list[str]:
    if not rows:
        return ["  nothing"]
    sizes = [mebibytes(size) for size, _, _ in rows]
    counts = [str(count) for _, count, _ in rows]
    size_width, count_width = max(map(len, sizes)), max(map(len, counts))
    lines = []
    for (size, count, name), text in zip(rows, sizes, strict=True):
        head = f"{text:>{size_width + 2}} MiB {percent(size, total):>5} % {count:>{count_width}}x  "
        lines.append(head + shorten(name, width - cells(head)))
    return lines


def _whole_stacks(owners: Sequence[MemoryOwner], when: str) -> Iterator[str]:
    for one in owners:
        yield ""
        yield f"{_mib(one.size_bytes)} in {one.blocks} blocks, {when}: {owner_name(one, unicode=True)}"
        for frame in one.frames:
            name = clean(f"{frame.file}:{frame.line} {frame.name}", unicode=True)
            yield f"    {name}" + (f" <- {clean(frame.source, unicode=True)}" if frame.source else "")


def _note_lines(report: AllocatorReport, unicode: bool, width: int, most: int) -> list[str]:
    lines = [line for note in report.notes for line in wrap(f"note: {clean(note, unicode=unicode)}", width, 2)]
    return lines[:most]


def _hidden(count: int, what: str) -> list[str]:
    return [f"({count} more {what})"] if count > 0 else []


def _mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{mebibytes(size_bytes)} MiB"
