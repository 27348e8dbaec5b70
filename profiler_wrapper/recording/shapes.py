"""Input shapes of ops: many spans, few different shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from profiler_wrapper.recording.decoding import NO_SHAPE, Event
from profiler_wrapper.recording.recording import Bool, Int64

_NAME = attrgetter("name")
_DIMS = attrgetter("args.dims", "args.old_dims")


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
    """Index of a span -> its shapes, in file order.

    `recorded`: whether the trace has shapes at all; those of some ops only may have been asked for.
    """

    def __init__(self, number_of: Mapping[int, int], distinct: Sequence[OpShapes], *, recorded: bool = True) -> None:
        self.recorded = recorded
        self._number_of = number_of
        self._distinct = distinct

    def number(self, span: int) -> int:
        """Equal for spans with equal shapes."""
        return self._number_of[span]

    def arrays(self) -> tuple[Int64, Int64]:
        """The spans, and the number of each."""
        count = len(self._number_of)
        return np.fromiter(self._number_of, np.int64, count), np.fromiter(self._number_of.values(), np.int64, count)

    def numbered(self, number: int) -> OpShapes:
        """The shapes of that number."""
        return self._distinct[number]

    def __getitem__(self, span: int) -> OpShapes:
        return self._distinct[self._number_of[span]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)


class _Raw(NamedTuple):
    """Shapes as a trace has them, undecoded."""

    dims: bytes
    types: bytes
    concrete: bytes
    strides: bytes


class _Decoded(Sequence[OpShapes]):
    """Shapes that are decoded when they are asked for."""

    def __init__(self, raw: Sequence[_Raw]) -> None:
        self._raw = raw
        self._known: dict[int, OpShapes] = {}

    @overload
    def __getitem__(self, index: int) -> OpShapes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[OpShapes]: ...
    def __getitem__(self, index: int | slice) -> OpShapes | Sequence[OpShapes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._known:
            self._known[index] = _decoded(self._raw[index])
        return self._known[index]

    def __len__(self) -> int:
        return len(self._raw)


class _Wanted(dict[str, bool]):
    """Whether shapes of ops of a name are wanted, asked once for each name."""

    def __init__(self, wanted: Callable[[str], bool] | None) -> None:
        super().__init__()
        self._wanted = wanted

    def __missing__(self, name: str) -> bool:
        self[name] = answer = self._wanted is None or self._wanted(name)
        return answer


class ShapeCollector:
    """Gathers shapes from spans as they come, decoding each different one once; of `wanted` names only."""

    def __init__(self, wanted: Callable[[str], bool] | None = None) -> None:
        self._wanted = _Wanted(wanted)
        self._recorded = False
        self._numbers: dict[tuple[bytes, bytes, bytes, bytes], int] = {}
        self._found: list[tuple[int, int]] = []
        self._seen = 0

    def add(self, spans: list[Event]) -> None:
        """The next spans, in the order in which they will be numbered."""
        numbers, found, seen = self._numbers, self._found, self._seen
        if not self._recorded:
            self._recorded = any(dims is not NO_SHAPE or old is not NO_SHAPE for dims, old in map(_DIMS, spans))
        wanted = map(self._wanted.__getitem__, map(_NAME, spans))
        for index in compress(range(len(spans)), wanted):
            given: Any = spans[index].args
            dims = given.dims if given.dims is not NO_SHAPE else given.old_dims
            if dims is not NO_SHAPE:
                key = (bytes(dims), bytes(given.types), bytes(given.concrete), bytes(given.strides))
                found.append((seen + index, numbers.setdefault(key, len(numbers))))
        self._seen += len(spans)

    def shapes(self, kept: Bool) -> Shapes:
        """The mapping, for spans numbered as they are once those that are not `kept` are gone."""
        found = np.array(self._found, dtype=np.int64).reshape(-1, 2)
        span, number = found[kept[found[:, 0]]].T
        final = np.cumsum(kept) - 1
        number_of = dict(zip(final[span].tolist(), number.tolist(), strict=True))
        return Shapes(number_of, _Decoded(tuple(_Raw(*key) for key in self._numbers)), recorded=self._recorded)


def _decoded(raw: _Raw) -> OpShapes:
    return OpShapes(
        dims=_list(raw.dims),
        types=tuple(map(str, _list(raw.types))),
        concrete=tuple(map(str, _list(raw.concrete))),
        strides=_list(raw.strides),
    )


def _list(raw: bytes) -> tuple[Any, ...]:
    value = msgspec.json.decode(raw) if raw else []
    return tuple(value) if isinstance(value, list) else ()
