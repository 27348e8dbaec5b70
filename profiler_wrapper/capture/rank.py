"""Who a process is within its job, as plain data. Imports no torch: what finishes a window needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL_SET_WORLD_SIZE = 8  # in larger worlds, one rank of each pipeline stage writes everything


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What `run.json` says of the process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # among the ranks of its host; None: nobody tells
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
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "host": self.host,
            "process": self.process,
            "attempt": self.attempt,
            "coordinates": dict(self.coordinates),
            "stages": list(self.stages),
            "device": self.device,
            "device_type": self.device_type,
            "cpu_name": self.cpu_name,
            "versions": dict(self.versions),
            "float32_matmul_precision": self.float32_matmul_precision,
        }
