"""What the training threads of a trace do, piece by piece, and what each piece is."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.collective_names import is_collective_call
from profiler_wrapper.analysis.layer_tree import is_named_block
from profiler_wrapper.analysis.phase import FORWARD_PHASES, is_server_step
from profiler_wrapper.analysis.ranks.span_rows import Row, Steps
from profiler_wrapper.analysis.ranks.trace_phases import Piece
from profiler_wrapper.analysis.ranks.trace_threads import STEP, main_thread, training_lanes
from profiler_wrapper.recording.marks import GARBAGE
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int64
from profiler_wrapper.recording.span_names import kind_of_span

_WHOLE = ("data", "checkpoint")  # of a block that somebody named so: all that is in it
_AROUND = ("forward", "backward", "recompute", "optimizer")  # of such a block: what nothing else names


@lru_cache(maxsize=4096)
def kind_of_block(name: str) -> str:
    """What somebody says by the name of an annotation, as `Timer` knows it; "" where it does not tell."""
    kind = kind_of_span(name) if is_named_block(name) else ""
    return kind if kind in (*_WHOLE, *_AROUND) else ""


def cpu_pieces(found: Attributed, steps: Steps) -> list[Piece]:
    """The outermost events of the training threads, in order of start, and the ends of blocks that somebody named.

    What the trace knows of an op comes before the name of a block around it. That block's two ends are pieces without
    length, so that it lasts from one to the other.
    """
    recording, spans, parent = found.recording, found.recording.spans, found.nesting.parent
    roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)[spans.name]
    blocks = np.array([kind_of_block(name) for name in recording.names])[spans.name]
    blocks[(spans.category != Category.ANNOTATION) | ~_on_training_threads(found)] = ""
    around = _outermost(found, np.isin(blocks, _AROUND))
    is_layer = np.zeros(len(spans), dtype=np.bool_)
    is_layer[list(found.tree.layer_of_span)] = True
    is_layer &= (blocks == "") | (blocks == "forward")
    is_step = np.array([name.startswith(STEP) or is_server_step(name) for name in recording.names], dtype=np.bool_)
    counts = (spans.category == Category.CPU_OP) | is_layer | np.isin(blocks, _WHOLE) | (roles != Role.PLAIN)
    outermost = _outermost(
        found, counts & (spans.category <= Category.MODULE) & ~is_step[spans.name] & _on_training_threads(found)
    )
    has_node = np.zeros(len(spans), dtype=np.bool_)
    made_in = nearest(parent, outermost)[made_nodes(found)]
    has_node[made_in[made_in >= 0]] = True
    named_by = nearest(parent, around)
    pieces = []
    for span, step in _with_steps(found, steps, outermost):
        kind = str(blocks[span]) if blocks[span] in _WHOLE else ""
        kind = kind or _kind_of(found, span, int(roles[span]), runs_forward=bool(has_node[span] or is_layer[span]))
        kind = kind or (str(blocks[named_by[span]]) if named_by[span] >= 0 else "")
        start = int(spans.start_ns[span])
        pieces.append(Piece(start, start + int(spans.duration_ns[span]), kind, step, recording.name_of(span)))
    for span, step in _with_steps(found, steps, around):
        for end in (int(spans.start_ns[span]), int(spans.end_ns[span])):
            pieces.append(Piece(end, end, str(blocks[span]), step, recording.name_of(span)))
    return sorted(pieces, key=lambda piece: (piece.start_ns, piece.end_ns))


def made_nodes(found: Attributed) -> Int64:
    """The forward ops of the nodes that ran."""
    return np.array([link.forward_op for link in found.attribution.links if link.forward_op >= 0], dtype=np.int64)


def garbage_rows(found: Attributed, steps: Steps, phases: list[Row]) -> list[Row]:
    """The collections of garbage on the training threads, in whatever phase each lies."""
    recording, spans = found.recording, found.recording.spans
    collects = np.array([name == GARBAGE or _says_garbage(name) for name in recording.names], dtype=np.bool_)
    chosen = _outermost(
        found, collects[spans.name] & (spans.category == Category.ANNOTATION) & _on_training_threads(found)
    )
    phases = sorted(phases, key=lambda row: row.start_ns)
    starts = np.array([row.start_ns for row in phases], dtype=np.int64)
    rows = []
    for span, step in _with_steps(found, steps, chosen):
        start = int(spans.start_ns[span])
        before = phases[at] if (at := int(np.searchsorted(starts, start, side="right")) - 1) >= 0 else None
        within = before is not None and start < before.start_ns + before.duration_ns
        rows.append(
            Row(
                step=step,
                name="gc",
                kind="gc",
                start_ns=start,
                duration_ns=int(spans.duration_ns[span]),
                depth=int(within),
                parent=before.name if before is not None and within else None,
                thread=main_thread(found),
            )
        )
    return rows


def _says_garbage(name: str) -> bool:
    return is_named_block(name) and kind_of_span(name) == "gc"


def _kind_of(found: Attributed, span: int, role: int, *, runs_forward: bool) -> str:
    name = found.recording.name_of(span)
    if role == Role.DATA_LOADING:
        return "data"
    phase = found.attribution.place(span).phase
    if role == Role.OPTIMIZER or phase == "optimizer":
        return "optimizer"
    if role == Role.COLLECTIVE or is_collective_call(name):
        return "communication"
    if phase in ("backward", "accumulate_grad") or name.startswith("torch.distributed.ddp.reducer"):
        return "backward"
    if runs_forward or phase in FORWARD_PHASES:
        return "forward"
    return "recompute" if phase == "recompute" else ""


def _on_training_threads(found: Attributed) -> Bool:
    on_them: Bool = np.isin(found.recording.spans.lane, training_lanes(found))
    return on_them


def _outermost(found: Attributed, chosen: Bool) -> Bool:
    parent = found.nesting.parent
    outermost: Bool = chosen & (nearest_above(parent, nearest(parent, chosen)) < 0)
    return outermost


def _with_steps(found: Attributed, steps: Steps, chosen: Bool) -> list[tuple[int, int | None]]:
    """The events in order of start, each with its step."""
    start = found.recording.spans.start_ns
    members = np.flatnonzero(chosen)
    members = members[np.argsort(start[members], kind="stable")]
    return list(zip(members.tolist(), steps.numbers(start[members]), strict=True))
