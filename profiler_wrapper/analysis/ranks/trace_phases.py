"""What runs on a training thread, or on the compute streams of a device, as phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.intervals import Union
from profiler_wrapper.analysis.phase import FORWARD_PHASES
from profiler_wrapper.analysis.ranks.span_rows import Row
from profiler_wrapper.recording.recording import Int64

LONG_GAP_NS = 100_000  # less belongs to what is before and after it
_LASTING = ("forward", "backward", "recompute")  # go on between their ops
_APART = ("data", "checkpoint", "communication")  # never joined: each is a span as it is
_KINDS = {"backward": "backward", "accumulate_grad": "backward", "recompute": "recompute", "optimizer": "optimizer"}


class Piece(NamedTuple):
    """Something that runs, and of which kind it is; "": nothing tells."""

    start_ns: int
    end_ns: int
    kind: str
    step: int | None
    name: str


def kind_of_phase(phase: str) -> str:
    """The kind of a span of this phase; "" for what is in none."""
    return "forward" if phase in FORWARD_PHASES else _KINDS.get(phase, "")


def phases(
    pieces: Sequence[Piece], collectives: Union, *, thread: int, lasting: tuple[str, ...] = _LASTING
) -> list[Row]:
    """Pieces of one kind after another as one span.

    What nothing names belongs to the phase on both sides of it, else to the one that it follows at once, else to none.
    A long gap within a phase that lasts is the phase's own, but for the collectives that run in it: the thread waits
    for them. Any other long gap belongs to nobody: what runs there shows in no event.

    Args:
        pieces: in order of start.
        collectives: when some run beside.
        lasting: kinds that go on between their pieces.
    """
    joined: list[Piece] = []
    gaps = _gaps(pieces, collectives)
    for (gap_ns, waited_ns), piece in zip(gaps, _named(pieces, gaps), strict=True):
        last = joined[-1] if joined else None
        if last is None or last.kind != piece.kind or last.step != piece.step or piece.kind in _APART:
            joined.append(piece)
        elif gap_ns <= LONG_GAP_NS or (piece.kind in lasting and waited_ns <= LONG_GAP_NS):
            joined[-1] = last._replace(end_ns=max(last.end_ns, piece.end_ns))
        elif piece.kind in lasting:
            first, end = _ends_of_wait(collectives, last.end_ns, piece.start_ns)
            joined[-1] = last._replace(end_ns=first)
            joined.append(piece._replace(start_ns=end))
        else:
            joined.append(piece)
    return [
        Row(
            step=piece.step,
            name=piece.name if piece.kind in _APART else piece.kind,
            kind=piece.kind,
            start_ns=piece.start_ns,
            duration_ns=piece.end_ns - piece.start_ns,
            thread=thread,
        )
        for piece in joined
        if piece.end_ns > piece.start_ns
    ]


def _named(pieces: Sequence[Piece], gaps: Sequence[tuple[int, int]]) -> list[Piece]:
    """The same, with a kind for each."""
    named: list[Piece] = []
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: (bool(piece.kind), piece.step))]
    for at, run in enumerate(runs):
        before = runs[at - 1][-1] if at else None
        after = runs[at + 1][0] if at + 1 < len(runs) else None
        kind = before.kind if before is not None and before.step == run[0].step and before.kind in _LASTING else ""
        within = after is not None and (after.kind, after.step) == (kind, run[0].step)
        for piece in run:
            gap_ns, waited_ns = gaps[len(named)]
            if not within and gap_ns - waited_ns > LONG_GAP_NS:
                kind = ""
            named.append(piece._replace(kind=piece.kind or kind or "other"))
    return named


def _gaps(pieces: Sequence[Piece], collectives: Union) -> list[tuple[int, int]]:
    """Per piece: how long nothing ran before it, and how much of that a collective did; nothing before the first."""
    if not pieces:
        return []
    start: Int64 = np.array([piece.start_ns for piece in pieces], dtype=np.int64)
    reached = np.maximum.accumulate(np.array([piece.end_ns for piece in pieces], dtype=np.int64))
    before = np.minimum(np.concatenate([start[:1], reached[:-1]]), start)
    return list(zip((start - before).tolist(), collectives.overlap(before, start).tolist(), strict=True))


def _ends_of_wait(collectives: Union, start_ns: int, end_ns: int) -> tuple[int, int]:
    """From the first to the last instant of a gap at which a collective runs."""
    first = int(np.searchsorted(collectives.end_ns, start_ns, side="right"))
    last = int(np.searchsorted(collectives.start_ns, end_ns, side="left")) - 1
    return max(start_ns, int(collectives.start_ns[first])), min(end_ns, int(collectives.end_ns[last]))
