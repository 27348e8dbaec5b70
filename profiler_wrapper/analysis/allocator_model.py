"""What is said of a memory snapshot: frozen rows, in bytes and microseconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from profiler_wrapper.analysis.stack_places import Place
from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.recording.snapshot_records import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Segments of one pool, stream and kind; bytes. `reserved` = `allocated` + `awaiting_free` + `free`."""

    pool: tuple[int, int]
    stream: int
    kind: str
    expandable: bool
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    awaiting_free_bytes: int
    free_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """What one line of code holds at one moment. `frames` is the whole stack of its largest part."""

    place: Place
    metadata: str  # that it was stamped with, "" for none
    size_bytes: int
    blocks: int
    largest_bytes: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What is held by all that was asked for in one `forward`, or outside of any: `layer` is then ""."""

    layer: str
    origin: str
    size_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The allocator after `state` entries of its history. Owners add up to `allocated_bytes`, as asked for."""

    state: int
    time_us: int | None
    allocated_bytes: int
    reserved_bytes: int | None
    owners: tuple[MemoryOwner, ...]  # largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """An allocation that could not be met, and what there was at that moment."""

    requested_bytes: int
    device_free_bytes: int | None
    place: Place
    moment: Moment

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but not allocated then."""
        reserved_bytes = self.moment.reserved_bytes
        return None if reserved_bytes is None else max(0, reserved_bytes - self.moment.allocated_bytes)

    @property
    def fragmented(self) -> bool:
        """As much as was asked for was reserved and free, but in pieces."""
        return (self.unallocated_bytes or 0) >= self.requested_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """What one line of code held over time."""

    place: Place
    metadata: str
    allocated_bytes: Int64  # by state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryHistory:
    """A device's history. Courses have one value more than there are entries: the state before the first."""

    entries: int
    time_us: Int64 | None  # of each entry, since 1970
    allocated_bytes: Int64  # as asked for
    reserved_bytes: Int64 | None  # None where it cannot be reckoned back from the end
    before_bytes: int  # allocated before the first entry
    before_unknown_bytes: int  # of them, what was freed within the history, so that its stack is not known
    peak: Moment
    failed: int  # allocations that could not be met
    failures: tuple[FailedAllocation, ...]  # the last of them, in order
    bands: tuple[Band, ...]  # the largest owners at `worst`, largest first
    inconsistent: int  # entries and blocks that contradict one another

    @property
    def worst(self) -> Moment:
        """The last failure, else the peak."""
        return self.failures[-1].moment if self.failures else self.peak


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMemory:
    """One device at the time of the snapshot, and what led there; bytes.

    `reserved` = `allocated` + `awaiting_free` + `free`; `allocated` = what was asked for + `rounding`.
    """

    device: int
    reserved_bytes: int
    allocated_bytes: int  # given to tensors
    awaiting_free_bytes: int  # freed, but another stream may still use it
    free_bytes: int  # reserved and unused
    largest_free_bytes: int
    rounding_bytes: int
    blocks: int  # that are allocated
    pools: tuple[PoolMemory, ...]  # largest first
    owners: tuple[MemoryOwner, ...]  # of what is allocated, largest first; they add up to `allocated_bytes`
    layers: tuple[LayerMemory, ...]  # of the same
    history: MemoryHistory | None  # None: none was recorded

    @property
    def failure(self) -> FailedAllocation | None:
        """The last allocation that could not be met."""
        return self.history.failures[-1] if self.history and self.history.failures else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocatorReport:
    """All of a snapshot."""

    name: str
    file_bytes: int
    devices: tuple[DeviceMemory, ...]  # those with any memory or history; those that ran out first, then by reserved
    settings: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def expandable(self) -> bool:
        """Whether the allocator was told to use expandable segments."""
        return self.settings.get("expandable_segments", "").lower() == "true"
