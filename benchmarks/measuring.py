"""What the benchmarks share: interleaved timing, medians with spread, and where it was measured."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # measure this checkout, with the models of the tests


def machine() -> str:
    """CPU, cores and versions, on two lines."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = f"{cpu} (no /proc/cpuinfo)"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "numpy", "msgspec", "transformers"))
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {device}\n"
        f"Python {platform.python_version()}, {packages}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def interleaved(candidates: Mapping[str, Callable[[], float | None]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds that each candidate takes, A B C A B C ..., so that a slow minute slows all of them.

    A candidate may time itself and return the seconds; else its whole call is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            gc.collect()
            start = time.perf_counter()
            own = run()
            seconds[name].append(time.perf_counter() - start if own is None else own)
    return seconds


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """`"1.234 (1.200-1.300)"`: median and quartiles, divided by `unit`."""
    scaled = [value / unit for value in values]
    if len(scaled) < 2:
        return f"{scaled[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(scaled, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Ratio of two series measured in turn: the median and the quartiles of the ratios of each round."""
    return spread([value / other for value, other in zip(values, base, strict=True)], digits=3)


def held(steps: int, *, traced: bool) -> Iterator[int]:
    """The steps 1, 2 ..., and prints what is held more than after a tenth of them: resident, or by Python's objects.

    Tracing objects takes memory itself, so the two are measured apart.
    """
    from profiler_wrapper.capture.growth import resident_bytes

    def held_bytes() -> int:
        return tracemalloc.get_traced_memory()[0] if traced else resident_bytes() or 0

    if traced:
        tracemalloc.start()
    at_first = 0
    for step in range(1, steps + 1):
        yield step
        if step in (steps // 10, steps // 2, steps * 3 // 4, steps):
            at_first = at_first or held_bytes()
            print(f"  {step:>9,} steps: {(held_bytes() - at_first) / 2**10:+8.1f} KiB", flush=True)
    tracemalloc.stop()
