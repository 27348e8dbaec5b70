"""Time in all, by class, by attention backend, per step, and without a layer, from the charges."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN, Attribution
from profiler_wrapper.analysis.calls import CallTree, layer_step_times, step_of_charges
from profiler_wrapper.analysis.charges import Charges, CpuTime, Union, union
from profiler_wrapper.analysis.layer_tree import Layer, LayerTree
from profiler_wrapper.analysis.memory.per_layer import CallMemory
from profiler_wrapper.analysis.model import (
    PHASES,
    WITHOUT_OP,
    Analysis,
    AttentionRow,
    ClassRow,
    LayerRow,
    Phase,
    StepRow,
    TimeTotals,
    UnattributedRow,
)
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.analysis.work.flops import FlopCount, LayerFlops
from profiler_wrapper.analysis.work.peaks import Given
from profiler_wrapper.analysis.work.roofline import Roof, Roofs, WorkCount, roofs
from profiler_wrapper.analysis.work.utilization import peaks_of_run, utilization
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


# --------------------------------------------------------------------------------------------------
# Time, memory and calls per layer and phase, from the charges.

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


_ON_CPU = re.compile(r"(gloo|mpi|ucc):")
_LEAF = 0.5  # of an op's duration that is its own: such ops compute, others hold them


def unattributed_rows(attribution: Attribution, charges: Charges) -> tuple[UnattributedRow, ...]:
    """Time without a layer, by reason, the largest first."""
    time: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for index, place in enumerate(attribution.places):
        if place.layer == UNKNOWN:
            members = charges.place == index
            time[place.reason] += int(charges.time_ns[members].sum())
            count[place.reason] += int(members.sum())
    rows = [UnattributedRow(reason=r, time_ns=time[r], count=count[r]) for r in time if count[r]]
    return tuple(sorted(rows, key=lambda row: (-row.time_ns, row.reason)))


def attention_rows(
    recording: Recording, tree: LayerTree, attribution: Attribution, charges: Charges
) -> tuple[AttentionRow, ...]:
    """Attention by innermost layer, phase and backend, layers in model order."""
    time: Counter[tuple[int, Phase, int]] = Counter()
    kernels: dict[tuple[int, Phase, int], Counter[str]] = defaultdict(Counter)
    for i in np.flatnonzero(charges.backend >= 0).tolist():
        place = attribution.places[charges.place[i]]
        if place.layer != UNKNOWN:
            key = (place.layer, place.phase, int(charges.backend[i]))
            time[key] += int(charges.time_ns[i])
            kernels[key][recording.name_of(int(charges.span[i]))] += int(charges.time_ns[i])
    rows = [
        (
            tree.layers[layer].order if layer >= 0 else len(tree.layers),
            PHASES.index(phase),
            AttentionRow(
                layer=tree.layers[layer].name if layer >= 0 else "",
                phase=phase,
                backend=classes.BACKENDS[backend],
                kernels=tuple(name for name, _ in kernels[layer, phase, backend].most_common()),
                time_ns=spent,
            ),
        )
        for (layer, phase, backend), spent in time.items()
    ]
    return tuple(row for _, _, row in sorted(rows, key=lambda r: r[:2]))


def class_rows(attribution: Attribution, charges: Charges) -> tuple[ClassRow, ...]:
    """Time by class and phase, what has no layer included; the most expensive first."""
    time: Counter[tuple[int, Phase]] = Counter()
    count: Counter[tuple[int, Phase]] = Counter()
    phase_of_place = [place.phase for place in attribution.places]
    keys = charges.place.astype(np.int64) * len(classes.CLASSES) + charges.work
    distinct, inverse = np.unique(keys, return_inverse=True)
    spent = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(spent, inverse, charges.time_ns)
    for key, nanoseconds, events in zip(
        distinct.tolist(), spent.tolist(), np.bincount(inverse, minlength=len(distinct)).tolist(), strict=True
    ):
        place, work = divmod(key, len(classes.CLASSES))
        time[work, phase_of_place[place]] += nanoseconds
        count[work, phase_of_place[place]] += events
    rows = [
        ClassRow(class_name=classes.CLASSES[work], phase=phase, time_ns=spent_ns, count=count[work, phase])
        for (work, phase), spent_ns in time.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.time_ns, row.class_name, row.phase)))


def step_rows(
    attribution: Attribution, charges: Charges, steps: Steps, peak_of_step: Sequence[int | None]
) -> tuple[StepRow, ...]:
    """A row per step, and a last one (`step` None) for what was launched in no step."""
    place = step_of_charges(charges, steps)
    phase = np.array([PHASES.index(p.phase) for p in attribution.places], dtype=np.int64)[charges.place]
    spent = np.zeros((len(steps) + 1, len(PHASES)), dtype=np.int64)  # the last row is for no step
    np.add.at(spent, (place, phase), charges.time_ns)
    attention = np.zeros(len(steps) + 1, dtype=np.int64)
    is_attention = charges.backend >= 0
    np.add.at(attention, place[is_attention], charges.time_ns[is_attention])
    rows = []
    for i, number in [*enumerate(steps.number), (-1, None)]:
        if number is None and not (place < 0).any():
            continue
        bounded = number is not None and steps.end_ns[i] < np.iinfo(np.int64).max
        rows.append(
            StepRow(
                step=number,
                time_ns=int(spent[i].sum()),
                span_ns=int(steps.end_ns[i] - steps.start_ns[i]) if bounded else None,
                phases_ns={name: int(ns) for name, ns in zip(PHASES, spent[i].tolist(), strict=True) if ns},
                attention_ns=int(attention[i]),
                peak_bytes=peak_of_step[i] if number is not None else None,
            )
        )
    return tuple(rows)


def exposed_communication(recording: Recording, charges: Charges) -> tuple[Int64, int | None]:
    """(per event, in all) communication time with no compute running beside it on the same device.

    Events that overlap one another each count; the second number counts an instant once. On a CPU that is wall time,
    waiting for other ranks included, and known in all alone: None where nothing is seen to communicate.
    """
    exposed = np.zeros(len(charges), dtype=np.int64)
    pairs = communication_and_compute(recording, charges)
    total = sum(alone_ns(moving, compute) for moving, compute in pairs)
    if charges.basis != "device":
        return exposed, total if any(moving.length_ns for moving, _ in pairs) else None
    spans = recording.spans
    start, end, device = spans.start_ns[charges.span], spans.end_ns[charges.span], spans.device[charges.span]
    for index, (_, compute) in zip(np.unique(device).tolist(), pairs, strict=True):
        moving = (device == index) & (charges.work == _COMMUNICATION)
        exposed[moving] = charges.time_ns[moving] - compute.overlap(start[moving], end[moving])
    return exposed, total


def communication_and_compute(
    recording: Recording, charges: Charges, counts: Bool | None = None
) -> list[tuple[Union, Union]]:
    """When something communicates, and when something computes: of each device, or of all threads of a CPU.

    `counts`: per charge, whether it counts as communication. Copies and sets compute nothing, so they hide none; nor do
    ops of a CPU that mostly hold others.
    """
    spans = recording.spans
    start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
    communicates: Bool = charges.work == _COMMUNICATION
    moves = communicates if counts is None else communicates & counts
    if charges.basis == "device":
        device, is_kernel = spans.device[charges.span], spans.category[charges.span] == Category.KERNEL
        computes = is_kernel & ~communicates
        return [
            (union(start[here & moves], end[here & moves]), union(start[here & computes], end[here & computes]))
            for here in (device == index for index in np.unique(device).tolist())
        ]
    computes = ~communicates & (charges.time_ns >= _LEAF * (end - start))
    threads = communicating_threads(recording)
    moving = union(
        np.append(spans.start_ns[threads], start[moves]),
        np.append(spans.end_ns[threads], end[moves]),
    )
    return [(moving, union(start[computes], end[computes]))]


def communicating_threads(recording: Recording) -> Bool:
    """Per span, whether it is a collective on a thread of gloo, MPI or UCC: from its begin there until all have met."""
    named = np.array([_ON_CPU.match(name) is not None for name in recording.names], dtype=np.bool_)
    chosen: Bool = named[recording.spans.name] & (recording.spans.category <= Category.ANNOTATION)
    return chosen


def alone_ns(moving: Union, compute: Union) -> int:
    """How long `moving` lasts without `compute`."""
    return moving.length_ns - int(compute.overlap(moving.start_ns, moving.end_ns).sum())


def totals(found: Attributed, exposed_ns: int | None) -> TimeTotals:
    """The sums over the whole trace."""
    recording, attribution, charges = found.recording, found.attribution, found.charges
    unknown = np.array([place.layer == UNKNOWN for place in attribution.places], dtype=np.bool_)
    total = int(charges.time_ns.sum())
    unattributed = int(charges.time_ns[unknown[charges.place]].sum())
    spans = recording.spans
    busy = None
    if charges.basis == "device" and found.unseen_until_ns is None:
        start, end, device = spans.start_ns[charges.span], spans.end_ns[charges.span], spans.device[charges.span]
        busy = sum(union(start[device == d], end[device == d]).length_ns for d in np.unique(device).tolist())
    span_ns = int(spans.end_ns.max() - spans.start_ns.min()) if len(spans) else 0
    return TimeTotals(
        total_ns=total,
        attributed_ns=total - unattributed,
        unattributed_ns=unattributed,
        busy_ns=busy,
        span_ns=span_ns,
        exposed_communication_ns=exposed_ns,
    )


# --------------------------------------------------------------------------------------------------
# FLOPs, bytes and the roof into rows of time: of layers, classes and what has no layer.


def with_work(analysis: Analysis, found: Attributed, work: WorkCount, peaks: Given | None) -> Analysis:
    """An analysis of times, with the FLOPs and bytes of its ops and what part of the machine they use."""
    roof, warning = peaks_of_run(analysis.run, given=peaks, on_device=analysis.time_basis == "device")
    at_roof = roofs(found, work, roof)
    shares, notes = utilization(found, work.flops, roof)
    if roof is not None and roof.bandwidth_bytes_per_s is None:
        of = roof.device or "this device"
        notes.insert(0, f"no memory bandwidth is known of {of}: give bandwidth=<GB/s> for the time at the roof")
    layers = with_layer_work(analysis.layers, work.flops, at_roof)
    if shares is not None:  # else the steps with shapes are not like those that are timed
        notes += _faster_than_the_roof(analysis, layers)
    return replace(
        analysis,
        layers=layers,
        classes=with_class_flops(analysis.classes, work.flops),
        unattributed=with_unattributed_work(analysis.unattributed, work.flops, at_roof),
        flops=work.flops.rows,
        uncounted=work.flops.uncounted,
        untold_bytes=work.untold_bytes,
        utilization=shares,
        warnings=(*analysis.warnings, *([warning] if warning else []), *notes),
    )


def _faster_than_the_roof(analysis: Analysis, layers: Sequence[LayerRow]) -> list[str]:
    """A warning of what took less time than it needs at the roof, the longest named."""
    steps = max(1, sum(row.step is not None for row in analysis.steps))
    named = [(f"{row.layer or 'code outside of all layers'} ({row.phase})", row.time_ns, [row]) for row in layers]
    found = []
    for name, time_ns, rows in [*named, ("the whole", analysis.time.total_ns, [r for r in layers if r.parent is None])]:
        took_ns = time_ns - sum(row.communication_ns for row in rows)
        needs_ns = steps * max(
            sum(row.roof_time_per_step_ns or 0 for row in rows), sum(row.peak_time_per_step_ns or 0 for row in rows)
        )
        if 0 < took_ns < needs_ns:
            found.append((took_ns, f"{name} at {100 * needs_ns / took_ns:.0f} %"))
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"faster than the roof of the device: {max(found)[1]}{more}. Likely kernels that the trace lacks, peaks of "
        "another device, what a mask hides, or data that was still in a cache"
    ]


def keys_of_work(tree: LayerTree, work: WorkCount | str) -> tuple[list[tuple[int, Phase]], list[str]]:
    """The (layer, phase) pairs that have FLOPs or move bytes, and what is to be said of them all."""
    if isinstance(work, str):
        return [], [f"FLOPs and bytes moved are not available, because {work}"]
    index = {**tree.by_name(), "": NO_LAYER}
    moving = [
        (demand.layer, demand.phase) for demand in work.demands if demand.layer is not None and demand.bytes_moved
    ]
    every = list(dict.fromkeys([*work.flops.layers, *moving]))
    notes = work.notes()
    gone = list(dict.fromkeys(layer for layer, _ in every if layer not in index))
    if gone:
        notes.append(
            f"FLOPs and bytes of {len(gone)} layers that ran in no timed step have no rows: {', '.join(gone[:3])}"
        )
    return [(index[layer], phase) for layer, phase in every if layer in index], notes


def with_layer_work(rows: Sequence[LayerRow], count: FlopCount, at_roof: Roofs) -> tuple[LayerRow, ...]:
    """The rows of layers; one without work has 0 of it."""
    no_flops, no_roof = LayerFlops(), Roof()
    found = []
    for row in rows:
        key = (row.layer, row.phase)
        flops = count.layers.get(key, no_flops)
        own, inclusive = at_roof.own.get(key, no_roof), at_roof.inclusive.get(key, no_roof)
        found.append(
            replace(
                row,
                flops_per_step=flops.inclusive,
                known_flops_per_step=flops.known,
                self_flops_per_step=flops.own,
                causal_flops_per_step=flops.causal_inclusive,
                self_causal_flops_per_step=flops.causal_own,
                bytes_moved_per_step=inclusive.bytes_moved,
                self_bytes_moved_per_step=own.bytes_moved,
                roof_time_per_step_ns=inclusive.time_ns,
                self_roof_time_per_step_ns=own.time_ns,
                memory_roof_time_per_step_ns=inclusive.memory_ns,
                self_memory_roof_time_per_step_ns=own.memory_ns,
                peak_time_per_step_ns=inclusive.peak_ns,
            )
        )
    return tuple(found)


def with_class_flops(rows: Sequence[ClassRow], count: FlopCount) -> tuple[ClassRow, ...]:
    """The rows of classes, those with FLOPs but without time at the end."""
    full: Counter[tuple[str, Phase]] = Counter()
    causal: Counter[tuple[str, Phase]] = Counter()
    for row in count.rows:
        full[row.class_name, row.phase] += row.flops_per_step
        causal[row.class_name, row.phase] += row.causal_flops_per_step
    unknown = {(row.class_name, row.phase) for row in count.uncounted}
    timed = {(row.class_name, row.phase) for row in rows}
    untimed = sorted(({*full} | unknown) - timed)
    every = [*rows, *(ClassRow(class_name=name, phase=phase, time_ns=0, count=0) for name, phase in untimed)]
    return tuple(
        row
        if (row.class_name, row.phase) in unknown
        else replace(
            row,
            flops_per_step=full[row.class_name, row.phase],
            causal_flops_per_step=causal[row.class_name, row.phase],
        )
        for row in every
    )


def with_unattributed_work(
    rows: Sequence[UnattributedRow], count: FlopCount, at_roof: Roofs
) -> tuple[UnattributedRow, ...]:
    """The rows of what has no layer, by reason, those with work but without time at the end.

    What was launched before the trace, or by the replay of a graph, has time, but no op in it that tells the work.
    """
    flops: Counter[str] = Counter()
    for counted in count.rows:
        if counted.layer is None:
            flops[counted.reason] += counted.flops_per_step
    with_work = {*flops, *(reason for reason, roof in at_roof.unattributed.items() if roof.bytes_moved != 0)}
    untimed = sorted(with_work - {row.reason for row in rows})
    no_roof, found = Roof(), []
    for row in (*rows, *(UnattributedRow(reason=reason, time_ns=0, count=0) for reason in untimed)):
        roof = at_roof.unattributed.get(row.reason, no_roof)
        if row.reason in WITHOUT_OP:
            found.append(row)
            continue
        found.append(
            replace(
                row,
                flops_per_step=flops[row.reason],
                bytes_moved_per_step=roof.bytes_moved,
                roof_time_per_step_ns=roof.time_ns,
            )
        )
    return tuple(found)
