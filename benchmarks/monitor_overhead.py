"""What `TrainingMonitor` adds to a step, and its memory over a million steps.

A step that does nothing is monitored: `start_step()` and `end_step(tokens=, samples=, loss=)`, with FLOPs by a model's
config. "Without flushing" writes no file; "with flushing" is the default: the text log, JSON lines flushed each step,
the summary. Rounds are interleaved; the time of the empty loop is taken off.

    python benchmarks/monitor_overhead.py [--rounds 9] [--steps 2000] [--long 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
import models
from profiler_wrapper.monitor.monitor import TrainingMonitor

WANTED_US = {"without flushing": 50, "with flushing": 500}


def monitor_of(folder: str | Path, case: models.Case, **options: Any) -> TrainingMonitor:
    return TrainingMonitor(
        folder, model=case.model, batch_size=2, seq_length=16, peaks=1.0, flops_profile_freq=0, **options
    )


def overhead(options: argparse.Namespace, case: models.Case) -> None:
    def loop(monitor: TrainingMonitor | None) -> float:
        times = []
        for _ in range(options.steps):
            begin = time.perf_counter()
            if monitor is not None:
                monitor.start_step()
                monitor.end_step(tokens=32, samples=2, loss=1.0)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    with tempfile.TemporaryDirectory() as folder:
        monitors = {
            "without flushing": monitor_of(folder, case, sinks=[]),
            "with flushing": monitor_of(Path(folder) / "files", case),
            "with flushing, breakdown": monitor_of(Path(folder) / "parts", case, breakdown=True),
        }
        candidates: dict[str, Callable[[], float]] = {"empty loop": lambda: loop(None)}
        candidates |= {name: (lambda monitor=monitor: loop(monitor)) for name, monitor in monitors.items()}  # type: ignore[misc]
        seconds = measuring.interleaved(candidates, rounds=options.rounds + 1)
        for monitor in monitors.values():
            monitor.close()
    empty = statistics.median(seconds.pop("empty loop"))
    print(f"median step of {options.steps}, over {options.rounds} rounds (quartiles):")
    for name, values in seconds.items():
        added = [value - empty for value in values[1:]]
        wanted = WANTED_US.get(name)
        print(
            f"  {name:26s} {measuring.spread(added, unit=1e-6, digits=1)} us"
            + (f"; at most {wanted}" if wanted else "")
        )


def memory(case: models.Case, *, files: bool, steps: int, traced: bool) -> None:
    """What is held more than at a tenth of the steps: resident, or by Python's objects, whose tracing takes memory."""

    print(f"{'held by Python' if traced else 'resident'} {'with' if files else 'without'} files:")
    with tempfile.TemporaryDirectory() as folder:
        monitor = monitor_of(folder, case, **({} if files else {"sinks": []}))
        for _ in measuring.held(steps, traced=traced):
            monitor.start_step()
            monitor.end_step(tokens=32, samples=2, loss=1.0)
        monitor.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--long", type=int, default=1_000_000, help="steps of the memory run; 0: none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(measuring.machine())
    llama = models.build("llama")
    overhead(arguments, llama)
    if arguments.long:
        memory(llama, files=False, steps=arguments.long, traced=False)
        memory(llama, files=True, steps=arguments.long, traced=False)
        memory(llama, files=False, steps=arguments.long // 10, traced=True)
        memory(llama, files=True, steps=arguments.long // 10, traced=True)
