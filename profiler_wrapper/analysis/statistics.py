"""Median and its deviation over numbers of which some are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826  # median deviation of normal numbers to their standard deviation


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
