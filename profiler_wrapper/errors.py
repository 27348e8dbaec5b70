"""Every error this package raises on purpose: what happened, what was found, what to do."""

from __future__ import annotations

import os
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ProfilerWrapperError(Exception):
    """Base class: `except ProfilerWrapperError` catches all of ours and nothing of yours."""


class BrokenTrace(ProfilerWrapperError, ValueError):
    """A file is not a readable trace. The message names the file, the byte offset and the cause."""


class BrokenSnapshot(ProfilerWrapperError, ValueError):
    """A file is not a readable memory snapshot. The message names the file, the cause and what to do."""


class EmptyRecording(ProfilerWrapperError, ValueError):
    """A recording holds no event that carries time, so there is nothing to report."""


class UnknownLayer(ProfilerWrapperError, KeyError):
    """A layer was asked for by a name that the recording does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class WrongUse(ProfilerWrapperError, ValueError):
    """An argument has a value that means nothing here."""


class SeveralProcesses(WrongUse):
    """A trace holds the events of several processes, whose `names` are given, and none of them was chosen."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        cure = "choose one by process= (analyze --process), or see all ranks by `profiler-wrapper ranks FILE`"
        super().__init__(f"{path}: it holds {len(names)} processes, as of several ranks: {listed(names)}; {cure}")
        self.names = tuple(names)


class MissingPackage(ProfilerWrapperError, ImportError):
    """Something needs a package that is not installed. The message says what to install."""


def imported(module: str, needed: str) -> Any:
    """A module of a package that may be missing; raises MissingPackage where it is: that `needed`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(needed) from error


class ProfilerWrapperWarning(UserWarning):
    """A profile is incomplete, or something could not be measured; the message says which and why."""


# --------------------------------------------------------------------------------------------------
# A user's value in a message: at most a line of it, and no more of it is written out, as it may hold itself many times.

_LINE, _LONGEST_ERROR = 100, 300  # characters


class _Short(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        """Of a subclass of a list or mapping as of these."""
        if isinstance(x, Mapping):
            return self.repr_dict(dict(x), level)
        return self.repr_list([*x], level) if isinstance(x, (list, tuple)) else super().repr_instance(x, level)


_short = _Short()
_short.maxstring = _short.maxother = _short.maxlong = _LINE


def shown(value: object) -> str:
    """`repr(value)`, or the beginning of it."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."


def listed(values: Iterable[object]) -> str:
    """`"'a', 'b' and 2 more"`: at most 16 of a user's values."""
    return first_few([*map(shown, values)], 16)


def in_a_line(error: BaseException) -> str:
    """`"ValueError: what it says"`, or the beginning of that: some libraries say pages."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 3]}..."


def first_few(names: Sequence[str], most: int, *, between: str = ", ") -> str:
    """`"a, b, c and 2 more"`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --------------------------------------------------------------------------------------------------
# How we say something in the user's process: what cannot be printed is dropped, and never becomes an exception.


def warn(message: str) -> None:
    """Warn; where that raises (warnings are errors, stderr is closed, a broken `showwarning`), print a plain line."""
    try:
        warnings.warn(message, ProfilerWrapperWarning, stacklevel=_caller())
    except Exception:
        say(f"profiler_wrapper: {message}\n", on="stderr")


def say(text: str, *, on: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print `text`, where there is something to print on: nothing that we print may end the user's training."""
    stream = getattr(sys, on)
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except Exception:  # none, closed, its reader gone, its disk full
        return


def occupy_closed_streams() -> None:
    """Open the null device in the place of a closed stdin, stdout or stderr (descriptors 0 to 2).

    A file of ours would get its number else, and torch's C++ prints its warnings on number 2, whatever that is.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _caller() -> int:
    """The stack level of the nearest frame that is not this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("profiler_wrapper"):
        level, frame = level + 1, frame.f_back
    return level


def attempt(what: str, ask: Callable[[], T], otherwise: T, notes: list[str]) -> T:
    """What `ask` returns; where it fails `otherwise`, and a note that says so: one part spoils no other."""
    try:
        return ask()
    except Exception as error:
        notes.append(f"{what} not available, because that failed: {in_a_line(error)}")
        return otherwise


class Notices:
    """Says each thing once. Where `quiet`, as on the ranks that write no log, nothing."""

    def __init__(self) -> None:
        self.quiet = False
        self._topics: set[str] = set()

    def warn_once(self, topic: str, message: str) -> None:
        """Warn of `message`, unless something of this topic was said before."""
        if topic in self._topics:
            return
        self._topics.add(topic)
        if not self.quiet:
            warn(message)
