"""How much of the time has a layer: every model, in every variant, and the recorded traces of GPUs.

For each: the share of forward and backward time that has a layer, and whether the rows add up to the
trace's total to the nanosecond. The total is summed from the JSON by other code (tests/truths.py).

    python benchmarks/coverage.py [--models llama,gpt2] [--variants plain,ddp] [--backend inductor] [--no-traces]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

import measuring
import models
import profiler_wrapper as pw
import shared_traces
import truths
import variants
from profiler_wrapper.result import ProfileResult

FORWARD_AND_BACKWARD = {"forward", "prefill", "decode", "backward", "recompute", "accumulate_grad"}


def layer_coverage(result: ProfileResult) -> float:
    """Share of the forward and backward time that is in a layer by name.

    The unattributed counts against it, and so does what has no module (a loss that is computed outside of
    the model); collectives of several layers do not, as they belong to none of them.
    """
    rows = [row for row in result.layers if row.phase in FORWARD_AND_BACKWARD]
    named = sum(row.self_time_ns for row in rows if row.layer)
    nameless = sum(row.self_time_ns - row.communication_ns for row in rows if not row.layer)
    whole = named + nameless + result.time.unattributed_ns
    return named / whole if whole else 1.0


def adds_up(result: ProfileResult, path: Path) -> bool:
    """Rows and the unattributed make the total, and the total is the trace's."""
    total = truths.device_total_ns(path) if result.time_basis == "device" else truths.cpu_total_ns(path)
    rows = sum(row.self_time_ns for row in result.layers)
    return rows + result.time.unattributed_ns == result.time.total_ns == total


def profile(name: str, variant: str, backend: str, folder: Path) -> tuple[ProfileResult, Path]:
    case = models.build(name, layers=4, hidden=128)
    if variant.startswith("compiled"):
        model = variants.VARIANTS[variant](case, backend=backend)  # type: ignore[call-arg]
        models.train(case, model=model, steps=2)  # compile outside of the profile
    else:
        model = variants.VARIANTS[variant](case)
    optimizer = models.optimizer_of(model)
    prof = pw.ProfilerWrapper(model, output_dir=folder, run_name=f"{name}_{variant}", files=("trace",))
    with contextlib.redirect_stdout(io.StringIO()), prof:
        for step in range(5):
            models.train_step(case, model, optimizer, seed=step)
            prof.step()
    assert prof.result is not None
    (trace,) = [path for path in folder.glob(f"{name}_{variant}/**/*_trace.json") if "_full_" not in path.name]
    return prof.result, trace


def one_model(name: str, variant: str, backend: str, plain_rows: set[str]) -> set[str]:
    """Print the line of one model in one variant; returns the names of its rows."""
    group = variants.process_group() if variant in variants.NEEDS_PROCESS_GROUP else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, group:
        start = time.perf_counter()
        result, trace = profile(name, variant, backend, Path(folder))
        rows = {row.layer for row in result.layers if row.layer}
        missing, extra = (len(plain_rows - rows), len(rows - plain_rows)) if plain_rows else ("-", "-")
        print(
            f"{name:10s} {variant:33s} {100 * layer_coverage(result):7.2f} {100 * result.time.coverage:7.2f}  "
            f"{'exact' if adds_up(result, trace) else 'WRONG':6s} {result.time.total_ns / 1e6:9.3f} "
            f"{len(rows):5d} {missing:>8} {extra:>6} "
            f"{time.perf_counter() - start:6.1f} s",
            flush=True,
        )
    return rows


def all_models(names: list[str], chosen: list[str], backend: str) -> None:
    print("\nmodel      variant                           fwd+bwd   all %  sum     total ms  rows  missing  extra")
    for name in names:
        plain: set[str] = set()
        for variant in chosen:
            torch._dynamo.reset()
            try:
                rows = one_model(name, variant, backend, plain)
            except Exception as error:
                print(f"{name:10s} {variant:33s} FAILED: {type(error).__name__}: {error}"[:160], flush=True)
                continue
            plain = plain or rows


def all_traces() -> None:
    if not shared_traces.TRACES.is_dir():
        print("\nno recorded traces beside this checkout")
        return
    print("\ntrace                                            basis   all %  sum     total ms   layers  phases")
    for path in sorted(shared_traces.TRACES.glob("*.json.gz")):
        result = pw.load(path)
        phases = ",".join(sorted({row.phase for row in result.layers}))
        print(
            f"{path.name:48s} {result.time_basis:6s} {100 * result.time.coverage:6.2f}  "
            f"{'exact' if adds_up(result, path) else 'WRONG':6s} {result.time.total_ns / 1e6:9.3f} "
            f"{len({row.layer for row in result.layers if row.layer}):8d}  {phases}"
        )
        for row in result.unattributed:
            print(f"    (unattributed) {row.reason}: {row.time_ns / 1e6:.3f} ms, {row.count} events")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.BUILDERS))
    parser.add_argument("--variants", default=",".join(variants.VARIANTS))
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--no-traces", action="store_true")
    options = parser.parse_args()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(measuring.machine())
    all_models(options.models.split(","), options.variants.split(","), options.backend)
    if not options.no_traces:
        all_traces()
