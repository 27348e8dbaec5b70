"""Who records and where, and how the run is set up: what `run.json` says of a process."""

from __future__ import annotations

import inspect
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.growth import free_bytes
from profiler_wrapper.capture.layers import Stage, all_modules, all_parameters
from profiler_wrapper.capture.owned_tensors import dtype_name
from profiler_wrapper.capture.records import DIMENSIONS, WRITTEN_ALWAYS, RunInfo, in_order
from profiler_wrapper.errors import shown
from profiler_wrapper.trace.launch import attempt_number

# Variables that hold rank, size of the job and rank on its host, of torchrun, SLURM, Open MPI, other launchers of MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def run_info(
    *,
    modules: Iterable[nn.Module] = (),
    rank: int | None = None,
    device_mesh: Any = None,
    coordinates: Mapping[str, int] | None = None,
    stages: Sequence[Stage] = (),
    environment: Mapping[str, str] | None = None,
    version: str = "",
) -> RunInfo:
    """Find out about this process; asks nobody else and waits for nobody.

    Args:
        modules: the models, whose sharded parameters may know the device mesh.
        rank: what the user says; the mesh, the process group, torchrun's and SLURM's variables come after it.
        coordinates: what the user says of the place in the mesh; the mesh, the stages of a pipeline and Megatron-LM's
            parallel state come after it.
        stages: of the pipeline, those that this process holds.
    """
    environment = os.environ if environment is None else environment
    warnings: list[str] = []
    mesh = root_mesh(device_mesh) if device_mesh is not None else mesh_of(modules)
    group_rank, group_size = _process_group()
    launcher_rank, launcher_size, local_rank = _of_launcher(environment, warnings)
    world_size = group_size or launcher_size
    rank_candidates = (rank, mesh_rank(mesh), group_rank, launcher_rank)
    found = next((candidate for candidate in rank_candidates if candidate is not None), 0)
    if world_size is not None and found >= world_size:
        warnings.append(f"rank {found} is beyond the world of {world_size}; it is kept as the name of this process")
    device_type, device = _device()
    return RunInfo(
        rank=found,
        world_size=max(world_size or 1, 1),
        local_rank=local_rank,
        host=socket.gethostname(),
        process=os.getpid(),
        attempt=attempt_number(environment),
        coordinates=_coordinates(coordinates, mesh, stages),
        stages=tuple(sorted(stage.number for stage in stages)),
        first_of_stage=_is_first_of_stage(coordinates, mesh, stages, found),
        device=device,
        device_type=device_type,
        cpu_name=f"{_processor()}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
        versions=versions(version),
        float32_matmul_precision=float32_matmul_precision(),
        warnings=tuple(warnings),
    )


def _of_launcher(environment: Mapping[str, str], warnings: list[str]) -> tuple[int | None, int | None, int | None]:
    """Rank, size of the job and rank on the host, each from the first variable that has it."""
    numbers: dict[str, int] = {}
    for name in dict.fromkeys(name for launcher in _LAUNCHERS for name in launcher if name in environment):
        if re.fullmatch(r"[0-9]{1,9}", environment[name].strip()):
            numbers[name] = int(environment[name])
        else:
            warnings.append(f"{name}={shown(environment[name])} in the environment is no number; ignored")
    rank, world_size, local_rank = (
        next((numbers[name] for name in column if name in numbers), None) for column in zip(*_LAUNCHERS, strict=True)
    )
    return rank, world_size or None, local_rank


def _coordinates(given: Mapping[str, int] | None, mesh: Any, stages: Sequence[Stage]) -> dict[str, int]:
    if given is not None:
        return dict(given)
    found = mesh_coordinates(mesh) or megatron_coordinates()
    place = next((stage.place for stage in stages if stage.place is not None), None)
    if place is None or has_pipeline(mesh):
        return found
    return {**found, "pp": place}  # of the other dimensions nothing is known, or what the mesh says


def _is_first_of_stage(given: Mapping[str, int] | None, mesh: Any, stages: Sequence[Stage], rank: int) -> bool | None:
    """Where only the pipeline's group is known: the ranks of the pipeline that rank 0 is in are the first ones."""
    if given is not None or not stages or mesh_coordinates(mesh):
        return None
    ranks = stages[0].ranks
    return 0 in ranks and rank in ranks if ranks else None


def float32_matmul_precision() -> str | None:
    """How products of float32 are done on CUDA: "highest"; "high" and "medium" in TF32; None: torch does not tell."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set for one backend by the newer switch, beside which this one refuses to be asked
        precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        return {"tf32": "high", "ieee": "highest"}.get(str(precision))


def _processor() -> str:
    """The processor's own name where the system has it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            name = next(names, "")
    except OSError:  # no Linux
        name = ""
    return name.replace("(R)", "").replace("(TM)", "") or platform.processor() or platform.machine()


def versions(own: str) -> dict[str, str]:
    """Of everything a time depends on and that names itself."""
    found: dict[str, object] = {"profiler_wrapper": own, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in ("transformers", "diffusers", "flash_attn", "transformer_engine"):
        found[package] = getattr(sys.modules.get(package), "__version__", None)
    return {name: str(version) for name, version in found.items() if version is not None}


def _process_group() -> tuple[int | None, int | None]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, None


def _device() -> tuple[str, str | None]:
    """Type and name of the current accelerator; starts no device that nobody uses yet."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None:
        return "cpu", None
    module: Any = getattr(torch, current.type, None)
    try:
        return current.type, str(module.get_device_name()) if module.is_initialized() else None
    except (RuntimeError, AttributeError):
        return current.type, None


# --- Where a process lies in the job's device mesh: by dimension, from whoever knows. Asks no other rank ---

# Megatron-LM has no mesh; its parallel state knows this process's place in each dimension.
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
        places = (mesh.get_coordinate() if names else None) or ()
        sizes = mesh.shape if places else ()
    except (RuntimeError, AttributeError, TypeError):
        return {}
    found: dict[str, int] = {}
    for name, place, size in zip(names or (), places, sizes, strict=False):
        if (known := DIMENSIONS.get(str(name).lower())) is not None:
            found[known] = found.get(known, 0) * int(size) + int(place)
    return in_order(found)


def has_pipeline(mesh: Any) -> bool:
    """Whether a mesh has a dimension of pipeline stages."""
    return any(DIMENSIONS.get(str(name).lower()) == "pp" for name in getattr(mesh, "mesh_dim_names", None) or ())


def is_in_pipeline(model: object, mesh: Any, coordinates: Mapping[str, int] | None) -> bool:
    """Whether what a user calls a model is a part of it, as a mesh, coordinates or its own parameters tell."""
    if coordinates is not None:
        return coordinates.get("pp", 0) > 0
    if mesh is None:
        modules = [model] if isinstance(model, nn.Module) else model if isinstance(model, (list, tuple)) else []
        mesh = mesh_of(module for module in modules if isinstance(module, nn.Module))
    return has_pipeline(root_mesh(mesh)) or megatron_has_pipeline()


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


def mesh_of(modules: Iterable[nn.Module]) -> Any:
    """The whole mesh that the first sharded parameter lies on."""
    meshes = (getattr(one, "device_mesh", None) for module in modules for one in all_parameters(module))
    return next((root_mesh(mesh) for mesh in meshes if mesh is not None), None)


def root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` is a part of, or itself."""
    try:
        return mesh._get_root_mesh()
    except Exception:  # a private helper that moved: the part of the mesh we have is right too
        return mesh


def mesh_rank(mesh: Any) -> int | None:
    """This process's rank as a mesh has it."""
    try:
        return int(mesh.get_rank()) if mesh is not None else None
    except (RuntimeError, AttributeError, ValueError):
        return None


# --------------------------------------------------------------------------------------------------
# How a run is set up: its optimizers, parameters and wrappers, what torch and its backends were set to.
#
# Asked once, when a window has ended, so that it costs no step anything. Nothing is started by asking: no device, no
# process group. What cannot be known is left out.

_ATTENTION_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")
_WRAPPERS = frozenset(
    (
        "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule",
        "DeepSpeedEngine", "PeftModel",
    )
)  # fmt: skip
# Variables that change how fast a program runs, or how; of torchrun's own, which differ from run to run, none.
_TUNING = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "LD_PRELOAD", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
)  # fmt: skip
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def run_settings(modules: Sequence[nn.Module], optimizers: Iterable[object]) -> dict[str, Any]:
    """What `run.json` says of it, for models with their wrappers and optimizers; a part that fails is left out."""
    parts: dict[str, Callable[[], object]] = {
        "optimizers": lambda: [_optimizer(one) for one in optimizers],
        "parameters": lambda: _parameters(modules),
        "wrappers": lambda: sorted(  # classes that distribute, compile or adapt what they are around
            {base.__name__ for module in modules for inner in all_modules(module) for base in type(inner).__mro__}
            & _WRAPPERS
        ),
        "attention_implementation": lambda: _attention_implementation(modules),
        "process_group_backend": lambda: str(torch.distributed.get_backend()) if _process_group()[1] else None,
        "attention_backends": lambda: {  # those of scaled-dot-product attention that are switched on
            name: bool(is_on())
            for name in _ATTENTION_BACKENDS
            if (is_on := getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)) is not None
        },
        "environment": lambda: {name: os.environ.get(name, "") for name in _TUNING},
        "free_memory_bytes": free_bytes,
        **(_PARTS_OF_CUDA if torch.cuda.is_available() and torch.cuda.is_initialized() else {}),  # type: ignore[no-untyped-call]
    }
    settings = {}
    for name, ask in parts.items():
        try:
            found = ask()
        except Exception:  # of a version of torch, or of a model, that has it otherwise
            continue
        if found is not None:
            settings[name] = found
    return settings


# --- what is trained ----------------------------------------------------------------------------


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "class_name": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        **{name: _of_groups(groups, name) for name in ("fused", "foreach", "capturable", "differentiable")},
        "can_fuse": _accepts(optimizer, "fused") and _have_fused_kernels(parameters),
        "can_foreach": _accepts(optimizer, "foreach"),
        "parameters": len(parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "devices": sorted({parameter.device.type for parameter in parameters}),
        "dtypes": sorted({dtype_name(parameter) for parameter in parameters}),
    }


def _of_groups(groups: Iterable[Mapping[str, Any]], name: str) -> bool | None:
    """What the groups say; None where that is nothing, which leaves it to torch, or not the same."""
    values = {group.get(name) for group in groups}
    return bool(next(iter(values))) if len(values) == 1 and None not in values else None


def _accepts(optimizer: object, name: str) -> bool:
    return name in inspect.signature(type(optimizer).__init__).parameters


def _have_fused_kernels(parameters: Iterable[torch.Tensor]) -> bool:
    from torch.utils import _foreach_utils

    devices = _foreach_utils._get_fused_kernels_supported_devices()
    return all(one.device.type in devices and torch.is_floating_point(one) for one in parameters)


def _parameters(modules: Iterable[nn.Module]) -> dict[str, Any]:
    every = {id(parameter): parameter for module in modules for parameter in all_parameters(module)}
    size_bytes: Counter[str] = Counter()
    for parameter in every.values():
        size_bytes[dtype_name(parameter)] += parameter.numel() * parameter.element_size()
    return {
        "tensors": len(every),
        "elements": sum(parameter.numel() for parameter in every.values()),
        "trainable_elements": sum(parameter.numel() for parameter in every.values() if parameter.requires_grad),
        "bytes_by_dtype": dict(size_bytes),
    }


def _attention_implementation(modules: Iterable[nn.Module]) -> str | None:
    """As a Hugging Face config says: "sdpa", "eager" ...; None where no model has one."""
    configs = (getattr(inner, "config", None) for module in modules for inner in all_modules(module))
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return next((name for name in names if isinstance(name, str)), None)


# --- torch and the device -----------------------------------------------------------------------


_PARTS_OF_CUDA: dict[str, Callable[[], object]] = {
    "device_count": torch.cuda.device_count,
    "device_memory_bytes": lambda: int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory),
    "compute_capability": lambda: list(torch.cuda.get_device_capability()) if torch.version.cuda else None,
    "tf32": lambda: {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
    "cudnn": lambda: {"benchmark": torch.backends.cudnn.benchmark, "deterministic": torch.backends.cudnn.deterministic},
    # Of the caching allocator, as the environment has them; "" where it has none.
    "allocator_settings": lambda: next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), ""),
}
