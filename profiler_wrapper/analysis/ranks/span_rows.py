"""Rows of the span table as they are made from a trace, and the steps they belong to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.ranks.trace_threads import main_thread
from profiler_wrapper.analysis.step_windows import StepWindows, step_windows
from profiler_wrapper.recording.recording import Int64

COMPUTE_THREAD = -1  # stands for the compute streams of a device


class Row(NamedTuple):
    """A row without its rank; times by the trace's own clock until `reduce` makes them nanoseconds since 1970."""

    step: int | None
    name: str
    kind: str
    start_ns: int
    duration_ns: int
    layer: str | None = None
    device_ns: int | None = None
    waiting_ns: int | None = None
    depth: int = 0
    parent: str | None = None
    thread: int | None = None
    microbatch: int | None = None
    chunk: int | None = None
    sequence: int | None = None
    group: str | None = None
    bytes: int | None = None
    overlapped_ns: int | None = None


class Steps(NamedTuple):
    """The steps of a trace. One without whole steps is a single step, 0."""

    windows: StepWindows
    cpu_start_ns: Int64  # of what the CPU does for a step
    number: tuple[int, ...]
    thread: int

    def numbers(self, at_ns: Int64) -> list[int | None]:
        """Per instant on the CPU the number of its step; None outside of all."""
        place = np.searchsorted(self.cpu_start_ns, at_ns, side="right") - 1
        inside = (place >= 0) & (at_ns < self.windows.end_ns[place])
        return [self.number[at] if known else None for at, known in zip(place.tolist(), inside.tolist(), strict=True)]

    def numbers_of_charges(self, charges: Int64) -> list[int | None]:
        """Per charge the number of the step that launched it."""
        return [self.number[at] if at >= 0 else None for at in self.windows.launched_in[charges].tolist()]

    def rows(self) -> list[Row]:
        """A span per step."""
        return [
            Row(number, "step", "step", start, end - start, thread=self.thread)
            for number, start, end in zip(
                self.number, self.windows.start_ns.tolist(), self.windows.end_ns.tolist(), strict=True
            )
        ]


def steps_of(found: Attributed) -> Steps:
    """The steps of an attributed recording, as every report has them."""
    windows = step_windows(found)
    numbers = tuple(0 if number is None else number for number in windows.number)
    begin_of: dict[int | None, int] = dict(zip(found.steps.number, found.steps.start_ns.tolist(), strict=True))
    begins = [begin_of.get(n, start) for n, start in zip(windows.number, windows.start_ns.tolist(), strict=True)]
    thread = COMPUTE_THREAD if found.charges.basis == "device" else main_thread(found)
    return Steps(windows, np.minimum(np.array(begins, dtype=np.int64), windows.start_ns), numbers, thread)
