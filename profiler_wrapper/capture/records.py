"""What a recording consists of, as plain data: its traces, the memory that could not be had, whose process it is.

Imports no torch: what finishes a window needs none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.run_file import Holding, KVCache


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """One exported session."""

    path: Path
    steps: tuple[int, ...] | None  # those that were recorded from begin to end; None: as the trace has them
    shapes: bool
    held: tuple[Holding, ...] = ()  # which memory the model and its optimizers held meanwhile
    # torch keeps the sizes of a CPU's blocks from one session to the next, and does not see what is freed in between:
    # a free of what this recording did not allocate may be of another block at the same address.
    cpu_frees_unsure: bool = False
    core_wait_share: float = 0.0  # of its time, how long one thread was ready to run and had no core, at most


@dataclass(slots=True)
class Window:
    """One stretch of recording: at most one trace in full and one timed."""

    full: RecordedTrace | None = None
    timed: RecordedTrace | None = None
    complete: bool = True
    begin_ns: int | None = None  # of the first session's recording, since 1970 by this machine's clock; None: unknown
    end_ns: int | None = None  # of the last one's
    warnings: list[str] = field(default_factory=list)
    why_full: str = "recording ended before a timed step did"  # where nothing was timed
    step_source: str | None = None  # what ended its steps; None: nothing did
    left_out: list[dict[str, Any]] = field(default_factory=list)  # {what, count, time_us}
    kv_cache: list[KVCache] = field(default_factory=list)  # of each model the largest
    evaluated_steps: list[int] = field(default_factory=list)  # that do not count, for a model was evaluated in them
    frees_unseen: bool = False  # threads that were not recorded may have freed memory

    @property
    def empty(self) -> bool:
        """Nothing of it was recorded."""
        return self.full is None and self.timed is None

    def drop_traces(self, *, but: Collection[Path] = ()) -> None:
        """Remove them where they were exported to, `but` those."""
        for trace in (self.full, self.timed):
            if trace is not None and trace.path not in but:
                with suppress(OSError):
                    trace.path.unlink(missing_ok=True)

    def warn(self, message: str, *, incomplete: bool = False) -> None:
        """Keep a message for the result."""
        if message not in self.warnings:
            self.warnings.append(message)
        self.complete = self.complete and not incomplete


# --- What an exception says about memory that could not be had ---

_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = r"(\d+(?:\.\d*)?) (bytes|[KMGT]i?B)"
_REQUESTED = re.compile(rf"(?:[Tt]ried|Unable) to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
_KIND = re.compile(r"\b(CUDA|HIP|XPU|MPS)\b", re.IGNORECASE)
_ON_DEVICE = re.compile(r"(CUDA|HIP|XPU|MPS).*out of memory", re.IGNORECASE | re.DOTALL)
_ON_CPU = re.compile(r"DefaultCPUAllocator|bad_alloc|not enough memory")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that could not be met; sizes in bytes, None where not known."""

    device: str  # "cpu", "cuda:0"; "cuda" or "an accelerator" where its number, or its kind, is not said
    requested_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None  # None on a CPU: by now the exception has let go of some


def out_of_memory(error: BaseException | None) -> OutOfMemory | None:
    """What `error`, or one that it was raised from, says; None if it is about something else."""
    for one in _chain(error):
        try:
            message = str(one)
        except Exception:  # its own __str__ fails
            return None
        of_runtime = isinstance(one, RuntimeError)
        if isinstance(one, MemoryError) or (of_runtime and _ON_CPU.search(message)):
            return OutOfMemory("cpu", _size(_REQUESTED, message), None, None, None)
        if type(one).__name__ == "OutOfMemoryError" or (of_runtime and _ON_DEVICE.search(message)):
            allocated, unused = _size(_ALLOCATED, message), _size(_UNUSED, message)
            reserved = None if allocated is None or unused is None else allocated + unused
            kind, number = _KIND.search(message), _DEVICE.search(message)
            name = "an accelerator" if kind is None else "cuda" if kind[1].upper() == "HIP" else kind[1].lower()
            device = f"{name}:{number[1]}" if number else name
            return OutOfMemory(device, _size(_REQUESTED, message), allocated, reserved, _size(_FREE, message))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2][0].lower()]) if match else None


# --- Who a process is within its job ---

# What the dimensions of a mesh are called in the names of directories, by what others call them.
_SYNONYMS = {
    "dp": "dp ddp fsdp dp_replicate dp_shard replicate shard data data_parallel",
    "tp": "tp tensor tensor_parallel model",
    "pp": "pp pipeline pipeline_parallel pipe",
    "cp": "cp context context_parallel",
    "ep": "ep expert expert_parallel",
}
DIMENSIONS = {other: name for name, others in _SYNONYMS.items() for other in others.split()}
WRITTEN_ALWAYS = ("dp", "tp", "pp")  # where there is a mesh: also those of size 1


def given_coordinates(given: object) -> dict[str, int]:
    """What a user says, `{"dp": 1, "pp": 0}`, by the same names as a mesh's. Raises WrongUse: it means no place."""
    if not isinstance(given, Mapping):
        raise WrongUse(f"coordinates={shown(given)} are none. Give something like {{'dp': 1, 'tp': 0, 'pp': 0}}.")
    found: dict[str, int] = {}
    for name, place in given.items():
        known = DIMENSIONS.get(str(name).lower())
        if known is None:
            raise WrongUse(f"coordinates={shown(given)}: {shown(name)} is no dimension. Name dp, tp, pp, cp or ep.")
        if known in found:
            raise WrongUse(f"coordinates={shown(given)}: {known} is in it twice. Give one number for it.")
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise WrongUse(f"coordinates={shown(given)}: {name}={shown(place)} is no place. Give a number from 0.")
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
