"""FLOPs, bytes and the roof for analyses made by hand: on a device of 1000 TFLOP/s and 4000 GB/s."""

from __future__ import annotations

from dataclasses import replace

from profiler_wrapper.tables.model import Analysis, FlopRow, LayerRow, Utilization
from profiler_wrapper.tables.work.peaks import Peaks

PEAKS = Peaks(
    device="NVIDIA H200",
    flops_per_s={"bfloat16": 1e15},
    bandwidth_bytes_per_s=4e12,
    source="a document of the maker",
)

# By the kind of a layer: GFLOP, without what a causal mask hides, and MB, of one call of its own in the forward.
_WORK = {
    "attention": (50, 40, 100),  # 40 us and 25 us at the roof
    "mlp": (150, 150, 40),  # 150 and 10
    "norm": (0, 0, 8),  # 0 and 2
    "head": (60, 60, 400),  # 60 and 100
    "embedding": (0, 0, 40),  # 0 and 10
}
_OPTIMIZER_MB = 240  # 60 us
_FACTOR = {"backward": 2}
GIGA, MEGA = 10**9, 10**6


def worked(analysis: Analysis, *, peaks: Peaks | None = PEAKS) -> Analysis:
    """The same, with the work of its layers and the share of the peak; each layer called once a step."""
    own = [_own(row, with_roof=peaks is not None) for row in analysis.layers]
    parents = {row.layer: row.parent for row in own}
    rows = [_inclusive(row, own, parents) for row in own]
    flops = tuple(
        FlopRow(
            layer=row.layer,
            phase=row.phase,
            class_name="attention" if row.kind == "attention" else "gemm",
            dtype="bfloat16",
            flops_per_step=row.self_flops_per_step or 0,
            causal_flops_per_step=row.self_causal_flops_per_step or 0,
        )
        for row in own
        if row.self_flops_per_step
    )
    return replace(analysis, layers=tuple(rows), flops=flops, utilization=_utilization(flops, peaks))


def _own(row: LayerRow, *, with_roof: bool) -> LayerRow:
    factor = _FACTOR.get(row.phase, 1)
    full, causal, moved = (factor * amount for amount in _WORK.get(row.kind, (0, 0, 0)))
    if not row.layer:
        moved = _OPTIMIZER_MB
    computing_ns, moving_ns = causal * 1000, moved * 250
    roof_ns = max(computing_ns, moving_ns)
    return replace(
        row,
        self_flops_per_step=full * GIGA,
        self_causal_flops_per_step=causal * GIGA,
        self_bytes_moved_per_step=moved * MEGA,
        self_roof_time_per_step_ns=roof_ns if with_roof else None,
        self_memory_roof_time_per_step_ns=(roof_ns if moving_ns > computing_ns else 0) if with_roof else None,
        peak_time_per_step_ns=full * 1000 if with_roof else None,
    )


def _inclusive(row: LayerRow, own: list[LayerRow], parents: dict[str, str | None]) -> LayerRow:
    within = [one for one in own if one.phase == row.phase and _is_in(one.layer, row.layer, parents)]
    fields = ("flops", "causal_flops", "bytes_moved", "roof_time", "memory_roof_time")
    names = [f"{field}_per_step" + ("_ns" if field.endswith("time") else "") for field in fields]
    sums = {name: _sum([getattr(one, f"self_{name}") for one in within]) for name in names}
    return replace(row, peak_time_per_step_ns=_sum([one.peak_time_per_step_ns for one in within]), **sums)


def _is_in(layer: str, outer: str, parents: dict[str, str | None]) -> bool:
    here: str | None = layer
    while here is not None:
        if here == outer:
            return True
        here = parents[here]
    return False


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _utilization(flops: tuple[FlopRow, ...], peaks: Peaks | None) -> Utilization:
    """Of a step of 5 ms."""
    full, causal = sum(row.flops_per_step for row in flops), sum(row.causal_flops_per_step for row in flops)
    at_peak = 5e-3 * 1e15
    known = peaks is not None
    return Utilization(
        step_time_ns=5_000_000,
        model_flops_per_step=full,
        hardware_flops_per_step=full,
        causal_model_flops_per_step=causal,
        causal_hardware_flops_per_step=causal,
        mfu=full / at_peak if known else None,
        hfu=full / at_peak if known else None,
        causal_mfu=causal / at_peak if known else None,
        causal_hfu=causal / at_peak if known else None,
        peaks=peaks,
    )
