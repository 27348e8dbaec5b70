"""Events on a device that are used again, and spans that wait for theirs. Only `finish` waits, and not for long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from profiler_wrapper.live.accelerator import Accelerator, Event
from profiler_wrapper.live.line_files import Unread
from profiler_wrapper.notices import Notices

MOST_UNREAD = 4096  # spans that the device may be behind
_READ_AT_ONCE = 2  # so that reading keeps up with writing
_PAUSE_S = 0.001


class EventPool:
    """Gives events, and tells the time between two when the device has come to both.

    Args:
        tell: called with a span and the nanoseconds between its events; None: they cannot be told.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tell: Callable[[Unread, int | None], None],
        notices: Notices,
        *,
        most: int = MOST_UNREAD,
    ) -> None:
        self._accelerator, self._tell, self._notices, self._most = accelerator, tell, notices, most
        self._free: list[Event] = []
        self._unread: deque[Unread] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._unread)

    def record(self) -> Event | None:
        """An event behind what the device was given so far; None: it is not in use, or captures a graph, or is too far
        behind."""
        if not self._accelerator.ready():
            return None
        if len(self._unread) >= self._most:
            self._notices.once(
                "behind", f"the device is {self._most} spans behind; the next ones have no time on the device"
            )
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._accelerator.event()
        try:
            event.record()
        except RuntimeError:  # it was made on another device
            event = self._accelerator.event()
            event.record()
        return event

    def give_back(self, event: Event | None) -> None:
        """One that is not read."""
        if event is not None and len(self._free) < 2 * self._most:
            self._free.append(event)

    def add(self, unread: Unread) -> None:
        """A span whose events have been recorded; reads some of those before it that the device has come to."""
        self._unread.append(unread)
        self.read(_READ_AT_ONCE)

    def read(self, most: int) -> bool:
        """Tell of at most so many spans that the device has come to the end of, in order. Whether all are told."""
        if self._unread and self._lock.acquire(blocking=False):
            try:
                for _ in range(most):
                    if not self._unread or not self._unread[0].end.query():
                        break
                    self._read(self._unread.popleft())
            finally:
                self._lock.release()
        return not self._unread

    def finish(self, wait_s: float) -> None:
        """Tell of all spans, and wait for the device so long at most; what it has not come to then has no time."""
        deadline = time.monotonic() + wait_s
        while not self.read(len(self._unread)) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        with self._lock:
            while self._unread:
                unread = self._unread.popleft()  # its events are not used again: the device may still come to them
                self._tell(unread, None)

    def _read(self, unread: Unread) -> None:
        try:
            device_ns = round(unread.begin.elapsed_time(unread.end) * 1e6)
        except RuntimeError:  # events of two devices
            device_ns = None
        else:
            self.give_back(unread.begin)
            self.give_back(unread.end)
        self._tell(unread, device_ns)
