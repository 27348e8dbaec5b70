"""Two results side by side: steps, series per step, and the rows of like layers together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.compare_model import Amounts
from profiler_wrapper.analysis.compare_names import match_layers
from profiler_wrapper.analysis.model import Analysis, LayerRow
from profiler_wrapper.analysis.noise import Float
from profiler_wrapper.analysis.phase import PHASES, Phase


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One result, with what is divided by to give a step."""

    analysis: Analysis
    steps: int  # at least 1
    known_steps: bool  # times within each step are known, and there are several
    marked: bool  # it tells its steps; else all of it counts as one

    @property
    def total_ns(self) -> float:
        """Of a step."""
        return self.analysis.time.total_ns / self.steps

    def series(self, rows: Sequence[LayerRow]) -> Float:
        """Time of `rows` together in each step; of one step, where no more is known, all of it."""
        if self.known_steps:
            told = [row.step_times_ns for row in rows if row.step_times_ns]
            per_row: Float = np.array(told, dtype=np.float64).reshape(-1, self.steps)
            return np.asarray(per_row.sum(axis=0), dtype=np.float64)
        return np.array([sum(row.time_ns for row in rows) / self.steps])

    def step_totals(self) -> Float:
        """Time of each step, or of one."""
        times = [row.time_ns for row in self.analysis.steps if row.step is not None]
        return np.array(times if self.known_steps else [self.total_ns], dtype=np.float64)


def side_of(analysis: Analysis) -> Side:
    """The side of one result. Times of its steps count as known where every row of a layer with time has them."""
    steps = sum(row.step is not None for row in analysis.steps)
    told = all(len(row.step_times_ns) == steps for row in analysis.layers if row.time_ns)
    return Side(analysis, max(1, steps), steps > 1 and told and bool(analysis.layers), steps > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One layer in one phase, on both sides or on one."""

    layer: str  # as `b` names it, else as `a` does
    phase: Phase
    a: LayerRow | None
    b: LayerRow | None

    @property
    def row(self) -> LayerRow:
        """That of `b`, else that of `a`."""
        row = self.b if self.b is not None else self.a
        assert row is not None
        return row


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """All pairs, in the order of `b`; what only `a` has follows what it follows there. `parents`: by shown name."""

    pairs: tuple[Pair, ...]
    parents: dict[str, str | None]


def pair_rows(a: Analysis, b: Analysis) -> Paired:
    """Every row of both results, once."""
    shown_of_a = _shown_names(a, b)
    rows_a: dict[tuple[str, Phase], LayerRow] = {}
    for row in a.layers:
        rows_a[shown_of_a[row.layer], row.phase] = row
    rows_b = {(row.layer, row.phase): row for row in b.layers}
    places = _places(b, a, shown_of_a)
    keys = sorted({*rows_a, *rows_b}, key=lambda key: (places[key[0]], PHASES.index(key[1])))
    pairs = tuple(Pair(layer, phase, rows_a.get((layer, phase)), rows_b.get((layer, phase))) for layer, phase in keys)
    parents: dict[str, str | None] = {}
    for row in a.layers:
        parents[shown_of_a[row.layer]] = None if row.parent is None else shown_of_a.get(row.parent, row.parent)
    parents |= {row.layer: row.parent for row in b.layers}
    return Paired(pairs, parents)


def _shown_names(a: Analysis, b: Analysis) -> dict[str, str]:
    """What the layers of `a` are called here. One that `b` does not have keeps its name, marked if `b` has that too."""
    matched = match_layers(a, b)
    of_b = {row.layer for row in b.layers if row.layer}
    shown = {"": ""}
    for layer in dict.fromkeys(row.layer for row in a.layers if row.layer):
        shown[layer] = matched.get(layer, f"{layer} (a)" if layer in of_b else layer)
    return shown


def _places(b: Analysis, a: Analysis, shown_of_a: dict[str, str]) -> dict[str, float]:
    """Where each layer stands: as in `b`, and what it does not have right behind what stands before it in `a`."""
    places: dict[str, float] = {}
    for row in b.layers:
        places.setdefault(row.layer, float(len(places)))
    behind: defaultdict[float, int] = defaultdict(int)
    here = -1.0
    for row in a.layers:
        name = shown_of_a[row.layer]
        if name in places:
            here = float(int(places[name]))
            continue
        behind[here] += 1
        places[name] = here + behind[here] / (len(a.layers) + 1)
    return places


def amounts(row: LayerRow, backends: tuple[str, ...]) -> Amounts:
    """What is compared of a row."""
    return Amounts(
        layer=row.layer,
        time_ns=row.time_ns,
        self_time_ns=row.self_time_ns,
        calls=row.calls,
        self_events=row.self_events,
        flops_per_step=row.flops_per_step,
        self_flops_per_step=row.self_flops_per_step,
        retained_bytes=row.retained_bytes,
        peak_bytes=row.peak_bytes,
        backends=backends,
        step_times_ns=row.step_times_ns,
    )
