"""The layer table as text, short enough for a terminal or a SLURM log: which layers fit, and what each row says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, PHASES, Analysis, LayerRow, Phase
from profiler_wrapper.analysis.statistics import sum_if_all_known, sum_of_known
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.reports.describe import (
    followed_lines,
    outside_label,
    per_step,
    scaled,
    step_count,
    step_numbers,
    title_parts,
    use_lines,
    work_scale,
)
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
from profiler_wrapper.reports.memory import memory_lines
from profiler_wrapper.reports.text import AT_LEAST, aligned_lines, cells, clean, shorten, wrap
from profiler_wrapper.units import MIB

# --------------------------------------------------------------------------------------------------
# The rows, as numbers.

RowKind = Literal["layer", "median", "odd", "outside", "unattributed", "total"]

MOST_OUTLIERS = 3
_FEWEST_OUTSIDE = 3  # rows for what is in no layer, so that the optimizer keeps its own
_TRIFLE = 0.01  # of the time: where so little is not known, the total still is
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


def table_rows(analysis: Analysis, *, most: int, order: Order = "cost", layer_rows: int | None = None) -> TableRows:
    """At most `most` rows: layers (at most `layer_rows`), what is outside all layers, `(unattributed)` and the total.

    Rows without indentation add up to the total; the most expensive layers of the tree are chosen, each
    below its parent.
    """
    steps = _Steps(analysis)
    few = max(1, (most - 6) // 5)
    outside = _merged(_outside_rows(analysis, steps), max(few, _FEWEST_OUTSIDE), "other work outside layers")
    unattributed = _merged(_unattributed_rows(analysis, steps), few, "(unattributed) other reasons")
    totals = layer_totals(analysis)
    room = most - 1 - len(outside) - len(unattributed)
    room = room if layer_rows is None else min(room, layer_rows)
    shown, rest = choose(
        Tree(totals), most=room, extras=lambda one: [_median_row(one, steps), *_outlier_rows(one, steps)]
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
    """Of all that ran; None where what is not known took over 1 % of the time."""
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


# --------------------------------------------------------------------------------------------------
# The text.

FEWEST_ROWS = 12
NARROWEST = 60
_NAME_WIDTH = 24  # below this, columns give way to names
_DEEPEST_INDENT = 6
_TITLE_LINES = 2
_WARNING_LINES = 3
_FOLLOWED_LINES = 3
_HIGH = 20  # rows: a lower table says less beside its layers
_LITTLE = 0.05  # of the total: a phase with less has a column only where there is room
_LARGEST_PLAIN = 1e11  # beyond, a number is written with an exponent


@dataclass(frozen=True)
class _Column:
    title: str
    unit: str
    value: Callable[[TableRow], Any]
    text: Callable[[Any], str]
    goes: int  # the highest goes first where there is no room


def console_table(
    analysis: Analysis,
    *,
    rows: int = 25,
    width: int = 100,
    unicode: bool = False,
    order: Order = "cost",
    layer_rows: int | None = None,
) -> str:
    """The layer tree with the most expensive layers first (`order="model"`: as in the model), times in ms per step.

    At most `rows` lines and `width` columns in all, `layer_rows` of them about layers; ASCII unless `unicode`; no
    colour codes. Rows without indentation add up to TOTAL. A row such as `layers.{0..31}` holds all 32; `median`
    below it is one of them, with the least and the most total. Below TOTAL, and no part of it, stands what
    is followed by name. Names are shortened, numbers never.

    Raises:
        WrongUse: `rows` or `width` is too small for any table, or `order` is neither of the two.
    """
    if rows < FEWEST_ROWS or width < NARROWEST:
        raise WrongUse(f"A table of {rows} rows and {width} columns: give at least {FEWEST_ROWS} and {NARROWEST}.")
    if order not in ("cost", "model"):
        raise WrongUse(f"order={order!r}: give 'cost' or 'model'.")
    head = _joined(title_parts(analysis, unicode=unicode), width)
    tail = [
        *(use_lines(analysis, width) if rows >= _HIGH else ()),
        *(memory_lines(analysis.memory, width) if rows >= _HIGH else ()),
        *_warning_lines(analysis, rows, width, unicode),
    ]
    followed = followed_lines(analysis, most=_FOLLOWED_LINES if rows >= _HIGH else 1, width=width, unicode=unicode)
    most = rows - len(head) - 2 - len(followed) - len(tail)  # 2: the heading and its units
    table = table_rows(analysis, most=most, order=order, layer_rows=layer_rows)
    if table.hidden_layers:
        table = table_rows(analysis, most=most - 1, order=order, layer_rows=layer_rows)
    if table.hidden_layers:
        tail.insert(0, f"({table.hidden_layers} smaller layers not shown; result.table() has them all)")
    return "\n".join([*head, *_draw(table.rows, analysis, width, unicode), *followed, *tail])


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """`parts` with commas on at most 2 lines; what does not fit is left out."""
    lines = [shorten(parts[0], width)]
    for part in parts[1:]:
        if cells(lines[-1]) + 2 + cells(part) <= width:
            lines[-1] += ", " + part
        elif len(lines) < _TITLE_LINES and cells(part) <= width:
            lines.append(part)
    return lines


def _warning_lines(analysis: Analysis, rows: int, width: int, unicode: bool) -> list[str]:
    """At most 3 lines of warnings (1 in a low table) and one that counts the others."""
    room = _WARNING_LINES if rows >= _HIGH else 1
    texts = ["warning: " + clean(warning, unicode=unicode) for warning in analysis.warnings]
    lines: list[str] = []
    for i, text in enumerate(texts[:room]):
        others = min(len(texts), room) - i - 1
        lines += wrap(text, width, room - len(lines) - others)
    if len(texts) > room:
        lines.append(f"({len(texts) - room} more in the log)")
    return lines


def _draw(rows: Sequence[TableRow], analysis: Analysis, width: int, unicode: bool) -> list[str]:
    """The heading, its units and one line per row."""
    columns = _columns(rows, unicode)
    milliseconds = _time_text(rows)
    needed = max([_NAME_WIDTH, *(_least_name_width(row, milliseconds) for row in rows)])
    columns = _fitting(columns, rows, width - needed)
    widths = [_column_width(column, rows) for column in columns]
    gap = 2 if needed + sum(widths) + 2 * len(widths) <= width else 1
    room = width - sum(widths) - gap * len(widths)
    texts = [[_cell(column, row) for column in columns] for row in rows]
    free = [_free_beside(line, widths, gap) for line in texts]
    names = [_name(row, room + beside, milliseconds, unicode) for row, beside in zip(rows, free, strict=True)]
    name_width = max(
        [len(per_step(analysis)), *(cells(name) - beside for name, beside in zip(names, free, strict=True))]
    )
    blank = " " * name_width
    heading, units, *lines = aligned_lines(
        [
            ["layer", *(column.title for column in columns)],
            [per_step(analysis), *(column.unit for column in columns)],
            *([blank, *line] for line in texts),
        ],
        ["left", *("right" for _ in columns)],
        gap=gap,
    )
    # A long name runs on over the empty cells beside it.
    named = [(name + line[cells(name) :]).rstrip() for name, line in zip(names, lines, strict=True)]
    return [heading, units, *named]


def _free_beside(texts: Sequence[str], widths: Sequence[int], gap: int) -> int:
    """How many columns of the terminal are empty between the name and the first number."""
    first = next((i for i, text in enumerate(texts) if text), len(texts))
    return sum(widths[:first]) + gap * first


def _fitting(columns: list[_Column], rows: Sequence[TableRow], width: int) -> list[_Column]:
    """The columns that fit into `width`, less those that can go."""
    while len(columns) > 1 and sum(_column_width(column, rows) + 1 for column in columns) > width:
        first = max(columns, key=lambda column: column.goes)
        columns = [column for column in columns if column is not first]
    return columns


def _column_width(column: _Column, rows: Sequence[TableRow]) -> int:
    return max(len(column.title), len(column.unit), *(len(_cell(column, row)) for row in rows))


def _cell(column: _Column, row: TableRow) -> str:
    value = column.value(row)
    return "" if value is None else column.text(value)


def _name(row: TableRow, width: int, milliseconds: Callable[[float], str], unicode: bool) -> str:
    """The indented name, with what stands before and after it whole."""
    before, after = _fixed_text(row, milliseconds)
    ellipsis = "…" if unicode else "..."
    label = shorten(clean(row.label, unicode=unicode), max(0, width - cells(before) - cells(after)), ellipsis=ellipsis)
    return shorten(before + label + after, width, ellipsis=ellipsis)


def _fixed_text(row: TableRow, milliseconds: Callable[[float], str]) -> tuple[str, str]:
    """What must not be shortened before and after a row's label."""
    after = row.after
    if row.range_ns is not None:
        least, most = map(milliseconds, row.range_ns)
        after = f" ({least}-{most})"
    return "  " * min(row.depth, _DEEPEST_INDENT) + row.before, after


def _least_name_width(row: TableRow, milliseconds: Callable[[float], str]) -> int:
    before, after = _fixed_text(row, milliseconds)
    return cells(before) + cells(after) + (min(12, cells(row.label)) if row.label else 0)


def _time_text(rows: Sequence[TableRow]) -> Callable[[float], str]:
    return _number(max((row.total_ns for row in rows), default=0), 1e6)


def _columns(rows: Sequence[TableRow], unicode: bool) -> list[_Column]:
    """The columns that hold anything, those of time first."""
    time = _time_text(rows)
    memory = _number(max((max(row.retained_bytes or 0, row.peak_bytes or 0) for row in rows), default=0), MIB, 2)
    total_ns = next((row.total_ns for row in rows if row.kind == "total"), 0)
    phases = [_phase_column(*shown, time, max(1, 6 - i)) for i, shown in enumerate(phase_columns(rows))]
    sums = next((row.times_ns for row in rows if row.kind == "total"), {})
    if sums.get("accumulate_grad", 0) < _LITTLE * total_ns:  # then it is the first to give way
        phases = [replace(column, goes=99) if column.title == ACCUMULATION else column for column in phases]
    total = _Column("total", "ms", lambda row: row.total_ns, time, 0)
    optional = [
        _Column("share", "%", lambda row: _share(row.total_ns, total_ns), lambda share: f"{share:.1f}", 7),
        _Column("attention", "ms", lambda row: row.attention_ns or None, time, 11),
        *_work_columns(rows, unicode),
        _Column("calls", "", lambda row: row.calls, _calls, 15),
        _Column("retained", "MiB", lambda row: row.retained_bytes, memory, 12),
        _Column("peak", "MiB", lambda row: row.peak_bytes, memory, 13),
    ]
    return [*phases, total, *(column for column in optional if any(column.value(row) for row in rows))]


def _work_columns(rows: Sequence[TableRow], unicode: bool) -> list[_Column]:
    """FLOPs per step, and per second of the time they took, in the units that fit the largest; how near the roof.

    Of a row in which an op tells no FLOPs, those that are known, as a lower bound.

    Of the roof: the time that the work needs at least, as a share of the time it took. Bound: by what.
    """
    most = max((row.flops or row.known_flops or 0 for row in rows), default=0)
    fastest = max((_flop_per_ns(row) or 0 for row in rows), default=0)
    unit, size = ("TFLOP", 1e12) if most >= 1e13 else ("GFLOP", 1e9) if most >= 1e7 else ("MFLOP", 1e6)
    rate_unit, rate_size = (
        ("TFLOP/s", 1e3) if fastest >= 1e3 else ("GFLOP/s", 1.0) if fastest >= 0.01 else ("MFLOP/s", 1e-3)
    )
    return [
        _Column("work", unit, _work, _work_text(_number(most, size), unicode), 14),
        _Column("speed", rate_unit, _flop_per_ns, _number(fastest, rate_size), 9),
        _Column("of roof", "%", _roof_share, lambda part: f"{part:.1f}", 8),
        _Column("bound", "by", _memory_share, lambda part: "memory" if part > 0.5 else "compute", 10),
    ]


def _work(row: TableRow) -> tuple[float, bool] | None:
    """FLOPs, and whether they are a lower bound."""
    if row.flops is None and row.known_flops is not None:
        return row.known_flops, True
    return (row.flops, False) if row.flops else None


def _work_text(number: Callable[[float], str], unicode: bool) -> Callable[[tuple[float, bool]], str]:
    return lambda work: clean(AT_LEAST * work[1], unicode=unicode) + number(work[0])


def _roof_share(row: TableRow) -> float | None:
    """Percent of the time that was no communication, which has no roof here."""
    return _share(row.roof_ns or 0, row.total_ns - row.communication_ns) or None


def _memory_share(row: TableRow) -> float | None:
    """The part of the time at the roof in ops that bytes bound."""
    if not row.roof_ns or row.memory_roof_ns is None:
        return None
    return row.memory_roof_ns / row.roof_ns


def _flop_per_ns(row: TableRow) -> float | None:
    return row.flops / row.total_ns if row.flops and row.total_ns else None


def _share(part_ns: float, total_ns: float) -> float | None:
    return 100 * part_ns / total_ns if total_ns > 0 else None


def _phase_column(phase: Phase, title: str, text: Callable[[float], str], goes: int) -> _Column:
    return _Column(title, "ms", lambda row: row.times_ns.get(phase), text, goes)


def _number(largest: float, unit: float, precise: int = 3) -> Callable[[float], str]:
    """Writes values of one column alike: with as many decimals as the largest leaves room for."""
    size = abs(largest) / unit
    decimals = 3 if size < 10 else precise if size < 100 else precise - 1 if size < 1000 else 1 if size < 1e5 else 0

    def text(value: float) -> str:
        scaled = value / unit
        return f"{scaled:.{decimals}f}" if abs(scaled) < _LARGEST_PLAIN else f"{scaled:.4g}"

    return text


def _calls(calls: float) -> str:
    if calls >= _LARGEST_PLAIN:
        return f"{calls:.4g}"
    return str(round(calls)) if calls == round(calls) else f"{calls:.1f}"
