"""A `with` around a long training, under defaults: after the first steps, nothing may be left of us.

Prints the step time without the wrapper, while recording and afterwards, the process's memory in the
course of the run, the hooks left on the model and the size of the files.

    python benchmarks/long_run.py [--steps 10000]
    python benchmarks/long_run.py --linear --steps 1000000     # a single Linear: a million steps take minutes
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import measuring
import models
import profiler_wrapper as pw

FIRST_STEPS = 12  # two in full, three timed, and some slack


def resident_mib() -> float:
    """Memory of this process now."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def hooks(model: torch.nn.Module) -> int:
    """Forward hooks and pre-hooks on all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def trained(linear: bool) -> tuple[torch.nn.Module, Callable[[int], object]]:
    """What is trained, and a step of its training."""
    if not linear:
        case = models.build("llama", layers=2, hidden=32, tokens=8)
        optimizer = models.optimizer_of(case.model)
        return case.model, lambda step: models.train_step(case, case.model, optimizer, seed=step)
    model, inputs = torch.nn.Linear(8, 8), torch.ones(2, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train_step(step: int) -> None:
        model(inputs).sum().backward()
        sgd.step()
        sgd.zero_grad()

    return model, train_step


def main(steps: int, *, linear: bool) -> None:
    model, train_step = trained(linear)

    def timed_steps(number: int, prof: pw.ProfilerWrapper | None = None) -> tuple[Sequence[float], list[float]]:
        times, memory = array("d"), []  # 8 bytes a step: a list of them would be the growth that is looked for
        for step in range(number):
            start = time.perf_counter()
            train_step(step)
            if prof is not None:
                prof.step()
            times.append(time.perf_counter() - start)
            if step % max(1, number // 10) == 0:
                memory.append(resident_mib())
        return times, memory

    timed_steps(50)
    before, _ = timed_steps(steps // 10)
    hooks_before = hooks(model)
    with tempfile.TemporaryDirectory() as folder:
        prof = pw.ProfilerWrapper(model, output_dir=folder)
        with contextlib.redirect_stdout(io.StringIO()), prof:
            during, memory = timed_steps(steps, prof)
            hooks_inside = hooks(model)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.2f} MiB" for path in sorted(files))
    after, _ = timed_steps(steps // 10)
    rest = during[FIRST_STEPS:]
    what = "a Linear" if linear else "a Llama of 2 layers"
    print(f"{steps} steps of {what} under the defaults; median (quartiles) of a step in ms:")
    print(f"  without                         {measuring.spread(before, unit=1e-3)}")
    print(f"  first {FIRST_STEPS} steps, recording        {measuring.spread(during[:FIRST_STEPS], unit=1e-3)}")
    print(f"  the other {len(rest)}, inside the with {measuring.spread(rest, unit=1e-3)}")
    print(f"  without, afterwards             {measuring.spread(after, unit=1e-3)}")
    base = statistics.median(before + after)
    print(f"  the others / without: {statistics.median(rest) / base:.3f}")
    print("  memory over the run, MiB: " + " ".join(f"{value:.0f}" for value in memory))
    print(f"  hooks before, at the end of the with: {hooks_before}, {hooks_inside}")
    print(f"  files: {sizes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--linear", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(measuring.machine())
    main(options.steps, linear=options.linear)
