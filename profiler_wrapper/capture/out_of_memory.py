"""What an exception says about memory that could not be had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from profiler_wrapper.capture.growth import free_bytes

_ENOUGH_BYTES = 1 << 30  # to analyse what was recorded
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMG]i?B)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
_ON_CPU = re.compile(r"DefaultCPUAllocator|bad_alloc|not enough memory")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that could not be met; sizes in bytes, None where nothing tells."""

    device: str  # "cpu", "cuda:0", "cuda"
    requested_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None

    @property
    def starves_this_process(self) -> bool:
        """Whether hardly any memory is left for what runs on the CPU."""
        return self.device == "cpu" and (self.free_bytes or 0) < _ENOUGH_BYTES


def out_of_memory(error: BaseException | None) -> OutOfMemory | None:
    """What `error`, or one that it was raised from, says; None if it is about something else."""
    for one in _chain(error):
        message = str(one)
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)) or _ON_CPU.search(message):
            return _read(message)
        if isinstance(one, RuntimeError) and "out of memory" in message:
            return _read(message)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _read(message: str) -> OutOfMemory:
    requested = _size(_REQUESTED, message)
    kind = re.match(r"(CUDA|HIP|XPU|MPS)", message)
    if kind is None:
        return OutOfMemory("cpu", requested, None, None, _free_on_cpu())
    allocated, unused = _size(_ALLOCATED, message), _size(_UNUSED, message)
    reserved = None if allocated is None or unused is None else allocated + unused
    number = _DEVICE.search(message)
    name = "cuda" if kind[1] == "HIP" else kind[1].lower()
    return OutOfMemory(f"{name}:{number[1]}" if number else name, requested, allocated, reserved, _size(_FREE, message))


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2][0].lower()]) if match else None


def _free_on_cpu() -> int | None:
    """What the machine, the container or the process's own limit leaves."""
    known = [size for size in (free_bytes(), _below_own_limit()) if size is not None]
    return min(known) if known else None


def _below_own_limit() -> int | None:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return max(0, limit - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError):  # no such limit on this system
        return None
