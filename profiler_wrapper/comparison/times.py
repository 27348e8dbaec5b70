"""Which layers changed in time by more than noise, and which of them explain the change of a step.

Judged is each layer in each phase, its phases together, and sibling layers together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.model import Phase
from profiler_wrapper.analysis.statistics import MAD_TO_SIGMA, Float
from profiler_wrapper.comparison.match import Side, blocks_of, folded_name, like_name
from profiler_wrapper.comparison.model import ChangedLayer, ComparedRow

Bool = npt.NDArray[np.bool_]

# --------------------------------------------------------------------------------------------------
# The noise of times: whether layers changed by more than it, known from a few steps on each side.
#
# 1. A layer's change is that of its median step, in logarithms, without what all layers of a step have in common.
# 2. Its noise is the typical distance between two of its steps, at least that of layers which take about as long;
#    where the layers' changes scatter more than it explains, all noise is that much larger.
# 3. A change counts where it is over 2 %, over four standard errors, and nearly every step of one side is longer than
#    nearly every step of the other; on a CPU also beside the rest of its step, as load slows down all.

LEAST_CHANGE = 0.02  # a smaller one is no difference
STANDARD_ERRORS = 4.0  # with the rank test: no alarm in hundreds of layers (benchmarks/guard_alarms.py, test_noise.py)
ERRORS_OF_ONE = 3.0  # of a layer that does other work: that is one question, not one of hundreds
BUSY = 0.20  # on a CPU: where all is so much slower or faster, the machine is at other work
FEWEST_STEPS = 3  # of a side: fewer do not tell a held-up step from the others
LEAST_CHANGE_UNKNOWN = 0.25  # where a side has fewer
_UNSTEADY = 0.25  # spread: of a layer that varies more from step to step, nothing is said
_LEAST_REST = 0.1  # of a step: with less beside a layer, load cannot be told from the layer
_IN_FASTEST = 0.5  # of a change, on a CPU: so much of it the fastest steps must show, which load holds up least
_MOST_PAIRS = 0.8  # share of pairs of steps that one side wins, less those that it loses: more is not asked
_RANK_DEVIATIONS = 3.0  # of the rank sum: what is asked of many steps
_NEIGHBOURS = 15  # layers on each side in order of their time
_FEWEST_LAYERS = 8  # with fewer their scatter widens nothing
_PAIR_TO_SIGMA = 1.0483  # of a normal distribution: the median distance of two values is 0.9539 standard deviations
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of the mean (normal distribution)


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """How layers changed from one side to the other: logarithms of ratios, one per layer."""

    common: float  # of the typical layer
    common_error: float  # its standard error; infinite where noise is not known
    shift: Float  # of each
    error: Float  # standard error of `shift - common`
    spread: Float  # standard deviation of one step's own noise; nan where no side has two steps
    steady: Bool  # it varies little enough from step to step to be judged
    agreed: Bool  # the rank test does
    known: bool  # both sides have steps enough to know the noise

    @property
    def excess(self) -> Float:
        """What each changed beyond the common change."""
        return self.shift - self.common

    def beyond_noise(self) -> Bool:
        """Which layers changed otherwise than the typical one."""
        return (np.abs(self.excess) > limit(self.error, known=self.known)) & self.steady & self.agreed


def limit(error: Float | float, *, known: bool = True, errors: float = STANDARD_ERRORS) -> Float:
    """How large a change (a logarithm) may be and still be noise."""
    least = LEAST_CHANGE if known else LEAST_CHANGE_UNKNOWN
    return np.maximum(math.log1p(least), errors * np.asarray(error))


def layer_shifts(a: Float, b: Float, weight: Float) -> Shifts:
    """The shifts between two tables (layers, steps) of positive times; `weight` of each layer in what is common.

    Where a side has one step, noise is taken from the other side, and where neither has more, from how much the
    layers differ from one another: `known` is then false.
    """
    log_a, log_b = np.log(a), np.log(b)
    factor_a, factor_b = common_factors(log_a, weight), common_factors(log_b, weight)
    own_a, own_b = log_a - factor_a, log_b - factor_b
    shift = np.median(own_b, axis=1) - np.median(own_a, axis=1)
    common = weighted_median(shift, weight)
    scale = _error_scale(a.shape[1], b.shape[1])
    size = log_a.mean(axis=1) + log_b.mean(axis=1)
    spread = step_spread(own_a, own_b)
    if np.isnan(spread).any():
        error = MAD_TO_SIGMA * _of_neighbours(np.abs(shift - common), size)
    else:
        spread = np.maximum(spread, _of_neighbours(spread, size))
        error = spread * scale
        if len(shift) >= _FEWEST_LAYERS:
            scatter = np.abs(shift - common) / np.maximum(error, 1e-12)
            error = error * max(1.0, MAD_TO_SIGMA * weighted_median(scatter, weight))
    common_error = float(step_spread(factor_a[None, :], factor_b[None, :])[0]) * scale
    return Shifts(
        common=common,
        common_error=common_error if math.isfinite(common_error) else math.inf,
        shift=shift,
        error=error,
        spread=spread,
        steady=~((step_spread(own_a) > _UNSTEADY) | (step_spread(own_b) > _UNSTEADY)),
        agreed=_ranks_agree(own_a, own_b - common),
        known=min(a.shape[1], b.shape[1]) >= FEWEST_STEPS,
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


NO_CHANGE = Change(0.0, math.nan, "times of steps are not known on both sides")


def series_change(a: Float, b: Float, *, errors: float = STANDARD_ERRORS) -> Change:
    """The change between two series of positive numbers, by themselves."""
    if not ((a > 0).all() and (b > 0).all()):  # what took no time has no ratio
        return NO_CHANGE
    log_a, log_b = np.log(a)[None, :], np.log(b)[None, :]
    shift = float(np.median(log_b) - np.median(log_a))
    known = min(len(a), len(b)) >= FEWEST_STEPS
    error = step_spread(log_a, log_b)[0] * _error_scale(len(a), len(b)) if known else 0.0
    noise = float(limit(error, known=known, errors=errors))
    median_step = f"the median step changed by {100 * math.expm1(shift):+.1f} %"
    why = ""
    if shift * (float(b.mean()) - float(a.mean())) <= 0:
        why = f"{median_step}, not the way of the mean"
    elif not _ranks_agree(log_a, log_b)[0]:
        why = "steps of both sides overlap"
    elif abs(shift) <= noise:
        rule = (
            f"{errors:g} standard errors, {100 * LEAST_CHANGE:g} % at least"
            if known
            else f"fewer than {FEWEST_STEPS} steps"
        )
        why = f"{median_step}, and up to {100 * math.expm1(noise):.1f} % may be noise ({rule})"
    if not known:
        return Change(shift, math.nan, why)
    return Change(shift, math.sqrt(sum(float(s.var(ddof=1)) / len(s) / float(s.mean()) ** 2 for s in (a, b))), why)


def beside_the_rest(a: Float, b: Float, step_a: Float, step_b: Float, *, errors: float = STANDARD_ERRORS) -> float:
    """The change of a layer (a logarithm) beside the rest of its step: 0 where that is noise, or may be load.

    Load takes more from what is long than from the rest, so that what all changed by must be less.
    """
    rest_a, rest_b = (np.maximum(step - own, _LEAST_REST * step) for step, own in ((step_a, a), (step_b, b)))
    beside = series_change(a / rest_a, b / rest_b, errors=errors)  # what holds up both cancels, step by step
    rest = float(np.median(np.log(rest_b)) - np.median(np.log(rest_a)))
    if not beside.beyond_noise or (abs(math.expm1(rest)) > BUSY and abs(beside.shift) <= abs(rest)):
        return 0.0
    fastest = math.log(b.min() / a.min()) - math.log(rest_b.min() / rest_a.min())
    return beside.shift if fastest / beside.shift >= _IN_FASTEST else 0.0


def step_spread(*sides: Float) -> Float:
    """Standard deviation of one step of each layer, of logarithms: from the distance of every two steps of a side.

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
    """What each step has in common over all layers: logarithms, 0 in the median step."""
    apart = logs - np.median(logs, axis=1, keepdims=True)
    return np.array([weighted_median(apart[:, step], weight) for step in range(logs.shape[1])])


def weighted_median(values: Float, weight: Float) -> float:
    """The value at half of the weight; 0 of nothing."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    place = int(np.searchsorted(reached, reached[-1] / 2))
    return float(values[order][min(place, len(values) - 1)])


def _error_scale(steps_a: int, steps_b: int) -> float:
    """The standard error of a difference of medians, in standard deviations of a step."""
    return math.sqrt(sum((1.0 if steps == 1 else _MEDIAN_ERROR) ** 2 / steps for steps in (steps_a, steps_b)))


def _ranks_agree(a: Float, b: Float) -> Bool:
    """Mann and Whitney's rank test of each row; of few steps, 0.8: nine of ten pairs go one way. True of one step."""
    m, n = a.shape[1], b.shape[1]
    if min(m, n) < FEWEST_STEPS:
        return np.ones(len(a), dtype=np.bool_)
    enough = min(_MOST_PAIRS, _RANK_DEVIATIONS * math.sqrt((m + n + 1) / (3 * m * n)))
    # Over all pairs of a step of `a` and one of `b`: the share in which `b` is more, less that in which it is less.
    won = np.sign(b[:, None, :] - a[:, :, None]).mean(axis=(1, 2))
    return np.asarray(np.abs(won) >= enough, dtype=np.bool_)


def _of_neighbours(values: Float, size: Float) -> Float:
    """The median of each among its neighbours in order of size."""
    order = np.argsort(size, kind="stable")
    ordered = values[order]
    first = np.clip(np.arange(len(values)) - _NEIGHBOURS, 0, max(0, len(values) - 2 * _NEIGHBOURS - 1))
    window = min(len(values), 2 * _NEIGHBOURS + 1)
    near = np.empty_like(values)
    near[order] = np.median(ordered[first[:, None] + np.arange(window)], axis=1)
    return near


# --- What is judged: layers, their phases and siblings, on both sides ---

LEAST_SHARE = 0.001  # of a step on either side: what takes less is not judged
LEAST_ONE_SIDED = 0.01  # what only one side has is a change from so much on
LEAST_SHARED = 0.5  # of the time must be in what both sides have, to say what all have in common
FEWEST_SIBLINGS = 3


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
    apart_ns: float  # per step, beyond the change that all have in common
    apart: bool  # that is more than noise
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
    left_out: float = 0.0  # relative, of what is common: nothing where that is beyond noise and of a device


def time_changes(
    pairs: Sequence[ComparedRow], a: Side, b: Side, *, otherwise: frozenset[str] = frozenset()
) -> TimeChanges:
    """Judge every layer, phase and fold of sibling layers that takes `LEAST_SHARE` of a step on a side.

    `otherwise`: layers that do other work. They are judged by their own steps: that others scatter as well makes no
    chance of their change. Times of a CPU and of a device are not judged together.
    """
    on_cpu = "cpu" in (a.analysis.time_basis, b.analysis.time_basis)
    whole_a, whole_b, shared = a.step_totals(), b.step_totals(), shared_time(pairs, a, b)
    if a.analysis.time_basis != b.analysis.time_basis:
        return TimeChanges({}, NO_CHANGE, shared, on_cpu)
    total = series_change(whole_a, whole_b) if a.marked == b.marked and a.total_ns and b.total_ns else NO_CHANGE
    series: dict[UnitKey, tuple[Float, Float, float]] = {}  # of each side, and the weight in what all have in common
    units: dict[UnitKey, UnitChange] = {}
    for key, members in _units(pairs):
        rows_a, rows_b = (
            [row for row in rows if row is not None] for rows in zip(*((m.a, m.b) for m in members), strict=True)
        )
        mean_a, mean_b = (sum(row.time_ns for row in rows) / side.steps for rows, side in ((rows_a, a), (rows_b, b)))
        series_a, series_b = a.series(rows_a), b.series(rows_b)
        if mean_a < LEAST_SHARE * a.total_ns and mean_b < LEAST_SHARE * b.total_ns:
            continue
        if not mean_a or not mean_b:
            much = max(mean_a / max(1.0, a.total_ns), mean_b / max(1.0, b.total_ns)) >= LEAST_ONE_SIDED
            delta = mean_b - mean_a
            units[key] = UnitChange(None, None, delta, much, delta, much, max(mean_a, mean_b))
        elif (series_a > 0).all() and (series_b > 0).all():
            # By its self time, so that nothing counts for itself and for what holds it.
            own_ns = sum(max(0, row.self_time_ns) for row in (*rows_a, *rows_b))
            series[key] = series_a, series_b, own_ns if len(key.layers) == 1 and key.phase is not None else 0.0
    if not series:
        return TimeChanges(units, total, shared, on_cpu)
    table_a, table_b, own = (np.array(column) for column in zip(*series.values(), strict=True))
    weight = np.sqrt(own) if own.any() else np.ones(len(series))
    shifts = layer_shifts(table_a, table_b, weight)
    means_a, means_b = table_a.mean(axis=1), table_b.mean(axis=1)
    moved = np.log(means_b / means_a)
    common = weighted_median(moved, weight)
    apart = shifts.beyond_noise() & ((moved - common) * shifts.excess > 0)  # what is shown and what is tested
    common_error = shifts.common_error if math.isfinite(shifts.common_error) else 0.0
    sure_of_common = abs(shifts.common) > limit(common_error, known=shifts.known)
    all_moved = bool(total.beyond_noise and shared >= LEAST_SHARED and sure_of_common)
    plain = all_moved and not on_cpu  # on a CPU that is as likely other load
    left_out = 0.0 if plain else common
    whole = np.abs(shifts.shift) > limit(np.hypot(shifts.error, common_error), known=shifts.known)
    whole &= moved * shifts.shift > 0
    for i, (key, (series_a, series_b, _)) in enumerate(series.items()):
        before, after = float(means_a[i]), float(means_b[i])
        errors, may_be, error = STANDARD_ERRORS, apart[i], float(shifts.error[i])
        if not may_be and otherwise.issuperset(key.layers):
            alone = series_change(series_a, series_b / math.exp(common), errors=ERRORS_OF_ONE)
            if alone.beyond_noise:
                errors, may_be, error = ERRORS_OF_ONE, True, alone.mean_error
        beside = shifts.excess[i]
        if on_cpu and may_be:
            beside = beside_the_rest(series_a, series_b, whole_a, whole_b, errors=errors)
        is_apart = bool(may_be and beside * shifts.excess[i] > 0)
        units[key] = UnitChange(
            change=after / before - 1,
            error=after / before * error if shifts.known else None,
            decided_ns=after - before * math.exp(left_out),
            decided=bool(whole[i]) if plain else is_apart,
            apart_ns=after - before * math.exp(common),
            apart=is_apart,
            time_ns=max(before, after),
        )
    return TimeChanges(units, total, shared, on_cpu, shifts.known, math.expm1(common), all_moved, math.expm1(left_out))


def shared_time(pairs: Sequence[ComparedRow], a: Side, b: Side) -> float:
    """Share of the time that is in layers and phases of both sides: the smaller of the two."""
    both = [pair for pair in pairs if pair.a is not None and pair.b is not None]
    return min(
        sum(row.self_time_ns for row in rows if row is not None) / max(1, side.analysis.time.total_ns)
        for rows, side in (([pair.a for pair in both], a), ([pair.b for pair in both], b))
    )


def _units(pairs: Sequence[ComparedRow]) -> Iterable[tuple[UnitKey, list[ComparedRow]]]:
    by_layer: dict[str, list[ComparedRow]] = defaultdict(list)
    for pair in pairs:
        by_layer[pair.layer].append(pair)
        yield UnitKey((pair.layer,), pair.phase), [pair]
    for layer, members in by_layer.items():
        if layer:
            yield UnitKey((layer,), None), members
    for layers in _folds(by_layer):
        members = [pair for layer in layers for pair in by_layer[layer]]
        yield UnitKey(layers, None), members
        for phase in dict.fromkeys(pair.phase for pair in members):
            yield UnitKey(layers, phase), [pair for pair in members if pair.phase == phase]


def _folds(rows: Mapping[str, Sequence[ComparedRow]]) -> list[tuple[str, ...]]:
    """Layers of one class that have one place in their blocks, or names that differ in one number; three or more.

    What only one side has goes together.
    """
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for layer, pairs in rows.items():
        first = pairs[0].row
        pattern, number = like_name(layer, first.block)
        sides = tuple(any(getattr(pair, side) is not None for pair in pairs) for side in "ab")
        if number is not None:
            groups[pattern, first.class_name, sides].append(layer)
    return [tuple(layers) for layers in groups.values() if len(layers) >= FEWEST_SIBLINGS]


# --- What explains a change: from the whole model down to the layers that it is in ---

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
    rows = [tree.row(key, total_delta_ns) for key in dict.fromkeys(found)]
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns))[:MOST_CHANGED])


class _Tree:
    """Layers below layers, with like ones together where they changed alike."""

    def __init__(self, pairs: Sequence[ComparedRow], changes: TimeChanges) -> None:
        self._changes = changes.units
        self._children: dict[str | None, list[str]] = defaultdict(list)
        self._rows: dict[str, list[ComparedRow]] = defaultdict(list)
        shown: dict[str | None, str] = {pair.a.layer: pair.layer for pair in pairs if pair.a is not None}
        parents: dict[str, str | None] = {}
        for pair in pairs:
            self._rows[pair.layer].append(pair)
            if pair.b is not None:
                parents[pair.layer] = pair.b.parent
            else:
                parents.setdefault(pair.layer, shown.get(pair.row.parent, pair.row.parent))
        for layer in filter(None, parents):
            above = parents[layer]
            self._children[above if above and above in parents else None].append(layer)
        self._blocks = blocks_of(pairs)
        self._fold_of = {layer: fold for fold in _folds(self._rows) for layer in fold}

    def roots(self) -> list[UnitKey]:
        """Where to begin: the roots, and what has no module, phase by phase."""
        outside = [UnitKey(("",), pair.phase) for pair in self._rows.get("", ())]
        return self._together(self._children[None]) + [key for key in outside if self._apart(key)]

    def explain(self, key: UnitKey) -> list[UnitKey]:
        """The parts that explain the change of `key`, itself if no part does; nothing where nothing changed."""
        if key.phase is not None:
            return [key]
        below = [child for layer in key.layers for child in self._children.get(layer, ())]
        deeper = [deep for part in self._together(below) for deep in self.explain(part)]
        if not self._apart(key):
            return deeper
        own = self._changes[key]
        explained = sum(self._changes[part].apart_ns for part in deeper) / own.apart_ns
        changed_time = sum(self._changes[part].time_ns for part in deeper) / own.time_ns
        everything = len(deeper) > 1 and changed_time >= EXPLAINS  # then the whole is said for its parts
        return deeper if explained >= EXPLAINS and not everything else [key]

    def _apart(self, key: UnitKey) -> bool:
        return key in self._changes and self._changes[key].apart

    def _together(self, layers: Sequence[str]) -> list[UnitKey]:
        """`layers` as parts: siblings that are all among them as one, unless they changed unlike one another."""
        present = set(layers)
        folds = {self._fold_of.get(layer, (layer,)): None for layer in layers}
        parts: dict[UnitKey, None] = {}
        for fold in folds:
            if present.issuperset(fold) and self._one_change(fold):
                parts[UnitKey(fold, None)] = None
            else:
                parts |= {UnitKey((layer,), None): None for layer in fold if layer in present}
        return list(parts)

    def _one_change(self, fold: tuple[str, ...]) -> bool:
        """None of them changed; or all together, most of them in one direction, and the typical one about as all."""
        whole, single = UnitKey(fold, None), [UnitKey((layer,), None) for layer in fold]
        if not self._apart(whole):
            return not any(map(self._apart, single))
        mean = self._changes[whole].apart_ns / len(fold)
        shares = [self._changes[key].apart_ns / mean for key in single if key in self._changes]
        one_way = sum(share > 0 for share in shares) >= _ONE_WAY * len(fold)
        return one_way and median(shares) >= _TYPICAL_SHARE

    def row(self, key: UnitKey, total_delta_ns: float | None) -> ChangedLayer:
        change = self._changes[key]
        phase = key.phase
        if phase is None:
            phase, change = self._phase_of(key, change)
        share = change.decided_ns / total_delta_ns if total_delta_ns else math.nan
        return ChangedLayer(
            layer=folded_name({layer: self._blocks.get(layer) for layer in key.layers}),
            layers=key.layers,
            phase=phase,
            change=change.change,
            error=change.error,
            change_ns=change.decided_ns,
            share=share if math.isfinite(share) else None,
        )

    def _phase_of(self, key: UnitKey, whole: UnitChange) -> tuple[Phase | None, UnitChange]:
        """The phase that has most of the change, and its own; else none and the change of all."""
        for phase in dict.fromkeys(pair.phase for layer in key.layers for pair in self._rows[layer]):
            part = self._changes.get(UnitKey(key.layers, phase))
            if part is not None and part.apart and part.apart_ns / whole.apart_ns >= EXPLAINS:
                return phase, part
        return None, whole
