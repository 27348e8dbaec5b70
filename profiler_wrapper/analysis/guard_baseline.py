"""A baseline from one run or several: ranges of what is exact, levels and spreads of times; like layers together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from profiler_wrapper.analysis.compare_names import like_name, match_layers
from profiler_wrapper.analysis.guard_measure import Exact, LongKey, Measured, measure
from profiler_wrapper.analysis.guard_model import Baseline, ExactRow, Range, TimeRow, names_of
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.noise import weighted_median
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.errors import WrongUse

_DIGITS = 4
_MOST_PLACES = 10


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
    timed = [one for one in timed if not one.traits.get("memory_in_timed_steps")] or timed  # never both in one mean
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
        ops=_by_phase(measured),
        op_layers=_op_layers(measured),
        rows=tuple(_folded({key: [one.exact.get(key) for one in measured] for key in keys}, first)),
        step_us=step_us,
        step_spread=step_spread,
        times=tuple(_times(timed, first)) if timed else (),
        no_times="" if timed else measured[0].no_times,
    )


def _renamed(analysis: Analysis, first: Analysis) -> Mapping[str, str]:
    return {} if analysis is first else match_layers(analysis, first)


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


def _folded(exact: Mapping[LongKey, Sequence[Exact | None]], first: Analysis) -> Iterable[ExactRow]:
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


def _by_phase(runs: Sequence[Measured]) -> dict[Phase, dict[str, Range]]:
    phases = dict.fromkeys(phase for run in runs for phase in run.ops)
    return {phase: _ranges([run.ops.get(phase, {}) for run in runs]) for phase in phases}


def _op_layers(runs: Sequence[Measured]) -> dict[Phase, dict[str, tuple[str, ...]]]:
    """Where an op ran in any run; nothing of one of which a run does not know all."""
    found: dict[Phase, dict[str, tuple[str, ...]]] = {}
    for phase, op in dict.fromkeys((phase, op) for run in runs for phase, ops in run.ops.items() for op in ops):
        layers = [run.op_layers[phase].get(op) for run in runs if op in run.ops.get(phase, {})]
        known = [one for one in layers if one is not None]
        if len(known) == len(layers):
            found.setdefault(phase, {})[op] = tuple(dict.fromkeys(layer for one in known for layer in one))
    return found


def _short(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")
