"""What a guard compares: of one run or several of the same thing, ranges of what is exact, and levels of times.

A range is (least, most) over the runs. Layers go by the names that the first run has for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.analysis.compare import peak_bytes
from profiler_wrapper.analysis.compare_differences import traits
from profiler_wrapper.analysis.compare_names import like_name, match_layers, match_names
from profiler_wrapper.analysis.compare_sides import Side, side_of
from profiler_wrapper.analysis.model import Analysis, LayerRow
from profiler_wrapper.analysis.noise import FEWEST_STEPS, levels, weighted_median
from profiler_wrapper.analysis.numbered_names import OPEN
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import OperatorRow
from profiler_wrapper.errors import WrongUse

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
MOST_LAYERS_OF_OP = 5  # that a row of an op names
_MOST_PLACES = 10
_MOST_LAYERS = 1_000_000

Range = tuple[float, float]
Key = tuple[str, Phase]
TimeKey = tuple[str, Phase | None]  # all phases of a layer together; of what has no module each


@dataclass(frozen=True, slots=True)
class Exact:
    """What is exact of one layer's own in one phase, per step. None where not known."""

    flops: Range | None = None  # of the model, in recompute all (see guard.check_flops)
    events: Range | None = None
    retained_bytes: Range | None = None
    backends: tuple[str, ...] = ()  # of its attention


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
    flops: Range | None  # all of a step, as in the rows
    events: Range
    peak_bytes: Range | None
    graph_breaks: Range | None  # distinct places
    break_places: tuple[str, ...] = ()
    synchronisations: Mapping[str, Range] | None  # "kind of op in layer (phase)" -> per step; None without a device
    classes: Mapping[str, Range]  # class -> events of a step
    ops: Mapping[Phase, Mapping[str, Range]]  # phase -> op -> calls of a step
    exact: Mapping[Key, Exact]
    step: LayerTime | None = None  # all time of a step; None: times cannot be judged
    times: Mapping[TimeKey, LayerTime]
    no_times: str = ""  # why times cannot be judged
    alike: Mapping[str, tuple[str, int | None]]  # layer -> name with a number left open, and that number
    # Phase -> op -> layers it ran in, "" for none; missing: more than are known.
    op_layers: Mapping[Phase, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    results: tuple[Analysis, ...] = field(default=(), compare=False, repr=False)  # that it was made from

    def renamed_like(self, other: Baseline) -> Baseline:
        """The same with its layers by the names of `other`, whatever wraps the model."""
        own, others = (dict.fromkeys(layer for layer, _ in side.exact if layer) for side in (self, other))
        name_of = match_names(own, others)

        def name(layer: str) -> str:
            return name_of.get(layer, layer)

        return replace(
            self,
            exact={(name(layer), phase): row for (layer, phase), row in self.exact.items()},
            times={(name(layer), phase): row for (layer, phase), row in self.times.items()},
            op_layers={
                phase: {op: tuple(map(name, layers)) for op, layers in ops.items()}
                for phase, ops in self.op_layers.items()
            },
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
    no_times = _no_times(side, own)
    times, step = ({}, None) if no_times else _times(side, name_of)
    operators: dict[Phase, list[OperatorRow]] = defaultdict(list)
    for row in analysis.operators:  # without autograd's nodes: the ops of a node tell more
        if row.calls and "::" in row.op and not row.op.startswith(("autograd::", "torch::autograd::")):
            operators[row.phase].append(row)
    breaks = _break_places(analysis.run.get("graph_breaks"))
    return Baseline(
        traits=own,
        flops=_once(sum(row.flops_per_step - _not_counted(row) for row in analysis.flops) if analysis.flops else None),
        events=_per_step(sum(row.count for row in analysis.classes), side),
        peak_bytes=_once(peak_bytes(analysis)),
        graph_breaks=_once(None if breaks is None else len(breaks)),
        break_places=breaks or (),
        synchronisations=_synchronisations(side, name_of),
        classes=_sums(((row.class_name, row.count) for row in analysis.classes), side),
        ops={phase: _sums(((row.op, row.calls) for row in rows), side) for phase, rows in operators.items()},
        op_layers={
            phase: {
                row.op: ("", *(name_of.get(layer, layer) for layer in row.layers))
                for row in rows
                if len(row.layers) < MOST_LAYERS_OF_OP
            }
            for phase, rows in operators.items()
        },
        exact=_exact(side, name_of),
        times=times,
        step=step,
        no_times=no_times,
        alike={name_of.get(row.layer, row.layer): like_name(row.layer, row.block) for row in analysis.layers},
    )


def _no_times(side: Side, own: Mapping[str, Any]) -> str:
    """Why the times of a run cannot be judged; "": they can."""
    if own.get("shapes_in_timed_steps"):
        return "shapes were recorded in the timed steps, which takes time; record without record_shapes=True"
    if not side.known_steps or side.steps < FEWEST_STEPS:
        return f"it takes at least {FEWEST_STEPS} timed steps to know the noise; record more: steps='5-14'"
    return ""


def _not_counted(row: Any) -> int:
    """FLOPs that do not count: the scores that a fused backward makes again, but nothing of recompute."""
    return 0 if row.phase == "recompute" else int(row.repeated_flops_per_step)


def _once(value: float | None) -> Range | None:
    return None if value is None else (float(value), float(value))


def _per_step(count: float, side: Side) -> Range:
    return count / side.steps, count / side.steps


def _sums(counts: Iterable[tuple[str, int]], side: Side) -> dict[str, Range]:
    sums: dict[str, int] = defaultdict(int)
    for name, count in counts:
        sums[name] += count
    return {name: _per_step(count, side) for name, count in sums.items()}


def _break_places(listed: object) -> tuple[str, ...] | None:
    """Where torch.compile could not go on, each place once; None where it is not known."""
    if not isinstance(listed, (list, tuple)):
        return None
    places = []
    for one in listed:
        reason, source = (one.get("reason"), one.get("source")) if isinstance(one, Mapping) else (one, None)
        places.append(f"{source}: {reason}" if source else str(reason))
    return tuple(dict.fromkeys(places))


def _synchronisations(side: Side, name_of: Mapping[str, str]) -> dict[str, Range] | None:
    if side.analysis.time_basis != "device":
        return None
    counts = []
    for row in side.analysis.synchronisations:
        layer = row.layer or ""
        where = f" in {name_of.get(layer, layer)}" if layer else ""
        counts.append((f"{row.kind} ({row.op}){where}, {row.phase}", row.count))
    return _sums(counts, side)


def _exact(side: Side, name_of: Mapping[str, str]) -> dict[Key, Exact]:
    """Of all layers but experts, whose work the data divide."""
    analysis = side.analysis
    backends: dict[Key, set[str]] = defaultdict(set)
    for attention in analysis.attention:
        backends[attention.layer, attention.phase].add(attention.backend)
    experts = {row.layer for row in analysis.layers if row.kind == "expert"}
    parent = {row.layer: row.parent for row in analysis.layers}
    again: dict[tuple[str | None, Phase], int] = defaultdict(int)
    for flops in analysis.flops:
        again[flops.layer, flops.phase] += _not_counted(flops)
    found: dict[Key, Exact] = {}
    for row in analysis.layers:
        if not _within(row.layer, experts, parent):
            own = row.self_flops_per_step
            found[name_of.get(row.layer, row.layer), row.phase] = Exact(
                flops=_once(None if own is None else own - again[row.layer, row.phase]),
                events=None if row.self_events is None else _per_step(row.self_events, side),
                retained_bytes=_once(row.self_retained_bytes),
                backends=tuple(sorted(backends.get((row.layer, row.phase), ()))),
            )
    return found


def _within(layer: str, some: set[str], parent: Mapping[str, str | None]) -> bool:
    here: str | None = layer
    seen: set[str] = set()
    while here is not None and here not in seen:
        if here in some:
            return True
        seen.add(here)
        here = parent.get(here)
    return False


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
    syncs = [one.synchronisations for one in sides if one.synchronisations is not None]
    return Baseline(
        runs=sum(one.runs for one in sides),
        traits=(timed or sides)[0].traits,
        flops=_span(one.flops for one in sides),
        events=_span(one.events for one in sides) or (0.0, 0.0),
        peak_bytes=_span(one.peak_bytes for one in sides),
        graph_breaks=_span(one.graph_breaks for one in sides),
        break_places=tuple(dict.fromkeys(place for one in sides for place in one.break_places))[:_MOST_PLACES],
        synchronisations=_spans(syncs) if len(syncs) == len(sides) else None,
        classes=_spans([one.classes for one in sides]),
        ops={
            phase: _spans([one.ops.get(phase, {}) for one in sides])
            for phase in dict.fromkeys(phase for one in sides for phase in one.ops)
        },
        op_layers=_op_layers(sides),
        exact={
            key: _exact_of([one.exact.get(key) for one in sides])
            for key in dict.fromkeys(key for one in sides for key in one.exact)
        },
        step=_step(timed),
        times=_times_together(timed),
        no_times="" if timed else sides[0].no_times,
        alike={layer: name for one in reversed(sides) for layer, name in one.alike.items()},
    )


def _span(ranges: Iterable[Range | None]) -> Range | None:
    known = [one for one in ranges if one is not None]
    return (min(one[0] for one in known), max(one[1] for one in known)) if known else None


def _spans(runs: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    """Of each name; a run without it has 0."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: _span(run.get(name, (0.0, 0.0)) for run in runs) or (0.0, 0.0) for name in names}


def _exact_of(runs: Sequence[Exact | None]) -> Exact:
    known = [one for one in runs if one is not None]
    return Exact(
        flops=_span(one.flops for one in known),
        events=_span((0.0, 0.0) if one is None else one.events for one in runs),
        retained_bytes=_span(one.retained_bytes for one in known),
        backends=tuple(sorted({backend for one in known for backend in one.backends})),
    )


def _op_layers(sides: Sequence[Baseline]) -> dict[Phase, dict[str, tuple[str, ...]]]:
    """Where an op ran in any run; nothing of one of which a run does not know all."""
    found: dict[Phase, dict[str, tuple[str, ...]]] = {}
    for phase, op in dict.fromkeys((phase, op) for side in sides for phase, ops in side.ops.items() for op in ops):
        layers = [side.op_layers.get(phase, {}).get(op) for side in sides if op in side.ops.get(phase, {})]
        known = [one for one in layers if one is not None]
        if len(known) == len(layers):
            found.setdefault(phase, {})[op] = tuple(dict.fromkeys(layer for one in known for layer in one))
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
        WrongUse: it is none.
    """
    try:
        return _version_2(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"not a baseline that guard wrote: {error}") from error


def _version_2(data: Mapping[str, Any]) -> Baseline:
    _check_numbers({key: value for key, value in data.items() if key != "traits"})
    if data["runs"] < 1 or not isinstance(data["traits"].get("coverage", 0.0), (int, float)):
        raise ValueError(f"it is of {data['runs']} runs, with a coverage of {data['traits'].get('coverage')!r}")
    alike: dict[str, tuple[str, int | None]] = {}
    exact: dict[Key, Exact] = {}
    times: dict[TimeKey, LayerTime] = {}
    for row in data["rows"]:
        ranges = {key: _range(row.get(key)) for key in ("flops", "events", "retained_bytes")}
        names = _names(row["names"])
        alike |= names
        exact |= {(layer, row["phase"]): Exact(**ranges, backends=tuple(row.get("backends", ()))) for layer in names}
    for row in data.get("times", ()):
        rows = zip(_names(row["names"]), _list(row["levels_us"]), _list(row["spreads"]), strict=True)
        for layer, level, spread in rows:
            times[layer, row.get("phase")] = LayerTime(level, spread, row["own"])
    syncs = data.get("synchronisations")
    return Baseline(
        runs=data["runs"],
        sources=tuple(data.get("sources", ())),
        traits=data["traits"],
        flops=_range(data.get("flops")),
        events=_range(data["events"]) or (0.0, 0.0),
        peak_bytes=_range(data.get("peak_bytes")),
        graph_breaks=_range(data.get("graph_breaks")),
        break_places=tuple(data.get("break_places", ())),
        synchronisations=None if syncs is None else _named_ranges(syncs),
        classes=_named_ranges(data["classes"]),
        ops={phase: _named_ranges(ops) for phase, ops in data["ops"].items()},
        exact=exact,
        times=times,
        step=LayerTime(data["step_us"], data["step_spread"]) if "step_us" in data else None,
        no_times=data.get("no_times", ""),
        alike=alike,
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


def _named_ranges(values: Mapping[str, Any]) -> dict[str, Range]:
    return {name: _range(value) or (0.0, 0.0) for name, value in values.items()}


def _names(names: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    """The layers that a row stands for, each with its pattern and number."""
    pattern, runs = names["pattern"], names.get("numbers", ())
    if not runs:
        return {pattern: (pattern, None)}
    runs = [_range(run) or (0, 0) for run in runs]
    if sum(last - first + 1 for first, last in runs) > _MOST_LAYERS:
        raise ValueError(f"{pattern} stands for more than {_MOST_LAYERS} layers")
    numbers = [number for first, last in runs for number in range(int(first), int(last) + 1)]
    return {pattern.replace("*", str(number), 1): (pattern.replace("*", OPEN, 1), number) for number in numbers}
