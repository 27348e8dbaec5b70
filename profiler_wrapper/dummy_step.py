"""FLOPs of a model's forward and backward on a batch made up for it, counted from what torch's profiler saw.

Modes, random numbers, gradients, buffers and compiled code stay as they are. The memory of one step is needed while
it runs, with a gradient of every parameter that is trained beside those in `.grad`.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from profiler_wrapper.analysis.utilization import StepWork
from profiler_wrapper.capture.others import recorder_is_taken
from profiler_wrapper.capture.phases import in_backward
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.capture.session import Session
from profiler_wrapper.capture.wrappers import holders
from profiler_wrapper.live.count_step import count_step

_IMAGES = "pixel_values"
_SHARDING_CLASSES = ("FullyShardedDataParallel", "FSDPModule")
_DEPTH = 4  # how deep a tensor may lie in what a model returns


class NotMeasurable(RuntimeError):
    """The FLOPs of a step of this model cannot be counted by this process alone; the message says why."""


def work_of_dummy_step(model: nn.Module, batch_size: int, seq_length: int) -> StepWork:
    """FLOPs of one forward and backward of `model` on `batch_size` sequences of `seq_length` tokens.

    They are those of a loss over all of the output. Images of the config's own size take the place of tokens where
    the model's input is `pixel_values`. All runs in eval mode (but RNNs), so nothing is recomputed.

    Raises:
        NotMeasurable: the model is sharded, another profiler is on, ...
        Exception: what the model raises on such a batch.
    """
    plain = holders(model)[-1]
    _check(model, plain)
    device = next((tensor.device for tensor in plain.parameters()), torch.device("cpu"))
    batch = _batch_for(plain, batch_size, seq_length, device)
    with tempfile.TemporaryDirectory(prefix="profiler_wrapper_") as scratch:
        trace = Path(scratch) / "trace.json"
        marks = LayerScopes(plain)  # tell a forward from a recomputed one
        with _everything_kept(plain, device):
            session = Session(activities=(ProfilerActivity.CPU,), record_shapes=True, profile_memory=False)
            marks.attach()
            try:
                session.start()
                _forward_and_backward(plain, batch)
            finally:
                session.stop()
                marks.detach()
        session.export(trace)
        session.close()
        return count_step(trace, {"layers": marks.describe()})


def _check(model: nn.Module, plain: nn.Module) -> None:
    if in_backward():
        raise NotMeasurable("it was called inside backward")
    if recorder_is_taken():
        raise NotMeasurable("another torch profiler is on, and torch runs one at a time")
    for module in (*holders(model), *plain.modules()):
        found = {base.__name__ for base in type(module).__mro__}.intersection(_SHARDING_CLASSES)
        if found:
            raise _sharded(found.pop())
    for parameter in plain.parameters():
        if hasattr(parameter, "device_mesh"):
            raise _sharded("its parameters are DTensors")
        if hasattr(parameter, "ds_id"):
            raise _sharded("ZeRO-3")
        if getattr(parameter, "tensor_model_parallel", False) and _several_ranks():
            raise _sharded("Megatron's tensor parallelism")


def _several_ranks() -> bool:
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def _sharded(what: str) -> NotMeasurable:
    return NotMeasurable(
        f"the model is spread over ranks ({what}), so that running it on one of them would wait for the others for "
        "ever. A TrainingMonitor with flops_profile_freq=N measures a real step of all of them, and "
        "model_flops(config, ...) needs no step at all"
    )


# --- the batch ------------------------------------------------------------------------------------


def _batch_for(model: nn.Module, batch_size: int, seq_length: int, device: torch.device) -> Mapping[str, Any] | Any:
    """Keyword arguments of `model`, or the one positional argument of a model without a config."""
    config: Any = getattr(model, "config", None)
    taken = inspect.signature(model.forward).parameters
    if config is None or not hasattr(config, "to_dict"):
        return _ids(_vocabulary(model), batch_size, seq_length, device)
    if getattr(model, "main_input_name", "input_ids") == _IMAGES or (_IMAGES in taken and "input_ids" not in taken):
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return {_IMAGES: torch.zeros(batch_size, config.num_channels, height, width, device=device, dtype=dtype)}
    ids = _ids(_vocabulary(model), batch_size, seq_length, device)
    batch: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        batch["decoder_input_ids"] = ids
    if "use_cache" in taken:
        batch["use_cache"] = False
    return batch


def _ids(vocabulary: int, batch_size: int, seq_length: int, device: torch.device) -> torch.Tensor:
    """Token ids without padding that come around evenly, so that a router of experts sees more than one token."""
    ids = torch.arange(batch_size * seq_length, device=device) % max(1, vocabulary - 2) + min(2, vocabulary - 1)
    return ids.reshape(batch_size, seq_length)


def _vocabulary(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise NotMeasurable(
            f"{type(model).__name__} has neither a config with vocab_size or image_size nor an embedding of tokens, "
            "so no batch can be made up for it"
        )
    return embedding.num_embeddings


# --- the step -------------------------------------------------------------------------------------


def _forward_and_backward(model: nn.Module, batch: Mapping[str, Any] | Any) -> None:
    # `forward`, so that no hook on the root sees a batch that is none
    output = model.forward(**batch) if isinstance(batch, Mapping) else model.forward(batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if trained and parts:
        loss = torch.stack([part.sum(dtype=torch.float32) for part in parts]).sum()
        torch.autograd.grad(loss, trained, allow_unused=True)


def _tensors(output: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(output, Sequence) and not isinstance(output, (str, bytes)):
        for value in output:
            yield from _tensors(value, depth - 1)


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
