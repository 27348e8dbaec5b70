"""The rows of the printed layer table: which layers fit, and what each row says. Numbers, no drawing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, PHASES, Analysis, LayerRow, Phase
from profiler_wrapper.analysis.statistics import sum_if_all_known, sum_of_known
from profiler_wrapper.reports.describe import scaled, step_count, step_numbers, work_scale
from profiler_wrapper.reports.folding import (
    Fold,
    LayerTotal,
    Order,
    Outlier,
    Shown,
    Tree,
    choose,
    in_order,
    layer_totals,
    outlying_layers,
)

RowKind = Literal["layer", "median", "odd", "outside", "unattributed", "total"]

MOST_OUTLIERS = 3
_FEWEST_OUTSIDE = 3  # rows for what is in no layer, so that the optimizer keeps its own
_NEARLY_ALL = 0.9
_TRIFLE = 0.01  # of the time: what is not told of so little leaves the total known
ACCUMULATION = "acc. grad"
# Of what stands in a row of sibling layers, their median.
_WITH_MEDIAN = (
    "total_ns", "attention_ns", "communication_ns", "flops", "known_flops", "roof_ns", "memory_roof_ns", "calls",
    "retained_bytes",
)  # fmt: skip
_ALONE: tuple[Phase, ...] = ("optimizer", "other")  # which layers seldom have: beside the total, no column is needed


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row. Times are nanoseconds per step."""

    kind: RowKind
    label: str
    depth: int
    times_ns: Mapping[Phase, float]
    total_ns: float
    attention_ns: float = 0
    communication_ns: float = 0
    flops: float | None = None  # as many steps as the times; None also where steps are not alike
    known_flops: float | None = None  # so too: at least so many, where an op inside tells none
    roof_ns: float | None = None  # so too: time at the roof
    memory_roof_ns: float | None = None  # of it, in ops that bytes bound
    calls: float | None = None  # per step
    retained_bytes: float | None = None
    peak_bytes: float | None = None
    before: str = ""  # said before and after the label, never shortened
    after: str = ""
    range_ns: tuple[float, float] | None = None  # of a median: the least and the most total


@dataclass(frozen=True)
class TableRows:
    """The rows of a table and how many layers have none in it."""

    rows: list[TableRow]
    hidden_layers: int


class _Steps:
    """Sums over the timed trace as values per step."""

    def __init__(self, analysis: Analysis) -> None:
        self._steps = step_count(analysis)
        self._work_scale = work_scale(analysis)

    def times(self, phases_ns: Mapping[Phase, int]) -> dict[Phase, float]:
        return {phase: time_ns / self._steps for phase, time_ns in phases_ns.items()}

    def of(self, value: float) -> float:
        return value / self._steps

    def work(self, per_step: int | None) -> int | None:
        return scaled(per_step, self._work_scale)

    def amounts(self, row: LayerRow | LayerTotal) -> dict[str, Any]:
        """Time and work of a row."""
        return {
            "total_ns": self.of(row.time_ns),
            "attention_ns": self.of(row.attention_ns),
            "communication_ns": self.of(row.communication_ns),
            "flops": self.work(row.flops_per_step),
            "known_flops": self.work(row.known_flops_per_step),
            "roof_ns": self.work(row.roof_time_per_step_ns),
            "memory_roof_ns": self.work(row.memory_roof_time_per_step_ns),
        }

    def layer(self, total: LayerTotal, kind: RowKind, label: str = "", depth: int = 0, **more: Any) -> TableRow:
        """The row of a layer, or of many together."""
        return TableRow(
            kind=kind,
            label=label,
            depth=depth,
            times_ns=self.times(total.phases_ns),
            calls=None if total.calls is None else self.of(total.calls),
            retained_bytes=total.retained_bytes,
            peak_bytes=total.peak_bytes,
            **self.amounts(total),
            **more,
        )


def table_rows(analysis: Analysis, *, most: int, order: Order = "cost") -> TableRows:
    """At most `most` rows: layers, what is outside all layers, `(unattributed)` and the total.

    Rows without indentation add up to the total; the most expensive layers of the tree are chosen, each
    below its parent.
    """
    steps = _Steps(analysis)
    few = max(1, (most - 6) // 5)
    outside = _merged(_outside_rows(analysis, steps), max(few, _FEWEST_OUTSIDE), "other work outside layers")
    unattributed = _merged(_unattributed_rows(analysis, steps), few, "(unattributed) other reasons")
    totals = layer_totals(analysis)
    shown, rest = choose(
        Tree(totals), most=most - 1 - len(outside) - len(unattributed), extras=lambda one: _extras(one, steps)
    )
    rows = [row for root in in_order(shown, order) for row in _rows_below(root, order, steps)]
    if rest:
        rows.append(_sum_row("layer", f"({len(rest)} more roots)", [steps.layer(fold.whole, "layer") for fold in rest]))
    visible = sum(len(one.fold.members) for root in shown for one in root.walk())
    rows += [*outside, *unattributed, _total_row(analysis, steps, totals)]
    return TableRows(rows, len(totals) - visible)


def phase_columns(rows: Sequence[TableRow]) -> list[tuple[Phase, str]]:
    """The phases that have a column, with its title."""
    used = {phase for row in rows for phase, time_ns in row.times_ns.items() if time_ns}
    of_layers = {phase for row in rows if row.kind == "layer" for phase, time_ns in row.times_ns.items() if time_ns}
    shown = (phase for phase in PHASES if phase in (of_layers if phase in _ALONE else used))
    return [(phase, ACCUMULATION if phase == "accumulate_grad" else phase) for phase in shown]


def _extras(one: Shown[TableRow], steps: _Steps) -> list[TableRow]:
    """Below a fold: what one of them takes, and the outliers."""
    return [_median_row(one, steps), *_outlier_rows(one, steps)]


def _median_row(one: Shown[TableRow], steps: _Steps) -> TableRow:
    rows = [steps.layer(member, "median") for member in one.fold.members]
    totals = [row.total_ns for row in rows]
    phases = {phase for row in rows for phase in row.times_ns}
    return TableRow(
        kind="median",
        label="",
        before="median",
        depth=one.depth + 1,
        times_ns={phase: median(row.times_ns.get(phase, 0) for row in rows) for phase in phases},
        range_ns=(min(totals), max(totals)),
        **{name: _median(getattr(row, name) for row in rows) for name in _WITH_MEDIAN},
    )


def _median(values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _outlier_rows(one: Shown[TableRow], steps: _Steps) -> list[TableRow]:
    outlying = outlying_layers(one.fold)
    relative = dict(zip((member.layer for member in one.fold.members), one.fold.relative, strict=True))
    more = len(outlying) - MOST_OUTLIERS
    rows = []
    for i, this in enumerate(outlying[:MOST_OUTLIERS]):
        after = _excess(this) + (f", {more} more odd" if more > 0 and i == MOST_OUTLIERS - 1 else "")
        label = relative[this.layer.layer]
        rows.append(steps.layer(this.layer, "odd", label, one.depth + 1, before="odd: ", after=after))
    return rows


def _excess(outlying: Outlier) -> str:
    """How far off: ` +97 %`, ` retained -40 %`, or as a factor from 10 on."""
    what = "" if outlying.what == "time" else " retained"
    return f"{what} {100 * outlying.excess:+.0f} %" if outlying.excess < 9 else f"{what} x{1 + outlying.excess:.3g}"


def _rows_below(one: Shown[TableRow], order: Order, steps: _Steps) -> list[TableRow]:
    """The row of `one` and of all below it, in drawing order."""
    rows: list[TableRow] = []
    stack = [one]
    while stack:
        this = stack.pop()
        rows.append(steps.layer(this.fold.whole, "layer", this.fold.label, this.depth, after=_flags(this.fold)))
        rows += this.extras
        stack += reversed(in_order(this.children, order))
    return rows


def _flags(fold: Fold) -> str:
    names = {"compiled": "compiled", "only_fused": "fused", "shared": "shared", "graph": "graph"}
    flags = [flag for name, flag in names.items() if all(getattr(m, name) for m in fold.members)]
    return f" [{', '.join(flags)}]" if flags else ""


def _outside_rows(analysis: Analysis, steps: _Steps) -> list[TableRow]:
    """What has no module by nature, the most expensive first."""
    rows = [
        TableRow(
            kind="outside",
            label=outside_label(row),
            depth=0,
            times_ns=steps.times({row.phase: row.time_ns}),
            **steps.amounts(row),
        )
        for row in analysis.layers
        if not row.layer and row.time_ns
    ]
    return sorted(rows, key=lambda row: -row.total_ns)


def outside_label(row: LayerRow) -> str:
    """What a row without a layer is called in tables."""
    own = row.raw_name or row.class_name
    if own:
        return own
    if row.phase == "optimizer":
        return "optimizer"
    if row.time_ns and row.communication_ns >= _NEARLY_ALL * row.time_ns:
        return f"collectives of several layers ({row.phase})"
    if row.phase == "other":
        return "other code between calls"
    return f"outside layers ({row.phase})"


def _unattributed_rows(analysis: Analysis, steps: _Steps) -> list[TableRow]:
    rows = [
        TableRow(
            kind="unattributed",
            before="(unattributed) ",
            label=row.reason,
            depth=0,
            times_ns={},
            total_ns=steps.of(row.time_ns),
        )
        for row in analysis.unattributed
        if row.time_ns
    ]
    return sorted(rows, key=lambda row: -row.total_ns)


def _merged(rows: list[TableRow], most: int, label: str) -> list[TableRow]:
    """At most `most` rows: the last ones in one."""
    if len(rows) <= most:
        return rows
    merged = _sum_row(rows[0].kind, f"{label} ({len(rows) - most + 1} rows)", rows[most - 1 :])
    return [*rows[: most - 1], merged]


def _sum_row(kind: RowKind, label: str, rows: Sequence[TableRow]) -> TableRow:
    phases = {phase for row in rows for phase in row.times_ns}
    return TableRow(
        kind=kind,
        label=label,
        depth=0,
        times_ns={phase: sum(row.times_ns.get(phase, 0) for row in rows) for phase in phases},
        total_ns=sum(row.total_ns for row in rows),
        attention_ns=sum(row.attention_ns for row in rows),
        calls=sum_of_known(row.calls for row in rows),
        retained_bytes=sum_of_known(row.retained_bytes for row in rows),
        peak_bytes=max((row.peak_bytes for row in rows if row.peak_bytes is not None), default=None),
    )


def _total_row(analysis: Analysis, steps: _Steps, totals: Sequence[LayerTotal]) -> TableRow:
    phases: dict[Phase, int] = {}
    for row in analysis.layers:
        phases[row.phase] = phases.get(row.phase, 0) + row.self_time_ns
    roots = [total for total in totals if total.parent is None]
    return TableRow(
        kind="total",
        label="TOTAL",
        depth=0,
        times_ns=steps.times(phases),
        total_ns=steps.of(analysis.time.total_ns),
        attention_ns=steps.of(sum(row.time_ns for row in analysis.attention)),
        communication_ns=steps.of(sum(r.time_ns for r in analysis.classes if r.class_name == "communication")),
        flops=steps.work(_all_flops(analysis)),
        known_flops=steps.work(sum(row.flops_per_step for row in analysis.flops)) if analysis.uncounted else None,
        roof_ns=steps.work(_whole_roof(analysis, roots)),
        retained_bytes=sum_of_known(root.retained_bytes for root in roots),
        peak_bytes=_overall_peak(analysis, roots),
    )


def _all_flops(analysis: Analysis) -> int | None:
    """Of all that ran; None where over 1 % of the time is of kernels launched before the trace, which tell none."""
    before_ns = sum(row.time_ns for row in analysis.unattributed if row.reason == LAUNCHED_BEFORE)
    if before_ns > _TRIFLE * analysis.time.total_ns or any(not row.layers for row in analysis.uncounted):
        return None
    own = [row.self_flops_per_step for row in analysis.layers]
    rest = [row.flops_per_step for row in analysis.unattributed if row.reason != LAUNCHED_BEFORE]
    return sum_if_all_known(own + rest)


def _whole_roof(analysis: Analysis, roots: Sequence[LayerTotal]) -> int | None:
    """Of all that ran; None where what is not told of took over 1 % of the time."""
    parts = [
        *((root.roof_time_per_step_ns, root.time_ns) for root in roots),
        *((row.roof_time_per_step_ns, row.time_ns) for row in analysis.layers if not row.layer),
        *((row.roof_time_per_step_ns, row.time_ns) for row in analysis.unattributed),
    ]
    known = [roof_ns for roof_ns, _ in parts if roof_ns is not None]
    steps = max(1, len(step_numbers(analysis)))
    missing_ns = max(
        sum(time_ns for roof_ns, time_ns in parts if roof_ns is None),
        steps * sum(row.time_per_step_ns for row in analysis.untold_bytes),
    )
    return sum(known) if known and missing_ns <= _TRIFLE * analysis.time.total_ns else None


def _overall_peak(analysis: Analysis, roots: Sequence[LayerTotal]) -> float | None:
    """The highest allocated at any time, in layers and outside."""
    peak = analysis.memory.get("peak")
    whole = peak.get("allocated_bytes") if isinstance(peak, Mapping) else None
    known = [whole, *(row.peak_bytes for row in analysis.steps), *(root.peak_bytes for root in roots)]
    return max((size for size in known if isinstance(size, (int, float))), default=None)
