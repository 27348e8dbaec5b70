"""What the training threads of a trace do, piece by piece, and what each piece is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from profiler_wrapper.place.layers import is_named_block
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.tables.spans.phases import OF_CPU, Pieces
from profiler_wrapper.tables.spans.row import Row, kinds_of_places
from profiler_wrapper.tables.spans.steps import Steps, with_steps
from profiler_wrapper.tables.spans.threads import is_step, main_thread, on_training_threads, outermost_of
from profiler_wrapper.tables.views.collectives import is_collective_call
from profiler_wrapper.trace.arrays import marked
from profiler_wrapper.trace.marks import GARBAGE, is_server_step
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category
from profiler_wrapper.trace.spans import kind_of_span

_AROUND = ("forward", "backward", "recompute", "optimizer")  # of such a block: what nothing else names


@lru_cache(maxsize=4096)
def _kind_of_block(name: str) -> str:
    """The kind that the name of an annotation means, as for `Timer`; "" where it means none."""
    kind = kind_of_span(name) if is_named_block(name) else ""
    return kind if kind in (*OF_CPU, *_AROUND) else ""


def cpu_pieces(found: Placed, steps: Steps) -> Pieces:
    """The outermost events of the training threads, in order of start, and the ends of blocks that somebody named.

    What the trace knows of an op comes before the name of a block around it. That block's two ends are pieces without
    length, so that it lasts from one to the other.
    """
    recording, spans, parent = found.recording, found.recording.spans, found.nesting.parent
    training = on_training_threads(found)
    roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)[spans.name]
    blocks = np.array([_kind_of_block(name) for name in recording.names])[spans.name]
    blocks[(spans.category != Category.ANNOTATION) | ~training] = ""
    around = outermost_of(found, np.isin(blocks, _AROUND))
    is_layer = marked(len(spans), found.tree.layer_of_span) & np.isin(blocks, ("", "forward"))
    starts_step = recording.named(lambda name: is_step(name) or is_server_step(name))
    counts = (spans.category == Category.CPU_OP) | is_layer | np.isin(blocks, OF_CPU) | (roles != Role.PLAIN)
    outermost = outermost_of(found, counts & (spans.category <= Category.MODULE) & ~starts_step & training)
    makes_node = np.flatnonzero(marked(len(spans), found.attribution.forward_op))
    runs_forward = is_layer | marked(len(spans), nearest(parent, outermost)[makes_node])
    in_phase = kinds_of_places(found)[found.attribution.place_of]
    of_reducer = recording.named(lambda name: name.startswith("torch.distributed.ddp.reducer"))
    kinds: list[tuple[Bool, Any]] = [  # the first that is
        (np.isin(blocks, OF_CPU), blocks),
        (roles == Role.DATA_LOADING, "data"),
        ((roles == Role.OPTIMIZER) | (in_phase == "optimizer"), "optimizer"),
        ((roles == Role.COLLECTIVE) | recording.named(is_collective_call), "communication"),
        ((in_phase == "backward") | of_reducer, "backward"),
        (runs_forward, "forward"),
        (in_phase != "", in_phase),
        (nearest(parent, around) >= 0, blocks[nearest(parent, around)]),
    ]
    kind_of = np.select([chosen for chosen, _ in kinds], [kind for _, kind in kinds], "")
    events, ends = np.flatnonzero(outermost), np.flatnonzero(around)
    span = np.concatenate([events, ends, ends])
    start = np.concatenate([spans.start_ns[events], spans.start_ns[ends], spans.end_ns[ends]])
    end = np.concatenate([spans.end_ns[events], spans.start_ns[ends], spans.end_ns[ends]])
    kind = np.concatenate([kind_of[events], blocks[ends], blocks[ends]])
    order = np.lexsort((end, start))
    step = steps.on_cpu.place_of(spans.start_ns[span])
    names = np.array(recording.names, dtype=object)[spans.name[span]]
    return Pieces(*(column[order] for column in (start, end, kind, step, names)))


def garbage_rows(found: Placed, steps: Steps) -> list[Row]:
    """The collections of garbage on the training threads, in whatever phase each lies."""
    spans = found.recording.spans
    collects = found.recording.named(
        lambda name: name == GARBAGE or (is_named_block(name) and kind_of_span(name) == "gc")
    )
    chosen = outermost_of(found, collects & (spans.category == Category.ANNOTATION) & on_training_threads(found))
    depth, thread = 0 if found.charges.basis == "device" else 1, main_thread(found)
    return [
        Row(step, "gc", "gc", int(spans.start_ns[span]), int(spans.duration_ns[span]), depth=depth, thread=thread)
        for span, step in with_steps(found, steps, chosen)
    ]
