"""`load_ranks`: what a job of many ranks says as a whole, from what its ranks wrote or from any table of spans."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.ranks import database as db
from profiler_wrapper.ranks.database import Database, LoadedSpans
from profiler_wrapper.ranks.model import RanksReport
from profiler_wrapper.ranks.reduce import Done, Reduced, Task, problem_of_table, read_summary, reduce_traces, table_rows
from profiler_wrapper.ranks.report import ranks_report
from profiler_wrapper.ranks.sources import SpanSources, TimerLog, TraceFile, Use, find_sources, rank_of_directory
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.spans import RANK_COLUMNS, SPAN_COLUMNS, Gap, absent_ranks, parts_of, ranges, rank_gaps

Progress = Callable[[str, int, int], None]  # what is done, how many of it, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What of a run is read, and how."""

    spans: Path | None = None  # a table of another tool, or a directory of such, in the place of the run's files
    columns: Mapping[str, str] = field(default_factory=dict)  # of it, theirs to ours
    scheduler: str | None = None  # of a Dask cluster that reduces the traces
    ranks: Sequence[int] | None = None  # only these
    use: Use | None = None  # None: what tells of more ranks
    output: Path | None = None  # where reduced traces go if they cannot lie beside the traces
    progress: Progress | None = None  # is told how far the reduction of traces has come


EVERYTHING = Choice()


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
def open_ranks(path: str | os.PathLike[str], choice: Choice = EVERYTHING) -> Iterator[tuple[LoadedSpans, RanksReport]]:
    """As `load_ranks`, with the database of the spans still open, for what draws them."""
    with open_spans(Path(path), choice) as loaded:
        yield loaded, ranks_report(loaded)


def run_of(path: Path) -> Path | None:
    """The directory of the run that a path is of, if there are several ranks in it."""
    for place in (path, path.parent, path.parent.parent):
        if not place.is_dir():
            continue
        try:
            sources = find_sources(place)
        except (BrokenTrace, OSError):
            continue
        ranks = {log.rank for log in sources.logs} | {trace.rank for trace in sources.traces}
        if len(ranks) > 1 and sources.root.is_relative_to(place):
            return sources.root
        if path.is_dir() and not path.name.startswith("rank"):
            return None
    return None


@contextmanager
def open_spans(path: Path, choice: Choice = EVERYTHING) -> Iterator[LoadedSpans]:
    """The spans of a run, of a directory of traces, of a trace or of a table; the database is gone at the end.

    Raises as `load_ranks`.
    """
    table = path if choice.spans is None and _is_table(path) else choice.spans
    if table is None and choice.columns:
        raise WrongUse("--columns is of a table: name it by --spans FILE")
    with db.open_database() as database, tempfile.TemporaryDirectory(prefix="profiler_wrapper_ranks_") as folder:
        try:
            if table is not None:
                yield _load_tables(database, table, choice.columns, choice.ranks)
            else:
                yield _load_run(database, path, choice, Path(folder))
        except db.import_duckdb().Error as error:
            why = str(error).strip().split("\n")[0]
            raise BrokenTrace(f"{table or path}: its spans cannot be read: {why}") from error


def _load_run(database: Database, path: Path, choice: Choice, folder: Path) -> LoadedSpans:
    path, choice = _whole_run(path, choice)
    sources = find_sources(path)
    uses = choice.use or sources.uses
    if choice.use is None and not sources.logs and not sources.traces:
        raise BrokenTrace(f"{path}: no trace and no timer's log of any rank in it{_why(sources.missing)}")
    logs, traces = _chosen(sources, uses, choice.ranks)
    if uses == "timers":
        loaded = _load_logs(database, logs, sources, folder)
        there = _ranks_in_spans(database) if loaded.ranks else set()
    else:
        where = (choice.output or folder) / "reduced"
        done = None if choice.progress is None else partial(choice.progress, "reducing traces")
        loaded = _load_traces(database, traces, sources, where, scheduler=choice.scheduler, done=done)
        there = set(loaded.ranks)
    if not there:
        raise BrokenTrace(f"{path}: no spans of any rank in it{_why(loaded.gaps)}")
    _write_ranks(database, loaded.ranks)
    world_size = max((place.get("world_size") or 0 for place in loaded.ranks.values()), default=0) or None
    if choice.ranks is None:
        absent = absent_ranks(there, world_size, sources.ranks)
    else:
        absent = _ranks_not_there(set(choice.ranks), there, path)
    failed = {gap.rank for gap in loaded.gaps if gap.rank is not None}
    absent = [gap for gap in absent if gap.rank is None or gap.rank not in failed]
    notes = list(loaded.notes)
    if uses == "timers" and sources.traces:
        notes.append(f"{len(sources.traces)} traces are there too, and are not in this report (--use traces)")
    if uses == "traces" and sources.logs:
        count = len(sources.logs)
        notes.append(f"logs of timers of {count} ranks are there too, and are not in this report (--use timers)")
    return LoadedSpans(
        database,
        run=sources.root.name or sources.root.resolve().name,
        root=sources.root,
        missing=(*sources.missing, *loaded.gaps, *absent),
        world_size=world_size,
        from_timers=uses == "timers",
        notes=tuple(notes),
    )


def _whole_run(path: Path, choice: Choice) -> tuple[Path, Choice]:
    """The directory of one rank of a run is that rank of the run: its steps are those that the run's report has."""
    rank = rank_of_directory(path.name)
    if rank < 0 or not (path / RUN_FILE).is_file():
        return path, choice
    ranks = (rank,) if choice.ranks is None else choice.ranks
    return path.parent, replace(choice, ranks=ranks, use=choice.use or "traces")


def _why(gaps: Sequence[Gap]) -> str:
    return "".join(f"{'; ' if place else ': '}{gap.what}: {gap.reason}" for place, gap in enumerate(gaps[:4]))


def _ranks_in_spans(database: Database) -> set[int]:
    return {row[0] for row in database.execute("SELECT DISTINCT rank FROM spans").fetchall()}


def _chosen(sources: SpanSources, uses: Use, ranks: Sequence[int] | None) -> tuple[list[TimerLog], list[TraceFile]]:
    if uses == "timers" and not sources.logs:
        raise WrongUse(f"{sources.root}: no log of a timer in it (timers/timer_rank<k>.jsonl)")
    if uses == "traces" and not sources.traces:
        raise WrongUse(f"{sources.root}: no trace in it")
    wanted = None if ranks is None else frozenset(ranks)
    logs = [log for log in sources.logs if wanted is None or log.rank in wanted]
    traces = [trace for trace in sources.traces if wanted is None or trace.rank is None or trace.rank in wanted]
    if not (logs if uses == "timers" else traces):
        there = {log.rank for log in sources.logs} if uses == "timers" else {trace.rank for trace in sources.traces}
        known = ranges(rank for rank in there if rank is not None)
        raise WrongUse(f"{sources.root}: no spans of ranks {ranges(ranks or ())}; there are those of {known or 'none'}")
    return logs, traces


def _write_ranks(database: Database, places: Mapping[int, Mapping[str, Any]]) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in RANK_COLUMNS.items())
    database.execute(f"CREATE OR REPLACE TABLE ranks ({columns})")
    rows = []
    for rank, place in sorted(places.items()):
        stage = place.get("stage", place.get("pp"))
        row = {**place, "rank": rank, "stage": stage if stage is not None else 0}
        rows.append([row.get(name) for name in RANK_COLUMNS])
    db.insert(database, "ranks", rows)


# --- what all of them use ---


# A table with these columns is one of ours.
OUR_COLUMNS: Final = ("rank", "step", "name", "kind", "start_ns", "duration_ns", "depth")


class _Loaded(NamedTuple):
    """What the files of a run's ranks gave. Where some of them can be read, `spans` is in the database."""

    ranks: Mapping[int, Mapping[str, Any]]  # columns of RANK_COLUMNS as far as they are known
    gaps: list[Gap]
    notes: tuple[str, ...] = ()


def _view_spans(database: Database, relation: str, *, ranks: Iterable[int] | None = None) -> tuple[int, int]:
    """Makes the view `spans` of a relation that has columns of ours: (rows, those left out since they are no spans)."""
    there = {name: db.quoted(name) for name in db.columns_of(database, relation) if name in SPAN_COLUMNS}
    select = db.span_select(relation, {**there, "depth": "coalesce(TRY_CAST(depth AS SMALLINT), 0)"})
    rows, bad = database.execute(
        f"SELECT count(*), count(*) FILTER (NOT coalesce({db.USABLE}, false)) FROM ({select})"
    ).fetchone()
    where = f" WHERE {db.USABLE} AND {_of_ranks(ranks)}" if bad or ranks is not None else ""
    database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM ({select}){where}")
    return rows, bad


def _of_ranks(ranks: Iterable[int] | None) -> str:
    """The condition that a row is of these ranks; None: of any."""
    if ranks is None:
        return "TRUE"
    parts = [f"rank BETWEEN {part[0]} AND {part[-1]}" for part in parts_of(ranks)]
    return f"({' OR '.join(parts) or 'FALSE'})"


def _ranks_not_there(wanted: set[int], there: set[int], path: Path) -> list[Gap]:
    """Of the ranks that are asked for, those without spans.

    Raises:
        WrongUse: that is all of them.
    """
    if not wanted & there:
        raise WrongUse(f"{path}: no spans of ranks {ranges(wanted)}; there are those of {ranges(there) or 'none'}")
    return rank_gaps(wanted - there, "was asked for, and no spans of it are there")


# --- traces ---


def _load_traces(
    database: Database,
    traces: Sequence[TraceFile],
    sources: SpanSources,
    otherwise: Path,
    *,
    scheduler: str | None,
    done: Done | None,
) -> _Loaded:
    """The traces' tables as `spans`; `otherwise`: where tables go that cannot lie beside their traces."""
    tasks = []
    for i, trace in enumerate(traces):
        if trace.has_trace:
            paths = (trace.path, trace.reduced, otherwise / f"{i}_spans.parquet")
            source, target, other = (str(path.resolve()) for path in paths)
            tasks.append(Task(source, target, other, trace.rank))
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
        return _Loaded({}, gaps)
    try:
        rows, bad = _view_spans(database, _relation(database, kept))
    except db.import_duckdb().Error:
        torn = {one: problem for one in kept if (problem := problem_of_table(Path(one.spans)))}
        gaps += [Gap(f"spans of {_whose(one)}", f"{one.spans}: {why}", one.rank) for one, why in torn.items()]
        kept = [one for one in kept if one not in torn]
        if not kept:
            return _Loaded({}, gaps)
        rows, bad = _view_spans(database, _relation(database, kept, by_name=True))
    places: dict[int, Mapping[str, Any]] = {}
    for one in kept:
        rank = int(one.rank or 0)
        place = {"rank": rank, "world_size": one.world_size, "host": one.host}
        known = sources.ranks.get(rank, {})
        places[rank] = {**place, **{key: value for key, value in known.items() if value is not None}}
    if bad:
        gaps.append(Gap(f"{bad} of {rows} rows", "they are no spans"))
        for rank in sorted(places.keys() - _ranks_in_spans(database)):
            gaps.append(Gap(f"spans of rank {rank}", "none of the rows of its table is one", rank))
            del places[rank]
    return _Loaded(places, gaps)


def _relation(database: Database, kept: list[Reduced], *, by_name: bool = False) -> str:
    """The tables as one; `by_name`: columns and types of each may be others."""
    tables = f"{db.file_list([Path(one.spans) for one in kept])}, union_by_name = {str(by_name).lower()}"
    if all(one.rank == one.stored_rank for one in kept):
        return f"read_parquet({tables})"
    database.execute("CREATE OR REPLACE TABLE span_files (filename VARCHAR, rank INTEGER)")
    db.insert(database, "span_files", [(one.spans, one.rank) for one in kept])
    return (
        f"(SELECT p.* REPLACE (f.rank AS rank) FROM read_parquet({tables}, filename = true) p "
        "JOIN span_files f USING (filename))"
    )


def _whose(one: Reduced) -> str:
    return Path(one.trace).name if one.rank is None else f"rank {one.rank}"


def _alone(trace: TraceFile) -> Reduced:
    """A table of spans without a trace: one was reduced to it, or somebody else wrote it."""
    if (summary := read_summary(trace.path)) is not None:
        return summary if summary.rank is not None else summary._replace(rank=trace.rank)
    path = str(trace.path)
    if (rows := table_rows(trace.path, OUR_COLUMNS)) is None:
        return Reduced(path, "", trace.rank, failure=f"is no table with the columns {', '.join(OUR_COLUMNS)}")
    return Reduced(path, path, trace.rank, rows=rows, stored_rank=trace.rank)


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


# --- logs of timers ---


_LONGEST_HEADER_BYTES = 1 << 16


def _load_logs(database: Database, logs: Sequence[TimerLog], sources: SpanSources, folder: Path) -> _Loaded:
    """JSON lines, made into Parquet once: they are asked many times."""
    problems = {log: why for log in logs if (why := _unreadable(log))}
    gaps = [Gap(f"spans of rank {log.rank}", f"{log.path}: {why}", log.rank) for log, why in problems.items()]
    files = [log.path for log in logs if log not in problems]
    if not files:
        return _Loaded({}, gaps)
    types = ", ".join(f"{db.literal(name)}: {db.literal(kind)}" for name, (kind, _) in SPAN_COLUMNS.items())
    target = folder / "timers.parquet"
    relation = (
        f"read_json({db.file_list(files)}, format = 'newline_delimited', ignore_errors = true, filename = 'log', "
        f"columns = {{{types}, 'header': 'JSON'}})"
    )
    rows = (
        "SELECT * EXCLUDE (header), header IS NOT NULL AS is_header, "
        f"TRY_CAST(header->>'lost_lines' AS BIGINT) AS lost_lines, header->>'ended_by' AS ended_by FROM {relation}"
    )
    database.execute(f"COPY ({rows}) TO {db.literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 122880)")
    table = f"read_parquet({db.literal(target)})"
    expressions = {name: db.quoted(name) for name in SPAN_COLUMNS} | {"depth": "coalesce(depth, 0)"}
    where = db.USABLE
    if copies := _copies(database, table):
        gaps += [Gap(f"spans in {Path(log).name}", f"the same as in {of}: left out") for log, of in copies.items()]
        where = f"{db.USABLE} AND log NOT IN ({', '.join(map(db.literal, copies))})"
    select = db.span_select(table, expressions, where=where)
    database.execute(f"CREATE OR REPLACE VIEW spans AS {select}")
    has_steps = database.execute("SELECT 1 FROM spans WHERE step IS NOT NULL LIMIT 1").fetchone() is not None
    how = None if has_steps else _find_steps(database, select)
    lines = database.execute(
        f"""SELECT log, count(*) FILTER (coalesce({db.USABLE}, false)), count(*) FILTER (NOT is_header),
            max(lost_lines), max(ended_by) FROM {table} GROUP BY log ORDER BY log"""
    ).fetchall()
    rank_of = {str(log.path): log.rank for log in logs}
    gaps += _unfinished(logs, {rank_of[name]: ended for name, *_, ended in lines if ended and name in rank_of})
    for name, good, total, lost, _ in lines:
        rank = rank_of.get(name)
        if not good:
            gaps.append(Gap(f"spans of rank {rank}", f"{name}: no line of it is a span", rank))
        elif total > good:
            count = "a line" if total == good + 1 else f"{total - good} lines"
            gaps.append(Gap(f"{count} of rank {rank}", f"{name}: torn, or no span", rank))
        if lost:
            gaps.append(Gap(f"{lost} spans of rank {rank}", f"{name}: its timer could not write them", rank))
    of_logs = {log.rank for log in logs}
    places = {rank: place for rank, place in sources.ranks.items() if rank in of_logs}
    return _Loaded(places, gaps, () if how is None else (how,))


def _unfinished(logs: Sequence[TimerLog], errors: Mapping[int, str]) -> list[Gap]:
    """Ranks whose program ended by an error, or did not end: their log is not closed."""
    open_ones = {
        log.rank: "its log is not closed: its process runs, or was killed" for log in logs if _is_open(log.path)
    }
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, reason in (open_ones | {rank: f"its program ended by {error}" for rank, error in errors.items()}).items():
        ranks_of[reason].append(rank)
    return [
        Gap(
            f"end of rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}", reason, ranks[0] if len(ranks) == 1 else None
        )
        for reason, ranks in sorted(ranks_of.items())
    ]


def _is_open(path: Path) -> bool:
    """Whether a log lacks the header that its timer closes it with, or, of earlier versions, ends in spaces."""
    try:
        with path.open("rb") as lines:
            header = lines.readline(_LONGEST_HEADER_BYTES)
            size = lines.seek(0, 2)
            lines.seek(max(0, size - _LONGEST_HEADER_BYTES))
            end = lines.read()
    except OSError:
        return False
    last = end[:-1].rpartition(b"\n")[2]
    return end.endswith(b"  ") or (b'"closing_line":true' in header and not last.startswith(b'{"header":'))


def _copies(database: Database, table: str) -> dict[str, str]:
    """Logs whose spans another one has too, as a copy or a link: which other."""
    rows = database.execute(
        f"""SELECT first(log ORDER BY log), list(log ORDER BY log) FROM (
            SELECT log, list([rank, spans, first_ns, last_ns, starts, lengths] ORDER BY rank) AS sums FROM (
                SELECT log, rank, count(*) AS spans, min(start_ns) AS first_ns, max(start_ns) AS last_ns,
                    sum(start_ns % 1000003) AS starts, sum(duration_ns) AS lengths
                FROM {table} WHERE {db.USABLE} GROUP BY log, rank) GROUP BY log) GROUP BY sums"""
    ).fetchall()
    return {log: Path(first).name for first, logs in rows for log in logs if log != first}


def _unreadable(log: TimerLog) -> str:
    """Why nothing can be read of it; empty if something can."""
    try:
        with log.path.open("rb") as lines:
            return "" if lines.read(1) else "is empty"
    except OSError as error:
        return error.strerror or str(error)


# --- steps of logs that tell none ---


_LONGEST = 80  # of a name, in messages

# Outermost spans of each rank's main thread, that with the most time in them.
_OUTERMOST = """
    outermost AS (
        SELECT rank, thread, name, kind, start_ns, start_ns + duration_ns AS end_ns FROM ({spans})
        WHERE depth = 0 AND kind NOT IN ('gc', 'step')),
    main AS (
        SELECT rank, arg_max(thread, busy_ns) AS thread FROM (
            SELECT rank, thread, sum(end_ns - start_ns) AS busy_ns FROM outermost GROUP BY rank, thread) GROUP BY rank),
    mine AS (SELECT o.* FROM outermost o JOIN main m ON o.rank = m.rank AND o.thread IS NOT DISTINCT FROM m.thread)
"""


def _find_steps(database: Database, spans: str) -> str | None:
    """Makes the view `spans` of a SELECT of spans without steps, with steps where they can be found: how they were.

    A step begins where the first of the outermost names that come again comes again. Where that comes several times
    before the optimizer does, as with accumulated gradients, a step begins with the first of them after the optimizer.
    What is before the first step is in none. The last one ends with its last span.

    Returns: None where no name of most ranks comes again; the view has no steps then.
    """
    outermost = _OUTERMOST.format(spans=spans)
    names = database.execute(
        f"""WITH {outermost},
        repeated AS (
            SELECT rank, name, any_value(kind) AS kind, count(*) AS times, min(start_ns) AS first_ns
            FROM mine GROUP BY rank, name HAVING count(*) > 1),
        first AS (SELECT rank, arg_min(name, first_ns) AS name FROM repeated GROUP BY rank),
        chosen AS (SELECT name FROM first GROUP BY name ORDER BY count(*) DESC, name LIMIT 1)
        SELECT name, kind, median(times) FROM repeated
        WHERE name = (SELECT name FROM chosen) OR kind = 'optimizer'
        GROUP BY name, kind ORDER BY name = (SELECT name FROM chosen) DESC, median(times), name"""
    ).fetchall()
    if not names:
        return None
    (first, _, times), others = names[0], names[1:]
    closing = next((name for name, kind, count in others if kind == "optimizer" and 2 * count <= times), None)
    place = "start_ns" if closing is None else "closed"  # what those of one step have in common
    database.execute(
        f"""CREATE OR REPLACE TABLE step_cuts AS
        WITH {outermost},
        begins AS (
            SELECT rank, thread, start_ns, {place} AS place FROM (
                SELECT *, sum((name = {db.literal(closing or "")})::INTEGER) OVER (
                    PARTITION BY rank ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS closed FROM mine)
            WHERE name = {db.literal(first)}),
        firsts AS (
            SELECT rank, any_value(thread) AS thread, min(start_ns) AS begin_ns FROM begins GROUP BY rank, place),
        ends AS (SELECT rank, max(end_ns) AS end_ns FROM mine GROUP BY rank)
        SELECT rank, thread, begin_ns, row_number() OVER steps - 1 AS step,
            coalesce(lead(begin_ns) OVER steps, e.end_ns) AS end_ns
        FROM firsts JOIN ends e USING (rank) WINDOW steps AS (PARTITION BY rank ORDER BY begin_ns)"""
    )
    database.execute(
        f"""CREATE OR REPLACE VIEW spans AS
        SELECT s.* REPLACE (c.step AS step) FROM ({spans}) s
        ASOF LEFT JOIN step_cuts c ON s.rank = c.rank AND s.start_ns >= c.begin_ns
        UNION ALL BY NAME
        SELECT rank, step, 'step' AS name, 'step' AS kind, begin_ns AS start_ns, end_ns - begin_ns AS duration_ns,
            0::SMALLINT AS depth, thread FROM step_cuts"""
    )
    how = f"steps were found by the repetition of {first[:_LONGEST]}"
    how += f": each begins with the first one after {closing[:_LONGEST]}" if closing else ", with which each begins"
    return f"{how}; global_timer.step() tells them"


# --- tables ---


def _is_table(path: Path) -> bool:
    """Whether it is a table by its ending, and no log or trace of ours."""
    name = path.name.removesuffix(".gz")
    return path.is_file() and name.endswith((".parquet", ".pq", ".csv", ".tsv", ".ndjson"))


def _tables(path: Path) -> list[Path]:
    if not path.is_dir():
        path.stat()  # raises where there is none
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    for ending in db.TABLE_ENDINGS:
        if found := [file for file in files if Path(file.name.removesuffix(".gz")).suffix.lower() == ending]:
            return found
    raise WrongUse(f"{path}: no table in it; one ends in {', '.join(db.TABLE_ENDINGS)}")


def _load_tables(
    database: Database, path: Path, columns: Mapping[str, str], ranks: Sequence[int] | None
) -> LoadedSpans:
    """The spans of a table, or of a directory of tables.

    Raises:
        OSError: it is not there.
        WrongUse: it is none of spans, or has none of `ranks`.
    """
    files = _tables(path)
    where = f" WHERE {_of_ranks(ranks)}"
    notes: tuple[str, ...] = ()
    has_clocks = True
    if ours := {} if columns else _columns_of_ours(database, files):
        rows, bad = _view_spans(database, db.relation_of(files), ranks=ranks)
        if rows == bad:
            raise WrongUse(f"{path}: {rows} rows, and none of them is a span")
        if bad:
            notes = (f"{bad} of {rows} rows left out: they are no spans",)
        stage = "coalesce(any_value(TRY_CAST(stage AS INTEGER)), 0)" if "stage" in ours else "0"
        of_ranks = (
            f"SELECT TRY_CAST(rank AS INTEGER) AS rank, {stage} AS stage "
            f"FROM {db.relation_of(files)} WHERE TRY_CAST(rank AS INTEGER) >= 0 GROUP BY ALL"
        )
    else:
        notes, laid_end_to_end = db.read_foreign(database, files, mapping=columns)
        has_clocks, of_ranks = not laid_end_to_end, "SELECT * FROM foreign_ranks"
        database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM foreign_spans{where}")
    places = {place["rank"]: place for place in db.to_rows(database, f"SELECT * FROM ({of_ranks}){where}")}
    _write_ranks(database, places)
    there = set(places)
    world_size = max((place.get("world_size") or 0 for place in places.values()), default=0)
    gaps = absent_ranks(there, world_size) if ranks is None else _ranks_not_there(set(ranks), there, path)
    return LoadedSpans(
        database,
        run=path.name,
        root=path.parent,
        missing=tuple(gaps),
        world_size=world_size or len(there),
        notes=notes,
        has_clocks=has_clocks,
    )


def _columns_of_ours(database: Database, files: Sequence[Path]) -> dict[str, str]:
    """The columns, if it is a Parquet table of ours; else none."""
    if not files[0].name.endswith(".parquet"):
        return {}
    try:
        there = db.columns_of(database, db.relation_of(files))
    except db.import_duckdb().Error:  # what is wrong with it is said where it is read as a foreign table
        return {}
    return there if set(OUR_COLUMNS) <= set(there) else {}
