"""What a job loses, and what it would gain without one suspect's slowness.

T, the time of a step where ranks meet once in it, is that of the rank that took longest for its own work: the others
wait for it. A rank's work is ideal when each kind of it takes as long as it typically does on the ranks of its stage in
that step (the median; of two ranks the quicker), garbage collection nothing, and stages all alike (the mean of them).
Then a suspect's share of the lost time is (T - T without it) / (T - T ideal), as in "Understanding Stragglers in Large
Model Training Using What-if Analysis" (OSDI 2025), with the meeting in the place of a replay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.statistics import OPEN, mad, median, split_number
from profiler_wrapper.ranks.model import COMPUTE, SELF_KINDS, Bool, Float, Int, LayerTimes, SelfTimes
from profiler_wrapper.ranks.times import comparable, largest

_OF_ITS_STAGE = (*COMPUTE, "optimizer", "communication")  # what differs from stage to stage by nature


@dataclass(frozen=True, slots=True, eq=False)
class IdealSteps:
    """Self times of the steady steps beside ideal ones. Times of a step: (S,); of ranks: (S, R)."""

    own: SelfTimes
    groups: list[Int]
    base: Float  # (S, R, K) what each kind would ideally take; nan as in own
    times: Float  # (S, R) self time, all kinds; -inf where not known
    ideals: Float  # (S, R) base, all kinds; -inf where not known
    step_ns: Float  # (S,) T
    ideal_ns: Float  # (S,) T ideal
    stage_ns: Float  # (S, G) ideal time of each group

    @property
    def lost_ns(self) -> Float:
        """T - T ideal of each step."""
        return np.asarray(np.maximum(self.step_ns - self.ideal_ns, 0.0))

    def excess(self, *kinds: str) -> Float:
        """What kinds took beyond their ideal, or less than it, (S, R); 0 where not known."""
        chosen = [self.own.kinds.index(kind) for kind in kinds if kind in self.own.kinds]
        beyond = (self.own.self_ns[:, :, chosen] - self.base[:, :, chosen]).sum(axis=2)
        return np.asarray(np.nan_to_num(beyond), dtype=np.float64)

    def gain(self, saved: Float) -> Float:
        """T - T without `saved`, which is (S, R) nanoseconds of self time."""
        return np.asarray(np.maximum(self.step_ns - (self.times - saved).max(axis=1), 0.0))

    def gain_of_kind(self, *kinds: str) -> Float:
        """With these kinds ideal on all ranks, (S,)."""
        return self.gain(np.maximum(self.excess(*kinds), 0.0))

    def gain_of_ranks(self, places: Int) -> Float:
        """With these ranks ideal, (S,)."""
        saved = np.zeros_like(self.times)
        saved[:, places] = np.maximum(self.excess(*self.own.kinds)[:, places], 0.0)
        return self.gain(saved)

    def gain_of_each_rank(self) -> Float:
        """With one rank ideal, for each, (S, R): only the longest of a step can gain anything."""
        gains = np.zeros_like(self.times)
        if self.times.shape[1] == 1:
            return gains
        steps = np.arange(len(self.times))
        longest = self.times.argmax(axis=1)
        others = np.partition(self.times, -2, axis=1)[:, -2]
        without = np.maximum(others, np.minimum(self.ideals[steps, longest], self.step_ns))
        gains[steps, longest] = np.maximum(self.step_ns - without, 0.0)
        return gains

    def gain_of_stage(self, group: int) -> Float:
        """With one stage as long as the mean of all, (S,)."""
        beyond = np.maximum(self.stage_ns[:, group] - self.stage_ns.mean(axis=1), 0.0)
        saved = np.zeros_like(self.times)
        saved[:, self.groups[group]] = beyond[:, None]
        return self.gain(saved)


def ideal_steps(own: SelfTimes) -> IdealSteps:
    """The frame of steps that all have at least one rank."""
    groups = comparable(own)
    base = np.full_like(own.self_ns, np.nan)
    alone = np.concatenate([members for members in groups if len(members) == 1] or [np.empty(0, dtype=np.int64)])
    for members in groups:
        base[:, members] = _typical(own, members, alone)
    base[:, :, [kind == "gc" for kind in own.kinds]] = 0.0  # ideal: none of it
    base[~np.isfinite(own.self_ns)] = np.nan
    sums, ideals = own.self_ns.sum(axis=2), base.sum(axis=2)
    stage_ns = np.stack([largest(ideals[:, members], axis=1) for members in groups], axis=1)
    stage_ns = np.where(np.isfinite(stage_ns), stage_ns, np.nanmean(stage_ns, axis=1, keepdims=True))
    times = np.where(np.isfinite(sums), sums, -np.inf)
    step_ns = times.max(axis=1)
    return IdealSteps(
        own=own,
        groups=groups,
        base=base,
        times=times,
        ideals=np.where(np.isfinite(ideals), ideals, -np.inf),
        step_ns=step_ns,
        ideal_ns=np.minimum(stage_ns.mean(axis=1), step_ns),
        stage_ns=stage_ns,
    )


def _typical(own: SelfTimes, members: Int, alone: Int) -> Float:
    """(S, members, K): what each kind typically takes on ranks that do the same."""
    times = own.self_ns[:, members]
    if len(members) > 2:
        typical = median(times, axis=1)[:, None]
    elif len(members) == 2:
        typical = -largest(-times, axis=1)[:, None]
    else:  # with nobody beside it: work is compared with its own of other steps, the rest with others' that are alone
        typical = np.broadcast_to(median(times, axis=0), times.shape).copy()
        apart = [place for place, kind in enumerate(own.kinds) if kind not in _OF_ITS_STAGE]
        if len(alone) > 1:
            typical[:, :, apart] = median(own.self_ns[:, alone][:, :, apart], axis=1)[:, None]
    return np.broadcast_to(typical, times.shape)


# --- whether a loss comes back step after step, or is chance ---


LEAST_LOSS = 0.05  # of a step's time: less is no loss
_LEAST_OF_A_KIND = 0.1  # of it, of one kind by itself
_VIEWS = (
    ("recompute", "backward"),
    *((kind,) for kind in SELF_KINDS if kind not in ("recompute", "backward", "communication")),
)
FEW_STEPS = 5  # fewer tell little: what is said then must hold in each of them
_LEAST_LOSS_FEW = 0.2  # of a step's time, with so few
_CHANCE = 0.01  # of naming a rank, or uneven load, where all are alike
_UNEVEN = 1.5  # ranks that are as good as alike may be hit so many times as often as others
_CAPPED_AT = 2.0  # a step counts with no more than so many times the loss that a quarter of the steps exceed
_LEAST_PRESENT = 0.25  # of the steps
_ERRORS = 4.0  # standard errors that are more than chance
_APART = 4.0  # times the typical difference of ranks
_FEWEST_STRETCHES = 3  # of steps one after the other
_WITHOUT_A_BREAK = 0.85  # of the steps
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of a mean


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """What one suspect cost, step by step."""

    gain_ns: Float  # (S,) T - T without it
    share: float  # of all lost time
    typical_share: float  # the same, with no step counting for many
    typical_gain: float  # of the step's time
    hit: Bool  # (S,) steps in which it cost something worth naming

    @property
    def steps(self) -> int:
        return int(self.hit.sum())

    @property
    def worth_naming(self) -> bool:
        return self.typical_gain >= LEAST_LOSS


def cost_of(ideal: IdealSteps, gain_ns: Float) -> Cost:
    """A suspect's part in the lost time. A step that is far out counts no more than others."""
    lost = ideal.lost_ns
    cap = _CAPPED_AT * float(np.quantile(lost, 0.75))
    weight = np.divide(cap, lost, out=np.ones_like(lost), where=lost > cap) if cap > 0 else np.ones_like(lost)
    step = ideal.step_ns
    return Cost(
        gain_ns=gain_ns,
        share=_share(gain_ns.sum(), lost.sum()),
        typical_share=_share((weight * gain_ns).sum(), (weight * lost).sum()),
        typical_gain=_share((weight * gain_ns).mean(), float(np.median(step))),
        hit=gain_ns >= LEAST_LOSS * np.maximum(step, float(np.median(step)) / 2),
    )


def recurs(cost: Cost) -> bool:
    """In a quarter of the steps, in each third of them, and again and again; of few steps, in all, and for much.

    One long stretch is not: that is chance as soon as what disturbs a step disturbs the next as well.
    """
    hit = cost.hit
    if len(hit) < FEW_STEPS:
        return bool(hit.all()) and cost.typical_gain >= _LEAST_LOSS_FEW
    stretches = int(hit[0]) + int((hit[1:] & ~hit[:-1]).sum())
    again = stretches >= _FEWEST_STRETCHES or bool(hit.mean() >= _WITHOUT_A_BREAK)
    return bool(hit.mean() >= _LEAST_PRESENT and again and all(third.any() for third in np.array_split(hit, 3)))


def nearly_all(steps: Int | int) -> Float:
    """How many steps are more than a rank has that takes turns with another: of few steps all.

    Of n steps it has n/2, give or take sqrt(n)/2: seven in ten, and half a step and 1.74 such deviations above n/2.
    """
    return np.minimum(steps, np.maximum(0.7 * steps, steps / 2 + 0.5 + 0.87 * np.sqrt(steps)))


def too_often(hits: int, steps: int, ranks: int) -> bool:
    """Whether one of `ranks` is hit in too many of `steps` for chance, which hits all alike.

    By Chernoff's bound: so many of n hits have at most the chance exp(-n KL(hits / n, p)).
    """
    if steps < FEW_STEPS:
        return ranks > 1 and 0 < steps == hits
    share, chance = hits / steps, min(0.75, _UNEVEN / ranks)
    if ranks < 2 or share <= chance:
        return False
    distance = share * math.log(share / chance)
    distance += (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return ranks * math.exp(-steps * distance) <= _CHANCE


def slow_ranks(ideal: IdealSteps) -> tuple[Int, Float]:
    """Places of the ranks whose typical step is too long for chance, the slowest first, and by how much each is, (R,).

    Under half of a stage. All that a rank does is looked at, and each kind of it: that has less noise, but counts only
    where it is longer for much, and the whole is as well.
    """
    step = float(np.median(ideal.step_ns))
    whole, far = _levels(ideal, LEAST_LOSS * step, *ideal.own.kinds)
    beyond = np.where(far, whole, 0.0)
    for kinds in _VIEWS:
        part, far = _levels(ideal, _LEAST_OF_A_KIND * step, *kinds)
        beyond = np.maximum(beyond, np.where(far & (whole >= part / 2), part, 0.0))
    chosen: list[int] = []
    for members in ideal.groups:
        these = members[beyond[members] > 0]
        if len(members) > 1 and len(these) <= max(1, (len(members) - 1) // 2):
            chosen.extend(these.tolist())
    chosen.sort(key=lambda place: -beyond[place])
    return np.array([place for place in chosen if beyond[place] >= beyond[chosen[0]] / 2], dtype=np.int64), beyond


def _levels(ideal: IdealSteps, least_ns: float, *kinds: str) -> tuple[Float, Bool]:
    """By how much a rank's typical step is longer than that of its stage's, and whether that is no chance, (R,) each.

    By medians over steps: what some steps have, or some ranks in turn, is not in them. It is no chance where it is
    `least_ns` or more, several standard errors, several times the typical difference of ranks, and there in nearly all
    steps: of two ranks that are slow by turns, one has a median as well.
    """
    times = ideal.own.of(*kinds)
    beyond, far = np.zeros(times.shape[1]), np.zeros(times.shape[1], dtype=np.bool_)
    for members in ideal.groups:
        if len(members) < 2:
            continue
        own = times[:, members]
        signed = (own - median(own, axis=1)[:, None]) * (2 if len(members) == 2 else 1)  # of two: from the other one
        typical, noise = median(signed, axis=0), mad(signed, axis=0)
        steps = np.maximum(np.isfinite(signed).sum(axis=0), 1)
        error = _MEDIAN_ERROR * np.maximum(noise, median(noise)) / np.sqrt(steps)
        apart = mad(typical) if len(members) > 2 else 0.0
        beyond[members] = np.nan_to_num(typical)
        least = np.fmax(least_ns, np.fmax(_ERRORS * error, _APART * apart))
        steady = (signed >= typical / 2).sum(axis=0) >= nearly_all(steps)
        far[members] = steady & (beyond[members] >= least)
    return beyond, far


def _share(part: float, whole: float) -> float:
    return float(min(1.0, part / whole)) if whole > 0 else 0.0


# --- another rank slow in each step: by its data, by one kind of work, or by chance ---


_LEAST = 0.15  # of its ideal compute
_LITTLE = 0.5  # of that by which compute is slower
_REST = ("data", "optimizer", "other")  # what long input leaves as it is
_SAME = 0.4  # of the steps have one rank longest in both
_BEYOND_CHANCE = 0.38  # of the steps, more than chance has it so
_FEWEST = 5  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """How forward and backward of a rank go together within a step, over the steps with a loss."""

    steps: int
    ranks: int
    same_rank: int  # steps whose longest forward and longest backward are of one rank
    inflation: float  # by how much the slowest rank's forward and backward each are beyond their ideal, relative to it
    other_inflation: float  # the same of the rest of its work, relative to that of compute

    @property
    def is_long_input(self) -> bool:
        """Forward and backward move together, the rest of the step does not."""
        return (
            self.steps >= _FEWEST
            and self.inflation >= _LEAST
            and not self.of_whole_rank
            and self.same_rank >= max(_SAME, 1 / self.ranks + _BEYOND_CHANCE) * self.steps
        )

    @property
    def of_whole_rank(self) -> bool:
        """Everything of the slowest rank is slower: its machine is, for a while."""
        return self.other_inflation >= _LITTLE


def movement(ideal: IdealSteps, lossy: Bool) -> Movement:
    """Of the steps marked in `lossy`, (S,): one at least; ranks are two at least."""
    forward = ideal.excess("forward")[lossy]
    backward = ideal.excess("recompute", "backward")[lossy]
    slowest = (forward + backward).argmax(axis=1)
    phases = (("forward",), ("recompute", "backward"))
    whole = _inflation(ideal, lossy, slowest, *COMPUTE)
    rest = _inflation(ideal, lossy, slowest, *_REST)
    return Movement(
        steps=len(forward),
        ranks=forward.shape[1],
        same_rank=int((forward.argmax(axis=1) == backward.argmax(axis=1)).sum()),
        inflation=min(_inflation(ideal, lossy, slowest, *kinds) for kinds in phases),
        other_inflation=max(0.0, rest) / whole if whole > 0 else 0.0,
    )


def stands_out(ideal: IdealSteps, lossy: Bool, kinds: tuple[str, ...]) -> float:
    """How many times as far from the typical rank as the next the slowest is, typically; 0 under four ranks."""
    excess = np.partition(np.maximum(ideal.excess(*kinds)[lossy], 1.0), -2, axis=1)
    return float(np.median(excess[:, -1] / excess[:, -2])) if excess.shape[1] >= 4 else 0.0


def _inflation(ideal: IdealSteps, lossy: Bool, slowest: Int, *kinds: str) -> float:
    """own / ideal - 1 of the slowest rank, the median over steps; 0 where it has none of these kinds."""
    steps = np.flatnonzero(lossy)
    excess = ideal.excess(*kinds)[steps, slowest]
    base = np.nan_to_num(ideal.own.of(*kinds)[steps, slowest] - excess)
    return float(np.median(np.divide(excess, base, out=np.zeros_like(base), where=base > 0)))


# --- one layer ---


_EXPLAINS = 0.5  # of what is to be explained
_NEXT = 0.5  # of it, by another layer, is no longer one layer's
_MOST_LAYERS = 0.5  # of the others within it
_FEWEST_EQUALS = 3  # beside it
_OUTLIER_RATIO = 1.5  # times its equals
_BEYOND_NOISE = 4.0  # deviations of its equals


class SlowLayer(NamedTuple):
    """A layer that takes longer than those `beside` which it stands, in a step."""

    layer: str
    excess_ns: float
    self_ns: float
    typical_ns: float
    beside: str

    def __str__(self) -> str:
        return f"{self.layer}: {ms(self.self_ns)} a step, {ms(self.typical_ns)} {self.beside}"


def ms(ns: float) -> str:
    """`12.3 ms`."""
    return f"{ns / 1e6:,.1f} ms"


def layer_of_rank(layers: LayerTimes, rank: int, excess_ns: float) -> SlowLayer | None:
    """The layer that makes a rank take `excess_ns` longer than others in a step, if it is one layer."""
    at = np.flatnonzero(layers.ranks == rank)
    if not len(at):
        return None
    times = layers.all_phases_ns
    others = np.flatnonzero((layers.stages == layers.stages[at[0]]) & (layers.ranks != rank))
    if len(others):
        of_stage = " of its stage" if len(np.unique(layers.stages)) > 1 else ""
        typical, beside = median(times[others], axis=0), f"on the other ranks{of_stage}"
    else:
        typical, beside = _of_equals(layers.layers, median(times, axis=0))[0], "in the layers like it"
    return _one(layers.layers, times[at[0]], typical, beside, excess_ns)


def outlier_layer(layers: LayerTimes, step_ns: float, least: float) -> SlowLayer | None:
    """The layer that takes longer than its equals on all ranks, by `least` of a step's time or more."""
    times = layers.all_phases_ns
    if not times.size:
        return None
    own = median(times, axis=0)
    typical, spread = _of_equals(layers.layers, own)
    excess = np.nan_to_num(own - typical, nan=-1.0)
    outlier = (excess >= least * step_ns) & (own >= _OUTLIER_RATIO * typical) & (excess >= _BEYOND_NOISE * spread)
    beyond = np.sort(times - typical, axis=0)[len(times) // 4]  # on all ranks, or nearly; of few on all
    outlier &= np.nan_to_num(beyond, nan=-1.0) >= 0.5 * excess
    if not outlier.any():
        return None
    own = np.where(outlier, own, typical)
    return _one(layers.layers, own, typical, "in the layers like it", float(excess[outlier].max()))


def _one(names: tuple[str, ...], own: Float, typical: Float, beside: str, excess_ns: float) -> SlowLayer | None:
    excess = np.nan_to_num(own - typical, nan=0.0)
    parts = [at for at in range(len(names)) if not _holds_the_model(names, at)]
    explains = [at for at in parts if excess[at] >= _EXPLAINS * excess_ns]
    if not explains or excess_ns <= 0:
        return None
    deepest = max(explains, key=lambda at: (names[at].count("."), excess[at]))
    within = f"{names[deepest]}."
    apart = [at for at in parts if not (f"{names[at]}.".startswith(within) or within.startswith(f"{names[at]}."))]
    if apart and excess[apart].max() > _NEXT * excess[deepest]:
        return None
    return SlowLayer(names[deepest], float(excess[deepest]), float(own[deepest]), float(typical[deepest]), beside)


def _holds_the_model(names: tuple[str, ...], at: int) -> bool:
    """The root, which goes by its class, or what holds most of the layers: no one layer."""
    name = names[at]
    if len(names) < 2:
        return False
    within = sum(other.startswith(f"{name}.") for other in names)
    return within > _MOST_LAYERS * (len(names) - 1) or ("." not in name and name[:1].isupper())


def _of_equals(names: tuple[str, ...], times: Float) -> tuple[Float, Float]:
    """The median and the deviation of each name's equals, which differ in their last number only; nan of too few."""
    equals: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        pattern, number = split_number(name)
        if number is not None and OPEN in pattern:
            equals[pattern].append(place)
    typical, spread = np.full((2, len(names)), np.nan)
    for places in equals.values():
        if len(places) > _FEWEST_EQUALS:
            typical[places], spread[places] = median(times[places]), mad(times[places])
    return typical, spread
