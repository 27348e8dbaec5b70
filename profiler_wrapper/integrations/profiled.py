"""What the profiling callbacks of other people's loops have in common."""

from __future__ import annotations

import atexit
from typing import Any

from profiler_wrapper.integrations.guarding import Guarded
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.wrapper import ProfilerWrapper


class ProfiledTraining(Guarded):
    """A `ProfilerWrapper` around one training at a time.

    Args:
        options: those of `ProfilerWrapper`.

    Raises:
        WrongUse: an option means nothing.
    """

    def __init__(self, **options: Any) -> None:
        ProfilerWrapper(**options)  # wrong options are told here, not in the training
        self._options = options
        self.rest()

    def rest(self) -> None:
        self.profiler: ProfilerWrapper | None = None
        self._inside = False

    @property
    def result(self) -> ProfileResult | None:
        """What `ProfilerWrapper.result` is; None before anything was recorded."""
        return None if self.profiler is None else self.profiler.result

    def abandon(self) -> None:
        self._leave()

    def _enter(self, model: object) -> None:
        """A training begins; one before it may have ended by an exception."""
        self._leave()
        self.profiler = ProfilerWrapper(model, **self._options)
        self.profiler.__enter__()
        self._inside = True
        atexit.register(self._leave)

    def _step(self) -> None:
        if self._inside and self.profiler is not None:
            self.profiler.step()

    def _leave(self, error: BaseException | None = None) -> None:
        if self._inside and self.profiler is not None:
            self._inside = False
            atexit.unregister(self._leave)
            self.profiler.__exit__(None if error is None else type(error), error, None)
