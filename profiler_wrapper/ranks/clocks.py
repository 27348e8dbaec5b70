"""How each rank's clock stands to the others': an offset and a drift, from moments that ranks share.

All members leave a blocking collective at about the same moment, so the differences of its ends are those of the
clocks, with the jitter of leaving. Ranks that are in no group together are compared through others that are. A clock
that was set, or changed its rate, while the job ran is no straight line: its residual is large, and a note says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis.statistics import MAD_TO_SIGMA, mad, median
from profiler_wrapper.ranks.database import Database, insert, steps_begin_anew, to_arrays
from profiler_wrapper.ranks.model import Clocks, Float, Int

MOST_ROWS: Final = 400_000  # of communication that are read
MOST_STEPS: Final = 200
MOST_EVENTS: Final = 200  # of a group, evenly chosen
# Of a blocking collective the ends scatter so much less than the starts: who only launches it goes on.
ENDS_TO_STARTS: Final = 0.5
CLOSE_ENDS_NS: Final = 1e6  # ends as close as this are shared whatever the starts are
# Collectives of a group whose ends scatter so many times as far as the closest are left out.
MOST_SCATTER_RATIO: Final = 3.0
ONE_CLOCK_NS: Final = 50e6  # ranks that differ by more have no clock in common, whatever their host is called
NO_HOST: Final = ("", "localhost", "localhost.localdomain")
MOST_DRIFT: Final = 1e-3  # no clock is as wrong
# A clock does not fit its line where the medians of parts of the events lie so far from it.
PARTS: Final = 8
EVENTS_OF_PART: Final = 5  # at least
MISFIT_NS: Final = 100e3  # less looks like jitter
MISFIT_DEVIATIONS: Final = 4.0  # of the events' own scatter


@dataclass(frozen=True, slots=True, eq=False)
class SharedEvents:
    """Moments that ranks share, as each one's clock shows them."""

    ranks: Int  # (M,)
    ends: Float  # (E, M) by time, ns since the first span; nan: not in that rank's table


class Line(NamedTuple):
    """How far a clock is ahead of the common time: offset_ns + drift * own time. Times are since the first span."""

    offset_ns: float
    drift: float

    def aligned(self, own: Float) -> Float:
        """Own times by the common time."""
        return own - (self.offset_ns + self.drift * own)


ON_TIME: Final = Line(0.0, 0.0)


def fit(database: Database) -> Clocks:
    """The clocks of all ranks of a database that is prepared (see `times.prepare`)."""
    base, found = database.execute("SELECT min(start_ns), list(DISTINCT rank ORDER BY rank) FROM spans").fetchone()
    ranks = np.array(found or [], dtype=np.int64)
    if len(ranks) < 2:
        return _unknown(ranks, base or 0, "one rank has one clock" if len(ranks) else "no rank has spans")
    if steps_begin_anew(database, "spans"):
        return _unknown(ranks, base, "times begin anew in each step: clocks are taken as they are")
    known = set(found)
    hosts = database.execute("SELECT rank, max(host) FROM ranks WHERE host IS NOT NULL GROUP BY rank").fetchall()
    fitted = _Fit(ranks, {rank: host for rank, host in hosts if host not in NO_HOST and rank in known})
    fitted.use(collective_ends(database, base))
    source: Literal["collectives", "steps"] = "collectives" if fitted.lines else "steps"
    if fitted.is_in_parts():
        fitted.join(step_ends(database, base))
    if not fitted.lines:
        if len(set(fitted.unit.values())) == 1:
            return _unknown(ranks, base, "all ranks are on one host, whose clock they share")
        return _unknown(ranks, base, "the ranks have neither collectives nor steps in common")
    return fitted.clocks(base, source)


def write_table(database: Database, clocks: Clocks) -> None:
    """Table `clocks` for queries: rank, reference_ns, offset_ns, drift, of ranks whose clock is known.

    aligned = own - offset_ns - drift * (own - reference_ns)
    """
    database.execute(
        "CREATE OR REPLACE TABLE clocks(rank INTEGER, reference_ns BIGINT, offset_ns DOUBLE, drift DOUBLE)"
    )
    known = np.isfinite(clocks.offset_ns)
    columns = (clocks.ranks[known].tolist(), clocks.offset_ns[known].tolist(), clocks.drift[known].tolist())
    reference = round(clocks.reference_ns)
    insert(database, "clocks", [(rank, reference, offset, drift) for rank, offset, drift in zip(*columns, strict=True)])


def align(clocks: Clocks, ranks: Int, own_ns: Int) -> Int:
    """Times by the common clock, of own times of ranks (arrays of one shape); unchanged where a clock is unknown."""
    place = np.minimum(np.searchsorted(clocks.ranks, ranks), max(0, len(clocks.ranks) - 1))
    own = (own_ns - round(clocks.reference_ns)).astype(np.float64)
    ahead = clocks.offset_ns[place] + clocks.drift[place] * own
    ahead[(clocks.ranks[place] != ranks) | ~np.isfinite(ahead)] = 0.0
    return np.asarray(own_ns - np.rint(ahead).astype(np.int64))


def _unknown(ranks: Int, base: int, note: str) -> Clocks:
    nothing, unknown = np.zeros(len(ranks)), np.full(len(ranks), np.nan)
    return Clocks(
        ranks=ranks,
        reference_ns=float(base),
        offset_ns=nothing,
        drift=nothing,
        residual_ns=unknown,
        residual_p95_ns=unknown,
        source="none",
        notes=(note,),
    )


# --- shared events ---


def collective_ends(database: Database, base_ns: int) -> list[SharedEvents]:
    """Ends of collectives and transfers of each group that blocks: those whose ends are closer than their starts."""
    _choose_steps(database, "communications", "duration_ns > 0")
    rows = to_arrays(
        database,
        f"""SELECT c.rank, c.step, coalesce(c.sequence, row_number() OVER (PARTITION BY c.rank, c.step, c.label
                ORDER BY c.start_ns) - 1) AS number, c.label, l.of, c.start_ns - {base_ns} AS start_ns,
            c.start_ns - {base_ns} + c.duration_ns AS end_ns
        FROM communications c JOIN clock_steps USING (step)
        JOIN (SELECT label, dense_rank() OVER (ORDER BY "group") AS of FROM labels WHERE "group" <> '') l USING (label)
        WHERE c.duration_ns > 0 ORDER BY l.of, label, step, number, rank""",
    )
    found = (_shared_by_group(group) for group in _split(rows, "of"))
    return [group for group in found if group is not None]


def step_ends(database: Database, base_ns: int) -> SharedEvents | None:
    """Ends of steps, which ranks that wait for one another at their end share, more or less."""
    _choose_steps(database, "spans", "step IS NOT NULL")
    rows = to_arrays(
        database,
        f"""SELECT rank, step, max(start_ns + duration_ns) - {base_ns} AS end_ns FROM spans
        JOIN clock_steps USING (step) GROUP BY rank, step""",
    )
    ranks = np.unique(rows["rank"]).astype(np.int64)
    ends = _shared(_matrix(rows["step"], rows["rank"], ranks, rows["end_ns"]))
    return SharedEvents(ranks, ends) if len(ends) else None


def _choose_steps(database: Database, table: str, where: str) -> None:
    """A table of steps, evenly spread, with not too many rows."""
    query = f"SELECT step, count(*) FROM {table} WHERE {where} GROUP BY step ORDER BY step"
    found = database.execute(query).fetchall()
    typical = max(1, sum(count for _, count in found) // max(1, len(found)))
    chosen = _evenly(len(found), min(MOST_STEPS, max(2, MOST_ROWS // typical)))
    database.execute("CREATE OR REPLACE TEMP TABLE clock_steps (step BIGINT)")
    insert(database, "clock_steps", [(found[index][0],) for index in chosen.tolist()])


def _evenly(count: int, most: int) -> Int:
    """At most so many places of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


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
        starts, ends = (_shared(_matrix(event, part["rank"], ranks, part[name])) for name in ("start_ns", "end_ns"))
        scatter = _scatter(ends)
        if len(ends) and (scatter < ENDS_TO_STARTS * _scatter(starts) or scatter < CLOSE_ENDS_NS):
            kept.append((scatter, ends))
    if not kept:
        return None
    closest = min(scatter for scatter, _ in kept)
    ends = np.concatenate([each for scatter, each in kept if scatter <= MOST_SCATTER_RATIO * closest])
    ends = ends[np.argsort(median(ends, axis=1), kind="stable")]
    return SharedEvents(ranks, ends[_evenly(len(ends), MOST_EVENTS)])


def _matrix(event: Int, rank: Int, ranks: Int, values: Int) -> Float:
    """(events, ranks); nan where there is no row."""
    events, row = np.unique(event, return_inverse=True)
    found = np.full((len(events), len(ranks)), np.nan)
    found[row.reshape(-1), np.searchsorted(ranks, rank)] = values
    return found


def _shared(ends: Float) -> Float:
    """Events of two ranks or more."""
    return np.asarray(ends[(~np.isnan(ends)).sum(axis=1) >= 2])


def _scatter(times: Float) -> float:
    """How far members differ from one event to the next, whatever their clocks' offsets: the typical change."""
    change = np.abs(np.diff(times - median(times, axis=1)[:, None], axis=0))
    typical = float(median(change.reshape(-1)))
    return 0.0 if np.isnan(typical) else typical


# --- lines ---


class _Fit:
    """Lines of units, which are ranks or hosts with one clock, against a common time: found group after group."""

    def __init__(self, ranks: Int, host_of: dict[int, str]) -> None:
        self.ranks = ranks
        self.host_of = host_of
        first: dict[str, int] = {}
        self.unit = {
            rank: first.setdefault(host_of[rank], rank) if rank in host_of else rank for rank in ranks.tolist()
        }
        self.lines: dict[int, Line] = {}
        self.part: dict[int, int] = {}  # of unit: the number of its part of the job
        self.errors: dict[int, list[tuple[Float, Float]]] = {}  # own times, what is left after the fit
        self.events = 0
        self.notes: list[str] = []

    def use(self, groups: list[SharedEvents]) -> None:
        """Fit all units that groups connect with one another; each connected part by a time of its own."""
        self._check_hosts(groups)
        left = sorted((self._of_units(group) for group in groups), key=lambda group: -group.ends.size)
        part = 0
        while left:  # the largest group that has somebody known
            connected = (at for at, group in enumerate(left) if not self.lines.keys().isdisjoint(group.ranks.tolist()))
            place = next(connected, None)
            if place is None:
                part, place = part + 1, 0
            self.part |= dict.fromkeys(self._fit_group(left.pop(place)), part)

    def is_in_parts(self) -> bool:
        """Whether some units have no event in common with the others."""
        alone = sum(unit not in self.lines for unit in set(self.unit.values()))
        return len(set(self.part.values())) + alone > 1

    def join(self, steps: SharedEvents | None) -> None:
        """Compare parts with the greatest of them by the ends of steps."""
        if steps is None:
            return
        group = self._of_units(steps)
        if not self.lines:
            self._fit_group(group)
            return
        main = Counter(self.part.values()).most_common(1)[0][0]
        for unit in group.ranks.tolist():
            self.part.setdefault(unit, -1 - unit)  # a part of its own
        part = np.array([self.part[unit] for unit in group.ranks.tolist()])
        aligned = self._aligned(group)
        main_ends = median(aligned[:, part == main], axis=1) if (part == main).any() else aligned[:, 0] * np.nan
        joined = 0
        for other in np.unique(part[part != main]).tolist():
            own = median(aligned[:, part == other], axis=1)
            both = ~np.isnan(own) & ~np.isnan(main_ends)
            if not both.any():
                continue
            line = fit_line(own[both], (own - main_ends)[both])
            for unit in [unit for unit, each in self.part.items() if each == other]:
                before = self.lines.get(unit, ON_TIME)
                self.lines[unit] = Line(
                    before.offset_ns + line.offset_ns - line.drift * before.offset_ns,
                    before.drift + line.drift * (1 - before.drift),
                )
                self.errors[unit] = [(own[both], line.aligned(own[both]) - main_ends[both])]
                joined += sum(each == unit for each in self.unit.values())
        self.notes.append(f"{joined} ranks share no collective with the others: compared by the ends of steps")

    def _aligned(self, group: SharedEvents) -> Float:
        """Its ends by the common time, as far as units are fitted; else as they are."""
        lines = np.array([self.lines.get(unit, ON_TIME) for unit in group.ranks.tolist()])
        return np.asarray(group.ends - (lines[:, 0] + lines[:, 1] * group.ends))

    def _of_units(self, group: SharedEvents) -> SharedEvents:
        """The earliest end on each clock: nobody leaves before the end."""
        units = np.array([self.unit[rank] for rank in group.ranks.tolist()], dtype=np.int64)
        found = np.unique(units)
        ends = [np.fmin.reduce(group.ends[:, units == unit], axis=1) for unit in found]
        return SharedEvents(found, np.stack(ends, axis=1))

    def _fit_group(self, group: SharedEvents) -> list[int]:
        """Fit the units of a group that are not known yet; which these are."""
        units = group.ranks.tolist()
        known = [place for place, unit in enumerate(units) if unit in self.lines]
        common = median(self._aligned(group)[:, known], axis=1) if known else reference_clock(group.ends)
        self.events += len(common)
        fresh = []
        for place, unit in enumerate(units):
            own = group.ends[:, place]
            both = ~np.isnan(own) & ~np.isnan(common)
            if not both.any():
                continue
            if unit not in self.lines:
                self.lines[unit] = fit_line(own[both], (own - common)[both])
                fresh.append(unit)
            self.errors.setdefault(unit, []).append((own[both], self.lines[unit].aligned(own[both]) - common[both]))
        return fresh

    def _check_hosts(self, groups: list[SharedEvents]) -> None:
        """A host's name that several machines have: each of its ranks has a clock of its own."""
        for group in groups:
            units = np.array([self.unit[rank] for rank in group.ranks.tolist()])
            for unit in np.unique(units):
                ends = group.ends[:, units == unit]
                apart = median(ends - np.fmin.reduce(ends, axis=1)[:, None], axis=0)
                if ends.shape[1] > 1 and np.nanmax(apart) > ONE_CLOCK_NS:
                    self.unit = {rank: rank for rank in self.ranks.tolist()}
                    self.notes.append(
                        f"ranks of host {self.host_of[int(unit)]} do not share a clock: one for each rank"
                    )
                    return

    def clocks(self, base: int, source: Literal["collectives", "steps"]) -> Clocks:
        """All lines, relative to what the first rank's clock shows."""
        reference = next(self.lines[self.unit[rank]] for rank in self.ranks.tolist() if self.unit[rank] in self.lines)
        rate = 1 - reference.drift
        if len(set(self.unit.values())) == 1:
            self.notes.append("all ranks are on one host and share its clock")
        offset, drift, residual, worst = (np.full(len(self.ranks), np.nan) for _ in range(4))
        bent = []
        for place, rank in enumerate(self.ranks.tolist()):
            line = self.lines.get(self.unit[rank])
            if line is None:
                continue
            offset[place] = (line.offset_ns - reference.offset_ns) / rate
            drift[place] = 1 - (1 - line.drift) / rate
            own, errors = (np.concatenate(each) for each in zip(*self.errors[self.unit[rank]], strict=True))
            residual[place], worst[place] = np.median(np.abs(errors)), np.quantile(np.abs(errors), 0.95)
            if _is_bent(errors[np.argsort(own, kind="stable")]):
                bent.append(place)
        if bent:
            shown = ", ".join(map(str, self.ranks[bent[:10]].tolist())) + (" ..." if len(bent) > 10 else "")
            self.notes.append(
                f"clocks that an offset and a drift do not fit, as if set while the job ran: rank {shown}; "
                f"their times may be wrong by {worst[bent].max() / 1e6:,.1f} ms and more"
            )
        if unknown := int(np.isnan(offset).sum()):
            self.notes.append(f"{unknown} ranks share nothing with the others: their clocks are taken as they are")
        return Clocks(
            ranks=self.ranks,
            reference_ns=float(base),
            offset_ns=offset,
            drift=drift,
            residual_ns=residual,
            residual_p95_ns=worst,
            source=source,
            events=self.events,
            notes=tuple(self.notes),
        )


def reference_clock(ends: Float) -> Float:
    """When events ended, by the median of the clocks; of two the first one's.

    Clocks of different rates pass one another, and their median is no clock of an even rate. So their lines are
    subtracted first.
    """
    if ends.shape[1] == 2:
        return np.array(ends[:, 0])
    most = int((~np.isnan(ends)).sum(axis=0).argmax())
    common = median(ends - np.nan_to_num(median(ends - ends[:, most : most + 1], axis=0)), axis=1)
    half = len(ends) // 2
    if half < 2:
        return common
    for _ in range(2):
        ahead = ends - common[:, None]
        apart = ends[-half:] - ends[:half]
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes = (ahead[-half:] - ahead[:half]) / apart
        slopes[~(apart > 0)] = np.nan
        flat = ends - np.nan_to_num(median(slopes, axis=0)) * (ends - ends[:1])
        common = median(flat - median(flat - common[:, None], axis=0), axis=1)
    return common


def fit_line(own: Float, ahead: Float) -> Line:
    """The line through how far a clock is ahead, by its own times. The drift is 0 where it cannot be told from 0.

    The median of slopes between events half the time apart, then least squares without what is far off: readings that
    are late count for nothing.
    """
    reference = float(own.mean())
    time = own - reference
    half = len(own) // 2
    drift = 0.0
    if half >= 2 and time[-1] > time[0]:
        apart = time[-half:] - time[:half]
        slopes = (ahead[-half:] - ahead[:half])[apart > 0] / apart[apart > 0]
        drift = float(median(slopes)) if len(slopes) else 0.0
    errors = np.abs(ahead - drift * time - median(ahead - drift * time))
    near = errors <= max(1.0, 3 * MAD_TO_SIGMA * float(median(errors)))
    center, least = float(time[near].mean()), time[near] - time[near].mean()
    spread = float(least @ least)
    if near.sum() < 4 or spread <= 0:
        return Line(float(median(ahead)), 0.0)
    drift = float(least @ ahead[near]) / spread
    offset = float(ahead[near].mean()) - drift * center
    left = ahead[near] - offset - drift * time[near]
    error = (float(left @ left) / len(left) / spread) ** 0.5  # standard error of the drift
    if abs(drift) < 3 * error or abs(drift) > MOST_DRIFT:
        return Line(float(median(ahead)), 0.0)
    return Line(offset - drift * reference, drift)


def _is_bent(errors: Float) -> bool:
    """Whether errors, by time, go away from the line together, farther than they scatter."""
    parts = min(PARTS, len(errors) // EVENTS_OF_PART)
    if parts < 2:
        return False
    levels = [float(median(part)) for part in np.array_split(errors, parts)]
    scatter = mad(np.concatenate([part - median(part) for part in np.array_split(errors, parts)]))
    return max(map(abs, levels)) > max(MISFIT_NS, MISFIT_DEVIATIONS * float(scatter))
