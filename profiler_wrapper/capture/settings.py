"""How a run is set up: its optimizers, parameters and wrappers, what torch and its backends were told.

Asked once, when a window has ended, so that it costs no step anything. Nothing is started by asking: no device, no
process group. What cannot be told is left out.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.growth import free_bytes
from profiler_wrapper.capture.wrappers import all_modules, all_parameters

_ATTENTION_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")
_WRAPPERS = frozenset(
    (
        "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule",
        "DeepSpeedEngine", "PeftModel",
    )
)  # fmt: skip
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def run_settings(modules: Sequence[nn.Module], optimizers: Iterable[object]) -> dict[str, Any]:
    """What `run.json` says of it; a part that fails is left out.

    `modules`: the models, wrappers included. `optimizers`: whatever has `param_groups`.
    """
    parts: dict[str, Callable[[], object]] = {
        "optimizers": lambda: [_optimizer(one) for one in optimizers],
        "parameters": lambda: _parameters(modules),
        "wrappers": lambda: _wrappers(modules),
        "attention_implementation": lambda: _attention_implementation(modules),
        "process_group_backend": _process_group_backend,
        "attention_backends": _attention_backends,
        "free_memory_bytes": free_bytes,
        **_PARTS_OF_CUDA,
    }
    settings = {}
    for name, ask in parts.items():
        try:
            told = ask()
        except Exception:  # of a version of torch, or of a model, that has it otherwise
            continue
        if told is not None:
            settings[name] = told
    return settings


# --- what is trained ----------------------------------------------------------------------------


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "class_name": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "fused": _told(groups, "fused"),
        "foreach": _told(groups, "foreach"),
        "capturable": _told(groups, "capturable"),
        "differentiable": _told(groups, "differentiable"),
        "can_fuse": _accepts(optimizer, "fused") and _devices_with("fused", parameters),
        "can_foreach": _accepts(optimizer, "foreach"),
        "parameters": len(parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "devices": sorted({parameter.device.type for parameter in parameters}),
        "dtypes": sorted({_dtype(parameter) for parameter in parameters}),
    }


def _told(groups: Iterable[Mapping[str, Any]], name: str) -> bool | None:
    """What the groups say; None where that is nothing, which leaves it to torch, or not the same."""
    told = {group.get(name) for group in groups}
    return bool(next(iter(told))) if len(told) == 1 and None not in told else None


def _accepts(optimizer: object, name: str) -> bool:
    return name in inspect.signature(type(optimizer).__init__).parameters


def _devices_with(kind: str, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch has such kernels for where all parameters are."""
    from torch.utils import _foreach_utils

    devices = getattr(_foreach_utils, f"_get_{kind}_kernels_supported_devices")()
    return all(one.device.type in devices and torch.is_floating_point(one) for one in parameters)


def _parameters(modules: Iterable[nn.Module]) -> dict[str, Any]:
    every = {id(parameter): parameter for module in modules for parameter in all_parameters(module)}
    size_bytes: Counter[str] = Counter()
    for parameter in every.values():
        size_bytes[_dtype(parameter)] += parameter.numel() * parameter.element_size()
    return {
        "tensors": len(every),
        "elements": sum(parameter.numel() for parameter in every.values()),
        "trainable_elements": sum(parameter.numel() for parameter in every.values() if parameter.requires_grad),
        "bytes_by_dtype": dict(size_bytes),
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _wrappers(modules: Iterable[nn.Module]) -> list[str]:
    """Classes that distribute, compile or adapt what they are around."""
    classes = {type(inner) for module in modules for inner in all_modules(module)}
    return sorted({base.__name__ for one in classes for base in one.__mro__} & _WRAPPERS)


def _attention_implementation(modules: Iterable[nn.Module]) -> str | None:
    """As a Hugging Face config says: "sdpa", "eager" ...; None where no model has one."""
    configs = (getattr(inner, "config", None) for module in modules for inner in all_modules(module))
    told = (getattr(config, "_attn_implementation", None) for config in configs)
    return next((name for name in told if isinstance(name, str)), None)


# --- torch and the device -----------------------------------------------------------------------


def _process_group_backend() -> str | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return str(distributed.get_backend())


def _attention_backends() -> dict[str, bool]:
    """Which backends of scaled-dot-product attention are switched on."""
    asked = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled", None) for name in _ATTENTION_BACKENDS}
    return {name: bool(ask()) for name, ask in asked.items() if ask is not None}


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _device_count() -> int | None:
    return torch.cuda.device_count() if _cuda_in_use() else None


def _device_memory_bytes() -> int | None:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) if _cuda_in_use() else None


def _compute_capability() -> list[int] | None:
    return list(torch.cuda.get_device_capability()) if _cuda_in_use() and torch.version.cuda else None


def _tf32() -> dict[str, bool] | None:
    if not _cuda_in_use():
        return None
    return {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}


def _cudnn() -> dict[str, bool] | None:
    if not _cuda_in_use():
        return None
    return {"benchmark": torch.backends.cudnn.benchmark, "deterministic": torch.backends.cudnn.deterministic}


def _allocator_settings() -> str | None:
    """Of the caching allocator, as the environment has them; "" where it has none."""
    return (
        next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), "") if _cuda_in_use() else None
    )


_PARTS_OF_CUDA: dict[str, Callable[[], object]] = {
    "device_count": _device_count,
    "device_memory_bytes": _device_memory_bytes,
    "compute_capability": _compute_capability,
    "tf32": _tf32,
    "cudnn": _cudnn,
    "allocator_settings": _allocator_settings,
}
