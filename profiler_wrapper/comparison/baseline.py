"""What a guard compares: of one run, or several of the same thing, ranges of what is exact, and levels of times.

A range is (least, most) over the runs. Layers go by the names that the first run has for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis.model import Analysis, LayerRow, Phase
from profiler_wrapper.analysis.statistics import OPEN
from profiler_wrapper.comparison.compare import peak_bytes
from profiler_wrapper.comparison.match import Side, like_name, match_layers, match_names, side_of
from profiler_wrapper.comparison.noise import FEWEST_STEPS, levels, weighted_median
from profiler_wrapper.comparison.verdict import traits
from profiler_wrapper.errors import WrongUse

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
MOST_LAYERS_OF_OP = 5  # that a row of an op names
_MOST_PLACES = 10

Range = tuple[float, float]
NOTHING: Range = (0.0, 0.0)
TimeKey = tuple[str, Phase | None]  # all phases of a layer together; of what has no module each


What = Literal["flops", "events", "retained_bytes", "peak_bytes", "graph_breaks", "op", "class", "wait"]
_OF_STEP: tuple[What, ...] = ("flops", "peak_bytes", "graph_breaks")
_OF_LAYER: tuple[What, ...] = ("flops", "events", "retained_bytes")


class Amount(NamedTuple):
    """What a range is of, per step: a layer's own in one phase; an op, class or wait; without a name all of a step."""

    what: What
    name: str = ""
    phase: Phase | None = None  # of layers and ops

    @property
    def of_layer(self) -> bool:
        return self.phase is not None and self.what != "op"


_COUNTS = frozenset({"events", "op", "class", "wait"})  # 0 in a run that has none; of others nothing is known then


class LayerTime(NamedTuple):
    """Time of a layer in a step."""

    level_us: float
    spread: float  # relative, of one step or between runs
    own: float = 1.0  # share of the time that is in no layer below


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a run may cost."""

    runs: int = 1
    sources: tuple[str, ...] = ()
    traits: Mapping[str, Any]
    ranges: Mapping[Amount, Range | None]  # None: not known
    backends: Mapping[tuple[str, Phase], tuple[str, ...]]  # of the attention in a layer itself
    break_places: tuple[str, ...] = ()  # where torch.compile could not go on
    op_layers: Mapping[tuple[Phase, str], tuple[str, ...]] = field(default_factory=dict)  # "": in none; if all known
    step: LayerTime | None = None  # all time of a step; None: times cannot be judged
    times: Mapping[TimeKey, LayerTime]
    no_times: str = ""  # why times cannot be judged
    siblings: Mapping[str, tuple[str, int | None]]  # layer -> name with a number left open, and that number
    results: tuple[Analysis, ...] = field(default=(), compare=False, repr=False)  # that it was made from

    @property
    def on_device(self) -> bool:
        return self.traits.get("time_basis") == "device"

    def of_step(self, what: What) -> Range | None:
        """Of a whole step; None where it is not known."""
        return self.ranges.get(Amount(what))

    def layers(self) -> dict[str, None]:
        """Names of the layers with exact amounts, in model order."""
        return dict.fromkeys(amount.name for amount in self.ranges if amount.of_layer and amount.name)

    def renamed_like(self, other: Baseline) -> Baseline:
        """The same with its layers by the names of `other`, whatever wraps the model."""
        name_of = match_names(self.layers(), other.layers())

        def name(layer: str) -> str:
            return name_of.get(layer, layer)

        return replace(
            self,
            ranges={
                amount._replace(name=name(amount.name)) if amount.of_layer else amount: known
                for amount, known in self.ranges.items()
            },
            backends={(name(layer), phase): known for (layer, phase), known in self.backends.items()},
            times={(name(layer), phase): row for (layer, phase), row in self.times.items()},
            op_layers={key: tuple(map(name, layers)) for key, layers in self.op_layers.items()},
        )


def baseline_of(analyses: Sequence[Analysis], *, sources: Sequence[str] = ()) -> Baseline:
    """What runs of the same thing have cost, and how much they differ.

    Raises:
        WrongUse: there is none, or they are of different models.
    """
    if not analyses:
        raise WrongUse("a baseline needs a run")
    first = analyses[0]
    sides = [_measured(one, {} if one is first else match_layers(one, first)) for one in analyses]
    models = {str(one.traits.get("model")) for one in sides}
    if len(models) > 1:
        raise WrongUse(f"a baseline is of runs of one thing, but these are of {', '.join(sorted(models))}")
    return replace(_together(sides), sources=tuple(sources), results=tuple(analyses))


# -- one run --------------------------------------------------------------------------------------


def _measured(analysis: Analysis, name_of: Mapping[str, str]) -> Baseline:
    """Of one run; `name_of`: what layers are called, where not by their own names."""
    side, own = side_of(analysis), traits(analysis)
    no_times = ""
    if own.get("shapes_in_timed_steps"):
        no_times = "shapes were recorded in the timed steps, which takes time; record without record_shapes=True"
    elif not side.known_steps or side.steps < FEWEST_STEPS:
        no_times = f"it takes at least {FEWEST_STEPS} timed steps to know the noise; record more: steps='5-14'"
    times, step = ({}, None) if no_times else _times(side, name_of)
    breaks = _break_places(analysis.run.get("graph_breaks"))
    counts: dict[Amount, int] = defaultdict(int, {Amount("events"): 0})
    op_layers: dict[tuple[Phase, str], tuple[str, ...]] = {}
    for row in analysis.classes:
        counts[Amount("events")] += row.count
        counts[Amount("class", row.class_name)] += row.count
    for op in analysis.operators:  # without autograd's nodes: the ops of a node tell more
        if op.calls and "::" in op.op and not op.op.startswith(("autograd::", "torch::autograd::")):
            counts[Amount("op", op.op, op.phase)] += op.calls
            if len(op.layers) < MOST_LAYERS_OF_OP:
                op_layers[op.phase, op.op] = ("", *(name_of.get(layer, layer) for layer in op.layers))
    for wait in analysis.synchronisations if analysis.time_basis == "device" else ():
        where = f" in {name_of.get(wait.layer, wait.layer)}" if wait.layer else ""
        counts[Amount("wait", f"{wait.kind} ({wait.op}){where}, {wait.phase}")] += wait.count
    layers, backends = _exact(side, name_of)
    flops = sum(row.flops_per_step - _not_counted(row) for row in analysis.flops) if analysis.flops else None
    return Baseline(
        traits=own,
        ranges={
            Amount("flops"): _once(flops),
            Amount("peak_bytes"): _once(peak_bytes(analysis)),
            Amount("graph_breaks"): _once(None if breaks is None else len(breaks)),
            **{amount: _once(count / side.steps) for amount, count in counts.items()},
            **layers,
        },
        backends=backends,
        break_places=breaks or (),
        op_layers=op_layers,
        times=times,
        step=step,
        no_times=no_times,
        siblings={name_of.get(row.layer, row.layer): like_name(row.layer, row.block) for row in analysis.layers},
    )


def _not_counted(row: Any) -> int:
    """FLOPs that do not count: the scores that a fused backward makes again, but nothing of recompute."""
    return 0 if row.phase == "recompute" else int(row.repeated_flops_per_step)


def _once(value: float | None) -> Range | None:
    return None if value is None else (float(value), float(value))


def _break_places(listed: object) -> tuple[str, ...] | None:
    """Where torch.compile could not go on, each place once; None where it is not known."""
    if not isinstance(listed, (list, tuple)):
        return None
    places = []
    for one in listed:
        reason, source = (one.get("reason"), one.get("source")) if isinstance(one, Mapping) else (one, None)
        places.append(f"{source}: {reason}" if source else str(reason))
    return tuple(dict.fromkeys(places))


def _exact(
    side: Side, name_of: Mapping[str, str]
) -> tuple[dict[Amount, Range | None], dict[tuple[str, Phase], tuple[str, ...]]]:
    """Amounts and attention backends of all layers but experts, whose work the data divide."""
    found: dict[tuple[str, Phase], set[str]] = defaultdict(set)
    for attention in side.analysis.attention:
        found[attention.layer, attention.phase].add(attention.backend)
    again: dict[tuple[str | None, Phase], int] = defaultdict(int)
    for flops in side.analysis.flops:
        again[flops.layer, flops.phase] += _not_counted(flops)
    experts: set[str] = set()
    for row in sorted(side.analysis.layers, key=lambda row: row.order):
        if row.kind == "expert" or row.parent in experts:
            experts.add(row.layer)
    ranges: dict[Amount, Range | None] = {}
    backends: dict[tuple[str, Phase], tuple[str, ...]] = {}
    for row in side.analysis.layers:
        if row.layer in experts:
            continue
        layer, phase = name_of.get(row.layer, row.layer), row.phase
        own, events = row.self_flops_per_step, row.self_events
        ranges[Amount("flops", layer, phase)] = _once(None if own is None else own - again[row.layer, phase])
        ranges[Amount("events", layer, phase)] = _once(None if events is None else events / side.steps)
        ranges[Amount("retained_bytes", layer, phase)] = _once(row.self_retained_bytes)
        if (row.layer, phase) in found:
            backends[layer, phase] = tuple(sorted(found[row.layer, phase]))
    return ranges, backends


def _times(side: Side, name_of: Mapping[str, str]) -> tuple[dict[TimeKey, LayerTime], LayerTime]:
    """Of each layer with all its phases, of each phase of what has no module, and of the step."""
    grouped: dict[TimeKey, list[LayerRow]] = defaultdict(list)
    for row in side.analysis.layers:
        if row.step_times_ns:
            grouped[name_of.get(row.layer, row.layer), None if row.layer else row.phase].append(row)
    tables = {key: side.series(rows) for key, rows in grouped.items()}
    least = LEAST_SHARE * side.total_ns
    keys = [key for key, series in tables.items() if (series > 0).all() and float(series.mean()) >= least]
    level, spread = levels(side.step_totals()[None, :], np.zeros(1))
    step = LayerTime(math.exp(level[0]) / 1000, float(spread[0]))
    if not keys:
        return {}, step
    table = np.array([tables[key] for key in keys])
    own = [
        sum(row.self_time_ns for row in grouped[key]) / max(1, sum(row.time_ns for row in grouped[key])) for key in keys
    ]
    level, spread = levels(table, np.sqrt(table.mean(axis=1) * np.array(own)))
    measured = zip(np.exp(level) / 1000, spread, own, strict=True)
    return {
        key: LayerTime(float(one), float(apart), share) for key, (one, apart, share) in zip(keys, measured, strict=True)
    }, step


# -- several runs ---------------------------------------------------------------------------------


def _together(sides: Sequence[Baseline]) -> Baseline:
    """The ranges over several runs, and what their times vary by."""
    timed = [one for one in sides if not one.no_times]
    timed = [one for one in timed if not one.traits.get("memory_in_timed_steps")] or timed  # never both in one mean
    amounts = dict.fromkeys(amount for one in sides for amount in one.ranges)
    attention = dict.fromkeys(key for one in sides for key in one.backends)
    return Baseline(
        runs=sum(one.runs for one in sides),
        traits=(timed or sides)[0].traits,
        ranges={
            amount: _span(one.ranges.get(amount, NOTHING if amount.what in _COUNTS else None) for one in sides)
            for amount in amounts
        },
        backends={
            key: tuple(sorted({backend for one in sides for backend in one.backends.get(key, ())})) for key in attention
        },
        break_places=tuple(dict.fromkeys(place for one in sides for place in one.break_places))[:_MOST_PLACES],
        op_layers=_op_layers(sides),
        step=_step(timed),
        times=_times_together(timed),
        no_times="" if timed else sides[0].no_times,
        siblings={layer: name for one in reversed(sides) for layer, name in one.siblings.items()},
    )


def _span(ranges: Iterable[Range | None]) -> Range | None:
    known = [one for one in ranges if one is not None]
    return (min(one[0] for one in known), max(one[1] for one in known)) if known else None


def _op_layers(sides: Sequence[Baseline]) -> dict[tuple[Phase, str], tuple[str, ...]]:
    """Where an op ran in any run; nothing of one of which a run does not know all."""
    found: dict[tuple[Phase, str], tuple[str, ...]] = {}
    for phase, op in dict.fromkeys(key for side in sides for key in side.op_layers):
        having = [side for side in sides if Amount("op", op, phase) in side.ranges]
        if all((phase, op) in side.op_layers for side in having):
            found[phase, op] = tuple(dict.fromkeys(layer for side in having for layer in side.op_layers[phase, op]))
    return found


def _step(timed: Sequence[Baseline]) -> LayerTime | None:
    steps = [one.step for one in timed if one.step is not None]
    if not steps:
        return None
    between = stdev(math.log(one.level_us) for one in steps) if len(steps) > 1 else 0.0
    return LayerTime(median(one.level_us for one in steps), max(between, *(one.spread for one in steps)))


def _times_together(timed: Sequence[Baseline]) -> dict[TimeKey, LayerTime]:
    """Levels as in the run that is typical in all, so that a busy machine moves none; spread between runs too."""
    if len(timed) < 2:
        return dict(timed[0].times) if timed else {}
    first = timed[0].times
    keys = [key for key in first if all(key in one.times for one in timed)]
    logs = [{key: math.log(one.times[key].level_us) for key in keys} for one in timed]
    weight = np.array([math.sqrt(first[key].level_us * first[key].own) for key in keys])
    factors = [weighted_median(np.array([log[key] - logs[0][key] for key in keys]), weight) for log in logs]
    middle = median(factors)
    found: dict[TimeKey, LayerTime] = {}
    for key in keys:
        own = [log[key] - factor + middle for log, factor in zip(logs, factors, strict=True)]
        spread = max(stdev(own), fmean(one.times[key].spread for one in timed))
        found[key] = LayerTime(math.exp(median(own)), spread, first[key].own)
    return found


# -- files of earlier versions --------------------------------------------------------------------


def baseline_from_dict(data: Mapping[str, Any]) -> Baseline:
    """The baseline of a file of version 2, which held ranges and levels instead of results.

    There a range of one number is that number, and like layers are one row: `*` in a pattern stands for their numbers.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: it is none.
    """
    _check_numbers({key: value for key, value in data.items() if key != "traits"})
    if data["runs"] < 1:
        raise ValueError(f"it is of {data['runs']} runs")
    ranges: dict[Amount, Range | None] = {Amount("events"): _range(data["events"])}
    for what in _OF_STEP:
        ranges[Amount(what)] = _range(data.get(what))
    ranges |= {Amount("class", name): _range(value) for name, value in data["classes"].items()}
    ranges |= {Amount("wait", name): _range(value) for name, value in (data.get("synchronisations") or {}).items()}
    for phase, ops in data["ops"].items():
        ranges |= {Amount("op", op, phase): _range(value) for op, value in ops.items()}
    siblings: dict[str, tuple[str, int | None]] = {}
    backends: dict[tuple[str, Phase], tuple[str, ...]] = {}
    times: dict[TimeKey, LayerTime] = {}
    for row in data["rows"]:
        names, phase = _names(row["names"]), row["phase"]
        siblings |= names
        for layer in names:
            for what in _OF_LAYER:
                ranges[Amount(what, layer, phase)] = _range(row.get(what))
            if row.get("backends"):
                backends[layer, phase] = tuple(row["backends"])
    for row in data.get("times", ()):
        rows = zip(_names(row["names"]), _list(row["levels_us"]), _list(row["spreads"]), strict=True)
        for layer, level, spread in rows:
            times[layer, row.get("phase")] = LayerTime(level, spread, row["own"])
    return Baseline(
        runs=data["runs"],
        sources=tuple(data.get("sources", ())),
        traits=data["traits"],
        ranges=ranges,
        backends=backends,
        break_places=tuple(data.get("break_places", ())),
        times=times,
        step=LayerTime(data["step_us"], data["step_spread"]) if "step_us" in data else None,
        no_times=data.get("no_times", ""),
        siblings=siblings,
    )


def _check_numbers(value: Any) -> None:
    """A number that is none would let every run pass."""
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} is no amount")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_numbers(item)


def _list(value: Any) -> list[float]:
    """Two equal numbers were written as one, as in a range."""
    return value if isinstance(value, list) else [value, value]


def _range(value: Any) -> Range | None:
    if value is None:
        return None
    least, most = map(float, _list(value))
    if least > most:
        raise ValueError(f"{value} is no range")
    return least, most


def _names(names: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    """The layers that a row stands for, each with its pattern and number."""
    pattern, runs = names["pattern"], names.get("numbers", ())
    if not runs:
        return {pattern: (pattern, None)}
    numbers = [number for first, last in map(_list, runs) for number in range(int(first), int(last) + 1)]
    return {pattern.replace("*", str(number), 1): (pattern.replace("*", OPEN, 1), number) for number in numbers}
