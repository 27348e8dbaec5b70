"""Reads `perf_steps_<time>.jsonl`, which may be torn, a few thousand steps at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from profiler_wrapper.errors import ProfilerWrapperError

LINES_AT_ONCE = 4 << 20  # bytes


class BrokenLog(ProfilerWrapperError, ValueError):
    """A file is no log of a training monitor, or holds no step. The message names the file and the cause."""


class StepLine(msgspec.Struct, gc=False):
    """One step, or one row, by the names in the files. What is not known is None."""

    iteration: float
    timestamp: str | float | None = None
    TFLOPS_per_GPU: float | None = None
    TFLOPS_total: float | None = None
    samples_per_sec: float | None = None
    tokens_per_sec: float | None = None
    step_time_ms: float | None = None
    memory_GB: float | None = None
    peak_memory_GB: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    tokens: float | None = None
    samples: float | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    flops_source: str | None = None
    flops_step: int | None = None
    convention: str | None = None
    breakdown_ms: dict[str, float] | None = None
    profiled: bool = False
    epoch: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    steps: float | None = None
    not_finite: dict[str, str] | None = None

    @property
    def odd_loss(self) -> bool:
        """It was NaN or infinite, which JSON cannot say."""
        return self.not_finite is not None and "loss" in self.not_finite


class _Head(msgspec.Struct):
    session: dict[str, Any]


class StepReader:
    """The lines of `perf_steps_<time>.jsonl`, one after another; those that cannot be read are counted.

    Attributes:
        session: what the first line tells.
        skipped: lines that are no step: torn by a kill or a full disk.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.session: Mapping[str, Any] = {}
        self.skipped = 0
        with path.open("rb") as file:
            head = file.readline(1 << 20)
        try:
            self.session = msgspec.json.decode(head, type=_Head).session
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return

    @property
    def log_interval(self) -> int:
        return _whole(self.session.get("log_interval"), 10)

    @property
    def world_size(self) -> int:
        return _whole(self.session.get("world_size"), 1)

    @property
    def start_time(self) -> str | None:
        started = self.session.get("start_time")
        return started if isinstance(started, str) else None

    def __iter__(self) -> Iterator[StepLine]:
        for lines in self.batches():
            yield from lines

    def batches(self) -> Iterator[list[StepLine]]:
        """Many at a time. Raises OSError, and at the end BrokenLog if there was none."""
        decoder = msgspec.json.Decoder(StepLine)
        found = False
        with self.path.open("rb") as file:
            if self.session:
                file.readline()
            while lines := file.readlines(LINES_AT_ONCE):
                batch = _decoded(lines, decoder)
                self.skipped += len(lines) - len(batch)
                found = found or bool(batch)
                yield batch
        if not found:
            raise BrokenLog(f"{self.path}: not a single step in it.")


def _decoded(lines: list[bytes], decoder: msgspec.json.Decoder[StepLine]) -> list[StepLine]:
    try:
        return decoder.decode_lines(b"".join(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return [line for text in lines if (line := _one(text, decoder)) is not None]


def _one(text: bytes, decoder: msgspec.json.Decoder[StepLine]) -> StepLine | None:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
