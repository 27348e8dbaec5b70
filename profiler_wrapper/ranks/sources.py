"""Opens the spans of a run, of traces or of a table: a database with `spans` and `ranks`, and what is missing."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.ranks.database import (
    USABLE,
    Database,
    columns_of,
    file_list,
    import_duckdb,
    insert,
    literal,
    open_database,
    quoted,
    span_select,
)
from profiler_wrapper.ranks.foreign_tables import TABLE_ENDINGS, read_foreign, relation_of
from profiler_wrapper.ranks.reduce import Done, Reduced, Task, problem_of_table, read_summary, reduce_traces, table_rows
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.spans import RANK_COLUMNS, SPAN_COLUMNS, Gap, absent_ranks, parts_of, ranges, rank_gaps

# --------------------------------------------------------------------------------------------------
# Finds what a run's ranks wrote: logs of timers, traces, reduced traces; whose they are, and whose is missing.

TIMERS = "timers"
REDUCED_FILE = "spans.parquet"
Use = Literal["timers", "traces"]

_TIMER_LOG = re.compile(r"timer_rank(\d+)\.jsonl$")
_TRACE_ENDINGS = (".json", ".json.gz")
_OWN_JSON = re.compile(r"(run|result|ranks|baseline)\.json|.*_(categories|timeline_trace)\.json|perf_.*")


class TimerLog(NamedTuple):
    """JSON lines of one rank."""

    rank: int
    path: Path


class TraceFile(NamedTuple):
    """A trace, or what it was reduced to where that alone is left."""

    path: Path  # the trace; without one, what it was reduced to
    rank: int | None  # as directory and name tell; None: the trace may say
    reduced: Path  # where its spans are, or go
    has_trace: bool = True


@dataclass(frozen=True, slots=True)
class SpanSources:
    """What there is of a run."""

    root: Path
    logs: tuple[TimerLog, ...] = ()
    traces: tuple[TraceFile, ...] = ()
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # columns of RANK_COLUMNS, as far as told
    missing: tuple[Gap, ...] = ()
    attempt: int = 0

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, as its files tell; None where none does."""
        told = [int(rank["world_size"]) for rank in self.ranks.values() if rank.get("world_size")]
        return max(told, default=None)

    @property
    def uses(self) -> Use:
        """What tells of more ranks: logs of timers or, where these tell of fewer, traces."""
        of_traces = {trace.rank if trace.rank is not None else -1 - i for i, trace in enumerate(self.traces)}
        return "timers" if len({log.rank for log in self.logs}) >= max(1, len(of_traces)) else "traces"


def find_sources(path: Path) -> SpanSources:
    """The sources of every rank in a run directory, a directory of traces, or one file.

    Of an elastic job the last attempt counts. Where files lie:
    `timers/timer_rank<k>.jsonl`, `rank<k>*/` with a trace, run.json and spans.parquet, or traces side by side.

    Raises:
        BrokenTrace: there is nothing in it, or several runs.
        OSError: it is not there, or cannot be read.
    """
    if not path.is_dir():
        path.stat()  # raises where there is none
        return _of_files(path.parent, [path], [])
    gaps: list[Gap] = []
    root, attempt = _last_attempt(path, gaps)
    logs = _logs_in(root)
    directories = sorted(_rank_directories(root), key=lambda place: rank_of_directory(place.name))
    if not logs and not directories:
        inner = _runs_in(root)
        if len(inner) == 1:
            return find_sources(inner[0])
        if inner:
            names = ", ".join(run.name for run in inner[:8])
            raise BrokenTrace(f"{path}: {len(inner)} runs are in it; name one: {names}")
        traces = [file for file in sorted(root.iterdir()) if _may_be_trace(file)]
        if not traces:
            raise BrokenTrace(f"{path}: no rank's files in it: no timers/, no rank<k>/ and no trace")
        return _of_files(root, traces, gaps, attempt)
    ranks: dict[int, dict[str, Any]] = {}
    for log in logs:
        add_place(ranks, log.rank, {**place_in_header(log.path, gaps), "attempt": attempt})
    traces_found: list[TraceFile] = []
    for directory in directories:
        traces_found += _of_rank(directory, ranks, gaps, attempt)
    return SpanSources(root, tuple(logs), tuple(traces_found), ranks, tuple(gaps), attempt)


def _of_files(root: Path, files: Iterable[Path], gaps: list[Gap], attempt: int = 0) -> SpanSources:
    """Files side by side: each rank's is known by its name, or by what is in it."""
    logs, traces = [], []
    ranks: dict[int, dict[str, Any]] = {}
    for file in files:
        if file.name.endswith(".jsonl"):
            place = place_in_header(file, gaps)
            rank = place.get("rank")
            rank = rank if rank is not None else rank_in_name(file.name) or 0
            logs.append(TimerLog(int(rank), file))
            add_place(ranks, int(rank), place)
        elif file.name.endswith(_TRACE_ENDINGS):
            rank = rank_in_name(file.name)
            directory_rank = rank_of_directory(file.parent.name)
            if rank is None and directory_rank >= 0:
                rank = directory_rank
            traces.append(TraceFile(file, rank, _reduced_beside(file, alone=False)))
        elif file.name.endswith(".parquet"):
            traces.append(TraceFile(file, rank_in_name(file.name), file, has_trace=False))
        else:
            raise WrongUse(
                f"{file}: neither a trace (.json, .json.gz), nor a timer's log (.jsonl), nor a run's directory"
            )
    return SpanSources(root, tuple(logs), tuple(traces), ranks, tuple(gaps), attempt)


# --- directories ---


def _last_attempt(path: Path, gaps: list[Gap]) -> tuple[Path, int]:
    """Where the files of the last attempt are, and its number."""
    attempts = sorted(
        (p for p in path.glob("attempt*") if p.is_dir() and _holds_ranks(p)), key=lambda p: digits_in(p.name)
    )
    if not attempts:
        return path, digits_in(path.name) if path.name.startswith("attempt") else 0
    last = attempts[-1]
    before = [digits_in(place.name) for place in attempts[:-1]]
    if _holds_ranks(path):
        before.insert(0, 0)
    if before:
        told = ", ".join(map(str, before))
        gaps.append(Gap(f"attempt {told}", f"only the last attempt, {digits_in(last.name)}, is in this report"))
    return last, digits_in(last.name)


def _holds_ranks(path: Path) -> bool:
    return (path / TIMERS).is_dir() or any(True for _ in _rank_directories(path))


def _runs_in(path: Path) -> list[Path]:
    return sorted(
        place
        for place in path.iterdir()
        if place.is_dir() and (_holds_ranks(place) or any(_holds_ranks(p) for p in place.glob("attempt*")))
    )


def _rank_directories(path: Path) -> Iterator[Path]:
    return (place for place in path.iterdir() if place.is_dir() and RANK_DIRECTORY.match(place.name))


def _logs_in(root: Path) -> list[TimerLog]:
    place = root / TIMERS if (root / TIMERS).is_dir() else root
    found = [TimerLog(int(match[1]), file) for file in place.glob("*.jsonl") if (match := _TIMER_LOG.match(file.name))]
    return sorted(found)


def _of_rank(directory: Path, ranks: dict[int, dict[str, Any]], gaps: list[Gap], attempt: int) -> list[TraceFile]:
    """The traces of a rank's directory, of its later windows too."""
    rank = rank_of_directory(directory.name)
    add_place(ranks, rank, {"attempt": attempt, **coordinates_in_name(directory.name)})
    windows = sorted((p for p in directory.glob("steps_*") if p.is_dir()), key=lambda p: digits_in(p.name))
    found: list[TraceFile] = []
    for place in (directory, *windows):
        try:
            next(place.iterdir(), None)
        except OSError as error:
            gaps.append(Gap(f"files of rank {rank}", f"{place}: {error.strerror or error}", rank))
            continue
        run = run_file_in(place, rank, gaps)
        if run is not None:
            add_place(ranks, rank, place_in_run(run))
            if run.get("complete") is False:
                gaps.append(Gap(f"end of rank {rank}", f"{place / RUN_FILE} says that it is not complete", rank))
        trace = _trace_in(place, run)
        if trace is not None:
            found.append(TraceFile(trace, rank, place / REDUCED_FILE))
        elif (place / REDUCED_FILE).is_file():
            found.append(TraceFile(place / REDUCED_FILE, rank, place / REDUCED_FILE, has_trace=False))
        elif place == directory and run is not None and run.get("trace"):
            gaps.append(Gap(f"trace of rank {rank}", f"{place / str(run['trace'])} is gone", rank))
    return found


def _trace_in(place: Path, run: Mapping[str, Any] | None) -> Path | None:
    """The timed trace: as run.json names it, zipped or not, else by its ending."""
    named = run.get("trace") if run else None
    if isinstance(named, str) and named:
        stem = place / Path(named).name.removesuffix(".gz")
        for file in (stem, stem.with_name(f"{stem.name}.gz")):
            if file.is_file():
                return file
        return None
    traces = [file for file in sorted(place.iterdir()) if _may_be_trace(file) and "trace" in file.name]
    return next((file for file in traces if "_full_trace" not in file.name), traces[0] if traces else None)


def _may_be_trace(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.is_file() and file.name.endswith(_TRACE_ENDINGS) and not hidden and not _OWN_JSON.fullmatch(file.name)


def _reduced_beside(trace: Path, *, alone: bool) -> Path:
    if alone:
        return trace.parent / REDUCED_FILE
    stem = trace.name.removesuffix(".gz").removesuffix(".json")
    return trace.parent / f"{stem}_{REDUCED_FILE}"


# --- what files and their names say of a rank: its number, its place in the mesh, its host ---


RANK_DIRECTORY = re.compile(r"rank(\d{1,9})(_|$)")
_RANK_IN_NAME = re.compile(r"(?i)(?:^|[^a-z])rank[_\-.]?(\d{1,9})(?!\d)")
_GREATEST = 2**31 - 1  # that a column of RANK_COLUMNS holds
_LONGEST_HEADER = 1 << 20


def add_place(ranks: dict[int, dict[str, Any]], rank: int, told: Mapping[str, Any]) -> None:
    """To what is known of each rank, as columns of `RANK_COLUMNS`: what else is told of one."""
    place = ranks.setdefault(rank, {"rank": rank})
    place.update({key: value for key, value in told.items() if key in RANK_COLUMNS and value is not None})
    place["rank"] = rank


def place_in_header(path: Path, gaps: list[Gap]) -> dict[str, Any]:
    """What the first line of a timer's log says of its rank; nothing of a log that is empty, or cannot be read."""
    try:
        with path.open("rb") as lines:
            line = lines.readline(_LONGEST_HEADER)
    except OSError:  # said where its spans are read
        return {}
    if not line:
        return {}
    try:
        header = json.loads(line)["header"]
        return {"rank": _number(header.get("rank")), **place_in_run(header)}
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        gaps.append(Gap(f"header of {path.name}", "its first line is not what a timer writes"))
        return {}


def place_in_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json or a header says of a rank's place."""
    coordinates = run.get("coordinates")
    told = {**coordinates} if isinstance(coordinates, Mapping) else {}
    told |= {"stage": run.get("stage", told.get("pp")), **{key: run.get(key) for key in ("world_size", "attempt")}}
    host = run.get("host")
    return {
        **{key: number for key, value in told.items() if (number := _number(value)) is not None},
        "host": host if isinstance(host, str) and host else None,
    }


def _number(value: object) -> int | None:
    """A number as a column of `RANK_COLUMNS` holds it, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _GREATEST else None


def run_file_in(place: Path, rank: int, gaps: list[Gap]) -> dict[str, Any] | None:
    """What run.json in a rank's directory says; None where there is none, or none that can be read."""
    path = place / RUN_FILE
    try:
        run = json.loads(path.read_bytes())
        if isinstance(run, dict):
            return run
        raise ValueError("no object")
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        gaps.append(Gap(f"description of rank {rank}", f"{path}: {error}", rank))
        return None


def coordinates_in_name(name: str) -> dict[str, int]:
    """`"rank3_dp1_tp0_pp2"` -> `{"dp": 1, "tp": 0, "pp": 2, "stage": 2}`."""
    parts = re.findall(r"_(dp|tp|pp|cp|ep)(\d{1,9})(?=_|$)", name)
    found = {key: int(number) for key, number in parts}
    return {**found, **({"stage": found["pp"]} if "pp" in found else {})}


def rank_in_name(name: str) -> int | None:
    """`"trace.rank-3.json"` -> 3."""
    match = _RANK_IN_NAME.search(name)
    return int(match[1]) if match is not None else None


def rank_of_directory(name: str) -> int:
    """`"rank3_dp1"` -> 3; -1: it is none of a rank."""
    match = RANK_DIRECTORY.match(name)
    return int(match[1]) if match is not None else -1


def digits_in(name: str) -> int:
    """`"attempt10"` -> 10; 0 without a number."""
    match = re.search(r"\d+", name)
    return int(match[0]) if match is not None else 0


Progress = Callable[[str, int, int], None]  # what is done, how many of it, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What of a run is read, and how.

    Attributes:
        spans: a table of another tool, or a directory of such tables, that takes the place of the run's files.
        columns: its columns, theirs to ours.
        scheduler: of a Dask cluster that reduces the traces.
        ranks: only these.
        use: timers or traces; None: what tells of more ranks.
        output: where reduced traces go if they cannot lie beside the traces.
        progress: is told how far the reduction of traces has come.
    """

    spans: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    scheduler: str | None = None
    ranks: Sequence[int] | None = None
    use: Use | None = None
    output: Path | None = None
    progress: Progress | None = None


EVERYTHING = Choice()


@contextmanager
def open_spans(path: Path, choice: Choice = EVERYTHING) -> Iterator[LoadedSpans]:
    """The spans of a run, of a directory of traces, of a trace or of a table; the database is gone at the end.

    Raises:
        BrokenTrace: nothing in it can be read.
        MissingPackage: DuckDB or pyarrow is not installed.
        OSError: it is not there.
        WrongUse: a table is none of spans; ranks that are not there.
    """
    table = path if choice.spans is None and is_table(path) else choice.spans
    if table is None and choice.columns:
        raise WrongUse("--columns is of a table: name it by --spans FILE")
    with open_database() as database, tempfile.TemporaryDirectory(prefix="profiler_wrapper_ranks_") as folder:
        try:
            if table is not None:
                yield load_tables(database, table, choice.columns, choice.ranks)
            else:
                yield _load_run(database, path, choice, Path(folder))
        except import_duckdb().Error as error:
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
        opened = load_logs(database, logs, sources, folder)
    else:
        where = (choice.output or folder) / "reduced"
        told = None if choice.progress is None else partial(choice.progress, "reducing traces")
        opened = load_traces(database, traces, sources, where, scheduler=choice.scheduler, done=told)
    files, gaps, places, notes = opened
    there = (set(places) if uses == "traces" else _ranks_in(database)) if files else set()
    if not there:
        raise BrokenTrace(f"{path}: no spans of any rank in it{_why(gaps)}")
    _write_ranks(database, places)
    world_size = max((place.get("world_size") or 0 for place in places.values()), default=0) or None
    if choice.ranks is None:
        absent = absent_ranks(there, world_size, sources.ranks)
    else:
        absent = not_there(set(choice.ranks), there, path)
    failed = {gap.rank for gap in gaps if gap.rank is not None}
    absent = [gap for gap in absent if gap.rank is None or gap.rank not in failed]
    return LoadedSpans(
        database,
        run=sources.root.name or sources.root.resolve().name,
        root=sources.root,
        missing=(*sources.missing, *gaps, *absent),
        world_size=world_size,
        from_timers=uses == "timers",
        notes=(*notes, *_others(sources, uses)),
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


def _ranks_in(database: Database) -> set[int]:
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


def _others(sources: SpanSources, uses: Use) -> list[str]:
    if uses == "timers" and sources.traces:
        return [f"{len(sources.traces)} traces are there too, and are not in this report (--use traces)"]
    if uses == "traces" and sources.logs:
        return [f"logs of timers of {len(sources.logs)} ranks are there too, and are not in this report (--use timers)"]
    return []


def _write_ranks(database: Database, places: Mapping[int, Mapping[str, Any]]) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in RANK_COLUMNS.items())
    database.execute(f"CREATE OR REPLACE TABLE ranks ({columns})")
    rows = []
    for rank, place in sorted(places.items()):
        stage = place.get("stage", place.get("pp"))
        row = {**place, "rank": rank, "stage": stage if stage is not None else 0}
        rows.append([row.get(name) for name in RANK_COLUMNS])
    insert(database, "ranks", rows)


# --- what all of them use ---


# A table with these columns is one of ours.
OUR_COLUMNS: Final = ("rank", "step", "name", "kind", "start_ns", "duration_ns", "depth")


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


class Opened(NamedTuple):
    """What the files of a run's ranks gave; `spans` is in the database, unless there are no files."""

    files: list[Path]
    gaps: list[Gap]
    places: dict[int, Mapping[str, Any]]  # by rank, columns of RANK_COLUMNS as far as they are told
    notes: tuple[str, ...] = ()


def view_spans(database: Database, relation: str, *, ranks: Iterable[int] | None = None) -> tuple[int, int]:
    """Makes the view `spans` of a relation that has columns of ours: (rows, those left out since they are no spans)."""
    there = {name: quoted(name) for name in columns_of(database, relation) if name in SPAN_COLUMNS}
    select = span_select(relation, {**there, "depth": "coalesce(TRY_CAST(depth AS SMALLINT), 0)"})
    rows, bad = database.execute(
        f"SELECT count(*), count(*) FILTER (NOT coalesce({USABLE}, false)) FROM ({select})"
    ).fetchone()
    where = f" WHERE {USABLE} AND {among(ranks)}" if bad or ranks is not None else ""
    database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM ({select}){where}")
    return rows, bad


def among(ranks: Iterable[int] | None) -> str:
    """The condition that a row is of these ranks; None: of any."""
    if ranks is None:
        return "TRUE"
    parts = [f"rank BETWEEN {part[0]} AND {part[-1]}" for part in parts_of(ranks)]
    return f"({' OR '.join(parts) or 'FALSE'})"


def not_there(wanted: set[int], there: set[int], path: Path) -> list[Gap]:
    """Of the ranks that are asked for, those without spans.

    Raises:
        WrongUse: that is all of them.
    """
    if not wanted & there:
        raise WrongUse(f"{path}: no spans of ranks {ranges(wanted)}; there are those of {ranges(there) or 'none'}")
    return rank_gaps(wanted - there, "was asked for, and no spans of it are there")


# --- traces ---


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


# --- logs of timers ---


_LONGEST_HEADER_BYTES = 1 << 16


def load_logs(database: Database, logs: Sequence[TimerLog], sources: SpanSources, folder: Path) -> Opened:
    """JSON lines, made into Parquet once: they are asked many times."""
    problems = {log: why for log in logs if (why := _unreadable(log))}
    gaps = [Gap(f"spans of rank {log.rank}", f"{log.path}: {why}", log.rank) for log, why in problems.items()]
    files = [log.path for log in logs if log not in problems]
    if not files:
        return Opened([], gaps, {})
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, (kind, _) in SPAN_COLUMNS.items())
    target = folder / "timers.parquet"
    relation = (
        f"read_json({file_list(files)}, format = 'newline_delimited', ignore_errors = true, filename = 'log', "
        f"columns = {{{types}, 'header': 'JSON'}})"
    )
    rows = (
        "SELECT * EXCLUDE (header), header IS NOT NULL AS is_header, "
        f"TRY_CAST(header->>'lost_lines' AS BIGINT) AS lost_lines, header->>'ended_by' AS ended_by FROM {relation}"
    )
    database.execute(f"COPY ({rows}) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 122880)")
    table = f"read_parquet({literal(target)})"
    expressions = {name: quoted(name) for name in SPAN_COLUMNS} | {"depth": "coalesce(depth, 0)"}
    select = span_select(table, expressions, where=USABLE)
    database.execute(f"CREATE OR REPLACE VIEW spans AS {select}")
    if twice := _same_twice(database, table):
        gaps += [Gap(f"spans in {Path(log).name}", f"the same as in {other}: left out") for log, other in twice.items()]
        where = f"{USABLE} AND log NOT IN ({', '.join(map(literal, twice))})"
        select = span_select(table, expressions, where=where)
        database.execute(f"CREATE OR REPLACE VIEW spans AS {select}")
    notes = _cut(database, select)
    lines = database.execute(
        f"""SELECT log, count(*) FILTER (coalesce({USABLE}, false)), count(*) FILTER (NOT is_header), max(lost_lines),
            max(ended_by) FROM {table} GROUP BY log ORDER BY log"""
    ).fetchall()
    rank_of = {str(log.path): log.rank for log in logs}
    gaps += _unfinished(logs, {rank_of[name]: ended for name, *_, ended in lines if ended and name in rank_of})
    for name, good, told, lost, _ in lines:
        rank = rank_of.get(name)
        if not good:
            gaps.append(Gap(f"spans of rank {rank}", f"{name}: no line of it is a span", rank))
        elif told > good:
            count = "a line" if told == good + 1 else f"{told - good} lines"
            gaps.append(Gap(f"{count} of rank {rank}", f"{name}: torn, or no span", rank))
        if lost:
            gaps.append(Gap(f"{lost} spans of rank {rank}", f"{name}: its timer could not write them", rank))
    of_logs = {log.rank for log in logs}
    return Opened(files, gaps, {rank: place for rank, place in sources.ranks.items() if rank in of_logs}, notes)


def _unfinished(logs: Sequence[TimerLog], errors: Mapping[int, str]) -> list[Gap]:
    """Ranks whose program ended by an error, or did not end: their log is not closed."""
    reasons = {rank: f"its program ended by {error}" for rank, error in errors.items()}
    for log in logs:
        if _is_open(log.path):
            reasons.setdefault(log.rank, "its log is not closed: its process runs, or was killed")
    return [
        Gap(
            f"end of rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}", reason, ranks[0] if len(ranks) == 1 else None
        )
        for reason in sorted(set(reasons.values()))
        if (ranks := sorted(rank for rank, why in reasons.items() if why == reason))
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


def _cut(database: Database, select: str) -> tuple[str, ...]:
    """Steps, where no span tells one: how they were found."""
    if database.execute("SELECT 1 FROM spans WHERE step IS NOT NULL LIMIT 1").fetchone() is not None:
        return ()
    how = with_steps(database, select)
    return () if how is None else (how,)


def _same_twice(database: Database, table: str) -> dict[str, str]:
    """Logs whose spans another one has too, as a copy or a link: which other."""
    rows = database.execute(
        f"""SELECT log, [rank, count(*), min(start_ns), max(start_ns), sum(start_ns % 1000003), sum(duration_ns)]
        FROM {table} WHERE {USABLE} GROUP BY log, rank ORDER BY log, rank"""
    ).fetchall()
    told: dict[str, list[tuple[int, ...]]] = {}
    for log, sums in rows:
        told.setdefault(log, []).append(tuple(sums))
    first: dict[tuple[tuple[int, ...], ...], str] = {}
    found = {}
    for log, sums_of_ranks in told.items():
        other = first.setdefault(tuple(sums_of_ranks), log)
        if other != log:
            found[log] = Path(other).name
    return found


def _unreadable(log: TimerLog) -> str:
    """Why nothing can be read of it; empty if something can."""
    try:
        with log.path.open("rb") as lines:
            return "" if lines.read(1) else "is empty"
    except OSError as error:
        return error.strerror or str(error)


# --- steps of logs that tell none ---


_LONGEST = 80  # of a name, in what is told

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


def with_steps(database: Database, spans: str) -> str | None:
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
                SELECT *, sum((name = {literal(closing or "")})::INTEGER) OVER (
                    PARTITION BY rank ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS closed FROM mine)
            WHERE name = {literal(first)}),
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


def is_table(path: Path) -> bool:
    """Whether it is a table by its ending, and no log or trace of ours."""
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


def load_tables(database: Database, path: Path, columns: Mapping[str, str], ranks: Sequence[int] | None) -> LoadedSpans:
    """The spans of a table, or of a directory of tables.

    Raises:
        OSError: it is not there.
        WrongUse: it is none of spans, or has none of `ranks`.
    """
    files = _tables(path)
    where = f" WHERE {among(ranks)}"
    if not columns and (there := _columns_of_ours(database, files)):
        notes, has_clocks = _view_ours(database, files, path, ranks), True
        place = "any_value(TRY_CAST(stage AS INTEGER))" if "stage" in there else "0"
        of_ranks = (
            f"SELECT TRY_CAST(rank AS INTEGER) AS rank, coalesce({place}, 0) AS stage "
            f"FROM {relation_of(files)} WHERE TRY_CAST(rank AS INTEGER) >= 0 GROUP BY ALL"
        )
    else:
        foreign = read_foreign(database, files, mapping=columns)
        notes, has_clocks, of_ranks = foreign.notes, not foreign.laid_end_to_end, foreign.ranks
        database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM ({foreign.spans}){where}")
    database.execute(f"CREATE OR REPLACE TABLE ranks AS SELECT * FROM ({of_ranks}){where}")
    _complete_ranks(database)
    there_ranks = {row[0] for row in database.execute("SELECT rank FROM ranks").fetchall()}
    told = database.execute("SELECT max(world_size) FROM ranks").fetchone()[0]
    gaps = absent_ranks(there_ranks, told) if ranks is None else not_there(set(ranks), there_ranks, path)
    return LoadedSpans(
        database,
        run=path.name,
        root=path.parent,
        missing=tuple(gaps),
        world_size=told or len(there_ranks),
        notes=notes,
        has_clocks=has_clocks,
    )


def _view_ours(database: Database, files: Sequence[Path], path: Path, ranks: Sequence[int] | None) -> tuple[str, ...]:
    rows, bad = view_spans(database, relation_of(files), ranks=ranks)
    if rows == bad:
        raise WrongUse(f"{path}: {rows} rows, and none of them is a span")
    return (f"{bad} of {rows} rows left out: they are no spans",) if bad else ()


def _columns_of_ours(database: Database, files: Sequence[Path]) -> dict[str, str] | None:
    """The columns, if it is a Parquet table of ours."""
    if not files[0].name.endswith(".parquet"):
        return None
    try:
        there = columns_of(database, relation_of(files))
    except Exception:  # what is wrong with it is said where it is read as a foreign table
        return None
    return there if set(OUR_COLUMNS) <= set(there) else None


def _complete_ranks(database: Database) -> None:
    """All columns of the table, in order."""
    there = columns_of(database, "ranks")
    columns = ", ".join(
        f"CAST({quoted(name) if name in there else 'NULL'} AS {kind}) AS {name}"
        for name, (kind, _) in RANK_COLUMNS.items()
    )
    database.execute(f"CREATE OR REPLACE TABLE ranks AS SELECT {columns} FROM ranks")
