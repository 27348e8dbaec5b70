"""A record of which some fields are made when one of them is first read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from profiler_wrapper.tables.deferred import Deferred, defer


@dataclass(frozen=True, slots=True)
class _Row(Deferred):
    now: int
    later: tuple[int, ...] = ()
    last: str = field(default="", compare=False)


_MADE: list[str] = []


def deferred() -> _Row:
    def make() -> _Row:
        _MADE.append("made")
        return _Row(0, (1, 2), "last")

    _MADE.clear()
    row = _Row(7)
    defer(row, ("later", "last"), make)
    return row


def test_nothing_is_made_before_it_is_read_and_all_of_it_once() -> None:
    row = deferred()
    assert row.now == 7 and _MADE == []
    assert (row.later, row.last, row.now) == ((1, 2), "last", 7) and _MADE == ["made"]


@pytest.mark.parametrize(
    "read",
    [repr, copy.deepcopy, pickle.dumps, lambda row: row == _Row(7), lambda row: replace(row, now=8)],
    ids=["repr", "deepcopy", "pickle", "compare", "replace"],
)
def test_what_reads_all_fields_makes_them(read: Callable[[_Row], object]) -> None:
    row = deferred()
    read(row)
    assert _MADE == ["made"]


def test_a_copy_has_what_was_made() -> None:
    assert pickle.loads(pickle.dumps(deferred())) == copy.copy(deferred()) == _Row(7, (1, 2), "last")


def test_an_unknown_name_is_no_attribute() -> None:
    for row in (deferred(), _Row(7)):
        with pytest.raises(AttributeError, match="'_Row' object has no attribute 'nothing'"):
            _ = row.nothing
        assert _MADE == []
