"""The layer table as text: short for a terminal or a SLURM log, and in full for the log file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiler_wrapper.analysis.model import Analysis, Phase
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.reports.describe import followed_lines, per_step, title_parts, use_lines
from profiler_wrapper.reports.folding import Order
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.memory import memory_lines
from profiler_wrapper.reports.table_rows import ACCUMULATION, TableRow, TableRows, phase_columns, table_rows
from profiler_wrapper.reports.text import AT_LEAST, aligned_lines, cells, clean, shorten, wrap
from profiler_wrapper.units import MIB

__all__ = ["FEWEST_ROWS", "NARROWEST", "console_table", "full_table"]

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
    """The layer tree with the dearest layers first (`order="model"`: as in the model), times in ms per step.

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
    table = table_rows(analysis, most=most, order=order)
    if layer_rows is not None:
        table = _with_layer_rows(analysis, layer_rows, most, order)
    if table.hidden_layers and layer_rows is None:
        table = table_rows(analysis, most=most - 1, order=order)
    if table.hidden_layers:
        tail.insert(0, f"({table.hidden_layers} smaller layers not shown; result.table() has them all)")
    return "\n".join([*head, *_draw(table.rows, analysis, width, unicode), *followed, *tail])


def _with_layer_rows(analysis: Analysis, layer_rows: int, most: int, order: Order) -> TableRows:
    """A table with so many rows about layers, if there are as many; those of work outside layers come on top."""
    table = table_rows(analysis, most=min(most, layer_rows + 1), order=order)
    for size in range(layer_rows + 2, most + 1):
        if not table.hidden_layers:
            break
        larger = table_rows(analysis, most=size, order=order)
        if sum(row.kind in ("layer", "median", "odd") for row in larger.rows) > layer_rows:
            break
        table = larger
    return table


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
