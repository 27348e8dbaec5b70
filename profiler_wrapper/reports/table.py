"""The layer table as text, short enough for a terminal or a SLURM log: which layers fit, and what each row says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any, Literal, NamedTuple

from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.place.names import LAUNCHED_BEFORE, PHASES, Phase
from profiler_wrapper.reports import describe
from profiler_wrapper.reports.columns import (
    COLUMNS,
    SUMMED,
    Column,
    Scale,
    Values,
    layer_values,
    most,
    scale_of,
    summed,
)
from profiler_wrapper.reports.folding import Fold, LayerTotal, Outlier, Tree, layer_totals, outlying_layers
from profiler_wrapper.reports.memory import memory_lines
from profiler_wrapper.reports.text import AT_LEAST, cells, clean, set_in, shorten, whole_ones, wrap
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.tables.statistics import sum_if_all_known
from profiler_wrapper.tables.work.peaks import NO_PEAK
from profiler_wrapper.terminal import Cell, Style, bar, in_a_row
from profiler_wrapper.units import MIB

# --- The rows, as numbers ---

Order = Literal["cost", "model"]
RowKind = Literal["layer", "median", "outlier", "outside", "unattributed", "total"]

MOST_OUTLIERS = 3
_FEWEST_OUTSIDE = 3  # rows for what is in no layer, so that the optimizer keeps its own
_TRIFLE = 0.01  # of the time: where so little is not known, the total still is
ALONE: tuple[Phase, ...] = ("optimizer", "other")  # which layers seldom have: beside the total, no column is needed


@dataclass(frozen=True, kw_only=True)
class TableRow:
    kind: RowKind
    values: Values  # of all columns; times and work are those of one step, as `Scale` has them
    label: str = ""
    depth: int = 0
    before: str = ""  # said before and after the label, never shortened
    after: str = ""
    range_ns: tuple[float, float] | None = None  # of a median: the least and the most total


_Place = tuple[tuple[int, int, int], ...]  # of a row: sorted by it, rows stand below that of their parent


@dataclass(frozen=True)
class TableRows:
    """The rows of a table and how many layers have none in it."""

    rows: list[TableRow]
    hidden_layers: int


def table_rows(analysis: Analysis, *, most: int, order: Order = "cost", layer_rows: int | None = None) -> TableRows:
    """Return at most `most` rows: layers (at most `layer_rows`), what is outside layers, `(unattributed)`, the total.

    Rows without indentation add up to the total; the most expensive layers of the tree are chosen, each
    below its parent.
    """
    scale = scale_of(analysis)
    few = max(1, (most - 6) // 5)
    outside = _merged(outside_rows(analysis, scale), max(few, _FEWEST_OUTSIDE), "other work outside layers", scale)
    unattributed = _merged(unattributed_rows(analysis, scale), few, "(unattributed) other reasons", scale)
    totals = layer_totals(analysis)
    room = most - 1 - len(outside) - len(unattributed)
    room = room if layer_rows is None else min(room, layer_rows)
    rows, shown_layers = _tree_rows(Tree(totals), scale, most=room, order=order)
    rows += [*outside, *unattributed, total_row(analysis, totals, scale)]
    return TableRows(rows, len(totals) - shown_layers)


def _tree_rows(tree: Tree, scale: Scale, *, most: int, order: Order) -> tuple[list[TableRow], int]:
    """Return at most `most` rows, each below its parent: roots, then the most expensive; and how many layers they hold.

    Roots that do not fit are one row together. A numbered fold brings its median and its outliers, as many as fit.
    """
    roots = sorted(tree.roots(), key=lambda fold: -fold.time_ns)
    fitting = roots if len(roots) <= most else roots[: max(0, most - 1)]
    rest = roots[len(fitting) :]
    room, number = most - len(fitting) - bool(rest), count()
    waiting: list[tuple[int, int, Fold, _Place, bool]] = []
    drawn: list[tuple[_Place, list[TableRow]]] = []
    layers = 0

    def wait(fold: Fold, above: _Place = (), *, part_of_many: bool = False) -> None:
        at, cost = next(number), -fold.time_ns
        place = (cost, fold.order, at) if order == "cost" else (fold.order, cost, at)
        heapq.heappush(waiting, (cost, at, fold, (*above, place), part_of_many))

    for root in fitting:
        wait(root)
    while waiting:
        _, _, fold, place, part_of_many = heapq.heappop(waiting)
        depth = len(place) - 1
        if depth and room < 1:
            continue
        room -= depth > 0
        rows = [_fold_row(fold, depth, scale)]
        if fold.numbered and not part_of_many:
            rows += [_median_row(fold, depth + 1, scale), *_outlier_rows(fold, depth + 1, scale)][:room]
            room -= len(rows) - 1
        drawn.append((place, rows))
        layers += len(fold.members)
        for child in tree.children(fold) if room > 0 else ():
            wait(child, place, part_of_many=len(fold.members) > 1)
    found = [row for _, rows in sorted(drawn, key=lambda one: one[0]) for row in rows]
    if rest:
        values = scale.of(summed([fold.values for fold in rest]))
        found.append(TableRow(kind="layer", label=f"({len(rest)} more roots)", values=values))
    return found, layers


def _fold_row(fold: Fold, depth: int, scale: Scale) -> TableRow:
    flags = [flag for flag in fold.members[0].flags if all(flag in member.flags for member in fold.members)]
    after = f" [{', '.join(flags)}]" if flags else ""
    return TableRow(kind="layer", values=scale.of(fold.values), label=fold.label, depth=depth, after=after)


def phase_columns(rows: Sequence[TableRow]) -> list[Phase]:
    """Return the phases that have a column."""
    used = {phase for row in rows for phase in PHASES if row.values.get(phase)}
    of_layers = {phase for row in rows if row.kind == "layer" for phase in PHASES if row.values.get(phase)}
    return [phase for phase in PHASES if phase in (of_layers if phase in ALONE else used)]


def _median_row(fold: Fold, depth: int, scale: Scale) -> TableRow:
    """Return the median of each value of sibling layers; the peak is of no layer alone."""
    rows = [scale.of(member.values) for member in fold.members]
    totals = [row["time"] for row in rows]
    phases = [phase for phase in PHASES if any(phase in row for row in rows)]
    values: dict[str, Any] = {phase: median(row.get(phase, 0) for row in rows) for phase in phases}
    for column in SUMMED:
        known = [row[column.key] for row in rows if row[column.key] is not None]
        values[column.key] = median(known) if known and column.key != "peak" else None
    values["lost_launches"] = most(row["lost_launches"] for row in rows)  # of one: the median is a lower bound
    return TableRow(
        kind="median",
        before="median",
        depth=depth,
        values=scale.completed(values),
        range_ns=(min(totals), max(totals)),
    )


def _outlier_rows(fold: Fold, depth: int, scale: Scale) -> list[TableRow]:
    outlying = outlying_layers(fold)
    relative = dict(zip((member.layer for member in fold.members), fold.relative, strict=True))
    more = len(outlying) - MOST_OUTLIERS
    rows = []
    for i, this in enumerate(outlying[:MOST_OUTLIERS]):
        after = _excess(this) + (f", {more} more" if more > 0 and i == MOST_OUTLIERS - 1 else "")
        values, label = scale.of(this.layer.values), relative[this.layer.layer]
        rows.append(TableRow(kind="outlier", values=values, label=label, depth=depth, before="outlier: ", after=after))
    return rows


def _excess(outlying: Outlier) -> str:
    """Say how far off a layer is: ` +97 %`, ` retained -40 %`, or as a factor from 10 on."""
    what = "" if outlying.what == "time" else " retained"
    return f"{what} {100 * outlying.excess:+.0f} %" if outlying.excess < 9 else f"{what} x{1 + outlying.excess:.3g}"


def outside_rows(analysis: Analysis, scale: Scale) -> list[TableRow]:
    """Return what has no module by nature, the most expensive first."""
    rows = [
        TableRow(kind="outside", label=describe.outside_label(row), values=scale.of(layer_values([row])))
        for row in analysis.layers
        if not row.layer and (row.time_ns or row.lost_launches)
    ]
    return sorted(rows, key=lambda row: -row.values["time"])


def unattributed_rows(analysis: Analysis, scale: Scale) -> list[TableRow]:
    """Return what should have a layer and has none, by reason, the most expensive first."""
    rows = [
        TableRow(
            kind="unattributed", before="(unattributed) ", label=row.reason, values=scale.of({"time": row.time_ns})
        )
        for row in analysis.unattributed
        if row.time_ns
    ]
    return sorted(rows, key=lambda row: -row.values["time"])


def _merged(rows: list[TableRow], most: int, label: str, scale: Scale) -> list[TableRow]:
    """Sum up the last rows in one, where there are more than `most`."""
    if len(rows) <= most:
        return rows
    rest = rows[most - 1 :]
    values = scale.completed(summed([row.values for row in rest]))
    return [*rows[: most - 1], TableRow(kind=rows[0].kind, label=f"{label} ({len(rest)} rows)", values=values)]


def total_row(analysis: Analysis, totals: Sequence[LayerTotal], scale: Scale) -> TableRow:
    """Return the row of all that was recorded; `totals` as `layer_totals` gives them."""
    phases: dict[str, int] = {}
    for row in analysis.layers:
        phases[row.phase] = phases.get(row.phase, 0) + row.self_time_ns
    roots = [total for total in totals if total.parent is None]
    of_roots = summed([root.values for root in roots])
    sums = {
        **phases,
        "time": analysis.time.total_ns,
        "lost_launches": analysis.lost_launches,
        "attention": sum(row.time_ns for row in analysis.attention),
        "communication": sum(row.time_ns for row in analysis.classes if row.class_name == "communication"),
        "exposed": analysis.time.exposed_communication_ns,
        "flops": _all_flops(analysis),
        "known_flops": sum(row.flops_per_step for row in analysis.flops) if analysis.uncounted else None,
        "roof": _whole_roof(analysis, roots),
        "retained": of_roots["retained"],
        "peak": most((describe.peak_bytes(analysis), of_roots["peak"])),
    }
    return TableRow(kind="total", label="TOTAL", values=scale.of(sums))


def _all_flops(analysis: Analysis) -> int | None:
    """Sum the FLOPs of all that ran; None where kernels launched before the trace, which tell none, took over 1 %."""
    before_ns = sum(row.time_ns for row in analysis.unattributed if row.reason == LAUNCHED_BEFORE)
    if before_ns > _TRIFLE * analysis.time.total_ns or any(not row.layers for row in analysis.uncounted):
        return None
    own = [row.self_flops_per_step for row in analysis.layers]
    rest = [row.flops_per_step for row in analysis.unattributed if row.reason != LAUNCHED_BEFORE]
    return sum_if_all_known(own + rest)


def _whole_roof(analysis: Analysis, roots: Sequence[LayerTotal]) -> int | None:
    """Sum the time at the roof of all that ran; None where what has none known took over 1 % of the time."""
    parts = [
        *((root.values["roof"], root.time_ns) for root in roots),
        *((row.roof_time_per_step_ns, row.time_ns) for row in analysis.layers if not row.layer),
        *((row.roof_time_per_step_ns, row.time_ns) for row in analysis.unattributed),
    ]
    known = [roof_ns for roof_ns, _ in parts if roof_ns is not None]
    steps = max(1, len(describe.step_numbers(analysis)))
    missing_ns = max(
        sum(time_ns for roof_ns, time_ns in parts if roof_ns is None),
        steps * sum(row.time_per_step_ns for row in analysis.untold_bytes),
    )
    return sum(known) if known and missing_ns <= _TRIFLE * analysis.time.total_ns else None


# --- The text ---

FEWEST_ROWS = 12
NARROWEST = 60
_NAME_WIDTH = 24  # below this, columns give way to names
_DEEPEST_INDENT = 6
_TITLE_LINES = 3
_VERDICT_LINES = 3
_FOLLOWED_LINES = 3
_HIGH = 20  # rows: a lower table says less beside its layers
_LITTLE = 0.05  # of the total: a phase with less has a column only where there is room
_SHORTEST_BAR, _LONGEST_BAR = 5, 20
_BAR_GOES = 10  # as `Column.goes`
_STYLES: Mapping[RowKind, Style] = {"outlier": "warning", "unattributed": "warning"}
_LARGEST_PLAIN = 1e11  # beyond, a number is written with an exponent


class _Drawn(NamedTuple):
    """A column as it is printed."""

    title: str
    unit: str
    goes: int  # the highest goes first where there is no room
    texts: Sequence[str]  # of each row
    style: Style = ""

    @property
    def width(self) -> int:
        return max(len(self.title), len(self.unit), *map(len, self.texts))


_SHARED = "[shared]: all calls of the module; a layer above it holds those that it made itself"


def console_table(
    analysis: Analysis,
    *,
    rows: int = 25,
    width: int = 100,
    unicode: bool = False,
    styled: bool = False,
    order: Order = "cost",
    layer_rows: int | None = None,
) -> str:
    """Print the layer tree, the most expensive layers first (`order="model"`: as in the model), times in ms per step.

    At most `rows` lines and `width` columns in all, `layer_rows` of them about layers; ASCII unless `unicode`; with
    colours and bars of the shares if `styled`. Rows without indentation add up to TOTAL. A row such as
    `layers.{0..31}` holds all 32; `median` below it is one of them, with the least and the most total. Below TOTAL,
    and no part of it, stands what is followed by name. Names are shortened, numbers never.

    Raises:
        WrongUse: `rows` or `width` is too small for any table, or `order` is neither of the two.
    """
    if rows < FEWEST_ROWS or width < NARROWEST:
        raise WrongUse(f"A table of {rows} rows and {width} columns: give at least {FEWEST_ROWS} and {NARROWEST}.")
    if order not in ("cost", "model"):
        raise WrongUse(f"order={shown(order)}: give 'cost' or 'model'.")
    high = rows >= _HIGH
    head = _joined(describe.title_parts(analysis, unicode=unicode), width, _TITLE_LINES if high else 2)
    about: list[str] = []
    if high:
        steps = filter(None, [describe.parts_in_words(analysis), describe.left_out_in_words(analysis)])
        about += (line for text in steps for line in wrap(text, width, 2))
        about += describe.use_lines(analysis, width) + describe.expert_and_adapter_lines(analysis, width)
        about += memory_lines(analysis.memory, width)
        about += (line for text in describe.kv_cache_lines(analysis)[:2] for line in wrap(text, width, 2))
    closing = [*_warning_lines(analysis, rows, width, unicode), *_verdict_lines(analysis, high, width, unicode, styled)]
    followed = describe.followed_lines(analysis, most=_FOLLOWED_LINES if high else 1, width=width, unicode=unicode)
    most = rows - len(head) - 2 - len(followed) - len(closing)  # 2: the heading and its units
    room = max(0, most - rows // 3 - 1)  # the table itself comes first
    if len(about) > room + 1:
        about = [*about[:room], f"({len(about) - room} more lines in a higher table)"]
    most -= len(about)
    for lines in range(3):  # that are left for the notes
        table = table_rows(analysis, most=most - lines, order=order, layer_rows=layer_rows)
        notes = [_SHARED] if any("shared" in row.after for row in table.rows) else []
        if table.hidden_layers:
            notes.append(f"({table.hidden_layers} smaller layers not shown: analyze --top N has more)")
        if len(notes) <= lines:
            break
    notes = [shorten(note, width) for note in notes]
    return "\n".join([*head, *_draw(table.rows, analysis, width, unicode, styled), *followed, *notes, *about, *closing])


def _joined(parts: Sequence[str], width: int, most: int) -> list[str]:
    """Join `parts` with commas on at most `most` lines; what does not fit is left out."""
    lines = [shorten(parts[0], width)]
    for part in parts[1:]:
        if cells(lines[-1]) + 2 + cells(part) <= width:
            lines[-1] += ", " + part
        elif len(lines) < most and cells(part) <= width:
            lines.append(part)
    return lines


def _warning_lines(analysis: Analysis, rows: int, width: int, unicode: bool) -> list[str]:
    """Return the warnings that fit in a fifth of the rows, and how many others there are."""
    # That of CPUs no peak is known is so in every run on one.
    texts = [one for one in analysis.warnings if analysis.time_basis == "device" or not one.startswith(NO_PEAK)]
    lines = [f"warning: {clean(one, unicode=unicode)}" for one in texts]
    return whole_ones(lines, width, rows // 5, "warnings: see the log")


def _verdict_lines(analysis: Analysis, high: bool, width: int, unicode: bool, styled: bool) -> list[str]:
    """Return what stands out, and what to do first, which has a line of its own."""
    verdict, before, fix = clean(analysis.summary.get("verdict") or "", unicode=unicode).partition("First fix: ")
    room = _VERDICT_LINES if high else 1
    lines = wrap(verdict.rstrip(), width, room) if verdict else []
    return [in_a_row([Cell(line, "bold")], styled) for line in lines] + (wrap(before + fix, width) if fix else [])


def _draw(rows: Sequence[TableRow], analysis: Analysis, width: int, unicode: bool, styled: bool) -> list[str]:
    """Return the heading, its units and one line per row."""
    formats = formats_for(rows)
    time = formats["time"].text
    afters = [f" ({time(row.range_ns[0])}-{time(row.range_ns[1])})" if row.range_ns else row.after for row in rows]
    befores = ["  " * min(row.depth, _DEEPEST_INDENT) + row.before for row in rows]
    parts = [*zip(befores, (clean(row.label, unicode=unicode) for row in rows), afters, strict=True)]
    needed = max(_NAME_WIDTH, *(cells(before) + min(12, cells(label)) + cells(after) for before, label, after in parts))
    columns = _columns(rows, formats, unicode, styled)
    while len(columns) > 1 and sum(column.width + 1 for column in columns) > width - needed:
        columns.remove(max(columns, key=lambda column: column.goes))
    taken = sum(column.width for column in columns)
    gap = 2 if needed + taken + 2 * len(columns) <= width else 1
    room = width - taken - gap * len(columns)
    # A long name runs on over the empty cells before its first number, which take so many columns of the terminal.
    empty = [next((i for i, column in enumerate(columns) if column.texts[at]), len(columns)) for at in range(len(rows))]
    free = [sum(column.width + gap for column in columns[:count]) for count in empty]
    names = [_name(*part, room + beside, unicode) for part, beside in zip(parts, free, strict=True)]
    per = describe.per_step(analysis)
    name_width = max([len(per), *(cells(name) - beside for name, beside in zip(names, free, strict=True))])
    longer = min(_LONGEST_BAR - _SHORTEST_BAR, room - name_width)
    columns = [_bars(rows, _SHORTEST_BAR + longer, unicode) if column.style else column for column in columns]

    def line(name: str, texts: Sequence[str], style: Style = "", skipped: int = 0) -> str:
        drawn = [
            Cell(set_in(name, name_width + sum(column.width + gap for column in columns[:skipped]), "left"), style)
        ]
        for column, text in zip(columns[skipped:], texts[skipped:], strict=True):
            drawn.append(Cell(set_in(text, column.width + gap), style or column.style))
        return in_a_row(drawn, styled)

    heads = [line("layer", [one.title for one in columns]), line(per, [one.unit for one in columns])]
    texts = zip(*(column.texts for column in columns), strict=True)
    styles = (_STYLES.get(row.kind, "") for row in rows)
    return heads + [line(*one) for one in zip(names, texts, styles, empty, strict=True)]


def _bars(rows: Sequence[TableRow], size: int, unicode: bool) -> _Drawn:
    """Return a column with the shares as bars."""
    bars = [bar(row.values["share"] or 0, size, unicode=unicode) for row in rows]
    return _Drawn("", " " * size, _BAR_GOES, [one.ljust(size) for one in bars], "accent")


def _name(before: str, label: str, after: str, width: int, unicode: bool) -> str:
    """Join the parts of a name; where there is no room, the label is cut in the middle."""
    ellipsis = "…" if unicode else "..."
    label = shorten(label, max(0, width - cells(before) - cells(after)), ellipsis=ellipsis)
    return shorten(before + label + after, width, ellipsis=ellipsis)


def _columns(rows: Sequence[TableRow], formats: Mapping[str, Format], unicode: bool, styled: bool) -> list[_Drawn]:
    """Return the columns that hold anything, those of phases first; with the shares as bars, if `styled`."""
    total = next((row.values for row in rows if row.kind == "total"), {})
    drawn = []
    for i, phase in enumerate(phase_columns(rows)):
        # Gradients' accumulation is the first to give way where it takes little.
        little = phase == "accumulate_grad" and total.get(phase, 0) < _LITTLE * total["time"]
        texts = [formats["time"].of(row.values.get(phase)) for row in rows]
        drawn.append(_Drawn(phase, formats["time"].unit, 99 if little else max(1, 6 - i), texts))
    for column in (column for column in COLUMNS if column.console):
        texts = [cell_text(column, row.values, formats[column.kind], unicode=unicode) for row in rows]
        values = texts if column.key == "flops" else [row.values[column.key] for row in rows]
        if column.key == "time" or any(values):
            drawn.append(_Drawn(column.console, formats[column.kind].unit, column.goes, texts))
            if styled and column.key == "share":
                drawn.append(_bars(rows, _SHORTEST_BAR, unicode))
    return drawn


def at_least(time: str, values: Values, *, unicode: bool = False) -> str:
    """Mark the time of a row as a lower bound, where kernels that it launched are not in the trace."""
    return clean(AT_LEAST, unicode=unicode) + time if values["lost_launches"] else time


def cell_text(column: Column, values: Values, form: Format, *, unicode: bool = False) -> str:
    """Write a value of a row; where an op tells no FLOPs, those that are known, as a lower bound."""
    if column.key == "flops" and values["flops"] is None and values["known_flops"]:
        return clean(AT_LEAST, unicode=unicode) + form.text(values["known_flops"])
    text = form.of(values[column.key])
    return at_least(text, values, unicode=unicode) if column.key == "time" else text


class Format(NamedTuple):
    """How values of one kind are written, and in what unit."""

    unit: str
    text: Callable[[Any], str]

    def of(self, value: Any) -> str:
        return "" if value is None else self.text(value)


def formats_for(rows: Sequence[TableRow]) -> dict[str, Format]:
    """Return formats by the kind of a column: a unit for the largest value, and as many digits as it has room for."""

    def largest(*keys: str) -> float:
        return max((row.values[key] or 0 for row in rows for key in keys), default=0)

    time, flops, rate = largest("time"), largest("flops", "known_flops"), largest("rate")
    work_unit, work_size = ("TFLOP", 1e12) if flops >= 1e13 else ("GFLOP", 1e9) if flops >= 1e7 else ("MFLOP", 1e6)
    rate_unit, rate_size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9) if rate >= 1e7 else ("MFLOP/s", 1e6)
    work = _number(flops, work_size)
    return {
        "time": Format("s", _number(time, 1e9)) if time >= describe.SECONDS_NS else Format("ms", _number(time, 1e6)),
        "share": Format("%", lambda share: f"{100 * share:.1f}"),
        "flops": Format(work_unit, lambda value: work(value) if value else ""),
        "rate": Format(rate_unit, _number(rate, rate_size)),
        "bytes": Format("MiB", _number(largest("retained", "peak"), MIB, 2)),
        "count": Format("", _calls),
        "number": Format("", lambda number: f"{number:.4g}"),
        "text": Format("by", str),
    }


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
