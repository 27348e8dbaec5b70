"""The file of a measurement of a device's own ceilings."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from profiler_wrapper.errors import WrongUse

FILE_VERSION = 1
_AGAIN = "Measure with `profiler-wrapper peaks --measure -o FILE`"


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The best and the median of several samples, each a second's worth: FLOPs, or bytes read and written."""

    per_s: float
    median_per_s: float
    size: str  # of the operands that gave the best: "4096 x 4096 x 4096", "1024 MiB"


class MeasuredPeaks(msgspec.Struct, frozen=True, kw_only=True):
    """What a device was measured to do. Readers of the file ignore keys that they don't know."""

    measured_peaks_version: int
    device: str
    threads: int | None  # of a CPU
    torch: str
    date: str  # ISO 8601, UTC
    flops: dict[str, Ceiling]  # by type: float64 float32 tfloat32 float16 bfloat16 float8 int8
    copy: Ceiling | None
    left_out: dict[str, str] = msgspec.field(default_factory=dict)  # type -> why it was not measured

    @property
    def source(self) -> str:
        """`"measured 2026-01-02 on 8 threads, torch 2.13.0"`."""
        threads = "" if self.threads is None else f" on {self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"measured {self.date[:10]}{threads}, torch {self.torch}"


def read_measured_peaks(path: str | os.PathLike[str]) -> MeasuredPeaks:
    """The measurement in a file that `peaks --measure -o FILE` wrote. Raises WrongUse, which says what to do."""
    name = os.fspath(path)
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=MeasuredPeaks)
    except OSError as error:
        raise WrongUse(f"{name}: measured peaks cannot be read: {error.strerror or error}. {_AGAIN}.") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WrongUse(f"{name} holds no measured peaks: {error}. {_AGAIN}.") from error
    if found.measured_peaks_version != FILE_VERSION:
        version = found.measured_peaks_version
        raise WrongUse(f"{name} is of version {version}, and this package reads {FILE_VERSION}. {_AGAIN}.")
    figures = {**found.flops, **({"copy": found.copy} if found.copy else {})}
    if not figures:
        raise WrongUse(f"{name} holds no figure. {_AGAIN}.")
    for key, ceiling in figures.items():
        if ceiling.per_s <= 0:
            raise WrongUse(f"{name} says {ceiling.per_s:g} a second for {key}; peaks are above 0. {_AGAIN}.")
    return found
