"""What grows slice by slice while a trace is read: columns, and numbers of things."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.decoding import Event
from profiler_wrapper.recording.recording import Bool, Int32

_NAME = attrgetter("name")
_LANE = attrgetter("pid", "tid")


class Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number

    def of(self, things: Iterable[Any], count: int) -> Int32:
        """The numbers of `count` things."""
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class Interned:
    """Names and lanes, numbered alike for all that a trace holds."""

    def __init__(self) -> None:
        self.names = Numbers()
        self.lanes = Numbers()

    def names_of(self, events: list[Event]) -> Int32:
        """The number of each event's name."""
        return self.names.of(map(_NAME, events), len(events))

    def lanes_of(self, events: list[Event]) -> Int32:
        """The number of each event's lane."""
        return self.lanes.of(map(_LANE, events), len(events))


class PerName:
    """An answer for every name, asked once for each."""

    def __init__(self, names: Numbers, question: Callable[[str], bool]) -> None:
        self._names = names
        self._question = question
        self._answers: Bool = np.empty(0, np.bool_)

    def answers(self) -> Bool:
        """By the number of a name."""
        known, count = len(self._answers), len(self._names)
        if known < count:
            new = [self._question(name) for name in list(self._names)[known:]]
            self._answers = np.concatenate((self._answers, np.array(new, np.bool_)))
        return self._answers


class Columns:
    """Columns that grow by slices."""

    def __init__(self) -> None:
        self._slices: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)

    def add(self, **columns: npt.NDArray[Any]) -> None:
        """The next slice of every column."""
        for name, values in columns.items():
            self._slices[name].append(values)

    def take(self, name: str, dtype: type[np.generic] = np.int64) -> npt.NDArray[Any]:
        """The whole column; its slices are given up."""
        slices = self._slices.pop(name, [])
        return np.concatenate(slices) if slices else np.empty(0, dtype)
