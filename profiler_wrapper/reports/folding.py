"""The layer tree with like siblings folded into one: plain data, which the tables draw.

`layers.0` to `layers.31` become one `Fold`, and below it the 32 `self_attn` become one. What
differs much from its siblings is named as an outlier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.columns import Values, layer_values, phase_times, summed
from profiler_wrapper.reports.describe import step_count
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.tables.statistics import FEWEST_VALUES, fill_numbers, outliers, split_number
from profiler_wrapper.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTotal:
    """One layer with its phases side by side."""

    layer: str
    class_name: str
    kind: str
    parent: str | None  # a layer that has a row, else None
    order: int
    flags: tuple[str, ...]
    values: Values  # sums over the timed trace
    typical_ns: float | None = None  # of its median step; None where steps are not known

    @property
    def time_ns(self) -> int:
        return int(self.values["time"])


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
    def values(self) -> Values:
        """The members together, as if they were one layer."""
        return summed([member.values for member in self.members])

    @property
    def time_ns(self) -> int:
        return int(self.values["time"])

    @property
    def order(self) -> int:
        return min(member.order for member in self.members)


def layer_totals(analysis: Analysis, *, own: bool = False) -> list[LayerTotal]:
    """Return one entry per layer with a name, in model order; `own`: each without the layers below it."""
    by_layer: dict[str, list[LayerRow]] = defaultdict(list)
    for row in analysis.layers:
        if row.layer:
            by_layer[row.layer].append(row)
    parents = _parents(by_layer)
    totals = [_layer_total(rows, parents[layer], own) for layer, rows in by_layer.items()]
    return sorted(totals, key=lambda total: total.order)


def _layer_total(rows: Sequence[LayerRow], parent: str | None, own: bool) -> LayerTotal:
    first, values = rows[0], layer_values(rows, own=own)
    flags = [name for name in ("compiled", "shared", "graph") if any(getattr(row, name) for row in rows)]
    if values.get("fused") and not values["time"]:  # all its kernels are other layers' as well: none of it is its own
        flags.append("fused")
    steps = [row.step_times_ns for row in rows if not own]
    known = bool(steps) and all(steps) and len(set(map(len, steps))) == 1
    return LayerTotal(
        layer=first.layer,
        class_name=first.class_name,
        kind=first.kind,
        parent=parent,
        order=first.order,
        flags=tuple(flags),
        values=values,
        typical_ns=median(map(sum, zip(*steps, strict=True))) if known else None,
    )


def _parents(by_layer: Mapping[str, Sequence[LayerRow]]) -> dict[str, str | None]:
    """Find the nearest layer above each that has a row itself; no layer is above itself."""
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
        """Return the layers directly below any member of `fold`, like ones folded."""
        named = [
            (relative_name(child.layer, member.layer), child)
            for member in fold.members
            for child in self._children.get(member.layer, ())
        ]
        return _folds(named, below_fold=len(fold.members) > 1)


def relative_name(layer: str, parent: str) -> str:
    """Return the name of a layer below another one."""
    return layer[len(parent) + 1 :] if layer.startswith(parent + ".") else layer


def _folds(named: Sequence[tuple[str, LayerTotal]], *, below_fold: bool) -> list[Fold]:
    """Fold `named` (relative name and layer): those of one class whose names differ in their last number are one."""
    groups: dict[tuple[str, str], list[tuple[str, LayerTotal]]] = defaultdict(list)
    for name, total in named:
        groups[split_number(name)[0], total.class_name].append((name, total))
    folds: list[Fold] = []
    dot = "." if below_fold else ""
    for (pattern, _), entries in groups.items():
        by_name: dict[str, list[LayerTotal]] = defaultdict(list)
        for name, total in entries:
            by_name[name].append(total)
        if len(by_name) >= FEWEST_VALUES:
            label = fill_numbers(pattern, {number for name in by_name if (number := split_number(name)[1]) is not None})
            names, members = zip(*entries, strict=True)
            folds.append(Fold(dot + label, members, names, numbered=True))
        else:
            for name, same in by_name.items():
                folds.append(Fold(dot + name, tuple(same), (name,) * len(same), numbered=False))
    return _tell_apart(folds)


def _tell_apart(folds: list[Fold]) -> list[Fold]:
    """Add the class to labels that are equal, or that a number alone tells apart from those of another class:

    `.mlp` of dense and of expert blocks, `layer.0` and `layer.1` of T5, attention and feed-forward.
    """
    counts = Counter(fold.label for fold in folds)
    classes: dict[str, set[str]] = defaultdict(set)
    for fold in folds:
        classes[split_number(fold.relative[0])[0]].add(fold.members[0].class_name)
    labelled: list[Fold] = []
    for fold in folds:
        beside = classes[split_number(fold.relative[0])[0]]
        if counts[fold.label] > 1 or (len(beside) > 1 and not fold.numbered):
            fold = replace(fold, label=f"{fold.label} ({fold.members[0].class_name})")
        labelled.append(fold)
    return labelled


def outlying_layers(fold: Fold) -> list[Outlier]:
    """Return members whose time or retained memory is over 20 % and 5 robust deviations off the median, worst first."""
    # Median steps decide, so that one step that was held up makes no outlier; how far off, the times in the rows say.
    typical = [member.typical_ns for member in fold.members if member.typical_ns is not None]
    times = [member.time_ns for member in fold.members]
    center, far_ones = median(times), outliers(typical if len(typical) == len(times) else times)
    far = [Outlier(fold.members[i], "time", times[i] / center - 1) for i in far_ones]
    retained = [member.values["retained"] for member in fold.members]
    known = [size for size in retained if size is not None]
    if len(known) == len(retained):
        named = {one.layer.layer for one in far}
        more = outliers(known).items()
        far += [Outlier(fold.members[i], "retained", e) for i, e in more if fold.members[i].layer not in named]
    return sorted(far, key=lambda one: -abs(one.excess))


def sibling_folds(totals: Sequence[LayerTotal]) -> list[tuple[str | None, Fold]]:
    """Return siblings that the printed table folds into one row, such as `layers.{0..31}`, with their parent."""
    tree = Tree(totals)
    folds: list[tuple[str | None, Fold]] = [(None, fold) for fold in tree.roots()]
    for total in totals:
        alone = Fold(total.layer, (total,), (total.layer,), numbered=False)
        folds += [(total.layer, fold) for fold in tree.children(alone)]
    return [(parent, fold) for parent, fold in folds if fold.numbered]


def attention_by_layer(analysis: Analysis, parents: Mapping[str, str | None]) -> dict[str, Counter[str]]:
    """Sum attention's time by layer and backend, in ns, with the layers below; without `parents` each one's own.

    An older version's rows do not tell it: there it counts in all above a layer in `parents`.
    """
    times: dict[str, Counter[str]] = defaultdict(Counter)
    for one in analysis.layers if parents else ():
        times[one.layer].update(one.attention_by_backend_ns)
    for row in () if any(times.values()) else analysis.attention:
        layer: str | None = row.layer
        while layer:
            times[layer][row.backend] += row.time_ns
            layer = parents.get(layer)
    return times


def own_communication(analysis: Analysis) -> Counter[tuple[str | None, Phase]]:
    """Sum communication's time by innermost layer and phase, in nanoseconds."""
    times = Counter[tuple[str | None, Phase]]()
    for row in analysis.collectives:
        times[row.layer, row.phase] += row.time_ns
    return times


# --- The layers that the plots show, side by side: in ms per step and MiB ---

NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class LayerBar:
    """One layer of the plots; times in ms per step."""

    layer: str
    block: bool  # one of the repeated blocks
    times_ms: Mapping[Phase, float]
    attention_ms: Mapping[str, float]  # by backend
    entry_mib: float | None
    exit_mib: float | None
    reserved_mib: float | None
    peak_mib: float | None
    retained_mib: float | None

    @property
    def time_ms(self) -> float:
        return sum(self.times_ms.values())


def shown_layers(totals: Sequence[LayerTotal]) -> list[LayerTotal]:
    """Return layers beside one another that together hold all below the roots, in model order.

    The outermost blocks and what stands beside them or beside what holds them (embedding, norm,
    head); without blocks the layers below the first one that has several.
    """
    below: dict[str | None, list[LayerTotal]] = defaultdict(list)
    for total in totals:
        below[total.parent].append(total)

    def outermost(total: LayerTotal) -> list[LayerTotal]:
        """Return the blocks of a layer that holds some, and what is beside them; else the layer."""
        parts = [part for child in below.get(total.layer, ()) for part in outermost(child)]
        holds_blocks = total.kind != "block" and any(part.kind == "block" for part in parts)
        return parts if holds_blocks else [total]

    shown = [part for root in below[None] for part in outermost(root)]
    if not any(total.kind == "block" and total.parent is not None for total in totals):
        while len(shown) == 1 and below.get(shown[0].layer):
            shown = below[shown[0].layer]
    return sorted(shown, key=lambda total: total.order)


def layer_bars(analysis: Analysis) -> list[LayerBar]:
    """Return one bar per layer of `shown_layers`; a shared layer has all its calls: rows do not tell who made which."""
    totals = layer_totals(analysis)
    shown = shown_layers(totals)
    attention = attention_by_layer(analysis, {total.layer: total.parent for total in totals})
    per_ms = step_count(analysis) * NS_PER_MS
    return [
        LayerBar(
            layer=total.layer,
            block=total.kind == "block",
            times_ms={phase: time_ns / per_ms for phase, time_ns in phase_times(total.values).items()},
            attention_ms={name: time_ns / per_ms for name, time_ns in attention.get(total.layer, {}).items()},
            entry_mib=_mib(total.values["entry"]),
            exit_mib=_mib(total.values["exit"]),
            reserved_mib=_mib(total.values["reserved"] or None),  # a CPU has no reserved memory, and says 0
            peak_mib=_mib(total.values["peak"]),
            retained_mib=_mib(total.values["retained"]),
        )
        for total in shown
    ]


def rest_bars(analysis: Analysis, bars: Sequence[LayerBar]) -> dict[str, float]:
    """Return what is in none of `bars`, in ms per step: the optimizer and the rest, with which they are the total."""
    steps = step_count(analysis)
    optimizer_ns = sum(row.time_ns for row in analysis.layers if not row.layer and row.phase == "optimizer")
    optimizer = optimizer_ns / steps / NS_PER_MS
    rest = analysis.time.total_ns / steps / NS_PER_MS - optimizer - sum(bar.time_ms for bar in bars)
    return {name: time_ms for name, time_ms in (("optimizer", optimizer), (_OUTSIDE, rest)) if time_ms >= _LEAST_REST}


_OUTSIDE = "outside these layers"  # own code of those above them, and what no layer has
_LEAST_REST = 0.0005  # ms: what is less is 0.000


def _mib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB
