"""Who a process is within its job, as plain data. Imports no torch: what finishes a window needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from profiler_wrapper.errors import WrongUse

# --------------------------------------------------------------------------------------------------
# Coordinates in a device mesh: their names, and what a user says of them. Imports no torch.

# What the dimensions of a mesh are called, and what they are called in the names of directories.
DIMENSIONS = {
    "dp": "dp",
    "ddp": "dp",
    "fsdp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "data": "dp",
    "data_parallel": "dp",
    "tp": "tp",
    "tensor": "tp",
    "tensor_parallel": "tp",
    "model": "tp",
    "pp": "pp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "pipe": "pp",
    "cp": "cp",
    "context": "cp",
    "context_parallel": "cp",
    "ep": "ep",
    "expert": "ep",
    "expert_parallel": "ep",
}
WRITTEN_ALWAYS = ("dp", "tp", "pp")  # where there is a mesh: also those of size 1


def given_coordinates(given: object) -> dict[str, int]:
    """What a user says: `{"dp": 1, "pp": 0}`, by the same names as a mesh's.

    Raises:
        WrongUse: it is no mapping, names a dimension that is unknown or named twice, or a place is no number from 0.
    """
    if not isinstance(given, Mapping):
        raise WrongUse(f"coordinates={given!r} are none. Give something like {{'dp': 1, 'tp': 0, 'pp': 0}}.")
    found: dict[str, int] = {}
    for name, place in given.items():
        known = DIMENSIONS.get(str(name).lower())
        if known is None:
            raise WrongUse(f"coordinates={given!r}: {name!r} is no dimension. Name dp, tp, pp, cp or ep.")
        if known in found:
            raise WrongUse(f"coordinates={given!r}: {known} is in it twice. Give one number for it.")
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise WrongUse(f"coordinates={given!r}: {name}={place!r} is no place. Give a number from 0.")
        found[known] = place
    return in_order(found)


def in_order(found: Mapping[str, int]) -> dict[str, int]:
    """Coordinates as they are written: dp, tp and pp always, then what else there is."""
    if not found:
        return {}
    return {name: found.get(name, 0) for name in (*WRITTEN_ALWAYS, *sorted(set(found) - set(WRITTEN_ALWAYS)))}


FULL_SET_WORLD_SIZE = 8  # in larger worlds, one rank of each pipeline stage writes everything


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What `run.json` says of the process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # among the ranks of its host; None: not known
    host: str = ""
    process: int | None = None  # its number on that host
    attempt: int = 0  # which start of an elastic job this is, from 0
    coordinates: Mapping[str, int] = field(default_factory=dict)  # "dp" -> 3; empty: no mesh known
    stages: tuple[int, ...] = ()  # of the pipeline, those that are here; empty: none known
    first_of_stage: bool | None = None  # of the ranks that hold the same stage; None: the coordinates tell
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
        if self.first_of_stage is not None:
            return self.first_of_stage
        if not self.coordinates:
            return self.rank == 0
        return all(place == 0 for name, place in self.coordinates.items() if name != "pp")

    @property
    def directory_name(self) -> str:
        """`"rank3_dp1_tp1_pp0"`, or `"rank3"` where no mesh is known."""
        return "_".join([f"rank{self.rank}", *(f"{name}{place}" for name, place in self.coordinates.items())])

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for `run.json`."""
        left_out = ("first_of_stage", "warnings")
        return {name: value for name, value in asdict(self).items() if name not in left_out} | {
            "stages": list(self.stages)
        }
