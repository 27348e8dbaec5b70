"""Results made by hand, with what makes them comparable in their summary, as advice writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profiler_wrapper.tables.model import Analysis


def comparable(analysis: Analysis, **changes: Any) -> Analysis:
    """The same with what its rows and its run say of it, or as `changes` say."""
    run = analysis.run
    roots = [row.class_name for row in analysis.layers if row.layer and row.parent is None]
    known = {
        "model": ", ".join(dict.fromkeys(roots)),
        "device": run.get("device"),
        "torch": run.get("versions", {}).get("torch"),
        "steps": sum(row.step is not None for row in analysis.steps),
        "memory_in_timed_steps": any(row.peak_bytes is not None for row in (*analysis.steps, *analysis.layers)),
    }
    return replace(analysis, summary={"verdict": None, "findings": [], "comparable": known | changes})
