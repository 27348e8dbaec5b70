"""The database of the spans of many ranks: DuckDB, with a bound on its memory, and how it reads tables of spans."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.errors import WrongUse, imported, listed, shown
from profiler_wrapper.ranks.model import Int
from profiler_wrapper.trace.arrays import grouped
from profiler_wrapper.trace.spans import (
    KINDS,
    RANK_COLUMNS,
    SPAN_COLUMNS,
    Gap,
    absent_ranks,
    group_of_span,
    kind_of_span,
    parts_of,
    ranges,
    rank_gaps,
)

# By the packages' own names: that works from a clone, from a wheel and where nothing of ours is installed.
INSTALL = "pip install 'duckdb>=1.5' 'pyarrow>=20'"
MEMORY_BYTES = 400 << 20  # of the database; what does not fit goes to disk
_THREAD_BYTES = 128 << 20  # what each of its threads needs at least, by DuckDB's guide to memory

# What a row must say to be a span: times whose sums are numbers too, so between 1824 and 2116, and at most 104 days.
USABLE = (
    "rank >= 0 AND name IS NOT NULL AND kind IS NOT NULL "
    f"AND start_ns BETWEEN {-(2**62)} AND {2**62} AND duration_ns BETWEEN 0 AND {2**53}"
)

Database = Any  # duckdb.DuckDBPyConnection, which is imported when it is needed


@dataclass(frozen=True, slots=True)
class LoadedSpans:
    """A database with the tables (or views) `spans` and `ranks`, and what is to be said of them."""

    database: Database
    run: str
    root: Path
    missing: tuple[Gap, ...]
    world_size: int | None = None
    from_timers: bool = False
    notes: tuple[str, ...] = ()
    has_clocks: bool = True  # False: starts say nothing of when other ranks started


@contextmanager
def open_database(*, memory_bytes: int = MEMORY_BYTES, threads: int | None = None) -> Iterator[Database]:
    """An empty database in memory, which spills to a directory of its own; both are gone at the end."""
    duckdb = import_duckdb()
    with tempfile.TemporaryDirectory(prefix="profiler_wrapper_spill_", ignore_cleanup_errors=True) as spill:
        settings: dict[str, Any] = {
            "memory_limit": f"{memory_bytes >> 20}MiB",
            "temp_directory": spill,
            "threads": threads or min(available_cores(), max(1, memory_bytes // _THREAD_BYTES)),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,  # nothing is fetched from a network
        }
        if int(duckdb.__version__.split(".")[0]) >= 2:  # else 8 more threads, whose stacks and heaps are 600 MB
            settings["async_threads"] = 1
        with duckdb.connect(":memory:", config=settings) as database:
            yield database


def import_duckdb() -> Any:
    """The module; raises MissingPackage where it is not installed."""
    return imported("duckdb", f"reports on many ranks need DuckDB: {INSTALL}")


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- SQL ---


def quoted(name: str) -> str:
    """A name as SQL has it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str | os.PathLike[str]) -> str:
    """A text as SQL has it."""
    return "'" + os.fspath(value).replace("'", "''") + "'"


def read(reader: str, files: Iterable[Path], *options: str) -> str:
    """Files as a relation of DuckDB's, with the columns that they have: a folder `rank=7` would replace one else."""
    listed = ", ".join(literal(re.sub(r"[*?[]", r"[\g<0>]", os.fspath(path))) for path in files)  # no patterns
    return f"{reader}({', '.join([f'[{listed}]', 'hive_partitioning = false', *options])})"


def span_select(relation: str, expressions: Mapping[str, str]) -> str:
    """A SELECT with all columns of a span table, in order and of their types; NULL where no expression makes one."""
    columns = ", ".join(
        f"TRY_CAST({expressions.get(name, 'NULL')} AS {kind}) AS {quoted(name)}"
        for name, (kind, _) in SPAN_COLUMNS.items()
    )
    return f"SELECT {columns} FROM {relation}"


def insert(database: Database, table: str, rows: Iterable[Sequence[Any]]) -> None:
    """Rows into a table, all at once: one by one takes a millisecond each."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    if not columns:
        return
    kinds = [row[1] for row in database.execute(f"DESCRIBE {quoted(table)}").fetchall()]
    values = ", ".join(f"unnest(?::{kind}[])" for kind in kinds)
    database.execute(f"INSERT INTO {quoted(table)} SELECT {values}", columns)


def columns_of(database: Database, relation: str) -> dict[str, str]:
    """Name and type of each column of a relation."""
    return {row[0]: row[1] for row in database.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()}


# --- answers as arrays ---


Arrays = Mapping[str, npt.NDArray[Any]]


def to_arrays(database: Database, sql: str) -> Arrays:
    """The columns of an answer."""
    found: Arrays = database.execute(sql).fetchnumpy()
    return found


def to_rows(database: Database, sql: str) -> list[dict[str, Any]]:
    """The rows of an answer, by the names of its columns."""
    answer = database.execute(sql)
    names = [name for name, *_ in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def column(database: Database, sql: str) -> Int:
    """The first column of an answer."""
    return np.asarray(next(iter(to_arrays(database, sql).values())), dtype=np.int64)


# --- Tables of spans: ours as they are, and those of other tools, whose columns are found by their names ---

_READERS: Final = {
    ".parquet": ("read_parquet",),
    ".pq": ("read_parquet",),
    ".csv": ("read_csv", "all_varchar = true"),
    ".tsv": ("read_csv", "all_varchar = true"),
    ".jsonl": ("read_json", "format = 'newline_delimited'", "ignore_errors = true"),
    ".ndjson": ("read_json", "format = 'newline_delimited'", "ignore_errors = true"),
    ".json": ("read_json",),
}
# A table with these columns is one of ours.
OUR_COLUMNS: Final = ("rank", "step", "name", "kind", "start_ns", "duration_ns", "depth")

_UNITS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}  # in nanoseconds
_TIMES: Final = ("start", "duration", "end", "device", "waiting")
_COLUMNS: Final = {
    name: kind for name, (kind, _) in {**SPAN_COLUMNS, **RANK_COLUMNS}.items() if not name.endswith("_ns")
}
# What a column may be named by `--columns`: which of ours it is, and its unit.
_OURS: Final = {name: (name, 1) for name in _COLUMNS} | {
    f"{time}_{unit}": (time, ns) for time in _TIMES for unit, ns in _UNITS.items()
}
# Other names of these, of which the first that a table has counts.
_ALIASES: Final = {
    "start_s": "start_ts",
    "start_us": "ts",
    "duration_s": "duration",
    "duration_us": "dur",
    "end_s": "end_ts",
    "rank": "global_rank",
    "step": "iteration iter",
    "name": "optype op_type op",
    "thread": "tid",
    "microbatch": "micro_batch mb_id",
    "chunk": "mc",
    "sequence": "seq_id",
    "group": "group_name",
    "stage": "pipeline_stage pp_rank pp",
    "dp": "dp_rank",
    "tp": "tp_rank",
    "cp": "cp_rank",
    "ep": "ep_rank",
    "pp": "pp_rank stage",
    "host": "hostname",
}
# (name of a column, which of ours it is), those that count first at the front.
_NAMES: Final = (
    *zip(_OURS, _OURS, strict=True),
    *((name, ours) for ours, names in _ALIASES.items() for name in names.split()),
)
_COMMUNICATES: Final = "n.kind = 'communication'"


class Column(NamedTuple):
    """A column of theirs that says what one of ours does; a time in units of `unit_ns`."""

    theirs: str
    unit_ns: int = 1


def parse_mapping(texts: Iterable[str]) -> dict[str, str]:
    """`["took=duration_ms,worker=rank"]` -> `{"took": "duration_ms", "worker": "rank"}`.

    Raises:
        WrongUse: a part is no `theirs=ours`, or ours is none.
    """
    found: dict[str, str] = {}
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        theirs, _, ours = (piece.strip() for piece in part.partition("="))
        if not (theirs and ours):
            raise WrongUse(f"--columns {part}: say THEIRS=OURS, as in took=duration_ms,worker=rank")
        if ours not in _OURS:
            times = ", ".join(f"{time}_ns|us|ms|s" for time in _TIMES)
            raise WrongUse(f"--columns: no column {shown(ours)} of ours. There are {', '.join(_COLUMNS)}; {times}")
        found[theirs] = ours
    return found


def find_columns(there: Iterable[str], mapping: Mapping[str, str], *, table: str) -> dict[str, Column]:
    """Which column of a table is which of ours, by `mapping`, else by names; times as `start`, `duration` or `end`.

    Raises:
        WrongUse: a column that is needed is not there, or one of `mapping` is not.
    """
    there = list(there)
    of_name = {name.lower(): name for name in reversed(there)} | {name: name for name in there}
    if unknown := [theirs for theirs in mapping if theirs not in of_name]:
        raise WrongUse(f"{table}: no column {shown(unknown[0])}, which --columns names. There are: {listed(there)}")
    found: dict[str, Column] = {}
    by_name = ((name, ours) for name, ours in _NAMES if name in of_name and name not in mapping)
    for theirs, ours in (*list(mapping.items())[::-1], *by_name):  # the last one named counts
        target, unit_ns = _OURS[ours]
        found.setdefault(target, Column(of_name[theirs], unit_ns))
    needed = (("rank",), ("step",), ("start",), ("name", "kind"), ("duration", "end"))
    lacking = [names[0] for names in needed if not found.keys() & set(names)]
    if lacking:
        raise WrongUse(
            f"{table}: cannot be read as a table of spans: no column for {', '.join(lacking)}. "
            f"It has: {listed(there) or 'no columns'}. Needed are rank, name (or kind), start and duration (or "
            "end), and step: name them by --columns THEIRS=OURS, as in --columns took=duration_ms,worker=rank"
        )
    return found


def read_table(
    database: Database, path: Path, columns: Mapping[str, str], ranks: Sequence[int] | None = None
) -> LoadedSpans:
    """The spans of a table, or of a directory of tables of one kind: Parquet, CSV or JSON lines.

    A table without groups gets them by what names of collectives mean in Megatron, one without depths by who encloses
    whom.

    Raises:
        OSError: it is not there.
        WrongUse: it is no table of spans, or has none of `ranks`; the message says what it has and what is needed.
    """
    files = _tables_in(path)
    reader, *options = _READERS[_ending(files[0])]
    relation = read(reader, files, "union_by_name = true", *options)
    begins_anew, problem = False, "cannot be read as a table"
    try:
        there = columns_of(database, relation)
        # Without threads nothing tells what runs beside what, as in tables of others.
        if not columns and {*OUR_COLUMNS, "thread"} <= set(there) and reader == "read_parquet":
            rows, bad = view_spans(database, relation, ranks=ranks)
            places = _places(database, relation, there, ranks)
        else:
            found = find_columns(there, columns, table=str(path))
            problem = "is no table of spans"
            rows, bad = _read_rows(database, relation, found, has_headers="header" in there)
            begins_anew = _lay_end_to_end(database)
            _make_spans(database, found, ranks)
            places = _places(database, "foreign_rows", RANK_COLUMNS, ranks)
            database.execute("DROP TABLE foreign_rows")
    except import_duckdb().Error as error:
        first_line = str(error).strip().split("\n")[0]
        raise WrongUse(f"{path}: {problem}: {first_line}") from error
    if rows == bad:
        raise WrongUse(f"{path}: {rows} rows, and none has a rank, a step, a name, a start and a duration")
    several = sum(place.get("stages", 1) > 1 for place in places)
    notes = (
        (bad, f"{bad} of {rows} rows left out: they lack a rank, step, name, start or a duration of 0 on"),
        (begins_anew, "starts begin anew in each step: steps are laid end to end, what was between them is not known"),
        (several, f"{several} ranks are said to be in several stages: each is taken to be in its first"),
    )
    write_ranks(database, places)
    known = {place["rank"] for place in places}
    world_size = max((place.get("world_size") or 0 for place in places), default=0)
    gaps = absent_ranks(known, world_size) if ranks is None else ranks_not_there(set(ranks), known, path)
    return LoadedSpans(
        database,
        run=path.name,
        root=path.parent,
        missing=tuple(gaps),
        world_size=world_size or len(known),
        notes=tuple(note for occurs, note in notes if occurs),
        has_clocks=not begins_anew,
    )


def _places(
    database: Database, relation: str, there: Iterable[str], ranks: Iterable[int] | None
) -> list[dict[str, Any]]:
    """What rows say of each rank, by columns of RANK_COLUMNS; of several stages the first, and how many."""
    about = {name: f"TRY_CAST({name} AS {kind})" for name, (kind, _) in RANK_COLUMNS.items() if name in there}
    rank = about.pop("rank")
    columns = [f"any_value({value}) AS {name}" for name, value in about.items() if name != "stage"]
    if stage := about.get("stage"):
        columns += [f"min({stage}) AS stage", f"count(DISTINCT {stage}) AS stages"]
    select = ", ".join([f"{rank} AS rank", *columns])
    found = f"SELECT {select} FROM {relation} WHERE {rank} >= 0 GROUP BY {rank} ORDER BY rank"
    return to_rows(database, f"SELECT * FROM ({found}) WHERE {of_ranks(ranks)}")


def is_table(path: Path) -> bool:
    """Whether it is a table by its ending, and no log or trace of ours: a timer's log begins with a header."""
    if not path.is_file() or _ending(path) not in _READERS or _ending(path) == ".json":
        return False
    if _ending(path) != ".jsonl":
        return True
    try:
        with path.open("rb") as lines:
            first = lines.readline(1 << 16).strip()
    except OSError:
        return False
    return not path.name.startswith("timer_rank") and first.startswith(b"{") and not first.startswith(b'{"header"')


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _tables_in(path: Path) -> list[Path]:
    """The file, or those of a directory that have one ending."""
    path.stat()  # raises where there is none
    inside = (one for one in sorted(path.rglob("*")) if one.is_file() and one.name[0] != ".")
    files = grouped((_ending(file), file) for file in ([path] if path.is_file() else inside))
    chosen = next((files[ending] for ending in _READERS if ending in files), None)
    if chosen is None:
        raise WrongUse(f"{path}: a table of spans ends in {', '.join(_READERS)}, and this does not")
    return chosen


def view_spans(database: Database, relation: str, *, ranks: Iterable[int] | None = None) -> tuple[int, int]:
    """Makes the view `spans` of a relation that has columns of ours: (rows, those left out since they are no spans)."""
    there = {name: quoted(name) for name in columns_of(database, relation) if name in SPAN_COLUMNS}
    select = span_select(relation, {**there, "depth": "coalesce(TRY_CAST(depth AS SMALLINT), 0)"})
    count = f"SELECT count(*), count(*) FILTER (NOT coalesce({USABLE}, false)) FROM ({select})"
    rows, bad = database.execute(count).fetchone()
    where = f" WHERE {USABLE} AND {of_ranks(ranks)}" if bad or ranks is not None else ""
    database.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM ({select}){where}")
    return rows, bad


def of_ranks(ranks: Iterable[int] | None) -> str:
    """The condition that a row is of these ranks; None: of any."""
    if ranks is None:
        return "TRUE"
    parts = [f"rank BETWEEN {part[0]} AND {part[-1]}" for part in parts_of(ranks)]
    return f"({' OR '.join(parts) or 'FALSE'})"


def ranks_not_there(wanted: set[int], there: set[int], path: Path) -> list[Gap]:
    """Of the ranks that are asked for, those without spans.

    Raises:
        WrongUse: that is all of them.
    """
    if not wanted & there:
        raise WrongUse(f"{path}: no spans of ranks {ranges(wanted)}; there are those of {ranges(there) or 'none'}")
    return rank_gaps(wanted - there, "was asked for, and no spans of it are there")


def write_ranks(database: Database, places: Iterable[Mapping[str, Any]]) -> None:
    """The table `ranks`."""
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in RANK_COLUMNS.items())
    database.execute(f"CREATE OR REPLACE TABLE ranks ({columns})")
    rows = ({**place, "stage": place.get("stage", place.get("pp")) or 0} for place in places)
    insert(database, "ranks", [[row.get(name) for name in RANK_COLUMNS] for row in rows])


# --- rows of other tools ---


def _read_rows(database: Database, relation: str, found: Mapping[str, Column], *, has_headers: bool) -> tuple[int, int]:
    """Make the table `foreign_rows`, with our names and units; return the counts of all rows and of dropped ones."""

    def value(name: str, kind: str = "BIGINT") -> str:
        if name not in found:
            return "NULL"
        theirs, unit_ns = quoted(found[name].theirs), found[name].unit_ns
        if unit_ns != 1:
            return f"TRY_CAST(round(TRY_CAST({theirs} AS DOUBLE) * {unit_ns}) AS BIGINT)"
        of_kind = f"TRY_CAST({theirs} AS {kind})"
        return f"CASE WHEN {of_kind} >= 0 THEN {of_kind} END" if kind == "INTEGER" else of_kind  # -1: has none

    columns = {name: value(name, kind) for name, kind in _COLUMNS.items()} | {
        "name": value("name" if "name" in found else "kind", "VARCHAR"),
        "start_ns": value("start"),
        "duration_ns": value("duration") if "duration" in found else f"({value('end')} - {value('start')})",
        "device_ns": value("device"),
        "waiting_ns": value("waiting"),
    }
    select = ", ".join(f"{expression} AS {quoted(name)}" for name, expression in columns.items())
    # A cast of a file's texts would be made while it is read, which fails at the first one that is no number.
    how = "MATERIALIZED" if relation.startswith("read_csv(") else "NOT MATERIALIZED"
    # Lines of a timer's log that are no spans have this one column.
    where = f"WHERE header IS NULL OR {quoted(found['rank'].theirs)} IS NOT NULL" if has_headers else ""
    database.execute(
        f"CREATE OR REPLACE TABLE foreign_rows AS WITH theirs AS {how} (SELECT * FROM {relation} {where}) "
        f"SELECT {select} FROM theirs"
    )
    usable = f"coalesce(step IS NOT NULL AND {USABLE.replace('kind', 'name')}, false)"
    count = f"SELECT count(*), count(*) FILTER (NOT {usable}) FROM foreign_rows"
    total, bad = database.execute(count).fetchone()
    database.execute(f"DELETE FROM foreign_rows WHERE NOT {usable}")
    return total, bad


def _lay_end_to_end(database: Database) -> bool:
    """Add to starts that begin anew in each step the length of the steps before; return whether they do.

    They do where most steps begin before the step before them is half done, which no job does. Steps of one rank are
    compared with one another: clocks of two may be hours apart.
    """
    anew, pairs = database.execute(
        """SELECT count(*) FILTER (begin_ns < before_begin + (before_end - before_begin) / 2), count(before_begin)
        FROM (SELECT begin_ns, lag(begin_ns) OVER steps AS before_begin, lag(end_ns) OVER steps AS before_end
            FROM (SELECT rank, step, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns
                FROM foreign_rows GROUP BY rank, step)
            WINDOW steps AS (PARTITION BY rank ORDER BY step))"""
    ).fetchone()
    if not pairs or anew < pairs / 2:
        return False
    database.execute(
        """UPDATE foreign_rows SET start_ns = start_ns + offset_ns FROM (
            SELECT step, CAST(coalesce(sum(length_ns) OVER (
                ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS BIGINT) AS offset_ns
            FROM (SELECT step, max(start_ns + duration_ns) - min(start_ns) AS length_ns FROM foreign_rows GROUP BY step)
        ) steps WHERE steps.step = foreign_rows.step"""
    )
    return True


def _make_spans(database: Database, found: Mapping[str, Column], ranks: Iterable[int] | None) -> None:
    """Make the table `spans` of the rows of these ranks, with what their names tell where columns do not."""
    (stages,) = database.execute("SELECT coalesce(max(stage), 0) + 1 FROM foreign_rows").fetchone()
    names = database.execute("SELECT DISTINCT name, kind, rank, dp, stage, tp FROM foreign_rows").fetchall()
    database.execute(
        "CREATE OR REPLACE TABLE foreign_names (name VARCHAR, theirs VARCHAR, rank INTEGER, dp INTEGER, "
        'stage INTEGER, tp INTEGER, kind VARCHAR, "group" VARCHAR)'
    )
    named = (
        (name, kind, *place, kind if kind in KINDS else kind_of_span(name), group_of_span(name, *place, stages=stages))
        for name, kind, *place in names
    )
    insert(database, "foreign_names", named)
    group = """coalesce(nullif(f."group", ''), n."group")"""
    ours = {name: f"f.{quoted(name)}" for name in SPAN_COLUMNS if name != "overlapped_ns"}
    made = {
        "sequence": f"row_number() OVER (PARTITION BY f.rank, f.step, f.name, {group} ORDER BY f.start_ns) - 1",
        "depth": _DEPTH,
        # Nothing tells whether communication runs beside the rest: what it hides behind is not its time. Nor does
        # anything tell in which order that of different names runs.
        "thread": f"CASE WHEN {_COMMUNICATES} THEN 1 + (hash(n.name) % 1000000)::BIGINT ELSE 0 END",
    }
    expressions = {**ours, **{name: how for name, how in made.items() if name not in found}}
    expressions |= {"kind": "n.kind", "group": f"CASE WHEN {_COMMUNICATES} THEN {group} END"}
    same_place = " AND ".join(f"n.{name} IS NOT DISTINCT FROM f.{name}" for name in ("rank", "dp", "stage", "tp"))
    relation = "foreign_rows f JOIN foreign_names n ON n.name = f.name AND n.theirs IS NOT DISTINCT FROM f.kind"
    select = span_select(f"{relation} AND {same_place}", expressions)
    database.execute(f"CREATE OR REPLACE TABLE spans AS SELECT * FROM ({select}) WHERE {of_ranks(ranks)}")


# 1 for what lies within a longer span of its rank and thread, else 0; what communicates lies in nothing.
_DEPTH: Final = f"""CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} AND f.duration_ns > 0 AND
    max(CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} THEN f.start_ns + f.duration_ns END) OVER (
        PARTITION BY f.rank, f.step, f.thread ORDER BY f.start_ns, f.duration_ns DESC
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) >= f.start_ns + f.duration_ns THEN 1 ELSE 0 END"""
