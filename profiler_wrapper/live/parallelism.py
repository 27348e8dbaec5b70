"""How a job is divided among its ranks; found out without asking any other rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler_wrapper.errors import WrongUse

# By what the dimensions of a device mesh are called. The ranks that none of these divides work on other data.
_SHARE_A_BATCH = {
    "tp": "tensor",
    "tensor": "tensor",
    "tensor_parallel": "tensor",
    "model": "tensor",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "pipeline_parallel": "pipeline",
    "pipe": "pipeline",
    "cp": "context",
    "context": "context",
    "context_parallel": "context",
    "sp": "context",
    "sequence": "context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSizes:
    """What the user says of the job; `None`: nothing.

    Raises:
        WrongUse: a size is no whole number above 0, or the sizes do not fit together.
    """

    world_size: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise WrongUse(f"{name}={size!r}: give a whole number above 0.")
        if self.world_size is not None and self.world_size % self.named:
            raise WrongUse(
                f"a world of {self.world_size} ranks does not divide by the {self.named} that data, tensor, pipeline "
                "and context parallel sizes make together."
            )

    @property
    def named(self) -> int:
        """The ranks that the given sizes make together."""
        return (
            (self.data_parallel or 1)
            * (self.tensor_parallel or 1)
            * (self.pipeline_parallel or 1)
            * (self.context_parallel or 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many ranks there are, and how many of them have data of their own.

    Attributes:
        world_size: ranks of the job.
        data_parallel: groups of ranks with a batch of their own; tensor, pipeline and context parallel ranks
            share one.
        pipeline_parallel: stages.
        warning: what does not fit together, and what was taken instead.
    """

    world_size: int = 1
    data_parallel: int = 1
    pipeline_parallel: int = 1
    warning: str | None = None


def parallelism(given: GivenSizes, *, world_size: int, device_mesh: Any = None) -> Parallelism:
    """What the user gave, then what the mesh says, then that every rank has data of its own.

    Args:
        given: sizes by the user.
        world_size: of the process group or the environment.
        device_mesh: a `DeviceMesh` with named dimensions.
    """
    told = {
        "tensor": given.tensor_parallel,
        "pipeline": given.pipeline_parallel,
        "context": given.context_parallel,
    }
    by_mesh = _sizes_of_mesh(device_mesh)
    sharing = {name: size or by_mesh.get(name, 1) for name, size in told.items()}
    share_a_batch = sharing["tensor"] * sharing["pipeline"] * sharing["context"]
    if given.world_size is not None:
        world_size = given.world_size
    elif given.named > world_size and world_size == 1:
        world_size = given.named  # ranks that neither a process group nor the environment tells of
    warning = None
    if given.data_parallel is not None:
        data_parallel = given.data_parallel
        if world_size % (data_parallel * share_a_batch):
            warning = (
                f"data_parallel={data_parallel} does not fit a world of {world_size} ranks of which {share_a_batch} "
                "share a batch; it is taken as given, so check the totals"
            )
    else:
        data_parallel = max(1, world_size // share_a_batch)
        if world_size % share_a_batch:
            warning = (
                f"a world of {world_size} ranks does not divide by the {share_a_batch} that share a batch; "
                f"{data_parallel} is taken for the data parallel size, so check the totals"
            )
    return Parallelism(
        world_size=world_size,
        data_parallel=data_parallel,
        pipeline_parallel=sharing["pipeline"],
        warning=warning,
    )


def _sizes_of_mesh(mesh: Any) -> Mapping[str, int]:
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    sizes: dict[str, int] = {}
    if not names or shape is None:
        return sizes
    for name, size in zip(names, shape, strict=False):
        known = _SHARE_A_BATCH.get(str(name).lower())
        if known is not None:
            sizes[known] = sizes.get(known, 1) * int(size)
    return sizes
