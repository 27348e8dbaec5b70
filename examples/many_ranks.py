"""Who is slow, and why: a simulated job with a cause planted in it, through `ranks`.

    python examples/many_ranks.py [--ranks 64] [--cause layer] [--output-dir outputs]

The job is a table of spans, as any tool may write one: a row for each thing that a rank did, with its start and its
duration. Ranks wait for one another in the all-reduces of their gradients, so all their steps take equally long; the
clocks of their hosts differ. Causes are layer, forward, late, data, gc, imbalance and none.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.__main__ import main as profiler_wrapper

Ns = npt.NDArray[np.int64]  # of each rank

CAUSES = ("layer", "forward", "late", "data", "gc", "imbalance", "none")
BLOCKS, BUCKETS = 12, 4
RANKS_OF_A_HOST = 8
EPOCH_NS = 1_790_000_000_000_000_000
MS = 1_000_000


class Job:
    """Spans of all ranks, each rank's by its own host's clock."""

    def __init__(self, ranks: int, cause: str, slow_rank: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.ranks, self.cause, self.slow_rank = ranks, cause, slow_rank
        self.slow = np.arange(ranks) == slow_rank
        self.now = np.full(ranks, EPOCH_NS, dtype=np.int64)
        of_hosts = self.random.normal(0, 15 * MS, -(-ranks // RANKS_OF_A_HOST)).astype(np.int64)
        self.ahead = of_hosts[np.arange(ranks) // RANKS_OF_A_HOST]
        self.columns: dict[str, list[npt.NDArray[Any]]] = {}

    def lasting(self, mean_ms: float, noise: float = 0.02) -> Ns:
        """A duration for each rank."""
        return np.asarray(mean_ms * MS * (1 + noise * np.abs(self.random.standard_normal(self.ranks))), dtype=np.int64)

    def add(self, name: str, kind: str, start: Ns, duration: Ns, **about: Any) -> None:
        """A span of every rank; those of no duration are left out."""
        told = {"name": name, "kind": kind, "depth": 0, "layer": None, "group": None, "sequence": None, "bytes": None}
        kept = duration > 0
        row = {"rank": np.arange(self.ranks), "start_ns": start + self.ahead, "duration_ns": duration}
        row |= {key: np.full(self.ranks, value, dtype=object) for key, value in (told | about).items()}
        for key, values in row.items():
            self.columns.setdefault(key, []).append(values[kept])

    def run(self, name: str, kind: str, duration: Ns, **about: Any) -> None:
        """The next thing that every rank does."""
        self.add(name, kind, self.now, duration, **about)
        self.now = self.now + duration

    def step(self, step: int) -> None:
        """Data, forward, backward, the all-reduces of the gradients, optimizer."""
        begin, about = self.now, {"step": step}
        long_input = np.ones(self.ranks)
        if self.cause == "imbalance":
            long_input[self.random.integers(0, self.ranks)] = 1.6
        self.run("data", "data", self.lasting(4) + self.slow * (60 * MS if self.cause == "data" else 0), **about)
        for kind, mean_ms in (("forward", 4.0), ("backward", 8.0)):
            start = self.now
            for place in range(BLOCKS) if kind == "forward" else reversed(range(BLOCKS)):
                factor = long_input * np.where(self.slow & (self.cause == "forward") & (kind == "forward"), 1.9, 1.0)
                if self.cause == "layer" and place == BLOCKS // 2:
                    factor = factor * np.where(self.slow, 5.0, 1.0)
                layer = f"model.layers.{place}"
                duration = np.asarray(self.lasting(mean_ms) * factor, dtype=np.int64)
                self.run(layer, kind, duration, layer=layer, depth=1, **about)
                if self.cause == "gc" and place == 3 and kind == "forward":
                    collects = (np.arange(self.ranks) + step) % 5 == 0
                    self.run("gc", "gc", collects * self.lasting(70, 0.2), depth=1, **about)
            self.add(kind, kind, start, self.now - start, **about)
        if self.cause == "late":
            self.now = self.now + self.slow * 60 * MS
        for sequence in range(BUCKETS):
            arrived = self.now + self.lasting(0.02)
            self.now = np.full(self.ranks, arrived.max() + 3 * MS)
            taken = self.now - arrived
            self.add(
                "all_reduce", "communication", arrived, taken, group="dp", sequence=sequence, bytes=256 << 20, **about
            )
        self.run("optimizer", "optimizer", self.lasting(6), **about)
        self.add("step", "step", begin, self.now - begin, **about)

    def write(self, path: Path) -> None:
        """The table, as Parquet."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {name: pa.array(np.concatenate(values)) for name, values in self.columns.items()}
        pq.write_table(pa.table(columns), path)


def main(ranks: int, steps: int, cause: str, slow_rank: int, output_dir: Path) -> None:
    job = Job(ranks, cause, slow_rank)
    for step in range(steps):
        job.step(step)
    output_dir.mkdir(parents=True, exist_ok=True)
    table = output_dir / "job.parquet"
    job.write(table)
    profiler_wrapper(["ranks", "--spans", str(table)])
    profiler_wrapper(["ranks", "--spans", str(table), "-o", f"{output_dir / 'ranks'}/", "--force"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cause", choices=CAUSES, default="layer")
    parser.add_argument("--slow-rank", type=int, default=41)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/many_ranks"))
    options = parser.parse_args()
    main(options.ranks, options.steps, options.cause, options.slow_rank % options.ranks, options.output_dir)
