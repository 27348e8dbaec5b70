"""FLOPs of every op that ran: which ops count, where they belong, how many a step.

Of ops around one another that have a formula only the innermost counts: `linear` holds `addmm`. What a
compiler runs to find out about a model (fake tensors) is no work. Steps recorded whole count; without
any the whole trace is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.flop_ops import FlopKey, FlopOps, layer_name
from profiler_wrapper.analysis.model import FlopRow, UncountedRow
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.recording.shapes import Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

_LONGEST = 48  # name of an op in a warning
LayerPhase = tuple[str, Phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlops:
    """FLOPs a step of one layer in one phase; None where some of its work tells no FLOPs."""

    own: int | None = 0
    inclusive: int | None = 0
    causal_own: int | None = 0
    causal_inclusive: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """What the shapes of a trace tell."""

    steps: int  # how many were counted
    rows: tuple[FlopRow, ...]
    uncounted: tuple[UncountedRow, ...]
    layers: Mapping[LayerPhase, LayerFlops]  # layers without FLOPs are left out

    def notes(self) -> list[str]:
        """What is not known, and why."""
        if not self.uncounted:
            return []
        ops = list(dict.fromkeys(_shortened(row.op) for row in self.uncounted))
        more = f" and {len(ops) - 3} more" if len(ops) > 3 else ""
        time_ms = sum(row.time_per_step_ns for row in self.uncounted) / 1e6
        return [
            f"FLOPs of layers with {', '.join(ops[:3])}{more} are not available, because nothing tells those of "
            f"these ops ({time_ms:.3f} ms a step)"
        ]


def _shortened(op: str) -> str:
    return op if len(op) <= _LONGEST else f"{op[:_LONGEST]}..."


def count_flops(found: Attributed, shapes: Shapes) -> FlopCount:
    """FLOPs of the ops of an attributed recording; `shapes`: of those that `has_formula` at least."""
    ops = FlopOps(found, shapes)
    steps = max(1, len(found.steps))
    full: Counter[FlopKey] = Counter()
    causal: Counter[FlopKey] = Counter()
    for key, flops in ops.counted():
        full[key] += flops.flops
        causal[key] += flops.causal_flops
    full_per_step, causal_per_step = _per_step(full, steps), _per_step(causal, steps)
    rows = tuple(_row(found, key, full_per_step[key], causal_per_step[key]) for key in sorted(full, key=_order))
    uncounted = ops.uncounted(steps)
    return FlopCount(steps=steps, rows=rows, uncounted=uncounted, layers=_layers(found, rows, uncounted))


def _order(key: FlopKey) -> tuple[bool, int, int, int, str, str]:
    place = key.place
    return place.layer < 0, place.layer, PHASES.index(place.phase), key.work, key.dtype, place.reason


def _row(found: Attributed, key: FlopKey, flops: int, causal_flops: int) -> FlopRow:
    return FlopRow(
        layer=layer_name(found, key.place),
        phase=key.place.phase,
        class_name=classes.CLASSES[key.work],
        dtype=key.dtype,
        flops_per_step=flops,
        causal_flops_per_step=causal_flops,
        reason=key.place.reason,
    )


def _per_step(sums: Mapping[FlopKey, int], steps: int) -> dict[FlopKey, int]:
    """Means as whole numbers that add up to the mean of the sum, rounded down."""
    means = {key: total // steps for key, total in sums.items()}
    missing = sum(sums.values()) // steps - sum(means.values())
    for key in sorted(sums, key=lambda key: -(sums[key] % steps))[:missing]:
        means[key] += 1
    return means


# --- by layer -----------------------------------------------------------------------------------


def _layers(
    found: Attributed, rows: Iterable[FlopRow], uncounted: Iterable[UncountedRow]
) -> dict[LayerPhase, LayerFlops]:
    """Per layer and phase, its own FLOPs and those with all layers below."""
    indices = found.tree.by_name()
    sums: dict[LayerPhase, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        if row.layer is None:
            continue
        for depth, name in enumerate(_upwards(found, indices, row.layer)):
            total = sums[name, row.phase]
            total[1] += row.flops_per_step
            total[3] += row.causal_flops_per_step
            if depth == 0:
                total[0] += row.flops_per_step
                total[2] += row.causal_flops_per_step
    layers = {
        key: LayerFlops(own=own, inclusive=inclusive, causal_own=causal_own, causal_inclusive=causal_inclusive)
        for key, (own, inclusive, causal_own, causal_inclusive) in sums.items()
    }
    own_unknown = {(layer, row.phase) for row in uncounted for layer in row.layers}
    for layer, phase in own_unknown:
        for name in _upwards(found, indices, layer):
            known = layers.get((name, phase), LayerFlops())
            own_is_known = (name, phase) not in own_unknown
            layers[name, phase] = LayerFlops(
                own=known.own if own_is_known else None,
                inclusive=None,
                causal_own=known.causal_own if own_is_known else None,
                causal_inclusive=None,
            )
    return layers


def _upwards(found: Attributed, indices: Mapping[str, int], layer: str) -> list[str]:
    """The layer, then all above it."""
    if layer not in indices:
        return [layer]
    return [found.tree.layers[index].name for index in found.tree.layers[indices[layer]].ancestors]


def flops_of_recording(found: Attributed) -> FlopCount | str:
    """What the shapes of an attributed recording tell, or why there are none."""
    if found.shapes is None or not found.shapes.recorded:
        return "the shapes of ops were not recorded (record_shapes=True)"
    return count_flops(found, found.shapes)
