"""How a failure of ours is said: one warning, that never becomes an exception."""

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
