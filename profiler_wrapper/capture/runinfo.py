"""Who records and where: rank, place in the device mesh, device, versions."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FULL_SET_WORLD_SIZE = 8  # in larger worlds, one rank of each pipeline stage writes everything
_MESH_NAMES = {
    "dp": "dp",
    "ddp": "dp",
    "fsdp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "data": "dp",
    "tp": "tp",
    "tensor": "tp",
    "model": "tp",
    "pp": "pp",
    "pipeline": "pp",
    "pipe": "pp",
    "cp": "cp",
    "context": "cp",
    "ep": "ep",
    "expert": "ep",
}
_WRITTEN_ALWAYS = ("dp", "tp", "pp")  # where there is a mesh: also those of size 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What `run.json` says of the process."""

    rank: int = 0
    world_size: int = 1
    coordinates: Mapping[str, int] = field(default_factory=dict)  # "dp" -> 3; empty: no mesh known
    device: str | None = None  # "NVIDIA H100 80GB HBM3"; None: no accelerator
    device_type: str = "cpu"
    cpu_name: str = ""  # "AMD EPYC 9534 64-Core Processor, 8 threads": those that torch's ops use
    versions: Mapping[str, str] = field(default_factory=dict)
    float32_matmul_precision: str | None = None  # "highest"; "high" and "medium" multiply in smaller types
    warnings: tuple[str, ...] = ()

    @property
    def writes_everything(self) -> bool:
        """This rank writes the full set of files; the others only `run.json` and `result.json`."""
        if self.world_size <= FULL_SET_WORLD_SIZE:
            return True
        if not self.coordinates:
            return self.rank == 0
        return all(place == 0 for name, place in self.coordinates.items() if name != "pp")

    @property
    def directory_name(self) -> str:
        """`"rank3_dp1_tp1_pp0"`, or `"rank3"` where no mesh is known."""
        return "_".join([f"rank{self.rank}", *(f"{name}{place}" for name, place in self.coordinates.items())])

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for `run.json`."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "coordinates": dict(self.coordinates),
            "device": self.device,
            "device_type": self.device_type,
            "cpu_name": self.cpu_name,
            "versions": dict(self.versions),
            "float32_matmul_precision": self.float32_matmul_precision,
        }


def run_info(
    *,
    modules: Iterable[torch.nn.Module] = (),
    rank: int | None = None,
    device_mesh: Any = None,
    environment: Mapping[str, str] | None = None,
    version: str = "",
) -> RunInfo:
    """Find out about this process; asks nobody else and waits for nobody.

    Args:
        modules: the models, whose sharded parameters may know the device mesh.
        rank: what the user says; the mesh, the process group, torchrun's and SLURM's variables come after it.
        device_mesh: a `torch.distributed.DeviceMesh` the user gave.
        environment: `os.environ` but in tests.
        version: of this package.
    """
    environment = os.environ if environment is None else environment
    warnings: list[str] = []
    mesh = device_mesh if device_mesh is not None else mesh_of(modules)
    group_rank, group_size = _process_group()
    world_size = (
        group_size or _number(environment, "WORLD_SIZE", warnings) or _number(environment, "SLURM_NTASKS", warnings)
    )
    rank_candidates = (
        rank,
        _mesh_rank(mesh),
        group_rank,
        _number(environment, "RANK", warnings),
        _number(environment, "SLURM_PROCID", warnings),
    )
    found = next((candidate for candidate in rank_candidates if candidate is not None), 0)
    if world_size is not None and found >= world_size:
        warnings.append(f"rank {found} is beyond the world of {world_size}; it is kept as the name of this process")
    device_type, device = _device()
    return RunInfo(
        rank=found,
        world_size=max(world_size or 1, 1),
        coordinates=mesh_coordinates(mesh),
        device=device,
        device_type=device_type,
        cpu_name=f"{_processor()}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
        versions=versions(version),
        float32_matmul_precision=float32_matmul_precision(),
        warnings=tuple(warnings),
    )


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
        known = _MESH_NAMES.get(str(name).lower())
        if known is not None:
            found[known] = found.get(known, 0) * int(size) + int(place)
    if not found:
        return {}
    return {name: found.get(name, 0) for name in (*_WRITTEN_ALWAYS, *sorted(set(found) - set(_WRITTEN_ALWAYS)))}


def mesh_of(modules: Iterable[torch.nn.Module]) -> Any:
    """The whole mesh that the first sharded parameter lies on."""
    for module in modules:
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return _root_mesh(mesh)
    return None


def _root_mesh(mesh: Any) -> Any:
    try:
        method = getattr(mesh, "_get_root_mesh", None)
        if method is not None:
            return method()
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_root_mesh(mesh)
    except Exception:  # a private helper that moved: the part of the mesh we have is right too
        return mesh


def _mesh_rank(mesh: Any) -> int | None:
    try:
        return int(mesh.get_rank()) if mesh is not None else None
    except (RuntimeError, AttributeError, ValueError):
        return None


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
