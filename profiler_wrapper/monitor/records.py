"""What is known of one step of a training loop, of the steps of a row of the log, and of a whole run."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

# How FLOPs became known: told by the user, by formula from the model's config, or counted in a real step.
FlopsSource = Literal["given", "config", "measured"]
Convention = Literal["full", "causal"]


GB = 1 << 30


def times(value: float | None, factor: float | None) -> float | None:
    """The product; None where one of them is not known."""
    return None if value is None or factor is None else value * factor


class Rates:
    """Work per second and shares of the peak, of a step or of several. None: not known."""

    __slots__ = ()
    world_size: int

    def per_s(self, work: str) -> float | None:
        """Work a second, by the name of its attribute in `StepRecord`."""
        raise NotImplementedError

    @property
    def tflops_total(self) -> float | None:
        """10^12 model FLOPs a second, all ranks together."""
        rate = self.per_s("model_flops")
        return None if rate is None else rate / 1e12

    @property
    def tflops_per_gpu(self) -> float | None:
        """10^12 model FLOPs a second and rank."""
        total = self.tflops_total
        return None if total is None else total / self.world_size

    @property
    def samples_per_s(self) -> float | None:
        return self.per_s("samples")

    @property
    def tokens_per_s(self) -> float | None:
        return self.per_s("tokens")

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the time that the model's FLOPs need at the peak. Not clipped to 1."""
        return self.per_s("model_time_at_peak_s")

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: as `mfu`, with what is computed again."""
        return self.per_s("hardware_time_at_peak_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(Rates):
    """One step. `None` stands for "not known"; counts and FLOPs are those of the whole job, memory is this rank's.

    Attributes:
        step: its number in the loop.
        timestamp: seconds since 1970 when the host ended it.
        step_time_s: from its start to its end, on the device's clock where there is one.
        samples, tokens: of all ranks; real tokens where a mask was given.
        model_flops: what the model needs, forward and backward, without anything computed again; padding included.
        hardware_flops: what ran, recompute included.
        model_time_at_peak_s, hardware_time_at_peak_s: what one device needs for its share of these FLOPs at its
            peak, each type of number at its own.
        flops_source, flops_step: how the FLOPs are known; of "measured", in which step.
        convention: of attention: "full", or "causal", which leaves out what a causal mask hides.
        world_size: ranks of the job.
        memory_bytes, peak_memory_bytes: allocated on this rank's accelerator now, and the most since the process
            began or the user last reset it; without an accelerator the resident memory of the process.
        breakdown_s: seconds by PARTS, which add up to `step_time_s`.
        profiled: some torch profiler was on when the step began or ended (this package's or another; not one that only
            warms up), so the time is not that of an undisturbed step, and is left out of means.
    """

    step: int
    timestamp: float
    step_time_s: float | None = None
    samples: int | None = None
    tokens: int | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    model_time_at_peak_s: float | None = None
    hardware_time_at_peak_s: float | None = None
    flops_source: FlopsSource | None = None
    flops_step: int | None = None
    convention: Convention = "full"
    world_size: int = 1
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    breakdown_s: Mapping[str, float] | None = None
    profiled: bool = False
    epoch: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None

    def per_s(self, work: str) -> float | None:
        amount = getattr(self, work)
        return None if amount is None or not self.step_time_s else amount / self.step_time_s


# --- One run of the monitor: what holds for all of its steps ---

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is written once, at the head of a log."""

    start_time: float = field(default_factory=time.time)  # seconds since 1970
    log_dir: Path | None = None  # where log files go; None: nowhere
    log_interval: int = 10  # steps between two rows of text, TensorBoard, W&B and console; JSON lines have every step
    rank: int = 0  # of this process
    world_size: int = 1  # ranks of the job
    device_name: str | None = None  # None, as of the next two: not known
    peak_flops_per_s: Mapping[str, float] | None = None  # of one device, dense, by type of number
    peak_source: str | None = None  # where these peaks are from
    convention: Convention = "full"  # of attention, as in `StepRecord`
    memory_kind: str = ""  # what the memory of a step is: the accelerator's, or the process's
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch, of this package, ...

    @property
    def stamp(self) -> str:
        """The start in local time as file names have it: `20240129_103000`."""
        return time.strftime("%Y%m%d_%H%M%S", time.localtime(self.start_time))

    def to_dict(self) -> dict[str, Any]:
        """The first line of `perf_steps_<time>.jsonl`, below its key `session`."""
        known = asdict(self)
        del known["log_dir"]
        return {
            "schema_version": SCHEMA_VERSION,
            **known,
            "start_time": self.stamp,
            "started": self.start_time,
            "units": {"GB": "2^30 bytes", "TFLOPS": "10^12 model FLOPs per second"},
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }


# --- Means, extremes and percentiles of any number of steps, in constant memory ---

PERCENTILES = (50, 95, 99)

FLOPS = ("model_flops", "hardware_flops", "model_time_at_peak_s", "hardware_time_at_peak_s")
_WORK = (*FLOPS, "samples", "tokens")
_TOTALS = ("samples", "tokens", "model_flops", "step_time_s")
_BUCKET_GROWTH = 1.01  # of a bucket of times over the one below it
_LOG_GROWTH = math.log(_BUCKET_GROWTH)


class Row(Rates):
    """Means of several steps, and the last of them: what a log shows of the steps since its last row.

    Sums of work over sums of time, so that a long step weighs what it took. Of a kind of work, only steps count where
    it and the time are known. Steps that were profiled count nowhere.
    """

    __slots__ = ("_broken_down", "_part_times_s", "_sums", "_time_s", "record", "steps", "world_size")

    def __init__(self) -> None:
        self.record: StepRecord  # the last step; its numbers other than times, work and rates are the row's
        self.steps = 0  # those that count: undisturbed, with a time
        self.world_size = 1
        self._time_s = 0.0
        self._sums = {name: [0.0, 0.0, 0] for name in _WORK}  # the work, the time of its steps, their number
        self._part_times_s: dict[str, float] = defaultdict(float)
        self._broken_down = 0  # steps whose parts are known

    def add(self, record: StepRecord) -> bool:
        """Whether the step counts."""
        time_s = record.step_time_s
        self.record, self.world_size = record, record.world_size
        if record.profiled or time_s is None or not 0.0 < time_s < math.inf:
            return False
        self.steps += 1
        self._time_s += time_s
        for name, sums in self._sums.items():
            work = getattr(record, name)
            if work is not None:
                sums[0] += work
                sums[1] += time_s
                sums[2] += 1
        if record.breakdown_s is not None:
            self._broken_down += 1
            for part, part_time_s in record.breakdown_s.items():
                self._part_times_s[part] += part_time_s
        return True

    @property
    def step_time_s(self) -> float | None:
        return self._time_s / self.steps if self.steps else None

    @property
    def breakdown_s(self) -> dict[str, float] | None:
        """The parts of one step, which add up to `step_time_s`; None where one of the steps does not tell."""
        if not 0 < self._broken_down == self.steps:
            return None
        return {part: time_s / self.steps for part, time_s in self._part_times_s.items()}

    def per_s(self, work: str) -> float | None:
        amount, time_s, _ = self._sums[work]
        return amount / time_s if time_s else None

    def per_step(self, work: str) -> float | None:
        """Of the steps that tell it."""
        amount, _, steps = self._sums[work]
        return amount / steps if steps else None


class Interval:
    """Makes a row of every so many steps: at those whose number is a multiple of `steps`, or that jump over one."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._row: Row | None = None
        self._last: int | None = None

    def add(self, record: StepRecord) -> Row | None:
        """The row that this step ends, if it ends one."""
        last, self._last = self._last, record.step
        if self._row is None:
            self._row = Row()
        self._row.add(record)
        jumped = last is not None and record.step // self._steps != last // self._steps
        return self.rest() if jumped or record.step % self._steps == 0 else None

    def rest(self) -> Row | None:
        """The row of the steps that ended none; None: there are no such steps."""
        row, self._row = self._row, None
        return row


class Range(NamedTuple):
    """The least and the most of what was seen."""

    least: float
    most: float


@dataclass(slots=True)
class RunStatistics:
    """What is known of all steps so far; nothing is kept of a single one."""

    steps: int = 0  # all that were given
    profiled_steps: int = 0  # those under the profiler, which count only in `steps` and in the memory's peak
    rates: Row = field(default_factory=Row)  # sums of work over sums of time, of the others
    step_time_s: Range | None = None  # of single steps, as the next
    tflops_per_gpu: Range | None = None
    first_step: int | None = None  # its number
    last_step: int | None = None
    last_timestamp: float | None = None  # when the last one ended; seconds since 1970
    peak_memory_bytes: int | None = None  # the most that a record has
    totals: dict[str, float] = field(default_factory=dict)  # of `_TOTALS`, over all steps that have them
    # How many steps took as long, in buckets of 1 %: fewer than 4,000 from a nanosecond to a year.
    _times: Counter[int] = field(default_factory=Counter)

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
        if self.rates.add(record):
            assert record.step_time_s is not None
            self._times[math.ceil(math.log(record.step_time_s) / _LOG_GROWTH)] += 1
            self.step_time_s = _widened(self.step_time_s, record.step_time_s)
            self.tflops_per_gpu = _widened(self.tflops_per_gpu, record.tflops_per_gpu)

    def step_time_percentile(self, percent: float) -> float | None:
        """What `percent` of the steps took at most: seconds, within 0.5 % of the true one; None: there were none."""
        wanted = max(1, math.ceil(self._times.total() * percent / 100))
        seen = 0
        for bucket, count in sorted(self._times.items()):
            seen += count
            if seen >= wanted:
                # the value nearest to both ends of the bucket
                return float(_BUCKET_GROWTH**bucket * 2 / (1 + _BUCKET_GROWTH))
        return None


def _widened(seen: Range | None, value: float | None) -> Range | None:
    if value is None:
        return seen
    least, most = seen or (value, value)
    return Range(min(least, value), max(most, value))
