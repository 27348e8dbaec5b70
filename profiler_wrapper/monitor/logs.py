"""The logs that a monitor writes: JSON lines and their summary, text in FlagScale's layout, and `training_log.json`."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import IO, Any, cast

import msgspec

from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.log_files import (
    REALTIME_FILE,
    LineFile,
    LogFiles,
    LogKind,
    is_locked,
    kind_and_stamp,
    lock,
    log_directory,
    log_file,
    unfinished,
)
from profiler_wrapper.monitor.read import StepLine, StepReader
from profiler_wrapper.monitor.records import (
    PERCENTILES,
    FlopsSource,
    Interval,
    Rates,
    Row,
    RunStatistics,
    Session,
    StepRecord,
)
from profiler_wrapper.monitor.sinks import Console, Sink, TensorBoard, Wandb
from profiler_wrapper.trace.atomic import plain_data, replacing

# --------------------------------------------------------------------------------------------------
# Steps and rows as JSON, under the names of FlagScale's performance monitor and, where it has none, of our own.

GB = 1 << 30

encode = msgspec.json.Encoder(enc_hook=plain_data).encode  # writes numbers that are not finite as null


def step_entry(record: StepRecord) -> dict[str, Any]:
    """A step as it was. What is not known is None.

    Numbers that are not finite, which JSON does not have, are null in a file; `not_finite` then says which they were.
    """
    work = record.tokens, record.samples, record.model_flops, record.hardware_flops
    return _entry(record, record, record.step_time_s, record.breakdown_s, work)


def row_entry(row: Row) -> dict[str, Any]:
    """As `step_entry` of the row's last step, with the row's means in the place of its times, work and rates."""
    tokens, samples = (_whole_if_it_is(row.per_step(name)) for name in ("tokens", "samples"))
    work = tokens, samples, row.per_step("model_flops"), row.per_step("hardware_flops")
    return {**_entry(row.record, row, row.step_time_s, row.breakdown_s, work), "steps": row.steps}


def _entry(
    record: StepRecord,
    rates: Rates,
    step_time_s: float | None,
    breakdown_s: Mapping[str, float] | None,
    work: tuple[float | None, ...],
) -> dict[str, Any]:
    tokens, samples, model_flops, hardware_flops = work
    entry: dict[str, Any] = {
        "iteration": record.step,
        "timestamp": local_time(record.timestamp),
        "TFLOPS_per_GPU": rates.tflops_per_gpu,
        "TFLOPS_total": rates.tflops_total,
        "samples_per_sec": rates.samples_per_s,
        "tokens_per_sec": rates.tokens_per_s,
        "step_time_ms": _ms(step_time_s),
        "memory_GB": _gb(record.memory_bytes),
        "peak_memory_GB": _gb(record.peak_memory_bytes),
        "mfu": rates.mfu,
        "hfu": rates.hfu,
        "tokens": tokens,
        "samples": samples,
        "model_flops": model_flops,
        "hardware_flops": hardware_flops,
        "flops_source": record.flops_source,
        "flops_step": record.flops_step,
        "convention": record.convention,
        "breakdown_ms": None if breakdown_s is None else {name: _ms(time_s) for name, time_s in breakdown_s.items()},
        "profiled": record.profiled,
        "epoch": record.epoch,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
    }
    not_finite = {
        name: str(value)
        for name in ("loss", "grad_norm", "learning_rate", "step_time_ms")
        if (value := entry[name]) is not None and not math.isfinite(value)
    }
    if not_finite:
        entry["not_finite"] = not_finite
    return entry


def record_of(line: StepLine, *, world_size: int) -> StepRecord:
    """The step of a line of the log."""
    step_time_s = None if line.step_time_ms is None else line.step_time_ms / 1e3
    return StepRecord(
        step=int(line.iteration),
        timestamp=_timestamp(line.timestamp),
        step_time_s=step_time_s,
        samples=_whole(line.samples),
        tokens=_whole(line.tokens),
        model_flops=line.model_flops,
        hardware_flops=line.hardware_flops,
        model_time_at_peak_s=_times(line.mfu, step_time_s),
        hardware_time_at_peak_s=_times(line.hfu, step_time_s),
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


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


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
        self._file.write((b"    " if self._empty else b",\n    ") + encode(row_entry(row)))
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
    end = statistics.last_timestamp
    head = {
        "session_info": {
            "start_time": start_time,
            "end_time": None if end is None else datetime.fromtimestamp(end).isoformat(timespec="seconds"),
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
    return {
        "avg_tflops_per_gpu": rates.tflops_per_gpu,
        "max_tflops_per_gpu": None if tflops is None else tflops.most,
        "min_tflops_per_gpu": None if tflops is None else tflops.least,
        "avg_throughput_tokens": rates.tokens_per_s,
        "peak_memory_gb": _gb(statistics.peak_memory_bytes),
        "avg_tflops_total": rates.tflops_total,
        "avg_throughput_samples": rates.samples_per_s,
        "avg_mfu": rates.mfu,
        "avg_hfu": rates.hfu,
        "avg_step_time_ms": _times(rates.step_time_s, 1e3),
        "min_step_time_ms": None if times is None else times.least * 1e3,
        "max_step_time_ms": None if times is None else times.most * 1e3,
        **{f"step_time_ms_p{share}": _times(statistics.step_time_percentile(share), 1e3) for share in PERCENTILES},
        "total_tokens": statistics.totals.get("tokens"),
        "total_samples": statistics.totals.get("samples"),
        "total_model_flops": statistics.totals.get("model_flops"),
        "total_time_s": statistics.totals.get("step_time_s"),
        "first_iteration": statistics.first_step,
        "last_iteration": statistics.last_step,
        "profiled_iterations": statistics.profiled_steps,
    }


def rebuild_summary(steps: Path, *, pause_s: float = 0.0) -> Path:
    """Makes the summary that a killed run could not write, from its `perf_steps_<time>.jsonl`; gives its path.

    Args:
        pause_s: every hundred steps, so that this can be done beside a training.

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
            if row := interval.add(record):
                rows.add(row)
            if pause_s and number % _PAUSE_EVERY == 0:
                time.sleep(pause_s)
        if rest := interval.rest():
            rows.add(rest)
        write_summary(summary, start_time=reader.start_time or stamp, statistics=statistics, rows=rows)
    finally:
        rows.close()
    return summary


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
        self._file: LineFile
        self._rows: Rows
        self._start_time = ""

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "steps")
        self._file.write(encode({"session": session.to_dict()}) + b"\n")
        self._rows = Rows(self._file.path.parent)
        self._start_time = session.stamp
        Thread(target=_finish_older, args=(self._file.path,), name="profiler_wrapper summaries", daemon=True).start()

    def write(self, record: StepRecord) -> None:
        self._file.write(encode(step_entry(record)) + b"\n")

    def write_row(self, row: Row) -> None:
        self._rows.add(row)
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        self._file.check()
        self._file.close()
        path = log_file(self._file.path.parent, "summary", self._files.stamp)
        write_summary(path, start_time=self._start_time, statistics=statistics, rows=self._rows)
        self._rows.close()


def _finish_older(own: Path) -> None:
    with contextlib.suppress(OSError):
        for session in unfinished(own.parent):
            if session.files["steps"] != own:
                with contextlib.suppress(OSError, ProfilerWrapperError):
                    rebuild_summary(session.files["steps"], pause_s=_PAUSE_S)


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
        self._file: LineFile

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "text")
        self._file.write(heading(session))

    def write_row(self, row: Row) -> None:
        self._file.write(text_line(row))
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        self._file.close()


class RealtimeLog(Sink):
    """`perf_realtime.log`: the same lines, of the newest run, at most 1 MiB of them.

    It begins with each run, and again, with its last lines, whenever it gets larger. Where another monitor still writes
    it, this one begins a file of its own, and the other finds that its file is gone.
    """

    name = "realtime"

    def __init__(self) -> None:
        self._file: LineFile
        self._heading = b""
        self._last: deque[bytes] = deque(maxlen=REALTIME_ROWS)
        self._size_bytes = 0

    def open(self, session: Session) -> None:
        path = log_directory(session) / REALTIME_FILE
        self._heading = heading(session)
        if is_locked(path):
            path.unlink(missing_ok=True)
        self._file = LineFile(path)
        self._restart()

    def write_row(self, row: Row) -> None:
        line = text_line(row)
        self._last.append(line)
        if self._size_bytes + len(line) > REALTIME_BYTES:
            self._restart()
        else:
            self._file.write(line)
            self._size_bytes += len(line)
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        self._file.close()

    def _restart(self) -> None:
        lines = b"".join([self._heading, *self._last])
        self._file.restart(lines)
        self._size_bytes = len(lines)


def heading(session: Session) -> bytes:
    """The five lines at the top."""
    banner, names = "=" * _RULE, _in_columns([name for name, _ in _COLUMNS])
    started = f"Performance Monitor Session Started: {_second(session.start_time)}"
    return "\n".join([banner, started, banner, names, "-" * _RULE, ""]).encode()


def text_line(row: Row) -> bytes:
    """One line; what is not known is `-`."""
    numbers = (
        (row.tflops_per_gpu, 2),
        (row.tflops_total, 2),
        (row.samples_per_s, 1),
        (row.tokens_per_s, 0),
        (_times(row.step_time_s, 1e3), 1),
        (_gb(row.record.memory_bytes), 2),
    )
    cells = ["-" if value is None else f"{value:.{decimals}f}" for value, decimals in numbers]
    return f"{_in_columns([_second(row.record.timestamp), str(row.record.step), *cells])}\n".encode()


def _second(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def _in_columns(cells: list[str]) -> str:
    return " ".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()


# --------------------------------------------------------------------------------------------------
# `training_log.json`: `step_logs`, `epoch_logs` and `total_training_time`, valid JSON at any moment.

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
        self._file: IO[bytes]
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
        self._waiting.append((b"\n" if self._empty else b",\n") + encode(_step_log(record)))
        self._empty = False
        self._time_s += record.step_time_s or 0.0
        if record.epoch is not None:
            if not self._epochs or self._epochs[-1].number != record.epoch:
                self._epochs.append(_Epoch(record.epoch))
            self._epochs[-1].add(record)
        if len(self._waiting) >= FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
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
        self._file.seek(self._end)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        self._file.truncate()

    def close(self, statistics: RunStatistics) -> None:
        self._file.close()


@dataclass(slots=True)
class _Epoch:
    """Sums over the steps of one epoch."""

    number: int
    steps: int = 0
    time_s: float = 0.0
    tokens: int = 0
    samples: int = 0
    losses: int = 0
    loss_sum: float = 0.0

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


def _step_log(record: StepRecord) -> dict[str, Any]:
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


def sinks_of(config: MonitorConfig, *, training_log: str | os.PathLike[str] | None = None) -> list[Sink]:
    """The sinks for `config`: text and JSON files, console, TensorBoard, W&B, and `training_log` if it is named.

    What they need is imported now, and nothing opened yet. Log files go into the session's `log_dir`.

    Names, as `Sinks.write(skip=)` takes them: `text`, `realtime`, `json`, `training_log`, `console`, `tensorboard`,
    `wandb`.
    """
    text, steps = config.perf_log_format in ("text", "both"), config.perf_log_format in ("json", "both")
    kinds: list[LogKind] = ["text"] if text else []
    files = LogFiles([*kinds, *(("steps", "summary") if steps else ())], max_files=config.perf_max_log_files)
    sinks: list[Sink] = [TextLog(files), RealtimeLog()] if text else []
    if steps:
        sinks.append(JsonLog(files))
    if training_log is not None:
        sinks.append(TrainingLog(training_log, max_files=config.perf_max_log_files))
    if config.perf_console_output:
        sinks.append(Console())
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoard(config.tensorboard_dir))
    if config.wandb:
        sinks.append(Wandb())
    return sinks
