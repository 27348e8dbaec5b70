"""The report on a simulated job: seconds and peak memory for more and more ranks, each in a process of its own.

    python benchmarks/ranks_scale.py [--ranks 64,256,1024,4096] [--spans 10000] [--plain] [-o ranks_scale.png]

A rank's spans are a Parquet file of ours. Steps have data loading, micro-batches with blocks forward and backward,
collectives of 8 ranks, reductions over all ranks that end together, an optimizer; one rank's forward is slower by 20 %,
which has to be the verdict. `--plain`: no blocks, so that every span counts for the accounting of the step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from measuring import machine

Int = npt.NDArray[np.int64]

BLOCKS, MICROBATCHES, REDUCTIONS = 20, 4, 16
SLOW_RANK, SLOWER_BY = 37, 0.2
EPOCH_NS = 1_790_000_000_000_000_000


class Shape(NamedTuple):
    """How many of each in a step."""

    blocks: int
    microbatches: int
    reductions: int


class Template(NamedTuple):
    """What the spans of every step of every rank have in common, in order."""

    name: list[str]
    kind: list[str]
    layer: list[str | None]
    depth: list[int]
    parent: list[str | None]
    microbatch: list[int | None]
    sequence: list[int | None]
    group: list[str | None]


def simulate(ranks: int, steps: int, shape: Shape, seed: int = 0) -> tuple[Template, Int, Int]:
    """(what spans are, their starts, their durations); times are (ranks, steps, spans of a step) in nanoseconds."""
    random = np.random.default_rng(seed)
    template = Template([], [], [], [], [], [], [], [])
    starts: list[list[Int]] = []
    lengths: list[list[Int]] = []
    now = np.full(ranks, EPOCH_NS, dtype=np.int64)
    slow = np.ones(ranks)
    slow[SLOW_RANK % ranks] += SLOWER_BY
    groups = np.arange(ranks) // 8
    first_of_group = np.flatnonzero(np.diff(groups, prepend=-1))
    for _ in range(steps):
        starts.append([])
        lengths.append([])

        def add(name: str, kind: str, begin: Int, length: Int, **more: Any) -> None:
            starts[-1].append(begin)
            lengths[-1].append(length)
            if len(starts) == 1:
                template.name.append(name)
                template.kind.append(kind)
                template.depth.append(more.get("depth", 0))
                for key in ("layer", "parent", "microbatch", "sequence", "group"):
                    getattr(template, key).append(more.get(key))

        def lasting(mean_us: float, noise: float = 0.02) -> Int:
            return (mean_us * 1e3 * (1 + noise * np.abs(random.standard_normal(ranks)))).astype(np.int64)

        def collective(name: str, sequence: int, group: str | None, mean_us: float) -> None:
            nonlocal now
            arrived = now + lasting(5)
            last = np.maximum.reduceat(arrived, first_of_group)[groups] if group is None else arrived.max()
            end = last + int(mean_us * 1e3)
            add(name, "communication", arrived, end - arrived, sequence=sequence, group=group or "tp")
            now = end.astype(np.int64) if group is None else np.full(ranks, end)

        step_begin = now.copy()
        length = lasting(300)
        add("data", "data", now, length)
        now = now + length
        for microbatch in range(shape.microbatches):
            for kind, mean in (("forward", 100.0), ("backward", 200.0)):
                long = mean if shape.blocks else mean * BLOCKS
                pieces = [lasting(long) * (slow if kind == "forward" else 1) for _ in range(max(1, shape.blocks))]
                whole: list[Int] = [piece.astype(np.int64) for piece in pieces]
                add(kind, kind, now, np.sum(whole, axis=0), microbatch=microbatch)
                if shape.blocks:
                    begin = now.copy()
                    for block, piece in enumerate(whole if kind == "forward" else whole[::-1]):
                        place = block if kind == "forward" else shape.blocks - 1 - block
                        layer = f"layers.{place}"
                        add(layer, kind, begin, piece, layer=layer, depth=1, parent=kind, microbatch=microbatch)
                        begin = begin + piece
                now = now + np.sum(whole, axis=0)
                collective(f"{kind}_all_reduce", microbatch, None, 40)
        for number in range(shape.reductions):
            collective("reduce_scatter", number, "dp", 60)
        length = lasting(400)
        add("optimizer", "optimizer", now, length)
        now = now + length
        add("step", "step", step_begin, now - step_begin)
    begins = np.stack([np.stack(begun, axis=1) for begun in starts], axis=1)
    return template, begins, np.stack([np.stack(took, axis=1) for took in lengths], axis=1).astype(np.int32)


def shape_of(spans: int, *, plain: bool) -> tuple[Shape, int]:
    """(how many of each, steps) so that a rank has about `spans` spans."""
    shape = Shape(0 if plain else BLOCKS, MICROBATCHES, REDUCTIONS)
    in_step = 3 + shape.microbatches * 2 * (2 + shape.blocks) + shape.reductions
    return shape, max(1, round(spans / in_step))


def write(folder: Path, ranks: int, spans: int, *, plain: bool) -> int:
    """A run of simulated ranks; returns the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shape, steps = shape_of(spans, plain=plain)
    template, starts, lengths = simulate(ranks, steps, shape)
    count = len(template.name)

    def repeated(values: list[Any], kind: Any) -> Any:
        return pa.chunked_array([pa.array(values, kind)] * steps).combine_chunks()

    text = pa.dictionary(pa.int32(), pa.string())
    common = {
        "name": repeated(template.name, text),
        "kind": repeated(template.kind, text),
        "layer": repeated(template.layer, text),
        "depth": repeated(template.depth, pa.int16()),
        "parent": repeated(template.parent, text),
        "microbatch": repeated(template.microbatch, pa.int32()),
        "sequence": repeated(template.sequence, pa.int32()),
        "step": pa.array(np.repeat(np.arange(steps), count)),
    }
    groups = np.array([group or "" for group in template.group])
    for rank in range(ranks):
        own = np.where(groups == "tp", f"tp{rank // 8}", groups)
        table = {
            "rank": pa.array(np.full(steps * count, rank, dtype=np.int32)),
            **common,
            "group": repeated([group or None for group in own.tolist()], text),
            "start_ns": pa.array(starts[rank].reshape(-1)),
            "duration_ns": pa.array(lengths[rank].reshape(-1).astype(np.int64)),
            "thread": pa.array(np.zeros(steps * count, dtype=np.int64)),
        }
        place = folder / f"rank{rank}"
        place.mkdir(parents=True)
        pq.write_table(pa.table(table), place / "spans.parquet", compression="zstd")
        (place / "run.json").write_text(json.dumps({"rank": rank, "world_size": ranks, "complete": True}))
    return ranks * steps * count


def measure(folder: str) -> None:
    """Makes the report and prints what it took, as JSON."""
    start, cpu_start = time.perf_counter(), time.process_time()
    from profiler_wrapper.ranks.load import load_ranks

    loaded = time.perf_counter() - start
    report = load_ranks(folder)
    told = {"verdict": report.verdict.verdict, "rank": report.verdict.rank, "cause": report.verdict.cause}
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "of_it_imports": loaded,
                "cpu_seconds": time.process_time() - cpu_start,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
                "spans": report.spans,
                **told,
            }
        )
    )


def draw(path: Path, found: list[dict[str, Any]]) -> None:
    """Seconds and memory against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = [one["ranks"] for one in found]
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    times.plot(ranks, [one["seconds"] for one in found], "o-", label="wall")
    times.plot(ranks, [one["cpu_seconds"] for one in found], "s--", label="CPU")
    memory.plot(ranks, [one["peak_mib"] for one in found], "o-")
    times.set(ylabel="seconds")
    memory.set(ylabel="peak memory, MiB")
    for axes in (times, memory):
        axes.set(xlabel="ranks", xticks=ranks, ylim=(0, None))
        axes.tick_params("x", rotation=90)
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(f"Report on simulated ranks, {found[-1]['spans'] // found[-1]['ranks']:,} spans each")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024,4096")
    parser.add_argument("--spans", type=int, default=10_000, help="of each rank")
    parser.add_argument("--plain", action="store_true", help="no blocks: every span is one of the step's own")
    parser.add_argument("-o", "--output", default="ranks_scale.png")
    parser.add_argument("--keep", help="a directory where the simulated runs stay")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    print(machine())
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in map(int, arguments.ranks.split(",")):
            folder = Path(arguments.keep or temporary, f"ranks{ranks}_{arguments.spans}{'_plain' * arguments.plain}")
            if not folder.is_dir():
                write(folder, ranks, arguments.spans, plain=arguments.plain)
            run = subprocess.run(
                [sys.executable, __file__, "--measure", str(folder)], check=True, capture_output=True, text=True
            )
            result = {"ranks": ranks, **json.loads(run.stdout)}
            found.append(result)
            print(
                f"{ranks:5} ranks, {result['spans']:11,} spans: {result['seconds']:6.1f} s "
                f"({result['cpu_seconds']:.1f} s of CPU time), peak {result['peak_mib']:.0f} MiB, "
                f"verdict: {result['verdict']} {result['rank']}, {result['cause']}",
                flush=True,
            )
    draw(Path(arguments.output), found)
    print(arguments.output)


if __name__ == "__main__":
    main()
