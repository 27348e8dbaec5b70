"""Medians of what is known, quick over large tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

MAD_TO_SIGMA = 1.4826  # median deviation of normal numbers to their standard deviation


def median(values: npt.NDArray[Any], axis: int = 0) -> Float:
    """Along an axis, `nan` left out; of an even number the mean of the middle two; `nan` where nothing is known."""
    ordered = np.sort(values.astype(np.float64, copy=False), axis=axis)  # nan goes last
    count = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    if not ordered.size:
        return np.full(np.delete(values.shape, axis), np.nan)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[axis] - 1), axis=axis)
    return np.asarray(((low + high) / 2).squeeze(axis=axis), dtype=np.float64)


def deviation(values: npt.NDArray[Any], axis: int = 0) -> Float:
    """Median distance from the median, as a standard deviation of normal numbers."""
    middle = np.expand_dims(median(values, axis), axis)
    return MAD_TO_SIGMA * median(np.abs(values - middle), axis)


def largest(values: Float, axis: int = 0) -> Float:
    """The maximum of what is known; `nan` where nothing is."""
    filled = np.where(np.isfinite(values), values, -np.inf).max(axis=axis, initial=-np.inf)
    return np.where(np.isfinite(filled), filled, np.nan)
