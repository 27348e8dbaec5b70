"""A row of the span table, as it is made of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.place.names import FORWARD_PHASES
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.trace.recording import Int64

COMPUTE_THREAD = -1  # stands for the compute streams of a device
LONG_GAP_NS = 100_000  # less belongs to what is before and after it
LASTING = ("forward", "backward", "recompute")  # go on between their ops
LASTING_ON_DEVICE = (*LASTING, "optimizer")  # a device waits between kernels for the CPU
# The kind of what runs in a phase of attribution; in others it has none.
KIND_OF_PHASE = {phase: phase for phase in LASTING_ON_DEVICE} | dict.fromkeys(FORWARD_PHASES, "forward")
KIND_OF_PHASE["accumulate_grad"] = "backward"


class Row(NamedTuple):
    """A row without its rank; times by the trace's own clock until `reduce` makes them nanoseconds since 1970."""

    step: int | None
    name: str
    kind: str
    start_ns: int
    duration_ns: int
    layer: str | None = None
    device_ns: int | None = None
    waiting_ns: int | None = None
    depth: int = 0
    parent: str | None = None
    thread: int | None = None
    microbatch: int | None = None
    chunk: int | None = None
    sequence: int | None = None
    group: str | None = None
    bytes: int | None = None
    overlapped_ns: int | None = None
    tokens: int | None = None


def kinds_of_places(found: Placed) -> npt.NDArray[Any]:
    """Of each place of an attributed recording the kind of what runs there; "" where it has none."""
    return np.array([KIND_OF_PHASE.get(place.phase, "") for place in found.attribution.places])


def bounds(rows: Sequence[Row]) -> tuple[Int64, Int64]:
    """When each begins and ends."""
    starts = np.array([row.start_ns for row in rows], dtype=np.int64)
    return starts, starts + np.array([row.duration_ns for row in rows], dtype=np.int64)
