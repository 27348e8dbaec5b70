"""Whose bytes, why and when: the memory of one device over a recording."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.layer_memory import DeviceMemory, device_name
from profiler_wrapper.analysis.memory_allocations import find_blocks, op_tree
from profiler_wrapper.analysis.memory_categories import categorise
from profiler_wrapper.analysis.memory_changes import find_changes
from profiler_wrapper.analysis.memory_growth import find_leaks, slope_of
from profiler_wrapper.analysis.memory_model import BEFORE_PROFILING, MemoryMoment, MemoryUse, StepTime
from profiler_wrapper.analysis.memory_moments import find_moments, phase_starts
from profiler_wrapper.analysis.memory_owned import OwnedMemory, own
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.recording import Recording
from profiler_wrapper.units import file_size


def owned_memory(found: Attributed, memory: DeviceMemory) -> OwnedMemory:
    """Every block of the device that `memory` is about, with its category and owner."""
    recording, attribution = found.recording, found.attribution
    ops = op_tree(recording, found.nesting, found.tree)
    blocks = find_blocks(recording, found.nesting, attribution, ops, memory)
    categories = categorise(found, ops, memory, blocks)
    phases = phase_starts(recording, attribution, found.calls)
    return own(found.tree, attribution, memory, blocks, categories, phases)


def begin_of(recording: Recording) -> int:
    """When the first event of a recording begins, on the trace's clock."""
    spans, memory = recording.spans, recording.memory
    return min(int(times.min()) for times in (spans.start_ns, memory.time_ns) if len(times))


def _end_of(recording: Recording) -> int:
    spans, memory = recording.spans, recording.memory
    return max(int(times.max()) for times in (spans.end_ns, memory.time_ns) if len(times))


def memory_use(found: Attributed, memory: DeviceMemory, *, owned: OwnedMemory | None = None) -> MemoryUse:
    """Everything known of the memory of the device that `memory` is about.

    `owned`: its blocks, where they are at hand.
    """
    recording, steps = found.recording, found.steps
    owned = owned or owned_memory(found, memory)
    top = int(np.argmax(owned.timeline.total_bytes))
    last = _last_moment(recording, memory)
    peak_owners = owned.owners(top)
    leaks = find_leaks(owned, steps)
    return MemoryUse(
        device=memory.device,
        known_owners=len(memory.told) > 0,
        timeline=owned.timeline,
        peak=_labelled(owned, steps, "highest allocated", top),
        peak_owners=peak_owners,
        reserved_peak=_reserved_peak(owned, steps),
        moments=find_moments(recording, found.attribution, found.calls, steps, owned),
        last=_labelled(owned, steps, "last allocation", last),
        last_owners=peak_owners if last == top else owned.owners(last),
        slope=slope_of(owned, steps),
        leaks=tuple(leak for leak, _ in leaks),
        changes=find_changes(found, owned, top, leaks),
        notes=_notes(owned),
        begin_ns=begin_of(recording),
        end_ns=_end_of(recording),
        steps=tuple(
            StepTime(*step) for step in zip(steps.number, steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
        ),
    )


def _labelled(owned: OwnedMemory, steps: Steps, label: str, event: int) -> MemoryMoment:
    time_ns = int(owned.memory.time_ns[event])
    (place,) = steps.place_of(np.array([time_ns], dtype=np.int64)).tolist()
    return owned.moment(label, steps.number[place] if place >= 0 else None, time_ns, event)


def _reserved_peak(owned: OwnedMemory, steps: Steps) -> MemoryMoment | None:
    reserved = owned.timeline.reserved_bytes
    return None if reserved is None else _labelled(owned, steps, "highest reserved", int(np.argmax(reserved)))


def _last_moment(recording: Recording, memory: DeviceMemory) -> int:
    """The event before the last allocation that failed on this device; without one, the last allocation."""
    failed = [
        failure.time_ns
        for failure in recording.failed_allocations
        if device_name(failure.device_type, failure.device) == memory.device
    ]
    if failed:
        return max(0, int(np.searchsorted(memory.time_ns, failed[-1], side="right")) - 1)
    made = np.flatnonzero(memory.size_bytes > 0)
    return int(made[-1]) if len(made) else len(memory.size_bytes) - 1


def _notes(owned: OwnedMemory) -> tuple[str, ...]:
    memory = owned.memory
    notes = list(memory.notes)
    if not len(memory.told):
        notes.append(
            "what the model and its optimizers hold is not known: gradients and optimizer state are inferred from "
            f"what stays, and what was there before the recording is '{BEFORE_PROFILING}'"
        )
    if memory.before.outside_bytes:
        notes.append(
            f"{file_size(memory.before.outside_bytes)} of what the model and its optimizers hold lie outside of what "
            "the allocator had given out when the recording began (memory of another allocator or process): "
            "they are not counted"
        )
    if owned.lost_bytes:
        notes.append(
            f"the trace lacks frees: at one moment {file_size(owned.lost_bytes)} more seem to be held than the "
            "allocator has given out; the largest categories are less by as much"
        )
    return tuple(notes)
