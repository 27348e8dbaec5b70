"""How the ranks' clocks stand to one another, from moments that they share.

All members leave a blocking collective at about the same moment, so the differences of its ends are those of the
clocks, with the jitter of leaving. Ranks that are in no group together are compared through others that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from profiler_wrapper.analysis.ranks.clock_events import Int, collective_ends, step_ends
from profiler_wrapper.analysis.ranks.clock_fit import ClockFit
from profiler_wrapper.analysis.ranks.clock_lines import Line, ahead_by
from profiler_wrapper.analysis.ranks.model import Clocks

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NO_HOST: Final = ("", "localhost", "localhost.localdomain")
TABLE: Final = "clocks"


def fit(connection: DuckDBPyConnection) -> Clocks:
    """The clocks of all ranks in the tables `spans` and `ranks`."""
    found = connection.execute(
        "SELECT rank, step, min(start_ns) AS begin, max(start_ns + duration_ns) AS finish FROM spans "
        "GROUP BY rank, step"
    ).fetchnumpy()
    ranks = np.unique(np.asarray(found["rank"]).astype(np.int64))
    if not len(ranks):
        return _unknown(ranks, 0, "no rank has spans")
    base = int(found["begin"].min())
    if len(ranks) == 1:
        return _unknown(ranks, base, "one rank has one clock")
    if _begins_anew(found, int(ranks[0])):
        return _unknown(ranks, base, "times begin anew in each step: clocks are taken as they are")
    fitted = ClockFit(ranks, _host_of(connection, ranks))
    collectives = collective_ends(connection, base)
    fitted.use(collectives)
    source: Literal["collectives", "steps"] = "collectives" if fitted.lines else "steps"
    if fitted.parts() > 1:
        fitted.join(step_ends(connection, base))
    if not fitted.lines:
        if len(set(fitted.unit.values())) == 1:
            return _unknown(ranks, base, "all ranks are on one host, whose clock they share")
        return _unknown(ranks, base, "the ranks have neither collectives nor steps in common")
    return fitted.clocks(base, source)


def write_table(connection: DuckDBPyConnection, clocks: Clocks) -> None:
    """Table `clocks` for queries: rank, from_ns, until_ns, reference_ns, offset_ns, drift.

    aligned = own - offset_ns - drift * (own - reference_ns), for own times from `from_ns` up to `until_ns`.
    """
    rows = []
    limits = np.iinfo(np.int64)
    for rank, lines in pieces_of(clocks).items():
        begins = [limits.min, *(round(line.from_ns) for line in lines[1:])]
        for line, begin, end in zip(lines, begins, [*begins[1:], limits.max], strict=True):
            rows.append((rank, begin, end, round(line.reference_ns), line.offset_ns, line.drift))
    connection.execute(
        f"CREATE OR REPLACE TABLE {TABLE}(rank INTEGER, from_ns BIGINT, until_ns BIGINT, reference_ns BIGINT, "
        "offset_ns DOUBLE, drift DOUBLE)"
    )
    columns = [list(column) for column in zip(*rows, strict=True)]
    connection.execute(
        f"INSERT INTO {TABLE} SELECT unnest(?::INTEGER[]), unnest(?::BIGINT[]), unnest(?::BIGINT[]), "
        "unnest(?::BIGINT[]), unnest(?::DOUBLE[]), unnest(?::DOUBLE[])",
        columns or [[]] * 6,
    )


def align(clocks: Clocks, ranks: Int, own_ns: Int) -> Int:
    """Times by the common clock, of own times of ranks (arrays of one shape)."""
    found = own_ns.copy()
    pieces = pieces_of(clocks)
    order = np.argsort(ranks, kind="stable")
    edges = np.flatnonzero(np.diff(ranks[order], prepend=-1, append=-1))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = order[first:end]
        lines = pieces.get(int(ranks[mine[0]]))
        if lines is not None:
            base = round(lines[0].reference_ns)
            near = [line._replace(from_ns=line.from_ns - base, reference_ns=line.reference_ns - base) for line in lines]
            found[mine] -= np.rint(ahead_by(near, (own_ns[mine] - base).astype(np.float64))).astype(np.int64)
    return np.asarray(found)


def pieces_of(clocks: Clocks) -> dict[int, list[Line]]:
    """The lines of each rank, by its own times in ns since 1970."""
    found: dict[int, list[Line]] = {}
    for rank, begin, reference, offset, drift in zip(
        clocks.piece_rank.tolist(),
        clocks.piece_from_ns.tolist(),
        clocks.piece_reference_ns.tolist(),
        clocks.piece_offset_ns.tolist(),
        clocks.piece_drift.tolist(),
        strict=True,
    ):
        found.setdefault(rank, []).append(Line(begin, reference, offset, drift))
    return found


def _unknown(ranks: Int, base: int, note: str) -> Clocks:
    nothing, known = np.zeros(len(ranks)), np.full(len(ranks), np.nan)
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=nothing,
        drift=nothing,
        residual_ns=known,
        residual_p95_ns=known,
        source="none",
        notes=(note,),
        piece_rank=ranks,
        piece_from_ns=np.full(len(ranks), -np.inf),
        piece_reference_ns=np.full(len(ranks), float(base)),
        piece_offset_ns=nothing,
        piece_drift=nothing,
    )


def _host_of(connection: DuckDBPyConnection, ranks: Int) -> dict[int, str]:
    if not any(row[0] == "host" for row in connection.execute("DESCRIBE ranks").fetchall()):
        return {}
    rows = connection.execute("SELECT rank, max(host) FROM ranks WHERE host IS NOT NULL GROUP BY rank").fetchall()
    known = set(ranks.tolist())
    return {rank: host for rank, host in rows if host not in NO_HOST and rank in known}


def _begins_anew(found: dict[str, Any], rank: int) -> bool:
    """Whether most steps of a rank begin before the step before them is half done, which no job does."""
    steps = np.ma.masked_invalid(np.ma.asarray(found["step"]))
    mine = np.flatnonzero((np.asarray(found["rank"]) == rank) & ~np.ma.getmaskarray(steps))
    order = mine[np.argsort(np.asarray(steps)[mine])]
    begin, finish = found["begin"][order].astype(np.int64), found["finish"][order].astype(np.int64)
    early = begin[1:] < begin[:-1] + (finish[:-1] - begin[:-1]) // 2
    return bool(len(early) and early.mean() > 0.5)
