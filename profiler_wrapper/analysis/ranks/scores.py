"""How quick each rank is: beside the quickest of its stage, and beside its own best."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.ranks.groups import comparable
from profiler_wrapper.analysis.ranks.medians import Float, median
from profiler_wrapper.analysis.ranks.model import Bool, OwnTimes, Scores

SLOW = 0.75  # a score under it
WINDOWS = 3  # so many in a row are flagged
_MOST_WINDOWS = 100
_FEWEST_WINDOWS = 6  # where there are steps enough


def score(own: OwnTimes, *, window: int | None = None) -> Scores:
    """Scores over windows of `window` steps; by default a hundred windows at most, six at least where steps suffice."""
    steps = len(own.steps)
    width = window or max(1, min(10, steps // _FEWEST_WINDOWS), -(-steps // _MOST_WINDOWS))
    count = steps // width if steps >= width else 0
    times = own.own_ns.sum(axis=2)[: count * width].reshape(count, width, len(own.ranks))
    typical = median(times, axis=1)  # (W, R)
    relative = np.full_like(typical, np.nan)
    for members in comparable(own):
        known = np.where(np.isfinite(typical[:, members]), typical[:, members], np.inf)
        quickest = known.min(axis=1, initial=np.inf, keepdims=True)
        relative[:, members] = _ratio(np.broadcast_to(quickest, known.shape), typical[:, members])
    best = np.minimum.accumulate(np.where(np.isfinite(typical), typical, np.inf), axis=0)
    individual = _ratio(best, typical)
    return Scores(
        window=width,
        first_steps=own.steps[: count * width : width],
        relative=relative,
        individual=individual,
        flagged_relative=_flagged(relative),
        flagged_individual=_flagged(individual),
    )


def _ratio(best: Float, now: Float) -> Float:
    """1 where both are 0; nan where not known."""
    known = np.isfinite(now) & np.isfinite(best)
    ratio = np.divide(best, now, out=np.ones_like(now), where=known & (now > 0))
    return np.where(known, ratio, np.nan)


def _flagged(scores: Float) -> Bool:
    """Under SLOW in three windows in a row."""
    low = scores < SLOW  # nan is not
    if len(low) < WINDOWS:
        return np.zeros(scores.shape[1], dtype=np.bool_)
    runs = np.logical_and.reduce([low[at : len(low) - WINDOWS + 1 + at] for at in range(WINDOWS)])
    return np.asarray(runs.any(axis=0))
