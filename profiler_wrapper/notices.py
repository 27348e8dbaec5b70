"""How a failure of ours is said: one warning, that never becomes an exception, and beside a loop only once."""

from __future__ import annotations

import sys
import warnings

from profiler_wrapper.errors import ProfilerWrapperWarning


def tell(message: str) -> None:
    """Warn, also where warnings are errors: those would end the user's training."""
    try:
        warnings.warn(message, ProfilerWrapperWarning, stacklevel=_caller())
    except ProfilerWrapperWarning:
        print(f"profiler_wrapper: {message}", file=sys.stderr)


def _caller() -> int:
    """The stack level of the nearest frame that is not this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("profiler_wrapper"):
        level, frame = level + 1, frame.f_back
    return level


class Notices:
    """Says each thing once. Where `quiet`, as on the ranks that write no log, nothing."""

    def __init__(self) -> None:
        self.quiet = False
        self._told: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Tell `message`, unless something of this topic has been told."""
        if topic in self._told:
            return
        self._told.add(topic)
        if not self.quiet:
            tell(message)
