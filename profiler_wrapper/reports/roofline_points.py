"""What the roofline plot shows, as numbers: parts of the model in each phase, and the roofs above them. No drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler_wrapper.analysis.model import Analysis, Bound, LayerRow, bound_of
from profiler_wrapper.analysis.numbered_names import split_number
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.analysis.roofline import peak_of
from profiler_wrapper.analysis.sums import sum_if_all_known
from profiler_wrapper.reports.describe import scaled, step_count, work_scale
from profiler_wrapper.reports.folding import Fold, LayerTotal, Tree, layer_totals
from profiler_wrapper.reports.plot_rows import short_names, shown_layers

_FEW_FLOPS = 0.01  # a type of number with a smaller share of the FLOPs has no roof of its own
_LEAST_TIME = 0.004  # of all points; shorter ones are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Like layers in one phase: all `.mlp` of a model's blocks in the backward. Of as many steps as the times are."""

    name: str
    kind: str
    phase: Phase
    time_ns: float
    flops: int | None  # without what a causal mask hides
    bytes_moved: int | None
    roof_ns: int | None
    bound: Bound | None

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte; None where either is not known or 0."""
        return self.flops / self.bytes_moved if self.flops and self.bytes_moved else None

    @property
    def flop_per_s(self) -> float | None:
        """None where it is not known or 0."""
        return self.flops / self.time_ns * 1e9 if self.flops and self.time_ns else None

    @property
    def of_roof(self) -> float | None:
        """The share of its time that it needs at the roof."""
        return self.roof_ns / self.time_ns if self.roof_ns and self.time_ns else None

    @property
    def why_no_roof(self) -> str:
        """What is not known of its work; `""` where all is."""
        if self.roof_ns is not None:
            return ""
        unknown = [name for name, value in (("FLOPs", self.flops), ("bytes", self.bytes_moved)) if value is None]
        return f"{' and '.join(unknown)} not told" if unknown else "no peak of its type"


@dataclass(frozen=True, slots=True)
class Roofline:
    """Points, the longest first, and the roofs: FLOP/s by type of number, the highest first, and bytes a second."""

    points: tuple[Point, ...]
    flops_per_s: dict[str, float]
    bytes_per_s: float | None
    source: str


def roofline(analysis: Analysis) -> Roofline:
    """The parts of the model: what blocks are made of, like ones together, and the layers beside the blocks."""
    rows: dict[tuple[Phase, str], list[LayerRow]] = defaultdict(list)
    for row in analysis.layers:
        rows[row.phase, row.layer].append(row)
    steps, scale = step_count(analysis), work_scale(analysis)
    points = []
    for part in _parts(layer_totals(analysis)):
        for phase in PHASES:
            of_part = [row for layer in part.layers for row in rows.get((phase, layer), ())]
            if any(row.self_time_ns if part.own else row.time_ns for row in of_part):
                points.append(_point(part.name, part.kind, of_part, steps, scale, own=part.own))
    points += [_point("optimizer", "optimizer", [row], steps, scale) for row in rows.get(("optimizer", ""), ())]
    total_ns = sum(point.time_ns for point in points)
    told = [point for point in points if point.time_ns > _LEAST_TIME * total_ns]
    peaks = analysis.utilization.peaks if analysis.utilization is not None else None
    return Roofline(
        points=tuple(sorted(told, key=lambda point: -point.time_ns)),
        flops_per_s={} if peaks is None else dict(_peaks_of_types(analysis)),
        bytes_per_s=None if peaks is None else peaks.bandwidth_bytes_per_s,
        source="" if peaks is None else peaks.source,
    )


def _peaks_of_types(analysis: Analysis) -> Iterable[tuple[str, float]]:
    """FLOP/s of the types that most of the FLOPs are of, the highest first."""
    assert analysis.utilization is not None
    assert analysis.utilization.peaks is not None
    flops: dict[str, int] = defaultdict(int)
    for row in analysis.flops:
        flops[row.dtype] += row.flops_per_step
    least = _FEW_FLOPS * sum(flops.values())
    used = {dtype: peak_of(analysis.utilization.peaks, dtype) for dtype, number in flops.items() if number > least}
    return sorted(((dtype, peak) for dtype, peak in used.items() if peak), key=lambda entry: -entry[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Like layers under one name; `own`: without the layers below them."""

    name: str
    kind: str
    layers: frozenset[str]
    own: bool = False


def _parts(totals: Sequence[LayerTotal]) -> list[_Part]:
    """Parts beside one another, which together hold every layer below the roots but the blocks' own work."""
    tree = Tree(totals)
    blocks: dict[str, list[LayerTotal]] = defaultdict(list)
    others: dict[tuple[str, str], list[LayerTotal]] = defaultdict(list)
    shown = shown_layers(totals)
    for total in shown:
        if total.kind == "block":
            blocks[total.class_name].append(total)
        else:
            others[split_number(total.layer)[0], total.class_name].append(total)
    parts: list[_Part] = []
    for class_name, members in blocks.items():
        of = f" of {class_name}" if len(blocks) > 1 else ""
        for fold in _inside(tree, _fold(members)):
            parts += _divided(tree, fold, f"{fold.label.lstrip('.')}{of}")
    names = dict(zip((total.layer for total in shown), short_names([total.layer for total in shown]), strict=True))
    for members in others.values():
        name = names[members[0].layer] if len(members) == 1 else f"{members[0].class_name} x{len(members)}"
        parts.append(_part(name, members))
    return parts


def _inside(tree: Tree, fold: Fold) -> list[Fold]:
    """What is below a fold; what holds nothing but one layer is passed over."""
    inside = tree.children(fold)
    while len(inside) == 1 and (below := tree.children(inside[0])):
        inside = below
    return inside or [fold]


def _divided(tree: Tree, fold: Fold, name: str) -> list[_Part]:
    """A part of a block: its layers, those of one class together, and what it does itself."""
    by_class: dict[str, list[Fold]] = defaultdict(list)
    for below in tree.children(fold):
        by_class[below.members[0].class_name].append(below)
    kind = fold.members[0].kind
    if not by_class:
        return [_part(name, fold.members)]
    parts = [_Part(name=f"{name} itself", kind=kind, layers=frozenset(m.layer for m in fold.members), own=True)]
    for class_name, folds in by_class.items():
        members = [member for below in folds for member in below.members]
        each = round(len(members) / len(fold.members))
        label = f"{name}{folds[0].label}" if len(folds) == 1 else f"{name}: {each} {class_name}"
        parts.append(_part(label, members, kind=kind if members[0].kind == "other" else members[0].kind))
    return parts


def _part(name: str, members: Sequence[LayerTotal], *, kind: str = "") -> _Part:
    return _Part(name=name, kind=kind or members[0].kind, layers=frozenset(member.layer for member in members))


def _fold(members: Sequence[LayerTotal]) -> Fold:
    return Fold(members[0].class_name, tuple(members), tuple(member.layer for member in members), numbered=True)


def _point(
    name: str, kind: str, rows: Sequence[LayerRow], steps: int, scale: int | None, *, own: bool = False
) -> Point:
    prefix = "self_" if own else ""

    def work(what: str) -> int | None:
        return scaled(sum_if_all_known(getattr(row, f"{prefix}{what}") for row in rows), scale)

    roof_ns = work("roof_time_per_step_ns")
    spent_ns = sum(row.self_time_ns if own else row.time_ns - row.communication_ns for row in rows)
    return Point(
        name=name,
        kind=kind,
        phase=rows[0].phase,
        time_ns=spent_ns / steps,
        flops=work("causal_flops_per_step"),
        bytes_moved=work("bytes_moved_per_step"),
        roof_ns=roof_ns,
        bound=bound_of(roof_ns, work("memory_roof_time_per_step_ns")),
    )
