"""Bytes of elementwise ops: all that is given is read once, and what it gives together is written once.

An op in place (`add_`) writes its first input. One with `out=` has its output as a further input at the end.
"""

from __future__ import annotations

from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands
from profiler_wrapper.analysis.op_sizes import broadcast

# Name -> how many inputs it declares. Whole numbers give whole numbers.
_KEEPS_TYPE = {
    **dict.fromkeys(
        (
            "abs", "neg", "square", "relu", "relu6", "sign", "sgn", "floor", "ceil", "trunc", "frac", "silu",
            "mish", "hardsigmoid", "hardswish", "bitwise_not", "conj_physical", "log_sigmoid", "selu", "erfinv",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "mul", "multiply", "maximum", "minimum", "fmax", "fmin", "remainder", "fmod", "pow", "bitwise_and",
            "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "floor_divide", "gelu",
            "clamp_min", "clamp_max", "leaky_relu", "hardshrink", "softshrink", "sigmoid_backward", "tanh_backward",
            "silu_backward", "mish_backward", "hardswish_backward", "hardsigmoid_backward", "heaviside", "prelu",
            "__and__", "__or__", "round",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "add", "sub", "subtract", "rsub", "lerp", "clamp", "hardtanh", "threshold", "softplus", "masked_fill",
            "threshold_backward", "gelu_backward", "native_dropout_backward", "elu", "_conj_copy", "logit_backward",
        ),
        3,
    ),
    **dict.fromkeys(
        (
            "addcmul", "addcdiv", "nan_to_num", "hardtanh_backward", "leaky_relu_backward", "softplus_backward",
            "mse_loss_backward", "l1_loss_backward",
        ),
        4,
    ),
    "elu_backward": 6,
    "huber_loss_backward": 5,
    "smooth_l1_loss_backward": 5,
    "_prelu_kernel": 2,
}  # fmt: skip
# Whole numbers give float32.
_GIVES_FLOATING = {
    **dict.fromkeys(
        (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh",
            "asin", "acos", "atan", "asinh", "acosh", "atanh", "sqrt", "rsqrt", "reciprocal", "sigmoid", "erf",
            "erfc", "lgamma", "digamma", "special_entr",
        ),
        1,
    ),
    **dict.fromkeys(("true_divide", "atan2", "xlogy", "logit", "logaddexp"), 2),
    "div": 2,
}  # fmt: skip
_GIVES_BOOL = {
    **dict.fromkeys(("isnan", "isinf", "isfinite", "isneginf", "isposinf", "logical_not", "signbit"), 1),
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "greater", "less"), 2
    ),
}
_WRITES_FIRST_ONLY = frozenset(
    (
        "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_",
        "cauchy_", "log_normal_", "trunc_normal_", "eye_",
    )
)  # fmt: skip


def has_rule(op: str) -> bool:
    """Whether the op (`add`, without its namespace) is one of these."""
    return op in _WRITES_FIRST_ONLY or _plain(op) in _INPUTS or _plain(op) in _OTHERS


def moved(op: str, given: Operands) -> Moved:
    """Bytes of one call. Raises `NotTold`."""
    if op in _WRITES_FIRST_ONLY:
        given.dims(0)
        return Moved(given.read(*range(1, given.count)), given.read(0))
    name = _plain(op)
    if name in _OTHERS:
        return _OTHERS[name](op, given)
    return _elementwise(op, given)


def _plain(op: str) -> str:
    return op if op in _INPUTS or not op.endswith("_") or op.endswith("__") else op[:-1]


def _elementwise(op: str, given: Operands) -> Moved:
    name = _plain(op)
    count = _INPUTS[name]
    if name == "div" and given.count > 2 and not given.is_tensor(2):
        count = 3  # with a way to round
    inputs = [place for place in range(min(count, given.count)) if given.is_tensor(place)]
    read = given.read(*(place for place in inputs if not given.is_wrapped_number(place) or len(inputs) == 1))
    if op != name:
        return Moved(read, given.read(0))
    if given.is_tensor(count):
        return Moved(read, _size_of_out(given, inputs) * given.size(count))
    return Moved(read, _size_of_out(given, inputs) * _element(name, given, inputs, count))


def _size_of_out(given: Operands, inputs: list[int]) -> int:
    total = 1
    for size in broadcast(given.dims(place) for place in inputs):
        total *= size
    return total


def _element(name: str, given: Operands, inputs: list[int], count: int) -> int:
    """Bytes of one element of the output."""
    if name in _GIVES_BOOL:
        return 1
    if name == "abs" and given.is_complex(0):
        return given.size(0) // 2
    if name == "masked_fill":
        return given.size(0)
    whole = not any(given.is_floating(place) for place in inputs)
    if whole and (name in _GIVES_FLOATING or given.has_floating_scalar(range(count))):
        if count > _INPUTS[name]:
            raise NotTold("how it rounds is not recorded, and whether whole numbers stay whole")
        return 4
    if all(given.type(place) == "bool" for place in inputs) and len(inputs) < min(count, 2):
        if name in ("bitwise_not", "masked_fill"):
            return 1
        raise NotTold("a truth value and a number")
    return given.promoted(inputs)


def _where(_: str, given: Operands) -> Moved:
    """condition, self, other; with the condition alone it gives as many places as are true."""
    if given.count < 3:
        raise NotTold("as many as are true")
    inputs = [place for place in range(3) if given.is_tensor(place)]
    values = [place for place in (1, 2) if place in inputs]
    read = given.read(*(place for place in inputs if not given.is_wrapped_number(place)))
    element = given.size(3) if given.is_tensor(3) else given.promoted(values)
    return Moved(read, _size_of_out(given, inputs) * element)


def _native_dropout(_: str, given: Operands) -> Moved:
    """Its output and a mask of bytes; where it is not trained, a copy and nothing to mask."""
    return Moved(given.read(0), given.full(0) + given.elements(0))


def _glu(_: str, given: Operands) -> Moved:
    return Moved(given.read(0), given.full(0) // 2)


def _glu_backward(_: str, given: Operands) -> Moved:
    return Moved(given.read(0, 1), given.full(1))


def _complex(_: str, given: Operands) -> Moved:
    """Two real numbers give one complex."""
    return Moved(given.read(0, 1), 2 * given.size(0) * _size_of_out(given, [0, 1]))


def _triangle(_: str, given: Operands) -> Moved:
    """All of the output is written; of the input what lies in the other half need not be read, but is counted."""
    return Moved(given.read(0), given.full(0))


_INPUTS = {**_KEEPS_TYPE, **_GIVES_FLOATING, **_GIVES_BOOL}
_OTHERS = {
    "where": _where,
    "native_dropout": _native_dropout,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "complex": _complex,
    "polar": _complex,
    "tril": _triangle,
    "triu": _triangle,
}
