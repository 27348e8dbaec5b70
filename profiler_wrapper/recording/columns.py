"""Recording: a trace in memory, one numpy array per field.

Times are integer nanoseconds on the trace's own clock; `-1` stands for "the event does not say".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.device_details import CollectiveDetails, DeviceDetails, PythonCalls

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Int8 = npt.NDArray[np.int8]
Bool = npt.NDArray[np.bool_]


class Category(IntEnum):
    """What an event is. Names follow the trace's `cat`."""

    CPU_OP = 0  # ops, autograd nodes and our layer marks
    ANNOTATION = 1  # user_annotation: record_function, ProfilerStep#, Optimizer.step#, FSDP::, nccl:
    MODULE = 2  # python_function events named `nn.Module: ...`
    RUNTIME = 3  # cuda_runtime, cuda_driver, hip_runtime ...: whatever runs on a CPU lane and launches
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    DEVICE_ANNOTATION = 7  # gpu_user_annotation
    SYNC = 8  # cuda_sync


DEVICE_CATEGORIES = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


class Lane(NamedTuple):
    """A row of the trace viewer: a CPU thread, or a stream of a device."""

    pid: int | str
    tid: int | str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Events with a duration, in file order. All arrays have one entry per event."""

    category: Int8  # Category
    name: Int32  # index into Recording.names
    lane: Int32  # index into Recording.lanes
    start_ns: Int64
    duration_ns: Int64
    correlation: Int64
    external_id: Int64
    sequence: Int64  # autograd's `Sequence number`
    forward_thread: Int32  # `Fwd thread id`: the profiler's own thread number; 0 on forward ops
    device: Int16  # device events: the device's index
    stream: Int32  # device events: the stream
    graph: Bool  # device events: a node of a replayed CUDA graph

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEvents:
    """Allocations and frees (`[memory]` instants), in time order."""

    time_ns: Int64
    lane: Int32
    address: Int64
    size_bytes: Int64  # negative: freed
    total_allocated_bytes: Int64
    total_reserved_bytes: Int64
    device_type: Int8  # c10::DeviceType: 0 CPU, 1 CUDA (and ROCm), 9 MPS, 12 XPU, 20 private use
    device: Int16

    def __len__(self) -> int:
        return len(self.time_ns)


class FailedAllocation(NamedTuple):
    """An allocation that could not be met (`[OutOfMemory]` instant)."""

    time_ns: int
    lane: int
    size_bytes: int
    device_type: int  # c10::DeviceType
    device: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardFlows:
    """`fwdbwd` arrows, both ends found: from where a forward op starts to where its backward node starts."""

    forward_lane: Int32
    forward_ns: Int64
    backward_lane: Int32
    backward_ns: Int64

    def __len__(self) -> int:
        return len(self.forward_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What one trace file holds."""

    path: str  # the file it was read from, "" if none
    names: tuple[str, ...]  # interned event names
    lanes: tuple[Lane, ...]
    spans: Spans
    memory: MemoryEvents
    flows: ForwardBackwardFlows
    metadata: Mapping[str, Any]  # the top-level keys of the file but traceEvents
    complete: bool = True  # False: the file is torn
    warnings: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)  # events not kept, by category
    failed_allocations: tuple[FailedAllocation, ...] = ()  # in order of time
    details: DeviceDetails = field(default_factory=DeviceDetails)
    collectives: tuple[CollectiveDetails, ...] = ()  # in file order
    python: PythonCalls = field(default_factory=PythonCalls)

    def name_of(self, span: int) -> str:
        """The name of span number `span`."""
        return self.names[int(self.spans.name[span])]

    @property
    def device_mask(self) -> Bool:
        """True for kernels, copies and sets."""
        mask: Bool = np.isin(self.spans.category, DEVICE_CATEGORIES)
        return mask

    @property
    def rank(self) -> int | None:
        """The rank the trace was written by, where it says."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, Mapping) else None
        return rank if isinstance(rank, int) else None
