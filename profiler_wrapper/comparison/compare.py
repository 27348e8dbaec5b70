"""Two results compared: every layer, phase and class, what changed by more than noise, and where."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from profiler_wrapper.analysis.model import Analysis, Phase
from profiler_wrapper.analysis.statistics import sum_if_all_known, sum_of_known
from profiler_wrapper.analysis.steps import step_times_ns
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
    ComparedClass,
    ComparedReason,
    ComparedRow,
    ComparedTotal,
    Comparison,
    Decision,
    WorkChange,
)
from profiler_wrapper.comparison.text import CLOCK, PEAK, SURE, explained, uncertain, verdict_of
from profiler_wrapper.comparison.times import (
    FEWEST,
    HALF,
    MOST_NOISE,
    NAMED_SHARE,
    TimeChanges,
    UnitKey,
    changed_layers,
    series_change,
    shared_time,
    time_changes,
)
from profiler_wrapper.reports.describe import peak_bytes
from profiler_wrapper.result import load

Source = Analysis | str | os.PathLike[str]  # a result, or what `load` reads
NO_BACKEND = "no attention kernel"  # single ops, where there is attention

# --------------------------------------------------------------------------------------------------
# What does other work on both sides, exactly: FLOPs, ops or device events, calls and memory kept, layer by layer.

_SAME_COUNT = 0.5  # per step: counts that are nearer are as good as equal
_SAME_BYTES = 0.01  # relative, of memory kept
_FEWEST_BYTES = 64 << 10


_WORK = [field.name for field in fields(WorkChange) if field.name not in ("layer", "layers", "phase")]


def work_changes(pairs: Sequence[ComparedRow], a: Side, b: Side) -> tuple[WorkChange, ...]:
    """Layers of both sides whose own work differs, the largest difference first; alike ones together.

    Nothing where one side marks no steps. Events and memory are told where both sides are of a device, or of a CPU.
    """
    if a.marked != b.marked:
        return ()
    members: dict[tuple[str, Phase | None], list[ComparedRow]] = defaultdict(list)
    for pair in pairs:
        members[pair.layer, None if pair.layer else pair.phase].append(pair)
    changed: dict[tuple[str, Phase | None], WorkChange] = {}
    for key, rows in members.items():
        change = _change(*key, rows, a, b)
        if change is not None:
            changed[key] = change
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
    """None where nothing changed, or one side does not have the layer."""
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
    other_memory = abs(change.delta("retained")) >= max(_FEWEST_BYTES, _SAME_BYTES * abs(change.retained_a or 0.0))
    counts = (change.delta("events"), change.delta("calls"))
    if not change.delta("flops") and not other_memory and all(abs(delta) < _SAME_COUNT for delta in counts):
        return None
    return change


EVENTS = {"cpu": "ops", "device": "device events", "cpu / device": "ops / device events"}
EVENTS["device / cpu"] = "device events / ops"


def compare(a: Source, b: Source, *, name_a: str = "", name_b: str = "") -> Comparison:
    """What is otherwise in `b` than in `a`: time, memory, FLOPs and calls of every layer, phase and class.

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
    backend_changes = _backend_changes(pairs)
    work: tuple[WorkChange, ...] = ()
    phases: list[tuple[Phase, float]] = []
    if shared_time(pairs, side_a, side_b) >= HALF:
        work, phases = work_changes(pairs, side_a, side_b), list(_phases_of_one(pairs, side_a, side_b))
    changes = time_changes(pairs, side_a, side_b, other_work=frozenset(layer for one in work for layer in one.layers))
    total_delta_ns = side_b.total_ns - side_a.total_ns
    changed = changes.total.beyond_noise and total_delta_ns * changes.total.shift > 0
    decision = _decision(total_delta_ns, changed)
    if side_a.marked != side_b.marked or a.time_basis != b.time_basis:
        decision = "not judged"
    found = changed_layers(pairs, changes, total_delta_ns if changed else None)
    different = differences(traits(a), traits(b))
    notes = tuple(_notes(side_a, side_b, changes))
    totals = tuple(_totals(side_a, side_b, pairs, changes, decision))
    totals = tuple(replace(total, decision="not certain") if uncertain(total) else total for total in totals)
    if totals[0].decision == "not certain":
        decision = "not certain"
    bases = (a.time_basis, b.time_basis)
    precise = math.isfinite(changes.total.mean_error) and changes.total.mean_error <= SURE
    sure = changes.known and (
        precise if decision in ("no difference", "not certain") else explained(found, totals[0]) >= HALF
    )
    return Comparison(
        verdict=verdict_of(phases, different, totals, changes, found, work, backend_changes, bases),
        decision=decision,
        confidence="high" if sure else "low",
        name_a=name_a,
        name_b=name_b,
        time_basis=b.time_basis,
        steps_a=side_a.steps,
        steps_b=side_b.steps,
        noise_known=changes.known,
        differences=different,
        notes=notes,
        totals=totals,
        culprits=found,
        work=work,
        rows=tuple(_decided(pair, side_a, side_b, changes) for pair in pairs),
        classes=_classes(a, b),
        unattributed=_reasons(a, b),
        backend_changes=backend_changes,
        common=changes.left_out,
    )


def name_of(source: Source, default: str) -> str:
    """What a side is called: its path, else the trace that its run names."""
    if not isinstance(source, Analysis):
        return os.fspath(source)
    trace = source.run.get("trace")
    return trace if isinstance(trace, str) and trace else default


def _decision(shift: float, beyond_noise: bool) -> Decision:
    if not beyond_noise:
        return "no difference"
    return "slower" if shift > 0 else "faster"


def _phases_of_one(pairs: Sequence[ComparedRow], a: Side, b: Side) -> Iterable[tuple[Phase, float]]:
    """Phases that one side alone has, and what they take of a step in nanoseconds: less than 0 where `a` has them."""
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
    unit = changes.units.get(UnitKey((pair.layer,), pair.phase))
    if pair.a is None or pair.b is None:
        return replace(pair, decision="only in b" if pair.a is None else "only in a")
    same_basis = side_a.analysis.time_basis == side_b.analysis.time_basis
    mean_a, mean_b = pair.a.time_ns / side_a.steps, pair.b.time_ns / side_b.steps
    known = unit is not None and unit.change is not None
    return replace(
        pair,
        change=mean_b / mean_a - 1 if mean_a and mean_b and same_basis else None,
        error=unit.error if unit is not None else None,
        decision=_decision(unit.decided_ns, unit.decided) if unit is not None and known else "not judged",
    )


def _totals(
    side_a: Side, side_b: Side, pairs: Sequence[ComparedRow], changes: TimeChanges, decision: Decision
) -> Iterable[ComparedTotal]:
    """Of a step: its time first."""
    a, b = side_a.analysis, side_b.analysis
    basis = " / ".join(dict.fromkeys((a.time_basis, b.time_basis)))
    same_basis = a.time_basis == b.time_basis

    def both(name: str, unit: Any, of: Callable[[Side], float | None], *, comparable: bool = True) -> ComparedTotal:
        return _total(name, unit, of(side_a), of(side_b), comparable=comparable)

    judged = decision != "not judged"
    time = _total(f"{basis} time", "ns", side_a.total_ns, side_b.total_ns, comparable=judged)
    known = bool(side_a.total_ns and side_b.total_ns)
    why = changes.total.why_noise if judged and known else ""
    decision = decision if known else "not judged"
    yield replace(time, error=_finite(changes.total.mean_error), decision=decision, reason=why)
    times = [np.array(step_times_ns(one), dtype=np.float64) for one in (a, b)]
    clock = _total(CLOCK, "ns", *(float(one.mean()) if len(one) else None for one in times), comparable=same_basis)
    # same (0 -> 1): no step takes 1 ns
    if same_basis and all(len(one) >= FEWEST and (one > 0).all() for one in times):
        change = series_change(*times)
        shown = _decision(change.shift, change.beyond_noise)
        clock = replace(clock, error=_finite(change.mean_error), decision=shown, reason=change.why_noise)
    yield clock
    yield both(PEAK, "bytes", lambda side: peak_bytes(side.analysis), comparable=same_basis)
    flops = both("FLOPs", "flops", lambda side: flops_per_step(side.analysis))
    yield flops
    if None in (flops.a, flops.b) and a.flops and b.flops:
        rows = [[0 if row is None else row.self_flops_per_step for row in (pair.a, pair.b)] for pair in pairs]
        sums = (sum(row[i] or 0 for row in rows if None not in row) for i in (0, 1))
        yield _total("FLOPs known on both sides", "flops", *sums)
    yield both(EVENTS[basis], "count", lambda side: _per_step(side, side.analysis.classes), comparable=same_basis)
    yield both(
        "synchronisations",
        "count",
        lambda side: _per_step(side, side.analysis.synchronisations) if side.analysis.time_basis == "device" else None,
        comparable=same_basis,
    )
    yield both("unattributed", "share", lambda side: 1 - side.analysis.time.coverage)
    yield both("MFU", "share", lambda side: side.analysis.utilization.mfu if side.analysis.utilization else None)


def _total(name: str, unit: Any, a: float | None, b: float | None, *, comparable: bool = True) -> ComparedTotal:
    change = b / a - 1 if a and b is not None and comparable else None
    return ComparedTotal(name=name, unit=unit, a=a, b=b, change=change)


def _per_step(side: Side, rows: Iterable[Any]) -> float:
    return float(sum(row.count for row in rows) / side.steps)


def flops_per_step(analysis: Analysis) -> int | None:
    """Of all that ran; None where none were counted, or some op tells none."""
    return sum(row.flops_per_step for row in analysis.flops) if analysis.flops and not analysis.uncounted else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _classes(a: Analysis, b: Analysis) -> tuple[ComparedClass, ...]:
    one, other = ({(row.class_name, row.phase): row for row in side.classes} for side in (a, b))
    return tuple(
        ComparedClass(
            class_name=key[0],
            phase=key[1],
            time_a_ns=one[key].time_ns if key in one else 0,
            time_b_ns=other[key].time_ns if key in other else 0,
            count_a=one[key].count if key in one else 0,
            count_b=other[key].count if key in other else 0,
            flops_per_step_a=one[key].flops_per_step if key in one else None,
            flops_per_step_b=other[key].flops_per_step if key in other else None,
        )
        for key in dict.fromkeys((*other, *one))
    )


def _reasons(a: Analysis, b: Analysis) -> tuple[ComparedReason, ...]:
    one, other = ({row.reason: row.time_ns for row in side.unattributed} for side in (a, b))
    return tuple(
        ComparedReason(reason=reason, time_a_ns=one.get(reason, 0), time_b_ns=other.get(reason, 0))
        for reason in dict.fromkeys((*other, *one))
    )


def _backend_changes(pairs: Sequence[ComparedRow]) -> tuple[tuple[str, str, str], ...]:
    """Where attention runs otherwise: sibling layers together, backends in `a` and in `b`."""
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
