"""What always-on layer spans add to a training step, and what a process holds after many steps.

A launch-bound Llama (small matrices, so that a step is all overhead) trains with and without, A B A B ...; each round
is the quickest of its steps, in CPU time of this process, which is what a loop on one thread waits for, and which
others on the machine disturb less. Told are the ratios of the rounds, median and quartiles, those of the plain loop to
itself too (what the machine does by itself). What a span costs is told of blocks that do next to nothing.

    python benchmarks/layer_spans_cost.py [--rounds 15] [--steps 25] [--layers 8] [--long 3000]
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import measuring
import models
from profiler_wrapper.capture.growth import resident_bytes
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.timer.layer_timer import LayerTimer


def cost(options: argparse.Namespace, case: models.Case) -> None:
    optimizer = torch.optim.AdamW(case.model.parameters())
    batch = case.batch(0)

    def train() -> None:
        case.loss(case.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> float:
        return _quickest(train, options.steps)

    with tempfile.TemporaryDirectory() as folder:

        def spans() -> float:
            with LayerTimer(case.model, Path(folder) / "timer") as layers:

                def step() -> None:
                    train()
                    layers.step()

                step()
                return _quickest(step, options.steps)

        def monitored(*, layers: bool) -> float:
            with TrainingMonitor(
                Path(folder) / "monitor", model=case.model, layers=layers, flops_profile_freq=0, peaks=1.0, sinks=[]
            ) as monitor:

                def step() -> None:
                    with monitor.step():
                        train()

                step()
                return _quickest(step, options.steps)

        candidates: dict[str, Callable[[], float]] = {
            "plain": plain,
            "LayerTimer": spans,
            "plain again": plain,
            "monitor": lambda: monitored(layers=False),
            "monitor, layers": lambda: monitored(layers=True),
        }
        seconds = measuring.interleaved(candidates, rounds=options.rounds + 1)
        lines = next((Path(folder) / "timer").rglob("*.jsonl")).read_text(encoding="utf-8").splitlines()
    count = sum('"layer"' in line and '"step":1,' in line for line in lines)
    seconds = {name: values[1:] for name, values in seconds.items()}
    print(
        f"{options.layers} blocks, {count} layer spans a step; quickest step, over {options.rounds} rounds (quartiles):"
    )
    for name, values in seconds.items():
        print(
            f"  {name:16s} {measuring.spread(values, unit=1e-3, digits=2)} ms, "
            f"to plain {measuring.ratio(values, seconds['plain'])}"
        )


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class _Blocks(torch.nn.Module):
    """Twenty that do next to nothing: a step is so short that its quickest is disturbed by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Block() for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def span_cost(rounds: int, steps: int) -> None:
    model, x = _Blocks(), torch.ones(2, 4)

    def plain() -> None:
        model(x).sum().backward()

    with tempfile.TemporaryDirectory() as folder:

        def spans() -> float:
            with LayerTimer(model, folder) as layers:

                def step() -> None:
                    plain()
                    layers.step()

                step()
                return _quickest(step, steps, clock=time.perf_counter)

        seconds = measuring.interleaved(
            {"plain": lambda: _quickest(plain, steps, clock=time.perf_counter), "spans": spans}, rounds=rounds
        )
    added = min(seconds["spans"]) - min(seconds["plain"])
    print(f"a span, lines and all: {added / 40 * 1e6:.1f} us (40 in a step of {min(seconds['plain']) * 1e3:.2f} ms)")


def memory(case: models.Case, steps: int) -> None:
    batch = case.batch(0)
    print(f"held more than after a tenth of {steps:,} steps:")
    with tempfile.TemporaryDirectory() as folder, LayerTimer(case.model, folder) as layers:
        tracemalloc.start()
        first = (0, 0)
        for step in range(1, steps + 1):
            case.loss(case.model, batch).backward()
            case.model.zero_grad()
            layers.step()
            if step in (steps // 10, steps // 2, steps):
                gc.collect()
                now = tracemalloc.get_traced_memory()[0], resident_bytes() or 0
                first = first if first[1] else now
                objects, resident = ((one - other) / 2**10 for one, other in zip(now, first, strict=True))
                print(f"  {step:>7,} steps: {objects:+8.1f} KiB of Python's objects, {resident:+9.1f} KiB resident")
        tracemalloc.stop()


def _quickest(step: Callable[[], None], steps: int, *, clock: Callable[[], float] = time.process_time) -> float:
    times = []
    for _ in range(steps):
        begin = clock()
        step()
        times.append(clock() - begin)
    return min(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--long", type=int, default=3000, help="steps of the memory run; 0: none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(measuring.machine())
    span_cost(5, 100)
    cost(arguments, models.build("llama", layers=arguments.layers))
    if arguments.long:
        memory(models.build("llama", layers=2), arguments.long)
