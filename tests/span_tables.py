"""Span tables made by hand, a row a tuple, in a database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from profiler_wrapper.ranks.database import Database, insert, open_database
from profiler_wrapper.ranks.model import SelfTimes
from profiler_wrapper.trace.spans import RANK_COLUMNS, SPAN_COLUMNS

EPOCH_NS = 1_790_000_000_000_000_000


def span(rank: int, step: int | None, kind: str, start: int, length: int, **more: Any) -> dict[str, Any]:
    """A row; times in ns after `EPOCH_NS`, named by its kind, on thread 1."""
    row = {"rank": rank, "step": step, "name": kind, "kind": kind, "start_ns": EPOCH_NS + start, "duration_ns": length}
    return {**row, "depth": 0, "thread": 1, **more}


@contextmanager
def span_database(
    rows: Iterable[Mapping[str, Any]], ranks: Mapping[int, Mapping[str, Any]] | None = None
) -> Iterator[Database]:
    """A database with `spans` and `ranks`; stages are 0 where `ranks` says nothing."""
    rows = list(rows)
    with open_database(memory_bytes=100 << 20, threads=1) as database:
        told = {row["rank"]: {"stage": 0} for row in rows} if ranks is None else ranks
        places = [{**place, "rank": rank} for rank, place in told.items()]
        for name, columns, found in (("spans", SPAN_COLUMNS, rows), ("ranks", RANK_COLUMNS, places)):
            listed = ", ".join(f'"{one}" {kind}' for one, (kind, _) in columns.items())
            database.execute(f"CREATE TABLE {name} ({listed})")
            insert(database, name, [[row.get(one) for one in columns] for row in found])
        yield database


def write_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """The same rows as a file of ours."""
    with span_database(rows) as database:
        path.parent.mkdir(parents=True, exist_ok=True)
        database.execute(f"COPY spans TO '{path}' (FORMAT parquet)")
    return path


def times_of_ranks(own: np.ndarray, *, stages: list[int] | None = None, waiting: np.ndarray | None = None) -> SelfTimes:
    """Times of (steps, ranks, kinds) in ns; ranks are 0, 10, 20 ..., and wait for nothing unless `waiting` says so."""
    steps, ranks, kinds = own.shape
    waiting = np.zeros((steps, ranks)) if waiting is None else waiting
    return SelfTimes(
        ranks=np.arange(ranks) * 10,
        stages=np.array(stages or [0] * ranks),
        steps=np.arange(steps),
        self_ns=own.astype(float),
        waiting_ns=waiting.astype(float),
        wall_ns=own.sum(axis=2) + waiting,
        kinds=("data", "forward", "backward", "other")[:kinds],
    )
