"""Names the modules of a model and chooses those that become layers.

A layer goes by its full name in the plain model: what DDP, FSDP, `torch.compile`, checkpoint wrappers
and PEFT put between is left out, so that the same rows come out whatever a model is wrapped in. Layers of a
pipeline's stage go by their number in the whole model.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from torch import nn
from torch.nn.parameter import UninitializedParameter

from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.marks import ROOT_PATH, Mark, expert_number, kind_of, looks_like_block, looks_like_stage

# --- Stages of a pipeline: which modules they hold, and which layers of the whole model those are ---

# What the entries of a list of layers, or a module right below them, have that says which layer of the whole model
# they are, and where it counts from: 1 is Megatron-LM.
_NUMBERS = {"layer_number": 1, "layer_idx": 0, "layer_id": 0, "layer_index": 0, "block_idx": 0}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of `torch.distributed.pipelining`."""

    number: int
    module: nn.Module
    place: int | None  # of this process in the pipeline's group
    ranks: tuple[int, ...]  # of that group, in the whole job; empty: not known


def find_stages(model: object) -> tuple[Stage, ...]:
    """The stages in what a user calls a model: a `PipelineStage`, a schedule, or several of these; empty for others."""
    if isinstance(model, nn.Module) or model is None:
        return ()
    if isinstance(model, (list, tuple)):
        return tuple(stage for one in model for stage in find_stages(one))
    held = getattr(model, "_stages", None)
    if not isinstance(held, (list, tuple)) or isinstance(model, Mapping):
        stage = getattr(model, "_stage", None)
        held = [model if stage is None else stage]
    return tuple(_stage(one) for one in held if _is_stage(one))


def _is_stage(found: Any) -> bool:
    is_numbered = isinstance(getattr(found, "stage_index", None), int)
    return is_numbered and isinstance(getattr(found, "submod", None), nn.Module)


def _stage(found: Any) -> Stage:
    place = getattr(found, "group_rank", None)
    try:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(getattr(found, "group", None)))
    except Exception:  # no process group, or an older torch
        ranks = ()
    return Stage(int(found.stage_index), found.submod, place if isinstance(place, int) else None, ranks)


def numbered_from(module: nn.Module) -> int:
    """Which layer of the whole model the first of a list is, as its entries say; 0 where they do not agree."""
    entries = [holders(entry)[-1] for entry in children(module).values()] if isinstance(module, nn.ModuleList) else []
    for name, first in _NUMBERS.items():
        numbers = [_own_number(entry, name) for entry in entries]
        starts = {None if number is None else number - first - place for place, number in enumerate(numbers)}
        start = starts.pop() if len(starts) == 1 else None
        if start is not None and start > 0:  # same (> -> >=): from 0 for one name, from 0 for all
            return start
    return 0


def _own_number(entry: nn.Module, name: str) -> int | None:
    numbers = (getattr(module, name, None) for module in (entry, *children(entry).values()))
    return next((one for one in numbers if isinstance(one, int) and not isinstance(one, bool)), None)


Pattern = Union[str, "re.Pattern[str]"]
Selection = Union[str, int, "re.Pattern[str]", Sequence[Pattern]]

# Names under which a list holds blocks, be they a single one or each of its own class.
_BLOCK_LIST_NAME = re.compile(r"(\w+_)?(layers?|h|blocks?)")


@dataclass(frozen=True, slots=True)
class Root:
    """A module whose outermost call is one pass through a model."""

    label: str  # "LlamaForCausalLM#0", or the name its user gave it
    module: nn.Module  # as the user holds it, wrappers included
    named: bool = False  # by its user: then all names below start with the label
    in_pipeline: bool = False  # a stage: its layers may say which they are of the whole model


@dataclass(frozen=True, slots=True)
class Layer:
    """One module that is a row of the tables. `holders` are the module and the wrappers around it, outermost first."""

    mark: Mark
    raw_name: str  # with what wrappers add; "" for a root that nothing wraps
    holders: tuple[nn.Module, ...]
    own_parameters: int  # registered on this module itself
    parameters: int  # with all modules below it, each parameter once

    @property
    def module(self) -> nn.Module:
        """The plain module, inside all wrappers."""
        return self.holders[-1]


class RootLabels:
    """Labels for roots that nobody named: the class and a number, the lowest that is free."""

    def __init__(self) -> None:
        self._taken: dict[str, set[int]] = {}

    def take(self, module: nn.Module) -> str:
        """A label that no other root has: `LlamaForCausalLM#0`, then `#1`."""
        name = plain_class_name(module)
        taken = self._taken.setdefault(name, set())
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return f"{name}#{number}"

    def give_back(self, label: str) -> None:
        """The root of this label is no more."""
        name, _, number = label.rpartition("#")
        self._taken.get(name, set()).discard(int(number))


def plain_class_name(module: nn.Module) -> str:
    """The class of what `module` is, or wraps, in the plain model."""
    return class_name(holders(module)[-1])


def find_roots(model: object, labels: RootLabels | None = None, *, in_pipeline: bool = False) -> tuple[Root, ...]:
    """The roots in what a user calls a model: a module, several in a list or dict, or a pipeline.

    The keys of a dict, and the component names of a pipeline (anything with a `components` mapping
    that holds modules), name their roots; other roots are named by class and number.

    Stages of `torch.distributed.pipelining`, or a schedule that holds them, are roots too. `in_pipeline`: so is what
    else is found.

    Raises WrongUse: there is no module in it.
    """
    labels = labels or RootLabels()
    is_module = isinstance(model, nn.Module)
    if stages := find_stages(model):
        numbers = [f"{plain_class_name(stage.module)}#stage{stage.number}" for stage in stages]
        names = numbers if len(stages) > 1 else [labels.take(stages[0].module)]
        return tuple(Root(name, stage.module, in_pipeline=True) for name, stage in zip(names, stages, strict=True))
    found: dict[int, Root] = {}
    if isinstance(model, (Mapping, nn.ModuleDict)):
        named = [(key, one) for key, one in model.items() if isinstance(one, nn.Module)]
        found = {i: Root(str(key), one, True, in_pipeline) for i, (key, one) in enumerate(named)}
    elif not is_module and isinstance(components := getattr(model, "components", None), Mapping):
        return find_roots(components, labels, in_pipeline=in_pipeline)
    else:
        is_list = isinstance(model, Iterable) and (isinstance(model, nn.ModuleList) or not is_module)
        for one in model if is_list else (model,):  # type: ignore[attr-defined]
            if isinstance(one, nn.Module) and id(one) not in found:
                found[id(one)] = Root(labels.take(one), one, False, in_pipeline)
    if not found:
        raise WrongUse(
            f"model={type(model).__name__} holds no torch.nn.Module. "
            "Give a module, a list or dict of modules, a pipeline, or nothing."
        )
    return tuple(found.values())


def name_layers(root: Root, select: Selection = "auto") -> tuple[Layer, ...]:
    """The layers of one root, in registration order, the root itself first.

    `select` is "auto" (all modules but those more than one level inside a block, of which only routers, experts and
    adapters), a depth below the root, or one or several name patterns: `fnmatch` globs on the full name, regular
    expressions searched in it. Lists of modules never run: they are neither a layer nor a level.

    Raises WrongUse: `select` is none of these.
    """
    wanted = selector(select)
    return tuple(
        _layer(spot, root.label)
        for spot in _walk(root)
        if spot.path == ROOT_PATH or (not _never_runs(spot.module) and wanted(spot))
    )


def module_paths(root: Root) -> dict[int, str]:
    """Full name in the plain model of every module of a root, by id; wrappers have the name of what they wrap."""
    return {id(holder): spot.path for spot in _walk(root) for holder in spot.holders}


@dataclass(slots=True)
class _Spot:
    """A place in the module tree."""

    path: str  # full name, "." for the root
    raw_name: str  # "" for a root that nothing wraps
    holders: tuple[nn.Module, ...]
    depth: int  # below the root
    depth_in_block: int | None  # 0 for the block itself, None outside
    is_block: bool
    in_adapted: bool
    parent: _Spot | None
    shared: bool = False

    @property
    def module(self) -> nn.Module:
        return self.holders[-1]


def _walk(root: Root) -> Iterator[_Spot]:
    """Each module of the plain model once, before those below it."""
    held = holders(root.module)
    is_block = bool(children(held[-1])) and looks_like_block(class_name(held[-1]))
    top = _Spot(ROOT_PATH, added_prefix(held)[:-1], held, 0, 0 if is_block else None, is_block, False, None)
    spots, paths = {id(top.module): top}, {ROOT_PATH}
    prefix = f"{root.label}." if root.named else ""
    waiting = _below(top, prefix, prefix + added_prefix(held), root)
    while waiting:  # without recursion, which ends where modules are nested deep
        parent, path, raw_name, is_block, module = waiting.pop()
        held = holders(module)
        if (seen := spots.get(id(held[-1]))) is not None:
            seen.shared = True
            continue
        level = not _never_runs(held[-1])
        spot = _Spot(
            path=raw_name if path in paths else path,  # two modules of one plain name: keep what sets them apart
            raw_name=f"{raw_name}.{added_prefix(held)}"[:-1],
            holders=held,
            depth=parent.depth + level,
            depth_in_block=0 if is_block else None if parent.depth_in_block is None else parent.depth_in_block + level,
            is_block=is_block,
            in_adapted=parent.in_adapted or _facts(parent.module).adapted_attribute is not None,  # a layer of PEFT's
            parent=parent,
        )
        spots[id(spot.module)] = spot
        paths.add(spot.path)
        waiting += _below(spot, f"{spot.path}.", f"{spot.raw_name}.", root)
    return iter(spots.values())


def _below(spot: _Spot, prefix: str, raw_prefix: str, root: Root) -> list[tuple[_Spot, str, str, bool, nn.Module]]:
    """What is right below: where, its plain and its raw name, whether it is a block, and the module; last one first."""
    blocks = _blocks_in(spot) if spot.depth_in_block is None else ()
    first = numbered_from(spot.module) if root.in_pipeline else 0
    found = [
        (spot, prefix + (str(int(name) + first) if first else name), raw_prefix + name, name in blocks, module)
        for name, module in children(spot.module).items()
    ]
    return found[::-1]


def _never_runs(module: nn.Module) -> bool:
    """Whether a module only holds others: `ModuleList`, `ModuleDict` and whatever else has no forward."""
    forward = inspect.getattr_static(type(module), "forward", None)  # TorchScript's answers to an instance only
    return forward is nn.Module.forward and "forward" not in module.__dict__


def _blocks_in(container: _Spot) -> tuple[str, ...]:
    """Names of the entries that are a model's repeated units, judged by structure.

    Entries of a list are blocks if they have modules inside and most of them have company of their
    class (several kinds may alternate), or if the list's name says so.
    """
    module = container.module
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return ()
    if _kind(module, container.path) == "expert":
        return ()
    entries = {name: holders(child)[-1] for name, child in children(module).items()}
    classes = {
        name: class_name(entry)
        for name, entry in entries.items()
        if children(entry) and not _never_runs(entry) and not _is_stage_of_a_pipeline(entry)
    }
    counts = Counter(classes.values())
    repeated = tuple(name for name, cls in classes.items() if counts[cls] > 1)
    named_so = _BLOCK_LIST_NAME.fullmatch(container.path.rpartition(".")[2]) and len(classes) == len(entries)
    return tuple(classes) if named_so or len(repeated) * 2 > len(entries) else ()


def _is_stage_of_a_pipeline(module: nn.Module) -> bool:
    """One of the parts of a model that hold blocks of one size each: `SwinStage`."""
    lists = (child for child in children(module).values() if isinstance(child, (nn.ModuleList, nn.Sequential)))
    return looks_like_stage(class_name(module)) and any(
        children(holders(entry)[-1]) for one in lists for entry in children(one).values()
    )


def selector(select: Selection) -> Callable[[_Spot], bool]:
    """Whether a place in the module tree is selected. Raises WrongUse if `select` is no selection of layers."""
    if isinstance(select, str) and select == "auto":
        return _by_default
    if isinstance(select, int) and not isinstance(select, bool) and select >= 0:
        deepest = select
        return lambda spot: spot.depth <= deepest
    patterns = [select] if isinstance(select, (str, re.Pattern)) else select
    if isinstance(patterns, Sequence) and patterns and all(isinstance(one, (str, re.Pattern)) for one in patterns):
        globs = [one if isinstance(one, re.Pattern) else re.compile(fnmatch.translate(one)) for one in patterns]
        return lambda spot: any(glob.search(spot.path) for glob in globs)
    raise WrongUse(f'layers={shown(select)} is no selection. Give "auto", a depth from 0, or name patterns.')


def _by_default(spot: _Spot) -> bool:
    """Not more than one level inside a block; deeper only routers, experts, and adapters with what they adapt."""
    if spot.in_adapted or _facts(spot.module).adapted_attribute is not None:
        return _is_part_of_adapted(spot)
    return (spot.depth_in_block or 0) <= 1 or _is_part_of_mixture(spot)


def _is_part_of_mixture(spot: _Spot) -> bool:
    """The outermost module of experts, or of one, or of those that all tokens share; a router beside them."""
    above = spot.parent
    if above is None or (kind := _kind(spot.module, spot.path)) not in ("router", "expert"):
        return False
    if kind == "expert":
        return expert_number(spot.path) is not None or _kind(above.module, above.path) != "expert"
    beside = ((f"{above.path}.{name}", one) for name, one in children(above.module).items())
    return any(_kind(holders(one)[-1], path) == "expert" for path, one in beside)


def _is_part_of_adapted(spot: _Spot) -> bool:
    """A layer that has adapters, what they adapt, and each of them."""
    above = spot.parent
    if not spot.in_adapted or above is None:
        return True
    is_base = spot.path.rpartition(".")[2] == _facts(above.module).adapted_attribute
    return is_base or (_kind(spot.module, spot.path) == "adapter" and _never_runs(above.module))


def _kind(module: nn.Module, path: str) -> str:
    return kind_of(class_name(module), path)


def _layer(spot: _Spot, label: str) -> Layer:
    name = class_name(spot.module)
    kind = "block" if spot.is_block else kind_of(name, "" if spot.path == ROOT_PATH else spot.path)
    mark = Mark(spot.path, name, kind, label, ("shared",) if spot.shared else ())
    own = sum(_numel(parameter) for parameter in spot.module._parameters.values() if parameter is not None)
    everything = sum(_numel(parameter) for parameter in all_parameters(spot.module))
    return Layer(mark, spot.raw_name, spot.holders, own, everything)


def _numel(parameter: nn.Parameter) -> int:
    """Of the unsharded tensor, where it knows its full size."""
    if isinstance(parameter, UninitializedParameter):
        return 0
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


# --------------------------------------------------------------------------------------------------
# What others wrap around a module, known by class and never by name: a class that nobody imported has no instance.

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
    """The class in the plain model: FSDP2 and parametrizations make a subclass of it, PEFT a layer in its place."""
    adapted = children(module).get(_facts(module).adapted_attribute or "")
    return _facts(module if adapted is None else adapted).plain_name


def holders(module: nn.Module) -> tuple[nn.Module, ...]:
    """`module`, what it wraps, what that wraps: the plain module is the last."""
    held = [module]
    while (inner := children(held[-1]).get(_facts(held[-1]).wrapped_attribute or "")) is not None:
        held.append(inner)
    return tuple(held)


def added_prefix(held: tuple[nn.Module, ...]) -> str:
    """What wrappers add to the names below them: "module._orig_mod." for DDP around `torch.compile`."""
    return "".join(f"{_facts(wrapper).wrapped_attribute}." for wrapper in held[:-1])


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs compiled code: `module.compile()` or a wrapper of `torch.compile`."""
    held = holders(module)
    return any(one._compiled_call_impl is not None or _facts(one).wrapped_attribute == "_orig_mod" for one in held)


def is_part_of_a_model(module: nn.Module) -> bool:
    """Whether `module` is none that a user made: DataParallel's copy for a device, or a compiler's graph."""
    if getattr(module, "_is_replica", False):
        return True
    graphs = sys.modules.get("torch.fx.graph_module")
    is_graph = graphs is not None and isinstance(module, graphs.GraphModule)
    return is_graph and "torch._dynamo" in sys.modules and type(module).__name__ in ("GraphModule", "<lambda>")


def takes(module: nn.Module) -> Collection[str]:
    """The names of what its `forward` takes; none where Python does not tell."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # of TorchScript, or no function
        return ()


def _facts(module: nn.Module) -> _ClassFacts:
    cls: type = type(module)
    if cls not in _known:
        names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
        made_from = (b for b in cls.__bases__ if cls.__name__ in [f"{p}{b.__name__}" for p in _DYNAMIC_PREFIXES])
        _known[cls] = _ClassFacts(
            plain_name=next(made_from, cls).__name__,
            wrapped_attribute=next((_WRAPPED[name] for name in names if name in _WRAPPED), None),
            adapted_attribute=next((_ADAPTED[name] for name in names if name in _ADAPTED), None),
        )
    return _known[cls]
