"""A step of a loop as a block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler_wrapper.live.monitor import TrainingMonitor


class MonitoredStep:
    """One step of a loop as a block::

    with monitor.step(tokens=batch.numel()) as step:
        ...
        step.log(loss=loss)

    An exception passes through, and the step is none.
    """

    def __init__(self, monitor: TrainingMonitor, numbers: dict[str, Any]) -> None:
        self._monitor, self._numbers = monitor, numbers

    def log(self, **numbers: Any) -> None:
        """More of what `end_step` takes."""
        self._numbers.update(numbers)

    def __enter__(self) -> MonitoredStep:
        self._monitor.start_step(self._numbers.get("step"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._monitor.end_step(**self._numbers)
        else:
            self._monitor.forget_step()
