"""The names that users of other tools have in their code, as thin adapters."""

from __future__ import annotations

import atexit
import functools
import importlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from profiler_wrapper.capture.runinfo import float32_matmul_precision
from profiler_wrapper.capture.session import Annotation
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.config_flops.model_flops import model_flops
from profiler_wrapper.errors import WrongUse, in_a_line, shown, warn
from profiler_wrapper.integrations.common import Guarded, Outlets, guarded
from profiler_wrapper.monitor.config import MonitorConfig, add_perf_monitor_arguments
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import Interval, Row, StepRecord
from profiler_wrapper.monitor.sinks import tagged
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.tables.work.peaks import Given, find_peaks
from profiler_wrapper.timer.timer import Timer as MyTimer
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.marks import MEMORY_POINT
from profiler_wrapper.wrapper import ProfilerWrapper

__all__ = [
    "FLOPSMeasurementCallback",
    "MyTimer",
    "SimpleMemoryProfiler",
    "add_perf_monitor_arguments",
    "add_perf_monitor_to_model_provider",
    "calculate_mfu_with_profiler",
    "get_perf_monitor",
    "initialize_perf_monitor",
    "perf_monitor_end_iteration",
    "perf_monitor_end_training",
    "perf_monitor_start_iteration",
    "wrap_forward_step_with_perf_monitor",
]


class SimpleMemoryProfiler:
    """InternLM's memory profiler by its own calls: who holds memory, at the points that the loop names.

        memory = SimpleMemoryProfiler(model, optimizer, "memory_trace/rank0_dp0_tp0", total_steps=5)
        for batch in batches:
            loss = model(**batch).loss
            memory.point("after forward")
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            memory.step()

    Recording begins here and ends with step number `total_steps`, or when the process ends before. Then
    `log_folder` has `memory.log` (a state at each point, and after each forward, backward and step of the
    optimizer; the layout at the peak) and the five sunburst pages.

    Args:
        model: whose parameters, gradients and activations are counted.
        optimizer: whose state is counted.
        log_folder: a directory, made where there is none; existing files of the same names are replaced.
        total_steps: how many steps are recorded.

    Raises:
        WrongUse: `total_steps` is not positive, or `model` holds no module. From then on nothing is raised: a
            failure of ours is one `ProfilerWrapperWarning`.
    """

    def __init__(
        self, model: object, optimizer: object, log_folder: str | os.PathLike[str], total_steps: int = 5
    ) -> None:
        if total_steps < 1:
            raise WrongUse(f"total_steps={shown(total_steps)}: give at least 1.")
        self.log_folder = Path(log_folder)
        self.result: ProfileResult | None = None
        self._steps_left = total_steps
        self._process = os.getpid()
        self._scratch = tempfile.mkdtemp(prefix="profiler_wrapper_")
        self._profiler = ProfilerWrapper(
            model,
            steps=f"0-{total_steps - 1}" if total_steps > 1 else "0",
            record_shapes=False,
            optimizer=optimizer,
            output_dir=self._scratch,
            files=(),
            enable_print_summary=False,
        )
        self._profiler.__enter__()
        atexit.register(self._finish)

    def point(self, tag: str = "", with_options: str = "", create: bool = False) -> None:
        """A state named `tag` is wanted here in memory.log.

        `with_options` and `create` are accepted and change nothing: the layout of every category is
        always written, once.
        """
        if self._steps_left and profiler_is_on():
            Annotation(f"{MEMORY_POINT}{tag or 'point'}").begin().end()

    def step(self) -> None:
        """A step has ended; the last one writes the files. Later calls do nothing."""
        if not self._steps_left:
            return
        self._profiler.step()
        self._steps_left -= 1
        if not self._steps_left:
            self._finish()

    def _finish(self) -> None:
        atexit.unregister(self._finish)
        if os.getpid() != self._process:
            return  # a forked worker ends
        self._steps_left = 0
        self._profiler.__exit__(None, None, None)
        self.result = self._profiler.result
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self.result is None:
            return  # ProfilerWrapper has said why
        if self.result.memory_use is None:
            warn(f"no memory.log was written: {'; '.join(self.result.warnings)}")
            return
        try:
            for file in (*REPORTS["memory_log"].files, *REPORTS["sunbursts"].files):
                with replacing(self.log_folder / Path(file.name).name) as beside:
                    file.write(self.result, beside)
        except Exception as error:
            warn(f"the files in {self.log_folder} could not be written: {in_a_line(error)}")


def calculate_mfu_with_profiler(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    peaks: Given | None = None,
    convention: Literal["full", "causal"] = "full",
) -> float:
    """MFU of a training step: the share of `step_time` that its FLOPs, forward and backward, need at the peak.

    The FLOPs are those of `model_flops` for the model's config: nothing is run. A `TrainingMonitor` measures those of a
    real step of any model (`flops_profile_freq`).

    Args:
        model: one that has a config, wrapped or not; its parameters are of the type whose peak counts, or, in
            autocast, that of autocast. Of one whose layers are divided over ranks it counts the FLOPs of all ranks.
        batch_size: sequences of a step on this device, micro-batches together; not those of all ranks.
        seq_length: tokens of each.
        step_time: seconds of a step, until the device was done.
        peaks: of this device, as `find_peaks` takes them; None: PROFILER_WRAPPER_PEAK_TFLOPS, else the table's.
        convention: of attention: "full", or "causal", without what a causal mask hides.

    Returns:
        1.0 is all of the peak. It is not cut off there: more than that is returned as it is, with a warning. NaN,
        and one warning that says why, where it is not known; never 0.0. Nothing is raised.
    """
    try:
        if not 0 < float(step_time) < math.inf:
            raise WrongUse(f"step_time={shown(step_time)}: give a positive number of seconds")
        flops = model_flops(model, batch_size, seq_length, convention=convention).total
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise WrongUse(f"{type(model).__name__} has no parameters, whose type says which peak counts")
        device = parameter.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
        name = str(dtype).removeprefix("torch.")
        device_name = torch.cuda.get_device_name(parameter.device) if device == "cuda" else None
        roof, warning = find_peaks(device_name, given=peaks)
        if roof is None:
            raise WrongUse(warning or "the peak of this device is not known")
        tf32 = device == "cuda" and name == "float32" and float32_matmul_precision() in ("high", "medium")
        peak = (roof.flops("tfloat32") if tf32 else None) or roof.flops(name)
        if peak is None:
            raise WrongUse(f"no peak of {name} is known: give peaks={{{shown(name)}: <TFLOP/s>}}")
    except Exception as error:
        warn(f"MFU is not available: {in_a_line(error)}")
        return math.nan
    mfu = flops / peak / float(step_time)
    if mfu > 1:
        warn(
            f"MFU is {mfu:.2f}, more than the peak allows: either step_time={step_time} s ends before the device "
            f"is done, or batch_size={batch_size} is that of all ranks, or the peak is not this device's"
        )
    return mfu


# --------------------------------------------------------------------------------------------------
# The hooks of FlagScale's performance monitor, on a `TrainingMonitor`. Their `args` are Megatron's, with the options of
# `add_perf_monitor_arguments` among them.

F = TypeVar("F", bound=Callable[..., Any])

_CALCULATOR = "megatron.core.num_microbatches_calculator"
_SIZES = {  # of Megatron's arguments
    "world_size": "world_size",
    "data_parallel_size": "data_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
}
_callback: FLOPSMeasurementCallback | None = None


class FLOPSMeasurementCallback(Guarded):
    """What FlagScale's training loop calls. Nothing is raised while training.

    Batches are those of the whole job: the current global batch size where Megatron tells it, else
    `global_batch_size`, else micro-batches times data parallel ranks.

    Args:
        args: the training's.
        log_interval: steps between two rows; None: `args.perf_log_interval`.

    Raises WrongUse where an option has a value that means nothing.
    """

    def __init__(self, args: Any, log_interval: int | None = None) -> None:
        config = replace(MonitorConfig.from_args(args), enable_perf_monitor=True)
        if log_interval is not None:
            config = replace(config, perf_log_interval=max(1, log_interval))
        sizes: dict[str, Any] = {ours: getattr(args, theirs, None) for theirs, ours in _SIZES.items()}
        self.args = args
        self.log_interval = config.perf_log_interval
        self.monitor = TrainingMonitor(
            ".",
            config,
            log_file=None,
            model_config=args,
            dtype=_dtype(args),
            counts="job",
            rank=getattr(args, "rank", None),
            **sizes,
        )
        self._interval = Interval(self.log_interval)
        self._seen: StepRecord | None = None
        self._writers = Outlets()

    @guarded
    def on_train_batch_start(self, iteration: int) -> None:
        """A step begins."""
        self.monitor.start_step(iteration)

    @guarded
    def on_train_batch_end(self, iteration: int, writer: Any = None, wandb_writer: Any = None) -> None:
        """A step has ended; rows also go to a SummaryWriter and a run of W&B where this rank has them."""
        samples = _global_batch_size(self.args)
        length = getattr(self.args, "seq_length", None)
        self.monitor.end_step(
            step=iteration, samples=samples, tokens=samples * length if samples is not None and length else None
        )
        self._write(self._new_row(), writer, wandb_writer)

    @guarded
    def on_train_end(self, writer: Any = None, wandb_writer: Any = None) -> None:
        """The training is over: the summary is written."""
        self.monitor.close()
        self._write(self._new_row() or self._interval.rest(), writer, wandb_writer)

    def abandon(self) -> None:
        self.monitor.close()

    def _new_row(self) -> Row | None:
        record = self.monitor.last  # there is one on every rank, and the writers are not on that of the log
        if record is None or record is self._seen:
            return None
        self._seen = record
        return self._interval.add(record)

    def _write(self, row: Row | None, writer: Any, wandb_writer: Any) -> None:
        if row is None:
            return
        values, step = tagged(row), row.record.step
        if writer is not None:
            self._writers.send("writer", lambda: [writer.add_scalar(tag, of, step) for tag, of in values.items()])
        if wandb_writer is not None:
            self._writers.send("wandb_writer", lambda: wandb_writer.log(values, step))


def initialize_perf_monitor(args: Any) -> FLOPSMeasurementCallback | None:
    """Make the monitor of this process if `args.enable_perf_monitor` is on; else there is none any more."""
    global _callback
    _callback = FLOPSMeasurementCallback(args) if getattr(args, "enable_perf_monitor", False) else None
    return _callback


def get_perf_monitor() -> FLOPSMeasurementCallback | None:
    """What `initialize_perf_monitor` made; `.monitor` is its `TrainingMonitor`."""
    return _callback


def perf_monitor_start_iteration(iteration: int) -> None:
    """An iteration begins. Does nothing without a monitor, as the two below."""
    if _callback is not None:
        _callback.on_train_batch_start(iteration)


def perf_monitor_end_iteration(iteration: int, writer: Any = None, wandb_writer: Any = None) -> None:
    """An iteration has ended."""
    if _callback is not None:
        _callback.on_train_batch_end(iteration, writer, wandb_writer)


def perf_monitor_end_training(writer: Any = None, wandb_writer: Any = None) -> None:
    """The training is over, and so is the monitor."""
    global _callback
    callback, _callback = _callback, None
    if callback is not None:
        callback.on_train_end(writer, wandb_writer)


def add_perf_monitor_to_model_provider(original_model_provider: F) -> F:
    """A model provider that makes the monitor first, from Megatron's global arguments."""

    @functools.wraps(original_model_provider)
    def provider(*args: Any, **kwargs: Any) -> Any:
        initialize_perf_monitor(importlib.import_module("megatron.training").get_args())
        return original_model_provider(*args, **kwargs)

    return provider  # type: ignore[return-value]  # the same parameters and result


def wrap_forward_step_with_perf_monitor(forward_step_func: F) -> F:
    """The function itself: what `--perf-breakdown` measures of the forward needs no wrapper."""
    return forward_step_func


def _global_batch_size(args: Any) -> int | None:
    calculator = sys.modules.get(_CALCULATOR)
    if calculator is not None:
        return int(calculator.get_current_global_batch_size())
    given, micro = getattr(args, "global_batch_size", None), getattr(args, "micro_batch_size", None)
    if given is not None or micro is None:
        return None if given is None else int(given)
    ranks = getattr(args, "data_parallel_size", None)
    if ranks is None:
        sharing = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        together = math.prod(getattr(args, name, None) or 1 for name in sharing)
        ranks = (getattr(args, "world_size", None) or 1) // together
    return int(micro * (getattr(args, "num_micro_batches", None) or 1) * ranks)


def _dtype(args: Any) -> str | None:
    if getattr(args, "bf16", False):
        return "bfloat16"
    if getattr(args, "fp16", False):
        return "float16"
    given = getattr(args, "params_dtype", None)
    return None if given is None else str(given)
