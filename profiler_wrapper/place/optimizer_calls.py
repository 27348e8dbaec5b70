"""Find where a recording says that an optimizer was called."""

from __future__ import annotations

from typing import Literal

import numpy as np

from profiler_wrapper.trace.arrays import in_order
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording


def optimizer_calls(recording: Recording, method: Literal["step", "zero_grad"]) -> Int64:
    """The spans, on CPUs, of one method of any optimizer, in the order in which they begin."""
    spans = recording.spans
    names = [i for i, name in enumerate(recording.names) if name.startswith(f"Optimizer.{method}#")]
    is_call = np.isin(spans.name, names) & (spans.category <= Category.ANNOTATION)
    return in_order(np.flatnonzero(is_call), spans.start_ns)


def closure_ops(recording: Recording, parent: Int32, optimizing: Bool, made_nodes: Int32) -> Bool:
    """Of events that belong to an optimizer, those of the forward that it lets its closure compute.

    They have the number of a node that was made in the same call. What an optimizer computes itself makes no
    node, and has no number or that of the next.

    `made_nodes`: the forward ops of the nodes that ran.
    """
    spans = recording.spans
    found = np.zeros_like(optimizing)
    made_nodes = made_nodes[optimizing[made_nodes]]
    if not len(made_nodes):  # same (early return dropped): only slower
        return found
    is_call = recording.named(lambda name: name.startswith("Optimizer."))
    call = nearest(parent, is_call & (spans.category < Category.RUNTIME))
    is_op = spans.category == Category.CPU_OP
    numbered = nearest(parent, optimizing & is_op & (spans.sequence >= 0) & (spans.forward_thread <= 0))
    nodes = set(zip(call[made_nodes].tolist(), spans.sequence[made_nodes].tolist(), strict=True))
    members = np.flatnonzero(optimizing & (numbered >= 0))
    numbers = spans.sequence[numbered[members]].tolist()
    found[members] = [node in nodes for node in zip(call[members].tolist(), numbers, strict=True)]
    return found
