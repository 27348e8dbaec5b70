"""FLOPs of one op from the shapes it was called with: two for each multiply-add, as torch counts them.

The formulas are those of `torch.utils.flop_counter`, and agree with it, but that here

- a grouped convolution's weight gradient counts as many as its forward (torch: times the groups);
- attention on a CPU, `mv`, `dot`, `_int_mm`, grouped and weight-only quantised products have one.

Elementwise work, norms, softmax and reductions are no FLOPs here: they do not limit a matmul machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attention_ops import ATTENTIONS, flex_attention
from profiler_wrapper.analysis.op_sizes import (
    Sizes,
    convolved,
    elements_of_product,
    flag_of,
    flags_in,
    numbers_in,
    per_dimension,
)
from profiler_wrapper.recording.shapes import OpShapes


class OpFlops(NamedTuple):
    """FLOPs of one call: all of them, and without those that a causal mask makes needless."""

    flops: int
    causal_flops: int
    dtype: str  # of the numbers multiplied: bfloat16, float8_e4m3fn, int8 ...; "" where not told
    repeated_flops: int = 0  # of them, the scores that a fused attention's backward computes again
    causal_repeated_flops: int = 0


_Formula = Callable[[OpShapes], int | None]

_LINEAR_ALGEBRA_OF_RNN = re.compile(r"aten::(_cudnn_rnn|miopen_rnn|mkldnn_rnn_layer|_thnn_fused_\w+_cell)")
_FUSED_ELEMENTWISE = re.compile(r"(triton|cpp)_(poi|red|per)_")
_GENERATED_ELEMENTWISE = re.compile(r"triton_(poi|red|per|for|split_scan)_")  # Inductor's, torch 2.13
_OP = re.compile(r"\w+(\.\w+)*::\w+")
# What ops of these do is known: products have a formula or a rule, all others none to count.
_OF_TORCH = re.compile(r"(aten|torch|prims?|rngprims|_?c10d(_functional)?|fsdp|inductor|profiler|mkldnn)(\.\w+)*::")
_WITHOUT_FLOPS = frozenset(classes.CLASSES) - {"gemm", "attention", "other"}
# What they call does the work, or, for elementwise cases, there is none.
_COMPOSITE = re.compile(r"aten::(einsum|conv[123]d|matmul|linear)$")


def has_formula(name: str) -> bool:
    """Whether FLOPs of ops of this name can be told from their shapes."""
    return name in _MATRIX_PRODUCTS or name in _CONVOLUTIONS or name in ATTENTIONS or flex_attention(name) is not None


def has_work(name: str) -> bool:
    """Whether an op of this name multiplies matrices, convolves or attends, in itself or in what it calls."""
    if has_formula(name) or _LINEAR_ALGEBRA_OF_RNN.match(name):
        return True
    if _COMPOSITE.match(name) or _FUSED_ELEMENTWISE.match(name):
        return False
    return classes.class_of_op(name) == "gemm" or classes.attention_backend_of_op(name) not in ("", "math")


def class_of_work(name: str) -> str:
    """The class of an op with work, or of one that may have some."""
    if is_of_library(name) and not has_work(name):
        return "other"
    return "attention" if classes.attention_backend_of_op(name) else "gemm"


def is_op(name: str) -> bool:
    """Whether it is the name of an op, not that of an autograd node, a mark or a range."""
    return _OP.match(name) is not None and not name.startswith(("autograd::", "torch::"))


def is_of_library(name: str) -> bool:
    """Whether an op of this name is none of torch's, so that nothing is known of what it computes."""
    return is_op(name) and not _OF_TORCH.match(name) and not is_without_flops(name)


def is_without_flops(name: str) -> bool:
    """Whether the name of an op or a kernel tells that it multiplies nothing: a norm, an optimizer, a collective."""
    if _GENERATED_ELEMENTWISE.match(name) or classes.is_communication(name):
        return True
    return (classes.class_of_op(name) or classes.class_of_kernel(name)) in _WITHOUT_FLOPS


def flops_of(name: str, shapes: OpShapes) -> OpFlops | None:
    """FLOPs of one call of the op `name`; None where its shapes do not tell."""
    try:
        return _flops_of(name, shapes)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):  # not the inputs that the formula is for
        return None


def _flops_of(name: str, shapes: OpShapes) -> OpFlops | None:
    attention = ATTENTIONS.get(name) or flex_attention(name)
    if attention is not None:
        counted = attention.flops(shapes)
        return None if counted is None else OpFlops(*counted[:2], dtype_of(shapes, attention.query), *counted[2:])
    operand, formula = _MATRIX_PRODUCTS.get(name) or _CONVOLUTIONS[name]
    flops = formula(shapes)
    return None if flops is None else OpFlops(flops, flops, dtype_of(shapes, operand))


# --- matrix products ----------------------------------------------------------------------------


def _product(left: Sizes, right: Sizes) -> int:
    """(..., m, k) x (..., k, n)."""
    return 2 * elements_of_product(left, right) * left[-1]


def _product_of(first: int) -> tuple[int, _Formula]:
    return first, lambda shapes: _product(shapes.dims[first], shapes.dims[first + 1])


def _scaled(shapes: OpShapes) -> int:
    """A type of four bits holds two numbers in one element, along the dimension that is summed over."""
    packed = 2 if "Float4" in shapes.types[0] else 1
    return packed * _product(shapes.dims[0], shapes.dims[1])


def _grouped(shapes: OpShapes) -> int:
    """Groups of rows (2-d x 3-d), of columns (3-d x 2-d), of what is summed over (2-d x 2-d), or a batch.

    The groups are taken to hold all rows: where they end is not recorded.
    """
    left, right = shapes.dims[0], shapes.dims[1]
    packed = 2 if "Float4" in shapes.types[0] else 1
    if left[-1] != right[-2] or not {len(left), len(right)} <= {2, 3}:
        raise ValueError("no grouped product")
    batch = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * packed * batch * left[-2] * left[-1] * right[-1])


def _linear(shapes: OpShapes) -> int:
    """(..., k) x (n, k)."""
    x, weight = shapes.dims[0], shapes.dims[1]
    if x[-1] != weight[-1] or len(weight) > 2:
        raise ValueError("no linear layer")
    return int(2 * prod(x) * prod(weight[:-1]))


def _int4_on_device(shapes: OpShapes) -> int:
    """(m, k) x a weight of eight rows in each entry of its first dimension."""
    (m, k), weight = shapes.dims[0], shapes.dims[1]
    return int(2 * m * k * 8 * weight[0])


def _rows_of_weight(shapes: OpShapes) -> int:
    """(m, k) x a packed weight of n rows."""
    (m, k), weight = shapes.dims[0], shapes.dims[1]
    return int(2 * m * k * weight[0])


_MATRIX_PRODUCTS: dict[str, tuple[int, _Formula]] = {
    **{f"aten::{name}": _product_of(0) for name in ("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm")},
    **{
        f"aten::{name}": _product_of(1)
        for name in (
            "addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addmv", "addmv_"
        )
    },
    "aten::_scaled_mm": (0, _scaled),
    "aten::_scaled_mm_v2": (0, _scaled),
    "aten::_grouped_mm": (0, _grouped),
    "aten::_scaled_grouped_mm": (0, _grouped),
    "aten::_scaled_grouped_mm_v2": (0, _grouped),
    "aten::linear": (0, _linear),
    "mkldnn::_linear_pointwise": (0, _linear),
    "aten::_weight_int8pack_mm": (0, _rows_of_weight),
    "aten::_weight_int4pack_mm": (0, _int4_on_device),
    "aten::_weight_int4pack_mm_for_cpu": (0, _rows_of_weight),
}  # fmt: skip


# --- convolutions -------------------------------------------------------------------------------


def _convolution(shapes: OpShapes) -> int:
    """Each output (of a transposed one, each input) meets the filter once; the filter has the groups in its shape.

    Inputs: x, weight, bias, stride, padding, dilation, transposed, ...
    """
    x, weight = shapes.dims[0], shapes.dims[1]
    filter_size = weight[2:]
    if len(x) != len(weight) or not filter_size:
        raise ValueError("no convolution")
    if flag_of(shapes.concrete[6]):
        return int(2 * x[0] * prod(x[2:]) * prod(weight))
    stride, padding, dilation = (per_dimension(numbers_in(shapes.concrete[i]), len(filter_size)) for i in (3, 4, 5))
    return int(2 * x[0] * prod(convolved(x[2:], filter_size, stride, padding, dilation)) * prod(weight))


def _convolution_backward(shapes: OpShapes) -> int:
    """As many as forward for each of the gradients of x and of the weight that the mask asks for; none for the bias.

    Inputs: grad_out, x, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask.
    """
    grad_out, x, weight = shapes.dims[:3]
    asked = flags_in(shapes.concrete[10])
    if len(asked) != 3 or len(x) != len(weight):
        raise ValueError("no mask")
    met = x if flag_of(shapes.concrete[7]) else grad_out
    return int(2 * x[0] * prod(met[2:]) * prod(weight) * asked[:2].count(True))


_CONVOLUTIONS: dict[str, tuple[int, _Formula]] = {
    "aten::convolution": (0, _convolution),
    "aten::_convolution": (0, _convolution),
    "aten::convolution_overrideable": (0, _convolution),
    "aten::convolution_backward": (1, _convolution_backward),
}

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short int": "int16",
    "int": "int32",
    "long int": "int64",
    "c10::Half": "float16",
}


def dtype_of(shapes: OpShapes, operand: int) -> str:
    """The type of an input by torch's name."""
    told = shapes.types[operand] if operand < len(shapes.types) else ""
    return _DTYPES.get(told, told.removeprefix("c10::").lower())
