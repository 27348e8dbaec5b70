"""The names that users of other tools have in their code, as thin adapters."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from profiler_wrapper.analysis.work.peaks import Given, find_peaks
from profiler_wrapper.capture.runinfo import float32_matmul_precision
from profiler_wrapper.capture.session import Annotation
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.config_flops.model_flops import model_flops
from profiler_wrapper.errors import WrongUse, warn
from profiler_wrapper.integrations.flagscale import (
    FLOPSMeasurementCallback,
    add_perf_monitor_to_model_provider,
    get_perf_monitor,
    initialize_perf_monitor,
    perf_monitor_end_iteration,
    perf_monitor_end_training,
    perf_monitor_start_iteration,
    wrap_forward_step_with_perf_monitor,
)
from profiler_wrapper.monitor.config import add_perf_monitor_arguments
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.result import ProfileResult
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
            raise WrongUse(f"total_steps={total_steps!r}: give at least 1.")
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
            warn(f"the files in {self.log_folder} could not be written: {type(error).__name__}: {error}")


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
            raise WrongUse(f"step_time={step_time!r}: give a positive number of seconds")
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
            raise WrongUse(f"no peak of {name} is known: give peaks={{{name!r}: <TFLOP/s>}}")
    except Exception as error:
        warn(f"MFU is not available: {type(error).__name__}: {error}")
        return math.nan
    mfu = flops / peak / float(step_time)
    if mfu > 1:
        warn(
            f"MFU is {mfu:.2f}, more than the peak allows: either step_time={step_time!r} s ends before the device "
            f"is done, or batch_size={batch_size} is that of all ranks, or the peak is not this device's"
        )
    return mfu
