"""Which layers changed in time by more than noise, and which of them explain the change of a step.

Judged is each layer in each phase, its phases together, and sibling layers together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from profiler_wrapper.analysis.model import Phase
from profiler_wrapper.comparison.match import Side, folded_name, like_name
from profiler_wrapper.comparison.model import ChangedLayer, ComparedRow
from profiler_wrapper.comparison.noise import (
    BUSY,
    NO_CHANGE,
    UNSTEADY,
    Change,
    Float,
    layer_shifts,
    limit,
    series_change,
    step_spread,
    weighted_median,
)

LEAST_SHARE = 0.001  # of a step on either side: what takes less is not judged
LEAST_ONE_SIDED = 0.01  # what only one side has is a change from so much on
LEAST_SHARED = 0.5  # of the time must be in what both sides have, to say what all have in common
FEWEST_SIBLINGS = 3
_IN_FASTEST = 0.5  # of a change, on a CPU: so much of it the fastest steps must show


@dataclass(frozen=True, slots=True)
class UnitKey:
    """What is judged as one: a layer or many alike, in one phase or (None) in all."""

    layers: tuple[str, ...]
    phase: Phase | None


@dataclass(frozen=True, slots=True)
class UnitChange:
    """How the mean of its steps changed. Relative changes; `delta_ns` is per step."""

    change: float | None  # None: only on one side
    error: float | None
    delta_ns: float  # of its time, without what is common, unless that is beyond noise and not on a CPU
    beyond_noise: bool  # `delta_ns` is
    apart_ns: float  # of its time, without what is common
    apart: bool  # `apart_ns` is beyond noise
    time_ns: float  # of a step, the larger of both sides


@dataclass(frozen=True, slots=True, eq=False)
class TimeChanges:
    """All units that could be judged, and what they have in common."""

    units: dict[UnitKey, UnitChange]
    total: Change
    shared: float  # share of the time in layers and phases that both sides have: the smaller of the two
    on_cpu: bool  # what all have in common is then the machine's as likely as the program's
    known: bool = False  # noise is
    common: float = 0.0  # relative
    common_beyond_noise: bool = False
    left_out: float = 0.0  # relative: of what is common, what `delta_ns` of the units leaves out


def time_changes(pairs: Sequence[ComparedRow], a: Side, b: Side) -> TimeChanges:
    """Judge every layer, phase and fold of sibling layers that takes `LEAST_SHARE` of a step on a side.

    Times of a CPU and of a device are not judged together.
    """
    if a.analysis.time_basis != b.analysis.time_basis:
        return TimeChanges({}, NO_CHANGE, shared_time(pairs, a, b), on_cpu=True)
    per_step = a.marked == b.marked and a.total_ns and b.total_ns
    total = series_change(a.step_totals(), b.step_totals()) if per_step else NO_CHANGE
    keys, tables, weights = [], ([], []), []  # type: tuple[list[UnitKey], tuple[list[Float], list[Float]], list[float]]
    units: dict[UnitKey, UnitChange] = {}
    for key, members in _units(pairs):
        rows_a = [pair.a for pair in members if pair.a is not None]
        rows_b = [pair.b for pair in members if pair.b is not None]
        series_a, series_b = a.series(rows_a), b.series(rows_b)
        mean_a, mean_b = (sum(row.time_ns for row in rows) / side.steps for rows, side in ((rows_a, a), (rows_b, b)))
        if mean_a < LEAST_SHARE * a.total_ns and mean_b < LEAST_SHARE * b.total_ns:
            continue
        if not mean_a or not mean_b:
            much = max(mean_a / max(1.0, a.total_ns), mean_b / max(1.0, b.total_ns)) >= LEAST_ONE_SIDED
            delta = mean_b - mean_a
            units[key] = UnitChange(None, None, delta, much, delta, much, max(mean_a, mean_b))
        elif (series_a > 0).all() and (series_b > 0).all():
            keys.append(key)
            tables[0].append(series_a)
            tables[1].append(series_b)
            # Of what all have in common by its own time, so that nothing counts for itself and for what holds it.
            alone = len(key.layers) == 1 and key.phase is not None
            weights.append(math.sqrt(sum(max(0, row.self_time_ns) for row in (*rows_a, *rows_b))) if alone else 0.0)
    shared = shared_time(pairs, a, b)
    on_cpu = "cpu" in (a.analysis.time_basis, b.analysis.time_basis)
    if not keys:
        return TimeChanges(units, total, shared, on_cpu)
    wholes = (a.step_totals(), b.step_totals())
    table_a, table_b = (np.array(table) for table in tables)
    steady = ~np.any([step_spread(np.log(table)) > UNSTEADY for table in (table_a, table_b)], axis=0)
    sure = steady & [not on_cpu or _beside_the_rest(one, other, wholes) for one, other in zip(*tables, strict=True)]
    weight = np.array(weights) if any(weights) else np.ones(len(keys))
    shifts = layer_shifts(table_a, table_b, weight)
    means_a, means_b = table_a.mean(axis=1), table_b.mean(axis=1)
    moved = np.log(means_b / means_a)
    common = weighted_median(moved, weight)
    common_error = shifts.common_error if math.isfinite(shifts.common_error) else 0.0
    sure_of_common = abs(shifts.common) > limit(common_error, known=shifts.known)
    all_moved = bool(total.beyond_noise and shared >= LEAST_SHARED and sure_of_common)
    one_way = (moved - common) * shifts.excess > 0  # what is shown and what is tested
    beyond = apart = shifts.beyond_noise() & sure & one_way
    base = common
    if all_moved and not on_cpu:
        error = np.hypot(shifts.error, common_error)
        beyond = (np.abs(shifts.shift) > limit(error, known=shifts.known)) & (moved * shifts.shift > 0)
        base = 0.0
    for i, key in enumerate(keys):
        before, after = float(means_a[i]), float(means_b[i])
        units[key] = UnitChange(
            change=after / before - 1,
            error=after / before * float(shifts.error[i]) if shifts.known else None,
            delta_ns=after - before * math.exp(base),
            beyond_noise=bool(beyond[i]),
            apart_ns=after - before * math.exp(common),
            apart=bool(apart[i]),
            time_ns=max(before, after),
        )
    return TimeChanges(
        units,
        total,
        shared,
        on_cpu,
        known=shifts.known,
        common=math.expm1(common),
        common_beyond_noise=all_moved,
        left_out=math.expm1(base),
    )


def shared_time(pairs: Sequence[ComparedRow], a: Side, b: Side) -> float:
    """Share of the time that is in layers and phases of both sides: the smaller of the two."""
    both = [pair for pair in pairs if pair.a is not None and pair.b is not None]
    return min(
        sum(row.self_time_ns for row in rows if row is not None) / max(1, side.analysis.time.total_ns)
        for rows, side in (([pair.a for pair in both], a), ([pair.b for pair in both], b))
    )


def _beside_the_rest(a: Float, b: Float, wholes: tuple[Float, Float]) -> bool:
    """Whether it changed otherwise than the rest of the step: load takes more from what is long than from the rest."""
    rest_a, rest_b = wholes[0] - a, wholes[1] - b
    if (rest_a <= 0).any() or (rest_b <= 0).any():
        return False
    beside = series_change(a / rest_a, b / rest_b)  # what holds up both cancels, step by step
    rest = float(np.median(np.log(rest_b)) - np.median(np.log(rest_a)))
    if not beside.beyond_noise or (abs(math.expm1(rest)) > BUSY and abs(beside.shift) <= abs(rest)):
        return False
    fastest = math.log(b.min() / a.min()) - math.log(rest_b.min() / rest_a.min())  # which load holds up least
    return fastest / beside.shift >= _IN_FASTEST


def _units(pairs: Sequence[ComparedRow]) -> Iterable[tuple[UnitKey, list[ComparedRow]]]:
    by_layer: dict[str, list[ComparedRow]] = defaultdict(list)
    for pair in pairs:
        by_layer[pair.layer].append(pair)
        yield UnitKey((pair.layer,), pair.phase), [pair]
    for layer, members in by_layer.items():
        if layer:
            yield UnitKey((layer,), None), members
    for layers in folds(pairs):
        members = [pair for layer in layers for pair in by_layer[layer]]
        yield UnitKey(layers, None), members
        for phase in dict.fromkeys(pair.phase for pair in members):
            yield UnitKey(layers, phase), [pair for pair in members if pair.phase == phase]


def folds(pairs: Iterable[ComparedRow]) -> list[tuple[str, ...]]:
    """Layers of one class that have one place in their blocks, or names that differ in one number; three or more."""
    groups: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for pair in pairs:
        pattern, number = like_name(pair.layer, pair.row.block)
        if number is not None:
            groups[pattern, pair.row.class_name][pair.layer] = None
    return [tuple(layers) for layers in groups.values() if len(layers) >= FEWEST_SIBLINGS]


# --------------------------------------------------------------------------------------------------
# What explains a change: from the whole model down to the layers that it is in.

EXPLAINS = 0.75  # of a change: then it is said of the part instead of the whole
_TYPICAL_SHARE = 0.5  # of the mean change of like layers that the median one must have, to name all of them
_ONE_WAY = 0.9  # of them have changed in the same direction
MOST_CHANGED = 5


def changed_layers(
    pairs: Sequence[ComparedRow], changes: TimeChanges, total_delta_ns: float | None
) -> tuple[ChangedLayer, ...]:
    """What changed otherwise than the rest, the largest change first. `total_delta_ns`: of a step, if it changed."""
    tree = _Tree(pairs, changes)
    found = [key for root in tree.roots() for key in tree.explain(root)]
    rows = [tree.row(key, total_delta_ns) for key in tree.joined(dict.fromkeys(found))]
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns))[:MOST_CHANGED])


class _Tree:
    """Layers below layers, with like ones together where they changed alike."""

    def __init__(self, pairs: Sequence[ComparedRow], changes: TimeChanges) -> None:
        self._changes: dict[UnitKey, UnitChange] = dict(changes.units)
        self._children: dict[str | None, list[str]] = defaultdict(list)
        self._phases: dict[str, list[Phase]] = defaultdict(list)
        shown: dict[str | None, str] = {pair.a.layer: pair.layer for pair in pairs if pair.a is not None}
        parents: dict[str, str | None] = {}
        for pair in pairs:
            self._phases[pair.layer].append(pair.phase)
            if pair.b is not None:
                parents[pair.layer] = pair.b.parent
            else:
                parents.setdefault(pair.layer, shown.get(pair.row.parent, pair.row.parent))
        for layer in filter(None, parents):
            above = parents[layer]
            self._children[above if above and above in parents else None].append(layer)
        self._block = {pair.layer: pair.row.block for pair in pairs}
        self._fold_of = {layer: fold for fold in folds(pairs) for layer in fold}

    def roots(self) -> list[UnitKey]:
        """Where to begin: the roots, and what has no module, phase by phase."""
        outside = [UnitKey(("",), phase) for phase in self._phases[""]]
        changed = [key for key in outside if key in self._changes and self._changes[key].apart]
        return self._together(self._children[None]) + changed

    def explain(self, key: UnitKey) -> list[UnitKey]:
        """The parts that explain the change of `key`, itself if no part does; nothing where nothing changed."""
        if key.phase is not None:
            return [key]
        deeper = [deep for part in self._parts(key) for deep in self.explain(part)]
        own = self._changes.get(key)
        if own is None or not own.apart:
            return deeper
        explained = sum(self._changes[part].apart_ns for part in deeper) / own.apart_ns
        changed_time = sum(self._changes[part].time_ns for part in deeper) / own.time_ns
        everything = len(deeper) > 1 and changed_time >= EXPLAINS  # then the whole is said for its parts
        return deeper if explained >= EXPLAINS and not everything else [key]

    def _parts(self, key: UnitKey) -> list[UnitKey]:
        """The layers right below, like ones as one where they changed alike."""
        return self._together([child for layer in key.layers for child in self._children.get(layer, ())])

    def _together(self, layers: Sequence[str]) -> list[UnitKey]:
        children = dict.fromkeys(layers)
        parts: dict[UnitKey, None] = {}
        for child in children:
            fold = tuple(layer for layer in self._fold_of.get(child, ()) if layer in children)
            whole = UnitKey(self._fold_of.get(child, ()), None)
            if len(fold) == len(whole.layers) and self._changed_together(whole):
                parts[whole] = None
            else:
                parts[UnitKey((child,), None)] = None
        return list(parts)

    def _changed_together(self, fold: UnitKey) -> bool:
        own = self._changes.get(fold)
        if own is None or not own.apart:
            return False
        single = [self._changes.get(UnitKey((layer,), None)) for layer in fold.layers]
        deltas = [change.apart_ns for change in single if change is not None]
        same_way = sum((delta > 0) == (own.apart_ns > 0) for delta in deltas)
        typical = median(deltas) if deltas else 0.0
        mean = own.apart_ns / len(fold.layers)
        return same_way >= _ONE_WAY * len(fold.layers) and typical / mean >= _TYPICAL_SHARE

    def joined(self, keys: Iterable[UnitKey]) -> Iterable[UnitKey]:
        """`keys`, with siblings as one where only one side has them, or where all are there and changed alike."""
        groups: dict[tuple[tuple[str, ...], Phase | None, str], list[UnitKey]] = defaultdict(list)
        for key in keys:
            change = self._changes[key]
            only = "" if len(key.layers) > 1 or change.change is not None else "b" if change.delta_ns > 0 else "a"
            fold = self._fold_of.get(key.layers[0], key.layers) if len(key.layers) == 1 else key.layers
            groups[fold, key.phase, only].append(key)
        for (fold, phase, only), members in groups.items():
            if only and len(members) > 1:
                key = UnitKey(tuple(layer for member in members for layer in member.layers), phase)
                delta = sum(self._changes[member].delta_ns for member in members)
                time = sum(self._changes[member].time_ns for member in members)
                self._changes[key] = UnitChange(None, None, delta, True, delta, True, time)
                yield key
            elif phase is None and 1 < len(fold) == len(members) and self._changed_together(UnitKey(fold, None)):
                yield UnitKey(fold, None)
            else:
                yield from members

    def row(self, key: UnitKey, total_delta_ns: float | None) -> ChangedLayer:
        change = self._changes[key]
        phase = key.phase
        if phase is None:
            phase, change = self._phase_of(key, change)
        share = change.delta_ns / total_delta_ns if total_delta_ns else math.nan
        return ChangedLayer(
            layer=folded_name({layer: self._block.get(layer) for layer in key.layers}),
            layers=key.layers,
            phase=phase,
            change=change.change,
            error=change.error,
            change_ns=change.delta_ns,
            share=share if math.isfinite(share) else None,
        )

    def _phase_of(self, key: UnitKey, whole: UnitChange) -> tuple[Phase | None, UnitChange]:
        """The phase that has most of the change, and its own; else none and the change of all."""
        for phase in dict.fromkeys(phase for layer in key.layers for phase in self._phases[layer]):
            part = self._changes.get(UnitKey(key.layers, phase))
            if part is not None and part.apart and part.apart_ns / whole.apart_ns >= EXPLAINS:
                return phase, part
        return None, whole
