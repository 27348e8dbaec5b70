"""What was recorded, as files: one stretch of steps, and what has to be said of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from profiler_wrapper.trace.run_directory import Holding

# --------------------------------------------------------------------------------------------------
# What an exception says about memory that could not be had.

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
        if isinstance(one, MemoryError) or (isinstance(one, RuntimeError) and _ON_CPU.search(message)):
            return OutOfMemory("cpu", _size(_REQUESTED, message), None, None, None)
        of_torch = type(one).__name__ == "OutOfMemoryError"
        if of_torch or (isinstance(one, RuntimeError) and _ON_DEVICE.search(message)):
            return _on_device(message)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _on_device(message: str) -> OutOfMemory:
    allocated, unused = _size(_ALLOCATED, message), _size(_UNUSED, message)
    reserved = None if allocated is None or unused is None else allocated + unused
    kind, number = _KIND.search(message), _DEVICE.search(message)
    name = "an accelerator" if kind is None else "cuda" if kind[1].upper() == "HIP" else kind[1].lower()
    device = f"{name}:{number[1]}" if number else name
    return OutOfMemory(device, _size(_REQUESTED, message), allocated, reserved, _size(_FREE, message))


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2][0].lower()]) if match else None


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

    @property
    def empty(self) -> bool:
        """Nothing of it was recorded."""
        return self.full is None and self.timed is None

    def warn(self, message: str, *, incomplete: bool = False) -> None:
        """Keep a message for the result."""
        if message not in self.warnings:
            self.warnings.append(message)
        self.complete = self.complete and not incomplete
