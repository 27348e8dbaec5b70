"""A rank that is slower than the others of its stage: by how much, in what it does, and how its collectives show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from profiler_wrapper.analysis.ranks.model import (
    COMPUTE,
    Arrivals,
    Cause,
    Float,
    Int,
    LayerTimes,
    Suspect,
    VerdictName,
)
from profiler_wrapper.analysis.ranks.persistence import (
    LEAST_LOSS,
    Loss,
    recurs,
    singled_out,
    weigh,
    worth_naming,
)
from profiler_wrapper.analysis.ranks.slow_layers import layer_of_rank
from profiler_wrapper.analysis.ranks.what_if import Frame

FEWEST_STEPS = 3
PERSISTENT = 0.05  # of the lost time, where the typical step has it
MEASURED = 0.3  # of it, where it comes and goes
OF_A_KIND = 0.6  # of a rank's excess: more is that kind's
_BOTH = 0.2  # of it in forward and backward each: compute
_LESS_THAN_HALF = 0.5
_PAIRS = ("send", "recv", "receive", "p2p")  # between stages: who is short there need not be late

CAUSES: dict[str, tuple[VerdictName, Cause]] = {
    "data": ("data", "data loading"),
    "gc": ("gc", "garbage collection"),
    "forward": ("rank", "forward"),
    "recompute": ("rank", "backward"),
    "backward": ("rank", "backward"),
    "optimizer": ("rank", "optimizer"),
    "checkpoint": ("rank", "checkpoint"),
    "communication": ("rank", "other"),
    "other": ("rank", "other"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A suspect, what it cost step by step, and whether that is more than chance."""

    suspect: Suspect
    loss: Loss
    certain: bool


def rank_suspects(
    frame: Frame, slow: Int, beyond: Float, arrivals: Arrivals | None, layers: LayerTimes | None
) -> Iterator[Weighed]:
    """The ranks that are slow in the typical step; else the one that cost most, in many steps or by chance."""
    step = float(np.median(frame.step_ns))
    if len(slow):
        loss = weigh(frame, frame.gain_of_ranks(slow))
        certain = loss.typical_share >= PERSISTENT and len(loss.hit) >= FEWEST_STEPS
        loss = replace(loss, typical_gain=max(loss.typical_gain, float(beyond[slow[0]]) / step))
        yield Weighed(_rank_suspect(frame, slow, loss, arrivals, layers), loss, certain)
        return
    gains = frame.gain_of_each_rank()
    capped = np.minimum(gains, np.quantile(frame.lost_ns, 0.75) * 2)
    places = np.array([capped.sum(axis=0).argmax()], dtype=np.int64)
    loss = weigh(frame, gains[:, places[0]])
    if not loss.gain_ns.any():
        return
    lossy = int((frame.lost_ns >= LEAST_LOSS * frame.step_ns).sum())
    certain = (
        worth_naming(loss)
        and recurs(loss)
        and loss.typical_share >= MEASURED
        and singled_out(loss, lossy, len(frame.own.ranks))
    )
    yield Weighed(_rank_suspect(frame, places, loss, arrivals, layers), loss, certain)


def _rank_suspect(
    frame: Frame, places: Int, loss: Loss, arrivals: Arrivals | None, layers: LayerTimes | None
) -> Suspect:
    own, place = frame.own, int(places[0])
    rank = int(own.ranks[place])
    hit = loss.hit if loss.hit.any() else np.ones_like(loss.hit)
    parts = {
        kind: max(0.0, float(np.median(frame.excess(kind)[hit, place])))
        for kind in own.kinds
        if kind != "communication"
    }
    verdict, cause = _of_parts(parts)
    whole = sum(parts.values())
    evidence = [
        *_longer(frame, place, parts),
        f"it held the step in {loss.steps} of {len(loss.hit)} steps",
    ]
    if len(places) > 1:
        evidence.append("as slow: rank" + _names(own.ranks[places[1:]].tolist()))
    last = _lateness(arrivals, rank, own.steps)
    if last and (last[0] or cause == "other"):
        evidence.append(last[1])
    if cause == "other" and last and last[0]:
        cause = "late collective"
    layer = None
    if cause in ("forward", "backward", "compute") and layers is not None:
        slow = layer_of_rank(layers, rank, sum(parts.get(kind, 0.0) for kind in COMPUTE))
        if slow:
            layer, cause = slow.layer, "slow layer"
            evidence.append(
                f"{slow.layer}: {ms(slow.own_ns)} a step, {ms(slow.typical_ns)} {slow.beside}, "
                f"{min(1.0, slow.excess_ns / whole):.0%} of what this rank takes longer"
            )
    return Suspect(
        verdict=verdict,
        cause=cause,
        rank=rank,
        stage=int(own.stages[place]),
        layer=layer,
        share=loss.share,
        lost_ns=float(loss.gain_ns.mean()),
        steps=loss.steps,
        evidence=tuple(evidence),
    )


def _of_parts(parts: dict[str, float]) -> tuple[VerdictName, Cause]:
    """What a rank's excess is made of, in a word."""
    whole = sum(parts.values())
    if whole <= 0:
        return "rank", "compute"
    ahead = parts.get("forward", 0.0) / whole
    behind = (parts.get("backward", 0.0) + parts.get("recompute", 0.0)) / whole
    if min(ahead, behind) >= _BOTH and ahead + behind >= OF_A_KIND:
        return "rank", "compute"
    if behind >= OF_A_KIND:
        return "rank", "backward"
    kind = max(parts, key=lambda name: parts[name])
    if parts[kind] < OF_A_KIND * whole:
        return "rank", "compute" if ahead + behind >= _LESS_THAN_HALF else "other"
    return CAUSES[kind]


def _lateness(arrivals: Arrivals | None, rank: int, steps_judged: Int) -> tuple[bool, str] | None:
    """Whether a rank came last to most of the collectives it matters for, and how it is said."""
    if arrivals is None or not len(arrivals.step):
        return None
    met = np.array([not any(part in name.lower() for part in _PAIRS) for name in arrivals.name])
    met &= np.isin(arrivals.step, steps_judged)
    if not met.any():
        return None
    late = (arrivals.shortest_rank == rank)[met]
    # A rank that came late to one collective of a step meets the next with all others: the greatest counts.
    steps, at = np.unique(arrivals.step[met], return_inverse=True)
    weight = np.nan_to_num(arrivals.shorter_by_ns[met])
    by_step, of_rank = np.bincount(at, weights=weight), np.bincount(at, weights=weight * late)
    most = int((of_rank > 0.5 * by_step).sum())
    typical = float(np.median(weight[late])) if late.any() else 0.0
    return (
        most >= 0.5 * len(steps),
        f"rank {rank} came last in {most} of {len(steps)} steps, to {int(late.sum())} of {len(late)} collectives, "
        f"typically by {ms(typical)}",
    )


def _longer(frame: Frame, place: int, parts: dict[str, float]) -> Iterator[str]:
    """The kinds that make a rank longer, those with a tenth of it or more: means over the steps, as in tables."""
    whole = sum(parts.values())
    for kind in sorted(parts, key=lambda name: -parts[name]):
        if whole <= 0 or parts[kind] < 0.1 * whole:
            return
        own, more = float(np.nanmean(frame.own.of(kind)[:, place])), float(frame.excess(kind)[:, place].mean())
        yield f"{kind} of rank {int(frame.own.ranks[place])}: {ms(own)} a step, {ms(more)} more than typical"


def _names(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'s' if len(ranks) > 1 else ''} {shown}{more}"


def ms(ns: float) -> str:
    """`12.3 ms`."""
    return f"{ns / 1e6:,.1f} ms"
