"""What follows from the inputs of an op, for its FLOPs as for its bytes. All raise ValueError where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

Sizes = Sequence[int]


def broadcast(shapes: Iterable[Sizes]) -> list[int]:
    """The shape that tensors of these shapes give together."""
    result: list[int] = []
    for dims in shapes:
        length = max(len(dims), len(result))
        one = [1] * (length - len(dims)) + list(dims)
        other = [1] * (length - len(result)) + result
        if any(a != b and 1 not in (a, b) for a, b in zip(one, other, strict=True)):
            raise ValueError("shapes do not broadcast")
        result = [b if a == 1 else a for a, b in zip(one, other, strict=True)]
    return result


def elements_of_product(left: Sizes, right: Sizes) -> int:
    """Of (..., m, k) x (..., k, n); a vector is a matrix of one row or column; batches broadcast."""
    rows = left if len(left) > 1 else [1, *left]
    columns = right if len(right) > 1 else [*right, 1]
    if not left or not right or rows[-1] != columns[-2]:
        raise ValueError("no matrix product")
    return prod(broadcast([rows[:-2], columns[:-2]])) * rows[-2] * columns[-1]


def convolved(sizes: Sizes, taps: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> list[int]:
    """What a convolution leaves of the sizes of an image, each argument with a number for each dimension."""
    columns = zip(sizes, taps, stride, padding, dilation, strict=True)
    return [(size + 2 * pad - spread * (count - 1) - 1) // step + 1 for size, count, step, pad, spread in columns]


def per_dimension(numbers: list[int], length: int) -> list[int]:
    """One number stands for all dimensions."""
    return numbers * length if len(numbers) == 1 else numbers


def numbers_in(text: str) -> list[int]:
    """`"[2, 2]"` or `"2"`."""
    return [int(number) for number in re.findall(r"-?\d+", text)]


def flags_in(text: str) -> list[bool]:
    """`"[True, False, True]"`."""
    return [flag == "True" for flag in re.findall(r"True|False", text)]


def flag_of(text: str) -> bool:
    """`"True"` or `"False"`."""
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"
