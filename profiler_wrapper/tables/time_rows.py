"""Time in all, per layer, class, attention backend and step, without a layer, of what is tracked; from the charges."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from profiler_wrapper.errors import first_few, in_a_line, shown
from profiler_wrapper.place import classes
from profiler_wrapper.place.intervals import Union, union
from profiler_wrapper.place.layers import Layer, LayerTree, is_named_block
from profiler_wrapper.place.names import PHASES, WITHOUT_OP, Phase
from profiler_wrapper.place.phases import NO_LAYER, UNKNOWN
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.steps import Steps, find_iterations
from profiler_wrapper.place.timed_events import TimedEvents
from profiler_wrapper.tables.idle import idle_per_place
from profiler_wrapper.tables.memory.calls import CallMemory
from profiler_wrapper.tables.memory.events import DeviceMemory
from profiler_wrapper.tables.model import (
    Analysis,
    AttentionRow,
    ClassRow,
    LayerRow,
    StepRow,
    TimeTotals,
    UnattributedRow,
)
from profiler_wrapper.tables.work.flops import FlopCount
from profiler_wrapper.tables.work.peaks import Given
from profiler_wrapper.tables.work.roofline import (
    LayerWork,
    WorkCount,
    WorkOfLayers,
    peaks_of_run,
    utilization,
    work_by_layer,
)
from profiler_wrapper.trace.arrays import at, in_order, sum_by_key
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64, Recording

# --- Time, memory and calls per layer and phase ---

_NO_MODULE = Layer("", "", "", "other", -1, -1)


Key = tuple[int, Phase]  # a layer, or NO_LAYER, in a phase


def layer_rows(placed: Placed, exposed_ns: Int64, memory: CallMemory, also: Iterable[Key] = ()) -> tuple[LayerRow, ...]:
    """One row per (layer, phase), `also` of those without time; layers in model order, what has no module last."""
    tree, charges, calls = placed.tree, placed.charges, placed.calls
    idle_ns, on_device = idle_per_place(placed), charges.basis == "device"
    own, inclusive, in_steps = _sums(placed, exposed_ns, idle_ns)
    fused_ns = placed.shared_kernels.time_ns(charges, placed.attribution)
    entered: dict[Key, list[int]] = defaultdict(list)  # calls
    for call, (span, index) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        if placed.left_out is None or not placed.left_out[span]:
            entered[index, placed.attribution.place(span).phase].append(call)
    keys = {*inclusive, *entered, *fused_ns, *also}
    highest, retained = _memory_of_calls(placed, memory)
    places = [place for place in placed.attribution.places if len(place.chain) > 1]
    elsewhere = {place.layer for place in places if place.chain[1] not in tree.layers[place.layer].ancestors}
    layers = [*tree.layers, _NO_MODULE]  # the last one is for `NO_LAYER`
    rows = []
    for key in sorted(keys, key=lambda key: (key[0] < 0, layers[key[0]].order, key[0], PHASES.index(key[1]))):
        index, phase = key
        layer = layers[index]
        self_sums, whole, calls_of_key = own[key], inclusive[key], entered.get(key)
        held = {name: values[calls_of_key] for name, values in memory.items()} if calls_of_key else {}
        kept = held if phase not in ("recompute", "backward") else {}
        attention_ns = {name: whole[name] for name in classes.BACKENDS if whole[name]}
        rows.append(
            LayerRow(
                layer=layer.name,
                raw_name=layer.raw_name,
                class_name=layer.class_name,
                kind=layer.kind,
                block=tree.layers[layer.block].name if layer.block >= 0 else None,
                parent=tree.layers[layer.parent].name if layer.parent >= 0 else None,
                depth=layer.depth,
                order=layer.order,
                phase=phase,
                calls=None if calls_of_key is None else len(calls_of_key),
                self_time_ns=self_sums["time"],
                time_ns=whole["time"],
                cpu_time_ns=whole["cpu"],
                attention_ns=sum(attention_ns.values()),
                communication_ns=whole["communication"],
                exposed_communication_ns=whole["exposed"] if on_device else None,
                idle_ns=None if idle_ns is None else whole["idle"],
                fused_ns=fused_ns.get(key, 0),
                flops_per_step=None,
                self_flops_per_step=None,
                allocated_bytes=_mean(held, "exit_allocated_bytes"),
                reserved_bytes=_mean(held, "exit_reserved_bytes"),
                entry_allocated_bytes=_mean(held, "entry_allocated_bytes"),
                entry_reserved_bytes=_mean(held, "entry_reserved_bytes"),
                peak_bytes=highest.get(key),
                retained_bytes=retained[key] / len(calls_of_key or ()) if kept else None,
                self_retained_bytes=_mean(kept, "self_retained_bytes"),
                shared=layer.shared or index in elsewhere,
                compiled=layer.compiled,
                graph=self_sums["graph"] > 0,
                self_events=self_sums["events"],
                step_times_ns=in_steps.get(key, (0,) * len(placed.steps)),
                lost_launches=whole["lost"],
                attention_by_backend_ns=attention_ns,
            )
        )
    return tuple(rows)


def _mean(memory: CallMemory, name: str) -> float | None:
    return float(memory[name].mean()) if name in memory else None


def _memory_of_calls(placed: Placed, memory: CallMemory) -> tuple[dict[Key, int], Counter[Key]]:
    """The highest of a layer's calls and of those below it, whose marks may fire where its own does not (a checkpoint
    within, a method that is no call); and what they keep in all.
    """
    highest, kept = defaultdict[Key, int](int), Counter[Key]()
    columns = [memory[name].tolist() for name in ("peak_bytes", "self_retained_bytes")] if memory else [[], []]
    for span, peak, own in zip(placed.calls.span.tolist() if memory else (), *columns, strict=True):
        if placed.left_out is None or not placed.left_out[span]:
            place = placed.attribution.place(span)
            for above in place.chain:
                highest[above, place.phase] = max(highest[above, place.phase], peak)
                kept[above, place.phase] += own
    return highest, kept


def _sums(
    placed: Placed, exposed_ns: Int64, idle_ns: Int64 | None
) -> tuple[dict[Key, Counter[str]], dict[Key, Counter[str]], dict[Key, tuple[int, ...]]]:
    """What each layer gathers in each phase: its own, with the layers below it, and of that the time in each step."""
    places, charges = placed.attribution.places, placed.charges
    time_ns, count = charges.time_ns, len(places)
    columns = {
        "time": time_ns,
        **{name: np.where(charges.backend == i, time_ns, 0) for i, name in enumerate(classes.BACKENDS)},
        "communication": np.where(charges.work == classes.COMMUNICATION, time_ns, 0),
        "exposed": exposed_ns,
        "graph": charges.graph,
        "events": np.ones(len(charges), dtype=np.int64),
    }
    per_place = {name: sum_by_key(charges.place, values, count) for name, values in columns.items()}
    per_place["cpu"] = sum_by_key(placed.attribution.place_of, placed.cpu_ns, count)
    per_place["lost"] = np.bincount(placed.attribution.place_of[placed.lost_launches], minlength=count)
    if idle_ns is not None:
        per_place["idle"] = idle_ns
    in_steps = np.zeros((count, len(placed.steps) + 1), dtype=np.int64)  # the last column is for no step
    np.add.at(in_steps, (charges.place, step_of_charges(placed)), time_ns)
    table = np.column_stack([*per_place.values(), in_steps[:, :-1]])
    row_of: dict[Key, int] = {}
    from_place, to_row, is_own = [], [], []
    for index in np.flatnonzero(table.any(axis=1)).tolist():
        place = places[index]
        if place.layer == UNKNOWN:
            continue
        chain = place.chain or (NO_LAYER,)
        for layer in chain:
            from_place.append(index)
            to_row.append(row_of.setdefault((layer, place.phase), len(row_of)))
            is_own.append(layer == chain[0])
    own, inclusive = np.zeros((2, len(row_of), table.shape[1]), dtype=np.int64)
    pieces, rows = table[from_place], np.array(to_row, dtype=np.int64)
    np.add.at(inclusive, rows, pieces)
    np.add.at(own, rows[is_own], pieces[is_own])
    of_own, of_all = defaultdict[Key, Counter[str]](Counter), defaultdict[Key, Counter[str]](Counter)
    for key, *sums in zip(row_of, own.tolist(), inclusive.tolist(), strict=True):
        of_own[key], of_all[key] = (Counter(dict(zip(per_place, row, strict=False))) for row in sums)
    times = map(tuple, inclusive[:, len(per_place) :].tolist())
    return of_own, of_all, dict(zip(row_of, times, strict=True))


def step_of_charges(placed: Placed) -> Int64:
    """Per charge the place of the step that launched it; -1 for none, as for what has no launch."""
    charges = placed.charges
    return np.where(charges.cpu_span >= 0, placed.steps.place_of(charges.launch_ns), -1)


_ON_CPU = re.compile(r"(gloo|mpi|ucc):")
_LEAF = 0.5  # of an op's duration that is its own: such ops compute, others hold them


def unattributed_rows(placed: Placed) -> tuple[UnattributedRow, ...]:
    """Time without a layer, by reason, the largest first."""
    charges = placed.charges
    time_ns, count = Counter[str](), Counter[str]()
    spent = sum_by_key(charges.place, charges.time_ns, len(placed.attribution.places)).tolist()
    for place, own_ns, number in zip(placed.attribution.places, spent, np.bincount(charges.place), strict=False):
        if place.layer == UNKNOWN:
            time_ns[place.reason] += own_ns
            count[place.reason] += int(number)
    rows = [UnattributedRow(reason=reason, time_ns=time_ns[reason], count=n) for reason, n in count.items() if n]
    return tuple(sorted(rows, key=lambda row: (-row.time_ns, row.reason)))


def attention_rows(placed: Placed) -> tuple[AttentionRow, ...]:
    """Attention by innermost layer, phase and backend, layers in model order."""
    recording, tree, charges = placed.recording, placed.tree, placed.charges
    kernels: dict[tuple[int, Phase, int], Counter[str]] = defaultdict(Counter)
    for i in np.flatnonzero(charges.backend >= 0).tolist():
        place = placed.attribution.places[charges.place[i]]
        if place.layer != UNKNOWN:
            key = (place.layer, place.phase, int(charges.backend[i]))
            kernels[key][recording.name_of(int(charges.span[i]))] += int(charges.time_ns[i])
    orders = [*(layer.order for layer in tree.layers), len(tree.layers)]  # the last one is for `NO_LAYER`
    return tuple(
        AttentionRow(
            layer=tree.layers[layer].name if layer >= 0 else "",
            phase=phase,
            backend=classes.BACKENDS[backend],
            kernels=tuple(name for name, _ in kernels[layer, phase, backend].most_common()),
            time_ns=kernels[layer, phase, backend].total(),
        )
        for layer, phase, backend in sorted(kernels, key=lambda key: (orders[key[0]], PHASES.index(key[1])))
    )


def class_rows(placed: Placed) -> tuple[ClassRow, ...]:
    """Time by class and phase, what has no layer included; the most expensive first."""
    charges = placed.charges
    phase = placed.attribution.phase_of_place[charges.place]
    time_ns, count = np.zeros((2, len(classes.CLASSES), len(PHASES)), dtype=np.int64)
    np.add.at(time_ns, (charges.work, phase), charges.time_ns)
    np.add.at(count, (charges.work, phase), 1)
    rows = [
        ClassRow(class_name=classes.CLASSES[i], phase=PHASES[j], time_ns=int(time_ns[i, j]), count=int(count[i, j]))
        for i, j in np.argwhere(count).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.time_ns, row.class_name, row.phase)))


def step_rows(placed: Placed, memory: DeviceMemory | None) -> tuple[StepRow, ...]:
    """A row per step, and a last one (`step` None) for what was launched in no step."""
    charges, steps = placed.charges, placed.steps
    place = step_of_charges(placed)
    phase = placed.attribution.phase_of_place[charges.place]
    spent = np.zeros((len(steps) + 1, len(PHASES)), dtype=np.int64)  # the last row is for no step
    np.add.at(spent, (place, phase), charges.time_ns)
    attention = sum_by_key(place, np.where(charges.backend >= 0, charges.time_ns, 0), len(steps) + 1)
    lost_in = steps.place_of(placed.recording.spans.start_ns[placed.lost_launches])
    lost = np.bincount(np.where(lost_in < 0, len(steps), lost_in), minlength=len(steps) + 1).tolist()
    peaks = None
    if memory is not None:
        peaks = memory.highest(*np.searchsorted(memory.time_ns, [steps.start_ns, steps.end_ns])).tolist()
    rows = []
    for i, number in [*enumerate(steps.number), (-1, None)]:
        if number is None and not (place < 0).any() and not lost[-1]:
            continue
        bounded = number is not None and steps.end_ns[i] < np.iinfo(np.int64).max
        rows.append(
            StepRow(
                step=number,
                time_ns=int(spent[i].sum()),
                span_ns=int(steps.end_ns[i] - steps.start_ns[i]) if bounded else None,
                phases_ns={name: int(ns) for name, ns in zip(PHASES, spent[i].tolist(), strict=True) if ns},
                attention_ns=int(attention[i]),
                peak_bytes=None if number is None or peaks is None else peaks[i],
                lost_launches=lost[i],
            )
        )
    return tuple(rows)


def exposed_communication(recording: Recording, charges: TimedEvents) -> tuple[Int64, int | None]:
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
        moving = (device == index) & (charges.work == classes.COMMUNICATION)
        exposed[moving] = charges.time_ns[moving] - compute.overlap(start[moving], end[moving])
    return exposed, total


def communication_and_compute(
    recording: Recording, charges: TimedEvents, counts: Bool | None = None
) -> list[tuple[Union, Union]]:
    """When something communicates, and when something computes: of each device, or of all threads of a CPU.

    `counts`: per charge, whether it counts as communication. Copies and sets compute nothing, so they hide none; nor do
    ops of a CPU that mostly hold others.
    """
    spans = recording.spans
    start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
    communicates: Bool = charges.work == classes.COMMUNICATION
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
    moving = union(np.append(spans.start_ns[threads], start[moves]), np.append(spans.end_ns[threads], end[moves]))
    return [(moving, union(start[computes], end[computes]))]


def communicating_threads(recording: Recording) -> Bool:
    """Per span, whether it is a collective on a thread of gloo, MPI or UCC: from its begin there until all have met."""
    return recording.named(_ON_CPU.match) & (recording.spans.category <= Category.ANNOTATION)


def alone_ns(moving: Union, compute: Union) -> int:
    """How long `moving` lasts without `compute`."""
    return moving.length_ns - int(compute.overlap(moving.start_ns, moving.end_ns).sum())


def totals(placed: Placed, exposed_ns: int | None) -> TimeTotals:
    """The sums over the whole trace."""
    recording, attribution, charges = placed.recording, placed.attribution, placed.charges
    unknown = attribution.layer_of_place == UNKNOWN
    total = int(charges.time_ns.sum())
    unattributed = int(charges.time_ns[unknown[charges.place]].sum())
    spans = recording.spans
    busy = None
    if charges.basis == "device" and placed.unseen_until_ns is None:
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


# --- Named things followed over the steps: ops, kernels, blocks somebody named, functions of events ---

_MOST_NAMED_BLOCKS = 50


class LayerEvent(NamedTuple):
    """What a tracking function sees of one event."""

    name: str
    time_us: float
    phase: str
    class_name: str


TrackFunction = Callable[[Sequence[LayerEvent]], float]
Track = str | re.Pattern[str] | TrackFunction


def tracked_series(placed: Placed, track: Sequence[Track], notes: list[str]) -> dict[str, tuple[float | None, ...]]:
    """What is followed, per step, or per entry of a layer loop; `notes` gets what is not known, and why.

    Microseconds of each tracked name, and of every block that the trace names: `name`. What each tracked function
    makes of a block's events: `function[block]`.

    A name is matched exactly; where nothing has it, as a regular expression anywhere in a name (as it
    stands, if it is none). An event inside another one that matches counts once. A tracked name that
    nothing has is no number, and `notes` says so.
    """
    recording, charges = placed.recording, placed.charges
    iterations = find_iterations(recording)
    steps = iterations if len(iterations) > 1 else placed.steps
    wanted: dict[str, set[int]] = {}
    for item in track:
        if callable(item):
            continue
        pattern = _pattern(item)
        exact = {i for i, name in enumerate(recording.names) if name == item}
        matching = exact or {i for i, name in enumerate(recording.names) if pattern.search(name)}
        wanted[pattern.pattern if isinstance(item, re.Pattern) else item] = matching
    used = np.unique(recording.spans.name[recording.spans.category == Category.ANNOTATION]).tolist()
    for i in [i for i in used if is_named_block(recording.names[i])][:_MOST_NAMED_BLOCKS]:
        wanted.setdefault(recording.names[i], {i})
    place = steps.place_of(charges.launch_ns) if len(steps) else np.zeros(len(charges), dtype=np.int64)
    count = max(len(steps), 1)
    series: dict[str, tuple[float | None, ...]] = {}
    for name, ids in wanted.items():
        if not ids:
            series[name] = (None,) * count
            notes.append(f"the tracked {shown(name)} is the name of nothing in the timed trace")
            continue
        chosen = _inside(placed, ids) & (place >= 0)
        series[name] = tuple((sum_by_key(place[chosen], charges.time_ns[chosen], count) / 1000).tolist())
    return series | _function_series(placed, steps, [item for item in track if callable(item)], notes)


def _pattern(item: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(item)
    except re.error:
        return re.compile(re.escape(str(item)))


def _inside(placed: Placed, ids: set[int]) -> Bool:
    """Per charge: it, or an event around its launch, has one of these names."""
    recording, charges = placed.recording, placed.charges
    chosen = np.isin(recording.spans.name, list(ids))
    inside: Bool = at(nearest(placed.enclosing, chosen) >= 0, charges.cpu_span, False) | chosen[charges.span]
    if blocks := {i for i in ids if is_named_block(recording.names[i])}:
        inside |= (charges.cpu_span >= 0) & _begins_in_block(recording, charges.cpu_span, blocks)
    return inside


def _begins_in_block(recording: Recording, members: Int64, names: set[int]) -> Bool:
    """Per member: it begins while a named block of these names runs on its thread.

    Such a block may cross what else encloses a member: a step that ends where a model is called within the block, or
    an optimizer's step in whose midst it was cut off with the recording.
    """
    spans = recording.spans
    blocks = np.flatnonzero((spans.category == Category.ANNOTATION) & np.isin(spans.name, list(names)))
    within = np.zeros(len(members), dtype=np.bool_)
    for lane in np.unique(spans.lane[blocks]).tolist():
        here = in_order(blocks[spans.lane[blocks] == lane], spans.start_ns)
        starts = spans.start_ns[members]
        begun = np.searchsorted(spans.start_ns[here], starts, side="right")
        ends = np.append(0, np.maximum.accumulate(spans.end_ns[here]))  # the last one of those that have begun
        within |= (spans.lane[members] == lane) & (begun > 0) & (starts < ends[begun])
    return within


def _function_series(
    placed: Placed, steps: Steps, functions: Sequence[TrackFunction], notes: list[str]
) -> dict[str, tuple[float | None, ...]]:
    """Per step, what each function makes of a block's events.

    Where the model has no blocks, a root's events are given. A function that raises has no number
    there, and `notes` gets its first reason.
    """
    if not functions:
        return {}
    groups = _events_by_block(placed, steps)
    series: dict[str, tuple[float | None, ...]] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        for block in dict.fromkeys(block for block, _ in groups):
            values = [groups.get((block, step)) for step in range(max(len(steps), 1))]
            series[f"{name}[{block}]"] = tuple(_number(function, name, events, notes) for events in values)
    return series


def _number(function: TrackFunction, name: str, events: list[LayerEvent] | None, notes: list[str]) -> float | None:
    if events is None:
        return None
    try:
        return float(function(events))
    except Exception as error:
        note = f"the tracked {name} has gaps, because it raised {in_a_line(error)}"
        if not any(before.startswith(f"the tracked {name} has gaps") for before in notes):
            notes.append(note)
        return None


def _events_by_block(placed: Placed, steps: Steps) -> dict[tuple[str, int], list[LayerEvent]]:
    recording, layers, charges = placed.recording, placed.tree.layers, placed.charges
    step = steps.place_of(charges.launch_ns)
    groups: dict[tuple[str, int], list[LayerEvent]] = defaultdict(list)
    for i in range(len(charges)):
        place = placed.attribution.places[charges.place[i]]
        if place.layer < 0:
            continue
        block = placed.tree.block_of(place.chain)
        event = LayerEvent(
            recording.name_of(int(charges.span[i])),
            int(charges.time_ns[i]) / 1000,
            place.phase,
            classes.CLASSES[charges.work[i]],
        )
        groups[layers[block if block >= 0 else place.chain[-1]].name, max(int(step[i]), 0)].append(event)
    return groups


# --- FLOPs, bytes and the roof into rows of time: of layers, classes and what has no layer ---


def with_work(analysis: Analysis, placed: Placed, work: WorkCount, peaks: Given | None) -> Analysis:
    """An analysis of times, with the FLOPs and bytes of its ops and what part of the machine they use."""
    roof, warning = peaks_of_run(analysis.run, given=peaks, on_device=analysis.time_basis == "device")
    own, inclusive, unattributed = work_by_layer(work, roof)
    shares, notes = utilization(placed, work.flops, roof)
    if roof is not None and roof.bandwidth_bytes_per_s is None:
        of = roof.device or "this device"
        notes.insert(0, f"no memory bandwidth is known of {of}: give bandwidth=<GB/s> for the time at the roof")
    layers = with_layer_work(analysis.layers, own, inclusive)
    if shares is not None:  # else the steps with shapes are not like those that are timed
        notes += _faster_than_the_roof(analysis, layers)
    return replace(
        analysis,
        layers=layers,
        classes=with_class_flops(analysis.classes, work.flops),
        unattributed=with_unattributed_work(analysis.unattributed, unattributed),
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
    slowest = first_few([name for _, name in sorted(found, reverse=True)], 1)
    return [
        f"faster than the roof of the device: {slowest}. Likely kernels that the trace lacks, peaks of "
        "another device, what a mask hides, or data that was still in a cache"
    ]


def keys_of_work(tree: LayerTree, work: WorkCount | str) -> tuple[list[tuple[int, Phase]], list[str]]:
    """The (layer, phase) pairs that have FLOPs or move bytes, and what is to be said of them all."""
    if isinstance(work, str):
        return [], [f"FLOPs and bytes moved are not available, because {work}"]
    index = {**tree.by_name(), "": NO_LAYER}
    moving = (demand.place for demand in work.demands if demand.bytes_moved)
    working = dict.fromkeys((*work.flops.of_places, *work.flops.unknown_in, *moving))
    notes = work.notes()
    if gone := list(dict.fromkeys(chain[0] for chain, *_ in working if chain and chain[0] not in index)):
        names = first_few(gone, 3)
        notes.append(f"FLOPs and bytes of {len(gone)} layers that ran in no timed step have no rows: {names}")
    return [(index[layer], phase) for chain, phase, _ in working for layer in chain if layer in index], notes


def with_layer_work(rows: Sequence[LayerRow], own: WorkOfLayers, inclusive: WorkOfLayers) -> tuple[LayerRow, ...]:
    """The rows of layers; one without work has 0 of it."""
    none = LayerWork()
    return tuple(
        replace(
            row,
            flops_per_step=whole.flops,
            known_flops_per_step=whole.known_flops,
            self_flops_per_step=itself.flops,
            causal_flops_per_step=whole.causal_flops,
            self_causal_flops_per_step=itself.causal_flops,
            bytes_moved_per_step=whole.bytes_moved,
            self_bytes_moved_per_step=itself.bytes_moved,
            roof_time_per_step_ns=whole.time_ns,
            self_roof_time_per_step_ns=itself.time_ns,
            memory_roof_time_per_step_ns=whole.memory_ns,
            self_memory_roof_time_per_step_ns=itself.memory_ns,
            peak_time_per_step_ns=whole.peak_ns,
        )
        for row in rows
        for itself, whole in [[works.get((row.layer, row.phase), none) for works in (own, inclusive)]]
    )


def with_class_flops(rows: Sequence[ClassRow], count: FlopCount) -> tuple[ClassRow, ...]:
    """The rows of classes, those with FLOPs but without time at the end."""
    full, causal = Counter[tuple[str, Phase]](), Counter[tuple[str, Phase]]()
    for row in count.rows:
        full[row.class_name, row.phase] += row.flops_per_step
        causal[row.class_name, row.phase] += row.causal_flops_per_step
    unknown = {(row.class_name, row.phase) for row in count.uncounted}
    untimed = sorted(({*full} | unknown) - {(row.class_name, row.phase) for row in rows})
    every = [*rows, *(ClassRow(class_name=name, phase=phase, time_ns=0, count=0) for name, phase in untimed)]
    return tuple(
        row
        if (row.class_name, row.phase) in unknown
        else replace(
            row, flops_per_step=full[row.class_name, row.phase], causal_flops_per_step=causal[row.class_name, row.phase]
        )
        for row in every
    )


def with_unattributed_work(
    rows: Sequence[UnattributedRow], asked: Mapping[str, LayerWork]
) -> tuple[UnattributedRow, ...]:
    """The rows of what has no layer, by reason, those with work but without time at the end.

    What was launched before the trace, or by the replay of a graph, has time, but no op in it that tells the work.
    """
    working = {reason for reason, work in asked.items() if work.known_flops or work.bytes_moved != 0}
    untimed = sorted(working - {row.reason for row in rows})
    works = [(row, asked.get(row.reason, LayerWork())) for row in rows]
    works += [(UnattributedRow(reason=reason, time_ns=0, count=0), asked[reason]) for reason in untimed]
    return tuple(
        row
        if row.reason in WITHOUT_OP
        else replace(
            row,
            flops_per_step=work.known_flops,
            bytes_moved_per_step=work.bytes_moved,
            roof_time_per_step_ns=work.time_ns,
        )
        for row, work in works
    )
