"""Collectives, sends and receives: who came last to each, who waited, what each name costs in all.

A database has the tables (or views) `spans` and `ranks`, as recording/span_table.py describes them. `prepare` adds:

- `main_threads`: rank, thread: the one whose time is the step's.
- `labels`: label, name, "group": a number for each communication in each group. A send and its receive are one.
- `labels_of_names`: key, label: of each name in each group as spans have it.
- `label_bytes`: label, bytes: moved in all.
- `communications`: rank, step, label, sequence, start_ns, duration_ns, on_main.

Rows are added up in the database, so that an answer has the size of ranks times steps, never that of the spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.model import Arrivals, CommunicationRow, Float, Int
from profiler_wrapper.recording.database import Arrays, Database, column, has_table, insert, to_arrays

_SENDS = re.compile(r"(?i)(^|[^a-z])(i?)(send|recv|receive)(?![a-z])")


def prepare(database: Database) -> None:
    """Adds the tables that the answers are made from."""
    found = database.execute(
        f"""SELECT rank, thread, CASE WHEN kind = 'communication' THEN {label_key("spans")} END AS key,
            count(*) FILTER (kind = 'step') AS steps, any_value(name), any_value("group"),
            coalesce(sum(duration_ns) FILTER (kind <> 'step' AND depth = 0), 0)::BIGINT AS busy_ns,
            TRY_CAST(sum(bytes) AS BIGINT) AS bytes
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
        SELECT s.rank, s.step, l.label, s.sequence, s.start_ns, s.duration_ns,
            (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main
        FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")} LEFT JOIN main_threads m ON m.rank = s.rank
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


def label_key(table: str) -> str:
    """The expression of the key in `labels_of_names` of a span's name in its group."""
    return f"""hash({table}.name, coalesce({table}."group", ''))"""


def common_name(name: str) -> str:
    """What a send and the receive that it goes to have in common: `"forward-send"` -> `"forward-send/recv"`."""
    return _SENDS.sub(r"\1\2send/recv", name)


# --- collectives matched across ranks ---


_ROWS_AT_ONCE = 1_500_000
_GREATEST = 2**62  # number of an instance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedCollectives:
    """Collectives that two ranks or more tell of. (C,) arrays by instance; (S, R) and (R,) by step and rank.

    The shortest duration over the ranks of an instance is its transfer: who came last did not wait.
    """

    label: Int  # (C,) as the table `labels` has it
    step: Int  # (C,)
    sequence: Int  # (C,)
    size: Int  # (C,) ranks that tell of it
    shortest_ns: Float  # (C,)
    median_ns: Float  # (C,) of durations
    total_ns: Float  # (C,)
    shortest_rank: Int  # (C,)
    first_rank: Int  # (C,) by starts, aligned where clocks are
    last_rank: Int  # (C,)
    lateness_ns: Float  # (C,) last start - median start
    ranks: Int  # (R,)
    steps: Int  # (S,)
    transfer_on_main_ns: Float  # (S, R) shortest durations of what a rank had part in, on its main thread
    transfer_beside_ns: Float  # (S, R) the same, beside it
    times_last: Int  # (R,) times a rank had the shortest duration
    late_ns: Float  # (R,) median - shortest of these
    waiting_ns: Float  # (R,) durations beyond the shortest


def match_collectives(database: Database) -> MatchedCollectives:
    """All of a database that is prepared, matched across ranks, a few steps at a time."""
    ranks = column(database, "SELECT DISTINCT rank FROM communications ORDER BY rank")
    steps = column(database, "SELECT DISTINCT step FROM communications ORDER BY step")
    shape = (len(steps), len(ranks))
    on_main, beside = np.zeros(shape), np.zeros(shape)
    times_last = np.zeros(len(ranks), dtype=np.int64)
    late, waiting = np.zeros(len(ranks)), np.zeros(len(ranks))
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for rows in _sorted_rows(database):
        first = np.flatnonzero(np.diff(rows["instance"], prepend=-1))
        size = np.diff(first, append=len(rows["instance"]))
        place = np.repeat(np.arange(len(first)), size)
        shared = (size > 1)[place]
        first, size, rows = _without_lone(rows, shared, size)
        if not len(first):
            continue
        place = np.repeat(np.arange(len(first)), size)
        part = _part(rows, first, size, place)
        parts.append(part)
        rank = np.searchsorted(ranks, rows["rank"])
        step = np.searchsorted(steps, rows["step"])
        shortest = part["shortest_ns"][place]
        for target, chosen in ((on_main, rows["on_main"]), (beside, ~rows["on_main"])):
            at = step[chosen] * len(ranks) + rank[chosen]
            target += np.bincount(at, weights=shortest[chosen], minlength=target.size).reshape(shape)
        waiting += np.bincount(rank, weights=rows["duration_ns"] - shortest, minlength=len(ranks))
        last = np.searchsorted(ranks, part["shortest_rank"])
        alone = part["median_ns"] > part["shortest_ns"]  # of ranks that came together, none came last
        times_last += np.bincount(last[alone], minlength=len(ranks))
        late += np.bincount(last, weights=part["median_ns"] - part["shortest_ns"], minlength=len(ranks))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _nothing()
    return MatchedCollectives(
        **joined,
        ranks=ranks,
        steps=steps,
        transfer_on_main_ns=on_main,
        transfer_beside_ns=beside,
        times_last=times_last,
        late_ns=late,
        waiting_ns=waiting,
    )


def _without_lone(rows: Arrays, shared: npt.NDArray[np.bool_], size: Int) -> tuple[Int, Int, Arrays]:
    """Where several ranks tell: (first row of each instance, its rows, all rows)."""
    size = size[size > 1]
    return np.cumsum(size) - size, size, {name: values[shared] for name, values in rows.items()}


def _part(rows: Arrays, first: Int, size: Int, place: Int) -> dict[str, npt.NDArray[Any]]:
    """Instances of some steps; `rows` are sorted by instance, then by duration."""
    duration, rank = rows["duration_ns"].astype(np.float64), rows["rank"].astype(np.int64)
    by_start = np.lexsort((rows["start_ns"], place))
    start = rows["start_ns"][by_start]
    low, high, last = first + (size - 1) // 2, first + size // 2, first + size - 1
    return {
        "label": rows["label"][first].astype(np.int64),
        "step": rows["step"][first].astype(np.int64),
        "sequence": rows["sequence"][first].astype(np.int64),
        "size": size.astype(np.int64),
        "shortest_ns": duration[first],
        "median_ns": (duration[low] + duration[high]) / 2,
        "total_ns": np.add.reduceat(duration, first),
        "shortest_rank": rank[first],
        "first_rank": rank[by_start[first]],
        "last_rank": rank[by_start[last]],
        "lateness_ns": (start[last] - start[low]) - (start[high] - start[low]) / 2,
    }


def _nothing() -> dict[str, npt.NDArray[Any]]:
    whole = ("label", "step", "sequence", "size", "shortest_rank", "first_rank", "last_rank")
    names = {name: np.empty(0, dtype=np.int64) for name in whole}
    return names | {name: np.empty(0) for name in ("shortest_ns", "median_ns", "total_ns", "lateness_ns")}


def _sorted_rows(database: Database) -> Iterator[Arrays]:
    """Numbered communications of some steps at a time, by instance, then by duration."""
    counts = to_arrays(
        database,
        """SELECT step, count(*) AS rows, max(sequence) AS most, max(label) AS label FROM communications
        WHERE sequence IS NOT NULL GROUP BY step ORDER BY step""",
    )
    if not len(counts["step"]):
        return
    sequences, labels = int(counts["most"].max()) + 1, int(counts["label"].max()) + 1
    part = (np.cumsum(counts["rows"]) - 1) // _ROWS_AT_ONCE
    for number in np.unique(part).tolist():
        steps = counts["step"][part == number]
        first, last = int(steps[0]), int(steps[-1])
        instance = f"c.sequence + {sequences} * (c.step - {first} + {last - first + 1} * c.label::BIGINT)"
        if sequences * (last - first + 1) * labels > _GREATEST:  # steps with such numbers are counted instead
            instance = "dense_rank() OVER (ORDER BY c.label, c.step, c.sequence)"
        start, join = _aligned_start(database)
        yield to_arrays(
            database,
            f"""SELECT {instance} AS instance,
                c.rank, c.step, c.label, c.sequence, {start} AS start_ns, c.duration_ns, c.on_main
            FROM communications c {join} WHERE c.sequence IS NOT NULL AND c.step BETWEEN {first} AND {last}
            ORDER BY instance, c.duration_ns, c.rank""",
        )


def _aligned_start(database: Database) -> tuple[str, str]:
    """(expression, join) of starts by aligned clocks, where the database has `clocks`; else by each rank's own."""
    if not has_table(database, "clocks"):
        return "c.start_ns", ""
    shift = "coalesce(k.offset_ns + k.drift * (c.start_ns - k.reference_ns), 0)::BIGINT"
    return f"c.start_ns - {shift}", "LEFT JOIN clocks k ON k.rank = c.rank"


# --- what each costs ---


def arrivals(database: Database, *, matched: MatchedCollectives | None = None) -> Arrivals | None:
    """Who came last to each collective, and who waited; None where no two ranks tell of one."""
    matched = match_collectives(database) if matched is None else matched
    if not len(matched.step):
        return None
    rows = database.execute('SELECT label, name, "group" FROM labels').fetchall()
    named = {label: (name, group) for label, name, group in rows}
    names = [named[label] for label in matched.label.tolist()]
    order = np.lexsort((matched.sequence, matched.label, matched.step))
    return Arrivals(
        step=matched.step[order],
        group=tuple(names[i][1] for i in order.tolist()),
        name=tuple(names[i][0] for i in order.tolist()),
        sequence=matched.sequence[order],
        size=matched.size[order],
        first_rank=matched.first_rank[order],
        last_rank=matched.last_rank[order],
        lateness_ns=matched.lateness_ns[order],
        shortest_rank=matched.shortest_rank[order],
        shorter_by_ns=(matched.median_ns - matched.shortest_ns)[order],
        transfer_ns=matched.shortest_ns[order],
        waiting_ns=(matched.total_ns - matched.shortest_ns * matched.size)[order],
        ranks=matched.ranks,
        times_last=matched.times_last,
        late_ns=matched.late_ns,
        rank_waiting_ns=matched.waiting_ns,
    )


def communication(database: Database, *, matched: MatchedCollectives | None = None) -> tuple[CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first."""
    matched = match_collectives(database) if matched is None else matched
    rows = database.execute(
        """SELECT c.label, l.name, l."group", c.ranks, c.instances, c.time_ns, b.bytes FROM (
            SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                sum(duration_ns)::BIGINT AS time_ns FROM communications GROUP BY label) c
        JOIN labels l USING (label) LEFT JOIN label_bytes b USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """
    ).fetchall()
    transfers = np.bincount(matched.label, weights=matched.shortest_ns * matched.size, minlength=1)
    counts = np.bincount(matched.label, minlength=1)
    hidden = overlapped_ns(database)
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
                overlapped_ns=hidden.get(label),
                bandwidth_bytes_per_s=bandwidth,
            )
        )
    return tuple(found)


def is_call(row: CommunicationRow, rows: Sequence[CommunicationRow]) -> bool:
    """Whether a row is what the calling thread takes to start collectives that another row has, of the backend's."""
    return not row.group and any(other.group and other.name == row.name for other in rows)


# --- overlap with compute ---


_NO_OVERLAP = "overlap: nothing tells what its rank computes beside it, or not of all of them"
_NO_BYTES = "bandwidth: nothing tells how many bytes were moved (traces of a CPU do with record_shapes alone)"
_NO_TRANSFER = "bandwidth: no two ranks tell of one of these, so its transfer cannot be told from waiting"


def overlapped_ns(database: Database) -> dict[int, int]:
    """By label of a prepared database: time with compute of the same rank beside, where all of its spans tell it."""
    if database.execute("SELECT 1 FROM spans WHERE overlapped_ns IS NOT NULL LIMIT 1").fetchone() is None:
        return {}
    found = database.execute(
        f"""SELECT l.label, sum(s.overlapped_ns)::BIGINT FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")}
        WHERE s.kind = 'communication' AND s.step IS NOT NULL
        GROUP BY l.label HAVING count(*) = count(s.overlapped_ns)"""
    ).fetchall()
    return dict(found)


def with_reasons(rows: Iterable[CommunicationRow]) -> tuple[CommunicationRow, ...]:
    """The rows, each with why its overlap or its bandwidth is not known."""
    found = []
    for row in rows:
        reasons = [_NO_OVERLAP] if row.overlapped_ns is None else []
        if row.bandwidth_bytes_per_s is None:
            reasons.append(_NO_BYTES if row.bytes is None else _NO_TRANSFER)
        found.append(replace(row, unknown="; ".join(reasons)))
    return tuple(found)
