"""The largest allocations, and what each op allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import AllocationRow, OpMemoryRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.layer_memory import DeviceMemory


def allocation_rows(found: Attributed, memory: DeviceMemory | None) -> tuple[AllocationRow, ...]:
    """The largest allocations of the recording."""
    return ()


def op_memory_rows(found: Attributed, memory: DeviceMemory | None) -> tuple[OpMemoryRow, ...]:
    """What each op allocated, most bytes first."""
    return ()
