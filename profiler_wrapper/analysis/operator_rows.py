"""Ops, one row per op and phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import OperatorRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def operator_rows(found: Attributed, shapes_of_op: Mapping[str, tuple[str, ...]]) -> tuple[OperatorRow, ...]:
    """The ops of an attributed recording, the most expensive first; `shapes_of_op`: the most frequent of each."""
    return ()
