"""What explains a change: from the whole model down to the layers that it is in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from profiler_wrapper.analysis.compare_model import Culprit
from profiler_wrapper.analysis.compare_names import folded_name
from profiler_wrapper.analysis.compare_sides import Paired
from profiler_wrapper.analysis.compare_times import TimeChanges, UnitChange, UnitKey, folds
from profiler_wrapper.analysis.phase import Phase

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
