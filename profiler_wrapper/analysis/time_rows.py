"""Time in all, by class, by attention backend, per step, and without a layer, from the charges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

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
from profiler_wrapper.recording.columns import Bool, Category, Int64, Recording

_COMMUNICATION = classes.CLASSES.index("communication")


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


def hides_communication(recording: Recording, charges: Charges) -> Bool:
    """Per event whether it computes: copies and sets do not, so they hide none."""
    is_kernel = recording.spans.category[charges.span] == Category.KERNEL
    computes: Bool = is_kernel & (charges.work != _COMMUNICATION)
    return computes


def exposed_communication(recording: Recording, charges: Charges) -> tuple[Int64, int | None]:
    """(per event, in all) communication time with no compute running beside it on the same device.

    Events that overlap one another each count; the second number counts an instant once.
    """
    exposed = np.zeros(len(charges), dtype=np.int64)
    if charges.basis != "device":
        return exposed, None
    spans = recording.spans
    start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
    device = spans.device[charges.span]
    communicates: Bool = charges.work == _COMMUNICATION
    computing = hides_communication(recording, charges)
    total = 0
    for index in np.unique(device).tolist():
        here = device == index
        compute = union(start[here & computing], end[here & computing])
        moving = here & communicates
        exposed[moving] = charges.time_ns[moving] - compute.overlap(start[moving], end[moving])
        moved: Union = union(start[moving], end[moving])
        total += moved.length_ns - int(compute.overlap(moved.start_ns, moved.end_ns).sum())
    return exposed, total


def totals(recording: Recording, attribution: Attribution, charges: Charges, exposed_ns: int | None) -> TimeTotals:
    """The sums over the whole trace."""
    unknown = np.array([place.layer == UNKNOWN for place in attribution.places], dtype=np.bool_)
    total = int(charges.time_ns.sum())
    unattributed = int(charges.time_ns[unknown[charges.place]].sum())
    spans = recording.spans
    busy = None
    if charges.basis == "device":
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
