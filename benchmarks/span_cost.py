"""What a span of `Timer` costs on the CPU, and what a process holds after a million steps of them.

A round times each way of writing spans in turn, A B C A B C ...: a block that does nothing. Told are, over the rounds,
the median of each round's median span, and of its mean (which has whatever else the machine did). "fake events"
is a device whose events cost nothing: what is left of a span on an accelerator is two records, two queries and one
elapsed_time of its events, which only a device can tell; where there is one, "events" has it all.

    python benchmarks/span_cost.py [--rounds 9] [--spans 20000] [--steps 1000000]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import measuring
from profiler_wrapper.timer import spans
from profiler_wrapper.timer.timer import Timer

WANTED_US = {"start, stop": 3, "with": 3, "events": 15}


class FakeEvent:
    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 1.25


class FakeDevice:
    def ready(self) -> bool:
        return True

    def event(self) -> FakeEvent:
        return FakeEvent()


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def timers(folder: Path) -> dict[str, Timer]:
    """One of each sort, which has written its first span."""
    made = {"cpu": Timer(folder / "cpu", device="cpu")}
    with replaced(spans, "find_accelerator", lambda _: FakeDevice()):
        made["fake events"] = Timer(folder / "fake")
        with made["fake events"]("first"):
            pass
    if torch.cuda.is_available():
        torch.cuda.init()
        made["events"] = Timer(folder / "events")
    with made["cpu"]("first"):
        pass
    return made


def cost(options: argparse.Namespace) -> None:
    clock = time.perf_counter_ns
    means: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = timers(Path(folder))

        def nothing(times: list[int]) -> None:
            for _ in range(options.spans):
                begin = clock()
                times.append(clock() - begin)

        def start_stop(timer: Timer) -> Callable[[list[int]], None]:
            def loop(times: list[int]) -> None:
                for _ in range(options.spans):
                    begin = clock()
                    timer.start("forward")
                    timer.stop("forward")
                    times.append(clock() - begin)

            return loop

        def block(times: list[int]) -> None:
            timer = made["cpu"]
            for _ in range(options.spans):
                begin = clock()
                with timer("forward"):
                    pass
                times.append(clock() - begin)

        @made["cpu"]("function")
        def function() -> None:
            pass

        def decorated(times: list[int]) -> None:
            for _ in range(options.spans):
                begin = clock()
                function()
                times.append(clock() - begin)

        loops = {"no span": nothing, "start, stop": start_stop(made["cpu"]), "with": block, "decorated": decorated}
        loops |= {name: start_stop(timer) for name, timer in made.items() if name != "cpu"}

        def measured(name: str) -> float:
            times: list[int] = []
            gc.disable()
            try:
                loops[name](times)
            finally:
                gc.enable()
            means.setdefault(name, []).append(statistics.fmean(times) / 1e9)
            return statistics.median(times) / 1e9

        medians = measuring.interleaved(
            {name: (lambda name=name: measured(name)) for name in loops},  # type: ignore[misc]
            rounds=options.rounds,
        )
        for timer in made.values():
            timer.close()
    empty, empty_mean = statistics.median(medians.pop("no span")), statistics.median(means.pop("no span"))
    print(f"a span in us, of {options.spans} in each of {options.rounds} rounds (quartiles over the rounds):")
    for name, values in medians.items():
        middle = [value - empty for value in values]
        mean = [value - empty_mean for value in means[name]]
        limit = f"; at most {WANTED_US[name]}" if name in WANTED_US else ""
        print(
            f"  {name:12s} median {measuring.spread(middle, unit=1e-6, digits=2)}"
            f"  mean {measuring.spread(mean, unit=1e-6, digits=2)}{limit}"
        )


def memory(*, steps: int, traced: bool) -> None:
    """What is held more than after a tenth of the steps, each of four spans, one of them with a name of its own."""

    print(f"{'held by Python' if traced else 'resident'}, {steps:,} steps:")
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(folder, device="cpu", gc=True)
        begin = time.perf_counter()
        for step in measuring.held(steps, traced=traced):
            with timer("forward"), timer("layer"):
                pass
            timer.start("backward")
            timer.stop("backward")
            with timer(f"batch {step}"):
                pass
            timer.step()
        lasted = time.perf_counter() - begin
        path = timer.dump()
        assert path is not None
        with path.open("rb") as lines:
            count = sum(1 for _ in lines)
        print(f"  {count:,} lines of text for {5 * steps:,} spans, {lasted / steps * 1e6:.1f} us a step")
        timer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spans", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the memory run; 0: none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(measuring.machine())
    cost(arguments)
    if arguments.steps:
        memory(steps=arguments.steps, traced=False)
        memory(steps=arguments.steps // 10, traced=True)
