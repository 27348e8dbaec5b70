"""Bytes of ops that move data: copies, pieces, rows of tables; of kernels of vLLM and of compiled code."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil, prod

from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands

_Rule = Callable[[Operands], Moved]


def _copied(given: Operands) -> Moved:
    """Input -> a dense tensor of the same shape and type."""
    return Moved(given.read(0), given.full(0))


def _converted(given: Operands) -> Moved:
    """Input, type, ..."""
    told = given.size_of_dtype(1)
    return Moved(given.read(0), given.elements(0) * (given.size(0) if told is None else told))


def _padded(given: Operands) -> Moved:
    """Input, (before, after) for each dimension from the last on."""
    dims, pads = given.dims(0), given.numbers(1)
    for i in range(len(pads) // 2):
        dims[-1 - i] += pads[2 * i] + pads[2 * i + 1]
    return Moved(given.read(0), prod(dims) * given.size(0))


def _put_into_zeros(given: Operands) -> Moved:
    """A gradient, and the sizes of the whole of which it is a part."""
    return Moved(given.read(0), prod(given.numbers(1)) * given.size(0))


def _repeated(given: Operands) -> Moved:
    return Moved(given.read(0), prod(given.numbers(1)) * given.full(0))


def _resized(given: Operands) -> Moved:
    """Input (batch, channels, sizes), the new sizes."""
    sizes = given.numbers(1)
    if not sizes:
        raise NotTold("by factors")
    return Moved(given.read(0), prod(given.dims(0)[: -len(sizes)]) * prod(sizes) * given.size(0))


def _resized_back(given: Operands) -> Moved:
    """A gradient, the sizes it has, the sizes of the whole input."""
    sizes = given.numbers(2)
    if len(sizes) != len(given.dims(0)):
        raise NotTold("by factors")
    return Moved(given.read(0), prod(sizes) * given.size(0))


def _counted_up(given: Operands) -> Moved:
    """Start, end, step, the output, which is there already and may be too small yet: `arange`."""
    start, end, step = (float(given.text(place)) for place in range(3))
    return Moved(0, max(0, ceil((end - start) / step)) * given.size(3))


def _spaced(given: Operands) -> Moved:
    """Start, end, how many, the output: `linspace`."""
    return Moved(0, given.number(2) * given.size(3))


def _one_number(given: Operands) -> Moved:
    return Moved(given.size(0), 0)


# --- rows of tables -----------------------------------------------------------------------------


def _embedding(given: Operands) -> Moved:
    """Table, places: as many of its rows as are asked for, and at most all of them, are read."""
    row = given.dims(0)[-1] * given.size(0)
    asked = given.elements(1)
    return Moved(min(asked * row, given.read(0)) + given.read(1), asked * row)


def _embedding_backward(given: Operands) -> Moved:
    """grad_out, places, rows of the table: a gradient of the whole table is written."""
    width = given.dims(0)[-1]
    return Moved(given.read(0, 1), given.number(2) * width * given.size(0))


def _selected(given: Operands) -> Moved:
    """Table, dimension, places."""
    dims = given.dims(0)
    if dims:
        dims[given.number(1)] = given.elements(2)
    rows = prod(dims) * given.size(0)
    return Moved(min(rows, given.read(0)) + given.read(2), rows)


def _gathered(given: Operands) -> Moved:
    """Input, dimension, places: one number for each place."""
    numbers = given.elements(2) * given.size(0)
    return Moved(min(numbers, given.read(0)) + given.read(2), numbers)


def _scattered_in_place(given: Operands) -> Moved:
    """Self, dimension, places, values or one: one number is written for each place."""
    numbers = given.elements(2) * given.size(0)
    values = numbers if given.is_tensor(3) and given.dims(3) else 0
    return Moved(given.read(2) + values, numbers)


def _added_in_place(given: Operands) -> Moved:
    """As before, but what is there is read too."""
    moved = _scattered_in_place(given)
    return Moved(moved.read + moved.written, moved.written)


def _rows_added_in_place(given: Operands) -> Moved:
    """Self, dimension, places, rows: what is there is read, and written."""
    rows = given.full(3)
    return Moved(given.read(2, 3) + rows, rows)


def _rows_copied_in_place(given: Operands) -> Moved:
    return Moved(given.read(2, 3), given.full(3))


def _rows_filled(given: Operands) -> Moved:
    """Self, dimension, places, a number."""
    dims = given.dims(0)
    if dims:
        dims[given.number(1)] = given.elements(2)
    return Moved(given.read(2), prod(dims) * given.size(0))


def _of_a_copy(rule: _Rule) -> _Rule:
    """The op that is not in place writes all of its output, which is as large as its first input."""

    def copied(given: Operands) -> Moved:
        return Moved(given.read(0) + rule(given).read, given.full(0))

    return copied


# --- kernels of vLLM ---------------------------------------------------------------------------


def _norm_in_place(given: Operands) -> Moved:
    """Input, residual, weight: the sum and its norm take the place of the first two."""
    return Moved(given.read(0, 1, 2), given.full(0) + given.full(1))


def _into_first(given: Operands) -> Moved:
    """The output, then all inputs."""
    return Moved(given.read(*range(1, given.count)), given.full(0))


def _rotated_in_place(given: Operands) -> Moved:
    """Positions, query, key, width of a head, a table of sines and cosines, of which each token needs one row."""
    rows = given.elements(0) * given.dims(4)[-1] * given.size(4)
    both = given.read(1, 2)
    return Moved(given.read(0) + both + rows, both)


def _into_cache(given: Operands) -> Moved:
    """Keys, values, their caches, a slot for each token."""
    written = given.elements(0) * given.size(2) + given.elements(1) * given.size(3)
    return Moved(given.read(0, 1, 4), written)


VLLM: dict[str, _Rule] = {
    "_C::fused_add_rms_norm": _norm_in_place,
    **dict.fromkeys(
        (
            "_C::rms_norm", "_C::static_scaled_fp8_quant", "_C::silu_and_mul", "_C::gelu_and_mul",
            "_C::gelu_tanh_and_mul",
        ),
        _into_first,
    ),
    "_C::rotary_embedding": _rotated_in_place,
    "_C_cache_ops::reshape_and_cache_flash": _into_cache,
}  # fmt: skip


# --- fused kernels of compiled code -------------------------------------------------------------

_PARTS_OF_TENSORS = re.compile(r"embedding|index|gather|scatter|nll_loss|slice|select|split|cat|pad|arange|roll|unfold")


def fused_kernel(name: str, given: Operands) -> Moved:
    """A kernel that a compiler wrote, which is given all that it reads and writes.

    Each tensor counts once, as read; one that is both read and written (it is not recorded which are) counts
    once too few. Kernels that name an op on parts of tensors are not told.
    """
    tensors = [place for place in range(given.count) if given.is_tensor(place)]
    if not tensors or _PARTS_OF_TENSORS.search(name):
        raise NotTold("no tensors, or parts of them")
    return Moved(given.read(*tensors), 0)


DATA: dict[str, _Rule] = {
    **dict.fromkeys(("clone", "flip", "roll", "_conj_physical"), _copied),
    "_to_copy": _converted,
    **dict.fromkeys(
        (
            "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d",
        ),
        _padded,
    ),
    **dict.fromkeys(("slice_backward", "select_backward", "diagonal_backward"), _put_into_zeros),
    "repeat": _repeated,
    **dict.fromkeys(
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d",
            "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
        ),
        _resized,
    ),
    **dict.fromkeys(
        (
            "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
            "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward",
            "upsample_bicubic2d_backward",
        ),
        _resized_back,
    ),
    "arange": _counted_up,
    "linspace": _spaced,
    "_local_scalar_dense": _one_number,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _selected,
    "gather": _gathered,
    "scatter_": _scattered_in_place,
    "scatter": _of_a_copy(_scattered_in_place),
    **dict.fromkeys(("scatter_add_", "scatter_reduce_"), _added_in_place),
    **dict.fromkeys(("scatter_add", "scatter_reduce"), _of_a_copy(_scattered_in_place)),
    "index_add_": _rows_added_in_place,
    "index_add": _of_a_copy(_rows_copied_in_place),
    "index_copy_": _rows_copied_in_place,
    "index_fill_": _rows_filled,
}  # fmt: skip
