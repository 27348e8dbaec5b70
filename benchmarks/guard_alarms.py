"""How often `guard` cries wolf, and what it catches: real runs on this machine, and recordings made by hand.

The same training in `--runs` processes, every pair of them compared both ways; recordings with the noise of steps,
`--by-hand` pairs of them; then runs with one thing worse, each against the runs without.

    python benchmarks/guard_alarms.py [--runs 20] [--by-hand 60] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import measuring
from guarded_runs import OTHER_PLANTS, PLANTS
from noisy_recordings import Noise, noisy_run
from profiler_wrapper.comparison.baseline import Baseline, make_baseline
from profiler_wrapper.comparison.guard import guard

SCRIPT = measuring.ROOT / "tests" / "guarded_runs.py"
SLOWER = (1.15, 2.0, 4.0)


def record(folder: Path, name: str, *options: str) -> Baseline:
    """One run in a process of its own, or what is there of it; as a guard looks at it."""
    directory = folder / name
    if not directory.is_dir():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{measuring.ROOT}:{SCRIPT.parent}"}
        command = [sys.executable, str(SCRIPT), str(folder), name, *options]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return make_baseline([directory])


def alarms(pairs: Iterable[tuple[Baseline, Baseline]], title: str) -> int:
    """Print how the comparisons of a thing with itself ended; returns the alarms."""
    counts, found = Counter[str](), 0
    total = 0
    for base, run in pairs:
        report = guard(base, run)
        total += 1
        found += report.regressed
        counts[report.checks[-1].status] += 1
        if report.regressed:
            print(f"    ALARM: {report.verdict}")
    print(f"{title:44s} {total:5d} comparisons, {found} alarms; time: {dict(counts)}", flush=True)
    return found


def caught(bases: Sequence[Baseline], runs: Sequence[Baseline], title: str) -> None:
    """Print in how many comparisons a planted regression was found, and what was said of it."""
    reports = [guard(base, run) for base in bases for run in runs]
    hits = [report for report in reports if report.regressed]
    judged = sum(report.checks[-1].status != "not judged" for report in reports)
    print(f"{title:44s} {len(reports):5d} comparisons, {len(hits)} caught; time judged in {judged}", flush=True)
    if hits:
        print(f"    {hits[0].verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--by-hand", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="keeps the runs there, and takes what is there")
    options = parser.parse_args()
    print(measuring.machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for kind, memory in (("memory", ("--memory",)), ("times_alone", ())):
            runs = [record(folder, f"{kind}_{i}", "--steps", "10", *memory) for i in range(options.runs)]
            alarms(itertools.permutations(runs, 2), f"the same run, real, {kind.replace('_', ' ')}")
        exact = [record(folder, f"exact_{i}", "--memory") for i in range(min(5, options.runs))]
        alarms(itertools.permutations(exact, 2), "the same run, real, five steps")
        by_hand(options.by_hand)
        for plant in (*PLANTS, OTHER_PLANTS[0]):
            compiled = ("--compiled",) if plant == "graph break" else ()
            bases = [record(folder, "compiled", "--memory", *compiled)] if compiled else exact[:3]
            caught(bases, [record(folder, plant.replace(" ", "_"), plant, "--memory", *compiled)], plant)
        spinning = [record(folder, f"spins_{i}", "--spins", "--steps", "15") for i in range(3)]
        alarms(itertools.permutations(spinning, 2), "the same run, real, with spinning layers")
        for slower in SLOWER:
            name, factor = f"slower_{slower}", ("--slower", str(slower))
            runs = [
                record(folder, f"{name}_{i}", OTHER_PLANTS[1], "--spins", "--steps", "15", *factor) for i in range(3)
            ]
            caught(spinning, runs, f"one layer spins {slower} times as long")


def by_hand(pairs: int) -> None:
    """Recordings with noise: alike, and with a layer that is slower."""
    noise = Noise(slow_step=True)
    sides = [[make_baseline([noisy_run(side + i, noise=noise)]) for i in range(pairs)] for side in (0, 10_000)]
    alarms(zip(*sides, strict=True), "the same, made by hand")
    for slower in (1.15, 1.3):

        def planted(layer: str, phase: str, step: int, factor: float = slower) -> float:
            return factor if layer.startswith("layers.7.") else 1.0

        runs = [make_baseline([noisy_run(20_000 + i, noise=noise, slower=planted)]) for i in range(min(20, pairs))]
        reports = [guard(base, run) for base, run in zip(sides[0], runs, strict=False)]
        hits = sum(report.regressed for report in reports)
        title = f"made by hand, layer 7 of 24 {slower} times as long"
        print(f"{title:44s} {len(reports):5d} comparisons, {hits} caught", flush=True)


if __name__ == "__main__":
    main()
