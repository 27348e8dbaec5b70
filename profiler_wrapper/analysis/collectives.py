"""Collectives: how many, how many bytes, how fast, and how much of them nothing hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import CollectiveRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def collective_rows(found: Attributed) -> tuple[CollectiveRow, ...]:
    """The collectives of an attributed recording, the most expensive first."""
    return ()
