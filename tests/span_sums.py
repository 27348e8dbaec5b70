"""Rows of the span table to what the verdict is made from, in plain Python: slow, with nothing of the engine in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from profiler_wrapper.ranks.database import open_database
from profiler_wrapper.ranks.model import SELF_KINDS, Arrivals, LayerTimes, SelfTimes
from profiler_wrapper.trace.spans import RANK_COLUMNS, SPAN_COLUMNS

Row = dict[str, Any]
_ELSEWHERE = ("gc", "checkpoint", "recompute")  # are their own in whatever they lie


def self_times(rows: Iterable[Row], *, stages: int = 1) -> SelfTimes:
    """Each moment of a step once: communication is waiting but for the shortest of its instance."""
    rows = [row for row in rows if row["step"] is not None]
    ranks, steps = sorted({row["rank"] for row in rows}), sorted({row["step"] for row in rows})
    place_of, at_step = {rank: at for at, rank in enumerate(ranks)}, {step: at for at, step in enumerate(steps)}
    own = np.zeros((len(steps), len(ranks), len(SELF_KINDS)))
    waiting, wall = np.zeros(own.shape[:2]), np.full(own.shape[:2], np.nan)
    shortest = _shortest(rows)
    kinds = {kind: at for at, kind in enumerate(SELF_KINDS)}
    for row in rows:
        step, rank = at_step[row["step"]], place_of[row["rank"]]
        if row["kind"] == "step":
            wall[step, rank] = row["duration_ns"]
        elif row["kind"] == "communication" or row["kind"] in _ELSEWHERE or row["depth"] == 0:
            length = row["duration_ns"]
            outer = _phase_around(row, rows) if row["depth"] else None
            if outer is not None:
                own[step, rank, kinds[outer]] -= length
            if row["kind"] == "communication":
                transfer = shortest[_instance(row)]
                own[step, rank, kinds["communication"]] += transfer
                waiting[step, rank] += length - transfer
            else:
                own[step, rank, kinds[row["kind"]]] += length
    own[:, :, kinds["other"]] += wall - own.sum(axis=2) - waiting
    width = len(ranks)
    return SelfTimes(
        ranks=np.array(ranks),
        stages=np.array([rank * stages // width for rank in ranks]),
        steps=np.array(steps),
        self_ns=own,
        waiting_ns=waiting,
        wall_ns=wall,
        waiting_known=any(row["kind"] == "communication" for row in rows),
    )


def _phase_around(row: Row, rows: list[Row]) -> str | None:
    """The kind of the outermost span around it but a step."""
    around = [
        one
        for one in rows
        if one["rank"] == row["rank"]
        and one["step"] == row["step"]
        and one["depth"] == 0
        and one["kind"] != "step"
        and one is not row
        and one["start_ns"] <= row["start_ns"] <= one["start_ns"] + one["duration_ns"]
    ]
    return around[0]["kind"] if around else None


def _instance(row: Row) -> tuple[Any, ...]:
    """The same on all ranks that take part; a send and its receive are one."""
    name = row["name"].replace("send_", "send_recv_") if row["name"].startswith("send_") else row["name"]
    name = name.replace("recv_", "send_recv_") if name.startswith("recv_") else name
    return row["step"], row["group"], name, row["sequence"]


def _shortest(rows: list[Row]) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for row in rows:
        if row["kind"] == "communication":
            key = _instance(row)
            found[key] = min(found.get(key, row["duration_ns"]), row["duration_ns"])
    return found


def arrivals(rows: Iterable[Row]) -> Arrivals | None:
    """One entry per instance, by durations."""
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    rows = list(rows)
    for row in rows:
        if row["kind"] == "communication":
            found[_instance(row)].append((row["duration_ns"], row["rank"]))
    if not found:
        return None
    ranks = sorted({row["rank"] for row in rows})
    keys = sorted(found, key=str)
    times = [sorted(found[key]) for key in keys]
    shorter = [float(np.median([one[0] for one in each]) - each[0][0]) for each in times]
    return Arrivals(
        step=np.array([key[0] for key in keys]),
        name=tuple(key[2] for key in keys),
        shortest_rank=np.array([each[0][1] for each in times]),
        shorter_by_ns=np.array(shorter),
        ranks=np.array(ranks),
        times_last=np.array([sum(each[0][1] == rank for each in times) for rank in ranks]),
        late_ns=np.array(
            [sum(by for each, by in zip(times, shorter, strict=True) if each[0][1] == rank) for rank in ranks]
        ),
    )


def layer_times(rows: Iterable[Row]) -> LayerTimes | None:
    """Medians over steps."""
    sums: dict[tuple[int, str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row.get("layer"):
            sums[row["rank"], row["layer"], row["kind"]][row["step"]] += row["duration_ns"]
    if not sums:
        return None
    ranks = sorted({key[0] for key in sums})
    layers = sorted({key[1] for key in sums}, key=lambda name: (len(name), name))
    kinds = tuple(kind for kind in ("forward", "recompute", "backward") if any(key[2] == kind for key in sums))
    own = np.full((len(ranks), len(layers), len(kinds)), np.nan)
    for (rank, layer, kind), values in sums.items():
        own[ranks.index(rank), layers.index(layer), kinds.index(kind)] = np.median(list(values.values()))
    return LayerTimes(ranks=np.array(ranks), layers=tuple(layers), kinds=kinds, self_ns=own)


@contextmanager
def database_of(rows: list[Row], *, stages: int = 1) -> Iterator[Any]:
    """The rows as the engine takes them."""
    import pyarrow

    ranks = sorted({row["rank"] for row in rows})
    places = [{"rank": rank, "stage": rank * stages // len(ranks)} for rank in ranks]
    with open_database() as database:
        for name, columns, found in (("spans", SPAN_COLUMNS, rows), ("ranks", RANK_COLUMNS, places)):
            database.register(
                "found", pyarrow.Table.from_pylist([{one: row.get(one) for one in columns} for row in found])
            )
            chosen = ", ".join(f'CAST("{one}" AS {kind}) AS "{one}"' for one, (kind, _) in columns.items())
            database.execute(f"CREATE TABLE {name} AS SELECT {chosen} FROM found")
        yield database
