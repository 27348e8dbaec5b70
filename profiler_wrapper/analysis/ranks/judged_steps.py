"""The steps that are judged, and each rank's own time in them: what the verdict and all averages are of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.levelled import without_waiting
from profiler_wrapper.analysis.ranks.model import Int, OwnTimes, WaitingSource

SOME_STEPS, MANY_STEPS = 5, 10  # for medium and high confidence
_WARM_UP = 1.5  # times the median of the steps after it
_MOST_WARM_UP = 3  # steps
_ALONE = "one rank alone does not tell what it waited for others: that is in the time of its communication"
_NOTHING_TELLS = "no communication was recorded, and no phase levels the ranks: phases may hold waiting"


def judged_steps(own: OwnTimes) -> tuple[OwnTimes, list[str]]:
    """The steps that can be judged: known of half the ranks at least, warm-up left out. And what is left out."""
    known = np.asarray(np.isfinite(own.own_ns).all(axis=2))
    share = known.mean(axis=1)
    kept = np.flatnonzero((share > 0) & (share >= 0.5 * share.max(initial=0.0)))
    left_out = []
    if len(kept) < len(share):
        left_out.append(f"{len(share) - len(kept)} steps were not judged: too few ranks have them")
    longest = np.where(known, own.own_ns.sum(axis=2), -np.inf).max(axis=1, initial=-np.inf)[kept]
    warm_up = 0
    while (
        warm_up < min(_MOST_WARM_UP, max(1, len(longest) // 5))
        and len(longest) - warm_up > SOME_STEPS
        and longest[warm_up] > _WARM_UP * np.median(longest[warm_up + 1 :])
    ):
        warm_up += 1
    if warm_up:
        left_out.append(
            f"the first {warm_up} steps were left out as warm-up"
            if warm_up > 1
            else "the first step was left out as warm-up"
        )
        kept = kept[warm_up:]
    return _of_steps(own, kept), left_out


def judged_times(own: OwnTimes) -> OwnTimes:
    """Own times in these steps, what was waited for others taken out of them, also where it has to be estimated.

    Where no step can be judged, all of them are told.
    """
    judged, _ = judged_steps(own)
    return without_waiting(judged if len(judged.steps) else own)


def with_waiting_of_one(own: OwnTimes) -> OwnTimes:
    """Of one rank nothing tells a transfer from waiting: all of its communication is its own time."""
    if len(own.ranks) != 1:
        return own
    times = own.own_ns.copy()
    times[:, :, own.kinds.index("communication")] += own.waiting_ns
    return replace(own, own_ns=times, waiting_ns=np.where(np.isfinite(own.waiting_ns), 0.0, np.nan))


def waiting_source(own: OwnTimes) -> tuple[WaitingSource, str | None]:
    """How the waiting in judged own times is known, and why it is not."""
    if len(own.ranks) == 1:
        return "unknown", _ALONE
    if own.waiting_known:
        return "measured", None
    if np.nansum(own.waiting_ns) > 0:
        return "estimated", None
    return "unknown", _NOTHING_TELLS


def _of_steps(own: OwnTimes, kept: Int) -> OwnTimes:
    return replace(
        own,
        steps=own.steps[kept],
        own_ns=own.own_ns[kept],
        waiting_ns=own.waiting_ns[kept],
        wall_ns=own.wall_ns[kept],
        begin_ns=own.begin_ns[kept],
    )
