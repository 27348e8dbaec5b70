"""What one op was called with: sizes in bytes of its inputs, their values, the type that they give together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

from profiler_wrapper.analysis.work.formulas import Product, Sizes, flag_of, flags_in, numbers_in, products_of
from profiler_wrapper.trace.shapes import OpShapes

# Bytes of one element by the type's name in a trace. Two numbers of four bits share one byte, and count as one element.
_SIZE_OF_TYPE = {
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::qint8", "c10::quint8"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2", "c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("c10::Float8_e8m0fnu", "c10::Float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("short int", "short", "short unsigned int", "unsigned short", "c10::Half", "c10::BFloat16"), 2),
    **dict.fromkeys(("int", "unsigned int", "c10::qint32", "float", "c10::complex<c10::Half>"), 4),
    **dict.fromkeys(("long int", "long", "long long", "__int64", "unsigned long", "long unsigned int"), 8),
    **dict.fromkeys(("double", "c10::complex<float>"), 8),
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
_WRAPPED_NUMBERS = ("double", "long int", "bool", "c10::complex<double>")
BOOL, INTEGER, FLOATING, COMPLEX = range(4)  # kinds of types, in the order in which they promote
_FLOATING_TYPE = re.compile(r"c10::(B?Float|Half)|float$|double$")


class BytesUnknown(ValueError):
    """The inputs do not give the bytes, or are not those that a rule is for."""


class Operands:
    """The inputs of one call by their place. What asks for a tensor raises `BytesUnknown` where there is none.

    `element_size`: bytes of one element of the tensors in lists, whose types no trace has; None: not known.
    """

    def __init__(self, name: str, shapes: OpShapes, element_size: int | None = None) -> None:
        self.name = name
        self.count = len(shapes.types)
        self._shapes = shapes
        self._element_size = element_size

    def is_tensor(self, place: int) -> bool:
        return place < self.count and self._shapes.types[place] in _SIZE_OF_TYPE

    def is_list(self, place: int) -> bool:
        """Whether a list of tensors was given there."""
        return place < self.count and self._shapes.types[place] == "TensorList"

    def is_wrapped_number(self, place: int) -> bool:
        """A Python number that was made a tensor of no dimensions: it comes with the call, not from memory."""
        return self.is_tensor(place) and not self.dims(place) and self.type(place) in _WRAPPED_NUMBERS

    def type(self, place: int) -> str:
        return self._shapes.types[place]

    def kind(self, place: int) -> int:
        """Bool, integer, floating or complex."""
        name = self.type(place)
        if name == "bool":
            return BOOL
        return COMPLEX if "complex" in name else FLOATING if _FLOATING_TYPE.match(name) else INTEGER

    def dims(self, place: int) -> list[int]:
        if not self.is_tensor(place):
            raise BytesUnknown(f"input {place} is no tensor")
        return list(self._shapes.dims[place])

    def size(self, place: int) -> int:
        """Bytes of one element."""
        self.dims(place)
        return _SIZE_OF_TYPE[self.type(place)]

    def elements(self, place: int) -> int:
        return prod(self.dims(place))

    def full(self, *places: int) -> int:
        """Bytes of dense tensors of these shapes."""
        return sum(self.elements(place) * self.size(place) for place in places)

    def read(self, *places: int) -> int:
        """Bytes of the different elements of the tensors there: what is expanded counts once, what is absent is 0."""
        tensors = [place for place in places if self.is_tensor(place)]
        return sum(_different_elements(self.dims(i), self._strides(i)) * self.size(i) for i in tensors)

    def _strides(self, place: int) -> list[Any]:
        return list(self._shapes.strides[place]) if place < len(self._shapes.strides) else []

    def list_dims(self, place: int) -> list[list[int]]:
        if not self.is_list(place):
            raise BytesUnknown(f"input {place} is no list of tensors")
        return list(self._shapes.dims[place])

    def list_size(self) -> int:
        """Bytes of one element of the tensors in lists."""
        if self._element_size is None:
            raise BytesUnknown("types of tensors in lists are not recorded")
        return self._element_size

    def list_full(self, *places: int) -> int:
        """Bytes of dense tensors of the shapes of lists."""
        return sum(sum(map(prod, self.list_dims(place))) * self.list_size() for place in places)

    def list_read(self, place: int) -> int:
        """Bytes of the different elements of the tensors of a list."""
        dims, strides = self.list_dims(place), self._strides(place)
        if len(strides) != len(dims):
            return self.list_full(place)
        return sum(map(_different_elements, dims, strides)) * self.list_size()

    def text(self, place: int) -> str:
        """The value of an input that is no tensor; "" for none."""
        return self._shapes.concrete[place] if place < len(self._shapes.concrete) else ""

    def number(self, place: int) -> int:
        return int(self.text(place))

    def numbers(self, place: int) -> list[int]:
        return numbers_in(self.text(place))

    def flag(self, place: int) -> bool:
        return flag_of(self.text(place))

    def flags(self, place: int) -> list[bool]:
        return flags_in(self.text(place))

    def type_size(self, place: int, *, sums: bool = False) -> int:
        """Bytes of one element of the `dtype` there, else of the first input; `sums` of whole numbers are int64."""
        text, size = self.text(place), self.size(0)
        if not text:
            return 8 if sums and self.kind(0) < FLOATING else size
        if not text.isdecimal() or int(text) not in _SIZE_OF_NUMBER:
            raise BytesUnknown(f"no type is known by {text!r}")
        return _SIZE_OF_NUMBER[int(text)]

    def product(self, first: int = 0) -> Product:
        """The one product of matrices that the op makes, of the tensors at the place `first` and after it."""
        self.dims(first), self.dims(first + 1)
        (product,) = products_of(self.name, self._shapes)
        return product

    def left(self, place: int) -> int:
        """Elements that are left of the first input when the dimensions named there are reduced; none named: all."""
        dims = self.dims(0)
        reduced = {d % max(1, len(dims)) for d in self.numbers(place)}
        return prod(size for i, size in enumerate(dims) if i not in reduced) if reduced else 1

    def promoted(self, places: Iterable[int]) -> int:
        """Bytes of one element of what tensors there give together.

        Tensors with dimensions decide before those without, unless the latter are of a higher kind; then the
        largest of the kind.
        """
        given = [place for place in places if self.is_tensor(place)]
        arrays = [place for place in given if self.dims(place)]
        kind = max(map(self.kind, given), default=BOOL)
        deciding = arrays if kind in map(self.kind, arrays) else [place for place in given if place not in arrays]
        if arrays and deciding and all(map(self.is_wrapped_number, deciding)):
            return (1, 8, 4, 8)[kind]  # a number beside tensors of a lower kind: the default type
        if {"c10::Half", "c10::BFloat16"} <= set(map(self.type, deciding)):
            return 4
        return max(self.size(place) for place in deciding if self.kind(place) == kind)


def _different_elements(dims: Sizes, strides: Sizes) -> int:
    """How many elements a tensor has of its own: along an expanded dimension they are the same."""
    if len(strides) != len(dims) or 0 in dims:
        return prod(dims)
    columns = list(zip(dims, strides, strict=True))
    reached = 1 + sum((size - 1) * stride for size, stride in columns)
    return min(prod(size for size, stride in columns if stride), reached)


def size_of_type(name: str) -> int | None:
    """Bytes of one element of the type of that name in a trace; None for one that is not known."""
    return _SIZE_OF_TYPE.get(name)
