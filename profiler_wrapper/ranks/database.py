"""DuckDB, with a bound on its memory: what answers questions about the spans of many ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.errors import MissingPackage
from profiler_wrapper.trace.spans import SPAN_COLUMNS

# By the packages' own names: that works from a clone, from a wheel and where nothing of ours is installed.
INSTALL = "pip install 'duckdb>=1.5' 'pyarrow>=20'"
MEMORY_BYTES = 400 << 20  # of the database; what does not fit goes to disk

# What a row must say to be a span: times whose sums are numbers too, so between 1824 and 2116, and at most 104 days.
USABLE = (
    "rank >= 0 AND name IS NOT NULL AND kind IS NOT NULL "
    f"AND start_ns BETWEEN {-(2**62)} AND {2**62} AND duration_ns BETWEEN 0 AND {2**53}"
)

Database = Any  # duckdb.DuckDBPyConnection, which is imported when it is needed


@contextmanager
def open_database(*, memory_bytes: int = MEMORY_BYTES, threads: int | None = None) -> Iterator[Database]:
    """An empty database in memory, which spills to a directory of its own; both are gone at the end.

    Raises:
        MissingPackage: DuckDB is not installed.
    """
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
    """The module.

    Raises:
        MissingPackage: it is not installed.
    """
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
