"""What an exception says about memory that could not be had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from profiler_wrapper.capture.growth import free_bytes

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
    free_bytes: int | None  # on a CPU by now, where the exception has let go of some


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
        return OutOfMemory("cpu", requested, None, None, free_bytes())
    allocated, unused = _size(_ALLOCATED, message), _size(_UNUSED, message)
    reserved = None if allocated is None or unused is None else allocated + unused
    number = _DEVICE.search(message)
    name = "cuda" if kind[1] == "HIP" else kind[1].lower()
    return OutOfMemory(f"{name}:{number[1]}" if number else name, requested, allocated, reserved, _size(_FREE, message))


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2][0].lower()]) if match else None
