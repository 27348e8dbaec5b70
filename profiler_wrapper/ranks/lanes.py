"""The spans of a few steps that a timeline of many ranks is drawn from, by aligned clocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.ranks.database import Database, has_table, literal, to_arrays
from profiler_wrapper.ranks.model import Float, Int, RanksReport
from profiler_wrapper.ranks.times import label_key
from profiler_wrapper.trace.spans import KINDS

STEPS = 3
MOST_SPANS = 400_000
_LONG_PAUSE, _SHORT_PAUSE = 0.3, 0.05  # of a step: longer ones between two steps are cut down to that
_CARVED = "'communication', 'gc', 'checkpoint', 'data', 'recompute'"  # drawn over what they lie in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneSpans:
    """Spans of chosen ranks and steps, as arrays (N,), by rank and start."""

    rank: Int
    step: Int
    kind: Int  # its place in KINDS
    start_ns: Int  # by aligned clocks
    duration_ns: Int
    waiting_ns: Int  # at its beginning, for others in a communication; -1: not known, or it is none
    depth: Int
    on_main: npt.NDArray[np.bool_]  # on the thread of the steps
    is_marked: npt.NDArray[np.bool_]  # of the layer that the verdict names
    is_cut: bool = False  # pauses between steps are
    from_own_begin: bool = False  # each rank's starts count from its own first span on: clocks tell nothing

    def on_one_axis(self, *, is_aligned: bool) -> LaneSpans:
        """The same as it can be drawn: pauses between steps cut down, so that steps recorded apart stand side by side.

        Where clocks are not aligned, and tell that ranks are in a step at times that are a step apart, each rank
        counts from its own first span on.
        """
        found = self
        if not is_aligned and len(self.rank):
            begin = {rank: int(self.start_ns[self.rank == rank].min()) for rank in np.unique(self.rank).tolist()}
            longest = max(last - first for of_rank in begin for first, last, _ in self._extents(self.rank == of_rank))
            if max(begin.values()) - min(begin.values()) > longest:
                shift = np.array([begin[rank] for rank in self.rank.tolist()], dtype=np.int64)
                found = replace(self, start_ns=self.start_ns - shift, from_own_begin=True)
        return found._without_pauses()

    def _extents(self, of: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
        """(first, last, step) of the steps of some of them."""
        end = self.start_ns + self.duration_ns
        parts = [(of & (self.step == step), step) for step in np.unique(self.step[of]).tolist()]
        return sorted((int(self.start_ns[mine].min()), int(end[mine].max()), step) for mine, step in parts)

    def _without_pauses(self) -> LaneSpans:
        extents = self._extents(np.ones(len(self.rank), dtype=np.bool_))
        usual = sorted(last - first for first, last, _ in extents)[len(extents) // 2] if extents else 0
        cut, total, reached = dict[int, int](), 0, 0
        for at, (first, last, step) in enumerate(extents):
            pause = first - reached
            if at and pause > _LONG_PAUSE * usual:
                total += pause - round(_SHORT_PAUSE * usual)
            cut[step], reached = total, max(reached, last)
        if not total:
            return self
        shift = np.array([cut[step] for step in self.step.tolist()], dtype=np.int64)
        return replace(self, start_ns=self.start_ns - shift, is_cut=True)

    def step_begins_ns(self) -> dict[int, float]:
        """When each step begins: the median over ranks."""
        found = {}
        for step in np.unique(self.step).tolist():
            mine = self.step == step
            firsts = [self.start_ns[mine & (self.rank == rank)].min() for rank in np.unique(self.rank[mine])]
            found[step] = float(np.median(firsts))
        return found

    def extent_ns(self, rank: int, step: int) -> tuple[int, int] | None:
        """Begin and end of a step of a rank; None where nothing of it is drawn."""
        mine = (self.rank == rank) & (self.step == step)
        return next(((first, last) for first, last, _ in self._extents(mine)), None)


def clocks_in_words(report: RanksReport, spans: LaneSpans) -> str:
    """By which clocks spans are drawn."""
    hosts = set(report.hosts)
    if is_aligned(report):
        said = "clocks aligned"
    elif spans.from_own_begin:
        said = "each rank from its own first step on, as clocks are not aligned"
    else:
        said = "by the clock of their one host" if len(hosts) == 1 and "" not in hosts else "by the clock of each rank"
    return said + ("; pauses between steps are cut" if spans.is_cut else "")


def is_aligned(report: RanksReport) -> bool:
    """Whether starts of different ranks can be compared by their clocks."""
    return report.clocks is not None and report.clocks.source != "none"


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
    database: Database, ranks: Sequence[int], steps: Sequence[int], *, layer: str | None = None, most: int = MOST_SPANS
) -> LaneSpans:
    """What is drawn in the lanes of some ranks: phases, and what lies within them that is none.

    Of more than `most` spans one step in the middle is left, and then of that what lies in no other span.
    """
    within = f"(s.depth = 0 OR s.kind IN ({_CARVED}) OR coalesce(s.layer = {_text(layer)}, false))"
    one = [steps[len(steps) // 2]] if steps else []
    for chosen, depth in ((steps, within), (one, within), (one, "s.depth = 0")):
        where = f"s.rank IN ({_numbers(ranks)}) AND s.step IN ({_numbers(chosen)}) AND s.kind <> 'step' AND {depth}"
        if database.execute(f"SELECT count(*) FROM spans s WHERE {where}").fetchone()[0] <= most:
            break
    kinds = " ".join(f"WHEN '{kind}' THEN {place}" for place, kind in enumerate(KINDS))
    found = to_arrays(
        database,
        f"""SELECT s.rank, s.step, CASE s.kind {kinds} ELSE {len(KINDS) - 1} END AS kind, {aligned_start(database)},
            s.duration_ns, coalesce(s.duration_ns - t.transfer_ns, -1) AS waiting_ns, s.depth,
            (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main,
            coalesce(s.layer = {_text(layer)}, false) AS is_marked
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank {clock_join(database)} {_transfer_join(steps)}
        WHERE {where}""",
    )
    order = np.lexsort((found["start_ns"], found["rank"]))
    columns = {name: values[order] for name, values in found.items()}
    return LaneSpans(
        rank=columns["rank"].astype(np.int64),
        step=columns["step"].astype(np.int64),
        kind=columns["kind"].astype(np.int64),
        start_ns=columns["start_ns"].astype(np.int64),
        duration_ns=columns["duration_ns"].astype(np.int64),
        waiting_ns=columns["waiting_ns"].astype(np.int64),
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
    return "LEFT JOIN clocks c ON c.rank = s.rank"


def _transfer_join(steps: Sequence[int]) -> str:
    """Of communications that others tell of too: their transfer, the shortest duration over all ranks."""
    return f"""LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key("s")}
        LEFT JOIN (SELECT step, label, sequence, min(duration_ns) AS transfer_ns FROM communications
            WHERE step IN ({_numbers(steps)}) AND sequence IS NOT NULL
            GROUP BY step, label, sequence HAVING count(*) > 1) t
        ON t.label = l.label AND t.step = s.step AND t.sequence = s.sequence"""


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(int(value)) for value in values) or "NULL"


def _text(value: str | None) -> str:
    return "NULL" if value is None else literal(value)


# --------------------------------------------------------------------------------------------------
# Bars of a timeline of many ranks: a lane for each rank, what lies over what, and who waits.

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
