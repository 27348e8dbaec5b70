"""Wall time of each step, on CPU and devices together, as intervals that do not overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.steps import NO_END_NS
from profiler_wrapper.trace.recording import Bool, Category, Int64


@dataclass(frozen=True, slots=True, eq=False)
class StepWindows:
    """Disjoint intervals in order; a number of None: a trace without whole steps, taken as one."""

    number: tuple[int | None, ...]
    start_ns: Int64
    end_ns: Int64
    launched_in: Int64  # per charge: the window whose step launched it, -1 for none
    place: Int64  # of its step among those of the recording

    @property
    def length_ns(self) -> int:
        """Wall time of all of them."""
        return int((self.end_ns - self.start_ns).sum())

    @property
    def step_times_ns(self) -> tuple[int, ...]:
        """What each step took; empty of a trace without whole steps."""
        return () if None in self.number else tuple((self.end_ns - self.start_ns).tolist())


def step_windows(placed: Placed) -> StepWindows:
    """From the end of the step before, or a step's own begin on the CPU if that is later, to its end.

    A step ends when both the CPU and the devices are done with it: the CPU runs ahead of a busy device, and
    behind an idle one. Before the first step ends what was launched before it, also what of it is not seen. Their
    lengths are what a step takes in every report. A trace without a step that has an end is one, from its first event
    on the CPU to the last that runs.
    """
    steps = placed.steps
    bounded = steps.end_ns < NO_END_NS
    ends = np.where(bounded, steps.end_ns, np.int64(-1))
    windows = _windows(placed, steps.number, steps.start_ns, ends, steps.place_of(placed.charges.launch_ns))
    if windows.number:
        return windows
    spans = placed.recording.spans
    on_cpu = spans.category <= Category.RUNTIME
    chosen = on_cpu if on_cpu.any() else np.ones(len(spans), dtype=np.bool_)
    start, end = spans.start_ns[chosen].min(keepdims=True), spans.end_ns[chosen].max(keepdims=True)
    return _windows(placed, (None,), start, end, np.zeros(len(placed.charges), dtype=np.int64))


def _windows(
    placed: Placed, numbers: tuple[int | None, ...], start_ns: Int64, end_ns: Int64, place: Int64
) -> StepWindows:
    """Of steps on the CPU; `place`: per charge the step it was launched in, an end of -1 stands for none."""
    charges, spans = placed.charges, placed.recording.spans
    ends, before = end_ns.astype(np.int64), int(np.iinfo(np.int64).min)
    if charges.basis == "device" and len(numbers):
        device_end = spans.end_ns[charges.span]
        launched: Bool = charges.cpu_span >= 0
        inside = launched & (place >= 0)
        place = np.where(inside, place, -1)
        np.maximum.at(ends, place[inside], device_end[inside])
        earlier = ~launched | (charges.launch_ns < start_ns[0])
        first = device_end[inside].min() if inside.any() else 0
        ahead = device_end[earlier & (spans.start_ns[charges.span] < first)]
        before = int(ahead.max(initial=placed.unseen_until_ns or before))
    starts = np.maximum(start_ns, np.maximum.accumulate(np.append(np.int64(before), ends))[:-1])
    kept = np.flatnonzero(starts < ends)
    renumbered = np.full(len(numbers) + 1, -1, dtype=np.int64)  # the last one is for "none"
    renumbered[kept] = np.arange(len(kept))
    return StepWindows(tuple(numbers[i] for i in kept.tolist()), starts[kept], ends[kept], renumbered[place], kept)
