"""What the benchmarks share: interleaved timing, medians with spread, where it was measured, Markdown and JSON."""

from __future__ import annotations

import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start and stop
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


NOT_INSTALLED = "not installed"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def peer(module: str) -> Any:
    """Another profiler's module; None where it is not installed: a benchmark then leaves it out with a word."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def torchprof() -> Any:
    """torchprof, if installed. Its last release calls a method that torch has taken away since, and now does itself."""
    from torch.autograd.profiler_util import EventList

    if not hasattr(EventList, "populate_cpu_children"):
        EventList.populate_cpu_children = lambda events: None  # type: ignore[attr-defined]
    return peer("torchprof")


class Report:
    """What a benchmark says: printed as Markdown as it comes, and at the end written as JSON.

    Args:
        name: of the benchmark.
        packages: other profilers whose versions are printed too.
    """

    def __init__(self, name: str, packages: Sequence[str] = ()) -> None:
        self.content: dict[str, Any] = {
            "benchmark": name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "machine": machine(),
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "peers": {package: _version(package) for package in packages},
            "tables": [],
            "goals": [],
        }
        peers = ", ".join(f"{package} {version}" for package, version in self.content["peers"].items())
        print(f"# {name}\n\n{self.content['machine']}" + (f"\n{peers}" if peers else ""), flush=True)

    def table(self, title: str, rows: Sequence[Mapping[str, str]], *, note: str = "", data: object = None) -> None:
        """Print a table with the same columns in all `rows`; `data` has its numbers, for the JSON."""
        from tabulate import tabulate

        self.content["tables"].append({"title": title, "note": note, "rows": [dict(row) for row in rows], "data": data})
        print(f"\n## {title}\n" + (f"\n{note}\n" if note else ""))
        print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True), flush=True)

    def goal(self, what: str, measured: float | None, at_most: float) -> None:
        """A number that is wanted small; None where it was not measured."""
        self.content["goals"].append({"what": what, "measured": measured, "at_most": at_most})

    def end(self, path: Path | None) -> None:
        """Print the goals; write all as JSON, if `path` is given."""
        if self.content["goals"]:
            print("\n## Goals\n")
        for goal in self.content["goals"]:
            measured, at_most = goal["measured"], goal["at_most"]
            if measured is None:
                found = "not measured"
            else:
                found = f"{'met' if measured <= at_most else 'NOT met'}: {measured:.3f}, at most {at_most:.3f}"
            print(f"- {goal['what']}: {found}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.content, indent=1), encoding="utf-8")


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of each round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits and commas: `1,234,000`; a dash where it is not known."""
    if value is None or math.isnan(value):
        return "-"
    if not value:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


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
