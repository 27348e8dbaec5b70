"""Ops of a trace that have an event and computed nothing, so that neither their FLOPs nor their bytes count.

*Handed to Python.* torch hands an op to a mode or to a subclass of Tensor (`__torch_dispatch__`), which calls other
ops or none. The event of the op holds one of the handler, and that what the handler called. So the op computed what it
holds, and nothing where it holds nothing: selective checkpointing answers a recomputed op with what it saved. An
answer that is computed without torch looks the same. A mode inside the handler of a subclass is one that the handler
entered. These are fake: `DTensor` runs every op on tensors without data, of the whole shape, before the local one.

*Stopped.* Checkpointing (not the reentrant one) ends a recompute by an exception, as soon as all that backward needs
is there again. It is raised where the last op saves its inputs, which is before that op computes anything: the trace
has its event, with nothing but `detach` in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.attribution import OPS_OF_SAVING, Attribution, Role, role_of
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.op_bytes import moves_nothing
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int32, Recording

_SUBCLASS, _MODE = "PythonSubclass", "PythonDispatchMode"  # as torch names the events
# An answer that was kept elsewhere is copied back.
_FETCHING = frozenset(("aten::copy_", "aten::_to_copy", "aten::clone"))


class PythonDispatch(NamedTuple):
    """Per span of a recording."""

    handlers: Bool  # events of Python that an op was handed to, but for fake ones
    idle: Bool  # ops that computed nothing: answered without, or on tensors without data; and their handlers


def python_dispatch(recording: Recording, parent: Int32, charges: Charges) -> PythonDispatch:
    """The handlers of a recording, and the ops that computed nothing because of them."""
    spans, names = recording.spans, recording.names
    is_op: Bool = spans.category == Category.CPU_OP

    def named(chosen: list[bool]) -> Bool:
        return is_op & np.array(chosen, dtype=np.bool_)[spans.name] if names else is_op

    subclasses, modes = (named([name == handler for name in names]) for handler in (_SUBCLASS, _MODE))
    handlers: Bool = subclasses | modes
    if not handlers.any():
        return PythonDispatch(handlers, np.zeros_like(handlers))
    launching = np.zeros_like(handlers)
    if charges.basis == "device":
        launching[charges.cpu_span[charges.cpu_span >= 0]] = True
    fake = modes & (nearest_above(parent, nearest(parent, subclasses)) >= 0) & ~ancestors_of(parent, launching)
    faked: Bool = nearest(parent, fake) >= 0
    works = is_op & ~named([moves_nothing(name) or name in _FETCHING for name in names])
    works &= ~faked & ~handlers & ~ancestors_of(parent, handlers)
    works |= launching
    handlers &= ~faked
    unused = (handlers | fake) & ~ancestors_of(parent, works)
    idle = np.zeros_like(handlers)
    above = parent[unused]
    idle[above[above >= 0]] = True
    idle &= is_op & ~named([moves_nothing(name) for name in names])
    # Ops such as `linear` that called idle ones; what else they called is counted by itself.
    idle |= ancestors_of(parent, idle, among=named([name.startswith("aten::") for name in names]))
    return PythonDispatch(handlers, idle | faked | unused)


def ancestors_of(parent: Int32, chosen: Bool, *, among: Bool | None = None) -> Bool:
    """What lies around a chosen span; `among`: up to the first that is none of these."""
    around = np.zeros_like(chosen)
    above = np.unique(parent[chosen])
    while len(above := above[above >= 0]):
        above = above[~around[above] if among is None else among[above] & ~around[above]]
        around[above] = True
        above = np.unique(parent[above])
    return around


def stopped_ops(recording: Recording, parent: Int32, attribution: Attribution, charges: Charges) -> Bool:
    """Per span: whether it is an op that was stopped, or was called for nothing but one.

    That is the last op recomputed in an autograd node (views save nothing), if it called no op but those of saving,
    launched nothing and allocated nothing. One that saves what it computed, as fused attention, ran.
    """
    spans, names = recording.spans, recording.names
    stopped = np.zeros(len(spans), dtype=np.bool_)
    phases = np.array([place.phase == "recompute" for place in attribution.places], dtype=np.bool_)
    recomputed = (spans.category == Category.CPU_OP) & (attribution.place_of >= 0) & (attribution.node_of >= 0)
    recomputed[recomputed] = phases[attribution.place_of[recomputed]]
    if not recomputed.any():
        return stopped
    saving = np.array([name in OPS_OF_SAVING for name in names], dtype=np.bool_)[spans.name]
    calling = np.zeros(len(spans), dtype=np.bool_)
    called = parent[(spans.category == Category.CPU_OP) & ~saving]
    calling[called[called >= 0]] = True
    idle = np.array([moves_nothing(name) for name in names], dtype=np.bool_)[spans.name]
    reentrant = np.array([role_of(name) == Role.CHECKPOINT_BACKWARD for name in names], dtype=np.bool_)[spans.name]
    ops = np.flatnonzero(recomputed & ~idle & (nearest(parent, reentrant) < 0))
    ops = ops[np.lexsort((-spans.duration_ns[ops], spans.start_ns[ops], attribution.node_of[ops]))]
    node = attribution.node_of[ops]
    last = ops[np.append(node[1:] != node[:-1], True)] if len(ops) else ops
    launching = np.zeros(len(spans), dtype=np.bool_)
    launching[last] = True
    launchers = nearest(parent, launching)[charges.cpu_span[charges.cpu_span >= 0]] if charges.basis == "device" else ()
    for span in last.tolist():
        if calling[span] or span in launchers or _allocates(recording, span):
            continue
        node_span, above = int(attribution.node_of[span]), span
        while above >= 0 and above != node_span:  # the composite ops around it too, such as `linear`
            stopped[above] = True
            above = int(parent[above])
    return stopped


def _allocates(recording: Recording, span: int) -> bool:
    memory, spans = recording.memory, recording.spans
    first, last = np.searchsorted(memory.time_ns, [spans.start_ns[span], spans.end_ns[span]])
    here = slice(int(first), int(last))
    return bool(((memory.lane[here] == spans.lane[span]) & (memory.size_bytes[here] > 0)).any())
