"""The timeline of many ranks: the spans of a few steps in lanes, a lane for each rank; and all as a Chrome trace.

The trace is for ui.perfetto.dev, a process for each rank, as "Trace Event Format" (Google) has it: `M`, `X`, and
`s`/`f` for arrows from who came last to who waited for it. Times are by aligned clocks, where ranks have them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from profiler_wrapper.analysis.statistics import median
from profiler_wrapper.ranks.database import Database, literal, to_arrays
from profiler_wrapper.ranks.model import Bool, Float, Int
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.times import ON_MAIN, label_key
from profiler_wrapper.trace.spans import KINDS, SPAN_KINDS, ranges

# --------------------------------------------------------------------------------------------------
# Which ranks and steps are drawn.

# Drawn over what they lie in.
_NESTED = tuple(kind.name for kind in SPAN_KINDS if kind.within or kind.name == "data")
DRAWN_STEPS = 3
MOST_LANES = 32  # where nobody chose the ranks
MOST_LANE_SPANS = 400_000


def drawn_steps(report: RanksReport) -> list[int]:
    """Steps one after another that are like most; of a verdict on garbage collection, those that have most of it."""
    own = report.own
    skipped = len(own.steps) - report.verdict.steps if 0 < report.verdict.steps < len(own.steps) else 0
    steps = own.steps[skipped:]
    known = np.nan_to_num(own.self_ns[skipped:])
    gc = report.verdict.verdict == "gc" and "gc" in own.kinds
    times: Float = known[:, :, own.kinds.index("gc")].max(axis=1) if gc else known.sum(axis=2).max(axis=1)
    for width in range(min(DRAWN_STEPS, len(steps)), 0, -1):
        first = np.flatnonzero(steps[width - 1 :] - steps[: len(steps) - width + 1] == width - 1)
        if len(first):
            windows = np.convolve(times, np.ones(width), mode="valid")[first]
            at = windows.argmax() if gc else np.abs(windows - np.median(windows)).argmin()
            return [int(step) for step in steps[first[at] : first[at] + width]]
    return []


def chosen_ranks(report: RanksReport, most: int) -> list[int]:
    """Ranks to be drawn: all, or those named or suspected, one of each stage, others evenly spread."""
    own = report.own
    ranks: list[int] = own.ranks.tolist()
    if len(ranks) <= most:
        return ranks
    named = sorted(report.named_ranks)[: most // 2]
    suspected = [one.rank for one in report.verdict.suspects[:4] if one.rank is not None]
    of_stages = own.ranks[np.unique(own.stages, return_index=True)[1]].tolist()
    wanted = list(dict.fromkeys(one for one in (*named, *suspected, *of_stages) if one in set(ranks)))[:most]
    rest = [rank for rank in ranks if rank not in set(wanted)]
    spread = np.linspace(0, len(rest) - 1, most - len(wanted)).round().astype(int)
    return sorted([*wanted, *(rest[at] for at in spread.tolist())])


# --------------------------------------------------------------------------------------------------
# The spans that lanes are drawn from.


LaneSpans = Mapping[str, Int]
# Of spans `s`: when each begins by aligned clocks, as far as they are known, and what tells it.
_START = """s.start_ns
    - coalesce(round(c.offset_ns + c.drift * (s.start_ns - c.reference_ns))::BIGINT, 0) AS start_ns"""
_CLOCKS = "LEFT JOIN clocks c ON c.rank = s.rank"


def lane_spans(
    database: Database,
    ranks: Sequence[int],
    steps: Sequence[int],
    *,
    layer: str | None = None,
    most: int = MOST_LANE_SPANS,
) -> LaneSpans:
    """What is drawn in the lanes of some ranks, as arrays (N,) by rank and start: phases, and what lies within them.

    `kind` is a place in KINDS; `start_ns` by aligned clocks; `waiting_ns`, at its beginning, for others in a
    communication, -1: not known, or it is none; `on_main` on the thread of the steps; `is_marked` of `layer`.

    Of more than `most` spans one step in the middle is left, and then of that what lies in no other span.
    """
    is_marked = "false" if layer is None else f"coalesce(s.layer = {literal(layer)}, false)"
    within = f"(s.depth = 0 OR s.kind IN {_NESTED} OR {is_marked})"
    one = steps[len(steps) // 2 :][:1]
    conditions = [
        f"s.rank IN ({_numbers(ranks)}) AND {_of_steps(chosen)} AND s.kind <> 'step' AND {depth}"
        for chosen, depth in ((steps, within), (one, within), (one, "s.depth = 0"))
    ]
    where = conditions[_first_small(database, conditions, most)]
    kinds = " ".join(f"WHEN '{kind}' THEN {place}" for place, kind in enumerate(KINDS))
    found = to_arrays(
        database,
        f"""SELECT s.rank, s.step, CASE s.kind {kinds} ELSE {len(KINDS) - 1} END AS kind, {_START},
            s.duration_ns, coalesce(s.duration_ns - t.shortest_ns, -1) AS waiting_ns, s.depth,
            {ON_MAIN} AS on_main,
            {is_marked} AS is_marked
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank {_CLOCKS}
            LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key("s")}
            LEFT JOIN matched t ON t.label = l.label AND t.step = s.step AND t.sequence = s.sequence
        WHERE {where}""",
    )
    order = np.lexsort((found["start_ns"], found["rank"]))
    return {name: values[order].astype(np.int64) for name, values in found.items()}


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(int(value)) for value in values) or "NULL"


# --------------------------------------------------------------------------------------------------
# Bars of a timeline of many ranks: a lane for each rank, what lies over what, and who waits.

_UNDER = tuple(kind for kind in KINDS[1:] if kind not in _NESTED)
_OVER = tuple(kind for kind in _NESTED if kind not in ("communication", "gc"))
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
    communication = spans["kind"] == KINDS.index("communication")
    within = communication & (spans["on_main"] > 0) & (spans["depth"] > 0)
    end = spans["start_ns"] + spans["duration_ns"]
    moved = spans["start_ns"] + np.maximum(spans["waiting_ns"], 0)  # the transfer begins

    def of_kind(kind: str) -> Bool:
        chosen: Bool = spans["kind"] == KINDS.index(kind)
        return chosen if kind in _NESTED else chosen & (spans["depth"] == 0)

    def parts() -> Iterator[tuple[str, Bool, Int, Int]]:
        beside = communication & ~within
        yield "waiting", beside & (spans["waiting_ns"] > 0), spans["start_ns"], moved
        yield "communication", beside, moved, end
        for kind in (*_UNDER, *_OVER):
            yield kind, of_kind(kind), spans["start_ns"], end
        yield "waiting", within & (spans["waiting_ns"] > 0), spans["start_ns"], moved
        yield "communication", within, moved, end
        yield "gc", of_kind("gc"), spans["start_ns"], end
        yield LAYER, (spans["is_marked"] > 0) & np.isin(spans["rank"], sorted(named)), spans["start_ns"], end

    found = (_joined(kind, spans["rank"], chosen, start, end, ranks, gap_ns) for kind, chosen, start, end in parts())
    return [bars for bars in found if len(bars.lane)]


def _joined(kind: str, rank: Int, chosen: Bool, start: Int, end: Int, ranks: Sequence[int], gap_ns: float) -> Bars:
    parts = [np.empty((3, 0), dtype=np.int64)]
    for lane, one in enumerate(ranks):
        mine = chosen & (rank == one)
        low, high = merged(start[mine], end[mine], gap_ns)
        parts.append(np.stack([np.full(len(low), lane), low, high]))
    lanes, starts, ends = np.concatenate(parts, axis=1).astype(np.int64)
    return Bars(kind=kind, lane=lanes, start_ns=starts, end_ns=ends)


def merged(start: Int, end: Int, gap_ns: float) -> tuple[Int, Int]:
    """Intervals with those put together that lie less than a gap apart, by start."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] - reached[:-1] > gap_ns]))
    return start[first], np.maximum.reduceat(end, first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What is drawn of a few steps, in nanoseconds from the first span on."""

    lanes: tuple[int, ...]  # ranks, the topmost first
    names: tuple[str, ...]  # of the lanes
    steps: tuple[int, ...]
    bars: tuple[Bars, ...]
    begins_ns: dict[int, float]  # of each step: the median over ranks
    gap_ns: float  # what lies closer together is one bar
    waiting_known: bool  # whether any communication tells its transfer from waiting
    drawn: str  # of which ranks and steps
    clocks: str  # by which clocks


def read_timeline(report: RanksReport, database: Database, lanes: Sequence[int], *, pixels: int) -> Timeline:
    """What lies closer together than a picture of `pixels` columns shows is one bar."""
    spans = lane_spans(database, lanes, drawn_steps(report), layer=report.verdict.layer)
    end = spans["start_ns"] + spans["duration_ns"]
    first = int(spans["start_ns"].min(initial=end.max(initial=0)))
    gap_ns = float(end.max(initial=first) - first) / pixels
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    staged = len(set(stages.values())) > 1
    steps = np.unique(spans["step"]).tolist()
    begins = {}
    for step in steps:
        mine = spans["step"] == step
        firsts = [spans["start_ns"][mine & (spans["rank"] == rank)].min() for rank in np.unique(spans["rank"][mine])]
        begins[step] = float(np.median(firsts)) - first
    spans = {**spans, "start_ns": spans["start_ns"] - first}
    return Timeline(
        lanes=tuple(lanes),
        names=tuple(f"rank {rank}" + (f", stage {stages.get(rank, 0)}" if staged else "") for rank in lanes),
        steps=tuple(steps),
        bars=tuple(lane_bars(spans, lanes, gap_ns, named=report.named_ranks)),
        begins_ns=begins,
        gap_ns=gap_ns,
        waiting_known=bool((spans["waiting_ns"] >= 0).any()),
        drawn=_drawn_text(report, lanes, steps),
        clocks=_clocks_text(report),
    )


def telling_ranks(report: RanksReport) -> list[int]:
    """The ranks of the lanes where nobody chose them: all, or those of many that tell most; a slow stage's together."""
    ranks = chosen_ranks(report, MOST_LANES)
    if report.verdict.verdict != "stage":
        return ranks
    stages = dict(zip(report.own.ranks.tolist(), report.own.stages.tolist(), strict=True))
    return sorted(ranks, key=lambda rank: (stages[rank], rank))


def _drawn_text(report: RanksReport, lanes: Sequence[int], steps: Sequence[int]) -> str:
    count = len(report.own.ranks)
    ranks = "One rank" if count == 1 else f"{'All' if len(lanes) >= count else f'{len(lanes):,} of'} {count:,} ranks"
    return f"{ranks}; step{'s' if len(steps) > 1 else ''} {ranges(steps)} ({len(steps)} of {len(report.own.steps):,})"


def _clocks_text(report: RanksReport) -> str:
    if report.clocks is not None and report.clocks.source != "none":
        return "clocks aligned"
    hosts = set(report.hosts)
    return "by the clock of their one host" if len(hosts) == 1 and "" not in hosts else "by the clock of each rank"


# --------------------------------------------------------------------------------------------------
# The Chrome trace.

MOST_ARROWS = 4_000  # more are a black page
_MOST_ARROWS_OF_ONE = 16  # of one collective, the longest waits
_LEAST_WAIT = 0.02  # of a step: who waited less gets no arrow
MOST_TRACE_SPANS = 300_000  # more make Perfetto slow: then only a few steps are written
_COMPRESSION = 6
_COLUMNS = ("rank", "step", "name", "kind", "layer", "duration_ns", "thread", "microbatch", "group", "bytes")
_ABOUT = ("step", "kind", "layer", "microbatch", "group", "bytes")
_MORE = ("is_main", "label", "sequence", "start_ns")  # beside these columns

Event = dict[str, Any]
Parts = dict[tuple[int, int, int], list[Event]]  # by label, step and sequence: each rank's part of a communication


def write_ranks_trace(
    report: RanksReport,
    database: Database,
    path: Path,
    *,
    ranks: Sequence[int] | None = None,
    most: int = MOST_TRACE_SPANS,
) -> None:
    """Writes the trace, as JSON, gzipped where the name ends in `.gz`, an event at a time.

    `ts` and `dur` are microseconds from `baseTimeNanoseconds` on.

    Of more than `most` spans only a few steps are written, and what is left out stands in the trace.
    """
    where, left_out = _chosen(report, database, ranks, most)
    first = f"SELECT min(start_ns) FROM (SELECT {_START} FROM spans s {_CLOCKS} WHERE {where})"
    base = int(database.execute(first).fetchone()[0] or 0)
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "metadata": {"run": report.run, "verdict": report.verdict.sentence, "left_out": left_out},
    }
    with ExitStack() as files:
        file: IO[bytes] | gzip.GzipFile = files.enter_context(path.open("wb"))
        if path.name.endswith(".gz"):  # no name and time in its header, so that the same spans are the same file
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=file, mtime=0)
            file = files.enter_context(packed)
        text = json.dumps(head, allow_nan=False, separators=(",", ":"))
        file.write(f'{text[:-1]},"traceEvents":['.encode())
        for at, event in enumerate(_events(report, database, where, base)):
            line = json.dumps(event, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
            file.write(f"{',' if at else ''}\n{line}".encode())
        file.write(b"\n]}\n")


def _events(report: RanksReport, database: Database, where: str, base: int) -> Iterator[Event]:
    yield from _processes(report)
    columns = ", ".join(f's."{name}"' for name in _COLUMNS)
    found = database.execute(
        f"""SELECT {columns}, coalesce(m.thread = s.thread, false) AS is_main, l.label, s.sequence,
            {_START}
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank
            LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key("s")}
            {_CLOCKS} WHERE {where}
        ORDER BY s.rank, is_main DESC, s.thread, s.kind = 'communication' AND s.thread IS NULL, start_ns,
            s.duration_ns DESC"""
    )
    parts: Parts = {}
    for rank, of_rank in groupby(_rows(found), key=lambda row: int(row["rank"])):
        threads = count(1)
        for _, rows in groupby(of_rank, key=_thread_of):
            yield from _lanes(list(rows), rank, base, threads, parts)
    yield from _arrows(parts, report)


def _arrows(parts: Parts, report: RanksReport) -> Iterator[Event]:
    """From the rank that came last to a communication to those that waited for it, the longest waits of all.

    An arrow leads from the middle of the last rank's transfer to the same instant within the span of who waited.
    """
    least_us = _LEAST_WAIT * float(median(report.own.wall_ns.reshape(-1))) / 1000  # nan, that nothing reaches, of none
    waits = []
    for ranks in parts.values():
        ordered = sorted(ranks, key=lambda part: (part["dur"], part["ts"], part["pid"], part["tid"]))
        last = ordered[0]
        if any(part["pid"] != last["pid"] for part in ordered):
            waiting = [part for part in reversed(ordered) if part["dur"] - last["dur"] >= least_us]
            waits += [(part["dur"] - last["dur"], last, part) for part in waiting[:_MOST_ARROWS_OF_ONE]]
    waits.sort(key=lambda wait: -wait[0])
    for number, (_, last, part) in enumerate(waits[:MOST_ARROWS], 1):
        about = {"cat": "waiting", "name": "waited for", "id": number}
        begin = last["ts"] + last["dur"] / 2
        yield {"ph": "s", **about, "pid": last["pid"], "tid": last["tid"], "ts": begin}
        there = min(max(begin, part["ts"]), part["ts"] + part["dur"])
        yield {"ph": "f", "bp": "e", **about, "pid": part["pid"], "tid": part["tid"], "ts": there}


# --- which spans ---


def _chosen(report: RanksReport, database: Database, ranks: Sequence[int] | None, most: int) -> tuple[str, str]:
    """Which spans are written, as SQL, and what is not."""
    of_ranks = "true" if ranks is None else f"s.rank IN ({_numbers(ranks)})"
    few = drawn_steps(report)
    one = few[len(few) // 2 :][:1]
    wanted = [
        ("s.step IS NOT NULL", ""),
        (_of_steps(few), f"all steps but {ranges(few)}"),
        (_of_steps(one), f"all steps but {ranges(one)}"),
        (f"{_of_steps(one)} AND s.depth = 0", f"all steps but {ranges(one)}, and all spans within others"),
    ]
    place = _first_small(database, [f"{where} AND {of_ranks}" for where, _ in wanted], most)
    left_out = [wanted[place][1], "" if ranks is None else f"all ranks but {ranges(ranks)}"]
    return f"{wanted[place][0]} AND {of_ranks}", "; ".join(one for one in left_out if one)


def _first_small(database: Database, conditions: Sequence[str], most: int) -> int:
    """Place of the first condition that at most so many spans fulfil; else of the last."""
    for place, where in enumerate(conditions[:-1]):
        if database.execute(f"SELECT count(*) FROM spans s WHERE {where}").fetchone()[0] <= most:
            return place
    return len(conditions) - 1


def _of_steps(steps: Sequence[int]) -> str:
    return f"s.step IN ({_numbers(steps)})"


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    while many := found.fetchmany(50_000):
        for row in many:
            yield dict(zip((*_COLUMNS, *_MORE), row, strict=True))


# --- lanes of threads ---


def _thread_of(row: dict[str, Any]) -> tuple[bool, int | None]:
    return row["kind"] == "communication" and row["thread"] is None, row["thread"]


def _lanes(
    rows: Sequence[dict[str, Any]], rank: int, base: int, threads: Iterator[int], parts: Parts
) -> Iterator[Event]:
    """Events of one thread; what overlaps another without lying within it is put into a lane of its own."""
    lanes: list[tuple[list[int], list[dict[str, Any]]]] = []  # ends of the spans that are open, and all of its spans
    for row in rows:
        start, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
        for ends, _ in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
        ends, lane = next((one for one in lanes if not one[0] or end <= one[0][-1]), ([], []))
        if not lane:
            lanes.append((ends, lane))
        ends.append(end)
        lane.append(row)
    for number, (_, lane) in enumerate(lanes):
        tid = next(threads)
        yield _named("thread_name", rank, tid, name=_thread_name(lane[0], number))
        yield _named("thread_sort_index", rank, tid, sort_index=tid)
        for row in lane:
            event = _event(row, rank, tid, base)
            if row["label"] is not None and row["sequence"] is not None:
                parts.setdefault((row["label"], row["step"], row["sequence"]), []).append(event)
            yield event


def _thread_name(row: dict[str, Any], number: int) -> str:
    if _thread_of(row)[0]:
        thread = "communication"
    elif row["thread"] is None:
        thread = "spans"
    else:
        thread = f"main thread {row['thread']}" if row["is_main"] else f"thread {row['thread']}"
    return thread if number == 0 else f"{thread}, overlapping {number}"


def _event(row: dict[str, Any], rank: int, tid: int, base: int) -> Event:
    return {
        "ph": "X",
        "name": row["name"] or row["kind"],
        "cat": row["kind"],
        "pid": rank,
        "tid": tid,
        "ts": (row["start_ns"] - base) / 1000,
        "dur": row["duration_ns"] / 1000,
        "args": {name: row[name] for name in _ABOUT if row[name] is not None},
    }


# --- processes ---


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _processes(report: RanksReport) -> Iterator[Event]:
    """Names of ranks, in their order; those that the verdict names say so."""
    named, own = report.named_ranks, report.own
    staged = len(set(own.stages.tolist())) > 1
    for place, rank in enumerate(own.ranks.tolist()):
        name = f"rank {rank}"
        if staged:
            name += f", stage {int(own.stages[place])}"
        labels = ["named by the verdict"] * (rank in named) + [host for host in report.hosts[place : place + 1] if host]
        yield _named("process_name", rank, 0, name=name)
        yield _named("process_sort_index", rank, 0, sort_index=place)  # same (0 -> 1): a process has no thread
        if labels:
            yield _named("process_labels", rank, 0, labels=", ".join(labels))
