"""Hand-made recordings with holdings, and what their memory must add up to."""

from __future__ import annotations

from typing import Any

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.memory.blocks import owned_memory
from profiler_wrapper.tables.memory.events import device_memory
from profiler_wrapper.tables.memory.use import memory_use
from profiler_wrapper.tables.model import CATEGORIES, MemoryUse
from profiler_wrapper.trace.recording import Recording
from profiler_wrapper.trace.run_file import read_holdings
from recordings import Trace, analyse

BASE_NS = 1_700_000_000_000_000_000  # the recording's clock begins here
Tensor = tuple[int, int, str, str]  # address, bytes, category, name
Moment = tuple[int, list[Tensor]]  # when, on the recording's clock


def held(*moments: Moment, device: str = "cpu") -> list[dict[str, Any]]:
    """What run.json says of held memory."""
    return [{"time_ns": BASE_NS + time, "tensors": {device: [list(t) for t in tensors]}} for time, tensors in moments]


def use_of(trace: Trace, *moments: Moment, device: str = "cpu", **run: Any) -> MemoryUse:
    """The memory of a trace with these holdings; it adds up."""
    recording = trace.op("aten::mm", 1, 2).recording(metadata={"baseTimeNanoseconds": BASE_NS})
    use = analyse(recording, run={"held": held(*moments, device=device), **run}).memory_use
    assert use is not None
    assert_adds_up(use)
    return use


def use_in_any_order(trace: Trace, *moments: Moment) -> MemoryUse:
    """As `use_of`; it is the same in whatever order a file has the ops."""
    use = use_of(trace, *moments)
    run = {"held": held(*moments)}
    for other in trace.rotations(most=10):
        recording = other.recording(metadata={"baseTimeNanoseconds": BASE_NS})
        memory = device_memory(recording, read_holdings(run["held"]))
        assert memory is not None
        found = place_events(recording, run=run)
        rotated = memory_use(found, owned_memory(found, memory))
        assert rotated.timeline.bytes_by_category.tolist() == use.timeline.bytes_by_category.tolist()
        assert set(rotated.peak_owners) == set(use.peak_owners)
        assert set(rotated.changes) == set(use.changes)
    return use


def assert_adds_up(use: MemoryUse) -> None:
    """Categories make the total at every event and every moment, and owners that of their moment; none is negative."""
    timeline = use.timeline
    assert timeline.bytes_by_category.min() >= 0
    for event, total in enumerate(timeline.total_bytes.tolist()):
        assert sum(int(held) for held in timeline.bytes_by_category[:, event]) == total
    moments = [use.peak, use.last, *use.moments, *([use.reserved_peak] if use.reserved_peak else [])]
    for moment in moments:
        assert sum(moment.categories.values()) == moment.total_bytes
        assert min(moment.categories.values()) >= 0
    assert sum(owner.size_bytes for owner in use.peak_owners) == use.peak.total_bytes == timeline.total_bytes.max()
    assert sum(owner.size_bytes for owner in use.last_owners) == use.last.total_bytes
    for moment, owners in ((use.peak, use.peak_owners), (use.last, use.last_owners)):
        assert all(owner.size_bytes > 0 for owner in owners)
        for category in CATEGORIES:
            of_category = sum(owner.size_bytes for owner in owners if owner.category == category)
            assert of_category == moment.categories[category]


def stated_totals(recording: Recording, device_type: int, device: int) -> list[int]:
    """What a device's allocator says it has given out, after each of its events."""
    memory = recording.memory
    rows = zip(memory.device_type.tolist(), memory.device.tolist(), memory.total_allocated_bytes.tolist(), strict=True)
    return [total for kind, index, total in rows if (kind, index) == (device_type, device)]


def category_at(use: MemoryUse, time_ns: int) -> dict[str, int]:
    """What the categories hold at an instant, without those that hold nothing."""
    event = [i for i, at in enumerate(use.timeline.time_ns.tolist()) if at <= time_ns][-1]
    sizes = use.timeline.bytes_by_category[:, event].tolist()
    return {category: size for category, size in zip(CATEGORIES, sizes, strict=True) if size}
