"""For Lightning's Trainer, under either name of the package: `lightning` or `pytorch_lightning`.

    trainer = Trainer(..., callbacks=[ProfilerCallback(steps="20-22"), MonitorCallback("outputs")])
    trainer = Trainer(..., profiler=LayerProfiler())

Nothing of it can end a training: a failure of ours is one warning.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from profiler_wrapper.integrations.common import (
    Collector,
    MonitoredTraining,
    Outlets,
    ProfiledTraining,
    counts,
    guarded,
    tagged_for_trainer,
)
from profiler_wrapper.monitor.batches import BatchSize, size_of
from profiler_wrapper.monitor.records import Row

if TYPE_CHECKING:

    class Callback:
        """Stands for that of Lightning, so that types are checked alike with and without it."""

    class Profiler:
        """As `Callback`."""

else:
    try:
        from lightning.pytorch.callbacks import Callback
        from lightning.pytorch.profilers import Profiler
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
            from pytorch_lightning.profilers import Profiler
        except ImportError as error:
            raise ImportError(
                "profiler_wrapper.integrations.lightning needs Lightning: pip install lightning"
            ) from error


# What products are computed in where the parameters are of another type, by Lightning's `precision`.
_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


class ProfilerCallback(ProfiledTraining, Callback):
    """Profiles some steps of `trainer.fit(model)`.

    `options` are those of `ProfilerWrapper`: `steps="20-22"`, `output_dir=`, ... What is wrong raises WrongUse here;
    nothing is raised while training.
    """

    def rest(self) -> None:
        super().rest()
        self._global_step = 0

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        self._enter(pl_module)

    @guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, self._global_step = self._global_step, trainer.global_step
        if self._global_step != before:  # an optimizer's step has ended
            self._step()

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)


class LayerProfiler(ProfiledTraining, Profiler):
    """What `Trainer(profiler=...)` takes: a profile by layer from the first training batch on.

    The roots are the modules that the LightningModule calls, by their classes; the optimizer's steps are the steps.

    `options` are those of `ProfilerWrapper`: `steps="20-22"`, `output_dir=`, ... What is wrong raises WrongUse here;
    nothing is raised while training.
    """

    @guarded
    def start(self, action_name: str) -> None:
        """An action of Lightning's begins."""
        if action_name == "run_training_batch" and not self._inside:
            self._enter(None)

    def stop(self, action_name: str) -> None:
        """An action of Lightning's has ended."""

    @guarded
    def teardown(self, stage: str | None = None) -> None:
        """The training has ended."""
        self._leave()


class MonitorCallback(MonitoredTraining, Callback):
    """A `TrainingMonitor` beside `trainer.fit(model)`: files, and all loggers of the Trainer.

    A step lasts from the end of the one before to the end of the batch that the optimizer steps in, other batches and
    waiting for data included; validation and saving are left out, and a step has no time where they come between its
    batches. Samples and tokens are those of the batches, see `monitor.steps.size_of`. The loggers get the monitor's
    tags, and beside them Lightning's own names (`device/mfu`, `items_per_sec`, ...; items are tokens).

    Args:
        output_dir: where files go; None: the Trainer's `default_root_dir`.
        config: as `TrainingMonitor` takes it; None: rows are as far apart as the Trainer's `log_every_n_steps`.
        options: others of `TrainingMonitor`: `peaks="bfloat16=989"`, `flops_profile_freq=500`, `model_config=`, ...
            What is wrong raises WrongUse or TypeError here, and nothing is raised while training.
    """

    def rest(self) -> None:
        super().rest()
        self._loggers = Outlets()
        self._rows = Collector()
        self._global_step = 0
        self._batches: list[BatchSize] = []
        self._losses: list[torch.Tensor] = []
        self._in_step = False

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._close(trainer)
        self._rows, self._loggers = Collector(), Outlets()
        self._global_step = trainer.global_step
        self._start(
            trainer.default_root_dir,
            interval=trainer.log_every_n_steps,
            instead_of_wandb="WandbLogger" in {cls.__name__ for one in trainer.loggers for cls in type(one).__mro__},
            more_sinks=[self._rows],
            model=pl_module,
            model_config=_config_in(pl_module),
            dtype=_AUTOCAST.get(str(trainer.precision)),
            device_mesh=_device_mesh(trainer),
        )

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._batches:
            self._begin()

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._in_step:  # something was saved since
            self._begin()

    @guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    @guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        self._batches.append(size_of(batch))
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        before, self._global_step = self._global_step, trainer.global_step
        if self._global_step == before:
            return
        loss = None
        if self._losses:  # of each batch of the step; Lightning has divided them by how many it accumulates
            mean = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).mean()
            loss = mean * trainer.accumulate_grad_batches if pl_module.automatic_optimization else mean
        # As Lightning's loggers count them: one for all optimizers together.
        steps = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step - 1)
        self.monitor.end_step(
            step=int(steps) + 1,
            epoch=trainer.current_epoch,
            loss=loss,
            learning_rate=self._learning_rate,
            **counts(self._batches),
        )
        self._log_rows(trainer)
        self._begin()

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._interrupted()

    @guarded
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._interrupted()

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(trainer)

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(trainer)

    def _begin(self) -> None:
        if self.monitor is not None:
            self._batches, self._losses = [], []
            self._in_step = True
            self.monitor.start_step()

    def _interrupted(self) -> None:
        """What Lightning does now is no part of a step; where it lies between the batches of one, that has no time."""
        if self.monitor is None:
            return
        if self._batches:
            self.monitor.forget_time()
        else:
            self._in_step = False
            self.monitor.forget_step()

    def _log_rows(self, trainer: Any) -> None:
        for row in self._rows.take():
            metrics = {**tagged_for_trainer(row), **dict(_by_lightnings_names(row))}
            step = row.record.step - 1  # Lightning counts the steps before
            for number, logger in enumerate(trainer.loggers):
                name = f"the Trainer's logger {number} ({type(logger).__name__})"
                self._loggers.send(name, functools.partial(logger.log_metrics, metrics, step=step))

    def _close(self, trainer: Any) -> None:
        self.abandon()
        self._log_rows(trainer)

    def abandon(self) -> None:
        monitor, self.monitor, self._in_step = self.monitor, None, False
        if monitor is not None:
            monitor.close()


def _by_lightnings_names(row: Row) -> Iterator[tuple[str, float]]:
    """What is known of a row under the names of Lightning's `ThroughputMonitor`: of all ranks, and of one device."""
    of_all = {
        "batches_per_sec": 1 / row.step_time_s if row.step_time_s else None,
        "samples_per_sec": row.samples_per_s,
        "items_per_sec": row.tokens_per_s,
        "flops_per_sec": None if row.tflops_total is None else row.tflops_total * 1e12,
    }
    for name, rate in of_all.items():
        if rate is not None:
            yield name, rate
            yield f"device/{name}", rate / row.record.world_size
    if row.mfu is not None:
        yield "device/mfu", row.mfu


def _config_in(pl_module: Any) -> Any:
    """The Hugging Face config of the one model in a LightningModule that has one; None: there is no such model."""
    if getattr(pl_module, "config", None) is not None:
        return None  # the monitor sees it itself
    configs = [getattr(child, "config", None) for child in pl_module.children()]
    found = [config for config in configs if getattr(config, "model_type", None)]
    return found[0] if len(found) == 1 else None


def _device_mesh(trainer: Any) -> Any:
    try:
        return getattr(trainer.strategy, "device_mesh", None)
    except RuntimeError:  # a strategy that makes none
        return None
