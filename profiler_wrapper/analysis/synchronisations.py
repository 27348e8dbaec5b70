"""Where the CPU waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import SynchronisationRow

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def synchronisation_rows(found: Attributed) -> tuple[SynchronisationRow, ...]:
    """The waits within the steps of an attributed recording, the longest first."""
    return ()
