"""What rules of advice look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.view_model import Finding

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One analysed recording, with its summary still empty."""

    analysis: Analysis
    found: Attributed

    @property
    def steps(self) -> int:
        """How many timed steps there are, at least 1: what sums over the trace are divided by."""
        return max(1, sum(row.step is not None for row in self.analysis.steps))


Rule = Callable[[Facts], Iterable[Finding]]
