"""For the Hugging Face Trainer: a profile of a few steps, and the monitor beside all of them.

    with ProfilerWrapper(trainer.model):        # the profile, without a callback
        trainer.train()

    trainer = Trainer(..., callbacks=[MonitorCallback("outputs")])
    trainer = Trainer(..., callbacks=[ProfilerCallback(steps="20-22")])

Nothing of it can end a training: a failure of ours is one warning.
"""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from profiler_wrapper.integrations.common import (
    MonitoredTraining,
    ProfiledTraining,
    counts,
    guarded,
    tagged_for_trainer,
)
from profiler_wrapper.monitor.batches import BatchCounter
from profiler_wrapper.monitor.records import Row
from profiler_wrapper.monitor.sinks import Sink

if TYPE_CHECKING:

    class TrainerCallback:
        """Stands for that of Transformers, so that types are checked alike with and without it."""

else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(
            "profiler_wrapper.integrations.transformers needs Transformers: pip install 'transformers[torch]'"
        ) from error


class ProfilerCallback(ProfiledTraining, TrainerCallback):
    """Profiles some steps of `trainer.train()`, as `with ProfilerWrapper(trainer.model): trainer.train()` does.

    `options` are those of `ProfilerWrapper`: `steps="20-22"`, `output_dir=`, ... What is wrong raises WrongUse here;
    nothing is raised while training.
    """

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._enter(model)

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._step()

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._leave()


class MonitorCallback(MonitoredTraining, TrainerCallback):
    """A `TrainingMonitor` beside `trainer.train()`: files, and whatever of TensorBoard and W&B the Trainer reports to.

    A step lasts from the end of the one before to the end of its optimizer step, micro-batches, waiting for data
    and, where the Trainer logs, reading the loss included; evaluating and saving are left out. Samples and tokens are
    counted where the model is called, by its attention mask if it gets one. W&B gets the rows in the Trainer's own
    run, TensorBoard in `perf_monitor` beside the Trainer's events.

    Args:
        output_dir: where files go; None: the Trainer's `output_dir`.
        config: as `TrainingMonitor` takes it; None: rows are as far apart as the Trainer's `logging_steps`.
        add_to_logs: put MFU, TFLOPS, tokens and samples a second of the last step into the logs that the Trainer
            prints, and that callbacks after this one get.
        options: others of `TrainingMonitor`: `peaks="bfloat16=989"`, `flops_profile_freq=500`, ...
            What is wrong raises WrongUse or TypeError here, and nothing is raised while training.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        config: Any = None,
        *,
        add_to_logs: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(output_dir, config, **options)
        self._add_to_logs = add_to_logs

    def rest(self) -> None:
        super().rest()
        self._batches: BatchCounter | None = None
        self._context_parallel = 1
        self._ended: int | None = None  # the step whose loss is about to be logged
        self._between_batches = False  # of one step

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.abandon()  # a training before this one ended by an exception
        reports_to = args.report_to or ()
        run = sys.modules["wandb"].run if "wandb" in reports_to and "wandb" in sys.modules else None
        sizes = _parallel_sizes(args, model)
        self._context_parallel = sizes["context_parallel"] or 1
        self._start(
            args.output_dir,
            interval=int(state.logging_steps or 10),
            tensorboard_dir=_tensorboard_dir(args) if "tensorboard" in reports_to else None,
            instead_of_wandb=run is not None,
            more_sinks=[] if run is None else [_RunOfTrainer(run)],
            model=model,
            dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else None,
            **sizes,
        )
        self._batches = BatchCounter(model)
        self._batches.start()

    @guarded
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begin()

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._ended is not None:  # somebody kept the Trainer from logging it
            self._interrupted(args, state)

    @guarded
    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._between_batches = True

    @guarded
    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if optimizer is not None:
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_log:
            self._ended = state.global_step
        else:
            self._end(args, state, state.global_step)

    @guarded
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        logs = logs if isinstance(logs, dict) else {}
        ended, self._ended = self._ended, None
        if ended is not None:
            self._end(args, state, ended, loss=logs.get("loss"), grad_norm=logs.get("grad_norm"))
        if self._add_to_logs and "loss" in logs and self.monitor is not None and self.monitor.last is not None:
            logs.update(_rates(self.monitor.last))

    @guarded
    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._interrupted(args, state)

    on_save = on_evaluate

    @guarded
    def on_predict(self, args: Any, state: Any, control: Any, *metrics: Any, **others: Any) -> None:
        self._interrupted(args, state)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._interrupted(args, state)
        self.abandon()

    def _begin(self) -> None:
        """A step begins; what was begun before is none."""
        if self.monitor is not None and self._batches is not None:
            self._batches.take()
            self._between_batches = False
            self.monitor.start_step()

    def _end(self, args: Any, state: Any, step: int, **numbers: Any) -> None:
        if self.monitor is None or self._batches is None:
            return
        sizes = self._batches.take()
        batch = counts(sizes, context_parallel=self._context_parallel)
        if not sizes:  # the loss is computed without a call of the model as a whole
            batch["samples"] = args.train_batch_size * args.gradient_accumulation_steps
        epoch = max(0, math.ceil(state.epoch or 0) - 1)  # the Trainer's is that of the step's end
        self.monitor.end_step(step=step, epoch=epoch, learning_rate=self._learning_rate, **batch, **numbers)
        self._begin()

    def _interrupted(self, args: Any, state: Any) -> None:
        """The Trainer did something else since the last step, which is no part of the next.

        A step in the midst of which a callback of the user evaluates has no time.
        """
        if self._between_batches and self.monitor is not None:
            self.monitor.forget_time()
            return
        ended, self._ended = self._ended, None
        if ended is not None:
            self._end(args, state, ended)
        self._begin()

    def abandon(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.stop()
        if self.monitor is not None:
            self.monitor.close()
        self._ended = self._learning_rate = None


class _RunOfTrainer(Sink):
    """Rows in the run of W&B that the Trainer has opened, over its step. What it logs itself is left to it."""

    name = "wandb"

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_row(self, row: Row) -> None:
        self._run.log({**tagged_for_trainer(row), "train/global_step": row.record.step})


def _rates(record: Any) -> dict[str, float]:
    """Rates of the last step; none of a profiled one, whose time is not that of a step alone."""
    found = {"tokens_per_second": record.tokens_per_s, "samples_per_second": record.samples_per_s}
    rates = {"mfu": record.mfu, "tflops_per_gpu": record.tflops_per_gpu, **found}
    return {name: value for name, value in rates.items() if value is not None and not record.profiled}


def _tensorboard_dir(args: Any) -> str:
    """A directory of our own below that of the Trainer's runs: TensorBoard reads one event file in each."""
    runs = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    return os.path.join(os.path.expanduser(runs or os.path.join(args.output_dir, "runs")), "perf_monitor")


def _parallel_sizes(args: Any, model: Any) -> dict[str, int | None]:
    """How the ranks share batches, as far as the Trainer says; None: it does not."""
    config = getattr(args, "parallelism_config", None)
    tensor = getattr(config, "tp_size", None) or getattr(model, "tp_size", None)
    context = (getattr(config, "cp_size", None) or 1) * (getattr(config, "sp_size", None) or 1)
    return {"tensor_parallel": tensor or None, "context_parallel": context if context > 1 else None}
