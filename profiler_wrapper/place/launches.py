"""Join device events with the calls that launched them."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from profiler_wrapper.trace.arrays import marked
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

_LAUNCH = re.compile(r"(cuda|cu|hip)([A-Z]\w*)?Launch(?!HostFunc)")


GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")


_CAPTURE_BEGIN = re.compile(r"(cuda|cu|hip)StreamBeginCapture")


_CAPTURE_END = re.compile(r"(cuda|cu|hip)StreamEndCapture")


def launches(recording: Recording) -> Int64:
    """Per span, the CPU event that launched it; -1 for CPU events and where there is none.

    The join is `correlation`. Device events without such an event join by `External id`, but only
    in a file where that agrees wherever both exist.
    """
    spans = recording.spans
    launch = np.full(len(spans), -1, dtype=np.int64)
    device = np.flatnonzero(recording.device_mask)
    # same (>= -> >, 0 -> 1): they begin at 1
    runtime = np.flatnonzero((spans.category == Category.RUNTIME) & (spans.correlation >= 0))
    known = _join(spans.correlation[device], spans.correlation[runtime], runtime)
    launch[device] = known
    if (known < 0).any():
        # same (>= -> >, 0 -> 1): they begin at 1
        ops = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.external_id >= 0))
        by_id = _join(spans.external_id[device], spans.external_id[ops], ops)
        op, call = by_id[(known >= 0) & (by_id >= 0)], known[(known >= 0) & (by_id >= 0)]
        inside = (spans.start_ns[op] <= spans.start_ns[call]) & (spans.start_ns[call] <= spans.end_ns[op])
        if len(op) and (inside & (spans.lane[op] == spans.lane[call])).all():
            launch[device] = np.where(known >= 0, known, by_id)
    return launch


def _join(wanted: Int64 | Int32, keys: Int64 | Int32, values: Int64) -> Int64:
    if len(keys) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    first = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    return np.where((keys[first] == wanted) & (wanted >= 0), values[first], -1)


class MissingKernels(NamedTuple):
    """Calls that launched kernels of which no event is in the trace."""

    captured: Int64  # while a graph was captured: they became part of it, and did not run
    lost: Int64  # the profiler lost the kernels, or stopped before they ran


def missing_kernels(recording: Recording, launch: Int64) -> MissingKernels:
    """Compare launches with device events; without any device event none counts as lost.

    A capture takes what any thread launches. Calls that set or copy memory say nothing: those without an event of
    their own are normal (sets, copies between devices).
    """
    spans = recording.spans
    runtime = spans.category == Category.RUNTIME
    calls, has_kernel = launches_kernels(recording), marked(len(spans), launch)
    begins = np.sort(spans.start_ns[runtime & recording.named(_CAPTURE_BEGIN.match)])
    ends = np.sort(spans.start_ns[runtime & recording.named(_CAPTURE_END.match)])
    open_at_first = len(ends) and (not len(begins) or ends[0] < begins[0])  # a capture that began before the trace
    missing = np.flatnonzero(calls & ~has_kernel)
    begun, ended = (np.searchsorted(times, spans.start_ns[missing], side="right") for times in (begins, ends))
    captured = begun + int(open_at_first) > ended
    if not recording.device_mask.any():
        return MissingKernels(missing[captured], missing[:0])
    lost, plain = missing[~captured], calls & ~recording.named(GRAPH_LAUNCH.match)
    # Profilers of ROCm may give the kernels of two launches the number of one: enough kernels, so none is lost.
    launched = launch[(spans.category == Category.KERNEL) & (launch >= 0)]
    if int(plain[launched].sum()) >= int((plain & has_kernel).sum()) + int(plain[lost].sum()):
        lost = lost[~plain[lost]]
    return MissingKernels(missing[captured], lost)


def launches_kernels(recording: Recording) -> Bool:
    """Per span whether it is a call that launches kernels."""
    calls: Bool = (recording.spans.category == Category.RUNTIME) & recording.named(_LAUNCH.match)
    return calls
