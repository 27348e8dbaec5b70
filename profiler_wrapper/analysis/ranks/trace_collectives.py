"""Collectives of a trace as rows of the span table: those that a device runs, or a thread of the backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.collective_names import collective_of, element_bytes, is_collective_call
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.analysis.ranks.span_rows import Row, Steps
from profiler_wrapper.analysis.ranks.trace_threads import main_thread, thread_of, training_lanes
from profiler_wrapper.analysis.time_rows import exposed_communication
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.rank_numbers import rank_list_text
from profiler_wrapper.recording.recording import DEVICE_CATEGORIES, Bool, Category, CollectiveDetails, Int64

_MOVE_THEIR_INPUT = ("all_reduce", "broadcast", "reduce", "send", "recv")
_COMMUNICATION = classes.CLASSES.index("communication")


def cpu_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Collectives as the backend's own threads show them, else as calls; calls beside the former have no number."""
    spans = found.recording.spans
    outermost = outermost_calls(found)
    training = np.isin(spans.lane, training_lanes(found))
    own_threads = np.flatnonzero(outermost & ~training)
    told = _told_of(found)
    by_backend = _numbered(found, steps, own_threads, told, thread_of=lambda span: thread_of(found, span), depth=0)
    nested = np.flatnonzero(outermost & training)
    thread = main_thread(found)
    by_call = _numbered(found, steps, nested, told, thread_of=lambda _: thread, depth=1)
    if by_backend:
        by_call = [row._replace(sequence=None, group=None) for row in by_call]
        by_backend = _with_overlap(found, by_backend)
    return by_backend + by_call


def outermost_calls(found: Attributed) -> Bool:
    """Per event whether it is a call that communicates, and within no other."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = np.array([is_collective_call(name) for name in found.recording.names], dtype=np.bool_)
    is_call: Bool = calls[spans.name] & (spans.category <= Category.ANNOTATION)
    outermost: Bool = is_call & (nearest_above(parent, nearest(parent, is_call)) < 0)
    return outermost


def _with_overlap(found: Attributed, rows: list[Row]) -> list[Row]:
    """With how long the training threads ran ops beside each, calls that communicate left out."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = np.array([is_collective_call(name) for name in found.recording.names], dtype=np.bool_)
    is_op = (spans.category == Category.CPU_OP) & np.isin(spans.lane, training_lanes(found))
    is_op[list(found.tree.layer_of_span)] = False
    chosen = is_op & ~(nearest(parent, calls[spans.name] & (spans.category <= Category.ANNOTATION)) >= 0)
    computing = union(spans.start_ns[chosen], spans.end_ns[chosen])
    starts = np.array([row.start_ns for row in rows], dtype=np.int64)
    ends = starts + np.array([row.duration_ns for row in rows], dtype=np.int64)
    beside = computing.overlap(starts, ends).tolist()
    return [row._replace(overlapped_ns=overlapped) for row, overlapped in zip(rows, beside, strict=True)]


def device_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Kernels that communicate, each in its stream; of the step that launched it."""
    spans, charges = found.recording.spans, found.charges
    chosen = np.flatnonzero(charges.work == _COMMUNICATION)
    if not len(chosen):
        return []
    numbers = steps.numbers_of_charges(chosen)
    exposed, _ = exposed_communication(found.recording, charges)
    told = _details(found)
    rows = []
    columns = (charges.span[chosen].tolist(), charges.cpu_span[chosen].tolist(), numbers, exposed[chosen].tolist())
    for span, cpu_span, number, exposed_ns in zip(*columns, strict=True):
        details = told.get(span) or told.get(_telling(found, cpu_span, told))
        row = _collective_row(found, span, number, details, thread=int(spans.stream[span]), depth=0)
        rows.append(row._replace(overlapped_ns=row.duration_ns - int(exposed_ns)))
    return _with_sequence(rows)


def _telling(found: Attributed, span: int, told: Mapping[int, CollectiveDetails]) -> int:
    """The innermost event around a launch that tells of its collective; -1 for none."""
    parent = found.nesting.parent
    while span >= 0 and span not in told:
        span = int(parent[span])
    return span


def _numbered(
    found: Attributed,
    steps: Steps,
    members: Int64,
    told: Mapping[int, CollectiveDetails],
    *,
    thread_of: Callable[[int], int],
    depth: int,
) -> list[Row]:
    spans = found.recording.spans
    members = members[np.argsort(spans.start_ns[members], kind="stable")]
    numbers = steps.numbers(spans.start_ns[members])
    rows = [
        _collective_row(found, span, number, told.get(span), thread=thread_of(span), depth=depth)
        for span, number in zip(members.tolist(), numbers, strict=True)
    ]
    return _with_sequence(rows)


def _told_of(found: Attributed) -> dict[int, CollectiveDetails]:
    """Per event that tells of its collective, or that is around one that does, what is told."""
    told = _details(found)
    parent = found.nesting.parent
    for span, details in list(told.items()):
        above = int(parent[span])
        while above >= 0 and above not in told:
            told[above] = details
            above = int(parent[above])
    return told


def _collective_row(
    found: Attributed, span: int, step: int | None, details: CollectiveDetails | None, *, thread: int, depth: int
) -> Row:
    spans, name = found.recording.spans, found.recording.name_of(span)
    on_device = int(spans.category[span]) in DEVICE_CATEGORIES
    plain = (details.name if details is not None else "") or name
    return Row(
        step=step,
        name=collective_of(plain) or collective_of(name) or name,
        kind="communication",
        start_ns=int(spans.start_ns[span]),
        duration_ns=int(spans.duration_ns[span]),
        device_ns=int(spans.duration_ns[span]) if on_device else None,
        thread=thread,
        depth=depth,
        sequence=None if details is None else details.sequence,
        group=_group(found, details),
        bytes=_bytes(details) if details is not None else _bytes_of_inputs(found, span),
    )


def _with_sequence(rows: list[Row]) -> list[Row]:
    """Numbered in each step where the trace does not tell: by name and group, in order of start."""
    seen: dict[tuple[int | None, str, str | None], int] = {}
    numbered = []
    for row in sorted(rows, key=lambda row: row.start_ns):
        key = (row.step, row.name, row.group)
        count = seen[key] = seen.get(key, -1) + 1
        numbered.append(row if row.sequence is not None else row._replace(sequence=count))
    return numbered


def _details(found: Attributed) -> dict[int, CollectiveDetails]:
    return {details.span: details for details in found.recording.collectives}


def _group(found: Attributed, details: CollectiveDetails | None) -> str | None:
    """The ranks of the group, else its name; where nothing is told, of a job with one group that one."""
    if details is not None and details.ranks:
        return rank_list_text(details.ranks)
    if details is not None and details.group_name:
        return details.group_name
    info = found.recording.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        ranks = groups[0].get("ranks")
        return rank_list_text(ranks) if isinstance(ranks, list) and ranks else str(groups[0].get("pg_desc") or "all")
    return None


def _bytes(details: CollectiveDetails) -> int | None:
    size = element_bytes(details.dtype or "")
    elements = [count for count in (details.in_elements, details.out_elements) if count is not None]
    return None if size is None or not elements else max(elements) * size


def _bytes_of_inputs(found: Attributed, span: int) -> int | None:
    """Of a collective that moves what it is given, as a trace with shapes tells it."""
    shapes = found.shapes.get(span) if found.shapes is not None else None
    if shapes is None or collective_of(found.recording.name_of(span)) not in _MOVE_THEIR_INPUT:
        return None
    inputs = [
        (math.prod(dims), element_bytes(kind)) for dims, kind in zip(shapes.dims, shapes.types, strict=False) if dims
    ]
    if not inputs or any(size is None for _, size in inputs):
        return None
    return int(sum(elements * (size or 0) for elements, size in inputs))
