"""Make, write and read what a guard compares a run with: exact amounts and step times, of one run or of several.

What is exact is a range, (least, most) over the runs. A baseline's file holds the results of its runs, with what a
guard looks at.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiler_wrapper.comparison.compare import Source
from profiler_wrapper.comparison.match import Side, backends_of, match_names, shown_names, side_of, traits
from profiler_wrapper.comparison.times import FEWEST
from profiler_wrapper.errors import BrokenTrace, WrongUse, first_few, shown
from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.describe import peak_bytes
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.result import load
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.trace.arrays import grouped
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.run_file import read_json

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
_MOST_BREAKS = 10

Range = tuple[float, float]
NOTHING: Range = (0.0, 0.0)
TimeKey = tuple[str, Phase | None]  # all phases of a layer together; of what has no module each
What = Literal["flops", "events", "retained_bytes", "peak_bytes", "graph_breaks", "op", "class", "wait"]
_OF_STEP: tuple[What, ...] = ("events", "flops", "peak_bytes", "graph_breaks")
_OF_LAYER: tuple[What, ...] = ("flops", "events", "retained_bytes")
COUNTS = frozenset({"events", "op", "class", "wait"})  # 0 in a run that has none; of others nothing is known then


class Amount(NamedTuple):
    """What a range is of, per step: a layer's own in one phase; an op, class or wait; without a name all of a step."""

    what: What
    name: str = ""
    phase: Phase | None = None  # of layers and ops

    @property
    def of_layer(self) -> bool:
        return self.phase is not None and self.what != "op"

    def renamed(self, new_name: Callable[[str], str]) -> Amount:
        """Return the same of the layer of another name."""
        if self.of_layer:
            return self._replace(name=new_name(self.name))
        if self.what == "wait" and " in " in self.name:
            kind, _, where = self.name.partition(" in ")
            layer, _, phase = where.rpartition(", ")
            return self._replace(name=f"{kind} in {new_name(layer)}, {phase}")
        return self


class LayerTime(NamedTuple):
    """Time of a layer in each step."""

    steps_ns: tuple[float, ...]
    own: float  # share of it that is in no layer below


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a run may cost: ranges of exact amounts, and times of steps."""

    runs: int = 1
    sources: tuple[str, ...] = ()
    traits: Mapping[str, Any]
    ranges: Mapping[Amount, Range | None]  # None: not known
    backends: Mapping[tuple[str, Phase], tuple[str, ...]]  # of the attention in a layer itself
    breaks: tuple[str, ...]  # where torch.compile could not go on
    blocks: Mapping[str, str | None]  # the block of each layer
    times: Mapping[TimeKey, LayerTime]
    steps_ns: tuple[float, ...]  # all time of each step, as many as in `times`
    lengths: tuple[int, ...] = ()  # how many of the steps each run has
    no_times: str = ""  # why times cannot be judged
    results: tuple[Analysis, ...] = field(default=(), compare=False, repr=False)  # that it was made from

    @property
    def on_device(self) -> bool:
        return self.traits.get("time_basis") == "device"

    def of_step(self, what: What) -> Range | None:
        """Return the range of a whole step; None where it is not known."""
        return self.ranges.get(Amount(what))

    def renamed_like(self, other: Baseline) -> Baseline:
        """Return the same with its layers by the names of `other`, whatever wraps the model."""
        if self.results and other.results:
            # same (0 -> -1): all runs of a side have its layers
            names = shown_names(self.results[0], other.results[0], "run")
        else:  # a file of version 2 has names alone
            names = match_names(self.blocks, other.blocks)

        def name(layer: str) -> str:
            return names.get(layer, layer)

        return replace(
            self,
            ranges={amount.renamed(name): known for amount, known in self.ranges.items()},
            backends={(name(layer), phase): known for (layer, phase), known in self.backends.items()},
            blocks={name(layer): block and name(block) for layer, block in self.blocks.items()},
            times={(name(layer), phase): time for (layer, phase), time in self.times.items()},
        )


def make_baseline(runs: Sequence[Source], *, read: Callable[[str | os.PathLike[str]], Analysis] = load) -> Baseline:
    """Return what to compare later runs with, from runs of one thing: what varies among several of them passes.

    Raises:
        WrongUse: there is none, or they are of different models.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    analyses = tuple(run if isinstance(run, Analysis) else read(run) for run in runs)
    sources = tuple(Path(run).name for run in runs if not isinstance(run, Analysis))
    return _baseline_of(analyses, sources)


def _baseline_of(analyses: tuple[Analysis, ...], sources: tuple[str, ...]) -> Baseline:
    if not analyses:
        raise WrongUse("a baseline needs a run")
    sides = [replace(_measured(one), results=(one,)) for one in analyses]
    models = {str(one.traits.get("model")) for one in sides}
    if len(models) > 1:
        raise WrongUse(f"a baseline is of runs of one thing, but these are of {first_few(sorted(models), 8)}")
    named = [sides[0], *(side.renamed_like(sides[0]) for side in sides[1:])]
    return replace(_together(named), sources=sources, results=analyses)


def _measured(analysis: Analysis) -> Baseline:
    """Return the baseline of one run."""
    side, own = side_of(analysis), traits(analysis)
    no_times = ""
    if own.get("shapes_in_timed_steps"):
        no_times = "shapes were recorded in the timed steps, which takes time; record without record_shapes=True"
    elif not side.known_steps or side.steps < FEWEST:
        no_times = f"it takes at least {FEWEST} timed steps to know the noise; record more: steps='5-14'"
    listed = analysis.run.get("graph_breaks")
    breaks = tuple(dict.fromkeys(map(_break_in_words, listed))) if isinstance(listed, (list, tuple)) else None
    flops = sum(row.flops_per_step - _not_counted(row) for row in analysis.flops) if analysis.flops else None
    known: dict[Amount, float | None] = {
        Amount("flops"): flops,
        Amount("peak_bytes"): peak_bytes(analysis),
        Amount("graph_breaks"): None if breaks is None else len(breaks),
        **{amount: sum(counts) / side.steps for amount, counts in grouped(_counts(analysis)).items()},
        **_of_layers(side),
    }
    return Baseline(
        traits=own,
        ranges={amount: None if value is None else (float(value), float(value)) for amount, value in known.items()},
        backends={key: tuple(sorted(set(names))) for key, names in backends_of(analysis).items()},
        breaks=breaks or (),
        blocks={row.layer: row.block for row in analysis.layers},
        times={} if no_times else _times(side),
        steps_ns=() if no_times else tuple(side.step_totals().tolist()),
        no_times=no_times,
    )


def _counts(analysis: Analysis) -> Iterator[tuple[Amount, int]]:
    """Yield counts over all steps, in parts."""
    yield Amount("events"), 0
    for row in analysis.classes:
        yield Amount("events"), row.count
        yield Amount("class", row.class_name), row.count
    for op in analysis.operators:  # without autograd's nodes: the ops of a node say more
        if op.calls and "::" in op.op and not op.op.startswith(("autograd::", "torch::autograd::")):
            yield Amount("op", op.op, op.phase), op.calls
    for wait in analysis.synchronisations if analysis.time_basis == "device" else ():
        where = f" in {wait.layer}" if wait.layer else ""
        yield Amount("wait", f"{wait.kind} ({wait.op}){where}, {wait.phase}"), wait.count


def _not_counted(row: Any) -> int:
    """Return FLOPs that do not count: the scores that a fused backward makes again, but nothing of recompute."""
    return 0 if row.phase == "recompute" else int(row.repeated_flops_per_step)


def _break_in_words(one: object) -> str:
    reason, source = (one.get("reason"), one.get("source")) if isinstance(one, Mapping) else (one, None)
    return f"{source}: {reason}" if source else str(reason)


def _of_layers(side: Side) -> dict[Amount, float | None]:
    """Return own amounts of all layers but experts, whose work the data divide."""
    again = grouped(((row.layer, row.phase), _not_counted(row)) for row in side.analysis.flops)
    experts: set[str | None] = set()
    for row in sorted(side.analysis.layers, key=lambda row: row.order):
        if row.kind == "expert" or row.parent in experts:
            experts.add(row.layer)
    amounts: dict[Amount, float | None] = {}
    for row in side.analysis.layers:
        if row.layer in experts:
            continue
        flops_, events, key = row.self_flops_per_step, row.self_events, (row.layer, row.phase)
        amounts[Amount("flops", *key)] = None if flops_ is None else flops_ - sum(again.get(key, ()))
        amounts[Amount("events", *key)] = None if events is None else events / side.steps
        amounts[Amount("retained_bytes", *key)] = row.self_retained_bytes
    return amounts


def _times(side: Side) -> dict[TimeKey, LayerTime]:
    """Return the times of each layer with all its phases, and of each phase of what has no module."""
    timed = (row for row in side.analysis.layers if row.step_times_ns)
    by_key: dict[TimeKey, list[LayerRow]] = grouped(
        ((row.layer, None if row.layer else row.phase), row) for row in timed
    )
    times = {}
    for key, rows in by_key.items():
        series = side.series(rows)
        if (series > 0).all() and series.mean() >= LEAST_SHARE * side.total_ns:
            own = sum(row.self_time_ns for row in rows) / max(1, sum(row.time_ns for row in rows))
            times[key] = LayerTime(tuple(series.tolist()), own)
    return times


def _together(sides: Sequence[Baseline]) -> Baseline:
    """Return the ranges over several runs, and the steps of all of them."""
    timed = [one for one in sides if not one.no_times]
    timed = [one for one in timed if not one.traits.get("memory_in_timed_steps")] or timed  # never both in one mean
    common = [key for key in timed[0].times if all(key in one.times for one in timed)] if timed else []
    return Baseline(
        runs=len(sides),
        traits=(timed or sides)[0].traits,
        ranges={amount: _span(amount, sides) for amount in dict.fromkeys(chain(*(one.ranges for one in sides)))},
        backends={
            key: tuple(sorted({backend for one in sides for backend in one.backends.get(key, ())}))
            for key in dict.fromkeys(chain(*(one.backends for one in sides)))
        },
        breaks=tuple(dict.fromkeys(chain(*(one.breaks for one in sides))))[:_MOST_BREAKS],
        blocks={layer: block for one in reversed(sides) for layer, block in one.blocks.items()},
        times={
            key: LayerTime(tuple(chain(*(one.times[key].steps_ns for one in timed))), timed[0].times[key].own)
            for key in common
        },
        steps_ns=tuple(chain(*(one.steps_ns for one in timed))),
        lengths=tuple(len(one.steps_ns) for one in timed),
        no_times="" if timed else sides[0].no_times,
    )


def _span(amount: Amount, sides: Sequence[Baseline]) -> Range | None:
    missing = NOTHING if amount.what in COUNTS else None
    known = [one for side in sides if (one := side.ranges.get(amount, missing)) is not None]
    return (min(one[0] for one in known), max(one[1] for one in known)) if known else None


# The file.

BASELINE_VERSION = 3
_LARGEST_BASELINE = 64 << 20  # bytes: a larger file is a trace, and is not read to see whether it is a baseline
# What a guard looks at: the lists of a result, and the fields of their rows.
_GUARDED: Mapping[str, str] = {
    "layers": "layer class_name kind block parent depth order phase time_us self_time_us self_events "
    "self_flops_per_step self_retained_bytes step_times_us",
    "attention": "layer phase backend time_us",
    "classes": "class phase count time_us",
    "steps": "step time_us",
    "flops": "layer phase class dtype flops_per_step repeated_flops_per_step",
    "operators": "op class phase calls time_us self_time_us",
    "synchronisations": "kind op layer phase count",
}


def read_baseline(source: Source) -> Baseline:
    """Read a baseline from its file, else make it of a result, a trace or the directory of a run.

    Raises:
        WrongUse: the file is of another version.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    data = None if isinstance(source, Analysis) else _baseline_data(Path(source))
    if data is None:
        return make_baseline([source])
    version = data["guard_baseline_version"]
    if version not in (2, BASELINE_VERSION):
        raise WrongUse(f"guard_baseline_version is {shown(version)}, not {BASELINE_VERSION}: make the baseline anew")
    try:
        if version == 2:
            return _of_version_2(data)
        return _baseline_of(tuple(map(from_dict, data["results"])), tuple(data["sources"]))
    except (BrokenTrace, KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"not a baseline that guard wrote: {error}") from error


def _baseline_data(path: Path) -> dict[str, Any] | None:
    if not path.is_file() or path.stat().st_size > _LARGEST_BASELINE:
        return None
    try:
        data = read_json(path)
    except BrokenTrace:
        return None
    return data if "guard_baseline_version" in data else None


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file to commit: the results of the runs, with what a guard looks at; a row on each line, for diffs.

    Raises:
        WrongUse: it was read from a file of version 2, which has no results.
        OSError: it cannot be written.
    """
    if not baseline.results:
        raise WrongUse("a baseline of version 2 has no results to write: make the baseline anew from its runs")
    results = ",\n".join(map(_guarded_result, baseline.results))
    head = f'"guard_baseline_version": {BASELINE_VERSION},\n"sources": {json.dumps(baseline.sources)}'
    with replacing(path) as beside:
        beside.write_text(f'{{{head},\n"results": [\n{results}\n]}}\n', encoding="utf-8")


def _guarded_result(analysis: Analysis) -> str:
    """Return what a guard looks at of a `result.json`, without what is not known."""
    whole = to_dict(analysis)
    short = {key: whole[key] for key in ("schema_version", "time_basis", "complete", "time")}
    short |= {
        "summary": {"comparable": traits(analysis)},
        "run": {"graph_breaks": whole["run"].get("graph_breaks")},
        "memory": {"peak": {"allocated_bytes": peak_bytes(analysis)}},
    }
    for name, names in _GUARDED.items():
        short[name] = [{key: row[key] for key in names.split() if row[key] is not None} for row in whole[name]]

    def lines(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(map(lines, value)) + "\n ]"
        return json.dumps(value, separators=(",", ":"))

    return "{" + ",\n ".join(f"{json.dumps(key)}: {lines(value)}" for key, value in short.items()) + "}"


def _of_version_2(data: Mapping[str, Any]) -> Baseline:
    """Return the baseline of a file that holds ranges, levels and spreads in the place of results.

    There a range of one number is that number, and sibling layers are one row: `*` stands for their numbers.
    """
    ranges = {Amount(what): _range(data.get(what)) for what in _OF_STEP}
    ranges |= {Amount("class", name): _range(value) for name, value in data["classes"].items()}
    ranges |= {Amount("wait", name): _range(value) for name, value in (data.get("synchronisations") or {}).items()}
    for phase, ops in data["ops"].items():
        ranges |= {Amount("op", op, phase): _range(value) for op, value in ops.items()}
    blocks: dict[str, str | None] = {}
    backends: dict[tuple[str, Phase], tuple[str, ...]] = {}
    times: dict[TimeKey, LayerTime] = {}
    for row in data["rows"]:
        blocks |= (layers := _layers(row["names"]))
        for layer in layers:
            for what in _OF_LAYER:
                ranges[Amount(what, layer, row["phase"])] = _range(row.get(what))
            if row.get("backends"):
                backends[layer, row["phase"]] = tuple(row["backends"])
    for row in data.get("times", ()):
        measured = zip(_layers(row["names"]), _pair(row["levels_us"]), _pair(row["spreads"]), strict=True)
        for layer, level_us, spread in measured:
            times[layer, row.get("phase")] = LayerTime(_three_steps(level_us, spread), row["own"])
    return Baseline(
        runs=data["runs"],
        sources=tuple(data.get("sources", ())),
        traits=data["traits"],
        ranges=ranges,
        backends=backends,
        breaks=tuple(data.get("break_places", ())),
        blocks=blocks,
        times=times,
        steps_ns=_three_steps(data["step_us"], data["step_spread"]) if "step_us" in data else (),
        no_times=data.get("no_times", ""),
    )


def _three_steps(level_us: float, spread: float) -> tuple[float, ...]:
    """Return steps that have nearly this level and spread, in nanoseconds."""
    return tuple(1000 * level_us * math.exp(spread * away) for away in (-1, 0, 1))


def _pair(value: Any) -> list[float]:
    """Return two numbers, which are written as one where they are equal."""
    return value if isinstance(value, list) else [value, value]


def _range(value: Any) -> Range | None:
    if value is None:
        return None
    least, most = _pair(value)
    return float(least), float(most)


def _layers(names: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the layers that a row stands for, each with its block."""
    head, _, tail = names["pattern"].partition("*")
    if "numbers" not in names:
        return {names["pattern"]: None}
    numbers = [number for first, last in map(_pair, names["numbers"]) for number in range(int(first), int(last) + 1)]
    return {f"{head}{number}{tail}": f"{head}{number}" for number in numbers}
