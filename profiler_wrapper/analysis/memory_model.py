"""What an analysis says of memory: whose bytes, why, and when. Frozen rows, in bytes and integer nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.recording.recording import Int64

MemoryCategory = Literal[
    "params",
    "grads",
    "os_params",
    "os_state",
    "activation",
    "communication",
    "workspace",
    "other",
]
# params: parameters and buffers. grads: what `.grad` holds. os_params: an optimizer's own (master) copies of
# parameters. os_state: its state. activation: what the passes through the model make, forward, recompute and
# backward, and hold beyond the op that made it. communication: buffers of collectives. workspace: gone again when
# the op, or the optimizer's step, that made it ends. other: all else, with what was there before profiling.
CATEGORIES: tuple[MemoryCategory, ...] = (
    "params", "grads", "os_params", "os_state", "activation", "communication", "workspace", "other",
)  # fmt: skip
BEFORE_PROFILING = "before profiling"  # the `op` of an owner that was there when the recording began


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds bytes at one moment, and why. Rows with equal keys are one."""

    category: MemoryCategory
    layer: str  # full name; "" for what has no layer
    name: str  # of the tensor (`model.embed_tokens.weight`, `exp_avg of lm_head.weight`); "" for what has none
    op: str  # that allocated it: `aten::mm`; BEFORE_PROFILING for what was there; "" where not known
    phase: Phase | None  # in which it was allocated; None for what was there before
    size_bytes: int
    count: int  # allocations


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """What the categories hold at one moment; they add up to `total_bytes` exactly."""

    label: str  # "after forward", "after backward", "after optimizer", "highest allocated", a user's point
    step: int | None
    time_ns: int  # on the trace's clock
    total_bytes: int  # what the allocator has given out
    reserved_bytes: int | None  # None on a CPU
    categories: Mapping[MemoryCategory, int]


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

    bytes_per_step: float
    error_bytes_per_step: float | None  # half the 95 % interval; None for fewer than three steps
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Allocations of one op in one layer that stay, step after step."""

    layer: str
    op: str
    phase: Phase
    category: MemoryCategory
    bytes_per_step: float
    count_per_step: float
    steps: int  # over which this was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What would lower the peak, from this run's numbers."""

    kind: Literal["checkpoint", "no_grad", "free_grads", "smaller_batch", "chunk_loss", "optimizer_state", "leak"]
    text: str  # one line: what to do
    layers: tuple[str, ...]
    saves_bytes: int  # at the peak
    costs_ns: int | None  # time a step more; None where the run does not tell


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
    slope: Slope | None  # None for fewer than two steps
    leaks: tuple[Leak, ...] = ()  # the largest first
    changes: tuple[Change, ...] = ()  # the largest saving first
    notes: tuple[str, ...] = field(default=())  # what is not known, and why
    begin_ns: int | None = None  # of the recording; None: its first allocation
    end_ns: int | None = None
    steps: tuple[StepTime, ...] = ()
