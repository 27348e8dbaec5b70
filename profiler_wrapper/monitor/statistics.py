"""Means, extremes and percentiles of any number of steps, in constant memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from profiler_wrapper.monitor.records import StepRecord

PERCENTILES = (50, 95, 99)

_GROWTH = 1.01  # of a bucket of times over the one below it
_LOG_GROWTH = math.log(_GROWTH)
_RATES = (
    "model_flops",
    "hardware_flops",
    "model_time_at_peak_s",
    "hardware_time_at_peak_s",
    "samples",
    "tokens",
)
_TOTALS = ("samples", "tokens", "model_flops", "step_time_s")


class Rates:
    """Sums of work over sums of time, so that a long step weighs what it took.

    Of a kind of work, only steps count where it and the time are known. Steps that were profiled count nowhere.
    """

    __slots__ = ("_sums", "steps", "time_s", "world_size")

    def __init__(self) -> None:
        self.steps = 0  # undisturbed steps whose time is known
        self.time_s = 0.0
        self.world_size = 1
        self._sums = {name: [0.0, 0.0, 0] for name in _RATES}

    def add(self, record: StepRecord) -> bool:
        """Whether the step counts."""
        time_s = record.step_time_s
        self.world_size = record.world_size
        if record.profiled or time_s is None or not 0.0 < time_s < math.inf:
            return False
        self.steps += 1
        self.time_s += time_s
        for name, sums in self._sums.items():
            work = getattr(record, name)
            if work is not None:
                sums[0] += work
                sums[1] += time_s
                sums[2] += 1
        return True

    def per_s(self, name: str) -> float | None:
        """Work of that name in a second, of all ranks; None: no step tells."""
        work, time_s, _ = self._sums[name]
        return work / time_s if time_s else None

    def per_step(self, name: str) -> float | None:
        """The mean work of that name in a step, of all ranks; None: no step tells."""
        work, _, steps = self._sums[name]
        return work / steps if steps else None

    @property
    def tflops_total(self) -> float | None:
        """10^12 model FLOPs a second, all ranks together."""
        rate = self.per_s("model_flops")
        return None if rate is None else rate / 1e12

    @property
    def tflops_per_gpu(self) -> float | None:
        """10^12 model FLOPs a second and rank."""
        return None if self.tflops_total is None else self.tflops_total / self.world_size

    @property
    def step_time_s(self) -> float | None:
        """The mean."""
        return self.time_s / self.steps if self.steps else None


class TimeSketch:
    """How often a time was seen, in buckets of 1 %: any percentile is right within 0.5 %.

    From a nanosecond to a year there are fewer than 4,000 buckets.
    """

    __slots__ = ("_buckets", "_count")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._count = 0

    def add(self, time_s: float) -> None:
        """Args: time_s: more than 0."""
        bucket = math.ceil(math.log(time_s) / _LOG_GROWTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self._count += 1

    def percentile(self, percent: float) -> float | None:
        """The time that `percent` of all were at most; None: there were none."""
        wanted = max(1, math.ceil(self._count * percent / 100))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return float(_GROWTH**bucket * 2 / (1 + _GROWTH))  # the value nearest to both ends of the bucket
        return None


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the most of what was seen."""

    least: float
    most: float

    def with_value(self, value: float) -> Range:
        if self.least <= value <= self.most:
            return self
        return Range(min(self.least, value), max(self.most, value))


class RunStatistics:
    """What is known of all steps so far; nothing is kept of a single one.

    Attributes:
        steps: all that were given.
        profiled_steps: those under the profiler, which count only in `steps` and in the memory's peak.
        rates: sums of work over sums of time, of the others.
        step_time_s, tflops_per_gpu: the least and the most of a single step; None before the first.
        first_step, last_step: their numbers; None before the first.
        last_timestamp: when the last one ended; seconds since 1970.
        peak_memory_bytes: the most that a record told.
        totals: of `samples`, `tokens`, `model_flops` and `step_time_s`, those of all steps that tell, profiled or not.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.profiled_steps = 0
        self.rates = Rates()
        self.step_time_s: Range | None = None
        self.tflops_per_gpu: Range | None = None
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.last_timestamp: float | None = None
        self.peak_memory_bytes: int | None = None
        self.totals: dict[str, float] = {}
        self._times = TimeSketch()

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.profiled_steps += record.profiled
        if self.first_step is None:
            self.first_step = record.step
        self.last_step, self.last_timestamp = record.step, record.timestamp
        for size_bytes in (record.memory_bytes, record.peak_memory_bytes):
            if size_bytes is not None and size_bytes > (self.peak_memory_bytes or -1):
                self.peak_memory_bytes = size_bytes
        for name in _TOTALS:
            value = getattr(record, name)
            if value is not None:
                self.totals[name] = self.totals.get(name, 0) + value
        if not self.rates.add(record):
            return
        assert record.step_time_s is not None
        self._times.add(record.step_time_s)
        self.step_time_s = _seen(self.step_time_s, record.step_time_s)
        tflops = record.tflops_per_gpu
        if tflops is not None:
            self.tflops_per_gpu = _seen(self.tflops_per_gpu, tflops)

    def step_time_percentile(self, percent: float) -> float | None:
        """Seconds; within 0.5 % of the true one."""
        return self._times.percentile(percent)


def _seen(seen: Range | None, value: float) -> Range:
    return Range(value, value) if seen is None else seen.with_value(value)


# --------------------------------------------------------------------------------------------------
# What a log shows of the steps since its last row.


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
