"""A comparison as text that fits a terminal, and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler_wrapper.analysis.statistics import sum_of_known
from profiler_wrapper.comparison.match import folded_name, like_name
from profiler_wrapper.comparison.model import ChangedLayer, ComparedRow, ComparedTotal, Comparison
from profiler_wrapper.comparison.verdict import BASIS, SIZES, decision_words, percent, place, place_of, work_words
from profiler_wrapper.reports.result_json import NS_PER_US, csv_cell
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.units import MIB

# --------------------------------------------------------------------------------------------------
# The rows of a printed comparison: own times of like layers together, so that they add up. Numbers, no drawing.

_FEWEST_FOLDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRow:
    """Own time of like layers in one phase, nanoseconds per step; None where a side has none of them."""

    label: str
    phase: str
    a_ns: float | None
    b_ns: float | None
    retained_a: float | None = None  # bytes, of all of them, with what is inside of them
    retained_b: float | None = None
    flops_a: int | None = None
    flops_b: int | None = None
    slower: tuple[str, ...] = ()  # those that are, by name
    faster: tuple[str, ...] = ()
    members: int = 1

    @property
    def difference_ns(self) -> float:
        return (self.b_ns or 0.0) - (self.a_ns or 0.0)


def folded_rows(comparison: Comparison) -> list[FoldedRow]:
    """Every row once, those that changed most first; what has no layer is among them."""
    groups: dict[tuple[str, str, str], list[ComparedRow]] = defaultdict(list)
    for row in comparison.rows:
        groups[like_name(row.layer, row.row.block)[0], row.row.class_name, row.phase].append(row)
    folded: list[FoldedRow] = []
    for rows in groups.values():
        members = [rows] if len(rows) >= _FEWEST_FOLDED else [[row] for row in rows]
        folded += [_folded(group, comparison) for group in members]
    for reason in comparison.unattributed:
        times = reason.time_a_ns / comparison.steps_a, reason.time_b_ns / comparison.steps_b
        folded.append(FoldedRow(label=f"(unattributed) {reason.reason}", phase="", a_ns=times[0], b_ns=times[1]))
    return sorted(folded, key=lambda row: -abs(row.difference_ns))


def _folded(rows: Sequence[ComparedRow], comparison: Comparison) -> FoldedRow:
    sides_a = [row.a for row in rows if row.a is not None]
    sides_b = [row.b for row in rows if row.b is not None]
    outside = "optimizer" if rows[0].phase == "optimizer" else "outside layers"
    return FoldedRow(
        label=folded_name({row.layer: row.row.block for row in rows}) or outside,
        phase=rows[0].phase,
        a_ns=sum(side.self_time_ns for side in sides_a) / comparison.steps_a if sides_a else None,
        b_ns=sum(side.self_time_ns for side in sides_b) / comparison.steps_b if sides_b else None,
        retained_a=sum_of_known(side.retained_bytes for side in sides_a),
        retained_b=sum_of_known(side.retained_bytes for side in sides_b),
        flops_a=sum_of_known(side.self_flops_per_step for side in sides_a),
        flops_b=sum_of_known(side.self_flops_per_step for side in sides_b),
        slower=tuple(row.layer for row in rows if row.decision == "slower"),
        faster=tuple(row.layer for row in rows if row.decision == "faster"),
        members=len(rows),
    )


_LONGEST_NAME = 60
_LEAST_NAME_WIDTH = 12
_LEAST_OWN_NAME_WIDTH = 22
_MOST_WORK = 8
_LEGEND = (
    "times: means of the steps; ±: the standard error of the change, which is certain beyond 4 of them, of the median "
    "step, where nearly all steps go that way"
)
_NO_COMMON = 0.0005


def compare_text(comparison: Comparison, *, rows: int = 20, width: int = 100, unicode: bool = False) -> str:
    """The verdict, the totals, what changed, and own times per step, those that changed most first.

    The own times and `(more)` add up to the time of a step.
    """
    parts = ["\n".join(textwrap.wrap(clean(comparison.verdict, unicode=unicode), width))]
    parts.append("\n".join(_sides(comparison, width, unicode)))
    totals = [_total(total, unicode) for total in comparison.totals]
    parts.append(_fitting(("per step", "a", "b", "change", ""), totals, width, spare=(4, 1)))
    parts[-1] += "".join(f"\n{line}" for line in textwrap.wrap(clean(_legend(comparison), unicode=unicode), width))
    if comparison.culprits:
        room = max(_LEAST_NAME_WIDTH, width - 36)
        changed = [_changed_layer(one, room, unicode) for one in comparison.culprits]
        parts.append(_fitting(("changed otherwise", "ms a step", "change", "of all"), changed, width, spare=(3, 1)))
        if abs(comparison.common) >= _NO_COMMON:
            left_out = f"ms a step: beyond the {percent(comparison.common, None)} that all layers have in common"
            parts[-1] += "".join(f"\n{line}" for line in textwrap.wrap(left_out, width))
    if comparison.work:
        parts.append(_work_table(comparison, width, unicode))
    parts.append(_table(comparison, rows, width, unicode))
    notes = [f"note: {clean(note, unicode=unicode)}" for note in comparison.notes]
    notes += [f"attention of {clean(layer, unicode=unicode)}: {a} -> {b}" for layer, a, b in comparison.backend_changes]
    parts.append("\n".join(line for note in notes for line in textwrap.wrap(note, width, subsequent_indent="  ")))
    return "\n\n".join(part for part in parts if part)


def _legend(comparison: Comparison) -> str:
    """What stands below the totals; where a change is told with low confidence, that it is."""
    parts = [_LEGEND] if any(total.error is not None for total in comparison.totals) else []
    if comparison.confidence == "low" and comparison.decision in ("slower", "faster"):
        parts.append(f"{comparison.decision}: with low confidence, no layer explains most of it")
    return "; ".join(parts)


def _sides(comparison: Comparison, width: int, unicode: bool) -> Iterable[str]:
    for name, path, steps in (
        ("a", comparison.name_a, comparison.steps_a),
        ("b", comparison.name_b, comparison.steps_b),
    ):
        count = f"{steps} step{'s' if steps > 1 else ''}"
        yield f"{name}: {shorten(clean(path, unicode=unicode), width - len(count) - 6)}, {count}"
    for one in comparison.differences:
        line = f"differs: {one.what}" + ("" if one.what == SIZES else f": {one.a} -> {one.b}")
        yield shorten(clean(line, unicode=unicode), width)


def _total(total: ComparedTotal, unicode: bool) -> tuple[str, str, str, str, str]:
    change = percent(total.change, total.error) if total.change is not None else ""
    a, b = (amount(value, total.unit) for value in (total.a, total.b))
    return total.name, a, b, clean(change, unicode=unicode), decision_words(total)


def amount(value: float | None, unit: str) -> str:
    """A number with its unit; what is not known is `-`."""
    if value is None:
        return "-"
    if unit == "ns":
        return f"{value / 1e6:.3f} ms"
    if unit == "bytes":
        return f"{value / MIB:.1f} MiB"
    if unit == "flops":
        return f"{value / 1e9:.3f} GFLOP"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:g}"


def _changed_layer(one: ChangedLayer, room: int, unicode: bool) -> tuple[str, str, str, str]:
    change = (
        percent(one.change, one.error) if one.change is not None else "only in " + ("b" if one.change_ns > 0 else "a")
    )
    share = "" if one.share is None else f"{100 * one.share:.0f} %"
    name = shorten(clean(place(one), unicode=unicode), room)
    return name, f"{one.change_ns / 1e6:+.3f}", clean(change, unicode=unicode), share


def _work_table(comparison: Comparison, width: int, unicode: bool) -> str:
    """The layers with other work; names give way to what is said of them, down to `_LEAST_NAME_WIDTH`."""
    shown = comparison.work[:_MOST_WORK]
    words = [work_words(one, comparison.time_basis) for one in shown]
    room = max(_LEAST_NAME_WIDTH, width - max(map(len, words)) - 2)
    names = [shorten(clean(place_of(one.layer, one.phase), unicode=unicode), room) for one in shown]
    lines = [(name, shorten(said, width - max(map(cells, names)) - 2)) for name, said in zip(names, words, strict=True)]
    table = grid(("other work", "a step"), lines, left_columns=2)
    more = len(comparison.work) - len(shown)
    return table + (f"\n({more} more)" if more else "")


def _table(comparison: Comparison, most: int, width: int, unicode: bool) -> str:
    every = folded_rows(comparison)
    comparable = all(one.what != BASIS for one in comparison.differences)
    shown = every[:most]
    rest = every[most:]
    lines = [_line(row, comparable) for row in shown]
    if rest:
        a, b = sum(row.a_ns or 0.0 for row in rest), sum(row.b_ns or 0.0 for row in rest)
        lines.append((f"({len(rest)} more)", "", _ms(a), _ms(b), f"{(b - a) / 1e6:+.3f}", "", ""))
    a, b = (sum((row.a_ns if side == "a" else row.b_ns) or 0.0 for row in every) for side in "ab")
    lines.append(
        ("TOTAL", "", _ms(a), _ms(b), f"{(b - a) / 1e6:+.3f}", percent(b / a - 1, None) if a and comparable else "", "")
    )
    header = ("mean own time a step", "phase", "a ms", "b ms", "b - a", "change", "")
    others = grid(("", *header[1:]), [("", *line[1:]) for line in lines], left_columns=2).split("\n")
    room = min(_LONGEST_NAME, max(_LEAST_OWN_NAME_WIDTH, width - max(map(cells, others)) - 2))
    names = _distinct([clean(line[0], unicode=unicode) for line in lines], room)
    lines = [(name, *line[1:]) for name, line in zip(names, lines, strict=True)]
    return _fitting(header, lines, width, spare=(2, 5, 3), left_columns=2)


def _fitting(
    header: Sequence[str], lines: Sequence[Sequence[str]], width: int, *, spare: Sequence[int], left_columns: int = 1
) -> str:
    """The table, without columns of `spare` from the first on where it is too wide."""
    drawn = grid(header, lines, left_columns=left_columns)
    for last in range(1, len(spare) + 1):
        if max(cells(line) for line in drawn.split("\n")) <= width:
            break
        kept = [["" if i in spare[:last] else text for i, text in enumerate(line)] for line in lines]
        drawn = grid(header, kept, left_columns=left_columns)
    return drawn


def _distinct(names: Sequence[str], room: int) -> list[str]:
    """Each in at most `room` columns: cut in the middle, and where two would then be one, at its begin."""
    short = [shorten(name, room) for name in names]
    whole: dict[str, set[str]] = defaultdict(set)
    for name, cut in zip(names, short, strict=True):
        whole[cut].add(name)
    return [
        cut if len(whole[cut]) == 1 or not name.isascii() else f"...{name[3 - room :]}"
        for name, cut in zip(names, short, strict=True)
    ]


def _line(row: FoldedRow, comparable: bool) -> tuple[str, ...]:
    change = percent(row.b_ns / row.a_ns - 1, None) if comparable and row.a_ns and row.b_ns is not None else ""
    return (
        row.label,
        "" if row.phase == row.label else row.phase.replace("_", " "),
        _ms(row.a_ns),
        _ms(row.b_ns),
        f"{row.difference_ns / 1e6:+.3f}",
        change,
        _said(row),
    )


def _said(row: FoldedRow) -> str:
    if row.a_ns is None or row.b_ns is None:
        return "only in b" if row.a_ns is None else "only in a"
    decided = [
        word if row.members == 1 else f"{len(names)} {word}"
        for names, word in ((row.slower, "slower"), (row.faster, "faster"))
        if names
    ]
    return ", ".join(decided)


def _ms(value_ns: float | None) -> str:
    return "" if value_ns is None else f"{value_ns / 1e6:.3f}"


_CSV_OF_ROW = ("layer", "phase", "class_name", "kind", "decision", "change", "error")
_CSV_OF_SIDE = (
    "time_per_step_us",
    "self_time_per_step_us",
    "calls_per_step",
    "self_events_per_step",
    "flops_per_step",
    "retained_bytes",
    "peak_bytes",
)


def compare_csv(comparison: Comparison) -> str:
    """A line per layer and phase; what has no layer, and what is not attributed, at the end. Empty: not known."""
    columns = [*_CSV_OF_ROW, *(f"{name}_{side}" for name in _CSV_OF_SIDE for side in "ab")]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    steps = {"a": comparison.steps_a, "b": comparison.steps_b}
    for row in comparison.rows:
        whole = row.to_dict(comparison.steps_a, comparison.steps_b)
        line = {name: csv_cell(whole[name]) for name in _CSV_OF_ROW}
        for side, of_side in (("a", row.a), ("b", row.b)):
            if of_side is not None:
                own = whole[side] | {"self_time_per_step_us": of_side.self_time_ns / steps[side] / NS_PER_US}
                line |= {f"{name}_{side}": own[name] for name in _CSV_OF_SIDE}
        writer.writerow(line)
    for reason in comparison.unattributed:
        times = {"a": reason.time_a_ns, "b": reason.time_b_ns}
        own = {f"self_time_per_step_us_{side}": times[side] / steps[side] / NS_PER_US for side in "ab"}
        writer.writerow({"layer": f"(unattributed) {reason.reason}"} | own)
    return out.getvalue()
