"""The hooks of FlagScale's performance monitor, under their names, on a `TrainingMonitor`.

In the place of `from flagscale.train.perf_monitor.hooks import ...`:

    from profiler_wrapper.compat import initialize_perf_monitor, perf_monitor_start_iteration, ...

`args` are Megatron's, with the options of `add_perf_monitor_arguments` among them.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from profiler_wrapper.integrations.common import Guarded, Outlets, guarded
from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import Interval, Row, StepRecord
from profiler_wrapper.monitor.sinks import tagged

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
