"""Who may have slowed a job, and by what: each suspect with its share of the lost time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.imbalance import Movement, movement, stands_out
from profiler_wrapper.analysis.ranks.medians import median
from profiler_wrapper.analysis.ranks.model import (
    COMPUTE,
    Arrivals,
    Bool,
    Cause,
    Int,
    LayerTimes,
    OwnTimes,
    Suspect,
)
from profiler_wrapper.analysis.ranks.persistence import (
    LEAST_LOSS,
    Loss,
    binomial_tail,
    recurs,
    slow_ranks,
    steady,
    weigh,
    worth_naming,
)
from profiler_wrapper.analysis.ranks.rank_suspects import (
    CAUSES,
    FEWEST_STEPS,
    MEASURED,
    PERSISTENT,
    Weighed,
    ms,
    rank_suspects,
)
from profiler_wrapper.analysis.ranks.slow_layers import odd_layer
from profiler_wrapper.analysis.ranks.what_if import Frame
from profiler_wrapper.analysis.ranks.what_if import frame as frame_of

MOST = 0.5  # of the lost time: what is more is the cause, also where it comes and goes
_SLOWER_STAGE = 1.33  # times the typical stage
_STANDS_OUT = 4.0
_FEWEST_TURNS = 8  # steps
_BY_TURNS = 0.001  # chance that one is slowest so often where all take turns
_HEAVY = 0.15  # of the step's time


def suspects(frame: Frame, arrivals: Arrivals | None, layers: LayerTimes | None) -> list[Weighed]:
    """All of them, the one that costs the typical step most first.

    What moves from rank to rank is looked for in what remains without the ranks that are always slow.
    """
    slow, beyond = slow_ranks(frame)
    rest = frame_of(_without(frame, slow)) if len(slow) else frame
    weighed = [
        *rank_suspects(frame, slow, beyond, arrivals, layers),
        *_kinds(frame),
        *_stages(frame, layers),
        *(_of_all_lost(one, frame) for one in _moving(rest)),
        *_odd_layers(frame, layers),
    ]
    return sorted(weighed, key=lambda one: -one.loss.typical_gain)


def _of_all_lost(one: Weighed, frame: Frame) -> Weighed:
    """Its share of the time lost in all, though it was looked for in what remains without the slow ranks."""
    lost = float(frame.lost_ns.mean())
    share = min(1.0, one.suspect.lost_ns / lost) if lost > 0 else 0.0
    return replace(one, suspect=replace(one.suspect, share=share))


def _without(frame: Frame, slow: Int) -> OwnTimes:
    """Own times without what some ranks typically take too long."""
    own = frame.own.own_ns.copy()
    beyond = median(own[:, slow] - frame.base[:, slow], axis=0)
    own[:, slow] -= np.minimum(np.maximum(np.nan_to_num(beyond), 0.0)[None], np.nan_to_num(own[:, slow]))
    return replace(frame.own, own_ns=own)


def _kinds(frame: Frame) -> Iterator[Weighed]:
    """Data loading and garbage collection, on whatever ranks."""
    for kind in ("data", "gc"):
        if kind not in frame.own.kinds:
            continue
        loss = weigh(frame, frame.gain_of_kind(kind))
        if not loss.gain_ns.any():
            continue
        verdict, cause = CAUSES[kind]
        if kind == "gc":  # rare and dear: its time is measured, so no step needs to be like another
            share = _share_without_worst(frame, loss)
            loss = replace(loss, typical_share=max(share, loss.typical_share), typical_gain=_mean_gain(frame, loss))
            certain = loss.steps >= 2 and worth_naming(loss) and loss.typical_share >= MEASURED
        else:
            certain = worth_naming(loss) and recurs(loss) and loss.typical_share >= MEASURED
        excess = np.maximum(frame.excess(kind), 0.0)
        by_rank = excess.sum(axis=0)
        most = int(by_rank.argmax())
        alone = len(by_rank) > 1 and by_rank[most] >= 0.8 * by_rank.sum()
        yield Weighed(
            Suspect(
                verdict=verdict,
                cause=cause,
                rank=int(frame.own.ranks[most]) if alone else None,
                stage=int(frame.own.stages[most]) if alone else None,
                share=loss.share,
                lost_ns=float(loss.gain_ns.mean()),
                steps=loss.steps,
                evidence=(
                    f"{cause}: up to {ms(float(excess.max()))} in a step beyond "
                    + ("none" if kind == "gc" else "the typical rank"),
                    f"it held {loss.steps} of {len(loss.hit)} steps, "
                    + ("all on one rank" if alone else f"on {int((by_rank > 0.2 * by_rank.max()).sum())} ranks"),
                ),
            ),
            loss,
            certain,
        )


def _stages(frame: Frame, layers: LayerTimes | None) -> Iterator[Weighed]:
    """The stage that is longest, where there are several."""
    groups = frame.groups
    if len(groups) < 2:
        return
    typical = median(frame.stage_ns, axis=0)
    place = int(typical.argmax())
    others = float(np.median(np.delete(typical, place)))
    loss = weigh(frame, frame.gain_of_stage(place))
    beyond = float(typical[place] - others)
    in_step = frame.stage_times()
    longest = int((in_step[:, place] >= (in_step.max(axis=1) + median(in_step, axis=1)) / 2).sum())
    certain = (
        loss.typical_share >= PERSISTENT
        and typical[place] >= _SLOWER_STAGE * others
        and beyond >= LEAST_LOSS * float(np.median(frame.step_ns))
        and steady(longest, len(loss.hit))
        and len(loss.hit) >= FEWEST_STEPS
    )
    loss = replace(loss, typical_gain=max(loss.typical_gain, beyond / float(np.median(frame.step_ns))))
    members = groups[place]
    stage = int(frame.own.stages[members[0]])
    evidence = [
        f"ranks of stage {stage} work {ms(typical[place])} a step, those of the typical other stage {ms(others)}",
        f"it is the longest stage in {int((in_step.argmax(axis=1) == place).sum())} of {len(loss.hit)} steps",
    ]
    cause: Cause = "slow stage"
    layer = None
    odd = odd_layer(layers, float(np.median(frame.step_ns)), LEAST_LOSS) if layers is not None else None
    if odd and layers is not None and _is_of_stage(layers, odd.layer, stage):
        if odd.excess_ns >= MOST * beyond:
            cause, layer = "slow layer", odd.layer
        evidence.append(f"{odd.layer}: {ms(odd.own_ns)} a step, {ms(odd.typical_ns)} {odd.beside}")
    if len(members) == 1:
        evidence.append(f"rank {int(frame.own.ranks[members[0]])} is alone in it: its machine may be the cause as well")
    yield Weighed(
        Suspect(
            verdict="stage",
            cause=cause,
            rank=int(frame.own.ranks[members[0]]) if len(members) == 1 else None,
            stage=stage,
            layer=layer,
            share=loss.share,
            lost_ns=float(loss.gain_ns.mean()),
            steps=loss.steps,
            evidence=tuple(evidence),
        ),
        loss,
        certain,
    )


def _moving(frame: Frame) -> Iterator[Weighed]:
    """Work that is long on another rank in each step."""
    lossy = frame.lost_ns >= LEAST_LOSS * frame.step_ns
    if not any(len(members) > 1 for members in frame.groups) or not lossy.any():
        return
    loss = weigh(frame, frame.gain_of_kind(*COMPUTE))
    moved = movement(frame, lossy)
    often = bool(lossy.mean() >= 0.5) and worth_naming(loss) and loss.typical_share >= MOST
    if moved.together and _takes_turns(frame, lossy, COMPUTE):
        yield Weighed(_moving_suspect("data imbalance", loss, _together(moved)), loss, often)
        return
    for kinds, cause in ((("forward",), "forward"), (("recompute", "backward"), "backward"), (("other",), "other")):
        loss = weigh(frame, frame.gain_of_kind(*kinds))
        times = stands_out(frame, lossy, kinds)
        certain = (
            bool(lossy.mean() >= 0.5)
            and lossy.sum() >= _FEWEST_TURNS
            and loss.typical_share >= MOST
            and times >= _STANDS_OUT
            and loss.typical_gain >= _HEAVY
            and not moved.whole_rank
            and _takes_turns(frame, lossy, kinds)
            and loss.steps >= 0.5 * len(loss.hit)
        )
        words = (
            f"in the typical step the slowest rank's {cause} is {times:.0f} times as far from the others' as the next",
            "another rank in each step, and no other part of the step moves with it",
        )
        yield Weighed(_moving_suspect(cause, loss, words), loss, certain)  # type: ignore[arg-type]


def _takes_turns(frame: Frame, lossy: Bool, kinds: tuple[str, ...]) -> bool:
    """No rank is the slowest so often that it is one rank's matter."""
    slowest = frame.excess(*kinds)[lossy].argmax(axis=1)
    most, steps, ranks = int(np.bincount(slowest).max()), len(slowest), len(frame.own.ranks)
    return most < steps and ranks * binomial_tail(most, steps, 1 / ranks) > _BY_TURNS


def _moving_suspect(cause: Cause, loss: Loss, evidence: tuple[str, ...]) -> Suspect:
    return Suspect(
        verdict="imbalance",
        cause=cause,
        share=loss.share,
        lost_ns=float(loss.gain_ns.mean()),
        steps=loss.steps,
        evidence=evidence,
    )


def _together(moved: Movement) -> tuple[str, ...]:
    return (
        f"forward and backward of a rank move together within a step: correlation {moved.correlation:.2f}",
        f"the same rank has the longest forward and the longest backward in {moved.same_rank} of {moved.steps} steps, "
        "and it is another one from step to step",
    )


def _odd_layers(frame: Frame, layers: LayerTimes | None) -> Iterator[Weighed]:
    """A layer that is slow on all ranks of a job without stages: ranks wait for none, but the job does."""
    if layers is None or len(frame.groups) > 1:
        return
    odd = odd_layer(layers, float(np.median(frame.step_ns)), LEAST_LOSS)
    if odd is None:
        return
    lost = float(frame.lost_ns.mean())
    gain = np.full_like(frame.step_ns, odd.excess_ns)
    share = odd.excess_ns / (odd.excess_ns + lost)
    step = float(np.median(frame.step_ns))
    loss = Loss(
        gain_ns=gain,
        share=share,
        typical_share=odd.excess_ns / (odd.excess_ns + float(np.median(frame.lost_ns))),
        typical_gain=odd.excess_ns / step,
        hit=np.ones(len(gain), dtype=np.bool_),
    )
    yield Weighed(
        Suspect(
            verdict="stage",
            cause="slow layer",
            stage=int(frame.own.stages[0]),
            layer=odd.layer,
            share=share,
            lost_ns=odd.excess_ns,
            steps=len(gain),
            evidence=(
                f"{odd.layer}: {ms(odd.own_ns)} a step on the typical rank, {ms(odd.typical_ns)} {odd.beside}",
                "it is as slow on all ranks",
            ),
        ),
        loss,
        worth_naming(loss) and len(gain) >= 3,
    )


def _is_of_stage(layers: LayerTimes, layer: str, stage: int) -> bool:
    column = layers.own_ns[:, layers.layers.index(layer)]
    return bool(np.isfinite(column[layers.stages == stage]).any())


def _share_without_worst(frame: Frame, loss: Loss) -> float:
    """The share, with the few steps left out that were longest for other reasons."""
    rest = frame.lost_ns - loss.gain_ns
    kept = np.argsort(rest)[: len(rest) - (-(-len(rest) // 20) if len(rest) >= 10 else 0)]
    lost = float(frame.lost_ns[kept].sum())
    return float(loss.gain_ns[kept].sum()) / lost if lost > 0 else 0.0


def _mean_gain(frame: Frame, loss: Loss) -> float:
    return float(loss.gain_ns.mean() / np.median(frame.step_ns))
