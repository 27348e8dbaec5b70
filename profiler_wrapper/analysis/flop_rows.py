"""FLOPs into rows of time: of layers, classes and what has no layer. Without a count all of them stay unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from profiler_wrapper.analysis.attribution import NO_LAYER
from profiler_wrapper.analysis.flops import FlopCount, LayerFlops
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import ClassRow, LayerRow, UnattributedRow
from profiler_wrapper.analysis.phase import Phase


def keys_of_flops(tree: LayerTree, flops: FlopCount | str) -> tuple[list[tuple[int, Phase]], list[str]]:
    """The (layer, phase) pairs that have FLOPs, and what is to be said of them all."""
    if isinstance(flops, str):
        return [], [f"FLOPs are not available, because {flops}"]
    index = {**tree.by_name(), "": NO_LAYER}
    keys = [(index[layer], phase) for layer, phase in flops.layers if layer in index]
    gone = list(dict.fromkeys(layer for layer, _ in flops.layers if layer not in index))
    notes = flops.notes()
    if gone:
        notes.append(f"FLOPs of {len(gone)} layers that ran in no timed step have no rows: {', '.join(gone[:3])}")
    return keys, notes


def with_layer_flops(rows: Sequence[LayerRow], count: FlopCount | None) -> tuple[LayerRow, ...]:
    """The rows of layers; one without FLOPs has 0 of them."""
    if count is None:
        return tuple(rows)
    nothing = LayerFlops()
    found = [count.layers.get((row.layer, row.phase), nothing) for row in rows]
    return tuple(
        replace(
            row,
            flops_per_step=flops.inclusive,
            self_flops_per_step=flops.own,
            causal_flops_per_step=flops.causal_inclusive,
            self_causal_flops_per_step=flops.causal_own,
        )
        for row, flops in zip(rows, found, strict=True)
    )


def with_class_flops(rows: Sequence[ClassRow], count: FlopCount | None) -> tuple[ClassRow, ...]:
    """The rows of classes, those with FLOPs but without time at the end."""
    if count is None:
        return tuple(rows)
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


def with_unattributed_flops(rows: Sequence[UnattributedRow], count: FlopCount | None) -> tuple[UnattributedRow, ...]:
    """The rows of what has no layer, by reason, those with FLOPs but without time at the end."""
    if count is None:
        return tuple(rows)
    flops: Counter[str] = Counter()
    for row in count.rows:
        if row.layer is None:
            flops[row.reason] += row.flops_per_step
    untimed = sorted({*flops} - {row.reason for row in rows})
    every = [*rows, *(UnattributedRow(reason=reason, time_ns=0, count=0) for reason in untimed)]
    return tuple(replace(row, flops_per_step=flops[row.reason]) for row in every)
