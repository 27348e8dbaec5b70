"""What the ops of each layer ask of a machine, the time that it needs for that at its roof, and the share of its peak.

An op needs at least the longer of two times: that of its FLOPs at the peak of their type, and that of its
bytes at the bandwidth of the memory. Here FLOPs are those of the causal convention: kernels skip what a
causal mask hides. Their sum over the ops of a layer is its time at the roof; it is bound by what makes up
more of it, memory or compute.

*Hardware FLOPs* are all that ran. *Model FLOPs* are those of forward and backward, also of what lies outside all
layers, such as a loss. They leave out what an optimizer multiplies itself (Muon), and what was computed before in
the same step: the recomputed forward of checkpointing, and the scores that a fused attention's backward makes
again. So MFU says how much of the peak goes into the model, and HFU how much of it the machine delivers.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.errors import WrongUse, attempt, first_few
from profiler_wrapper.place.names import GENERATING_PHASES, Phase
from profiler_wrapper.place.phases import Place
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.step_windows import step_windows
from profiler_wrapper.tables.model import UncountedRow, Utilization
from profiler_wrapper.tables.views.products import ShapeRows, shape_rows
from profiler_wrapper.tables.work.flops import (
    FlopCount,
    FlopOps,
    WorkPlace,
    calls_ratio,
    count_of_ops,
    per_step,
    shapes_of,
)
from profiler_wrapper.tables.work.formulas import OpFlops
from profiler_wrapper.tables.work.peaks import VARIABLE, Given, Peaks, find_peaks
from profiler_wrapper.tables.work.traffic import Traffic
from profiler_wrapper.trace.arrays import grouped, sum_by_key
from profiler_wrapper.trace.recording import Float64

NS_PER_S = 1e9
_UNKNOWN_TIME_SHARE = 0.01  # of a layer's time; if less is in ops whose bytes are not known, they are left out


class Demand(NamedTuple):
    """What one call of an op asks of the machine, and where it belongs."""

    place: WorkPlace
    flops: tuple[OpFlops, ...]  # of the op and of what it calls
    bytes_moved: int  # 0 where not known


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """What the shapes of a trace tell: FLOPs, and per call of an op FLOPs and bytes."""

    flops: FlopCount
    demands: Mapping[Demand, int | Fraction]  # how often each, in all steps that were counted
    coverage: Mapping[WorkPlace, tuple[int, int]]  # nanoseconds of ops whose bytes are not known, and of all ops
    untold_bytes: tuple[UncountedRow, ...]
    shapes: ShapeRows = field(default_factory=ShapeRows)

    def notes(self) -> list[str]:
        """What is not known, and why."""
        all_ns = max(1, sum(every_ns for _, every_ns in self.coverage.values()) // max(1, self.flops.steps))
        unknown = (("FLOPs", self.flops.uncounted), ("bytes moved", self.untold_bytes))
        return [*(note for what, rows in unknown for note in _note(what, rows, all_ns)), *self.shapes.notes]


_LONGEST_OP = 32  # name in a warning


def _note(what: str, rows: Sequence[UncountedRow], all_ns: int) -> list[str]:
    if not rows:
        return []
    ops = [op if len(op) <= _LONGEST_OP else f"{op[:_LONGEST_OP]}..." for op in dict.fromkeys(row.op for row in rows)]
    percent = min(100.0, 100 * sum(row.time_per_step_ns for row in rows) / all_ns)
    what = f"{what} of layers with {first_few(ops, 1)}"
    return [f"{what}: no rule tells them ({percent:.1f} % of the time in steps with shapes; the log lists these ops)"]


def work_of_recording(found: Placed, timed: Placed | None = None) -> WorkCount | str:
    """FLOPs and bytes of the ops of an attributed recording, or why there are none. `timed`: see `calls_ratio`."""
    shapes = shapes_of(found)
    if isinstance(shapes, str):
        return shapes
    ops = FlopOps(found, shapes)
    flops = count_of_ops(found, ops, timed)
    traffic = Traffic(found, shapes, ops)
    notes: list[str] = []
    shaped = attempt("sizes of products and attention are", lambda: shape_rows(found, shapes, ops), ShapeRows(), notes)
    return WorkCount(
        flops=flops,
        demands=_demands(found, ops, traffic, calls_ratio(found, timed)),
        coverage=_coverage(found, traffic),
        untold_bytes=traffic.unknown(flops.steps),
        shapes=replace(shaped, notes=tuple(notes)),
    )


def _demands(
    found: Placed, ops: FlopOps, traffic: Traffic, ratio: Callable[[Place], int | Fraction]
) -> dict[Demand, int | Fraction]:
    """Every unit of work: its bytes, with the FLOPs of all ops in it that count; an op in none is a unit of its own."""
    place_of, places = found.attribution.place_of, found.attribution.places
    counted = np.flatnonzero(ops.is_counted)
    unit_of = np.where(traffic.unit_of[counted] >= 0, traffic.unit_of[counted], counted)
    units_of = zip(counted.tolist(), unit_of.tolist(), strict=True)
    flops_of = grouped((unit, ops.flops_of(span)) for span, unit in units_of)
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
        demand = Demand((found.names_of(where), where.phase, where.reason), known[which], size)
        demands[demand] += number * ratio(where)
    return demands


def _coverage(found: Placed, traffic: Traffic) -> dict[WorkPlace, tuple[int, int]]:
    """Time of ops whose bytes are not known, and of all ops, by place."""
    charges, places = found.charges, found.attribution.places
    counts, unknown = traffic.counts, traffic.counts & ~traffic.has_bytes
    coverage: dict[WorkPlace, tuple[int, int]] = {}
    unknown_of = sum_by_key(charges.place[unknown], charges.time_ns[unknown], len(places))
    time_of = sum_by_key(charges.place[counts], charges.time_ns[counts], len(places))
    for place, unknown_ns, all_ns in zip(places, unknown_of.tolist(), time_of.tolist(), strict=True):
        if all_ns:
            key = (found.names_of(place), place.phase, place.reason)
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


WorkOfLayers = Mapping[tuple[str, Phase], LayerWork]  # by layer and phase


def peak_of(peaks: Peaks, dtype: str) -> float | None:
    """FLOP/s of a type of number; a device without tfloat32 multiplies it as float32."""
    found = peaks.flops(dtype)
    return peaks.flops("float32") if found is None and dtype == "tfloat32" else found


def work_by_layer(work: WorkCount, peaks: Peaks | None) -> tuple[WorkOfLayers, WorkOfLayers, Mapping[str, LayerWork]]:
    """The work of every layer and phase that has some, its own and with all layers below; by reason that without layer.

    Without peaks no time at the roof is known.
    """
    own: dict[tuple[str, Phase], LayerWork] = defaultdict(LayerWork)
    inclusive: dict[tuple[str, Phase], LayerWork] = defaultdict(LayerWork)
    unattributed: dict[str, LayerWork] = defaultdict(LayerWork)
    for (chain, phase, reason), asked in _by_place(work, peaks).items():
        if not chain:
            unattributed[reason] += asked
            continue
        own[chain[0], phase] += asked
        for name in chain:
            inclusive[name, phase] += asked
    return dict(own), dict(inclusive), dict(unattributed)


def _by_place(work: WorkCount, peaks: Peaks | None) -> dict[WorkPlace, LayerWork]:
    found: dict[WorkPlace, LayerWork] = defaultdict(LayerWork)
    bytes_moved: dict[WorkPlace, int | Fraction] = defaultdict(int)
    times_ns: dict[WorkPlace, Float64] = defaultdict(lambda: np.zeros(3))
    bandwidth = None if peaks is None else peaks.bandwidth_bytes_per_s
    for demand, number in work.demands.items():
        place = demand.place
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
    so_far: dict[WorkPlace, Float64] = defaultdict(lambda: np.zeros(3))
    steps = work.flops.steps
    for place, size in per_step(bytes_moved, steps).items():
        asked = found[place]
        asked.known_bytes = size
        row = (place[0][:1], *place[1:])  # whose sum is rounded, whoever called the layer
        before, so_far[row] = so_far[row], so_far[row] + times_ns[place] / steps
        known = (np.rint(so_far[row]) - np.rint(before)).astype(np.int64)
        asked.known_time_ns, asked.known_memory_ns, asked.known_peak_ns = known.tolist()
    for place, (unknown_ns, all_ns) in work.coverage.items():
        found[place].unknown_ns, found[place].all_ns = unknown_ns, all_ns
    for place, (flops_per_step, causal_per_step) in work.flops.of_places.items():
        asked = found[place]
        asked.known_flops += flops_per_step
        asked.known_causal_flops += causal_per_step
    for place in work.flops.unknown_in:
        found[place].unknown_flops += 1
    for asked in found.values():
        asked.unknown_peaks += peaks is None
        asked.unknown_bandwidth += bandwidth is None
    return found


# --- How much of a machine a step uses: model FLOPs and hardware FLOPs, and their share of the peak ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """FLOPs of one step, by type of number (`""` where it is not told), and the ops that tell none.

    `causal_`: without what a causal mask hides. Where `uncounted` has ops, every number is too low.
    """

    model_flops_by_dtype: Mapping[str, int]
    hardware_flops_by_dtype: Mapping[str, int]
    causal_model_flops_by_dtype: Mapping[str, int]
    causal_hardware_flops_by_dtype: Mapping[str, int]
    uncounted: tuple[str, ...] = ()

    @property
    def model_flops(self) -> int:
        return sum(self.model_flops_by_dtype.values())

    @property
    def hardware_flops(self) -> int:
        return sum(self.hardware_flops_by_dtype.values())


def work_of_count(count: FlopCount) -> StepWork:
    """The work of a step whose FLOPs are counted."""
    model, hardware, causal_model, causal_hardware = (Counter[str]() for _ in range(4))
    for row in count.rows:
        hardware[row.dtype] += row.flops_per_step
        causal_hardware[row.dtype] += row.causal_flops_per_step
        if row.phase != "optimizer":
            model[row.dtype] += row.flops_per_step - row.repeated_flops_per_step
            causal_model[row.dtype] += row.causal_flops_per_step - row.causal_repeated_flops_per_step
    return StepWork(
        model_flops_by_dtype=dict(model),
        hardware_flops_by_dtype=dict(hardware),
        causal_model_flops_by_dtype=dict(causal_model),
        causal_hardware_flops_by_dtype=dict(causal_hardware),
        uncounted=tuple(dict.fromkeys(row.op for row in count.uncounted)),
    )


RECOMPUTE_IS_HIDDEN = "compiled code computes parts of the forward again, and does not tell which"


def hides_recompute(found: Placed, count: FlopCount) -> bool:
    """Whether the backward of compiled code has more than the gradients of what goes into each product of the forward.

    Only where something is not known of that code: else what is computed again is a phase of its own.
    """
    forward = sum(row.flops_per_step for row in count.rows if row.phase == "forward")
    backward = sum(row.flops_per_step - row.repeated_flops_per_step for row in count.rows if row.phase == "backward")
    return bool(found.notes) and backward > 2 * forward


# --- share of the peak --------------------------------------------------------------------------


def peaks_of_run(run: Mapping[str, Any], *, given: Given | None, on_device: bool) -> tuple[Peaks | None, str | None]:
    """The peaks of the device that a run was on, and a warning: what is given, else told by the run, else by the table.

    Raises:
        WrongUse: `given`, or the environment, means no peak.
    """
    name = run.get("device") if on_device else None
    name = name if isinstance(name, str) and name else None
    if given is None and not os.environ.get(VARIABLE, "").strip() and run.get("peaks") is not None:
        try:
            given = msgspec.convert(run["peaks"], Peaks)
        except msgspec.ValidationError as error:
            raise WrongUse(f"the run's peaks are not what was written ({error}); give peaks=") from error
    return find_peaks(name, given=given)


def utilization(found: Placed, count: FlopCount, peaks: Peaks | None) -> tuple[Utilization | None, list[str]]:
    """How much of the machine a timed step uses, and what is to be said of it.

    `found`: the timed trace; `count`: FLOPs of a step, maybe by another trace of the run.
    """
    timed = {found.attribution.places[place].phase for place in np.unique(found.charges.place).tolist()}
    if len(timed.union(row.phase for row in count.rows).intersection(GENERATING_PHASES)) > 1:  # not each all decode
        return None, ["MFU is not available, because steps that generate are not alike"]
    work = work_of_count(count)
    if not work.hardware_flops and not work.uncounted:
        return None, []
    times_ns = step_windows(found).step_times_ns
    step_ns = round(fmean(times_ns)) if times_ns else None
    on_device = found.charges.basis == "device"
    devices = max(1, len(np.unique(found.recording.spans.device[found.charges.span]))) if on_device else 1
    dtypes = [dtype for dtype, flops in work.hardware_flops_by_dtype.items() if flops]
    notes = [] if peaks is None else _missing(work, step_ns, dtypes, peaks)
    hidden = hides_recompute(found, count)

    def share(flops: Mapping[str, int]) -> float | None:
        if peaks is None or notes or step_ns is None:
            return None
        return share_of_peak(flops, peaks, devices=devices, time_ns=step_ns)

    def total(flops: Mapping[str, int]) -> int | None:
        return None if work.uncounted else sum(flops.values())

    shares = Utilization(
        step_time_ns=step_ns,
        model_flops_per_step=None if hidden else total(work.model_flops_by_dtype),
        hardware_flops_per_step=total(work.hardware_flops_by_dtype),
        causal_model_flops_per_step=None if hidden else total(work.causal_model_flops_by_dtype),
        causal_hardware_flops_per_step=total(work.causal_hardware_flops_by_dtype),
        mfu=None if hidden else share(work.model_flops_by_dtype),
        hfu=share(work.hardware_flops_by_dtype),
        causal_mfu=None if hidden else share(work.causal_model_flops_by_dtype),
        causal_hfu=share(work.causal_hardware_flops_by_dtype),
        devices=devices,
        peaks=peaks,
    )
    if hidden:
        notes.append(f"MFU is not available, because {RECOMPUTE_IS_HIDDEN}")
    return shares, [*notes, *_too_high(shares, dtypes)]


def share_of_peak(flops: Mapping[str, int], peaks: Peaks, *, devices: int = 1, time_ns: float) -> float | None:
    """The part of a time that FLOPs, by type, would take at the peaks; None where one of these is not known."""
    at_peak_s = 0.0
    for dtype, number in flops.items():
        peak = peak_of(peaks, dtype)
        if number and peak is None:
            return None
        at_peak_s += number / peak if peak else 0.0
    return at_peak_s / devices / (time_ns / NS_PER_S)


def _missing(work: StepWork, step_ns: int | None, dtypes: Iterable[str], peaks: Peaks) -> list[str]:
    """Why there is no share of the peak."""
    untyped = [dtype or "a type that the trace does not tell" for dtype in dtypes if peak_of(peaks, dtype) is None]
    why = f"no peak is known for {', '.join(untyped)}" if untyped else ""
    if step_ns is None:
        why = "no step has a begin and an end"
    if work.uncounted:
        why = "the FLOPs of some ops are not known (above)"
    return [f"MFU is not available, because {why}"] if why else []


def _too_high(shares: Utilization, dtypes: Iterable[str]) -> list[str]:
    """A share over 1 is told, with what it is likely from."""
    peaks = shares.peaks
    if shares.hfu is None or shares.hfu <= 1 or peaks is None:
        return []
    of = ", ".join(f"{(peak_of(peaks, dtype) or 0) / 1e12:g} TFLOP/s {dtype}" for dtype in dtypes)
    what, share = ("MFU", shares.mfu) if shares.mfu is not None and shares.mfu > 1 else ("HFU", shares.hfu)
    cause = "the peak is of another device or type, or the step time misses work"
    if shares.causal_hfu is not None and shares.causal_hfu <= 1:
        cause = "it counts what a causal mask hides, and kernels skip (causal_mfu does not)"
    return [f"{what} is {100 * share:.1f} %. Likely {cause}. Peak: {of} ({peaks.source})"]
