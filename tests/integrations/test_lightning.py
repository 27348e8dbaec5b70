"""The callbacks of Lightning in real trainings on a CPU, under both names of the package."""

from __future__ import annotations

import copy
import csv
import importlib
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.monitor.monitor import TrainingMonitor
from trainers import (
    FLOPS_OF_SEQUENCE,
    REAL_TOKENS,
    Sequences,
    equal,
    logged_steps,
    scalars,
    wandb_rows,
    weights,
)

pytest.importorskip("lightning")
from profiler_wrapper.integrations.lightning import LayerProfiler, MonitorCallback, ProfilerCallback
from profiling import blocks_with_time

pytestmark = pytest.mark.full

PEAK_TFLOPS = 0.5
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def lightning(package: str = PACKAGES[0]) -> Any:
    return pytest.importorskip(package)


def loggers(package: str = PACKAGES[0]) -> Any:
    return importlib.import_module(f"{package}.loggers")


def module(package: str = PACKAGES[0], model: str = "llama", *, manual: bool = False) -> Any:
    class Model(lightning(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = models.build(model).model
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("train/loss", loss)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Model()


def trainer(tmp_path: Path, *callbacks: Any, package: str = PACKAGES[0], **options: Any) -> Any:
    """A Trainer of 6 steps, that logs every 2 and writes no checkpoint."""
    options = {
        "max_steps": 6,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 2,
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
        **options,
    }
    return lightning(package).Trainer(**options)


def data(length: int = 64, batch: int = 2) -> Any:
    return torch.utils.data.DataLoader(Sequences(length), batch_size=batch)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".*(num_workers|LeafSpec|logging interval|val_dataloader).*")


# --- the monitor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_throughput_mfu_and_memory_in_files_and_loggers(tmp_path: Path, package: str) -> None:
    pytest.importorskip("tensorboard")
    callback = MonitorCallback(peaks=PEAK_TFLOPS)
    made = loggers(package)
    two = [made.TensorBoardLogger(tmp_path, name="tb"), made.CSVLogger(tmp_path, name="csv")]
    trainer(tmp_path, callback, package=package, logger=two).fit(module(package), data())
    assert not callback.failed
    (steps,) = logged_steps(tmp_path)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        seconds = step["step_time_ms"] / 1e3
        assert (step["samples"], step["tokens"]) == (2, 2 * REAL_TOKENS)
        assert step["mfu"] == pytest.approx(2 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds, rel=1e-6)
        assert step["memory_GB"] > 0 and step["learning_rate"] == pytest.approx(1e-3)
    tags = scalars(tmp_path / "tb")
    seconds = sum(step["step_time_ms"] for step in steps[2:4]) / 1e3
    expected = {
        "performance/tokens_per_second": 4 * REAL_TOKENS / seconds,
        "performance/samples_per_second": 4 / seconds,
        "perf/mfu": 4 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds,
        "device/mfu": 4 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds,
        "items_per_sec": 4 * REAL_TOKENS / seconds,
        "device/flops_per_sec": 4 * FLOPS_OF_SEQUENCE / seconds,
        "batches_per_sec": 2 / seconds,
        "memory/peak_gb": steps[3]["peak_memory_GB"],
    }
    for tag, value in expected.items():
        assert sorted(tags[tag]) == [1, 3, 5] == sorted(tags["train/loss"])  # as Lightning numbers its own
        assert tags[tag][3] == pytest.approx(value, rel=1e-4)
    with next((tmp_path / "csv").rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["device/mfu"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5]


def test_the_users_run_of_wandb_is_the_only_one(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(dir=tmp_path, mode="offline", project="x", settings=wandb.Settings(silent=True))
    logger = loggers().WandbLogger(experiment=run)
    try:
        made = trainer(tmp_path, MonitorCallback(peaks=PEAK_TFLOPS, config={"wandb": True}), logger=logger)
        made.fit(module(), data(40))
    finally:
        wandb.finish()
    (rows,) = wandb_rows(tmp_path)
    ours = [row for row in rows if "device/mfu" in row]
    assert [row["trainer/global_step"] for row in ours] == [5]  # a config was given: every 10 steps, and the rest
    (steps,) = logged_steps(tmp_path)
    seconds = sum(step["step_time_ms"] for step in steps) / 1e3
    assert ours[0]["perf/mfu"] == pytest.approx(12 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds, rel=1e-4)


@pytest.mark.parametrize("manual", [False, True])
def test_the_loss_is_the_mean_over_the_step(tmp_path: Path, manual: bool) -> None:
    model = module(manual=manual)
    together = 1 if manual else 3
    options = {} if manual else {"accumulate_grad_batches": together}
    trainer(tmp_path, MonitorCallback(), **options).fit(model, data())
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(n, 2 * together) for n in range(1, 7)]
    assert all(step["model_flops"] == 2 * together * FLOPS_OF_SEQUENCE for step in steps)
    parts = [model.losses[at : at + together] for at in range(0, 6 * together, together)]
    assert [step["loss"] for step in steps] == pytest.approx([sum(part) / together for part in parts])


def test_validation_and_saving_are_no_steps_and_no_part_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("start_step", "end_step", "forget_step"):
        original = getattr(TrainingMonitor, name)

        def told(self: Any, *args: Any, original: Any = original, name: str = name, **others: Any) -> None:
            events.append(name)
            original(self, *args, **others)

        monkeypatch.setattr(TrainingMonitor, name, told)
    base = lightning().Callback

    class Tells(base):  # type: ignore[misc,valid-type]
        def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
            if not trainer.sanity_checking:
                events.append("validate")

        def on_save_checkpoint(self, *args: Any) -> None:
            events.append("save")

    saving = lightning().callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=3)
    options = {"val_check_interval": 4, "enable_checkpointing": True}
    made = trainer(tmp_path, Tells(), MonitorCallback(), saving, **options)
    made.fit(module(), data(), data(4))
    made.validate(module(), data(4), verbose=False)
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(number, 2) for number in range(1, 7)]
    assert (events.count("validate"), events.count("save"), events.count("end_step")) == (2, 2, 6)
    for at, event in enumerate(events[:-1]):
        if event in ("validate", "save") and "end_step" in events[at:]:  # the next step begins after it
            assert events[at + 1 : at + 3] == ["forget_step", "start_step"]


def test_a_step_with_a_validation_between_its_batches_has_its_counts_and_no_time(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    trainer(tmp_path, MonitorCallback(), **options).fit(module(), data(), data(4))
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(number, 4) for number in range(1, 7)]
    assert all(step["model_flops"] == 4 * FLOPS_OF_SEQUENCE and step["loss"] for step in steps)
    timeless = [step for step in steps if step["step_time_ms"] is None]
    assert [step["iteration"] for step in timeless] == [2, 5]  # after batches 3 and 9; after 6 and 12 is between steps
    assert all(step["mfu"] is None and step["tokens_per_sec"] is None for step in timeless)


def test_the_parts_of_a_step_that_calls_the_model_in_the_module(tmp_path: Path) -> None:
    trainer(tmp_path, MonitorCallback(breakdown=True)).fit(module(), data())
    (steps,) = logged_steps(tmp_path)
    for step in steps:
        assert all(step["breakdown_ms"][part] > 0 for part in ("data", "forward", "backward", "optimizer"))


def test_a_logger_that_fails_is_dropped_and_all_else_goes_on(tmp_path: Path) -> None:
    class Fails(loggers().CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "perf/step_time" in metrics:
                raise OSError("full")

    two = [Fails(tmp_path, name="bad"), loggers().CSVLogger(tmp_path, name="good")]
    callback = MonitorCallback()
    with pytest.warns(ProfilerWrapperWarning, match=r"logger 0 \(Fails\) gets no more.*full") as said:
        trainer(tmp_path, callback, logger=two).fit(module(), data())
    assert len([one for one in said if "full" in str(one.message)]) == 1 and not callback.failed
    (steps,) = logged_steps(tmp_path)
    assert len(steps) == 6
    with next((tmp_path / "good").rglob("metrics.csv")).open() as file:
        assert len([row for row in csv.DictReader(file) if row["perf/step_time"]]) == 3


def test_callbacks_can_be_copied_meanwhile(tmp_path: Path) -> None:
    twins: list[Any] = []
    base = lightning().Callback

    class Copies(base):  # type: ignore[misc,valid-type]
        def on_train_batch_end(self, *args: Any) -> None:
            twins.append([copy.deepcopy(callback) for callback in callbacks])
            pickle.dumps(callbacks)

    options = {"output_dir": tmp_path / "profile", "files": ("result",), "enable_print_summary": False}
    callbacks = [MonitorCallback(), ProfilerCallback(**options)]
    trainer(tmp_path, *callbacks, Copies()).fit(module(), data())
    assert not any(callback.failed for callback in callbacks)
    monitor, profiler = twins[3]
    assert monitor.monitor is None and profiler.profiler is None
    trainer(tmp_path, monitor, profiler, max_steps=5).fit(module(), data())
    assert sorted(len(run) for run in logged_steps(tmp_path)) == [5, 6]
    assert profiler.result is not None and not monitor.failed and not profiler.failed


def test_several_epochs_with_a_smaller_last_batch_and_resuming(tmp_path: Path) -> None:
    callback = MonitorCallback()
    saving = lightning().callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=3)
    made = trainer(tmp_path, callback, saving, enable_checkpointing=True)
    made.fit(module(), data(5))
    again = trainer(tmp_path, callback, max_steps=8)
    again.fit(module(), data(5), ckpt_path=next((tmp_path / "saved").glob("*step=6.ckpt")))
    first, second = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in first] == [(1, 2), (2, 2), (3, 1), (4, 2), (5, 2), (6, 1)]
    assert [(step["iteration"], step["epoch"]) for step in second] == [(7, 2), (8, 2)]


def test_the_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(5)
        model = module(model="gpt2")  # drops out
        trainer(tmp_path, *callbacks, accumulate_grad_batches=2).fit(model, data())
        return weights(model), model.losses

    plain = trained()
    profiler = ProfilerCallback(steps="3-4", output_dir=tmp_path, files=("result",), enable_print_summary=False)
    monitor = MonitorCallback(peaks=1.0, flops_profile_freq=6, breakdown=True)
    both = trained(monitor, profiler)
    assert both[1] == plain[1]
    assert equal(both[0], plain[0])
    assert not profiler.failed and not monitor.failed and profiler.result is not None


@pytest.mark.parametrize("method", ["__init__", "start_step", "end_step", "close"])
def test_a_failure_inside_is_one_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    callback = MonitorCallback()
    made = trainer(tmp_path, callback)

    broken = [True]

    def fails(*args: Any, **others: Any) -> None:
        if broken:
            raise RuntimeError("ours")

    monkeypatch.setattr(TrainingMonitor, method, fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.fit(module(), data())
    broken.clear()  # it is called once more when the process ends
    assert made.global_step == 6
    ours = [str(one.message) for one in said if one.category is ProfilerWrapperWarning]
    assert len([message for message in ours if "MonitorCallback is off" in message]) == 1


def test_the_users_exception_passes_and_the_log_is_whole(tmp_path: Path) -> None:
    base = lightning().Callback

    class Fails(base):  # type: ignore[misc,valid-type]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise ValueError("the user's")

    callback = MonitorCallback()
    profiler = ProfilerCallback(output_dir=tmp_path, files=("result",), enable_print_summary=False)
    with pytest.raises(ValueError, match="the user's"):
        trainer(tmp_path, profiler, callback, Fails()).fit(module(), data())
    assert callback.monitor is None and not callback.failed and not profiler.failed
    (steps,) = logged_steps(tmp_path)
    assert len(steps) == 3
    assert profiler.result is not None and not profiler.result.complete


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "profiler_wrapper.integrations.lightning")
    with pytest.raises(ImportError, match="pip install lightning"):
        import profiler_wrapper.integrations.lightning  # noqa: F401


# --- the profile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_the_callback_profiles_steps_and_not_batches(tmp_path: Path, package: str) -> None:
    callback = ProfilerCallback(output_dir=tmp_path, files=("result",), enable_print_summary=False)
    trainer(tmp_path, callback, package=package, accumulate_grad_batches=2).fit(module(package), data())
    result = callback.result
    assert result is not None and result.complete
    assert [step.step for step in result.steps if step.step is not None] == [2, 3, 4]
    assert blocks_with_time(result) == {"model.model.layers.0", "model.model.layers.1"}
    root = next(row for row in result.layers if row.layer == "model" and row.phase == "forward")
    assert root.calls == 3 * 2


def test_a_with_block_around_fit_has_the_layers(tmp_path: Path) -> None:
    model = module()
    with ProfilerWrapper(model, output_dir=tmp_path, files=("result",), enable_print_summary=False) as prof:
        trainer(tmp_path).fit(model, data())
    assert prof.result is not None
    assert blocks_with_time(prof.result) == {"model.model.layers.0", "model.model.layers.1"}
    assert len([step for step in prof.result.steps if step.step is not None]) == 3


@pytest.mark.parametrize("package", PACKAGES)
def test_the_trainers_profiler(tmp_path: Path, package: str) -> None:
    profiler = LayerProfiler(output_dir=tmp_path, files=("result",), enable_print_summary=False)
    made = trainer(tmp_path, package=package, profiler=profiler, accumulate_grad_batches=2)
    made.fit(module(package), data())
    assert not profiler.failed
    assert profiler.result is not None
    assert blocks_with_time(profiler.result) == {"model.layers.0", "model.layers.1"}
    assert [step.step for step in profiler.result.steps if step.step is not None] == [2, 3, 4]


def test_a_trainers_profiler_that_fails_lets_the_training_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = LayerProfiler(output_dir=tmp_path, files=("result",), enable_print_summary=False)

    def fails(self: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(ProfilerWrapper, "__enter__", fails)
    made = trainer(tmp_path, profiler=profiler)
    with pytest.warns(ProfilerWrapperWarning, match="LayerProfiler is off"):
        made.fit(module(), data())
    assert made.global_step == 6
