"""The timeline of many ranks: the spans of a few steps in lanes, a lane for each rank; and all as a Chrome trace.

The trace is for ui.perfetto.dev, a process for each rank, as "Trace Event Format" (Google) has it: `M`, `X`, and
`s`/`f` for arrows from who came last to who waited for it. Times are by aligned clocks, where ranks have them.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.ranks.database import Database, literal, to_arrays
from profiler_wrapper.ranks.model import Float, Int
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.times import ON_MAIN, label_key
from profiler_wrapper.tables.statistics import median
from profiler_wrapper.trace.spans import KINDS, SPAN_KINDS, ranges

# --- Which ranks, steps and spans are drawn ---

# Drawn over what they lie in.
_NESTED = tuple(kind.name for kind in SPAN_KINDS if kind.within or kind.name == "data")
DRAWN_STEPS = 3
MOST_LANES = 32  # where nobody chose the ranks


def drawn_steps(report: RanksReport) -> list[int]:
    """Steps one after another that are like most; of a verdict on garbage collection, those that have most of it."""
    own = report.steady
    steps, known = own.steps, np.nan_to_num(own.self_ns)
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
    """Ranks to be drawn where nobody chose: all, or those named or suspected, one of each stage, others evenly spread.

    Of a verdict on a stage, its ranks lie together.
    """
    own = report.own
    ranks: list[int] = own.ranks.tolist()
    if len(ranks) > most:
        named = sorted(report.named_ranks)[: most // 2]
        suspected = [one.rank for one in report.verdict.suspects[:4] if one.rank is not None]
        of_stages = own.ranks[np.unique(own.stages, return_index=True)[1]].tolist()
        wanted = list(dict.fromkeys((*named, *suspected, *of_stages)))[:most]
        rest = np.setdiff1d(own.ranks, wanted)
        spread = np.linspace(0, len(rest) - 1, most - len(wanted)).round().astype(int)
        ranks = sorted([*wanted, *rest[spread].tolist()])
    if report.verdict.verdict == "stage":
        stages = dict(zip(own.ranks.tolist(), own.stages.tolist(), strict=True))
        ranks.sort(key=lambda rank: (stages[rank], rank))
    return ranks


# Of spans `s`: when each begins by aligned clocks, as far as they are known, and what tells it.
_START = """s.start_ns
    - coalesce(round(c.offset_ns + c.drift * (s.start_ns - c.reference_ns))::BIGINT, 0) AS start_ns"""
_CLOCKS = "LEFT JOIN clocks c ON c.rank = s.rank"
_LABELS = f"LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key('s')}"


def _among(column: str, values: Iterable[int]) -> str:
    return f"{column} IN ({', '.join(map(str, values)) or 'NULL'})"


# --- Bars of a timeline of many ranks: a lane for each rank, what lies over what, and who waits ---

LAYER = "layer"  # the kind of the frames around the layer that the verdict names
# Bars, the undermost first. A communication beside the main thread shows where nothing else runs; one within a phase
# lies over it. It begins with waiting for others as far as that is known; only its transfer is communication.
_LEVELS = (
    *("waiting", "communication"),
    *(kind for kind in KINDS[1:] if kind not in _NESTED),
    *(kind for kind in _NESTED if kind not in ("communication", "gc")),
    *("waiting", "communication", "gc", LAYER),
)
_WAITING_WITHIN = _LEVELS.index("waiting", 1)


class Bars(NamedTuple):
    """Bars of one kind, which lie over those of all `Bars` before them."""

    kind: str  # of KINDS, "waiting" or LAYER
    lanes: Int  # (N,) places among the ranks
    starts_us: Float  # (N,)
    lengths_us: Float  # (N,)


class Timeline(NamedTuple):
    """What is drawn of some steps, in microseconds from the first span on."""

    ranks: list[int]  # of the lanes, the topmost first
    lanes: list[str]  # their names
    steps: list[int]
    begins_us: list[float]  # of each step: the median over ranks
    bars: list[Bars]
    waiting_known: bool  # whether any communication tells its transfer from waiting
    drawn: str  # of which ranks and steps
    clocks: str  # by which clocks


def read_timeline(
    report: RanksReport,
    database: Database,
    ranks: Sequence[int] | None,
    *,
    pixels: int,
    most: int | None = None,
    steps: Sequence[int] | None = None,
) -> Timeline:
    """What lies closer together than a picture of `pixels` columns shows is one bar.

    `ranks`: at most `most` of these, None: all, or of many those that tell most. `steps`: None: a few that are like
    most.
    """
    steps = drawn_steps(report) if steps is None else steps
    ranks = chosen_ranks(report, MOST_LANES) if ranks is None else list(ranks)
    if most is not None and len(ranks) > most:
        ranks = [rank for rank in chosen_ranks(report, most) if rank in set(ranks)]
    layer = report.verdict.layer
    named = _among("s.rank", sorted(report.named_ranks))
    framed = "false" if layer is None else f"coalesce(s.layer = {literal(layer)} AND {named}, false)"
    database.execute(
        f"""CREATE OR REPLACE TEMP TABLE drawn_spans AS
        SELECT *, start_ns + duration_ns AS end_ns, start_ns + greatest(coalesce(waiting_ns, 0), 0) AS moved_ns
        FROM (SELECT list_position({ranks}, s.rank) - 1 AS lane, s.step, s.kind, {_START}, s.duration_ns,
                s.duration_ns - t.shortest_ns AS waiting_ns, s.depth, s.depth > 0 AND {ON_MAIN} AS within,
                {framed} AS framed
            FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank {_CLOCKS} {_LABELS}
                LEFT JOIN matched t ON t.label = l.label AND t.step = s.step AND t.sequence = s.sequence
            WHERE {_among("s.rank", ranks)} AND {_among("s.step", steps)} AND s.kind <> 'step'
                AND (s.depth = 0 OR s.kind IN {_NESTED} OR {framed}))"""
    )
    first, length, waiting_known = database.execute(
        """SELECT coalesce(min(start_ns), 0), coalesce(max(end_ns) - min(start_ns), 0), count(waiting_ns) > 0
        FROM drawn_spans"""
    ).fetchone()
    begins = database.execute(
        f"""SELECT step, median(begin_ns) / 1000 FROM (
            SELECT step, min(start_ns) - {first} AS begin_ns FROM drawn_spans GROUP BY step, lane)
        GROUP BY step ORDER BY step"""
    ).fetchall()
    names, drawn = _names(report), [step for step, _ in begins]
    return Timeline(
        ranks,
        [names.get(rank, f"rank {rank}") for rank in ranks],
        drawn,
        [begin_us for _, begin_us in begins],
        _bars(database, first, length / pixels),
        waiting_known,
        _drawn_text(report, ranks, drawn),
        _clocks_text(report),
    )


def _names(report: RanksReport) -> dict[int, str]:
    """Names of ranks, in their order, with their stages where there are several."""
    own = report.own
    staged = len(set(own.stages.tolist())) > 1
    of_ranks = zip(own.ranks.tolist(), own.stages.tolist(), strict=True)
    return {rank: f"rank {rank}" + (f", stage {stage}" if staged else "") for rank, stage in of_ranks}


def _bars(database: Database, first_ns: int, gap_ns: float) -> list[Bars]:
    """Those of the table `drawn_spans`."""
    found = to_arrays(
        database,
        f"""WITH parts AS (
            SELECT if(within, {_WAITING_WITHIN}, 0) AS level, lane, start_ns, moved_ns AS end_ns
            FROM drawn_spans WHERE kind = 'communication' AND waiting_ns > 0
            UNION ALL SELECT if(within, {_WAITING_WITHIN}, 0) + 1, lane, moved_ns, end_ns
            FROM drawn_spans WHERE kind = 'communication'
            UNION ALL SELECT coalesce(list_position({list(_LEVELS)}, kind) - 1, {_LEVELS.index("other")}), lane,
                start_ns, end_ns
            FROM drawn_spans WHERE kind <> 'communication' AND (depth = 0 OR kind IN {_NESTED})
            UNION ALL SELECT {len(_LEVELS) - 1}, lane, start_ns, end_ns FROM drawn_spans WHERE framed),
        beginnings AS (SELECT *, coalesce(start_ns - max(end_ns) OVER (PARTITION BY level, lane ORDER BY start_ns
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) > {gap_ns}, true) AS begins FROM parts),
        numbered AS (SELECT *, count(*) FILTER (begins) OVER (PARTITION BY level, lane
            ORDER BY start_ns, begins DESC ROWS UNBOUNDED PRECEDING) AS number FROM beginnings)
        SELECT level, lane AS lanes, (min(start_ns) - {first_ns}) / 1000 AS starts_us,
            (max(end_ns) - min(start_ns)) / 1000 AS lengths_us
        FROM numbered GROUP BY level, lane, number ORDER BY level, lane, number""",
    )
    chosen = [(level, found["level"] == level) for level in np.unique(found["level"]).tolist()]
    return [Bars(_LEVELS[level], *(found[name][of] for name in Bars._fields[1:])) for level, of in chosen]


def _drawn_text(report: RanksReport, lanes: Collection[int], steps: Collection[int]) -> str:
    count = len(report.own.ranks)
    ranks = "One rank" if count == 1 else f"{'All' if len(lanes) >= count else f'{len(lanes):,} of'} {count:,} ranks"
    return f"{ranks}; step{'s' if len(steps) > 1 else ''} {ranges(steps)} ({len(steps)} of {len(report.own.steps):,})"


def _clocks_text(report: RanksReport) -> str:
    if report.clocks is not None and report.clocks.source != "none":
        return "clocks aligned"
    hosts = set(report.hosts)
    return "by the clock of their one host" if len(hosts) == 1 and "" not in hosts else "by the clock of each rank"


# --- The Chrome trace ---

MOST_ARROWS = 4_000  # more are a black page
_MOST_ARROWS_OF_ONE = 16  # of one collective, the longest waits
_LEAST_WAIT = 0.02  # of a step: who waited less gets no arrow
MOST_TRACE_SPANS = 300_000  # more make Perfetto slow: then only a few steps are written
_ABOUT = ("step", "kind", "layer", "microbatch", "group", "bytes")

Event = dict[str, Any]


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
    few = drawn_steps(report)
    one = few[len(few) // 2 :][:1]
    of_ranks = "true" if ranks is None else _among("s.rank", ranks)
    wanted = [
        ("s.step IS NOT NULL", ""),
        (_among("s.step", few), f"all steps but {ranges(few)}"),
        (_among("s.step", one), f"all steps but {ranges(one)}"),
        (f"{_among('s.step', one)} AND s.depth = 0", f"all steps but {ranges(one)}, and all spans within others"),
    ]
    while True:
        of_steps, left_out = wanted.pop(0)
        where = f"{of_steps} AND {of_ranks}"
        if not wanted or database.execute(f"SELECT count(*) FROM spans s WHERE {where}").fetchone()[0] <= most:
            break
    if ranks is not None:
        left_out = "; ".join(filter(None, [left_out, f"all ranks but {ranges(ranks)}"]))
    first = f"SELECT min(start_ns) FROM (SELECT {_START} FROM spans s {_CLOCKS} WHERE {where})"
    base = int(database.execute(first).fetchone()[0] or 0)
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "metadata": {"run": report.run, "verdict": report.verdict.sentence, "left_out": left_out},
    }
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    with path.open("wb") as file:
        # No name and time in its header, so that the same spans are the same file.
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if path.suffix == ".gz" else file
        with packed:
            packed.write(f'{encode(head)[:-1]},"traceEvents":['.encode())
            for at, event in enumerate(_events(report, database, where, base)):
                packed.write(f"{',' if at else ''}\n{encode(event)}".encode())
            packed.write(b"\n]}\n")


def _events(report: RanksReport, database: Database, where: str, base: int) -> Iterator[Event]:
    for place, (rank, name) in enumerate(_names(report).items()):
        labels = ["named by the verdict"] if rank in report.named_ranks else []
        labels += [host for host in report.hosts[place : place + 1] if host]
        yield _named("process_name", rank, 0, name=name)
        yield _named("process_sort_index", rank, 0, sort_index=place)  # same (0 -> 1): a process has no thread
        if labels:
            yield _named("process_labels", rank, 0, labels=", ".join(labels))
    found = database.execute(
        f"""SELECT s.rank, coalesce(nullif(s.name, ''), s.kind) AS name, s.kind, {_START}, s.duration_ns, s.step,
            s.layer, s.microbatch, s."group", s.bytes, l.label, s.sequence,
            CASE WHEN s.thread IS NULL THEN if(s.kind = 'communication', s.kind, 'spans')
                ELSE concat(if(m.thread = s.thread, 'main ', ''), 'thread ', s.thread) END AS thread_name
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank {_LABELS} {_CLOCKS} WHERE {where}
        ORDER BY s.rank, coalesce(m.thread = s.thread, false) DESC, s.thread,
            s.kind = 'communication' AND s.thread IS NULL, start_ns, s.duration_ns DESC"""
    )
    communications: dict[tuple[int, int, int], list[Event]] = defaultdict(list)  # each rank's part
    for rank, of_rank in groupby(_rows(found), key=lambda row: int(row["rank"])):
        numbers = count(1)
        for thread, of_thread in groupby(of_rank, key=lambda row: str(row["thread_name"])):
            for place, lane in enumerate(_lanes(of_thread)):
                tid = next(numbers)
                yield _named("thread_name", rank, tid, name=f"{thread}, overlapping {place}" if place else thread)
                yield _named("thread_sort_index", rank, tid, sort_index=tid)
                for row in lane:
                    event = {
                        "ph": "X",
                        "name": row["name"],
                        "cat": row["kind"],
                        "pid": rank,
                        "tid": tid,
                        "ts": (row["start_ns"] - base) / 1000,
                        "dur": row["duration_ns"] / 1000,
                        "args": {name: row[name] for name in _ABOUT if row[name] is not None},
                    }
                    if row["label"] is not None and row["sequence"] is not None:
                        communications[row["label"], row["step"], row["sequence"]].append(event)
                    yield event
    yield from _arrows(communications.values(), report)


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    names = [name for name, *_ in found.description]
    while many := found.fetchmany(50_000):
        for row in many:
            yield dict(zip(names, row, strict=True))


def _lanes(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Spans of one thread; what overlaps another without lying within it is put into a lane of its own."""
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
    return [lane for _, lane in lanes]


def _arrows(communications: Iterable[Sequence[Event]], report: RanksReport) -> Iterator[Event]:
    """From the rank that came last to a communication to those that waited for it, the longest waits of all.

    An arrow leads from the middle of the last rank's transfer to the same instant within the span of who waited.
    """
    least_us = _LEAST_WAIT * float(median(report.own.wall_ns.reshape(-1))) / 1000  # nan, that nothing reaches, of none
    waits = []
    for ranks in communications:
        last, *ordered = sorted(ranks, key=lambda part: (part["dur"], part["ts"], part["pid"], part["tid"]))
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


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
