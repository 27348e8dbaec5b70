"""Where an allocation failed that could not be met."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.memory_allocations import innermost_spans, op_tree
from profiler_wrapper.analysis.phase import Phase


@dataclass(frozen=True, slots=True)
class FailedOp:
    """The op that asked for memory in vain."""

    op: str  # `aten::mm`
    layer: str  # "" outside of all layers
    phase: Phase
    step: int | None


def failed_op(found: Attributed) -> FailedOp | None:
    """Whose the last failed allocation of the recording was; None where none failed, or outside of all ops."""
    recording = found.recording
    if not recording.failed_allocations:
        return None
    failure = recording.failed_allocations[-1]
    time_ns = np.array([failure.time_ns], dtype=np.int64)
    lane = np.array([failure.lane], dtype=np.int32)
    around = int(innermost_spans(recording, found.nesting, lane, time_ns)[0])
    if around < 0:
        return None
    ops = op_tree(recording, found.nesting, found.tree)
    maker = int(ops.maker[around])
    span = maker if maker >= 0 else around
    place = found.attribution.place(span)
    (step,) = found.steps.place_of(time_ns).tolist()
    return FailedOp(
        op=recording.name_of(span),
        layer=found.tree.layers[place.layer].name if place.layer >= 0 else "",
        phase=place.phase,
        step=found.steps.number[step] if step >= 0 else None,
    )
