"""Opens tables of spans, ours or of another tool, as the tables `spans` and `ranks` of a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from profiler_wrapper.analysis.ranks.loaded import OUR_COLUMNS, LoadedSpans, among, not_there, view_spans
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.foreign_tables import TABLE_ENDINGS, read_foreign, relation_of
from profiler_wrapper.recording.rank_numbers import absent_ranks
from profiler_wrapper.recording.span_database import Database, columns_of, quoted
from profiler_wrapper.recording.span_table import RANK_COLUMNS


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
