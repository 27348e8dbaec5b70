"""Times on an accelerator, by events in the work it is given. Only `EventPool.finish` waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from profiler_wrapper.errors import Notices, WrongUse, shown

MOST_PENDING = 4096  # pairs of events that the device may be behind
_READ_AT_ONCE = 2  # for each pair that is added, so that reading keeps up with recording
_PAUSE_S = 0.001  # same: how soon it looks again


Event = Any  # a point in the work that a device was given: `record()`, `query()` and `elapsed_time(later)` of torch's


class Accelerator:
    """The current accelerator, by torch.

    Args:
        device_type: "cuda", "xpu", "mps", ...
    """

    def __init__(self, device_type: str) -> None:
        self._module: Any = getattr(torch, device_type)
        self._initialised: Any = getattr(self._module, "is_initialized", lambda: True)
        self._capturing: Any = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._event: Any = getattr(self._module, "Event", None) or partial(torch.Event, device=device_type)
        self._pins = True
        self._statistics: Any = getattr(self._module, "memory_stats_as_nested_dict", None)

    def ready(self) -> bool:
        """It is in use by this process, and may be given something now."""
        return bool(self._initialised()) and not self._capturing()

    def event(self) -> Event:
        """A new one that keeps the time."""
        return self._event(enable_timing=True)

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes allocated now, and the most so far."""
        if self._statistics is not None:  # a fifth of what the flat statistics cost
            allocated = self._statistics().get("allocated_bytes", {}).get("all", {})
            return allocated.get("current"), allocated.get("peak")
        names = ("memory_allocated", "current_allocated_memory"), ("max_memory_allocated",)  # the second is MPS's
        current, peak = (
            next((int(getattr(self._module, name)()) for name in those if hasattr(self._module, name)), None)
            for those in names
        )
        return current, peak

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host that is right as soon as an event recorded after this is reached."""
        try:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins)
        except (RuntimeError, NotImplementedError):  # a device that shares its memory with the host
            self._pins = False
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor, non_blocking=True)


def find_accelerator(device: str | torch.device | None = None) -> Accelerator | None:
    """The accelerator that training runs on; None for a CPU. Starts no device.

    Args:
        device: what the user says; None: what torch finds.

    Raises:
        WrongUse: torch knows no such device.
    """
    if device is not None:
        try:
            device_type = torch.device(device).type
        except Exception as error:
            raise WrongUse(
                f"device={shown(device)} is none that torch knows. Give 'cpu', 'cuda' or nothing."
            ) from error
    else:
        accelerators = getattr(torch, "accelerator", None)
        if accelerators is None or not accelerators.is_available():
            return None
        device_type = accelerators.current_accelerator().type
    return None if device_type in ("cpu", "meta") else Accelerator(device_type)


# --- pairs of events, as around a span ---


class EventPool:
    """Events that are used again, and the times between pairs of them, once the device has come to both."""

    def __init__(self, accelerator: Accelerator, notices: Notices) -> None:
        self._accelerator, self._notices = accelerator, notices
        self._free: list[Event] = []
        self._pending: deque[tuple[Event, Event, Callable[[int | None], None]]] = deque()
        self._lock = threading.RLock()  # a signal's handler may dump what the thread it stopped is reading

    def record(self) -> Event | None:
        """An event behind what the device was given so far; None: it is not in use, captures a graph, or is too far
        behind."""
        if not self._accelerator.ready():
            return None
        if len(self._pending) >= MOST_PENDING:
            self._notices.warn_once(
                "behind", f"the device is {MOST_PENDING} spans behind; the next ones have no time on the device"
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
        if event is not None and len(self._free) < 2 * MOST_PENDING:
            self._free.append(event)

    def add(self, begin: Event, end: Event, then: Callable[[int | None], None]) -> None:
        """Call `then` with the nanoseconds between two recorded events once the device has come to both; with None
        where no clock measures them, or it does not come there before `finish`. Reads some of the pairs before."""
        self._pending.append((begin, end, then))
        self.read(_READ_AT_ONCE)

    def read(self, most: int) -> bool:
        """Read at most so many pairs that the device has come to the end of, in order. Whether none is left."""
        if self._pending and self._lock.acquire(blocking=False):
            try:
                for _ in range(most):
                    if not self._pending or not self._pending[0][1].query():
                        break
                    self._read(*self._pending.popleft())
            finally:
                self._lock.release()
        return not self._pending

    def finish(self, wait_s: float) -> None:
        """Read all pairs, and wait for the device so long at most; what it has not come to then has no time."""
        deadline = time.monotonic() + wait_s
        while not self.read(len(self._pending)) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        with self._lock:
            while self._pending:
                _, _, then = self._pending.popleft()  # not used again: the device may still come to these events
                then(None)

    def _read(self, begin: Event, end: Event, then: Callable[[int | None], None]) -> None:
        device_ns = nanoseconds_between(begin, end)
        if device_ns is not None:
            self.give_back(begin)
            self.give_back(end)
        then(device_ns)


def nanoseconds_between(begin: Event | None, end: Event | None) -> int | None:
    """None: there are none, or the device has not come to them, has failed, or they are of two devices."""
    if begin is None or end is None:
        return None
    try:
        if not (begin.query() and end.query()):
            return None
        elapsed_ms: float = begin.elapsed_time(end)
    except RuntimeError:
        return None
    return round(elapsed_ms * 1e6)


# --- moments of a training loop ---

Moment = tuple[int, Any]  # nanoseconds of the monotonic clock, and the event on the device if there is one


class Mark(NamedTuple):
    """A moment at which a step, or a part of it, begins or ends."""

    host_ns: int
    event: Event | None

    @property
    def reached(self) -> bool:
        """The device has come to it."""
        return self.event is None or self.event.query()


class StepClock:
    """Makes marks. A device's event says when the device came to it, however far ahead the host runs."""

    def __init__(
        self, accelerator: Accelerator | None, *, host_clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._accelerator, self._host_clock = accelerator, host_clock

    def mark(self) -> Mark:
        """Now."""
        event = None
        if self._accelerator is not None and self._accelerator.ready():
            event = self._accelerator.event()
            event.record()
        return Mark(self._host_clock(), event)


def seconds_between(begin: Mark, end: Mark) -> float | None:
    """Both have been reached. None where no clock measures it: it went backwards, or the device changed in between."""
    between: int | None = end.host_ns - begin.host_ns
    if begin.event is not None and end.event is not None:
        between = nanoseconds_between(begin.event, end.event)
    return None if between is None or between < 0 else between / 1e9
