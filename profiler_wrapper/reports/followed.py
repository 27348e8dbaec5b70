"""What is followed by name: tracked names, named blocks and what functions make of a layer's events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import step_numbers
from profiler_wrapper.reports.text import cells, clean, shorten

_US_PER_MS = 1000
_LONG_MS = 1e7  # almost three hours: beyond it microseconds say nothing, and the digits would not fit
_FUNCTION_OF_LAYER = re.compile(r"(?:<lambda>|\w+)\[(.+)\]", re.DOTALL)


@dataclass(frozen=True)
class Followed:
    """One series: times in ms, or the values of a function in its own unit."""

    name: str
    values: tuple[float | None, ...]
    is_time: bool

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    def text(self, value: float) -> str:
        """`value` without its unit."""
        return f"{value:.3f}" if self.is_time and abs(value) < _LONG_MS else f"{value:.6g}"


def followed(analysis: Analysis) -> list[Followed]:
    """Every series, as it is in the analysis."""
    layers = {row.layer for row in analysis.layers}
    series = []
    for name, values in analysis.series.items():
        match = _FUNCTION_OF_LAYER.fullmatch(name)
        if match and match.group(1) in layers:
            series.append(Followed(name, values, is_time=False))
        else:
            scaled = tuple(None if value is None else value / _US_PER_MS for value in values)
            series.append(Followed(name, scaled, is_time=True))
    return series


def followed_lines(analysis: Analysis, *, most: int, width: int, unicode: bool) -> list[str]:
    """`followed: vae 0.250 ms per step`: the mean of each in at most `most` lines; the last counts the others.

    What is a layer already has its row, and what has no value its warning.
    """
    layers = {row.layer for row in analysis.layers}
    series = [one for one in followed(analysis) if one.known and one.name not in layers]
    lines = []
    for i, one in enumerate(series[:most]):
        rest = len(series) - most if i == most - 1 else 0
        lines.append(_line(one, step_numbers(analysis), rest, width, unicode))
    return lines


def _line(one: Followed, steps: Sequence[int], rest: int, width: int, unicode: bool) -> str:
    per = " per step" if len(one.values) == len(steps) else " per entry" if len(one.values) > 1 else " in all"
    after = f" {one.text(fmean(one.known))}{' ms' if one.is_time else ''}{per}"
    after += f" ({rest} more in the log)" if rest > 0 else ""
    name = shorten(clean(one.name, unicode=unicode), width - cells("followed: " + after))
    return f"followed: {name}{after}"
