"""Opens the spans of a run: finds what ranks wrote, reduces traces, gives a database with `spans` and `ranks`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.pool import reduce_traces
from profiler_wrapper.analysis.ranks.reduce import Reduced, Task, read_summary, table_rows
from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.recording.foreign_spans import TABLE_ENDINGS, read_foreign, relation_of
from profiler_wrapper.recording.span_database import (
    Database,
    columns_of,
    file_list,
    insert,
    literal,
    open_database,
    quoted,
    span_select,
)
from profiler_wrapper.recording.span_files import (
    Gap,
    SpanSources,
    TimerLog,
    TraceFile,
    Use,
    absent_ranks,
    find_sources,
    ranges,
)
from profiler_wrapper.recording.span_table import RANK_COLUMNS, SPAN_COLUMNS

Progress = Callable[[str, int, int], None]  # what is done, how many of it, of how many
_OURS = ("rank", "step", "name", "kind", "start_ns", "duration_ns", "depth")  # a table with these is one of ours
_TORN_LINES = 1  # the last line of a log may be torn: its process was killed, or writes it now


@dataclass(frozen=True, slots=True)
class LoadedSpans:
    """A database with `spans` and `ranks`, and what is to be said of them."""

    database: Database
    run: str
    root: Path
    missing: tuple[Gap, ...]
    world_size: int | None = None
    from_timers: bool = False
    notes: tuple[str, ...] = ()
    has_clocks: bool = True  # False: starts say nothing of when other ranks started


@contextmanager
def open_spans(
    path: Path,
    *,
    spans: Path | None = None,
    columns: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    ranks: Sequence[int] | None = None,
    use: Use | None = None,
    output: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[LoadedSpans]:
    """The spans of a run, of a directory of traces, of a trace or of a table; the database is gone at the end.

    Args:
        path: of the run; also a table of spans.
        spans: a table of another tool, or a directory of such tables, that takes the place of the run's files.
        columns: its columns, theirs to ours.
        scheduler: of a Dask cluster that reduces the traces.
        ranks: only these.
        use: timers or traces; None: what tells of more ranks.
        output: where reduced traces go if they cannot lie beside the traces.
        progress: is told how far the reduction of traces has come.

    Raises:
        BrokenTrace: nothing in it can be read.
        MissingPackage: DuckDB or pyarrow is not installed.
        OSError: it is not there.
        WrongUse: a table is none of spans; ranks that are not there.
    """
    with open_database() as database, tempfile.TemporaryDirectory(prefix="profiler_wrapper_ranks_") as folder:
        if spans is None and _is_table(path):
            spans = path
        if spans is not None:
            yield _load_tables(database, spans, columns or {}, ranks)
            return
        if columns:
            raise WrongUse("--columns is of a table: name it by --spans FILE")
        sources = find_sources(path)
        uses = use or sources.uses
        logs, traces = _chosen(sources, uses, ranks)
        others = _others(sources, uses)
        if uses == "timers":
            files, gaps, places = _load_logs(database, logs, sources, Path(folder))
        else:
            where = (output or Path(folder)) / "reduced"
            files, gaps, places = _load_traces(database, traces, sources, where, scheduler, progress)
        if not files:
            reasons = "; ".join(f"{gap.what}: {gap.reason}" for gap in gaps[:4])
            raise BrokenTrace(f"{path}: no spans of any rank in it{': ' + reasons if reasons else ''}")
        _write_ranks(database, places)
        there = set(places) if uses == "traces" else _ranks_in(database)
        world_size = max((place.get("world_size") or 0 for place in places.values()), default=0) or None
        wanted = None if ranks is None else set(ranks)
        absent = absent_ranks(there, world_size, sources.ranks) if wanted is None else _not_there(wanted, there, path)
        failed = {gap.rank for gap in gaps if gap.rank is not None}
        absent = [gap for gap in absent if gap.rank is None or gap.rank not in failed]
        missing = (*sources.missing, *gaps, *absent)
        yield LoadedSpans(
            database,
            sources.root.name or str(sources.root.resolve().name),
            sources.root,
            missing,
            world_size,
            uses == "timers",
            tuple(others),
        )


def _ranks_in(database: Database) -> set[int]:
    return {row[0] for row in database.execute("SELECT DISTINCT rank FROM spans").fetchall()}


def _not_there(wanted: set[int], there: set[int], path: Path) -> list[Gap]:
    if not wanted & there:
        raise WrongUse(f"{path}: no spans of ranks {ranges(wanted)}; there are those of {ranges(there) or 'none'}")
    return [Gap(f"rank {rank}", "was asked for, and no spans of it are there", rank) for rank in sorted(wanted - there)]


def _chosen(sources: SpanSources, uses: Use, ranks: Sequence[int] | None) -> tuple[list[TimerLog], list[TraceFile]]:
    if uses == "timers" and not sources.logs:
        raise WrongUse(f"{sources.root}: no log of a timer in it (timers/timer_rank<k>.jsonl)")
    if uses == "traces" and not sources.traces:
        raise WrongUse(f"{sources.root}: no trace in it")
    logs = [log for log in sources.logs if ranks is None or log.rank in ranks]
    traces = [trace for trace in sources.traces if ranks is None or trace.rank is None or trace.rank in ranks]
    if not (logs if uses == "timers" else traces):
        there = {log.rank for log in sources.logs} if uses == "timers" else {trace.rank for trace in sources.traces}
        known = ranges(rank for rank in there if rank is not None)
        raise WrongUse(f"{sources.root}: no spans of ranks {ranges(ranks or ())}; there are those of {known or 'none'}")
    return logs, traces


def _others(sources: SpanSources, uses: Use) -> list[str]:
    if uses == "timers" and sources.traces:
        return [f"{len(sources.traces)} traces are there too, and are not in this report (--use traces)"]
    if uses == "traces" and sources.logs:
        return [f"logs of timers of {len(sources.logs)} ranks are there too, and are not in this report (--use timers)"]
    return []


# --- tables ---


def _is_table(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return path.is_file() and name.endswith((".parquet", ".pq", ".csv", ".tsv", ".ndjson"))


def _tables(path: Path) -> list[Path]:
    if not path.is_dir():
        path.stat()  # raises where there is none
        return [path]
    endings: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        ending = Path(file.name.removesuffix(".gz")).suffix.lower()
        if file.is_file() and not file.name.startswith(".") and ending in TABLE_ENDINGS:
            endings.setdefault(ending, []).append(file)
    found = next((endings[ending] for ending in TABLE_ENDINGS if ending in endings), [])
    if not found:
        raise WrongUse(f"{path}: no table in it; one ends in {', '.join(TABLE_ENDINGS)}")
    return found


def _load_tables(
    database: Database, path: Path, columns: Mapping[str, str], ranks: Sequence[int] | None
) -> LoadedSpans:
    files = _tables(path)
    notes: tuple[str, ...] = ()
    has_clocks = True
    if not columns and (there := _columns_of_ours(database, files)):
        select = span_select(relation_of(files), {name: quoted(name) for name in there if name in SPAN_COLUMNS})
        place = "any_value(stage)" if "stage" in there else "0"
        of_ranks = (
            f"SELECT CAST(rank AS INTEGER) AS rank, CAST(coalesce({place}, 0) AS INTEGER) AS stage "
            f"FROM {relation_of(files)} WHERE rank IS NOT NULL GROUP BY rank"
        )
    else:
        foreign = read_foreign(database, files, mapping=columns)
        select, of_ranks, notes, laid_end_to_end = foreign
        has_clocks = not laid_end_to_end
    where = "" if ranks is None else f" WHERE rank IN ({', '.join(map(str, ranks))})"
    database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM ({select}){where}")
    database.execute(f"CREATE OR REPLACE TABLE ranks AS SELECT * FROM ({of_ranks}){where}")
    _complete_ranks(database)
    there_ranks = {row[0] for row in database.execute("SELECT rank FROM ranks").fetchall()}
    gaps = [] if ranks is None else _not_there(set(ranks), there_ranks, path)
    told = database.execute("SELECT max(world_size) FROM ranks").fetchone()[0]
    gaps += absent_ranks(there_ranks, told) if ranks is None else []
    return LoadedSpans(
        database, path.name, path.parent, tuple(gaps), told or len(there_ranks), False, notes, has_clocks
    )


def _columns_of_ours(database: Database, files: Sequence[Path]) -> dict[str, str] | None:
    """The columns, if it is a Parquet table of ours."""
    if not files[0].name.endswith(".parquet"):
        return None
    try:
        there = columns_of(database, relation_of(files))
    except Exception:  # what is wrong with it is said where it is read as a foreign table
        return None
    return there if set(_OURS) <= set(there) else None


def _complete_ranks(database: Database) -> None:
    """All columns of the table, in order."""
    there = columns_of(database, "ranks")
    columns = ", ".join(
        f"CAST({quoted(name) if name in there else 'NULL'} AS {kind}) AS {name}"
        for name, (kind, _) in RANK_COLUMNS.items()
    )
    database.execute(f"CREATE OR REPLACE TABLE ranks AS SELECT {columns} FROM ranks")


# --- logs of timers ---


def _load_logs(
    database: Database, logs: Sequence[TimerLog], sources: SpanSources, folder: Path
) -> tuple[list[Path], list[Gap], dict[int, dict[str, Any]]]:
    """JSON lines, made into Parquet once: they are asked many times."""
    files = [log.path for log in logs if log.path.stat().st_size]
    if not files:
        return [], [Gap("spans", "the logs of all timers are empty")], {}
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, (kind, _) in SPAN_COLUMNS.items())
    target = folder / "timers.parquet"
    relation = (
        f"read_json({file_list(files)}, format = 'newline_delimited', ignore_errors = true, filename = 'log', "
        f"columns = {{{types}, 'header': 'JSON'}})"
    )
    rows = f"SELECT * EXCLUDE (header), header IS NOT NULL AS is_header FROM {relation}"
    database.execute(f"COPY ({rows}) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 122880)")
    table = f"read_parquet({literal(target)})"
    usable = "rank IS NOT NULL AND start_ns IS NOT NULL AND duration_ns >= 0 AND kind IS NOT NULL"
    expressions = {name: quoted(name) for name in SPAN_COLUMNS} | {"depth": "coalesce(depth, 0)"}
    database.execute(f"CREATE OR REPLACE VIEW spans AS {span_select(table, expressions, where=usable)}")
    lines = database.execute(
        f"""SELECT log, count(*) FILTER (coalesce({usable}, false)), count(*) FILTER (NOT is_header) FROM {table}
        GROUP BY log ORDER BY log"""
    ).fetchall()
    gaps = []
    for name, good, told in lines:
        rank = next((log.rank for log in logs if str(log.path) == name), None)
        if not good:
            gaps.append(Gap(f"spans of rank {rank}", f"{name}: no line of it is a span", rank))
        elif told - good > _TORN_LINES:
            gaps.append(Gap(f"{told - good} lines of rank {rank}", f"{name}: they are no spans", rank))
    gaps += [
        Gap(f"spans of rank {log.rank}", f"{log.path}: is empty", log.rank)
        for log in logs
        if not log.path.stat().st_size
    ]
    of_logs = {log.rank for log in logs}
    return files, gaps, {rank: dict(place) for rank, place in sources.ranks.items() if rank in of_logs}


# --- traces ---


def _load_traces(
    database: Database,
    traces: Sequence[TraceFile],
    sources: SpanSources,
    otherwise: Path,
    scheduler: str | None,
    progress: Progress | None,
) -> tuple[list[Path], list[Gap], dict[int, dict[str, Any]]]:
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
    told = None if progress is None else (lambda done, total: progress("reducing traces", done, total))
    reduced = list(reduce_traces(tasks, scheduler=scheduler, done=told))
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
        return [], gaps, {}
    files = [Path(one.spans) for one in kept]
    database.execute("CREATE OR REPLACE TABLE span_files (filename VARCHAR, rank INTEGER)")
    relation = f"read_parquet({file_list(files)})"
    if any(one.rank != one.stored_rank for one in kept):
        insert(database, "span_files", [(one.spans, one.rank) for one in kept])
        relation = (
            f"(SELECT p.* REPLACE (f.rank AS rank) FROM read_parquet({file_list(files)}, filename = true) p "
            "JOIN span_files f USING (filename))"
        )
    expressions = {name: quoted(name) for name in SPAN_COLUMNS if name in columns_of(database, relation)}
    database.execute(f"CREATE OR REPLACE VIEW spans AS {span_select(relation, expressions)}")
    places: dict[int, dict[str, Any]] = {}
    for one in kept:
        rank = int(one.rank or 0)
        place = {"rank": rank, "world_size": one.world_size, "host": one.host}
        known = sources.ranks.get(rank, {})
        places[rank] = {**place, **{key: value for key, value in known.items() if value is not None}}
    return files, gaps, places


def _whose(one: Reduced) -> str:
    return Path(one.trace).name if one.rank is None else f"rank {one.rank}"


def _alone(trace: TraceFile) -> Reduced:
    """A table of spans without a trace: one was reduced to it, or somebody else wrote it."""
    summary = read_summary(trace.path)
    if summary is not None:
        return summary if summary.rank is not None else summary._replace(rank=trace.rank)
    if (rows := table_rows(trace.path, _OURS)) is None:
        return Reduced(str(trace.path), "", trace.rank, failure=f"is no table with the columns {', '.join(_OURS)}")
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


def _write_ranks(database: Database, places: Mapping[int, Mapping[str, Any]]) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in RANK_COLUMNS.items())
    database.execute(f"CREATE OR REPLACE TABLE ranks ({columns})")
    rows = []
    for rank, place in sorted(places.items()):
        stage = place.get("stage", place.get("pp"))
        row = {**place, "rank": rank, "stage": stage if stage is not None else 0}
        rows.append([row.get(name) for name in RANK_COLUMNS])
    insert(database, "ranks", rows)
