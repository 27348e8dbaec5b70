"""Within the steps, the gaps in which a device runs nothing: what the CPU was doing that it waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.device_properties import busiest_device
from profiler_wrapper.analysis.intervals import Union, union
from profiler_wrapper.recording.recording import Bool, Category, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.advice.facts import Facts

# Calls into the runtime that wait, or hand out memory: they are no launches, and launching less makes them no shorter.
_WAITS = re.compile(
    r"(cuda|hip|cu)\w*Synchronize|(cuda|hip|cu)(Memcpy(?!\w*Async)|Malloc|Free|HostAlloc|HostRegister|MemAlloc|"
    r"MemCreate|MemMap|MemUnmap|MemRelease|StreamCreate|EventDestroy)\w*"
)

LONGEST_LAUNCH_NS = 1_000_000  # on the way to one launch; what is longer is work on the CPU, or a first call


class Gaps(NamedTuple):
    """The gaps of one device within the steps, in order of time; a gap that a step's end cuts is two."""

    step: Int64  # place of the step
    start_ns: Int64
    end_ns: Int64
    ender: Int64  # index into Charges of the device event that ends it; -1 for one that the step's end cuts
    loading_ns: Int64  # of it: with that thread fetching data
    waiting_ns: Int64  # of it: with that thread in a call that waits, or hands out memory
    launching_ns: Int64  # of it: all else, with that thread on its way to the launch, and till the event began

    @property
    def length_ns(self) -> Int64:
        return self.end_ns - self.start_ns


def device_gaps(facts: Facts) -> Gaps | None:
    """The gaps of the busiest device, within the wall time of the steps; None without device events.

    A gap has a cause only where the event that ends it was launched within the gap: else the device waited for
    something of its own. Launching is what is left of it, but for what is too long to be on the way to one launch.
    """
    found = facts.found
    charges, spans = found.charges, found.recording.spans
    if charges.basis != "device":
        return None
    here = _on_busiest(facts)
    start = spans.start_ns[charges.span[here]]
    busy = union(start, start + charges.time_ns[here])
    pieces = list(_pieces(facts, busy))
    if not pieces:
        return None
    step, left, right, by_event = (np.concatenate(column) for column in zip(*pieces, strict=True))
    ender = np.where(by_event, here[np.minimum(np.searchsorted(start, right), len(here) - 1)], -1)
    return Gaps(step, left, right, ender, *_causes(facts, left, right, ender))


def _on_busiest(facts: Facts) -> Int64:
    """Its charges, in order of start."""
    recording = facts.found.recording
    return np.flatnonzero(recording.spans.device[facts.found.charges.span] == busiest_device(recording))


def _pieces(facts: Facts, busy: Union) -> Iterator[tuple[Int64, Int64, Int64, Bool]]:
    """Per step: (place of the step, begin, end, whether a device event ends it) of its gaps."""
    for step, (begin, end) in enumerate(zip(facts.windows.start_ns, facts.windows.end_ns, strict=True)):
        first = int(np.searchsorted(busy.end_ns, begin, side="right"))
        last = int(np.searchsorted(busy.start_ns, end, side="left"))
        starts = np.maximum(np.concatenate([[begin], busy.end_ns[first:last]]), begin)
        ends = np.minimum(np.concatenate([busy.start_ns[first:last], [end]]), end)
        by_event = np.arange(len(ends)) < len(ends) - 1
        real = starts < ends
        yield np.full(int(real.sum()), step, dtype=np.int64), starts[real], ends[real], by_event[real]


def _causes(facts: Facts, left: Int64, right: Int64, ender: Int64) -> tuple[Int64, Int64, Int64]:
    """(loading, waiting, launching) of each gap, by what the thread that launched its end was doing."""
    charges, spans = facts.found.charges, facts.found.recording.spans
    loading, waiting, launching = (np.zeros(len(left), dtype=np.int64) for _ in range(3))
    cpu_span = np.where(ender >= 0, charges.cpu_span[ender], -1)
    lane = np.where(cpu_span >= 0, spans.lane[cpu_span], -1)
    launched = np.where(cpu_span >= 0, spans.start_ns[cpu_span], np.iinfo(np.int64).min)
    for thread in np.unique(lane[lane >= 0]).tolist():
        mine = np.flatnonzero((lane == thread) & (launched > left))
        waits, loads = _states(facts, thread)
        begin, end, call = left[mine], right[mine], np.minimum(launched[mine], right[mine])
        waiting[mine] = waits.overlap(begin, call)
        loading[mine] = np.minimum(loads.overlap(begin, call), call - begin - waiting[mine])
        rest = end - begin - waiting[mine] - loading[mine]
        launching[mine] = np.where(rest <= LONGEST_LAUNCH_NS, rest, 0)
    return loading, waiting, launching


def _states(facts: Facts, thread: int) -> tuple[Union, Union]:
    """When a thread waits, and when it fetches data."""
    recording = facts.found.recording
    spans = recording.spans
    mine = spans.lane == thread
    waits = np.array([_WAITS.match(name) is not None for name in recording.names], dtype=np.bool_)
    loads = np.array([role_of(name) == Role.DATA_LOADING for name in recording.names], dtype=np.bool_)
    waiting = mine & (spans.category == Category.RUNTIME) & waits[spans.name]
    loading = mine & (spans.category == Category.ANNOTATION) & loads[spans.name]
    return _union(facts, waiting), _union(facts, loading)


def _union(facts: Facts, chosen: Bool) -> Union:
    spans = facts.found.recording.spans
    return union(spans.start_ns[chosen], spans.end_ns[chosen])
