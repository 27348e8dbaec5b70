"""`perf_summary_<time>.json`: at the end of a run, or afterwards from its steps."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from profiler_wrapper.live.json_lines import encode, local_time, record_of, row_line
from profiler_wrapper.live.rows import Interval, Row
from profiler_wrapper.live.statistics import PERCENTILES, RunStatistics
from profiler_wrapper.recording.atomic import replacing
from profiler_wrapper.recording.monitor_files import LogSession, kind_and_stamp, log_file, log_sessions
from profiler_wrapper.recording.monitor_steps import StepReader

GB = 1 << 30
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
    percentiles = {f"step_time_ms_p{percent}": _ms(statistics.step_time_percentile(percent)) for percent in PERCENTILES}
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
        "avg_step_time_ms": _ms(rates.step_time_s),
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


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1e3
