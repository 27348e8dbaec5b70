"""Where a training thread waits for a collective within a layer or a node, which show in the trace as one event.

The thread goes on when the collective ends. So where one ends while the thread is in no op, only in a layer's mark,
in the engine's part of a node or around a call that communicates, it waited since the last op, or since the
collective began. A thread that goes on before waited for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from profiler_wrapper.place.intervals import Union, union
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.spans.row import LASTING_ON_DEVICE, LONG_GAP_NS, Row
from profiler_wrapper.tables.spans.threads import collective_calls, on_training_threads, outermost_of
from profiler_wrapper.trace.arrays import at, marked
from profiler_wrapper.trace.recording import Category, Int64

_WAITING = (*LASTING_ON_DEVICE, "other")


_ENGINE = "autograd::engine::evaluate_function: "  # hooks run in it, beside the node itself


def waits_within_events(found: Placed) -> Union:
    """The waits of the training threads within events, where the backend's threads show collectives."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = outermost_of(found, collective_calls(found))
    training = on_training_threads(found)
    collectives = np.flatnonzero(calls & ~training)
    if found.charges.basis == "device" or not len(collectives):
        return union(np.empty(0, np.int64), np.empty(0, np.int64))
    may_wait = marked(len(spans), found.tree.layer_of_span)
    may_wait |= found.recording.named(lambda name: name.startswith(_ENGINE))
    around = parent[np.flatnonzero(calls & training)]
    while len(around := np.unique(around[around >= 0])):
        may_wait[around] = True
        around = parent[around]
    ops = training & (spans.category == Category.CPU_OP)
    runs = union(spans.start_ns[ops & ~may_wait], spans.end_ns[ops & ~may_wait])
    within = union(spans.start_ns[training & may_wait], spans.end_ns[training & may_wait])
    end = spans.end_ns[collectives]
    begin = np.maximum(spans.start_ns[collectives], _last(within.start_ns, within.start_ns, end))
    begin = np.maximum(begin, _last(runs.start_ns, runs.end_ns, end))  # after the end where an op runs on
    chosen = (end - begin > LONG_GAP_NS) & (within.overlap(end - 1, end) > 0)
    return union(begin[chosen], end[chosen])


def without_waits(rows: Iterable[Row], waits: Union) -> list[Row]:
    """Phases of a step, cut where their thread waits."""
    kept = []
    for row in rows:
        begin, end = row.start_ns, row.start_ns + row.duration_ns
        first = int(np.searchsorted(waits.end_ns, begin, side="right"))
        last = int(np.searchsorted(waits.start_ns, end, side="left")) if row.kind in _WAITING else first
        starts, ends = waits.start_ns[first:last].tolist(), waits.end_ns[first:last].tolist()
        for start_ns, end_ns in zip([begin, *ends], [*starts, end], strict=True):
            if end_ns > start_ns:
                kept.append(row._replace(start_ns=start_ns, duration_ns=end_ns - start_ns))
    return kept


def _last(starts: Int64, values: Int64, at_ns: Int64) -> Int64:
    """Per instant the value of the interval that began last before it; the lowest of all where none did."""
    return at(values, np.searchsorted(starts, at_ns, side="left") - 1, np.iinfo(np.int64).min)
