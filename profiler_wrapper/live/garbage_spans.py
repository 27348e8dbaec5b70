"""The pauses in which Python collects garbage, as spans."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from profiler_wrapper.capture.calls import keep_dynamo_off

SHORTEST_NS = 100_000  # a pause that is told by itself; there are thousands of shorter ones a second


class GarbageSpans:
    """Calls `tell()(start_ns, end_ns)` after each long pause, on the thread that had it, and counts the short ones.

    Attributes:
        short, short_ns: how many were not told, and how long they took in all.
    """

    def __init__(self, tell: weakref.WeakMethod[Callable[[int, int], None]]) -> None:
        self._tell = tell
        self._begin_ns = 0
        self.short = self.short_ns = 0

    def install(self) -> None:
        """From now on. Again: nothing more."""
        if self._heard not in gc.callbacks:
            gc.callbacks.append(self._heard)

    def remove(self) -> None:
        """No longer."""
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)

    def _heard(self, phase: str, info: dict[str, Any]) -> None:
        now = perf_counter_ns()
        if phase == "start":
            self._begin_ns = now
        elif now - self._begin_ns < SHORTEST_NS:
            self.short += 1
            self.short_ns += now - self._begin_ns
        elif self._begin_ns:
            tell = self._tell()
            if tell is not None:
                tell(self._begin_ns, now)


keep_dynamo_off(GarbageSpans._heard, and_below=True)  # it may be called in the midst of a function that is compiled
