"""Who or what slows a job, in one sentence, from the answers to the one question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from profiler_wrapper.errors import first_few
from profiler_wrapper.ranks import model, suspects
from profiler_wrapper.ranks.account import KINDS
from profiler_wrapper.ranks.excess import COMPUTES, LEAST_SHARE_OF_STEP, Job
from profiler_wrapper.ranks.model import BETWEEN, COMPUTE, Cause
from profiler_wrapper.ranks.question import Answer
from profiler_wrapper.ranks.times import MANY_STEPS, SOME_STEPS
from profiler_wrapper.trace.spans import ranges

FEWEST_STEPS = 3  # fewer tell nothing
_CAUSES: dict[str, Cause] = {
    "data": "data loading",
    "gc": "garbage collection",
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
}
# What a suspect is called, and the cause of it; None: that of its kinds.
_CALLED: dict[str, tuple[model.VerdictName, Cause | None]] = {
    "host": ("host", None),
    "stage": ("stage", "slow stage"),
    "link": ("link", "communication"),
    "group": ("group", "communication"),
    "unrecorded": ("unrecorded", "late collective"),
    "background": ("save", "checkpoint"),
    "uneven": ("imbalance", "data imbalance"),
    "turns": ("imbalance", None),
    "all": ("steps", None),
}
_CALLED_BY_KIND: dict[tuple[str, ...], model.VerdictName] = {("data",): "data", ("gc",): "gc", ("checkpoint",): "save"}
OUTSIDE = "what it does outside its phases"
MOST_ERROR = 0.05  # of a step, by which the graph may miss when communications begin
_DOES = {"other": OUTSIDE, BETWEEN: "what it does between steps", "checkpoint": "its saving"}


def ms(ns: float) -> str:
    """`12.3 ms`."""
    return f"{ns / 1e6:,.1f} ms"


def unknown(name: str, taken_ns: float, step_ns: float, steps: int) -> model.Verdict:
    """The verdict where most of a step is one call that waits for the device: phases are launches."""
    sentence = (
        f"Cannot tell: {ms(taken_ns)} of a step's {ms(step_ns)} are in {name}, which waits for the device, and the "
        "other phases are launches; let the timers use device events."
    )
    return model.Verdict(verdict="unknown", sentence=sentence, wall_ns=step_ns, steps=steps)


def verdict_of(job: Job, answer: Answer, *, notes: Sequence[str] = ()) -> model.Verdict:
    """The verdict, its evidence, and all suspects."""
    account = job.account
    steps = int(job.judged.sum())
    ranks = len(account.ranks)
    if steps < FEWEST_STEPS or not ranks:
        sentence = (
            f"No verdict: {steps} steps of {ranks} ranks are too few to tell a straggler from chance; "
            f"record {MANY_STEPS} steps or more."
        )
        return model.Verdict(verdict="none", sentence=sentence, steps=steps)
    certain = answer.error <= MOST_ERROR and job.measured
    if answer.error > MOST_ERROR and job.ordered:
        notes = (
            *notes,
            f"when communications begin is predicted to {100 * answer.error:.0f} % of a step only: "
            "what the job would gain is at most this",
        )
    if not job.measured and ranks > 1:
        notes = (*notes, "nothing tells who meets whom: waiting is estimated, and what is slow on all may be one rank")
    found = _each_once(_suspect(job, answer, one) for one in answer.suspects if one.gain_ns > 0)
    causes = tuple(_suspect(job, answer, one) for one in answer.causes)
    verdict = model.Verdict(
        verdict="none",
        sentence=_nobody(ranks, answer),
        step_ns=answer.step_ns,
        wall_ns=answer.step_ns,
        ideal_ns=answer.step_ns - answer.lost_ns,
        confidence=_confidence(steps, certain=certain),
        steps=steps,
        evidence=tuple(notes),
        suspects=found,
        causes=causes,
    )
    if not causes:
        if job.absent:
            why = " Whether a rank that was not recorded is one cannot be told."
            return replace(verdict, sentence=verdict.sentence + why, confidence="low")
        return verdict
    first, *others = causes
    likely = "Most likely: " if answer.error > MOST_ERROR else ""
    sentence = (
        f"{likely}{_what(job, answer.causes[0], first)}; without it a step of {ms(answer.step_ns)} would be "
        f"{ms(first.lost_ns)} shorter, {100 * first.share:.0f} % of the lost time."
    )
    evidence = list(first.evidence)
    for x, one in zip(answer.causes[1:], others, strict=True):
        evidence.append(f"then: {_what(job, x, one)}; {ms(one.lost_ns)} a step more")
    fields = ("verdict", "cause", "rank", "stage", "layer", "share", "lost_ns", "named_ranks", "host", "group", "phase")
    if answer.causes[0].what == "unrecorded" or job.absent:
        verdict = replace(verdict, confidence="low")
    return replace(
        verdict,
        sentence=sentence,
        evidence=(*evidence, *notes),
        first_step=first.first_step,
        last_step=first.last_step,
        **{name: getattr(first, name) for name in fields},
    )


def _each_once(suspects: Iterable[model.Suspect]) -> tuple[model.Suspect, ...]:
    """The greatest gain first. Of those that read alike, as all of a rank and what it computes, the first counts."""
    found: dict[tuple[object, ...], model.Suspect] = {}
    for one in suspects:
        said = one.verdict, one.cause, one.named_ranks, one.stage, one.layer, one.host, one.group, one.phase
        found.setdefault(said, one)
    return tuple(found.values())


def _confidence(steps: int, *, certain: bool) -> model.Confidence:
    if not certain:
        return "medium" if steps >= MANY_STEPS else "low"
    return "high" if steps >= MANY_STEPS else "medium" if steps >= SOME_STEPS else "low"


def _nobody(ranks: int, answer: Answer) -> str:
    if ranks == 1:
        return f"No straggler: there is one rank, of {ms(answer.step_ns)} a step."
    share = answer.lost_ns / answer.step_ns if answer.step_ns else 0.0
    little = share < LEAST_SHARE_OF_STEP
    return (
        f"No straggler: ranks differ by {ms(answer.lost_ns)} of a step's {ms(answer.step_ns)} ({100 * share:.0f} %), "
        + ("which is little." if little else "spread over all of them.")
    )


def _suspect(job: Job, answer: Answer, one: suspects.Suspect) -> model.Suspect:
    account = job.account
    named = tuple(int(account.ranks[at]) for at in one.ranks)
    numbers = account.steps[one.steps].tolist()
    group = job.label_groups[one.label] if one.label >= 0 else None
    verdict, called = _CALLED.get(one.what, ("rank", None))
    cause = called or _cause_of(one.kinds)
    if one.what not in _CALLED or one.what == "all":
        verdict = _CALLED_BY_KIND.get(one.kinds, verdict)
    if one.layer is not None:
        verdict, cause = "stage" if one.what == "all" else verdict, "slow layer"
    phase = one.kinds[0] if len(one.kinds) == 1 and one.label < 0 else "backward" if cause == "backward" else None
    more_tokens = _more_tokens(job, one)
    if more_tokens:
        verdict, cause = "imbalance", "data imbalance"
    lost = answer.lost_ns
    return model.Suspect(
        verdict=verdict,
        cause=cause,
        rank=named[0] if named and (one.what in ("rank", "ranks", "tied") or len(named) == 1) else None,
        stage=one.stage if one.what in ("rank", "ranks", "tied", "stage", "host") else None,
        layer=one.layer,
        share=min(1.0, one.gain_ns / lost) if lost > 0 else 0.0,
        lost_ns=one.gain_ns,
        steps=len(numbers),
        evidence=_evidence(job, one, more_tokens),
        named_ranks=named if one.what != "all" else (),
        host=one.host,
        group=group,
        phase=None if one.layer or one.what == "background" else phase,
        first_step=numbers[0] if numbers else None,
        last_step=numbers[-1] if numbers else None,
    )


def _cause_of(kinds: tuple[str, ...]) -> Cause:
    if len(kinds) == 1:
        return _CAUSES.get(kinds[0], "other")
    if set(kinds) <= {"recompute", "backward"}:
        return "backward"
    return "compute" if set(kinds) & set(COMPUTE) else "other"


def _more_tokens(job: Job, one: suspects.Suspect) -> float | None:
    """By which share ranks that compute longer have more tokens than others; 0: they are slower; None: not known."""
    places = [KINDS.index(kind) for kind in one.kinds if kind in COMPUTES]
    others = np.delete(np.arange(len(job.stages)), one.ranks)
    if one.what not in ("rank", "ranks", "host") or not places or not len(others):
        return None
    mine, theirs = job.account.tokens[one.steps][:, one.ranks], job.account.tokens[one.steps][:, others]
    if not (np.isfinite(mine).any() and np.isfinite(theirs).any()):
        return None
    more = float(np.nanmean(mine) / np.nanmedian(theirs) - 1)
    taken = float(np.nanmean(job.account.own_ns[one.steps][:, one.ranks][:, :, places].sum(axis=2)))
    longer = one.excess_ns / max(1.0, taken - one.excess_ns)
    return more if more > longer / 2 else 0.0  # most of what they take longer


def _evidence(job: Job, one: suspects.Suspect, more_tokens: float | None) -> tuple[str, ...]:
    account, work, rank_of_work = job.account, job.account.work, job.rank_of_work
    rows, less_ns = one.change.rows, one.change.less_ns
    found = []
    if one.label >= 0:
        found.append(f"its transfer takes {ms(one.typical_ns + one.excess_ns)} a step, {ms(one.typical_ns)} is typical")
    if one.what == "stage":
        found.append(f"what its ranks compute takes {ms(one.excess_ns)} a step more than that of other stages")
    if more_tokens is not None:
        more = f"its tokens are {100 * more_tokens:.0f} % more than those of others"
        found.append(more if more_tokens else "with as many tokens as others")
    for rank in one.ranks[:2] if one.label < 0 and one.what != "stage" else ():
        for kind in one.kinds:
            place = KINDS.index(kind)
            mine = (rank_of_work[rows] == rank) & (work.kind[rows] == place)
            if mine.any():
                steps = np.unique(work.step[rows[mine]])
                taken, more = ms(account.own_ns[steps, rank, place].mean()), ms(less_ns[mine].sum() / len(steps))
                found.append(f"{kind} of rank {account.ranks[rank]}: {taken} a step, {more} more than typical")
    judged = int(job.judged.sum())
    if 0 < one.steps.sum() < judged:
        found.append(f"in {int(one.steps.sum())} of {judged} steps: {ranges(account.steps[one.steps].tolist())}")
    return tuple(found)


def _what(job: Job, one: suspects.Suspect, said: model.Suspect) -> str:
    ranks = [str(rank) for rank in said.named_ranks]
    since = _since(job, one)
    if one.what == "unrecorded":
        name = job.label_names[one.label]
        return f"Most likely a rank that was not recorded is the straggler: all others wait in {name}{since}"
    if one.what == "background":
        whose = f"rank {ranks[0]} is" if len(ranks) == 1 else "ranks are"
        return f"Slower while something runs beside it, as a save in the background: {whose}{since} (coincides)"
    if one.label >= 0:
        name = job.label_names[one.label]
        return f"The {name} of ranks {first_few(ranks, 8)} ({said.group}) is slow{since}"
    does = _of_kinds(one)
    if said.layer is not None:
        does = f"its {said.layer} takes longer"
    if one.what == "turns":
        return f"Another rank in each step is slower, or is given more: {does}{since}"
    if one.what == "uneven":
        return f"The load is uneven: another rank gets more work in each step{since}"
    if one.what == "all" and said.layer is not None:
        return f"{said.layer} takes longer on all ranks{since}"
    if one.what == "all":
        return f"All ranks take longer for {' and '.join(one.kinds)}{since}"
    if one.what == "host":
        return f"Host {one.host} is slow (ranks {first_few(ranks, 8)}): {does}{since}"
    if one.what == "stage":
        return f"Stage {one.stage} is slower than the others{since}"
    if said.verdict == "imbalance":
        if len(ranks) > 1:
            return f"Ranks {first_few(ranks, 8)} get more work than others: {does.replace('its', 'their')}{since}"
        return f"Rank {ranks[0]} gets more work than others: {does}{since}"
    if len(ranks) > 1:
        return f"Ranks {first_few(ranks, 8)} are the stragglers, equally slow: {does.replace('its', 'their')}{since}"
    if said.verdict in ("data", "gc"):
        return f"{said.cause.capitalize()} of rank {ranks[0]} holds the others up{since}"
    return f"Rank {ranks[0]} is the straggler: {does}{since}"


def _of_kinds(one: suspects.Suspect) -> str:
    if len(one.kinds) == 1:
        return _DOES.get(one.kinds[0], f"its {one.kinds[0]}") + " takes longer"
    if set(one.kinds) <= {"recompute", "backward"}:
        return "its backward takes longer"
    if set(one.kinds) & set(COMPUTE):
        return "its forward and backward take longer"
    return "it takes longer outside its phases"


def _since(job: Job, one: suspects.Suspect) -> str:
    places = np.flatnonzero(one.steps)
    judged = np.flatnonzero(job.judged)
    if not len(places) or len(places) == len(judged):
        return ""
    if np.array_equal(places, judged[-len(places) :]):
        return f", since step {job.account.steps[places[0]]}, still so at the end"
    return f", in {len(places)} of {len(judged)} steps"
