"""Who is slow, and why: a simulated job with a cause planted in it, through `ranks`.

    python examples/14_many_ranks.py [--ranks 64] [--cause layer] [--output-dir outputs]

Look at the first sentence, then at `timeline.png`. The job is a table of spans, as any tool may write one. Its ranks
wait for one another in the all-reduces of their gradients, so all their steps take equally long.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from profiler_wrapper.__main__ import main as profiler_wrapper

MS = 1_000_000
BLOCKS, BUCKETS, RANKS_OF_A_HOST = 12, 4, 8


def spans_of_job(ranks: int, steps: int, cause: str, slow_rank: int) -> list[dict[str, Any]]:
    """One row for each thing that a rank did, by its own host's clock."""
    random = np.random.default_rng(0)
    slow = np.arange(ranks) == slow_rank
    clocks = random.normal(0, 15 * MS, -(-ranks // RANKS_OF_A_HOST)).astype(np.int64)
    ahead = clocks[np.arange(ranks) // RANKS_OF_A_HOST]
    now = np.full(ranks, 1_790_000_000_000_000_000)
    rows: list[dict[str, Any]] = []

    def lasting(mean_ms: float, slower: float = 1.0) -> Any:
        times = mean_ms * MS * (1 + 0.02 * np.abs(random.standard_normal(ranks)))
        return np.asarray(times * np.where(slow, slower, 1.0), dtype=np.int64)

    def add(step: int, name: str, kind: str, begin: Any, end: Any, **about: Any) -> None:
        starts, durations = (begin + ahead).tolist(), (end - begin).tolist()
        for rank in range(ranks):
            span = {"rank": rank, "step": step, "name": name, "kind": kind, "depth": 0}
            rows.append(span | {"start_ns": starts[rank], "duration_ns": durations[rank]} | about)

    for step in range(steps):
        step_begin = now
        now = now + lasting(4, 16 if cause == "data" else 1)
        add(step, "data", "data", step_begin, now)
        for kind, mean_ms in (("forward", 4.0), ("backward", 8.0)):
            begin = now
            for place in range(BLOCKS) if kind == "forward" else reversed(range(BLOCKS)):
                start, layer = now, f"model.layers.{place}"
                now = now + lasting(mean_ms, 5 if cause == "layer" and place == BLOCKS // 2 else 1)
                add(step, layer, kind, start, now, layer=layer, depth=1)
            add(step, kind, kind, begin, now)
        if cause == "late":
            now = now + slow * 60 * MS
        for sequence in range(BUCKETS):
            arrived = now + lasting(0.02)
            now = np.full(ranks, arrived.max() + 3 * MS)
            add(step, "all_reduce", "communication", arrived, now, group="dp", sequence=sequence, bytes=256 << 20)
        begin, now = now, now + lasting(6)
        add(step, "optimizer", "optimizer", begin, now)
        add(step, "step", "step", step_begin, now)
    return rows


def main(ranks: int, steps: int, cause: str, slow_rank: int, output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    table = output_dir / "job.parquet"
    rows = spans_of_job(ranks, steps, cause, slow_rank)
    columns = dict.fromkeys(key for row in rows for key in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in columns}), table)
    profiler_wrapper(["ranks", "--spans", str(table)])
    profiler_wrapper(["ranks", "--spans", str(table), "-o", f"{output_dir / 'ranks'}/", "--force"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cause", choices=("layer", "data", "late", "none"), default="layer")
    parser.add_argument("--slow-rank", type=int, default=41)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/many_ranks"))
    options = parser.parse_args()
    main(options.ranks, options.steps, options.cause, options.slow_rank % options.ranks, options.output_dir)
