"""Which layers changed in time by more than noise, and which of them explain the change of a step.

Judged is each layer in each phase, its phases together, and sibling layers together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from profiler_wrapper.comparison.match import Side, blocks_of, folded_name, like_name
from profiler_wrapper.comparison.model import ChangedLayer, ComparedRow
from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.statistics import MAD_TO_SIGMA, Float
from profiler_wrapper.trace.arrays import grouped

Bool = npt.NDArray[np.bool_]

# The noise rule. A layer's change is that of its median step, as a logarithm and without what the layers of a step
# share. Its standard error is that of its own steps, at least that of layers which take about as long, and larger for
# all where their changes scatter by more. The layer changed if that is over 2 %, over four standard errors, and nine of
# ten pairs of steps go one way; on a CPU also its share of the step, as other load holds up whole steps.

LEAST_CHANGE = 0.02  # relative: a smaller one is no difference
STANDARD_ERRORS = 4.0  # no alarm in hundreds of layers (benchmarks/guard_alarms.py, test_times.py)
LEAST_WON = 0.8  # share of pairs of steps that one side wins, less those that it loses: nine of ten go one way
NEIGHBOURS = 15  # layers on each side in order of their time: by chance one alone may seem to vary little
FEWEST = 3  # steps of a side, siblings: among fewer the odd one is not known
MOST_NOISE = 0.25  # relative: steps that vary by more are not judged; a change counts beyond it where steps are too few
LEAST_SHARE = 0.001  # of a step on either side: what takes less is not judged
NAMED_SHARE = 0.01  # of a step: from so much on, what one side has alone is a change, and a layer is in the verdict
HALF = 0.5  # of a change or of the time: what has less does not stand for the whole
EXPLAINS = 0.75  # of a change: from so much on it is said of the part instead of the whole
# Of a normal distribution.
_PAIR_TO_SIGMA = 1.0483  # the median distance of two values is 0.9539 standard deviations
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of the mean


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """How rows of step times changed from one side to the other: logarithms of ratios, one per row."""

    shift: Float  # of the median step
    error: Float  # standard error of `shift - common`
    spread: Float  # standard deviation of a step; nan where no side has two steps
    steady: Bool  # the steps of both sides vary little enough to be judged
    one_way: Bool  # nine of ten pairs of steps
    known: bool  # both sides have steps enough to know the noise
    common: float = 0.0  # what the rows share
    common_error: float = 0.0  # its standard error
    least: float = 0.0  # what a row must have changed by beyond that

    @property
    def excess(self) -> Float:
        """Return what each row changed by beyond what all share."""
        return self.shift - self.common

    def beyond_noise(self) -> Bool:
        """Return which rows changed otherwise than the typical one."""
        noise = np.maximum(limit(self.error, known=self.known), self.least)
        return (np.abs(self.excess) > noise) & self.steady & self.one_way


def limit(error: Float | float, *, known: bool = True) -> Float:
    """Return how large a change (a logarithm) may be and still be noise."""
    least = LEAST_CHANGE if known else MOST_NOISE
    return np.maximum(math.log1p(least), STANDARD_ERRORS * np.asarray(error))


def other_load(common: float) -> float:
    """Return what a layer must have changed by (a logarithm) on a CPU where all share this change: 0 if they may."""
    return abs(common) if abs(common) > math.log1p(MOST_NOISE) else 0.0


def row_shifts(log_a: Float, log_b: Float, common: float = 0.0) -> Shifts:
    """Return the shifts between two tables (rows, steps) of logarithms, each row by its own steps."""
    m, n = log_a.shape[1], log_b.shape[1]
    known = min(m, n) >= FEWEST
    spread = step_spread(log_a, log_b)
    # Mann and Whitney's rank test: the share of pairs in which `b` is more, less that in which it is less.
    won = np.sign(log_b[:, None, :] - log_a[:, :, None] - common).mean(axis=(1, 2))
    enough = min(LEAST_WON, STANDARD_ERRORS * math.sqrt((m + n + 1) / (3 * m * n)))
    return Shifts(
        shift=np.median(log_b, axis=1) - np.median(log_a, axis=1),
        error=np.nan_to_num(spread) * math.sqrt(sum((_MEDIAN_ERROR if k > 1 else 1.0) ** 2 / k for k in (m, n))),
        spread=spread,
        steady=~((step_spread(log_a) > MOST_NOISE) | (step_spread(log_b) > MOST_NOISE)),
        one_way=np.abs(won) >= enough if known else np.ones(len(won), dtype=np.bool_),
        known=known,
    )


def layer_shifts(
    a: Float,
    b: Float,
    weight: Float,
    *,
    cpu_steps: tuple[Float, Float] | None = None,
    other_work: Bool | bool = False,
) -> Shifts:
    """Return the shifts between two tables (layers, steps) of positive times, beside what the layers share.

    Args:
        a: nanoseconds, of what was before.
        b: nanoseconds, of what is now.
        weight: of each layer in what they share.
        cpu_steps: times of whole steps on both sides, on a CPU, where other load holds up steps and long layers most:
            a layer's share of its step must then have changed beyond noise too, and see `other_load`.
        other_work: layers that are judged by their own steps alone: how all others scatter is no reason to take their
            change for chance.
    """
    log_a, log_b = np.log(a), np.log(b)
    factor_a, factor_b = common_factors(log_a, weight), common_factors(log_b, weight)
    own_a, own_b = log_a - factor_a, log_b - factor_b
    common = weighted_median(np.median(own_b, axis=1) - np.median(own_a, axis=1), weight)
    shifts = row_shifts(own_a, own_b, common)
    away = np.abs(shifts.shift - common)
    if np.isnan(shifts.spread).any():
        error = np.full(len(away), MAD_TO_SIGMA * weighted_median(away, weight))
    else:
        error = np.maximum(shifts.error, _of_neighbours(shifts.error, log_a.mean(axis=1) + log_b.mean(axis=1)))
        wider = max(1.0, MAD_TO_SIGMA * weighted_median(away / np.maximum(error, 1e-12), weight))
        error = np.where(other_work, shifts.error, error * wider)
    one_way, least = shifts.one_way, 0.0
    if cpu_steps is not None:
        share = row_shifts(log_a - np.log(cpu_steps[0]), log_b - np.log(cpu_steps[1]))
        changed = (np.abs(share.shift) > limit(share.error, known=share.known)) & share.one_way
        one_way, least = one_way & changed & (share.shift * (shifts.shift - common) > 0), other_load(common)
    return replace(
        shifts,
        error=error,
        one_way=one_way,
        least=least,
        steady=shifts.steady | other_work,
        common=common,
        common_error=float(row_shifts(factor_a[None, :], factor_b[None, :]).error[0]),
    )


@dataclass(frozen=True, slots=True)
class Change:
    """How one series of times changed."""

    shift: float  # of the median step: a logarithm
    mean_error: float  # standard error of the relative change of the mean; nan where noise is not known
    why_noise: str  # the rule by which it may be noise; "": the median and the mean changed one way, by more than it

    @property
    def beyond_noise(self) -> bool:
        return not self.why_noise

    @property
    def precise(self) -> bool:
        """Whether noise is small enough to hide no large change."""
        return STANDARD_ERRORS * self.mean_error <= MOST_NOISE


NO_CHANGE = Change(0.0, math.nan, "times of steps are not known on both sides")


def series_change(a: Float, b: Float) -> Change:
    """Return the change between two series of positive numbers, by themselves."""
    if not ((a > 0).all() and (b > 0).all()):  # what took no time has no ratio
        return NO_CHANGE
    one = row_shifts(np.log(a)[None, :], np.log(b)[None, :])
    shift = float(one.shift[0])
    noise = float(limit(one.error[0] if one.known else 0.0, known=one.known))
    median_step = f"the median step changed by {100 * math.expm1(shift):+.1f} %"
    why = ""
    if shift * (float(b.mean()) - float(a.mean())) <= 0:
        why = f"{median_step}, not the way of the mean"
    elif not one.one_way[0]:
        why = "steps of both sides overlap"
    elif abs(shift) <= noise:
        known = f"{STANDARD_ERRORS:g} standard errors, {100 * LEAST_CHANGE:g} % at least"
        rule = known if one.known else f"fewer than {FEWEST} steps"
        why = f"{median_step}, and up to {100 * math.expm1(noise):.1f} % may be noise ({rule})"
    squares = (float(side.var(ddof=1)) / len(side) / float(side.mean()) ** 2 for side in (a, b))
    return Change(shift, math.sqrt(sum(squares)) if one.known else math.nan, why)


def step_spread(*sides: Float) -> Float:
    """Return the standard deviation of one step of each row, of logarithms: from the distance of every two of a side.

    The median distance leaves out a step that was held up, also of as few as four; the mean square of both sides has
    what only one side varies by. Nan where no side has two steps.
    """
    squares = []
    for side in sides:
        one, other = np.triu_indices(side.shape[1], 1)
        if len(one):
            squares.append((_PAIR_TO_SIGMA * np.median(np.abs(side[:, one] - side[:, other]), axis=1)) ** 2)
    return np.sqrt(np.mean(squares, axis=0)) if squares else np.full(len(sides[0]), np.nan)


def common_factors(logs: Float, weight: Float) -> Float:
    """Return what each step shares over all layers: logarithms, 0 in the median step."""
    apart = logs - np.median(logs, axis=1, keepdims=True)
    return np.array([weighted_median(step, weight) for step in apart.T])


def weighted_median(values: Float, weight: Float) -> float:
    """Return the value at half of the weight; 0 of nothing."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    place = int(np.searchsorted(reached, reached[-1] / 2))
    return float(values[order][min(place, len(values) - 1)])


def _of_neighbours(values: Float, size: Float) -> Float:
    """Return the median of each among its neighbours in order of size."""
    order = np.argsort(size, kind="stable")
    window = min(len(values), 2 * NEIGHBOURS + 1)
    first = np.clip(np.arange(len(values)) - NEIGHBOURS, 0, len(values) - window)
    near = np.empty_like(values)
    near[order] = np.median(values[order][first[:, None] + np.arange(window)], axis=1)
    return near


# What is judged: layers, their phases and siblings, on both sides.


@dataclass(frozen=True, slots=True)
class UnitKey:
    """What is judged as one: a layer or several sibling layers, in one phase or (None) in all."""

    layers: tuple[str, ...]
    phase: Phase | None


@dataclass(frozen=True, slots=True)
class UnitChange:
    """How the mean of its steps changed."""

    change: float | None  # relative; None: only on one side
    error: float | None
    decided_ns: float  # per step, beyond `TimeChanges.left_out`
    decided: bool  # that is more than noise
    apart_ns: float  # per step, beyond the change that all layers share
    apart: bool  # that is more than noise
    time_ns: float  # of a step, the larger of both sides


@dataclass(frozen=True, slots=True, eq=False)
class TimeChanges:
    """All units that could be judged, and what they share."""

    units: dict[UnitKey, UnitChange]
    total: Change
    shared: float  # share of the time in layers and phases that both sides have: the smaller of the two
    on_cpu: bool  # what all layers share is then the machine's as likely as the program's
    known: bool = False  # noise is
    common: float = 0.0  # relative
    common_beyond_noise: bool = False
    left_out: float = 0.0  # relative, of what is common: nothing where that is beyond noise and of a device


def time_changes(
    pairs: Sequence[ComparedRow], a: Side, b: Side, shared: float, other_work: frozenset[str]
) -> TimeChanges:
    """Judge every layer, phase and fold of sibling layers that takes `LEAST_SHARE` of a step on a side.

    Times of a CPU and of a device are not judged together. `shared`: see `TimeChanges`;
    `other_work`: layers, see `layer_shifts`.
    """
    on_cpu = "cpu" in (a.analysis.time_basis, b.analysis.time_basis)
    if a.analysis.time_basis != b.analysis.time_basis:
        return TimeChanges({}, NO_CHANGE, shared, on_cpu)
    judged = a.marked == b.marked and a.total_ns and b.total_ns
    total = series_change(a.step_totals(), b.step_totals()) if judged else NO_CHANGE
    units: dict[UnitKey, UnitChange] = {}
    series: dict[UnitKey, tuple[Float, Float, float]] = {}  # of each side, and the weight in what all share
    for key, members in _units(pairs):
        of_a, of_b = ([row for one in members if (row := getattr(one, side)) is not None] for side in "ab")
        means = [sum(row.time_ns for row in rows) / side.steps for rows, side in ((of_a, a), (of_b, b))]
        share = max(mean / max(1.0, side.total_ns) for mean, side in zip(means, (a, b), strict=True))
        if share < LEAST_SHARE:
            continue
        series_a, series_b = a.series(of_a), b.series(of_b)
        if not all(means):
            delta, much = means[1] - means[0], share >= NAMED_SHARE
            units[key] = UnitChange(None, None, delta, much, delta, much, max(means))
        elif (series_a > 0).all() and (series_b > 0).all():
            # By its self time, so that nothing counts for itself and for what holds it.
            own_ns = sum(max(0, row.self_time_ns) for row in (*of_a, *of_b))
            series[key] = series_a, series_b, own_ns if len(key.layers) == 1 and key.phase is not None else 0.0
    if not series:
        return TimeChanges(units, total, shared, on_cpu)
    table_a, table_b, own = (np.array(column) for column in zip(*series.values(), strict=True))
    weight = np.sqrt(own) if own.any() else np.ones(len(series))
    of_other_work = np.array([other_work.issuperset(key.layers) for key in series])
    cpu_steps = (a.step_totals(), b.step_totals()) if on_cpu else None
    shifts = layer_shifts(table_a, table_b, weight, cpu_steps=cpu_steps, other_work=of_other_work)
    before, after = table_a.mean(axis=1), table_b.mean(axis=1)
    moved = np.log(after / before)  # of the means, which are shown; the medians are tested, and both must go one way
    common = weighted_median(moved, weight)
    apart = shifts.beyond_noise() & ((moved - common) * shifts.excess > 0)
    if on_cpu:
        apart &= np.abs(moved - common) > other_load(common)
    sure_of_common = abs(shifts.common) > limit(shifts.common_error, known=shifts.known)
    all_moved = bool(total.beyond_noise and shared >= HALF and sure_of_common)
    decided, left_out = apart, common
    if all_moved and not on_cpu:
        noise = limit(np.hypot(shifts.error, shifts.common_error), known=shifts.known)
        decided, left_out = (np.abs(shifts.shift) > noise) & (moved * shifts.shift > 0), 0.0
    for i, key in enumerate(series):
        ratio = float(after[i] / before[i])
        units[key] = UnitChange(
            change=ratio - 1,
            error=ratio * float(shifts.error[i]) if shifts.known else None,
            decided_ns=float(after[i] - before[i] * math.exp(left_out)),
            decided=bool(decided[i]),
            apart_ns=float(after[i] - before[i] * math.exp(common)),
            apart=bool(apart[i]),
            time_ns=float(max(before[i], after[i])),
        )
    return TimeChanges(units, total, shared, on_cpu, shifts.known, math.expm1(common), all_moved, math.expm1(left_out))


def _units(pairs: Sequence[ComparedRow]) -> Iterable[tuple[UnitKey, list[ComparedRow]]]:
    """Yield what is judged as one, with its rows."""
    by_layer = _rows_of_layers(pairs)
    for pair in pairs:
        yield UnitKey((pair.layer,), pair.phase), [pair]
    for layers in [(layer,) for layer in by_layer if layer] + _folds(by_layer):
        members = [pair for layer in layers for pair in by_layer[layer]]
        yield UnitKey(layers, None), members
        for phase in dict.fromkeys(pair.phase for pair in members if len(layers) > 1):
            yield UnitKey(layers, phase), [pair for pair in members if pair.phase == phase]


def _rows_of_layers(pairs: Iterable[ComparedRow]) -> dict[str, list[ComparedRow]]:
    return grouped((pair.layer, pair) for pair in pairs)


def _folds(rows: Mapping[str, Sequence[ComparedRow]]) -> list[tuple[str, ...]]:
    """Return layers of one class that have one place in their blocks, or names that differ in one number.

    Three or more; what only one side has goes together.
    """
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for layer, pairs in rows.items():
        first = pairs[0].row
        pattern, number = like_name(layer, first.block)
        sides = tuple(any(getattr(pair, side) is not None for pair in pairs) for side in "ab")
        if number is not None:
            groups[pattern, first.class_name, sides].append(layer)
    return [tuple(layers) for layers in groups.values() if len(layers) >= FEWEST]


# What explains a change: from the whole model down to the layers that it is in.

MOST_CHANGED = 5  # layers


def changed_layers(
    pairs: Sequence[ComparedRow], changes: TimeChanges, total_delta_ns: float | None
) -> tuple[ChangedLayer, ...]:
    """Return what changed otherwise than the rest, the largest change first.

    `total_delta_ns`: the change of a step, if it changed.
    """
    tree = _Tree(pairs, changes.units)
    outside = [key for pair in pairs if not pair.layer and tree.apart(key := UnitKey(("",), pair.phase))]
    rows = [tree.row(key, total_delta_ns) for key in dict.fromkeys((*tree.explain(None), *outside))]
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns))[:MOST_CHANGED])


class _Tree:
    """Layers below layers, with siblings together where they changed alike."""

    def __init__(self, pairs: Sequence[ComparedRow], changes: Mapping[UnitKey, UnitChange]) -> None:
        self._changes = changes
        self._rows = _rows_of_layers(pairs)
        self._blocks = blocks_of(pairs)
        self._fold_of = {layer: fold for fold in _folds(self._rows) for layer in fold}
        shown: dict[str | None, str] = {pair.a.layer: pair.layer for pair in pairs if pair.a is not None}
        self._children: dict[str | None, list[str]] = defaultdict(list)
        for layer, rows in self._rows.items():
            of_b = [row.b.parent for row in rows if row.b is not None]
            parent = of_b[0] if of_b else shown.get(rows[0].row.parent, rows[0].row.parent)
            if layer:
                self._children[parent if parent in self._rows else None].append(layer)

    def apart(self, key: UnitKey) -> bool:
        """Whether it changed otherwise than the rest."""
        return key in self._changes and self._changes[key].apart

    def explain(self, key: UnitKey | None) -> list[UnitKey]:
        """Return the parts that explain a change, itself if no part does; of the whole model (None) all parts."""
        layers = key.layers if key is not None else (None,)
        parts = self._together([child for layer in layers for child in self._children.get(layer, ())])
        deeper = [deep for part in parts for deep in self.explain(part)]
        if key is None or not self.apart(key):
            return deeper
        own = self._changes[key]
        explained = sum(self._changes[part].apart_ns for part in deeper) / own.apart_ns
        changed_time = sum(self._changes[part].time_ns for part in deeper) / own.time_ns
        everything = len(deeper) > 1 and changed_time >= EXPLAINS  # then the whole is said for its parts
        return deeper if explained >= EXPLAINS and not everything else [key]

    def _together(self, layers: Sequence[str]) -> list[UnitKey]:
        """Return `layers` as parts: siblings that are all among them as one, unless they changed in different ways."""
        present = set(layers)
        parts: dict[UnitKey, None] = {}
        for fold in dict.fromkeys(self._fold_of.get(layer, (layer,)) for layer in layers):
            if present.issuperset(fold) and self._one_change(fold):
                parts[UnitKey(fold, None)] = None
            else:
                parts |= {UnitKey((layer,), None): None for layer in fold if layer in present}
        return list(parts)

    def _one_change(self, fold: tuple[str, ...]) -> bool:
        """Whether none of them changed; or all together, and the typical one about as all."""
        whole, single = UnitKey(fold, None), [UnitKey((layer,), None) for layer in fold]
        if not self.apart(whole):
            return not any(map(self.apart, single))
        mean = self._changes[whole].apart_ns / len(fold)
        known = (self._changes[key].apart_ns if key in self._changes else 0.0 for key in single)  # else not seen to
        return median(apart_ns / mean for apart_ns in known) >= HALF

    def row(self, key: UnitKey, total_delta_ns: float | None) -> ChangedLayer:
        """Return a changed layer; with the phase that explains its change, if one does."""
        if key.phase is None:
            phases = dict.fromkeys(pair.phase for layer in key.layers for pair in self._rows[layer])
            parts = [part for phase in phases if self.apart(part := UnitKey(key.layers, phase))]
            whole_ns = self._changes[key].apart_ns
            key = next((part for part in parts if self._changes[part].apart_ns / whole_ns >= EXPLAINS), key)
        change = self._changes[key]
        return ChangedLayer(
            layer=folded_name({layer: self._blocks.get(layer) for layer in key.layers}),
            layers=key.layers,
            phase=key.phase,
            change=change.change,
            error=change.error,
            change_ns=change.decided_ns,
            share=change.decided_ns / total_delta_ns if total_delta_ns else None,
        )
