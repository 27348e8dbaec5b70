"""What a log shows of the steps since its last row."""

from __future__ import annotations

from dataclasses import dataclass

from profiler_wrapper.live.records import StepRecord
from profiler_wrapper.live.statistics import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rates and times are means over the undisturbed steps since the row before; the rest is that of the last step.

    `None` stands for "not known". A row over profiled steps alone has no rates.

    Attributes:
        record: the last step.
        steps: how many the means are over.
        step_time_s: of one step.
    """

    record: StepRecord
    steps: int
    step_time_s: float | None
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
        self._last: StepRecord | None = None
        self._ended = True

    def add(self, record: StepRecord) -> Row | None:
        """The row that this step ends, if it ends one."""
        last, self._last = self._last, record
        self._rates.add(record)
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
        return Row(
            record=record,
            steps=rates.steps,
            step_time_s=rates.step_time_s,
            tflops_per_gpu=rates.tflops_per_gpu,
            tflops_total=rates.tflops_total,
            samples_per_s=rates.per_s("samples"),
            tokens_per_s=rates.per_s("tokens"),
            mfu=rates.per_s("model_time_at_peak_s"),
            hfu=rates.per_s("hardware_time_at_peak_s"),
        )
