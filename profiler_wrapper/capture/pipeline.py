"""Stages of a pipeline: which modules they hold, and which layers of the whole model those are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiler_wrapper.capture.mesh import has_pipeline, megatron_has_pipeline, mesh_of, root_mesh
from profiler_wrapper.capture.wrappers import children

# How the entries of a list of layers, or a module right below them, say which layer of the whole model they are.
_NUMBERS_FROM_0 = ("layer_idx", "layer_id", "layer_index", "block_idx")
_NUMBER_FROM_1 = "layer_number"  # Megatron-LM


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
    if held is None and getattr(model, "_stage", None) is not None:
        held = [model._stage]  # type: ignore[attr-defined]
    if isinstance(held, (list, tuple)) and not isinstance(model, Mapping):
        return tuple(stage for one in held if _is_stage(one) for stage in (_stage(one),))
    return (_stage(model),) if _is_stage(model) else ()


def _is_stage(found: Any) -> bool:
    return isinstance(getattr(found, "submod", None), nn.Module) and isinstance(
        getattr(found, "stage_index", None), int
    )


def _stage(found: Any) -> Stage:
    place = getattr(found, "group_rank", None)
    return Stage(int(found.stage_index), found.submod, place if isinstance(place, int) else None, _ranks_of(found))


def _ranks_of(found: Any) -> tuple[int, ...]:
    """The ranks that hold the pipeline's stages, as the whole job numbers them."""
    try:
        import torch.distributed as dist

        return tuple(dist.get_process_group_ranks(getattr(found, "group", None)))
    except Exception:  # no process group, or an older torch
        return ()


def is_in_pipeline(model: object, mesh: Any, coordinates: Mapping[str, int] | None) -> bool:
    """Whether what a user calls a model is a part of it, as a mesh, coordinates or its own parameters tell."""
    if coordinates is not None:
        return coordinates.get("pp", 0) > 0
    if mesh is None:
        modules = [model] if isinstance(model, nn.Module) else model if isinstance(model, (list, tuple)) else []
        mesh = mesh_of(module for module in modules if isinstance(module, nn.Module))
    return has_pipeline(root_mesh(mesh)) or megatron_has_pipeline()


def numbered_from(entries: Mapping[str, nn.Module]) -> int:
    """Which layer of the whole model the first of these is, as they say themselves; 0 where they do not agree."""
    for number in (_from_1, *(_from_0(name) for name in _NUMBERS_FROM_0)):
        told = [number(entry) for entry in entries.values()]
        starts = {None if one is None else one - place for place, one in enumerate(told)}
        if len(starts) == 1:
            (start,) = starts
            if start is not None and start > 0:
                return start
    return 0


def _from_1(entry: nn.Module) -> int | None:
    number = getattr(entry, _NUMBER_FROM_1, None)
    return number - 1 if _is_number(number) else None  # type: ignore[operator]


def _from_0(name: str) -> Callable[[nn.Module], int | None]:
    def number(entry: nn.Module) -> int | None:
        for module in (entry, *children(entry).values()):
            told = getattr(module, name, None)
            if _is_number(told):
                return int(told)  # type: ignore[arg-type]
        return None

    return number


def _is_number(told: object) -> bool:
    return isinstance(told, int) and not isinstance(told, bool)
