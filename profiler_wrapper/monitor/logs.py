"""The logs that a monitor writes: JSON lines and their summary, text in FlagScale's layout, and `training_log.json`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import IO, Any

import msgspec

from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.read import LogKind, StepLine, StepReader, kind_and_stamp, log_file, log_sessions
from profiler_wrapper.monitor.records import GB, PERCENTILES, Interval, Row, RunStatistics, Session, StepRecord, times
from profiler_wrapper.monitor.sinks import Console, Sink, TensorBoard, Wandb
from profiler_wrapper.timer.line_file import LineFile, is_written
from profiler_wrapper.trace.atomic import plain_data, replacing

# --------------------------------------------------------------------------------------------------
# Steps and rows as JSON, under the names of FlagScale's performance monitor and, where it has none, of our own.

encode = msgspec.json.Encoder(enc_hook=plain_data).encode  # writes numbers that are not finite as null


# What a `StepRecord` and the files call the same.
_SAME = (
    "tokens", "samples", "model_flops", "hardware_flops", "flops_source", "flops_step", "convention", "profiled",
    "epoch", "loss", "grad_norm", "learning_rate",
)  # fmt: skip
_MAY_BE_NAN = ("loss", "grad_norm", "learning_rate", "step_time_ms")


def row_entry(row: Row) -> dict[str, Any]:
    """That of the row's last step, with the row's means in the place of its times, work and rates."""
    work = {name: row.per_step(name) for name in _SAME[:4]}
    for name in ("tokens", "samples"):
        if (mean := work[name]) is not None and mean.is_integer():
            work[name] = int(mean)
    return {**_entry(row.record, row), **work, "steps": row.steps}


def _entry(record: StepRecord, timed: StepRecord | Row) -> dict[str, Any]:
    """A step with the times and rates of `timed`. What is not known is None.

    Numbers that are not finite, which JSON does not have, are null in a file; `not_finite` then says which they were.
    """
    parts = timed.breakdown_s
    entry: dict[str, Any] = {
        "iteration": record.step,
        "timestamp": local_time(record.timestamp),
        "TFLOPS_per_GPU": timed.tflops_per_gpu,
        "TFLOPS_total": timed.tflops_total,
        "samples_per_sec": timed.samples_per_s,
        "tokens_per_sec": timed.tokens_per_s,
        "step_time_ms": _ms(timed.step_time_s),
        "memory_GB": times(record.memory_bytes, 1 / GB),
        "peak_memory_GB": times(record.peak_memory_bytes, 1 / GB),
        "mfu": timed.mfu,
        "hfu": timed.hfu,
        "breakdown_ms": None if parts is None else {name: _ms(time_s) for name, time_s in parts.items()},
        **{name: getattr(record, name) for name in _SAME},
    }
    not_finite = {
        name: str(value) for name in _MAY_BE_NAN if (value := entry[name]) is not None and not math.isfinite(value)
    }
    return {**entry, "not_finite": not_finite} if not_finite else entry


def record_of(line: StepLine, *, world_size: int) -> StepRecord:
    """The step of a line of the log."""
    parts, timestamp = line.breakdown_ms, line.timestamp
    time_s = None if line.step_time_ms is None else line.step_time_ms / 1e3
    memory, peak = times(line.memory_GB, GB), times(line.peak_memory_GB, GB)
    return StepRecord(
        step=int(line.iteration),
        timestamp=datetime.fromisoformat(timestamp).timestamp() if isinstance(timestamp, str) else timestamp or 0.0,
        step_time_s=time_s,
        model_time_at_peak_s=times(line.mfu, time_s),
        hardware_time_at_peak_s=times(line.hfu, time_s),
        world_size=world_size,
        memory_bytes=None if memory is None else round(memory),
        peak_memory_bytes=None if peak is None else round(peak),
        breakdown_s=None if parts is None else {name: time_ms / 1e3 for name, time_ms in parts.items()},
        **{name: getattr(line, name) for name in _SAME},
    )


def local_time(timestamp: float) -> str:
    """`2024-01-29T10:30:15.250`, as the text log has it."""
    return datetime.fromtimestamp(timestamp).isoformat(timespec="milliseconds")


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s * 1e3, 6)


# --- `perf_summary_<time>.json`: at the end of a run, or afterwards from its steps ---


class Summary:
    """The summary of a run. Its rows, `iteration_logs`, never lie in memory: they are kept in a file without a name."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError: no file can be made there."""
        self._rows: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed in close

    def add(self, row: Row) -> None:
        self._rows.write((b",\n    " if self._rows.tell() else b"    ") + encode(row_entry(row)))

    def write(self, path: Path, start_time: str, statistics: RunStatistics) -> None:
        """Whole or not at all. Raises OSError: it cannot be written."""
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
            self._rows.seek(0)
            shutil.copyfileobj(self._rows, file, 1 << 20)
            file.write(b"\n  ]\n}\n")

    def close(self) -> None:
        self._rows.close()


def final_statistics(statistics: RunStatistics) -> dict[str, Any]:
    """Means are sums of work over sums of time; steps that were profiled are in no mean. None: not known."""
    rates, seconds, tflops = statistics.rates, statistics.step_time_s, statistics.tflops_per_gpu
    return {
        "avg_tflops_per_gpu": rates.tflops_per_gpu,
        "max_tflops_per_gpu": None if tflops is None else tflops.most,
        "min_tflops_per_gpu": None if tflops is None else tflops.least,
        "avg_throughput_tokens": rates.tokens_per_s,
        "peak_memory_gb": times(statistics.peak_memory_bytes, 1 / GB),
        "avg_tflops_total": rates.tflops_total,
        "avg_throughput_samples": rates.samples_per_s,
        "avg_mfu": rates.mfu,
        "avg_hfu": rates.hfu,
        "avg_step_time_ms": times(rates.step_time_s, 1e3),
        "min_step_time_ms": None if seconds is None else seconds.least * 1e3,
        "max_step_time_ms": None if seconds is None else seconds.most * 1e3,
        **{f"step_time_ms_p{share}": times(statistics.step_time_percentile(share), 1e3) for share in PERCENTILES},
        "total_tokens": statistics.totals.get("tokens"),
        "total_samples": statistics.totals.get("samples"),
        "total_model_flops": statistics.totals.get("model_flops"),
        "total_time_s": statistics.totals.get("step_time_s"),
        "first_iteration": statistics.first_step,
        "last_iteration": statistics.last_step,
        "profiled_iterations": statistics.profiled_steps,
    }


def rebuild_summary(steps: Path) -> Path:
    """Makes the summary that a killed run could not write, from its `perf_steps_<time>.jsonl`; gives its path.

    Raises:
        OSError: it cannot be read or written.
        BrokenLog: it is no such file, or does not hold a single step.
    """
    kind, stamp = kind_and_stamp(steps)
    path = log_file(steps.parent, "summary", stamp if kind == "steps" else steps.stem)
    reader = StepReader(steps)
    world_size, every = (
        value if isinstance(value := reader.session.get(name), int) and value > 0 else usual
        for name, usual in (("world_size", 1), ("log_interval", 10))
    )
    statistics, interval = RunStatistics(), Interval(every)
    with contextlib.closing(Summary(steps.parent)) as summary:
        for line in itertools.chain.from_iterable(reader.batches()):
            record = record_of(line, world_size=world_size)
            statistics.add(record)
            if row := interval.add(record):
                summary.add(row)
        if rest := interval.rest():
            summary.add(rest)
        summary.write(path, str(reader.session.get("start_time") or stamp), statistics)
    return path


def unfinished(directory: Path) -> list[Path]:
    """The steps of runs that ended without a summary, as if killed. Raises OSError."""
    return [
        files["steps"]
        for files in log_sessions(directory).values()
        if "steps" in files and "summary" not in files and not any(map(is_written, files.values()))
    ]


# --------------------------------------------------------------------------------------------------
# The files of a run are named alike. The oldest go, but for those that are still written.


_CLAIMING = Lock()  # each log opens its file in a thread of its own


class LogFiles:
    """Names the files of a run alike, lets no two runs share one, and removes the oldest.

    Of each of the `kinds` that this run writes, the newest `max_files` stay, this run's among them; 0: all.
    """

    def __init__(self, kinds: Sequence[LogKind], *, max_files: int) -> None:
        self._kinds, self._max_files = kinds, max_files
        self.stamp = ""  # of this run's files, as in their names; "" before the first is opened

    def open(self, session: Session, kind: LogKind) -> LineFile:
        """The new file of this kind. Raises OSError: it cannot be made."""
        directory = log_directory(session)
        with _CLAIMING:
            if not self.stamp:
                self.stamp = self._claim(directory, session.stamp)
                others = [files for stamp, files in log_sessions(directory).items() if stamp != self.stamp]
                for one in self._kinds if self._max_files else ():
                    remove_oldest([files[one] for files in others if one in files], keep=self._max_files - 1)
        return LineFile(log_file(directory, kind, self.stamp), marked=True)

    def _claim(self, directory: Path, stamp: str) -> str:
        for number in itertools.count(1):
            name = stamp if number == 1 else f"{stamp}_{number}"
            paths = [log_file(directory, kind, name) for kind in self._kinds]
            with contextlib.suppress(FileExistsError):  # another process was quicker
                if not any(path.exists() for path in paths):
                    paths[0].touch(exist_ok=False)
                    break
        return name


def remove_oldest(files: Sequence[Path], *, keep: int) -> None:
    """All but the last so many, and but for those that are still written."""
    for path in files[: max(0, len(files) - keep)]:
        if not is_written(path):
            with contextlib.suppress(OSError):
                path.unlink()


def log_directory(session: Session) -> Path:
    """Made if it is not there. Raises OSError."""
    if session.log_dir is None:
        raise FileNotFoundError("there is no log directory")
    session.log_dir.mkdir(parents=True, exist_ok=True)
    return session.log_dir


# --------------------------------------------------------------------------------------------------
# `perf_steps_<time>.jsonl`, a line for each step as it ends, and at the end `perf_summary_<time>.json`.


class JsonLog(Sink):
    """Every step, in a file that is whole up to its last line whenever the run is killed."""

    name = "json"
    every_step = True
    waited_for = True

    def __init__(self, files: LogFiles) -> None:
        self._files = files
        self._file: LineFile
        self._summary: Summary
        self._start_time = ""

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "steps")
        self._file.append(encode({"session": session.to_dict()}) + b"\n")
        self._summary = Summary(self._file.path.parent)
        self._start_time = session.stamp

    def write(self, record: StepRecord) -> None:
        self._file.append(encode(_entry(record, record)) + b"\n")

    def write_row(self, row: Row) -> None:
        self._summary.add(row)
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        self._file.check()
        self._file.close()
        path = log_file(self._file.path.parent, "summary", self._files.stamp)
        self._summary.write(path, self._start_time, statistics)
        self._summary.close()


# --- The text logs, in the layout of FlagScale's performance monitor ---

REALTIME_BYTES = 1 << 20  # about 9,000 rows
REALTIME_ROWS = 20  # that stay when the file begins again

# Of each column of numbers its title, width, decimals, and what of a row it shows.
_Column = tuple[str, int, int, Callable[[Row], "float | None"]]
_COLUMNS: tuple[_Column, ...] = (
    ("TFLOPS/GPU", 12, 2, lambda row: row.tflops_per_gpu),
    ("TFLOPS", 10, 2, lambda row: row.tflops_total),
    ("Samples/s", 12, 1, lambda row: row.samples_per_s),
    ("Tokens/s", 12, 0, lambda row: row.tokens_per_s),
    ("Time(ms)", 10, 1, lambda row: times(row.step_time_s, 1e3)),
    ("Memory(GB)", 10, 2, lambda row: times(row.record.memory_bytes, 1 / GB)),
)
_RULE = 80
_HEADING_LINES = 5


class TextLog(Sink):
    """`perf_metrics_<time>.log`: a line for each row."""

    name = "text"
    waited_for = True

    def __init__(self, files: LogFiles) -> None:
        self._files = files
        self._file: LineFile

    def open(self, session: Session) -> None:
        self._file = self._files.open(session, "text")
        self._file.append(heading(session))

    def write_row(self, row: Row) -> None:
        self._file.append(text_line(row))
        self._file.check()

    def close(self, statistics: RunStatistics) -> None:
        self._file.close()


class RealtimeLog(TextLog):
    """`perf_realtime.log`: the same lines, of the newest run, at most 1 MiB of them.

    It begins again, with its last lines, whenever it gets larger. Another monitor that still writes one there finds
    that its file is gone.
    """

    name = "realtime"
    waited_for = False

    def __init__(self) -> None:
        self._file: LineFile

    def open(self, session: Session) -> None:
        path = log_directory(session) / "perf_realtime.log"
        path.unlink(missing_ok=True)
        self._file = LineFile(path, marked=True)
        self._file.append(heading(session))

    def write_row(self, row: Row) -> None:
        if self._file.tell() + len(text_line(row)) > REALTIME_BYTES:
            lines = self._file.read().splitlines(keepends=True)
            self._file.replace_end(0, b"".join(lines[:_HEADING_LINES] + lines[_HEADING_LINES:][1 - REALTIME_ROWS :]))
        super().write_row(row)


def heading(session: Session) -> bytes:
    """Return the lines at the top, `_HEADING_LINES` of them."""
    banner, titles = "=" * _RULE, _in_columns("Timestamp", "Step", [title for title, *_ in _COLUMNS])
    started = f"Performance Monitor Session Started: {_second(session.start_time)}"
    return "\n".join([banner, started, banner, titles, "-" * _RULE, ""]).encode()


def text_line(row: Row) -> bytes:
    """Return a row as one line; what is not known is `-`."""
    numbers = [(value_of(row), decimals) for _, _, decimals, value_of in _COLUMNS]
    cells = ["-" if value is None else f"{value:.{decimals}f}" for value, decimals in numbers]
    return f"{_in_columns(_second(row.record.timestamp), str(row.record.step), cells)}\n".encode()


def _second(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def _in_columns(timestamp: str, step: str, cells: list[str]) -> str:
    numbers = " ".join(f"{cell:<{width}}" for cell, (_, width, *_) in zip(cells, _COLUMNS, strict=True))
    return f"{timestamp:<20} {step:<8} {numbers}".rstrip()


# --- `training_log.json`: `step_logs`, `epoch_logs` and `total_training_time`, valid JSON at any moment ---

FLUSH_STEPS = 100  # steps that wait for a row at most


class TrainingLog(Sink):
    """Each step, appended in place: only the end of the file is written again, and little of it is in memory.

    It is brought up to date with each row. A file of an earlier run is moved aside, to `training_log_<its time>.json`;
    the newest `max_files` stay, this run's among them; 0: all.
    """

    name = "training_log"
    every_step = True

    def __init__(self, path: str | os.PathLike[str], *, max_files: int = 0) -> None:
        self._path = Path(path)
        self._max_files = max_files
        self._file: LineFile
        self._end = 0  # where the last step in the file ends
        self._waiting: list[bytes] = []
        self._empty = True
        self._epochs: dict[int, defaultdict[str, float]] = {}  # sums over their steps
        self._time_s = 0.0

    def open(self, session: Session) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        path = self._path
        if path.exists():
            stamp = f"{path.stem}_{time.strftime('%Y%m%d_%H%M%S', time.localtime(path.stat().st_mtime))}"
            names = itertools.chain([stamp], (f"{stamp}_{number}" for number in itertools.count(2)))
            path.rename(next(aside for name in names if not (aside := path.with_stem(name)).exists()))
        if self._max_files:
            ours = re.compile(rf"{re.escape(path.stem)}_\d{{8}}_\d{{6}}(_\d+)?{re.escape(path.suffix)}")
            found = [beside for beside in path.parent.iterdir() if ours.fullmatch(beside.name)]
            remove_oldest(sorted(found, key=lambda beside: beside.stem), keep=self._max_files - 1)
        path.touch(exist_ok=False)
        self._file = LineFile(path, marked=True)
        self._file.append(b'{"step_logs": [')
        self._end = self._file.tell()
        self.flush()

    def write(self, record: StepRecord) -> None:
        self._waiting.append((b"\n" if self._empty else b",\n") + encode(_step_log(record)))
        self._empty = False
        self._time_s += record.step_time_s or 0.0
        if record.epoch is not None:
            sums = self._epochs.setdefault(record.epoch, defaultdict(float))
            known = {"tokens": record.tokens, "samples": record.samples, "time_s": record.step_time_s, "steps": 1}
            if record.loss is not None:
                known |= {"loss_sum": record.loss, "losses": 1}
            for name, value in known.items():
                sums[name] += value or 0
        if len(self._waiting) >= FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        steps = b"".join(self._waiting)
        self._waiting.clear()
        epochs = b",\n".join(encode(_epoch_log(number, sums)) for number, sums in self._epochs.items())
        tail = b'\n],\n"epoch_logs": [\n%s\n],\n"total_training_time": %s\n}\n' % (epochs, encode(self._time_s))
        self._file.replace_end(self._end, steps + tail)
        self._end += len(steps)

    def close(self, statistics: RunStatistics) -> None:
        self._file.close()


def _epoch_log(number: int, sums: Mapping[str, float]) -> dict[str, Any]:
    return {
        "epoch": number,
        "steps": sums["steps"],
        "avg_loss": sums["loss_sum"] / sums["losses"] if sums["losses"] else None,
        "tokens": sums["tokens"] or None,
        "samples": sums["samples"] or None,
        "epoch_time": sums["time_s"],
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


def sinks_of(config: MonitorConfig, *, training_log: str | os.PathLike[str] | None = None) -> list[Sink]:
    """The sinks for `config`: text and JSON files, console, TensorBoard, W&B, and `training_log` if it is named.

    What they need is imported now, and nothing opened yet. Log files go into the session's `log_dir`.

    Names, as `Sinks.write(skip=)` takes them: `text`, `realtime`, `json`, `training_log`, `console`, `tensorboard`,
    `wandb`.
    """
    of_format: dict[str, list[LogKind]] = {"text": ["text"], "json": ["steps", "summary"]}
    kinds = of_format.get(config.perf_log_format) or [kind for some in of_format.values() for kind in some]
    files = LogFiles(kinds, max_files=config.perf_max_log_files)
    sinks: list[Sink] = [TextLog(files), RealtimeLog()] if "text" in kinds else []
    if "steps" in kinds:
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
