"""Numbered names as one; median, deviation and outliers; sums by key, and of numbers of which some are unknown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from profiler_wrapper.trace.arrays import Int64, _Key, grouped, in_pieces, sum_by_key
from profiler_wrapper.trace.spans import parts_of

# --- Names that differ in a number, as one: `layers.3` and `layers.4` are `layers.{3,4}` ---

FEWEST_IN_STEPS = 3  # more numbers at equal distances are written as a range with its step
FEWEST_IN_RANGE = 3  # fewer neighbours are written one by one

# A number that is a component of a name, or ends one: `layers.3.mlp`, `Qwen2DecoderLayer_7`.
_NUMBER = re.compile(r"(?:(?<=[._#])|^)[0-9]{1,9}(?=\.|$)")
OPEN = "\0"  # stands for it in a pattern; no name that is written holds it


def split_number(name: str, *, left_open: str = OPEN) -> tuple[str, int | None]:
    """A name with its last number left open, and that number: equal for `layers.3` and `layers.4` but for it."""
    matches = list(_NUMBER.finditer(name))
    if not matches:
        return name, None
    last = matches[-1]
    return name[: last.start()] + left_open + name[last.end() :], int(last.group())


def fill_numbers(pattern: str, numbers: Iterable[int]) -> str:
    """A name that `split_number` left open, with the numbers of all that it stands for: `layers.{0..31}.mlp`."""
    ordered = sorted(numbers)
    if not ordered:
        return pattern
    ranges = number_ranges(ordered)
    return pattern.replace(OPEN, ranges if len(ordered) == 1 else f"{{{ranges}}}")


def number_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 3, 7]` -> `"0..3,7"`, `[0, 2, 4, 6]` -> `"0,2..6"`; `numbers` ascend."""
    distances = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > FEWEST_IN_STEPS and len(distances) == 1 and distances != {1}:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    return ",".join(
        ",".join(map(str, part)) if len(part) < FEWEST_IN_RANGE else f"{part[0]}..{part[-1]}"
        for part in parts_of(numbers)
    )


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


def mean(values: npt.NDArray[Any]) -> Float:
    """The mean along the first axis, `nan` left out; `nan` where nothing is known."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))


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


# --- Whole columns: values by an index that may be -1, sums by key ---


def summed(pairs: Iterable[tuple[_Key, int]]) -> Counter[_Key]:
    """Add up the numbers of each key, keys in the order in which they come."""
    sums = Counter[_Key]()
    for key, number in pairs:
        sums[key] += number
    return sums


def largest_names(
    names: Sequence[str], key: npt.NDArray[Any], value: npt.NDArray[Any], weight: Int64, most: int
) -> dict[int, tuple[str, ...]]:
    """Per key the names of its largest values, see `largest_by_key`; a value is an index into `names`."""
    largest = largest_by_key(key, value, weight, most)
    return {one: tuple(names[i] for i in chosen) for one, chosen in largest.items()}


def largest_by_key(
    key: npt.NDArray[Any], value: npt.NDArray[Any], weight: Int64, most: int
) -> dict[int, tuple[int, ...]]:
    """Per key at most so many of its values, those with the largest sums of weights first; -1 is no value."""
    width = int(value.max(initial=0)) + 1
    found, sums = [], []
    for chosen in in_pieces(np.flatnonzero(value >= 0)):
        pairs, place = np.unique(key[chosen].astype(np.int64) * width + value[chosen], return_inverse=True)
        found.append(pairs)
        sums.append(sum_by_key(place, weight[chosen], len(pairs)))
    pairs, place = np.unique(np.concatenate(found), return_inverse=True)
    order = np.lexsort((pairs, -sum_by_key(place, np.concatenate(sums), len(pairs))))
    columns = (column.tolist() for column in np.divmod(pairs[order], width))
    values: dict[int, list[int]] = grouped(zip(*columns, strict=True))
    return {one: tuple(numbers[:most]) for one, numbers in values.items()}


# --- Sums of numbers of which some are not known ---

Number = TypeVar("Number", int, float)


def sum_of_known(values: Iterable[Number | None]) -> Number | None:
    """The sum of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def sum_if_all_known(values: Iterable[Number | None]) -> Number | None:
    """The sum; None where one of them is not known."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known) if len(known) == len(every) else None
