"""The layer tree with like siblings folded into one: plain data, which the tables draw.

`layers.0` to `layers.31` become one `Fold`, and below it the 32 `self_attn` become one. What
differs much from its siblings is named as an outlier.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Generic, Literal, TypeVar

from profiler_wrapper.analysis.model import FORWARD_PHASES, Analysis, LayerRow, Phase
from profiler_wrapper.analysis.statistics import (
    FEWEST_VALUES,
    fill_numbers,
    outliers,
    split_number,
    sum_if_all_known,
    sum_of_known,
)

FEWEST_FOLDED = FEWEST_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTotal:
    """One layer with its phases side by side; times are sums over the timed trace."""

    layer: str
    class_name: str
    kind: str
    block: str | None
    parent: str | None  # a layer that has a row, else None
    order: int
    phases_ns: Mapping[Phase, int]
    attention_ns: int
    communication_ns: int
    fused_ns: int
    flops_per_step: int | None
    known_flops_per_step: int | None  # at least so many
    roof_time_per_step_ns: int | None
    memory_roof_time_per_step_ns: int | None  # of it, in ops that bytes bound
    calls: int | None
    retained_bytes: float | None
    peak_bytes: int | None
    shared: bool
    compiled: bool
    graph: bool

    @property
    def time_ns(self) -> int:
        return sum(self.phases_ns.values())

    @property
    def only_fused(self) -> bool:
        """Whether all kernels of this layer are other layers' as well, so that none of their time is its own."""
        return bool(self.fused_ns and not self.time_ns)


@dataclass(frozen=True)
class Outlier:
    """A layer whose time or retained memory is far from the median of its siblings."""

    layer: LayerTotal
    what: str  # "time" or "retained"
    excess: float  # 0.97: 97 % above the median


@dataclass(frozen=True)
class Fold:
    """Like layers as one row: one of them, or many whose names differ in a number."""

    label: str  # the name below its parent
    members: tuple[LayerTotal, ...]
    relative: tuple[str, ...]  # the members' names below their parents
    numbered: bool  # many siblings under one name such as `layers.{0..31}`

    @cached_property
    def whole(self) -> LayerTotal:
        """The members together, as if they were one layer."""
        phases: dict[Phase, int] = defaultdict(int)
        for member in self.members:
            for phase, time_ns in member.phases_ns.items():
                phases[phase] += time_ns
        return replace(
            self.members[0],
            order=min(member.order for member in self.members),
            phases_ns=dict(phases),
            calls=sum_of_known(member.calls for member in self.members),
            retained_bytes=sum_of_known(member.retained_bytes for member in self.members),
            **_sums(self.members),
        )

    @cached_property
    def time_ns(self) -> int:
        return self.whole.time_ns


# Fields of layers that are summed, over phases and over sibling layers; of work one unknown part makes all unknown.
_TIMES = ("attention_ns", "communication_ns", "fused_ns")
_WORK = ("flops_per_step", "known_flops_per_step", "roof_time_per_step_ns", "memory_roof_time_per_step_ns")


def _sums(rows: Sequence[LayerRow] | Sequence[LayerTotal]) -> dict[str, Any]:
    return {
        **{name: sum(getattr(row, name) for row in rows) for name in _TIMES},
        **{name: sum_if_all_known(getattr(row, name) for row in rows) for name in _WORK},
        "peak_bytes": max((row.peak_bytes for row in rows if row.peak_bytes is not None), default=None),
    }


def layer_totals(analysis: Analysis) -> list[LayerTotal]:
    """One entry per layer with a name, in model order."""
    by_layer: dict[str, list[LayerRow]] = defaultdict(list)
    for row in analysis.layers:
        if row.layer:
            by_layer[row.layer].append(row)
    parents = _parents(by_layer)
    totals = [_layer_total(layer, rows, parents[layer]) for layer, rows in by_layer.items()]
    return sorted(totals, key=lambda total: total.order)


def _layer_total(layer: str, rows: Sequence[LayerRow], parent: str | None) -> LayerTotal:
    first = rows[0]
    forward = [row for row in rows if row.phase in FORWARD_PHASES]
    phases: dict[Phase, int] = defaultdict(int)
    for row in rows:
        phases[row.phase] += row.time_ns
    retained = [row.retained_bytes for row in forward if row.retained_bytes is not None]
    return LayerTotal(
        layer=layer,
        class_name=first.class_name,
        kind=first.kind,
        block=first.block,
        parent=parent,
        order=first.order,
        phases_ns=dict(phases),
        calls=sum_of_known(row.calls for row in forward),
        retained_bytes=max(retained, default=None),
        shared=any(row.shared for row in rows),
        compiled=any(row.compiled for row in rows),
        graph=any(row.graph for row in rows),
        **_sums(rows),
    )


def _parents(by_layer: Mapping[str, Sequence[LayerRow]]) -> dict[str, str | None]:
    """The nearest layer above each that has a row itself; nobody is above itself."""
    parents: dict[str, str | None] = {}
    for layer, rows in by_layer.items():
        parent = rows[0].parent
        while parent and parent not in by_layer:
            parent = parent.rpartition(".")[0] or None
        parents[layer] = parent or None
    for layer in by_layer:
        seen, above = {layer}, parents[layer]
        while above is not None and above not in seen:
            seen.add(above)
            above = parents[above]
        if above is not None:  # a ring, as only a damaged file has
            parents[layer] = None
    return parents


class Tree:
    """Folds and what is below them, worked out when asked for."""

    def __init__(self, totals: Sequence[LayerTotal]) -> None:
        self._children: dict[str | None, list[LayerTotal]] = defaultdict(list)
        for total in totals:
            self._children[total.parent].append(total)

    def roots(self) -> list[Fold]:
        return _folds([(total.layer, total) for total in self._children[None]], below_fold=False)

    def children(self, fold: Fold) -> list[Fold]:
        """The layers directly below any member of `fold`, like ones folded."""
        named = [
            (_relative(child.layer, member.layer), child)
            for member in fold.members
            for child in self._children.get(member.layer, ())
        ]
        return _folds(named, below_fold=len(fold.members) > 1)


def _relative(layer: str, parent: str) -> str:
    return layer[len(parent) + 1 :] if layer.startswith(parent + ".") else layer


def _folds(named: Sequence[tuple[str, LayerTotal]], *, below_fold: bool) -> list[Fold]:
    """`named` (relative name and layer) as folds: those of one class whose names differ in their last number."""
    groups: dict[tuple[str, str], list[tuple[str, LayerTotal]]] = defaultdict(list)
    for name, total in named:
        groups[_pattern(name), total.class_name].append((name, total))
    folds: list[Fold] = []
    dot = "." if below_fold else ""
    for (pattern, _), entries in groups.items():
        by_name: dict[str, list[LayerTotal]] = defaultdict(list)
        for name, total in entries:
            by_name[name].append(total)
        if len(by_name) >= FEWEST_FOLDED:
            label = fill_numbers(pattern, {number for name in by_name if (number := split_number(name)[1]) is not None})
            names, members = zip(*entries, strict=True)
            folds.append(Fold(dot + label, members, names, numbered=True))
        else:
            for name, same in by_name.items():
                folds.append(Fold(dot + name, tuple(same), (name,) * len(same), numbered=False))
    return _tell_apart(folds)


def _pattern(name: str) -> str:
    return split_number(name)[0]


def _tell_apart(folds: list[Fold]) -> list[Fold]:
    """Adds the class to labels that are equal, or that a number alone tells apart from those of another class:

    `.mlp` of dense and of expert blocks, `layer.0` and `layer.1` of T5, attention and feed-forward.
    """
    counts: dict[str, int] = defaultdict(int)
    classes: dict[str, set[str]] = defaultdict(set)
    for fold in folds:
        counts[fold.label] += 1
        classes[_pattern(fold.relative[0])].add(fold.members[0].class_name)
    labelled: list[Fold] = []
    for fold in folds:
        beside = classes[_pattern(fold.relative[0])]
        if counts[fold.label] > 1 or (len(beside) > 1 and not fold.numbered):
            fold = replace(fold, label=f"{fold.label} ({fold.members[0].class_name})")
        labelled.append(fold)
    return labelled


def outlying_layers(fold: Fold) -> list[Outlier]:
    """Members whose time or retained memory is over 20 % and 5 robust deviations off the median, worst first."""
    times = [float(member.time_ns) for member in fold.members]
    far = [Outlier(fold.members[i], "time", excess) for i, excess in outliers(times).items()]
    retained = [member.retained_bytes for member in fold.members]
    known = [size for size in retained if size is not None]
    if len(known) == len(retained):
        named = {one.layer.layer for one in far}
        more = outliers(known).items()
        far += [Outlier(fold.members[i], "retained", e) for i, e in more if fold.members[i].layer not in named]
    return sorted(far, key=lambda one: -abs(one.excess))


# --------------------------------------------------------------------------------------------------
# Which folds of a layer tree get a row where there is only room for some: the most expensive, each below its parent.

Order = Literal["cost", "model"]
Extra = TypeVar("Extra")


@dataclass(eq=False)
class Shown(Generic[Extra]):
    """A fold that got a row, further rows that belong to it, and the folds below that got one."""

    fold: Fold
    depth: int
    parent: Shown[Extra] | None = None
    extras: list[Extra] = field(default_factory=list)
    children: list[Shown[Extra]] = field(default_factory=list)

    @property
    def inside_fold(self) -> bool:
        """Whether it stands for a part of many layers."""
        return self.parent is not None and len(self.parent.fold.members) > 1

    def walk(self) -> Iterator[Shown[Extra]]:
        """Itself and all below it."""
        stack = [self]
        while stack:
            this = stack.pop()
            yield this
            stack += this.children


def choose(
    tree: Tree, *, most: int, extras: Callable[[Shown[Extra]], list[Extra]]
) -> tuple[list[Shown[Extra]], list[Fold]]:
    """The roots with what is shown below them, in at most `most` rows; and the roots that do not fit.

    Those need one row together, which is counted. `extras` gives the further rows of a numbered
    fold; as many as fit are kept.
    """
    roots = sorted(tree.roots(), key=lambda fold: -fold.time_ns)
    fitting = roots if len(roots) <= most else roots[: max(0, most - 1)]
    rest = roots[len(fitting) :]
    room = most - len(fitting) - bool(rest)
    number = count()
    shown = [Shown[Extra](root, 0) for root in fitting]
    waiting = [(-one.fold.time_ns, next(number), one) for one in shown]
    heapq.heapify(waiting)
    while waiting:
        _, _, one = heapq.heappop(waiting)
        if one.parent is not None:
            if room < 1:
                break
            room -= 1
            one.parent.children.append(one)
        if one.fold.numbered and not one.inside_fold:
            one.extras = extras(one)[:room]
            room -= len(one.extras)
        if room > 0:
            for fold in tree.children(one.fold):
                below = Shown(fold, one.depth + 1, parent=one)
                heapq.heappush(waiting, (-fold.time_ns, next(number), below))
    return shown, rest


def in_order(shown: Sequence[Shown[Extra]], order: Order) -> list[Shown[Extra]]:
    """Siblings as they are drawn: the most expensive first, or as in the model."""
    if order == "model":
        return sorted(shown, key=lambda one: one.fold.whole.order)
    return sorted(shown, key=lambda one: (-one.fold.time_ns, one.fold.whole.order))


# --------------------------------------------------------------------------------------------------
# Which layers stand above and beside which, for the layer table of the page: parents, and like siblings as one.


def parents_of_layers(analysis: Analysis) -> dict[str, str]:
    """The layer with a row above each that has one."""
    return {total.layer: total.parent for total in layer_totals(analysis) if total.parent is not None}


def layer_groups(analysis: Analysis) -> list[dict[str, Any]]:
    """Siblings that the text table folds into one row, such as `layers.{0..31}`, with the outliers named.

    Siblings of one parent each: those of other parents are other groups.
    """
    totals = layer_totals(analysis)
    tree = Tree(totals)
    folds: list[tuple[str | None, Fold]] = [(None, fold) for fold in tree.roots()]
    for total in totals:
        alone = Fold(total.layer, (total,), (total.layer,), numbered=False)
        folds += [(total.layer, fold) for fold in tree.children(alone)]
    return [
        {
            "label": fold.label,
            "parent": parent,
            "layers": [member.layer for member in fold.members],
            "odd": [
                {"layer": one.layer.layer, "what": one.what, "excess": one.excess} for one in outlying_layers(fold)
            ],
        }
        for parent, fold in folds
        if fold.numbered
    ]
