"""Kernels, copies and sets, one row per launch configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import KernelRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def kernel_rows(found: Attributed) -> tuple[KernelRow, ...]:
    """The kernels of an attributed recording, the most expensive first."""
    return ()
