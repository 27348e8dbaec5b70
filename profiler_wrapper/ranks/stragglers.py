"""Who slows the job, in one sentence: a rank, a stage, its data, garbage collection, or nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profiler_wrapper.analysis.statistics import mean, median
from profiler_wrapper.errors import first_few
from profiler_wrapper.ranks import lost_time, model
from profiler_wrapper.ranks.lost_time import Cost, IdealSteps, ms
from profiler_wrapper.ranks.model import COMPUTE, Arrivals, Cause, Int, LayerTimes, SelfTimes, Suspect
from profiler_wrapper.ranks.times import (
    MANY_STEPS,
    SOME_STEPS,
    steady_steps,
    subtract_estimated_waiting,
    waiting_source,
)

_FEWEST_STEPS = 3  # fewer: nothing is said
LATE = "it comes late to the collectives though its phases are no longer"
OUTSIDE = "it spends longer outside its phases"
_CLEAR = 0.7  # of the lost time
_NEAR = 0.7  # of the greatest loss: told apart by what says more
_SLOWDOWN = 1.05  # by replay: less is no loss
_OF_SUSPECT = ("verdict", "cause", "rank", "stage", "layer", "share", "lost_ns")  # that a verdict has of its suspect


def diagnose(
    own: SelfTimes,
    arrivals: Arrivals | None = None,
    layers: LayerTimes | None = None,
    replay: model.Replay | None = None,
) -> model.Verdict:
    """The verdict over all steps, with its evidence and all suspects."""
    own, left_out = steady_steps(own)
    if len(own.steps) < _FEWEST_STEPS or not len(own.ranks):
        what = f"{len(own.steps)} steps of {len(own.ranks)} ranks"
        sentence = f"No verdict: {what} are too few to tell a straggler from chance; record {MANY_STEPS} steps or more."
        return model.Verdict(verdict="none", sentence=sentence, steps=len(own.steps))
    own = subtract_estimated_waiting(own)
    times = lost_time.ideal_steps(own)
    scored = suspects(times, arrivals, layers)
    step_ns, ideal_ns = float(times.step_ns.mean()), float(times.ideal_ns.mean())
    wall_ns = said_ns = float(np.nanmax(mean(own.wall_ns)))
    if len(times.groups) > 1 and replay is not None:  # without stages all ranks meet: a replay knows nothing more
        scored = [_by_replay(one, times, replay) for one in scored]
        step_ns, ideal_ns = replay.total_ns / max(1, replay.steps), replay.ideal_ns / max(1, replay.steps)
        said_ns = step_ns
        left_out.append(
            f"{ms(step_ns)} is the step replayed: each operation begins as soon as what it needs is there; "
            f"recorded, with what lies between them, it takes {ms(float(np.nanmean(own.wall_ns)))}"
        )
    found = _chosen(scored)
    share = found.cost.typical_share if found else _of_nobody(times, scored)
    verdict = model.Verdict(
        verdict="none",
        sentence=_no_straggler(len(own.ranks), said_ns, max(0.0, step_ns - ideal_ns)),
        step_ns=step_ns,
        wall_ns=wall_ns,
        ideal_ns=ideal_ns,
        confidence=_confidence(own, share),
        steps=len(own.steps),
        ms=replay.ms if replay else None,
        mw=replay.mw if replay else None,
        evidence=(*(found.suspect.evidence if found else ()), *left_out, *_notes(own)),
        suspects=_each_once(scored),
    )
    if found is None:
        return verdict
    suspect = found.suspect
    return replace(
        verdict,
        sentence=f"{_what(suspect)}; without it a step of {ms(said_ns)} would be {ms(suspect.lost_ns)} shorter, "
        f"{min(1.0, suspect.share):.0%} of the lost time.",
        **{name: getattr(suspect, name) for name in _OF_SUSPECT},
    )


def _each_once(scored: list[ScoredSuspect]) -> tuple[Suspect, ...]:
    """The greatest share first. What was found in two ways, as data loading of a slow rank, counts as the greater."""
    found: dict[tuple[object, ...], Suspect] = {}
    for one in sorted(scored, key=lambda one: -one.suspect.share):
        suspect = one.suspect
        found.setdefault((suspect.verdict, suspect.cause, suspect.rank, suspect.stage, suspect.layer), suspect)
    return tuple(found.values())


def _chosen(scored: list[ScoredSuspect]) -> ScoredSuspect | None:
    """The one with most of the loss; of those with about as much, the one that says most."""
    certain = [one for one in scored if one.certain]
    if not certain:
        return None
    most = max(one.cost.typical_gain for one in certain)
    near = [one for one in certain if one.cost.typical_gain >= _NEAR * most]
    return min(near, key=lambda one: (one.suspect.rank is None, one.suspect.layer is None, -one.cost.typical_gain))


def _by_replay(one: ScoredSuspect, times: IdealSteps, replay: model.Replay) -> ScoredSuspect:
    """Shares of ranks and stages as the replay of dependencies has them: it knows who waits for whom."""
    suspect = one.suspect
    if suspect.layer is not None or suspect.verdict not in ("rank", "stage"):
        return one
    of_stage = suspect.verdict == "stage"
    at = np.flatnonzero(replay.stages == suspect.stage if of_stage else replay.ranks == suspect.rank)
    shares = (replay.share_of_stage if of_stage else replay.share_of_rank)[at]
    if not np.isfinite(shares).any():
        return one
    share = float(shares[0])
    per_step = (replay.total_ns - replay.ideal_ns) / max(1, replay.steps or len(times.step_ns))
    gain = share * (replay.slowdown - 1)
    return ScoredSuspect(
        replace(suspect, share=share, lost_ns=share * per_step),
        replace(one.cost, share=share, typical_share=min(1.0, share), typical_gain=gain),
        one.certain and replay.slowdown >= _SLOWDOWN and gain >= lost_time.LEAST_LOSS,
    )


def _notes(own: SelfTimes) -> list[str]:
    notes = []
    if len(own.steps) < MANY_STEPS:
        notes.append(f"only {len(own.steps)} steps were judged")
    if not own.waiting_known:
        how = "estimated" if waiting_source(own)[0] == "estimated" else "not told apart"
        notes.append(
            f"no communication was recorded: waiting was {how}, and a slow backward of one rank may look like "
            "that of all"
        )
    return notes


def _confidence(own: SelfTimes, share: float) -> model.Confidence:
    steps = len(own.steps)
    if steps >= MANY_STEPS and share >= _CLEAR and own.waiting_known:
        return "high"
    return "medium" if steps >= SOME_STEPS else "low"


def _no_straggler(ranks: int, step_ns: float, lost: float) -> str:
    if ranks == 1:
        return f"No straggler: there is one rank, of {ms(step_ns)} a step."
    unsure = "and no rank, stage or cause surely has most of that."
    return (
        f"No straggler: ranks differ by {ms(lost)} of a step's {ms(step_ns)} "
        f"({lost / step_ns if step_ns > 0 else 0.0:.0%}), "
        + (unsure if lost >= lost_time.LEAST_LOSS * step_ns else "which is little.")
    )


def _of_nobody(times: IdealSteps, scored: list[ScoredSuspect]) -> float:
    """How much of what is lost has no likely cause: all of it where little is lost."""
    little = times.lost_ns.mean() < lost_time.LEAST_LOSS * times.step_ns.mean()
    return 1.0 if little or not scored else 1.0 - scored[0].cost.share


def _what(suspect: Suspect) -> str:
    if suspect.verdict == "imbalance" and suspect.cause == "data imbalance":
        return "The load is uneven: another rank gets the long input in each step"
    if suspect.verdict == "imbalance":
        return f"The load is uneven: another rank is slow in each step, in its {suspect.cause}"
    if suspect.verdict in ("data", "gc"):
        of = "" if suspect.rank is None else f" of rank {suspect.rank}"
        return f"{suspect.cause.capitalize()}{of} holds the others up"
    if suspect.verdict == "stage":
        what = f"{suspect.layer} is slower than the layers like it" if suspect.layer else None
        return what or f"Stage {suspect.stage} is slower than the others"
    how = {
        "late collective": LATE,
        "slow layer": f"its {suspect.layer} takes longer",
        "compute": "its forward and backward take longer",
        "other": OUTSIDE,
    }.get(suspect.cause, f"its {suspect.cause} takes longer")
    return f"Rank {suspect.rank} is the straggler: {how}"


# --- suspects ---


MOST = 0.5  # of the lost time: what is more is the cause, also where it comes and goes
_SLOWER_STAGE = 1.33  # times the typical stage
_STANDS_OUT = 4.0
_FEWEST_TURNS = 8  # steps
_HEAVY = 0.15  # of the step's time


def suspects(ideal: IdealSteps, arrivals: Arrivals | None, layers: LayerTimes | None) -> list[ScoredSuspect]:
    """All of them, the one that costs the typical step most first."""
    scored = [
        *_ranks(ideal, arrivals, layers),
        *_kinds(ideal),
        *_stages(ideal, layers),
        *_moving(ideal),
        *_outlier_layers(ideal, layers),
    ]
    return sorted(scored, key=lambda one: -one.cost.typical_gain)


def _scored(
    verdict: model.VerdictName, cause: Cause, cost: Cost, certain: bool, evidence: Iterable[str], **where: Any
) -> ScoredSuspect:
    suspect = Suspect(
        verdict=verdict,
        cause=cause,
        share=cost.share,
        lost_ns=float(cost.gain_ns.mean()),
        steps=cost.steps,
        evidence=tuple(evidence),
        **where,
    )
    return ScoredSuspect(suspect, cost, certain)


def _kinds(ideal: IdealSteps) -> Iterator[ScoredSuspect]:
    """Data loading and garbage collection, on whatever ranks."""
    for kind in ("data", "gc"):
        cost = lost_time.cost_of(ideal, ideal.gain_of_kind(kind))
        if not cost.gain_ns.any():
            continue
        if kind == "gc":  # rare and expensive: its time is measured, so no step needs to be like another
            gain = float(cost.gain_ns.mean() / np.median(ideal.step_ns))
            cost = replace(cost, typical_share=max(cost.share, cost.typical_share), typical_gain=gain)
        comes_back = cost.steps >= 2 if kind == "gc" else lost_time.recurs(cost)
        excess = np.maximum(ideal.excess(kind), 0.0)
        by_rank = excess.sum(axis=0)
        most = int(by_rank.argmax())
        alone = len(by_rank) > 1 and by_rank[most] >= 0.8 * by_rank.sum()
        verdict, cause = CAUSES[kind]
        yield _scored(
            verdict,
            cause,
            cost,
            comes_back and cost.worth_naming and cost.typical_share >= MEASURED,
            (
                f"{cause}: up to {ms(float(excess.max()))} in a step beyond "
                + ("none" if kind == "gc" else "the typical rank"),
                f"it held {cost.steps} of {len(cost.hit)} steps, "
                + ("all on one rank" if alone else f"on {int((by_rank > 0.2 * by_rank.max()).sum())} ranks"),
            ),
            rank=int(ideal.own.ranks[most]) if alone else None,
            stage=int(ideal.own.stages[most]) if alone else None,
        )


def _stages(ideal: IdealSteps, layers: LayerTimes | None) -> Iterator[ScoredSuspect]:
    """The stage that is longest, where there are several."""
    groups, steps = ideal.groups, len(ideal.step_ns)
    if len(groups) < 2:
        return
    step = float(np.median(ideal.step_ns))
    typical = median(ideal.stage_ns, axis=0)
    place = int(typical.argmax())
    others = float(np.median(np.delete(typical, place)))
    cost = lost_time.cost_of(ideal, ideal.gain_of_stage(place))
    beyond = float(typical[place] - others)
    times = np.where(np.isfinite(ideal.times), ideal.times, np.nan)
    in_step = np.stack([median(times[:, members], axis=1) for members in groups], axis=1)  # of the typical rank, (S, G)
    longest = int((in_step[:, place] >= (in_step.max(axis=1) + median(in_step, axis=1)) / 2).sum())
    certain = (
        cost.typical_share >= PERSISTENT
        and typical[place] >= _SLOWER_STAGE * others
        and beyond >= lost_time.LEAST_LOSS * step
        and longest >= lost_time.nearly_all(steps)
    )
    cost = replace(cost, typical_gain=max(cost.typical_gain, beyond / step))
    members = groups[place]
    stage = int(ideal.own.stages[members[0]])
    alone = int(ideal.own.ranks[members[0]]) if len(members) == 1 else None
    evidence = [
        f"ranks of stage {stage} work {ms(typical[place])} a step, those of the typical other stage {ms(others)}",
        f"it is the longest stage in {int((in_step.argmax(axis=1) == place).sum())} of {steps} steps",
    ]
    slow = False
    outlier = lost_time.outlier_layer(layers, step, lost_time.LEAST_LOSS) if layers is not None else None
    if outlier and layers is not None:
        of_stage = layers.self_ns[layers.stages == stage, layers.layers.index(outlier.layer)]
        if np.isfinite(of_stage).any():
            slow = outlier.excess_ns >= MOST * beyond
            evidence.append(str(outlier))
    if alone is not None:
        evidence.append(f"rank {alone} is alone in it: its machine may be the cause as well")
    cause: Cause = "slow layer" if slow else "slow stage"
    layer = outlier.layer if outlier and slow else None
    yield _scored("stage", cause, cost, bool(certain), evidence, rank=alone, stage=stage, layer=layer)


_MOVING: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    ("forward", ("forward",)),
    ("backward", ("recompute", "backward")),
    ("other", ("other",)),
)


def _moving(ideal: IdealSteps) -> Iterator[ScoredSuspect]:
    """Work that is long on another rank in each step."""
    lossy = ideal.lost_ns >= lost_time.LEAST_LOSS * ideal.step_ns
    if not any(len(members) > 1 for members in ideal.groups) or not lossy.any():
        return

    def take_turns(*kinds: str) -> bool:
        """No rank is the slowest so often that it is one rank's matter."""
        slowest = ideal.excess(*kinds)[lossy].argmax(axis=1)
        most = int(np.bincount(slowest).max())
        return most < len(slowest) and not lost_time.too_often(most, len(slowest), len(ideal.own.ranks))

    half = bool(lossy.mean() >= 0.5)
    cost = lost_time.cost_of(ideal, ideal.gain_of_kind(*COMPUTE))
    moved = lost_time.movement(ideal, lossy)
    if moved.is_long_input and take_turns(*COMPUTE):
        said = (
            f"the same rank has the longest forward and the longest backward in {moved.same_rank} of {moved.steps} "
            "steps, and it is another one from step to step"
        )
        certain = half and cost.worth_naming and cost.typical_share >= MOST
        yield _scored("imbalance", "data imbalance", cost, certain, [said])
        return
    for cause, kinds in _MOVING:
        if not take_turns(*kinds):
            continue
        cost = lost_time.cost_of(ideal, ideal.gain_of_kind(*kinds))
        times = lost_time.stands_out(ideal, lossy, kinds)
        certain = (
            half
            and lossy.sum() >= _FEWEST_TURNS
            and cost.typical_share >= MOST
            and times >= _STANDS_OUT
            and cost.typical_gain >= _HEAVY
            and not moved.of_whole_rank
            and cost.steps >= 0.5 * len(cost.hit)
        )
        evidence = (
            f"in the typical step the slowest rank's {cause} is {times:.0f} times as far from the others' as the next",
            "another rank in each step, and no other part of the step moves with it",
        )
        yield _scored("imbalance", cause, cost, certain, evidence)


def _outlier_layers(ideal: IdealSteps, layers: LayerTimes | None) -> Iterator[ScoredSuspect]:
    """A layer that is slow on all ranks of a job without stages: ranks wait for none, but the job does."""
    if layers is None or len(ideal.groups) > 1:
        return
    step = float(np.median(ideal.step_ns))
    outlier = lost_time.outlier_layer(layers, step, lost_time.LEAST_LOSS)
    if outlier is None:
        return
    excess, steps = outlier.excess_ns, len(ideal.step_ns)
    cost = Cost(
        gain_ns=np.full(steps, excess),
        share=excess / (excess + float(ideal.lost_ns.mean())),
        typical_share=excess / (excess + float(np.median(ideal.lost_ns))),
        typical_gain=excess / step,
        hit=np.ones(steps, dtype=np.bool_),
    )
    evidence, stage = (str(outlier), "it is as slow on all ranks"), int(ideal.own.stages[0])
    yield _scored("stage", "slow layer", cost, cost.worth_naming, evidence, stage=stage, layer=outlier.layer)


# --- ranks ---


PERSISTENT = 0.05  # of the lost time, where the typical step has it
MEASURED = 0.3  # of it, where it comes and goes
OF_A_KIND = 0.6  # of a rank's excess: more is that kind's
_BOTH = 0.2  # of it in forward and backward each: compute
_LESS_THAN_HALF = 0.5
_PAIRS = ("send", "recv", "receive", "p2p")  # between stages: who is short there need not be late

CAUSES: dict[str, tuple[model.VerdictName, Cause]] = {
    "data": ("data", "data loading"),
    "gc": ("gc", "garbage collection"),
    "forward": ("rank", "forward"),
    "recompute": ("rank", "backward"),
    "backward": ("rank", "backward"),
    "optimizer": ("rank", "optimizer"),
    "checkpoint": ("rank", "checkpoint"),
}


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSuspect:
    """A suspect, what it cost step by step, and whether that is more than chance."""

    suspect: Suspect
    cost: Cost
    certain: bool


def _ranks(ideal: IdealSteps, arrivals: Arrivals | None, layers: LayerTimes | None) -> Iterator[ScoredSuspect]:
    """The ranks that are slow in the typical step; else the one that cost most, in many steps or by chance."""
    slow, beyond = lost_time.slow_ranks(ideal)
    if len(slow):
        cost = lost_time.cost_of(ideal, ideal.gain_of_ranks(slow))
        certain = cost.typical_share >= PERSISTENT
        cost = replace(cost, typical_gain=max(cost.typical_gain, float(beyond[slow[0]] / np.median(ideal.step_ns))))
        yield _rank_suspect(ideal, slow, cost, certain, arrivals, layers)
        return
    gains = ideal.gain_of_each_rank()
    capped = np.minimum(gains, np.quantile(ideal.lost_ns, 0.75) * 2)
    place = int(capped.sum(axis=0).argmax())
    cost = lost_time.cost_of(ideal, gains[:, place])
    if not cost.gain_ns.any():
        return
    lossy = int((ideal.lost_ns >= lost_time.LEAST_LOSS * ideal.step_ns).sum())
    often = lost_time.recurs(cost) and lost_time.too_often(cost.steps, lossy, len(ideal.own.ranks))
    certain = often and cost.worth_naming and cost.typical_share >= MEASURED
    yield _rank_suspect(ideal, np.array([place]), cost, certain, arrivals, layers)


def _rank_suspect(
    ideal: IdealSteps, places: Int, cost: Cost, certain: bool, arrivals: Arrivals | None, layers: LayerTimes | None
) -> ScoredSuspect:
    own, place = ideal.own, int(places[0])
    rank = int(own.ranks[place])
    hit = cost.hit if cost.hit.any() else np.ones_like(cost.hit)
    parts = {
        kind: max(0.0, float(np.median(ideal.excess(kind)[hit, place])))
        for kind in own.kinds
        if kind != "communication"
    }
    verdict, cause = _of_parts(parts)
    whole = sum(parts.values())
    evidence = []
    for kind in sorted(parts, key=lambda name: -parts[name]):  # those with a tenth or more; means, as in tables
        if whole > 0 and parts[kind] >= 0.1 * whole:
            taken, beyond = float(np.nanmean(own.of(kind)[:, place])), float(ideal.excess(kind)[:, place].mean())
            evidence.append(f"{kind} of rank {rank}: {ms(taken)} a step, {ms(beyond)} more than typical")
    evidence.append(f"it held the step in {cost.steps} of {len(cost.hit)} steps")
    if len(places) > 1:
        others = [str(one) for one in own.ranks[places[1:]].tolist()]
        evidence.append(f"as slow: rank{'s' if len(others) > 1 else ''} {first_few(others, 8)}")
    last = _lateness(arrivals, rank, own.steps)
    if last and (last[0] or cause == "other"):
        evidence.append(last[1])
    if cause == "other" and last and last[0]:
        cause = "late collective"
    slow = None
    if cause in ("forward", "backward", "compute") and layers is not None:
        slow = lost_time.layer_of_rank(layers, rank, sum(parts.get(kind, 0.0) for kind in COMPUTE))
        if slow:
            cause = "slow layer"
            evidence.append(f"{slow}, {min(1.0, slow.excess_ns / whole):.0%} of what this rank takes longer")
    where = {"rank": rank, "stage": int(own.stages[place])}
    return _scored(verdict, cause, cost, certain, evidence, **where, layer=slow.layer if slow else None)


def _of_parts(parts: dict[str, float]) -> tuple[model.VerdictName, Cause]:
    """What a rank's excess is made of, in a word."""
    whole = sum(parts.values())
    if whole <= 0:
        return "rank", "compute"
    ahead = parts.get("forward", 0.0) / whole
    behind = (parts.get("backward", 0.0) + parts.get("recompute", 0.0)) / whole  # same: a nanosecond of a step
    if min(ahead, behind) >= _BOTH and ahead + behind >= OF_A_KIND:
        return "rank", "compute"
    if behind >= OF_A_KIND:
        return "rank", "backward"
    kind = max(parts, key=lambda name: parts[name])
    if parts[kind] < OF_A_KIND * whole:
        return "rank", "compute" if ahead + behind >= _LESS_THAN_HALF else "other"
    return CAUSES.get(kind, ("rank", "other"))


def _lateness(arrivals: Arrivals | None, rank: int, steady_steps: Int) -> tuple[bool, str] | None:
    """Whether a rank came last to most of the collectives it matters for, and how it is said."""
    if arrivals is None or not len(arrivals.step):
        return None
    met = np.array([not any(part in name.lower() for part in _PAIRS) for name in arrivals.name])
    met &= np.isin(arrivals.step, steady_steps)
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
