"""All rules asked, and what they find as the summary of a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from profiler_wrapper.analysis.advice.facts import Facts

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.model import Analysis


def summary_of(analysis: Analysis, found: Attributed) -> Mapping[str, Any]:
    """The `summary` of result.json: verdict, findings, comparable."""
    Facts(analysis=analysis, found=found)
    return {"verdict": None, "findings": [], "comparable": {}}
