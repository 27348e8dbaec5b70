"""Ranks with wrong clocks: the span table that they leave, and what their clocks really showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.ranks.times import prepare

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Float = npt.NDArray[np.float64]
BEGIN_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class WrongClocks:
    """Times in ns, drift in seconds per second; true time begins at 0."""

    offsets: Float  # (R,)
    drifts: Float  # (R,)
    jumps: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # rank: true time, how far it was set

    def shown(self, rank: int, true: Float) -> Float:
        """What a rank's clock shows at true times, from BEGIN_NS."""
        found = np.asarray(true + self.offsets[rank] + self.drifts[rank] * true)
        if rank in self.jumps:
            at, size = self.jumps[rank]
            found = found + np.where(true >= at, size, 0)
        return found


def random_clocks(ranks: int, *, seed: int, offset_ns: float = 1e9, drift: float = 50e-6, **more: Any) -> WrongClocks:
    draw = np.random.default_rng(seed)
    return WrongClocks(
        offsets=draw.uniform(-offset_ns, offset_ns, ranks), drifts=draw.uniform(-drift, drift, ranks), **more
    )


def clock_tables(
    clocks: WrongClocks,
    groups: Sequence[tuple[str, Sequence[int]]],
    *,
    steps: int = 100,
    step_ns: float = 1e9,
    jitter_ns: float = 20e3,
    late: Mapping[int, float] | None = None,
    blocking: bool = True,
    hosts: Mapping[int, str] | None = None,
    seed: int = 0,
) -> DuckDBPyConnection:
    """Each step every rank computes, then has one collective in each of its groups.

    All leave a collective when its last member is there, each late by a jitter that is now and then thirty times as
    long. `late`: ranks that compute longer in each step, by ns. Not `blocking`: ranks only launch it, and go on.
    """
    import duckdb
    import pyarrow

    draw = np.random.default_rng(seed)
    ranks = len(clocks.offsets)
    free = np.zeros((steps, ranks))
    free += (np.arange(steps) * step_ns)[:, None] + draw.uniform(0, 0.1 * step_ns, free.shape)
    for rank, more in (late or {}).items():
        free[:, rank] += more
    columns: dict[str, list[Any]] = {key: [] for key in ("rank", "step", "kind", "group", "start", "end")}

    def add(rank: int, kind: str, group: str | None, start: Float, end: Float) -> None:
        begin, finish = clocks.shown(rank, start), clocks.shown(rank, end)
        for key, value in (("rank", rank), ("kind", kind), ("group", group)):
            columns[key].append(np.full(steps, value, dtype=object if key != "rank" else np.int64))
        columns["step"].append(np.arange(steps))
        columns["start"].append(BEGIN_NS + np.rint(begin).astype(np.int64))
        columns["end"].append(BEGIN_NS + np.rint(finish).astype(np.int64))

    for rank in range(ranks):
        add(rank, "forward", None, np.arange(steps) * step_ns, free[:, rank].copy())
    for group, members in groups:
        met = free[:, list(members)].max(axis=1) + 1e6
        for rank in members:
            start = free[:, rank].copy()
            leaving = np.abs(draw.normal(0, jitter_ns, steps)) * np.where(draw.random(steps) < 0.03, 30, 1)
            end = met + leaving if blocking else start + 50e3 + leaving
            free[:, rank] = end
            add(rank, "communication", group, start, end)
    table = {key: np.concatenate(parts) for key, parts in columns.items()}
    arrow = pyarrow.table({**table, "kind": table["kind"].tolist(), "group": table["group"].tolist()})
    connection = duckdb.connect(config={"threads": 1})
    connection.register("arrow", arrow)
    connection.execute(
        """CREATE TABLE spans AS SELECT rank::INTEGER AS rank, step, 'all_reduce' AS name, kind, "group",
        "start" AS start_ns, "end" - "start" AS duration_ns, 0 AS depth, 0 AS sequence,
        NULL::BIGINT AS thread, NULL::BIGINT AS bytes, NULL::BIGINT AS overlapped_ns,
        NULL::BIGINT AS device_ns FROM arrow"""
    )
    connection.unregister("arrow")
    connection.execute("CREATE TABLE ranks(rank INTEGER, stage INTEGER, host VARCHAR)")
    hosts = hosts or {}
    connection.execute(
        "INSERT INTO ranks SELECT unnest(?::INTEGER[]), 0, unnest(?::VARCHAR[])",
        [list(range(ranks)), [hosts.get(rank) for rank in range(ranks)]],
    )
    prepare(connection)
    return connection
