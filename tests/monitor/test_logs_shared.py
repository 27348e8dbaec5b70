"""Logs on a full disk, of many runs, and of two monitors in one directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from monitor_runs import only, open_sinks, record, strict_json, write_run
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.monitor.logs import TrainingLog
from profiler_wrapper.monitor.records import Session


class FullDisk:
    """A file that cannot grow over what it is when this is put around it, and is written in parts."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._most = os.fstat(file.fileno()).st_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        left = self._most - self._file.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data[: min(left, 7)]))


def test_on_a_full_disk_the_training_log_stays_what_it_was(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "training_log.json")
    log.open(Session(start_time=0.0, log_dir=tmp_path, log_interval=1))
    for step in (1, 2):
        log.write(record(step, epoch=0))
    log.flush()
    before = strict_json(tmp_path / "training_log.json")
    log._file._inside = FullDisk(log._file._inside)  # type: ignore[assignment]
    for step in (3, 4):
        log.write(record(step, epoch=1))
    with pytest.raises(OSError, match="No space"):
        log.flush()
    assert strict_json(tmp_path / "training_log.json") == before
    assert [entry["step"] for entry in before["step_logs"]] == [1, 2]


def test_of_training_logs_as_many_stay_as_of_the_other_files(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    for day in range(1, 6):
        (tmp_path / f"training_log_2024010{day}_000000.json").touch()
    for name in ("training_log_best.json", "training_log_20240101.json"):
        (tmp_path / name).touch()
    write_run(tmp_path, [record(10)], training_log=path, perf_max_log_files=3)
    assert sorted(file.name for file in tmp_path.glob("training_log*")) == [
        "training_log.json",
        "training_log_20240101.json",
        "training_log_20240104_000000.json",
        "training_log_20240105_000000.json",
        "training_log_best.json",
    ]


def test_a_training_log_that_is_still_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    first = open_sinks(tmp_path, training_log=path, perf_max_log_files=1)
    first.write(record(10))
    write_run(tmp_path, [record(10)], training_log=path, perf_max_log_files=1)
    assert only(tmp_path, "training_log_*.json")
    first.close()
    write_run(tmp_path, [record(10)], training_log=path, perf_max_log_files=1)
    assert not list(tmp_path.glob("training_log_*.json"))


def test_the_realtime_log_is_that_of_the_newest_monitor_alone(tmp_path: Path) -> None:
    first = open_sinks(tmp_path)
    first.write(record(10))
    second = open_sinks(tmp_path)
    second.write(record(20))
    with pytest.warns(ProfilerWrapperWarning, match="without realtime.*another monitor writes it"):
        first.write(record(30))
        first.close()
    second.write(record(40))
    second.close()
    rows = (tmp_path / "perf_realtime.log").read_text().splitlines()[5:]
    assert [row.split()[2] for row in rows] == ["20", "40"]
