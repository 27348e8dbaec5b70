"""Bytes that one op must move between memory and chip, from the shapes and types it was called with.

Compulsory traffic: every input is read once, every output written once, whatever a kernel does beyond. Caches
are taken to be of no help between ops, and of all help within one.

- Outputs are not recorded: they follow from the inputs by the rule of the op.
- What was expanded counts once, where the trace has strides; in one without, as if it were dense.
- Of a table (`embedding`, `index_select`, `gather`) the rows asked for count, and at most the table.
- A Python number beside tensors is no traffic.
- Indices (`x[indices]`) are in no trace: what the op calls inside has their shapes, see `indexed`.
- Types of tensors in lists (`cat`, `_foreach_*`, fused optimizers) are in no trace: they are asked for.
- Views, and what only allocates or looks at metadata, move nothing. An op that calls others for all it does
  (`reshape`, `to`, `contiguous`, `zeros`) moves nothing itself.

Where no rule fits the result is None, never an estimate. Nothing here imports torch: a trace is read without it. The
tests compare the rules with what torch gives on its meta device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import ceil, prod
from typing import NamedTuple

from profiler_wrapper.place.attention_ops import ATTENTIONS, NO_MASK, flex_attention
from profiler_wrapper.tables.work.formulas import (
    WRONG_INPUTS,
    Product,
    Sizes,
    broadcast,
    convolved,
    flag_of,
    flags_in,
    numbers_in,
    per_dimension,
    products_of,
)
from profiler_wrapper.trace.recording import OpShapes

BOOL, INTEGER, FLOATING, COMPLEX = range(4)  # kinds of types, in the order in which they promote
# Kind, bytes of one element, torch's numbers of these types (as `dtype` arguments are recorded), their names in a
# trace. Two numbers of four bits share one byte, and count as one element.
_KINDS: tuple[tuple[int, int, tuple[int, ...], str], ...] = (
    (BOOL, 1, (11,), "bool"),
    (INTEGER, 1, (0, 1, 12, 13), "unsigned char, signed char, c10::qint8, c10::quint8"),
    (INTEGER, 2, (2, 27), "short int, short, short unsigned int, unsigned short"),
    (INTEGER, 4, (3, 14, 28), "int, unsigned int, c10::qint32"),
    (INTEGER, 8, (4, 29), "long int, long, long long, __int64, unsigned long, long unsigned int"),
    (FLOATING, 1, (23, 24, 25, 26, 44, 45), "c10::Float8_e5m2, c10::Float8_e4m3fn, c10::Float8_e5m2fnuz, "
     "c10::Float8_e4m3fnuz, c10::Float8_e8m0fnu, c10::Float4_e2m1fn_x2"),
    (FLOATING, 2, (5, 15), "c10::Half, c10::BFloat16"),
    (FLOATING, 4, (6,), "float"),
    (FLOATING, 8, (7,), "double"),
    (COMPLEX, 4, (8,), "c10::complex<c10::Half>"),
    (COMPLEX, 8, (9,), "c10::complex<float>"),
    (COMPLEX, 16, (10,), "c10::complex<double>"),
)  # fmt: skip
_KIND_OF_TYPE = {name: kind for kind, _, _, names in _KINDS for name in names.split(", ")}
SIZE_OF_TYPE = {name: size for _, size, _, names in _KINDS for name in names.split(", ")}
_SIZE_OF_NUMBER = {str(number): size for _, size, numbers, _ in _KINDS for number in numbers}
_WRAPPED_NUMBERS = ("double", "long int", "bool", "c10::complex<double>")


class Operands:
    """The inputs of one call by their place. What asks for one raises one of `WRONG_INPUTS` where it is not given.

    `element_size`: bytes of one element of the tensors in lists, whose types no trace has; None: not known.
    """

    def __init__(self, name: str, shapes: OpShapes, element_size: int | None = None) -> None:
        self.name = name
        self.types = shapes.types
        self.count = len(shapes.types)
        self._shapes = shapes
        self._element_size = element_size

    def is_tensor(self, place: int) -> bool:
        return place < self.count and self.types[place] in SIZE_OF_TYPE

    def is_list(self, place: int) -> bool:
        """Return whether a list of tensors was given there."""
        return place < self.count and self.types[place] == "TensorList"

    def is_wrapped_number(self, place: int) -> bool:
        """Return whether it is a Python number made a tensor without dimensions, which is not read from memory."""
        return self.types[place] in _WRAPPED_NUMBERS and not self.dims(place)

    def dims(self, place: int) -> list[int]:
        if not self.is_tensor(place):
            raise ValueError(f"input {place} is no tensor")
        return list(self._shapes.dims[place])

    def kind(self, place: int) -> int:
        """Return BOOL, INTEGER, FLOATING or COMPLEX."""
        return _KIND_OF_TYPE[self.types[place]]

    def size(self, place: int) -> int:
        """Return the bytes of one element of a tensor, or of the tensors of a list."""
        if self.is_list(place):
            if self._element_size is None:
                raise ValueError("types of tensors in lists are not recorded")
            return self._element_size
        return SIZE_OF_TYPE[self.types[place]]

    def elements(self, place: int) -> int:
        return prod(self.dims(place))

    def each(self, place: int) -> list[tuple[Sizes, Sizes]]:
        """Return sizes and strides (empty where not recorded) of the tensor there, or of all in a list."""
        strides = self._shapes.strides[place] if place < len(self._shapes.strides) else []
        if not self.is_list(place):
            return [(self.dims(place), strides)]
        dims = self._shapes.dims[place]
        return list(zip(dims, strides if len(strides) == len(dims) else [[]] * len(dims), strict=True))

    def full(self, *places: int) -> int:
        """Return the bytes of dense tensors of these shapes."""
        return sum(self.size(place) * sum(prod(dims) for dims, _ in self.each(place)) for place in places)

    def read(self, *places: int) -> int:
        """Return the bytes of the tensors' different elements: what is expanded counts once, an absent tensor as 0."""
        given = [place for place in places if self.is_tensor(place) or self.is_list(place)]
        return sum(self.size(i) * sum(_different_elements(*one) for one in self.each(i)) for i in given)

    def text(self, place: int) -> str:
        """Return the value of an input that is no tensor; "" for none."""
        return self._shapes.concrete[place] if place < len(self._shapes.concrete) else ""

    def number(self, place: int) -> int:
        return int(self.text(place))

    def flag(self, place: int) -> bool:
        return flag_of(self.text(place))

    def flags(self, place: int) -> list[bool]:
        return flags_in(self.text(place))

    def numbers(self, place: int) -> list[int]:
        return numbers_in(self.text(place))

    def type_size(self, place: int, *, sums: bool = False) -> int:
        """Return the element size of the `dtype` there, else of the first input; `sums` of whole numbers are int64."""
        if text := self.text(place):
            return _SIZE_OF_NUMBER[text]
        return 8 if sums and self.kind(0) < FLOATING else self.size(0)

    def product(self, first: int = 0) -> Product:
        """Return the one product of matrices that the op makes, of the tensors at the place `first` and after it."""
        self.dims(first), self.dims(first + 1)
        (product,) = products_of(self.name, self._shapes)
        return product

    def left(self, place: int) -> int:
        """Return the elements of the first input that are left by reducing the dimensions named there; none: all."""
        dims = self.dims(0)
        reduced = {d % max(1, len(dims)) for d in self.numbers(place)}
        return prod(size for i, size in enumerate(dims) if i not in reduced) if reduced else 1

    def promoted(self, places: Iterable[int]) -> int:
        """Return the element size of the result of an elementwise op on the tensors there, by torch's promotion.

        Tensors with dimensions decide before those without, unless the latter are of a higher kind; then the
        largest of the kind.
        """
        given = [place for place in places if self.is_tensor(place)]
        kind = max(map(self.kind, given), default=BOOL)
        arrays = [place for place in given if self.dims(place)]
        deciding = [place for place in arrays if self.kind(place) == kind]
        if arrays and not deciding and all(self.dims(place) or self.is_wrapped_number(place) for place in given):
            return (1, 8, 4, 8)[kind]  # a number beside tensors of a lower kind: the default type
        deciding = deciding or [place for place in given if self.kind(place) == kind]
        if {"c10::Half", "c10::BFloat16"} <= {self.types[place] for place in deciding}:
            return 4
        return max(map(self.size, deciding))


def _different_elements(dims: Sizes, strides: Sizes) -> int:
    """Return how many different elements a tensor has: along an expanded dimension they are the same."""
    if len(strides) != len(dims) or 0 in dims:
        return prod(dims)
    columns = list(zip(dims, strides, strict=True))
    reached = 1 + sum((size - 1) * stride for size, stride in columns)
    return min(prod(size for size, stride in columns if stride), reached)


class Moved(NamedTuple):
    """Bytes of one op call: each input read once, each output written once."""

    read: int
    written: int


_Rule = Callable[[Operands], Moved]
_Bytes = Callable[[Operands], int]
_INDEX = 8  # bytes of one index
_FLOAT = 4
_WHOLE = ("long int", "long", "long long", "__int64", "int")
_FLOATING_NUMBER = re.compile(r"-?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)")


# What whole numbers give, how many inputs the op declares, its names. Each has a form in place (`add_`), which writes
# its first input, and one with `out=`, an input more at the end.
_SAME, _FLOAT32, _TRUTH = "whole numbers", "float32", "truth values"
_ELEMENTWISE = (
    (_SAME, 1, "abs neg square relu relu6 sign sgn floor ceil trunc frac silu mish hardsigmoid hardswish bitwise_not"),
    (_SAME, 1, "conj_physical log_sigmoid selu erfinv"),
    (_SAME, 2, "mul multiply maximum minimum fmax fmin remainder fmod pow bitwise_and bitwise_or bitwise_xor __and__"),
    (_SAME, 2, "__or__ bitwise_left_shift bitwise_right_shift floor_divide gelu clamp_min clamp_max leaky_relu prelu"),
    (_SAME, 2, "_prelu_kernel hardshrink softshrink sigmoid_backward tanh_backward silu_backward mish_backward round"),
    (_SAME, 2, "hardswish_backward hardsigmoid_backward heaviside"),
    (_SAME, 3, "add sub subtract rsub lerp clamp hardtanh threshold softplus masked_fill threshold_backward"),
    (_SAME, 3, "gelu_backward native_dropout_backward _conj_copy logit_backward where"),
    (_SAME, 4, "addcmul addcdiv nan_to_num hardtanh_backward leaky_relu_backward softplus_backward mse_loss_backward"),
    (_SAME, 4, "l1_loss_backward elu"),
    (_SAME, 5, "huber_loss_backward smooth_l1_loss_backward"),
    (_SAME, 6, "elu_backward"),
    (_FLOAT32, 1, "exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh"),
    (_FLOAT32, 1, "sqrt rsqrt reciprocal sigmoid erf erfc lgamma digamma special_entr"),
    (_FLOAT32, 2, "div true_divide atan2 xlogy logit logaddexp"),
    (_TRUTH, 1, "isnan isinf isfinite isneginf isposinf logical_not signbit"),
    (_TRUTH, 2, "eq ne lt le gt ge logical_and logical_or logical_xor greater less"),
)


def _elementwise(op: str, gives: str, declared: int, *, in_place: bool) -> _Rule:
    """Make the rule of an elementwise op: all inputs are read, the broadcast result is written."""

    def rule(x: Operands) -> Moved:
        inputs = [place for place in range(declared) if x.is_tensor(place)]
        read = x.read(*(place for place in inputs if not x.is_wrapped_number(place) or len(inputs) == 1))
        if in_place:
            return Moved(read, _first(x))
        given = [place for place in range(declared, x.count) if x.is_tensor(place)]  # as `out=`
        elements = prod(broadcast(map(x.dims, inputs)))
        return Moved(read, elements * (x.size(given[0]) if given else element(x, inputs)))

    def element(x: Operands, inputs: list[int]) -> int:
        if gives == _TRUTH:
            return 1
        if op == "abs" and x.kind(0) == COMPLEX:
            return x.size(0) // 2
        if op == "masked_fill":
            return x.size(0)
        if op == "where":
            return x.promoted(place for place in inputs if place)  # not the condition
        kind = max(map(x.kind, inputs))
        numbers = [x.text(place) for place in range(declared) if place not in inputs]
        if kind < FLOATING and (gives == _FLOAT32 or any(map(_FLOATING_NUMBER.fullmatch, numbers))):
            if op == "div" and x.count > 2 and not x.is_tensor(2):
                raise ValueError("how it rounds is not recorded, and whether whole numbers stay whole")
            return _FLOAT
        if kind == BOOL and len(inputs) < min(declared, 2):
            raise ValueError("a truth value and a number")
        return x.promoted(inputs)

    return rule


def _first(x: Operands) -> int:
    """Return the different bytes of the first input, which has to be a tensor."""
    x.dims(0)
    return x.read(0)


def _added(x: Operands) -> int:
    """Return the bytes read of c, a, b, beta, alpha: with a beta of zero c is not read."""
    return x.read(1, 2) + (0 if x.text(3) in ("0", "0.", "False") else x.read(0))


def _convolution(x: Operands) -> int:
    """Return the bytes written; inputs: image, weight, bias, stride, padding, dilation, transposed, more, groups."""
    if not x.flag(6):
        return x.product().elements * x.size(0)
    image, weight = x.dims(0), x.dims(1)
    taps = weight[2:]
    if len(image) != len(weight) or not taps:
        raise ValueError("no convolution")
    columns = zip(image[2:], taps, *(per_dimension(x.numbers(i), len(taps)) for i in (3, 4, 5, 7)), strict=True)
    out: list[int] = [
        (i - 1) * stride - 2 * pad + wide * (tap - 1) + more + 1 for i, tap, stride, pad, wide, more in columns
    ]
    return image[0] * weight[1] * x.number(8) * prod(out) * x.size(0)


def _asked(x: Operands, mask: int, *sizes: int) -> int:
    """Return the sum of those of the sizes that the mask asks for."""
    return sum(size for size, asked in zip(sizes, x.flags(mask), strict=True) if asked)


def _attention(x: Operands) -> Moved:
    """Return what attention moves.

    Forward: q, k, v and a mask are read, the output and a sum of exponentials per query and head written.
    Backward: these and the gradient of the output are read, the gradients of q, k and v written. Of the keys and
    values of a cache in pages it is not recorded how much is used.
    """
    op = ATTENTIONS[x.name]
    if any(x.is_tensor(place) and x.dims(place) for place in op.absent):
        raise ValueError("keys in pages, or shortened")
    q, k, v = range(op.query, op.query + 3)
    mask = () if op.mask in (None, NO_MASK) else (op.mask,)
    if op.backward:
        out, sums = op.saved or (v + 1, v + 2)
        x.dims(out), x.dims(sums)
        asked = [] if op.wants_gradients is None else x.flags(op.wants_gradients)
        of_mask = x.full(*mask) if len(asked) == 4 and asked[3] else 0
        return Moved(x.read(q - 1, q, k, v, out, sums, *mask), x.full(q, k, v) + of_mask)
    rows, size = prod(x.dims(q)[:-1]), x.size(q)
    has_sums = op.wants_sums is None or x.flag(op.wants_sums)
    written = rows * x.dims(v)[-1] * size + (rows * max(_FLOAT, size) if has_sums else 0)
    return Moved(x.read(q, k, v, *mask), written)


def _reduced(x: Operands) -> int:
    """Return how many elements are left, of input, dimensions, ...; where no dimensions are given, one."""
    return x.left(1) if x.count > 2 else 1


def _extreme(x: Operands) -> int:
    """Return the bytes that `max` writes: with indices where it has a dimension, or elementwise of two inputs."""
    if x.is_tensor(1) and x.count == 2:
        return max(x.elements(0), x.elements(1)) * x.promoted((0, 1))
    if x.count < 3:
        return x.size(0)
    x.number(1)
    return x.left(1) * (x.size(0) + _INDEX)


def _loss(x: Operands, inputs: tuple[int, ...], reduction: int) -> int:
    """Return the elements of the loss: without a reduction as many as the inputs have."""
    return max(map(x.elements, inputs)) if x.number(reduction) == 0 else 1


def _pooled(x: Operands, *, indices: bool) -> int:
    """Return the bytes written; inputs: image, kernel, stride, padding, dilation (of maxima), rounding."""
    dims, taps = x.dims(0), x.numbers(1)
    dilation = x.numbers(4) if indices else [1] * len(taps)
    if x.flag(5 if indices else 4) or not taps:
        raise ValueError("rounded up")
    out = convolved(dims[-len(taps) :], taps, x.numbers(2) or taps, x.numbers(3), dilation)
    return prod(dims[: -len(taps)]) * prod(out) * (x.size(0) + (_INDEX if indices else 0))


def _statistic(x: Operands, place: int = 0) -> int:
    """Return the element size of a mean or deviation: at least float32, as on a device; on a CPU a half may stay."""
    return max(_FLOAT, x.size(place))


def _rows(x: Operands) -> int:
    """Return the rows of an input whose last dimensions, named second, are normalised."""
    width = prod(x.numbers(1))
    return x.elements(0) // width if width else 0


def _padded(x: Operands) -> int:
    """Return the bytes written; inputs: tensor, (before, after) for each dimension from the last on."""
    pads = x.numbers(1)
    return prod(size + sum(pads[2 * i : 2 * i + 2]) for i, size in enumerate(reversed(x.dims(0)))) * x.size(0)


def _resized(x: Operands, place: int = 1) -> int:
    """Return the bytes of the first input when its last dimensions, or all, have the sizes at that place."""
    sizes = x.numbers(place)
    if not sizes:
        raise ValueError("by factors")
    return prod(x.dims(0)[: -len(sizes)]) * prod(sizes) * x.size(0)


def _counted_up(x: Operands) -> int:
    """Return the bytes of `arange` of start, end, step, and the output, which may be too small yet."""
    start, end, step = (float(x.text(place)) for place in range(3))
    return max(0, ceil((end - start) / step)) * x.size(3)


def _of_table(x: Operands, rows: int, indices: int) -> int:
    """Return the bytes read of a table: those of the rows asked for, at most all of it, and the indices."""
    return min(rows, x.read(0)) + x.read(indices)


def _looked_up(x: Operands) -> int:
    """Return the bytes of the rows that are looked up, of table, indices."""
    return x.elements(1) * x.dims(0)[-1] * x.size(0)


def _with_size(x: Operands, place: int, size: int) -> int:
    """Return the elements of the first input when the dimension named at that place has another size."""
    if dims := x.dims(0):
        dims[x.number(place)] = size
    return prod(dims)


def _selected(x: Operands) -> int:
    """Return the bytes of the rows that are selected, of table, dimension, indices."""
    return _with_size(x, 1, x.elements(2)) * x.size(0)


def _one_for_each(x: Operands) -> int:
    """Return the bytes of a number for each index, of self, dimension, indices."""
    return x.elements(2) * x.size(0)


def _scattered(x: Operands) -> int:
    """Return the bytes read to write one number for each index, of self, dimension, indices, values or one."""
    return x.read(2) + (_one_for_each(x) if x.is_tensor(3) and x.dims(3) else 0)


_PARTS_OF_TENSORS = re.compile(r"embedding|index|gather|scatter|nll_loss|slice|select|split|cat|pad|arange|roll|unfold")


def _fused_kernel(x: Operands) -> Moved:
    """Return what a kernel moves that a compiler wrote, which is given all that it reads and writes.

    Each tensor counts once, as read; one that is both read and written (it is not recorded which are) counts
    once too few. Of kernels that name an op on parts of tensors nothing is known.
    """
    tensors = [place for place in range(x.count) if x.is_tensor(place)]
    if not tensors or _PARTS_OF_TENSORS.search(x.name):
        raise ValueError("no tensors, or parts of them")
    return Moved(x.read(*tensors), 0)


_FOREACH = "aten::_foreach_"


def _foreach(x: Operands) -> Moved:
    """Return what an op on lists [, lists, numbers] moves: all are read; the first, or one like it, is written."""
    given = [place for place in range(x.count) if x.is_list(place) or (x.is_tensor(place) and x.dims(place))]
    read, first = x.read(*given), x.full(0)
    op = x.name.removeprefix(_FOREACH).removesuffix("_")
    if op in ("norm", "max"):
        return Moved(read, len(x.each(0)) * x.size(0))
    return Moved({"copy": read - first, "zero": 0}.get(op, read), first)


_ALL = tuple(range(16))
# Names of ops (aten's without their namespace), the places (or bytes) of what they read, the bytes of what they write:
# a number is the place of an input that it is as large as.
_READ_AND_WRITTEN: tuple[tuple[str, Sequence[int] | _Bytes, int | _Bytes], ...] = (
    # products
    ("mm bmm mv dot vdot matmul", (0, 1), lambda x: x.product().elements * x.size(0)),
    ("linear mkldnn::_linear_pointwise", (0, 1, 2), lambda x: x.product().elements * x.size(0)),
    ("addmm addmm_ _addmm_activation baddbmm baddbmm_ addmv addmv_", _added,
     lambda x: x.product(1).elements * x.size(1)),
    ("addbmm addbmm_", _added, lambda x: x.product(1)._replace(batch=1).elements * x.size(1)),  # the sum of a batch
    ("_int_mm", (0, 1), lambda x: x.product().elements * _FLOAT),  # int32
    ("_scaled_mm", (0, 1, 2, 3, 4, 5), lambda x: x.product().elements * x.type_size(6)),
    # a, b, offsets, bias, type of the output: of two matrices a batch, one for each offset
    ("_grouped_mm", (0, 1, 2, 3), lambda x: x.product().elements * x.type_size(4)
     * (x.dims(2)[0] if len(x.dims(0)) == len(x.dims(1)) == 2 else 1)),
    ("_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu", _ALL,
     lambda x: x.product().elements * x.size(0)),  # same (0 -> -1): the scales have the type of the first
    ("convolution _convolution convolution_overrideable", (0, 1, 2), _convolution),
    # gradient, image, weight, ..., mask: of image and weight the gradient of one needs the other
    ("convolution_backward", lambda x: x.read(0) + _asked(x, 10, x.read(2), x.read(1), 0),
     lambda x: _asked(x, 10, x.full(1), x.full(2), sum(x.numbers(3)) * x.size(0))),
    # elementwise, but for what `_ELEMENTWISE` has; where dropout does not train it copies, and has nothing to mask
    ("copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ trunc_normal_ "
     "eye_", _ALL[1:], _first),
    ("native_dropout", (0,), lambda x: x.full(0) + x.elements(0)),
    ("glu", (0,), lambda x: x.full(0) // 2),
    ("glu_backward", (0, 1), 1),
    ("complex polar", (0, 1), lambda x: 2 * x.size(0) * prod(broadcast((x.dims(0), x.dims(1))))),
    # reductions and scans
    ("sum prod mean", (0,), lambda x: _reduced(x) * x.type_size(3 if x.count > 2 else 1, sums=True)),
    ("linalg_vector_norm", (0,), lambda x: x.left(2) * x.type_size(4)),
    ("std var", (0,), lambda x: _reduced(x) * x.size(0)),
    ("std_mean var_mean", (0,), lambda x: 2 * _reduced(x) * x.size(0)),
    ("all any", (0,), _reduced),
    ("max min", (0, 1), _extreme),
    ("amax amin logsumexp", (0,), lambda x: x.left(1) * x.size(0)),
    ("argmax argmin", (0,), lambda x: x.left(1) * _INDEX),
    ("cumsum cumprod", (0,), lambda x: x.elements(0) * x.type_size(2, sums=True)),
    ("topk", (0,), lambda x: _with_size(x, 2, x.number(1)) * (x.size(0) + _INDEX)),
    ("sort", (0,), lambda x: x.elements(0) * (x.size(0) + _INDEX)),
    # softmax, losses, pooling: of some inputs of a backward the shape alone counts
    ("_softmax _log_softmax", (0,), lambda x: x.elements(0) * (_FLOAT if x.flag(2) else x.size(0))),
    ("_safe_softmax", (0,), lambda x: x.elements(0) * x.type_size(2)),
    ("_softmax_backward_data _log_softmax_backward_data", (0, 1), lambda x: x.elements(0) * x.type_size(3)),
    # log-probabilities, targets, weights, reduction: of each row one number is read; a loss and a sum are written
    ("nll_loss_forward nll_loss2d_forward", lambda x: x.elements(1) * x.size(0) + x.read(1, 2),
     lambda x: (_loss(x, (1,), 3) + 1) * x.size(0)),
    ("nll_loss_backward nll_loss2d_backward", (0, 2, 3, 6), 1),
    ("mse_loss smooth_l1_loss huber_loss", (0, 1), lambda x: _loss(x, (0, 1), 2) * x.promoted((0, 1))),
    ("binary_cross_entropy binary_cross_entropy_with_logits", _ALL, lambda x: _loss(x, (0,), x.count - 1) * x.size(0)),
    ("max_pool2d_with_indices max_pool3d_with_indices", (0,), lambda x: _pooled(x, indices=True)),
    ("max_pool2d_with_indices_backward max_pool3d_with_indices_backward", (0, 7), 1),
    ("avg_pool2d avg_pool3d", (0,), lambda x: _pooled(x, indices=False)),
    ("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward", (0,), 1),
    # norms
    ("native_layer_norm", (0, 2, 3), lambda x: x.full(0) + 2 * _rows(x) * _statistic(x)),
    ("native_layer_norm_backward", (0, 1, 3, 4, 5), lambda x: _asked(x, 7, x.full(1), x.read(5), x.read(6))),
    ("_fused_rms_norm", (0, 2), lambda x: x.full(0) + _rows(x) * _statistic(x)),
    ("_fused_rms_norm_backward", (0, 1, 3, 4), lambda x: _asked(x, 5, x.full(1), x.read(4))),
    ("native_group_norm", (0, 1, 2), lambda x: x.full(0) + 2 * x.number(3) * x.number(6) * x.size(0)),
    # grad_out, input, mean, deviation, weight, batch, channels, size, groups, mask
    ("native_group_norm_backward", (0, 1, 2, 3, 4),
     lambda x: _asked(x, 9, x.full(1), *[x.number(6) * x.size(4 if x.is_tensor(4) else 1)] * 2)),
    # input, weight, bias, running mean and variance, whether it trains: then it writes a mean and a deviation for
    # each channel, and the running ones again
    ("native_batch_norm cudnn_batch_norm miopen_batch_norm", (0, 1, 2, 3, 4),
     lambda x: x.full(0) + (2 * x.dims(0)[1] * _statistic(x) + x.read(3, 4) if x.flag(5) else 0)),
    # grad_out, input, weight, running mean and variance, the saved ones, whether it trains (it needs the latter), eps
    ("native_batch_norm_backward", lambda x: x.read(0, 1, 2, *((5, 6) if x.flag(7) else (3, 4))),
     lambda x: _asked(x, 9, x.full(1), *[x.full(2) if x.is_tensor(2) else x.dims(1)[1] * _statistic(x, 1)] * 2)),
    ("cudnn_batch_norm_backward miopen_batch_norm_backward", (0, 1, 2, 5, 6), lambda x: x.full(0, 2, 2)),
    # copies and pieces
    ("_local_scalar_dense", lambda x: x.size(0), lambda x: 0),
    ("clone flip roll _conj_physical tril triu tril_ triu_ cat _amp_foreach_non_finite_check_and_unscale_", (0,), 0),
    ("_to_copy", (0,), lambda x: x.elements(0) * x.type_size(1)),
    ("constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
     "replication_pad3d", (0,), _padded),
    ("repeat", (0,), lambda x: prod(x.numbers(1)) * x.full(0)),
    ("slice_backward select_backward diagonal_backward _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d "
     "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d "
     "upsample_trilinear3d upsample_bicubic2d", (0,), _resized),
    ("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
     "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward "
     "upsample_bicubic2d_backward", (0,), lambda x: _resized(x, 2)),
    ("arange", (), _counted_up),
    ("linspace", (), lambda x: x.number(2) * x.size(3)),
    # rows of tables: self, dimension, indices, values
    ("embedding", lambda x: _of_table(x, _looked_up(x), 1), _looked_up),
    ("index_select", lambda x: _of_table(x, _selected(x), 2), _selected),
    ("gather", lambda x: _of_table(x, _one_for_each(x), 2), _one_for_each),
    ("embedding_dense_backward", (0, 1), lambda x: x.number(2) * x.dims(0)[-1] * x.size(0)),
    ("scatter_", _scattered, _one_for_each),
    ("scatter_add_ scatter_reduce_", lambda x: _scattered(x) + _one_for_each(x), _one_for_each),
    ("scatter scatter_add scatter_reduce", lambda x: x.read(0) + _scattered(x), 0),
    ("index_copy_", (2, 3), 3),
    ("index_add_", lambda x: x.read(2, 3) + x.full(3), 3),
    ("index_add", (0, 2, 3), 0),
    ("index_fill_", (2,), _selected),
    # optimizers: parameters, gradients, states; step counts are read and, a few bytes, not counted as written
    ("_fused_adamw_ _fused_adam_", (0, 1, 2, 3, 4, 5), lambda x: x.full(0, 2, 3) + x.read(4)),
    ("_fused_sgd_", (0, 1, 2), lambda x: x.full(0) + x.read(2)),
    ("_fused_adagrad_", (0, 1, 2), lambda x: x.full(0, 2)),
    # kernels of vLLM: a residual and its norm in place; keys and values into the slots of a cache; positions, query,
    # key, width of a head, and a table of sines and cosines, of which each token needs one row
    ("_C::rms_norm _C::static_scaled_fp8_quant _C::silu_and_mul _C::gelu_and_mul _C::gelu_tanh_and_mul", _ALL[1:],
     _first),
    ("_C::fused_add_rms_norm", (0, 1, 2), lambda x: x.full(0, 1)),
    ("_C_cache_ops::reshape_and_cache_flash", (0, 1, 4),
     lambda x: x.elements(0) * x.size(2) + x.elements(1) * x.size(3)),
    ("_C::rotary_embedding", lambda x: x.read(0, 1, 2) + x.elements(0) * x.dims(4)[-1] * x.size(4),
     lambda x: x.read(1, 2)),
)  # fmt: skip


def _moves(places: Sequence[int] | _Bytes, written: int | _Bytes) -> _Rule:
    read = places if callable(places) else lambda x: x.read(*places)
    writes = written if callable(written) else lambda x: x.full(written)
    return lambda x: Moved(read(x), writes(x))


def _qualified(names: str) -> list[str]:
    return [name if "::" in name else f"aten::{name}" for name in names.split()]


_RULES: dict[str, _Rule] = {
    **{
        f"aten::{op}{end}": _elementwise(op, gives, count, in_place=bool(end))
        for gives, count, ops in _ELEMENTWISE
        for op in ops.split()
        for end in ("", "_")
    },
    **{name: _moves(places, written) for names, places, written in _READ_AND_WRITTEN for name in _qualified(names)},
    **{op: _attention for op in ATTENTIONS if not op.endswith("_for_mps")},  # that gives its weights
}
# They call an op with a rule wherever they can, and do the work themselves elsewhere.
CALLERS = ("aten::linear", "aten::matmul")
_FUSED_KERNEL = re.compile(r"triton_(poi|red|per|tem)_")
# Views, allocations, looks at metadata, and ops that call others for all they do. Below autograd some views are
# recorded without a namespace.
_MOVES_NOTHING = frozenset(("detach", "detach_", "alias", *_qualified("""
    _conj _neg_view _reshape_alias _unsafe_view alias as_strided as_strided_ broadcast_tensors broadcast_to chunk
    conj detach detach_ diagonal expand expand_as flatten hsplit imag lift lift_fresh meshgrid movedim moveaxis
    narrow permute positive real reshape reshape_as resolve_conj resolve_neg select set_ slice split
    split_with_sizes squeeze squeeze_ swapaxes swapdims t t_ tensor_split transpose transpose_ unbind unflatten
    unflatten_dense_tensors unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_ view
    view_as view_as_complex view_as_real vsplit

    empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_

    _assert_scalar _assert_tensor_metadata _version can_cast is_complex is_floating_point is_pinned is_same_size
    item is_nonzero numel output_nr record_stream requires_grad_ result_type size stride

    _batch_norm_impl_index _batch_norm_impl_index_backward _scaled_dot_product_attention_math adaptive_avg_pool2d
    allclose argsort batch_norm concat concatenate contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cross_entropy_loss diff dropout einsum embedding_backward feature_dropout flatten_dense_tensors
    frobenius_norm full full_like group_norm hstack index_put index_put_ inner instance_norm isclose layer_norm
    linalg_norm log_softmax max_pool2d new_full new_ones new_zeros nll_loss nll_loss2d nll_loss_nd norm one_hot ones
    ones_like outer pad rand rand_like randint randn randn_like repeat_interleave rms_norm scalar_tensor
    scaled_dot_product_attention softmax stack sum_to_size tensordot to type_as value_selecting_reduction_backward
    vstack zeros zeros_like
""")))  # fmt: skip
_CALLS_ITSELF = ("aten::arange", "aten::linspace")  # with a tensor to write to
# Lookups of compiled code, what data-parallel training calls ops for, and the autograd functions of DTensor.
_OF_THE_HOST = re.compile(
    r"TorchDynamo Cache Lookup|Pregraph bytecode|AOTDispatcher |torch(::|\.)distributed"
    r"|(_FromTorchTensor|_ToTorchTensor|(Nested)?Redistribute)(Backward)?$"
)


def moves_nothing(name: str) -> bool:
    """Return whether an op of this name moves nothing itself: a view, an allocation, or one that only calls others."""
    return name in _MOVES_NOTHING or _OF_THE_HOST.match(name) is not None


def calls_known_ops(name: str) -> bool:
    """Return whether an op of this name, where it holds one with a rule, leaves all work to it: lists, one by one."""
    return name.startswith(_FOREACH) or name in (*CALLERS, *_CALLS_ITSELF)


def has_rule(name: str) -> bool:
    """Return whether shapes of ops of this name give bytes: their own, or those of an op that calls them."""
    return name in INDEXING or name in SHOWS_INDICES or _rule_of(name) is not None


def _rule_of(name: str) -> _Rule | None:
    if name.startswith(_FOREACH):
        return _foreach
    of_kernel = _FUSED_KERNEL.match(name) or flex_attention(name) is not None
    return _RULES.get(name) or (_fused_kernel if of_kernel else None)


def moved_by(name: str, shapes: OpShapes, *, element_size: int | None = None) -> Moved | None:
    """Return what one call of the op `name` reads and writes; None where its shapes do not tell, or it has no rule."""
    rule = _rule_of(name)
    try:
        return rule(Operands(name, shapes, element_size)) if rule is not None else None
    except WRONG_INPUTS:
        return None


_GET, _PUT = INDEXING = ("aten::index", "aten::_index_put_impl_")
_VIEWED, _PLACES, _MASK = SHOWS_INDICES = ("aten::as_strided", "aten::reshape", "aten::nonzero")


def indexed(name: str, shapes: OpShapes, inside: Iterable[tuple[str, OpShapes]]) -> Moved | None:
    """Return what one call of an op of `INDEXING` moves; None where the ops that it calls do not show its indices.

    It views its first input in the shape of the result (`as_strided`), reshapes each tensor of indices, and looks for
    what is true in a mask (`nonzero`). `inside`: the ops of `SHOWS_INDICES` that it calls itself.
    """
    x, calls = Operands(name, shapes), [Operands(*call) for call in inside]
    try:
        (view,) = (call for call in calls if call.name == _VIEWED and call.dims(0) == x.dims(0))
        rows = prod(view.numbers(1)) * x.size(0)
        indices = [call for call in calls if call.name == _PLACES and call.types[0] in _WHOLE]
        masks = [call for call in calls if call.name == _MASK]
        if masks and len(indices) != sum(len(call.dims(0)) for call in masks):
            raise ValueError("masks and indices")
        chosen_by = sum(call.read(0) for call in masks or indices)
        if x.name == _GET:
            return Moved(min(rows, x.read(0)) + chosen_by, rows)
        x.dims(2)
        return Moved(x.read(2) + chosen_by + (rows if x.flag(3) else 0), rows)
    except WRONG_INPUTS:
        return None
