"""A part of a recording or of its analysis that fails is a note; it spoils nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_LONGEST_NOTE = 300


def attempt(what: str, ask: Callable[[], _T], otherwise: _T, notes: list[str]) -> _T:
    """What `ask` returns; where it fails `otherwise`, and a note that says so."""
    try:
        return ask()
    except Exception as error:
        notes.append(f"{what} not available, because that failed: {type(error).__name__}: {error}"[:_LONGEST_NOTE])
        return otherwise
