"""Steps that have ended on the host but perhaps not on the device, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from profiler_wrapper.live.breakdown import Boundaries, parts_of
from profiler_wrapper.live.deferred import Number, value_of
from profiler_wrapper.live.device_events import Mark, seconds_between
from profiler_wrapper.live.records import Convention, StepRecord
from profiler_wrapper.live.step_work import Work
from profiler_wrapper.notices import Notices

Count: TypeAlias = "tuple[tuple[Number, ...], int] | None"
MOST_PENDING = 1024  # steps that the device may be behind


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step and what is known of it so far.

    Attributes:
        begin: None: nobody saw it.
        read_after: the mark behind which all of `numbers` and the step's end are there.
        samples, tokens: each with how many ranks have as many.
        numbers: loss, grad_norm, learning_rate.
        boundaries: of its parts; None: not measured.
        skip: the sinks that don't get it.
    """

    step: int
    timestamp: float
    begin: Mark | None
    end: Mark
    read_after: Mark
    profiled: bool
    epoch: int | None = None
    samples: Count = None
    tokens: Count = None
    numbers: Mapping[str, Number] = field(default_factory=dict)
    work: Work | None = None
    memory: tuple[int | None, int | None] = (None, None)
    boundaries: Boundaries | None = None
    skip: frozenset[str] = frozenset()

    def record(self, *, world_size: int, convention: Convention, notices: Notices, reached: bool = True) -> StepRecord:
        """The step as it is told; without `reached`, what the device did not come to is not known."""
        time_s = parts = None
        if self.begin is not None and reached:
            time_s = seconds_between(self.begin, self.end)
            if time_s is None:
                notices.once("clock", f"the time of step {self.step} is not known: the clock ran backwards in it")
            elif self.boundaries:
                parts = parts_of(self.boundaries, self.end, time_s)
        values = {name: value_of(number) for name, number in self.numbers.items()} if reached else {}
        work = self.work
        return StepRecord(
            step=self.step,
            timestamp=self.timestamp,
            step_time_s=time_s,
            samples=_total(self.samples) if reached else None,
            tokens=_total(self.tokens) if reached else None,
            model_flops=None if work is None else work.model_flops,
            hardware_flops=None if work is None else work.hardware_flops,
            model_time_at_peak_s=None if work is None else work.model_time_at_peak_s,
            hardware_time_at_peak_s=None if work is None else work.hardware_time_at_peak_s,
            flops_source=None if work is None else work.source,
            flops_step=None if work is None else work.step,
            convention=convention,
            world_size=world_size,
            memory_bytes=self.memory[0],
            peak_memory_bytes=self.memory[1],
            breakdown_s=parts,
            profiled=self.profiled,
            epoch=self.epoch,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            learning_rate=values.get("learning_rate"),
        )


def _total(count: Count) -> int | None:
    """Of the job; None where a part is not known."""
    if count is None:
        return None
    numbers, ranks = count
    total = 0.0
    for number in numbers:
        value = value_of(number)
        if value is None:
            return None
        total += value
    return round(total * ranks)


class PendingSteps:
    """A queue that gives a step when the device has come to its end, and none before an earlier one."""

    def __init__(self, most: int = MOST_PENDING) -> None:
        self._steps: deque[PendingStep] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: PendingStep) -> None:
        """Behind all others."""
        self._steps.append(step)

    def take(self, give: Callable[[PendingStep, bool], None], *, everything: bool = False) -> None:
        """Give all steps that have been reached, and those there are too many of, with whether they were reached.

        `everything`: also those that were not.
        """
        steps = self._steps
        while steps:
            reached = steps[0].read_after.reached
            if not reached and not everything and len(steps) <= self._most:
                return
            give(steps.popleft(), reached)
