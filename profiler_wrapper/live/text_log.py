"""The text logs, in the layout of FlagScale's performance monitor."""

from __future__ import annotations

import time
from collections import deque

from profiler_wrapper.live.log_files import LineFile, LogFiles
from profiler_wrapper.live.rows import Row
from profiler_wrapper.live.session import Session
from profiler_wrapper.live.sinks import Sink
from profiler_wrapper.live.statistics import RunStatistics
from profiler_wrapper.recording.monitor_files import REALTIME_FILE, is_locked

GB = 1 << 30
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
