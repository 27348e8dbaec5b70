"""Reads a span table of another tool into the database, as a table of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.span_columns import Column, find_columns
from profiler_wrapper.recording.span_database import (
    USABLE,
    Database,
    columns_of,
    file_list,
    import_duckdb,
    insert,
    literal,
    quoted,
    span_select,
)
from profiler_wrapper.recording.span_names import (
    ALL,
    EMBEDDING,
    OWN,
    PAIR,
    group_of_span,
    kind_of_span,
    receives,
    sends_forward,
)
from profiler_wrapper.recording.span_table import KINDS, RANK_COLUMNS

_READERS = {
    ".parquet": "read_parquet({files}, union_by_name = true)",
    ".pq": "read_parquet({files}, union_by_name = true)",
    ".csv": "read_csv({files}, union_by_name = true)",
    ".tsv": "read_csv({files}, union_by_name = true)",
    ".jsonl": "read_json({files}, format = 'newline_delimited', ignore_errors = true, union_by_name = true)",
    ".ndjson": "read_json({files}, format = 'newline_delimited', ignore_errors = true, union_by_name = true)",
    ".json": "read_json({files}, union_by_name = true)",
}
TABLE_ENDINGS = tuple(_READERS)
_COUNTED = ("microbatch", "chunk", "sequence")
_PLACES = ("stage", "dp", "tp", "cp", "ep", "pp", "world_size", "attempt")
_COMMUNICATES = "n.kind = 'communication'"


class ForeignSpans(NamedTuple):
    """What was read: SQL that gives the spans, SQL that gives the ranks, what is to be said of it."""

    spans: str
    ranks: str
    notes: tuple[str, ...]
    laid_end_to_end: bool  # steps: starts began anew in each, so that clocks cannot be compared


def read_foreign(
    database: Database, paths: Sequence[Path], *, mapping: Mapping[str, str] | None = None
) -> ForeignSpans:
    """Reads tables of spans: Parquet, CSV or JSON lines, all of one kind.

    Starts that begin anew in each step are laid end to end. A table without groups gets them by what names of
    collectives mean in Megatron, one without depths by who encloses whom.

    Raises:
        WrongUse: it is no table of spans; the message says what it has and what is needed.
    """
    table = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} tables)"
    relation = relation_of(paths)
    try:
        types = columns_of(database, relation)
    except import_duckdb().Error as error:
        raise WrongUse(f"{table}: cannot be read as a table: {_first_line(error)}") from error
    found = find_columns(types, mapping or {}, table=table)
    try:
        if relation.startswith("read_csv("):
            # As texts: where a value is none of the type that was guessed, reading a file fails, TRY_CAST or not.
            texts = relation.removesuffix(")") + ", all_varchar = true)"
            relation = "foreign_texts"
            database.execute(f"CREATE OR REPLACE TEMP TABLE {relation} AS SELECT * FROM {texts}")
        return _Reading(database, relation, types, found, table).read()
    except import_duckdb().Error as error:
        raise WrongUse(f"{table}: is no table of spans: {_first_line(error)}") from error


def relation_of(paths: Sequence[Path]) -> str:
    """The files as SQL reads them.

    Raises:
        WrongUse: they have the ending of no table.
    """
    ending = next(iter(Path(paths[0].name.removesuffix(".gz")).suffixes[-1:]), "").lower()
    if ending not in _READERS:
        raise WrongUse(f"{paths[0]}: a table of spans ends in {', '.join(TABLE_ENDINGS)}, and this does not")
    return _READERS[ending].format(files=file_list(paths))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


class _Reading:
    def __init__(
        self, database: Database, relation: str, types: Mapping[str, str], found: Mapping[str, Column], table: str
    ) -> None:
        self.database, self.relation, self.types, self.found, self.table = database, relation, types, found, table
        self.notes: list[str] = []

    def read(self) -> ForeignSpans:
        """The table as ours, kept in the database."""
        self._read_rows()
        self._name_kinds()
        offset = self._lay_end_to_end()
        groups = self._group() if "group" not in self.found else '"group"'
        self.database.execute(f"CREATE OR REPLACE TABLE foreign_ranks AS {self._ranks()}")
        depth = "f.depth" if "depth" in self.found else self._depth()
        expressions = {
            "rank": "f.rank",
            "step": "f.step",
            "name": "f.name",
            "kind": "n.kind",
            "start_ns": f"f.start_ns{offset}",
            "duration_ns": "f.duration_ns",
            "device_ns": "f.device_ns",
            "waiting_ns": "f.waiting_ns",
            "depth": depth,
            "group": f"CASE WHEN {_COMMUNICATES} THEN {groups} END",
            "sequence": self._sequence(groups),
            **{
                name: f"f.{quoted(name)}"
                for name in ("layer", "parent", "microbatch", "chunk", "bytes")
                if name in self.found
            },
            # Where nothing tells, communication may run beside the rest: what it hides behind is not its time.
            "thread": "f.thread" if "thread" in self.found else f"CASE WHEN {_COMMUNICATES} THEN 1 ELSE 0 END",
        }
        relation = "foreign_rows f JOIN foreign_names n USING (name) LEFT JOIN foreign_offsets o ON o.step = f.step"
        self.database.execute(f"CREATE OR REPLACE TABLE foreign_spans AS {span_select(relation, expressions)}")
        self.database.execute("DROP TABLE foreign_rows")
        return ForeignSpans(
            "SELECT * FROM foreign_spans",
            "SELECT * FROM foreign_ranks",
            tuple(self.notes),
            laid_end_to_end=bool(offset),
        )

    def _read_rows(self) -> None:
        """Its rows with our names and units; those that say too little are counted and left out."""
        found = self.found
        start, length = self._time("start"), self._time("duration")
        if length is None:
            length = f"({self._time('end')} - {start})"
        elif start is None:
            start = f"({self._time('end')} - {length})"
        name = self._plain("name") if "name" in found else self._plain("kind")
        columns = {
            "rank": f"TRY_CAST({self._plain('rank')} AS BIGINT)",
            "step": f"TRY_CAST({self._plain('step')} AS BIGINT)",
            "name": f"CAST({name} AS VARCHAR)",
            "start_ns": f"TRY_CAST(round({start}) AS BIGINT)",
            "duration_ns": f"TRY_CAST(round({length}) AS BIGINT)",
            "device_ns": f"TRY_CAST(round({self._time('device') or 'NULL::DOUBLE'}) AS BIGINT)",
            "waiting_ns": f"TRY_CAST(round({self._time('waiting') or 'NULL::DOUBLE'}) AS BIGINT)",
        }
        for other in ("kind", "layer", "parent", "group", "host"):
            columns[other] = f"CAST({self._plain(other)} AS VARCHAR)"
        for other in ("depth", "thread", "bytes"):
            columns[other] = f"TRY_CAST({self._plain(other)} AS BIGINT)"
        for other in (*_COUNTED, *_PLACES):  # -1: has none
            number = f"TRY_CAST({self._plain(other)} AS INTEGER)"
            columns[other] = f"CASE WHEN {number} >= 0 THEN {number} END"
        select = ", ".join(f"{expression} AS {quoted(column)}" for column, expression in columns.items())
        usable = f"step IS NOT NULL AND {USABLE.replace('kind', 'name')} AND rank <= {2**31 - 1}"
        # Lines of a timer's log that are no spans have this one column.
        where = f" WHERE header IS NULL OR {self._plain('rank')} IS NOT NULL" if "header" in self.types else ""
        self.database.execute(f"CREATE OR REPLACE TABLE foreign_rows AS SELECT {select} FROM {self.relation}{where}")
        self.database.execute("DROP TABLE IF EXISTS foreign_texts")
        total, bad = self._one(f"SELECT count(*), count(*) FILTER (NOT coalesce({usable}, false)) FROM foreign_rows")
        if total == bad:
            raise WrongUse(f"{self.table}: {total} rows, and none has a rank, a step, a name, a start and a duration")
        if bad:
            self.database.execute(f"DELETE FROM foreign_rows WHERE NOT coalesce({usable}, false)")
            self.notes.append(
                f"{bad} of {total} rows left out: they lack a rank, step, name, start or a duration of 0 on"
            )

    def _plain(self, name: str) -> str:
        return quoted(self.found[name].theirs) if name in self.found else "NULL"

    def _time(self, name: str) -> str | None:
        """A time in nanoseconds, whatever its type and unit."""
        if name not in self.found:
            return None
        column = self.found[name]
        theirs, kind = quoted(column.theirs), self.types[column.theirs]
        if kind.startswith("TIMESTAMP"):
            return f"epoch_ns(TRY_CAST({theirs} AS {kind}))"
        if kind == "INTERVAL":
            return f"(epoch({theirs}) * 1e9)"
        if column.unit_ns == 1:
            return f"TRY_CAST({theirs} AS BIGINT)" if "INT" in kind else f"TRY_CAST({theirs} AS DOUBLE)"
        return f"(TRY_CAST({theirs} AS DOUBLE) * {column.unit_ns})"

    def _name_kinds(self) -> None:
        """What kind each name is of: as the table says, where it says one of ours, else as the name tells."""
        rows = self.database.execute("SELECT name, any_value(kind) FROM foreign_rows GROUP BY name").fetchall()
        named = [
            (
                name,
                kind if kind in KINDS else kind_of_span(name),
                group_of_span(name),
                sends_forward(name),
                receives(name),
            )
            for name, kind in rows
        ]
        self.database.execute(
            "CREATE OR REPLACE TABLE foreign_names "
            "(name VARCHAR, kind VARCHAR, of VARCHAR, forward BOOLEAN, receives BOOLEAN)"
        )
        insert(self.database, "foreign_names", named)

    def _lay_end_to_end(self) -> str:
        """What to add to a start: where starts begin anew in each step, the length of the steps before.

        Steps of one rank are compared with one another: clocks of two may be hours apart.
        """
        self.database.execute(
            "CREATE OR REPLACE TABLE foreign_offsets AS "
            "SELECT step, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns, 0::BIGINT AS offset_ns "
            "FROM foreign_rows GROUP BY step"
        )
        anew, pairs = self._one(
            "SELECT count(*) FILTER (begin_ns < before_begin + (before_end - before_begin) / 2), count(before_begin) "
            "FROM (SELECT begin_ns, lag(begin_ns) OVER steps AS before_begin, lag(end_ns) OVER steps AS before_end "
            "FROM (SELECT rank, step, min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns "
            "FROM foreign_rows GROUP BY rank, step) WINDOW steps AS (PARTITION BY rank ORDER BY step))"
        )
        if not pairs or anew < pairs / 2:
            return ""
        self.database.execute(
            "CREATE OR REPLACE TABLE foreign_offsets AS SELECT step, CAST(coalesce(sum(end_ns - begin_ns) OVER "
            "(ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS BIGINT) AS offset_ns "
            "FROM foreign_offsets"
        )
        self.notes.append(
            "starts begin anew in each step: steps are laid end to end, what was between them is not known"
        )
        return " + o.offset_ns"

    def _group(self) -> str:
        """Who takes part in a communication, where the table does not tell."""
        stages = self._one("SELECT coalesce(max(stage), 0) + 1 FROM foreign_rows")[0]
        dp, stage = "coalesce(f.dp, 0)", "coalesce(f.stage, 0)"
        tensor = "coalesce(' tp' || f.tp, '')"
        sender = f"CASE WHEN n.receives = n.forward THEN ({stage} + {stages} - 1) % {stages} ELSE {stage} END"
        return (
            f"CASE n.of WHEN {literal(ALL)} THEN 'all' WHEN {literal(OWN)} THEN 'rank ' || f.rank "
            f"WHEN {literal(EMBEDDING)} THEN 'embedding dp' || {dp} || {tensor} "
            f"WHEN {literal(PAIR)} THEN 'dp' || {dp} || {tensor} || ' stage ' || ({sender}) || '-' || "
            f"((({sender}) + 1) % {stages}) "
            f"ELSE 'stage ' || {stage} || {tensor} END"
        )

    def _sequence(self, groups: str) -> str:
        if "sequence" in self.found:
            return "f.sequence"
        return f"row_number() OVER (PARTITION BY f.rank, f.step, f.name, {groups} ORDER BY f.start_ns) - 1"

    def _depth(self) -> str:
        """1 for what lies within a longer span of its rank and thread, else 0; what communicates lies in nothing."""
        end = "(f.start_ns + f.duration_ns)"
        before = "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
        around = (
            f"max(CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} THEN {end} END) OVER "
            f"(PARTITION BY f.rank, f.step, f.thread ORDER BY f.start_ns, f.duration_ns DESC {before})"
        )
        inside = f"{around} >= {end} AND f.duration_ns > 0"
        return f"CASE WHEN n.kind <> 'step' AND NOT {_COMMUNICATES} AND {inside} THEN 1 ELSE 0 END"

    def _ranks(self) -> str:
        places = ", ".join(
            f"CAST(any_value({name}) AS INTEGER) AS {name}" if name != "host" else "any_value(host) AS host"
            for name in RANK_COLUMNS
            if name not in ("rank", "stage")
        )
        several = self._one(
            "SELECT count(*) FROM (SELECT rank FROM foreign_rows GROUP BY rank HAVING count(DISTINCT stage) > 1)"
        )[0]
        if several:
            self.notes.append(f"{several} ranks are said to be in several stages: each is taken to be in its first")
        return (
            f"SELECT CAST(rank AS INTEGER) AS rank, CAST(coalesce(min(stage), 0) AS INTEGER) AS stage, {places} "
            "FROM foreign_rows GROUP BY rank ORDER BY rank"
        )

    def _one(self, sql: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self.database.execute(sql).fetchone()
        return row
