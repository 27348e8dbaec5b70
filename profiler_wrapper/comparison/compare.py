"""Two results compared: every layer, phase and class, what changed by more than noise, and where."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.advice.verdict import input_shapes
from profiler_wrapper.analysis.model import Analysis, LayerRow, Phase
from profiler_wrapper.analysis.statistics import sum_if_all_known, sum_of_known
from profiler_wrapper.analysis.steps import step_times_ns
from profiler_wrapper.comparison.match import Pair, Paired, Side, amounts, folded_name, like_name, pair_rows, side_of
from profiler_wrapper.comparison.model import (
    ComparedClass,
    ComparedReason,
    ComparedRow,
    ComparedTotal,
    Comparison,
    Culprit,
    Decision,
    Difference,
    WorkChange,
)
from profiler_wrapper.comparison.noise import (
    BUSY,
    FEWEST_STEPS,
    LEAST_CHANGE,
    LEAST_CHANGE_UNKNOWN,
    NO_CHANGE,
    UNSTEADY,
    Change,
    Float,
    clearly_apart,
    layer_shifts,
    limit,
    series_change,
    step_spread,
    weighted_median,
)
from profiler_wrapper.units import MIB

# --------------------------------------------------------------------------------------------------
# Which layers changed in time by more than noise: each in each phase, its phases together, and like ones together.

LEAST_SHARE = 0.001  # of a step on either side: what takes less is not judged
LEAST_ONE_SIDED = 0.01  # what only one side has is a change from so much on
LEAST_SHARED = 0.5  # of the time must be in what both sides have, to say what all have in common
FEWEST_ALIKE = 3
_PLAIN = BUSY / 2  # beside all layers, of what is plain beside the rest of its step
_OWN_PART = 0.1  # of a layer's time must be its own, for other work of its own to be a reason
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
    common: float  # relative
    common_beyond_noise: bool
    known: bool  # noise is
    total: Change
    shared: float  # share of the time in layers and phases that both sides have: the smaller of the two
    on_cpu: bool = False  # what all have in common is then the machine's as likely as the program's
    left_out: float = 0.0  # relative: of what is common, what `delta_ns` of the units leaves out


def time_changes(pairs: Sequence[Pair], a: Side, b: Side, other_work: Collection[str] = frozenset()) -> TimeChanges:
    """Judge every layer, phase and fold of like layers that takes `LEAST_SHARE` of a step on a side.

    `other_work`: layers that are known to do other work, of which less is asked than of one among many. Times of a
    CPU and of a device are not judged together.
    """
    if a.analysis.time_basis != b.analysis.time_basis:
        return TimeChanges({}, 0.0, False, False, NO_CHANGE, shared_time(pairs, a, b), on_cpu=True)
    per_step = a.marked == b.marked and a.total_ns and b.total_ns
    total = series_change(a.step_totals(), b.step_totals()) if per_step else NO_CHANGE
    keys, tables, weights = [], ([], []), []  # type: tuple[list[UnitKey], tuple[list[Float], list[Float]], list[float]]
    one_sided: dict[UnitKey, UnitChange] = {}
    owns: dict[UnitKey, float] = {}
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
            one_sided[key] = UnitChange(None, None, delta, much, delta, much, max(mean_a, mean_b))
        elif (series_a > 0).all() and (series_b > 0).all():
            keys.append(key)
            tables[0].append(series_a)
            tables[1].append(series_b)
            weights.append(_own_weight(key, rows_a, rows_b))
            owns[key] = _own_part(rows_a, rows_b)
    shared = shared_time(pairs, a, b)
    on_cpu = "cpu" in (a.analysis.time_basis, b.analysis.time_basis)
    if not keys:
        return TimeChanges(one_sided, 0.0, False, False, total, shared, on_cpu)
    wholes = (a.step_totals(), b.step_totals())
    sure = [
        (not on_cpu or _beside_the_rest(one, other, wholes)) and _steady(one, other)
        for one, other in zip(*tables, strict=True)
    ]
    table_a, table_b = (np.array(table) for table in tables)
    plain = {
        key: _plainly_apart(one, other, wholes)
        for key, one, other in zip(keys, *tables, strict=True)
        if set(key.layers) <= set(other_work) and owns[key] >= _OWN_PART
    }
    for fold in folds(pairs):  # like layers that all do other work have one reason: what is plain is so of all or none
        if set(fold) <= set(other_work):
            plain |= {key: plain.get(UnitKey(fold, key.phase), 0.0) for key in keys if key.layers[0] in fold}
    for key, direction in list(plain.items()):  # a layer is looked into where one of its phases is
        whole = UnitKey(key.layers, None)
        plain[whole] = plain.get(whole, 0.0) or direction
    certain = (np.array(sure), np.array([plain.get(key, 0.0) for key in keys]))
    return _judged(keys, table_a, table_b, np.array(weights), one_sided, total, shared, certain, on_cpu)


def shared_time(pairs: Sequence[Pair], a: Side, b: Side) -> float:
    """Share of the time that is in layers and phases of both sides: the smaller of the two."""
    both = [pair for pair in pairs if pair.a is not None and pair.b is not None]
    return min(
        sum(row.self_time_ns for row in rows if row is not None) / max(1, side.analysis.time.total_ns)
        for rows, side in (([pair.a for pair in both], a), ([pair.b for pair in both], b))
    )


def _plainly_apart(a: Float, b: Float, wholes: tuple[Float, Float]) -> float:
    rest_a, rest_b = wholes[0] - a, wholes[1] - b
    return clearly_apart(a / rest_a, b / rest_b) if (rest_a > 0).all() and (rest_b > 0).all() else 0.0


def _steady(a: Float, b: Float) -> bool:
    """Whether its time is much the same from step to step, on each side that tells."""
    return not any(float(step_spread(np.log(side)[None, :])[0]) > UNSTEADY for side in (a, b))


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


def _judged(
    keys: Sequence[UnitKey],
    a: Float,
    b: Float,
    weight: Float,
    units: dict[UnitKey, UnitChange],
    total: Change,
    shared: float,
    certain: tuple[npt.NDArray[np.bool_], Float],  # where noise lets be sure; where it is plain, and which way
    on_cpu: bool,
) -> TimeChanges:
    weight = weight if weight.any() else np.ones(len(keys))
    shifts = layer_shifts(a, b, weight)
    mean_a, mean_b = a.mean(axis=1), b.mean(axis=1)
    moved = np.log(mean_b / mean_a)
    common = weighted_median(moved, weight)
    common_error = shifts.common_error if math.isfinite(shifts.common_error) else 0.0
    sure_of_common = abs(shifts.common) > limit(common_error, known=shifts.known)
    all_alike = bool(total.beyond_noise and shared >= LEAST_SHARED and sure_of_common)
    sure, direction = certain
    plain = np.sign(direction) * shifts.excess > math.log1p(_PLAIN)  # beside the rest of its step, and all layers
    one_way = (moved - common) * shifts.excess > 0  # what is shown and what is judged
    beyond = apart = ((shifts.beyond_noise() & sure) | plain) & one_way
    if all_alike and not on_cpu:
        error = np.hypot(shifts.error, common_error)
        far = np.abs(shifts.shift) > limit(error, known=shifts.known)
        beyond = (far | plain) & (moved * shifts.shift > 0)
    base = 0.0 if all_alike and not on_cpu else common
    for i, key in enumerate(keys):
        before, after = float(mean_a[i]), float(mean_b[i])
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
        units=units,
        common=math.expm1(common),
        common_beyond_noise=all_alike,
        known=shifts.known,
        total=total,
        shared=shared,
        on_cpu=on_cpu,
        left_out=math.expm1(base),
    )


def _own_part(rows_a: Sequence[LayerRow], rows_b: Sequence[LayerRow]) -> float:
    """The larger share, of both sides, that is in no layer below."""
    return max(
        sum(row.self_time_ns for row in rows) / max(1, sum(row.time_ns for row in rows)) for rows in (rows_a, rows_b)
    )


def _own_weight(key: UnitKey, rows_a: Sequence[LayerRow], rows_b: Sequence[LayerRow]) -> float:
    """In what all have in common: by the time of its own, so that nothing counts for itself and for what holds it."""
    if len(key.layers) > 1 or key.phase is None:
        return 0.0
    return math.sqrt(sum(max(0, row.self_time_ns) for row in (*rows_a, *rows_b)))


def _units(pairs: Sequence[Pair]) -> Iterable[tuple[UnitKey, list[Pair]]]:
    by_layer: dict[str, list[Pair]] = defaultdict(list)
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


def folds(pairs: Iterable[Pair]) -> list[tuple[str, ...]]:
    """Layers of one class that have one place in their blocks, or names that differ in one number; three or more."""
    groups: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for pair in pairs:
        pattern, number = like_name(pair.layer, pair.row.block)
        if number is not None:
            groups[pattern, pair.row.class_name][pair.layer] = None
    return [tuple(layers) for layers in groups.values() if len(layers) >= FEWEST_ALIKE]


# --------------------------------------------------------------------------------------------------
# What explains a change: from the whole model down to the layers that it is in.

EXPLAINS = 0.75  # of a change: then it is said of the part instead of the whole
_ALIKE = 0.5  # of the mean change of like layers that the median one must have, to name all of them
_ONE_WAY = 0.9  # of them have changed in the same direction
MOST_CULPRITS = 5


def culprits(paired: Paired, changes: TimeChanges, total_delta_ns: float | None) -> tuple[Culprit, ...]:
    """What changed otherwise than the rest, the largest change first. `total_delta_ns`: of a step, if it changed."""
    tree = _Tree(paired, changes)
    found = [key for root in tree.roots() for key in tree.explain(root)]
    rows = [tree.culprit(key, total_delta_ns) for key in tree.joined(tree.whole(dict.fromkeys(found)))]
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns))[:MOST_CULPRITS])


class _Tree:
    """Layers below layers, with like ones together where they changed alike."""

    def __init__(self, paired: Paired, changes: TimeChanges) -> None:
        self._changes: dict[UnitKey, UnitChange] = dict(changes.units)
        self._children: dict[str | None, list[str]] = defaultdict(list)
        self._phases: dict[str, list[Phase]] = defaultdict(list)
        layers = dict.fromkeys(pair.layer for pair in paired.pairs if pair.layer)
        for layer in layers:
            above = paired.parents.get(layer)
            self._children[above if above in layers else None].append(layer)
        for pair in paired.pairs:
            self._phases[pair.layer].append(pair.phase)
        self._block = {pair.layer: pair.row.block for pair in paired.pairs}
        self._fold_of = {layer: fold for fold in folds(paired.pairs) for layer in fold}

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
            if len(fold) == len(whole.layers) and self._changed_alike(whole):
                parts[whole] = None
            else:
                parts[UnitKey((child,), None)] = None
        return list(parts)

    def _changed_alike(self, fold: UnitKey) -> bool:
        own = self._changes.get(fold)
        if own is None or not own.apart:
            return False
        single = [self._changes.get(UnitKey((layer,), None)) for layer in fold.layers]
        deltas = [change.apart_ns for change in single if change is not None]
        same_way = sum((delta > 0) == (own.apart_ns > 0) for delta in deltas)
        typical = median(deltas) if deltas else 0.0
        mean = own.apart_ns / len(fold.layers)
        return same_way >= _ONE_WAY * len(fold.layers) and typical / mean >= _ALIKE

    def whole(self, keys: Iterable[UnitKey]) -> list[UnitKey]:
        """`keys`, with all of the like layers as one where each of them is there and they changed alike."""
        found = list(keys)
        for fold in dict.fromkeys(self._fold_of.get(key.layers[0], ()) for key in found):
            single = [UnitKey((layer,), None) for layer in fold]
            if fold and set(single) <= set(found) and self._changed_alike(UnitKey(fold, None)):
                found = [UnitKey(fold, None), *(key for key in found if key not in single)]
        return found

    def joined(self, keys: Iterable[UnitKey]) -> Iterable[UnitKey]:
        """`keys`, with like layers that only one side has as one."""
        alike: dict[tuple[object, ...], list[UnitKey]] = defaultdict(list)
        for key in keys:
            change = self._changes[key]
            own = key.layers if len(key.layers) > 1 or change.change is not None else ()
            fold = own or self._fold_of.get(key.layers[0], key.layers)
            alike[fold, own, key.phase, change.change is None and change.delta_ns > 0].append(key)
        for members in alike.values():
            key = UnitKey(tuple(layer for member in members for layer in member.layers), members[0].phase)
            if len(members) > 1:
                delta = sum(self._changes[member].delta_ns for member in members)
                time = sum(self._changes[member].time_ns for member in members)
                self._changes[key] = UnitChange(None, None, delta, True, delta, True, time)
            yield key

    def culprit(self, key: UnitKey, total_delta_ns: float | None) -> Culprit:
        change = self._changes[key]
        phase = key.phase
        if phase is None:
            phase, change = self._phase_of(key, change)
        return Culprit(
            layer=folded_name({layer: self._block.get(layer) for layer in key.layers}),
            layers=key.layers,
            phase=phase,
            change=change.change,
            error=change.error,
            change_ns=change.delta_ns,
            share=_share(change.delta_ns, total_delta_ns),
        )

    def _phase_of(self, key: UnitKey, whole: UnitChange) -> tuple[Phase | None, UnitChange]:
        """The phase that has most of the change, and its own; else none and the change of all."""
        for phase in dict.fromkeys(phase for layer in key.layers for phase in self._phases[layer]):
            part = self._changes.get(UnitKey(key.layers, phase))
            if part is not None and part.apart and part.apart_ns / whole.apart_ns >= EXPLAINS:
                return phase, part
        return None, whole


def _share(apart_ns: float, total_delta_ns: float | None) -> float | None:
    if not total_delta_ns or not math.isfinite(apart_ns / total_delta_ns):
        return None
    return apart_ns / total_delta_ns


# --------------------------------------------------------------------------------------------------
# What makes two results hard to compare, from the `comparable` of each, or where that is missing from its run.

BASIS = "time basis"
SIZES = "sizes of linear layers' products"  # told by digests
_NEAR = 0.02  # coverages that are nearer are as good as equal


class _Trait(NamedTuple):
    key: str
    words: str
    of_time_only: bool = False


# In the order in which they are told. What is not known on a side is no difference.
_TRAITS = (
    _Trait("time_basis", BASIS, True),
    _Trait("model", "model"),
    _Trait("layers", "layers"),
    _Trait("blocks", "blocks"),
    _Trait("parameters", "parameters"),
    _Trait("shapes", SIZES),
    _Trait("attention_shape", "attention shape"),
    _Trait("dtypes", "types of numbers"),
    _Trait("phases", "phases"),
    _Trait("device", "device", True),
    _Trait("device_count", "devices", True),
    _Trait("cpu_name", "CPU", True),
    _Trait("world_size", "world size"),
    _Trait("torch", "torch"),
    _Trait("python", "Python", True),
    _Trait("steps", "timed steps", True),
    _Trait("shapes_in_timed_steps", "shapes in the timed steps", True),
    _Trait("memory_in_timed_steps", "allocations in the timed steps", True),
    _Trait("complete", "complete"),
    _Trait("coverage", "coverage", True),
)
HARMLESS = frozenset({"timed steps"})  # to be told, but no reason not to judge
OF_MACHINE = frozenset({"device", "devices", "CPU", "world size", "torch", "Python", BASIS})


def traits(analysis: Analysis) -> dict[str, Any]:
    """What makes a result comparable: as it says itself, else as its run and rows tell."""
    run, versions = analysis.run, analysis.run.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    roots = [row.class_name or row.layer for row in analysis.layers if row.layer and row.parent is None]
    own: dict[str, Any] = {
        "model": ", ".join(dict.fromkeys(roots)) or None,
        "layers": len({row.layer for row in analysis.layers if row.layer}),
        "blocks": len({row.layer for row in analysis.layers if row.kind == "block"}),
        "phases": sorted({row.phase for row in analysis.layers if row.time_ns}),
        "time_basis": analysis.time_basis,
        "device": run.get("device"),
        "cpu_name": run.get("cpu_name"),
        "world_size": run.get("world_size"),
        "torch": versions.get("torch"),
        "python": versions.get("python"),
        "steps": sum(row.step is not None for row in analysis.steps),
        "complete": analysis.complete,
        "coverage": analysis.time.coverage,
        "memory_in_timed_steps": any(
            peak is not None
            for peak in (*(row.peak_bytes for row in analysis.steps), *(row.peak_bytes for row in analysis.layers))
        ),
        "shapes_in_timed_steps": not set(_numbers(run.get("timed_steps"))).isdisjoint(_numbers(run.get("full_steps"))),
    }
    told = analysis.summary.get("comparable")
    known = own | (dict(told) if isinstance(told, Mapping) else {})
    known["time_basis"] = analysis.time_basis
    known["shapes"] = input_shapes(analysis) or known.get("shapes")
    return {key: value for key, value in known.items() if value is not None}


def _numbers(told: object) -> list[object]:
    return list(told) if isinstance(told, (list, tuple)) else []


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Where two results' traits differ: the work first, then the machine, then how it was recorded."""
    found = []
    for trait in _TRAITS:
        one, other = a.get(trait.key), b.get(trait.key)
        if one is None or other is None or one == other:
            continue
        if trait.key == "coverage" and abs(float(one) - float(other)) <= _NEAR:
            continue
        if trait.key == "cpu_name" and a.get("time_basis") == b.get("time_basis") == "device":
            continue
        words_a, words_b = (_words(trait.key, value) for value in (one, other))
        found.append(Difference(what=trait.words, a=words_a, b=words_b, of_time_only=trait.of_time_only))
    return tuple(found)


def _words(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "coverage" and isinstance(value, (int, float)):
        return f"{100 * value:.1f} %"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


# --------------------------------------------------------------------------------------------------
# A comparison in one sentence.

_MOST_DIFFERENCES = 3
_MANY_TIMES = 2  # as much more
CLOCK = "step on the clock"
PEAK = "peak memory"
NO_BACKEND = "no attention kernel"  # single ops, where there is attention
_compare_verdict_NEAR = 0.01  # FLOPs that are nearer are as good as equal
SURE = 0.05  # standard error of the change of a step: with more, no difference is found where there may be one
MOST_OF_IT = 0.5  # of a change: with less in single layers, it is told of all
_LEAST_PART = 0.2  # of a change: what explains less is not where it is
LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"
BY_LOAD = "within what load and clock do on a CPU"
_MOST_WORK = 2  # layers
_LEAST_MEMORY = 64 << 10  # bytes
_LONGEST = 40  # characters of a value


def verdict_of(
    differences: Sequence[Difference],
    totals: Sequence[ComparedTotal],
    changes: TimeChanges,
    culprits: Sequence[Culprit],
    work: Sequence[WorkChange],
    backend_changes: Sequence[tuple[str, str, str]],
    bases: tuple[str, str],
) -> str:
    """What is not alike, then what changed, then where. `totals`: the time of a step first; `bases` of time: a, b.

    The largest certain difference comes first: of the time of a step, else of its peak memory, else of its FLOPs.
    """
    total, flops = totals[0], _other_flops(totals)
    like_load = not flops and _like_load(culprits, changes, total)
    alone = bool(changes.units) and changes.shared >= LEAST_SHARED and not culprits
    certain = total.decision in ("slower", "faster")
    time = [_of_total(total, like_load, bases, alone and changes.on_cpu)]
    if certain and not like_load:
        time += [flops, _where(culprits, total, flops)]
    elif culprits:
        time.append(f"{'besides,' if certain else 'but'} {_alone(culprits, changes.left_out)}")
    memory = _of_memory(totals)
    parts = [*time, memory] if certain and not like_load else [memory or (flops and f"b runs {flops}"), *time]
    said = ", ".join(part for part in parts if part)
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in backend_changes[:1])
    return f"{_unlike(differences)}{said}{_on_the_clock(totals)}{attention}{_work(work, bases[1])}"


def _work(work: Sequence[WorkChange], basis: str) -> str:
    """The layers with most other work; exact, so it is said whatever the noise."""
    if not work:
        return ""
    more = f" and {len(work) - _MOST_WORK} more" if len(work) > _MOST_WORK else ""
    told = "; ".join(f"{place_of(one.layer, one.phase)} {work_words(one, basis)}" for one in work[:_MOST_WORK])
    signs = {delta > 0 for one in work for delta in (one.flops_delta, one.events_delta, one.calls_delta) if delta}
    word = "other" if len(signs) != 1 else "more" if signs == {True} else "less"
    return f"; {word} work: {told}{more}"


def work_words(one: WorkChange, basis: str) -> str:
    """`+12.5 % FLOPs, +12 ops`: what differs a step; `basis`: what events are."""
    words = []
    if one.flops_delta:
        flops = one.flops_delta / one.flops_a if one.flops_a else 0.0
        words.append(f"{100 * flops:+.1f} % FLOPs" if one.flops_a else f"{one.flops_delta / 1e9:+.3f} GFLOP")
    if (one.flops_a is None) != (one.flops_b is None):
        words.append(f"FLOPs not known in {'a' if one.flops_a is None else 'b'}")
    if abs(one.events_delta) >= 1:
        words.append(f"{one.events_delta:+.0f} {'ops' if basis == 'cpu' else 'device events'}")
    if one.calls_delta:
        words.append(f"{one.calls_delta:+g} calls")
    if abs(one.retained_delta) >= _LEAST_MEMORY:
        words.append(f"{one.retained_delta / MIB:+.1f} MiB kept")
    return ", ".join(words) or "a little otherwise"


def _unlike(differences: Sequence[Difference]) -> str:
    told = [one for one in differences if one.what not in HARMLESS]
    if not told:
        return ""
    words = [
        f"other {one.what}" if one.what == SIZES else f"{one.what} {one.a[:_LONGEST]} -> {one.b[:_LONGEST]}"
        for one in told[:_MOST_DIFFERENCES]
    ]
    more = f" and {len(told) - _MOST_DIFFERENCES} more" if len(told) > _MOST_DIFFERENCES else ""
    return f"not alike ({'; '.join(words)}{more}): "


def explained(culprits: Sequence[Culprit], total: ComparedTotal) -> float:
    """Share of the change of a step that is in layers which changed otherwise than the rest."""
    return sum(one.share or 0.0 for one in culprits if (one.change_ns > 0) == (total.decision == "slower"))


def _like_load(culprits: Sequence[Culprit], changes: TimeChanges, total: ComparedTotal) -> bool:
    """Load and clock of a machine change from run to run, and no step of a run shows it: on a CPU, by any amount."""
    if total.decision not in ("slower", "faster") or explained(culprits, total) >= MOST_OF_IT:
        return False
    if changes.common_beyond_noise or changes.shared < LEAST_SHARED:
        return changes.common_beyond_noise
    alone = not culprits and total.change is not None and changes.common / total.change >= MOST_OF_IT
    return changes.on_cpu or alone


def _other_flops(totals: Sequence[ComparedTotal]) -> str:
    """How many FLOPs more or fewer, where both sides tell."""
    change = next((one.change for one in totals if one.unit == "flops" and one.change is not None), None)
    if change is None or abs(change) <= _compare_verdict_NEAR:
        return ""
    return f"with {100 * abs(change):.3g} % {'more' if change > 0 else 'fewer'} FLOPs"


def _of_memory(totals: Sequence[ComparedTotal]) -> str:
    """The peak, where it is another."""
    peak = next((one for one in totals if one.name == PEAK), None)
    if peak is None or peak.change is None or abs(peak.change) < LEAST_CHANGE or not peak.a or peak.b is None:
        return ""
    if abs(peak.b - peak.a) < _LEAST_MEMORY:
        return ""
    word = "more" if peak.change > 0 else "less"
    sizes = f"{peak.a / MIB:.1f} -> {peak.b / MIB:.1f} MiB"
    return f"b needs {100 * abs(peak.change):.1f} % {word} memory at its peak ({sizes})"


def _on_the_clock(totals: Sequence[ComparedTotal]) -> str:
    """Where a step took longer or shorter and its work did not."""
    wall = next((one for one in totals if one.name == CLOCK), None)
    if wall is None or wall.decision not in ("slower", "faster") or wall.decision == totals[0].decision:
        return ""
    word = "more" if wall.decision == "slower" else "less"
    more = f"{100 * abs(wall.change or 0.0):.0f} % {word} time"
    times = f"{(wall.a or 0.0) / 1e6:.3f} -> {(wall.b or 0.0) / 1e6:.3f} ms"
    return f"; on the clock a step took {more} ({times}): waits, data, other load"


def _of_total(total: ComparedTotal, like_load: bool, bases: tuple[str, str], alike_on_cpu: bool) -> str:
    if total.a is None or total.b is None or not total.a or not total.b:
        return "the time of a step is not known on both sides"
    a, b = (f"{value / 1e6:.3f}" for value in (total.a, total.b))
    of_a, of_b = (f"ms of {'device' if basis == 'device' else 'CPU'} time" for basis in bases)
    if of_a != of_b:
        return f"times are not judged, because they are of a CPU and of a device (a {a} {of_a} a step, b {b} {of_b})"
    times = f"{a} -> {b} {of_b} a step"
    if total.decision == "not judged":
        return f"not judged, because one side marks no steps ({times})"
    more = abs(total.change or 0.0)
    if total.decision == "no difference":
        return _no_difference(total, times, alike_on_cpu)
    if like_load:
        word = "more" if total.decision == "slower" else "less"
        return f"b took {100 * more:.0f} % {word} time, {LIKE_LOAD} ({times})"
    if total.decision == "slower" and more >= _MANY_TIMES:
        return f"b takes {1 + more:.1f} times as long ({times})"
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {100 * more:.1f} % {error} {total.decision} ({times})"


def decision_words(total: ComparedTotal) -> str:
    """`"slower"`; `"not certain"` where noise may hide a difference, or may have made the one that is shown."""
    if total.decision == "not judged":
        return ""
    uncertain = abs(total.change or 0.0) >= LEAST_CHANGE or (total.error is not None and total.error > SURE)
    return "not certain" if total.decision == "no difference" and uncertain else total.decision


def _no_difference(total: ComparedTotal, times: str, alike_on_cpu: bool) -> str:
    """Of a change that may be noise, that it is not certain: the numbers beside it may differ by much."""
    change, moved = percent(total.change, total.error), abs(total.change or 0.0)
    if decision_words(total) == "no difference":
        return f"no difference in all ({change}; {times})"
    if total.error is None:
        return f"no certain difference ({change}, noise not known; {times})"
    if alike_on_cpu and moved >= LEAST_CHANGE:
        more = f"{100 * moved:.0f} % {'more' if (total.change or 0.0) > 0 else 'less'} time"
        return f"no certain difference: {more} in common to all layers, {BY_LOAD} ({change}; {times})"
    return f"no certain difference of the whole step ({change}; {times})"


def _where(culprits: Sequence[Culprit], total: ComparedTotal, work: str) -> str:
    same_way = [one for one in culprits if (one.change_ns > 0) == (total.decision == "slower")]
    if not same_way:
        return "" if work else "and no layer stands out"
    first = same_way[0]
    share = min(first.share or 0.0, 1.0)
    if share < _LEAST_PART:
        return f"and no layer explains much of it (most, {100 * share:.0f} %: {place(first)})"
    return f"{100 * share:.0f} % of it in {place(first)}"


def _alone(culprits: Sequence[Culprit], common: float) -> str:
    """The first of them, and how many more; where it moved with all others, and less than they, with their change."""
    first = culprits[0]
    more = f", and {len(culprits) - 1} more changed" if len(culprits) > 1 else ""
    if first.change is None:
        return f"{place(first)} is only in {'b' if first.change_ns > 0 else 'a'}{more}"
    word = "slower" if first.change_ns > 0 else "faster"
    error = f" (±{100 * first.error:.1f})" if first.error is not None else ""
    amount = f"{100 * abs(first.change):.1f} %{error}"
    if first.change * first.change_ns < 0:
        less = "more" if first.change > 0 else "less"
        return f"{place(first)} took {amount} {less} time, the rest {100 * abs(common):.1f} % {less}{more}"
    return f"{place(first)} is {amount} {word}{more}"


def place(culprit: Culprit) -> str:
    """`layers.7.mlp backward`; what has no module goes by its phase."""
    return place_of(culprit.layer, culprit.phase)


def place_of(layer: str, phase: str | None) -> str:
    """The same of a layer's name and a phase."""
    return f"{layer} {(phase or '').replace('_', ' ')}".strip() or "code between calls"


def percent(change: float | None, error: float | None) -> str:
    """`+8.2 % ±1.1`; a change that is not known is `-`."""
    if change is None or not math.isfinite(change):
        return "-"
    return f"{100 * change:+.1f} %" + (f" ±{100 * error:.1f}" if error is not None else "")


# --------------------------------------------------------------------------------------------------
# What does other work on both sides, exactly: FLOPs, ops or device events, calls and memory kept, layer by layer.

_SAME_COUNT = 0.5  # per step: counts that are nearer are as good as equal
_SAME_BYTES = 0.01  # relative, of memory kept
_FEWEST_BYTES = 64 << 10
_MUCH = 0.05  # relative: a layer whose work changed so much has a reason to take another time

_Key = tuple[str, Phase | None]


def work_changes(pairs: Sequence[Pair], a: Side, b: Side) -> tuple[WorkChange, ...]:
    """Layers of both sides whose own work differs, the largest difference first; alike ones together.

    Nothing where one side marks no steps. Events and memory are told where both sides are of a device, or of a CPU.
    """
    if a.marked != b.marked:
        return ()
    members: dict[_Key, list[Pair]] = defaultdict(list)
    for pair in pairs:
        members[pair.layer, None if pair.layer else pair.phase].append(pair)
    alike: dict[tuple[object, ...], list[WorkChange]] = defaultdict(list)
    for (layer, phase), rows in members.items():
        change = _change(layer, phase, rows, a, b)
        if change is not None:
            pattern, _ = like_name(layer, rows[0].row.block)
            deltas = (change.flops_delta, round(change.events_delta), round(change.calls_delta))
            alike[pattern, phase, deltas].append(change)
    block = {pair.layer: pair.row.block for pair in pairs}
    found = [_together(changes, block) for changes in alike.values()]
    flops = max(1, *(sum(row.flops_per_step for row in side.analysis.flops) for side in (a, b)))
    events = max(1, *(sum(row.count for row in side.analysis.classes) / side.steps for side in (a, b)))
    return tuple(sorted(found, key=lambda one: -abs(one.flops_delta) / flops - abs(one.events_delta) / events))


def much_other_work(changes: Iterable[WorkChange]) -> frozenset[str]:
    """The layers among them with other time to be expected; "" stands for what has no layer and is left out."""
    return frozenset(
        layer
        for one in changes
        for layer in one.layers
        if layer
        and any(
            abs(delta) >= _MUCH * max(before or 0, 1)
            for delta, before in ((one.flops_delta, one.flops_a), (one.events_delta, one.events_a))
        )
    )


def _change(layer: str, phase: Phase | None, pairs: Sequence[Pair], a: Side, b: Side) -> WorkChange | None:
    """None where nothing changed, or one side does not have the layer."""
    rows_a = [pair.a for pair in pairs if pair.a is not None]
    rows_b = [pair.b for pair in pairs if pair.b is not None]
    if not rows_a or not rows_b:
        return None
    counted = bool(a.analysis.flops) and bool(b.analysis.flops)
    same_basis = a.analysis.time_basis == b.analysis.time_basis
    change = WorkChange(
        layer=layer,
        layers=(layer,),
        phase=phase,
        flops_a=_flops(rows_a) if counted else None,
        flops_b=_flops(rows_b) if counted else None,
        events_a=_events(rows_a, a.steps) if same_basis else None,
        events_b=_events(rows_b, b.steps) if same_basis else None,
        calls_a=_calls(rows_a, a.steps),
        calls_b=_calls(rows_b, b.steps),
        retained_a=sum_of_known(row.self_retained_bytes for row in rows_a) if same_basis else None,
        retained_b=sum_of_known(row.self_retained_bytes for row in rows_b) if same_basis else None,
    )
    kept = abs(change.retained_delta)
    other_memory = kept >= max(_FEWEST_BYTES, _SAME_BYTES * abs(change.retained_a or 0.0))
    counts = (change.events_delta, change.calls_delta)
    if not change.flops_delta and not other_memory and all(abs(delta) < _SAME_COUNT for delta in counts):
        return None
    return change


def _flops(rows: Sequence[LayerRow]) -> int | None:
    return sum_if_all_known(row.self_flops_per_step for row in rows)


def _events(rows: Sequence[LayerRow], steps: int) -> float | None:
    known = sum_if_all_known(row.self_events for row in rows)
    return None if known is None else known / steps


def _calls(rows: Sequence[LayerRow], steps: int) -> float | None:
    known = sum_of_known(row.calls for row in rows)
    return None if known is None else known / steps


def _together(changes: Sequence[WorkChange], block: dict[str, str | None]) -> WorkChange:
    first = changes[0]
    if len(changes) == 1:
        return first
    layers = tuple(layer for one in changes for layer in one.layers)
    return WorkChange(
        layer=folded_name({layer: block.get(layer) for layer in layers}),
        layers=layers,
        phase=first.phase,
        flops_a=sum_of_known(one.flops_a for one in changes),
        flops_b=sum_of_known(one.flops_b for one in changes),
        events_a=sum_of_known(one.events_a for one in changes),
        events_b=sum_of_known(one.events_b for one in changes),
        calls_a=sum_of_known(one.calls_a for one in changes),
        calls_b=sum_of_known(one.calls_b for one in changes),
        retained_a=sum_of_known(one.retained_a for one in changes),
        retained_b=sum_of_known(one.retained_b for one in changes),
    )


EVENTS = {"cpu": "ops", "device": "device events", "cpu / device": "ops / device events"}
EVENTS["device / cpu"] = "device events / ops"
_Backends = Mapping[tuple[str, Phase], tuple[str, ...]]


def compare(a: Analysis, b: Analysis, *, name_a: str = "a", name_b: str = "b") -> Comparison:
    """What is otherwise in `b` than in `a`.

    Nothing is dropped: self times of `rows` and `unattributed` add up to the total of each side, to the nanosecond.
    """
    side_a, side_b = side_of(a), side_of(b)
    paired = pair_rows(a, b)
    backends_a, backends_b = _backends(a), _backends(b)
    backend_changes = _backend_changes(paired.pairs, backends_a, backends_b)
    work = (
        work_changes(paired.pairs, side_a, side_b) if shared_time(paired.pairs, side_a, side_b) >= LEAST_SHARED else ()
    )
    other_attention = {layer for layers, _, _ in backend_changes for layer in layers}
    changes = time_changes(paired.pairs, side_a, side_b, much_other_work(work) | other_attention)
    total_delta_ns = side_b.total_ns - side_a.total_ns
    changed = changes.total.beyond_noise and total_delta_ns * changes.total.shift > 0
    decision = _decision(total_delta_ns, changed)
    if side_a.marked != side_b.marked or a.time_basis != b.time_basis:
        decision = "not judged"
    found = culprits(paired, changes, total_delta_ns if changed else None)
    different = differences(traits(a), traits(b))
    notes = tuple(_notes(side_a, side_b, changes))
    totals = tuple(_totals(side_a, side_b, paired.pairs, changes, decision))
    told_backends = tuple((folded_name(layers), one, other) for layers, one, other in backend_changes)
    told = math.isfinite(changes.total.mean_error) and changes.total.mean_error <= SURE
    sure = changes.known and (told if decision == "no difference" else explained(found, totals[0]) >= MOST_OF_IT)
    return Comparison(
        verdict=verdict_of(different, totals, changes, found, work, told_backends, (a.time_basis, b.time_basis)),
        decision=decision,
        confidence="high" if sure else "low",
        name_a=name_a,
        name_b=name_b,
        time_basis=b.time_basis,
        steps_a=side_a.steps,
        steps_b=side_b.steps,
        noise_known=changes.known,
        differences=different,
        notes=notes,
        totals=totals,
        culprits=found,
        work=work,
        rows=tuple(_row(pair, side_a, side_b, changes, backends_a, backends_b) for pair in paired.pairs),
        classes=_classes(a, b),
        unattributed=_reasons(a, b),
        backend_changes=told_backends,
        common=changes.left_out,
    )


def _decision(shift: float, beyond_noise: bool) -> Decision:
    if not beyond_noise:
        return "no difference"
    return "slower" if shift > 0 else "faster"


def _row(
    pair: Pair, side_a: Side, side_b: Side, changes: TimeChanges, backends_a: _Backends, backends_b: _Backends
) -> ComparedRow:
    row, unit = pair.row, changes.units.get(UnitKey((pair.layer,), pair.phase))
    mean_a, mean_b = (
        0.0 if own is None else own.time_ns / side.steps for own, side in ((pair.a, side_a), (pair.b, side_b))
    )
    same_basis = side_a.analysis.time_basis == side_b.analysis.time_basis
    change = mean_b / mean_a - 1 if mean_a and mean_b and same_basis else None
    decision: Decision = "not judged"
    if pair.a is None or pair.b is None:
        decision = "only in b" if pair.a is None else "only in a"
    elif unit is not None and unit.change is not None:
        decision = _decision(unit.delta_ns, unit.beyond_noise)
    return ComparedRow(
        layer=pair.layer,
        class_name=row.class_name,
        kind=row.kind,
        block=row.block,
        parent=row.parent,
        depth=row.depth,
        order=row.order,
        phase=pair.phase,
        a=None if pair.a is None else amounts(pair.a, backends_a.get((pair.a.layer, pair.phase), ())),
        b=None if pair.b is None else amounts(pair.b, backends_b.get((pair.b.layer, pair.phase), ())),
        change=change,
        error=None if unit is None else unit.error,
        decision=decision,
    )


def _totals(
    side_a: Side, side_b: Side, pairs: Sequence[Pair], changes: TimeChanges, decision: Decision
) -> Iterable[ComparedTotal]:
    """Of a step: its time first."""
    basis = " / ".join(dict.fromkeys((side_a.analysis.time_basis, side_b.analysis.time_basis)))
    yield ComparedTotal(
        name=f"{basis} time",
        unit="ns",
        a=side_a.total_ns,
        b=side_b.total_ns,
        change=side_b.total_ns / side_a.total_ns - 1 if decision != "not judged" and side_a.total_ns else None,
        error=_finite(changes.total.mean_error),
        decision=decision if side_a.total_ns and side_b.total_ns else "not judged",
    )
    yield _steps_on_the_clock(side_a, side_b)
    quantities: Sequence[tuple[str, Any, Callable[[Side], float | None]]] = (
        (PEAK, "bytes", lambda side: peak_bytes(side.analysis)),
        ("FLOPs", "flops", lambda side: flops_per_step(side.analysis)),
        (EVENTS[basis], "count", lambda side: sum(row.count for row in side.analysis.classes) / side.steps),
        ("synchronisations", "count", _synchronisations),
        ("unattributed", "share", lambda side: 1 - side.analysis.time.coverage),
        ("MFU", "share", lambda side: side.analysis.utilization.mfu if side.analysis.utilization is not None else None),
    )
    for name, unit, value_of in quantities:
        one, other = value_of(side_a), value_of(side_b)
        same_thing = unit not in ("count", "bytes") or basis in ("cpu", "device")
        change = other / one - 1 if one and other is not None and same_thing else None
        yield ComparedTotal(name=name, unit=unit, a=one, b=other, change=change)
        if name == "FLOPs" and None in (one, other) and side_a.analysis.flops and side_b.analysis.flops:
            yield _known_flops(pairs)


def _known_flops(pairs: Sequence[Pair]) -> ComparedTotal:
    """Of the layers whose own FLOPs are known on both sides."""
    one = other = 0
    for pair in pairs:
        before, after = (0 if row is None else row.self_flops_per_step for row in (pair.a, pair.b))
        if before is not None and after is not None:
            one, other = one + before, other + after
    change = other / one - 1 if one else None
    return ComparedTotal(name="FLOPs known on both sides", unit="flops", a=one, b=other, change=change)


def _steps_on_the_clock(side_a: Side, side_b: Side) -> ComparedTotal:
    """What a step takes, judged where it is known of several steps."""
    told, _ = _step_times(side_a.analysis, side_b.analysis)
    times_a, times_b = (np.array(times, dtype=np.float64) for times in told)
    same_basis = side_a.analysis.time_basis == side_b.analysis.time_basis
    enough = min(len(times_a), len(times_b)) >= FEWEST_STEPS and bool((times_a > 0).all() and (times_b > 0).all())
    change = series_change(times_a, times_b) if same_basis and enough else None
    one, other = _mean(times_a), _mean(times_b)
    return ComparedTotal(
        name=CLOCK,
        unit="ns",
        a=one,
        b=other,
        change=other / one - 1 if one and other is not None and same_basis else None,
        error=_finite(change.mean_error) if change else None,
        decision=_decision(change.shift, change.beyond_noise) if change else "not judged",
    )


def _step_times(a: Analysis, b: Analysis) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], bool]:
    """What the steps of `a` and of `b` took, end to end as in all reports; True where both are of the CPU alone.

    So it is where a side does not tell the end of a step on its devices: times of two kinds are not set side by side.
    """
    whole = step_times_ns(a), step_times_ns(b)
    on_cpu = _step_times_on_cpu(a), _step_times_on_cpu(b)
    alone = not all(whole) and all(on_cpu)
    return (on_cpu if alone else whole), alone


def _step_times_on_cpu(analysis: Analysis) -> tuple[int, ...]:
    return tuple(row.span_ns for row in analysis.steps if row.step is not None and row.span_ns is not None)


def _synchronisations(side: Side) -> float | None:
    if side.analysis.time_basis != "device":
        return None
    return sum(row.count for row in side.analysis.synchronisations) / side.steps


def flops_per_step(analysis: Analysis) -> int | None:
    """Of all that ran; None where none were counted, or some op tells none."""
    return sum(row.flops_per_step for row in analysis.flops) if analysis.flops and not analysis.uncounted else None


def peak_bytes(analysis: Analysis) -> int | None:
    """The highest allocated at any time; None where no allocation was recorded."""
    peak = analysis.memory.get("peak")
    whole = peak.get("allocated_bytes") if isinstance(peak, Mapping) else None
    known = [whole, *(row.peak_bytes for row in analysis.steps)]
    return max((int(size) for size in known if isinstance(size, (int, float))), default=None)


def _mean(values: Float) -> float | None:
    return float(values.mean()) if len(values) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _classes(a: Analysis, b: Analysis) -> tuple[ComparedClass, ...]:
    one, other = ({(row.class_name, row.phase): row for row in side.classes} for side in (a, b))
    rows = []
    for name, phase in dict.fromkeys((*other, *one)):
        before, after = one.get((name, phase)), other.get((name, phase))
        rows.append(
            ComparedClass(
                class_name=name,
                phase=phase,
                time_a_ns=before.time_ns if before is not None else 0,
                time_b_ns=after.time_ns if after is not None else 0,
                count_a=before.count if before is not None else 0,
                count_b=after.count if after is not None else 0,
                flops_per_step_a=before.flops_per_step if before is not None else None,
                flops_per_step_b=after.flops_per_step if after is not None else None,
            )
        )
    return tuple(rows)


def _reasons(a: Analysis, b: Analysis) -> tuple[ComparedReason, ...]:
    one, other = ({row.reason: row.time_ns for row in side.unattributed} for side in (a, b))
    return tuple(
        ComparedReason(reason=reason, time_a_ns=one.get(reason, 0), time_b_ns=other.get(reason, 0))
        for reason in dict.fromkeys((*other, *one))
    )


def _backends(analysis: Analysis) -> _Backends:
    """Backends of each layer's own attention, the one with most time first."""
    found: dict[tuple[str, Phase], list[tuple[int, str]]] = defaultdict(list)
    for row in analysis.attention:
        found[row.layer, row.phase].append((-row.time_ns, row.backend))
    return {key: tuple(backend for _, backend in sorted(backends)) for key, backends in found.items()}


def _backend_changes(
    pairs: Sequence[Pair], a: _Backends, b: _Backends
) -> tuple[tuple[Mapping[str, str | None], str, str], ...]:
    """Where attention runs otherwise, like layers together: each with its block."""

    def told(row: LayerRow | None, backends: _Backends) -> str:
        return "" if row is None else " + ".join(sorted(backends.get((row.layer, row.phase), ())))

    groups: dict[tuple[str, str, str], dict[str, str | None]] = defaultdict(dict)
    for pair in pairs:
        one, other = told(pair.a, a), told(pair.b, b)
        if one != other and pair.a is not None and pair.b is not None:
            pattern, _ = like_name(pair.layer, pair.row.block)
            groups[pattern, one or NO_BACKEND, other or NO_BACKEND][pair.layer] = pair.row.block
    return tuple((layers, one, other) for (_, one, other), layers in groups.items())


def _notes(side_a: Side, side_b: Side, changes: TimeChanges) -> Iterable[str]:
    few = [name for name, side in (("a", side_a), ("b", side_b)) if not side.known_steps or side.steps < FEWEST_STEPS]
    if few and not changes.known and side_a.analysis.time_basis == side_b.analysis.time_basis:
        who = f"{' and '.join(few)} {'has' if len(few) == 1 else 'have'} fewer than {FEWEST_STEPS} timed steps"
        least = f"{100 * LEAST_CHANGE_UNKNOWN:.0f} %"
        yield f"noise not known, because {who}: a change counts from {least} on, and beyond that of other layers"
    if side_a.marked != side_b.marked:
        yield f"{'b' if side_a.marked else 'a'} marks no steps: its times and counts are of all of it, not of one step"
    if _step_times(side_a.analysis, side_b.analysis)[1]:
        sides = zip("ab", (side_a, side_b), strict=True)
        silent = [name for name, side in sides if not step_times_ns(side.analysis)]
        who = f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'}"
        yield f"{CLOCK}: from begin to end on the CPU, because {who} not tell when a step's device events end"
    if changes.shared < LEAST_SHARED:
        yield f"only {100 * changes.shared:.0f} % of the time is in layers and phases that both have by name or class"
    if changes.common_beyond_noise:
        yield (
            f"all layers alike changed by {100 * changes.common:+.1f} %: software does that, but so do the clock, heat "
            "and other load of the machine"
        )
