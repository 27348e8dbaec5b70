"""Sums of numbers of which some are not known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def sum_of_known(values: Iterable[Number | None]) -> Number | None:
    """The sum of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def sum_if_all_known(values: Iterable[Number | None]) -> Number | None:
    """The sum; None where one of them is not known."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return sum(known)
