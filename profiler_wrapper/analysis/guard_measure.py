"""One run, as a guard looks at it: what is exact of each layer, and its time with the noise of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.analysis.compare import peak_bytes
from profiler_wrapper.analysis.compare_differences import traits
from profiler_wrapper.analysis.compare_sides import Side, side_of
from profiler_wrapper.analysis.model import Analysis, FlopRow, LayerRow
from profiler_wrapper.analysis.noise import FEWEST_STEPS, Float, levels
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import OperatorRow

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
MOST_LAYERS_OF_OP = 5  # that a row of an op names
LongKey = tuple[str, Phase]


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
    ops: Mapping[Phase, Mapping[str, float]]
    op_layers: Mapping[Phase, Mapping[str, tuple[str, ...]]]  # see Baseline
    exact: Mapping[LongKey, Exact]
    times: Mapping[tuple[str, Phase | None], tuple[float, float, float]]  # level in us, spread, share of its own
    step: tuple[float, float] | None  # of all of a step, the same
    no_times: str  # why there are none


def measure(analysis: Analysis, name_of: Mapping[str, str]) -> Measured:
    """What a guard looks at; `name_of`: what layers are called, where not by their own names."""
    side = side_of(analysis)
    own = traits(analysis)
    no_times = _no_times(side, own)
    times, step = ({}, None) if no_times else _levels(side, name_of)
    operators = _operators(analysis)
    return Measured(
        traits=own,
        flops=sum(map(_flops, analysis.flops)) if analysis.flops else None,
        events=_per_step(sum(row.count for row in analysis.classes), side),
        peak_bytes=peak_bytes(analysis),
        breaks=_break_places(analysis.run.get("graph_breaks")),
        synchronisations=_synchronisations(side, name_of),
        classes=_sums(((row.class_name, row.count) for row in analysis.classes), side),
        ops={phase: _sums(((row.op, row.calls) for row in rows), side) for phase, rows in operators.items()},
        op_layers=_op_layers(operators, name_of),
        exact=_exact(side, name_of),
        times=times,
        step=step,
        no_times=no_times,
    )


def _no_times(side: Side, own: Mapping[str, Any]) -> str:
    """Why the times of a run cannot be judged; "": they can."""
    if own.get("shapes_in_timed_steps"):
        return "shapes were recorded in the timed steps, which takes time; record without record_shapes=True"
    if not side.known_steps or side.steps < FEWEST_STEPS:
        return f"it takes at least {FEWEST_STEPS} timed steps to know the noise; record more: steps='5-14'"
    return ""


def _flops(row: FlopRow) -> int:
    """What counts of its FLOPs: not the scores that a fused backward makes again, but all of recompute."""
    return row.flops_per_step - _not_counted(row)


def _not_counted(row: FlopRow) -> int:
    return 0 if row.phase == "recompute" else row.repeated_flops_per_step


def _operators(analysis: Analysis) -> dict[Phase, list[OperatorRow]]:
    """The ops of each phase, without autograd's nodes: the ops of a node tell more."""
    found: dict[Phase, list[OperatorRow]] = defaultdict(list)
    for row in analysis.operators:
        if row.calls and "::" in row.op and not row.op.startswith(("autograd::", "torch::autograd::")):
            found[row.phase].append(row)
    return found


def _op_layers(
    operators: Mapping[Phase, Sequence[OperatorRow]], name_of: Mapping[str, str]
) -> dict[Phase, dict[str, tuple[str, ...]]]:
    """Where each op may have run; nothing of one whose layers may be more than its row names."""
    return {
        phase: {
            row.op: ("", *(name_of.get(layer, layer) for layer in row.layers))
            for row in rows
            if len(row.layers) < MOST_LAYERS_OF_OP
        }
        for phase, rows in operators.items()
    }


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


def _exact(side: Side, name_of: Mapping[str, str]) -> dict[LongKey, Exact]:
    """Of all layers but experts, whose work the data divide."""
    analysis = side.analysis
    backends: dict[LongKey, set[str]] = defaultdict(set)
    for attention in analysis.attention:
        backends[attention.layer, attention.phase].add(attention.backend)
    experts = {row.layer for row in analysis.layers if row.kind == "expert"}
    parent = {row.layer: row.parent for row in analysis.layers}
    again: dict[tuple[str | None, Phase], int] = defaultdict(int)
    for flops in analysis.flops:
        again[flops.layer, flops.phase] += _not_counted(flops)
    found: dict[LongKey, Exact] = {}
    for row in analysis.layers:
        if not _within(row.layer, experts, parent):
            found[name_of.get(row.layer, row.layer), row.phase] = Exact(
                flops=None
                if row.self_flops_per_step is None
                else row.self_flops_per_step - again[row.layer, row.phase],
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


def _level_of_total(whole: Float) -> tuple[float, float]:
    level, spread = levels(whole[None, :], np.zeros(1))
    return float(np.exp(level[0])) / 1000, float(spread[0])
