"""Moments that several ranks share: a blocking collective ends for all its members at about the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

MOST_ROWS: Final = 400_000  # of communication that are read
MOST_EVENTS: Final = 200  # of a group: steps are chosen evenly
MOST_STEPS: Final = 200
ALIKE: Final = 3.0  # collectives of a group whose ends are so much less close than the closest are left out
CLOSE_NS: Final = 1e6  # ends as close as this are common whatever the starts are
BLOCKS: Final = 0.5  # else the ends must be so much closer than the starts: who only launches does not wait

_COMMON: Final = "kind = 'communication' AND step IS NOT NULL AND duration_ns > 0"
# Both ends of a transfer are one event: "forward-send" and "forward-recv" of one pair with one number.
_EVENT: Final = "regexp_replace(name, '(i?send|i?recv|receive)', '', 'g')"


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """Events of one group: when each member says they ended. Times in ns from `base_ns`."""

    ranks: Int  # (M,)
    ends: Float  # (E, M), by time; nan: not in that rank's table


def collective_ends(connection: DuckDBPyConnection, base_ns: int) -> list[Common]:
    """Ends of collectives and transfers of each group that blocks: those whose ends are closer than their starts."""
    if all(_has(connection, table) for table in ("communications", "labels")):
        rows = _from_labels(connection, base_ns)
    else:
        rows = _from_spans(connection, base_ns)
    found = []
    edges = np.flatnonzero(np.diff(rows["of"], prepend=-1, append=-1))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        common = _group({name: values[first:end] for name, values in rows.items()})
        if common is not None:
            found.append(common)
    return found


def _has(connection: DuckDBPyConnection, table: str) -> bool:
    query = "SELECT count(*) FROM information_schema.tables WHERE table_name = ?"
    return bool((connection.execute(query, [table]).fetchone() or (0,))[0])


def _from_labels(connection: DuckDBPyConnection, base_ns: int) -> dict[str, Any]:
    """By the tables that the reports' queries are made from, where they are: numbers instead of names."""
    _choose_steps(connection, "communications", "duration_ns > 0")
    return _arrays(
        connection,
        f"""SELECT c.rank, c.step, coalesce(c.sequence, row_number() OVER (PARTITION BY c.rank, c.step, c.label
                ORDER BY c.start_ns) - 1) AS number, c.label AS code, l.of, c.start_ns - {base_ns} AS start_ns,
            c.start_ns - {base_ns} + c.duration_ns AS end_ns
        FROM communications c JOIN clock_steps USING (step)
        JOIN (SELECT label, dense_rank() OVER (ORDER BY "group") AS of FROM labels WHERE "group" <> '') l USING (label)
        WHERE c.duration_ns > 0 ORDER BY l.of, code, step, number, rank""",
    )


def _from_spans(connection: DuckDBPyConnection, base_ns: int) -> dict[str, Any]:
    _choose_steps(connection, "spans", f'{_COMMON} AND "group" IS NOT NULL')
    return _arrays(
        connection,
        f"""WITH common AS (
            SELECT s.rank, s.step, {_EVENT} AS event, "group",
                coalesce(sequence, row_number() OVER (PARTITION BY s.rank, s.step, name, "group" ORDER BY start_ns) - 1)
                AS number, start_ns - {base_ns} AS start_ns, start_ns - {base_ns} + duration_ns AS end_ns
            FROM spans s JOIN clock_steps USING (step) WHERE {_COMMON} AND "group" IS NOT NULL),
        names AS (SELECT event, "group", row_number() OVER (ORDER BY "group", event) AS code,
            dense_rank() OVER (ORDER BY "group") AS of FROM (SELECT DISTINCT event, "group" FROM common))
        SELECT rank, step, number, code, names.of AS of, start_ns, end_ns
        FROM common JOIN names USING (event, "group") ORDER BY code, step, number, rank""",
    )


def step_ends(connection: DuckDBPyConnection, base_ns: int) -> Common | None:
    """Ends of steps, which ranks that wait for one another at their end share, more or less."""
    _choose_steps(connection, "spans", "step IS NOT NULL")
    rows = _arrays(
        connection,
        f"""SELECT rank, step, max(start_ns + duration_ns) - {base_ns} AS end_ns FROM spans
        JOIN clock_steps USING (step) GROUP BY rank, step""",
    )
    ranks = np.unique(rows["rank"])
    if len(ranks) < 2:
        return None
    ends = _matrix(rows["step"], rows["rank"], ranks, rows["end_ns"])
    shared = (~np.isnan(ends)).sum(axis=1) >= 2
    return Common(ranks, ends[shared]) if shared.any() else None


def _choose_steps(connection: DuckDBPyConnection, table: str, where: str) -> None:
    """A table of steps, evenly spread, with not too many rows."""
    query = f"SELECT step, count(*) FROM {table} WHERE {where} GROUP BY step ORDER BY step"
    found = connection.execute(query).fetchall()
    typical = max(1, sum(count for _, count in found) // max(1, len(found)))
    kept = min(len(found), MOST_STEPS, max(2, MOST_ROWS // typical))
    chosen = np.unique(np.linspace(0, len(found) - 1, kept).round().astype(int)).tolist() if found else []
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE clock_steps AS SELECT unnest(?::BIGINT[]) AS step",
        [[found[index][0] for index in chosen]],
    )


def _arrays(connection: DuckDBPyConnection, query: str) -> dict[str, Any]:
    return {
        name: np.asarray(values).astype(np.int64) for name, values in connection.execute(query).fetchnumpy().items()
    }


def _group(rows: dict[str, Any]) -> Common | None:
    ranks = np.unique(rows["rank"])
    if len(ranks) < 2:
        return None
    kept: list[tuple[float, Float]] = []
    edges = np.flatnonzero(np.diff(rows["code"], prepend=-1, append=-1))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = {name: values[first:end] for name, values in rows.items()}
        event = part["step"] * (int(part["number"].max()) + 1) + part["number"]
        starts = _matrix(event, part["rank"], ranks, part["start_ns"])
        ends = _matrix(event, part["rank"], ranks, part["end_ns"])
        shared = (~np.isnan(ends)).sum(axis=1) >= 2
        spread = _spread(ends[shared])
        if shared.sum() and (spread < BLOCKS * _spread(starts[shared]) or spread < CLOSE_NS):
            kept.append((spread, ends[shared]))
    if not kept:
        return None
    closest = min(spread for spread, _ in kept)
    ends = np.concatenate([each for spread, each in kept if spread <= ALIKE * closest])
    ends = ends[np.argsort(middle(ends, axis=1), kind="stable")]
    chosen = np.unique(np.linspace(0, len(ends) - 1, min(MOST_EVENTS, len(ends))).round().astype(int))
    return Common(ranks, ends[chosen])


def _matrix(event: Int, rank: Int, ranks: Int, values: Int) -> Float:
    events, row = np.unique(event, return_inverse=True)
    found = np.full((len(events), len(ranks)), np.nan)
    found[row.reshape(-1), np.searchsorted(ranks, rank)] = values
    return found


def _spread(times: Float) -> float:
    """How far members differ from one event to the next, whatever their clocks' offsets: the typical change."""
    if len(times) < 2:
        return 0.0
    change = np.abs(np.diff(times - middle(times, axis=1)[:, None], axis=0))
    known = change[~np.isnan(change)]
    return float(np.median(known)) if len(known) else 0.0


def middle(values: Float, *, axis: int) -> Float:
    """Median without nan, the lower one of two in the middle averaged with the upper; nan where all are."""
    ordered = np.sort(values, axis=axis)  # nan last
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(0, (count - 1) // 2), axis=axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[axis] - 1), axis=axis)
    return np.asarray(((low + high) / 2).squeeze(axis))
