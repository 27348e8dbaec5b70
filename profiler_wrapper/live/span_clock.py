"""The clocks of spans: the monotonic one for durations, and what it is behind the time since 1970."""

from __future__ import annotations

import time


def monotonic_offset_ns() -> int:
    """What `time.perf_counter_ns` is behind `time.time_ns`, by the closest two of several readings."""
    readings = []
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def clock_reading(offset_ns: int) -> dict[str, int]:
    """How the clocks stand now.

    Returns:
        time_ns: the wall clock, which may have been set. monotonic_ns: the monotonic one. start_ns: what a span that
        began now says.
    """
    monotonic_ns = time.perf_counter_ns()
    return {"time_ns": time.time_ns(), "monotonic_ns": monotonic_ns, "start_ns": monotonic_ns + offset_ns}
