"""When a device has nothing to do within a step, and what the CPU did meanwhile."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.place.intervals import uncovered, union
from profiler_wrapper.place.names import LAUNCHED_BEFORE, PHASES
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.place.step_windows import StepWindows
from profiler_wrapper.tables import timeline_columns as causes
from profiler_wrapper.tables.spans.threads import is_step, main_lane
from profiler_wrapper.tables.statistics import largest_by_key
from profiler_wrapper.tables.time_rows import communicating_threads
from profiler_wrapper.tables.views.collectives import collective_of
from profiler_wrapper.trace.arrays import at, marked
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest, outermost
from profiler_wrapper.trace.recording import Bool, Category, Int8, Int32, Int64

# Calls into the runtime that wait, or hand out memory: they are no launches, and launching less makes them no shorter.
WAITING_CALLS = re.compile(
    r"(cuda|hip|cu)\w*Synchronize|(cuda|hip|cu)(Memcpy(?!\w*Async)|Malloc|Free|HostAlloc|HostRegister|MemAlloc|"
    r"MemCreate|MemMap|MemUnmap|MemRelease|StreamCreate|EventDestroy)\w*"
)


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


def idle_gaps(found: Placed, windows: StepWindows) -> IdleGaps | None:
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


def meanwhile(found: Placed, gaps: IdleGaps, nesting: Nesting, place_of: Int32) -> tuple[Int64, ...]:
    """Per gap the cause, the event that stands for it (a span, -1 for none), and the layer and phase of most of it.

    It is what the thread did that launched what ends the gap; where nobody knows which, the thread of the steps. From
    the launch on, also where that was before the gap, that is the launch. `nesting`: of all events of CPUs, calls into
    the runtime too; `place_of`: per span.
    """
    charges, count = found.charges, len(gaps.start_ns)
    call = at(charges.cpu_span, gaps.ender, -1)
    launched_ns = at(charges.launch_ns, gaps.ender, np.iinfo(np.int64).max)
    gap, length_ns, span, recorded = _pieces(found, gaps, call, launched_ns, nesting)
    kind_of, target_of = _kinds(found, nesting)
    kind = np.where(recorded, at(kind_of, span, causes.PYTHON), causes.NOTHING)
    cause = _most(gap, kind, length_ns, count)
    event = _most(gap, np.where(kind == cause[gap], at(target_of, span, -1), -1), length_ns, count)
    place = at(place_of, span, found.attribution.outside)
    layers, phases = found.attribution.layer_of_place, found.attribution.phase_of_place
    where = (layers[place] + 2) * len(PHASES) + phases[place]  # from 0: -2 is the first layer
    layer, phase = np.divmod(_most(gap, where, length_ns, count), len(PHASES))
    before = np.array([one.reason == LAUNCHED_BEFORE for one in found.attribution.places], dtype=np.bool_)
    waits = (gaps.ender >= 0) & np.where(call >= 0, launched_ns <= gaps.start_ns, before[charges.place[gaps.ender]])
    return np.where(waits, causes.WAITS_FOR_ITSELF, cause), event, layer - 2, phase


def _pieces(found: Placed, gaps: IdleGaps, call: Int64, launched_ns: Int64, nesting: Nesting) -> tuple[Any, ...]:
    """Gaps cut where a thread enters or leaves an event, and at the launch of what ends them.

    Of each piece: its gap, its length, the innermost event or the launch, whether the thread shows events then.
    """
    spans, pieces = found.recording.spans, []
    lane = np.where(call >= 0, spans.lane[call], main_lane(found))
    launched_ns = np.clip(launched_ns, gaps.start_ns, gaps.end_ns)
    for thread, device in sorted({*zip(lane.tolist(), gaps.device.tolist(), strict=True)}):
        mine = np.flatnonzero((lane == thread) & (gaps.device == device))  # of one device they do not overlap
        members = nesting.order[spans.lane[nesting.order] == thread]
        begins, ends = spans.start_ns[members], spans.end_ns[members]
        of_gaps = gaps.start_ns[mine], gaps.end_ns[mine], launched_ns[mine]
        cuts = np.unique(np.concatenate([*of_gaps, begins, ends]))
        left, right = cuts[:-1], cuts[1:]
        gap = np.searchsorted(gaps.start_ns[mine], left, side="right") - 1
        inside = (gap >= 0) & (left < gaps.end_ns[mine][gap])
        left, right, gap = left[inside], right[inside], mine[gap[inside]]
        span = innermost_around(nesting, spans, np.full(len(left), thread, dtype=np.int32), left, left + 1)
        span = np.where((left >= launched_ns[gap]) & (call[gap] >= 0), call[gap], span)
        first, last = (begins.min(), ends.max()) if len(members) else (right.max(), 0)
        pieces.append((gap, right - left, span, (left >= first) & (right <= last)))
    return tuple(map(np.concatenate, zip(*pieces, strict=True)))


def _kinds(found: Placed, nesting: Nesting) -> tuple[Int8, Int64]:
    """Per span of a CPU what it means that a thread is in it, and the event to name: of launches the outermost op."""
    recording, parent = found.recording, nesting.parent
    category = recording.spans.category
    is_layer = marked(len(category), found.tree.layer_of_span)
    is_op = ((category == Category.CPU_OP) & ~is_layer) | (category == Category.RUNTIME)
    is_name = (category < Category.RUNTIME) & ~recording.named(is_step)
    loads = recording.named(lambda name: role_of(name) == Role.DATA_LOADING)
    communicates = communicating_threads(recording)
    communicates |= is_op & recording.named(lambda name: collective_of(name) in ("wait", "barrier"))
    waits = (category == Category.RUNTIME) & recording.named(WAITING_CALLS.match)
    kind, target = np.full(len(category), causes.PYTHON, dtype=np.int8), nearest(parent, is_name)
    for cause, near in (
        (causes.LAUNCHES, outermost(parent, nearest(parent, is_op | is_layer), is_layer)),
        (causes.LOADS, nearest(parent, loads)),
        (causes.COMMUNICATES, nearest(parent, communicates)),
        (causes.WAITS, nearest(parent, waits)),
    ):
        chosen = (near >= 0) & ~at(is_layer, near, False)
        kind[chosen], target[chosen] = cause, near[chosen]
    return kind, target.astype(np.int64)


def _most(key: Int64, value: Int64, weight: Int64, count: int) -> Int64:
    """Per key the value with the largest sum of weights, of equal ones the smallest; -1 is no value."""
    largest = largest_by_key(key, value, weight, 1)
    most = np.full(count, -1, dtype=np.int64)
    most[[*largest]] = [values[0] for values in largest.values()]
    return most
