"""Where a recording broke off: the op that ran when an exception ended it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.analyse import Attributed
from profiler_wrapper.analysis.memory_allocations import op_tree
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.recording.columns import Category


@dataclass(frozen=True, slots=True)
class LastOp:
    """The op that began last."""

    span: int
    op: str  # `aten::mm`
    layer: str  # "" outside of all layers
    phase: Phase


def last_op(found: Attributed) -> LastOp | None:
    """The op that began last in the recording, and not the mere `aten::empty` in it; None without any."""
    spans = found.recording.spans
    ops = op_tree(found.recording, found.nesting, found.tree)
    candidates = np.flatnonzero((spans.category == Category.CPU_OP) & ~ops.is_border)
    if not len(candidates):
        return None
    latest = int(candidates[np.lexsort((-spans.end_ns[candidates], spans.start_ns[candidates]))[-1]])
    maker = int(ops.maker[latest])
    span = maker if maker >= 0 and not ops.is_border[maker] else latest
    place = found.attribution.place(span)
    layer = found.tree.layers[place.layer].name if place.layer >= 0 else ""
    return LastOp(span, found.recording.name_of(span), layer, place.phase)
