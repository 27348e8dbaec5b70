"""Arrays of whole numbers: look up, mark, order and add up."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Item = TypeVar("Item", bound=np.generic)


_Key = TypeVar("_Key")


_Value = TypeVar("_Value")


Int64 = npt.NDArray[np.int64]


_PIECE = 1 << 17


def in_pieces(values: npt.NDArray[Item]) -> list[npt.NDArray[Item]]:
    """A column in pieces, at least one, for what takes several times the memory of its answer."""
    return np.array_split(values, 1 + len(values) // _PIECE)


def at(values: npt.NDArray[Item], index: npt.NDArray[Any], none: float) -> npt.NDArray[Item]:
    """The values at these indices; for an index of -1 `none`."""
    chosen: npt.NDArray[Item] = np.append(values, values.dtype.type(none))[index]
    return chosen


def marked(length: int, members: Collection[int] | npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """True for these of so many; -1 is none of them."""
    index = members if isinstance(members, np.ndarray) else np.fromiter(members, np.int64, len(members))
    chosen = np.zeros(length, dtype=np.bool_)
    chosen[index[index >= 0]] = True
    return chosen


def in_order(members: npt.NDArray[Item], time_ns: Int64) -> npt.NDArray[Item]:
    """Indices into times, in the order of their times; of equal times as they were."""
    return members[np.argsort(time_ns[members], kind="stable")]


def sum_by_key(key: npt.NDArray[Any], values: Int64, count: int) -> Int64:
    """Per key, from 0 to `count` - 1, the exact sum of its values."""
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, key, values)
    return total


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, keys and values in the order in which they come."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
