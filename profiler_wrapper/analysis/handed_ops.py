"""Ops that torch handed to Python: to a mode, or to a subclass of Tensor, which call other ops or none.

The event of such an op holds one of the handler, and that what the handler called. So the op computed what it
holds, and nothing where it holds nothing: selective checkpointing answers a recomputed op with what it saved. An
answer that is computed without torch looks the same.

A mode inside the handler of a subclass is one that the handler entered. These are fake: `DTensor` runs every op on
tensors without data, of the whole shape, before it runs the local one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.op_bytes import moves_nothing
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int32, Recording

_SUBCLASS, _MODE = "PythonSubclass", "PythonDispatchMode"  # as torch names the events
# An answer that was kept elsewhere is copied back.
_FETCHING = frozenset(("aten::copy_", "aten::_to_copy", "aten::clone"))


class HandedOps(NamedTuple):
    """Per span of a recording."""

    handlers: Bool  # events of Python that an op was handed to, but for fake ones
    idle: Bool  # ops that computed nothing: answered without, or on tensors without data; and their handlers


def handed_ops(recording: Recording, parent: Int32, charges: Charges) -> HandedOps:
    """The handlers of a recording, and the ops that computed nothing because of them."""
    spans, names = recording.spans, recording.names
    is_op: Bool = spans.category == Category.CPU_OP

    def named(chosen: list[bool]) -> Bool:
        return is_op & np.array(chosen, dtype=np.bool_)[spans.name] if names else is_op

    subclasses, modes = (named([name == handler for name in names]) for handler in (_SUBCLASS, _MODE))
    handlers: Bool = subclasses | modes
    if not handlers.any():
        return HandedOps(handlers, np.zeros_like(handlers))
    launching = np.zeros_like(handlers)
    if charges.basis == "device":
        launching[charges.cpu_span[charges.cpu_span >= 0]] = True
    fake = modes & (nearest_above(parent, nearest(parent, subclasses)) >= 0) & ~holding(parent, launching)
    faked: Bool = nearest(parent, fake) >= 0
    handlers &= ~faked
    views = named([moves_nothing(name) for name in names])
    works = (
        is_op
        & ~views
        & ~named([name in _FETCHING for name in names])
        & ~faked
        & ~subclasses
        & ~modes
        & ~holding(parent, subclasses | modes)
    )
    works |= launching
    unused = (handlers | fake) & ~holding(parent, works)
    idle = np.zeros_like(handlers)
    above = parent[unused]
    idle[above[above >= 0]] = True
    idle &= is_op & ~views
    idle |= _composites(parent, idle, named([name.startswith("aten::") for name in names]))
    return HandedOps(handlers, idle | faked | unused)


def holding(parent: Int32, chosen: Bool) -> Bool:
    """What lies around a chosen one."""
    around = np.zeros_like(chosen)
    above = np.unique(parent[chosen])
    while len(above := above[above >= 0]):
        above = above[~around[above]]
        around[above] = True
        above = np.unique(parent[above])
    return around


def _composites(parent: Int32, idle: Bool, is_aten: Bool) -> Bool:
    """Ops such as `linear` that called idle ones; what else they called is counted by itself."""
    around = np.zeros_like(idle)
    above = np.unique(parent[idle])
    while len(above := above[above >= 0]):
        above = above[is_aten[above] & ~around[above]]
        around[above] = True
        above = np.unique(parent[above])
    return around
