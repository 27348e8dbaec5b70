"""`perf_steps_<time>.jsonl`, a line for each step as it ends, and at the end `perf_summary_<time>.json`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from threading import Thread

from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.live.json_lines import session_line, step_line
from profiler_wrapper.live.log_files import LineFile, LogFiles
from profiler_wrapper.live.records import StepRecord
from profiler_wrapper.live.rows import Row
from profiler_wrapper.live.session import Session
from profiler_wrapper.live.sinks import Sink
from profiler_wrapper.live.statistics import RunStatistics
from profiler_wrapper.live.summary import Rows, rebuild_summary, unfinished, write_summary
from profiler_wrapper.recording.monitor_files import log_file

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
