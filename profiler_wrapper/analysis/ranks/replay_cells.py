"""The operations of a job as arrays: what each rank did in each step, read once from the span table.

A slot is the n-th operation of a name within a step. Ranks and steps with the same slots stand beside one another, so
that the replay works on whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.replay_places import NotReplayable, Places, read_places

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Align = Callable[[Int, Int], Int]  # (ranks, own times) -> times by the common clock

ROWS_AT_ONCE: Final = 500_000
_OPERATIONS: Final = "coalesce(depth, 0) = 0 AND kind <> 'step' AND step IS NOT NULL AND duration_ns >= 0"
_OF_SPANS: Final = "coalesce(s.depth, 0) = 0 AND s.kind <> 'step' AND duration_ns >= 0"


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Axes: K slots, R ranks, S steps; G stages, P pipelines (ranks of one stage that differ in other coordinates)."""

    ranks: Int  # (R,)
    stages: Int  # (G,) numbers of the stages, ascending
    grid: Int  # (G, P) index into ranks; -1: no such rank in the table
    coordinates: Int  # (P, 4) of COORDINATES; -1 where not known
    steps: Int  # (S,)
    all_steps: int  # in the table; more than S where steps were left out to bound time and memory
    names: tuple[tuple[str, str], ...]  # (name, kind)
    slot_name: Int  # (K,) index into names
    start_ns: Float  # (K, R, S) from the step's first start; nan: no such operation
    length_ns: npt.NDArray[np.float32]  # (K, R, S) its duration
    microbatch: npt.NDArray[np.int16]  # (K, R, S); -1: not known
    chunk: npt.NDArray[np.int16]  # (K, R, S) part of the model within the stage; -1: not known
    group: Int  # (K, R) of a collective, a number for each group of the table; -1: not told
    waiting_share: float  # of forwards and backwards that is communication within them


class _Name(NamedTuple):
    """Operations of one name: how many slots they take, and whether `sequence` numbers them, else their order."""

    name: str
    kind: str
    slots: int
    numbered: bool


def read_cells(
    connection: DuckDBPyConnection, *, most_rows: int, most_rows_of_one_stage: int, align: Align | None = None
) -> Cells:
    """The operations of depth 0 of all ranks.

    Steps are left out evenly beyond `most_rows` operations, sooner where there is no pipeline: all ranks are alike.

    Raises:
        NotReplayable: the table has no operations, or ranks whose places in the job are not told.
    """
    found = _ranks_and_steps(connection)
    places = read_places(connection, np.unique(found[:, 0]))
    all_steps = _choose_steps(connection, found, most_rows if len(places.stages) > 1 else most_rows_of_one_stage)
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_ranks AS "
        "SELECT unnest(?::INTEGER[]) AS rank, unnest(?::INTEGER[]) AS place",
        [places.ranks.tolist(), list(range(len(places.ranks)))],
    )
    _read_rows(connection)
    cells, count = _filled(connection, places, _names(connection, by_order=False), all_steps, align)
    if int((~np.isnan(cells.length_ns)).sum()) < count:  # two had one number: all by their order, then
        cells, _ = _filled(connection, places, _names(connection, by_order=True), all_steps, align)
    connection.execute("DROP TABLE replay_rows")
    return cells


def _ranks_and_steps(connection: DuckDBPyConnection) -> Int:
    """(rank, step, operations, first start); by the table that other queries made of it, where it is."""
    query = f"SELECT rank, step, count(*), min(start_ns) FROM spans WHERE {_OPERATIONS} GROUP BY rank, step"
    made = connection.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = 'step_windows'")
    if (made.fetchone() or (0,))[0]:
        (rank,) = connection.execute("SELECT coalesce(min(rank), 0) FROM step_windows").fetchone() or (0,)
        (count,) = connection.execute(  # one rank tells about how many there are
            f"SELECT count(*) // greatest(1, count(DISTINCT step)) FROM spans WHERE {_OPERATIONS} AND rank = {rank}"
        ).fetchone() or (1,)
        query = f"SELECT rank, step, {max(1, count)}, begin_ns FROM step_windows WHERE step IS NOT NULL"
    rows = connection.execute(query).fetchnumpy()
    found = np.stack([np.asarray(column).astype(np.int64) for column in rows.values()], axis=1)
    if not len(found):
        raise NotReplayable("no operation has a step")
    return found


def _choose_steps(connection: DuckDBPyConnection, found: Int, most_rows: int) -> int:
    """A table of chosen steps with the first start in each, of (rank, step, count, first start); how many there are."""
    steps, place = np.unique(found[:, 1], return_inverse=True)
    bases = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(bases, place.reshape(-1), found[:, 3])
    typical = max(1, int(found[:, 2].sum()) // len(steps))
    count = max(1, min(len(steps), most_rows // typical))
    chosen = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_steps AS SELECT unnest(?::BIGINT[]) AS step, unnest(?::BIGINT[]) AS base,"
        " unnest(?::INTEGER[]) AS place",
        [steps[chosen].tolist(), bases[chosen].tolist(), list(range(len(chosen)))],
    )
    return len(steps)


def _read_rows(connection: DuckDBPyConnection) -> None:
    """A table of the operations of the chosen steps: the spans may lie in many files, which are read once."""
    columns = {row[0] for row in connection.execute("DESCRIBE spans").fetchall()}
    computes = "s.kind IN ('forward', 'backward')"
    waiting = f"CASE WHEN {computes} THEN coalesce(waiting_ns, 0) ELSE 0 END" if "waiting_ns" in columns else "0"
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE replay_rows AS
        SELECT r.place AS rank, t.place AS step, name, kind, start_ns, duration_ns::FLOAT AS length, sequence,
            coalesce(microbatch, -1)::SMALLINT AS microbatch,
            {"coalesce(chunk, -1)" if "chunk" in columns else "-1"}::SMALLINT AS chunk,
            CASE WHEN s.kind = 'communication' AND "group" IS NOT NULL
                THEN (hash("group") >> 1)::BIGINT ELSE -1 END AS of,
            ({waiting})::FLOAT AS waiting, CASE WHEN {computes} THEN duration_ns ELSE 0 END::FLOAT AS computing
        FROM spans s JOIN replay_steps t ON s.step = t.step JOIN replay_ranks r ON s.rank = r.rank
        WHERE {_OF_SPANS}"""
    )


def _names(connection: DuckDBPyConnection, *, by_order: bool) -> list[_Name]:
    rows = connection.execute(
        """SELECT name, kind, max(n), bool_and(told = n AND low >= 0), max(high) FROM
            (SELECT name, kind, count(*) AS n, count(sequence) AS told, min(sequence) AS low, max(sequence) AS high
            FROM replay_rows GROUP BY rank, step, name, kind) GROUP BY name, kind ORDER BY name, kind"""
    ).fetchall()
    names = []
    for name, kind, count, told, high in rows:  # else numbers go on over steps, or begin anew in each group
        numbered = bool(not by_order and told and high + 1 <= 2 * count + 4)
        names.append(_Name(name, kind, int(high) + 1 if numbered else int(count), numbered))
    return names


def _filled(
    connection: DuckDBPyConnection, places: Places, names: list[_Name], all_steps: int, align: Align | None
) -> tuple[Cells, int]:
    """The cells, and how many operations there were to fill in."""
    most = [each.slots for each in names]
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_names AS "
        "SELECT unnest(?::VARCHAR[]) AS name, unnest(?::VARCHAR[]) AS kind, unnest(?::INTEGER[]) AS slot, "
        "unnest(?::BOOLEAN[]) AS numbered",
        [
            [each.name for each in names],
            [each.kind for each in names],
            (np.cumsum(most) - most).tolist(),
            [each.numbered for each in names],
        ],
    )
    steps = connection.execute("SELECT step, base FROM replay_steps ORDER BY place").fetchall()
    shape = (sum(most), len(places.ranks), len(steps))
    cells = Cells(
        *places,
        steps=np.array([step for step, _ in steps], dtype=np.int64),
        all_steps=all_steps,
        names=tuple((each.name, each.kind) for each in names),
        slot_name=np.repeat(np.arange(len(names)), most).astype(np.int64),
        start_ns=np.full(shape, np.nan),
        length_ns=np.full(shape, np.nan, dtype=np.float32),
        microbatch=np.full(shape, -1, dtype=np.int16),
        chunk=np.full(shape, -1, dtype=np.int16),
        group=np.full(shape[:2], -1, dtype=np.int64),
        waiting_share=0.0,
    )
    bases = np.array([base for _, base in steps], dtype=np.int64)
    count, waiting, computing = 0, 0.0, 0.0
    for rows in _rows(connection, numbered=all(each.numbered for each in names)):
        count += len(rows["slot"])
        waiting, computing = waiting + float(rows["waiting"].sum()), computing + float(rows["computing"].sum())
        _place(cells, rows, bases, align)
    return replace(cells, waiting_share=waiting / max(1.0, computing)), count


def _rows(connection: DuckDBPyConnection, *, numbered: bool) -> Iterator[dict[str, Any]]:
    """The operations with their slots, some at a time."""
    if not numbered:
        connection.execute(
            """CREATE OR REPLACE TEMP TABLE replay_rows AS SELECT * EXCLUDE (numbered) REPLACE (CASE WHEN numbered
                THEN sequence ELSE row_number() OVER (PARTITION BY rank, step, name, kind ORDER BY start_ns) - 1
                END AS sequence)
            FROM (SELECT replay_rows.*, numbered FROM replay_rows JOIN replay_names USING (name, kind))"""
        )
    (count,) = connection.execute("SELECT count(*) FROM replay_rows").fetchone() or (0,)
    for first in range(0, count, ROWS_AT_ONCE):
        rows = connection.execute(
            """SELECT rank, step, start_ns, length, (n.slot + sequence)::INTEGER AS slot, microbatch, chunk, of,
                waiting, computing
            FROM (SELECT * FROM replay_rows WHERE rowid >= ? AND rowid < ?) JOIN replay_names n USING (name, kind)""",
            [first, first + ROWS_AT_ONCE],
        ).fetchnumpy()
        yield {name: np.asarray(column) for name, column in rows.items()}


def _place(cells: Cells, rows: dict[str, Any], bases: Int, align: Align | None) -> None:
    rank, step, slot, start = (rows[key].astype(np.int64) for key in ("rank", "step", "slot", "start_ns"))
    if align is not None:
        start = align(cells.ranks[rank], start)
    row = slot * len(cells.ranks) + rank
    place = row * len(cells.steps) + step
    cells.start_ns.reshape(-1)[place] = start - bases[step]
    cells.length_ns.reshape(-1)[place] = rows["length"]
    cells.microbatch.reshape(-1)[place] = rows["microbatch"]
    cells.chunk.reshape(-1)[place] = rows["chunk"]
    told = rows["of"] >= 0
    cells.group.reshape(-1)[row[told]] = rows["of"][told]
