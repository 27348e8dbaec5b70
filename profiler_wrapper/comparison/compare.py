"""Two results compared: every layer, phase and class, what changed by more than noise, and where."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from profiler_wrapper.comparison.match import (
    Side,
    blocks_of,
    differences,
    pair_rows,
    siblings_together,
    side_of,
    traits,
)
from profiler_wrapper.comparison.model import (
    LEAST_BYTES,
    SAME,
    ComparedClass,
    ComparedReason,
    ComparedRow,
    ComparedTotal,
    WorkChange,
)
from profiler_wrapper.comparison.text import CLOCK, PEAK, Comparison, explained, verdict_of
from profiler_wrapper.comparison.times import (
    FEWEST,
    HALF,
    LEAST_CHANGE,
    MOST_NOISE,
    NAMED_SHARE,
    Change,
    TimeChanges,
    UnitKey,
    changed_layers,
    series_change,
    time_changes,
)
from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.describe import peak_bytes
from profiler_wrapper.result import load
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.tables.statistics import sum_if_all_known, sum_of_known
from profiler_wrapper.trace.arrays import grouped

Source = Analysis | str | os.PathLike[str]  # a result, or what `load` reads
NO_BACKEND = "no attention kernel"  # single ops, where there is attention
EVENTS = {"cpu": "ops", "device": "device events", "cpu / device": "ops / device events"}
EVENTS["device / cpu"] = "device events / ops"


def compare(a: Source, b: Source, *, name_a: str = "", name_b: str = "") -> Comparison:
    """Return what differs in `b` from `a`: time, memory, FLOPs and calls of every layer, phase and class.

    A difference in time counts where it is beyond the noise that the steps show; see `Comparison.decision`. Self times
    of `rows` and `unattributed` add up to the total of each side, to the nanosecond.

    Args:
        a: a result, or what `load` reads: a trace, the directory of a run, a result.json.
        b: the same, of what is now.
        name_a: what `a` is called; else its path.
        name_b: what `b` is called; else its path.

    Raises:
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    name_a, name_b = name_a or name_of(a, "a"), name_b or name_of(b, "b")
    a, b = (source if isinstance(source, Analysis) else load(source) for source in (a, b))
    side_a, side_b = side_of(a), side_of(b)
    pairs = pair_rows(a, b)
    shared = shared_time(pairs, side_a, side_b)
    same_model = shared >= HALF
    work = work_changes(pairs, side_a, side_b) if same_model else ()
    changes = time_changes(pairs, side_a, side_b, shared, frozenset(layer for one in work for layer in one.layers))
    totals = tuple(_totals(side_a, side_b, pairs, changes))
    decision = totals[0].decision
    decided = decision in ("slower", "faster")
    total_delta_ns = side_b.total_ns - side_a.total_ns
    culprits = changed_layers(pairs, changes, total_delta_ns if decided else None)
    sure = explained(culprits, decision) >= HALF if decided else changes.total.precise
    found = Comparison(
        verdict="",
        decision=decision,
        confidence="high" if changes.known and sure else "low",
        name_a=name_a,
        name_b=name_b,
        time_basis=b.time_basis,
        steps_a=side_a.steps,
        steps_b=side_b.steps,
        noise_known=changes.known,
        differences=differences(traits(a), traits(b)),
        notes=tuple(_notes(side_a, side_b, changes)),
        totals=totals,
        culprits=culprits,
        work=work,
        rows=tuple(_decided(pair, side_a, side_b, changes) for pair in pairs),
        classes=_classes(a, b),
        unattributed=_reasons(a, b),
        backend_changes=_backend_changes(pairs),
        common=changes.left_out,
    )
    phases = _phases_of_one(pairs, side_a, side_b) if same_model else ()
    return replace(found, verdict=verdict_of(found, changes, phases))


def name_of(source: Source, default: str) -> str:
    """Return what a side is called: its path, else the trace that its run names."""
    if not isinstance(source, Analysis):
        return os.fspath(source)
    trace = source.run.get("trace")
    return trace if isinstance(trace, str) and trace else default


def shared_time(pairs: Sequence[ComparedRow], a: Side, b: Side) -> float:
    """Return the share of the time that is in layers and phases of both sides: the smaller of the two."""
    both = [(pair.a, pair.b) for pair in pairs if pair.a is not None and pair.b is not None]
    return min(
        sum(rows[i].self_time_ns for rows in both) / max(1, side.analysis.time.total_ns)
        for i, side in enumerate((a, b))
    )


# Layers that do other work on both sides, exactly: FLOPs, ops or device events, calls and memory kept.

_SAME_COUNT = 0.5  # per step: counts that are nearer are as good as equal
_WORK = [field.name for field in fields(WorkChange) if field.name not in ("layer", "layers", "phase")]


def work_changes(pairs: Sequence[ComparedRow], a: Side, b: Side) -> tuple[WorkChange, ...]:
    """Return layers of both sides whose own work differs, the largest difference first; siblings together.

    Nothing where one side marks no steps. Events and memory are known where both sides are of a device, or of a CPU.
    """
    if a.marked != b.marked:
        return ()
    members = grouped(((pair.layer, None if pair.layer else pair.phase), pair) for pair in pairs)
    changes = {key: _change(*key, rows, a, b) for key, rows in members.items()}
    changed = {key: change for key, change in changes.items() if change is not None}
    deltas = (
        (layer, (phase, one.delta("flops"), round(one.delta("events")), round(one.delta("calls"))))
        for (layer, phase), one in changed.items()
    )
    found = []
    for name, layers, (phase, *_) in siblings_together(deltas, blocks_of(pairs)):
        work: Any = {key: sum_of_known(getattr(changed[layer, phase], key) for layer in layers) for key in _WORK}
        found.append(WorkChange(layer=name, layers=layers, phase=phase, **work))
    flops = max(1, *(sum(row.flops_per_step for row in side.analysis.flops) for side in (a, b)))
    events = max(1, *(_per_step(side, side.analysis.classes) for side in (a, b)))
    return tuple(sorted(found, key=lambda one: -abs(one.delta("flops")) / flops - abs(one.delta("events")) / events))


def _change(layer: str, phase: Phase | None, pairs: Sequence[ComparedRow], a: Side, b: Side) -> WorkChange | None:
    """Return the other work of one layer; None where nothing changed, or one side does not have the layer."""
    counted = bool(a.analysis.flops) and bool(b.analysis.flops)
    same_basis = a.analysis.time_basis == b.analysis.time_basis
    work: dict[str, Any] = {}
    for name, side in (("a", a), ("b", b)):
        rows = [row for row in (getattr(pair, name) for pair in pairs) if row is not None]
        if not rows:
            return None
        events = sum_if_all_known(row.self_events for row in rows)
        calls = sum_of_known(row.calls for row in rows)
        work |= {
            f"flops_{name}": sum_if_all_known(row.self_flops_per_step for row in rows) if counted else None,
            f"events_{name}": None if events is None or not same_basis else events / side.steps,
            f"calls_{name}": None if calls is None else calls / side.steps,
            f"retained_{name}": sum_of_known(row.self_retained_bytes for row in rows) if same_basis else None,
            f"time_{name}_ns": sum(row.self_time_ns for row in rows) / side.steps,
        }
    change = WorkChange(layer=layer, layers=(layer,), phase=phase, **work)
    other_memory = abs(change.delta("retained")) >= max(LEAST_BYTES, SAME * abs(change.retained_a or 0.0))
    counts = (change.delta("events"), change.delta("calls"))
    if not change.delta("flops") and not other_memory and all(abs(delta) < _SAME_COUNT for delta in counts):
        return None
    return change


def _phases_of_one(pairs: Sequence[ComparedRow], a: Side, b: Side) -> Iterable[tuple[Phase, float]]:
    """Yield phases that only one side has, and their nanoseconds per step: negative where `a` has them."""
    if a.marked != b.marked or a.analysis.time_basis != b.analysis.time_basis:
        return
    spent: dict[Phase, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for pair in pairs:
        for i, (row, side) in enumerate(((pair.a, a), (pair.b, b))):
            spent[pair.phase][i] += 0 if row is None else row.self_time_ns / side.steps
    for phase, (before, after) in spent.items():
        if not (before and after) and max(before, after) >= NAMED_SHARE * max(a.total_ns, b.total_ns):
            yield phase, after - before


def _decided(pair: ComparedRow, side_a: Side, side_b: Side, changes: TimeChanges) -> ComparedRow:
    """Return the row with its change and whether that is noise."""
    if pair.a is None or pair.b is None:
        return replace(pair, decision="only in b" if pair.a is None else "only in a")
    unit = changes.units.get(UnitKey((pair.layer,), pair.phase))
    if unit is not None and unit.change is not None:
        slower: Any = "slower" if unit.decided_ns > 0 else "faster"
        return replace(pair, change=unit.change, error=unit.error, decision=slower if unit.decided else "no difference")
    mean_a, mean_b = pair.a.time_ns / side_a.steps, pair.b.time_ns / side_b.steps
    same_basis = side_a.analysis.time_basis == side_b.analysis.time_basis
    return replace(pair, change=mean_b / mean_a - 1 if mean_a and mean_b and same_basis else None)


def _totals(side_a: Side, side_b: Side, pairs: Sequence[ComparedRow], changes: TimeChanges) -> Iterable[ComparedTotal]:
    """Yield what a step takes on both sides: its time first."""
    a, b = side_a.analysis, side_b.analysis
    basis = " / ".join(dict.fromkeys((a.time_basis, b.time_basis)))
    same_basis = a.time_basis == b.time_basis
    judged = same_basis and side_a.marked == side_b.marked

    def both(
        name: str, unit: Any, of: Callable[[Side], float | None], *, comparable: bool = same_basis
    ) -> ComparedTotal:
        return _total(name, unit, of(side_a), of(side_b), comparable=comparable)

    time = both(f"{basis} time", "ns", lambda side: side.total_ns, comparable=judged)
    yield _with_decision(time, changes.total) if judged and side_a.total_ns and side_b.total_ns else time
    times = [np.array(one.step_times_ns, dtype=np.float64) for one in (a, b)]
    clock = _total(CLOCK, "ns", *(float(one.mean()) if len(one) else None for one in times), comparable=same_basis)
    # same (0 -> 1): no step takes 1 ns
    known = same_basis and all(len(one) >= FEWEST and (one > 0).all() for one in times)
    yield _with_decision(clock, series_change(*times)) if known else clock
    yield both(PEAK, "bytes", lambda side: peak_bytes(side.analysis))
    flops = both("FLOPs", "flops", lambda side: flops_per_step(side.analysis), comparable=True)
    yield flops
    if None in (flops.a, flops.b) and a.flops and b.flops:
        rows = [[0 if row is None else row.self_flops_per_step for row in (pair.a, pair.b)] for pair in pairs]
        sums = (sum(row[i] or 0 for row in rows if None not in row) for i in (0, 1))
        yield _total("FLOPs known on both sides", "flops", *sums, comparable=True)
    yield both(EVENTS[basis], "count", lambda side: _per_step(side, side.analysis.classes))
    yield both("synchronisations", "count", _synchronisations)
    yield both("unattributed", "share", lambda side: 1 - side.analysis.time.coverage, comparable=True)
    yield both("MFU", "share", lambda side: getattr(side.analysis.utilization, "mfu", None), comparable=True)


def _synchronisations(side: Side) -> float | None:
    return _per_step(side, side.analysis.synchronisations) if side.analysis.time_basis == "device" else None


def _total(name: str, unit: Any, a: float | None, b: float | None, *, comparable: bool) -> ComparedTotal:
    change = b / a - 1 if a and b is not None and comparable else None
    return ComparedTotal(name=name, unit=unit, a=a, b=b, change=change)


def _with_decision(total: ComparedTotal, change: Change) -> ComparedTotal:
    """Return a time with whether noise may have made its change, or may hide one."""
    moved = total.change or 0.0
    error = change.mean_error if math.isfinite(change.mean_error) else None
    if change.beyond_noise and moved * change.shift > 0:
        return replace(total, error=error, decision="slower" if moved > 0 else "faster")
    hidden = abs(moved) >= LEAST_CHANGE or (error is not None and not change.precise)
    decision: Any = "not certain" if hidden else "no difference"
    return replace(total, error=error, decision=decision, reason=change.why_noise)


def _per_step(side: Side, rows: Iterable[Any]) -> float:
    return float(sum(row.count for row in rows) / side.steps)


def flops_per_step(analysis: Analysis) -> int | None:
    """Return the FLOPs of all that ran; None where none were counted, or those of some op are not known."""
    return sum(row.flops_per_step for row in analysis.flops) if analysis.flops and not analysis.uncounted else None


def _classes(a: Analysis, b: Analysis) -> tuple[ComparedClass, ...]:
    one, other = ({(row.class_name, row.phase): row for row in side.classes} for side in (a, b))
    both = [(key, one.get(key), other.get(key)) for key in dict.fromkeys((*other, *one))]
    return tuple(
        ComparedClass(
            class_name=class_name,
            phase=phase,
            time_a_ns=of_a.time_ns if of_a else 0,
            time_b_ns=of_b.time_ns if of_b else 0,
            count_a=of_a.count if of_a else 0,
            count_b=of_b.count if of_b else 0,
            flops_per_step_a=of_a.flops_per_step if of_a else None,
            flops_per_step_b=of_b.flops_per_step if of_b else None,
        )
        for (class_name, phase), of_a, of_b in both
    )


def _reasons(a: Analysis, b: Analysis) -> tuple[ComparedReason, ...]:
    one, other = ({row.reason: row.time_ns for row in side.unattributed} for side in (a, b))
    return tuple(
        ComparedReason(reason=reason, time_a_ns=one.get(reason, 0), time_b_ns=other.get(reason, 0))
        for reason in dict.fromkeys((*other, *one))
    )


def _backend_changes(pairs: Sequence[ComparedRow]) -> tuple[tuple[str, str, str], ...]:
    """Return where attention has another backend: sibling layers together, backends in `a` and in `b`."""
    changed = []
    for pair in pairs:
        one, other = (" + ".join(sorted(backends)) or NO_BACKEND for backends in (pair.backends_a, pair.backends_b))
        if one != other and pair.a is not None and pair.b is not None and pair.phase != "recompute":  # as forward
            changed.append((pair.layer, (one, other)))
    return tuple((name, *backends) for name, _, backends in siblings_together(changed, blocks_of(pairs)))


def _notes(side_a: Side, side_b: Side, changes: TimeChanges) -> Iterable[str]:
    few = [name for name, side in (("a", side_a), ("b", side_b)) if not side.known_steps or side.steps < FEWEST]
    if few and not changes.known and side_a.analysis.time_basis == side_b.analysis.time_basis:
        who = f"{' and '.join(few)} {'has' if len(few) == 1 else 'have'} fewer than {FEWEST} timed steps"
        least = f"{100 * MOST_NOISE:.0f} %"
        yield f"noise not known, because {who}: a change counts from {least} on, and beyond that of other layers"
    if side_a.marked != side_b.marked:
        yield f"{'b' if side_a.marked else 'a'} marks no steps: its times and counts are of all of it, not of one step"
    if changes.shared < HALF:
        yield f"only {100 * changes.shared:.0f} % of the time is in layers and phases that both have by name or class"
