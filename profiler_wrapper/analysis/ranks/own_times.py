"""What each rank did itself in each step, and how long it waited for others."""

from __future__ import annotations

from typing import Literal

import numpy as np

from profiler_wrapper.analysis.ranks.arrays import Database, Grid, column, has_table, to_arrays
from profiler_wrapper.analysis.ranks.meetings import Meetings, meet
from profiler_wrapper.analysis.ranks.model import COMPUTE, OWN_KINDS, Float, Int, OwnTimes

Basis = Literal["cpu", "device"]

_CARVED = ("gc", "checkpoint", "communication", "recompute")  # their own kinds wherever they lie
_RELEVANT = "step IS NOT NULL AND (depth = 0 OR kind IN ('gc', 'checkpoint', 'communication', 'recompute'))"
# A moment in which several spans run belongs to the first of these: on the main thread, then beside it.
_ON_MAIN = ("gc", "checkpoint", "communication", "recompute", "data", "optimizer", "backward", "forward", "other")
_BESIDE = ("communication", "data", "gc", "checkpoint")
_BITS = 9  # of a counter of running spans: at most 511 of one kind at once


def own_times(database: Database, *, basis: Basis = "cpu", meetings: Meetings | None = None) -> OwnTimes:
    """What each rank did itself in each step, see `OwnTimes`; of a database that is prepared.

    Args:
        basis: "device": compute is the device's time where a span has it.
        meetings: what `meet` says, where it was asked already.
    """
    meetings = meet(database) if meetings is None else meetings
    duration = "coalesce(device_ns, duration_ns)" if basis == "device" else "duration_ns"
    sums = ", ".join(
        f"coalesce(sum({time}) FILTER (kind = '{kind}'), 0)::DOUBLE AS {kind}_ns"
        for kind, time in ((kind, duration if kind in COMPUTE else "duration_ns") for kind in OWN_KINDS)
    )
    carved = ", ".join(f"'{kind}'" for kind in _CARVED)
    database.execute(
        f"""CREATE OR REPLACE TABLE step_sums AS
        SELECT rank, step, {sums},
            min(start_ns) FILTER (kind = 'step') AS step_begin,
            max(start_ns + duration_ns) FILTER (kind = 'step') AS step_end,
            min(start_ns) FILTER (kind <> 'step') AS first_ns,
            max(start_ns + duration_ns) FILTER (kind <> 'step') AS last_ns,
            coalesce(sum(duration_ns) FILTER (kind <> 'step'), 0) AS covered_ns,
            count(*) FILTER (depth > 0 AND kind IN ({carved})) AS nested,
            min(thread) FILTER (kind <> 'step') AS least_thread, max(thread) FILTER (kind <> 'step') AS greatest_thread
        FROM spans WHERE {_RELEVANT} GROUP BY rank, step"""
    )
    database.execute(
        """CREATE OR REPLACE TABLE step_windows AS
        SELECT rank, step, coalesce(step_begin, first_ns) AS begin_ns, coalesce(step_end, last_ns) AS end_ns,
            nested > 0 OR least_thread <> greatest_thread OR first_ns < step_begin OR last_ns > step_end
            OR covered_ns > coalesce(step_end - step_begin, last_ns - first_ns) AS overlapping
        FROM step_sums"""
    )
    ranks, stages = _ranks_and_stages(database)
    steps = column(database, "SELECT DISTINCT step FROM step_windows ORDER BY step")
    grid = Grid(ranks, steps)
    windows = to_arrays(database, "SELECT rank, step, begin_ns, end_ns - begin_ns AS wall_ns FROM step_windows")
    wall = grid.filled(windows, "wall_ns")
    own = np.zeros((*wall.shape, len(OWN_KINDS)))
    plain = to_arrays(
        database,
        "SELECT s.* FROM step_sums s JOIN step_windows w USING (rank, step) WHERE NOT coalesce(w.overlapping, false)",
    )
    step, rank = grid.places(plain)
    for place, kind in enumerate(OWN_KINDS):
        own[step, rank, place] = plain[f"{kind}_ns"]
    beside = np.zeros(wall.shape)  # communication that runs beside the main thread, and that nothing hides
    if database.execute("SELECT coalesce(bool_or(overlapping), false) FROM step_windows").fetchone()[0]:
        _sweep(database, grid, own, beside, duration)
    communication = OWN_KINDS.index("communication")
    transfers = _transfers(meetings, grid, own[:, :, communication], beside)
    waiting = own[:, :, communication] + beside - transfers
    own[:, :, communication] = transfers
    other = OWN_KINDS.index("other")
    named = own.sum(axis=2) - own[:, :, other] + waiting
    if basis == "cpu":
        own[:, :, other] = wall - named
    own[np.isnan(wall)] = np.nan
    waiting[np.isnan(wall)] = np.nan
    told = database.execute("SELECT count(*) > 0 FROM communications").fetchone()[0]
    begin = grid.filled(windows, "begin_ns")
    return OwnTimes(
        ranks=ranks,
        stages=stages,
        steps=steps,
        own_ns=own,
        waiting_ns=waiting,
        wall_ns=wall,
        begin_ns=_aligned(database, ranks, begin),
        basis=basis,
        waiting_known=bool(told) or len(ranks) < 2,
    )


def _sweep(database: Database, grid: Grid, own: Float, beside: Float, duration: str) -> None:
    """Steps in which spans overlap: each moment goes to one kind, the first of those that run, as `_ON_MAIN` has it."""
    counters = {("main", kind): place for place, kind in enumerate(_ON_MAIN)}
    counters |= {("beside", kind): len(_ON_MAIN) + place for place, kind in enumerate(_BESIDE)}
    weights = {place: 1 << (_BITS * place) for place in counters.values()}
    on_main = "(m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread)"

    def cases(where: str, kinds: tuple[str, ...]) -> str:
        whens = " ".join(f"WHEN '{kind}' THEN {weights[counters[where, kind]]}::HUGEINT" for kind in kinds)
        return f"CASE s.kind {whens} END"

    weight = f"CASE WHEN {on_main} THEN {cases('main', _ON_MAIN)} ELSE {cases('beside', _BESIDE)} END"
    running = " ".join(
        f"WHEN (running // {weights[place]}) % {1 << _BITS} > 0 THEN {place}" for place in sorted(counters.values())
    )
    relevant = f"kind <> 'step' AND {_RELEVANT}"
    for first, last in _rank_ranges(database):
        found = to_arrays(
            database,
            f"""WITH relevant AS (
                SELECT s.rank, s.step, greatest(s.start_ns, w.begin_ns) AS begin_ns,
                    least(s.start_ns + s.duration_ns, w.end_ns) AS end_ns, {weight} AS weight
                FROM (SELECT * FROM spans WHERE {relevant} AND rank BETWEEN {first} AND {last}) s
                JOIN (SELECT * FROM step_windows WHERE overlapping) w USING (rank, step)
                LEFT JOIN main_threads m ON m.rank = s.rank),
            counted AS (SELECT * FROM relevant WHERE weight IS NOT NULL AND end_ns > begin_ns),
            events AS (
                SELECT rank, step, begin_ns AS at_ns, weight FROM counted
                UNION ALL
                SELECT rank, step, end_ns, -weight FROM counted),
            moments AS (
                SELECT rank, step, sum(weight) OVER moment AS running, lead(at_ns) OVER moment - at_ns AS length_ns
                FROM events WINDOW moment AS (PARTITION BY rank, step ORDER BY at_ns ROWS UNBOUNDED PRECEDING))
            SELECT rank, step, CASE {running} ELSE -1 END AS place, sum(length_ns)::DOUBLE AS length_ns
            FROM moments WHERE length_ns > 0 GROUP BY ALL""",
        )
        names = {place: key for key, place in counters.items()}
        places = grid.places(found)
        for place, (where, kind) in names.items():
            chosen = found["place"] == place
            target = beside if (where, kind) == ("beside", "communication") else own[:, :, OWN_KINDS.index(kind)]
            np.add.at(target, (places[0][chosen], places[1][chosen]), found["length_ns"][chosen])
        if "device_ns" in duration:
            _device_times(database, grid, own, first, last)


def _device_times(database: Database, grid: Grid, own: Float, first: int, last: int) -> None:
    """Compute of these ranks as the device tells it, where a rank's spans do."""
    for kind in COMPUTE:
        told = to_arrays(
            database,
            f"""SELECT s.rank, s.step, sum(s.device_ns)::DOUBLE AS device_ns FROM spans s
            JOIN (SELECT * FROM step_windows WHERE overlapping) w USING (rank, step)
            WHERE s.kind = '{kind}' AND s.depth = 0 AND s.device_ns IS NOT NULL AND s.rank BETWEEN {first} AND {last}
            GROUP BY s.rank, s.step""",
        )
        step, rank = grid.places(told)
        own[step, rank, OWN_KINDS.index(kind)] = told["device_ns"]


def _rank_ranges(database: Database, rows_at_once: int = 2_000_000) -> list[tuple[int, int]]:
    """Ranks in ranges with about so many spans, so that what is sorted at once stays small."""
    counts = to_arrays(database, "SELECT rank, count(*) AS spans FROM spans GROUP BY rank ORDER BY rank")
    part = (np.cumsum(counts["spans"]) - 1) // rows_at_once
    firsts = np.flatnonzero(np.diff(part, prepend=-1))
    ends = np.append(firsts[1:], len(part)) - 1
    ranks = counts["rank"]
    return [(int(ranks[first]), int(ranks[end])) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]


def _transfers(meetings: Meetings, grid: Grid, on_main: Float, beside: Float) -> Float:
    """Of the time in communication what its transfers take: of each collective the shortest over its ranks."""
    total = np.zeros(on_main.shape)
    places = np.ix_(np.searchsorted(grid.steps, meetings.steps), np.searchsorted(grid.ranks, meetings.ranks))
    for communication, of_meetings in ((on_main, meetings.transfer_on_main_ns), (beside, meetings.transfer_beside_ns)):
        transfer = np.zeros(on_main.shape)
        transfer[places] = of_meetings
        total += np.minimum(communication, transfer)
    return total


def _ranks_and_stages(database: Database) -> tuple[Int, Int]:
    found = to_arrays(
        database,
        """SELECT w.rank, coalesce(any_value(r.stage), 0)::BIGINT AS stage
        FROM (SELECT DISTINCT rank FROM step_windows) w LEFT JOIN ranks r USING (rank)
        GROUP BY w.rank ORDER BY w.rank""",
    )
    return found["rank"].astype(np.int64), found["stage"].astype(np.int64)


def _aligned(database: Database, ranks: Int, begin: Float) -> Float:
    """Begins of steps (S, R) by aligned clocks."""
    if not has_table(database, "clocks"):
        return begin
    clocks = to_arrays(database, f"SELECT * FROM clocks WHERE rank IN ({', '.join(map(str, ranks.tolist()))})")
    at = np.searchsorted(ranks, clocks["rank"])
    found: Float = begin.copy()
    found[:, at] -= clocks["offset_ns"] + clocks["drift"] * (begin[:, at] - clocks["reference_ns"])
    return found
