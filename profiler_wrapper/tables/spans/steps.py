"""The steps of a trace as rows of the span table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.step_windows import StepWindows, step_windows
from profiler_wrapper.place.steps import Steps as CpuSteps
from profiler_wrapper.tables.spans.row import COMPUTE_THREAD, Row
from profiler_wrapper.tables.spans.threads import main_thread
from profiler_wrapper.trace.arrays import in_order
from profiler_wrapper.trace.recording import Bool, Int64


class Steps(NamedTuple):
    """The steps of a trace. One without whole steps is a single step, 0."""

    windows: StepWindows
    on_cpu: CpuSteps  # what the CPU does for a step
    thread: int

    def numbers(self, places: Int64) -> list[int | None]:
        """Per place of a step its number; None for -1."""
        return [self.on_cpu.number[place] if place >= 0 else None for place in places.tolist()]

    def rows(self) -> list[Row]:
        """A span per step."""
        columns = (self.on_cpu.number, self.windows.start_ns.tolist(), self.windows.end_ns.tolist())
        return [
            Row(number, "step", "step", start, end - start, thread=self.thread)
            for number, start, end in zip(*columns, strict=True)
        ]


def steps_of(found: Placed) -> Steps:
    """The steps of an attributed recording, as every report has them."""
    windows = step_windows(found)
    numbers = tuple(0 if number is None else number for number in windows.number)
    begin_of: dict[int | None, int] = dict(zip(found.steps.number, found.steps.start_ns.tolist(), strict=True))
    begins = [begin_of.get(n, start) for n, start in zip(windows.number, windows.start_ns.tolist(), strict=True)]
    on_cpu = CpuSteps(numbers, np.minimum(np.array(begins, dtype=np.int64), windows.start_ns), windows.end_ns)
    return Steps(windows, on_cpu, COMPUTE_THREAD if found.charges.basis == "device" else main_thread(found))


def with_steps(found: Placed, steps: Steps, chosen: Bool) -> list[tuple[int, int | None]]:
    """The chosen events in order of start, each with its step."""
    start_ns = found.recording.spans.start_ns
    members = in_order(np.flatnonzero(chosen), start_ns)
    return list(zip(members.tolist(), steps.numbers(steps.on_cpu.place_of(start_ns[members])), strict=True))
