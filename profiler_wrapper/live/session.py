"""One run of the monitor: what holds for all of its steps."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler_wrapper.live.records import Convention

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
