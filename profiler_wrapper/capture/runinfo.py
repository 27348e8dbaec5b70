"""Who records and where: rank, place in the device mesh, device, versions."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from profiler_wrapper.capture.layers import Stage
from profiler_wrapper.capture.mesh import (
    has_pipeline,
    megatron_coordinates,
    mesh_coordinates,
    mesh_of,
    mesh_rank,
    root_mesh,
)
from profiler_wrapper.capture.rank import FULL_SET_WORLD_SIZE, RunInfo
from profiler_wrapper.trace.run_directory import attempt_number

__all__ = ["FULL_SET_WORLD_SIZE", "RunInfo", "float32_matmul_precision", "mesh_coordinates", "mesh_of", "run_info"]

# Who tells rank, size of the job and rank on its host: torchrun, SLURM, Open MPI, other launchers of MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def run_info(
    *,
    modules: Iterable[torch.nn.Module] = (),
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
        device_mesh: a `torch.distributed.DeviceMesh` the user gave.
        coordinates: what the user says of the place in the mesh; the mesh, the stages of a pipeline and Megatron-LM's
            parallel state come after it.
        stages: of the pipeline, those that this process holds.
        environment: `os.environ` but in tests.
        version: of this package.
    """
    environment = os.environ if environment is None else environment
    warnings: list[str] = []
    mesh = root_mesh(device_mesh) if device_mesh is not None else mesh_of(modules)
    group_rank, group_size = _process_group()
    told = _told_by_launcher(environment, warnings)
    world_size = group_size or told[1]
    rank_candidates = (rank, mesh_rank(mesh), group_rank, told[0])
    found = next((candidate for candidate in rank_candidates if candidate is not None), 0)
    if world_size is not None and found >= world_size:
        warnings.append(f"rank {found} is beyond the world of {world_size}; it is kept as the name of this process")
    device_type, device = _device()
    return RunInfo(
        rank=found,
        world_size=max(world_size or 1, 1),
        local_rank=told[2],
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


def _told_by_launcher(environment: Mapping[str, str], warnings: list[str]) -> tuple[int | None, int | None, int | None]:
    """Rank, size of the job and rank on the host, each from the first that tells it."""
    told: list[int | None] = [None, None, None]
    numbers: dict[str, int | None] = {}
    for names in _LAUNCHERS:
        for place, name in enumerate(names):
            if name not in numbers:
                numbers[name] = _number(environment, name, warnings)
            if told[place] is None:
                told[place] = numbers[name]
    rank, world_size, local_rank = told
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
        told = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        return {"tf32": "high", "ieee": "highest"}.get(str(told))


def _processor() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            name = next(names, "")
    except OSError:  # no Linux
        name = ""
    return name.replace("(R)", "").replace("(TM)", "") or platform.processor() or platform.machine()


def versions(own: str) -> dict[str, str]:
    """Of everything a time depends on and that names itself."""
    found = {"profiler_wrapper": own, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            found[name] = str(version)
    for package in ("transformers", "diffusers", "flash_attn", "transformer_engine"):
        version = getattr(sys.modules.get(package), "__version__", None)
        if version:
            found[package] = str(version)
    return found


def _process_group() -> tuple[int | None, int | None]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, None


def _number(environment: Mapping[str, str], name: str, warnings: list[str]) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return int(text)
    warnings.append(f"{name}={text!r} in the environment is no number; ignored")
    return None


def _device() -> tuple[str, str | None]:
    """Type and name of the current accelerator; starts no device that nobody uses yet."""
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    if current is None:
        return "cpu", None
    module: Any = getattr(torch, current.type, None)
    try:
        return current.type, str(module.get_device_name()) if module.is_initialized() else None
    except (RuntimeError, AttributeError):
        return current.type, None
