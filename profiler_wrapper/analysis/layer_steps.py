"""Time per layer, phase and step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN, Attribution
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.recording import Int64


def step_of_charges(charges: Charges, steps: Steps) -> Int64:
    """Per charge the place of the step that launched it; -1 for none, as for what has no launch."""
    place = steps.place_of(charges.launch_ns)
    place[charges.cpu_span < 0] = -1
    return place


def layer_step_times(
    tree: LayerTree, attribution: Attribution, charges: Charges, steps: Steps
) -> Mapping[tuple[int, Phase], tuple[int, ...]]:
    """Nanoseconds of each (layer, phase) that has time, layers below included, in each step."""
    places = attribution.places
    spent = np.zeros((len(places), len(steps) + 1), dtype=np.int64)  # the last column is for no step
    np.add.at(spent, (charges.place, step_of_charges(charges, steps)), charges.time_ns)
    row_of: dict[tuple[int, Phase], int] = {}
    from_place, to_row = [], []
    for index in np.flatnonzero(spent.any(axis=1)).tolist():
        place = places[index]
        if place.layer == UNKNOWN:
            continue
        chain = tree.layers[place.layer].ancestors if place.layer >= 0 else (NO_LAYER,)
        for layer in chain:
            from_place.append(index)
            to_row.append(row_of.setdefault((layer, place.phase), len(row_of)))
    table = np.zeros((len(row_of), len(steps)), dtype=np.int64)
    np.add.at(table, to_row, spent[from_place, :-1])
    return {key: tuple(times) for key, times in zip(row_of, table.tolist(), strict=True)}
