"""Bytes of ops that take lists of tensors: joining them, `_foreach_*`, and optimizers in one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable

from profiler_wrapper.analysis.bytes_operands import Moved, Operands

_Rule = Callable[[Operands], Moved]


def _joined(given: Operands) -> Moved:
    """A list -> all of it, one after another. Empty tensors of one dimension are left out by nature."""
    return Moved(given.list_read(0), given.list_bytes(0))


_FOREACH = re.compile(r"_foreach_(?P<op>\w+?)(?P<in_place>_?)$")


def _foreach(name: str, given: Operands) -> Moved:
    """Lists [, lists, numbers]: all are read; the first, or one like it, is written."""
    match = _FOREACH.match(name)
    assert match is not None
    lists = [place for place in range(given.count) if given.is_list(place)]
    tensors = [place for place in range(given.count) if given.is_tensor(place) and given.dims(place)]
    read = sum(given.list_bytes(place) for place in lists) + given.read(*tensors)
    first = given.list_bytes(0)
    if match["op"] in ("norm", "max"):
        return Moved(read, len(given.list_dims(0)) * given.list_element_size())
    if match["op"] == "copy":
        return Moved(read - first, first)
    if match["op"] == "zero":
        return Moved(0, first)
    return Moved(read, first)


def _fused_adam(given: Operands) -> Moved:
    """Lists of parameters, gradients, first and second moments, largest second moments (or none), step counts.

    All are read; all but the gradients are written. Step counts are counted apart by nobody: a few bytes each.
    """
    params, grads, first, second = (given.list_bytes(place) for place in range(4))
    largest = given.list_bytes(4) if given.is_list(4) else 0
    steps = given.list_bytes(5) if given.is_list(5) else 0
    states = params + first + second + largest
    return Moved(states + grads + steps, states)


def _fused_sgd(given: Operands) -> Moved:
    """Lists of parameters, gradients, momenta (or none)."""
    params, grads = given.list_bytes(0), given.list_bytes(1)
    momenta = given.list_bytes(2) if given.is_list(2) else 0
    return Moved(params + grads + momenta, params + momenta)


def _fused_adagrad(given: Operands) -> Moved:
    """Lists of parameters, gradients, sums, step counts."""
    params, grads, sums = (given.list_bytes(place) for place in range(3))
    return Moved(params + grads + sums, params + sums)


def _unscaled(given: Operands) -> Moved:
    """A list of gradients, which are read and written."""
    total = given.list_bytes(0)
    return Moved(total, total)


_LISTS: dict[str, _Rule] = {
    "cat": _joined,
    **dict.fromkeys(("_fused_adamw_", "_fused_adam_"), _fused_adam),
    "_fused_sgd_": _fused_sgd,
    "_fused_adagrad_": _fused_adagrad,
    "_amp_foreach_non_finite_check_and_unscale_": _unscaled,
}


def has_rule(op: str) -> bool:
    """Whether the op (`cat`, without its namespace) is one of these."""
    return op in _LISTS or op.startswith("_foreach_")


def moved(op: str, given: Operands) -> Moved:
    """Bytes of one call. Raises `NotTold`."""
    return _LISTS[op](given) if op in _LISTS else _foreach(op, given)
