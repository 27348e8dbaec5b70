"""How long `load()` takes, reading and analysis together, against what others need for the same profile.

- against `prof.key_averages()`: each round profiles the same steps of a Llama anew, exports them, and
  times both on that profile;
- against HolisticTraceAnalysis: `TraceAnalysis(trace_dir=...)` on a recorded DDP training, if installed.

    python benchmarks/load_vs_others.py [--rounds 7] [--layers 12] [--steps 5]
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import measuring
import models
import profiler_wrapper as pw
import shared_traces

HTA_TRACE = shared_traces.TRACES / "ddp_training_with_memory.pt.trace.json.gz"


def against_key_averages(rounds: int, layers: int, steps: int) -> None:
    case = models.build("llama", layers=layers)
    optimizer = models.optimizer_of(case.model)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for round_number in range(rounds + 1):
            with (
                pw.mark(case.model),
                profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as prof,
            ):
                for step in range(steps):
                    models.train_step(case, case.model, optimizer, seed=step)
                    prof.step()
            prof.export_chrome_trace(str(path))
            start = time.perf_counter()
            pw.load(path)
            middle = time.perf_counter()
            prof.key_averages()
            end = time.perf_counter()
            if round_number:  # the first one warms caches up
                ours.append(middle - start)
                theirs.append(end - middle)
        print(f"\nLlama of {layers} layers, {steps} steps: a trace of {path.stat().st_size / 2**20:.1f} MiB")
    print(f"  load()               {measuring.spread(ours)} s")
    print(f"  prof.key_averages()  {measuring.spread(theirs)} s")
    print(f"  load() / key_averages(): {measuring.ratio(ours, theirs)}; at most 0.1 is wanted")


def against_hta(rounds: int) -> None:
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        print("\nHolisticTraceAnalysis is not installed: no comparison with it.")
        return
    if not HTA_TRACE.is_file():
        print(f"\n{HTA_TRACE.name} is not there: no comparison with HolisticTraceAnalysis.")
        return
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = shutil.copy(HTA_TRACE, folder)
        seconds = measuring.interleaved(
            {
                "ours": lambda: _seconds(lambda: pw.load(copy)),
                "HTA": lambda: _seconds(lambda: TraceAnalysis(trace_dir=folder)),
            },
            rounds=rounds + 1,
        )
    ours, theirs = seconds["ours"][1:], seconds["HTA"][1:]
    print(f"\n{HTA_TRACE.name}")
    print(f"  load()                         {measuring.spread(ours)} s")
    print(f"  hta TraceAnalysis(trace_dir)   {measuring.spread(theirs)} s")
    print(f"  load() / HTA: {measuring.ratio(ours, theirs)}; at most 0.25 is wanted")


def _seconds(run: object) -> float:
    start = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(measuring.machine())
    against_key_averages(options.rounds, options.layers, options.steps)
    against_hta(options.rounds)
