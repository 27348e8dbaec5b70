"""How much of a machine a step uses: model FLOPs and hardware FLOPs, and their share of the peak.

*Hardware FLOPs* are all that ran. *Model FLOPs* are those of forward and backward, also of what lies outside all
layers, such as a loss. They leave out what an optimizer multiplies itself (Muon), and what was computed before in
the same step: the recomputed forward of checkpointing, and the scores that a fused attention's backward makes
again. So MFU says how much of the peak goes into the model, and HFU how much of it the machine delivers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from profiler_wrapper.analysis.model import GENERATING_PHASES, Utilization
from profiler_wrapper.analysis.steps import step_windows
from profiler_wrapper.analysis.work.flops import FlopCount
from profiler_wrapper.analysis.work.peaks import VARIABLE, Given, Peaks, find_peaks
from profiler_wrapper.analysis.work.roofline import NS_PER_S, peak_of
from profiler_wrapper.errors import WrongUse

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


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

    @property
    def causal_model_flops(self) -> int:
        return sum(self.causal_model_flops_by_dtype.values())

    @property
    def causal_hardware_flops(self) -> int:
        return sum(self.causal_hardware_flops_by_dtype.values())


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


def hides_recompute(found: Attributed, count: FlopCount) -> bool:
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


def utilization(found: Attributed, count: FlopCount, peaks: Peaks | None) -> tuple[Utilization | None, list[str]]:
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

    known = not work.uncounted
    shares = Utilization(
        step_time_ns=step_ns,
        model_flops_per_step=work.model_flops if known and not hidden else None,
        hardware_flops_per_step=work.hardware_flops if known else None,
        causal_model_flops_per_step=work.causal_model_flops if known and not hidden else None,
        causal_hardware_flops_per_step=work.causal_hardware_flops if known else None,
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
