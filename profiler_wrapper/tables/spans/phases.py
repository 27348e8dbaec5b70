"""Phases of the steps of a trace as rows.

On a CPU-only trace phases are what the training threads do: ops one after another with the same phase are one span. On
a trace of a device they are what its compute streams do, and data loading is the CPU's, beside it. A long gap in which
a collective runs is none of a phase: it is that collective's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.place.intervals import Union
from profiler_wrapper.tables.spans.row import LASTING, LONG_GAP_NS, Row
from profiler_wrapper.tables.spans.steps import Steps
from profiler_wrapper.trace.recording import Bool, Int64
from profiler_wrapper.trace.spans import SPAN_KINDS

Texts = npt.NDArray[Any]


OF_CPU = tuple(kind.name for kind in SPAN_KINDS if kind.of_cpu)
_APART = (*OF_CPU, "communication")  # never joined: each is a span as it is


class Pieces(NamedTuple):
    """Things that run, in order of start."""

    start_ns: Int64
    end_ns: Int64
    kind: Texts  # "": not known
    step: Int64  # its place among the steps; -1: in none
    name: Texts


def phases(
    pieces: Pieces, steps: Steps, collectives: Union, *, thread: int, lasting: tuple[str, ...] = LASTING
) -> list[Row]:
    """Pieces of one kind after another as one span.

    What nothing names belongs to the phase on both sides of it, else to the one that it follows at once, else to none.
    A long gap within a phase that lasts is the phase's own, but for the collectives that run in it: the thread waits
    for them. Any other long gap belongs to nobody: what runs there shows in no event.
    """
    if not len(pieces.kind):
        return []
    start, end, step = pieces.start_ns, pieces.end_ns, pieces.step
    reached = np.minimum(np.append(start[:1], np.maximum.accumulate(end)[:-1]), start)
    gap_ns, waited_ns = start - reached, collectives.overlap(reached, start)
    kind = _with_kinds(pieces, gap_ns - waited_ns > LONG_GAP_NS)
    lasts, apart = np.isin(kind, lasting), np.isin(kind, _APART)
    goes_on = np.append(False, (kind[1:] == kind[:-1]) & (step[1:] == step[:-1])) & ~apart
    waits = goes_on & lasts & (gap_ns > LONG_GAP_NS) & (waited_ns > LONG_GAP_NS)
    first = np.flatnonzero(~goes_on | waits | ((gap_ns > LONG_GAP_NS) & ~lasts))
    begins, ends = start[first], np.maximum.reduceat(end, first)
    after = np.flatnonzero(waits[first])  # a wait is from the first to the last instant at which a collective runs
    wait_ns = collectives.start_ns[np.searchsorted(collectives.end_ns, ends[after - 1], side="right")]
    waited_till_ns = collectives.end_ns[np.searchsorted(collectives.start_ns, begins[after], side="left") - 1]
    ends[after - 1] = np.maximum(ends[after - 1], wait_ns)
    begins[after] = np.minimum(begins[after], waited_till_ns)
    names = np.where(apart, pieces.name, kind)
    columns = (column.tolist() for column in (names[first], kind[first], begins, ends))
    return [
        Row(number, name, kind_of, begin, end_ns - begin, thread=thread)
        for number, name, kind_of, begin, end_ns in zip(steps.numbers(step[first]), *columns, strict=True)
        if end_ns > begin
    ]


def _with_kinds(pieces: Pieces, is_apart: Bool) -> Texts:
    """A kind for each; `is_apart`: whether it begins long after what is before it."""
    kind, step, named = pieces.kind, pieces.step, pieces.kind != ""
    begins = np.append(True, (named[1:] != named[:-1]) | (step[1:] != step[:-1]))
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    behind = first[1:]  # of each run the piece behind it
    in_step = step[behind] == step[behind - 1]
    before = np.append("", np.where(in_step, kind[behind - 1], ""))
    before[~np.isin(before, LASTING)] = ""
    within = before == np.append(np.where(in_step, kind[behind], ""), "")
    times_apart = np.cumsum(is_apart)
    goes_on: Bool = times_apart == (times_apart - is_apart)[first][run]
    found = np.where(named, kind, np.where(within[run] | goes_on, before[run], ""))
    return np.where(found == "", "other", found)
