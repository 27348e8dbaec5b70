"""The matrix products that an op makes, by their sizes: m x k times k x n, so many of them.

A convolution is a product too: of the patches of its input with its filters, once for each group. For every op here
2 * m * n * k * batch, summed over its products, is what `flop_formulas` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from profiler_wrapper.analysis.op_sizes import (
    Sizes,
    broadcast,
    convolved,
    elements_of_product,
    flag_of,
    flags_in,
    numbers_in,
    per_dimension,
)
from profiler_wrapper.recording.shapes import OpShapes


class Product(NamedTuple):
    """So many products of (m, k) and (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.m * self.n * self.k * self.batch


def products_of(name: str, shapes: OpShapes) -> tuple[Product, ...]:
    """The products of one call of the op `name`; empty where its name or its shapes tell none."""
    rule = _RULES.get(name)
    try:
        return rule(shapes) if rule is not None else ()
    except (IndexError, TypeError, ValueError, ZeroDivisionError):  # not the inputs that the rule is for
        return ()


_Rule = Callable[[OpShapes], tuple[Product, ...]]


def _product(left: Sizes, right: Sizes, *, packed: int = 1) -> tuple[Product, ...]:
    """(..., m, k) x (..., k, n); a vector is a matrix of one row or column; `packed`: numbers in one element."""
    elements_of_product(left, right)  # refuses what is no product
    rows = left if len(left) > 1 else [1, *left]
    columns = right if len(right) > 1 else [*right, 1]
    batch = prod(broadcast([rows[:-2], columns[:-2]]))
    return (Product(rows[-2], columns[-1], packed * rows[-1], batch),)


def _product_of(first: int) -> _Rule:
    return lambda shapes: _product(shapes.dims[first], shapes.dims[first + 1])


def _packed(shapes: OpShapes) -> int:
    """A type of four bits holds two numbers in one element."""
    return 2 if "Float4" in shapes.types[0] else 1


def _scaled(shapes: OpShapes) -> tuple[Product, ...]:
    return _product(shapes.dims[0], shapes.dims[1], packed=_packed(shapes))


def _grouped(shapes: OpShapes) -> tuple[Product, ...]:
    """Groups of unknown sizes are told as the one product that has all their rows (columns, numbers to sum)."""
    left, right = shapes.dims[0], shapes.dims[1]
    if left[-1] != right[-2] or not {len(left), len(right)} <= {2, 3}:
        raise ValueError("no grouped product")
    batch = left[0] if len(left) == len(right) == 3 else 1
    return (Product(left[-2], right[-1], _packed(shapes) * left[-1], batch),)


def _linear(shapes: OpShapes) -> tuple[Product, ...]:
    """(..., k) x (n, k)."""
    x, weight = shapes.dims[0], shapes.dims[1]
    if x[-1] != weight[-1] or len(weight) > 2:
        raise ValueError("no linear layer")
    return (Product(prod(x[:-1]), prod(weight[:-1]), x[-1]),)


def _rows_of_weight(shapes: OpShapes, *, packed: int = 1) -> tuple[Product, ...]:
    """(m, k) x a packed weight of n rows."""
    (m, k), weight = shapes.dims[0], shapes.dims[1]
    return (Product(m, packed * weight[0], k),)


def _convolution(shapes: OpShapes) -> tuple[Product, ...]:
    """A row for each output of a filter (of a transposed one, each input), a column for each filter of a group."""
    x, weight = shapes.dims[0], shapes.dims[1]
    taps = weight[2:]
    if len(x) != len(weight) or not taps:
        raise ValueError("no convolution")
    groups = _groups(shapes.concrete[8])
    if flag_of(shapes.concrete[6]):
        return (_of_filters(x[0] * prod(x[2:]), weight, groups, transposed=True),)
    stride, padding, dilation = (per_dimension(numbers_in(shapes.concrete[i]), len(taps)) for i in (3, 4, 5))
    return (_of_filters(x[0] * prod(convolved(x[2:], taps, stride, padding, dilation)), weight, groups),)


def _of_filters(places: int, weight: Sizes, groups: int, *, transposed: bool = False) -> Product:
    filters, taps = weight[0] // groups, prod(weight[1:])
    if weight[0] % groups:
        raise ValueError("no groups of filters")
    return Product(places, taps, filters, groups) if transposed else Product(places, filters, taps, groups)


def _convolution_backward(shapes: OpShapes) -> tuple[Product, ...]:
    """The gradients of x and of the weight, those that the mask asks for; the forward's sizes in another order."""
    grad_out, x, weight = shapes.dims[:3]
    asked = flags_in(shapes.concrete[10])
    if len(asked) != 3 or len(x) != len(weight):
        raise ValueError("no mask")
    transposed = flag_of(shapes.concrete[7])
    met = x if transposed else grad_out
    forward = _of_filters(x[0] * prod(met[2:]), weight, _groups(shapes.concrete[9]), transposed=transposed)
    of_x = Product(forward.m, forward.k, forward.n, forward.batch)
    of_weight = Product(forward.n, forward.k, forward.m, forward.batch)
    return tuple(product for product, wanted in zip((of_x, of_weight), asked, strict=False) if wanted)


def _groups(text: str) -> int:
    (groups,) = numbers_in(text)
    return groups


_RULES: dict[str, _Rule] = {
    **{f"aten::{name}": _product_of(0) for name in ("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm")},
    **{
        f"aten::{name}": _product_of(1)
        for name in (
            "addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addmv", "addmv_"
        )
    },
    "aten::_scaled_mm": _scaled,
    "aten::_scaled_mm_v2": _scaled,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm_v2": _grouped,
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_weight_int8pack_mm": _rows_of_weight,
    "aten::_weight_int4pack_mm": lambda shapes: _rows_of_weight(shapes, packed=8),
    "aten::_weight_int4pack_mm_for_cpu": _rows_of_weight,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
}  # fmt: skip
