"""FLOPs, bytes and the roof into rows of time: of layers, classes and what has no layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.attribution import NO_LAYER
from profiler_wrapper.analysis.flops import FlopCount, LayerFlops
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import WITHOUT_OP, Analysis, ClassRow, LayerRow, UnattributedRow
from profiler_wrapper.analysis.peaks import Given
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.roofline import Roof, Roofs, WorkCount, roofs
from profiler_wrapper.analysis.utilization import peaks_of_run, utilization

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


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
