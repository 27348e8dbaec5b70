"""Bytes of norms, forward and backward.

Means and deviations are taken to be at least float32, as on a device; on a CPU those of half precision may be of it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands

_Rule = Callable[[Operands], Moved]


def _statistic(given: Operands, place: int = 0) -> int:
    """Bytes of one mean or deviation: at least float32."""
    return max(4, given.size(place))


def _layer_norm(given: Operands) -> Moved:
    """Input, shape, weight, bias, eps: the output, and a mean and a deviation for each row."""
    rows = _rows(given, 1)
    return Moved(given.read(0, 2, 3), given.full(0) + 2 * rows * _statistic(given))


def _rows(given: Operands, shape: int) -> int:
    width = prod(given.numbers(shape))
    return given.elements(0) // width if width else 0


def _layer_norm_backward(given: Operands) -> Moved:
    """grad_out, input, shape, mean, deviation, weight, bias, mask; the bias itself is not needed."""
    return Moved(given.read(0, 1, 3, 4, 5), _gradients(given, (1, 5, 6), 7))


def _gradients(given: Operands, places: tuple[int, int, int] | tuple[int, int], mask: int) -> int:
    """Bytes of the gradients asked for, each as large as what it is of."""
    asked = given.flags(mask)
    if len(asked) != len(places):
        raise NotTold("no mask")
    return sum(given.full(place) for place, wanted in zip(places, asked, strict=True) if wanted)


def _rms_norm(given: Operands) -> Moved:
    """Input, shape, weight, eps: the output and a deviation for each row."""
    return Moved(given.read(0, 2), given.full(0) + _rows(given, 1) * _statistic(given))


def _rms_norm_backward(given: Operands) -> Moved:
    """grad_out, input, shape, deviation, weight, mask."""
    return Moved(given.read(0, 1, 3, 4), _gradients(given, (1, 4), 5))


def _group_norm(given: Operands) -> Moved:
    """Input, weight, bias, batch, channels, size, groups: the output, a mean and a deviation for each group."""
    groups = given.number(3) * given.number(6)
    return Moved(given.read(0, 1, 2), given.full(0) + 2 * groups * given.size(0))


def _group_norm_backward(given: Operands) -> Moved:
    """grad_out, input, mean, deviation, weight, batch, channels, size, groups, mask."""
    asked = given.flags(9)
    if len(asked) != 3:
        raise NotTold("no mask")
    each = given.number(6) * (given.size(4) if given.is_tensor(4) else given.size(1))
    return Moved(given.read(0, 1, 2, 3, 4), asked[0] * given.full(1) + (asked[1] + asked[2]) * each)


def _batch_norm(given: Operands) -> Moved:
    """Input, weight, bias, running mean and variance, whether it trains.

    In training it writes the output, a mean and a deviation for each channel, and the running ones again.
    """
    if not given.flag(5):
        return Moved(given.read(0, 1, 2, 3, 4), given.full(0))
    channels = given.dims(0)[1]
    running = given.read(3, 4)
    return Moved(given.read(0, 1, 2) + running, given.full(0) + 2 * channels * _statistic(given) + running)


def _batch_norm_backward(given: Operands) -> Moved:
    """grad_out, input, weight, running mean and variance, saved mean and deviation, whether it trains, eps, mask.

    The running ones are needed where it does not train, else the saved ones.
    """
    statistics = (5, 6) if given.flag(7) else (3, 4)
    asked = given.flags(9)
    if len(asked) != 3:
        raise NotTold("no mask")
    each = given.full(2) if given.is_tensor(2) else given.dims(1)[1] * _statistic(given, 1)
    return Moved(given.read(0, 1, 2, *statistics), asked[0] * given.full(1) + (asked[1] + asked[2]) * each)


def _library_batch_norm_backward(given: Operands) -> Moved:
    """Input, grad_out, weight, running mean and variance, saved mean and variance: all three gradients."""
    return Moved(given.read(0, 1, 2, 5, 6), given.full(0) + 2 * given.full(2))


NORMS: dict[str, _Rule] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _batch_norm),
    "native_batch_norm_backward": _batch_norm_backward,
    **dict.fromkeys(("cudnn_batch_norm_backward", "miopen_batch_norm_backward"), _library_batch_norm_backward),
}
