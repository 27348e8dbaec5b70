"""`TrainingMonitor`: stands beside a training loop for weeks, and says of every step what it made of the machine."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.errors import Notices, WrongUse, in_a_line, shown
from profiler_wrapper.monitor.config import DEFAULT_LOG_DIR, MonitorConfig
from profiler_wrapper.monitor.records import RunStatistics, StepRecord
from profiler_wrapper.monitor.sinks import Sink
from profiler_wrapper.monitor.steps import MonitorArgs, StepWatch
from profiler_wrapper.timer.device_events import find_accelerator
from profiler_wrapper.timer.spans import weakly
from profiler_wrapper.timer.timer import harmless
from profiler_wrapper.trace.run_directory import given_directory

# --- A step of a loop as a block ---


class MonitoredStep:
    """One step of a loop as a block::

    with monitor.step(tokens=batch.numel()) as step:
        ...
        step.log(loss=loss)

    An exception passes through, and the step is none.
    """

    def __init__(self, monitor: TrainingMonitor, numbers: dict[str, Any]) -> None:
        self._monitor, self._numbers = monitor, numbers

    def log(self, **numbers: Any) -> None:
        """More of what `end_step` takes."""
        self._numbers.update(numbers)

    def __enter__(self) -> MonitoredStep:
        self._monitor.start_step(self._numbers.get("step"))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._monitor.end_step(**self._numbers)
        else:
            self._monitor.forget_step()


class TrainingMonitor:
    """Step time, FLOP/s, throughput, MFU, memory and, if asked for, the parts of every step of a training loop.

    Tell it of steps in one of three ways:

        monitor.start_step(); ...; monitor.end_step(tokens=n, loss=loss)
        with monitor.step(tokens=n): ...
        monitor.log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask)     # at the end of each

    With the last, a step lasts from the end of the one before. Nothing here waits for the device, but for torch's
    profiler at the end of a step whose FLOPs it measures: times are those of events that are read later, and so are
    numbers that are given as tensors on it. Steps under a torch profiler, this package's or another, are marked and
    left out of means. A failure of the monitor is one warning, after which it does nothing; errors of its arguments
    are raised when it is made.

    FLOPs are those measured, else those given, else those by the model's config. A measurement holds for the steps
    after it whose batch is alike, as calls of `model` tell where it is given, or not known; in one with more or fewer
    sequences of the same length FLOPs are in proportion to their number; for other lengths it does not hold. A step
    in which the model is evaluated is not measured. Where a number is not known it is `None`; a warning says why once.

    `PROFILER_WRAPPER=off` in the environment turns it off. A copy of a monitor is one that is off.

    Args:
        output_dir: where files go.
        config: a `MonitorConfig`, a mapping with its options (also below `system:` or `monitoring:`), the path of a
            YAML file, or parsed arguments.
        log_file: the JSON log of all steps and epochs, in `output_dir`; `None`: none.
        flops_profile_freq: every so many steps, and in the first, the FLOPs of the real step are measured with the
            profiler, which slows that step; it is marked and left out of means (so of 1 no means are left). 0: never.
            `None`: as in `config`; by default every 500 steps where nothing else tells the FLOPs.
        model: tells its config, the type of its numbers, and what forward is.
        model_config: for FLOPs by formula; by default `model`'s.
        batch_size: sequences of this rank's batch of one step, all micro-batches together. It is believed; one
            warning says where the first step's calls of `model` contradict it.
        seq_length: tokens of each; believed as well.
        flops_per_step: of forward and backward on this rank's batch.
        convention: of attention: "full", or "causal", which leaves out what a causal mask hides.
        peaks: as `find_peaks` takes them: 989, "bfloat16=989,float8=1979", a file of `peaks --measure`.
        dtype: of the model's matrix products, where it is not that of its parameters (autocast).
        counts: "rank": samples, tokens and FLOPs given are this rank's. "job": those of all ranks.
        world_size: ranks of the job; as the next six, where the process group and the environment don't tell.
        data_parallel: ranks with batches of their own.
        tensor_parallel: ranks that share the layers of a stage.
        pipeline_parallel: stages of the pipeline.
        context_parallel: ranks that share the tokens of a sequence.
        device_mesh: the `DeviceMesh` of the job.
        rank: of this process.
        log_rank: the one that writes; negative: counted from the last. The others only keep the numbers.
        sinks: in the place of those that `config` asks for.
        optimizer: its step is the optimizer's part of a step, and its learning rate the one that is logged.
        breakdown: measure data, forward, backward, optimizer and other.
        layers: write how long forward, backward and recompute of each block of `model`, and of what lies beside the
            blocks, take in each step, with the step's parts, as spans of every rank: see `LayerTimer`. Steps under a
            profiler are left out.
        device: "cpu", for a training on the CPU beside an accelerator.
        options: others of `MonitorConfig`, by name: `tensorboard_dir=`, `wandb=`, `perf_log_interval=` ...

    Raises:
        WrongUse: an argument has a value that means nothing.
        OSError: `config` names a file that cannot be read.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] = "outputs",
        config: Any = None,
        log_file: str | None = "training_log.json",
        flops_profile_freq: int | None = None,
        *,
        model: Any = None,
        model_config: Any = None,
        batch_size: int | None = None,
        seq_length: int | None = None,
        flops_per_step: float | None = None,
        convention: str | None = None,
        peaks: Any = None,
        dtype: Any = None,
        counts: Literal["rank", "job"] = "rank",
        world_size: int | None = None,
        data_parallel: int | None = None,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        context_parallel: int | None = None,
        device_mesh: Any = None,
        rank: int | None = None,
        log_rank: int | None = None,
        sinks: Sequence[Sink] | None = None,
        optimizer: Any = None,
        breakdown: bool | None = None,
        layers: bool = False,
        device: Any = None,
        **options: Any,
    ) -> None:
        self.config = MonitorConfig.of(config).with_options(
            flops_profile_freq=flops_profile_freq,
            convention=convention,
            peaks=peaks,
            log_rank=log_rank,
            perf_breakdown=breakdown,
            **options,
        )
        # Absolute, as the loop may go to another directory.
        output_dir = given_directory(output_dir, "output_dir").absolute()
        log_dir = Path(self.config.perf_log_dir or output_dir / DEFAULT_LOG_DIR).absolute()
        dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
        on_cpu = device is not None and str(device).startswith("cpu")
        arguments = {**locals(), "config": self.config}
        given = MonitorArgs(**{field.name: arguments[field.name] for field in fields(MonitorArgs)})
        if not isinstance(layers, bool):
            raise WrongUse(f"layers={shown(layers)}: give True or False.")
        if layers and model is None:
            raise WrongUse("layers=True times the layers of a model: give model=, as the loop calls it.")
        self._pid = os.getpid()
        self._over = not self.config.enable_perf_monitor or is_off()
        self._notices = Notices()
        accelerator = None if self._over else find_accelerator(device)
        # Nothing of this holds the monitor, so that it is closed where its last user lets go of it.
        self._watch = StepWatch(
            given, self._notices, accelerator, on_failure=weakly(self.failed), layers=layers and not self._over
        )
        self._finish = weakref.finalize(self, _finish, self._watch, self._pid)
        # As soon as the logs are open, so that it comes before they close themselves.
        self._watch.on_open = functools.partial(atexit.register, self._finish)

    @property
    def active(self) -> bool:
        """It is on: enabled, not closed, not failed, and in the process that it was made in."""
        return not self._over and os.getpid() == self._pid

    @property
    def last(self) -> StepRecord | None:
        """The last step that the device came to the end of, on this rank."""
        return self._watch.last

    @property
    def statistics(self) -> RunStatistics | None:
        """Of all steps so far, on this rank; None before the first."""
        return self._watch.statistics

    @harmless
    def start_step(self, step: int | None = None) -> None:
        """A step begins. Where one was begun and not ended, that one is forgotten.

        Args:
            step: its number; by default one more than the last, from 0.
        """
        self._watch.explicit_starts = True
        self._watch.begin(step)

    @harmless
    def end_step(
        self,
        /,
        *,
        tokens: Any = None,
        samples: Any = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        epoch: int | None = None,
        attention_mask: Any = None,
        shapes: Any = None,
        step: int | None = None,
        skip: Sequence[str] = (),
        **others: Any,
    ) -> None:
        """The step ends. Without a begin, it began where the one before ended.

        Args:
            tokens: of this rank's batch, all micro-batches together; a number or a tensor of one.
            samples: the same, of its sequences.
            loss: as it is logged; a number or a tensor of one, also on the device.
            grad_norm: the same.
            learning_rate: the same.
            epoch: its number.
            attention_mask: of this rank's batch, (sequences, places), or a list with those of the micro-batches;
                where it is not 0 there are real tokens, which are counted where `tokens` is not given.
            shapes: (sequences, places) of each of this rank's micro-batches, padding included, which is what FLOPs by
                the model's config go by; where there is an attention mask, its shapes are taken without this.
            step: its number.
            skip: names of sinks that do not get it.
            others: what the monitor has no place for; left out, with one warning.
        """
        for name in others:
            self._notices.warn_once(
                f"number {name}", f"the monitor leaves out {name}: it logs loss, grad_norm, learning_rate"
            )
        self._watch.end(
            step=step,
            epoch=epoch,
            batch={"samples": samples, "tokens": tokens, "attention_mask": attention_mask, "shapes": shapes},
            numbers={"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate},
            skip=frozenset(skip),
        )

    @harmless
    def log_step(
        self,
        /,
        step: int,
        epoch: int | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        attention_mask: Any = None,
        skip_wandb: bool = False,
        *,
        tokens: Any = None,
        samples: Any = None,
        shapes: Any = None,
        **others: Any,
    ) -> None:
        """The step ends, and the next one begins unless `start_step()` says when; arguments as of `end_step`."""
        numbers = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "step": step, "epoch": epoch}
        batch = {"tokens": tokens, "samples": samples, "shapes": shapes, "attention_mask": attention_mask}
        self.end_step(**{**others, **numbers, **batch, "skip": ("wandb",) if skip_wandb else ()})
        if self.active and not self._watch.explicit_starts:
            self._watch.begin(None, at_last_end=True)

    def step(self, **numbers: Any) -> MonitoredStep:
        """A block that is one step; `numbers` as `end_step` takes them. See `MonitoredStep`."""
        return MonitoredStep(self, numbers)

    @harmless
    def forget_step(self) -> None:
        """The step that was begun is none: an exception ended it, or there was no batch."""
        self._watch.forget()

    @harmless
    def forget_time(self) -> None:
        """The step that was begun will end with its counts and no time: the loop did something else in its midst."""
        self._watch.forget_time()

    def close(self) -> None:
        """Write what is left, and take everything away. Waits for the device, some seconds at most."""
        if self.active:
            self._over = True
            atexit.unregister(self._finish)
            self._finish()

    def __reduce__(self) -> tuple[Callable[[], TrainingMonitor], tuple[()]]:
        """A copy, as that of a model that holds its monitor, is a monitor that is off."""
        return _off, ()

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def failed(self, what: str, error: Exception) -> None:
        """Something has failed: one warning, and the monitor is off."""
        if self._over:
            return
        self._over = True
        atexit.unregister(self._finish)
        self._finish.detach()
        self._notices.quiet = False
        self._notices.warn_once(
            "failed", f"the monitor is off, because {what} failed: {in_a_line(error)}; training goes on"
        )
        self._watch.close(wait=False)

    _active, _failed = active, failed  # as `harmless` knows them


def _off() -> TrainingMonitor:
    return TrainingMonitor(config=MonitorConfig(enable_perf_monitor=False))


def _finish(watch: StepWatch, pid: int) -> None:
    if os.getpid() == pid:
        watch.close(wait=True)
