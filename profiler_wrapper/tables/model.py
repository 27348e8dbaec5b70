"""What an analysis says: frozen rows, in integer nanoseconds and bytes.

`None` stands for "not known"; a warning of the analysis says why. Comments of fields are what the schema says of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args

from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.call_rows import AdapterRow, ExpertLayerRow, ExpertRow, LayerCall, PartRow
from profiler_wrapper.tables.deferred import Deferred
from profiler_wrapper.tables.timeline_columns import NO_TRACE, Timeline
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.trace.recording import Int64
from profiler_wrapper.trace.run_file import Run

MemoryCategory = Literal[
    "params", "grads", "os_params", "os_state", "activation", "communication", "workspace", "other"
]  # fmt: skip
# params: parameters and buffers. grads: what `.grad` holds. os_params: an optimizer's own (master) copies of
# parameters. os_state: its state. activation: what the passes through the model make, forward, recompute and
# backward, and hold beyond the op that made it. communication: buffers of collectives. workspace: gone again when
# the op, or the optimizer's step, that made it ends. other: all else, with what was there before profiling.
CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
BEFORE_PROFILING = "before profiling"  # the `op` of an owner that was there when the recording began


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds bytes at one moment, and why. Rows with equal keys are one; phase None: what was there before."""

    category: MemoryCategory  # what the bytes are for
    layer: str  # full name; empty for what has no layer
    name: str  # of the tensor; empty for what has none
    op: str  # that allocated it
    phase: Phase | None  # in which it was allocated
    size_bytes: int  # that it holds
    count: int  # allocations
    call_path: tuple[str, ...] = ()  # down to the layer by calls, of one that not only its parent calls; else empty


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """What the categories hold at one moment; they add up to `total_bytes` exactly."""

    label: str  # which it is: after forward, after backward, after optimizer ...
    step: int | None  # number of the step
    time_ns: int  # time on the trace's clock
    total_bytes: int  # allocated then
    reserved_bytes: int | None  # reserved then; None on a CPU
    categories: Mapping[MemoryCategory, int]  # by what they are for, in bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """After each event of the device's allocator: bytes by category, in the order of CATEGORIES."""

    time_ns: Int64  # shape (events,)
    bytes_by_category: Int64  # shape (categories, events)
    total_bytes: Int64  # shape (events,): the sum over categories
    reserved_bytes: Int64 | None  # shape (events,); None on a CPU
    phase_starts: tuple[tuple[int, Phase], ...] = ()  # when a phase begins, ascending in time

    def phase_at(self, time_ns: int) -> Phase | None:
        """The phase that the loop is in; None before the first one."""
        place = bisect_right(self.phase_starts, time_ns, key=lambda start: start[0]) - 1
        return self.phase_starts[place][1] if place >= 0 else None


class StepTime(NamedTuple):
    """When a step begins and ends; one that no other follows may end never."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A straight line through what is allocated at the ends of the steps, without the first of more than three."""

    bytes_per_step: float  # what is added every step
    error_bytes_per_step: float | None  # half the 95 % interval; None for fewer than three steps
    steps: int  # over which this was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Allocations of one op in one layer that stay, step after step."""

    layer: str  # full name in the plain model; "" for what by nature has no module; null where not known
    op: str  # name of the op (aten::mm)
    phase: Phase  # what the loop was doing
    # what the bytes are for: params, grads, os_params, os_state, activation, communication, workspace, other
    category: MemoryCategory
    bytes_per_step: float  # what is added every step
    count_per_step: float  # how many are added every step
    steps: int  # over which this was seen


ChangeKind = Literal["checkpoint", "no_grad", "free_grads", "smaller_batch", "chunk_loss", "optimizer_state", "leak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would lower the peak, from this run's numbers."""

    kind: ChangeKind  # what it is: of a layer block, attention, mlp, norm, ...; of a change what to do
    text: str  # one line: what to do
    layers: tuple[str, ...]  # layers that it is about
    saves_bytes: int  # at the peak
    costs_ns: int | None  # time a step more; None where the run does not tell


class PeakKeys(TypedDict):
    """The highest allocated, in `result.json`."""

    allocated_bytes: int  # the highest allocated
    reserved_bytes: int | None  # the highest reserved; None on a CPU
    time_ns: int  # time on the trace's clock
    step: int | None  # number of the step
    phase: Phase | None  # what the loop was doing
    owners: Sequence[Annotated[Mapping[str, Any], Owner]]  # who held it, the largest first
    reserved: Annotated[Mapping[str, Any], MemoryMoment] | None  # the moment of the highest reserved; None on a CPU


class Curve(TypedDict):
    """Memory over time: what is held from each time on, until the next."""

    start_ns: int  # the recording's begin, on the trace's clock
    end_us: float  # the recording's end, since its begin
    events: int  # events of the allocator, of which these are some
    time_us: Sequence[float]  # times since the begin
    allocated_bytes: Sequence[int]  # allocated then
    reserved_bytes: Sequence[int] | None  # reserved then; None on a CPU
    categories: Mapping[str, Sequence[int]]  # by what it is for, in bytes; those that hold nothing are left out
    steps: Sequence[Mapping[str, Any]]  # when steps begin and end
    phases: Sequence[Mapping[str, Any]]  # when phases begin


class Memory(TypedDict, total=False):
    """The `memory` of a result: what was allocated, by whom and why."""

    device: str | None  # cpu, cuda:0 ...
    known_owners: bool  # parameters and optimizers were seen; else grads and os_state are inferred
    allocated_bytes: int | None  # at the end of the recording
    reserved_bytes: int | None  # at the end of the recording; None on a CPU
    categories: Mapping[MemoryCategory, int] | None  # at the peak, in bytes: they add up to what is allocated
    peak: PeakKeys | None  # the highest allocated
    moments: Sequence[Annotated[Mapping[str, Any], MemoryMoment]]  # per step after forward, backward, optimizer
    slope: Annotated[Mapping[str, Any], Slope] | None  # how allocated memory grows; None: not known, as in one step
    leaks: Sequence[Annotated[Mapping[str, Any], Leak]] | None  # what stays, step after step; None: not known
    changes: Sequence[Annotated[Mapping[str, Any], Change]]  # what would lower the peak
    curve: Curve  # what is held from each time on, until the next


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Everything known of one device's memory over a recording."""

    device: str  # "cpu", "cuda:0"
    known_owners: bool  # parameters and optimizers were seen: else grads and os_state are inferred from what stays
    timeline: MemoryTimeline
    peak: MemoryMoment  # the highest allocated
    peak_owners: tuple[Owner, ...]  # at that moment, the largest first; they add up to its total
    reserved_peak: MemoryMoment | None  # the highest reserved; None on a CPU
    moments: tuple[MemoryMoment, ...]  # per step after forward, backward, optimizer, in order of time
    last: MemoryMoment  # where an allocation failed, the last that did; without one, at the last allocation
    last_owners: tuple[Owner, ...]
    slope: Slope | None  # None for fewer than two steps, and where frees are not seen
    begin_ns: int  # of the recording: the zero of all times of memory that are shown
    end_ns: int
    leaks: tuple[Leak, ...] | None = ()  # the largest first; None where frees are not seen
    changes: tuple[Change, ...] = ()  # the largest saving first
    notes: tuple[str, ...] = field(default=())  # what is not known, and why
    steps: tuple[StepTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One op in one phase, over the timed trace. `self_` leaves out the ops that it calls."""

    op: str  # `(no op)` for what was launched by none
    class_name: str  # of most of its time
    phase: Phase  # what the loop was doing
    calls: int  # how often it was called, in all timed steps
    self_time_ns: int  # of the device events that it launched itself; on a CPU-only trace, its own wall time
    time_ns: int  # with the ops that it calls
    self_cpu_time_ns: int  # time of the CPU in it, without what it calls
    cpu_time_ns: int  # time of the CPU in it, with what it calls
    device_events: int  # kernels, copies and sets that it launched itself
    tensor_core_eligible: bool  # matrix products, convolutions and fused attention
    tensor_core_time_ns: int | None  # of its self time, in kernels that use tensor cores; None where none can tell
    layers: tuple[str, ...]  # the innermost layers it took most time in, at most five of `layer_count`
    shapes: tuple[str, ...] = ()  # of its inputs, the most frequent first, at most five, as text; of the full steps
    # `file:line` of the functions around it, where stacks were recorded, at most five: the user's innermost, then
    # libraries' within those; of backward, those whose forward made its nodes.
    sources: tuple[str, ...] = ()
    layer_count: int | None = None  # innermost layers that it ran in


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel with one launch configuration (copies and sets have none), over the timed trace."""

    name: str  # name as the trace has it
    class_name: str  # Class: of a layer, its Python class; of events gemm, attention, norm, softmax, elementwise, ...
    count: int  # how many events
    time_ns: int  # time of them all
    min_ns: int  # the shortest one
    max_ns: int  # the longest one
    grid: tuple[int, ...] | None = None  # blocks; of some launches on AMD devices, threads
    block: tuple[int, ...] | None = None  # threads
    registers_per_thread: int | None = None  # of the launch
    shared_memory_bytes: int | None = None  # of the launch, a block
    blocks_per_sm: float | None = None  # of the launch, over all multiprocessors
    occupancy: float | None = None  # 0 to 1, as the profiler estimates it; mean by time
    tensor_cores: bool | None = None  # by what the kernel is; None where its name does not tell
    ops: tuple[str, ...] = ()  # that launched it, at most three
    layers: tuple[str, ...] = ()  # innermost, those with most of its time, at most three of `layer_count`
    copied_bytes: int | None = None  # of copies and sets: in all
    layer_count: int | None = None  # innermost layers that launched it


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One kind of collective in one process group, for one layer and phase."""

    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ... ; "other"
    group: str  # name of the process group; "" where the trace does not tell
    group_size: int | None  # ranks in the group; null where the trace does not tell
    dtype: str  # "" where the trace does not tell
    layer: str | None  # "" for collectives of several layers, and what has none; None where not known
    phase: Phase  # what the loop was doing
    count: int  # calls; 0 for what gloo's own threads do for calls that are counted elsewhere
    payload_bytes: int | None  # the larger of what goes in and comes out, of all of them
    time_ns: int  # time of them all
    exposed_ns: int | None  # with no compute beside it; None without device events
    overlapped_ns: int | None  # with compute beside it: time - exposed
    bandwidth_bytes_per_s: float | None  # payload over time
    bus_bandwidth_bytes_per_s: float | None  # as nccl-tests define it


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronisationRow:
    """Waits of the CPU for the device, of one kind, op, layer and phase."""

    kind: Literal["item", "nonzero", "blocking copy", "stream", "device", "event", "other"]  # what makes it wait
    op: str  # torch's op that was called (`aten::item`), else the call into the runtime
    layer: str | None  # innermost; "" outside of all; None where not known
    phase: Phase  # what the loop was doing
    count: int  # ops that waited; calls, where no op did
    wait_ns: int  # wall time in the calls that wait
    sources: tuple[str, ...] = ()  # `file:line`, where stacks were recorded, as those of an op


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Wall time of one step, without overlap, in this order of priority. The parts add up to `span_ns` exactly.

    An instant with a kernel running is kernel time, whatever else runs beside it; and so on down the list. Kernels
    that move data between ranks are communication, so this is what of it no other kernel hides: copies do not compute.
    """

    step: int | None  # None: a trace without steps, taken as one
    span_ns: int  # until both the CPU and the devices are done with it, from the end of the step before at the earliest
    kernel_ns: int  # a kernel running
    communication_ns: int  # a collective running, and neither kernel, copy nor set
    memcpy_ns: int  # a copy running, and no kernel or communication
    memset_ns: int  # a set running, and no kernel, communication or copy
    runtime_ns: int  # calls into the runtime or driver
    dataloader_ns: int  # loading data
    cpu_ns: int  # ops, with no device at work
    other_ns: int  # nothing of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """How busy the machine is within the steps, of the device with most kernel time where there are several."""

    device: str | None  # name of the device; null without one
    device_memory_bytes: int | None  # memory of the device
    compute_capability: str | None  # "9.0"
    multiprocessors: int | None  # of the device
    steps: tuple[StepSplit, ...]  # one entry a step
    utilization: float | None  # union of kernels over the wall time of the steps; all None without device events
    sm_efficiency: float | None  # sum of min(blocks per SM, 1) x duration, over the wall time of the steps
    occupancy: float | None  # estimated achieved, mean over kernels by time
    tensor_core_share: float | None  # of kernel time
    kernels: int  # launched within the steps
    launches_per_s: float | None  # launches within the steps, a second
    gaps_ns: int | None  # within the steps, without any device event running


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One matrix product or convolution by its sizes, of the steps with shapes."""

    op: str  # name of the op (aten::mm)
    layer: str  # innermost; "" where it has none
    phase: Phase  # what the loop was doing
    dtype: str  # float32, bfloat16 ...
    m: int  # rows of the result
    n: int  # columns of the result
    k: int  # inner size of the product
    batch: int  # products of this size in one call; 1 for mm
    calls_per_step: float  # Calls, a step
    time_per_step_ns: int  # in the steps with shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCallRow:
    """Calls of scaled-dot-product attention with equal inputs, of the steps with shapes."""

    layer: str  # full name in the plain model; "" for what by nature has no module; null where not known
    phase: Phase  # what the loop was doing
    backend: str  # that ran: flash, cudnn, mem_efficient, math, flex, external
    dtype: str  # type of number by torch's name (bfloat16); empty where the trace does not tell
    query_shape: tuple[int, ...]  # (batch, heads, tokens, head_dim)
    key_shape: tuple[int, ...]  # shape of the keys: batch, heads, tokens, head_dim
    mask: bool | None  # a tensor was given as mask; None where the trace does not tell
    causal: bool | None  # whether attention was causal; null where the trace does not tell
    dropout: float | None  # Probability; null where the trace does not tell
    grouped: bool  # fewer heads of keys than of queries
    calls_per_step: float  # Calls, a step
    time_per_step_ns: int  # Time, a step, in the steps with shapes
    value_shape: tuple[int, ...] = ()  # shape of the values: batch, heads, tokens, head_dim
    mask_shape: tuple[int, ...] = ()  # shape of the mask; empty where none was given
    strided: bool = False  # the last dimension of an input is not dense


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRow:
    """One allocation of the recording, among the largest."""

    size_bytes: int  # size
    allocated_ns: int  # since the recording's begin, as are the times of `memory.curve`
    released_ns: int | None  # None: alive at the end of the recording
    layer: str  # full name in the plain model; "" for what by nature has no module; null where not known
    op: str  # name of the op (aten::mm)
    phase: Phase | None  # what the loop was doing
    # what the bytes are for: params, grads, os_params, os_state, activation, communication, workspace, other
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemoryRow:
    """What one op allocated over the recording. The rows add up to all allocations of the device."""

    op: str  # the innermost that does not merely allocate; "" for what is allocated outside of all ops
    allocations: int  # how many allocations
    allocated_bytes: int  # sum over its allocations
    kept_bytes: int | None  # of them, still alive when the op returned; None for what no op made
    largest_bytes: int  # the largest one


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that could be better, with its evidence and what changing it would save at most."""

    id: str  # of the rule: "attention-fallback"
    title: str  # one line: what is so, with its number
    layer: str | None  # where; a folded name such as `model.layers.{0..31}.self_attn` for like layers; None: all
    phase: Phase | None  # what the loop was doing
    share: float | None  # of what `share_of` names that this is about, 0 to 1
    saves_at_most_us: float | None  # a step; None where time is not what it saves, or it is not known
    saves_at_most_bytes: int | None  # at the peak
    evidence: tuple[str, ...]  # numbers of this run
    confidence: Literal["high", "medium", "low"]  # how sure this is
    fix: str  # one line: how
    source: str | None = None  # `file:line` to change, where it is known
    layers: tuple[str, ...] = ()  # all that it is about
    details: Mapping[str, object] = field(default_factory=dict)  # numbers behind the evidence, for programs
    next: str | None = None  # command that shows the rows behind it, with RUN for the path of the run or trace
    share_of: str | None = None  # what `share` is a share of, in words


class Comparable(TypedDict, total=False):
    """What two results must have in common to be compared: machine, model, sizes, how it was recorded."""

    device: str | None  # name of the device; None without one
    device_count: int | None  # devices that ran something; None on a CPU
    cpu_name: str | None  # name of the CPU
    time_basis: str  # of times: device or cpu
    torch: str | None  # version
    python: str | None  # version
    world_size: int | None  # number of ranks
    coordinates: Mapping[str, int]  # place in the device mesh
    dtypes: Sequence[str]  # types of number, those with most FLOPs first
    model: str | None  # classes of the roots
    layers: int  # how many layers have a name
    blocks: int  # how many of them are blocks
    parameters: int | None  # of all roots
    shapes: str | None  # digest of the sizes of the products of linear layers and convolutions, attention aside
    attention_shape: Sequence[int] | None  # of the largest queries: batch, heads, tokens, head_dim
    flops_per_step: int | None  # all that ran
    phases: Sequence[str]  # phases with any time
    steps: int  # number of timed steps
    step_us: float  # wall time of a step: the mean
    coverage: float  # attributed share of the time, 0 to 1
    shapes_in_timed_steps: bool  # shapes were recorded in the timed steps, which costs time
    memory_in_timed_steps: bool  # allocations were recorded in the timed steps, which costs time
    complete: bool  # False where recording was cut short


class Headline(TypedDict):
    """Where most of a step's time goes, in at most 15 words."""

    text: str  # the sentence
    about: Literal["idle", "layers", "optimizer", "communication", "outside", "unknown", "none"]  # what its share is of
    layers: Sequence[str]  # whose time that is, folded: `model.layers.{0..31}.self_attn`


class Summary(TypedDict, total=False):
    """What to know first."""

    verdict: str | None  # where the time goes, what to do first
    headline: Headline | None  # the first of it, in at most 15 words
    findings: Sequence[Annotated[Mapping[str, Any], Finding]]  # what could be better, the largest saving first
    comparable: Comparable  # what two results must have in common to be compared


SCHEMA_VERSION = 1
Bound = Literal["memory", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer in one phase, summed over the timed trace.

    `self_*` counts what happens in the layer but in no layer below it, so it adds up over all rows;
    the same field without `self_` includes every layer below.
    """

    layer: str  # full name in the plain model; "" for what by nature has no module
    raw_name: str  # the name as the wrapped model has it
    class_name: str  # its Python class
    kind: str  # block, attention, mlp, norm, embedding, head, router, expert, adapter, modulation, conv, other
    block: str | None  # the block this is in; a block's own name on the block's row
    parent: str | None  # the layer above; None at a root
    depth: int  # 0 at a root
    order: int  # place in model order: by registration where known, else by first call
    phase: Phase  # what the loop was doing
    calls: int | None  # entries of the module; null in phases in which it is not entered (backward, optimizer)
    # time in the layer and in no layer below it. Each kernel, copy and set belongs to the innermost layer whose op
    # launched it. The self times of all rows and the unattributed time add up to the total exactly
    self_time_ns: int
    # device time of the layer and of all layers below it; wall time of ops on a trace without device events. Kernels
    # that overlap on two streams count twice
    time_ns: int
    cpu_time_ns: int | None  # wall time of its ops: per thread their union, summed over threads
    # part of the time that is attention, by the op that launched the kernel or by the kernel's name. Attention made
    # of single ops counts as far as its ops are recognised
    attention_ns: int
    # part of the time that is collectives, by the names of kernels and ops. It includes waiting for slower ranks
    communication_ns: int
    exposed_communication_ns: int | None  # communication during which no compute kernel ran; null without device events
    idle_ns: int | None  # the device had nothing to run while the CPU was in the layer; null without device events
    # compiled code only: kernels that work for this layer and for others. They are in the time of the layer that
    # holds all of these, and not in this row's
    fused_ns: int = 0
    # FLOPs of matrix products, convolutions and attention, two per multiply-add, from the shapes of the ops that ran
    # in the steps with shapes; null where an op of the layer has no formula
    flops_per_step: int | None
    self_flops_per_step: int | None  # FLOPs of its own ops only, without the layers below: these add up
    known_flops_per_step: int | None = None  # at least so many: without ops of which nothing tells them
    # FLOPs without what a causal mask hides; tables leave it out where it is equal
    causal_flops_per_step: int | None = None
    self_causal_flops_per_step: int | None = None  # as causal_flops_per_step, of its own ops only
    # each input of an op read once, each output written once, from shapes, types and strides. A lower bound: a kernel
    # whose caches are too small reads more
    bytes_moved_per_step: int | None = None
    self_bytes_moved_per_step: int | None = None  # as bytes_moved_per_step, of its own ops only
    # time at the roof: of each op the longer of its FLOPs at the peak and its bytes at the memory's bandwidth,
    # summed. FLOPs that a causal mask hides are left out; null without a known peak and bandwidth
    roof_time_per_step_ns: int | None = None
    self_roof_time_per_step_ns: int | None = None  # as roof_time_per_step_us, of its own ops only
    memory_roof_time_per_step_ns: int | None = None  # of it, in ops whose bytes take longer than their FLOPs
    self_memory_roof_time_per_step_ns: int | None = None  # as memory_roof_time_per_step_us, of its own ops only
    peak_time_per_step_ns: int | None = None  # what all its FLOPs take at the peak of their types
    allocated_bytes: float | None  # allocated when the layer returns, mean over calls
    # reserved by the caching allocator when the layer returns, mean over calls; null on a CPU
    reserved_bytes: float | None
    entry_allocated_bytes: float | None  # allocated when the layer is entered, mean over calls
    entry_reserved_bytes: float | None  # reserved when the layer is entered: mean over calls
    # highest allocated on the device while inside, over all calls. On a CPU what was there before counts only as far
    # as model and optimizers held it
    peak_bytes: int | None
    # allocated in the forward of the layer and alive when the backward of that forward begins; without a backward,
    # alive when the outermost forward ends. Mean over calls
    retained_bytes: float | None
    self_retained_bytes: float | None  # what it retains itself, without what the layers below retain: these add up
    shared: bool  # one module under several names or callers: the sum of all; each caller has its own calls below it
    compiled: bool  # its code is compiled, or is part of what is
    graph: bool  # some of its time is kernels of a replayed CUDA graph
    self_events: int | None = None  # device events (on a CPU-only trace, ops) whose innermost layer this is
    step_times_ns: tuple[int, ...] = ()  # `time_ns` within each timed step, in the order of the steps
    lost_launches: int = 0  # kernels launched in it of which the trace has no event: its times are lower bounds
    attention_by_backend_ns: Mapping[str, int] = field(default_factory=dict)  # `attention_ns` by backend

    @property
    def bound(self) -> Bound | None:
        """What holds it at the roof: the larger part of its time there. None where that is not known, or 0."""
        return bound_of(self.roof_time_per_step_ns, self.memory_roof_time_per_step_ns)


def bound_of(roof_ns: float | None, memory_ns: float | None) -> Bound | None:
    """Which part of the time at the roof is the larger one."""
    if not roof_ns or memory_ns is None:
        return None
    return "memory" if 2 * memory_ns > roof_ns else "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnattributedRow:
    """Time that should have a layer but whose layer is not known."""

    reason: str  # why the layer is not known
    time_ns: int  # time of them all
    count: int  # device events; on a CPU-only trace, ops
    flops_per_step: int | None = None  # FLOPs of matrix products, convolutions and attention
    bytes_moved_per_step: int | None = None  # each input of an op read once, each output written once
    roof_time_per_step_ns: int | None = None  # at the roof: per op the longer of its bytes and its FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Attention of one layer, phase and backend; `layer` is the innermost one."""

    layer: str  # full name in the plain model; "" for what by nature has no module; null where not known
    phase: Phase  # what the loop was doing
    backend: str  # flash, cudnn, mem_efficient, flex, math, external
    kernels: tuple[str, ...]  # distinct kernel names (op names on a CPU-only trace), most expensive first
    time_ns: int  # time of them all


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """Time of one class of events in one phase."""

    class_name: str  # gemm, attention, norm, softmax, elementwise, reduction, embedding, copy, communication, ...
    phase: Phase  # what the loop was doing
    time_ns: int  # time of them all
    count: int  # how many events
    flops_per_step: int | None = None  # FLOPs of matrix products, convolutions and attention
    causal_flops_per_step: int | None = None  # FLOPs without what a causal mask hides


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRow:
    """FLOPs of one layer's own ops, in one phase, of one class and type of number: what all FLOPs are summed from."""

    layer: str | None  # "" for what by nature has no module; None where it should have a layer and none is known
    phase: Phase  # what the loop was doing
    class_name: str  # Class: of a layer, its Python class; of events gemm, attention, norm, softmax, elementwise, ...
    dtype: str  # bfloat16, float8_e4m3fn, int8 ...; "" where the trace does not tell
    flops_per_step: int  # FLOPs of matrix products, convolutions and attention
    causal_flops_per_step: int  # FLOPs without what a causal mask hides
    repeated_flops_per_step: int = 0  # of them, what was computed before: recompute, scores in attention's backward
    causal_repeated_flops_per_step: int = 0  # as repeated_flops_per_step, without what a causal mask hides
    reason: str = ""  # why there is no layer


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedRow:
    """Ops (or kernels without one) that have FLOPs, or move bytes, but nothing tells how many."""

    op: str  # name of the op (aten::mm)
    class_name: str  # gemm, attention, other (ops and kernels that are none of torch's); of bytes any
    phase: Phase  # what the loop was doing
    layers: tuple[str, ...]  # the innermost layers they ran in; their FLOPs, or bytes, are not known
    count: int  # in all steps that were counted
    time_per_step_ns: int  # in those steps, in which shapes were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """How much of the machine a step uses: FLOPs of a step at the peak of their types, over the time of a step.

    *Hardware* FLOPs are all that ran; *model* FLOPs leave out what was computed before in the step (recompute,
    the scores in the backward of fused attention). `causal_`: without what a causal mask hides. On a CPU the
    peak is that of all threads of torch's ops. Shares may be over 1, and a warning then says what is likely wrong.
    """

    step_time_ns: int | None  # mean; a step ends when both the CPU and the devices are done with it
    model_flops_per_step: int | None  # of a step's forward and backward, without what was computed before
    hardware_flops_per_step: int | None  # of a step, all that ran
    causal_model_flops_per_step: int | None  # of a step's forward and backward, without what a causal mask hides
    causal_hardware_flops_per_step: int | None  # of a step, all that ran, without what a causal mask hides
    mfu: float | None  # share of the peak that goes into the model, 0 to 1; null where not known
    hfu: float | None  # share of the peak of what ran, 0 to 1
    causal_mfu: float | None  # as mfu, without what a causal mask hides
    causal_hfu: float | None  # as hfu, without what a causal mask hides
    devices: int = 1  # that this process used; the peak is theirs together
    peaks: Peaks | None = None  # of one device; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step. `step` is None for what belongs to no step."""

    step: int | None  # number of the step; null for what belongs to no step
    time_ns: int  # time of the events launched in it
    # the span of the CPU alone, from its begin to its end there: the CPU runs ahead of a busy device. What a step
    # takes is span_us of overview.steps
    span_ns: int | None
    phases_ns: Mapping[str, int] = field(default_factory=dict)  # time per phase
    attention_ns: int = 0  # the part of the time that is attention
    peak_bytes: int | None = None  # highest allocated during the step
    lost_launches: int = 0  # kernels launched in it of which the trace has no event: its times are lower bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTotals:
    """Times of the whole trace."""

    total_ns: int  # time of all events of the trace: device time, or wall time of ops where there is no device
    attributed_ns: int  # time whose layer is known, or that by nature has none
    unattributed_ns: int  # time that should have a layer, of which none is known
    busy_ns: int | None  # union over streams; None without device events
    span_ns: int  # wall time of the whole trace
    exposed_communication_ns: int | None  # communication with no compute beside it; null without device events

    @property
    def coverage(self) -> float:
        """Attributed share of the total, 0 to 1; 1 for an empty total."""
        return self.attributed_ns / self.total_ns if self.total_ns else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis(Deferred):
    """Everything the tables say about one recorded window."""

    # what times are: of device events, or of ops on the CPU where the trace has none
    time_basis: Literal["device", "cpu"]
    complete: bool  # false where the recording was cut short, or something could not be recorded
    warnings: tuple[str, ...]  # what is not known or was odd, and why
    run: Run  # where this was recorded, and what
    time: TimeTotals  # times of the whole timed trace
    unattributed: tuple[UnattributedRow, ...]  # time that should have a layer, of which none is known, by reason
    # one row per layer and phase. The self times and the unattributed ones add up to the total
    layers: tuple[LayerRow, ...]
    attention: tuple[AttentionRow, ...]  # Attention, by layer, phase and backend
    classes: tuple[ClassRow, ...]  # time by class of event and phase
    steps: tuple[StepRow, ...]  # one row per step, and one with step null for the rest; their times add up to the total
    # what is followed by name, per step or entry: microseconds; of a function what it gave
    series: Mapping[str, tuple[float | None, ...]]
    memory: Memory  # what was allocated, by whom and why; all null where no allocation was recorded
    # parts of each step: prefill, tokens, models of a pipeline, roles of training; they add up to its time
    parts: tuple[PartRow, ...] = ()
    flops: tuple[FlopRow, ...] = ()  # all FLOPs, by layer, phase, class and type of number
    uncounted: tuple[UncountedRow, ...] = ()  # ops that have FLOPs, and nothing tells how many
    untold_bytes: tuple[UncountedRow, ...] = ()  # ops that move bytes, and nothing tells how many
    # how much of the machine a step uses; null where the FLOPs of a step are not known
    utilization: Utilization | None = None
    overview: Overview | None = None  # how busy the machine is within the steps
    operators: tuple[OperatorRow, ...] = ()  # one row per op and phase
    kernels: tuple[KernelRow, ...] = ()  # one row per kernel and launch configuration
    collectives: tuple[CollectiveRow, ...] = ()  # one row per kind of collective, process group, layer and phase
    synchronisations: tuple[SynchronisationRow, ...] = ()  # waits of the CPU for the device
    products: tuple[ProductRow, ...] = ()  # matrix products and convolutions by their sizes, of the steps with shapes
    attention_calls: tuple[AttentionCallRow, ...] = ()  # calls of attention by their sizes, of the steps with shapes
    experts: tuple[ExpertRow, ...] = ()  # Tokens, time and FLOPs of each expert, of the steps with shapes
    # what computes the experts of each layer, how even their tokens are, what runs beside them
    expert_layers: tuple[ExpertLayerRow, ...] = ()
    adapters: tuple[AdapterRow, ...] = ()  # LoRA and other adapters beside what they adapt
    allocations: tuple[AllocationRow, ...] = ()  # the largest allocations
    op_memory: tuple[OpMemoryRow, ...] = ()  # what each op allocated
    calls: tuple[LayerCall, ...] = ()  # not in result.json
    memory_use: MemoryUse | None = None  # not in result.json; None where no allocation was recorded
    timeline: Timeline | str = field(default=NO_TRACE, compare=False, repr=False)  # or why not; not in result.json
    # what to know first: the verdict, what to do about it, and what makes two results comparable
    summary: Summary = field(default_factory=Summary)

    @property
    def step_times_ns(self) -> tuple[int, ...]:
        """What each step took, as `StepWindows.step_times_ns`; empty where that is not known."""
        if self.overview is None:
            return ()
        return tuple(split.span_ns for split in self.overview.steps if split.step is not None)

    @property
    def lost_launches(self) -> int:
        """Kernels launched of which the trace has no event: where there are some, times are lower bounds."""
        return sum(row.lost_launches for row in self.steps)

    def rows(self, layer: str) -> tuple[LayerRow, ...]:
        """The rows of one layer, a row a phase; empty for a name that has none."""
        return tuple(row for row in self.layers if row.layer == layer)
