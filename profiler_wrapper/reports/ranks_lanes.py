"""Bars of a timeline of many ranks: a lane for each rank, what lies over what, and who waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.model import Int
from profiler_wrapper.recording.span_table import KINDS
from profiler_wrapper.reports.ranks_spans import LaneSpans

_NESTED = ("communication", "gc", "checkpoint", "data", "recompute")  # their own kinds wherever they lie
_UNDER = tuple(kind for kind in KINDS[1:] if kind not in _NESTED)
_OVER = ("recompute", "data", "checkpoint")
LAYER = "layer"  # the kind of the frames around the layer that the verdict names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bars:
    """Bars of one kind, which lie over those of all `Bars` before them."""

    kind: str  # of KINDS, "waiting" or LAYER
    lane: Int  # (N,) its place among the ranks
    start_ns: Int  # (N,)
    end_ns: Int  # (N,)


def lane_bars(spans: LaneSpans, ranks: Sequence[int], gap_ns: float, *, named: Collection[int] = ()) -> list[Bars]:
    """What is drawn in the lanes of `ranks`, the undermost first; what lies closer together than a gap is one bar.

    A communication beside the main thread shows where nothing else runs; one within a phase lies over it. It begins
    with waiting for others as far as that is known; only its transfer is drawn as communication.
    """
    communication = spans.kind == KINDS.index("communication")
    within = communication & spans.on_main & (spans.depth > 0)
    end = spans.start_ns + spans.duration_ns
    moved = spans.start_ns + np.maximum(spans.waiting_ns, 0)  # the transfer begins

    def of_kind(kind: str) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = spans.kind == KINDS.index(kind)
        return chosen if kind in _NESTED else chosen & (spans.depth == 0)

    def parts() -> Iterator[tuple[str, npt.NDArray[np.bool_], Int, Int]]:
        beside = communication & ~within
        yield "waiting", beside & (spans.waiting_ns > 0), spans.start_ns, moved
        yield "communication", beside, moved, end
        for kind in (*_UNDER, *_OVER):
            yield kind, of_kind(kind), spans.start_ns, end
        yield "waiting", within & (spans.waiting_ns > 0), spans.start_ns, moved
        yield "communication", within, moved, end
        yield "gc", of_kind("gc"), spans.start_ns, end
        yield LAYER, spans.is_marked & np.isin(spans.rank, sorted(named)), spans.start_ns, end

    found = (_joined(kind, spans.rank, chosen, start, end, ranks, gap_ns) for kind, chosen, start, end in parts())
    return [bars for bars in found if len(bars.lane)]


def _joined(
    kind: str, rank: Int, chosen: npt.NDArray[np.bool_], start: Int, end: Int, ranks: Sequence[int], gap_ns: float
) -> Bars:
    lanes: list[Int] = []
    starts: list[Int] = []
    ends: list[Int] = []
    for lane, one in enumerate(ranks):
        mine = chosen & (rank == one)
        low, high = merged(start[mine], end[mine], gap_ns)
        lanes.append(np.full(len(low), lane))
        starts.append(low)
        ends.append(high)
    return Bars(kind=kind, lane=_all(lanes), start_ns=_all(starts), end_ns=_all(ends))


def _all(parts: Iterable[npt.NDArray[Any]]) -> Int:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64)


def merged(start: Int, end: Int, gap_ns: float) -> tuple[Int, Int]:
    """Intervals with those put together that lie less than a gap apart, by start."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] - reached[:-1] > gap_ns]))
    return start[first], np.maximum.reduceat(end, first)


def waiting_is_known(spans: LaneSpans) -> bool:
    """Whether any communication tells its transfer from waiting."""
    return bool((spans.waiting_ns >= 0).any())
