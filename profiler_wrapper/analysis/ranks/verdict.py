"""Who slows the job, in one sentence: a rank, a stage, its data, garbage collection, or nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.causes import suspects
from profiler_wrapper.analysis.ranks.judged_steps import MANY_STEPS, SOME_STEPS, judged_steps, waiting_source
from profiler_wrapper.analysis.ranks.levelled import without_waiting
from profiler_wrapper.analysis.ranks.model import (
    Arrivals,
    Confidence,
    LayerTimes,
    OwnTimes,
    Replay,
    Suspect,
    Verdict,
)
from profiler_wrapper.analysis.ranks.persistence import LEAST_LOSS
from profiler_wrapper.analysis.ranks.rank_suspects import Weighed
from profiler_wrapper.analysis.ranks.what_if import Frame, frame

_FEWEST_STEPS = 3  # fewer: nothing is said
LATE = "it comes late to the collectives though its phases are no longer"
OUTSIDE = "it spends longer outside its phases"
_CLEAR = 0.7  # of the lost time
_NEAR = 0.7  # of the greatest loss: told apart by what says more
_SLOWDOWN = 1.05  # by replay: less is no loss


def judge(
    own: OwnTimes, arrivals: Arrivals | None = None, layers: LayerTimes | None = None, replay: Replay | None = None
) -> Verdict:
    """The verdict over all steps, with its evidence and everything that was weighed."""
    own, left_out = judged_steps(own)
    if len(own.steps) < _FEWEST_STEPS or not len(own.ranks):
        return _too_little(own)
    own = without_waiting(own)
    times = frame(own)
    weighed = suspects(times, arrivals, layers)
    step_ns, ideal_ns = float(times.step_ns.mean()), float(times.ideal_ns.mean())
    if len(times.groups) > 1 and replay is not None:  # without stages all ranks meet: a replay knows nothing more
        weighed = [_by_replay(one, times, replay) for one in weighed]
        step_ns, ideal_ns = replay.total_ns / max(1, replay.steps), replay.ideal_ns / max(1, replay.steps)
        left_out.append(_replayed(own, step_ns))
    found = _chosen(weighed)
    common = {
        "step_ns": step_ns,
        "ideal_ns": ideal_ns,
        "steps": len(own.steps),
        "ms": replay.ms if replay else None,
        "mw": replay.mw if replay else None,
        "suspects": _each_once(weighed),
    }
    notes = [*left_out, *_notes(own)]
    if found is None:
        return Verdict(
            verdict="none",
            sentence=_no_straggler(len(own.ranks), step_ns, ideal_ns),
            confidence=_confidence(own, _unexplained(times, weighed)),
            evidence=(*_why_none(times, weighed), *notes),
            **common,  # type: ignore[arg-type]
        )
    suspect = found.suspect
    return Verdict(
        verdict=suspect.verdict,
        cause=suspect.cause,
        sentence=_sentence(suspect, step_ns),
        rank=suspect.rank,
        stage=suspect.stage,
        layer=suspect.layer,
        share=suspect.share,
        lost_ns=suspect.lost_ns,
        confidence=_confidence(own, found.loss.typical_share),
        evidence=(*suspect.evidence, *notes),
        **common,  # type: ignore[arg-type]
    )


def _each_once(weighed: list[Weighed]) -> tuple[Suspect, ...]:
    """The greatest share first. What was found in two ways, as data loading of a slow rank, counts as the greater."""
    found: dict[tuple[object, ...], Suspect] = {}
    for one in sorted(weighed, key=lambda one: -one.suspect.share):
        suspect = one.suspect
        found.setdefault((suspect.verdict, suspect.cause, suspect.rank, suspect.stage, suspect.layer), suspect)
    return tuple(found.values())


def _chosen(weighed: list[Weighed]) -> Weighed | None:
    """The one with most of the loss; of those with about as much, the one that says most."""
    certain = [one for one in weighed if one.certain]
    if not certain:
        return None
    most = max(one.loss.typical_gain for one in certain)
    near = [one for one in certain if one.loss.typical_gain >= _NEAR * most]
    return min(near, key=lambda one: (one.suspect.rank is None, one.suspect.layer is None, -one.loss.typical_gain))


def _by_replay(one: Weighed, times: Frame, replay: Replay) -> Weighed:
    """Shares of ranks and stages as the replay of dependencies has them: it knows who waits for whom."""
    suspect = one.suspect
    if suspect.layer is not None or suspect.verdict not in ("rank", "stage"):
        return one
    if suspect.verdict == "stage":
        at = np.flatnonzero(replay.stages == suspect.stage)
        shares = replay.share_of_stage
    else:
        at = np.flatnonzero(replay.ranks == suspect.rank)
        shares = replay.share_of_rank
    if not len(at) or not np.isfinite(shares[at[0]]):
        return one
    share = float(shares[at[0]])
    per_step = (replay.total_ns - replay.ideal_ns) / max(1, replay.steps or len(times.step_ns))
    gain = share * (replay.slowdown - 1)
    return Weighed(
        replace(suspect, share=share, lost_ns=share * per_step),
        replace(one.loss, share=share, typical_share=min(1.0, share), typical_gain=gain),
        one.certain and replay.slowdown >= _SLOWDOWN and gain >= LEAST_LOSS,
    )


def _replayed(own: OwnTimes, step_ns: float) -> str:
    recorded = float(np.nanmean(own.wall_ns))
    return (
        f"{step_ns / 1e6:,.1f} ms is the step replayed: each operation begins as soon as what it needs is there; "
        f"recorded, with what lies between them, it takes {recorded / 1e6:,.1f} ms"
    )


def _too_little(own: OwnTimes) -> Verdict:
    steps, ranks = len(own.steps), len(own.ranks)
    what = f"{steps} step{'s' if steps != 1 else ''} of {ranks} rank{'s' if ranks != 1 else ''}"
    return Verdict(
        verdict="none",
        sentence=f"No verdict: {what} are too few to tell a straggler from chance; record {MANY_STEPS} steps or more.",
        steps=steps,
    )


def _notes(own: OwnTimes) -> list[str]:
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


def _confidence(own: OwnTimes, share: float) -> Confidence:
    steps = len(own.steps)
    if steps >= MANY_STEPS and share >= _CLEAR and own.waiting_known:
        return "high"
    return "medium" if steps >= SOME_STEPS else "low"


def _no_straggler(ranks: int, step_ns: float, ideal_ns: float) -> str:
    if ranks == 1:
        return f"No straggler: there is one rank, of {step_ns / 1e6:,.1f} ms a step."
    lost = max(0.0, step_ns - ideal_ns)
    unsure = "and no rank, stage or cause surely has most of that."
    return (
        f"No straggler: ranks differ by {lost / 1e6:,.1f} ms of a step's {step_ns / 1e6:,.1f} ms "
        f"({lost / step_ns if step_ns > 0 else 0.0:.0%}), "
        + (unsure if lost >= LEAST_LOSS * step_ns else "which is little.")
    )


def _unexplained(times: Frame, weighed: list[Weighed]) -> float:
    """How much of what is lost has no likely cause; all of it where little is lost."""
    if not weighed or times.lost_ns.mean() < LEAST_LOSS * times.step_ns.mean():
        return 1.0
    return 1.0 - weighed[0].loss.share


def _why_none(times: Frame, weighed: list[Weighed]) -> list[str]:
    if not weighed:
        return []
    most = weighed[0]
    return [
        f"the likeliest, {_likely(most.suspect)}, would be {most.suspect.share:.0%} of the lost time, "
        f"in {most.loss.steps} of {len(times.step_ns)} steps: not sure enough"
    ]


def _sentence(suspect: Suspect, step_ns: float) -> str:
    return (
        f"{_what(suspect)}; without it a step of {step_ns / 1e6:,.1f} ms would be "
        f"{suspect.lost_ns / 1e6:,.1f} ms shorter, {_share_text(suspect.share)}."
    )


def _share_text(share: float) -> str:
    """What is lost is lost against all being typical. Where the others are quicker than that, more can be gained."""
    if share <= 1.0:
        return f"{share:.0%} of the lost time"
    return (
        f"which is all of the lost time and more ({share:.0%}): that is counted against a job in which all are as "
        "quick as the typical one, and the others are quicker"
    )


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


def _likely(suspect: Suspect) -> str:
    if suspect.verdict == "imbalance":
        return f"{suspect.cause} on another rank in each step"
    if suspect.rank is not None:
        return f"{suspect.cause} of rank {suspect.rank}"
    return f"stage {suspect.stage}" if suspect.verdict == "stage" else suspect.cause
