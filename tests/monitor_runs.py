"""Steps and sinks for tests of the training monitor's logs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.logs import sinks_of
from profiler_wrapper.monitor.records import Session, StepRecord
from profiler_wrapper.monitor.sinks import Sinks

START = datetime(2024, 1, 29, 10, 30, 0).timestamp()
GB = 1 << 30

# As it stands in FlagScale's documentation.
EXAMPLE = (Path(__file__).parent / "data" / "flagscale_example.log").read_text(encoding="utf-8")


def record(step: int, **known: Any) -> StepRecord:
    """A step that took a second more than the one before, at 10 tokens and 2 TFLOP."""
    usual: dict[str, Any] = {
        "timestamp": START + step,
        "step_time_s": float(step),
        "tokens": 10,
        "samples": 2,
        "model_flops": 2e12,
        "model_time_at_peak_s": 0.5,
        "memory_bytes": GB,
        "peak_memory_bytes": 2 * GB,
    }
    return StepRecord(step=step, **{**usual, **known})


def open_sinks(directory: Path, *, interval: int = 10, world_size: int = 1, **options: Any) -> Sinks:
    """The files that a monitor writes into `directory`."""
    training_log = options.pop("training_log", None)
    session = Session(start_time=START, log_dir=directory, log_interval=interval, world_size=world_size)
    sinks = Sinks(sinks_of(MonitorConfig(**options), training_log=training_log), session)
    for worker in sinks._workers:
        worker._wait_s *= 100  # the machine may be busy
        worker.is_done(60)  # its thread has opened its file: what is opened next comes second
    return sinks


def write_run(directory: Path, records: list[StepRecord], **options: Any) -> None:
    """One whole run."""
    sinks = open_sinks(directory, **options)
    for one in records:
        sinks.write(one)
    sinks.close()


def only(directory: Path, pattern: str) -> Path:
    """The one file of that name."""
    (path,) = directory.glob(pattern)
    return path


def json_lines(path: Path) -> list[dict[str, Any]]:
    """As a strict parser reads them: no NaN."""
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def strict_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(), parse_constant=_refuse)
    assert isinstance(content, dict)
    return content


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
