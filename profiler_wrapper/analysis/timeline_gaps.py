"""When a device has nothing to do within a step, and what the CPU did meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.advice.facts import WAITING_CALLS, uncovered
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.charges import outermost, union
from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, PHASES
from profiler_wrapper.analysis.spans.threads import is_step, main_lane
from profiler_wrapper.analysis.statistics import at, marked, sum_by_key
from profiler_wrapper.analysis.steps import StepWindows
from profiler_wrapper.analysis.time_rows import communicating_threads
from profiler_wrapper.analysis.timeline_columns import (
    COMMUNICATES,
    LAUNCHES,
    LOADS,
    NOTHING,
    PYTHON,
    WAITS,
    WAITS_FOR_ITSELF,
)
from profiler_wrapper.analysis.views.collectives import collective_of
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest
from profiler_wrapper.trace.recording import Bool, Category, Int8, Int32, Int64, Spans

_WAITS_FOR_RANKS = ("wait", "barrier")


class IdleGaps(NamedTuple):
    """All gaps of all devices, by device, then in order of time; one that a step's end cuts is two."""

    start_ns: Int64
    end_ns: Int64
    device: Int64
    window: Int64  # of the step that it is in
    ender: Int64  # the charge that ends it; -1 where the step ends first

    @property
    def length_ns(self) -> Int64:
        return self.end_ns - self.start_ns

    def only(self, kept: Bool) -> IdleGaps:
        """Some of them."""
        return IdleGaps(*(column[kept] for column in self))


def idle_gaps(found: Attributed, windows: StepWindows) -> IdleGaps | None:
    """None without device events, and where some of what a device did is not in the trace, or nothing ran by nature."""
    charges, spans = found.charges, found.recording.spans
    cut = found.unseen_until_ns is not None and len(windows.number) == 1
    if charges.basis != "device" or cut or len(found.lost_launches) or found.captured_kernels:
        return None
    pieces = []
    device = spans.device[charges.span]
    for one in np.unique(device).tolist():
        here = np.flatnonzero(device == one)
        start = spans.start_ns[charges.span[here]]  # in order
        left, right, by_event = uncovered(union(start, start + charges.time_ns[here]), windows.start_ns, windows.end_ns)
        ender = np.where(by_event, here[np.minimum(np.searchsorted(start, right), len(here) - 1)], -1)
        window = np.searchsorted(windows.start_ns, left, side="right") - 1
        pieces.append((left, right, np.full(len(left), one, dtype=np.int64), window, ender))
    return IdleGaps(*map(np.concatenate, zip(*pieces, strict=True)))


class Meanwhile(NamedTuple):
    """Per gap what the CPU did."""

    cause: Int64
    event: Int64  # the span that it was in most of the time, of those that are the cause; -1 for none
    layer: Int64  # that it was in for the most of it
    phase: Int64


def meanwhile(found: Attributed, gaps: IdleGaps, nesting: Nesting, place_of: Int32) -> Meanwhile:
    """What the thread did that launched what ends a gap; where nobody knows which, the thread of the steps.

    From the launch on, and where that was before the gap, it is on its way: so its op is named.

    `nesting`: of all events on CPUs, calls into the runtime too; `place_of`: per span.
    """
    charges, spans = found.charges, found.recording.spans
    call = at(charges.cpu_span, gaps.ender, -1)
    lane = np.where(call >= 0, spans.lane[call], main_lane(found))
    launched_ns = at(charges.launch_ns, gaps.ender, np.iinfo(np.int64).max)
    pieces = _Pieces.of(gaps, lane, np.clip(launched_ns, gaps.start_ns, gaps.end_ns), call, spans, nesting)
    kind_of, target_of = _kinds(found, nesting)
    kind = np.where(pieces.recorded, at(kind_of, pieces.span, PYTHON), NOTHING)
    count = len(gaps.start_ns)
    cause = _most(pieces.gap, kind, pieces.length_ns, count)
    of_cause = kind == cause[pieces.gap]
    event = _most(pieces.gap, np.where(of_cause, at(target_of, pieces.span, -1), -1), pieces.length_ns, count)
    place = at(place_of, pieces.span, found.attribution.outside)
    layers, phases = found.attribution.layer_of_place, found.attribution.phase_of_place
    where = (layers[place] + 2) * len(PHASES) + phases[place]  # from 0: -2 is the first layer
    layer, phase = np.divmod(_most(pieces.gap, where, pieces.length_ns, count), len(PHASES))
    before = np.array([one.reason == LAUNCHED_BEFORE for one in found.attribution.places], dtype=np.bool_)
    waits = (gaps.ender >= 0) & np.where(call >= 0, launched_ns <= gaps.start_ns, before[charges.place[gaps.ender]])
    return Meanwhile(np.where(waits, WAITS_FOR_ITSELF, cause), event, layer - 2, phase)


class _Pieces(NamedTuple):
    """Gaps cut wherever a thread enters or leaves an event, and at the launch of what ends them."""

    gap: Int64
    length_ns: Int64
    span: Int64  # the innermost event; from the launch on the launch itself
    recorded: Bool  # whether the thread had begun and not ended

    @classmethod
    def of(cls, gaps: IdleGaps, lane: Int64, launch_ns: Int64, call: Int64, spans: Spans, nesting: Nesting) -> _Pieces:
        found = []
        lanes = spans.lane[nesting.order]
        for thread in np.unique(lane).tolist():
            for device in np.unique(gaps.device[lane == thread]).tolist():  # of one device gaps do not overlap
                mine = np.flatnonzero((lane == thread) & (gaps.device == device))
                members = nesting.order[lanes == thread]
                begins, ends = spans.start_ns[members], spans.end_ns[members]
                of_gaps = gaps.start_ns[mine], gaps.end_ns[mine], launch_ns[mine]
                cuts = np.unique(np.concatenate([*of_gaps, begins, ends]))
                left, right = cuts[:-1], cuts[1:]
                gap = np.searchsorted(gaps.start_ns[mine], left, side="right") - 1
                inside = (gap >= 0) & (left < gaps.end_ns[mine][gap])
                left, right, gap = left[inside], right[inside], mine[gap[inside]]
                threads = np.full(len(left), thread, dtype=np.int32)
                span = innermost_around(nesting, spans, threads, left, left + 1).astype(np.int64)
                span = np.where((left >= launch_ns[gap]) & (call[gap] >= 0), call[gap], span)
                recorded = (left >= begins.min(initial=_NEVER)) & (right <= ends.max(initial=-_NEVER))
                found.append((gap, right - left, span, recorded))
        return cls(*map(np.concatenate, zip(*found, strict=True)))


_NEVER = np.iinfo(np.int64).max


def _kinds(found: Attributed, nesting: Nesting) -> tuple[Int8, Int64]:
    """Per span of a CPU what it means that a thread is in it, and the event to name: of launches the outermost op."""
    recording, parent = found.recording, nesting.parent
    category = recording.spans.category
    is_layer = marked(len(category), found.tree.layer_of_span)
    is_op = ((category == Category.CPU_OP) & ~is_layer) | (category == Category.RUNTIME)
    is_name = (category < Category.RUNTIME) & ~recording.named(is_step)
    loads = recording.named(lambda name: role_of(name) == Role.DATA_LOADING)
    communicates = communicating_threads(recording)
    communicates |= is_op & recording.named(lambda name: collective_of(name) in _WAITS_FOR_RANKS)
    waits = (category == Category.RUNTIME) & recording.named(WAITING_CALLS.match)
    kind, target = np.full(len(category), PYTHON, dtype=np.int8), nearest(parent, is_name)
    for cause, near in (
        (LAUNCHES, outermost(parent, nearest(parent, is_op | is_layer), is_layer)),
        (LOADS, nearest(parent, loads)),
        (COMMUNICATES, nearest(parent, communicates)),
        (WAITS, nearest(parent, waits)),
    ):
        chosen = (near >= 0) & ~at(is_layer, near, False)
        kind[chosen], target[chosen] = cause, near[chosen]
    return kind, target.astype(np.int64)


def _most(key: Int64, value: Int64, weight: Int64, count: int) -> Int64:
    """Per key the value with the largest sum of weights, of equal ones the smallest; -1 is no value."""
    chosen = value >= 0
    width = int(value.max(initial=0)) + 1
    pairs, place = np.unique(key[chosen] * width + value[chosen], return_inverse=True)
    sums = sum_by_key(place, weight[chosen], len(pairs))
    keys, values = np.divmod(pairs, width)
    order = np.lexsort((values, -sums, keys))
    first = order[np.append(True, np.diff(keys[order]) > 0)[: len(order)]]
    most = np.full(count, -1, dtype=np.int64)
    most[keys[first]] = values[first]
    return most
