"""How busy the machine is within the steps, and how the wall time of a step divides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler_wrapper.analysis.view_model import Overview

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


def overview(found: Attributed) -> Overview | None:
    """The overview of an attributed recording."""
    return None
