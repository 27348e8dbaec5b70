"""What others wrap around a module, known by class and never by name.

Nothing here imports the packages that define the wrappers: a class that nobody imported has no instance.
"""

from __future__ import annotations

import sys
from functools import lru_cache

from torch import nn

_WRAPPED = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.transformer.module.Float16Module": "module",
}
_OPTIMIZED = "torch._dynamo.eval_frame.OptimizedModule"
_TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
# Classes made at run time, "FSDPLlamaModel" out of "LlamaModel": what the name then begins with.
_DYNAMIC_PREFIXES = ("FSDP", "DDP", "Replicate", "Parametrized")


def _names(cls: type) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


@lru_cache(maxsize=4096)
def wrapped_attribute(cls: type) -> str | None:
    """The attribute under which instances of `cls` hold what they wrap; None for a class that wraps nothing."""
    return next((_WRAPPED[name] for name in _names(cls) if name in _WRAPPED), None)


@lru_cache(maxsize=4096)
def is_compiled_wrapper(cls: type) -> bool:
    """Whether instances of `cls` are what `torch.compile(module)` returns."""
    return _OPTIMIZED in _names(cls)


@lru_cache(maxsize=4096)
def is_tuner_layer(cls: type) -> bool:
    """Whether instances of `cls` are a layer with PEFT adapters beside it."""
    return _TUNER_LAYER in _names(cls)


@lru_cache(maxsize=4096)
def plain_class(cls: type) -> type:
    """The class as its author named it: FSDP2 and parametrizations put a made-up subclass in its place."""
    for base in reversed(cls.__bases__):
        if any(cls.__name__ == prefix + base.__name__ for prefix in _DYNAMIC_PREFIXES):
            return base
    return cls


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """What `module` wraps, one level down; None if it wraps nothing."""
    attribute = wrapped_attribute(type(module))
    inner = module._modules.get(attribute) if attribute else None
    return inner if isinstance(inner, nn.Module) else None


def unwrap(module: nn.Module) -> tuple[nn.Module, str]:
    """The module inside all wrappers, and the prefix that they add to the names below it."""
    prefix = ""
    while (inner := wrapped_module(module)) is not None:
        prefix += f"{wrapped_attribute(type(module))}."
        module = inner
    return module, prefix


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs compiled code: `module.compile()` or a wrapper of `torch.compile`."""
    while not (module._compiled_call_impl is not None or is_compiled_wrapper(type(module))):
        inner = wrapped_module(module)
        if inner is None:
            return False
        module = inner
    return True


def made_by_dynamo(module: nn.Module) -> bool:
    """Whether `module` is a graph that a compiler made and calls: part of a model, no model."""
    graph_module = sys.modules.get("torch.fx.graph_module")
    is_graph = graph_module is not None and isinstance(module, graph_module.GraphModule)
    return is_graph and "torch._dynamo" in sys.modules and type(module).__name__ in ("GraphModule", "<lambda>")
