"""Whose bytes, why and when: the memory of one device over a recording."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_calls import CallTree
from profiler_wrapper.analysis.layer_memory import DeviceMemory
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory_allocations import Blocks, find_blocks, op_tree
from profiler_wrapper.analysis.memory_categories import categorise
from profiler_wrapper.analysis.memory_changes import find_changes
from profiler_wrapper.analysis.memory_growth import find_leaks, slope_of
from profiler_wrapper.analysis.memory_model import BEFORE_PROFILING, MemoryMoment, MemoryUse
from profiler_wrapper.analysis.memory_moments import find_moments, phase_starts
from profiler_wrapper.analysis.memory_owned import OwnedMemory, own
from profiler_wrapper.analysis.phase import FORWARD_PHASES
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.columns import Recording
from profiler_wrapper.recording.nesting import Nesting


def memory_use(
    recording: Recording,
    nesting: Nesting,
    tree: LayerTree,
    attribution: Attribution,
    charges: Charges,
    calls: CallTree,
    steps: Steps,
    memory: DeviceMemory,
) -> MemoryUse:
    """Everything known of the memory of the device that `memory` is about."""
    ops = op_tree(recording, nesting, tree)
    blocks = find_blocks(recording, nesting, attribution, ops, memory)
    categories = categorise(recording, nesting, tree, attribution, ops, memory, blocks)
    owned = own(tree, attribution, memory, blocks, categories, phase_starts(recording, attribution, calls))
    top = int(np.argmax(owned.timeline.total_bytes))
    last = _last_allocation(memory)
    peak_owners = owned.owners(top)
    leaks = find_leaks(owned, steps)
    return MemoryUse(
        device=memory.device,
        known_owners=len(memory.told) > 0,
        timeline=owned.timeline,
        peak=_labelled(owned, steps, "highest allocated", top),
        peak_owners=peak_owners,
        reserved_peak=_reserved_peak(owned, steps),
        moments=find_moments(recording, attribution, calls, steps, owned),
        last=_labelled(owned, steps, "last allocation", last),
        last_owners=peak_owners if last == top else owned.owners(last),
        slope=slope_of(owned, steps),
        leaks=tuple(leak for leak, _ in leaks),
        changes=find_changes(
            tree,
            attribution,
            charges,
            steps,
            owned,
            top,
            leaks,
            forwards_followed=_forwards_followed(recording, attribution, calls),
        ),
        notes=_notes(memory, blocks),
    )


def _labelled(owned: OwnedMemory, steps: Steps, label: str, event: int) -> MemoryMoment:
    time_ns = int(owned.memory.time_ns[event])
    (place,) = steps.place_of(np.array([time_ns], dtype=np.int64)).tolist()
    return owned.moment(label, steps.number[place] if place >= 0 else None, time_ns, event)


def _forwards_followed(recording: Recording, attribution: Attribution, calls: CallTree) -> int:
    """Outermost calls outside of backward, if ops in forward have sequence numbers: they get them with gradients on."""
    forward = np.array([place.phase in FORWARD_PHASES for place in attribution.places], dtype=np.bool_)
    numbered = np.flatnonzero((recording.spans.sequence >= 0) & (attribution.place_of >= 0))
    if not forward[attribution.place_of[numbered]].any():
        return 0
    return int(((calls.parent < 0) & (attribution.node_of[calls.span] < 0)).sum())


def _reserved_peak(owned: OwnedMemory, steps: Steps) -> MemoryMoment | None:
    reserved = owned.timeline.reserved_bytes
    return None if reserved is None else _labelled(owned, steps, "highest reserved", int(np.argmax(reserved)))


def _last_allocation(memory: DeviceMemory) -> int:
    made = np.flatnonzero(memory.size_bytes > 0)
    return int(made[-1]) if len(made) else len(memory.size_bytes) - 1


def _notes(memory: DeviceMemory, blocks: Blocks) -> tuple[str, ...]:
    notes = []
    if not len(memory.told):
        notes.append(
            "what the model and its optimizers hold is not known: gradients and optimizer state are inferred from "
            f"what stays, and what was there before the recording is '{BEFORE_PROFILING}'"
        )
    unexplained = memory.allocated_at_start - int(blocks.size_bytes[blocks.before].sum())
    if unexplained < 0:
        notes.append(
            f"the model and its optimizers hold {-unexplained} bytes more than the allocator had given out "
            "when the recording began: 'other' is less by as much"
        )
    return tuple(notes)
