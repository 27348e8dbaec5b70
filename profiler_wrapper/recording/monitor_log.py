"""Reads the logs of a training monitor, ours and those of FlagScale's layout, as columns."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.monitor_files import LogKind, log_directories, log_sessions
from profiler_wrapper.recording.monitor_steps import LINES_AT_ONCE, BrokenLog, StepLine, StepReader

Column = npt.NDArray[np.float64]

_TEXT_COLUMNS = (
    "iteration", "TFLOPS_per_GPU", "TFLOPS_total", "samples_per_sec", "tokens_per_sec", "step_time_ms", "memory_GB",
)  # fmt: skip
_TEXT_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\s+(\d+)((?:\s+\S+){6})")
_STARTED = "Performance Monitor Session Started: "
_TRAINING_LOG = "training_log.json"
_WHAT_IS_READ = "perf_steps_*.jsonl, perf_summary_*.json, perf_metrics_*.log or training_log.json"
PARTS = ("data", "forward", "backward", "optimizer", "other")  # of a step's time

# What is drawn or counted. `steps`: how many a row is the mean of. Beside these the PARTS, in ms.
COLUMNS = (
    "iteration", "TFLOPS_per_GPU", "TFLOPS_total", "samples_per_sec", "tokens_per_sec", "step_time_ms", "memory_GB",
    "peak_memory_GB", "mfu", "hfu", "profiled", "loss", "grad_norm", "learning_rate", "steps", "odd_loss",
)  # fmt: skip


class _TrainingStep(msgspec.Struct):
    """A step of `training_log.json`; its time is in seconds."""

    step: float
    timestamp: str | None = None
    step_time: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    mfu: float | None = None
    epoch: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    profiled: bool | None = None  # others do not tell

    def line(self) -> StepLine:
        return StepLine(
            iteration=self.step,
            timestamp=self.timestamp,
            step_time_ms=None if self.step_time is None else 1e3 * self.step_time,
            tokens_per_sec=self.tokens_per_second,
            samples_per_sec=self.samples_per_second,
            mfu=self.mfu,
            epoch=self.epoch,
            loss=self.loss,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rate,
            profiled=bool(self.profiled),
        )


class _Summary(msgspec.Struct):
    iteration_logs: list[StepLine] = []
    step_logs: list[_TrainingStep] | None = None
    session_info: dict[str, Any] = {}
    final_statistics: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLog:
    """What one file tells of a run.

    Attributes:
        kind: what was read: "steps" has every step, "summary" and "text" the rows of the log interval.
        session: of the run: `start_time`, and in our own logs device, peak, versions ...
        columns: by the names of COLUMNS and PARTS, one value for each step or row; NaN: not known.
        first_time, last_time: of the first and the last, as they stand in the file.
        warnings: what was odd, in words.
        decimals: of columns that the file has rounded.
    """

    path: Path
    kind: LogKind
    session: Mapping[str, Any]
    columns: Mapping[str, Column]
    first_time: str = ""
    last_time: str = ""
    warnings: tuple[str, ...] = ()
    decimals: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["iteration"])


def find_log(path: str | os.PathLike[str]) -> Path:
    """The file that tells most of the newest run in a directory, or in one below it; of a file: itself.

    Raises:
        OSError: it is not there or cannot be read.
        BrokenLog: there is no log in it.
    """
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(given))
    if not given.is_dir():
        return given
    sessions = [session for directory in log_directories(given) for session in log_sessions(directory)]
    sessions = [session for session in sessions if _has_begun(session.best)] or sessions
    if not sessions and (given / _TRAINING_LOG).is_file():
        return given / _TRAINING_LOG
    if not sessions:
        raise BrokenLog(f"no log of a monitor in {given}: no {_WHAT_IS_READ}.")
    return max(sessions, key=lambda session: session.best.stat().st_mtime).best


def _has_begun(path: Path) -> bool:
    """Of a file of steps, whether there is one."""
    if path.suffix != ".jsonl":
        return True
    with path.open("rb") as file:
        file.readline(LINES_AT_ONCE)
        return bool(file.readline(LINES_AT_ONCE))


def read_log(path: Path) -> MonitorLog:
    """The steps or rows in a file, by its ending: `.jsonl`, `.json`, `.log`.

    Raises:
        OSError: it cannot be read.
        BrokenLog: it is something else, or holds no step.
    """
    readers = {".jsonl": _read_steps, ".json": _read_summary, ".log": _read_text}
    reader = readers.get(path.suffix)
    if reader is None:
        raise BrokenLog(f"{path}: no log of a monitor. Give {_WHAT_IS_READ}, or their directory.")
    return reader(path)


def _read_steps(path: Path) -> MonitorLog:
    reader = StepReader(path)
    columns = _Columns()
    for batch in reader.batches():
        columns.add(batch)
    warnings = []
    if reader.skipped:
        warnings.append(
            f"{reader.skipped} of {reader.skipped + columns.count} lines could not be read; they are left out"
        )
    if not reader.session:
        warnings.append("the first line, which tells of the session, could not be read")
    return columns.log(path, "steps", reader.session, warnings)


def _read_summary(path: Path) -> MonitorLog:
    content = path.read_bytes()
    try:
        try:
            summary = msgspec.json.decode(content, type=_Summary, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            summary = msgspec.convert(json.loads(content), type=_Summary, strict=False)  # it may hold a bare NaN
    except (ValueError, RecursionError) as error:
        raise BrokenLog(f"{path}: no log of a monitor: {error}. Give {_WHAT_IS_READ}.") from error
    columns = _Columns()
    if summary.step_logs is not None:
        columns.add([step.line() for step in summary.step_logs])
        if not columns.count:
            raise BrokenLog(f"{path}: its step_logs are empty.")
        told = "this file does not tell which steps were profiled: their times count too (perf_steps_*.jsonl tells)"
        untold = any(step.profiled is None for step in summary.step_logs)
        return columns.log(path, "steps", {}, [told] if untold else [])
    columns.add(summary.iteration_logs)
    if not columns.count:
        raise BrokenLog(f"{path}: it has no step_logs, and no iteration_logs. Give {_WHAT_IS_READ}.")
    return columns.log(path, "summary", summary.session_info, [])


def _read_text(path: Path) -> MonitorLog:
    columns = _Columns()
    session: dict[str, Any] = {}
    decimals: dict[str, int] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            match = _TEXT_LINE.match(text)
            if match is not None:
                values = [match[2], *match[3].split()]
                named = zip(_TEXT_COLUMNS, map(_float, values), strict=True)
                for name, value in zip(_TEXT_COLUMNS, values, strict=True):
                    decimals[name] = max(decimals.get(name, 0), len(value.partition(".")[2]))
                columns.add([StepLine(timestamp=match[1], **dict(named))])  # type: ignore[arg-type]
            elif text.startswith(_STARTED):
                session["start_time"] = text.removeprefix(_STARTED).strip()
    if not columns.count:
        raise BrokenLog(f"{path}: not a single row of a monitor's text log in it.")
    return replace(columns.log(path, "text", session, []), decimals=decimals)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Columns:
    """Collects lines as arrays."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: dict[str, list[Column]] = {name: [] for name in (*COLUMNS, *PARTS)}
        self._first: StepLine | None = None
        self._last: StepLine | None = None

    def add(self, lines: Sequence[StepLine]) -> None:
        if not lines:
            return
        self.count += len(lines)
        self._first = self._first or lines[0]
        self._last = lines[-1]
        for name in COLUMNS:
            values = [getattr(line, name) for line in lines]
            self._parts[name].append(np.array(values, np.float64))  # None becomes NaN
        broken_down = [line.breakdown_ms or {} for line in lines]
        known = any(broken_down)
        for name in PARTS:
            times = [one.get(name) for one in broken_down] if known else np.full(len(lines), np.nan)
            self._parts[name].append(np.array(times, np.float64))

    def log(self, path: Path, kind: LogKind, session: Mapping[str, Any], warnings: Iterable[str]) -> MonitorLog:
        return MonitorLog(
            path=path,
            kind=kind,
            session=session,
            columns={name: np.concatenate(parts) for name, parts in self._parts.items()},
            first_time=_time(self._first),
            last_time=_time(self._last),
            warnings=tuple(warnings),
        )


def _time(line: StepLine | None) -> str:
    return "" if line is None or line.timestamp is None else str(line.timestamp)[:19].replace("T", " ")
