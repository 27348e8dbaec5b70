"""The names that users of other tools have in their code, as thin adapters."""

from __future__ import annotations

import atexit
import inspect
import math
import operator
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_leaves

from profiler_wrapper.analysis.work.peaks import Given, find_peaks
from profiler_wrapper.analysis.work.utilization import StepWork
from profiler_wrapper.capture.layers import holders
from profiler_wrapper.capture.runinfo import float32_matmul_precision
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.capture.session import Annotation, Session
from profiler_wrapper.capture.torch_state import in_backward, profiler_is_on, recorder_is_taken
from profiler_wrapper.errors import Notices, WrongUse, warn
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
from profiler_wrapper.monitor.count_step import count_step
from profiler_wrapper.monitor.work import Roof
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

    The FLOPs are those of a batch made up for the model, run and counted here. The model's modes, buffers and
    gradients, and the random numbers, are the same afterwards, but it takes the time and the memory of a step, and
    gradients of all trained parameters beside those that are there. Call it in the autocast of your steps, as the
    type of the numbers decides which peak counts.

    Args:
        model: on its device; what DDP or `torch.compile` wrapped may stay wrapped. A sharded one (FSDP, ZeRO-3,
            tensor parallel) is refused: one rank alone would wait for ever.
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
        for name, value, as_number, wanted in (
            ("batch_size", batch_size, operator.index, "whole number"),
            ("seq_length", seq_length, operator.index, "whole number"),
            ("step_time", step_time, float, "number of seconds"),
        ):
            try:
                is_positive = 0 < as_number(value) < math.inf  # type: ignore[arg-type]
            except (TypeError, ValueError):
                is_positive = False
            if not is_positive:
                raise WrongUse(f"{name}={value!r}: give a positive {wanted}")
        if convention not in ("full", "causal"):
            raise WrongUse(f"convention={convention!r}: give 'full' or 'causal'")
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        roof, warning = find_peaks(device_name, given=peaks)
        if roof is None:
            raise NotMeasurable(warning or "the peak of this device is not known")
        work = _work_of_made_up_step(model, batch_size, seq_length)
        if work.uncounted:
            warn(f"MFU is too low: the FLOPs of {', '.join(work.uncounted)} are not known")
        by_dtype = work.model_flops_by_dtype if convention == "full" else work.causal_model_flops_by_dtype
        tf32 = device.type == "cuda" and float32_matmul_precision() in ("high", "medium")
        seconds = Roof(roof, _Raising(), tf32=tf32).time_s(by_dtype)
        if not seconds:
            raise NotMeasurable("the model ran nothing that has FLOPs")
    except Exception as error:
        warn(f"MFU is not available: {type(error).__name__}: {error}")
        return math.nan
    mfu = seconds / step_time
    if mfu > 1:
        warn(
            f"MFU is {mfu:.2f}, more than the peak allows: either step_time={step_time!r} s ends before the device "
            f"is done, or batch_size={batch_size} is that of all ranks, or the peak is not this device's"
        )
    return mfu


class _Raising(Notices):
    """What cannot be said of the peak ends the attempt."""

    def warn_once(self, topic: str, message: str) -> None:
        raise NotMeasurable(message)


class NotMeasurable(RuntimeError):
    """The FLOPs of a step of this model cannot be counted by this process alone; the message says why."""


# --- one step on a batch that is made up, as torch's profiler sees it ---
#
# Modes, random numbers, gradients, buffers and compiled code stay as they are. The memory of one step is needed while
# it runs, with a gradient of every parameter that is trained beside those in `.grad`.

_IMAGES = "pixel_values"
_SHARDING_CLASSES = ("FullyShardedDataParallel", "FSDPModule")


def _work_of_made_up_step(model: nn.Module, batch_size: int, seq_length: int) -> StepWork:
    """FLOPs of a forward and backward, of a loss over all of the output, in eval mode.

    Raises:
        NotMeasurable: the model is sharded, another profiler is on, ...
        Exception: what the model raises on such a batch.
    """
    if in_backward():
        raise NotMeasurable("it was called inside backward")
    if recorder_is_taken():
        raise NotMeasurable("another torch profiler is on, and torch runs one at a time")
    plain = holders(model)[-1]
    sharded = _sharded_by(model, plain)
    if sharded is not None:
        raise NotMeasurable(
            f"the model is spread over ranks ({sharded}), so that running it on one of them would wait for the others "
            "for ever. A TrainingMonitor with flops_profile_freq=N measures a real step of all of them, and "
            "model_flops(config, ...) needs no step at all"
        )
    device = next((tensor.device for tensor in plain.parameters()), torch.device("cpu"))
    arguments, keywords = _batch_for(plain, batch_size, seq_length, device)
    marks = LayerScopes(plain)  # tell a forward from a recomputed one
    with tempfile.TemporaryDirectory(prefix="profiler_wrapper_") as scratch:
        trace = Path(scratch) / "trace.json"
        with _everything_kept(plain, device):
            session = Session(activities=(ProfilerActivity.CPU,), record_shapes=True, profile_memory=False)
            marks.attach()
            try:
                session.start()
                # `forward`, so that no hook on the root sees a batch that is none
                output = plain.forward(*arguments, **keywords)
                trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
                losses = [
                    leaf.sum(dtype=torch.float32)
                    for leaf in tree_leaves(output)
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                ]
                if trained and losses:
                    torch.autograd.grad(torch.stack(losses).sum(), trained, allow_unused=True)
            finally:
                session.stop()
                marks.detach()
        session.export(trace)
        session.close()
        return count_step(trace, {"layers": marks.describe()})


def _sharded_by(model: nn.Module, plain: nn.Module) -> str | None:
    """Who has spread the model over ranks; None: nobody."""
    for module in (*holders(model), *plain.modules()):
        for base in type(module).__mro__:
            if base.__name__ in _SHARDING_CLASSES:
                return base.__name__
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    for parameter in plain.parameters():
        if hasattr(parameter, "device_mesh"):
            return "its parameters are DTensors"
        if hasattr(parameter, "ds_id"):
            return "ZeRO-3"
        if several and getattr(parameter, "tensor_model_parallel", False):
            return "Megatron's tensor parallelism"
    return None


def _batch_for(
    model: nn.Module, batch_size: int, seq_length: int, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments of a model: by name where it has a config, which says whether they are images; else token ids."""
    config: Any = getattr(model, "config", None)
    has_config = hasattr(config, "to_dict")
    taken = inspect.signature(model.forward).parameters
    images = _IMAGES in taken and "input_ids" not in taken
    if has_config and (images or getattr(model, "main_input_name", "input_ids") == _IMAGES):
        size = config.image_size
        height, width = size if isinstance(size, Sequence) else (size, size)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return (), {_IMAGES: torch.zeros(batch_size, config.num_channels, height, width, device=device, dtype=dtype)}
    words = _vocabulary(model, config)
    # no padding, and they come around evenly, so that a router of experts sees more than one token
    ids = torch.arange(batch_size * seq_length, device=device) % max(1, words - 2) + min(2, words - 1)
    ids = ids.reshape(batch_size, seq_length)
    if not has_config:
        return (ids,), {}
    batch: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        batch["decoder_input_ids"] = ids
    if "use_cache" in taken:
        batch["use_cache"] = False
    return (), batch


def _vocabulary(model: nn.Module, config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise NotMeasurable(
        f"{type(model).__name__} has neither a config with vocab_size or image_size nor an embedding of tokens, "
        "so no batch can be made up for it"
    )


@contextmanager
def _everything_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, gradients on, compiled code left alone; afterwards modes and random numbers are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    on_device = device.type not in ("cpu", "meta")
    forked = torch.random.fork_rng(
        devices=[device] if on_device else [], device_type=device.type if on_device else "cuda"
    )
    try:
        for module, _ in modes:
            # by the attribute: `eval()` may be overridden, to merge adapters for example
            if not isinstance(module, nn.RNNBase):  # cuDNN has a backward of those in train mode only
                module.training = False
        with forked, torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
