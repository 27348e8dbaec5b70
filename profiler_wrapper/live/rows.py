"""What a log shows of the steps since its last row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from profiler_wrapper.live.records import StepRecord
from profiler_wrapper.live.statistics import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Times, work and rates are means over the undisturbed steps since the row before; the rest is the last step's.

    `None` stands for "not known". A row over profiled steps alone has no means.

    Attributes:
        record: the last step.
        steps: how many the means are over.
        step_time_s: of one step.
        breakdown_s: the parts of one step, which add up to `step_time_s`; None where one of the steps does not tell.
        samples, tokens, model_flops, hardware_flops: of one step, in all ranks.
    """

    record: StepRecord
    steps: int
    step_time_s: float | None
    breakdown_s: Mapping[str, float] | None
    samples: float | None
    tokens: float | None
    model_flops: float | None
    hardware_flops: float | None
    tflops_per_gpu: float | None
    tflops_total: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None


class Interval:
    """Makes a row of every so many steps: at those whose number is a multiple of `steps`, or that jump over one."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._rates = Rates()
        self._parts: dict[str, float] = defaultdict(float)  # seconds, summed over the steps of the rates
        self._broken_down = 0  # of them
        self._last: StepRecord | None = None
        self._ended = True

    def add(self, record: StepRecord) -> Row | None:
        """The row that this step ends, if it ends one."""
        last, self._last = self._last, record
        if self._rates.add(record) and record.breakdown_s is not None:
            self._broken_down += 1
            for part, time_s in record.breakdown_s.items():
                self._parts[part] += time_s
        self._ended = record.step % self._steps == 0 or (
            last is not None and record.step // self._steps != last.step // self._steps
        )
        return self._row(record) if self._ended else None

    def rest(self) -> Row | None:
        """The row of the steps that ended none; None: there are no such steps."""
        if self._ended or self._last is None:
            return None
        self._ended = True
        return self._row(self._last)

    def _row(self, record: StepRecord) -> Row:
        rates, self._rates = self._rates, Rates()
        parts, self._parts = self._parts, defaultdict(float)
        broken_down, self._broken_down = self._broken_down, 0
        all_are = 0 < broken_down == rates.steps
        return Row(
            record=record,
            steps=rates.steps,
            step_time_s=rates.step_time_s,
            breakdown_s={part: time_s / rates.steps for part, time_s in parts.items()} if all_are else None,
            samples=rates.per_step("samples"),
            tokens=rates.per_step("tokens"),
            model_flops=rates.per_step("model_flops"),
            hardware_flops=rates.per_step("hardware_flops"),
            tflops_per_gpu=rates.tflops_per_gpu,
            tflops_total=rates.tflops_total,
            samples_per_s=rates.per_s("samples"),
            tokens_per_s=rates.per_s("tokens"),
            mfu=rates.per_s("model_time_at_peak_s"),
            hfu=rates.per_s("hardware_time_at_peak_s"),
        )
