"""`load_ranks`: what a job of many ranks says as a whole, from what its ranks wrote or from any table of spans."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.ranks import database as db
from profiler_wrapper.ranks.database import Database, LoadedSpans
from profiler_wrapper.ranks.reduce import Done, Reduced, Task, problem_of_table, read_alone, reduce_traces
from profiler_wrapper.ranks.report import LONGEST_NAME, RanksReport, ranks_report
from profiler_wrapper.trace.arrays import grouped
from profiler_wrapper.trace.rank_files import (
    LONGEST_HEADER,
    REDUCED_FILE,
    Source,
    SpanSources,
    Use,
    find_sources,
    rank_of_directory,
)
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.spans import SPAN_COLUMNS, Gap, absent_ranks, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What of a run is read, and how."""

    spans: Path | None = None  # a table of another tool, or a directory of such, in the place of the run's files
    columns: Mapping[str, str] = field(default_factory=dict)  # of it, theirs to ours
    scheduler: str | None = None  # of a Dask cluster that reduces the traces
    ranks: Sequence[int] | None = None  # only these
    use: Use | None = None  # None: what tells of more ranks
    output: Path | None = None  # where reduced traces go if they cannot lie beside the traces
    done: Done | None = None  # is told how far the reduction of traces has come


def load_ranks(
    path: str | os.PathLike[str],
    *,
    spans: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    ranks: Sequence[int] | None = None,
    use: Use | None = None,
) -> RanksReport:
    """Who slows a job, who waits for whom, and what it costs: over all ranks of a run.

    Traces are reduced first, each where it lies, to a small `spans.parquet` beside it, by as many processes as there
    are cores. Scripts and notebooks call this as they are: those processes run nothing of theirs.

    Args:
        path: the directory of a run, a directory of traces, a trace, or a table of spans.
        spans: a table of spans of another tool (Parquet, CSV, JSON lines), instead of what the run's ranks wrote.
        columns: which of its columns is which of ours, where names don't tell: `{"took": "duration_ms"}`.
        scheduler: address of a Dask scheduler whose workers reduce the traces; they see the same files.
        ranks: only these.
        use: "timers" or "traces", where a run has both; None: what tells of more ranks.

    Raises:
        BrokenTrace: there is nothing of any rank, or several runs.
        EmptyRecording: no span belongs to a step.
        MissingPackage: DuckDB or pyarrow is not installed: the message says how to install it.
        OSError: the path is not there, or cannot be read.
        WrongUse: the table is none of spans, or there are no such ranks.
    """
    table = None if spans is None else Path(spans)
    choice = Choice(spans=table, columns=columns or {}, scheduler=scheduler, ranks=ranks, use=use)
    with open_ranks(path, choice) as (_, report):
        return report


@contextmanager
def open_ranks(path: str | os.PathLike[str], choice: Choice = Choice()) -> Iterator[tuple[LoadedSpans, RanksReport]]:
    """As `load_ranks`, with the database of the spans still open, for what draws them; it is gone at the end."""
    path = Path(path)
    table = path if choice.spans is None and db.is_table(path) else choice.spans
    if table is None and choice.columns:
        raise WrongUse("--columns is of a table: name it by --spans FILE")
    with db.open_database() as database, tempfile.TemporaryDirectory(prefix="profiler_wrapper_ranks_") as folder:
        try:
            if table is not None:
                loaded = db.read_table(database, table, choice.columns, choice.ranks)
            else:
                loaded = _load_run(database, path, choice, Path(folder))
            yield loaded, ranks_report(loaded)
        except db.import_duckdb().Error as error:
            why = str(error).strip().split("\n")[0]
            raise BrokenTrace(f"{table or path}: its spans cannot be read: {why}") from error


def run_of(path: Path) -> Path | None:
    """The directory of the run that a path is of, if there are several ranks in it."""
    for place in (path, path.parent, path.parent.parent):
        if not place.is_dir():
            continue
        with suppress(BrokenTrace, OSError):
            sources = find_sources(place)
            if len({one.rank for one in (*sources.logs, *sources.traces)}) > 1 and sources.root.is_relative_to(place):
                return sources.root
            if path.is_dir() and not path.name.startswith("rank"):
                return None
    return None


def _load_run(database: Database, path: Path, choice: Choice, folder: Path) -> LoadedSpans:
    rank = rank_of_directory(path)
    # Of one rank of a run: its steps are those of the run's report.
    if rank is not None and (path / RUN_FILE).is_file():
        choice = replace(choice, ranks=(rank,) if choice.ranks is None else choice.ranks, use=choice.use or "traces")
        path = path.parent
    sources = find_sources(path)
    from_timers = (choice.use or sources.uses) == "timers"
    chosen = _chosen(sources, sources.logs if from_timers else sources.traces, choice, path)
    described = len(sources.missing)
    if from_timers:
        places, notes = _load_logs(database, chosen, sources, folder)
    else:
        places, notes = _load_traces(database, chosen, sources, choice, (choice.output or folder) / "reduced"), []
    gaps = sources.missing[described:]
    there = set(db.column(database, "SELECT DISTINCT rank FROM spans").tolist() if places else ())
    if not there:
        raise BrokenTrace(f"{path}: no spans of any rank in it{_why(gaps)}")
    db.write_ranks(database, (places[rank] for rank in sorted(places)))
    world_size = max((place.get("world_size") or 0 for place in places.values()), default=0) or None
    if choice.ranks is None:
        absent = absent_ranks(there, world_size, sources.ranks)
    else:
        absent = db.ranks_not_there(set(choice.ranks), there, path)
    failed = {gap.rank for gap in gaps} - {None}
    if from_timers and sources.traces:
        notes.append(f"{len(sources.traces)} traces are there too, and are not in this report (--use traces)")
    if not from_timers and sources.logs:
        count = len(sources.logs)
        notes.append(f"logs of timers of {count} ranks are there too, and are not in this report (--use timers)")
    return LoadedSpans(
        database,
        run=sources.root.name or sources.root.resolve().name,
        root=sources.root,
        missing=(*sources.missing, *(gap for gap in absent if gap.rank not in failed)),
        world_size=world_size,
        from_timers=from_timers,
        notes=tuple(notes),
    )


def _why(gaps: Sequence[Gap]) -> str:
    return "".join(f"{'; ' if place else ': '}{gap.what}: {gap.reason}" for place, gap in enumerate(gaps[:4]))


def _chosen(sources: SpanSources, there: Sequence[Source], choice: Choice, path: Path) -> list[Source]:
    """Those of the ranks that are asked for, or that may be."""
    if not there and choice.use is None:
        raise BrokenTrace(f"{path}: no trace and no timer's log of any rank in it{_why(sources.missing)}")
    if not there:
        what = "log of a timer in it (timers/timer_rank<k>.jsonl)" if choice.use == "timers" else "trace in it"
        raise WrongUse(f"{sources.root}: no {what}")
    wanted = None if choice.ranks is None else {None, *choice.ranks}
    chosen = [one for one in there if wanted is None or one.rank in wanted]
    if not chosen:
        db.ranks_not_there(set(choice.ranks or ()), {one.rank for one in there if one.rank is not None}, sources.root)
    return chosen


# Of each rank columns of RANK_COLUMNS as far as they are known; where there are any, `spans` is in the database.
_Places = Mapping[int, Mapping[str, Any]]


# --- traces ---

_WRITTEN_AT = re.compile(r"\d{10,}(\.\d+)?")  # `worker.time.pt.trace.json`, `time-TP-0-DECODE.trace.json.gz`
_SERVER_STAGE = re.compile(r"(?i)(?<![a-z])(extend|prefill|decode)(?![a-z])")


def _load_traces(
    database: Database, traces: Sequence[Source], sources: SpanSources, choice: Choice, otherwise: Path
) -> _Places:
    """The traces' tables as `spans`; `otherwise`: where tables go that cannot lie beside their traces."""
    tasks = []
    for i, trace in enumerate(traces):
        if trace.has_trace:
            paths = (trace.path, trace.reduced, otherwise / f"{i}_{REDUCED_FILE}")
            source, target, other = (str(path.resolve()) for path in paths)
            tasks.append(Task(source, target, other, trace.rank))
    reduced = list(reduce_traces(tasks, scheduler=choice.scheduler, done=choice.done))
    reduced += [read_alone(trace.path, trace.rank) for trace in traces if not trace.has_trace]
    for one in reduced:
        if one.failure:
            whose = Path(one.trace).name if one.rank is None else f"rank {one.rank}"
            sources.miss(f"spans of {whose}", f"{one.trace}: {one.failure}", one.rank)
    kept = _one_per_step(_ranked([one for one in reduced if not one.failure], sources), sources)
    for one in kept:
        for note in one.notes:
            if "no layers" not in note:
                sources.miss(f"part of rank {one.rank}'s trace", note, one.rank)
    while kept:
        try:
            rows, bad = db.view_spans(database, _relation(database, kept))
        except db.import_duckdb().Error:
            torn = {one: why for one in kept if (why := problem_of_table(Path(one.spans)))}
            if not torn:
                raise
            for one, why in torn.items():
                sources.miss(f"spans of rank {one.rank}", f"{one.spans}: {why}", one.rank)
            kept = [one for one in kept if one not in torn]
            continue
        if bad:
            sources.miss(f"{bad} of {rows} rows", "they are no spans")
        break
    places = {}
    for one in kept:
        rank = int(one.rank or 0)
        places[rank] = {"rank": rank, "world_size": one.world_size, "host": one.host, **sources.ranks.get(rank, {})}
    return places


def _relation(database: Database, kept: list[Reduced]) -> str:
    """The tables as one."""
    files = [Path(one.spans) for one in kept]
    if all(one.rank == one.stored_rank for one in kept):
        return db.read("read_parquet", files)
    database.execute("CREATE OR REPLACE TABLE span_files (filename VARCHAR, rank INTEGER)")
    db.insert(database, "span_files", [(one.spans, one.rank) for one in kept])
    return (
        f"(SELECT p.* REPLACE (f.rank AS rank) FROM {db.read('read_parquet', files, 'filename = true')} p "
        "JOIN span_files f USING (filename))"
    )


def _ranked(reduced: list[Reduced], sources: SpanSources) -> list[Reduced]:
    """With a rank for each: where neither trace nor name tells, workers are numbered in order of their names.

    A worker's files differ in the time at which they were written: they are windows of one rank.

    Raises:
        BrokenTrace: their names tell of several stages of a server, which do not do the same.
    """
    worker = {one.trace: _WRITTEN_AT.sub("", Path(one.trace).name) for one in reduced if one.rank is None}
    if worker and len(reduced) > 1:
        reason = "neither they nor their names tell: numbered in order of names"
        sources.miss(f"ranks of {len(worker)} traces", reason)
    stages = {found[0].upper() for name in worker.values() if (found := _SERVER_STAGE.search(name))}
    if len(stages) > 1:
        raise BrokenTrace(f"traces of several stages of a server: {', '.join(sorted(stages))}; name those of one")
    taken = {one.rank for one in reduced}
    free = (rank for rank in itertools.count() if rank not in taken)
    of_worker = dict(zip(dict.fromkeys(worker.values()), free, strict=False))
    return [one if one.rank is not None else one._replace(rank=of_worker[worker[one.trace]]) for one in reduced]


def _one_per_step(reduced: list[Reduced], sources: SpanSources) -> list[Reduced]:
    """Without traces that tell of steps of their rank which a later one has too."""
    kept: list[Reduced] = []
    seen: set[tuple[int | None, int]] = set()
    for one in reversed(reduced):
        steps = {(one.rank, step) for step in one.steps}
        if seen & steps:
            sources.miss(f"a trace of rank {one.rank}", f"{one.trace}: another has the same steps", one.rank)
        else:
            seen |= steps
            kept.append(one)
    return kept[::-1]


# --- logs of timers ---


_NOT_CLOSED = "its log is not closed: its process runs, or was killed"


def _load_logs(
    database: Database, logs: Sequence[Source], sources: SpanSources, folder: Path
) -> tuple[_Places, list[str]]:
    """JSON lines, made into Parquet once: they are asked many times."""
    states = {log: _state_of(log.path) for log in logs}
    files = [log.path for log, why in states.items() if why in ("", _NOT_CLOSED)]
    for log, why in states.items():
        if log.path not in files:
            sources.miss(f"spans of rank {log.rank}", f"{log.path}: {why}", log.rank)
    if not files:
        return {}, []
    types = ", ".join(f"{db.literal(name)}: {db.literal(kind)}" for name, (kind, _) in SPAN_COLUMNS.items())
    lines = "format = 'newline_delimited', ignore_errors = true, filename = 'log'"
    relation = db.read("read_json", files, lines, f"columns = {{{types}, 'header': 'JSON'}}")
    rows = (
        "SELECT * EXCLUDE (header), header IS NOT NULL AS is_header, "
        f"TRY_CAST(header->>'lost_lines' AS BIGINT) AS lost_lines, header->>'ended_by' AS ended_by FROM {relation}"
    )
    target = folder / "timers.parquet"
    database.execute(f"COPY ({rows}) TO {db.literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 122880)")
    table = db.read("read_parquet", [target])
    db.view_spans(database, table)
    counts = database.execute(
        f"""SELECT log, count(*) FILTER ({db.USABLE}), count(*) FILTER (NOT is_header), max(lost_lines), max(ended_by),
            count(step) FILTER ({db.USABLE}) FROM {table} GROUP BY log ORDER BY log"""
    ).fetchall()
    how = None if any(with_step for *_, with_step in counts) else _find_steps(database)
    rank_of = {str(log.path): log.rank or 0 for log in logs}
    unfinished = {log.rank or 0: why for log, why in states.items() if why == _NOT_CLOSED}
    unfinished |= {rank_of[name]: f"its program ended by {error}" for name, *_, error, _ in counts if error}
    for reason, ranks in sorted(grouped((why, rank) for rank, why in unfinished.items()).items()):
        what = f"end of rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
        sources.miss(what, reason, ranks[0] if len(ranks) == 1 else None)
    for name, good, total, lost, *_ in counts:
        rank = rank_of[name]
        if not good:
            sources.miss(f"spans of rank {rank}", f"{name}: no line of it is a span", rank)
        elif total > good:
            bad = "a line" if total == good + 1 else f"{total - good} lines"
            sources.miss(f"{bad} of rank {rank}", f"{name}: torn, or no span", rank)
        if lost:
            sources.miss(f"{lost} spans of rank {rank}", f"{name}: its timer could not write them", rank)
    return {rank: sources.ranks[rank] for rank in rank_of.values()}, [] if how is None else [how]


def _state_of(log: Path) -> str:
    """Why nothing can be read of a log, or that its timer did not close it; empty if all is well."""
    try:
        with log.open("rb") as lines:
            header = lines.readline(LONGEST_HEADER)
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - LONGEST_HEADER))
            end = lines.read()
    except OSError as error:
        return error.strerror or str(error)
    if not header:
        return "is empty"
    last = end[:-1].rpartition(b"\n")[2]
    # It is closed with a last header; of earlier versions without the spaces that were there to be written into.
    is_open = end.endswith(b"  ") or (b'"closing_line":true' in header and not last.startswith(b'{"header":'))
    return _NOT_CLOSED if is_open else ""


# --- steps of logs that tell none ---


def _find_steps(database: Database) -> str | None:
    """Give the view `spans` steps where they can be found; return how they were.

    A step begins where the first of the outermost names that come again comes again. Where that comes several times
    before the optimizer does, as with accumulated gradients, a step begins with the first of them after the optimizer.
    What is before the first step is in none. The last one ends with its last span.

    Returns: None where no name of most ranks comes again; the view has no steps then.
    """
    # Outermost spans of each rank's main thread, that with the most time in them.
    database.execute(
        """CREATE OR REPLACE TEMP TABLE outermost AS
        SELECT * FROM (
            SELECT rank, thread, name, kind, start_ns, start_ns + duration_ns AS end_ns,
                sum(duration_ns) OVER (PARTITION BY rank, thread) AS busy_ns
            FROM spans WHERE depth = 0 AND kind NOT IN ('gc', 'step'))
        QUALIFY thread IS NOT DISTINCT FROM
            first_value(thread) OVER (PARTITION BY rank ORDER BY busy_ns DESC, thread)"""
    )
    repeated = database.execute(
        """SELECT name, any_value(kind), median(times) FROM (
            SELECT name, any_value(kind) AS kind, count(*) AS times,
                row_number() OVER (PARTITION BY rank ORDER BY min(start_ns)) AS place
            FROM outermost GROUP BY rank, name HAVING count(*) > 1)
        GROUP BY name ORDER BY count(*) FILTER (place = 1) DESC, name"""
    ).fetchall()
    if not repeated:
        return None
    first, _, times = repeated[0]
    closers = [(count, name) for name, kind, count in repeated if kind == "optimizer" and 2 * count <= times]
    closing = min(closers)[1] if closers else None
    place = "start_ns" if closing is None else "closed"  # what those of one step have in common
    database.execute(
        f"""CREATE OR REPLACE TABLE step_cuts AS
        SELECT rank, thread, begin_ns, row_number() OVER steps - 1 AS step,
            coalesce(lead(begin_ns) OVER steps, last_ns) AS end_ns
        FROM (SELECT rank, any_value(thread) AS thread, min(start_ns) AS begin_ns, any_value(last_ns) AS last_ns FROM (
                SELECT *, max(end_ns) OVER (PARTITION BY rank) AS last_ns,
                    sum((name = {db.literal(closing or "")})::INTEGER) OVER (
                        PARTITION BY rank ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS closed FROM outermost)
            WHERE name = {db.literal(first)} GROUP BY rank, {place})
        WINDOW steps AS (PARTITION BY rank ORDER BY begin_ns)"""
    )
    database.execute(
        """ALTER VIEW spans RENAME TO spans_without_steps;
        CREATE VIEW spans AS
        SELECT s.* REPLACE (c.step AS step) FROM spans_without_steps s
        ASOF LEFT JOIN step_cuts c ON s.rank = c.rank AND s.start_ns >= c.begin_ns
        UNION ALL BY NAME
        SELECT rank, step, 'step' AS name, 'step' AS kind, begin_ns AS start_ns, end_ns - begin_ns AS duration_ns,
            0::SMALLINT AS depth, thread FROM step_cuts"""
    )
    how = f"steps were found by the repetition of {first[:LONGEST_NAME]}"
    how += f": each begins with the first one after {closing[:LONGEST_NAME]}" if closing else ", with which each begins"
    return f"{how}; global_timer.step() tells them"
