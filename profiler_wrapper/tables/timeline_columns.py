"""What a page draws of single events: columns, and the names that their numbers stand for. No part of result.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from profiler_wrapper.trace.recording import Int64

NO_TRACE = "Single events are in the trace, which was not read for this page."
NO_TRACE_BESIDE = "Single events are in the trace, and none lies beside the result that this page was made from."
OTHER_TRACE = "The trace that lies beside the result is not the one that it was made from."
FAILED = "The timeline could not be made"
Columns = Mapping[str, Int64]
# Why a device has nothing to do: what its CPU thread does meanwhile. A page knows them by their order.
CAUSES = (
    "the CPU is in ops and calls before the next launch",
    "the CPU is in a call that waits for the device or hands out memory",
    "the CPU waits for the DataLoader",
    "the CPU runs Python between ops",
    "the CPU waits for communication",
    "nothing was recorded on the CPU",
    "the next work was launched before: the device waits for itself, or for another",
)
LAUNCHES, WAITS, LOADS, PYTHON, COMMUNICATES, NOTHING, WAITS_FOR_ITSELF = range(len(CAUSES))


class TimelineStep(NamedTuple):
    """A step from its begin to its end on CPU and devices."""

    number: int | None  # None: a trace without steps, as one
    start_ns: int  # since the origin, as all times here
    end_ns: int
    drawn: bool
    slowest: bool
    idle_ns: int | None  # how long its devices run nothing, also in gaps too short to be listed; None: not known


class TimelineLane(NamedTuple):
    """Rows of events, one below the other."""

    kind: Literal["layers", "phases", "thread", "stream"]
    name: str
    device: int | None
    main: bool  # the thread of the steps
    levels: int  # rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Events of some steps (by lane, start, the longest first), gaps, sums of all. -1: none; layer -2: not known."""

    note: str  # what is left out; "": nothing
    device: bool  # whether sums are of device time; else of CPU time of ops
    origin_ns: int  # on the trace's clock
    length_ns: int  # from the origin to the end of what is drawn
    steps: tuple[TimelineStep, ...]
    lanes: tuple[TimelineLane, ...]
    names: tuple[str, ...]
    own_names: frozenset[int]  # those of `names` that a user gave to blocks and moments
    layers: tuple[str, ...]
    events: Columns  # lane, start_ns, duration_ns, depth, name, layer, phase, class, step, launch, forward
    gaps: Columns  # start_ns, duration_ns, device, step, layer, phase, op, cause, event
    sums: Columns  # name, layer, phase, class, step, time_ns, count
