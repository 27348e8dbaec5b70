"""The answer to an out-of-memory: who holds what, and which change would help most. At most 12 lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from profiler_wrapper.advice.memory import SMALLER, WORTH_TRYING
from profiler_wrapper.capture.records import OutOfMemory
from profiler_wrapper.errors import in_a_line, say, warn
from profiler_wrapper.place.phases import NO_LAYER
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.tables.memory.blocks import op_tree
from profiler_wrapper.tables.model import Change, MemoryUse, Owner
from profiler_wrapper.tables.statistics import OPEN, fill_numbers, split_number
from profiler_wrapper.trace.nesting import innermost_around
from profiler_wrapper.units import file_size, percent

# --- Where an allocation failed that could not be met ---


def failed_op(found: Placed) -> str:
    """Op, layer, phase and step of the last failed allocation; "" where none failed, or outside of all ops."""
    recording = found.recording
    if not recording.failed_allocations:
        return ""
    failure = recording.failed_allocations[-1]
    time_ns = np.array([failure.time_ns], dtype=np.int64)
    lane = np.array([failure.lane], dtype=np.int32)
    around = int(innermost_around(found.nesting, recording.spans, lane, time_ns, time_ns)[0])
    if around < 0:
        return ""
    maker = int(op_tree(recording, found.nesting, found.tree).maker[around])
    span = maker if maker >= 0 else around
    place = found.attribution.place(span)
    layer = found.tree.layers[place.layer].name if place.layer >= 0 else "code outside of layers"
    (step,) = found.steps.place_of(time_ns).tolist()
    during = f", step {found.steps.number[step]}" if step >= 0 and found.steps.number[step] is not None else ""
    return f"{recording.name_of(span)} of {layer} ({place.phase}{during})"


ShapeOf = Callable[[str, str], str]  # (op, layer) -> the shapes of what it was given, "" where not known

MOST_LINES = 12
_WIDTH = 100
_WORTH_A_WORD = 0.005
_MOST_LAYERS = 3
_MOST_TENSORS = 3
_MOST_CHANGES = 2


def out_of_memory_text(
    failure: OutOfMemory, *, where: str, use: MemoryUse | None, shape_of: ShapeOf, failed_in_recording: bool, files: str
) -> str:
    """What to say of an allocation that could not be met.

    Args:
        where: the layer, phase and op that asked for it; "" where not known.
        use: of the recording that it ended, or of an earlier one.
        failed_in_recording: the recording ends with the failure, so its last owners are those at fault.
    """
    allocated_bytes = failure.allocated_bytes
    if allocated_bytes is None and use is not None and failed_in_recording:
        allocated_bytes = use.last.total_bytes
    sizes = {
        "requested": failure.requested_bytes,
        "allocated": allocated_bytes,
        "reserved": failure.reserved_bytes,
        "free": failure.free_bytes,
    }
    known = ", ".join(f"{name} {file_size(size)}" for name, size in sizes.items() if size is not None)
    lines = [f"out of memory on {failure.device}" + (f": {known}" if known else "")]
    if where:
        lines.append(f"in {where}")
    if use is None:
        lines.append("who holds it is not known: nothing of this device's memory was recorded")
    else:
        owners = use.last_owners if failed_in_recording else use.peak_owners
        if not failed_in_recording:
            lines.append("it came after the recording ended; at the recording's own peak it was:")
        lines += _owners_lines(owners)
        lines += [f"  largest: {text}" for text in _largest(owners, shape_of)]
        least = WORTH_TRYING * (failure.requested_bytes or 0)
        changes = [change for change in use.changes if change.saves_bytes >= least]
        lines += [f"try: {_change_text(change)}" for change in changes[:_MOST_CHANGES]]
        if use.changes and not changes:
            lines.append(f"try: {SMALLER}")
    if files:
        lines.append(f"files: {files}")
    lines = [f"{'  ' if i else 'profiler_wrapper: '}{line}" for i, line in enumerate(lines[:MOST_LINES])]
    return "\n".join(shorten(clean(line), _WIDTH) for line in lines)


def _owners_lines(owners: Sequence[Owner]) -> list[str]:
    total = sum(owner.size_bytes for owner in owners)
    by_category: Counter[str] = Counter()
    by_layers: Counter[tuple[str, str]] = Counter()
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for owner in owners:
        by_category[owner.category] += owner.size_bytes
        pattern, number = split_number(owner.layer.replace(OPEN, " "))
        key = (pattern, owner.category)
        by_layers[key] += owner.size_bytes
        if number is not None:
            members[key].add(number)
    shares = [
        f"{name} {file_size(size)} ({percent(size, total)} %)"
        for name, size in by_category.most_common()
        if size >= _WORTH_A_WORD * total
    ]
    while len(shares) > 1 and len("  held by: " + ", ".join(shares)) > _WIDTH:
        shares.pop()
    lines = [f"held by: {', '.join(shares)}"]
    for (pattern, category), size in by_layers.most_common(_MOST_LAYERS):
        where = fill_numbers(pattern, members[pattern, category])
        lines.append(f"  {file_size(size)} {category} of {where or 'code outside of layers'}")
    return lines


def _largest(owners: Sequence[Owner], shape_of: ShapeOf) -> list[str]:
    """The largest single tensors; those of like layers are one line."""
    count: dict[tuple[int, str, str, str], int] = defaultdict(int)
    numbers: dict[tuple[int, str, str, str], set[int]] = defaultdict(set)
    layer_of: dict[tuple[int, str, str, str], str] = {}
    for owner in owners:
        pattern, number = split_number((owner.name or owner.layer).replace(OPEN, " "))
        key = (owner.size_bytes // max(1, owner.count), str(owner.category), pattern, "" if owner.name else owner.op)
        count[key] += owner.count
        layer_of[key] = owner.layer
        if number is not None:
            numbers[key].add(number)
    lines = []
    for key in sorted(count, key=lambda key: -key[0])[:_MOST_TENSORS]:
        size, category, pattern, op = key
        place = fill_numbers(pattern, numbers[key])
        what = f"{op} {shape_of(op, layer_of[key])}".strip() if op else f"{category} {place}"
        where = f" of {place}" if op and place else ""
        lines.append(f"{f'{count[key]} x ' if count[key] > 1 else ''}{file_size(size)}, {what}{where}")
    return lines


def _change_text(change: Change) -> str:
    costs = f", {change.costs_ns / 1e6:+.1f} ms a step" if change.costs_ns else ""
    what, _, _ = change.text.partition(":")
    return f"{what}: -{file_size(change.saves_bytes)}{costs}"


# --- Explains an out-of-memory on stderr, from the exception and from what was recorded ---

_MOST_INPUTS = 3


def explain_oom(
    failure: OutOfMemory,
    result: ProfileResult | None,
    *,
    found: Placed | None = None,
    directory: Path | None = None,
) -> bool:
    """Say who holds the memory and what would help; whether that could be.

    Args:
        result: of the recording that the failure ended, or of an earlier one; None without one.
        found: of the recording that the failure ended.
    """
    try:
        text = out_of_memory_text(
            failure,
            where="" if found is None else failed_op(found),
            use=_use_of(failure.device, result),
            shape_of=lambda op, layer: "" if found is None else _inputs(found, op, layer),
            failed_in_recording=found is not None,
            files=str(directory) if directory is not None else "",
        )
    except Exception as error:
        warn(f"the out-of-memory could not be explained: {in_a_line(error)}")
        return False
    say(f"{text}\n", on="stderr")
    return True


def _use_of(device: str, result: ProfileResult | None) -> MemoryUse | None:
    """What was recorded of the memory of this very device."""
    use = result.memory_use if result is not None else None
    if use is None or device in (use.device, use.device.partition(":")[0]):
        return use
    return use if device == "an accelerator" and use.device != "cpu" else None


def _inputs(found: Placed, op: str, layer: str) -> str:
    """`[4096, 512] x [512, 32000]`: of the last call of an op in a layer; "" where that was not recorded."""
    names, attribution = found.recording.names, found.attribution
    wanted = found.tree.by_name().get(layer, NO_LAYER)
    places = [i for i, place in enumerate(attribution.places) if place.layer == wanted]
    name = names.index(op) if op in names else -1
    chosen = (found.recording.spans.name == name) & np.isin(attribution.place_of, places)
    calls = [span for span in np.flatnonzero(chosen).tolist() if found.shapes and span in found.shapes]
    if not calls or found.shapes is None:
        return ""
    tensors = [dims for dims in found.shapes[calls[-1]].dims if dims and all(isinstance(size, int) for size in dims)]
    return " x ".join(str(list(dims)) for dims in tensors[:_MOST_INPUTS])
