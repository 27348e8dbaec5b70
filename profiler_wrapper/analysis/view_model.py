"""What an analysis says beyond its layers: ops, kernels, collectives, waits, the split of a step. Frozen rows.

As everywhere: integer nanoseconds, bytes, and `None` for what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from profiler_wrapper.analysis.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One op in one phase, over the timed trace. `self_` leaves out the ops that it calls."""

    op: str  # `(no op)` for what was launched by none
    class_name: str  # of most of its time
    phase: Phase
    calls: int
    self_time_ns: int  # of the device events that it launched itself; on a CPU-only trace, its own CPU time
    time_ns: int  # with the ops that it calls
    self_cpu_time_ns: int
    cpu_time_ns: int
    device_events: int  # kernels, copies and sets that it launched itself
    tensor_core_eligible: bool  # matrix products, convolutions and fused attention
    tensor_core_time_ns: int | None  # of its self time, in kernels that use tensor cores; None where none can tell
    layers: tuple[str, ...]  # the innermost layers it took most time in, at most five
    shapes: tuple[str, ...] = ()  # of its inputs, the most frequent first, at most five, as text; of the full steps
    # `file:line` of the functions around it, where stacks were recorded, at most five: the user's innermost, then
    # libraries' within those; of backward, those whose forward made its nodes.
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel with one launch configuration (copies and sets have none), over the timed trace."""

    name: str
    class_name: str
    count: int
    time_ns: int
    min_ns: int
    max_ns: int
    grid: tuple[int, ...] | None = None  # blocks; of some launches on AMD devices, threads
    block: tuple[int, ...] | None = None  # threads
    registers_per_thread: int | None = None
    shared_memory_bytes: int | None = None
    blocks_per_sm: float | None = None
    occupancy: float | None = None  # 0 to 1, as the profiler estimates it; mean by time
    tensor_cores: bool | None = None  # by what the kernel is; None where its name does not tell
    ops: tuple[str, ...] = ()  # that launched it, at most three
    layers: tuple[str, ...] = ()  # innermost, those with most of its time, at most three
    copied_bytes: int | None = None  # of copies and sets: in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One kind of collective in one process group, for one layer and phase."""

    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ... ; "other"
    group: str  # name of the process group; "" where the trace does not tell
    group_size: int | None
    dtype: str  # "" where the trace does not tell
    layer: str | None  # "" for collectives of several layers, and what has none; None where not known
    phase: Phase
    count: int  # calls; 0 for what gloo's own threads do for calls that are counted elsewhere
    payload_bytes: int | None  # the larger of what goes in and comes out, of all of them
    time_ns: int
    exposed_ns: int | None  # with no compute beside it; None without device events
    overlapped_ns: int | None  # with compute beside it: time - exposed
    bandwidth_bytes_per_s: float | None  # payload over time
    bus_bandwidth_bytes_per_s: float | None  # as nccl-tests define it


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronisationRow:
    """Waits of the CPU for the device, of one kind, op, layer and phase."""

    kind: Literal["item", "nonzero", "blocking copy", "stream", "device", "event", "other"]
    op: str  # torch's op that was called (`aten::item`), else the call into the runtime
    layer: str | None  # innermost; "" outside of all; None where not known
    phase: Phase
    count: int  # ops that waited; calls, where no op did
    wait_ns: int  # CPU time in the calls that wait
    sources: tuple[str, ...] = ()  # `file:line`, where stacks were recorded, as those of an op


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Wall time of one step, without overlap, in this order of priority. The parts add up to `span_ns` exactly.

    An instant with a kernel running is kernel time, whatever else runs beside it; and so on down the list. Kernels
    that move data between ranks are communication, so this is what of it no other kernel hides: copies do not compute.
    """

    step: int | None  # None: a trace without steps, taken as one
    span_ns: int  # until both the CPU and the devices are done with it, from the end of the step before at the earliest
    kernel_ns: int
    communication_ns: int
    memcpy_ns: int
    memset_ns: int
    runtime_ns: int  # calls into the runtime or driver
    dataloader_ns: int
    cpu_ns: int  # ops, with no device at work
    other_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """How busy the machine is within the steps, of the device with most kernel time where there are several."""

    device: str | None
    device_memory_bytes: int | None
    compute_capability: str | None  # "9.0"
    multiprocessors: int | None
    steps: tuple[StepSplit, ...]
    utilization: float | None  # union of kernels over the wall time of the steps; all None without device events
    sm_efficiency: float | None  # sum of min(blocks per SM, 1) x duration, over the wall time of the steps
    occupancy: float | None  # estimated achieved, mean over kernels by time
    tensor_core_share: float | None  # of kernel time
    kernels: int  # launched within the steps
    launches_per_s: float | None
    gaps_ns: int | None  # within the steps, without any device event running


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One matrix product or convolution by its sizes, of the steps with shapes."""

    op: str
    layer: str  # innermost; "" where it has none
    phase: Phase
    dtype: str  # float32, bfloat16 ...
    m: int
    n: int
    k: int
    batch: int  # products of this size in one call; 1 for mm
    calls_per_step: float
    time_per_step_ns: int  # in the steps with shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCallRow:
    """Calls of scaled-dot-product attention with equal inputs, of the steps with shapes."""

    layer: str
    phase: Phase
    backend: str  # that ran: flash, cudnn, mem_efficient, math, flex, external
    dtype: str
    query_shape: tuple[int, ...]  # (batch, heads, tokens, head_dim)
    key_shape: tuple[int, ...]
    mask: bool | None  # a tensor was given as mask; None where the trace does not tell
    causal: bool | None
    dropout: float | None
    grouped: bool  # fewer heads of keys than of queries
    calls_per_step: float
    time_per_step_ns: int
    value_shape: tuple[int, ...] = ()
    mask_shape: tuple[int, ...] = ()
    strided: bool = False  # the last dimension of an input is not dense


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRow:
    """One allocation of the recording, among the largest."""

    size_bytes: int
    allocated_ns: int  # since the recording's begin, as are the times of `memory.curve`
    released_ns: int | None  # None: alive at the end of the recording
    layer: str
    op: str
    phase: Phase | None
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemoryRow:
    """What one op allocated over the recording. The rows add up to all allocations of the device."""

    op: str  # the innermost that does not merely allocate; "" for what is allocated outside of all ops
    allocations: int
    allocated_bytes: int  # sum over its allocations
    kept_bytes: int | None  # of them, still alive when the op returned; None for what no op made
    largest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that could be better, with its evidence and what changing it would save at most."""

    id: str  # of the rule: "attention-fallback"
    title: str  # one line: what is so, with its number
    layer: str | None  # where; a folded name such as `model.layers.{0..31}.self_attn` for like layers; None: all
    phase: Phase | None
    share: float | None  # of the step's time (of the peak, where it saves bytes only) that this is about, 0 to 1
    saves_at_most_us: float | None  # a step; None where time is not what it saves, or it is not known
    saves_at_most_bytes: int | None  # at the peak
    evidence: tuple[str, ...]  # numbers of this run
    confidence: Literal["high", "medium", "low"]
    fix: str  # one line: how
    source: str | None = None  # `file:line` to change, where it is known
    layers: tuple[str, ...] = ()  # all that it is about
    details: Mapping[str, object] = field(default_factory=dict)  # numbers behind the evidence, for programs
