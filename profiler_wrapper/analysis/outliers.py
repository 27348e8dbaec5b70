"""Which of many like values are far from the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FEWEST_ALIKE = 3
ODD_SHARE = 0.2  # of the median
ODD_DEVIATIONS = 5.0  # robust standard deviations
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


def robust_deviation(values: Sequence[float]) -> float:
    """The standard deviation of a normal distribution with this median absolute deviation; 0 for no values."""
    if not values:
        return 0.0
    middle = median(values)
    return _MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def outliers(values: Sequence[float]) -> dict[int, float]:
    """Index and relative excess of each value far from the median of all; none among fewer than three."""
    if len(values) < FEWEST_ALIKE:
        return {}
    middle = median(values)
    if middle <= 0:
        return {}
    far = max(ODD_SHARE * middle, ODD_DEVIATIONS * robust_deviation(values))
    return {i: value / middle - 1 for i, value in enumerate(values) if abs(value - middle) > far}
