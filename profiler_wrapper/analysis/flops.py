"""FLOPs of every op that ran: which ops count, where they belong, how many a step.

Of ops around one another that have a formula only the innermost counts: `linear` holds `addmm`. What a
compiler runs to find out about a model (fake tensors) is no work. Steps recorded whole count; without
any the whole trace is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.flop_ops import FlopKey, FlopOps
from profiler_wrapper.analysis.model import FlopRow, UncountedRow
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.recording.shapes import Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

NEVER_CALLED = "(no call in the steps with shapes)"
LayerPhase = tuple[str, Phase]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlops:
    """FLOPs a step of one layer in one phase; None where some of its work tells no FLOPs."""

    own: int | None = 0
    inclusive: int | None = 0
    known: int = 0  # of all inclusive ones those that are known
    causal_own: int | None = 0
    causal_inclusive: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """What the shapes of a trace tell."""

    steps: int  # how many were counted
    rows: tuple[FlopRow, ...]
    uncounted: tuple[UncountedRow, ...]
    layers: Mapping[LayerPhase, LayerFlops]  # layers without FLOPs are left out


def count_flops(found: Attributed, shapes: Shapes) -> FlopCount:
    """FLOPs of the ops of an attributed recording; `shapes`: of those that `has_formula` at least."""
    return count_of_ops(found, FlopOps(found, shapes))


def count_of_ops(found: Attributed, ops: FlopOps, timed: Attributed | None = None) -> FlopCount:
    """The same of its ops that count. `timed`: the trace whose steps it is for, if another, see `calls_ratio`."""
    steps = max(1, len(found.steps))
    ratio = calls_ratio(found, timed)
    sums: list[dict[FlopKey, int | Fraction]] = [defaultdict(int) for _ in range(4)]
    for key, flops in ops.counted():
        numbers = (flops.flops, flops.causal_flops, flops.repeated_flops, flops.causal_repeated_flops)
        calls = ratio(key.place.layer)
        for total, number in zip(sums, numbers, strict=True) if calls else ():
            total[key] += number * calls
    means = [per_step(total, steps) for total in sums]
    rows = tuple(_row(found, key, *(mean[key] for mean in means)) for key in sorted(sums[0], key=_order))
    uncounted = (*ops.uncounted(steps), *_never_called(found, timed))
    return FlopCount(steps=steps, rows=rows, uncounted=uncounted, layers=_layers(found, rows, uncounted))


def _order(key: FlopKey) -> tuple[bool, int, int, int, str, str]:
    place = key.place
    return place.layer < 0, place.layer, PHASES.index(place.phase), key.work, key.dtype, place.reason


def _row(
    found: Attributed, key: FlopKey, flops: int, causal_flops: int, repeated: int, causal_repeated: int
) -> FlopRow:
    again = key.place.phase == "recompute"
    return FlopRow(
        layer=found.layer_name(key.place),
        phase=key.place.phase,
        class_name=classes.CLASSES[key.work],
        dtype=key.dtype,
        flops_per_step=flops,
        causal_flops_per_step=causal_flops,
        repeated_flops_per_step=flops if again else repeated,
        causal_repeated_flops_per_step=causal_flops if again else causal_repeated,
        reason=key.place.reason,
    )


# --- for the steps of another trace --------------------------------------------------------------


def calls_ratio(found: Attributed, timed: Attributed | None) -> Callable[[int], int | Fraction]:
    """By layer: how often its model is called in a step of the timed trace, over how often in a step of this one.

    A model of several (a UNet after a text encoder) may not run in every step; the calls of one are taken to be alike.
    """
    if timed is None:
        return lambda layer: 1
    here, there = _calls_of_roots(found), _calls_of_roots(timed)
    layers = found.tree.layers
    ratios = {name: there[name] / calls for name, calls in here.items() if calls}
    whole = {name: int(ratio) if ratio.denominator == 1 else ratio for name, ratio in ratios.items()}  # far quicker
    return lambda layer: whole.get(layers[layers[layer].ancestors[-1]].name, 1) if layer >= 0 else 1


def _calls_of_roots(found: Attributed) -> defaultdict[str, Fraction]:
    """How often the outermost layers are called in a step; nothing of a trace without marks of layers."""
    calls, layers, steps = found.calls, found.tree.layers, found.steps
    inside = steps.place_of(found.recording.spans.start_ns[calls.span]) >= 0
    names = [layers[i].name for i in calls.layer[inside | (not len(steps))].tolist() if layers[i].parent < 0]
    per_step = {name: Fraction(count, max(1, len(steps))) for name, count in Counter(names).items()}
    return defaultdict(Fraction, per_step)


def _never_called(found: Attributed, timed: Attributed | None) -> Iterable[UncountedRow]:
    """The layers of the timed trace whose model is not called in this one."""
    if timed is None:
        return
    here, layers = _calls_of_roots(found), timed.tree.layers
    missing = {name for name, calls in _calls_of_roots(timed).items() if calls and not here[name]}
    unknown: dict[Phase, dict[str, None]] = defaultdict(dict)
    for place in timed.attribution.places:
        above = layers[place.layer].ancestors if place.layer >= 0 else ()
        if above and layers[above[-1]].name in missing:
            unknown[place.phase].update(dict.fromkeys(layers[i].name for i in above))
    for phase, names in unknown.items():
        yield UncountedRow(
            op=NEVER_CALLED, class_name="other", phase=phase, layers=tuple(names), count=0, time_per_step_ns=0
        )


def per_step(sums: Mapping[Key, int | Fraction], steps: int) -> dict[Key, int]:
    """Means as whole numbers that add up to the mean of the sum, rounded down."""
    means = {key: int(total // steps) for key, total in sums.items()}
    missing = int(sum(sums.values()) // steps) - sum(means.values())
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
        for depth, name in enumerate(names_upwards(found, indices, row.layer)):
            total = sums[name, row.phase]
            total[1] += row.flops_per_step
            total[3] += row.causal_flops_per_step
            if depth == 0:
                total[0] += row.flops_per_step
                total[2] += row.causal_flops_per_step
    layers = {
        key: LayerFlops(
            own=own, inclusive=inclusive, known=inclusive, causal_own=causal_own, causal_inclusive=causal_inclusive
        )
        for key, (own, inclusive, causal_own, causal_inclusive) in sums.items()
    }
    own_unknown = {(layer, row.phase) for row in uncounted for layer in row.layers}
    for layer, phase in own_unknown:
        for name in names_upwards(found, indices, layer):
            known = layers.get((name, phase), LayerFlops())
            own_is_known = (name, phase) not in own_unknown
            layers[name, phase] = LayerFlops(
                own=known.own if own_is_known else None,
                inclusive=None,
                known=known.known,
                causal_own=known.causal_own if own_is_known else None,
                causal_inclusive=None,
            )
    return layers


def names_upwards(found: Attributed, indices: Mapping[str, int], layer: str) -> list[str]:
    """The layer, then all above it."""
    if layer not in indices:
        return [layer]
    return [found.tree.layers[index].name for index in found.tree.layers[indices[layer]].ancestors]


def shapes_of(found: Attributed) -> Shapes | str:
    """The shapes of an attributed recording, or why there are none."""
    if found.shapes is None or not found.shapes.recorded:
        return "the shapes of ops were not recorded (record_shapes=True)"
    return found.shapes


def flops_of_recording(found: Attributed) -> FlopCount | str:
    """What the shapes of an attributed recording tell, or why there are none."""
    shapes = shapes_of(found)
    return shapes if isinstance(shapes, str) else count_flops(found, shapes)
