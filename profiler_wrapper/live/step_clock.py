"""Time between two points of a training loop, on the device's clock where there is one. Never waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from profiler_wrapper.live.accelerator import Accelerator, Event


class Mark:
    """A point in time: on the host, and in the work of the device if it is in use."""

    __slots__ = ("event", "host_s")

    def __init__(self, host_s: float, event: Event | None) -> None:
        self.host_s, self.event = host_s, event

    @property
    def reached(self) -> bool:
        """The device has come to it."""
        return self.event is None or self.event.query()


class StepClock:
    """Makes marks. A device's event tells when the device came to it, however far ahead the host runs."""

    def __init__(self, accelerator: Accelerator | None, *, host_clock: Callable[[], float] = time.perf_counter) -> None:
        self._accelerator, self._host_clock = accelerator, host_clock

    def mark(self) -> Mark:
        """Now."""
        accelerator = self._accelerator
        if accelerator is None or not accelerator.ready():
            return Mark(self._host_clock(), None)
        event = accelerator.event()
        event.record()
        return Mark(self._host_clock(), event)


def seconds_between(begin: Mark, end: Mark) -> float | None:
    """Both have been reached. None where no clock tells: it went backwards, or the device changed in between."""
    if begin.event is not None and end.event is not None:
        try:
            seconds = begin.event.elapsed_time(end.event) / 1e3
        except RuntimeError:  # events of two devices
            return None
    else:
        seconds = end.host_s - begin.host_s
    return seconds if seconds >= 0 else None
