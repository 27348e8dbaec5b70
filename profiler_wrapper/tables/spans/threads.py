"""Events of a recording by their names and threads: calls that communicate, the threads that train."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.views.collectives import is_collective_call
from profiler_wrapper.trace.arrays import in_order, marked
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category


def collective_calls(found: Placed) -> Bool:
    """Per event whether it is a call that communicates."""
    return found.recording.named(is_collective_call) & (found.recording.spans.category <= Category.ANNOTATION)


def outermost_of(found: Placed, chosen: Bool) -> Bool:
    """Those of the chosen events that are within no other."""
    parent = found.nesting.parent
    return chosen & (nearest_above(parent, nearest(parent, chosen)) < 0)


def on_training_threads(found: Placed) -> Bool:
    """Per event whether it is on the main thread or on one on which backward runs."""
    lane = found.recording.spans.lane
    return np.isin(lane, [main_lane(found), *np.unique(lane[found.attribution.is_node])])


def main_lane(found: Placed) -> int:
    """Where steps are, else where the first layer is entered, else where most ops are."""
    spans = found.recording.spans
    steps = found.recording.named(is_step) & (spans.category <= Category.ANNOTATION)
    enters = marked(len(spans), found.tree.layer_of_span) & (found.attribution.node_of < 0)
    for chosen in (steps, enters):
        if chosen.any():
            return int(spans.lane[in_order(np.flatnonzero(chosen), spans.start_ns)[0]])
    return int(np.bincount(spans.lane[spans.category == Category.CPU_OP], minlength=1).argmax())


def is_step(name: str) -> bool:
    """Whether an event is a step of torch.profiler's."""
    return name.startswith("ProfilerStep#")


def main_thread(found: Placed) -> int:
    """The thread that trains."""
    return thread_of(found, main_lane(found))


def thread_of(found: Placed, lane: int) -> int:
    """The number of a thread, as the trace has it."""
    tid = found.recording.lanes[lane].tid
    return tid if isinstance(tid, int) else lane
