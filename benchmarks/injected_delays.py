"""How often a planted delay is the verdict, and how often none is where none is planted: real gloo processes.

Every cause `--runs` times, each time on another rank, stage or layer, recorded by `Timer` (or, with `--traces`, by
`ProfilerWrapper`) and read as `python -m profiler_wrapper ranks` reads it. The causes of a pipeline have their stages
in the name. What else runs on the machine makes real stragglers: `--before-others` keeps it away. With `--layers` a
layer of one of four ranks is slow, or none is, in jobs that wait within their layers.

    python benchmarks/injected_delays.py [--runs 20] [--ranks 4 8] [--traces] [--ddp] [--steps 12] [--delay-ms 80]
        [--before-others] [--auto] [--causes CAUSE ...]
    python benchmarks/injected_delays.py --layers [--runs 20] [--steps 12] [--delay-ms 150]
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

import slow_layer_jobs
import straggler_jobs
from processes import run_in_processes
from profiler_wrapper.ranks.model import Verdict
from slow_layer_jobs import SlowLayer
from straggler_jobs import BLOCKS, Plan, said, verdict_of

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
    parser.add_argument(
        "--auto", action="store_true", help="three steps, as if nobody asks for more; only with --traces"
    )
    parser.add_argument("--layers", action="store_true", help="jobs that wait within their layers")
    parser.add_argument("--causes", nargs="+", help="only these")
    chosen = parser.parse_args()
    if chosen.ddp and not chosen.traces:  # whose all-reduce no span is of
        parser.error("--ddp is told by traces: add --traces")
    if chosen.auto and not chosen.traces:
        parser.error("--auto is of traces: add --traces")
    print(f"{chosen.runs} runs each, {chosen.steps} steps, {chosen.delay_ms:g} ms planted; {measuring.machine()}")
    if chosen.layers:
        tell_layers(chosen.runs, chosen.steps, chosen.delay_ms / 1e3)
        return
    for ranks in chosen.ranks:
        for cause, stages in JOBS:
            if chosen.before_others and stages > 1:  # its waits spin, and would keep each other from running
                continue
            if (chosen.causes and cause not in chosen.causes) or (chosen.ddp and stages > 1):
                continue
            plans = list(variants(cause, stages, ranks, chosen.runs, chosen.steps, chosen.delay_ms / 1e3))
            plans = [replace(plan, ddp=chosen.ddp) for plan in plans]
            tell(plans, ranks, traces=chosen.traces, alone=chosen.before_others, auto=chosen.auto)


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


def tell(plans: list[Plan], ranks: int, *, traces: bool, alone: bool, auto: bool) -> None:
    """A line of the table, and what the wrong ones said."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if traces:
            steps = "auto" if auto else "all"
            run_in_processes(straggler_jobs.record_traces, plans, folder, alone, steps, world_size=ranks)
        else:
            run_in_processes(straggler_jobs.record_timers, plans, folder, alone, world_size=ranks)
        verdicts = [verdict_of(Path(folder) / f"job{at}") for at in range(len(plans))]
    right = [said(plan, verdict, ranks) for plan, verdict in zip(plans, verdicts, strict=True)]
    wrong = Counter(
        f"{verdict.verdict}/{verdict.cause}" + ("" if verdict.rank == plan.rank else " of another rank")
        for plan, verdict, fine in zip(plans, verdicts, right, strict=True)
        if not fine
    )
    name = plans[0].cause + (f", {plans[0].stages} stages" if plans[0].stages > 1 else "")
    name += ", DDP" if plans[0].ddp else ""
    show(ranks, name, right, verdicts, begin, wrong)


def tell_layers(runs: int, steps: int, delay_s: float) -> None:
    """A line for each way to divide a model and to record it, with a slow layer and without."""
    for job in slow_layer_jobs.JOBS:
        for planted_s in (delay_s, 0.0):
            begin = time.perf_counter()
            plans = [SlowLayer(*job, planted_s, run) for run in range(runs)]
            with tempfile.TemporaryDirectory() as folder:
                run_in_processes(slow_layer_jobs.record, plans, folder, steps, world_size=slow_layer_jobs.WORLD)
                verdicts = [verdict_of(Path(folder) / str(plan)) for plan in plans]
            right = [slow_layer_jobs.said(plan, verdict) for plan, verdict in zip(plans, verdicts, strict=True)]
            wrong = Counter(f"{one.verdict}/{one.cause}" for one, fine in zip(verdicts, right, strict=True) if not fine)
            name = f"{', '.join(job)}, {'slow layer' if planted_s else 'none'}"
            show(slow_layer_jobs.WORLD, name, right, verdicts, begin, wrong)


def show(ranks: int, name: str, right: list[bool], verdicts: list[Verdict], begin: float, wrong: Counter[str]) -> None:
    confident = sum(verdict.confidence == "high" for verdict in verdicts)
    print(
        f"{ranks} ranks  {name:32s} {sum(right):3d} of {len(right)} right, {confident:3d} of high confidence, "
        f"{time.perf_counter() - begin:5.0f} s  {'; '.join(f'{count} {what}' for what, count in wrong.items())}",
        flush=True,
    )


if __name__ == "__main__":
    main()
