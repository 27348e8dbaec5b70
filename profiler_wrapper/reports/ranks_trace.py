"""A timeline of many ranks as a Chrome trace, for ui.perfetto.dev: a process for each rank, clocks aligned."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.recording.span_database import Database
from profiler_wrapper.reports.ranks_rows import culprits
from profiler_wrapper.reports.ranks_spans import aligned_start, clock_join, drawn_steps

MOST_SPANS = 300_000  # more make Perfetto slow: then only a few steps are written
_COMPRESSION = 6
_COLUMNS = ("rank", "step", "name", "kind", "layer", "duration_ns", "thread", "microbatch", "group", "bytes")
_ABOUT = ("step", "kind", "layer", "microbatch", "group", "bytes")


def write_ranks_trace(
    report: RanksReport, database: Database, path: Path, *, steps: Sequence[int] | None = None, most: int = MOST_SPANS
) -> None:
    """Writes the trace, as JSON, gzipped where the name ends in `.gz`.

    Args:
        steps: that are written; None: all, or where that is more than `most` spans those of a few steps.

    Raises:
        OSError: it cannot be written.
    """
    data = ranks_trace(report, database, steps=steps, most=most)
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    # Without a name and a time in its header, so that the same spans are the same file.
    path.write_bytes(gzip.compress(text, _COMPRESSION, mtime=0) if _is_compressed(path) else text)


def _is_compressed(path: Path) -> bool:
    return ".gz" in path.suffixes or path.name.endswith(".gz")


def ranks_trace(
    report: RanksReport, database: Database, *, steps: Sequence[int] | None = None, most: int = MOST_SPANS
) -> dict[str, Any]:
    """The trace as plain data. `ts` and `dur` are microseconds from `baseTimeNanoseconds` on."""
    where, left_out = _chosen(report, database, steps, most)
    starts = f"SELECT {aligned_start(database)} FROM spans s {clock_join(database)} WHERE {where}"
    first = database.execute(f"SELECT min(start_ns) FROM ({starts})").fetchone()[0]
    base = int(first or 0)
    columns = ", ".join(f's."{name}"' for name in _COLUMNS)
    found = database.execute(
        f"""SELECT {columns}, {aligned_start(database)} FROM spans s {clock_join(database)} WHERE {where}
        ORDER BY s.rank, s.thread, s.kind = 'communication' AND s.thread IS NULL, start_ns, s.duration_ns DESC"""
    )
    events = list(_processes(report))
    for (rank, _), rows in groupby(_rows(found), key=lambda row: (row["rank"], _lane_of(row))):
        events += _lanes(list(rows), rank, base, tid=_next_thread(events, rank))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "metadata": {"run": report.run, "verdict": report.verdict.sentence, "left_out": left_out},
    }


def _chosen(report: RanksReport, database: Database, steps: Sequence[int] | None, most: int) -> tuple[str, str]:
    """Which spans are written, as SQL, and what is not."""
    where = "s.step IS NOT NULL"
    wanted: list[tuple[str, str]] = []
    if steps is None:
        few = drawn_steps(report)
        one = [few[len(few) // 2]] if few else []
        wanted = [(where, "")]
        wanted += [(_of_steps(chosen), f"all steps but {', '.join(map(str, chosen))}") for chosen in (few, one)]
        wanted.append((f"{_of_steps(one)} AND s.depth = 0", f"all steps but {one}, and all spans within others"))
    else:
        wanted = [(_of_steps(steps), "")]
    for where, left_out in wanted:
        count = database.execute(f"SELECT count(*) FROM spans s WHERE {where}").fetchone()[0]
        if count <= most:
            return where, left_out
    return wanted[-1]


def _of_steps(steps: Sequence[int]) -> str:
    return f"s.step IN ({', '.join(str(int(step)) for step in steps) or 'NULL'})"


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    while many := found.fetchmany(50_000):
        for row in many:
            yield dict(zip((*_COLUMNS, "start_ns"), row, strict=True))


def _lane_of(row: dict[str, Any]) -> tuple[bool, int | None]:
    return row["kind"] == "communication" and row["thread"] is None, row["thread"]


def _next_thread(events: Sequence[dict[str, Any]], rank: int) -> int:
    last = events[-1] if events else {}
    return int(last["tid"]) + 1 if last.get("pid") == rank and last.get("ph") == "X" else 1


def _lanes(rows: Sequence[dict[str, Any]], rank: int, base: int, *, tid: int) -> list[dict[str, Any]]:
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
    events: list[dict[str, Any]] = []
    for number, lane in enumerate(lanes):
        name = _thread_name(lane[0], number)
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid + number, "args": {"name": name}})
        events += [_event(row, rank, tid + number, base) for row in lane]
    return events


def _thread_name(row: dict[str, Any], number: int) -> str:
    thread = "communication" if _lane_of(row)[0] else "spans" if row["thread"] is None else f"thread {row['thread']}"
    return thread if number == 0 else f"{thread}, overlapping {number}"


def _event(row: dict[str, Any], rank: int, tid: int, base: int) -> dict[str, Any]:
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


def _processes(report: RanksReport) -> Iterator[dict[str, Any]]:
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
        for key, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": place})):
            yield {"ph": "M", "name": key, "pid": rank, "tid": 0, "args": value}
        if labels:
            yield {"ph": "M", "name": "process_labels", "pid": rank, "tid": 0, "args": {"labels": ", ".join(labels)}}
