"""How each rank's clock stands to the others': an offset and a drift, from moments that ranks share.

All members leave a blocking collective at about the same moment, so the differences of its ends are those of the
clocks, with the jitter of leaving. Ranks that are in no group together are compared through others that are, else by
the ends of their steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from profiler_wrapper.ranks.database import Database, column, insert, to_arrays
from profiler_wrapper.ranks.model import Clocks, Float, Int
from profiler_wrapper.tables.statistics import mad, median

# Of a blocking collective the ends scatter so much less than the starts: who only launches it goes on.
ENDS_TO_STARTS: Final = 0.5
CLOSE_ENDS_NS: Final = 1e6  # ends as close as this are shared whatever the starts are
ONE_CLOCK_NS: Final = 50e6  # ranks that differ by more have no clock in common, whatever their host is called
_MOST_SCATTER_RATIO: Final = 3.0  # to the closest of its group; a collective whose ends scatter more is left out


class SharedEvents(NamedTuple):
    """Moments that ranks share, as each one's clock shows them."""

    ranks: Int  # (M,)
    ends: Float  # (E, M) by time, ns since the first span; nan: not in that rank's table


# How far a clock is ahead of the common time: offset_ns + drift * own time. Times are since the first span.
Line = tuple[float, float]


def fit(database: Database) -> Clocks:
    """The clocks of all ranks of a database that is prepared (see `times.prepare`)."""
    base = database.execute("SELECT min(start_ns) FROM spans").fetchone()[0] or 0
    # Ranks of one host have one clock, which goes by the first of them.
    database.execute(
        """CREATE OR REPLACE TEMP TABLE clock_owners AS
        SELECT rank, host, CASE WHEN coalesce(host, '') IN ('', 'localhost', 'localhost.localdomain') THEN rank
            ELSE min(rank) OVER (PARTITION BY host) END AS owner
        FROM (SELECT DISTINCT rank FROM spans) LEFT JOIN (SELECT rank, max(host) AS host FROM ranks GROUP BY rank)
            USING (rank)"""
    )
    ranks = column(database, "SELECT rank FROM clock_owners ORDER BY rank")
    if len(ranks) < 2:
        return _unknown(ranks, base, "one rank has one clock" if len(ranks) else "no rank has spans")
    share_collective_ends(database, base)
    # Clocks that cannot be one: of machines of the same name, whose ranks see the same ends far apart.
    apart = database.execute(
        f"""SELECT DISTINCT owner, host FROM (
            SELECT of, owner, any_value(host) AS host, max(end_ns) - min(end_ns) AS apart_ns
            FROM shared_ends JOIN clock_owners USING (rank) GROUP BY of, event, owner HAVING count(*) > 1)
        GROUP BY of, owner, host HAVING median(apart_ns) > {ONE_CLOCK_NS} ORDER BY owner"""
    ).fetchall()
    hosts = [host for _, host in apart]
    notes = [f"ranks of host {host} do not share a clock: each has its own" for host in hosts]
    database.execute("UPDATE clock_owners SET owner = rank WHERE list_contains(?::VARCHAR[], host)", [hosts])
    owner = column(database, "SELECT owner FROM clock_owners ORDER BY rank").tolist()
    if len(set(owner)) == 1:
        return _unknown(ranks, base, "all ranks are on one host, whose clock they share")
    groups = sorted(_by_group(database), key=lambda group: -group.ends.size)
    parts: list[_Fit] = []
    while groups:  # each by a time of its own
        parts.append(part := _Fit())
        group: SharedEvents | None = groups[0]
        while group is not None:  # the largest, then those that share ranks with others
            groups = [one for one in groups if one is not group]
            part.join([_alone(clock) for clock in group.ranks.tolist()], group)
            group = next((one for one in groups if part.lines.keys() & {*one.ranks.tolist()}), None)
    fitted = max(parts, key=lambda part: len(part.lines), default=_Fit())
    alone = {*owner}.difference(*(part.lines for part in parts))
    others = [part for part in parts if part is not fitted] + [_alone(clock) for clock in sorted(alone)]
    if others:
        share_step_ends(database, base)
        without = [clock for clock in owner if clock not in fitted.lines]
        for steps in _by_group(database):
            fitted.join(others, steps)
        joined = sum(clock in fitted.lines for clock in without)
        if parts and joined:
            notes.append(f"{joined} ranks share no collective with the others: compared by the ends of steps")
    if not fitted.lines:
        return _unknown(ranks, base, "the ranks have neither collectives nor steps in common")
    lines = np.array([fitted.lines.get(clock, (np.nan, np.nan)) for clock in owner])
    reference = lines[np.isfinite(lines[:, 0])][0]  # the first rank's clock, as far as it is known
    if missing := int(np.isnan(lines[:, 0]).sum()):
        notes.append(f"{missing} ranks share nothing with the others: their clocks are taken as they are")
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=(lines[:, 0] - reference[0]) / (1 - reference[1]),
        drift=1 - (1 - lines[:, 1]) / (1 - reference[1]),
        residual_ns=np.array([fitted.residual_ns.get(clock, np.nan) for clock in owner]),
        source="collectives" if parts else "steps",
        events=fitted.events,
        notes=tuple(notes),
    )


def write_table(database: Database, clocks: Clocks | None) -> None:
    """Table `clocks` for queries: rank, reference_ns, offset_ns, drift, of ranks whose clock is known; None: of none.

    aligned = own - offset_ns - drift * (own - reference_ns)
    """
    database.execute(
        "CREATE OR REPLACE TABLE clocks(rank INTEGER, reference_ns BIGINT, offset_ns DOUBLE, drift DOUBLE)"
    )
    if clocks is not None:
        reference = round(clocks.reference_ns)
        rows = zip(clocks.ranks.tolist(), clocks.offset_ns.tolist(), clocks.drift.tolist(), strict=True)
        insert(database, "clocks", [(rank, reference, *line) for rank, *line in rows if np.isfinite(line[0])])


def align(clocks: Clocks, ranks: Int, own_ns: Int) -> Int:
    """Times by the common clock, of own times of ranks (arrays of one shape); unchanged where a clock is unknown."""
    place = np.minimum(np.searchsorted(clocks.ranks, ranks), max(0, len(clocks.ranks) - 1))
    own = (own_ns - round(clocks.reference_ns)).astype(np.float64)
    ahead = clocks.offset_ns[place] + clocks.drift[place] * own
    ahead[(clocks.ranks[place] != ranks) | ~np.isfinite(ahead)] = 0.0
    return np.asarray(own_ns - np.rint(ahead).astype(np.int64))


def _unknown(ranks: Int, base: int, note: str) -> Clocks:
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=np.zeros(len(ranks)),
        drift=np.zeros(len(ranks)),
        residual_ns=np.full(len(ranks), np.nan),
        source="none",
        notes=(note,),
    )


# --- shared events ---


def share_collective_ends(database: Database, base_ns: int) -> None:
    """Table `shared_ends`: of (a group), event (by time), rank, end_ns, of collectives and transfers that block.

    Of a blocking one the ends scatter less than the starts: how far members differ from one event to the next,
    whatever their clocks' offsets, is the typical change.
    """
    steps = _choose_steps(database, "communications", "duration_ns > 0")
    database.execute(
        f"""CREATE OR REPLACE TEMP TABLE shared_ends AS WITH every AS (
            SELECT rank, label, dense_rank() OVER (ORDER BY "group") AS of, step, start_ns - {base_ns} AS start_ns,
                start_ns - {base_ns} + duration_ns AS end_ns, coalesce(sequence, row_number() OVER (
                    PARTITION BY rank, step, label ORDER BY start_ns) - 1) AS number
            FROM communications SEMI JOIN (SELECT unnest({steps}::BIGINT[]) AS step) USING (step)
            JOIN labels USING (label) WHERE duration_ns > 0 AND "group" <> ''),
        once AS (SELECT rank, label, of, step, number, arg_max(start_ns, end_ns) AS start_ns, max(end_ns) AS end_ns
            FROM every GROUP BY ALL),
        shared AS (SELECT *, median(start_ns) OVER event AS start_at, median(end_ns) OVER event AS end_at FROM once
            WINDOW event AS (PARTITION BY label, step, number) QUALIFY count(*) OVER event > 1),
        changes AS (SELECT of, label, abs(start_ns - start_at - lag(start_ns - start_at) OVER one) AS of_starts,
            abs(end_ns - end_at - lag(end_ns - end_at) OVER one) AS of_ends
            FROM shared WINDOW one AS (PARTITION BY label, rank ORDER BY step, number)),
        scatter AS (SELECT of, label, coalesce(median(of_starts), 0) AS of_starts, coalesce(median(of_ends), 0)
            AS of_ends FROM changes GROUP BY of, label),
        blocking AS (SELECT of, label, of_ends FROM scatter
            WHERE of_ends < {ENDS_TO_STARTS} * of_starts OR of_ends < {CLOSE_ENDS_NS}),
        closest AS (SELECT label FROM blocking
            QUALIFY of_ends <= {_MOST_SCATTER_RATIO} * min(of_ends) OVER (PARTITION BY of))
        SELECT of, dense_rank() OVER (ORDER BY end_at, label, step, number) AS event, rank, end_ns
        FROM shared SEMI JOIN closest USING (label)"""
    )


def share_step_ends(database: Database, base_ns: int) -> None:
    """The same of the ends of steps, which ranks that wait for one another at their end share, more or less."""
    steps = _choose_steps(database, "spans", "step IS NOT NULL")
    database.execute(
        f"""CREATE OR REPLACE TEMP TABLE shared_ends AS
        SELECT 1 AS of, step AS event, rank, max(start_ns + duration_ns) - {base_ns} AS end_ns
        FROM spans SEMI JOIN (SELECT unnest({steps}::BIGINT[]) AS step) USING (step) GROUP BY rank, step
        QUALIFY count(*) OVER (PARTITION BY step) > 1"""
    )


def _by_group(database: Database) -> list[SharedEvents]:
    """The ends of each group, on each clock the earliest: nobody leaves before the end."""
    rows = to_arrays(
        database,
        """SELECT of, event, owner, min(end_ns) AS end_ns FROM shared_ends JOIN clock_owners USING (rank)
        GROUP BY of, event, owner ORDER BY of, event, owner""",
    )
    found = []
    for first, end in pairwise(np.flatnonzero(np.diff(rows["of"], prepend=-1, append=-1)).tolist()):
        clocks, place = np.unique(rows["owner"][first:end], return_inverse=True)
        events, event = np.unique(rows["event"][first:end], return_inverse=True)
        ends = np.full((len(events), len(clocks)), np.nan)
        ends[event, place] = rows["end_ns"][first:end]
        found.append(SharedEvents(clocks.astype(np.int64), ends))
    return found


def _choose_steps(database: Database, table: str, where: str) -> list[int]:
    """Steps, evenly spread: 200 at most, and not too many rows."""
    query = f"SELECT step, count(*) FROM {table} WHERE {where} GROUP BY step ORDER BY step"
    found = database.execute(query).fetchall()
    typical = max(1, sum(count for _, count in found) // max(1, len(found)))
    count = min(len(found), 200, max(2, 400_000 // typical))
    return [found[at][0] for at in np.unique(np.linspace(0, len(found) - 1, count).round().astype(np.int64))]


# --- lines ---


@dataclass(slots=True, eq=False)
class _Fit:
    """Lines of clocks against a common time, which is that of one of them: found group after group."""

    lines: dict[int, Line] = field(default_factory=dict)
    residual_ns: dict[int, float] = field(default_factory=dict)
    events: int = 0

    def join(self, others: list[_Fit], group: SharedEvents) -> None:
        """Add the others, each shifted as a whole, as far as their clocks are not known: by common events."""
        place = {clock: at for at, clock in enumerate(group.ranks.tolist())}
        common = self._common_of(group, place)
        if not self.lines:  # the one with most events; a median of clocks of different rates is none of an even rate
            common = group.ends[:, np.isfinite(group.ends).sum(axis=0).argmax()]
        self.events += len(common)
        for other in (one for one in others if not one.lines.keys() & self.lines.keys()):
            own = other._common_of(group, place)
            both = np.isfinite(own) & np.isfinite(common)
            if not both.any():
                continue
            offset, drift = fit_line(own[both], (own - common)[both])
            left = (own - common)[both] - offset - drift * own[both]
            for clock, (own_offset, own_drift) in other.lines.items():
                self.lines[clock] = offset + own_offset * (1 - drift), drift + own_drift * (1 - drift)
                self.residual_ns[clock] = float(np.median(np.abs(left)))
            self.events += other.events

    def _common_of(self, group: SharedEvents, place: Mapping[int, int]) -> Float:
        """When events ended by the common time: the median of the clocks that are known."""
        known = [place[clock] for clock in self.lines if clock in place]
        if not known:
            return np.full(len(group.ends), np.nan)
        lines = np.array([self.lines[clock] for clock in group.ranks[known].tolist()])
        return median(group.ends[:, known] * (1 - lines[:, 1]) - lines[:, 0], axis=1)


def _alone(clock: int) -> _Fit:
    """A clock by its own time."""
    return _Fit({clock: (0.0, 0.0)})


def fit_line(own: Float, ahead: Float) -> Line:
    """The line through how far a clock is ahead, by its own times. The drift is 0 where it cannot be told from 0.

    Least squares without what lies far from the line of the median slope: readings that are late count for nothing.
    """
    constant = float(median(ahead)), 0.0
    half = len(own) // 2
    center = float(own.mean())
    time = own - center
    if half < 2 or time[-half] <= time[half - 1]:
        return constant
    slope = median((ahead[-half:] - ahead[:half]) / (time[-half:] - time[:half]))
    left = ahead - slope * time
    near = np.abs(left - median(left)) <= max(1.0, 3 * float(mad(left)))
    if near.sum() < 4:
        return constant
    (drift, offset), covariance = np.polyfit(time[near], ahead[near], 1, cov=True)
    if abs(drift) < 3 * covariance[0, 0] ** 0.5 or abs(drift) > 1e-3:  # no clock is as wrong
        return constant
    return float(offset - drift * center), float(drift)
