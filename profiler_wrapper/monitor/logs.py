"""`training_log.json`: `step_logs`, `epoch_logs` and `total_training_time`, valid JSON at any moment."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, cast

import msgspec

from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.monitor.read import (
    REALTIME_FILE,
    LogKind,
    LogSession,
    StepLine,
    StepReader,
    is_locked,
    kind_and_stamp,
    lock,
    log_file,
    log_sessions,
)
from profiler_wrapper.monitor.records import FlopsSource, Session, StepRecord
from profiler_wrapper.monitor.sinks import Sink
from profiler_wrapper.monitor.statistics import PERCENTILES, Interval, Row, RunStatistics
from profiler_wrapper.trace.atomic import replacing

# --------------------------------------------------------------------------------------------------
# Steps and rows as JSON, under the names of FlagScale's performance monitor and, where it has none, of our own.

GB = 1 << 30


def _plain(value: Any) -> Any:
    """What JSON does not know, such as numpy's numbers, as what it does."""
    return value.item() if hasattr(value, "item") else str(value)


encode = msgspec.json.Encoder(enc_hook=_plain).encode  # writes numbers that are not finite as null


def session_line(session: Session) -> bytes:
    """The first line of `perf_steps_<time>.jsonl`."""
    return encode({"session": session.to_dict()}) + b"\n"


def step_line(record: StepRecord) -> bytes:
    """The line of one step."""
    return encode(step_entry(record)) + b"\n"


def row_line(row: Row) -> bytes:
    """The line of one entry of `iteration_logs`."""
    return encode(row_entry(row)) + b"\n"


def step_entry(record: StepRecord) -> dict[str, Any]:
    """A step as it was. What is not known is None.

    Numbers that are not finite, which JSON does not have, are null in a file; `not_finite` then tells which they were.
    """
    step_time_s = record.step_time_s
    entry: dict[str, Any] = {
        "iteration": record.step,
        "timestamp": local_time(record.timestamp),
        "TFLOPS_per_GPU": record.tflops_per_gpu,
        "TFLOPS_total": record.tflops_total,
        "samples_per_sec": record.samples_per_s,
        "tokens_per_sec": record.tokens_per_s,
        "step_time_ms": _ms(step_time_s),
        "memory_GB": _gb(record.memory_bytes),
        "peak_memory_GB": _gb(record.peak_memory_bytes),
        "mfu": record.mfu,
        "hfu": record.hfu,
        "tokens": record.tokens,
        "samples": record.samples,
        "model_flops": record.model_flops,
        "hardware_flops": record.hardware_flops,
        "flops_source": record.flops_source,
        "flops_step": record.flops_step,
        "convention": record.convention,
        "breakdown_ms": _breakdown_ms(record.breakdown_s),
        "profiled": record.profiled,
        "epoch": record.epoch,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
    }
    odd = {
        name: str(value)
        for name in ("loss", "grad_norm", "learning_rate", "step_time_ms")
        if (value := entry[name]) is not None and not math.isfinite(value)
    }
    if odd:
        entry["not_finite"] = odd
    return entry


def row_entry(row: Row) -> dict[str, Any]:
    """As `step_entry` of the row's last step, with the row's means in the place of its times, work and rates."""
    return {
        **step_entry(row.record),
        "TFLOPS_per_GPU": row.tflops_per_gpu,
        "TFLOPS_total": row.tflops_total,
        "samples_per_sec": row.samples_per_s,
        "tokens_per_sec": row.tokens_per_s,
        "step_time_ms": _ms(row.step_time_s),
        "mfu": row.mfu,
        "hfu": row.hfu,
        "tokens": _whole_if_it_is(row.tokens),
        "samples": _whole_if_it_is(row.samples),
        "model_flops": row.model_flops,
        "hardware_flops": row.hardware_flops,
        "breakdown_ms": _breakdown_ms(row.breakdown_s),
        "steps": row.steps,
    }


def record_of(line: StepLine, *, world_size: int) -> StepRecord:
    """The step that a line of the log tells of."""
    step_time_s = None if line.step_time_ms is None else line.step_time_ms / 1e3
    return StepRecord(
        step=int(line.iteration),
        timestamp=_timestamp(line.timestamp),
        step_time_s=step_time_s,
        samples=_whole(line.samples),
        tokens=_whole(line.tokens),
        model_flops=line.model_flops,
        hardware_flops=line.hardware_flops,
        model_time_at_peak_s=_product(line.mfu, step_time_s),
        hardware_time_at_peak_s=_product(line.hfu, step_time_s),
        flops_source=cast("FlopsSource | None", line.flops_source),
        flops_step=line.flops_step,
        convention="causal" if line.convention == "causal" else "full",
        world_size=world_size,
        memory_bytes=_bytes(line.memory_GB),
        peak_memory_bytes=_bytes(line.peak_memory_GB),
        breakdown_s=None if line.breakdown_ms is None else {k: v / 1e3 for k, v in line.breakdown_ms.items()},
        profiled=line.profiled,
        epoch=_whole(line.epoch),
        loss=line.loss,
        grad_norm=line.grad_norm,
        learning_rate=line.learning_rate,
    )


def local_time(timestamp: float) -> str:
    """`2024-01-29T10:30:15.250`, as the text log has it."""
    return datetime.fromtimestamp(timestamp).isoformat(timespec="milliseconds")


def _timestamp(time: str | float | None) -> float:
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else time or 0.0


def _whole_if_it_is(value: float | None) -> float | None:
    return int(value) if value is not None and value.is_integer() else value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s * 1e3, 6)


def _gb(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GB


def _bytes(size_gb: float | None) -> int | None:
    return None if size_gb is None else round(size_gb * GB)


def _product(share: float | None, time_s: float | None) -> float | None:
    return None if share is None or time_s is None else share * time_s


def _breakdown_ms(breakdown_s: Mapping[str, float] | None) -> dict[str, float] | None:
    if breakdown_s is None:
        return None
    return {name: round(time_s * 1e3, 6) for name, time_s in breakdown_s.items()}


# --------------------------------------------------------------------------------------------------
# The files that one run of the monitor makes in its log directory.


class LineFile:
    """Appends whole lines. Nothing is buffered in the process, so a fork repeats none and a kill loses none."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Raises OSError: it cannot be opened, or is there although it should be new."""
        self.path = path
        self._file = open(path, "ab", buffering=0, opener=_create if new else None)  # noqa: SIM115 - closed in close
        lock(self._file.fileno())

    def write(self, lines: bytes) -> None:
        """Raises OSError: not all of it could be written."""
        while lines:
            lines = lines[self._file.write(lines) :]

    def restart(self, lines: bytes) -> None:
        """Put `lines` in the place of all that is there."""
        self._file.truncate(0)
        self.write(lines)

    def check(self) -> None:
        """Raises OSError: the file has been removed, so nobody would ever see what is written."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed, or another monitor writes it now")

    def close(self) -> None:
        self._file.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)


class LogFiles:
    """Names the files of a run alike, lets no two runs share one, and removes the oldest."""

    def __init__(self, kinds: Collection[LogKind], *, max_files: int) -> None:
        """
        Args:
            kinds: what this run writes.
            max_files: of each kind, the newest so many stay, this run's among them; 0: all.
        """
        self._kinds = tuple(kind for kind in kinds if kind != "summary")
        self._all_kinds = tuple(kinds)
        self._max_files = max_files
        self._lock = Lock()
        self._opened: dict[LogKind, LineFile] = {}
        self.stamp = ""

    def open(self, session: Session, kind: LogKind) -> LineFile:
        """The new file of this kind; the first call makes those of all kinds.

        Raises:
            OSError: they cannot be made.
        """
        if session.log_dir is None:
            raise FileNotFoundError("there is no log directory")
        with self._lock:
            if not self._opened:
                session.log_dir.mkdir(parents=True, exist_ok=True)
                self._make(session.log_dir, session.stamp)
                self._remove_oldest(session.log_dir)
        return self._opened[kind]

    def _make(self, directory: Path, stamp: str) -> None:
        for number in itertools.count(1):
            self.stamp = stamp if number == 1 else f"{stamp}_{number}"
            if any(log_file(directory, kind, self.stamp).exists() for kind in self._all_kinds):
                continue
            made: dict[LogKind, LineFile] = {}
            try:
                for kind in self._kinds:
                    made[kind] = LineFile(log_file(directory, kind, self.stamp), new=True)
            except FileExistsError:  # another process was quicker
                for file in made.values():
                    file.close()
                    file.path.unlink(missing_ok=True)
                continue
            self._opened = made
            return

    def _remove_oldest(self, directory: Path) -> None:
        if not self._max_files:
            return
        sessions = [session for session in log_sessions(directory) if session.stamp != self.stamp]
        running = {session.stamp for session in sessions if session.is_running}
        for kind in self._all_kinds:
            for path in _beyond(sessions, kind, self._max_files - 1, running):
                with contextlib.suppress(OSError):
                    path.unlink()


def _beyond(sessions: Sequence[LogSession], kind: LogKind, keep: int, running: Collection[str]) -> list[Path]:
    """The files of that kind but the newest `keep`, and but those of runs that still write."""
    having = [session for session in sessions if kind in session.files]
    return [session.files[kind] for session in having[: len(having) - keep] if session.stamp not in running]


# --------------------------------------------------------------------------------------------------
# `perf_summary_<time>.json`: at the end of a run, or afterwards from its steps.

_PAUSE_EVERY = 100  # steps


class Rows:
    """The entries of `iteration_logs`, kept in a file without a name, which is gone with the process."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError: no file can be made there."""
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed in close
        self._empty = True

    def add(self, row: Row) -> None:
        self._file.write((b"    " if self._empty else b",\n    ") + row_line(row).rstrip())
        self._empty = False

    def copy_to(self, file: IO[bytes]) -> None:
        self._file.seek(0)
        shutil.copyfileobj(self._file, file, 1 << 20)

    def close(self) -> None:
        self._file.close()


def write_summary(path: Path, *, start_time: str, statistics: RunStatistics, rows: Rows) -> None:
    """The summary, whole or not at all; `iteration_logs` never lies in memory.

    Raises:
        OSError: it cannot be written.
    """
    head = {
        "session_info": {
            "start_time": start_time,
            "end_time": _end_time(statistics),
            "total_iterations": statistics.steps,
        },
        "final_statistics": final_statistics(statistics),
    }
    text = msgspec.json.format(encode(head), indent=2).removesuffix(b"\n}")
    with replacing(path) as beside, beside.open("wb") as file:
        file.write(text + b',\n  "iteration_logs": [\n')
        rows.copy_to(file)
        file.write(b"\n  ]\n}\n")


def final_statistics(statistics: RunStatistics) -> dict[str, Any]:
    """Means are sums of work over sums of time; steps that were profiled are in no mean. None: not known."""
    rates, times, tflops = statistics.rates, statistics.step_time_s, statistics.tflops_per_gpu
    percentiles = {
        f"step_time_ms_p{percent}": _milliseconds_text(statistics.step_time_percentile(percent))
        for percent in PERCENTILES
    }
    peak_bytes = statistics.peak_memory_bytes
    return {
        "avg_tflops_per_gpu": rates.tflops_per_gpu,
        "max_tflops_per_gpu": None if tflops is None else tflops.most,
        "min_tflops_per_gpu": None if tflops is None else tflops.least,
        "avg_throughput_tokens": rates.per_s("tokens"),
        "peak_memory_gb": None if peak_bytes is None else peak_bytes / GB,
        "avg_tflops_total": rates.tflops_total,
        "avg_throughput_samples": rates.per_s("samples"),
        "avg_mfu": rates.per_s("model_time_at_peak_s"),
        "avg_hfu": rates.per_s("hardware_time_at_peak_s"),
        "avg_step_time_ms": _milliseconds_text(rates.step_time_s),
        "min_step_time_ms": None if times is None else times.least * 1e3,
        "max_step_time_ms": None if times is None else times.most * 1e3,
        **percentiles,
        "total_tokens": statistics.totals.get("tokens"),
        "total_samples": statistics.totals.get("samples"),
        "total_model_flops": statistics.totals.get("model_flops"),
        "total_time_s": statistics.totals.get("step_time_s"),
        "first_iteration": statistics.first_step,
        "last_iteration": statistics.last_step,
        "profiled_iterations": statistics.profiled_steps,
    }


def rebuild_summary(steps: Path, *, pause: Callable[[], object] | None = None) -> Path:
    """Makes the summary that a killed run could not write, from its `perf_steps_<time>.jsonl`; gives its path.

    Args:
        pause: called every hundred steps, so that this can be done beside a training.

    Raises:
        OSError: it cannot be read or written.
        BrokenLog: it is no such file, or does not hold a single step.
    """
    kind, stamp = kind_and_stamp(steps)
    summary = log_file(steps.parent, "summary", stamp if kind == "steps" else steps.stem)
    reader = StepReader(steps)
    statistics, interval = RunStatistics(), Interval(reader.log_interval)
    rows = Rows(steps.parent)
    try:
        for number, line in enumerate(reader):
            record = record_of(line, world_size=reader.world_size)
            statistics.add(record)
            row = interval.add(record)
            if row is not None:
                rows.add(row)
            if pause is not None and number % _PAUSE_EVERY == 0:
                pause()
        rest = interval.rest()
        if rest is not None:
            rows.add(rest)
        write_summary(summary, start_time=reader.start_time or stamp, statistics=statistics, rows=rows)
    finally:
        rows.close()
    return summary


def unfinished(directory: Path) -> list[LogSession]:
    """Runs that ended without a summary, as if killed. Raises OSError."""
    return [
        session
        for session in log_sessions(directory)
        if "steps" in session.files and "summary" not in session.files and not session.is_running
    ]


def _end_time(statistics: RunStatistics) -> str | None:
    if statistics.last_timestamp is None:
        return None
    text = local_time(statistics.last_timestamp)
    return datetime.fromisoformat(text).isoformat(timespec="seconds")


def _milliseconds_text(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1e3


# --------------------------------------------------------------------------------------------------
# `perf_steps_<time>.jsonl`, a line for each step as it ends, and at the end `perf_summary_<time>.json`.

_PAUSE_S = 0.02  # per hundred steps of an older log, so that reading it takes a small share of one core


class JsonLog(Sink):
    """Every step, in a file that is whole up to its last line whenever the run is killed.

    When it opens it writes the summaries of runs in the same directory that were killed before they could.
    """

    name = "json"
    every_step = True
    waited_for = True

    def __init__(self, files: LogFiles) -> None:
        self._files = files
        self._file: LineFile | None = None
        self._rows: Rows | None = None
        self._start_time = ""

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "steps")
        self._file.write(session_line(session))
        self._rows = Rows(self._file.path.parent)
        self._start_time = session.stamp
        Thread(target=_finish_older, args=(self._file.path,), name="profiler_wrapper summaries", daemon=True).start()

    def write(self, record: StepRecord) -> None:
        assert self._file is not None
        self._file.write(step_line(record))

    def write_row(self, row: Row) -> None:
        assert self._file is not None and self._rows is not None
        self._rows.add(row)
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        if self._file is None or self._rows is None:
            return
        self._file.check()
        self._file.close()
        path = log_file(self._file.path.parent, "summary", self._files.stamp)
        write_summary(path, start_time=self._start_time, statistics=statistics, rows=self._rows)
        self._rows.close()


def _finish_older(own: Path) -> None:
    with contextlib.suppress(OSError):
        for session in unfinished(own.parent):
            if session.files["steps"] == own:
                continue
            with contextlib.suppress(OSError, ProfilerWrapperError):
                rebuild_summary(session.files["steps"], pause=lambda: time.sleep(_PAUSE_S))


# --------------------------------------------------------------------------------------------------
# The text logs, in the layout of FlagScale's performance monitor.

REALTIME_BYTES = 1 << 20  # about 9,000 rows
REALTIME_ROWS = 20  # that stay when the file begins again

_COLUMNS = (
    ("Timestamp", 20),
    ("Step", 8),
    ("TFLOPS/GPU", 12),
    ("TFLOPS", 10),
    ("Samples/s", 12),
    ("Tokens/s", 12),
    ("Time(ms)", 10),
    ("Memory(GB)", 10),
)
_RULE = 80


class TextLog(Sink):
    """`perf_metrics_<time>.log`: a line for each row."""

    name = "text"
    waited_for = True

    def __init__(self, files: LogFiles) -> None:
        self._files = files
        self._file: LineFile | None = None

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "text")
        self._file.write(heading(session))

    def write_row(self, row: Row) -> None:
        assert self._file is not None
        self._file.write(text_line(row))
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        if self._file is not None:
            self._file.close()


class RealtimeLog(Sink):
    """`perf_realtime.log`: the same lines, of the newest run, at most 1 MiB of them.

    It begins with each run, and again, with its last lines, whenever it gets larger. Where another monitor still writes
    it, this one begins a file of its own, and the other is told that its file is gone.
    """

    name = "realtime"

    def __init__(self) -> None:
        self._file: LineFile | None = None
        self._heading = b""
        self._last: deque[bytes] = deque(maxlen=REALTIME_ROWS)
        self._size_bytes = 0

    def open(self, session: Session) -> None:
        if session.log_dir is None:
            raise FileNotFoundError("there is no log directory")
        session.log_dir.mkdir(parents=True, exist_ok=True)
        self._heading = heading(session)
        path = session.log_dir / REALTIME_FILE
        if is_locked(path):
            path.unlink(missing_ok=True)
        self._file = LineFile(path)
        self._restart()

    def write_row(self, row: Row) -> None:
        assert self._file is not None
        line = text_line(row)
        self._last.append(line)
        if self._size_bytes + len(line) > REALTIME_BYTES:
            self._restart()
        else:
            self._file.write(line)
            self._size_bytes += len(line)
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        if self._file is not None:
            self._file.close()

    def _restart(self) -> None:
        assert self._file is not None
        lines = b"".join([self._heading, *self._last])
        self._file.restart(lines)
        self._size_bytes = len(lines)


def heading(session: Session) -> bytes:
    """The five lines at the top."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.start_time))
    banner = "=" * _RULE
    names = _in_columns([name for name, _ in _COLUMNS])
    return "\n".join(
        [banner, f"Performance Monitor Session Started: {started}", banner, names, "-" * _RULE, ""]
    ).encode()


def text_line(row: Row) -> bytes:
    """One line; what is not known is `-`."""
    record = row.record
    cells = [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.timestamp)),
        str(record.step),
        _number(row.tflops_per_gpu, 2),
        _number(row.tflops_total, 2),
        _number(row.samples_per_s, 1),
        _number(row.tokens_per_s, 0),
        _number(None if row.step_time_s is None else row.step_time_s * 1e3, 1),
        _number(None if record.memory_bytes is None else record.memory_bytes / GB, 2),
    ]
    return f"{_in_columns(cells)}\n".encode()


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _in_columns(cells: list[str]) -> str:
    return " ".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()


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
