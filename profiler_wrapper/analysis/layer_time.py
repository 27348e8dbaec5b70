"""Time, memory and calls per layer and phase, from the charges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN, Attribution
from profiler_wrapper.analysis.charges import Charges, CpuTime
from profiler_wrapper.analysis.layer_calls import CallTree
from profiler_wrapper.analysis.layer_memory import CallMemory
from profiler_wrapper.analysis.layer_steps import layer_step_times
from profiler_wrapper.analysis.layer_tree import Layer, LayerTree
from profiler_wrapper.analysis.model import LayerRow
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.recording import Int32, Int64

_COMMUNICATION = classes.CLASSES.index("communication")
_NO_MODULE = Layer("", "", "", "other", -1, -1)


@dataclass(slots=True)
class _Sums:
    """What one layer gathers in one phase; the first of each pair is its own, the second inclusive."""

    time_ns: list[int] = field(default_factory=lambda: [0, 0])
    cpu_time_ns: list[int] = field(default_factory=lambda: [0, 0])
    attention_ns: list[int] = field(default_factory=lambda: [0, 0])
    communication_ns: list[int] = field(default_factory=lambda: [0, 0])
    exposed_communication_ns: list[int] = field(default_factory=lambda: [0, 0])
    idle_ns: list[int] = field(default_factory=lambda: [0, 0])
    events: list[int] = field(default_factory=lambda: [0, 0])
    fused_ns: int = 0
    graph: bool = False


Key = tuple[int, Phase]


def layer_rows(
    tree: LayerTree,
    attribution: Attribution,
    charges: Charges,
    cpu: CpuTime,
    exposed_ns: Int64,
    idle_ns: Int64 | None,
    calls: CallTree,
    memory: CallMemory | None,
    fused_ns: Mapping[Key, int],
    also: Iterable[Key] = (),
    *,
    steps: Steps,
) -> tuple[LayerRow, ...]:
    """One row per (layer, phase), `also` of those without time; layers in model order, what has no module last."""
    sums = _gather(tree, attribution, charges, cpu, exposed_ns, idle_ns)
    entered = _entered(attribution, calls)
    for key in (*entered, *fused_ns, *also):
        sums.setdefault(key, _Sums())
    for key, time_ns in fused_ns.items():
        sums[key].fused_ns = time_ns
    place = {index: layer.order for index, layer in enumerate(tree.layers)}
    order = sorted(sums, key=lambda key: (key[0] < 0, place.get(key[0], 0), key[0], PHASES.index(key[1])))
    on_device, knows_idle = charges.basis == "device", idle_ns is not None
    in_steps, in_none = layer_step_times(tree, attribution, charges, steps), (0,) * len(steps)
    rows = [
        _row(
            tree,
            key,
            sums[key],
            entered.get(key),
            memory,
            in_steps.get(key, in_none),
            on_device=on_device,
            knows_idle=knows_idle,
        )
        for key in order
    ]
    return tuple(_with_peaks_below(rows))


def _with_peaks_below(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """A layer whose own mark did not fire in a phase (a checkpoint within it) has the peak of those below."""
    highest: dict[tuple[str, Phase], int] = {}
    parent_of = {row.layer: row.parent for row in rows if row.layer}
    for row in rows:
        above = row.parent
        while row.peak_bytes is not None and above:
            highest[above, row.phase] = max(row.peak_bytes, highest.get((above, row.phase), 0))
            above = parent_of.get(above)
    return [
        replace(row, peak_bytes=highest[row.layer, row.phase])
        if row.peak_bytes is None and (row.layer, row.phase) in highest
        else row
        for row in rows
    ]


def _gather(
    tree: LayerTree,
    attribution: Attribution,
    charges: Charges,
    cpu: CpuTime,
    exposed_ns: Int64,
    idle_ns: Int64 | None,
) -> dict[Key, _Sums]:
    places = attribution.places
    communication = np.where(charges.work == _COMMUNICATION, charges.time_ns, 0)
    attention = np.where(charges.backend >= 0, charges.time_ns, 0)
    cpu_place = attribution.place_of[cpu.span]
    per_place = {
        "time_ns": _per_place(places, charges.place, charges.time_ns),
        "attention_ns": _per_place(places, charges.place, attention),
        "communication_ns": _per_place(places, charges.place, communication),
        "exposed_communication_ns": _per_place(places, charges.place, exposed_ns),
        "cpu_time_ns": _per_place(places, cpu_place, cpu.time_ns),
        "events": np.bincount(charges.place, minlength=len(places)),
    }
    if idle_ns is not None:
        per_place["idle_ns"] = idle_ns
    graph = _per_place(places, charges.place, charges.graph.astype(np.int64))
    sums: dict[Key, _Sums] = defaultdict(_Sums)
    for index, place in enumerate(places):
        if place.layer == UNKNOWN or not any(values[index] for values in per_place.values()):
            continue
        chain = tree.layers[place.layer].ancestors if place.layer >= 0 else (NO_LAYER,)
        for depth, layer in enumerate(chain):
            gathered = sums[layer, place.phase]
            for name, values in per_place.items():
                pair: list[int] = getattr(gathered, name)
                pair[1] += int(values[index])
                pair[0] += int(values[index]) if depth == 0 else 0
            gathered.graph |= depth == 0 and bool(graph[index])
    return dict(sums)


def _per_place(places: Sequence[object], place: Int32 | Int64, values: Int64) -> Int64:
    total = np.zeros(len(places), dtype=np.int64)
    np.add.at(total, place, values)
    return total


def _entered(attribution: Attribution, calls: CallTree) -> dict[Key, list[int]]:
    """The calls of each (layer, phase)."""
    entered: dict[Key, list[int]] = defaultdict(list)
    for call, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        entered[layer, attribution.place(span).phase].append(call)
    return dict(entered)


def _row(
    tree: LayerTree,
    key: Key,
    sums: _Sums,
    entered: list[int] | None,
    memory: CallMemory | None,
    step_times_ns: tuple[int, ...],
    *,
    on_device: bool,
    knows_idle: bool,
) -> LayerRow:
    index, phase = key
    layer = tree.layers[index] if index >= 0 else _NO_MODULE
    held = memory if entered else None
    chosen = entered or []
    forward = phase not in ("recompute", "backward")
    return LayerRow(
        layer=layer.name,
        raw_name=layer.raw_name,
        class_name=layer.class_name,
        kind=layer.kind,
        block=tree.layers[layer.block].name if layer.block >= 0 else None,
        parent=tree.layers[layer.parent].name if layer.parent >= 0 else None,
        depth=layer.depth,
        order=layer.order,
        phase=phase,
        calls=len(chosen) if entered is not None else None,
        self_time_ns=sums.time_ns[0],
        time_ns=sums.time_ns[1],
        cpu_time_ns=sums.cpu_time_ns[1],
        attention_ns=sums.attention_ns[1],
        communication_ns=sums.communication_ns[1],
        exposed_communication_ns=sums.exposed_communication_ns[1] if on_device else None,
        idle_ns=sums.idle_ns[1] if knows_idle else None,
        fused_ns=sums.fused_ns,
        flops_per_step=None,
        self_flops_per_step=None,
        allocated_bytes=_mean(held.exit_allocated, chosen) if held else None,
        reserved_bytes=_mean(held.exit_reserved, chosen) if held else None,
        entry_allocated_bytes=_mean(held.entry_allocated, chosen) if held else None,
        entry_reserved_bytes=_mean(held.entry_reserved, chosen) if held else None,
        peak_bytes=int(held.peak[chosen].max()) if held else None,
        retained_bytes=_mean(held.retained, chosen) if held and forward else None,
        self_retained_bytes=_mean(held.self_retained, chosen) if held and forward else None,
        shared=layer.shared,
        compiled=layer.compiled,
        graph=sums.graph,
        self_events=sums.events[0],
        step_times_ns=step_times_ns,
    )


def _mean(values: Int64 | None, chosen: list[int]) -> float | None:
    return None if values is None else float(values[chosen].mean())
