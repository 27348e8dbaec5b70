"""FlagScale's hooks under their names, in a loop as Megatron's."""

from __future__ import annotations

import argparse
import json
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper import compat
from profiler_wrapper.config_flops.model_flops import model_flops
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.monitor.monitor import TrainingMonitor

ROUNDED = 1e-3  # a step of some microseconds is logged in whole nanoseconds


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    compat.perf_monitor_end_training()


def arguments(tmp_path: Path, *given: str, **changes: Any) -> argparse.Namespace:
    """Those of a small GPT in Megatron's names, parsed with the monitor's options."""
    parser = argparse.ArgumentParser()
    compat.add_perf_monitor_arguments(parser)
    args = parser.parse_args(["--enable-perf-monitor", "--perf-log-dir", str(tmp_path / "logs"), *given])
    megatron = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 256,
        "padded_vocab_size": 128,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "micro_batch_size": 2,
        "world_size": 1,
        "rank": 0,
        "swiglu": False,
        "bf16": True,
    }
    vars(args).update({**megatron, **changes})
    return args


def run(args: Any, iterations: int, **writers: Any) -> None:
    compat.initialize_perf_monitor(args)
    for iteration in range(1, iterations + 1):
        compat.perf_monitor_start_iteration(iteration)
        compat.perf_monitor_end_iteration(iteration, **writers)
    compat.perf_monitor_end_training(**writers)


def summary_of(tmp_path: Path) -> Any:
    (path,) = (tmp_path / "logs").glob("perf_summary_*.json")
    return json.loads(path.read_text())


class Writer:
    """Stands for a SummaryWriter and for a run of W&B."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.rows: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        self.scalars.setdefault(tag, {})[iteration] = value

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.rows[iteration] = values


def test_a_loop_with_the_hooks_writes_the_files_and_to_the_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER_PEAK_TFLOPS", "bfloat16=1")
    args = arguments(tmp_path, "--perf-log-interval", "2", num_micro_batches=3)
    tensorboard, wandb = Writer(), Writer()
    run(args, 5, writer=tensorboard, wandb_writer=wandb)
    summary = summary_of(tmp_path)
    assert summary["session_info"]["total_iterations"] == 5
    lines = summary["iteration_logs"]
    flops = float(model_flops(args, 6, 32))
    for line in lines:
        seconds = line["step_time_ms"] / 1e3
        assert line["samples_per_sec"] == pytest.approx(6 / seconds, rel=ROUNDED)
        assert line["tokens_per_sec"] == pytest.approx(6 * 32 / seconds, rel=ROUNDED)
        assert line["TFLOPS_total"] == pytest.approx(flops / 1e12 / seconds, rel=ROUNDED)
        assert line["mfu"] == pytest.approx(flops / 1e12 / seconds, rel=ROUNDED)
    assert list((tmp_path / "logs").glob("perf_metrics_*.log"))
    for tag in ("performance/tflops_per_gpu", "performance/tokens_per_second", "memory/peak_gb", "perf/mfu"):
        assert sorted(tensorboard.scalars[tag]) == [2, 4, 5]
        assert [row[tag] for row in wandb.rows.values()] == list(tensorboard.scalars[tag].values())


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"global_batch_size": 24, "world_size": 8, "data_parallel_size": 8}, 24),
        ({"num_micro_batches": 3, "world_size": 8, "data_parallel_size": 4, "tensor_model_parallel_size": 2}, 24),
        ({"num_micro_batches": 3, "world_size": 8, "pipeline_model_parallel_size": 2}, 24),
        ({}, 2),
    ],
)
def test_the_batch_is_that_of_the_job(tmp_path: Path, changes: dict[str, int], samples: int) -> None:
    run(arguments(tmp_path, "--perf-log-interval", "1", **changes), 2)
    for line in summary_of(tmp_path)["iteration_logs"]:
        seconds = line["step_time_ms"] / 1e3
        world_size = changes.get("world_size", 1)
        assert line["samples_per_sec"] == pytest.approx(samples / seconds, rel=ROUNDED)
        assert line["tokens_per_sec"] == pytest.approx(samples * 32 / seconds, rel=ROUNDED)
        flops = float(model_flops(arguments(tmp_path), samples, 32))
        assert line["TFLOPS_total"] == pytest.approx(flops / 1e12 / seconds, rel=ROUNDED)
        assert line["TFLOPS_per_GPU"] == pytest.approx(flops / 1e12 / seconds / world_size, rel=ROUNDED)


def test_a_batch_that_ramps_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((4, 8))
    calculator = types.SimpleNamespace(get_current_global_batch_size=lambda: next(sizes))
    monkeypatch.setitem(sys.modules, "megatron.core.num_microbatches_calculator", calculator)
    run(arguments(tmp_path, "--perf-log-interval", "1", global_batch_size=64), 2)
    lines = summary_of(tmp_path)["iteration_logs"]
    assert [line["samples"] for line in lines] == [4, 8]


def test_without_the_option_nothing_happens(tmp_path: Path) -> None:
    args = arguments(tmp_path, enable_perf_monitor=False)
    assert compat.initialize_perf_monitor(args) is None
    run(args, 2)
    assert compat.get_perf_monitor() is None
    assert not (tmp_path / "logs").exists()


def test_the_monitor_can_be_had_until_the_training_ends(tmp_path: Path) -> None:
    made = compat.initialize_perf_monitor(arguments(tmp_path))
    assert made is not None and compat.get_perf_monitor() is made
    assert made.monitor.active and made.log_interval == 10
    compat.perf_monitor_end_training()
    assert compat.get_perf_monitor() is None and not made.monitor.active


def test_the_callback_by_itself(tmp_path: Path) -> None:
    callback = compat.FLOPSMeasurementCallback(arguments(tmp_path), log_interval=1)
    callback.on_train_batch_start(1)
    callback.on_train_batch_end(1)
    callback.on_train_end()
    assert summary_of(tmp_path)["session_info"]["total_iterations"] == 1


class Broken(Writer):
    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        raise OSError("disk")

    def log(self, values: dict[str, float], iteration: int) -> None:
        raise OSError("disk")


def warned_of_disk(tmp_path: Path, **writers: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(arguments(tmp_path, "--perf-log-interval", "1"), 4, **writers)
    return [str(one.message) for one in said if one.category is ProfilerWrapperWarning and "disk" in str(one.message)]


@pytest.mark.parametrize("broken", ["writer", "wandb_writer"])
def test_a_writer_that_fails_is_dropped_and_all_else_goes_on(tmp_path: Path, broken: str) -> None:
    writers = {"writer": Writer(), "wandb_writer": Writer(), broken: Broken()}
    (said,) = warned_of_disk(tmp_path, **writers)
    assert said.startswith(f"{broken} gets no more")
    assert summary_of(tmp_path)["session_info"]["total_iterations"] == 4
    if broken == "writer":
        assert sorted(writers["wandb_writer"].rows) == [1, 2, 3, 4]
    else:
        assert sorted(writers["writer"].scalars["perf/step_time"]) == [1, 2, 3, 4]


def test_a_failure_inside_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **others: Any) -> None:
        raise OSError("disk")

    monkeypatch.setattr(TrainingMonitor, "end_step", fails)
    (said,) = warned_of_disk(tmp_path)
    assert "FLOPSMeasurementCallback is off" in said


def test_a_model_provider_makes_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.training", types.SimpleNamespace(get_args=lambda: args))

    @compat.add_perf_monitor_to_model_provider
    def provider(pre_process: bool = True, post_process: bool = True) -> tuple[bool, bool]:
        return pre_process, post_process

    assert provider(False) == (False, True)
    made = compat.get_perf_monitor()
    assert made is not None and isinstance(made.monitor, TrainingMonitor)


def test_a_forward_step_stays_what_it_is() -> None:
    def forward_step(data_iterator: object, model: object) -> object:
        return model

    wrapped = compat.wrap_forward_step_with_perf_monitor(forward_step)
    assert wrapped(None, 3) == 3
