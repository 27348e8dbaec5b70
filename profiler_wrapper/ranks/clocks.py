"""How each rank's clock stands to the others': an offset and a drift, from moments that ranks share.

All members leave a blocking collective at about the same moment, so the differences of its ends are those of the
clocks, with the jitter of leaving. Ranks that are in no group together are compared through others that are, else by
the ends of their steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from profiler_wrapper.analysis.statistics import mad, median
from profiler_wrapper.ranks.database import Database, insert, to_arrays
from profiler_wrapper.ranks.model import Clocks, Float, Int

# Of a blocking collective the ends scatter so much less than the starts: who only launches it goes on.
ENDS_TO_STARTS: Final = 0.5
CLOSE_ENDS_NS: Final = 1e6  # ends as close as this are shared whatever the starts are
ONE_CLOCK_NS: Final = 50e6  # ranks that differ by more have no clock in common, whatever their host is called
_MOST_SCATTER_RATIO: Final = 3.0  # to the closest of its group; a collective whose ends scatter more is left out


class SharedEvents(NamedTuple):
    """Moments that ranks share, as each one's clock shows them."""

    ranks: Int  # (M,)
    ends: Float  # (E, M) by time, ns since the first span; nan: not in that rank's table


class Line(NamedTuple):
    """How far a clock is ahead of the common time: offset_ns + drift * own time. Times are since the first span."""

    offset_ns: float
    drift: float


def fit(database: Database) -> Clocks:
    """The clocks of all ranks of a database that is prepared (see `times.prepare`)."""
    base = database.execute("SELECT min(start_ns) FROM spans").fetchone()[0] or 0
    # Ranks of one host have one clock, which goes by the first of them.
    found = database.execute(
        """SELECT rank, host, CASE WHEN coalesce(host, '') IN ('', 'localhost', 'localhost.localdomain') THEN rank
            ELSE min(rank) OVER (PARTITION BY host) END
        FROM (SELECT DISTINCT rank FROM spans) LEFT JOIN (SELECT rank, max(host) AS host FROM ranks GROUP BY rank)
            USING (rank) ORDER BY rank"""
    ).fetchall()
    ranks = np.array([rank for rank, _, _ in found], dtype=np.int64)
    if len(ranks) < 2:
        return _unknown(ranks, base, "one rank has one clock" if len(ranks) else "no rank has spans")
    hosts, owner = {rank: host for rank, host, _ in found}, {rank: one for rank, _, one in found}
    ends = collective_ends(database, base)
    apart = _without_one_clock(ends, owner)
    notes = [f"ranks of host {hosts[one]} do not share a clock: each has its own" for one in sorted(apart)]
    owner = {rank: rank if one in apart else one for rank, one in owner.items()}
    if len(set(owner.values())) == 1:
        return _unknown(ranks, base, "all ranks are on one host, whose clock they share")
    groups = sorted((_of_clocks(group, owner) for group in ends), key=lambda group: -group.ends.size)
    parts: list[_Fit] = []
    while groups:  # each by a time of its own
        parts.append(part := _Fit())
        group: SharedEvents | None = groups[0]
        while group is not None:  # the largest, then those that share ranks with others
            groups = [one for one in groups if one is not group]
            part.join([_alone(clock) for clock in group.ranks.tolist()], group)
            group = next((one for one in groups if part.lines.keys() & {*one.ranks.tolist()}), None)
    fitted = max(parts, key=lambda part: len(part.lines), default=_Fit())
    alone = {*owner.values()}.difference(*(part.lines for part in parts))
    others = [part for part in parts if part is not fitted] + [_alone(clock) for clock in sorted(alone)]
    if others and (steps := step_ends(database, base)) is not None:
        without = [clock for clock in owner.values() if clock not in fitted.lines]
        fitted.join(others, _of_clocks(steps, owner))
        joined = sum(clock in fitted.lines for clock in without)
        if parts and joined:
            notes.append(f"{joined} ranks share no collective with the others: compared by the ends of steps")
    if not fitted.lines:
        return _unknown(ranks, base, "the ranks have neither collectives nor steps in common")
    lines = np.array([fitted.lines.get(owner[rank], (np.nan, np.nan)) for rank in ranks.tolist()])
    reference = lines[np.isfinite(lines[:, 0])][0]  # the first rank's clock, as far as it is known
    if missing := int(np.isnan(lines[:, 0]).sum()):
        notes.append(f"{missing} ranks share nothing with the others: their clocks are taken as they are")
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=(lines[:, 0] - reference[0]) / (1 - reference[1]),
        drift=1 - (1 - lines[:, 1]) / (1 - reference[1]),
        residual_ns=np.array([fitted.residual_ns.get(owner[rank], np.nan) for rank in ranks.tolist()]),
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
    nothing = np.zeros(len(ranks))
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=nothing,
        drift=nothing,
        residual_ns=np.full(len(ranks), np.nan),
        source="none",
        notes=(note,),
    )


# --- shared events ---


def collective_ends(database: Database, base_ns: int) -> list[SharedEvents]:
    """Ends of collectives and transfers of each group that blocks: those whose ends are closer than their starts."""
    steps = _choose_steps(database, "communications", "duration_ns > 0")
    rows = to_arrays(
        database,
        f"""SELECT c.rank, c.step, coalesce(c.sequence, row_number() OVER (PARTITION BY c.rank, c.step, c.label
                ORDER BY c.start_ns) - 1) AS number, c.label, l.of, c.start_ns - {base_ns} AS start_ns,
            c.start_ns - {base_ns} + c.duration_ns AS end_ns
        FROM communications c SEMI JOIN (SELECT unnest({steps}::BIGINT[]) AS step) USING (step)
        JOIN (SELECT label, dense_rank() OVER (ORDER BY "group") AS of FROM labels WHERE "group" <> '') l USING (label)
        WHERE c.duration_ns > 0 ORDER BY l.of, label, step, number, rank""",
    )
    found = (_shared_by_group(group) for group in _split(rows, "of"))
    return [group for group in found if group is not None]


def step_ends(database: Database, base_ns: int) -> SharedEvents | None:
    """Ends of steps, which ranks that wait for one another at their end share, more or less."""
    steps = _choose_steps(database, "spans", "step IS NOT NULL")
    rows = to_arrays(
        database,
        f"""SELECT rank, step, max(start_ns + duration_ns) - {base_ns} AS end_ns
        FROM spans SEMI JOIN (SELECT unnest({steps}::BIGINT[]) AS step) USING (step) GROUP BY rank, step""",
    )
    ranks = np.unique(rows["rank"]).astype(np.int64)
    ends = _shared(rows["step"], rows["rank"], ranks, rows["end_ns"])
    return SharedEvents(ranks, ends) if len(ends) else None


def _choose_steps(database: Database, table: str, where: str) -> list[int]:
    """Steps, evenly spread: 200 at most, and not too many rows."""
    query = f"SELECT step, count(*) FROM {table} WHERE {where} GROUP BY step ORDER BY step"
    found = database.execute(query).fetchall()
    typical = max(1, sum(count for _, count in found) // max(1, len(found)))
    count = min(len(found), 200, max(2, 400_000 // typical))
    return [found[at][0] for at in np.unique(np.linspace(0, len(found) - 1, count).round().astype(np.int64))]


def _split(rows: Any, column: str) -> list[dict[str, Any]]:
    """Rows that are sorted by a column, for each value of it."""
    edges = np.flatnonzero(np.diff(rows[column], prepend=-1, append=-1)).tolist()
    return [
        {name: np.asarray(values[first:end]).astype(np.int64) for name, values in rows.items()}
        for first, end in pairwise(edges)
    ]


def _shared_by_group(rows: dict[str, Any]) -> SharedEvents | None:
    ranks = np.unique(rows["rank"])
    kept: list[tuple[float, Float]] = []
    for part in _split(rows, "label"):
        event = part["step"] * (int(part["number"].max()) + 1) + part["number"]
        starts, ends = (_shared(event, part["rank"], ranks, part[name]) for name in ("start_ns", "end_ns"))
        scatter = _scatter(ends)
        if len(ends) and (scatter < ENDS_TO_STARTS * _scatter(starts) or scatter < CLOSE_ENDS_NS):
            kept.append((scatter, ends))
    if not kept:
        return None
    closest = min(scatter for scatter, _ in kept)
    ends = np.concatenate([each for scatter, each in kept if scatter <= _MOST_SCATTER_RATIO * closest])
    return SharedEvents(ranks, ends[np.argsort(median(ends, axis=1), kind="stable")])


def _shared(event: Int, rank: Int, ranks: Int, values: Int) -> Float:
    """(events of two ranks or more, ranks); nan where there is no row."""
    events, row = np.unique(event, return_inverse=True)
    found = np.full((len(events), len(ranks)), np.nan)
    found[row.reshape(-1), np.searchsorted(ranks, rank)] = values
    return np.asarray(found[np.isfinite(found).sum(axis=1) >= 2])


def _scatter(times: Float) -> float:
    """How far members differ from one event to the next, whatever their clocks' offsets: the typical change."""
    change = np.abs(np.diff(times - median(times, axis=1)[:, None], axis=0))
    return float(np.nan_to_num(median(change.reshape(-1))))


def _of_clocks(group: SharedEvents, owner: dict[int, int]) -> SharedEvents:
    """The earliest end on each clock: nobody leaves before the end."""
    clocks, of = np.unique([owner[rank] for rank in group.ranks.tolist()], return_inverse=True)
    ends = np.full((len(clocks), len(group.ends)), np.nan)
    np.fmin.at(ends, of, group.ends.T)
    return SharedEvents(clocks, ends.T)


def _without_one_clock(groups: list[SharedEvents], owner: dict[int, int]) -> set[int]:
    """Owners of clocks that cannot be one: machines of the same name, whose ranks see the same ends far apart."""
    found = set()
    for group in groups:
        owners = np.array([owner[rank] for rank in group.ranks.tolist()])
        for one in np.unique(owners).tolist():
            ends = group.ends[:, owners == one]
            spread = np.fmax.reduce(ends, axis=1) - np.fmin.reduce(ends, axis=1)
            several = np.isfinite(ends).sum(axis=1) > 1
            if several.any() and np.median(spread[several]) > ONE_CLOCK_NS:
                found.add(one)
    return found


# --- lines ---


@dataclass(slots=True, eq=False)
class _Fit:
    """Lines of clocks against a common time, which is that of one of them: found group after group."""

    lines: dict[int, Line] = field(default_factory=dict)
    residual_ns: dict[int, float] = field(default_factory=dict)
    events: int = 0

    def join(self, others: list[_Fit], group: SharedEvents) -> None:
        """Add the others, each shifted as a whole, as far as their clocks are not known: by common events."""
        common = self._common_of(group)
        if not self.lines:  # the one with most events; a median of clocks of different rates is none of an even rate
            common = group.ends[:, np.isfinite(group.ends).sum(axis=0).argmax()]
        self.events += len(common)
        for other in (one for one in others if not one.lines.keys() & self.lines.keys()):
            own = other._common_of(group)
            both = np.isfinite(own) & np.isfinite(common)
            if not both.any():
                continue
            offset, drift = fit_line(own[both], (own - common)[both])
            left = (own - common)[both] - offset - drift * own[both]
            for clock, line in other.lines.items():
                self.lines[clock] = Line(offset + line.offset_ns * (1 - drift), drift + line.drift * (1 - drift))
                self.residual_ns[clock] = float(np.median(np.abs(left)))
            self.events += other.events

    def _common_of(self, group: SharedEvents) -> Float:
        """When events ended by the common time: the median of the clocks that are known."""
        known = [at for at, clock in enumerate(group.ranks.tolist()) if clock in self.lines]
        if not known:
            return np.full(len(group.ends), np.nan)
        lines = np.array([self.lines[clock] for clock in group.ranks[known].tolist()])
        return median(group.ends[:, known] * (1 - lines[:, 1]) - lines[:, 0], axis=1)


def _alone(clock: int) -> _Fit:
    """A clock by its own time."""
    return _Fit({clock: Line(0.0, 0.0)})


def fit_line(own: Float, ahead: Float) -> Line:
    """The line through how far a clock is ahead, by its own times. The drift is 0 where it cannot be told from 0.

    Least squares without what lies far from the line of the median slope: readings that are late count for nothing.
    """
    constant = Line(float(median(ahead)), 0.0)
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
    return Line(float(offset - drift * center), float(drift))
