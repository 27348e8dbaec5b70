"""What keeps a failure of ours, and the life of our objects, away from the training."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Active(Protocol):
    """Something that can be off, and turns itself off where it fails."""

    @property
    def active(self) -> bool:
        """It is on, and in the process that it was made in."""

    def failed(self, what: str, error: Exception) -> None:
        """It has failed: one warning, and it is off."""


Owner = TypeVar("Owner", bound=Active)


def harmless(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result | None]:
    """What fails inside becomes one warning, and its object does nothing more. In a forked child it does nothing."""

    @functools.wraps(method)
    def guarded(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        if not self.active:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.failed(f"{method.__name__}()", error)
            return None

    return guarded


def weakly(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Calls a method of an object that may be gone, and does not hold it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        there = reference()
        if there is not None:
            there(*args, **kwargs)

    return call
