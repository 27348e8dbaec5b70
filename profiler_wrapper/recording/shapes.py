"""Input shapes of ops: many spans, few different shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from profiler_wrapper.recording.columns import Bool
from profiler_wrapper.recording.decoding import NO_SHAPE, Event

_ARGS = attrgetter("args")
_DIMS = attrgetter("dims", "old_dims")


@dataclass(frozen=True, slots=True)
class OpShapes:
    """What an op was called with, one entry per input.

    `dims`: a list of ints for a tensor (`[]` for a scalar or none), a list of lists for a list of
    tensors. `types`: `float`, `c10::BFloat16`, `Scalar`, `TensorList` ... `concrete`: the values of
    inputs that are no tensors, as text, else `""`; empty where the trace has none.
    """

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    concrete: tuple[str, ...]


class Shapes(Mapping[int, OpShapes]):
    """Index of a span -> its shapes, in file order.

    `recorded`: whether the trace has shapes at all; those of some ops only may have been asked for.
    """

    def __init__(self, number_of: Mapping[int, int], distinct: tuple[OpShapes, ...], *, recorded: bool = True) -> None:
        self.recorded = recorded
        self._number_of = number_of
        self._distinct = distinct

    def number(self, span: int) -> int:
        """Equal for spans with equal shapes."""
        return self._number_of[span]

    def __getitem__(self, span: int) -> OpShapes:
        return self._distinct[self._number_of[span]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)


class ShapeCollector:
    """Gathers shapes from spans as they come, decoding each different one once; of `wanted` names only."""

    def __init__(self, wanted: Callable[[str], bool] | None = None) -> None:
        self._wanted = wanted
        self._is_wanted: dict[str, bool] = {}
        self._recorded = False
        self._numbers: dict[tuple[bytes, bytes, bytes], int] = {}
        self._found: list[tuple[int, int]] = []
        self._seen = 0

    def add(self, spans: list[Event]) -> None:
        """The next spans, in the order in which they will be numbered."""
        numbers = self._numbers
        args = list(map(_ARGS, spans))
        shaped = [dims is not NO_SHAPE or old is not NO_SHAPE for dims, old in map(_DIMS, args)]
        self._recorded |= True in shaped
        for index in compress(range(len(spans)), shaped):
            if self._wants(spans[index].name):
                given = args[index]
                key = (bytes(given.dims) or bytes(given.old_dims), bytes(given.types), bytes(given.concrete))
                self._found.append((self._seen + index, numbers.setdefault(key, len(numbers))))
        self._seen += len(spans)

    def _wants(self, name: str) -> bool:
        if self._wanted is None:
            return True
        if name not in self._is_wanted:
            self._is_wanted[name] = self._wanted(name)
        return self._is_wanted[name]

    def shapes(self, kept: Bool) -> Shapes:
        """The mapping, for spans numbered as they are once those that are not `kept` are gone."""
        final = np.cumsum(kept) - 1
        number_of = {int(final[index]): number for index, number in self._found if kept[index]}
        return Shapes(number_of, tuple(_decoded(*key) for key in self._numbers), recorded=self._recorded)


def _decoded(dims: bytes, types: bytes, concrete: bytes) -> OpShapes:
    return OpShapes(
        dims=_list(dims),
        types=tuple(map(str, _list(types))),
        concrete=tuple(map(str, _list(concrete))),
    )


def _list(raw: bytes) -> tuple[Any, ...]:
    value = msgspec.json.decode(raw) if raw else []
    return tuple(value) if isinstance(value, list) else ()
