"""Finds and reads the logs of a training monitor, and says of a run: means, percentiles, where it was slow or grew."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from profiler_wrapper.errors import ProfilerWrapperError

# --- The files of a log directory: their names, and which belong together ---

LogKind = Literal["steps", "summary", "text"]

# The best source first: every step, the rows of a log interval with statistics, the rows alone.
_NAMES: Mapping[LogKind, tuple[str, str]] = {
    "steps": ("perf_steps_", ".jsonl"),
    "summary": ("perf_summary_", ".json"),
    "text": ("perf_metrics_", ".log"),
}


def log_file(directory: Path, kind: LogKind, stamp: str) -> Path:
    """`perf_steps_20240129_103000.jsonl` in `directory`."""
    begin, end = _NAMES[kind]
    return directory / f"{begin}{stamp}{end}"


def kind_and_stamp(path: Path) -> tuple[LogKind | None, str]:
    """By its name; None: it is no log file."""
    for kind, (begin, end) in _NAMES.items():
        if path.name.startswith(begin) and path.name.endswith(end):
            return kind, path.name[len(begin) : -len(end)]
    return None, ""


def log_sessions(directory: Path) -> dict[str, dict[LogKind, Path]]:
    """The files of each run in a directory, by the stamp in their names, the oldest first. Raises OSError.

    A stamp is the run's start: `20240129_103000`, or `20240129_103000_2` of a second.
    """
    found: dict[str, dict[LogKind, Path]] = {}
    for path in directory.iterdir():
        kind, stamp = kind_and_stamp(path)
        if kind is not None:
            found.setdefault(stamp, {})[kind] = path
    return {stamp: found[stamp] for stamp in sorted(found)}


def log_directories(root: Path) -> Iterator[Path]:
    """`root` and all directories in it that hold log files."""
    for directory, _, names in os.walk(root):
        if any(kind_and_stamp(Path(name))[0] is not None for name in names):
            yield Path(directory)


# --- Reads `perf_steps_<time>.jsonl`, which may be torn, a few thousand steps at a time ---

LINES_AT_ONCE = 4 << 20  # bytes


class BrokenLog(ProfilerWrapperError, ValueError):
    """A file is no log of a training monitor, or holds no step. The message names the file and the cause."""


class StepLine(msgspec.Struct):
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
    tokens: int | float | None = None
    samples: int | float | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    flops_source: str | None = None
    flops_step: int | None = None
    convention: str | None = None
    breakdown_ms: dict[str, float] | None = None
    profiled: bool = False
    epoch: int | float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    steps: float | None = None
    not_finite: dict[str, str] | None = None

    @property
    def bad_loss(self) -> bool:
        """It was NaN or infinite, which JSON cannot say."""
        return self.not_finite is not None and "loss" in self.not_finite


# Names in `training_log.json`; its times are in seconds.
_IN_TRAINING_LOG = {
    "step": "iteration",
    "step_time": "step_time_ms",
    "tokens_per_second": "tokens_per_sec",
    "samples_per_second": "samples_per_sec",
}


class _Summary(msgspec.Struct):
    iteration_logs: list[StepLine] = []
    step_logs: list[dict[str, Any]] | None = None
    session_info: dict[str, Any] = {}


class _Head(msgspec.Struct):
    session: dict[str, Any]


class StepReader:
    """The lines of `perf_steps_<time>.jsonl`, one after another; those that cannot be read are counted."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.session: Mapping[str, Any] = {}  # what the first line tells
        self.skipped = 0  # lines that are no step: torn by a kill or a full disk
        with path.open("rb") as file:
            head = file.readline(1 << 20)
        with contextlib.suppress(*_UNREADABLE):
            self.session = msgspec.json.decode(head, type=_Head).session

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


_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError


def _decoded(lines: list[bytes], decoder: msgspec.json.Decoder[StepLine]) -> list[StepLine]:
    try:
        return decoder.decode_lines(b"".join(lines))
    except _UNREADABLE:
        found = []
        for line in lines:
            with contextlib.suppress(*_UNREADABLE):
                found.append(decoder.decode(line))
        return found


# --- Reads the logs of a training monitor, ours and those of FlagScale's layout, as columns ---

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
    "peak_memory_GB", "mfu", "hfu", "profiled", "loss", "grad_norm", "learning_rate", "steps", "bad_loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLog:
    """What one file tells of a run."""

    path: Path
    kind: LogKind  # what was read: "steps" has every step, "summary" and "text" the rows of the log interval
    session: Mapping[str, Any]  # of the run: `start_time`, and in our own logs device, peak, versions ...
    columns: Mapping[str, Column]  # by the names of COLUMNS and PARTS, one value for each step or row; NaN: not known
    first_time: str = ""  # this, and of the last: as they stand in the file
    last_time: str = ""
    warnings: tuple[str, ...] = ()  # what was odd, in words

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
    runs = [files for directory in log_directories(given) for files in log_sessions(directory).values()]
    best = [next(files[kind] for kind in _NAMES if kind in files) for files in runs]  # which has the most detail
    best = [path for path in best if _has_begun(path)] or best
    if not best and (given / _TRAINING_LOG).is_file():
        return given / _TRAINING_LOG
    if not best:
        raise BrokenLog(f"no log of a monitor in {given}: no {_WHAT_IS_READ}.")
    return max(best, key=lambda path: path.stat().st_mtime)


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
    log = _log(path, "steps", reader.session, reader.batches())
    warnings = []
    if reader.skipped:
        warnings.append(f"{reader.skipped} of {reader.skipped + len(log)} lines could not be read; they are left out")
    if not reader.session:
        warnings.append("the first line, which tells of the session, could not be read")
    return replace(log, warnings=tuple(warnings))


def _read_summary(path: Path) -> MonitorLog:
    try:
        summary = msgspec.convert(json.loads(path.read_bytes()), type=_Summary, strict=False)  # may hold a bare NaN
        steps = summary.step_logs
        lines = summary.iteration_logs if steps is None else _training_steps(steps)
    except (ValueError, RecursionError) as error:
        raise BrokenLog(f"{path}: no log of a monitor: {error}. Give {_WHAT_IS_READ}.") from error
    if steps is None:
        return _log(path, "summary", summary.session_info, [lines])
    warning = "this file does not tell which steps were profiled: their times count too (perf_steps_*.jsonl tells)"
    unknown = any(step.get("profiled") is None for step in steps)
    return replace(_log(path, "steps", {}, [lines]), warnings=(warning,) if unknown else ())


def _training_steps(steps: list[dict[str, Any]]) -> list[StepLine]:
    """Raises ValueError."""
    known = [{_IN_TRAINING_LOG.get(name, name): v for name, v in step.items() if v is not None} for step in steps]
    lines = msgspec.convert(known, type=list[StepLine], strict=False)
    for line in lines:
        line.step_time_ms = None if line.step_time_ms is None else 1e3 * line.step_time_ms
    return lines


def _read_text(path: Path) -> MonitorLog:
    rows: list[StepLine] = []
    session: dict[str, Any] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            match = _TEXT_LINE.match(text)
            if match is not None:
                named = zip(_TEXT_COLUMNS, map(_float, (match[2], *match[3].split())), strict=True)
                rows.append(StepLine(timestamp=match[1], **dict(named)))  # type: ignore[arg-type]
            elif text.startswith(_STARTED):
                session["start_time"] = text.removeprefix(_STARTED).strip()
    return _log(path, "text", session, [rows])


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _log(path: Path, kind: LogKind, session: Mapping[str, Any], batches: Iterable[list[StepLine]]) -> MonitorLog:
    """Lines as arrays, in which None becomes NaN. Raises BrokenLog: there are none."""
    parts: dict[str, list[Column]] = {name: [] for name in (*COLUMNS, *PARTS)}
    times: list[str | float | None] = []
    for lines in filter(None, batches):
        times += lines[0].timestamp, lines[-1].timestamp
        for name in COLUMNS:
            parts[name].append(np.array([getattr(line, name) for line in lines], np.float64))
        broken_down = [line.breakdown_ms or {} for line in lines]
        for name in PARTS:
            parts[name].append(np.array([times_ms.get(name) for times_ms in broken_down], np.float64))
    if not times:
        raise BrokenLog(f"{path}: there is no step in it, and no row. Give {_WHAT_IS_READ}.")
    first, last = ("" if time is None else str(time)[:19].replace("T", " ") for time in (times[0], times[-1]))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return MonitorLog(path=path, kind=kind, session=session, columns=columns, first_time=first, last_time=last)


PERCENTILES = (5, 50, 95, 99)

_RATES = ("TFLOPS_per_GPU", "TFLOPS_total", "tokens_per_sec", "samples_per_sec", "mfu", "hfu")
_WINDOWS = 50  # that a run is cut into at least, to look for change
_LEAST_WINDOW, _LONGEST_WINDOW = 3, 200  # steps, of those that are slow together
_SLOW = 1.2  # of the median: a stretch that takes so much longer is worth a word
_GROWTH = 0.02  # of the memory at the begin: less is not worth a word
_NET = 0.5  # of all its ups and downs, that the growth must be
_IN_EACH_HALF = 0.25  # of the growth: what is allocated once at the begin is no growth


Spread = dict[str, float]  # one number over the steps or rows: count, mean, min, max, and p5 ... by PERCENTILES


@dataclass(frozen=True, slots=True)
class Stretch:
    """`slow` of the `timed` steps or rows from `first` to `last`, both among them, took `factor` times the median."""

    first: int
    last: int
    factor: float
    slow: int
    timed: int
    first_row: int  # this and the next: their places in the log
    last_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRun:
    """The numbers of a run."""

    log: MonitorLog
    first_step: int
    last_step: int
    spreads: Mapping[str, Spread]  # by the names of columns; those of which nothing is known are left out
    # By PARTS, of steps that were not profiled: mean_ms and share of the time; empty where it was not measured.
    breakdown: Mapping[str, Mapping[str, float]]
    slow: tuple[Stretch, ...]  # stretches of slow steps, the longest first
    memory_growth_gb: float | None  # from begin to end, where it grew throughout; else None
    profiled: int  # steps under the profiler, which are in no number of time
    bad_losses: tuple[int, ...]  # numbers of the steps whose loss was NaN or infinite
    slowest_step: int | None  # its number; None: no time is known

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Times are in ms, memory in GB of 2^30 bytes."""
        return {
            "path": str(self.log.path),
            "kind": self.log.kind,
            "session": dict(self.log.session),
            "first_iteration": self.first_step,
            "last_iteration": self.last_step,
            "entries": len(self.log),
            "profiled_iterations": self.profiled,
            "statistics": dict(self.spreads),
            "breakdown": dict(self.breakdown),
            "slow": [
                {name: getattr(one, name) for name in ("first", "last", "factor", "slow", "timed")} for one in self.slow
            ],
            "memory_growth_gb": self.memory_growth_gb,
            "steps_with_odd_loss": list(self.bad_losses),
            "warnings": list(self.log.warnings),
        }


def monitor_run(log: MonitorLog) -> MonitorRun:
    """The numbers of a log."""
    columns = log.columns
    undisturbed = columns["profiled"] == 0
    times = np.where(undisturbed & (columns["step_time_ms"] > 0), columns["step_time_ms"], np.nan)
    counts = np.nan_to_num(columns["steps"], nan=1.0)
    weights = times * counts
    spreads: dict[str, Spread | None] = {"step_time_ms": _spread(times, counts)}
    for name in _RATES:
        spreads[name] = _spread(np.where(undisturbed, columns[name], np.nan), weights)
    for name in ("memory_GB", "peak_memory_GB", "loss", "grad_norm"):
        spreads[name] = _spread(columns[name], None)
    steps = columns["iteration"]
    return MonitorRun(
        log=log,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        spreads={name: spread for name, spread in spreads.items() if spread is not None},
        breakdown=_breakdown(columns, undisturbed, counts),
        slow=_slow_stretches(steps, times),
        memory_growth_gb=_growth(columns["memory_GB"]),
        profiled=int((~undisturbed).sum()),
        bad_losses=tuple(int(step) for step in steps[columns["bad_loss"] == 1]),
        slowest_step=int(steps[np.nanargmax(times)]) if np.isfinite(times).any() else None,
    )


def _spread(values: Column, weights: Column | None) -> Spread | None:
    """Of what is known; None: nothing is. The mean of a rate is the sum of work over the sum of time."""
    known = np.isfinite(values)
    if not known.any():
        return None
    finite = values[known]
    shares = np.ones_like(finite) if weights is None else np.nan_to_num(weights[known], nan=0.0)
    if not shares.sum():
        shares = np.ones_like(finite)
    percentiles = np.percentile(finite, PERCENTILES, method="inverted_cdf")
    return {
        "count": len(finite),
        "mean": float((finite * shares).sum() / shares.sum()),
        "min": float(finite.min()),
        "max": float(finite.max()),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)},
    }


def _breakdown(
    columns: Mapping[str, Column], undisturbed: npt.NDArray[np.bool_], counts: Column
) -> dict[str, dict[str, float]]:
    """Rows weigh as many steps as they have."""
    known = undisturbed & np.logical_or.reduce([np.isfinite(columns[name]) for name in PARTS])
    sums = {name: float((np.nan_to_num(columns[name]) * counts)[known].sum()) for name in PARTS}
    whole, steps = sum(sums.values()), float(counts[known].sum())
    return {name: {"mean_ms": total / steps, "share": total / whole} for name, total in sums.items() if whole}


def _slow_stretches(steps: Column, times: Column) -> tuple[Stretch, ...]:
    """Where one window after another is slow, and what is slow on both sides of them: first slow step to last."""
    windows = _windows(len(times), number=max(_WINDOWS, len(times) // _LONGEST_WINDOW))
    usual = float(np.nanmedian(times)) if np.isfinite(times).any() else np.nan
    slow = times > _SLOW * usual
    found: list[Stretch] = []
    for first_window, end_window in _runs(_medians(times, windows) > _SLOW * usual):
        first, end = windows[first_window], windows[end_window]
        while first > 0 and slow[first - 1]:
            first -= 1
        while end < len(slow) and slow[end]:
            end += 1
        rows = first + np.flatnonzero(slow[first:end])
        timed = int(np.isfinite(times[rows[0] : rows[-1] + 1]).sum())
        if len(rows) >= _LEAST_WINDOW and timed < 2 * len(rows):
            found.append(
                Stretch(
                    first=int(steps[rows[0]]),
                    last=int(steps[rows[-1]]),
                    factor=float(np.median(times[rows])) / usual,
                    slow=len(rows),
                    timed=timed,
                    first_row=int(rows[0]),
                    last_row=int(rows[-1]),
                )
            )
    return tuple(sorted(found, key=lambda stretch: stretch.first - stretch.last))


def _growth(memory: Column) -> float | None:
    medians = _medians(memory, _windows(len(memory), number=_WINDOWS))
    medians = medians[np.isfinite(medians)]
    if len(medians) < _LEAST_WINDOW + 2:
        return None
    growth, middle = float(medians[-1] - medians[0]), medians[len(medians) // 2]
    in_halves = min(middle - medians[0], medians[-1] - middle)
    throughout = growth > _NET * np.abs(np.diff(medians)).sum() and in_halves >= _IN_EACH_HALF * growth
    return growth if throughout and growth > _GROWTH * medians[0] else None


def _windows(length: int, *, number: int) -> list[int]:
    """The bounds of windows of like size."""
    number = max(1, min(number, length // _LEAST_WINDOW))
    return [length * i // number for i in range(number + 1)]


def _medians(values: Column, windows: list[int]) -> Column:
    parts = (values[first:end] for first, end in pairwise(windows))
    return np.array([np.nanmedian(part) if np.isfinite(part).any() else np.nan for part in parts])


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """`[F, T, T, F]` -> `[(1, 3)]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]
