"""Median, its deviation and outliers, over numbers of which some are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826  # median deviation of normal numbers to their standard deviation
# An outlier is farther from the median than both of these.
OUTLIER_SHARE: Final = 0.2  # of the median
OUTLIER_DEVIATIONS: Final = 5.0  # robust standard deviations
FEWEST_VALUES: Final = 3  # among which one can be an outlier


def median(values: npt.NDArray[Any] | Sequence[float], axis: int = 0) -> Float:
    """Along an axis, `nan` left out; of an even number the mean of the middle two; `nan` where nothing is known.

    Over large tables several times as quick as `numpy.nanmedian`.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=axis)  # nan goes last
    if not ordered.size:
        return np.full(np.delete(ordered.shape, axis), np.nan)
    count = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[axis] - 1), axis=axis)
    return np.asarray(((low + high) / 2).squeeze(axis=axis), dtype=np.float64)


def mad(values: npt.NDArray[Any] | Sequence[float], axis: int = 0) -> Float:
    """Median absolute deviation from the median, scaled to the standard deviation of normal numbers."""
    center = np.expand_dims(median(values, axis), axis)
    return MAD_TO_SIGMA * median(np.abs(np.asarray(values, dtype=np.float64) - center), axis)


def outliers(values: Sequence[float]) -> dict[int, float]:
    """Index and relative excess of each value far from the median of all; none among fewer than three."""
    if len(values) < FEWEST_VALUES:
        return {}
    center = float(median(values))
    if center <= 0:
        return {}
    far = max(OUTLIER_SHARE * center, OUTLIER_DEVIATIONS * float(mad(values)))
    return {i: value / center - 1 for i, value in enumerate(values) if abs(value - center) > far}
