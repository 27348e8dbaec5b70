"""`training_log.json`: `step_logs`, `epoch_logs` and `total_training_time`, valid JSON at any moment."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import IO, Any

from profiler_wrapper.live.json_lines import encode, local_time
from profiler_wrapper.live.records import StepRecord
from profiler_wrapper.live.rows import Row
from profiler_wrapper.live.session import Session
from profiler_wrapper.live.sinks import Sink
from profiler_wrapper.live.statistics import RunStatistics
from profiler_wrapper.recording.monitor_files import is_locked, lock

FLUSH_STEPS = 100  # steps that wait for a row at most


class TrainingLog(Sink):
    """Each step, appended in place: only the end of the file is written again, and little of it is in memory.

    It is brought up to date with each row. A file of an earlier run is moved aside, to `training_log_<its time>.json`.

    Args:
        max_files: the newest so many stay, this run's among them; 0: all.
    """

    name = "training_log"
    every_step = True

    def __init__(self, path: str | os.PathLike[str], *, max_files: int = 0) -> None:
        self._path = Path(path)
        self._max_files = max_files
        self._file: IO[bytes] | None = None
        self._end = 0  # where the last step in the file ends
        self._tail = b""  # of the file, behind that
        self._waiting: list[bytes] = []
        self._empty = True
        self._epochs: list[_Epoch] = []
        self._time_s = 0.0

    def open(self, session: Session) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._path.rename(_aside(self._path))
        if self._max_files:
            _remove_oldest(self._path, keep=self._max_files - 1)
        self._file = self._path.open("xb", buffering=0)
        lock(self._file.fileno())
        head = b'{"step_logs": ['
        self._file.write(head)
        self._end = len(head)
        self.flush()

    def write(self, record: StepRecord) -> None:
        self._waiting.append((b"\n" if self._empty else b",\n") + encode(_entry(record)))
        self._empty = False
        self._time_s += record.step_time_s or 0.0
        if record.epoch is not None:
            if not self._epochs or self._epochs[-1].number != record.epoch:
                self._epochs.append(_Epoch(record.epoch))
            self._epochs[-1].add(record)
        if len(self._waiting) >= FLUSH_STEPS:
            self.flush()

    def write_row(self, row: Row) -> None:
        """The steps are flushed after it."""

    def flush(self) -> None:
        assert self._file is not None
        steps = b"".join(self._waiting)
        self._waiting.clear()
        epochs = b",\n".join(encode(epoch.to_dict()) for epoch in self._epochs)
        tail = b'\n],\n"epoch_logs": [\n%s\n],\n"total_training_time": %s\n}\n' % (epochs, encode(self._time_s))
        try:
            self._write_end(steps + tail)
        except OSError:  # the disk is full: where the old end was, there is place for it
            with contextlib.suppress(OSError):
                self._write_end(self._tail)
            raise
        self._end += len(steps)
        self._tail = tail

    def _write_end(self, unwritten: bytes) -> None:
        """In the place of all behind the last step."""
        assert self._file is not None
        self._file.seek(self._end)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        self._file.truncate()

    def close(self, statistics: RunStatistics) -> None:
        if self._file is not None:
            self._file.close()


class _Epoch:
    """Sums over the steps of one epoch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.time_s = 0.0
        self.tokens = 0
        self.samples = 0
        self.losses = 0
        self.loss_sum = 0.0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.time_s += record.step_time_s or 0.0
        self.tokens += record.tokens or 0
        self.samples += record.samples or 0
        if record.loss is not None:
            self.losses += 1
            self.loss_sum += record.loss

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.number,
            "steps": self.steps,
            "avg_loss": self.loss_sum / self.losses if self.losses else None,
            "tokens": self.tokens or None,
            "samples": self.samples or None,
            "epoch_time": self.time_s,
        }


def _entry(record: StepRecord) -> dict[str, Any]:
    """Times in seconds; what is not known, or not finite, is null."""
    return {
        "step": record.step,
        "epoch": record.epoch,
        "timestamp": local_time(record.timestamp),
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "step_time": record.step_time_s,
        "steps_per_second": 1 / record.step_time_s if record.step_time_s else None,
        "tokens_per_second": record.tokens_per_s,
        "samples_per_second": record.samples_per_s,
        "mfu": record.mfu,
        "profiled": record.profiled,
    }


def _aside(path: Path) -> Path:
    """A free name with the time of the file's last change."""
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(path.stat().st_mtime))
    aside, number = path.with_stem(f"{path.stem}_{stamp}"), 1
    while aside.exists():
        number += 1
        aside = path.with_stem(f"{path.stem}_{stamp}_{number}")
    return aside


def _remove_oldest(path: Path, *, keep: int) -> None:
    """Of the files that were moved aside, but for those that are still written."""
    name = re.compile(rf"{re.escape(path.stem)}_(\d{{8}}_\d{{6}})(?:_(\d+))?{re.escape(path.suffix)}")
    found = [(match, beside) for beside in path.parent.iterdir() if (match := name.fullmatch(beside.name))]
    found.sort(key=lambda one: (one[0][1], int(one[0][2] or 1)))
    for _, old in found[: max(0, len(found) - keep)]:
        with contextlib.suppress(OSError):
            if not is_locked(old):
                old.unlink()
