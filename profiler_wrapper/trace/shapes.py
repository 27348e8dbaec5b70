"""Input shapes of ops: many spans, few different shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from profiler_wrapper.trace.events import ABSENT, Event
from profiler_wrapper.trace.recording import Bool, Int32, Int64

_NAME = attrgetter("name")
_DIMS = attrgetter("args.dims", "args.old_dims")
_NO_DIMS = (ABSENT, ABSENT)
_Undecoded = tuple[bytes, bytes, bytes, bytes]  # dims, types, concrete, strides as a trace has them


@dataclass(frozen=True, slots=True)
class OpShapes:
    """What an op was called with, one entry per input.

    `dims`: a list of ints for a tensor (`[]` for a scalar or none), a list of lists for a list of
    tensors. `types`: `float`, `c10::BFloat16`, `Scalar`, `TensorList` ... `concrete`: the values of
    inputs that are no tensors, as text, else `""`; empty where the trace has none. `strides`: as
    `dims`, in elements; empty where the trace has none.
    """

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    concrete: tuple[str, ...]
    strides: tuple[Any, ...] = ()


class Shapes(Mapping[int, OpShapes]):
    """Index of a span -> its shapes, in file order; different shapes are decoded once, when they are asked for.

    `number_of`: per span the number of its shapes in `distinct`, -1 for none.
    `recorded`: whether the trace has shapes at all; those of some ops only may have been asked for.
    """

    def __init__(self, number_of: Int32, distinct: Sequence[OpShapes | _Undecoded], *, recorded: bool = True) -> None:
        self.recorded = recorded
        self._number_of = number_of
        self._distinct = list(distinct)

    def number(self, span: int) -> int:
        """Equal for spans with equal shapes."""
        number = int(self._number_of[span]) if 0 <= span < len(self._number_of) else -1
        if number < 0:
            raise KeyError(span)
        return number

    def arrays(self) -> tuple[Int64, Int64]:
        """The spans, and the number of each."""
        spans = np.flatnonzero(self._number_of >= 0)
        return spans, self._number_of[spans].astype(np.int64)

    def numbered(self, number: int) -> OpShapes:
        """The shapes of that number."""
        found = self._distinct[number]
        if isinstance(found, tuple):
            dims, types, concrete, strides = map(_list, found)
            found = self._distinct[number] = OpShapes(dims, tuple(map(str, types)), tuple(map(str, concrete)), strides)
        return found

    def __getitem__(self, span: int) -> OpShapes:
        return self.numbered(self.number(span))

    def __iter__(self) -> Iterator[int]:
        return iter(self.arrays()[0].tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._number_of >= 0))


def _list(raw: bytes) -> tuple[Any, ...]:
    value = msgspec.json.decode(raw) if raw else []
    return tuple(value) if isinstance(value, list) else ()


class ShapeCollector:
    """Gathers shapes from spans as they come, each different one once; of `wanted` names only."""

    def __init__(self, wanted: Callable[[str], bool] | None = None) -> None:
        self._wanted = wanted
        self._is_wanted: dict[str, bool] = {}
        self._recorded = False
        self._numbers: dict[_Undecoded, int] = {}
        self._slices: list[Int32] = [np.empty(0, np.int32)]

    def add(self, spans: list[Event]) -> None:
        """The next spans, in the order in which they will be numbered."""
        given = list(map(_DIMS, spans))
        number_of = [-1] * len(spans)
        if given.count(_NO_DIMS) < len(given):
            self._recorded = True
            self._number(spans, number_of)
        self._slices.append(np.array(number_of, np.int32))

    def _number(self, spans: list[Event], number_of: list[int]) -> None:
        names, numbers = list(map(_NAME, spans)), self._numbers
        for name in set(names) - self._is_wanted.keys():
            self._is_wanted[name] = self._wanted is None or self._wanted(name)
        for index in compress(range(len(spans)), map(self._is_wanted.__getitem__, names)):
            args: Any = spans[index].args
            dims = args.dims if args.dims is not ABSENT else args.old_dims
            if dims is not ABSENT:
                key = (bytes(dims), bytes(args.types), bytes(args.concrete), bytes(args.strides))
                number_of[index] = numbers.setdefault(key, len(numbers))

    def shapes(self, kept: Bool) -> Shapes:
        """Those of the spans that are `kept`, numbered as they are once the others are gone."""
        return Shapes(np.concatenate(self._slices)[kept], list(self._numbers), recorded=self._recorded)
