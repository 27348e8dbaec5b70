"""Bytes of matrix products, convolutions and fused attention.

Inputs and their places are those that `flop_formulas` and `attention_ops` know.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from profiler_wrapper.analysis.attention_ops import ATTENTIONS, Attention
from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands
from profiler_wrapper.analysis.op_sizes import convolved, elements_of_product, per_dimension

_Rule = Callable[[Operands], Moved]
_FLOAT = 4


def _product(given: Operands) -> Moved:
    """a, b [, out]."""
    return Moved(given.read(0, 1), elements_of_product(given.dims(0), given.dims(1)) * given.size(0))


def _int_product(given: Operands) -> Moved:
    """Bytes times bytes give int32."""
    return Moved(given.read(0, 1), 4 * elements_of_product(given.dims(0), given.dims(1)))


def _added(given: Operands) -> Moved:
    """c, a, b, beta, alpha: with a beta of zero c is not read."""
    elements = elements_of_product(given.dims(1), given.dims(2))
    added = given.read(0) if not _is_zero(given.text(3)) else 0
    return Moved(given.read(1, 2) + added, elements * given.size(1))


def _added_batches(given: Operands) -> Moved:
    """c, a, b, beta, alpha: the products of all batches become one matrix."""
    (_, rows, _), (_, _, columns) = given.dims(1), given.dims(2)
    added = given.read(0) if not _is_zero(given.text(3)) else 0
    return Moved(given.read(1, 2) + added, rows * columns * given.size(1))


def _is_zero(text: str) -> bool:
    return text in ("0", "0.", "False")


def _scaled(given: Operands) -> Moved:
    """a, b, scale a, scale b, bias, scale of the result, type of the output."""
    out = given.size_of_dtype(6)
    element = given.size(0) if out is None else out
    return Moved(given.read(0, 1, 2, 3, 4, 5), elements_of_product(given.dims(0), given.dims(1)) * element)


def _grouped(given: Operands) -> Moved:
    """a, b, offsets, bias, type of the output: rows, columns, what is summed over in groups, or a batch."""
    left, right = given.dims(0), given.dims(1)
    if not {len(left), len(right)} <= {2, 3}:
        raise NotTold("no grouped product")
    groups = left[0] if len(left) == 3 else right[0] if len(right) == 3 else given.dims(2)[0]
    batch = groups if len(left) == len(right) else 1
    out = given.size_of_dtype(4)
    element = given.size(0) if out is None else out
    return Moved(given.read(0, 1, 2, 3), batch * left[-2] * right[-1] * element)


def _linear(given: Operands) -> Moved:
    """x, weight, bias."""
    x, weight = given.dims(0), given.dims(1)
    if not x or x[-1] != weight[-1] or len(weight) > 2:
        raise NotTold("no linear layer")
    return Moved(given.read(0, 1, 2), prod(x[:-1]) * prod(weight[:-1]) * given.size(0))


def _packed_weight(rows_per_entry: int) -> _Rule:
    """x (m, k), a packed weight whose first dimension tells the columns, and what its numbers are scaled by."""

    def rule(given: Operands) -> Moved:
        columns = rows_per_entry * given.dims(1)[0]
        return Moved(given.read(*range(given.count)), given.dims(0)[0] * columns * given.size(0))

    return rule


def _convolution(given: Operands) -> Moved:
    """x, weight, bias, stride, padding, dilation, transposed, output padding, groups."""
    x, weight = given.dims(0), given.dims(1)
    taps = weight[2:]
    if len(x) != len(weight) or not taps:
        raise NotTold("no convolution")
    stride, padding, dilation, more = (per_dimension(given.numbers(place), len(taps)) for place in (3, 4, 5, 7))
    if given.flag(6):
        channels = weight[1] * given.number(8)
        out = [
            (size - 1) * step - 2 * pad + spread * (count - 1) + extra + 1
            for size, count, step, pad, spread, extra in zip(x[2:], taps, stride, padding, dilation, more, strict=True)
        ]
    else:
        channels = weight[0]
        out = convolved(x[2:], taps, stride, padding, dilation)
    return Moved(given.read(0, 1, 2), x[0] * channels * prod(out) * given.size(0))


def _convolution_backward(given: Operands) -> Moved:
    """grad_out, x, weight, bias sizes, ..., mask: the gradient of x needs the weight, that of the weight x."""
    asked = given.flags(10)
    if len(asked) != 3:
        raise NotTold("no mask")
    of_x, of_weight, of_bias = asked
    read = given.read(0) + (given.read(2) if of_x else 0) + (given.read(1) if of_weight else 0)
    written = (given.full(1) if of_x else 0) + (given.full(2) if of_weight else 0)
    if of_bias:
        written += sum(given.numbers(3)) * given.size(0)
    return Moved(read, written)


# --- attention ----------------------------------------------------------------------------------

# Places of masks and biases, which are read where they are given.
_BIAS = {
    "aten::_scaled_dot_product_efficient_attention": 3,
    "aten::_scaled_dot_product_efficient_attention_backward": 4,
    "aten::_scaled_dot_product_cudnn_attention": 3,
    "aten::_scaled_dot_product_cudnn_attention_backward": 8,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 5,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 8,
    "aten::_scaled_dot_product_fused_attention_overrideable": 3,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 4,
    "aten::_scaled_dot_product_attention_math_for_mps": 3,
    "aten::_efficient_attention_forward": 3,
    "aten::_efficient_attention_backward": 4,
}
# Places of the output and of the sums of exponentials among the inputs of a backward; else right after the value.
_OUT_AND_SUMS = {
    "aten::_scaled_dot_product_efficient_attention_backward": (5, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": (6, 7),
    "aten::_efficient_attention_backward": (5, 10),
}
# Places of the flag that asks for the sums of exponentials; all others always give them.
_ASKS_FOR_SUMS = {
    "aten::_scaled_dot_product_efficient_attention": 4,
    "aten::_scaled_dot_product_cudnn_attention": 4,
    "aten::_efficient_attention_forward": 10,
}
_BIAS_MASK = {
    "aten::_scaled_dot_product_efficient_attention_backward": 10,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 5,
}


def attention(name: str, given: Operands) -> Moved:
    """Forward: q, k, v and a mask are read, the output and a sum of exponentials per query and head written.

    Backward: these and the gradient of the output are read, the gradients of q, k and v written. The keys and
    values of a cache in pages are `NotTold`: how much of it is used is not recorded.
    """
    told = ATTENTIONS[name]
    if any(given.is_tensor(place) and given.dims(place) for place in told.absent):
        raise NotTold("keys in pages, or shortened")
    q, k, v = range(told.query, told.query + 3)
    bias = _BIAS.get(name, -1)
    read = given.read(q, k, v) + (given.read(bias) if bias >= 0 else 0)
    if not told.backward:
        return Moved(read, _output(given, q, v) + _sums(name, given, told))
    out, sums = _OUT_AND_SUMS.get(name, (v + 1, v + 2))
    given.dims(out), given.dims(sums)
    written = given.full(q) + given.full(k) + given.full(v)
    mask = given.flags(_BIAS_MASK[name]) if name in _BIAS_MASK else []
    if len(mask) == 4 and mask[3]:
        written += given.full(bias)
    return Moved(read + given.read(q - 1, out, sums), written)


def _output(given: Operands, q: int, v: int) -> int:
    """As the query, as wide as the value."""
    *rows, _ = given.dims(q)
    return prod(rows) * given.dims(v)[-1] * given.size(q)


def _sums(name: str, given: Operands, told: Attention) -> int:
    if name in _ASKS_FOR_SUMS and not given.flag(_ASKS_FOR_SUMS[name]):
        return 0
    if name == "aten::_scaled_dot_product_attention_math_for_mps":
        raise NotTold("it gives its weights")
    *rows, _ = given.dims(told.query)
    return prod(rows) * max(_FLOAT, given.size(told.query))


PRODUCTS: dict[str, _Rule] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), _product),
    "aten::_int_mm": _int_product,
    **dict.fromkeys(
        (
            "aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::baddbmm", "aten::baddbmm_",
            "aten::addmv", "aten::addmv_",
        ),
        _added,
    ),
    **dict.fromkeys(("aten::addbmm", "aten::addbmm_"), _added_batches),
    "aten::_scaled_mm": _scaled,
    "aten::_grouped_mm": _grouped,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_weight_int8pack_mm": _packed_weight(1),
    "aten::_weight_int4pack_mm": _packed_weight(8),
    "aten::_weight_int4pack_mm_for_cpu": _packed_weight(1),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
}  # fmt: skip
# They call one of the above wherever they can, and do the work themselves elsewhere.
CALLERS: dict[str, _Rule] = {"aten::linear": _linear, "aten::matmul": _product}
