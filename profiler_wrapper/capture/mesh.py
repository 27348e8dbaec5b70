"""Where a process lies in the job's device mesh: by dimension, from whoever knows. Asks no other rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from profiler_wrapper.capture.rank import DIMENSIONS, WRITTEN_ALWAYS, in_order
from profiler_wrapper.capture.wrappers import all_parameters

# Megatron-LM has no mesh; its parallel state tells this process's place in each dimension.
_MEGATRON = "megatron.core.parallel_state"
_MEGATRON_DIMENSIONS = {
    "dp": "data_parallel",
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}


def mesh_coordinates(mesh: Any) -> dict[str, int]:
    """`{"dp": 1, "tp": 0, "pp": 0}` of this process; empty for no mesh, or one without names.

    Dimensions that mean the same (`dp_replicate` and `dp_shard`) are counted through as one.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    try:
        places = mesh.get_coordinate() if names else None
        sizes = tuple(mesh.shape) if places else ()
    except (RuntimeError, AttributeError, TypeError):
        return {}
    if not names or not places:
        return {}
    found: dict[str, int] = {}
    for name, place, size in zip(names, places, sizes, strict=False):
        known = DIMENSIONS.get(str(name).lower())
        if known is not None:
            found[known] = found.get(known, 0) * int(size) + int(place)
    return in_order(found)


def has_pipeline(mesh: Any) -> bool:
    """Whether a mesh has a dimension of pipeline stages."""
    return any(DIMENSIONS.get(str(name).lower()) == "pp" for name in getattr(mesh, "mesh_dim_names", None) or ())


def megatron_coordinates() -> dict[str, int]:
    """What Megatron-LM's parallel state says, where it is loaded and set up; else nothing."""
    state: Any = sys.modules.get(_MEGATRON)
    found: dict[str, int] = {}
    try:
        if state is None or not state.model_parallel_is_initialized():
            return {}
        for name, dimension in _MEGATRON_DIMENSIONS.items():
            size = getattr(state, f"get_{dimension}_world_size", None)
            if size is not None and (name in WRITTEN_ALWAYS or size() > 1):
                found[name] = int(getattr(state, f"get_{dimension}_rank")())
    except Exception:  # of a version that has it otherwise
        return {}
    return in_order(found)


def megatron_has_pipeline() -> bool:
    """Whether Megatron-LM divides the layers of the model among stages."""
    state: Any = sys.modules.get(_MEGATRON)
    try:
        return state is not None and int(state.get_pipeline_model_parallel_world_size()) > 1
    except Exception:  # not set up yet, or a version that has it otherwise
        return False


def mesh_of(modules: Iterable[torch.nn.Module]) -> Any:
    """The whole mesh that the first sharded parameter lies on."""
    for module in modules:
        for parameter in all_parameters(module):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return root_mesh(mesh)
    return None


def root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` is a part of, or itself."""
    try:
        method = getattr(mesh, "_get_root_mesh", None)
        if method is not None:
            return method()
        if type(mesh).__name__ != "DeviceMesh":
            return mesh
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_root_mesh(mesh)
    except Exception:  # a private helper that moved: the part of the mesh we have is right too
        return mesh


def mesh_rank(mesh: Any) -> int | None:
    """This process's rank as a mesh tells it."""
    try:
        return int(mesh.get_rank()) if mesh is not None else None
    except (RuntimeError, AttributeError, ValueError):
        return None
