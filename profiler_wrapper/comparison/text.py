"""A comparison in words: its verdict in one sentence, a text that fits a terminal, a CSV, and the page."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from profiler_wrapper.analysis.statistics import sum_of_known
from profiler_wrapper.comparison.match import BASIS, HARMLESS, changed, folded_name, like_name, what_differs
from profiler_wrapper.comparison.model import (
    ChangedLayer,
    ComparedRow,
    ComparedTotal,
    Comparison,
    Difference,
    WorkChange,
)
from profiler_wrapper.comparison.times import HALF, LEAST_CHANGE, NAMED_SHARE, TimeChanges
from profiler_wrapper.errors import first_few
from profiler_wrapper.reports.page import page_text
from profiler_wrapper.reports.result_json import NS_PER_US, csv_cell, to_plain
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.units import MIB, TIME_NAMES

# --- The verdict ---

CLOCK = "step on the clock"
PEAK = "peak memory"
SURE = 0.05  # standard error of the change of a step: with more, no difference is found where there may be one
LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"
_MOST_DIFFERENCES = 3  # in the verdict
_MOST_LAYERS = 2  # with other work
_SAME_FLOPS = 0.01  # FLOPs that are nearer are as good as equal
_LEAST_MEMORY_BYTES = 64 << 10
_LONGEST_DIFFERENCE = 60


def verdict_of(
    phases: Iterable[tuple[str, float]],
    differences: Sequence[Difference],
    totals: Sequence[ComparedTotal],
    changes: TimeChanges,
    changed: Sequence[ChangedLayer],
    work: Sequence[WorkChange],
    backend_changes: Sequence[tuple[str, str, str]],
    bases: tuple[str, str],
) -> str:
    """What is not alike, then what changed, then where. `totals`: the time of a step first; `bases` of time: a, b.

    The largest certain difference comes first: phases of one side and their nanoseconds, the time of a step, else its
    peak memory, else its FLOPs.
    """
    total, flops = totals[0], _other_flops(totals)
    like_load = not flops and _like_load(changed, changes, total)
    certain = total.decision in ("slower", "faster") and not like_load
    time = [_of_total(total, like_load, bases)]
    if certain:
        time += [flops, _where(changed, total, flops)]
    elif changed and _time_ns(changed[0], changes) >= NAMED_SHARE * max(total.a or 0.0, total.b or 0.0):
        time.append(f"but {_beside_the_rest(changed, changes.left_out)}")
    memory = _of_memory(totals)
    parts = [*time, memory] if certain else [memory or (flops and f"b runs {flops}"), *time]
    alone = [f"{name}: {ns / 1e6:+.1f} ms a step, only in {'ab'[ns > 0]}" for name, ns in phases]
    said = ", ".join(part for part in (*alone, *parts) if part)
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in backend_changes[:1])
    return f"{_unlike(differences)}{said}{_on_the_clock(totals)}{attention}{_other_work(work, bases[1])}"


def _unlike(differences: Sequence[Difference]) -> str:
    named = [one for one in differences if one.what not in HARMLESS]
    if not named:
        return ""
    words = [shorten(changed(one.what, one.a, one.b), _LONGEST_DIFFERENCE) for one in named]
    return f"not alike ({first_few(words, _MOST_DIFFERENCES, between='; ')}): "


def _of_total(total: ComparedTotal, like_load: bool, bases: tuple[str, str]) -> str:
    if not total.a or not total.b:
        return "the time of a step is not known on both sides"
    a, b = (f"{value / 1e6:.3f}" for value in (total.a, total.b))
    of_a, of_b = (f"ms of {TIME_NAMES[basis]}" for basis in bases)
    if of_a != of_b:
        return f"times are not judged, because they are of a CPU and of a device (a {a} {of_a} a step, b {b} {of_b})"
    times = f"{a} -> {b} {of_b} a step"
    if total.decision == "not judged":
        return f"not judged, because one side marks no steps ({times})"
    if total.decision in ("no difference", "not certain"):
        unknown = ", noise not known" if total.error is None else ""
        certain = total.decision == "no difference"
        words = "no difference in all" if certain else "no certain difference of the whole step"
        why = "" if certain else f"; {total.reason}"
        return f"{words} ({percent(total.change, total.error)}{unknown}; {times}{why})"
    more = abs(total.change or 0.0)
    if like_load:
        return (
            f"b took {100 * more:.1f} % {'more' if total.decision == 'slower' else 'less'} time, {LIKE_LOAD} ({times})"
        )
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {100 * more:.1f} % {error} {total.decision} ({times})"


def uncertain(total: ComparedTotal) -> bool:
    """Whether noise may hide a difference, or may have made the one that is shown."""
    large = abs(total.change or 0.0) >= LEAST_CHANGE or (total.error is not None and total.error > SURE)
    return total.decision == "no difference" and large


def decision_words(total: ComparedTotal) -> str:
    """`"slower"`, `"not certain"` ..."""
    return "" if total.decision == "not judged" else total.decision


def explained(changed: Sequence[ChangedLayer], total: ComparedTotal) -> float:
    """Share of the change of a step that is in layers which changed otherwise than the rest."""
    return sum(one.share or 0.0 for one in changed if (one.change_ns > 0) == (total.decision == "slower"))


def _like_load(changed: Sequence[ChangedLayer], changes: TimeChanges, total: ComparedTotal) -> bool:
    """Load and clock of a machine change from run to run, and no step of a run shows it: on a CPU, by any amount."""
    if total.decision not in ("slower", "faster") or explained(changed, total) >= HALF:
        return False
    if changes.common_beyond_noise or changes.shared < HALF:
        return changes.common_beyond_noise
    alone = not changed and total.change is not None and changes.common / total.change >= HALF
    return changes.on_cpu or alone


def _where(changed: Sequence[ChangedLayer], total: ComparedTotal, flops: str) -> str:
    same_way = [one for one in changed if (one.change_ns > 0) == (total.decision == "slower")]
    if not same_way:
        return "" if flops else "and no layer stands out"
    share = 100 * (same_way[0].share or 0.0)
    return f"{f'{share:.0f} %' if share < 100 else 'all'} of it in {place_of(same_way[0])}"


def _time_ns(one: ChangedLayer, changes: TimeChanges) -> float:
    """What a changed layer takes of a step, on the side where it takes more."""
    if one.change is None or one.change == changes.left_out:
        return abs(one.change_ns)
    return one.change_ns / (one.change - changes.left_out) * max(1.0, 1 + one.change)


def _beside_the_rest(changed: Sequence[ChangedLayer], common: float) -> str:
    """The first of them, beside what all have in common, and how many more."""
    first = changed[0]
    more = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
    if first.change is None:
        return f"{place_of(first)} is only in {'b' if first.change_ns > 0 else 'a'}{more}"
    error = f" (±{100 * first.error:.1f})" if first.error is not None else ""
    rest = f", where all layers have {percent(common)} in common" if abs(common) >= _NO_COMMON else ""
    way = "slower" if first.change > 0 else "faster"
    return f"{place_of(first)} is {100 * abs(first.change):.1f} %{error} {way}{rest}{more}"


def _other_flops(totals: Sequence[ComparedTotal]) -> str:
    """How many FLOPs more or fewer, where both sides know."""
    change = next((one.change for one in totals if one.unit == "flops" and one.change is not None), None)
    if change is None or abs(change) <= _SAME_FLOPS:
        return ""
    return f"with {100 * abs(change):.1f} % {'more' if change > 0 else 'fewer'} FLOPs"


def _of_memory(totals: Sequence[ComparedTotal]) -> str:
    """The peak, where it is another."""
    peak = next(one for one in totals if one.name == PEAK)
    if not peak.a or not peak.b or not peak.change or abs(peak.change) < LEAST_CHANGE:
        return ""
    if abs(peak.b - peak.a) < _LEAST_MEMORY_BYTES:
        return ""
    word = "more" if peak.change > 0 else "less"
    sizes = f"{peak.a / MIB:.1f} -> {peak.b / MIB:.1f} MiB"
    return f"b needs {100 * abs(peak.change):.1f} % {word} memory at its peak ({sizes})"


def _on_the_clock(totals: Sequence[ComparedTotal]) -> str:
    """Where a step took longer or shorter and its work did not."""
    wall = next(one for one in totals if one.name == CLOCK)
    if wall.decision not in ("slower", "faster") or wall.decision == totals[0].decision:
        return ""
    more = f"{100 * abs(wall.change or 0.0):.1f} % {'more' if wall.decision == 'slower' else 'less'} time"
    return f"; on the clock a step took {more} ({(wall.a or 0) / 1e6:.3f} -> {(wall.b or 0) / 1e6:.3f} ms)"


def _other_work(work: Sequence[WorkChange], basis: str) -> str:
    """The layers with most other work; exact, so it is said whatever the noise."""
    words = [f"{place_of(one)} {work_words(one, basis)}" for one in work]
    return f"; other work: {first_few(words, _MOST_LAYERS, between='; ')}" if words else ""


def work_words(one: WorkChange, basis: str) -> str:
    """`+12.5 % FLOPs, +12 ops`: what differs a step; `basis`: what events are."""
    words = [f"{one.time_a_ns / 1e6:.1f} -> {one.time_b_ns / 1e6:.1f} ms"]
    if one.delta("flops"):
        flops = one.delta("flops") / one.flops_a if one.flops_a else 0.0
        words.append(f"{100 * flops:+.1f} % FLOPs" if one.flops_a else f"{one.delta('flops') / 1e9:+.3f} GFLOP")
    if (one.flops_a is None) != (one.flops_b is None):
        words.append(f"FLOPs not known in {'a' if one.flops_a is None else 'b'}")
    if abs(one.delta("events")) >= 1:
        words.append(f"{one.delta('events'):+.0f} {'ops' if basis == 'cpu' else 'device events'}")
    if one.delta("calls"):
        words.append(f"{one.delta('calls'):+g} calls")
    if abs(one.delta("retained")) >= _LEAST_MEMORY_BYTES:
        words.append(f"{one.delta('retained') / MIB:+.1f} MiB kept")
    return ", ".join(words)


def place_of(one: ChangedLayer | WorkChange) -> str:
    """`layers.7.mlp backward`; what has no module goes by its phase."""
    return f"{one.layer} {one.phase or ''}".strip() or "code between calls"


def percent(change: float | None, error: float | None = None) -> str:
    """`+8.2 % ±1.1`; a change that is not known is `-`."""
    if change is None or not math.isfinite(change):
        return "-"
    return f"{100 * change:+.1f} %" + (f" ±{100 * error:.1f}" if error is not None else "")


# --------------------------------------------------------------------------------------------------
# The rows of a printed comparison: self times of like layers together, so that they add up. Numbers, no drawing.

_FEWEST_FOLDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRow:
    """Own time of like layers in one phase, nanoseconds per step; None where a side has none of them."""

    label: str
    phase: str  # in words; "" where the label says it
    a_ns: float | None
    b_ns: float | None
    difference_ns: float
    retained_a: float | None = None  # bytes, of all of them, with what is inside of them
    retained_b: float | None = None
    flops_a: int | None = None
    flops_b: int | None = None
    slower: tuple[str, ...] = ()  # those that are, by name
    faster: tuple[str, ...] = ()
    members: int = 1


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
        a, b = reason.time_a_ns / comparison.steps_a, reason.time_b_ns / comparison.steps_b
        label = f"(unattributed) {reason.reason}"
        folded.append(FoldedRow(label=label, phase="", a_ns=a, b_ns=b, difference_ns=b - a))
    return sorted(folded, key=lambda row: -abs(row.difference_ns))


def _folded(rows: Sequence[ComparedRow], comparison: Comparison) -> FoldedRow:
    sides_a = [row.a for row in rows if row.a is not None]
    sides_b = [row.b for row in rows if row.b is not None]
    phase = rows[0].phase
    label = folded_name({row.layer: row.row.block for row in rows}) or (
        phase if phase == "optimizer" else "outside layers"
    )
    a = sum(side.self_time_ns for side in sides_a) / comparison.steps_a if sides_a else None
    b = sum(side.self_time_ns for side in sides_b) / comparison.steps_b if sides_b else None
    return FoldedRow(
        label=label,
        phase="" if phase == label else phase,
        a_ns=a,
        b_ns=b,
        difference_ns=(b or 0.0) - (a or 0.0),
        retained_a=sum_of_known(side.retained_bytes for side in sides_a),
        retained_b=sum_of_known(side.retained_bytes for side in sides_b),
        flops_a=sum_of_known(side.self_flops_per_step for side in sides_a),
        flops_b=sum_of_known(side.self_flops_per_step for side in sides_b),
        slower=tuple(row.layer for row in rows if row.decision == "slower"),
        faster=tuple(row.layer for row in rows if row.decision == "faster"),
        members=len(rows),
    )


# --- On a terminal ---

_LONGEST_NAME = 60
_LEAST_NAME_WIDTH = 12
_LEAST_OWN_NAME_WIDTH = 22
_MOST_WORK = 8
_LEGEND = "times: means of the steps; ±: the standard error of the change"
_NO_COMMON = 0.0005


def compare_text(comparison: Comparison, *, rows: int = 20, width: int = 100, unicode: bool = False) -> str:
    """The verdict, the totals, what changed, and self times per step, those that changed most first.

    The self times and `(more)` add up to the time of a step.
    """

    def wrapped(text: str, indent: str = "") -> str:
        return "\n".join(textwrap.wrap(clean(text, unicode=unicode), width, subsequent_indent=indent))

    totals = [_total(total, unicode) for total in comparison.totals]
    parts = [wrapped(comparison.verdict), "\n".join(_sides(comparison, width, unicode))]
    parts.append(_fitting(("per step", "a", "b", "change", ""), totals, width, spare=(4, 1)))
    parts[-1] += f"\n{wrapped(_legend(comparison))}"
    if comparison.culprits:
        room = max(_LEAST_NAME_WIDTH, width - 36)
        changed = [_changed_layer(one, room, unicode) for one in comparison.culprits]
        parts.append(_fitting(("changed otherwise", "ms a step", "change", "of all"), changed, width, spare=(3, 1)))
        if abs(comparison.common) >= _NO_COMMON:
            beyond = f"ms a step: beyond the {percent(comparison.common)} that all layers have in common"
            parts[-1] += f"\n{wrapped(beyond)}"
    if comparison.work:
        parts.append(_work_table(comparison, width, unicode))
    parts.append(_table(comparison, rows, width, unicode))
    notes = [f"note: {note}" for note in comparison.notes]
    notes += [f"attention of {layer}: {a} -> {b}" for layer, a, b in comparison.backend_changes]
    parts.append("\n".join(wrapped(note, "  ") for note in notes))
    return "\n\n".join(part.strip("\n") for part in parts if part)


def _legend(comparison: Comparison) -> str:
    """What stands below the totals; where a change is told with low confidence, that it is."""
    parts = [_LEGEND] if any(total.error is not None for total in comparison.totals) else []
    if comparison.confidence == "low" and comparison.decision in ("slower", "faster"):
        parts.append(f"{comparison.decision}: with low confidence, no layer explains most of it")
    uncertain_ones = (total for total in comparison.totals if total.decision == "not certain")
    parts += [f"{total.name} not certain: {total.reason}" for total in uncertain_ones]
    change = comparison.totals[0].change
    if comparison.decision == "not certain" and change and comparison.common / change >= HALF:
        parts.append("all layers changed alike, as under other load or clock")
    return "; ".join(parts)


def _sides(comparison: Comparison, width: int, unicode: bool) -> Iterable[str]:
    for name, path, steps in (
        ("a", comparison.name_a, comparison.steps_a),
        ("b", comparison.name_b, comparison.steps_b),
    ):
        count = f"{steps} step{'s' if steps > 1 else ''}"
        yield f"{name}: {shorten(clean(path, unicode=unicode), width - len(count) - 6)}, {count}"
    lines = what_differs([(one.what, one.a, one.b) for one in comparison.differences])
    yield from (shorten(clean(line, unicode=unicode), width) for line in lines)


def _total(total: ComparedTotal, unicode: bool) -> tuple[str, str, str, str, str]:
    change = percent(total.change, total.error) if total.change is not None else ""
    a, b = (_amount(value, total.unit) for value in (total.a, total.b))
    return total.name, a, b, clean(change, unicode=unicode), decision_words(total)


def _amount(value: float | None, unit: str) -> str:
    """A number with its unit; what is not known is `-`."""
    if value is None:
        return "-"
    per, form = {"ns": (1e6, "{:.3f} ms"), "bytes": (MIB, "{:.1f} MiB"), "flops": (1e9, "{:.3f} GFLOP")}.get(
        unit, (0.01, "{:.1f} %") if unit == "share" else (1, "{:g}")
    )
    return form.format(value / per)


def _changed_layer(one: ChangedLayer, room: int, unicode: bool) -> tuple[str, str, str, str]:
    only = f"only in {'b' if one.change_ns > 0 else 'a'}"
    change = percent(one.change, one.error) if one.change is not None else only
    share = "" if one.share is None else f"{100 * one.share:.0f} %"
    name = shorten(clean(place_of(one), unicode=unicode), room)
    return name, f"{one.change_ns / 1e6:+.3f}", clean(change, unicode=unicode), share


def _work_table(comparison: Comparison, width: int, unicode: bool) -> str:
    """The layers with other work; names give way to what is said of them, down to `_LEAST_NAME_WIDTH`."""
    shown = comparison.work[:_MOST_WORK]
    words = [work_words(one, comparison.time_basis) for one in shown]
    room = max(_LEAST_NAME_WIDTH, width - max(map(len, words)) - 2)
    names = [shorten(clean(place_of(one), unicode=unicode), room) for one in shown]
    lines = [(name, shorten(said, width - max(map(cells, names)) - 2)) for name, said in zip(names, words, strict=True)]
    table = grid(("other work", "a step"), lines, left_columns=2)
    more = len(comparison.work) - len(shown)
    return table + (f"\n({more} more)" if more else "")


def _table(comparison: Comparison, most: int, width: int, unicode: bool) -> str:
    every = folded_rows(comparison)
    comparable = all(one.what != BASIS for one in comparison.differences)
    rest = every[most:]
    lines = [_line(row.label, row.phase, row.a_ns, row.b_ns, comparable, _said(row)) for row in every[:most]]
    for label, rows in ((f"({len(rest)} more)", rest), ("TOTAL", every)):
        a, b = sum(row.a_ns or 0.0 for row in rows), sum(row.b_ns or 0.0 for row in rows)
        lines += [_line(label, "", a, b, comparable and label == "TOTAL")] if rows else []
    header = ("mean self time a step", "phase", "a ms", "b ms", "b - a", "change", "")
    others = grid(("", *header[1:]), [("", *line[1:]) for line in lines], left_columns=2).split("\n")
    room = min(_LONGEST_NAME, max(_LEAST_OWN_NAME_WIDTH, width - max(map(cells, others)) - 2))
    lines = [(_end(clean(line[0], unicode=unicode), room), *line[1:]) for line in lines]
    return _fitting(header, lines, width, spare=(2, 5, 3), left_columns=2)


def _line(
    label: str, phase: str, a_ns: float | None, b_ns: float | None, with_change: bool, said: str = ""
) -> tuple[str, ...]:
    a, b = ("" if value is None else f"{value / 1e6:.3f}" for value in (a_ns, b_ns))
    change = percent(b_ns / a_ns - 1) if with_change and a_ns and b_ns is not None else ""
    return label, phase, a, b, f"{((b_ns or 0.0) - (a_ns or 0.0)) / 1e6:+.3f}", change, said


def _said(row: FoldedRow) -> str:
    if row.a_ns is None or row.b_ns is None:
        return "only in b" if row.a_ns is None else "only in a"
    decided = [(row.slower, "slower"), (row.faster, "faster")]
    return ", ".join(word if row.members == 1 else f"{len(names)} {word}" for names, word in decided if names)


def _end(name: str, room: int) -> str:
    """In at most `room` columns; the end of a layer's name tells it from others."""
    if cells(name) <= room or not name.isascii():
        return shorten(name, room)
    return f"...{name[3 - room :]}"


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


# --- As files ---

_CSV_OF_ROW = ("layer", "phase", "class_name", "kind", "decision", "change", "error")
_CSV_OF_SIDE = (
    "time_per_step_us", "self_time_per_step_us", "calls_per_step", "self_events_per_step", "flops_per_step",
    "retained_bytes", "peak_bytes",
)  # fmt: skip


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


def compare_page(comparison: Comparison) -> str:
    """One page with both sides, which opens from disk, in the frame of a run's page."""
    return page_text(_page_data(comparison))


def _page_data(comparison: Comparison) -> dict[str, Any]:
    """What the page's scripts read: `Comparison.to_dict` with what the frame asks for."""
    steps = " and ".join(
        f"{steps} step{'s' if steps > 1 else ''}" for steps in (comparison.steps_a, comparison.steps_b)
    )
    return {
        "page": {
            "kind": "compare",
            "title": f"{comparison.name_b} against {comparison.name_a}",
            "machine": "",
            "steps_in_words": steps,
        },
        "summary": {"verdict": comparison.verdict},
        "warnings": list(comparison.notes),
        "comparison": comparison.to_dict(),
        "decisions": [decision_words(total) for total in comparison.totals],
        "work": [{"place": place_of(one), "words": work_words(one, comparison.time_basis)} for one in comparison.work],
        "folded": [to_plain(row) for row in folded_rows(comparison)],
    }
