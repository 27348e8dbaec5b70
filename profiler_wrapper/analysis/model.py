"""What an analysis says: frozen rows, in integer nanoseconds and bytes.

`None` stands for "not known"; a warning of the analysis says why. `to_dict` gives the contract
written to `result.json`, where times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from profiler_wrapper.analysis.memory_model import MemoryUse
from profiler_wrapper.analysis.peaks import Peaks
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import (
    AllocationRow,
    AttentionCallRow,
    CollectiveRow,
    KernelRow,
    OperatorRow,
    OpMemoryRow,
    Overview,
    ProductRow,
    SynchronisationRow,
)

SCHEMA_VERSION = 1

Bound = Literal["memory", "compute"]

# Why device time has no layer.
LAUNCHED_BEFORE = "launched before the trace"
NO_LAUNCH = "no launch found"
NO_FORWARD_LINK = "no forward link"
NO_LAYERS = "a trace without layers"
GRAPH_REPLAY = "graph replay"
WITHOUT_OP = (LAUNCHED_BEFORE, NO_LAUNCH, GRAPH_REPLAY)  # so nothing tells their FLOPs and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer in one phase, summed over the timed trace.

    `self_*` counts what happens in the layer but in no layer below it, so it adds up over all rows;
    the same field without `self_` includes every layer below.
    """

    layer: str  # full name in the plain model; "" for what by nature has no module
    raw_name: str  # the name as the wrapped model has it
    class_name: str
    kind: str  # block, attention, mlp, norm, embedding, head, router, expert, adapter, modulation, conv, other
    block: str | None  # the block this is in; a block's own name on the block's row
    parent: str | None  # the layer above; None at a root
    depth: int  # 0 at a root
    order: int  # place in model order: by registration where known, else by first call
    phase: Phase
    calls: int | None  # entries of the layer; None where it is not entered (backward, optimizer)
    self_time_ns: int
    time_ns: int
    cpu_time_ns: int | None
    attention_ns: int
    communication_ns: int
    exposed_communication_ns: int | None
    idle_ns: int | None
    fused_ns: int = (
        0  # of compiled code: kernels that work for this layer and others, charged to the one above them all
    )
    flops_per_step: int | None  # of matrix products, convolutions and attention; whatever a mask hides counts too
    self_flops_per_step: int | None
    known_flops_per_step: int | None = None  # at least so many: without ops of which nothing tells them
    causal_flops_per_step: int | None = None  # without what a causal mask hides
    self_causal_flops_per_step: int | None = None
    bytes_moved_per_step: int | None = None  # each input of an op read once, each output written once
    self_bytes_moved_per_step: int | None = None
    roof_time_per_step_ns: int | None = None  # at the roof: per op the longer of its bytes and its causal FLOPs
    self_roof_time_per_step_ns: int | None = None
    memory_roof_time_per_step_ns: int | None = None  # of it, in ops whose bytes take longer than their FLOPs
    self_memory_roof_time_per_step_ns: int | None = None
    peak_time_per_step_ns: int | None = None  # what all its FLOPs take at the peak of their types
    allocated_bytes: float | None  # allocated when the layer returns: mean over calls
    reserved_bytes: float | None
    entry_allocated_bytes: float | None  # allocated when the layer is entered: mean over calls
    entry_reserved_bytes: float | None
    peak_bytes: int | None  # highest allocated while inside, over all calls
    retained_bytes: float | None  # allocated inside and kept for backward (without one: by callers): mean over calls
    self_retained_bytes: float | None
    shared: bool  # one instance under several names
    compiled: bool  # its code is compiled, or is part of what is
    graph: bool  # some of its time is kernels of a replayed CUDA graph
    self_events: int | None = None  # device events (on a CPU-only trace, ops) whose innermost layer this is
    step_times_ns: tuple[int, ...] = ()  # `time_ns` within each timed step, in the order of the steps

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

    reason: str
    time_ns: int
    count: int  # device events; on a CPU-only trace, ops
    flops_per_step: int | None = None
    bytes_moved_per_step: int | None = None
    roof_time_per_step_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Attention of one layer, phase and backend; `layer` is the innermost one."""

    layer: str
    phase: Phase
    backend: str  # flash, cudnn, mem_efficient, flex, math, external
    kernels: tuple[str, ...]  # distinct kernel names (op names on a CPU-only trace), most expensive first
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """Time of one class of events in one phase."""

    class_name: str  # gemm, attention, norm, softmax, elementwise, reduction, embedding, copy, communication, ...
    phase: Phase
    time_ns: int
    count: int
    flops_per_step: int | None = None
    causal_flops_per_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRow:
    """FLOPs of one layer's own ops, in one phase, of one class and type of number: what all FLOPs are summed from."""

    layer: str | None  # "" for what by nature has no module; None where it should have a layer and none is known
    phase: Phase
    class_name: str
    dtype: str  # bfloat16, float8_e4m3fn, int8 ...; "" where the trace does not tell
    flops_per_step: int
    causal_flops_per_step: int
    repeated_flops_per_step: int = 0  # of them, what was computed before: recompute, scores in attention's backward
    causal_repeated_flops_per_step: int = 0
    reason: str = ""  # why there is no layer


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedRow:
    """Ops (or kernels without one) that have FLOPs, or move bytes, but nothing tells how many."""

    op: str
    class_name: str  # gemm, attention, other (ops and kernels that are none of torch's); of bytes any
    phase: Phase
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
    model_flops_per_step: int | None
    hardware_flops_per_step: int | None
    causal_model_flops_per_step: int | None
    causal_hardware_flops_per_step: int | None
    mfu: float | None
    hfu: float | None
    causal_mfu: float | None
    causal_hfu: float | None
    devices: int = 1  # that this process used; the peak is theirs together
    peaks: Peaks | None = None  # of one device; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step. `step` is None for what belongs to no step."""

    step: int | None
    time_ns: int  # time of the events launched in it
    span_ns: int | None  # from its begin to its end on the CPU
    phases_ns: Mapping[str, int] = field(default_factory=dict)  # time per phase
    attention_ns: int = 0
    peak_bytes: int | None = None  # highest allocated during the step


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One entry of one layer, in time order: what the per-call series and the lanes are drawn from."""

    layer: str
    phase: Phase
    step: int | None
    index: int  # which call of this layer and phase it is, from 0
    start_ns: int  # on the CPU
    end_ns: int
    device_start_ns: int | None  # first and last device event launched in it
    device_end_ns: int | None
    device: int | None
    time_ns: int  # device time (CPU time on a CPU-only trace) inside it, layers below included
    attention_ns: int
    entry_allocated_bytes: int | None
    exit_allocated_bytes: int | None
    entry_reserved_bytes: int | None
    exit_reserved_bytes: int | None
    peak_bytes: int | None
    retained_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTotals:
    """Times of the whole trace."""

    total_ns: int
    attributed_ns: int
    unattributed_ns: int
    busy_ns: int | None  # union over streams; None without device events
    span_ns: int
    exposed_communication_ns: int | None

    @property
    def coverage(self) -> float:
        """Attributed share of the total, 0 to 1; 1 for an empty total."""
        return self.attributed_ns / self.total_ns if self.total_ns else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything the tables say about one recorded window."""

    time_basis: Literal["device", "cpu"]
    complete: bool
    warnings: tuple[str, ...]
    run: Mapping[str, Any]
    time: TimeTotals
    unattributed: tuple[UnattributedRow, ...]
    layers: tuple[LayerRow, ...]
    attention: tuple[AttentionRow, ...]
    classes: tuple[ClassRow, ...]
    steps: tuple[StepRow, ...]
    series: Mapping[str, tuple[float | None, ...]]  # name -> per step or entry; us, or a function's own
    memory: Mapping[str, Any]
    flops: tuple[FlopRow, ...] = ()
    uncounted: tuple[UncountedRow, ...] = ()
    untold_bytes: tuple[UncountedRow, ...] = ()  # what moves bytes, and nothing tells how many
    utilization: Utilization | None = None  # None: the FLOPs of a step are not known
    overview: Overview | None = None
    operators: tuple[OperatorRow, ...] = ()  # the most expensive first
    kernels: tuple[KernelRow, ...] = ()  # the most expensive first; without device events none
    collectives: tuple[CollectiveRow, ...] = ()
    synchronisations: tuple[SynchronisationRow, ...] = ()
    products: tuple[ProductRow, ...] = ()  # of steps with shapes, the most expensive first
    attention_calls: tuple[AttentionCallRow, ...] = ()  # of steps with shapes
    allocations: tuple[AllocationRow, ...] = ()  # the largest first
    op_memory: tuple[OpMemoryRow, ...] = ()  # most bytes first
    calls: tuple[LayerCall, ...] = ()  # not in result.json
    memory_use: MemoryUse | None = None  # not in result.json; None where no allocation was recorded
    summary: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, layer: str) -> tuple[LayerRow, ...]:
        """The rows of one layer, a row a phase; empty for a name that has none."""
        return tuple(row for row in self.layers if row.layer == layer)
