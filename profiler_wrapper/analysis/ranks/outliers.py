"""Ranks that stand out of all, by a typical value and a spread that they themselves don't move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.ranks.medians import MAD_TO_SIGMA, median
from profiler_wrapper.analysis.ranks.model import Float, Int

_SPREADS = 4.0  # beyond the median
_SHARE = 0.1  # and at least this much longer than the median


class OverRanks(NamedTuple):
    """One time over the ranks that have it, in the unit of what was given."""

    typical: float  # the median; of two the quicker
    spread: float  # 1.48 times the median deviation
    outliers: tuple[int, ...]  # ranks far beyond, the slowest first


def typical(values: Float, axis: int) -> Float:
    """The median; of two the quicker, as only one of them can be slow."""
    known = np.isfinite(values).sum(axis=axis)
    least = np.where(np.isfinite(values), values, np.inf).min(axis=axis, initial=np.inf)
    return np.where(known == 2, least, median(values, axis=axis))


def over_ranks(values: Float, ranks: Int) -> OverRanks:
    """What is typical of (R,) values, all known, how they spread, and who is far beyond."""
    middle = float(typical(values, axis=0))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))
    far = values > middle + max(_SPREADS * spread, _SHARE * middle)
    order = np.argsort(-values[far], kind="stable")
    return OverRanks(middle, spread, tuple(ranks[far][order].tolist()) if len(values) > 1 else ())
