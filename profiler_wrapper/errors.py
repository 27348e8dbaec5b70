"""Every error this package raises on purpose: what happened, what was found, what to do."""

from __future__ import annotations


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


class MissingPackage(ProfilerWrapperError, ImportError):
    """Something needs a package that is not installed. The message says what to install."""


class ProfilerWrapperWarning(UserWarning):
    """A profile is incomplete, or something could not be measured; the message says which and why."""
