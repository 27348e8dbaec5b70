"""The waits for other ranks in a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from profiler_wrapper.capture.phases import in_backward
from profiler_wrapper.live.device_events import Moment
from profiler_wrapper.live.rank_waits import Told

MOST_WAITS = 20_000  # of a step


class Wait(NamedTuple):
    """One.

    Attributes:
        in_graph: the autograd engine ran on its thread.
    """

    begin: Moment
    end: Moment
    told: Told
    thread: int
    in_graph: bool


class StepWaits:
    """Listens to waits, see `rank_waits`.

    Args:
        moment: tells what time it is; None: no step is open.
        on_failure: told of its own failures.
    """

    def __init__(self, moment: Callable[[], Moment | None], on_failure: Callable[[Exception], None]) -> None:
        self._moment, self._on_failure = moment, on_failure
        self._waits: list[Wait] = []

    def open_wait(self) -> Moment | None:
        """See `rank_waits.Listener`."""
        try:
            return self._moment() if len(self._waits) < MOST_WAITS else None
        except Exception as error:
            self._on_failure(error)
            return None

    def close_wait(self, opened: Moment, told: Told) -> None:
        """That one is over."""
        try:
            end = self._moment()
            if end is not None:
                self._waits.append(Wait(opened, end, told, threading.get_native_id(), in_backward()))
        except Exception as error:
            self._on_failure(error)

    def take(self) -> list[Wait]:
        """Those of the step, by their begins."""
        waits, self._waits = self._waits, []
        waits.sort(key=lambda wait: wait.begin[0])
        return waits
