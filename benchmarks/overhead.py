"""What profiling costs a training step: ours by default and by option, bare `torch.profiler`, and what others offer.

A Llama trains in two sizes: launch-bound (small matrices, so that a step is all overhead) and compute-bound. Each way
of measuring takes a round of steps in turn, A B C A B C ..., so that a slow minute slows all of them; times are of the
steps alone, without start, stop and export. "Same flags" are the two profilers with the same activities and options.
Another profiler that is not installed is left out with a word.

With `--clock cpu`, times are CPU time of this process: on a CPU alone, others on the machine disturb that less.

    python benchmarks/overhead.py [--rounds 7] [--steps 5] [--layers 12] [--only launch-bound] [--clock cpu] [--json F]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import measuring
import models
import profiler_wrapper as pw
from profiler_wrapper.timer.layer_timer import LayerTimer

SIZES = {
    "launch-bound": {"hidden": 64, "tokens": 16},
    "compute-bound": {"hidden": 512, "tokens": 128},
}
# Options of torch.profiler, which both profilers get.
FLAGS: dict[str, dict[str, Any]] = {
    "memory (our default)": {"profile_memory": True},
    "memory off": {},
    "memory, shapes": {"profile_memory": True, "record_shapes": True},
    "memory, stacks": {"profile_memory": True, "with_stack": True},
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PEERS = ("deepspeed", "torchprof")
_MODULES = {"DeepSpeed FlopsProfiler": "deepspeed.profiling.flops_profiler", "torchprof": "torchprof"}
WANTED_SAME_FLAGS = 1.05
WANTED_TIMED_STEP = {"launch-bound": 1.35, "compute-bound": 1.02}

UNPROFILED, AGAIN = "unprofiled", "unprofiled, again"
WINDOW, AFTER = "ProfilerWrapper: its timed steps", "ProfilerWrapper: the steps after them"
_WINDOW_STEPS = range(2, 5)  # of `steps="auto"`: after two of warm-up
_STEPS_TO_AFTER = 8  # so that there are steps after the window


class Loop:
    """Steps of one model on one device."""

    def __init__(self, case: models.Case, device: torch.device, steps: int, clock: str = "wall") -> None:
        self.case, self.device, self.steps = case, device, steps
        self.clock = CLOCKS[clock]
        case.model.to(device)
        self.optimizer = models.optimizer_of(case.model)
        self.batch = {key: value.to(device) for key, value in case.batch(0).items()}

    def step(self) -> None:
        self.case.loss(self.case.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def times(self, steps: int, after_step: Callable[[], None] | None = None) -> list[float]:
        """Seconds of each step; `after_step` is called after each, and not in them."""
        found = []
        for _ in range(steps):
            start = self.clock()
            self.step()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            found.append(self.clock() - start)
            if after_step is not None:
                after_step()
        return found

    def median(self, after_step: Callable[[], None] | None = None) -> float:
        return statistics.median(self.times(self.steps, after_step))


def torch_profiler(loop: Loop, flags: dict[str, Any]) -> float:
    with profile(**flags) as prof:
        return loop.median(prof.step)


def same_flags(loop: Loop, flags: dict[str, Any], folder: str) -> float:
    """Ours, recording all steps with these flags."""
    own = {"profile_memory": False, "record_shapes": False, **flags}
    with contextlib.redirect_stdout(io.StringIO()):
        prof = pw.ProfilerWrapper(loop.case.model, steps="all", output_dir=folder, files=("trace",), **own)
        with prof:
            return loop.median(prof.step)


def by_default(loop: Loop, folder: str, after: list[float]) -> float:
    """Ours as it comes: the steps whose times it reports; adds to `after` what the steps behind them take."""
    with contextlib.redirect_stdout(io.StringIO()):
        prof = pw.ProfilerWrapper(loop.case.model, output_dir=folder)
        with prof:
            times = loop.times(max(loop.steps, _STEPS_TO_AFTER), prof.step)
    after.append(statistics.median(times[_WINDOW_STEPS.stop + 1 :]))
    return statistics.median(times[_WINDOW_STEPS.start : _WINDOW_STEPS.stop])


def monitored(loop: Loop, folder: str, *, layers: bool) -> float:
    monitor = pw.TrainingMonitor(folder, model=loop.case.model, layers=layers, flops_profile_freq=0, peaks=1.0)
    with monitor:
        monitor.start_step()

        def next_step() -> None:
            monitor.end_step(tokens=1)
            monitor.start_step()

        found = loop.median(next_step)
        monitor.end_step(tokens=1)
    return found


def layer_timer(loop: Loop, folder: str) -> float:
    with LayerTimer(loop.case.model, folder) as layers:
        return loop.median(layers.step)


def flop_counter(loop: Loop) -> float:
    with FlopCounterMode(display=False):
        return loop.median()


def deepspeed_profiler(loop: Loop) -> float:
    profiler = measuring.peer("deepspeed.profiling.flops_profiler").FlopsProfiler(loop.case.model)
    profiler.start_profile()
    try:
        return loop.median()
    finally:
        profiler.end_profile()


def torchprof_profile(loop: Loop) -> float:
    with measuring.torchprof().Profile(loop.case.model, use_cuda=loop.device.type == "cuda"):
        return loop.median()


def candidates(loop: Loop, folder: str, after: list[float]) -> dict[str, Callable[[], float | None]]:
    """Every way of measuring a step; those of others that fail once are left out by `measure`."""
    found: dict[str, Callable[[], float | None]] = {
        UNPROFILED: loop.median,
        WINDOW: lambda: by_default(loop, folder, after),
        AGAIN: loop.median,
        "TrainingMonitor": lambda: monitored(loop, folder, layers=False),
        "TrainingMonitor, layers": lambda: monitored(loop, folder, layers=True),
        "LayerTimer": lambda: layer_timer(loop, folder),
        "torch FlopCounterMode": lambda: flop_counter(loop),
        "DeepSpeed FlopsProfiler": lambda: deepspeed_profiler(loop),
        "torchprof": lambda: torchprof_profile(loop),
    }
    for name, flags in FLAGS.items():
        found[f"torch.profiler: {name}"] = lambda flags=flags: torch_profiler(loop, flags)  # type: ignore[misc]
        found[f"ours: {name}"] = lambda flags=flags: same_flags(loop, flags, folder)  # type: ignore[misc]
    return found


def measure(
    loop: Loop, rounds: int, only: Collection[str] | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of a step under each candidate, or `only` these, a number a round; and why some were left out."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after: list[float] = []
        ways, left_out = candidates(loop, folder, after), {}
        ways = {name: way for name, way in ways.items() if only is None or name in only}
        for name in list(ways):  # all once, to warm caches up
            module = _MODULES.get(name)
            if module is not None and measuring.peer(module) is None:
                left_out[name] = measuring.NOT_INSTALLED
                del ways[name]
                continue
            try:
                ways[name]()
            except Exception as error:
                if module is None:
                    raise
                left_out[name] = f"failed: {type(error).__name__}: {error}".split("\n")[0][:100]
                del ways[name]
        after.clear()
        seconds = measuring.interleaved(ways, rounds=rounds)
    return seconds | ({AFTER: after} if after else {}), left_out


def one_size(report: measuring.Report, name: str, options: argparse.Namespace, device: torch.device) -> None:
    size = SIZES[name]
    case = models.build("llama", layers=options.layers, **size)
    loop = Loop(case, device, options.steps, options.clock)
    tell(report, name, f"hidden {size['hidden']}, 2 x {size['tokens']} tokens", loop, options)


def tell(report: measuring.Report, name: str, size: str, loop: Loop, options: argparse.Namespace) -> None:
    """Measure and print both tables of one model."""
    seconds, left_out = measure(loop, options.rounds)
    base = seconds[UNPROFILED]
    note = (
        f"Llama of {options.layers} layers, {size}, on {loop.device.type}; median of {loop.steps} steps, over "
        f"{options.rounds} rounds: median (quartiles), in {options.clock} time. Ratios are of the same round."
    )
    compared = {f"{who}: {flags}" for flags in FLAGS for who in ("torch.profiler", "ours")}
    order = [UNPROFILED, AGAIN, WINDOW, AFTER, *seconds]
    rows = [
        {
            "a step": way,
            "ms": measuring.spread(seconds[way], unit=1e-3, digits=2),
            "x unprofiled": measuring.ratio(seconds[way], base),
        }
        for way in dict.fromkeys(order)
        if way not in compared
    ]
    rows += [{"a step": way, "ms": why, "x unprofiled": "-"} for way, why in left_out.items()]
    report.table(f"A {name} step", rows, note=note, data=seconds)
    pairs = {flags: (seconds[f"torch.profiler: {flags}"], seconds[f"ours: {flags}"]) for flags in FLAGS}
    report.table(
        f"A {name} step, recorded with the same flags",
        [
            {
                "flags": flags,
                "torch.profiler, x unprofiled": measuring.ratio(theirs, base),
                "ProfilerWrapper, x unprofiled": measuring.ratio(ours, base),
                "ours / torch.profiler": measuring.ratio(ours, theirs),
            }
            for flags, (theirs, ours) in pairs.items()
        ],
    )
    for flags, (theirs, ours) in pairs.items():
        what = f"{name}: ours / torch.profiler, {flags}"
        report.goal(what, measuring.median_ratio(ours, theirs), WANTED_SAME_FLAGS)
    if name in WANTED_TIMED_STEP:
        what = f"{name}: a timed step / an unprofiled one"
        report.goal(what, measuring.median_ratio(seconds[WINDOW], base), WANTED_TIMED_STEP[name])


def main(options: argparse.Namespace) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    report = measuring.Report("overhead", PEERS)
    for name in SIZES if options.only is None else (options.only,):
        one_size(report, name, options, device or torch.device("cpu"))
    report.end(options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", choices=tuple(SIZES))
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    main(parser.parse_args())
