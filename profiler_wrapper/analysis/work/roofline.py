"""What the ops of each layer ask of a machine, and the time that it needs for that at its roof.

An op needs at least the longer of two times: that of its FLOPs at the peak of their type, and that of its
bytes at the bandwidth of the memory. Here FLOPs are those of the causal convention: kernels skip what a
causal mask hides. Their sum over the ops of a layer is its time at the roof; it is bound by what makes up
more of it, memory or compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.model import Phase, UncountedRow
from profiler_wrapper.analysis.statistics import sum_by_key
from profiler_wrapper.analysis.views.products import ShapeRows, shape_rows
from profiler_wrapper.analysis.work.flops import (
    FlopCount,
    FlopOps,
    LayerPhase,
    calls_ratio,
    count_of_ops,
    per_step,
    shapes_of,
)
from profiler_wrapper.analysis.work.formulas import OpFlops
from profiler_wrapper.analysis.work.peaks import Peaks
from profiler_wrapper.analysis.work.traffic import Traffic
from profiler_wrapper.errors import attempt
from profiler_wrapper.trace.recording import Float64, Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


NS_PER_S = 1e9
_UNKNOWN_TIME_SHARE = 0.01  # of a layer's time; if less is in ops whose bytes are not known, they are left out
LayerPlace = tuple[str | None, Phase, str]  # layer (None: not known, with the reason), phase


class Demand(NamedTuple):
    """What one call of an op asks of the machine, and where it belongs."""

    layer: str | None  # "" for what by nature has no module; None where it should have a layer and none is known
    phase: Phase
    reason: str  # why there is no layer
    flops: tuple[OpFlops, ...]  # of the op and of what it calls
    bytes_moved: int  # 0 where not known


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """What the shapes of a trace tell: FLOPs, and per call of an op FLOPs and bytes."""

    flops: FlopCount
    demands: Mapping[Demand, int | Fraction]  # how often each, in all steps that were counted
    coverage: Mapping[LayerPlace, tuple[int, int]]  # nanoseconds of ops whose bytes are not known, and of all ops
    untold_bytes: tuple[UncountedRow, ...]
    shapes: ShapeRows = field(default_factory=ShapeRows)

    def notes(self) -> list[str]:
        """What is not known, and why."""
        return [*_note("FLOPs", self.flops.uncounted), *_note("bytes moved", self.untold_bytes), *self.shapes.notes]


_LONGEST_OP = 32  # name in a warning


def _note(what: str, rows: Sequence[UncountedRow]) -> list[str]:
    if not rows:
        return []
    ops = list(dict.fromkeys(row.op for row in rows))
    first = ops[0] if len(ops[0]) <= _LONGEST_OP else f"{ops[0][:_LONGEST_OP]}..."
    more = f" and {len(ops) - 1} more op{'s' if len(ops) > 2 else ''}" if len(ops) > 1 else ""
    time_ms = sum(row.time_per_step_ns for row in rows) / 1e6
    what = f"{what} of layers with {first}{more}"
    return [f"{what}: no rule tells them ({time_ms:.3f} ms a step; the log lists these ops)"]


def work_of_recording(found: Attributed, timed: Attributed | None = None) -> WorkCount | str:
    """FLOPs and bytes of the ops of an attributed recording, or why there are none. `timed`: see `calls_ratio`."""
    shapes = shapes_of(found)
    if isinstance(shapes, str):
        return shapes
    ops = FlopOps(found, shapes)
    flops = count_of_ops(found, ops, timed)
    traffic = Traffic(found, shapes, ops)
    return WorkCount(
        flops=flops,
        demands=_demands(found, ops, traffic, calls_ratio(found, timed)),
        coverage=_coverage(found, traffic),
        untold_bytes=traffic.unknown(flops.steps),
        shapes=_shape_rows(found, shapes, ops),
    )


def _shape_rows(found: Attributed, shapes: Shapes, ops: FlopOps) -> ShapeRows:
    notes: list[str] = []
    rows = attempt("sizes of products and attention are", lambda: shape_rows(found, shapes, ops), ShapeRows(), notes)
    return replace(rows, notes=tuple(notes))


def _demands(
    found: Attributed, ops: FlopOps, traffic: Traffic, ratio: Callable[[int], int | Fraction]
) -> dict[Demand, int | Fraction]:
    """Every unit of work: its bytes, with the FLOPs of all ops in it that count; an op in none is a unit of its own."""
    place_of, places = found.attribution.place_of, found.attribution.places
    counted = np.flatnonzero(ops.is_counted)
    unit_of = np.where(traffic.unit_of[counted] >= 0, traffic.unit_of[counted], counted)
    flops_of: dict[int, list[OpFlops]] = defaultdict(list)
    for span, unit in zip(counted.tolist(), unit_of.tolist(), strict=True):
        flops_of[unit].append(ops.flops_of(span))
    distinct: dict[tuple[OpFlops, ...], int] = {(): 0}
    flops = np.zeros(len(place_of), dtype=np.int64)
    for unit, members in flops_of.items():
        flops[unit] = distinct.setdefault(tuple(members), len(distinct))
    units = np.union1d(traffic.units, unit_of)
    moved = np.zeros(len(place_of), dtype=np.int64)
    moved[traffic.units] = traffic.bytes_moved
    columns = np.stack((place_of[units].astype(np.int64), flops[units], moved[units]))
    calls, numbers = np.unique(columns, axis=1, return_counts=True)
    known = list(distinct)
    demands: dict[Demand, int | Fraction] = defaultdict(int)
    for at, which, size, number in zip(*calls.tolist(), numbers.tolist(), strict=True):
        where = places[at]
        demand = Demand(found.layer_name(where), where.phase, where.reason, known[which], size)
        demands[demand] += number * ratio(where.layer)
    return demands


def _coverage(found: Attributed, traffic: Traffic) -> dict[LayerPlace, tuple[int, int]]:
    """Time of ops whose bytes are not known, and of all ops, by place."""
    charges, places = found.charges, found.attribution.places
    counts, unknown = traffic.counts, traffic.counts & ~traffic.has_bytes
    coverage: dict[LayerPlace, tuple[int, int]] = {}
    unknown_of = sum_by_key(charges.place[unknown], charges.time_ns[unknown], len(places))
    time_of = sum_by_key(charges.place[counts], charges.time_ns[counts], len(places))
    for place, unknown_ns, all_ns in zip(places, unknown_of.tolist(), time_of.tolist(), strict=True):
        if all_ns:
            key = (found.layer_name(place), place.phase, place.reason)
            before = coverage.get(key, (0, 0))
            coverage[key] = (before[0] + unknown_ns, before[1] + all_ns)
    return coverage


# --- at the roof --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LayerWork:
    """What a layer in one phase asks of the machine a step, as far as it is known, and how much of its time it covers.

    A sum holds what is known; the properties are None where that is too little to go by: where over 1 % of the
    time (in the steps with shapes) is in ops whose bytes are not known, where FLOPs are not, or a peak.
    """

    known_flops: int = 0
    known_causal_flops: int = 0
    known_bytes: int = 0
    known_time_ns: int = 0
    known_memory_ns: int = 0
    known_peak_ns: int = 0
    unknown_ns: int = 0
    all_ns: int = 0
    unknown_flops: int = 0  # over 0: of some op nobody knows them
    unknown_peaks: int = 0  # over 0: of some type that was multiplied nobody knows it
    unknown_bandwidth: int = 0

    def __iadd__(self, other: LayerWork) -> LayerWork:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def flops(self) -> int | None:
        return None if self.unknown_flops else self.known_flops

    @property
    def causal_flops(self) -> int | None:
        return None if self.unknown_flops else self.known_causal_flops

    @property
    def bytes_moved(self) -> int | None:
        return self.known_bytes if self.unknown_ns <= _UNKNOWN_TIME_SHARE * self.all_ns else None

    @property
    def time_ns(self) -> int | None:
        """At the roof."""
        return self.known_time_ns if self._is_known else None

    @property
    def memory_ns(self) -> int | None:
        """Of the time at the roof, in ops whose bytes take longer than their FLOPs."""
        return self.known_memory_ns if self._is_known else None

    @property
    def peak_ns(self) -> int | None:
        """Of all FLOPs at the peak of their types."""
        return None if self.unknown_flops or self.unknown_peaks else self.known_peak_ns

    @property
    def _is_known(self) -> bool:
        return self.peak_ns is not None and not self.unknown_bandwidth and self.bytes_moved is not None


class WorkByLayer(NamedTuple):
    """The work of every layer and phase that has some, its own and with all layers below, and of what has no layer."""

    own: Mapping[LayerPhase, LayerWork]
    inclusive: Mapping[LayerPhase, LayerWork]
    unattributed: Mapping[str, LayerWork]  # by reason


def peak_of(peaks: Peaks, dtype: str) -> float | None:
    """FLOP/s of a type of number; a device without tfloat32 multiplies it as float32."""
    found = peaks.flops(dtype)
    return peaks.flops("float32") if found is None and dtype == "tfloat32" else found


def work_by_layer(found: Attributed, work: WorkCount, peaks: Peaks | None) -> WorkByLayer:
    """Of an attributed recording, whose layers they are named after; without peaks no time at the roof is known."""
    layers, indices = found.tree.layers, found.tree.by_name()
    own: dict[LayerPhase, LayerWork] = defaultdict(LayerWork)
    inclusive: dict[LayerPhase, LayerWork] = defaultdict(LayerWork)
    unattributed: dict[str, LayerWork] = defaultdict(LayerWork)
    for (layer, phase, reason), asked in _by_place(work, peaks).items():
        if layer is None:
            unattributed[reason] += asked
            continue
        own[layer, phase] += asked
        above = [layers[i].name for i in layers[indices[layer]].ancestors] if layer in indices else [layer]
        for name in above:
            inclusive[name, phase] += asked
    return WorkByLayer(dict(own), dict(inclusive), dict(unattributed))


def _by_place(work: WorkCount, peaks: Peaks | None) -> dict[LayerPlace, LayerWork]:
    found: dict[LayerPlace, LayerWork] = defaultdict(LayerWork)
    bytes_moved: dict[LayerPlace, int | Fraction] = defaultdict(int)
    times_ns: dict[LayerPlace, Float64] = defaultdict(lambda: np.zeros(3))
    bandwidth = None if peaks is None else peaks.bandwidth_bytes_per_s
    for demand, number in work.demands.items():
        place = (demand.layer, demand.phase, demand.reason)
        bytes_moved[place] += number * demand.bytes_moved
        computing_ns = causal_ns = 0.0
        for flops in demand.flops:
            peak = None if peaks is None else peak_of(peaks, flops.dtype)
            if peak is None:
                found[place].unknown_peaks += 1
                continue
            computing_ns += flops.flops / peak * NS_PER_S
            causal_ns += flops.causal_flops / peak * NS_PER_S
        moving_ns = demand.bytes_moved / bandwidth * NS_PER_S if bandwidth is not None else 0.0
        memory_ns = moving_ns if moving_ns > causal_ns else 0.0
        times_ns[place] += float(number) * np.array([max(causal_ns, moving_ns), memory_ns, computing_ns])
    steps = work.flops.steps
    for place, size in per_step(bytes_moved, steps).items():
        asked = found[place]
        asked.known_bytes = size
        asked.known_time_ns, asked.known_memory_ns, asked.known_peak_ns = map(round, (times_ns[place] / steps).tolist())
    for place, (unknown_ns, all_ns) in work.coverage.items():
        found[place].unknown_ns, found[place].all_ns = unknown_ns, all_ns
    for row in work.flops.rows:
        asked = found[row.layer, row.phase, row.reason]
        asked.known_flops += row.flops_per_step
        asked.known_causal_flops += row.causal_flops_per_step
    for uncounted in work.flops.uncounted:  # one without a layer may be wherever none is known
        without = [place for place in found if place[0] is None and place[1] == uncounted.phase]
        for place in [(layer, uncounted.phase, "") for layer in uncounted.layers] or without:
            found[place].unknown_flops += 1
    for asked in found.values():
        asked.unknown_peaks += peaks is None
        asked.unknown_bandwidth += bandwidth is None
    return found
