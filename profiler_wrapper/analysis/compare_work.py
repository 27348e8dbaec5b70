"""What does other work on both sides, exactly: FLOPs, ops or device events, calls and memory kept, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from profiler_wrapper.analysis.compare_model import WorkChange
from profiler_wrapper.analysis.compare_names import folded_name, like_name
from profiler_wrapper.analysis.compare_sides import Pair, Side
from profiler_wrapper.analysis.model import LayerRow
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.sums import sum_if_all_known, sum_of_known

_SAME_COUNT = 0.5  # per step: counts that are nearer are as good as equal
_SAME_BYTES = 0.01  # relative, of memory kept
_FEWEST_BYTES = 64 << 10
_MUCH = 0.05  # relative: a layer whose work changed so much has a reason to take another time

_Key = tuple[str, Phase | None]


def work_changes(pairs: Sequence[Pair], a: Side, b: Side) -> tuple[WorkChange, ...]:
    """Layers of both sides whose own work differs, the largest difference first; alike ones together.

    Nothing where one side marks no steps. Events and memory are told where both sides are of a device, or of a CPU.
    """
    if a.marked != b.marked:
        return ()
    members: dict[_Key, list[Pair]] = defaultdict(list)
    for pair in pairs:
        members[pair.layer, None if pair.layer else pair.phase].append(pair)
    alike: dict[tuple[object, ...], list[WorkChange]] = defaultdict(list)
    for (layer, phase), rows in members.items():
        change = _change(layer, phase, rows, a, b)
        if change is not None:
            pattern, _ = like_name(layer, rows[0].row.block)
            deltas = (change.flops_delta, round(change.events_delta), round(change.calls_delta))
            alike[pattern, phase, deltas].append(change)
    block = {pair.layer: pair.row.block for pair in pairs}
    found = [_together(changes, block) for changes in alike.values()]
    flops = max(1, *(sum(row.flops_per_step for row in side.analysis.flops) for side in (a, b)))
    events = max(1, *(sum(row.count for row in side.analysis.classes) / side.steps for side in (a, b)))
    return tuple(sorted(found, key=lambda one: -abs(one.flops_delta) / flops - abs(one.events_delta) / events))


def much_other_work(changes: Iterable[WorkChange]) -> frozenset[str]:
    """The layers among them with other time to be expected; "" stands for what has no layer and is left out."""
    return frozenset(
        layer
        for one in changes
        for layer in one.layers
        if layer
        and any(
            abs(delta) >= _MUCH * max(before or 0, 1)
            for delta, before in ((one.flops_delta, one.flops_a), (one.events_delta, one.events_a))
        )
    )


def _change(layer: str, phase: Phase | None, pairs: Sequence[Pair], a: Side, b: Side) -> WorkChange | None:
    """None where nothing changed, or one side does not have the layer."""
    rows_a = [pair.a for pair in pairs if pair.a is not None]
    rows_b = [pair.b for pair in pairs if pair.b is not None]
    if not rows_a or not rows_b:
        return None
    counted = bool(a.analysis.flops) and bool(b.analysis.flops)
    same_basis = a.analysis.time_basis == b.analysis.time_basis
    change = WorkChange(
        layer=layer,
        layers=(layer,),
        phase=phase,
        flops_a=_flops(rows_a) if counted else None,
        flops_b=_flops(rows_b) if counted else None,
        events_a=_events(rows_a, a.steps) if same_basis else None,
        events_b=_events(rows_b, b.steps) if same_basis else None,
        calls_a=_calls(rows_a, a.steps),
        calls_b=_calls(rows_b, b.steps),
        retained_a=sum_of_known(row.self_retained_bytes for row in rows_a) if same_basis else None,
        retained_b=sum_of_known(row.self_retained_bytes for row in rows_b) if same_basis else None,
    )
    kept = abs(change.retained_delta)
    other_memory = kept >= max(_FEWEST_BYTES, _SAME_BYTES * abs(change.retained_a or 0.0))
    counts = (change.events_delta, change.calls_delta)
    if not change.flops_delta and not other_memory and all(abs(delta) < _SAME_COUNT for delta in counts):
        return None
    return change


def _flops(rows: Sequence[LayerRow]) -> int | None:
    return sum_if_all_known(row.self_flops_per_step for row in rows)


def _events(rows: Sequence[LayerRow], steps: int) -> float | None:
    known = sum_if_all_known(row.self_events for row in rows)
    return None if known is None else known / steps


def _calls(rows: Sequence[LayerRow], steps: int) -> float | None:
    known = sum_of_known(row.calls for row in rows)
    return None if known is None else known / steps


def _together(changes: Sequence[WorkChange], block: dict[str, str | None]) -> WorkChange:
    first = changes[0]
    if len(changes) == 1:
        return first
    layers = tuple(layer for one in changes for layer in one.layers)
    return WorkChange(
        layer=folded_name({layer: block.get(layer) for layer in layers}),
        layers=layers,
        phase=first.phase,
        flops_a=sum_of_known(one.flops_a for one in changes),
        flops_b=sum_of_known(one.flops_b for one in changes),
        events_a=sum_of_known(one.events_a for one in changes),
        events_b=sum_of_known(one.events_b for one in changes),
        calls_a=sum_of_known(one.calls_a for one in changes),
        calls_b=sum_of_known(one.calls_b for one in changes),
        retained_a=sum_of_known(one.retained_a for one in changes),
        retained_b=sum_of_known(one.retained_b for one in changes),
    )
