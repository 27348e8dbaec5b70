"""What rules about matrix products have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable

from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.advice.wording import duration
from profiler_wrapper.analysis.view_model import ProductRow

_LONGEST_NAME = 80
_CUTLASS = re.compile(r"(void )?cutlass\w*::Kernel2?<(?P<name>\w+)>")


def at_peak_ns(facts: Facts, rows: Iterable[ProductRow], dtype: str) -> float:
    """What these products take in a step at the peak of a type; 0 where that is not known."""
    peaks = facts.analysis.utilization.peaks if facts.analysis.utilization is not None else None
    peak = peaks.flops(dtype) if peaks is not None else None
    flops = sum(2.0 * row.m * row.n * row.k * row.batch * row.calls_per_step for row in rows)
    return flops / peak * 1e9 if peak else 0.0


def reckoned(what: str, least_ns: float) -> str:
    """How much was saved at most, as evidence says it."""
    left = f"took no longer than {duration(least_ns)}, at the peak" if least_ns else "took no time at all"
    return f"saves at most: as if {what} {left}"


def short_name(name: str) -> str:
    """What tells a kernel apart; a template of CUTLASS says it within its brackets."""
    if (told := _CUTLASS.match(name)) is not None:
        name = told["name"]
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
