"""What a trace says of a device event beside its time: how it was launched, what it copied, which collective it is.

Many events are launched alike, so each holds the number of a configuration, and the configurations are few.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


_THREADS_OF_A_WARP = 32  # on the devices whose traces tell blocks per SM


def _no_sizes() -> Int64:
    return np.empty((0, 3), dtype=np.int64)


def _no_counts() -> Int64:
    return np.empty(0, dtype=np.int64)


def _no_indices() -> Int32:
    return np.empty(0, dtype=np.int32)


def _no_amounts() -> Float64:
    return np.empty(0, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Configurations:
    """How device events were launched, or what they copied. -1, or NaN, where the trace does not tell."""

    grid: Int64 = field(default_factory=_no_sizes)  # blocks
    block: Int64 = field(default_factory=_no_sizes)  # threads
    registers: Int64 = field(default_factory=_no_counts)  # per thread
    shared_memory_bytes: Int64 = field(default_factory=_no_counts)  # per block
    copied_bytes: Int64 = field(default_factory=_no_counts)
    blocks_per_sm: Float64 = field(default_factory=_no_amounts)
    occupancy: Float64 = field(default_factory=_no_amounts)  # estimated achieved, 0 to 1

    def __len__(self) -> int:
        return len(self.registers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceDetails:
    """Kernels, copies and sets of which the trace tells more than their time. All arrays have one entry each."""

    span: Int64 = field(default_factory=_no_counts)  # index into Recording.spans, ascending
    configuration: Int32 = field(default_factory=_no_indices)  # index into `configurations`
    configurations: Configurations = field(default_factory=Configurations)

    def __len__(self) -> int:
        return len(self.span)

    @property
    def grid(self) -> Int64:
        """(n, 3): blocks of the launch; -1 where not told."""
        return self.configurations.grid[self.configuration]

    @property
    def block(self) -> Int64:
        """(n, 3): threads of a block; -1 where not told."""
        return self.configurations.block[self.configuration]

    @property
    def registers(self) -> Int64:
        """Registers per thread; -1 where not told."""
        return self.configurations.registers[self.configuration]

    @property
    def shared_memory_bytes(self) -> Int64:
        """Of a block; -1 where not told."""
        return self.configurations.shared_memory_bytes[self.configuration]

    @property
    def copied_bytes(self) -> Int64:
        """Of a copy or set; -1 where not told."""
        return self.configurations.copied_bytes[self.configuration]

    @property
    def blocks_per_sm(self) -> Float64:
        """Blocks of the grid per multiprocessor of the device; NaN where not told."""
        return self.configurations.blocks_per_sm[self.configuration]

    @property
    def warps_per_sm(self) -> Float64:
        """Warps of the grid per multiprocessor of the device; NaN where not told."""
        threads = self.block.prod(axis=1)
        known: Float64 = np.where((self.block > 0).all(axis=1), threads, np.nan)
        return self.blocks_per_sm * known / _THREADS_OF_A_WARP

    @property
    def occupancy(self) -> Float64:
        """Estimated achieved occupancy, 0 to 1; NaN where not told."""
        return self.configurations.occupancy[self.configuration]

    def configuration_of(self, span: Int64) -> Int64:
        """Per span the row of `configurations`; -1 where the trace tells none."""
        if not len(self.span):
            return np.full(len(span), -1, dtype=np.int64)
        place = np.minimum(np.searchsorted(self.span, span), len(self.span) - 1)
        return np.where(self.span[place] == span, self.configuration[place], -1).astype(np.int64)


class CollectiveDetails(NamedTuple):
    """What an event tells of the collective that it is, or launches; None where it does not tell."""

    span: int  # index into Recording.spans: a kernel, or an op or annotation of the CPU
    name: str  # as the trace has it: allreduce, _allgather_base ...
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None  # Float, BFloat16 ...
    group_size: int | None = None
    group_name: str | None = None
    ranks: tuple[int, ...] | None = None
    sequence: int | None = None  # the same on every rank of the group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PythonCalls:
    """Calls of Python functions that tell their file and line: `file.py(12): name`. Empty without stacks."""

    name: Int32 = field(default_factory=_no_indices)  # index into Recording.names
    lane: Int32 = field(default_factory=_no_indices)  # index into Recording.lanes
    start_ns: Int64 = field(default_factory=_no_counts)
    duration_ns: Int64 = field(default_factory=_no_counts)

    def __len__(self) -> int:
        return len(self.start_ns)
