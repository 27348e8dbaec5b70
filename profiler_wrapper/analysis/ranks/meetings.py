"""What the ranks of one collective say together: who came last, how long the transfer was, who waited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.arrays import Arrays, Database, column, has_table, to_arrays
from profiler_wrapper.analysis.ranks.model import Float, Int

_ROWS_AT_ONCE = 1_500_000
_GREATEST = 2**62  # number of an instance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meetings:
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


def meet(database: Database) -> Meetings:
    """All meetings of a database that is prepared (see prepared), a few steps at a time."""
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
    return Meetings(
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
