"""The database of the spans of many ranks: DuckDB, with a bound on its memory, and how it reads tables of spans."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.errors import MissingPackage, WrongUse
from profiler_wrapper.trace.spans import (
    ALL,
    EMBEDDING,
    KINDS,
    OWN,
    PAIR,
    RANK_COLUMNS,
    SPAN_COLUMNS,
    Gap,
    group_of_span,
    kind_of_span,
    receives,
    sends_forward,
)

# By the packages' own names: that works from a clone, from a wheel and where nothing of ours is installed.
INSTALL = "pip install 'duckdb>=1.5' 'pyarrow>=20'"
MEMORY_BYTES = 400 << 20  # of the database; what does not fit goes to disk

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
    spill = tempfile.mkdtemp(prefix="profiler_wrapper_spill_")
    try:
        settings: dict[str, Any] = {
            "memory_limit": f"{memory_bytes >> 20}MiB",
            "temp_directory": spill,
            "threads": threads or available_cores(),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,  # nothing is fetched from a network
        }
        if int(duckdb.__version__.split(".")[0]) >= 2:  # else 8 more threads, whose stacks and heaps are 600 MB
            settings["async_threads"] = 1
        with duckdb.connect(":memory:", config=settings) as database:
            yield database
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def import_duckdb() -> Any:
    """The module; raises MissingPackage where it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise MissingPackage(f"reports on many ranks need DuckDB: {INSTALL}") from error
    return duckdb


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # no Linux
        return os.cpu_count() or 1


# --- SQL ---


def quoted(name: str) -> str:
    """A name as SQL has it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str | os.PathLike[str]) -> str:
    """A text as SQL has it."""
    return "'" + os.fspath(value).replace("'", "''") + "'"


def file_list(paths: Iterable[Path]) -> str:
    """Files as SQL has them; a name is never taken for a pattern."""
    return "[" + ", ".join(literal(_plain(path)) for path in paths) + "]"


def _plain(path: Path) -> str:
    """A path in which `*`, `?` and `[` stand for themselves."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in os.fspath(path))


def span_select(relation: str, expressions: Mapping[str, str], *, where: str = "") -> str:
    """A SELECT with all columns of a span table, in order and of their types; NULL where no expression makes one."""
    columns = ", ".join(
        f"TRY_CAST({expressions.get(name, 'NULL')} AS {kind}) AS {quoted(name)}"
        for name, (kind, _) in SPAN_COLUMNS.items()
    )
    return f"SELECT {columns} FROM {relation}" + (f" WHERE {where}" if where else "")


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
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


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


def has_table(database: Database, table: str) -> bool:
    """Whether there is such a table."""
    found = database.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = ?", [table]).fetchone()
    return bool(found[0])


class Grid:
    """Places of (step, rank) pairs in arrays (S, R)."""

    def __init__(self, ranks: Int, steps: Int) -> None:
        self.ranks, self.steps = ranks, steps

    def places(self, found: Arrays) -> tuple[Int, Int]:
        """(step's place, rank's place) per row."""
        return np.searchsorted(self.steps, found["step"]), np.searchsorted(self.ranks, found["rank"])

    def filled(self, found: Arrays, name: str) -> Float:
        """One column as (S, R); nan where there is no row."""
        values = np.full((len(self.steps), len(self.ranks)), np.nan)
        values[self.places(found)] = found[name]
        return values


# --------------------------------------------------------------------------------------------------
# Tables of other tools: which of their columns is which of ours, and their rows in a table of ours.

_CSV = "read_csv({files}, union_by_name = true, all_varchar = true)"
_LINES = "read_json({files}, format = 'newline_delimited', ignore_errors = true, union_by_name = true)"
_READERS: Final = {
    ".parquet": "read_parquet({files}, union_by_name = true)",
    ".pq": "read_parquet({files}, union_by_name = true)",
    ".csv": _CSV,
    ".tsv": _CSV,
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".json": "read_json({files}, union_by_name = true)",
}
TABLE_ENDINGS: Final = tuple(_READERS)

_UNITS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}  # in nanoseconds
_TIMES: Final = ("start", "duration", "end", "device", "waiting")
_TIME: Final = re.compile(rf"({'|'.join(_TIMES)})_({'|'.join(_UNITS)})")
_UNIT: Final = re.compile(r"_(ns|us|ms|s)$")
# Other names of our columns; of several the first that a table has.
_ALIASES: Final = {
    "rank": ("global_rank",),
    "step": ("iteration", "iter"),
    "name": ("optype", "op_type", "op"),
    "thread": ("tid",),
    "microbatch": ("micro_batch", "mb_id"),
    "chunk": ("mc",),
    "sequence": ("seq_id",),
    "group": ("group_name",),
    "stage": ("pipeline_stage", "pp_rank", "pp"),
    "dp": ("dp_rank",),
    "tp": ("tp_rank",),
    "cp": ("cp_rank",),
    "ep": ("ep_rank",),
    "pp": ("pp_rank", "stage"),
    "host": ("hostname",),
}
_TIME_ALIASES: Final = {  # with their unit, beside `start_ms` and the like
    "start": {"start_ts": "s", "ts": "us"},
    "duration": {"duration": "s", "dur": "us"},
    "end": {"end_ts": "s"},
}
_COLUMNS: Final = tuple(name for name in {**SPAN_COLUMNS, **RANK_COLUMNS} if not name.endswith("_ns"))
# Of each column of ours the names that it may have, with their unit.
_NAMES: Final = {name: dict.fromkeys((name, *_ALIASES.get(name, ())), "ns") for name in _COLUMNS} | {
    time: {f"{time}_{unit}": unit for unit in _UNITS} | _TIME_ALIASES.get(time, {}) for time in _TIMES
}
_COMMUNICATES: Final = "n.kind = 'communication'"


# --- columns ---


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
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not part:
            continue
        theirs, _, ours = (piece.strip() for piece in part.partition("="))
        if not (theirs and ours):
            raise WrongUse(f"--columns {part}: say THEIRS=OURS, as in took=duration_ms,worker=rank")
        if not _TIME.fullmatch(ours) and ours not in (*_COLUMNS, *_TIMES):
            times = ", ".join(f"{time}_ns|us|ms|s" for time in _TIMES)
            raise WrongUse(f"--columns: no column {ours!r} of ours. There are {', '.join(_COLUMNS)}; {times}")
        found[theirs] = ours
    return found


def find_columns(there: Iterable[str], mapping: Mapping[str, str], *, table: str) -> dict[str, Column]:
    """Which column of a table is which of ours, by `mapping`, else by names; times as `start`, `duration` or `end`.

    Raises:
        WrongUse: a column that is needed is not there, or one of `mapping` is not, or a time lacks its unit.
    """
    there = list(there)
    of_name = {name.lower(): name for name in reversed(there)} | {name: name for name in there}
    found: dict[str, Column] = {}
    for theirs, ours in mapping.items():
        name = of_name.get(theirs, of_name.get(theirs.lower()))
        if name is None:
            raise WrongUse(f"{table}: no column {theirs!r}, which --columns names. There are: {', '.join(there)}")
        time = _TIME.fullmatch(ours)
        target, unit = (time[1], time[2]) if time else (ours, None)
        if target in _TIMES and unit is None:
            suffix = _UNIT.search(name.lower())
            unit = suffix[1] if suffix else _TIME_ALIASES.get(target, {}).get(name.lower())
            if unit is None:
                raise WrongUse(f"--columns {theirs}={ours}: say the unit, as in {theirs}={target}_ms (ns, us, ms, s)")
        found[target] = Column(name, _UNITS[unit or "ns"])
    for target, names in _NAMES.items():
        theirs_and_unit = ((of_name[name], unit) for name, unit in names.items() if name in of_name)
        chosen = next(((name, unit) for name, unit in theirs_and_unit if name not in mapping), None)
        if target not in found and chosen is not None:
            found[target] = Column(chosen[0], _UNITS[chosen[1]])
    lacking = [name for name in ("rank", "step", "start") if name not in found]
    lacking += ["name"] if not {"name", "kind"} & found.keys() else []
    lacking += ["duration"] if not {"duration", "end"} & found.keys() else []
    if lacking:
        raise WrongUse(
            f"{table}: cannot be read as a table of spans: no column for {', '.join(lacking)}. "
            f"It has: {', '.join(there) or 'no columns'}. Needed are rank, name (or kind), start and duration (or "
            "end), and step: name them by --columns THEIRS=OURS, as in --columns took=duration_ms,worker=rank"
        )
    return found


# --- rows ---


def relation_of(paths: Sequence[Path]) -> str:
    """The files as SQL reads them.

    Raises:
        WrongUse: they have the ending of no table.
    """
    ending = Path(paths[0].name.removesuffix(".gz")).suffix.lower()
    if ending not in _READERS:
        raise WrongUse(f"{paths[0]}: a table of spans ends in {', '.join(TABLE_ENDINGS)}, and this does not")
    return _READERS[ending].format(files=file_list(paths))


def read_foreign(
    database: Database, paths: Sequence[Path], *, mapping: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], bool]:
    """Reads tables of spans, Parquet, CSV or JSON lines, all of one kind, into `foreign_spans` and `foreign_ranks`.

    Returns what is to be said of them, and whether starts began anew in each step, so that clocks cannot be compared:
    these steps are laid end to end. A table without groups gets them by what names of
    collectives mean in Megatron, one without depths by who encloses whom.

    Raises:
        WrongUse: it is no table of spans; the message says what it has and what is needed.
    """
    table = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} tables)"
    relation = relation_of(paths)
    problem = "cannot be read as a table"
    try:
        there = columns_of(database, relation)
        found = find_columns(there, mapping or {}, table=table)
        problem = "is no table of spans"
        if relation.startswith("read_csv("):
            # A cast of a file's texts would be made while it is read, which fails at the first one that is no number.
            database.execute(f"CREATE OR REPLACE TEMP TABLE foreign_texts AS SELECT * FROM {relation}")
            relation = "foreign_texts"
        notes = _read_rows(database, relation, found, table, has_headers="header" in there)
        _name_kinds(database)
        laid = _lay_end_to_end(database)
        _make_spans(database, found)
        several = _one(
            database,
            "SELECT count(*) FROM (SELECT rank FROM foreign_rows GROUP BY rank HAVING count(DISTINCT stage) > 1)",
        )[0]
        database.execute(f"CREATE OR REPLACE TABLE foreign_ranks AS {_RANKS}")
        database.execute("DROP TABLE foreign_rows")
        database.execute("DROP TABLE IF EXISTS foreign_texts")
    except import_duckdb().Error as error:
        first_line = str(error).strip().split("\n")[0]
        raise WrongUse(f"{table}: {problem}: {first_line}") from error
    if laid:
        notes.append("starts begin anew in each step: steps are laid end to end, what was between them is not known")
    if several:
        notes.append(f"{several} ranks are said to be in several stages: each is taken to be in its first")
    return tuple(notes), laid


_RANKS: Final = (
    "SELECT CAST(rank AS INTEGER) AS rank, CAST(coalesce(min(stage), 0) AS INTEGER) AS stage, "
    + ", ".join(f"any_value({name}) AS {name}" for name in RANK_COLUMNS if name not in ("rank", "stage"))
    + " FROM foreign_rows GROUP BY rank ORDER BY rank"
)


def _read_rows(
    database: Database, relation: str, found: Mapping[str, Column], table: str, *, has_headers: bool
) -> list[str]:
    """Its rows with our names and units; those that say too little are counted and left out."""

    def plain(name: str) -> str:
        return quoted(found[name].theirs) if name in found else "NULL"

    def time(name: str) -> str:
        if name not in found or found[name].unit_ns == 1:
            return f"TRY_CAST({plain(name)} AS BIGINT)"
        return f"TRY_CAST(round(TRY_CAST({plain(name)} AS DOUBLE) * {found[name].unit_ns}) AS BIGINT)"

    columns = {
        "rank": f"TRY_CAST({plain('rank')} AS BIGINT)",
        "step": f"TRY_CAST({plain('step')} AS BIGINT)",
        "name": f"CAST({plain('name' if 'name' in found else 'kind')} AS VARCHAR)",
        "start_ns": time("start") if "start" in found else f"({time('end')} - {time('duration')})",
        "duration_ns": time("duration") if "duration" in found else f"({time('end')} - {time('start')})",
        "device_ns": time("device"),
        "waiting_ns": time("waiting"),
    }
    for name in ("kind", "layer", "parent", "group", "host"):
        columns[name] = f"CAST({plain(name)} AS VARCHAR)"
    for name in ("depth", "thread", "bytes"):
        columns[name] = f"TRY_CAST({plain(name)} AS BIGINT)"
    for name in (name for name in _COLUMNS if name not in columns):  # numbers; -1: has none
        columns[name] = f"CASE WHEN TRY_CAST({plain(name)} AS INTEGER) >= 0 THEN TRY_CAST({plain(name)} AS INTEGER) END"
    select = ", ".join(f"{expression} AS {quoted(name)}" for name, expression in columns.items())
    # Lines of a timer's log that are no spans have this one column.
    where = f" WHERE header IS NULL OR {plain('rank')} IS NOT NULL" if has_headers else ""
    database.execute(f"CREATE OR REPLACE TABLE foreign_rows AS SELECT {select} FROM {relation}{where}")
    usable = f"coalesce(step IS NOT NULL AND {USABLE.replace('kind', 'name')} AND rank <= {2**31 - 1}, false)"
    total, bad = _one(database, f"SELECT count(*), count(*) FILTER (NOT {usable}) FROM foreign_rows")
    if total == bad:
        raise WrongUse(f"{table}: {total} rows, and none has a rank, a step, a name, a start and a duration")
    database.execute(f"DELETE FROM foreign_rows WHERE NOT {usable}")
    return [f"{bad} of {total} rows left out: they lack a rank, step, name, start or a duration of 0 on"] if bad else []


def _name_kinds(database: Database) -> None:
    """What kind each name is of: as the table says, where it says one of ours, else as the name tells."""
    rows = database.execute("SELECT name, any_value(kind) FROM foreign_rows GROUP BY name").fetchall()
    database.execute(
        "CREATE OR REPLACE TABLE foreign_names "
        "(name VARCHAR, kind VARCHAR, of VARCHAR, forward BOOLEAN, receives BOOLEAN)"
    )
    named = (
        (name, kind if kind in KINDS else kind_of_span(name), group_of_span(name), sends_forward(name), receives(name))
        for name, kind in rows
    )
    insert(database, "foreign_names", named)


def steps_begin_anew(database: Database, table: str) -> bool:
    """Whether most steps of spans begin before the step before them is half done, which no job does.

    Steps of one rank are compared with one another: clocks of two may be hours apart.
    """
    anew, pairs = _one(
        database,
        f"""SELECT count(*) FILTER (begin_ns < before_begin + (before_end - before_begin) / 2), count(before_begin)
        FROM (SELECT begin_ns, lag(begin_ns) OVER steps AS before_begin, lag(end_ns) OVER steps AS before_end
            FROM (SELECT rank, step, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns
                FROM {table} WHERE step IS NOT NULL GROUP BY rank, step)
            WINDOW steps AS (PARTITION BY rank ORDER BY step))""",
    )
    return bool(pairs) and anew >= pairs / 2


def _lay_end_to_end(database: Database) -> bool:
    """Adds to starts that begin anew in each step the length of the steps before; whether they do."""
    if not steps_begin_anew(database, "foreign_rows"):
        return False
    database.execute(
        """UPDATE foreign_rows SET start_ns = start_ns + offset_ns FROM (
            SELECT step, CAST(coalesce(sum(length_ns) OVER (
                ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS BIGINT) AS offset_ns
            FROM (SELECT step, max(start_ns + duration_ns) - min(start_ns) AS length_ns FROM foreign_rows GROUP BY step)
        ) steps WHERE steps.step = foreign_rows.step"""
    )
    return True


def _make_spans(database: Database, found: Mapping[str, Column]) -> None:
    stages = _one(database, "SELECT coalesce(max(stage), 0) + 1 FROM foreign_rows")[0]
    group = '"group"' if "group" in found else _group(stages)
    expressions = {name: f"f.{quoted(name)}" for name in SPAN_COLUMNS if name != "overlapped_ns"} | {
        "kind": "n.kind",
        "group": f"CASE WHEN {_COMMUNICATES} THEN {group} END",
    }
    if "sequence" not in found:
        expressions["sequence"] = (
            f"row_number() OVER (PARTITION BY f.rank, f.step, f.name, {group} ORDER BY f.start_ns) - 1"
        )
    if "depth" not in found:
        expressions["depth"] = _DEPTH
    if "thread" not in found:
        # Nothing tells whether communication runs beside the rest: what it hides behind is not its time.
        expressions["thread"] = f"CASE WHEN {_COMMUNICATES} THEN 1 ELSE 0 END"
    select = span_select("foreign_rows f JOIN foreign_names n USING (name)", expressions)
    database.execute(f"CREATE OR REPLACE TABLE foreign_spans AS {select}")


def _group(stages: int) -> str:
    """Who takes part in a communication, by its name, where the table does not tell."""
    dp, stage, tensor = "coalesce(f.dp, 0)", "coalesce(f.stage, 0)", "coalesce(' tp' || f.tp, '')"
    sender = f"CASE WHEN n.receives = n.forward THEN ({stage} + {stages} - 1) % {stages} ELSE {stage} END"
    return (
        f"CASE n.of WHEN {literal(ALL)} THEN 'all' WHEN {literal(OWN)} THEN 'rank ' || f.rank "
        f"WHEN {literal(EMBEDDING)} THEN 'embedding dp' || {dp} || {tensor} "
        f"WHEN {literal(PAIR)} THEN 'dp' || {dp} || {tensor} || ' stage ' || ({sender}) || '-' || "
        f"((({sender}) + 1) % {stages}) ELSE 'stage ' || {stage} || {tensor} END"
    )


# 1 for what lies within a longer span of its rank and thread, else 0; what communicates lies in nothing.
_DEPTH: Final = f"""CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} AND f.duration_ns > 0 AND
    max(CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} THEN f.start_ns + f.duration_ns END) OVER (
        PARTITION BY f.rank, f.step, f.thread ORDER BY f.start_ns, f.duration_ns DESC
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) >= f.start_ns + f.duration_ns THEN 1 ELSE 0 END"""


def _one(database: Database, sql: str) -> tuple[Any, ...]:
    row: tuple[Any, ...] = database.execute(sql).fetchone()
    return row
