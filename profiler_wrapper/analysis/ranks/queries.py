"""What DuckDB answers about the spans of all ranks, as arrays: times, arrivals, layers, communication.

A database has the tables (or views) `spans` and `ranks`, as recording/span_table.py describes them. `prepare` adds:

- `main_threads`: rank, thread: the one whose time is the step's.
- `labels`: label, name, "group": a number for each communication in each group. A send and its receive are one.
- `communications`: rank, step, label, sequence, start_ns, duration_ns, on_main.

Rows are added up in the database, so that an answer has the size of ranks times steps, never that of the spans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.meetings import Arrays, Meetings, has_table, meet, to_arrays
from profiler_wrapper.analysis.ranks.model import (
    COMPUTE,
    OWN_KINDS,
    Arrivals,
    CommunicationRow,
    Float,
    Int,
    LayerTimes,
    OwnTimes,
)
from profiler_wrapper.recording.span_database import insert

Database = Any  # duckdb.DuckDBPyConnection
Basis = Literal["cpu", "device"]

CARVED = ("gc", "checkpoint", "communication", "recompute")  # their own kinds wherever they lie
_RELEVANT = "step IS NOT NULL AND (depth = 0 OR kind IN ('gc', 'checkpoint', 'communication', 'recompute'))"
# A moment in which several spans run belongs to the first of these: on the main thread, then beside it.
_ON_MAIN = ("gc", "checkpoint", "communication", "recompute", "data", "optimizer", "backward", "forward", "other")
_BESIDE = ("communication", "data", "gc", "checkpoint")
_BITS = 9  # of a counter of running spans: at most 511 of one kind at once
_SENDS = re.compile(r"(?i)(^|[^a-z])(i?)(send|recv|receive)(?![a-z])")


def prepare(database: Database) -> None:
    """Adds the tables that the answers are made from."""
    found = database.execute(
        f"""SELECT rank, thread, CASE WHEN kind = 'communication' THEN {_key("spans")} END AS key,
            count(*) FILTER (kind = 'step') AS steps, any_value(name), any_value("group"),
            coalesce(sum(duration_ns) FILTER (kind <> 'step' AND depth = 0), 0)::BIGINT AS busy_ns,
            sum(bytes)::BIGINT AS bytes
        FROM spans WHERE step IS NOT NULL GROUP BY ALL"""
    ).fetchall()
    _main_threads(database, [(rank, thread, key, steps, busy) for rank, thread, key, steps, _, _, busy, _ in found])
    label_of = _labels(database, {key: (name, group) for _, _, key, _, name, group, _, _ in found if key is not None})
    moved: dict[int, int] = {}
    for _, _, key, _, _, _, _, size in found:
        if key is not None and size is not None:
            moved[label_of[key]] = moved.get(label_of[key], 0) + size
    database.execute("CREATE OR REPLACE TABLE label_bytes (label INTEGER, bytes BIGINT)")
    insert(database, "label_bytes", list(moved.items()))
    database.execute(
        f"""CREATE OR REPLACE TABLE communications AS
        SELECT s.rank, s.step::INTEGER AS step, l.label, s.sequence, s.start_ns, s.duration_ns,
            (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main
        FROM spans s JOIN labels_of_names l ON l.key = {_key("s")} LEFT JOIN main_threads m ON m.rank = s.rank
        WHERE s.kind = 'communication' AND s.step IS NOT NULL"""
    )


def _main_threads(database: Database, found: Sequence[tuple[int, int | None, int | None, int, int]]) -> None:
    """Of each rank: the thread of its steps; where there are none, that with the most time in spans."""
    marks: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, thread, key, steps, busy_ns in found:
        if thread is not None:
            before = marks.setdefault(rank, {}).get(thread, (0, 0))
            marks[rank][thread] = (before[0] + steps, before[1] + (busy_ns if key is None else 0))
    database.execute("CREATE OR REPLACE TABLE main_threads (rank INTEGER, thread BIGINT)")
    rows = [(rank, max(threads, key=lambda thread: threads[thread])) for rank, threads in marks.items()]
    insert(database, "main_threads", rows)


def _labels(database: Database, named: Mapping[int, tuple[str, str | None]]) -> dict[int, int]:
    """By key of a name in a group, its label."""
    numbers: dict[tuple[str, str], int] = {}
    of_names = [
        (key, numbers.setdefault((common_name(name), group or ""), len(numbers)))
        for key, (name, group) in named.items()
    ]
    database.execute('CREATE OR REPLACE TABLE labels (label INTEGER, name VARCHAR, "group" VARCHAR)')
    database.execute("CREATE OR REPLACE TABLE labels_of_names (key UBIGINT, label INTEGER)")
    insert(database, "labels_of_names", of_names)
    insert(database, "labels", [(label, *both) for both, label in numbers.items()])
    return dict(of_names)


def _key(table: str) -> str:
    return f"""hash({table}.name, coalesce({table}."group", ''))"""


def common_name(name: str) -> str:
    """What a send and the receive that it goes to have in common: `"forward-send"` -> `"forward-send/recv"`."""
    return _SENDS.sub(r"\1\2send/recv", name)


# --- times of ranks ---


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
    carved = ", ".join(f"'{kind}'" for kind in CARVED)
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
    steps = _column(database, "SELECT DISTINCT step FROM step_windows ORDER BY step")
    grid = _Grid(ranks, steps)
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


def _sweep(database: Database, grid: _Grid, own: Float, beside: Float, duration: str) -> None:
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


def _device_times(database: Database, grid: _Grid, own: Float, first: int, last: int) -> None:
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


def _transfers(meetings: Meetings, grid: _Grid, on_main: Float, beside: Float) -> Float:
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


# --- clocks ---


def _aligned(database: Database, ranks: Int, begin: Float) -> Float:
    """Begins of steps (S, R) by aligned clocks."""
    if not has_table(database, "clocks"):
        return begin
    pieces = to_arrays(database, "SELECT * FROM clocks ORDER BY rank, from_ns")
    found: Float = begin.copy()
    for i in range(len(pieces["rank"])):
        column = np.flatnonzero(ranks == pieces["rank"][i])
        if not len(column):
            continue
        own = begin[:, column[0]]
        inside = (own >= pieces["from_ns"][i]) & (own < pieces["until_ns"][i])
        shift = pieces["offset_ns"][i] + pieces["drift"][i] * (own - pieces["reference_ns"][i])
        found[inside, column[0]] = (own - shift)[inside]
    return found


# --- communication ---


def arrivals(database: Database, *, meetings: Meetings | None = None) -> Arrivals | None:
    """Who came last to each collective, and who waited; None where no two ranks tell of one."""
    meetings = meet(database) if meetings is None else meetings
    if not len(meetings.step):
        return None
    rows = database.execute('SELECT label, name, "group" FROM labels').fetchall()
    named = {label: (name, group) for label, name, group in rows}
    names = [named[label] for label in meetings.label.tolist()]
    order = np.lexsort((meetings.sequence, meetings.label, meetings.step))
    return Arrivals(
        step=meetings.step[order],
        group=tuple(names[i][1] for i in order.tolist()),
        name=tuple(names[i][0] for i in order.tolist()),
        sequence=meetings.sequence[order],
        size=meetings.size[order],
        first_rank=meetings.first_rank[order],
        last_rank=meetings.last_rank[order],
        lateness_ns=meetings.lateness_ns[order],
        shortest_rank=meetings.shortest_rank[order],
        shorter_by_ns=(meetings.median_ns - meetings.shortest_ns)[order],
        transfer_ns=meetings.shortest_ns[order],
        waiting_ns=(meetings.total_ns - meetings.shortest_ns * meetings.size)[order],
        ranks=meetings.ranks,
        times_last=meetings.times_last,
        late_ns=meetings.late_ns,
        rank_waiting_ns=meetings.waiting_ns,
    )


def communication(database: Database, *, meetings: Meetings | None = None) -> tuple[CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first."""
    meetings = meet(database) if meetings is None else meetings
    rows = database.execute(
        """SELECT c.label, l.name, l."group", c.ranks, c.instances, c.time_ns, b.bytes FROM (
            SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                sum(duration_ns)::BIGINT AS time_ns FROM communications GROUP BY label) c
        JOIN labels l USING (label) LEFT JOIN label_bytes b USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """
    ).fetchall()
    transfers = np.bincount(meetings.label, weights=meetings.shortest_ns * meetings.size, minlength=1)
    counts = np.bincount(meetings.label, minlength=1)
    found = []
    for label, name, group, ranks, instances, time_ns, moved in rows:
        met = label < len(counts) and counts[label] > 0
        transfer_ns = int(transfers[label]) if met else None
        of_one_rank = None if moved is None else moved // ranks
        bandwidth = moved * 1e9 / transfer_ns if moved and transfer_ns else None
        found.append(
            CommunicationRow(
                name=name,
                group=group,
                size=ranks,
                instances=int(counts[label]) if met else instances,
                bytes=of_one_rank,
                time_ns=time_ns,
                transfer_ns=transfer_ns,
                waiting_ns=None if transfer_ns is None else time_ns - transfer_ns,
                overlapped_ns=None,
                bandwidth_bytes_per_s=bandwidth,
            )
        )
    return tuple(found)


# --- layers ---


def layer_times(database: Database, *, basis: Basis = "cpu") -> LayerTimes | None:
    """Each layer's time in a step of each rank, what is below it included; None where no span is of a layer."""
    own = "duration_ns - coalesce(waiting_ns, 0)"
    if basis == "device":
        own = f"coalesce(device_ns, {own})"
    kinds = ", ".join(f"'{kind}'" for kind in COMPUTE)
    database.execute(
        f"""CREATE OR REPLACE TABLE layer_sums AS
        SELECT rank, layer, kind, median(own_ns) AS own_ns, coalesce(stddev_samp(own_ns), 0) AS spread_ns,
            count(*) AS steps, min(first_ns) AS first_ns
        FROM (SELECT rank, step, layer, kind, sum({own})::DOUBLE AS own_ns, min(start_ns) AS first_ns FROM spans
            WHERE layer IS NOT NULL AND step IS NOT NULL AND kind IN ({kinds}) GROUP BY rank, step, layer, kind)
        GROUP BY rank, layer, kind"""
    )
    layers = [
        row[0]
        for row in database.execute(
            """SELECT layer FROM layer_sums s LEFT JOIN ranks r USING (rank)
            GROUP BY layer ORDER BY min(coalesce(r.stage, 0)), min(first_ns), layer"""
        ).fetchall()
    ]
    if not layers:
        return None
    found = to_arrays(database, "SELECT rank, layer, kind, own_ns, spread_ns, steps FROM layer_sums")
    ranks = np.unique(found["rank"]).astype(np.int64)
    stage_of = dict(database.execute("SELECT rank, stage FROM ranks").fetchall())
    place_of = {layer: place for place, layer in enumerate(layers)}
    places = (
        np.searchsorted(ranks, found["rank"]),
        np.array([place_of[layer] for layer in _texts(found["layer"])], dtype=np.int64),
        np.array([COMPUTE.index(kind) for kind in _texts(found["kind"])], dtype=np.int64),
    )
    times = np.full((len(ranks), len(layers), len(COMPUTE)), np.nan)
    spread, steps = times.copy(), np.zeros(len(ranks), dtype=np.int64)
    times[places], spread[places] = found["own_ns"], found["spread_ns"]
    np.maximum.at(steps, places[0], found["steps"].astype(np.int64))
    return LayerTimes(
        ranks=ranks,
        stages=np.array([stage_of.get(rank) or 0 for rank in ranks.tolist()], dtype=np.int64),
        layers=tuple(layers),
        kinds=COMPUTE,
        own_ns=times,
        spread_ns=spread,
        steps=steps,
    )


# --- from the database to arrays ---


class _Grid:
    """Places of (step, rank) pairs in arrays (S, R)."""

    def __init__(self, ranks: Int, steps: Int) -> None:
        self.ranks, self.steps = ranks, steps

    def places(self, found: Arrays) -> tuple[Int, Int]:
        """(step's place, rank's place) per row."""
        return np.searchsorted(self.steps, found["step"]), np.searchsorted(self.ranks, found["rank"])

    def filled(self, found: Arrays, name: str) -> Float:
        """One column as (S, R); nan where there is no row."""
        values = np.full((len(self.steps), len(self.ranks)), np.nan)
        values[self.places(found)] = found[name]
        return values


def _column(database: Database, sql: str) -> Int:
    return np.asarray(next(iter(to_arrays(database, sql).values())), dtype=np.int64)


def _texts(values: npt.NDArray[Any]) -> tuple[str, ...]:
    return tuple("" if value is None else str(value) for value in values.tolist())
