"""Opens traces as the table `spans` of a database: each is reduced first, where that was not done before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.loaded import OUR_COLUMNS, Opened, view_spans
from profiler_wrapper.analysis.ranks.pool import Done, reduce_traces
from profiler_wrapper.analysis.ranks.reduce import Reduced, Task, problem_of_table, read_summary, table_rows
from profiler_wrapper.recording.rank_numbers import Gap
from profiler_wrapper.recording.span_database import Database, file_list, import_duckdb, insert
from profiler_wrapper.recording.span_files import SpanSources, TraceFile


def load_traces(
    database: Database,
    traces: Sequence[TraceFile],
    sources: SpanSources,
    otherwise: Path,
    *,
    scheduler: str | None,
    done: Done | None,
) -> Opened:
    """The traces' tables as `spans`.

    Args:
        otherwise: where tables go that cannot lie beside their traces.
        scheduler: of a Dask cluster that reduces them.
        done: is told how many are reduced, of how many.
    """
    tasks = [
        Task(
            str(trace.path.resolve()),
            str(trace.reduced.resolve()),
            str((otherwise / f"{i}_spans.parquet").resolve()),
            trace.rank,
        )
        for i, trace in enumerate(traces)
        if trace.has_trace
    ]
    reduced = list(reduce_traces(tasks, scheduler=scheduler, done=done))
    reduced += [_alone(trace) for trace in traces if not trace.has_trace]
    gaps = [Gap(f"spans of {_whose(one)}", f"{one.trace}: {one.failure}", one.rank) for one in reduced if one.failure]
    kept = _one_per_step(_ranked([one for one in reduced if not one.failure], gaps), gaps)
    gaps += [
        Gap(f"part of rank {one.rank}'s trace", note, one.rank)
        for one in kept
        for note in one.notes
        if "no layers" not in note
    ]
    if not kept:
        return Opened([], gaps, {})
    try:
        rows, bad = view_spans(database, _relation(database, kept))
    except import_duckdb().Error:
        kept = [one for one in kept if _is_whole(one, gaps)]
        if not kept:
            return Opened([], gaps, {})
        rows, bad = view_spans(database, _relation(database, kept, by_name=True))
    places: dict[int, Mapping[str, Any]] = {}
    for one in kept:
        rank = int(one.rank or 0)
        place = {"rank": rank, "world_size": one.world_size, "host": one.host}
        known = sources.ranks.get(rank, {})
        places[rank] = {**place, **{key: value for key, value in known.items() if value is not None}}
    if bad:
        gaps.append(Gap(f"{bad} of {rows} rows", "they are no spans"))
        there = {row[0] for row in database.execute("SELECT DISTINCT rank FROM spans").fetchall()}
        for rank in [rank for rank in places if rank not in there]:
            gaps.append(Gap(f"spans of rank {rank}", "none of the rows of its table is one", rank))
            del places[rank]
    return Opened([Path(one.spans) for one in kept], gaps, places)


def _relation(database: Database, kept: list[Reduced], *, by_name: bool = False) -> str:
    """The tables as one; `by_name`: columns and types of each may be others."""
    tables = f"{file_list([Path(one.spans) for one in kept])}, union_by_name = {str(by_name).lower()}"
    if all(one.rank == one.stored_rank for one in kept):
        return f"read_parquet({tables})"
    database.execute("CREATE OR REPLACE TABLE span_files (filename VARCHAR, rank INTEGER)")
    insert(database, "span_files", [(one.spans, one.rank) for one in kept])
    return (
        f"(SELECT p.* REPLACE (f.rank AS rank) FROM read_parquet({tables}, filename = true) p "
        "JOIN span_files f USING (filename))"
    )


def _is_whole(one: Reduced, gaps: list[Gap]) -> bool:
    """Whether all of a table can be read; if not, that is said."""
    problem = problem_of_table(Path(one.spans))
    if problem:
        gaps.append(Gap(f"spans of {_whose(one)}", f"{one.spans}: {problem}", one.rank))
    return not problem


def _whose(one: Reduced) -> str:
    return Path(one.trace).name if one.rank is None else f"rank {one.rank}"


def _alone(trace: TraceFile) -> Reduced:
    """A table of spans without a trace: one was reduced to it, or somebody else wrote it."""
    summary = read_summary(trace.path)
    if summary is not None:
        return summary if summary.rank is not None else summary._replace(rank=trace.rank)
    if (rows := table_rows(trace.path, OUR_COLUMNS)) is None:
        return Reduced(
            str(trace.path), "", trace.rank, failure=f"is no table with the columns {', '.join(OUR_COLUMNS)}"
        )
    return Reduced(str(trace.path), str(trace.path), trace.rank, rows=rows, stored_rank=trace.rank)


def _ranked(reduced: list[Reduced], gaps: list[Gap]) -> list[Reduced]:
    """With a rank for each: where neither trace nor name tells, they are numbered in order of their names."""
    without = [one for one in reduced if one.rank is None]
    if without and len(reduced) > 1:
        gaps.append(
            Gap(f"ranks of {len(without)} traces", "neither they nor their names tell: numbered in order of names")
        )
    taken = {one.rank for one in reduced}
    free = (rank for rank in range(len(reduced) + len(taken) + 1) if rank not in taken)
    return [one if one.rank is not None else one._replace(rank=next(free)) for one in reduced]


def _one_per_step(reduced: list[Reduced], gaps: list[Gap]) -> list[Reduced]:
    """Without traces that tell of steps of their rank which a later one has too."""
    kept: list[Reduced] = []
    seen: dict[int | None, set[int]] = {}
    for one in reversed(reduced):
        steps = seen.setdefault(one.rank, set())
        if steps & set(one.steps):
            gaps.append(Gap(f"a trace of rank {one.rank}", f"{one.trace}: another has the same steps", one.rank))
            continue
        steps |= set(one.steps)
        kept.append(one)
    return kept[::-1]
