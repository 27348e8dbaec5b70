"""What a profiled step costs: unprofiled, under bare `torch.profiler`, under `ProfilerWrapper`.

The flags of the two profilers are the same (CPU and the accelerator, memory, no shapes); times are of
the steps alone, without start, stop and export. Rounds are interleaved.

    python benchmarks/step_overhead.py [--rounds 9] [--steps 10] [--layers 12] [--hidden 64] [--tokens 16]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

import measuring
import models
import profiler_wrapper as pw


def main(options: argparse.Namespace) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    case = models.build("llama", layers=options.layers, hidden=options.hidden, tokens=options.tokens)
    case.model.to(device)
    optimizer = models.optimizer_of(case.model)
    batch = {key: value.to(device) for key, value in case.batch(0).items()}

    def steps(after_step: object = None) -> float:
        """The median step in seconds."""
        times = []
        for _ in range(options.steps):
            start = time.perf_counter()
            case.loss(case.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
            if callable(after_step):
                after_step()
        return statistics.median(times)

    def bare() -> float:
        with profile(profile_memory=True) as prof:
            return steps(prof.step)

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            prof = pw.ProfilerWrapper(case.model, steps="all", record_shapes=False, output_dir=folder, files=("trace",))
            with prof:
                return steps(prof.step)

    def cpu_only() -> float:
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            return steps(prof.step)

    steps()
    seconds = measuring.interleaved(
        {"unprofiled": steps, "CPU activity only": cpu_only, "torch.profiler": bare, "ProfilerWrapper": ours},
        rounds=options.rounds + 1,
    )
    seconds = {name: values[1:] for name, values in seconds.items()}
    print(f"Llama of {options.layers} layers, hidden {options.hidden}, 2 x {options.tokens} tokens, on {device.type}")
    print(f"median step of {options.steps}, over {options.rounds} rounds (quartiles):")
    for name, values in seconds.items():
        against = measuring.ratio(values, seconds["unprofiled"])
        print(f"  {name:18s} {measuring.spread(values, unit=1e-3)} ms   x unprofiled: {against}")
    against = measuring.ratio(seconds["ProfilerWrapper"], seconds["torch.profiler"])
    print(f"  ProfilerWrapper / torch.profiler: {against}; at most 1.15 is wanted")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(measuring.machine())
    main(parser.parse_args())
