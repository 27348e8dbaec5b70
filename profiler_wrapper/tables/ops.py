"""Find the ops of a recording: which spans they are, which of them calls which, what runs in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.trace.nesting import depths, nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording


@dataclass(frozen=True, slots=True, eq=False)
class OpSpans:
    """Ops in file order: autograd nodes too, but no layer marks. Indices below are into `span`."""

    span: Int32  # index into Recording.spans
    op_of: Int32  # per span of the recording: the innermost op around it, or itself; -1 for none
    around: Int32  # per op: the op that calls it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


def find_ops(recording: Recording, parent: Int32, tree: LayerTree) -> OpSpans:
    """The ops of `recording`; `parent`: per span the span around it."""
    is_op: Bool = recording.spans.category == Category.CPU_OP
    if tree.source == "marks":
        is_op[list(tree.layer_of_span)] = False
    span = np.flatnonzero(is_op).astype(np.int32)
    place = np.full(len(is_op) + 1, -1, dtype=np.int32)  # the last one is for "none"
    place[span] = np.arange(len(span), dtype=np.int32)
    near = nearest(parent, is_op)
    return OpSpans(span, place[near], place[nearest_above(parent, near)[span]])


def levels_of_calls(ops: OpSpans) -> list[Int32]:
    """The ops that no op calls, then those that these call, and so on."""
    depth = depths(ops.around)
    by_depth = np.argsort(depth, kind="stable").astype(np.int32)
    return np.split(by_depth, np.cumsum(np.bincount(depth, minlength=1))[:-1])


def with_called(ops: OpSpans, levels: list[Int32], own: Int64) -> Int64:
    """Per op the sum of `own` over it and all that it calls; `own` becomes that."""
    for members in reversed(levels[1:]):
        np.add.at(own, ops.around[members], own[members])
    return own


def called_by_same_key(around: Int32, key: Int32) -> Bool:
    """Per op or call: whether one with the same key calls it, directly or not; `around`: which one calls it, or -1."""
    found = np.zeros(len(around), dtype=np.bool_)
    doubtful, above = np.arange(len(around)), around
    while True:  # one caller up each round
        called = above >= 0
        doubtful, above = doubtful[called], above[called]
        if not len(doubtful):
            return found
        same = key[above] == key[doubtful]
        found[doubtful[same]] = True
        doubtful, above = doubtful[~same], around[above[~same]]
