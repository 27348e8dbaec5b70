"""Whether a loss comes back step after step, or is chance."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from profiler_wrapper.analysis.ranks.medians import Float, deviation, median
from profiler_wrapper.analysis.ranks.model import Bool, Int
from profiler_wrapper.analysis.ranks.what_if import Frame

LEAST_LOSS = 0.05  # of a step's time: less is no loss
_LEAST_OF_A_KIND = 0.1  # of it, of one kind by itself
_VIEWS = (("forward",), ("recompute", "backward"), ("data",), ("optimizer",), ("gc",), ("checkpoint",), ("other",))
FEW_STEPS = 5  # fewer tell little: what is said then must hold in each of them
_LEAST_LOSS_FEW = 0.2  # of a step's time, with so few
_CHANCE = 0.01  # of naming a rank where all are alike
_UNEVEN = 1.5  # ranks that are as good as alike may be hit so many times as often as others
_CAPPED_AT = 2.0  # a step counts with no more than so many times the loss that a quarter of the steps exceed
_LEAST_PRESENT = 0.25  # of the steps
_FEWEST_STRETCHES = 3  # of steps one after the other
_NEARLY_ALL = 0.85  # of the steps
_ERRORS = 4.0  # standard errors that are more than chance
_APART = 4.0  # times the typical difference of ranks
_BY_COIN = 0.04  # chance
_MOST_STEPS = 0.7
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of a mean


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """What one suspect cost, step by step."""

    gain_ns: Float  # (S,) T - T without it
    share: float  # of all lost time
    typical_share: float  # the same, with no step counting for many
    typical_gain: float  # of the step's time
    hit: Bool  # (S,) steps in which it cost something worth naming

    @property
    def steps(self) -> int:
        return int(self.hit.sum())


def weigh(frame: Frame, gain_ns: Float) -> Loss:
    """A suspect's part in the lost time. A step that is far out counts no more than others."""
    lost = frame.lost_ns
    cap = _CAPPED_AT * float(np.quantile(lost, 0.75))
    weight = np.divide(cap, lost, out=np.ones_like(lost), where=lost > cap) if cap > 0 else np.ones_like(lost)
    step = frame.step_ns
    return Loss(
        gain_ns=gain_ns,
        share=_share(gain_ns.sum(), lost.sum()),
        typical_share=_share((weight * gain_ns).sum(), (weight * lost).sum()),
        typical_gain=_share((weight * gain_ns).mean(), float(np.median(step))),
        hit=gain_ns >= LEAST_LOSS * np.maximum(step, float(np.median(step)) / 2),
    )


def recurs(loss: Loss) -> bool:
    """In a quarter of the steps, in each third of them, and again and again; of few steps, in all, and for much.

    One long stretch is not: that is chance as soon as what disturbs a step disturbs the next as well.
    """
    hit = loss.hit
    if len(hit) < FEW_STEPS:
        return bool(hit.all()) and loss.typical_gain >= _LEAST_LOSS_FEW
    thirds = np.array_split(hit, 3)
    stretches = int(hit[0]) + int((hit[1:] & ~hit[:-1]).sum())
    again = stretches >= _FEWEST_STRETCHES or bool(hit.mean() >= _NEARLY_ALL)
    return bool(hit.mean() >= _LEAST_PRESENT and again and all(third.any() for third in thirds))


def worth_naming(loss: Loss) -> bool:
    return loss.typical_gain >= LEAST_LOSS


def singled_out(loss: Loss, lossy: int, ranks: int, suspects: int = 1) -> bool:
    """Whether `suspects` of `ranks` are hit too often among `lossy` steps for chance, which hits all alike."""
    if lossy < 1 or ranks <= suspects:
        return False
    if lossy < FEW_STEPS:
        return loss.steps == lossy
    chance = min(0.75, _UNEVEN * suspects / ranks)
    return ranks * binomial_tail(loss.steps, lossy, chance) <= _CHANCE


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """How far each rank's typical step is from the typical rank of its stage, (R,)."""

    beyond_ns: Float  # median over steps
    error_ns: Float  # standard error of that
    apart_ns: Float  # how far ranks of its stage typically are from one another
    steady: Bool  # far in nearly all steps: of two ranks that are slow by turns, one has a median as well


def levels(frame: Frame, *kinds: str) -> Levels:
    """Of some kinds together. By medians over steps: what some steps have, or some ranks in turn, is not in them."""
    times = frame.own.of(*kinds)
    beyond, error, apart = (np.full(times.shape[1], np.nan) for _ in range(3))
    far_enough = np.zeros(times.shape[1], dtype=np.bool_)
    fewest = {steps: _fewest_steady(steps) for steps in np.unique(np.isfinite(times).sum(axis=0)).tolist()}
    for members in frame.groups:
        if len(members) < 2:
            continue
        own = times[:, members]
        middle = median(own, axis=1)[:, None]
        signed = own - middle if len(members) > 2 else 2 * (own - middle)  # of two: from the other one
        beyond[members] = median(signed, axis=0)
        noise = deviation(signed, axis=0)
        count = np.maximum(np.isfinite(signed).sum(axis=0), 1)
        error[members] = _MEDIAN_ERROR * np.maximum(noise, median(noise)) / np.sqrt(count)
        needed = np.array([fewest[steps] for steps in np.isfinite(signed).sum(axis=0).tolist()])
        far_enough[members] = (signed >= beyond[members] / 2).sum(axis=0) >= needed
        apart[members] = deviation(beyond[members]) if len(members) > 2 else 0.0
    return Levels(beyond_ns=beyond, error_ns=error, apart_ns=apart, steady=far_enough)


def steady(far: int, steps: int) -> bool:
    """Whether that is in more of the steps than a coin would have it, and in most."""
    return far >= _fewest_steady(steps)


@lru_cache(maxsize=256)
def _fewest_steady(steps: int) -> int:
    by_coin = bisect_left(range(steps), True, key=lambda far: binomial_tail(far, steps, 0.5) <= _BY_COIN)
    return max(by_coin, math.ceil(_MOST_STEPS * steps))


def slow_ranks(frame: Frame) -> tuple[Int, Float]:
    """Places of the ranks whose typical step is too long for chance, the slowest first, and by how much each is, (R,).

    Under half of a stage. All that a rank does is looked at, and each kind of it: that has less noise, but counts only
    where it is longer for much, and the whole is as well.
    """
    step = float(np.median(frame.step_ns))
    whole = levels(frame, *frame.own.kinds)
    beyond = np.where(_stands_apart(whole, LEAST_LOSS * step), np.nan_to_num(whole.beyond_ns), 0.0)
    for kinds in _VIEWS:
        part = levels(frame, *kinds)
        also = _stands_apart(part, _LEAST_OF_A_KIND * step) & (whole.beyond_ns >= part.beyond_ns / 2)
        beyond = np.maximum(beyond, np.where(also, np.nan_to_num(part.beyond_ns), 0.0))
    chosen: list[int] = []
    for members in frame.groups:
        these = members[beyond[members] > 0]
        if len(members) > 1 and len(these) <= max(1, (len(members) - 1) // 2):
            chosen.extend(these.tolist())
    chosen.sort(key=lambda place: -beyond[place])
    return np.array([place for place in chosen if beyond[place] >= beyond[chosen[0]] / 2], dtype=np.int64), beyond


def _stands_apart(found: Levels, least_ns: float) -> Bool:
    least = np.fmax(least_ns, np.fmax(_ERRORS * found.error_ns, _APART * found.apart_ns))
    return np.asarray(found.steady & (np.nan_to_num(found.beyond_ns) >= least))


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """Chance of at least so many successes."""
    if successes <= 0:
        return 1.0
    log, log_not = math.log(chance), math.log1p(-chance)
    whole = math.lgamma(trials + 1)
    logs = [
        whole - math.lgamma(count + 1) - math.lgamma(trials - count + 1) + count * log + (trials - count) * log_not
        for count in range(successes, trials + 1)
    ]
    return min(1.0, sum(math.exp(value) for value in logs))


def _share(part: float, whole: float) -> float:
    return float(min(1.0, part / whole)) if whole > 0 else 0.0
