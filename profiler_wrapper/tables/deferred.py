"""A record of which some fields are made when one of them is first read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from profiler_wrapper.errors import shown


class Deferred:
    """Base of a frozen dataclass with slots. What copies, compares, pickles or writes a record reads all its fields."""

    __slots__ = ("_deferred",)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make the deferred fields; asked for what no slot holds only."""
            names, make = ((), None) if name == "_deferred" else getattr(self, "_deferred", ((), None))
            if name not in names:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute {shown(name)}")
            made = make()
            for each in names:
                object.__setattr__(self, each, getattr(made, each))
            object.__delattr__(self, "_deferred")
            return getattr(self, name)


def defer(record: Deferred, names: Collection[str], make: Callable[[], object]) -> None:
    """Let the fields `names` of a record be those of what `make` returns, once one of them is read."""
    for name in names:
        object.__delattr__(record, name)
    object.__setattr__(record, "_deferred", (names, make))
