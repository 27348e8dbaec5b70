"""Find the calls of layers: which layer was entered, in which other call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.trace.arrays import in_order, marked
from profiler_wrapper.trace.nesting import Nesting, nearest, nearest_above
from profiler_wrapper.trace.recording import Int32, Int64


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """Entries of layers in the order they began; `parent` is the entry around one on its thread."""

    span: Int32
    layer: Int32
    parent: Int32  # index of the enclosing call, -1 for none
    call_of_span: Int32  # per span of the recording: the innermost call around it; -1 for none
    outermost: Int32  # the spans of calls outside of all others, and of backward

    def __len__(self) -> int:
        return len(self.span)

    def with_below(self, own: Int64) -> Int64:
        """Per call the sum of `own` over it and all below it; `own` becomes that."""
        for call in range(len(own) - 1, -1, -1):  # a call begins after the one around it
            if self.parent[call] >= 0:
                own[self.parent[call]] += own[call]
        return own


def find_calls(tree: LayerTree, nesting: Nesting, start_ns: Int64, node_of: Int32) -> CallTree:
    """The calls of a recording. What an autograd node runs belongs to calls only inside that node."""
    is_entry = marked(len(node_of), tree.layer_of_span)
    entries = in_order(nesting.order[is_entry[nesting.order]], start_ns)
    is_node = node_of == np.arange(len(node_of))
    near = nearest(nesting.parent, is_entry | is_node)
    call_at = np.full(len(node_of) + 1, -1, dtype=np.int32)  # the last one is for "none"
    call_at[entries] = np.arange(len(entries))
    parent = call_at[nearest_above(nesting.parent, near)[entries]]
    layer = np.array([tree.layer_of_span[span] for span in entries.tolist()], dtype=np.int32)
    return CallTree(entries, layer, parent, call_at[near], entries[(parent < 0) & (node_of[entries] < 0)])
