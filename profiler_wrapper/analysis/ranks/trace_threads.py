"""Which threads of a trace train."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.recording.recording import Category

STEP = "ProfilerStep#"


def main_thread(found: Attributed) -> int:
    """The thread that trains: its number, as the trace has it."""
    return _tid_of_lane(found, main_lane(found)) if found.recording.lanes else 0


def thread_of(found: Attributed, span: int) -> int:
    """The thread that an event is on: its number, as the trace has it."""
    return _tid_of_lane(found, int(found.recording.spans.lane[span]))


def main_lane(found: Attributed) -> int:
    """Where steps are, else where the first layer is entered, else where most ops are."""
    spans = found.recording.spans
    is_step = np.array([name.startswith(STEP) for name in found.recording.names], dtype=np.bool_)[spans.name]
    marked = np.flatnonzero(is_step & (spans.category <= Category.ANNOTATION))
    if len(marked):
        return int(spans.lane[marked[np.argmin(spans.start_ns[marked])]])
    outside = [span for span in found.tree.layer_of_span if found.attribution.node_of[span] < 0]
    if outside:
        return int(spans.lane[min(outside, key=lambda span: int(spans.start_ns[span]))])
    ops = np.flatnonzero(spans.category == Category.CPU_OP)
    return int(np.bincount(spans.lane[ops]).argmax()) if len(ops) else 0


def training_lanes(found: Attributed) -> list[int]:
    """The main thread's, and those on which backward runs."""
    nodes = np.flatnonzero(found.attribution.is_node)
    return sorted({main_lane(found), *np.unique(found.recording.spans.lane[nodes]).tolist()})


def _tid_of_lane(found: Attributed, lane: int) -> int:
    tid = found.recording.lanes[lane].tid
    return tid if isinstance(tid, int) else lane
