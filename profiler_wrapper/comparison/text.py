"""A comparison, and its words: a verdict in one sentence, a text that fits a terminal, a CSV, and the page."""

from __future__ import annotations

import csv
import io
import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.comparison.match import BASIS, HARMLESS, changed, folded_name, like_name, what_differs
from profiler_wrapper.comparison.model import (
    LEAST_BYTES,
    SAME,
    ChangedLayer,
    ComparedClass,
    ComparedReason,
    ComparedRow,
    ComparedTotal,
    Decision,
    Difference,
    WorkChange,
)
from profiler_wrapper.comparison.times import FEWEST, HALF, LEAST_CHANGE, NAMED_SHARE, TimeChanges, UnitKey
from profiler_wrapper.errors import first_few
from profiler_wrapper.reports.page import page_text
from profiler_wrapper.reports.result_json import NS_PER_US, csv_cell, plain, to_plain
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.tables.model import LayerRow
from profiler_wrapper.tables.statistics import sum_of_known
from profiler_wrapper.terminal import unicode_terminal
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.units import MIB, TIME_NAMES

COMPARISON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results side by side. `print(comparison)` shows the verdict and what changed most."""

    verdict: str  # one sentence
    decision: Decision  # of the time of a step
    confidence: Literal[
        "high", "low"
    ]  # in `decision`; low: no layer explains it, as under other load; or much noise, or not known
    name_a: str
    name_b: str
    time_basis: Literal["device", "cpu"]  # of `b`
    steps_a: int  # what sums are divided by to give a step
    steps_b: int
    noise_known: bool
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    totals: tuple[ComparedTotal, ...]
    culprits: tuple[ChangedLayer, ...]  # what changed otherwise than the rest, the largest change first
    work: tuple[WorkChange, ...]  # what does other work, whatever its time: exact, the most first
    rows: tuple[ComparedRow, ...]  # in the order of `b`, behind them what only `a` has
    classes: tuple[ComparedClass, ...]
    unattributed: tuple[ComparedReason, ...]
    backend_changes: tuple[tuple[str, str, str], ...]  # attention's layers (folded), backends of a, of b
    common: float = 0.0  # relative change of all layers that `change_ns` of culprits leaves out, as load does it

    def __str__(self) -> str:
        return self.table()

    def table(self, *, rows: int = 20, width: int = 100) -> str:
        """Return the verdict, totals, what changed, and self times per step: at most `rows` of them by `width`."""
        return compare_text(self, rows=rows, width=width, unicode=unicode_terminal())

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a line per layer and phase, with both sides. Returns `path`.

        Raises:
            OSError: it cannot be written.
        """
        return _write(path, compare_csv(self))

    def write_page(self, path: str | os.PathLike[str]) -> Path:
        """Write one page with both sides, which opens from disk and loads nothing. Returns `path`.

        Raises:
            OSError: it cannot be written.
        """
        return _write(path, page_text(_page_data(self)))

    def total(self, name: str) -> ComparedTotal:
        """Return one of `totals`.

        Raises:
            KeyError: there is none of this name.
        """
        return {total.name: total for total in self.totals}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: times in microseconds, sizes in bytes; the verdict first.

        {comparison_version, verdict, decision, confidence, a, b, time_basis, steps_a, steps_b, noise_known,
         differences[{what, a, b, of_time_only}], notes[], totals[{name, unit, a, b, change, error, decision,
         reason}],
         culprits[{layer, layers[], phase, change, error, change_us, share}],
         work[{layer, layers[], phase, flops_a, flops_b, events_a, events_b, calls_a, calls_b, retained_a, retained_b,
               time_a_us, time_b_us}],
         rows[{layer, class_name, kind, block, parent, depth, order, phase, a{...}|null, b{...}|null,
               change, error, decision}],
         classes[{class, phase, time_a_us, time_b_us, count_a, count_b, flops_per_step_a, flops_per_step_b}],
         unattributed[{reason, time_a_us, time_b_us}], backend_changes[{layer, a, b}], common}

        Changes are relative: 0.1 is 10 % more in b. Times of `rows` are sums over the timed trace with, beside
        them, those per step; of `totals` per step; counts and times of `classes` are sums.
        """
        own = {
            "totals": [total.to_dict() for total in self.totals],
            "rows": [row.to_dict(self.steps_a, self.steps_b) for row in self.rows],
            "backend_changes": [{"layer": layer, "a": a, "b": b} for layer, a, b in self.backend_changes],
        }
        return {"comparison_version": COMPARISON_VERSION} | {
            name.removeprefix("name_"): own[name] if name in own else plain(getattr(self, name))
            for name in (field.name for field in fields(self))
        }


def _write(path: str | os.PathLike[str], text: str) -> Path:
    with replacing(Path(path)) as beside:
        beside.write_text(text, encoding="utf-8")
    return Path(path)


# The verdict.

CLOCK = "step on the clock"
PEAK = "peak memory"
LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"
_MOST_DIFFERENCES = 3  # in the verdict
_MOST_LAYERS = 2  # with other work, in the verdict
_LONGEST_DIFFERENCE = 60  # columns


def verdict_of(found: Comparison, changes: TimeChanges, phases: Iterable[tuple[str, float]]) -> str:
    """Return what is not alike, then what changed, then where; `phases`: of one side, with their nanoseconds per step.

    The largest certain difference comes first: phases of one side, the time of a step, else its peak memory, else its
    FLOPs.
    """
    total, flops, memory = found.totals[0], _other_flops(found.totals), _other_memory(found.total(PEAK))
    like_load = not flops and _like_load(found, changes)
    parts = [f"{name}: {ns / 1e6:+.1f} ms a step, only in {'ab'[ns > 0]}" for name, ns in phases]
    if found.decision in ("slower", "faster") and not like_load:
        parts += [_time_words(found), flops, _where(found, flops), memory]
    else:
        first = found.culprits[0] if found.culprits else None
        least_ns = NAMED_SHARE * max(total.a or 0.0, total.b or 0.0)
        named = first is not None and changes.units[UnitKey(first.layers, first.phase)].time_ns >= least_ns
        parts += [memory or (flops and f"b runs {flops}"), _time_words(found, like_load)]
        parts += [f"but {_first_culprit(found)}"] if named else []
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in found.backend_changes[:1])
    work = [f"{place_of(one)} {work_words(one, found.time_basis)}" for one in found.work]
    other_work = f"; other work: {first_few(work, _MOST_LAYERS, between='; ')}" if work else ""
    clock = _clock_words(found.total(CLOCK), found.decision)
    return f"{_unlike(found.differences)}{', '.join(filter(None, parts))}{clock}{attention}{other_work}"


def explained(changed_layers: Iterable[ChangedLayer], decision: str) -> float:
    """Return the share of the change of a step that is in layers which changed otherwise than the rest."""
    return sum(one.share or 0.0 for one in changed_layers if (one.change_ns > 0) == (decision == "slower"))


def _like_load(found: Comparison, changes: TimeChanges) -> bool:
    """Whether load or clock may have changed the time of a step, as no step of a run shows: on a CPU, by any amount."""
    if found.decision not in ("slower", "faster") or explained(found.culprits, found.decision) >= HALF:
        return False
    if changes.common_beyond_noise or changes.shared < HALF:
        return changes.common_beyond_noise
    change = found.totals[0].change
    return changes.on_cpu or (not found.culprits and change is not None and changes.common / change >= HALF)


def _unlike(differences: Sequence[Difference]) -> str:
    named = [one for one in differences if one.what not in HARMLESS]
    words = [shorten(changed(one.what, one.a, one.b), _LONGEST_DIFFERENCE) for one in named]
    return f"not alike ({first_few(words, _MOST_DIFFERENCES, between='; ')}): " if words else ""


def _time_words(found: Comparison, like_load: bool = False) -> str:
    """Return how the time of a step changed."""
    total, of_b = found.totals[0], TIME_NAMES[found.time_basis]
    if not total.a or not total.b:
        return "the time of a step is not known on both sides"
    a, b = (f"{value / 1e6:.3f}" for value in (total.a, total.b))
    times = f"{a} -> {b} ms of {of_b} a step"
    bases = [TIME_NAMES[one.a] for one in found.differences if one.what == BASIS]
    if bases:
        both = f"a {a} ms of {bases[0]} a step, b {b} ms of {of_b}"
        return f"times are not judged, because they are of a CPU and of a device ({both})"
    if found.decision == "not judged":
        return f"not judged, because one side marks no steps ({times})"
    change = f"{percent(total.change, total.error)}{', noise not known' if total.error is None else ''}; {times}"
    if found.decision == "no difference":
        return f"no difference in all ({change})"
    if found.decision == "not certain":
        return f"no certain difference of the whole step ({change}; {total.reason})"
    size = f"{100 * abs(total.change or 0.0):.1f} %"
    if like_load:
        return f"b took {size} {'more' if found.decision == 'slower' else 'less'} time, {LIKE_LOAD} ({times})"
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {size} {error} {found.decision} ({times})"


def _where(found: Comparison, flops: str) -> str:
    same_way = [one for one in found.culprits if (one.change_ns > 0) == (found.decision == "slower")]
    if not same_way:
        return "" if flops else "and no layer stands out"
    share = 100 * (same_way[0].share or 0.0)
    return f"{f'{share:.0f} %' if share < 100 else 'all'} of it in {place_of(same_way[0])}"


def _first_culprit(found: Comparison) -> str:
    """Return what changed most apart from what all layers share, and how many more did."""
    first, more = found.culprits[0], len(found.culprits) - 1
    others = f", and {more} more changed" if more else ""
    if first.change is None:
        return f"{place_of(first)} is only in {'b' if first.change_ns > 0 else 'a'}{others}"
    error = f" (±{100 * first.error:.1f})" if first.error is not None else ""
    rest = f", where all layers have {percent(found.common)} in common" if _is_shown(found.common) else ""
    way = "slower" if first.change > 0 else "faster"
    return f"{place_of(first)} is {100 * abs(first.change):.1f} %{error} {way}{rest}{others}"


def _is_shown(change: float) -> bool:
    """Whether a change is more than `0.0 %` in words."""
    return abs(change) >= 0.0005


def _other_flops(totals: Iterable[ComparedTotal]) -> str:
    """Return how many FLOPs more or fewer, where both sides know."""
    change = next((one.change for one in totals if one.unit == "flops" and one.change is not None), 0.0)
    if abs(change) <= SAME:
        return ""
    return f"with {100 * abs(change):.1f} % {'more' if change > 0 else 'fewer'} FLOPs"


def _other_memory(peak: ComparedTotal) -> str:
    if not peak.a or not peak.b or abs(peak.change or 0.0) < LEAST_CHANGE or abs(peak.b - peak.a) < LEAST_BYTES:
        return ""
    more = f"{100 * abs(peak.change or 0.0):.1f} % {'more' if peak.b > peak.a else 'less'}"
    return f"b needs {more} memory at its peak ({peak.a / MIB:.1f} -> {peak.b / MIB:.1f} MiB)"


def _clock_words(clock: ComparedTotal, decision: str) -> str:
    """Return how long a step took, where that changed and its work did not."""
    if clock.decision not in ("slower", "faster") or clock.decision == decision:
        return ""
    more = f"{100 * abs(clock.change or 0.0):.1f} % {'more' if clock.decision == 'slower' else 'less'} time"
    return f"; on the clock a step took {more} ({(clock.a or 0) / 1e6:.3f} -> {(clock.b or 0) / 1e6:.3f} ms)"


def work_words(one: WorkChange, basis: str) -> str:
    """Return `+12.5 % FLOPs, +12 ops`: what differs a step; `basis`: what events are."""
    words = [f"{one.time_a_ns / 1e6:.1f} -> {one.time_b_ns / 1e6:.1f} ms"]
    flops, events, calls = one.delta("flops"), one.delta("events"), one.delta("calls")
    if flops:
        words.append(f"{100 * flops / one.flops_a:+.1f} % FLOPs" if one.flops_a else f"{flops / 1e9:+.3f} GFLOP")
    if (one.flops_a is None) != (one.flops_b is None):
        words.append(f"FLOPs not known in {'a' if one.flops_a is None else 'b'}")
    words += [f"{events:+.0f} {'ops' if basis == 'cpu' else 'device events'}"] if abs(events) >= 1 else []
    words += [f"{calls:+g} calls"] if calls else []
    if abs(one.delta("retained")) >= LEAST_BYTES:
        words.append(f"{one.delta('retained') / MIB:+.1f} MiB kept")
    return ", ".join(words)


def place_of(one: ChangedLayer | WorkChange) -> str:
    """Return `layers.7.mlp backward`; what has no module goes by its phase."""
    return f"{one.layer} {one.phase or ''}".strip() or "code between calls"


def percent(change: float | None, error: float | None = None) -> str:
    """Return `+8.2 % ±1.1`; a change that is not known is `-`."""
    if change is None or not math.isfinite(change):
        return "-"
    return f"{100 * change:+.1f} %" + (f" ±{100 * error:.1f}" if error is not None else "")


# The rows of a printed comparison: self times of sibling layers together, so that they add up. Numbers, no drawing.


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRow:
    """Own time of sibling layers in one phase, nanoseconds per step; None where a side has none of them."""

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
    """Return every row once, those that changed most first; what has no layer is among them."""
    groups: dict[tuple[str, str, str], list[ComparedRow]] = defaultdict(list)
    for row in comparison.rows:
        groups[like_name(row.layer, row.row.block)[0], row.row.class_name, row.phase].append(row)
    folded: list[FoldedRow] = []
    for rows in groups.values():
        members = [rows] if len(rows) >= FEWEST else [[row] for row in rows]
        folded += [_folded(group, comparison) for group in members]
    for reason in comparison.unattributed:
        a, b = reason.time_a_ns / comparison.steps_a, reason.time_b_ns / comparison.steps_b
        label = f"(unattributed) {reason.reason}"
        folded.append(FoldedRow(label=label, phase="", a_ns=a, b_ns=b, difference_ns=b - a))
    return sorted(folded, key=lambda row: -abs(row.difference_ns))


def _folded(rows: Sequence[ComparedRow], comparison: Comparison) -> FoldedRow:
    phase = rows[0].phase
    outside = phase if phase == "optimizer" else "outside layers"
    label = folded_name({row.layer: row.row.block for row in rows}) or outside

    def of_side(rows: Sequence[LayerRow], steps: int) -> tuple[float | None, float | None, int | None]:
        time_ns = sum(row.self_time_ns for row in rows) / steps if rows else None
        retained = sum_of_known(row.retained_bytes for row in rows)
        return time_ns, retained, sum_of_known(row.self_flops_per_step for row in rows)

    a_ns, retained_a, flops_a = of_side([row.a for row in rows if row.a is not None], comparison.steps_a)
    b_ns, retained_b, flops_b = of_side([row.b for row in rows if row.b is not None], comparison.steps_b)
    return FoldedRow(
        label=label,
        phase="" if phase == label else phase,
        a_ns=a_ns,
        b_ns=b_ns,
        difference_ns=(b_ns or 0.0) - (a_ns or 0.0),
        retained_a=retained_a,
        retained_b=retained_b,
        flops_a=flops_a,
        flops_b=flops_b,
        slower=tuple(row.layer for row in rows if row.decision == "slower"),
        faster=tuple(row.layer for row in rows if row.decision == "faster"),
        members=len(rows),
    )


# On a terminal.

_LONGEST_NAME = 60  # columns
_LEAST_NAME = 22  # columns: names are cut down to them before columns of numbers give way
_MOST_WORK = 8  # rows
_LEGEND = "times: means of the steps; ±: the standard error of the change"


def compare_text(comparison: Comparison, *, rows: int = 20, width: int = 100, unicode: bool = False) -> str:
    """Return the verdict, the totals, what changed, and self times per step, those that changed most first.

    The self times and `(more)` add up to the time of a step.
    """

    def wrapped(text: str, indent: str = "") -> str:
        return "\n".join(textwrap.wrap(clean(text, unicode=unicode), width, subsequent_indent=indent))

    def table(header: Sequence[str], lines: Sequence[Sequence[str]], spare: Sequence[int], left: int = 1) -> str:
        cleaned = [[clean(text, unicode=unicode) for text in line] for line in lines]
        return _fitted(header, cleaned, width, spare, left)

    totals = [(total.name, *_total_cells(total)) for total in comparison.totals]
    totals_table = table(("per step", "a", "b", "change", ""), totals, (4, 1))
    sides = "\n".join(shorten(clean(line, unicode=unicode), width) for line in _sides(comparison, width))
    parts = [wrapped(comparison.verdict), sides, f"{totals_table}\n{wrapped(_legend(comparison))}"]
    if comparison.culprits:
        culprits = [(place_of(one), *_culprit_cells(one)) for one in comparison.culprits]
        parts.append(table(("changed otherwise", "ms a step", "change", "of all"), culprits, (3, 1)))
        if _is_shown(comparison.common):
            beyond = f"ms a step: beyond the {percent(comparison.common)} that all layers have in common"
            parts[-1] += f"\n{wrapped(beyond)}"
    if comparison.work:
        shown = comparison.work[:_MOST_WORK]
        room = width - _LEAST_NAME - 2
        work = [(place_of(one), shorten(work_words(one, comparison.time_basis), room)) for one in shown]
        more = len(comparison.work) - len(shown)
        parts.append(table(("other work", "a step"), work, (), left=2) + (f"\n({more} more)" if more else ""))
    header = ("mean self time a step", "phase", "a ms", "b ms", "b - a", "change", "")
    parts.append(table(header, list(_row_cells(comparison, rows)), (2, 5, 3), left=2))
    notes = [f"note: {note}" for note in comparison.notes]
    notes += [f"attention of {layer}: {a} -> {b}" for layer, a, b in comparison.backend_changes]
    parts.append("\n".join(wrapped(note, "  ") for note in notes))
    return "\n\n".join(part.strip("\n") for part in parts if part)


def _fitted(header: Sequence[str], lines: Sequence[Sequence[str]], width: int, spare: Sequence[int], left: int) -> str:
    """Return a table in `width` columns: names are cut, then columns of `spare` left out, the first one first."""
    longest = max(cells(line[0]) for line in lines)
    least = max(cells(header[0]), min(longest, _LEAST_NAME))
    for dropped in range(len(spare) + 1):
        kept = [["" if i in spare[:dropped] else text for i, text in enumerate(line)] for line in lines]
        others = grid(("", *header[1:]), [("", *line[1:]) for line in kept], left_columns=left)
        room = width - 2 - max(map(cells, others.split("\n")))
        if room >= least:
            break
    room = min(_LONGEST_NAME, max(least, room))
    return grid(header, [(_end(line[0], room), *line[1:]) for line in kept], left_columns=left)


def _end(name: str, room: int) -> str:
    """Return a name in at most `room` columns; the end of a layer's name tells it from others."""
    if cells(name) <= room or not name.isascii():
        return shorten(name, room)
    return f"...{name[3 - room :]}"


def _legend(comparison: Comparison) -> str:
    """Return what stands below the totals; where a change has low confidence, that it has."""
    parts = [_LEGEND] if any(total.error is not None for total in comparison.totals) else []
    if comparison.confidence == "low" and comparison.decision in ("slower", "faster"):
        parts.append(f"{comparison.decision}: with low confidence, no layer explains most of it")
    parts += [f"{one.name} not certain: {one.reason}" for one in comparison.totals if one.decision == "not certain"]
    change = comparison.totals[0].change
    if comparison.decision == "not certain" and change and comparison.common / change >= HALF:
        parts.append("all layers changed alike, as under other load or clock")
    return "; ".join(parts)


def _sides(comparison: Comparison, width: int) -> Iterator[str]:
    for name, path, count in _sides_of(comparison):
        yield f"{name}: {shorten(path, width - len(count) - 6)}, {count}"
    yield from what_differs([(one.what, one.a, one.b) for one in comparison.differences])


def _sides_of(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Yield `a` and `b`, each with its path and `5 steps`."""
    paths, steps = (comparison.name_a, comparison.name_b), (comparison.steps_a, comparison.steps_b)
    for name, path, count in zip("ab", paths, steps, strict=True):
        yield name, path, f"{count} step{'s' if count > 1 else ''}"


def _total_cells(total: ComparedTotal) -> tuple[str, str, str, str]:
    per, form = {
        "ns": (1e6, "{:.3f} ms"),
        "bytes": (MIB, "{:.1f} MiB"),
        "flops": (1e9, "{:.3f} GFLOP"),
        "share": (0.01, "{:.1f} %"),
        "count": (1, "{:g}"),
    }[total.unit]
    a, b = ("-" if value is None else form.format(value / per) for value in (total.a, total.b))
    change = "" if total.change is None else percent(total.change, total.error)
    return a, b, change, decision_words(total)


def decision_words(total: ComparedTotal) -> str:
    """Return `"slower"`, `"not certain"` ..."""
    return "" if total.decision == "not judged" else total.decision


def _culprit_cells(one: ChangedLayer) -> tuple[str, str, str]:
    only = f"only in {'b' if one.change_ns > 0 else 'a'}"
    share = "" if one.share is None else f"{100 * one.share:.0f} %"
    return f"{one.change_ns / 1e6:+.3f}", only if one.change is None else percent(one.change, one.error), share


def _row_cells(comparison: Comparison, most: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the rows that changed most, of the rest together, and of all."""
    every = folded_rows(comparison)
    comparable = all(one.what != BASIS for one in comparison.differences)

    def line(label: str, phase: str, a: float | None, b: float | None, with_change: bool, said: str) -> tuple[str, ...]:
        times = ("" if value is None else f"{value / 1e6:.3f}" for value in (a, b))
        change = percent(b / a - 1) if with_change and a and b is not None else ""
        return label, phase, *times, f"{((b or 0.0) - (a or 0.0)) / 1e6:+.3f}", change, said

    for row in every[:most]:
        yield line(row.label, row.phase, row.a_ns, row.b_ns, comparable, _decided_words(row))
    for label, rows in ((f"({len(every) - most} more)", every[most:]), ("TOTAL", every)):
        a, b = sum(row.a_ns or 0.0 for row in rows), sum(row.b_ns or 0.0 for row in rows)
        if rows:
            yield line(label, "", a, b, comparable and label == "TOTAL", "")


def _decided_words(row: FoldedRow) -> str:
    if row.a_ns is None or row.b_ns is None:
        return "only in b" if row.a_ns is None else "only in a"
    decided = [(row.slower, "slower"), (row.faster, "faster")]
    return ", ".join(word if row.members == 1 else f"{len(names)} {word}" for names, word in decided if names)


# As files.

_CSV_OF_ROW = ("layer", "phase", "class_name", "kind", "decision", "change", "error")
_CSV_OF_SIDE = (
    "time_per_step_us", "self_time_per_step_us", "calls_per_step", "self_events_per_step", "flops_per_step",
    "retained_bytes", "peak_bytes",
)  # fmt: skip


def compare_csv(comparison: Comparison) -> str:
    """Return a line per layer and phase, at the end what has no layer or is not attributed. Empty: not known."""
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


def _page_data(comparison: Comparison) -> dict[str, Any]:
    """Return what the page's scripts read: `Comparison.to_dict` with what the frame asks for."""
    return {
        "page": {
            "kind": "compare",
            "title": f"{comparison.name_b} against {comparison.name_a}",
            "machine": "",
            "steps_in_words": " and ".join(count for _, _, count in _sides_of(comparison)),
        },
        "summary": {"verdict": comparison.verdict},
        "warnings": list(comparison.notes),
        "comparison": comparison.to_dict(),
        "decisions": [decision_words(total) for total in comparison.totals],
        "work": [{"place": place_of(one), "words": work_words(one, comparison.time_basis)} for one in comparison.work],
        "folded": [to_plain(row) for row in folded_rows(comparison)],
    }
