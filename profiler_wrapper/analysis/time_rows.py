"""Time in all, by class, by attention backend, per step, and without a layer, from the charges."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attribution import UNKNOWN, Attribution
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.intervals import Union, union
from profiler_wrapper.analysis.layer_steps import step_of_charges
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import AttentionRow, ClassRow, StepRow, TimeTotals, UnattributedRow
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.recording import Bool, Category, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

_COMMUNICATION = classes.CLASSES.index("communication")
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
