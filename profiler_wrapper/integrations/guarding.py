"""Callbacks that cannot stop the training they are called from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from profiler_wrapper.notices import tell

T = TypeVar("T", bound=Callable[..., Any])


class Guarded:
    """Base of a callback: after the first failure in a `guarded` method it does nothing any more.

    A copy, also one by pickle, is a callback that has not begun.

    Attributes:
        failed: it has failed, and one `ProfilerWrapperWarning` has said so.
    """

    failed = False

    def rest(self) -> None:
        """Set what changes while it runs to what it is before. Called when it is made."""

    def __getstate__(self) -> dict[str, Any]:
        idle: Guarded = object.__new__(type(self))
        vars(idle).update(vars(self), failed=False)
        idle.rest()
        return vars(idle)

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


class Outlets:
    """Places of other people that numbers go to. One that raises gets no more, and one warning says so."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()

    def send(self, name: str, action: Callable[[], object]) -> None:
        """Run `action`, which gives numbers to the place of that name."""
        if name in self._dropped:
            return
        try:
            action()
        except Exception as error:
            self._dropped.add(name)
            tell(f"{name} gets no more of the monitor's numbers, because it failed: {type(error).__name__}: {error}")


def _silently(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        del error  # of no use to anybody after the first
