"""What a step would take without somebody's slowness, where ranks meet once a step.

T, the time of a step, is that of the rank that took longest for its own work: the others wait for it. A rank's work is
ideal when each kind of it takes as long as it typically does on the ranks of its stage in that step (the median; of two
ranks the quicker), garbage collection nothing, and stages all alike (the mean of them). Then a suspect's share of the
lost time is (T - T without it) / (T - T ideal). The frame is that of "Understanding Stragglers in Large Model Training
Using What-if Analysis" (OSDI 2025), with the meeting in the place of a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.ranks.groups import comparable
from profiler_wrapper.analysis.ranks.medians import Float, largest, median
from profiler_wrapper.analysis.ranks.model import COMPUTE, Int, OwnTimes

_AVOIDABLE = ("gc",)  # ideal: none of it
_OF_ITS_STAGE = (*COMPUTE, "optimizer", "communication")  # what differs from stage to stage by nature


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Own times of the judged steps beside ideal ones. Times of a step: (S,); of ranks: (S, R)."""

    own: OwnTimes
    groups: list[Int]
    base: Float  # (S, R, K) what each kind would ideally take; nan as in own
    times: Float  # (S, R) own time, all kinds; -inf where not known
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
        beyond = (self.own.own_ns[:, :, chosen] - self.base[:, :, chosen]).sum(axis=2)
        return np.asarray(np.nan_to_num(beyond), dtype=np.float64)

    def gain(self, saved: Float) -> Float:
        """T - T without `saved`, which is (S, R) nanoseconds of the ranks' own time."""
        return np.asarray(np.maximum(self.step_ns - (self.times - saved).max(axis=1), 0.0))

    def gain_of_kind(self, *kinds: str) -> Float:
        """With these kinds ideal on all ranks, (S,)."""
        return self.gain(np.maximum(self.excess(*kinds), 0.0))

    def gain_of_ranks(self, places: Int, *kinds: str) -> Float:
        """With these ranks ideal, or these kinds on them, (S,)."""
        saved = np.zeros_like(self.times)
        saved[:, places] = np.maximum(self.excess(*(kinds or self.own.kinds))[:, places], 0.0)
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

    def stage_times(self) -> Float:
        """What the typical rank of each group worked in each step, (S, G)."""
        times = np.where(np.isfinite(self.times), self.times, np.nan)
        return np.stack([median(times[:, members], axis=1) for members in self.groups], axis=1)

    def gain_of_stage(self, group: int) -> Float:
        """With one stage as long as the mean of all, (S,)."""
        beyond = np.maximum(self.stage_ns[:, group] - self.stage_ns.mean(axis=1), 0.0)
        saved = np.zeros_like(self.times)
        saved[:, self.groups[group]] = beyond[:, None]
        return self.gain(saved)


def frame(own: OwnTimes) -> Frame:
    """The frame of steps that all have at least one rank."""
    groups = comparable(own)
    base = np.full_like(own.own_ns, np.nan)
    alone = np.concatenate([members for members in groups if len(members) == 1] or [np.empty(0, dtype=np.int64)])
    for members in groups:
        base[:, members] = _typical(own, members, alone)
    base[:, :, [own.kinds.index(kind) for kind in _AVOIDABLE if kind in own.kinds]] = 0.0
    base[~np.isfinite(own.own_ns)] = np.nan
    sums, ideals = own.own_ns.sum(axis=2), base.sum(axis=2)
    stage_ns = np.stack([largest(ideals[:, members], axis=1) for members in groups], axis=1)
    stage_ns = np.where(np.isfinite(stage_ns), stage_ns, np.nanmean(stage_ns, axis=1, keepdims=True))
    times = np.where(np.isfinite(sums), sums, -np.inf)
    step_ns = times.max(axis=1)
    return Frame(
        own=own,
        groups=groups,
        base=base,
        times=times,
        ideals=np.where(np.isfinite(ideals), ideals, -np.inf),
        step_ns=step_ns,
        ideal_ns=np.minimum(stage_ns.mean(axis=1), step_ns),
        stage_ns=stage_ns,
    )


def _typical(own: OwnTimes, members: Int, alone: Int) -> Float:
    """(S, members, K): what each kind typically takes on ranks that do the same."""
    times = own.own_ns[:, members]
    if len(members) > 2:
        typical = median(times, axis=1)[:, None]
    elif len(members) == 2:
        typical = -largest(-times, axis=1)[:, None]
    else:  # with nobody beside it: work is compared with its own of other steps, the rest with others' that are alone
        typical = np.broadcast_to(median(times, axis=0), times.shape).copy()
        apart = [place for place, kind in enumerate(own.kinds) if kind not in _OF_ITS_STAGE]
        if len(alone) > 1:
            typical[:, :, apart] = median(own.own_ns[:, alone][:, :, apart], axis=1)[:, None]
    return np.broadcast_to(typical, times.shape)
