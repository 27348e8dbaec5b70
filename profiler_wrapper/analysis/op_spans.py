"""The ops of a recording: which spans they are, which of them calls which, what runs in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int32, Int64, Recording


@dataclass(frozen=True, slots=True, eq=False)
class OpSpans:
    """Ops in file order: autograd nodes too, but no layer marks. Indices below are into `span`."""

    span: Int64  # index into Recording.spans
    op_of: Int32  # per span of the recording: the innermost op around it, or itself; -1 for none
    around: Int32  # per op: the op that calls it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


def find_ops(recording: Recording, parent: Int32, tree: LayerTree) -> OpSpans:
    """The ops of `recording`; `parent`: per span the span around it."""
    is_op: Bool = recording.spans.category == Category.CPU_OP
    if tree.source == "marks":
        is_op[list(tree.layer_of_span)] = False
    span = np.flatnonzero(is_op)
    place = np.full(len(is_op) + 1, -1, dtype=np.int32)  # the last one is for "none"
    place[span] = np.arange(len(span), dtype=np.int32)
    near = nearest(parent, is_op)
    return OpSpans(span, place[near], place[nearest_above(parent, near)[span]])


def with_called(ops: OpSpans, own: Int64) -> Int64:
    """Per op the sum of `own` over it and all that it calls; `own` becomes that."""
    depth, above = (ops.around >= 0).astype(np.int32), ops.around.copy()
    while (further := above >= 0).any():  # each round looks twice as far
        depth[further] += depth[above[further]]
        above[further] = above[above[further]]
    del above, further
    by_depth = np.argsort(depth, kind="stable").astype(np.int32)
    bounds = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
    for level in range(len(bounds) - 2, -1, -1):
        members = by_depth[bounds[level] : bounds[level + 1]]
        np.add.at(own, ops.around[members], own[members])
    return own


def called_by_alike(ops: OpSpans, key: Int32) -> Bool:
    """Per op: whether one with the same key calls it, directly or not."""
    found = np.zeros(len(ops), dtype=np.bool_)
    doubtful, above = np.arange(len(ops)), ops.around
    while True:  # one caller up each round
        called = above >= 0
        doubtful, above = doubtful[called], above[called]
        if not len(doubtful):
            return found
        alike = key[above] == key[doubtful]
        found[doubtful[alike]] = True
        doubtful, above = doubtful[~alike], ops.around[above[~alike]]
