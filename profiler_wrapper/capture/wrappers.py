"""What others wrap around a module, known by class and never by name.

Nothing here imports the packages that define the wrappers: a class that nobody imported has no instance.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

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
# Layers of PEFT that took the place of one of the model's, and the attribute that holds it.
_ADAPTED = {
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
    "peft.utils.other.ModulesToSaveWrapper": "original_module",
}
# Classes made at run time, "FSDPLlamaModel" out of "LlamaModel": what the name then begins with.
_DYNAMIC_PREFIXES = ("FSDP", "DDP", "Replicate", "Parametrized")


@dataclass(frozen=True, slots=True)
class _ClassFacts:
    plain_name: str
    wrapped_attribute: str | None
    is_compiled_wrapper: bool
    adapted_attribute: str | None


_known: weakref.WeakKeyDictionary[type, _ClassFacts] = weakref.WeakKeyDictionary()


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The modules right below by name, an instance under each of its names."""
    return {name: child for name, child in module._modules.items() if child is not None}


def all_modules(module: nn.Module) -> Iterator[nn.Module]:
    """As `module.modules()`, which a model's class may have otherwise, and which ends where modules are nested deep."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(reversed(children(one).values()))


def all_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """As `module.parameters()`, which a model's class may have otherwise."""
    seen: set[int] = set()
    for one in all_modules(module):
        for parameter in one._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def class_name(module: nn.Module) -> str:
    """The class in the plain model.

    FSDP2 and parametrizations make up a subclass, PEFT puts a layer of its own in the place of the model's.
    """
    adapted = children(module).get(_facts(module).adapted_attribute or "")
    return _facts(module if adapted is None else adapted).plain_name


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` is a layer of PEFT's, with the model's own inside and adapters beside it."""
    return _facts(module).adapted_attribute is not None


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """What `module` wraps, one level down; None if it wraps nothing."""
    attribute = _facts(module).wrapped_attribute
    return children(module).get(attribute) if attribute else None


def holders(module: nn.Module) -> tuple[nn.Module, ...]:
    """`module`, what it wraps, what that wraps: the plain module is the last."""
    held = [module]
    while (inner := wrapped_module(held[-1])) is not None:
        held.append(inner)
    return tuple(held)


def added_prefix(held: tuple[nn.Module, ...]) -> str:
    """What wrappers add to the names below them: "module._orig_mod." for DDP around `torch.compile`."""
    return "".join(f"{_facts(wrapper).wrapped_attribute}." for wrapper in held[:-1])


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs compiled code: `module.compile()` or a wrapper of `torch.compile`."""
    return any(one._compiled_call_impl is not None or _facts(one).is_compiled_wrapper for one in holders(module))


def is_part_of_a_model(module: nn.Module) -> bool:
    """Whether `module` is none that a user made: DataParallel's copy for a device, or a compiler's graph."""
    if getattr(module, "_is_replica", False):
        return True
    graphs = sys.modules.get("torch.fx.graph_module")
    is_graph = graphs is not None and isinstance(module, graphs.GraphModule)
    return is_graph and "torch._dynamo" in sys.modules and type(module).__name__ in ("GraphModule", "<lambda>")


def _facts(module: nn.Module) -> _ClassFacts:
    cls: type = type(module)
    facts = _known.get(cls)
    if facts is None:
        facts = _known[cls] = _find_out(cls)
    return facts


def _find_out(cls: type) -> _ClassFacts:
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    return _ClassFacts(
        plain_name=_plain_name(cls),
        wrapped_attribute=next((_WRAPPED[name] for name in names if name in _WRAPPED), None),
        is_compiled_wrapper=_OPTIMIZED in names,
        adapted_attribute=next((_ADAPTED[name] for name in names if name in _ADAPTED), None),
    )


def _plain_name(cls: type) -> str:
    for base in cls.__bases__:
        if any(cls.__name__ == prefix + base.__name__ for prefix in _DYNAMIC_PREFIXES):
            return base.__name__
    return cls.__name__
