"""Callbacks that cannot stop the training they are called from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from profiler_wrapper.notices import tell

T = TypeVar("T", bound=Callable[..., Any])


class Guarded:
    """Base of a callback: after the first failure in a `guarded` method it does nothing any more.

    Attributes:
        failed: it has failed, and one `ProfilerWrapperWarning` has said so.
    """

    failed = False

    def abandon(self) -> None:
        """Let go of everything, in whatever state it is. What this raises is dropped: the failure has been told."""


def guarded(method: T) -> T:
    """What the method raises becomes one warning and turns its `Guarded` object off; Ctrl-C and the like pass."""

    @functools.wraps(method)
    def body(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed = True
            tell(
                f"{type(self).__name__} is off from now on, because {method.__name__} failed: "
                f"{type(error).__name__}: {error}"
            )
            _silently(self.abandon)

    return body  # type: ignore[return-value]  # the same parameters; a callback returns nothing


def _silently(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        del error  # of no use to anybody after the first
