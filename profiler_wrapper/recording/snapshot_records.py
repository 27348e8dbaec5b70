"""What a memory snapshot of torch holds, as records: segments, blocks, the history of each device, stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from profiler_wrapper.recording.recording import Int64

BlockState = Literal["allocated", "awaiting_free", "free"]

# What an entry of a history says, by the number that stands for it in `AllocatorEvents.action`.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
UNKNOWN = -1  # where a time, an address or the free memory is not given
NO_STACK = 0  # the number of the empty stack
NO_TEXT = 0  # the number of the empty metadata


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack. `source` is the place in the model that generated code stands for, "" for other code."""

    file: str
    line: int
    name: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a segment, given out or free."""

    address: int  # UNKNOWN in old files without any
    size_bytes: int  # given
    requested_bytes: int  # asked for
    state: BlockState
    stack: int  # into MemorySnapshot.stacks
    text: int  # into MemorySnapshot.texts: the metadata it was stamped with


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that the allocator got from the device in one piece."""

    device: int
    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]  # (0, 0): the default one; others belong to CUDA graphs and `MemPool`s
    kind: str  # "small", "large"
    expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocatorEvents:
    """What a device's allocator did, oldest first, as columns of equal length.

    Sizes of alloc and free are those asked for; of an oom too, and its address is UNKNOWN.
    """

    action: Int64  # into ACTIONS
    address: Int64
    size_bytes: Int64
    device_free_bytes: Int64  # of an oom, else UNKNOWN
    time_us: Int64  # since 1970, UNKNOWN in old files
    stack: Int64  # into MemorySnapshot.stacks
    text: Int64  # into MemorySnapshot.texts

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySnapshot:
    """One file: the state of the allocator when it was written, and what it did before, where that was recorded."""

    name: str  # of the file
    file_bytes: int
    segments: tuple[Segment, ...]
    events: Mapping[int, AllocatorEvents]  # by device, those with any
    stacks: tuple[tuple[Frame, ...], ...]  # innermost frame first; the first stack is the empty one
    texts: tuple[str, ...]  # the first is ""
    settings: Mapping[str, str]  # of the allocator, as far as the file has them
    notes: tuple[str, ...]  # what was missing or odd
