"""What the shapes of a trace say of its products and attention: sizes, types, backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import AttentionCallRow, ProductRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.recording.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRows:
    """Empty where no shapes were recorded."""

    products: tuple[ProductRow, ...] = ()
    attention_calls: tuple[AttentionCallRow, ...] = ()
    shapes_of_op: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of its inputs, the most frequent first


def shape_rows(found: Attributed, shapes: Shapes) -> ShapeRows:
    """What the shapes of an attributed recording say."""
    return ShapeRows()
