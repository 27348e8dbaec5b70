"""A table of spans of a few ranks by hand, one of them slow in one layer: every time in it is known."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MS = 1_000_000
START_NS = 1_767_225_600_000_000_000  # 2026-01-01
STEP_MS = 100
STEPS = 8
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u202e\x1b[31m$x$\n<b>"

Row = dict[str, Any]


def rank_rows(
    rank: int,
    *,
    slow_rank: int = 2,
    layer: str = "blocks.1",
    group: str = "world",
    ahead_ns: Mapping[int, int] | None = None,
) -> list[Row]:
    """A step: data 2 ms, forward 10 ms of two blocks, 50 ms more in one block of the slow rank, an all-reduce that ends
    at 80 ms on all ranks, an optimizer of 5 ms."""
    rows: list[Row] = []
    forward = 60 if rank == slow_rank else 10
    for step in range(STEPS):
        begin = START_NS + step * STEP_MS * MS + (ahead_ns or {}).get(rank, 0)
        common: Row = {"rank": rank, "step": step, "layer": "", "depth": 0, "group": "", "bytes": ""}

        def row(
            name: str, kind: str, start_ms: int, length_ms: int, common: Row = common, begin: int = begin, **more: Any
        ) -> None:
            times = {"start_ns": begin + start_ms * MS, "duration_ns": length_ms * MS}
            rows.append({**common, "name": name, "kind": kind, **times, **more})

        row("step", "step", 0, 90)
        row("data", "data", 0, 2)
        row("forward", "forward", 2, forward)
        row("blocks.0", "forward", 2, 5, layer="blocks.0", depth=1)
        row(layer, "forward", 7, forward - 5, layer=layer, depth=1)
        row("all_reduce", "communication", 2 + forward, 78 - forward, group=group, bytes=1 << 20)
        row("optimizer", "optimizer", 80, 5)
    return rows


def write_job(path: Path, *, ranks: int = 4, **about: Any) -> Path:
    """The table of a job, as CSV."""
    rows = [row for rank in range(ranks) for row in rank_rows(rank, **about)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
