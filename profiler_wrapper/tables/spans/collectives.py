"""Collectives of a trace as rows: those that a device runs, or a thread of the backend."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from profiler_wrapper.place.classes import COMMUNICATION
from profiler_wrapper.place.intervals import union
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.spans.row import Row, bounds
from profiler_wrapper.tables.spans.steps import Steps, with_steps
from profiler_wrapper.tables.spans.threads import (
    collective_calls,
    main_thread,
    on_training_threads,
    outermost_of,
    thread_of,
)
from profiler_wrapper.tables.statistics import sum_if_all_known
from profiler_wrapper.tables.time_rows import exposed_communication
from profiler_wrapper.tables.views.collectives import collective_of, element_bytes, payload_bytes_of
from profiler_wrapper.trace.arrays import at, marked
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, CollectiveDetails
from profiler_wrapper.trace.spans import rank_list_text

_MOVE_THEIR_INPUT = ("all_reduce", "broadcast", "reduce", "send", "recv")


def cpu_collectives(found: Placed, steps: Steps) -> list[Row]:
    """Collectives as the backend's own threads show them, else as calls; calls beside the former have no number."""
    outermost = outermost_of(found, collective_calls(found))
    training = on_training_threads(found)
    top = nearest(found.nesting.parent, outermost)
    # The event around them is the same collective.
    details = {int(top[one.span]): one for one in reversed(found.recording.collectives)}
    details |= {one.span: one for one in found.recording.collectives}

    def rows(chosen: Bool, depth: int) -> list[Row]:
        made = []
        for span, step in with_steps(found, steps, outermost & chosen):
            thread = calling if depth else thread_of(found, int(found.recording.spans.lane[span]))
            made.append(_collective_row(found, span, step, details.get(span), thread=thread, depth=depth))
        return _with_sequence(made)

    calling = main_thread(found)
    by_backend, by_call = rows(~training, 0), rows(training, 1)
    if not by_backend:
        return by_call
    # How long the training threads run ops beside each, calls that communicate left out.
    spans = found.recording.spans
    computes = training & (spans.category == Category.CPU_OP) & ~marked(len(spans), found.tree.layer_of_span)
    computes &= nearest(found.nesting.parent, collective_calls(found)) < 0
    beside = union(spans.start_ns[computes], spans.end_ns[computes]).overlap(*bounds(by_backend)).tolist()
    return [
        *(row._replace(overlapped_ns=overlapped) for row, overlapped in zip(by_backend, beside, strict=True)),
        *(row._replace(sequence=None, group=None) for row in by_call),
    ]


def device_collectives(found: Placed, steps: Steps) -> list[Row]:
    """Kernels that communicate, each in its stream; of the step that launched it."""
    spans, charges = found.recording.spans, found.charges
    chosen = np.flatnonzero(charges.work == COMMUNICATION)
    if not len(chosen):
        return []
    exposed, _ = exposed_communication(found.recording, charges)
    details = {one.span: one for one in found.recording.collectives}
    # The innermost event around the launch that knows it.
    around = at(nearest(found.nesting.parent, marked(len(spans), details)), charges.cpu_span[chosen], -1)
    rows = []
    columns = (charges.span[chosen].tolist(), around.tolist(), exposed[chosen].tolist())
    for span, telling, exposed_ns, step in zip(*columns, steps.numbers(steps.windows.launched_in[chosen]), strict=True):
        known = details.get(span) or details.get(telling)
        row = _collective_row(found, span, step, known, thread=int(spans.stream[span]), depth=0)
        rows.append(row._replace(device_ns=row.duration_ns, overlapped_ns=row.duration_ns - exposed_ns))
    return _with_sequence(rows)


def _collective_row(
    found: Placed, span: int, step: int | None, details: CollectiveDetails | None, *, thread: int, depth: int
) -> Row:
    spans, name = found.recording.spans, found.recording.name_of(span)
    plain = (details.name if details is not None else "") or name
    return Row(
        step=step,
        name=collective_of(plain) or collective_of(name) or name,
        kind="communication",
        start_ns=int(spans.start_ns[span]),
        duration_ns=int(spans.duration_ns[span]),
        thread=thread,
        depth=depth,
        sequence=None if details is None else details.sequence,
        group=_group(found, details),
        bytes=payload_bytes_of(details) if details is not None else _bytes_of_inputs(found, span),
    )


def _with_sequence(rows: list[Row]) -> list[Row]:
    """Numbered in each step where the trace does not number them: by name and group, in order of start."""
    numbers: defaultdict[tuple[int | None, str, str | None], Iterator[int]] = defaultdict(itertools.count)
    ordered = sorted(rows, key=lambda row: row.start_ns)
    numbered = [(row, next(numbers[row.step, row.name, row.group])) for row in ordered]
    return [row if row.sequence is not None else row._replace(sequence=number) for row, number in numbered]


def _group(found: Placed, details: CollectiveDetails | None) -> str | None:
    """The ranks of the group, else its name; where neither is known, of a job with one group that one."""
    if details is not None and (details.ranks or details.group_name):
        return rank_list_text(details.ranks) if details.ranks else details.group_name
    info = found.recording.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        ranks = groups[0].get("ranks")
        return rank_list_text(ranks) if isinstance(ranks, list) and ranks else str(groups[0].get("pg_desc") or "all")
    return None


def _bytes_of_inputs(found: Placed, span: int) -> int | None:
    """Of a collective that moves its inputs, by their shapes, where they were recorded."""
    shapes = found.shapes.get(span) if found.shapes is not None else None
    if shapes is None or collective_of(found.recording.name_of(span)) not in _MOVE_THEIR_INPUT:
        return None
    inputs = [
        (math.prod(dims), element_bytes(kind)) for dims, kind in zip(shapes.dims, shapes.types, strict=False) if dims
    ]
    sizes = [None if size is None else elements * size for elements, size in inputs]
    return sum_if_all_known(sizes) if sizes else None
