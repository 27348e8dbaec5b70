"""FLOPs of one op from the shapes it was called with: two for each multiply-add, as torch counts them.

A product of matrices is told by its sizes, m x k times k x n, so many of them. A convolution is a product too: of the
patches of its input with its filters, once for each group. The numbers agree with `torch.utils.flop_counter`, but

- a grouped convolution's weight gradient counts as many as its forward (torch: times the groups);
- attention on a CPU, `mv`, `dot`, `_int_mm`, grouped and weight-only quantised products have a formula here.

Elementwise work, norms, softmax and reductions are no FLOPs here: they do not limit a matmul machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

from profiler_wrapper.errors import shown
from profiler_wrapper.place import classes
from profiler_wrapper.place.attention_ops import ATTENTIONS, flex_attention
from profiler_wrapper.trace.recording import OpShapes

Sizes = Sequence[int]
WRONG_INPUTS = (LookupError, TypeError, ValueError, ZeroDivisionError)  # what a formula raises for others


class OpFlops(NamedTuple):
    """FLOPs of one call: all of them, and without those that a causal mask makes needless."""

    flops: int
    causal_flops: int
    dtype: str  # of the numbers multiplied: bfloat16, float8_e4m3fn, int8 ...; "" where not known
    repeated_flops: int = 0  # of them, the scores that a fused attention's backward computes again
    causal_repeated_flops: int = 0


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

    @property
    def elements(self) -> int:
        """Of the results."""
        return self.m * self.n * self.batch


_Formula = Callable[[OpShapes], tuple[Product, ...]]


def flops_of(name: str, shapes: OpShapes) -> OpFlops | None:
    """FLOPs of one call of the op `name`; None where its shapes do not tell."""
    try:
        if (attention := ATTENTIONS.get(name) or flex_attention(name)) is not None:
            counted = attention.flops(shapes)
            return None if counted is None else OpFlops(*counted[:2], dtype_of(shapes, attention.query), *counted[2:])
        flops = sum(product.flops for product in _PRODUCTS[name](shapes))
        return OpFlops(flops, flops, dtype_of(shapes, 1 if name in _SECOND_IS_MULTIPLIED else 0))
    except WRONG_INPUTS:
        return None


def products_of(name: str, shapes: OpShapes) -> tuple[Product, ...]:
    """The products of one call of the op `name`; empty where its name or its shapes tell none."""
    try:
        return _PRODUCTS[name](shapes)
    except WRONG_INPUTS:
        return ()


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
    name = shapes.types[operand] if operand < len(shapes.types) else ""
    return _DTYPES.get(name, name.removeprefix("c10::").lower())


# --- which ops ------------------------------------------------------------------------------------

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
    return name in _PRODUCTS or name in ATTENTIONS or flex_attention(name) is not None


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


# --- what sizes and values say; ValueError where they do not ----------------------------------------


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
        raise ValueError(f"{shown(text)} is neither True nor False")
    return text == "True"


# --- matrix products and convolutions ---------------------------------------------------------------


def _product(left: Sizes, right: Sizes, *, packed: int = 1) -> tuple[Product, ...]:
    """(..., m, k) x (..., k, n); a vector is a matrix of one row or column; `packed`: numbers in one element."""
    rows = left if len(left) > 1 else [1, *left]
    columns = right if len(right) > 1 else [*right, 1]
    if not left or not right or rows[-1] != columns[-2]:
        raise ValueError("no matrix product")
    batch = prod(broadcast([rows[:-2], columns[:-2]]))
    return (Product(rows[-2], columns[-1], packed * rows[-1], batch),)


def _packed(shapes: OpShapes) -> int:
    """A type of four bits holds two numbers in one element."""
    return 2 if "Float4" in shapes.types[0] else 1


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
    groups = int(shapes.concrete[8])
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
    forward = _of_filters(x[0] * prod(met[2:]), weight, int(shapes.concrete[9]), transposed=transposed)
    of_x = Product(forward.m, forward.k, forward.n, forward.batch)
    of_weight = Product(forward.n, forward.k, forward.m, forward.batch)
    return tuple(product for product, wanted in zip((of_x, of_weight), asked, strict=False) if wanted)


_SECOND_IS_MULTIPLIED = tuple(
    f"aten::{name}"
    for name in (
        "addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addmv", "addmv_",
        "convolution_backward",
    )
)  # fmt: skip
_PRODUCTS: dict[str, _Formula] = {
    **dict.fromkeys(
        (f"aten::{name}" for name in ("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm")),
        lambda shapes: _product(shapes.dims[0], shapes.dims[1]),
    ),
    **dict.fromkeys(_SECOND_IS_MULTIPLIED, lambda shapes: _product(shapes.dims[1], shapes.dims[2])),
    **dict.fromkeys(
        ("aten::_scaled_mm", "aten::_scaled_mm_v2"),
        lambda shapes: _product(shapes.dims[0], shapes.dims[1], packed=_packed(shapes)),
    ),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), _grouped),
    **dict.fromkeys(("aten::linear", "mkldnn::_linear_pointwise"), _linear),
    **dict.fromkeys(("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm_for_cpu"), _rows_of_weight),
    "aten::_weight_int4pack_mm": lambda shapes: _rows_of_weight(shapes, packed=8),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution),
    "aten::convolution_backward": _convolution_backward,
}
