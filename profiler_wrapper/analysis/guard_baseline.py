"""A baseline from one run or several: ranges of what is exact, levels and spreads of times; like layers together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from profiler_wrapper.analysis.compare import flops_per_step, peak_bytes
from profiler_wrapper.analysis.compare_differences import traits
from profiler_wrapper.analysis.compare_names import like_name, match_layers
from profiler_wrapper.analysis.compare_sides import Side, side_of
from profiler_wrapper.analysis.guard_model import Baseline, ExactRow, Range, TimeRow, names_of
from profiler_wrapper.analysis.model import Analysis, LayerRow
from profiler_wrapper.analysis.noise import FEWEST_STEPS, levels, weighted_median
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.errors import WrongUse

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
_DIGITS = 4
_MOST_PLACES = 10
_LongKey = tuple[str, Phase]


def baseline_of(analyses: Sequence[Analysis], *, sources: Sequence[str] = ()) -> Baseline:
    """What runs of the same thing have cost, and how much they differ.

    Raises:
        WrongUse: there is none, or they are of different models.
    """
    if not analyses:
        raise WrongUse("a baseline needs a run")
    first = analyses[0]
    measured = [measure(analysis, _renamed(analysis, first)) for analysis in analyses]
    models = {str(one.traits.get("model")) for one in measured}
    if len(models) > 1:
        raise WrongUse(f"a baseline is of runs of one thing, but these are of {', '.join(sorted(models))}")
    timed = [one for one in measured if not one.no_times]
    step_us, step_spread = _step(timed)
    keys = dict.fromkeys(key for one in measured for key in one.exact)
    return Baseline(
        runs=len(measured),
        sources=tuple(sources),
        traits=(timed[0] if timed else measured[0]).traits,
        flops=_range(one.flops for one in measured),
        events=_range(one.events for one in measured) or (0.0, 0.0),
        peak_bytes=_range(one.peak_bytes for one in measured),
        graph_breaks=_range(None if one.breaks is None else len(one.breaks) for one in measured),
        break_places=tuple(dict.fromkeys(place for one in measured for place in one.breaks or ()))[:_MOST_PLACES],
        synchronisations=None
        if any(one.synchronisations is None for one in measured)
        else _ranges([one.synchronisations or {} for one in measured]),
        classes=_ranges([one.classes for one in measured]),
        ops=_ranges([one.ops for one in measured]),
        rows=tuple(_folded({key: [one.exact.get(key) for one in measured] for key in keys}, first)),
        step_us=step_us,
        step_spread=step_spread,
        times=tuple(_times(timed, first)) if timed else (),
        no_times="" if timed else measured[0].no_times,
    )


@dataclass(frozen=True, slots=True)
class Exact:
    """What is exact of one layer in one phase, per step."""

    flops: float | None
    events: float | None
    retained_bytes: float | None
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """One run, as a guard looks at it. Layers go by the names that the baseline's first run has for them."""

    traits: Mapping[str, Any]
    flops: float | None
    events: float
    peak_bytes: float | None
    breaks: tuple[str, ...] | None
    synchronisations: Mapping[str, float] | None
    classes: Mapping[str, float]
    ops: Mapping[str, float]
    exact: Mapping[_LongKey, Exact]
    times: Mapping[tuple[str, Phase | None], tuple[float, float, float]]  # level in us, spread, share of its own
    step: tuple[float, float] | None  # of all of a step, the same
    no_times: str  # why there are none


def measure(analysis: Analysis, name_of: Mapping[str, str]) -> Measured:
    """What a guard looks at; `name_of`: what layers are called, where not by their own names."""
    side = side_of(analysis)
    own = traits(analysis)
    no_times = _no_times(side, own)
    times, step = ({}, None) if no_times else _levels(side, name_of)
    return Measured(
        traits=own,
        flops=flops_per_step(analysis),
        events=_per_step(sum(row.count for row in analysis.classes), side),
        peak_bytes=peak_bytes(analysis),
        breaks=_break_places(analysis.run.get("graph_breaks")),
        synchronisations=_synchronisations(side, name_of),
        classes=_sums(((row.class_name, row.count) for row in analysis.classes), side),
        ops=_sums(((row.op, row.calls) for row in analysis.operators), side),
        exact=_exact(side, name_of),
        times=times,
        step=step,
        no_times=no_times,
    )


def _renamed(analysis: Analysis, first: Analysis) -> Mapping[str, str]:
    return {} if analysis is first else match_layers(analysis, first)


def _no_times(side: Side, own: Mapping[str, Any]) -> str:
    """Why the times of a run cannot be judged; "": they can."""
    if own.get("shapes_in_timed_steps") or own.get("memory_in_timed_steps"):
        what = " and ".join(
            word
            for key, word in (("shapes_in_timed_steps", "shapes"), ("memory_in_timed_steps", "allocations"))
            if own.get(key)
        )
        return f"{what} were recorded in the timed steps, which takes time; record with profile_memory=False"
    if not side.known_steps or side.steps < FEWEST_STEPS:
        return f"it takes at least {FEWEST_STEPS} timed steps to know the noise; record more: steps='5-14'"
    return ""


def _per_step(count: float, side: Side) -> float:
    return count / side.steps


def _break_places(told: object) -> tuple[str, ...] | None:
    """Where torch.compile could not go on, each place once; None where nothing tells."""
    if not isinstance(told, (list, tuple)):
        return None
    places = []
    for one in told:
        reason, source = (one.get("reason"), one.get("source")) if isinstance(one, Mapping) else (one, None)
        places.append(f"{source}: {reason}" if source else str(reason))
    return tuple(dict.fromkeys(places))


def _sums(counts: Iterable[tuple[str, int]], side: Side) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, count in counts:
        sums[name] += _per_step(count, side)
    return dict(sums)


def _synchronisations(side: Side, name_of: Mapping[str, str]) -> dict[str, float] | None:
    if side.analysis.time_basis != "device":
        return None
    sums: dict[str, float] = defaultdict(float)
    for row in side.analysis.synchronisations:
        layer = row.layer or ""
        where = f" in {name_of.get(layer, layer)}" if layer else ""
        sums[f"{row.kind} ({row.op}){where}, {row.phase}"] += _per_step(row.count, side)
    return dict(sums)


def _exact(side: Side, name_of: Mapping[str, str]) -> dict[_LongKey, Exact]:
    """Of all layers but experts, whose work the data divide."""
    analysis = side.analysis
    backends: dict[_LongKey, set[str]] = defaultdict(set)
    for attention in analysis.attention:
        backends[attention.layer, attention.phase].add(attention.backend)
    experts = {row.layer for row in analysis.layers if row.kind == "expert"}
    parent = {row.layer: row.parent for row in analysis.layers}
    found: dict[_LongKey, Exact] = {}
    for row in analysis.layers:
        if not _within(row.layer, experts, parent):
            found[name_of.get(row.layer, row.layer), row.phase] = Exact(
                flops=row.self_flops_per_step,
                events=None if row.self_events is None else _per_step(row.self_events, side),
                retained_bytes=row.self_retained_bytes,
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


def _levels(
    side: Side, name_of: Mapping[str, str]
) -> tuple[dict[tuple[str, Phase | None], tuple[float, float, float]], tuple[float, float]]:
    """Level and spread of each layer with all its phases, of each phase of what has no module, and of the step."""
    grouped: dict[tuple[str, Phase | None], list[LayerRow]] = defaultdict(list)
    for row in side.analysis.layers:
        if row.step_times_ns:
            grouped[name_of.get(row.layer, row.layer), None if row.layer else row.phase].append(row)
    tables = {key: side.series(rows) for key, rows in grouped.items()}
    least = LEAST_SHARE * side.total_ns
    keys = [key for key, series in tables.items() if (series > 0).all() and float(series.mean()) >= least]
    whole = side.step_totals()
    if not keys:
        return {}, _level_of_total(whole)
    table = np.array([tables[key] for key in keys])
    own = [
        sum(row.self_time_ns for row in grouped[key]) / max(1, sum(row.time_ns for row in grouped[key])) for key in keys
    ]
    level, spread = levels(table, np.sqrt(table.mean(axis=1) * np.array(own)))
    found = {
        key: (float(np.exp(one)) / 1000, float(apart), share)
        for key, one, apart, share in zip(keys, level, spread, own, strict=True)
    }
    return found, _level_of_total(whole)


def _level_of_total(whole: Any) -> tuple[float, float]:
    level, spread = levels(whole[None, :], np.zeros(1))
    return float(np.exp(level[0])) / 1000, float(spread[0])


def _step(timed: Sequence[Measured]) -> tuple[float | None, float | None]:
    steps = [one.step for one in timed if one.step is not None]
    if not steps:
        return None, None
    between = stdev(math.log(level) for level, _ in steps) if len(steps) > 1 else 0.0
    return _short(median(level for level, _ in steps)), _short(max(between, *(spread for _, spread in steps)))


def _times(timed: Sequence[Measured], first: Analysis) -> Iterable[TimeRow]:
    """Levels as in the run that is typical in all, so that a busy machine moves none; spread between runs too."""
    keys = [key for key in timed[0].times if all(key in one.times for one in timed)]
    logs = [{key: math.log(one.times[key][0]) for key in keys} for one in timed]
    weight = np.array([math.sqrt(timed[0].times[key][0] * timed[0].times[key][2]) for key in keys])
    factors = [weighted_median(np.array([log[key] - logs[0][key] for key in keys]), weight) for log in logs]
    middle = median(factors) if keys else 0.0
    found: dict[tuple[str, Phase | None], tuple[float, float]] = {}
    for key in keys:
        own = [log[key] - factor + middle for log, factor in zip(logs, factors, strict=True)]
        between = stdev(own) if len(own) > 1 else 0.0
        found[key] = math.exp(median(own)), max(between, fmean(one.times[key][1] for one in timed))
    groups: dict[tuple[str, Phase | None], dict[int | None, str]] = defaultdict(dict)
    pattern_of = patterns(first)
    for layer, phase in keys:
        pattern, number = pattern_of(layer)
        groups[pattern, phase][number] = layer
    for (pattern, phase), members in groups.items():
        numbers = sorted(number for number in members if number is not None)
        order = [members[number] for number in numbers] or [members[None]]
        yield TimeRow(
            names=names_of(pattern, numbers),
            phase=phase,
            levels_us=tuple(_short(found[layer, phase][0]) for layer in order),
            spreads=tuple(_short(found[layer, phase][1], 2) for layer in order),
            own=_short(median(timed[0].times[layer, phase][2] for layer in order), 2),
        )


def patterns(analysis: Analysis) -> Callable[[str], tuple[str, int | None]]:
    """`like_name` of each layer of a result."""
    block_of = {row.layer: row.block for row in analysis.layers}
    return lambda layer: like_name(layer, block_of.get(layer))


def _folded(exact: Mapping[_LongKey, Sequence[Exact | None]], first: Analysis) -> Iterable[ExactRow]:
    """Rows that are alike but for a number as one."""
    pattern_of = patterns(first)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for (layer, phase), runs in exact.items():
        told = [one for one in runs if one is not None]
        pattern, number = pattern_of(layer)
        backends = tuple(sorted({backend for one in told for backend in one.backends}))
        flops = _range(one.flops for one in told)
        events = _range(0.0 if one is None else one.events for one in runs)
        retained = _range(one.retained_bytes for one in told)
        group = groups[pattern, phase, flops, events, retained, backends]
        group += [] if number is None else [number]
    for (pattern, phase, flops, events, retained, backends), numbers in groups.items():
        yield ExactRow(
            names=names_of(pattern, numbers),
            phase=phase,
            flops=flops,
            events=events,
            retained_bytes=retained,
            backends=backends,
        )


def _range(values: Iterable[float | None]) -> Range | None:
    known = [float(value) for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _ranges(runs: Sequence[Mapping[str, float]]) -> dict[str, Range]:
    """Of each name; a run without it has 0."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: (min(run.get(name, 0.0) for run in runs), max(run.get(name, 0.0) for run in runs)) for name in names}


def _short(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")
