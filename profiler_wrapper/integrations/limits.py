"""What a test may cost: the limits of `@pytest.mark.profile_layers`, and which of them a profile is beyond."""

from __future__ import annotations

import gc
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.comparison.baseline import (
    Baseline,
    make_baseline,
    read_baseline,
    write_baseline,
)
from profiler_wrapper.comparison.guard import guard
from profiler_wrapper.comparison.match import folded_name, like_name
from profiler_wrapper.errors import ProfilerWrapperError, WrongUse
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.text import clean
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.trace.run_directory import PAGE_FILE, safe_name
from profiler_wrapper.units import file_size
from profiler_wrapper.wrapper import ProfilerWrapper

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b", re.IGNORECASE)
_MOST_LAYERS = 3


class _Quantity(NamedTuple):
    """Something that may have a limit."""

    title: str
    value: float | None  # None: not known
    text: Callable[[float], str]
    holders: Mapping[str, float]  # how much each layer has of it; of graph breaks, each place
    why_unknown: str


class Judgement(NamedTuple):
    """What a profile is like beside its limits."""

    message: str  # what is beyond them, and where the files are; "" if nothing is
    notes: list[str]  # what was not judged, though it is no failure
    measured: dict[str, float]  # by the names of the limits, without max_


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one test may cost. The names of its limits are the keywords of the mark."""

    max_peak: float | None = None  # bytes
    max_launches: float | None = None  # a step, as all below but graph breaks
    max_flops: float | None = None
    max_graph_breaks: float | None = None
    max_synchronisations: float | None = None
    baseline: Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], *, root: Path, test: str) -> Limits:
        """The limits as a mark gives them.

        Args:
            root: what the path of a baseline is relative to.
            test: names the baseline in a directory of them.

        Raises:
            WrongUse: a keyword that there is none of, or a value that is no limit.
        """
        names = [one.name for one in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            raise WrongUse(f"there is no {unknown[0]!r}. Give some of: {', '.join(names)}.")
        limits = {name: _limit(name, value) for name, value in given.items() if name != "baseline"}
        path = given.get("baseline")
        if path is not None:
            if not isinstance(path, (str, os.PathLike)):
                raise WrongUse(f"baseline={path!r} is no path. Give a file of `profiler-wrapper guard --update`.")
            is_directory = str(path).endswith(("/", os.sep)) or (root / path).is_dir()
            path = root / path / f"{safe_name(test, 'test')}.json" if is_directory else root / path
        return cls(**limits, baseline=path)

    @property
    def counts_graph_breaks(self) -> bool:
        """Whether it matters which test compiled something first."""
        return self.max_graph_breaks is not None or self.baseline is not None

    def check_baseline(self) -> None:
        """Raises WrongUse where there is none yet."""
        if self.baseline is not None and not self.baseline.is_file():
            raise WrongUse(f"there is no baseline {self.baseline}. Write it with: pytest --profile-layers-update")

    @staticmethod
    def forget_compiled() -> None:
        """As if nothing had been compiled yet: torch counts a graph break only where it compiles."""
        import torch._dynamo.utils

        torch._dynamo.reset()
        torch._dynamo.utils.counters["graph_break"].clear()

    def profiler(self, directory: Path, name: str) -> ProfilerWrapper:
        """Records every step, with shapes; where times are compared, without them but for two steps of warm-up."""
        gc.collect()  # what earlier tests left is no part of this one's peak
        return ProfilerWrapper(
            steps="all",
            record_shapes=True if self.baseline is None else "auto",
            output_dir=directory,
            run_name=safe_name(name, "test"),
            files=("result", "trace", "full_trace"),
            trace="json.gz",
            background=False,
            enable_print_summary=False,
        )

    def judge(self, prof: ProfilerWrapper, *, update: bool = False, raised: bool = False) -> Judgement:
        """Compare a profile with the limits and the baseline.

        Args:
            update: write the baseline, and compare nothing with it.
            raised: the test did not come to its end, so that a baseline says nothing of it.
        """
        if is_off():
            return Judgement("", ["nothing is checked, because PROFILER_WRAPPER turns profiling off"], {})
        result = prof.result
        if result is None:
            why = "nothing was recorded: the test ran no op of torch, or another profiler was on (see the warnings)"
            return Judgement(why, [], {})
        run = make_baseline([result])
        quantities = _quantities(result, run)
        failures = [*self._beyond(quantities)]
        notes = [*self._unsure(result, run)]
        if not result.complete and not raised:
            failures.append(f"the recording is not complete: {'; '.join(result.warnings)}")
        if self.baseline is not None and not raised:
            try:
                if update:
                    self.baseline.parent.mkdir(parents=True, exist_ok=True)
                    write_baseline(run, self.baseline)
                else:
                    self._compare(self.baseline, run, failures, notes)
            except (ProfilerWrapperError, OSError) as error:
                failures.append(f"baseline {self.baseline}: {error}")
        if failures and prof.directory is not None:
            page = prof.directory / PAGE_FILE
            write_page(result, page)
            failures.append(f"page: {page}\nresult and trace: {prof.directory}")
        measured = {name: one.value for name, one in quantities.items() if one.value is not None}
        if not self.counts_graph_breaks:  # what other tests compiled is among them
            measured.pop("graph_breaks", None)
        return Judgement("\n\n".join(failures), notes, measured)

    def _beyond(self, quantities: Mapping[str, _Quantity]) -> Iterator[str]:
        """What is over its limit, with the layers that hold most of it."""
        for name, quantity in quantities.items():
            most = getattr(self, f"max_{name}")
            if most is None:
                continue
            if quantity.value is None:
                yield f"max_{name} cannot be checked: {quantity.why_unknown}"
            elif quantity.value > most:
                over = f"{quantity.title}: {quantity.text(quantity.value)}, limit {quantity.text(most)} (max_{name})"
                yield "\n".join((over, *_largest(quantity)))

    def _unsure(self, result: ProfileResult, run: Baseline) -> Iterator[str]:
        """Limits that are not checked in full."""
        if self.max_flops is not None and result.uncounted:
            ops = ", ".join(clean(row.op) for row in result.uncounted[:_MOST_LAYERS])
            yield f"FLOPs are a lower bound, because nothing tells those of {ops}"
        if self.max_synchronisations is not None and not run.on_device:
            yield "max_synchronisations is not checked: on a CPU there is no device to wait for"

    def _compare(self, baseline: Path, run: Baseline, failures: list[str], notes: list[str]) -> None:
        report = guard(read_baseline(baseline), run, baseline_name=str(baseline), run_name="this test")
        if report.regressed or not report.judged:
            failures.append(report.table())
        notes += [
            f"{check.name}: not compared with {baseline.name}: {check.reason}"
            for check in report.checks
            if check.status == "not judged" and (check.name != "synchronisations" or run.on_device)
        ]


def _limit(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and name == "max_peak" and (size := _SIZE.fullmatch(value.strip())):
        base = 1024 if size[3] else 1000
        return float(float(size[1]) * base ** " kmgt".index((size[2] or " ").lower()))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and not math.isnan(value):
        return value
    what = "bytes or a size such as '1 GiB' or '500 MB'" if name == "max_peak" else "a number from 0"
    raise WrongUse(f"{name}={value!r} is no limit. Give {what}.")


def _quantities(result: ProfileResult, run: Baseline) -> dict[str, _Quantity]:
    """What there may be limits of, by their names without `max_`."""
    steps = max(1, sum(row.step is not None for row in result.steps))

    def of_step(what: Any) -> float | None:
        found = run.of_step(what)
        return None if found is None else found[1]

    def by_layer(found: Iterable[tuple[str | None, str | None, float | None]]) -> Mapping[str, float]:
        """Amounts by layer and a word beside it; like layers together."""
        rows = {row.layer: row for row in result.layers if row.layer}
        like: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
        for named, word, amount in found:
            layer = named or ""
            row = rows.get(layer)
            pattern, class_name = (layer, "") if row is None else (like_name(layer, row.block)[0], row.class_name)
            group = like[pattern, class_name, word or "other"]
            group[layer] = group.get(layer, 0.0) + (amount or 0.0)
        amounts = {}
        for (_, _, word), layers in like.items():
            name = folded_name({layer: rows[layer].block if layer in rows else None for layer in layers})
            amounts[f"{name} {word.replace('_', ' ')}".strip()] = sum(layers.values())
        return amounts

    peak = result.memory.get("peak")
    owners = peak["owners"] if peak else ()
    launches = "launches a step (kernels, copies and memsets)" if run.on_device else "launches a step (ops on the CPU)"
    waits = sum(found[1] for amount, found in run.ranges.items() if amount.what == "wait" and found is not None)

    def per_step(value: float) -> str:
        return f"{value:.12g}" if float(value).is_integer() else f"{value:.1f}"

    return {
        "peak": _Quantity(
            "peak memory",
            of_step("peak_bytes"),
            lambda size: file_size(round(size)),
            by_layer((owner["layer"], owner["category"], owner["bytes"]) for owner in owners),
            "no allocation was recorded",
        ),
        "launches": _Quantity(
            launches,
            of_step("events"),
            per_step,
            by_layer((row.layer, row.phase, (row.self_events or 0) / steps) for row in result.layers),
            "nothing ran",
        ),
        "flops": _Quantity(
            "FLOPs a step",
            of_step("flops"),
            lambda flops: f"{flops:.6g}",
            by_layer((row.layer, row.phase, row.self_flops_per_step) for row in result.layers),
            "no op with FLOPs was recorded with its shapes",
        ),
        "graph_breaks": _Quantity(
            "graph breaks", of_step("graph_breaks"), per_step, dict.fromkeys(run.breaks, 1), "this torch tells of none"
        ),
        "synchronisations": _Quantity(
            "waits for the device a step",
            waits,
            per_step,
            by_layer((row.layer, row.phase, row.count / steps) for row in result.synchronisations),
            "",
        ),
    }


def _largest(quantity: _Quantity) -> list[str]:
    """The layers that hold most of it."""
    order = sorted(quantity.holders, key=lambda name: -quantity.holders[name])[:_MOST_LAYERS]
    return [f"  {quantity.text(quantity.holders[name])}  {clean(name)}" for name in order if quantity.holders[name]]
