"""A timeline of many ranks as a Chrome trace, for ui.perfetto.dev: a process for each rank, clocks aligned.

As "Trace Event Format" (Google) has it: `M`, `X`, and `s`/`f` for arrows from who came last to who waited for it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.lanes import aligned_start, clock_join, drawn_steps
from profiler_wrapper.ranks.model import RanksReport
from profiler_wrapper.ranks.rows import chosen_ranks, culprits
from profiler_wrapper.ranks.times import label_key
from profiler_wrapper.trace.spans import ranges

# --------------------------------------------------------------------------------------------------
# Arrows in a Chrome trace: from the rank that came last to a collective to those that waited for it.

MOST_ARROWS = 4_000  # more are a black page
_MOST_OF_ONE = 16  # of one collective, the longest waits
_LEAST_SHARE = 0.02  # of a step: who waited less gets none

Key = tuple[int, int, int]  # (label, step, sequence) of a collective, a send or a receive


class Flows:
    """Gathers communications as they are written; the arrows come last."""

    def __init__(self, report: RanksReport) -> None:
        known = report.own.wall_ns[np.isfinite(report.own.wall_ns)]
        self._least_us = _LEAST_SHARE * float(np.median(known)) / 1000 if len(known) else np.inf
        self._parts: dict[Key, list[tuple[float, float, int, int]]] = {}  # duration, start, pid, tid

    def add(self, key: Key, event: dict[str, Any]) -> None:
        """A rank's part in one communication, as the event that is written of it."""
        self._parts.setdefault(key, []).append((event["dur"], event["ts"], event["pid"], event["tid"]))

    def events(self) -> Iterator[dict[str, Any]]:
        """A start and a finish for each arrow: the longest waits of all."""
        waits = []
        for parts in self._parts.values():
            if len({pid for _, _, pid, _ in parts}) < 2:
                continue
            last = min(parts)
            waiting = sorted((part for part in parts if part[0] - last[0] >= self._least_us), reverse=True)
            waits += [(part[0] - last[0], last, part) for part in waiting[:_MOST_OF_ONE]]
        waits.sort(key=lambda wait: -wait[0])
        for number, (_, last, part) in enumerate(waits[:MOST_ARROWS], 1):
            yield from _arrow(number, last, part)


def _arrow(
    number: int, last: tuple[float, float, int, int], part: tuple[float, float, int, int]
) -> Iterator[dict[str, Any]]:
    """From the middle of the transfer of who came last to the same instant of who waited, within its span."""
    duration, start, pid, tid = last
    about = {"cat": "waiting", "name": "waited for", "id": number}
    begin = start + duration / 2
    yield {"ph": "s", **about, "pid": pid, "tid": tid, "ts": begin}
    there = min(max(begin, part[1]), part[1] + part[0])
    yield {"ph": "f", "bp": "e", **about, "pid": part[2], "tid": part[3], "ts": there}


MOST_TRACE_SPANS = 300_000  # more make Perfetto slow: then only a few steps are written
_COMPRESSION = 6
_COLUMNS = ("rank", "step", "name", "kind", "layer", "duration_ns", "thread", "microbatch", "group", "bytes")
_ABOUT = ("step", "kind", "layer", "microbatch", "group", "bytes")
_MORE = ("is_main", "label", "sequence", "start_ns")  # beside these columns

Event = dict[str, Any]


def write_ranks_trace(
    report: RanksReport,
    database: Database,
    path: Path,
    *,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    most: int = MOST_TRACE_SPANS,
) -> None:
    """Writes the trace, as JSON, gzipped where the name ends in `.gz`, an event at a time.

    `ts` and `dur` are microseconds from `baseTimeNanoseconds` on.

    Args:
        ranks: that are written; None: all.
        steps: that are written; None: all, or where that is more than `most` spans those of a few steps.
        most: spans; what is left out so that there are not more stands in the trace.

    Raises:
        OSError: it cannot be written.
    """
    where, left_out = _chosen(report, database, ranks, steps, most)
    starts = f"SELECT {aligned_start(database)}, s.duration_ns FROM spans s {clock_join(database)} WHERE {where}"
    extent = database.execute(f"SELECT min(start_ns), max(start_ns + duration_ns) FROM ({starts})").fetchone()
    base, end = (int(one or 0) for one in extent)
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "metadata": {"run": report.run, "verdict": report.verdict.sentence, "left_out": left_out},
    }
    with path.open("wb") as file:
        if not path.name.endswith(".gz"):
            _write(file, head, _events(report, database, where, left_out, base, end))
            return
        # Without a name and a time in its header, so that the same spans are the same file.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=file, mtime=0) as packed:
            _write(packed, head, _events(report, database, where, left_out, base, end))


def _write(file: IO[bytes] | gzip.GzipFile, head: Event, events: Iterator[Event]) -> None:
    text = json.dumps(head, allow_nan=False, separators=(",", ":"))
    file.write(f'{text[:-1]},"traceEvents":['.encode())
    for at, event in enumerate(events):
        line = json.dumps(event, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        file.write(f"{',' if at else ''}\n{line}".encode())
    file.write(b"\n]}\n")


def _events(report: RanksReport, database: Database, where: str, left_out: str, base: int, end: int) -> Iterator[Event]:
    yield from _about(report, left_out, (end - base) / 1000)
    yield from _processes(report)
    columns = ", ".join(f's."{name}"' for name in _COLUMNS)
    found = database.execute(
        f"""SELECT {columns}, coalesce(m.thread = s.thread, false) AS is_main, l.label, s.sequence,
            {aligned_start(database)}
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank
            LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key("s")}
            {clock_join(database)} WHERE {where}
        ORDER BY s.rank, is_main DESC, s.thread, s.kind = 'communication' AND s.thread IS NULL, start_ns,
            s.duration_ns DESC"""
    )
    flows = Flows(report)
    for rank, of_rank in groupby(_rows(found), key=lambda row: int(row["rank"])):
        threads = count(1)
        for _, rows in groupby(of_rank, key=_thread_of):
            yield from _lanes(list(rows), rank, base, threads, flows)
    yield from flows.events()


# --- which spans ---


def _chosen(
    report: RanksReport, database: Database, ranks: Sequence[int] | None, steps: Sequence[int] | None, most: int
) -> tuple[str, str]:
    """Which spans are written, as SQL, and what is not."""
    of_ranks = "true" if ranks is None else f"s.rank IN ({_numbers(ranks)})"
    others = "" if ranks is None else f"all ranks but {ranges(ranks)}"
    whole = "s.step IS NOT NULL" if steps is None else _of_steps(steps)
    few = drawn_steps(report) if steps is None else list(steps)
    one = [few[len(few) // 2]] if few else []
    wanted = [(whole, "")] + [(_of_steps(some), f"all steps but {ranges(some)}") for some in (few, one)]
    shallow = f"{_of_steps(one)} AND s.depth = 0"
    wanted.append((shallow, f"all steps but {ranges(one)}, and all spans within others"))
    spans = 0
    for part, left_out in wanted:
        where = f"{part} AND {of_ranks}"
        spans = database.execute(f"SELECT count(*) FROM spans s WHERE {where}").fetchone()[0]
        if spans <= most:
            return where, "; ".join(one for one in (left_out, others) if one)
    there = report.own.ranks.tolist() if ranks is None else list(ranks)
    kept = [rank for rank in chosen_ranks(report, max(1, most * len(there) // spans)) if rank in set(there)]
    left_out = f"{wanted[-1][1]}; {len(there) - len(kept)} of {len(there)} ranks: --lanes chooses"
    return f"{shallow} AND s.rank IN ({_numbers(kept)})", left_out


def _of_steps(steps: Sequence[int]) -> str:
    return f"s.step IN ({_numbers(steps)})"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(int(value)) for value in values) or "NULL"


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    while many := found.fetchmany(50_000):
        for row in many:
            yield dict(zip((*_COLUMNS, *_MORE), row, strict=True))


# --- lanes of threads ---


def _thread_of(row: dict[str, Any]) -> tuple[bool, int | None]:
    return row["kind"] == "communication" and row["thread"] is None, row["thread"]


def _lanes(
    rows: Sequence[dict[str, Any]], rank: int, base: int, threads: Iterator[int], flows: Flows
) -> Iterator[Event]:
    """Events of one thread; what overlaps another without lying within it is put into a lane of its own."""
    stacks: list[list[int]] = []
    lanes: list[list[dict[str, Any]]] = []
    for row in rows:
        start, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
        for stack in stacks:
            while stack and stack[-1] <= start:
                stack.pop()
        free = (at for at, stack in enumerate(stacks) if not stack or end <= stack[-1])
        at = next(free, len(stacks))
        if at == len(stacks):
            stacks.append([])
            lanes.append([])
        stacks[at].append(end)
        lanes[at].append(row)
    for number, lane in enumerate(lanes):
        tid = next(threads)
        yield _named("thread_name", rank, tid, name=_thread_name(lane[0], number))
        yield _named("thread_sort_index", rank, tid, sort_index=tid)
        for row in lane:
            event = _event(row, rank, tid, base)
            if row["label"] is not None and row["sequence"] is not None:
                flows.add((row["label"], row["step"], row["sequence"]), event)
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


def _about(report: RanksReport, left_out: str, length_us: float) -> Iterator[Event]:
    """A process before all ranks whose spans say what the trace is of, as no viewer shows metadata at once."""
    pid = int(report.own.ranks.max(initial=0)) + 1
    yield _named("process_name", pid, 0, name="about this trace")
    yield _named("process_sort_index", pid, 0, sort_index=-1)
    clocks = "not aligned"
    if report.clocks is not None:
        aligned = "not aligned" if report.clocks.source == "none" else f"aligned by ends of {report.clocks.source}"
        clocks = "; ".join([aligned, *report.clocks.notes])
    args = {"evidence": "; ".join(report.verdict.evidence), "clocks": clocks, "left_out": left_out or "nothing"}
    told = [report.verdict.sentence] + ([f"Left out: {left_out}"] if left_out else [])
    for tid, sentence in enumerate(told, 1):
        yield _named("thread_name", pid, tid, name=("verdict", "left out")[tid - 1])
        event = {"ph": "X", "name": sentence, "cat": "about", "pid": pid, "tid": tid}
        yield {**event, "ts": 0.0, "dur": length_us, "args": args}


def _processes(report: RanksReport) -> Iterator[Event]:
    """Names of ranks, in their order; those that the verdict names say so."""
    named, own = culprits(report), report.own
    staged = len(set(own.stages.tolist())) > 1
    for place, rank in enumerate(own.ranks.tolist()):
        name = f"rank {rank}"
        if staged:
            name += f", stage {int(own.stages[place])}"
        labels = [label for label in ("named by the verdict" if rank in named else "",) if label]
        if report.hosts and report.hosts[place]:
            labels.append(report.hosts[place])
        yield _named("process_name", rank, 0, name=name)
        yield _named("process_sort_index", rank, 0, sort_index=place)
        if labels:
            yield _named("process_labels", rank, 0, labels=", ".join(labels))
