"""Bytes of indexing by tensors, whose shapes no trace has: what the op calls inside tells them.

It views its first input in the shape of the result (`as_strided`), reshapes each tensor of places, and
looks for what is true in a mask (`nonzero`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands
from profiler_wrapper.recording.shapes import OpShapes

_GET, _PUT = "aten::index", "aten::_index_put_impl_"
INDEXING = frozenset((_GET, _PUT))
_VIEWED, _PLACES, _MASK = "aten::as_strided", "aten::reshape", "aten::nonzero"
TELLING = frozenset((_VIEWED, _PLACES, _MASK))
_WHOLE = ("long int", "long", "long long", "__int64", "int")


def indexed(name: str, shapes: OpShapes, inside: Iterable[tuple[str, OpShapes]]) -> Moved | None:
    """One call of an op of `INDEXING`; `inside`: the ops of `TELLING` that it calls itself. None where not told."""
    try:
        return _indexed(name, Operands(shapes), [(op, Operands(told)) for op, told in inside])
    except (IndexError, TypeError, ValueError):  # not called as expected
        return None


def _indexed(name: str, given: Operands, inside: list[tuple[str, Operands]]) -> Moved:
    viewed = [told for op, told in inside if op == _VIEWED and told.dims(0) == given.dims(0)]
    if len(viewed) != 1:
        raise NotTold("no view in the shape of the result")
    rows = prod(viewed[0].numbers(1)) * given.size(0)
    places = [told for op, told in inside if op == _PLACES and told.type(0) in _WHOLE]
    masks = [told for op, told in inside if op == _MASK]
    if masks and len(places) != sum(len(told.dims(0)) for told in masks):
        raise NotTold("masks and places")
    chosen_by = sum(told.read(0) for told in masks or places)
    if name == _GET:
        return Moved(min(rows, given.read(0)) + chosen_by, rows)
    added_to = rows if given.flag(3) else 0
    given.dims(2)
    return Moved(given.read(2) + chosen_by + added_to, rows)
