"""What is known of one step of a training loop, and the rates that follow from it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# How FLOPs became known: told by the user, by formula from the model's config, or counted in a real step.
FlopsSource = Literal["given", "config", "measured"]
Convention = Literal["full", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
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

    @property
    def tflops_total(self) -> float | None:
        """10^12 model FLOPs a second, all ranks together."""
        rate = _per_s(self.model_flops, self.step_time_s)
        return None if rate is None else rate / 1e12

    @property
    def tflops_per_gpu(self) -> float | None:
        """10^12 model FLOPs a second and rank."""
        return None if self.tflops_total is None else self.tflops_total / self.world_size

    @property
    def samples_per_s(self) -> float | None:
        return _per_s(self.samples, self.step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        return _per_s(self.tokens, self.step_time_s)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the step that the model's FLOPs need at the peak. Not clipped to 1."""
        return _per_s(self.model_time_at_peak_s, self.step_time_s)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: as `mfu`, with what is computed again."""
        return _per_s(self.hardware_time_at_peak_s, self.step_time_s)


def _per_s(amount: float | None, seconds: float | None) -> float | None:
    return None if amount is None or not seconds else amount / seconds


# --------------------------------------------------------------------------------------------------
# One run of the monitor: what holds for all of its steps.

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is written once, at the head of a log.

    Attributes:
        start_time: seconds since 1970.
        log_dir: where log files go; None: nowhere.
        log_interval: steps between two rows of text, TensorBoard, W&B and console. JSON lines have every step.
        rank, world_size: of this process; of the job.
        device_name: None where not known.
        peak_flops_per_s: of one device, dense, by type of number; None where not known.
        peak_source: where these peaks are from.
        convention: of attention, as in `StepRecord`.
        memory_kind: what the memory of a step is: the accelerator's, or the process's.
        versions: of torch, of this package, ...
    """

    start_time: float = field(default_factory=time.time)
    log_dir: Path | None = None
    log_interval: int = 10
    rank: int = 0
    world_size: int = 1
    device_name: str | None = None
    peak_flops_per_s: Mapping[str, float] | None = None
    peak_source: str | None = None
    convention: Convention = "full"
    memory_kind: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def stamp(self) -> str:
        """The start in local time as file names have it: `20240129_103000`."""
        return time.strftime("%Y%m%d_%H%M%S", time.localtime(self.start_time))

    def to_dict(self) -> dict[str, Any]:
        """The first line of `perf_steps_<time>.jsonl`, below its key `session`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "start_time": self.stamp,
            "started": self.start_time,
            "log_interval": self.log_interval,
            "rank": self.rank,
            "world_size": self.world_size,
            "device_name": self.device_name,
            "peak_flops_per_s": None if self.peak_flops_per_s is None else dict(self.peak_flops_per_s),
            "peak_source": self.peak_source,
            "convention": self.convention,
            "memory_kind": self.memory_kind,
            "versions": dict(self.versions),
            "units": {"GB": "2^30 bytes", "TFLOPS": "10^12 model FLOPs per second"},
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
