"""One layer that takes longer than it should: on one rank beside others, or on all of them beside its equals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.numbered_names import OPEN, split_number
from profiler_wrapper.analysis.ranks.medians import Float, deviation, median
from profiler_wrapper.analysis.ranks.model import LayerTimes

_EXPLAINS = 0.5  # of what is to be explained
_NEXT = 0.5  # of it, by another layer, is no longer one layer's
_MOST_LAYERS = 0.5  # of the others within it
_FEWEST_EQUALS = 3  # beside it
_ODD = 1.5  # times its equals
_BEYOND_NOISE = 4.0  # deviations of its equals


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLayer:
    layer: str
    excess_ns: float  # in a step
    own_ns: float
    typical_ns: float
    beside: str  # whom it was compared with


def layer_of_rank(layers: LayerTimes, rank: int, excess_ns: float) -> SlowLayer | None:
    """The layer that makes a rank take `excess_ns` longer than others in a step, if it is one layer."""
    at = np.flatnonzero(layers.ranks == rank)
    if not len(at):
        return None
    times = layers.own_ns.sum(axis=2, where=np.isfinite(layers.own_ns))  # (R, L)
    times[~np.isfinite(layers.own_ns).any(axis=2)] = np.nan
    own = times[at[0]]
    others = np.flatnonzero((layers.stages == layers.stages[at[0]]) & (layers.ranks != rank))
    if len(others):
        of_stage = " of its stage" if len(np.unique(layers.stages)) > 1 else ""
        typical, beside = median(times[others], axis=0), f"on the other ranks{of_stage}"
    else:
        typical, beside = _of_equals(layers.layers, median(times, axis=0)), "in the layers like it"
    return _one(layers.layers, own, typical, beside, excess_ns)


def odd_layer(layers: LayerTimes, step_ns: float, least: float) -> SlowLayer | None:
    """The layer that takes longer than its equals on all ranks, by `least` of a step's time or more."""
    times = layers.own_ns.sum(axis=2, where=np.isfinite(layers.own_ns))
    times[~np.isfinite(layers.own_ns).any(axis=2)] = np.nan
    if not times.size:
        return None
    own = median(times, axis=0)
    typical = _of_equals(layers.layers, own)
    spread = _spread_of_equals(layers.layers, own)
    excess = np.nan_to_num(own - typical, nan=-1.0)
    odd = (excess >= least * step_ns) & (own >= _ODD * typical) & (excess >= _BEYOND_NOISE * spread)
    beyond = np.sort(times - typical, axis=0)[len(times) // 4]  # on all ranks, or nearly; of few on all
    odd &= np.nan_to_num(beyond, nan=-1.0) >= 0.5 * excess
    if not odd.any():
        return None
    return _one(layers.layers, np.where(odd, own, typical), typical, "in the layers like it", float(excess[odd].max()))


def _one(names: tuple[str, ...], own: Float, typical: Float, beside: str, excess_ns: float) -> SlowLayer | None:
    excess = np.nan_to_num(own - typical, nan=0.0)
    parts = [at for at in range(len(names)) if not _holds_the_model(names, at)]
    explains = [at for at in parts if excess[at] >= _EXPLAINS * excess_ns]
    if not explains or excess_ns <= 0:
        return None
    deepest = max(explains, key=lambda at: (names[at].count("."), excess[at]))
    apart = [at for at in parts if not _related(names[at], names[deepest])]
    if apart and excess[apart].max() > _NEXT * excess[deepest]:
        return None
    return SlowLayer(
        layer=names[deepest],
        excess_ns=float(excess[deepest]),
        own_ns=float(own[deepest]),
        typical_ns=float(typical[deepest]),
        beside=beside,
    )


def _holds_the_model(names: tuple[str, ...], at: int) -> bool:
    """The root, which goes by its class, or what holds most of the layers: no one layer."""
    name = names[at]
    if len(names) < 2:
        return False
    within = sum(other.startswith(f"{name}.") for other in names)
    return within > _MOST_LAYERS * (len(names) - 1) or ("." not in name and name[:1].isupper())


def _related(name: str, other: str) -> bool:
    """One is the other, or within it."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _equals(names: tuple[str, ...]) -> list[list[int]]:
    """Places of the names that differ in their last number only, where there are enough of them."""
    like: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        pattern, number = split_number(name)
        if number is not None and OPEN in pattern:
            like[pattern].append(place)
    return [places for places in like.values() if len(places) > _FEWEST_EQUALS]


def _of_equals(names: tuple[str, ...], times: Float) -> Float:
    """The median of each name's equals; nan where it has too few."""
    typical = np.full(len(names), np.nan)
    for places in _equals(names):
        typical[places] = median(times[places])
    return typical


def _spread_of_equals(names: tuple[str, ...], times: Float) -> Float:
    spread = np.full(len(names), np.nan)
    for places in _equals(names):
        spread[places] = deviation(times[places])
    return spread
