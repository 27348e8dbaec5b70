"""The spans of a few steps that a timeline of many ranks is drawn from, by aligned clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.meetings import has_table, to_arrays
from profiler_wrapper.analysis.ranks.model import Float, Int, RanksReport
from profiler_wrapper.recording.span_database import Database, literal
from profiler_wrapper.recording.span_table import KINDS

STEPS = 3
_CARVED = "'communication', 'gc', 'checkpoint', 'data', 'recompute'"  # drawn over what they lie in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneSpans:
    """Spans of chosen ranks and steps, as arrays (N,), by rank and start."""

    rank: Int
    step: Int
    kind: Int  # its place in KINDS
    start_ns: Int  # by aligned clocks
    duration_ns: Int
    depth: Int
    on_main: npt.NDArray[np.bool_]  # on the thread of the steps
    is_marked: npt.NDArray[np.bool_]  # of the layer that the verdict names

    def of_rank(self, rank: int) -> LaneSpans:
        """Those of one rank."""
        chosen = self.rank == rank
        return LaneSpans(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def drawn_steps(report: RanksReport, count: int = STEPS) -> list[int]:
    """Steps one after another that are like most; of a verdict on garbage collection, those that have most of it."""
    own = report.own
    steps: list[int] = own.steps.tolist()
    skipped = len(steps) - report.verdict.steps if 0 < report.verdict.steps < len(steps) else 0
    if len(steps) - skipped <= count:
        return steps[-count:]
    known = np.where(np.isfinite(own.own_ns), own.own_ns, 0.0)
    gc = report.verdict.verdict == "gc" and "gc" in own.kinds
    times: Float = known[:, :, own.kinds.index("gc")].max(axis=1) if gc else known.sum(axis=2).max(axis=1)
    windows = np.convolve(times[skipped:], np.ones(count), mode="valid")
    at = int(windows.argmax()) if gc else int(np.abs(windows - np.median(windows)).argmin())
    return steps[skipped + at : skipped + at + count]


def lane_spans(
    database: Database, ranks: Sequence[int], steps: Sequence[int], *, layer: str | None = None, most: int = 400_000
) -> LaneSpans:
    """What is drawn in the lanes of some ranks: phases, and what lies within them that is none; at most so many."""
    kinds = " ".join(f"WHEN '{kind}' THEN {place}" for place, kind in enumerate(KINDS))
    found = to_arrays(
        database,
        f"""SELECT s.rank, s.step, CASE s.kind {kinds} ELSE {len(KINDS) - 1} END AS kind, {aligned_start(database)},
            s.duration_ns, s.depth, (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main,
            coalesce(s.layer = {_text(layer)}, false) AS is_marked
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank {clock_join(database)}
        WHERE s.rank IN ({_numbers(ranks)}) AND s.step IN ({_numbers(steps)}) AND s.kind <> 'step'
            AND (s.depth = 0 OR s.kind IN ({_CARVED}) OR coalesce(s.layer = {_text(layer)}, false))
        ORDER BY s.depth, s.rank, s.start_ns LIMIT {most}""",
    )
    order = np.lexsort((found["start_ns"], found["rank"]))
    columns = {name: values[order] for name, values in found.items()}
    return LaneSpans(
        rank=columns["rank"].astype(np.int64),
        step=columns["step"].astype(np.int64),
        kind=columns["kind"].astype(np.int64),
        start_ns=columns["start_ns"].astype(np.int64),
        duration_ns=columns["duration_ns"].astype(np.int64),
        depth=columns["depth"].astype(np.int64),
        on_main=columns["on_main"].astype(np.bool_),
        is_marked=columns["is_marked"].astype(np.bool_),
    )


def aligned_start(database: Database) -> str:
    """The expression of a span's start, `start_ns`, by aligned clocks where there are any."""
    if not has_table(database, "clocks"):
        return "s.start_ns"
    shift = "c.offset_ns + c.drift * (s.start_ns - c.reference_ns)"
    return f"s.start_ns - coalesce(round({shift})::BIGINT, 0) AS start_ns"


def clock_join(database: Database) -> str:
    """What the expression needs behind FROM spans s."""
    if not has_table(database, "clocks"):
        return ""
    return "LEFT JOIN clocks c ON c.rank = s.rank AND s.start_ns >= c.from_ns AND s.start_ns < c.until_ns"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(int(value)) for value in values) or "NULL"


def _text(value: str | None) -> str:
    return "NULL" if value is None else literal(value)


def merged(start: Int, end: Int, gap_ns: float) -> tuple[Int, Int]:
    """Intervals in order of their starts with those put together that lie less than a gap apart."""
    if not len(start):
        return start, end
    reached = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] - reached[:-1] > gap_ns]))
    return start[first], np.maximum.reduceat(end, first)
