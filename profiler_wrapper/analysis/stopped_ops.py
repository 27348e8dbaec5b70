"""Ops of recomputed layers that were called and never ran.

Checkpointing (not the reentrant one) ends a recompute by an exception, as soon as all that backward needs is
there again. It is raised where the last op saves its inputs, which is before that op computes anything: the
trace has its event, with nothing but `detach` in it.
"""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attribution import OPS_OF_SAVING, Attribution, Role, role_of
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.op_bytes import moves_nothing
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Bool, Category, Int32, Recording


def stopped_ops(recording: Recording, parent: Int32, attribution: Attribution, charges: Charges) -> Bool:
    """Per span: whether it is such an op, or was called for nothing but one.

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
        if not calling[span] and span not in launchers and not _allocates(recording, span):
            _mark_with_callers(stopped, parent, span, int(attribution.node_of[span]))
    return stopped


def _allocates(recording: Recording, span: int) -> bool:
    memory, spans = recording.memory, recording.spans
    first, last = np.searchsorted(memory.time_ns, [spans.start_ns[span], spans.end_ns[span]])
    here = slice(int(first), int(last))
    return bool(((memory.lane[here] == spans.lane[span]) & (memory.size_bytes[here] > 0)).any())


def _mark_with_callers(stopped: Bool, parent: Int32, span: int, node: int) -> None:
    """The op and the composite ops around it, such as `linear`; what else these did was counted by itself."""
    while span >= 0 and span != node:
        stopped[span] = True
        span = int(parent[span])
