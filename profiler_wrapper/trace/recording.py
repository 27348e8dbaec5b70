"""Recording: a trace in memory, one numpy array per field.

Times are integer nanoseconds on the trace's own clock; `-1` stands for "the event does not say".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from profiler_wrapper.trace.events import ABSENT, Event

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Int8 = npt.NDArray[np.int8]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

OUR_CATEGORY = "profiler_wrapper"  # `cat` of the lanes that we add to a trace
MODULE_PREFIX = "nn.Module: "  # begins the name of a Python event that is a call of a module


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


# What the reader does with a `cat` that is no Category.
SKIPPED = -1
UNKNOWN = 100  # a launch, if it has a correlation and lies on a CPU lane; else in no figure, which is said

_CODES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "python_function": Category.MODULE,
    "runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,  # Kineto's enum has it as CONCURRENT_KERNEL
    "memcpy": Category.MEMCPY,
    "gpu_memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
    "gpu_memset": Category.MEMSET,
    "overhead": SKIPPED,
    "trace": SKIPPED,
    "cuda_event": SKIPPED,
    "cuda_profiler_range": SKIPPED,  # around kernels, for counters
    "collective_comm": SKIPPED,
    "": SKIPPED,
    OUR_CATEGORY: SKIPPED,
}


def category_code(cat: str) -> int:
    """The Category that `cat` stands for in any version of Kineto, or SKIPPED, UNKNOWN."""
    cat = cat.lower()
    if cat in _CODES:
        return _CODES[cat]
    if cat.endswith("_sync"):
        return Category.SYNC
    if cat.endswith(("_runtime", "_driver")):
        return Category.RUNTIME
    return UNKNOWN


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
    correlation: Int64 | Int32
    external_id: Int32
    sequence: Int64 | Int32  # autograd's `Sequence number`
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


_sizes: Callable[[], Any] = partial(np.empty, (0, 3), np.int64)
_counts: Callable[[], Any] = partial(np.empty, 0, np.int64)
_indices: Callable[[], Any] = partial(np.empty, 0, np.int32)
_amounts: Callable[[], Any] = partial(np.empty, 0, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Configurations:
    """How device events were launched, or what they copied. -1, or NaN, where the trace does not tell.

    Many events are launched alike, so each has the number of a configuration, and the configurations are few.
    """

    grid: Int64 = field(default_factory=_sizes)  # blocks
    block: Int64 = field(default_factory=_sizes)  # threads
    registers: Int64 = field(default_factory=_counts)  # per thread
    shared_memory_bytes: Int64 = field(default_factory=_counts)  # per block
    copied_bytes: Int64 = field(default_factory=_counts)
    blocks_per_sm: Float64 = field(default_factory=_amounts)
    occupancy: Float64 = field(default_factory=_amounts)  # estimated achieved, 0 to 1

    def __len__(self) -> int:
        return len(self.registers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceDetails:
    """Kernels, copies and sets of which the trace tells more than their time."""

    span: Int64 = field(default_factory=_counts)  # index into Recording.spans, ascending
    configuration: Int32 = field(default_factory=_indices)  # index into `configurations`
    configurations: Configurations = field(default_factory=Configurations)

    def __len__(self) -> int:
        return len(self.span)

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

    name: Int32 = field(default_factory=_indices)  # index into Recording.names
    lane: Int32 = field(default_factory=_indices)  # index into Recording.lanes
    start_ns: Int64 = field(default_factory=_counts)
    duration_ns: Int64 = field(default_factory=_counts)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.duration_ns


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
    failed_allocations: tuple[FailedAllocation, ...] = ()  # in order of time
    details: DeviceDetails = field(default_factory=DeviceDetails)
    collectives: tuple[CollectiveDetails, ...] = ()  # in file order
    python: PythonCalls = field(default_factory=PythonCalls)
    no_profile: str = ""  # what the file is, if it is none that torch.profiler wrote

    def name_of(self, span: int) -> str:
        """The name of span number `span`."""
        return self.names[int(self.spans.name[span])]

    def named(self, test: Callable[[str], object]) -> Bool:
        """Per span: whether its name passes a test, which is made once a name."""
        passes = np.array([bool(test(name)) for name in self.names], dtype=np.bool_)
        mask: Bool = passes[self.spans.name]
        return mask

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


_NAME = attrgetter("name")
_DIMS = attrgetter("args.dims", "args.old_dims")
_NO_DIMS = (ABSENT, ABSENT)
_Undecoded = tuple[bytes, bytes, bytes, bytes]  # dims, types, concrete, strides as a trace has them


# --- Input shapes of ops: many spans, few different shapes ---


@dataclass(frozen=True, slots=True)
class OpShapes:
    """What an op was called with, one entry per input.

    `dims`: a list of ints for a tensor (`[]` for a scalar or none), a list of lists for a list of
    tensors. `types`: `float`, `c10::BFloat16`, `Scalar`, `TensorList` ... `concrete`: the values of
    inputs that are no tensors, as text, else `""`; empty where the trace has none. `strides`: as
    `dims`, in elements; empty where the trace has none.
    """

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    concrete: tuple[str, ...]
    strides: tuple[Any, ...] = ()


class Shapes(Mapping[int, OpShapes]):
    """Index of a span -> its shapes, in file order; different shapes are decoded once, when they are asked for.

    `number_of`: per span the number of its shapes in `distinct`, -1 for none; empty where none has any.
    `recorded`: whether the trace has shapes at all; those of some ops only may have been asked for.
    """

    def __init__(self, number_of: Int32, distinct: Sequence[OpShapes | _Undecoded], *, recorded: bool = True) -> None:
        self.recorded = recorded
        self._number_of = number_of
        self._distinct = list(distinct)

    def number(self, span: int) -> int:
        """Equal for spans with equal shapes."""
        number = int(self._number_of[span]) if 0 <= span < len(self._number_of) else -1
        if number < 0:
            raise KeyError(span)
        return number

    def arrays(self) -> tuple[Int64, Int64]:
        """The spans, and the number of each."""
        spans = np.flatnonzero(self._number_of >= 0)
        return spans, self._number_of[spans].astype(np.int64)

    def numbered(self, number: int) -> OpShapes:
        """The shapes of that number."""
        found = self._distinct[number]
        if isinstance(found, tuple):
            dims, types, concrete, strides = map(_list, found)
            found = self._distinct[number] = OpShapes(dims, tuple(map(str, types)), tuple(map(str, concrete)), strides)
        return found

    def __getitem__(self, span: int) -> OpShapes:
        return self.numbered(self.number(span))

    def __iter__(self) -> Iterator[int]:
        return iter(self.arrays()[0].tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._number_of >= 0))


def _list(raw: bytes) -> tuple[Any, ...]:
    value = msgspec.json.decode(raw) if raw else []
    return tuple(value) if isinstance(value, list) else ()


class ShapeCollector:
    """Gathers shapes from spans as they come, each different one once; of `wanted` names only."""

    def __init__(self, wanted: Callable[[str], bool] | None = None) -> None:
        self._wanted = wanted
        self._is_wanted: dict[str, bool] = {}
        self._recorded = False
        self._numbers: dict[_Undecoded, int] = {}
        self._number_of = bytearray()  # int32, per span

    def add(self, spans: list[Event]) -> None:
        """The next spans, in the order in which they will be numbered."""
        given = list(map(_DIMS, spans))
        number_of = [-1] * len(spans)
        if given.count(_NO_DIMS) < len(given):
            self._recorded = True
            self._number(spans, number_of)
        self._number_of += np.array(number_of, np.int32).tobytes()

    def _number(self, spans: list[Event], number_of: list[int]) -> None:
        names, numbers = list(map(_NAME, spans)), self._numbers
        for name in set(names) - self._is_wanted.keys():
            self._is_wanted[name] = self._wanted is None or self._wanted(name)
        for index in compress(range(len(spans)), map(self._is_wanted.__getitem__, names)):
            args: Any = spans[index].args
            dims = args.dims if args.dims is not ABSENT else args.old_dims
            if dims is not ABSENT:
                key = (bytes(dims), bytes(args.types), bytes(args.concrete), bytes(args.strides))
                number_of[index] = numbers.setdefault(key, len(numbers))

    def shapes(self, kept: Bool) -> Shapes:
        """Those of the spans that are `kept`, numbered as they are once the others are gone."""
        number_of = np.frombuffer(self._number_of, np.int32)[kept] if self._recorded else np.empty(0, np.int32)
        return Shapes(number_of, list(self._numbers), recorded=self._recorded)
