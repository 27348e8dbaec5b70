"""Sizes of the inputs of one op call, and of outputs that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from profiler_wrapper.analysis.op_sizes import Sizes, flag_of, flags_in, numbers_in
from profiler_wrapper.recording.shapes import OpShapes

# Bytes of one element by the type's name in a trace. Two numbers of four bits share one byte, and count as one element.
_SIZE_OF_TYPE = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::qint8": 1,
    "c10::quint8": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
    "c10::Float4_e2m1fn_x2": 1,
    "short int": 2,
    "short": 2,
    "short unsigned int": 2,
    "unsigned short": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "unsigned int": 4,
    "c10::qint32": 4,
    "float": 4,
    "c10::complex<c10::Half>": 4,
    "long int": 8,
    "long": 8,
    "long long": 8,
    "__int64": 8,
    "unsigned long": 8,
    "long unsigned int": 8,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
# Bytes of one element by torch's number of the type, as `dtype` arguments are recorded.
_SIZE_OF_NUMBER = {
    **dict.fromkeys((0, 1, 11, 12, 13, 23, 24, 25, 26, 44, 45), 1),
    **dict.fromkeys((2, 5, 15, 27), 2),
    **dict.fromkeys((3, 6, 8, 14, 28), 4),
    **dict.fromkeys((4, 7, 9, 29), 8),
    10: 16,
}
_FLOATING = re.compile(r"c10::(B?Float|Half|complex)|float$|double$")
_LIST = "TensorList"
_WRAPPED_NUMBERS = ("double", "long int", "bool", "c10::complex<double>")
_KINDS = ("bool", "integer", "floating", "complex")


class Moved(NamedTuple):
    """Bytes of one op call: each input read once, each output written once."""

    read: int
    written: int


class NotTold(ValueError):
    """The inputs do not tell the bytes, or are not those that a rule is for."""


class Operands:
    """The inputs of one call by their place.

    `element_size`: bytes of one element of the tensors in lists, whose types no trace has; None: not known.
    """

    def __init__(self, shapes: OpShapes, element_size: int | None = None) -> None:
        self._shapes = shapes
        self._element_size = element_size
        self.count = len(shapes.types)

    def is_tensor(self, place: int) -> bool:
        """Whether a tensor was given there."""
        return place < self.count and self._shapes.types[place] in _SIZE_OF_TYPE

    def is_list(self, place: int) -> bool:
        """Whether a list of tensors was given there."""
        return place < self.count and self._shapes.types[place] == _LIST

    def type(self, place: int) -> str:
        return self._shapes.types[place]

    def dims(self, place: int) -> list[int]:
        """Raises `NotTold` where there is no tensor."""
        if not self.is_tensor(place):
            raise NotTold(f"input {place} is no tensor")
        return list(self._shapes.dims[place])

    def size(self, place: int) -> int:
        """Bytes of one element."""
        self.dims(place)
        return _SIZE_OF_TYPE[self._shapes.types[place]]

    def elements(self, place: int) -> int:
        return prod(self.dims(place))

    def full(self, place: int) -> int:
        """Bytes of a dense tensor of that shape. Raises `NotTold` where there is none."""
        return self.elements(place) * self.size(place)

    def read(self, *places: int) -> int:
        """Bytes of the different elements of the tensors there: what is expanded counts once, what is absent is 0."""
        return sum(self._distinct(place) * self.size(place) for place in places if self.is_tensor(place))

    def _distinct(self, place: int) -> int:
        return different_elements(self.dims(place), self._strides(place))

    def _strides(self, place: int) -> list[Any]:
        return list(self._shapes.strides[place]) if place < len(self._shapes.strides) else []

    def list_bytes(self, place: int) -> int:
        """Bytes of dense tensors of the shapes of a list. Raises `NotTold` without the size of an element."""
        return sum(map(prod, self.list_dims(place))) * self.list_element_size()

    def list_read(self, place: int) -> int:
        """Bytes of the different elements of the tensors of a list. Raises as `list_bytes`."""
        dims, strides = self.list_dims(place), self._strides(place)
        if len(strides) != len(dims):
            return self.list_bytes(place)
        return sum(map(different_elements, dims, strides)) * self.list_element_size()

    def list_element_size(self) -> int:
        """Raises `NotTold` where it is not known."""
        if self._element_size is None:
            raise NotTold("types of tensors in lists are not recorded")
        return self._element_size

    def list_dims(self, place: int) -> list[list[int]]:
        """Raises `NotTold` where there is no list of tensors."""
        if not self.is_list(place):
            raise NotTold(f"input {place} is no list of tensors")
        return list(self._shapes.dims[place])

    def text(self, place: int) -> str:
        """The value of an input that is no tensor; "" for none."""
        return self._shapes.concrete[place] if place < len(self._shapes.concrete) else ""

    def number(self, place: int) -> int:
        """Raises ValueError where there is none."""
        return int(self.text(place))

    def numbers(self, place: int) -> list[int]:
        """`"[2, 2]"` or `"2"`."""
        return numbers_in(self.text(place))

    def flag(self, place: int) -> bool:
        """Raises ValueError for what is neither."""
        return flag_of(self.text(place))

    def flags(self, place: int) -> list[bool]:
        """`"[True, False, True]"`."""
        return flags_in(self.text(place))

    def is_wrapped_number(self, place: int) -> bool:
        """A Python number that was made a tensor of no dimensions: it comes with the call, not from memory."""
        return self.is_tensor(place) and not self.dims(place) and self.type(place) in _WRAPPED_NUMBERS

    def promoted(self, places: Iterable[int], *, floating: bool = False) -> int:
        """Bytes of one element of what tensors there give together; `floating`: of whole numbers, float32.

        Tensors with dimensions decide before those without, unless the latter are of a higher kind; then the
        largest of the kind.
        """
        given = [place for place in places if self.is_tensor(place)]
        numbers = [place for place in given if not self.dims(place)]
        arrays = [place for place in given if self.dims(place)]
        kind = max((self._kind(place) for place in given), default=0)
        deciding = arrays if any(self._kind(place) == kind for place in arrays) else numbers
        if not deciding:
            raise NotTold("no tensor")
        if floating and kind < _KINDS.index("floating"):
            return 4
        sizes = [self.size(place) for place in deciding if self._kind(place) == kind]
        if deciding is numbers and arrays and all(self.is_wrapped_number(place) for place in numbers):
            return {0: 1, 1: 8, 2: 4, 3: 8}[kind]  # a number beside tensors of a lower kind: the default type
        if {"c10::Half", "c10::BFloat16"} <= {self.type(place) for place in deciding}:
            return 4
        return max(sizes)

    def _kind(self, place: int) -> int:
        told = self.type(place)
        if told == "bool":
            return 0
        if "complex" in told:
            return 3
        return 2 if _FLOATING.match(told) else 1

    def is_floating(self, place: int) -> bool:
        return self._kind(place) >= _KINDS.index("floating")

    def is_complex(self, place: int) -> bool:
        return self._kind(place) == _KINDS.index("complex")

    def has_floating_scalar(self, places: Iterable[int]) -> bool:
        """Whether a number there that is no tensor is not whole."""
        texts = [self.text(place) for place in places if place < self.count and not self.is_tensor(place)]
        return any(re.fullmatch(r"-?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)", text) for text in texts)

    def size_of_dtype(self, place: int) -> int | None:
        """Bytes of one element of a type given by number; None where none is given. Raises `NotTold` if unknown."""
        text = self.text(place)
        if not text:
            return None
        if not text.isdecimal() or int(text) not in _SIZE_OF_NUMBER:
            raise NotTold(f"no type is known by {text!r}")
        return _SIZE_OF_NUMBER[int(text)]


def size_of_type(name: str) -> int | None:
    """Bytes of one element of the type of that name; None for one that is not known."""
    return _SIZE_OF_TYPE.get(name)


def different_elements(dims: Sizes, strides: Sizes) -> int:
    """How many elements a tensor has of its own: along an expanded dimension they are the same."""
    if len(strides) != len(dims) or 0 in dims:
        return prod(dims)
    columns = list(zip(dims, strides, strict=True))
    reached = 1 + sum((size - 1) * stride for size, stride in columns)
    return min(prod(size for size, stride in columns if stride), reached)
