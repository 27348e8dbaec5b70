"""What a test may cost: the limits of `@pytest.mark.profile_layers`, and what a profile has beyond them."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.comparison.baseline import Baseline, What, make_baseline, read_baseline, write_baseline
from profiler_wrapper.comparison.guard import guard
from profiler_wrapper.comparison.match import siblings_together
from profiler_wrapper.errors import ProfilerWrapperError, WrongUse, shown, warn
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.text import clean
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.trace.run_directory import PAGE_FILE, safe_name
from profiler_wrapper.units import file_size
from profiler_wrapper.wrapper import ProfilerWrapper

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b", re.IGNORECASE)
_NAMES = ("max_peak", "max_launches", "max_flops", "max_graph_breaks", "max_synchronisations", "baseline")
_MOST_LAYERS = 3
_Part = tuple[str, str, float]  # a layer, a word beside it, how much


class Limits(NamedTuple):
    """What one test may cost."""

    most: Mapping[str, float]  # by the keywords of the mark; bytes, counts a step, graph breaks in all
    baseline: Path | None
    update: bool  # the baseline is to be written, not to be compared with


def read_limits(given: Mapping[str, Any], *, root: Path, test: str, update: bool = False) -> Limits:
    """The limits as a mark gives them; a baseline's path is relative to `root`, and `test` its name in a directory.

    Raises:
        WrongUse: a keyword that there is none of, a value that is no limit, or a baseline that is not there.
    """
    if unknown := [name for name in given if name not in _NAMES]:
        raise WrongUse(f"there is no {shown(unknown[0])}. Give some of: {', '.join(_NAMES)}.")
    baseline = given.get("baseline")
    if baseline is not None and not isinstance(baseline, (str, os.PathLike)):
        raise WrongUse(f"baseline={shown(baseline)} is no path. Give that of a file, or of a directory of them.")
    path = None if baseline is None else baseline_path(baseline, root=root, test=test)
    if path is not None and not update and not path.is_file():
        raise WrongUse(f"there is no baseline {path}. Write it with: pytest --profile-layers-update")
    most = {name: _number(name, value) for name, value in given.items() if name != "baseline" and value is not None}
    return Limits(most, path, update)


def baseline_path(baseline: str | os.PathLike[str], *, root: Path, test: str) -> Path:
    """The file of a test's baseline: as given, or in the directory that is given."""
    path = root / baseline
    in_directory = str(baseline).endswith(("/", os.sep)) or path.is_dir()
    return path / f"{safe_name(test, 'test')}.json" if in_directory else path


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and name == "max_peak" and (size := _SIZE.fullmatch(value.strip())):
        power = " kmgt".index((size[2] or " ").lower())
        return float(size[1]) * (1024.0 if size[3] else 1000.0) ** power
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and not math.isnan(value):
        return value
    what = "bytes or a size such as '1 GiB' or '500 MB'" if name == "max_peak" else "a number from 0"
    raise WrongUse(f"{name}={shown(value)} is no limit. Give {what}.")


def begin_test(limits: Limits) -> None:
    """Where graph breaks count, begin as if nothing had been compiled: torch tells of a break when it compiles."""
    if "torch._dynamo" in sys.modules and ("max_graph_breaks" in limits.most or limits.baseline is not None):
        import torch._dynamo.utils

        torch._dynamo.reset()
        torch._dynamo.utils.counters["graph_break"].clear()


def make_profiler(limits: Limits, directory: Path, test: str) -> ProfilerWrapper:
    """Records every step, with shapes; where times are compared, only the first two with shapes, as warm-up."""
    gc.collect()  # what earlier tests left is no part of this one's peak
    return ProfilerWrapper(
        steps="all",
        record_shapes=True if limits.baseline is None else "auto",
        output_dir=directory,
        run_name=safe_name(test, "test"),
        files=("result", "trace", "full_trace"),
        trace="json.gz",
        background=False,
        enable_print_summary=False,
    )


def failure(limits: Limits, prof: ProfilerWrapper, *, raised: bool = False) -> str:
    """What is beyond the limits, and where the files are; "" if nothing is. What cannot be checked is a warning.

    `raised`: the test did not come to its end, so that a baseline says nothing of it.
    """
    if is_off():
        warn("the limits are not checked, because PROFILER_WRAPPER turns profiling off")
        return ""
    result = prof.result
    if result is None:
        return "nothing was recorded: the test ran no op of torch, or another profiler was on (see the warnings)"
    run = make_baseline([result])
    found = list(_beyond(limits, result, run))
    if not raised:
        if not result.complete:
            found.append(f"the recording is not complete: {'; '.join(result.warnings)}")
        try:
            found += _beside_baseline(limits, run)
        except (ProfilerWrapperError, OSError) as error:
            found.append(f"baseline {limits.baseline}: {error}")
    if found and prof.directory is not None:
        write_page(result, prof.directory / PAGE_FILE)
        found.append(f"page: {prof.directory / PAGE_FILE}\nresult and trace: {prof.directory}")
    return "\n\n".join(found)


def _beside_baseline(limits: Limits, run: Baseline) -> Iterator[str]:
    if limits.baseline is None:
        return
    if limits.update:
        write_baseline(run, limits.baseline)
        return
    report = guard(read_baseline(limits.baseline), run, baseline_name=str(limits.baseline), run_name="this test")
    if report.regressed or not report.judged:
        yield report.table()
    for check in report.checks:
        if check.status == "not judged" and (run.on_device or check.name != "synchronisations"):
            warn(f"{check.name}: not compared with {limits.baseline}: {check.reason}")


def _beyond(limits: Limits, result: ProfileResult, run: Baseline) -> Iterator[str]:
    """What is over its limit, with the layers that have most of it."""
    for name, most in limits.most.items():
        title, value, parts = _measured(name, result, run)
        text = (lambda size: file_size(round(size))) if name == "max_peak" else _count
        if name == "max_synchronisations" and not run.on_device:
            warn(f"{name} is not checked: on a CPU there is no device to wait for")
        elif value is None:
            yield f"{name} cannot be checked: {title} not known"
        elif value > most:
            first = sorted(_by_layer(parts, result).items(), key=lambda part: -part[1])[:_MOST_LAYERS]
            lines = [f"  {text(amount)}  {clean(layer)}" for layer, amount in first if amount]
            yield "\n".join((f"{title}: {text(value)}, limit {text(most)} ({name})", *lines))
        elif name == "max_flops" and result.uncounted:
            warn(f"{name}: there are more than {text(value)}, as nothing tells those of {result.uncounted[0].op}")


def _count(count: float) -> str:
    return f"{count:,.1f}".removesuffix(".0")


def _measured(name: str, result: ProfileResult, run: Baseline) -> tuple[str, float | None, Sequence[_Part]]:
    """What a limit is of: in words, how much there is, and which part each layer has; of graph breaks each place."""
    steps = max(1, sum(row.step is not None for row in result.steps))
    launches = "kernels, copies and memsets" if run.on_device else "ops on the CPU"
    rows, waits, peak = result.layers, result.synchronisations, result.memory.get("peak")
    owners = peak["owners"] if peak else ()
    found: Mapping[str, tuple[str, What, list[_Part]]] = {
        "max_peak": ("peak memory", "peak_bytes", [(one["layer"], one["category"], one["bytes"]) for one in owners]),
        "max_launches": (
            f"launches a step ({launches})",
            "events",
            [(row.layer, row.phase, (row.self_events or 0) / steps) for row in rows],
        ),
        "max_flops": ("FLOPs a step", "flops", [(row.layer, row.phase, row.self_flops_per_step or 0) for row in rows]),
        "max_graph_breaks": ("graph breaks", "graph_breaks", [(place, "", 1) for place in run.breaks]),
        "max_synchronisations": (
            "waits for the device a step",
            "wait",
            [(wait.layer or "", wait.phase, wait.count / steps) for wait in waits],
        ),
    }
    title, what, parts = found[name]
    known = run.of_step(what)
    if what == "wait":
        return title, sum(amount for _, _, amount in parts), parts
    return title, None if known is None else known[1], parts


def _by_layer(parts: Iterable[_Part], result: ProfileResult) -> dict[str, float]:
    """What each layer has, like layers together."""
    blocks = {row.layer: row.block for row in result.layers}
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    for layer, word, amount in parts:
        amounts[layer, word] += amount
    return {
        f"{name} {word}".strip(): sum(amounts[layer, word] for layer in layers)
        for name, layers, word in siblings_together(amounts, blocks)
    }
