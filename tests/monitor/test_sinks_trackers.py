"""Rows in TensorBoard and W&B, read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monitor_runs import GB, open_sinks, record
from profiler_wrapper.monitor.records import Session
from profiler_wrapper.monitor.sinks import Sink, Sinks, TensorBoard, Wandb
from programs import run_script, warned

TAGS = {
    "performance/tflops_per_gpu": 1.0,
    "performance/tflops_total": 2.0,
    "performance/samples_per_second": 2.0,
    "performance/tokens_per_second": 10.0,
    "memory/current_gb": 1.0,
    "memory/peak_gb": 2.0,
    "perf/mfu": 0.5,
    "perf/mfu_percent": 50.0,
    "perf/step_time": 1.0,
    "perf/steps_per_second": 1.0,
    "perf/tokens_per_second": 10.0,
    "perf/samples_per_second": 2.0,
    "train/loss": 3.0,
}


def write_steps(sinks: Sinks, last: int = 4) -> None:
    for step in range(1, last + 1):
        sinks.write(record(step, step_time_s=1.0, world_size=2, loss=3.0, memory_bytes=GB))


def test_the_tags_of_both_pages_are_in_the_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(tmp_path / "logs", interval=2, perf_log_format="json", tensorboard_dir=str(tmp_path / "tb"))
    write_steps(sinks)
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == TAGS.keys()
    for tag, value in TAGS.items():
        assert [(event.step, event.value) for event in events.Scalars(tag)] == [(2, value), (4, value)]


@pytest.mark.parametrize(("make", "module"), [(lambda: TensorBoard("tb"), "torch.utils.tensorboard"), (Wandb, "wandb")])
def test_what_is_not_installed_is_one_warning_with_what_to_do(
    make: Callable[[], Sink], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    sink = make()

    def run() -> None:
        sinks = Sinks([sink], Session(log_interval=1))
        write_steps(sinks)
        sinks.close()

    (message,) = warned(run)
    assert f"pip install {sink.name}" in message


def test_what_the_user_logged_of_later_steps_is_not_gone_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B refuses a step before the one that its run has come to: the numbers then go with that one."""
    logged: list[dict[str, Any]] = []
    run = SimpleNamespace(step=3, log=lambda values, **how: logged.append(how))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    sinks = Sinks([Wandb()], Session(log_interval=1))
    write_steps(sinks)
    sinks.close()
    assert logged == [{"commit": False}, {"commit": False}, {"step": 3}, {"step": 4}]


# One process for all: W&B takes seconds to start its service.
WANDB = """
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

directory = Path(sys.argv[1])
os.environ.update(WANDB_SILENT="true", WANDB_MODE="offline", WANDB_DIR=str(directory))
import wandb

from monitor_runs import open_sinks, record


def rows(case, after_step=lambda step: None):
    sinks = open_sinks(directory / "logs" / case, interval=2, perf_log_format="json", wandb=True)
    for step in range(1, 5):
        sinks.write(record(step, step_time_s=1.0, world_size=2, loss=3.0))
        after_step(step)
    sinks.close()


def begin(case):
    return wandb.init(project="test", dir=directory, id=case)


run = begin("same-steps")
rows("same-steps", lambda step: run.log({"mine": step}, step=step))
assert wandb.run is run, "it is the user's to finish"
run.log({"mine": 5}, step=5)
run.finish()

run = begin("own-count")
for step in range(20):
    run.log({"mine": step})  # its own count is beyond the loop's
rows("own-count")
run.log({"mine": 20})
run.finish()

assert wandb.run is None
rows("none-active")
assert wandb.run is None
"""


@pytest.fixture(scope="module")
def wandb_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What each offline run of the program keeps for its upload, by its id; by "" of the run that is ours."""
    pytest.importorskip("wandb")
    directory = tmp_path_factory.mktemp("wandb")
    run_script(WANDB, directory)
    files = {path.stem.removeprefix("run-"): path.read_bytes() for path in directory.glob("**/offline-run-*/*.wandb")}
    (ours,) = files.keys() - {"same-steps", "own-count"}
    return {**files, "": files[ours]}


@pytest.mark.full
def test_rows_go_to_the_active_run_of_wandb_and_take_nothing_from_it(wandb_runs: dict[str, bytes]) -> None:
    content = wandb_runs["same-steps"]
    assert all(content.count(tag.encode()) >= 2 for tag in TAGS)  # two rows
    assert content.count(b"mine") >= 5


@pytest.mark.full
def test_a_user_who_logs_no_steps_or_fewer_to_wandb_loses_nothing(wandb_runs: dict[str, bytes]) -> None:
    content = wandb_runs["own-count"]
    assert all(tag.encode() in content for tag in TAGS)
    assert content.count(b"mine") >= 21


@pytest.mark.full
def test_without_an_active_run_one_is_made_and_finished(wandb_runs: dict[str, bytes]) -> None:
    assert all(wandb_runs[""].count(tag.encode()) >= 2 for tag in TAGS)
