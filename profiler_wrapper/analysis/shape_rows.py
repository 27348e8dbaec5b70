"""What the shapes of a trace say of its products and attention: sizes, types, backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler_wrapper.analysis.attention_calls import attention_call_rows
from profiler_wrapper.analysis.flops import FlopOps
from profiler_wrapper.analysis.formulas import dtype_of
from profiler_wrapper.analysis.product_rows import product_rows
from profiler_wrapper.analysis.view_model import AttentionCallRow, ProductRow
from profiler_wrapper.recording.shapes import OpShapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.recording.shapes import Shapes

MOST_ROWS = 200  # of products, and of calls of attention
_MOST_SHAPES = 5  # of one op
_LONGEST = 200  # characters of one entry of `shapes_of_op`


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRows:
    """Empty where no shapes were recorded."""

    products: tuple[ProductRow, ...] = ()
    attention_calls: tuple[AttentionCallRow, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be worked out
    shapes_of_op: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of its inputs, the most frequent first


def shape_rows(found: Attributed, shapes: Shapes, ops: FlopOps | None = None) -> ShapeRows:
    """What the shapes of an attributed recording say. `ops`: of it, where they are known already."""
    ops = ops or FlopOps(found, shapes)
    return ShapeRows(
        products=product_rows(found, shapes, ops, most=MOST_ROWS),
        attention_calls=attention_call_rows(found, shapes, ops, most=MOST_ROWS),
        shapes_of_op=_shapes_of_op(found, shapes, ops),
    )


def _shapes_of_op(found: Attributed, shapes: Shapes, ops: FlopOps) -> dict[str, tuple[str, ...]]:
    """By the name of an op, the most frequent shapes of its inputs as text."""
    spans, numbers = shapes.arrays()
    ran = ops.ran[spans]
    names = found.recording.spans.name[spans[ran]].astype(np.int64)
    different = int(numbers.max(initial=0)) + 1
    pairs, counts = np.unique(names * different + numbers[ran], return_counts=True)
    of_name: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        name, number = divmod(pair, different)
        of_name[name].append((-count, number))
    texts = {}
    for name, told in of_name.items():
        kept = [_text(shapes.numbered(number)) for _, number in sorted(told)[:_MOST_SHAPES]]
        texts[found.recording.names[name]] = tuple(dict.fromkeys(text for text in kept if text))
    return {name: kept for name, kept in texts.items() if kept}


def _text(shapes: OpShapes) -> str:
    """`float32[2, 16, 64], float32[64]`: the tensors among the inputs; `8 tensors` for a list of them."""
    parts = (_input(shapes, place, dims) for place, dims in enumerate(shapes.dims))
    text = ", ".join(part for part in parts if part)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _input(shapes: OpShapes, place: int, dims: Any) -> str:
    if dims and isinstance(dims, list) and isinstance(dims[0], list):
        return f"{len(dims)} tensors"
    return f"{dtype_of(shapes, place)}{dims}" if dims else ""
