"""Where a training thread waits for a collective within a layer or a node, which show in the trace as one event.

The thread goes on when the collective ends. So where one ends while the thread is in no op, only in a layer's mark, in
the engine's part of a node or around a call that communicates, it waited since the last op, or since the collective
began. A thread that goes on before waited for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.intervals import Union, union
from profiler_wrapper.analysis.ranks.span_rows import Row
from profiler_wrapper.analysis.ranks.trace_collectives import outermost_calls
from profiler_wrapper.analysis.ranks.trace_phases import LONG_GAP_NS
from profiler_wrapper.analysis.ranks.trace_threads import training_lanes
from profiler_wrapper.recording.recording import Category, Int64

_ENGINE = "autograd::engine::evaluate_function: "  # hooks run in it, beside the node itself
_WAITING = ("forward", "backward", "recompute", "optimizer", "other")


def waits_within(found: Attributed) -> Union:
    """The waits of the training threads within events, where the backend's threads show collectives."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = outermost_calls(found)
    training = np.isin(spans.lane, training_lanes(found))
    collectives = np.flatnonzero(calls & ~training)
    if found.charges.basis == "device" or not len(collectives):
        return union(np.empty(0, np.int64), np.empty(0, np.int64))
    engine = np.array([name.startswith(_ENGINE) for name in found.recording.names], dtype=np.bool_)
    may_wait = engine[spans.name]
    may_wait[list(found.tree.layer_of_span)] = True
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
        last = int(np.searchsorted(waits.start_ns, end, side="left"))
        for at in range(first, last) if row.kind in _WAITING else ():
            if waits.start_ns[at] > begin:
                kept.append(row._replace(start_ns=begin, duration_ns=int(waits.start_ns[at]) - begin))
            begin = int(waits.end_ns[at])
        if end > begin:
            kept.append(row._replace(start_ns=begin, duration_ns=end - begin))
    return kept


def _last(starts: Int64, values: Int64, at_ns: Int64) -> Int64:
    """Per instant the value of the interval that began last before it; the lowest of all where none did."""
    if not len(starts):
        return np.full(len(at_ns), np.iinfo(np.int64).min, dtype=np.int64)
    place = np.searchsorted(starts, at_ns, side="left") - 1
    found: Int64 = np.where(place >= 0, values[np.maximum(place, 0)], np.iinfo(np.int64).min)
    return found
