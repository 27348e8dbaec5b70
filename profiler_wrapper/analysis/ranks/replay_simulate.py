"""When each operation of a graph would end, given how long each takes: many steps and pipelines at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.replay_cells import Float
from profiler_wrapper.analysis.ranks.replay_graph import Graph, Meeting

NUMBERS_AT_ONCE: Final = 2_000_000  # 16 MB
Length = Float | npt.NDArray[np.float32] | float  # of one operation: (P, B), or the same for all
Lengths = Callable[[int, int], Sequence[Length]]  # (first, end) of a batch -> of each operation


def ends_of(
    graph: Graph,
    lengths: Sequence[Length],
    shape: tuple[int, int],
    *,
    gaps: Float | None = None,
    pairs: bool = False,
) -> Float:
    """End of each operation, from the begin of the step at 0; (N, P, B), where `shape` is (P, B).

    `gaps`: how long an operation begins after all that it waits for. With `pairs` there are two pipelines: one to look
    at, and one that stands for all others.
    """
    ends = np.empty((len(lengths), *shape))
    starts = np.empty((max(len(each.members) for each in graph.meetings), *shape))
    for meeting in graph.meetings:
        first = meeting.members[0]
        if meeting.how == "alone" and len(graph.waits_for[first]) == 1 and gaps is None:  # most are so
            np.add(ends[graph.waits_for[first][0]], lengths[first], out=ends[first])
            continue
        own = starts[: len(meeting.members)]
        for place, number in enumerate(meeting.members):
            _start(own[place], ends, graph.waits_for[number])
            if gaps is not None:
                own[place] += gaps[number]
        begin = _begin(meeting, own, pairs=pairs)
        for place, number in enumerate(meeting.members):
            np.add(begin[place if len(begin) > 1 else 0], lengths[number], out=ends[number])
    return ends


def _start(start: Float, ends: Float, waits_for: tuple[int, ...]) -> None:
    if not waits_for:
        start[...] = 0.0
    elif len(waits_for) == 1:
        start[...] = ends[waits_for[0]]
    else:
        np.maximum(ends[waits_for[0]], ends[waits_for[1]], out=start)
        for other in waits_for[2:]:
            np.maximum(start, ends[other], out=start)


def _begin(meeting: Meeting, starts: Float, *, pairs: bool) -> Float:
    if not pairs:
        return meeting.last(starts)
    if meeting.how in ("all", "some") and meeting.labels.shape[1] > 1:
        return np.asarray(starts.max(axis=(0, 1), keepdims=True))
    return starts if meeting.how == "alone" else np.asarray(starts.max(axis=0, keepdims=True))


def step_times(graph: Graph, lengths: Lengths, pipelines: int, count: int, *, pairs: bool = False) -> Float:
    """Time of each of `count` steps, from its first start to its last end."""
    batch = max(1, NUMBERS_AT_ONCE // (len(graph.operations) * pipelines))
    found = np.empty(count)
    last = list(graph.ends)
    for first in range(0, count, batch):
        end = min(count, first + batch)
        ends = ends_of(graph, lengths(first, end), (pipelines, end - first), pairs=pairs)
        found[first:end] = ends[last].max(axis=(0, 1))
    return found


def launch_gaps(graph: Graph, starts: Float, ends: Float) -> Float:
    """How long each operation began after all that it waits for, below 0 where before; all are (N, P, B)."""
    gaps = starts.copy()
    for number, waits_for in enumerate(graph.waits_for):
        if waits_for:
            gaps[number] -= ends[list(waits_for)].max(axis=0)
    return np.asarray(gaps)
