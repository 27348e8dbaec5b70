"""What is opened of a run: a database of its spans, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.rank_numbers import Gap, parts_of, ranges, rank_gaps
from profiler_wrapper.recording.span_database import USABLE, Database, columns_of, quoted, span_select
from profiler_wrapper.recording.span_table import SPAN_COLUMNS

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
