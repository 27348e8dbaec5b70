"""Bytes of reductions, scans, softmax, losses and pooling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands

_Rule = Callable[[Operands], Moved]
_INDEX = 8  # bytes of one


# --- reductions and scans -----------------------------------------------------------------------


def _left(given: Operands, place: int, *, all_if_absent: bool = True) -> int:
    """Elements that are left of the input when the dimensions that are named at `place` are reduced."""
    dims = given.dims(0)
    reduced = given.numbers(place)
    if not reduced:
        if not all_if_absent:
            raise NotTold("no dimension")
        return 1
    kept = [size for i, size in enumerate(dims) if i not in {d % max(1, len(dims)) for d in reduced}]
    return prod(kept)


def _reduction(given: Operands, *, whole: bool = False) -> Moved:
    """Input, dimensions, whether they are kept, the type [, out]; without dimensions all become one number.

    `whole`: sums of whole numbers and truth values are int64.
    """
    left = _left(given, 1) if given.count > 2 else 1
    told = given.size_of_dtype(3 if given.count > 2 else 1)
    element = told if told is not None else given.size(0)
    if told is None and whole and not given.is_floating(0):
        element = 8
    return Moved(given.read(0), left * element)


def _sum_of_squares(given: Operands) -> Moved:
    """Input, order, dimensions, whether they are kept, type: `linalg_vector_norm`."""
    told = given.size_of_dtype(4)
    return Moved(given.read(0), _left(given, 2) * (given.size(0) if told is None else told))


def _spread(given: Operands, *, results: int = 1) -> Moved:
    """Input, dimensions, correction, whether they are kept: `std`, `var_mean`. With two inputs: of everything."""
    left = _left(given, 1) if given.count > 2 else 1
    return Moved(given.read(0), results * left * given.size(0))


def _truth(given: Operands) -> Moved:
    """Input [, dimensions, whether they are kept]: `all`, `any`."""
    left = _left(given, 1) if given.count > 2 else 1
    return Moved(given.read(0), left)


def _extreme(given: Operands) -> Moved:
    """Input [, dimension, whether it is kept]: `max` with places where it has a dimension; or of two inputs."""
    if given.is_tensor(1) and given.count == 2:
        return Moved(given.read(0, 1), max(given.elements(0), given.elements(1)) * given.promoted((0, 1)))
    if given.count < 3:
        return Moved(given.read(0), given.size(0))
    return Moved(given.read(0), _left(given, 1, all_if_absent=False) * (given.size(0) + _INDEX))


def _extremes(given: Operands) -> Moved:
    """Input, dimensions, whether they are kept: `amax`."""
    return Moved(given.read(0), _left(given, 1) * given.size(0))


def _place_of_extreme(given: Operands) -> Moved:
    """Input, dimension, whether it is kept: `argmax`."""
    return Moved(given.read(0), _left(given, 1) * _INDEX)


def _scan(given: Operands) -> Moved:
    """Input, dimension, type: `cumsum`, whose sums of whole numbers are int64."""
    told = given.size_of_dtype(2)
    element = told if told is not None else given.size(0) if given.is_floating(0) else 8
    return Moved(given.read(0), given.elements(0) * element)


def _top(given: Operands) -> Moved:
    """Input, how many, dimension: values and places."""
    dims = given.dims(0)
    along = dims[given.number(2)] if dims else 1
    count = given.elements(0) // along * given.number(1) if along else 0
    return Moved(given.read(0), count * (given.size(0) + _INDEX))


def _sorted(given: Operands) -> Moved:
    return Moved(given.read(0), given.full(0) + given.elements(0) * _INDEX)


# --- softmax ------------------------------------------------------------------------------------


def _softmax(given: Operands) -> Moved:
    """Input, dimension, whether half becomes float."""
    return Moved(given.read(0), given.elements(0) * (4 if given.flag(2) else given.size(0)))


def _safe_softmax(given: Operands) -> Moved:
    told = given.size_of_dtype(2)
    return Moved(given.read(0), given.elements(0) * (given.size(0) if told is None else told))


def _softmax_backward(given: Operands) -> Moved:
    """grad_out, output, dimension, type of the input."""
    told = given.size_of_dtype(3)
    return Moved(given.read(0, 1), given.elements(0) * (given.size(0) if told is None else told))


# --- losses -------------------------------------------------------------------------------------


def _nll_loss(given: Operands) -> Moved:
    """Log-probabilities, targets, weights, reduction: of each row one number is read; a loss and a sum are written."""
    rows = given.elements(1)
    losses = rows if given.number(3) == 0 else 1
    return Moved(rows * given.size(0) + given.read(1, 2), (losses + 1) * given.size(0))


def _nll_loss_backward(given: Operands) -> Moved:
    """grad_out, log-probabilities, targets, weights, ..., sum of the weights: of the second the shape alone counts."""
    return Moved(given.read(0, 2, 3, 6), given.full(1))


def _pointwise_loss(given: Operands, *, reduction: int = 2) -> Moved:
    """Input, target, reduction."""
    element = given.promoted((0, 1))
    written = max(given.elements(0), given.elements(1)) if given.number(reduction) == 0 else 1
    return Moved(given.read(0, 1), written * element)


def _binary_cross_entropy(given: Operands) -> Moved:
    """Input, target, weight [, weight of positives], reduction."""
    last = given.count - 1
    written = given.elements(0) if given.number(last) == 0 else 1
    return Moved(given.read(*range(last)), written * given.size(0))


# --- pooling ------------------------------------------------------------------------------------


def _max_pool_backward(given: Operands) -> Moved:
    """grad_out, input, kernel, stride, padding, dilation, rounding, places: of the input the shape alone counts."""
    return Moved(given.read(0, 7), given.full(1))


def _pooled(given: Operands, *, with_places: bool) -> Moved:
    """Input, kernel, stride, padding, dilation (of maxima), rounding."""
    dims, taps = given.dims(0), given.numbers(1)
    sizes = dims[-len(taps) :]
    stride = given.numbers(2) or taps
    spread = given.numbers(4) if with_places else [1] * len(taps)
    if given.flag(5 if with_places else 4) or not taps:
        raise NotTold("rounded up")
    columns = zip(sizes, taps, stride, given.numbers(3), spread, strict=True)
    out = [(size + 2 * pad - wide * (count - 1) - 1) // step + 1 for size, count, step, pad, wide in columns]
    count = prod(dims[: -len(taps)]) * prod(out)
    return Moved(given.read(0), count * (given.size(0) + (_INDEX if with_places else 0)))


def _adaptive_pool(given: Operands) -> Moved:
    dims, out = given.dims(0), given.numbers(1)
    return Moved(given.read(0), prod(dims[: -len(out)]) * prod(out) * given.size(0))


def _adaptive_pool_backward(given: Operands) -> Moved:
    return Moved(given.read(0), given.full(1))


REDUCTIONS: dict[str, _Rule] = {
    **dict.fromkeys(("sum", "prod"), partial(_reduction, whole=True)),
    "mean": _reduction,
    "linalg_vector_norm": _sum_of_squares,
    **dict.fromkeys(("std", "var"), _spread),
    **dict.fromkeys(("std_mean", "var_mean"), partial(_spread, results=2)),
    **dict.fromkeys(("all", "any"), _truth),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("amax", "amin", "logsumexp"), _extremes),
    **dict.fromkeys(("argmax", "argmin"), _place_of_extreme),
    **dict.fromkeys(("cumsum", "cumprod"), _scan),
    "topk": _top,
    "sort": _sorted,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "_safe_softmax": _safe_softmax,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _pointwise_loss),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), _binary_cross_entropy),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices"), partial(_pooled, with_places=True)
    ),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), _max_pool_backward),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), partial(_pooled, with_places=False)),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _adaptive_pool),
    **dict.fromkeys(("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"), _adaptive_pool_backward),
    **dict.fromkeys(
        ("avg_pool2d_backward", "avg_pool3d_backward"), _adaptive_pool_backward
    ),
}  # fmt: skip
