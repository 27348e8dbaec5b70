"""Spans of a data-parallel job, made by hand: as the logs of timers, or as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from span_tables import span

STEP_NS = 100_000_000
OURS = ("rank", "step", "name", "kind", "start_ns", "duration_ns", "depth")


def job(
    ranks: int = 4, steps: int = 12, *, slow: int | None = None, ahead_ns: Mapping[int, int] | None = None
) -> list[dict[str, Any]]:
    """Steps of 100 ms: a forward of 20 ms, or 50 on the rank that is slow, for which the others wait in an all-reduce.

    Args:
        ahead_ns: by rank, how far its clock is ahead.
    """
    rows = []
    for rank in range(ranks):
        forward = 50_000_000 if rank == slow else 20_000_000
        for step in range(steps):
            begin = step * STEP_NS + (ahead_ns or {}).get(rank, 0)

            def add(kind: str, start: int, length: int, begin: int = begin, **more: Any) -> None:
                more = {"group": None, "sequence": None, **more}
                rows.append(span(rank, step, kind, begin + start, length, **more))  # noqa: B023 - called at once

            add("step", 0, STEP_NS)
            add("forward", 0, forward)
            add("backward", forward, 20_000_000)
            reduced = forward + 20_000_000
            add("communication", reduced, 90_000_000 - reduced, name="all_reduce", group="all", sequence=0)
            add("optimizer", 90_000_000, 5_000_000)
    return rows


def write_logs(
    run: Path, rows: Iterable[Mapping[str, Any]], *, ranks: int = 4, world_size: object = None
) -> dict[int, Path]:
    """The log of each rank; where each is."""
    rows, logs = list(rows), {}
    for rank in range(ranks):
        path = logs[rank] = run / "timers" / f"timer_rank{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"schema_version": 1, "rank": rank, "world_size": ranks if world_size is None else world_size}
        lines = [json.dumps({"header": header}), *(json.dumps(row) for row in rows if row["rank"] == rank)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return logs
