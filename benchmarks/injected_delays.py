"""How often a planted delay is the verdict, and how often none is where none is planted: real gloo processes.

Every cause `--runs` times, each time on another rank, stage or layer, recorded by `Timer` (or, with `--traces`, by
`ProfilerWrapper`) and read as `python -m profiler_wrapper ranks` reads it. The causes of a pipeline have their stages
in the name. What else runs on the machine makes real stragglers: `--before-others` keeps it away.

    python benchmarks/injected_delays.py [--runs 20] [--ranks 4 8] [--traces] [--ddp] [--steps 12] [--delay-ms 80]
        [--before-others] [--causes CAUSE ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import measuring

sys.path.insert(0, str(measuring.ROOT / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import straggler_jobs
from processes import run_in_processes
from straggler_jobs import BLOCKS, Plan, said

# Cause and stages of the pipeline.
JOBS = (
    ("none", 1),
    ("forward", 1),
    ("backward", 1),
    ("data", 1),
    ("layer", 1),
    ("late collective", 1),
    ("imbalance", 1),
    ("anyone's forward", 1),
    ("gc", 1),
    ("layer everywhere", 1),
    ("none", 2),
    ("stage", 2),
    ("forward", 2),
    ("none", 4),
    ("stage", 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay-ms", type=float, default=80.0)
    parser.add_argument("--traces", action="store_true", help="record with ProfilerWrapper instead of Timer")
    parser.add_argument("--ddp", action="store_true", help="DDP reduces the gradients; only with --traces")
    parser.add_argument("--before-others", action="store_true", help="real-time priority, against other load (root)")
    parser.add_argument("--causes", nargs="+", help="only these")
    chosen = parser.parse_args()
    if chosen.ddp and not chosen.traces:  # whose all-reduce no span is of
        parser.error("--ddp is told by traces: add --traces")
    print(f"{chosen.runs} runs each, {chosen.steps} steps, {chosen.delay_ms:g} ms planted; {measuring.machine()}")
    for ranks in chosen.ranks:
        for cause, stages in JOBS:
            if chosen.before_others and stages > 1:  # its waits spin, and would keep each other from running
                continue
            if (chosen.causes and cause not in chosen.causes) or (chosen.ddp and stages > 1):
                continue
            plans = list(variants(cause, stages, ranks, chosen.runs, chosen.steps, chosen.delay_ms / 1e3))
            plans = [replace(plan, ddp=chosen.ddp) for plan in plans]
            tell(plans, ranks, traces=chosen.traces, alone=chosen.before_others)


def variants(cause: str, stages: int, ranks: int, runs: int, steps: int, delay_s: float) -> Iterator[Plan]:
    """The same cause elsewhere in each run."""
    for run in range(runs):
        rank = run % ranks
        stage = run % stages
        first = rank * stages // ranks * BLOCKS  # of the blocks that this rank has
        yield Plan(
            cause,
            rank=rank,
            stage=stage,
            block=first + run % BLOCKS,
            delay_s=delay_s,
            steps=steps,
            stages=stages,
            seed=run,
        )


def tell(plans: list[Plan], ranks: int, *, traces: bool, alone: bool) -> None:
    """A line of the table, and what the wrong ones said."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record = straggler_jobs.record_traces if traces else straggler_jobs.record_timers
        run_in_processes(record, plans, folder, alone, world_size=ranks)
        verdicts = [straggler_jobs.verdict_of(Path(folder) / f"job{at}") for at in range(len(plans))]
    right = [said(plan, verdict, ranks) for plan, verdict in zip(plans, verdicts, strict=True)]
    wrong = Counter(
        f"{verdict.verdict}/{verdict.cause}" + ("" if verdict.rank == plan.rank else " of another rank")
        for plan, verdict, fine in zip(plans, verdicts, right, strict=True)
        if not fine
    )
    confident = sum(verdict.confidence == "high" for verdict in verdicts)
    name = plans[0].cause + (f", {plans[0].stages} stages" if plans[0].stages > 1 else "")
    name += ", DDP" if plans[0].ddp else ""
    print(
        f"{ranks} ranks  {name:28s} {sum(right):3d} of {len(plans)} right, {confident:3d} of high confidence, "
        f"{time.perf_counter() - begin:5.0f} s  {'; '.join(f'{count} {what}' for what, count in wrong.items())}",
        flush=True,
    )


if __name__ == "__main__":
    main()
