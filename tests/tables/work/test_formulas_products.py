"""Sizes of matrix products: derived by hand, and as many FLOPs as the formulas count."""

from __future__ import annotations

import pytest

from profiler_wrapper.tables.work.formulas import Product, flops_of, products_of
from profiler_wrapper.trace.recording import OpShapes

NO_ARGUMENTS: dict[int, str] = {}
CONVOLUTION = {3: "[2, 2]", 4: "[1, 1]", 5: "[1, 1]", 6: "False", 7: "[0, 0]", 8: "1"}
GRADIENTS = {4: "[2, 2]", 5: "[1, 1]", 6: "[1, 1]", 7: "False", 8: "[0, 0]", 9: "1", 10: "[True, True, False]"}


def given(*dims: list[int], arguments: dict[int, str] = NO_ARGUMENTS, dtype: str = "float") -> OpShapes:
    """Tensors of these sizes, then arguments by their places."""
    length = max([len(dims), *(place + 1 for place in arguments)])
    padded = [*dims, *([] for _ in range(length - len(dims)))]
    concrete = tuple(arguments.get(place, "") for place in range(length))
    return OpShapes(dims=tuple(padded), types=tuple(dtype if size else "" for size in padded), concrete=concrete)


# 16 x 16 pixels, a filter of 3 x 3, every second place, one pixel around: 8 x 8 places in each of 2 images.
CASES = {
    "mm": ("aten::mm", given([4, 8], [8, 6]), (Product(4, 6, 8),)),
    "addmm": ("aten::addmm", given([6], [4, 8], [8, 6]), (Product(4, 6, 8),)),
    "bmm": ("aten::bmm", given([3, 4, 8], [3, 8, 6]), (Product(4, 6, 8, 3),)),
    "baddbmm": ("aten::baddbmm", given([3, 4, 6], [3, 4, 8], [3, 8, 6]), (Product(4, 6, 8, 3),)),
    "broadcast": ("aten::matmul", given([5, 1, 4, 8], [3, 8, 6]), (Product(4, 6, 8, 15),)),
    "mv": ("aten::mv", given([4, 8], [8]), (Product(4, 1, 8),)),
    "dot": ("aten::dot", given([8], [8]), (Product(1, 1, 8),)),
    "linear": ("aten::linear", given([2, 5, 8], [6, 8], [6]), (Product(10, 6, 8),)),
    "linear, vector": ("aten::linear", given([2, 5, 8], [8]), (Product(10, 1, 8),)),
    "scaled": ("aten::_scaled_mm", given([4, 8], [8, 6], dtype="c10::Float8_e4m3fn"), (Product(4, 6, 8),)),
    "packed": ("aten::_scaled_mm", given([4, 8], [8, 6], dtype="c10::Float4_e2m1fn_x2"), (Product(4, 6, 16),)),
    "grouped rows": ("aten::_grouped_mm", given([40, 8], [3, 8, 6], [3]), (Product(40, 6, 8),)),
    "grouped sums": ("aten::_grouped_mm", given([8, 40], [40, 6], [3]), (Product(8, 6, 40),)),
    "grouped batch": ("aten::_grouped_mm", given([3, 4, 8], [3, 8, 6]), (Product(4, 6, 8, 3),)),
    "int4": ("aten::_weight_int4pack_mm", given([4, 8], [2, 1, 1, 1]), (Product(4, 16, 8),)),
    "convolution": (
        "aten::convolution",
        given([2, 4, 16, 16], [6, 4, 3, 3], arguments=CONVOLUTION),
        (Product(2 * 8 * 8, 6, 4 * 9),),
    ),
    "groups": (
        "aten::_convolution",
        given([2, 4, 16, 16], [6, 2, 3, 3], arguments={**CONVOLUTION, 8: "2"}),
        (Product(2 * 8 * 8, 3, 2 * 9, 2),),
    ),
    "transposed": (
        "aten::convolution",
        given([2, 4, 16, 16], [4, 6, 3, 3], arguments={**CONVOLUTION, 6: "True"}),
        (Product(2 * 16 * 16, 6 * 9, 4),),
    ),
    "both gradients": (
        "aten::convolution_backward",
        given([2, 6, 8, 8], [2, 4, 16, 16], [6, 4, 3, 3], arguments=GRADIENTS),
        (Product(2 * 8 * 8, 4 * 9, 6), Product(6, 4 * 9, 2 * 8 * 8)),
    ),
    "gradient of the weight": (
        "aten::convolution_backward",
        given([2, 6, 8, 8], [2, 4, 16, 16], [6, 4, 3, 3], arguments={**GRADIENTS, 10: "[False, True, False]"}),
        (Product(6, 4 * 9, 2 * 8 * 8),),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sizes_of_products_follow_from_the_inputs(case: str) -> None:
    name, shapes, expected = CASES[case]
    assert products_of(name, shapes) == expected


@pytest.mark.parametrize("case", CASES)
def test_products_have_the_flops_that_are_counted(case: str) -> None:
    name, shapes, _ = CASES[case]
    counted = flops_of(name, shapes)
    assert counted is not None
    assert sum(product.flops for product in products_of(name, shapes)) == counted.flops


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::add", given([4, 8], [4, 8])),
        ("aten::mm", given([4, 8], [7, 6])),
        ("aten::mm", given([4, 8])),
        ("aten::mm", given()),
        ("aten::convolution", given([2, 4, 16, 16], [6, 4, 3, 3])),
        ("aten::_grouped_mm", given([40, 8], [3, 7, 6])),
    ],
)
def test_what_is_no_product_has_none(name: str, shapes: OpShapes) -> None:
    assert products_of(name, shapes) == ()
