"""Amounts of layers against a baseline's ranges: limits, the rows beyond them, and numbers in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from profiler_wrapper.analysis.compare_names import match_names
from profiler_wrapper.analysis.guard_model import (
    Baseline,
    ExactRow,
    GuardCheck,
    GuardFinding,
    Range,
    Status,
    shown,
)
from profiler_wrapper.analysis.phase import Phase

UNEVEN_SLACK = 0.1  # relative: events of a layer whose number differs from step to step

Words = Callable[[float], str]
NO_CAUSES: Mapping[str, str] = {}


class Limit(NamedTuple):
    """What would still have been fine."""

    most: float
    least: float


Limiter = Callable[[Range], Limit]


@dataclass(frozen=True, slots=True)
class Row:
    """A finding, whether it is for the worse, and for which layers it stands."""

    finding: GuardFinding
    worse: bool
    layers: tuple[str, ...] = ("",)  # that it stands for, as the baseline calls them
    follows: bool = False  # from something that is for the better, so that it is no regression

    @property
    def members(self) -> int:
        """How many layers it stands for."""
        return len(self.layers)


def compare_rows(
    base: Baseline,
    run: Baseline,
    field: str,
    limit_of: Limiter,
    what: str,
    words: Words,
    *,
    causes: Mapping[str, str] = NO_CAUSES,
) -> list[Row]:
    """The rows whose amounts left the baseline's range, like layers that changed alike together.

    `causes`: of layers, what is for the better there and explains more of the amount.
    """
    before, after = expanded(base), expanded(run)
    renamed = renamed_layers(base, run)
    after = {(renamed.get(layer, layer), phase): row for (layer, phase), row in after.items()}
    groups: dict[tuple[str, Phase, float, float, float, str], list[str]] = defaultdict(list)
    alike = Alike(base, run)
    for layer, phase in dict.fromkeys((*before, *after)):
        one, other = (_amount(rows.get((layer, phase)), field) for rows in (before, after))
        if one is None or other is None:
            continue
        limit = limit_of(one)
        found = outside(limit, other, one)
        if found is not None:
            cause = causes.get(layer, "") if found[1] > found[0] else ""
            groups[alike.pattern(layer), phase, found[0], found[1], limit.most, cause].append(layer)
    rows = []
    for (_, phase, one_value, other_value, most, cause), layers in groups.items():
        name = alike.folded(layers)
        change = change_text(one_value, other_value)
        text = f"{name or 'outside of layers'} ({phase}): {what} {words(one_value)} -> {words(other_value)} ({change})"
        text += f", with {cause}" if cause else ""
        finding = GuardFinding(
            layer=name, phase=phase, what=what, before=one_value, after=other_value, limit=most, text=text
        )
        rows.append(Row(finding, other_value > one_value, tuple(layers), follows=bool(cause)))
    return rows


def expanded(side: Baseline) -> dict[tuple[str, Phase], ExactRow]:
    """The row of each layer and phase."""
    return {(layer, row.phase): row for row in side.rows for layer in row.names.layers()}


def renamed_layers(base: Baseline, run: Baseline) -> Mapping[str, str]:
    """The run's layers by the baseline's names."""
    names = [dict.fromkeys(layer for row in side.rows for layer in row.names.layers() if layer) for side in (run, base)]
    return match_names(*names)


def _amount(row: ExactRow | None, field: str) -> Range | None:
    """That of a row; 0 of one that is not there."""
    if row is None:
        return 0.0, 0.0
    amount: Range | None = getattr(row, field)
    return amount


class Alike:
    """Which layers are alike, as the rows of both sides say; layers go by the names of the first."""

    def __init__(self, *sides: Baseline) -> None:
        self._number: dict[str, tuple[str, int | None]] = {}
        for row in (row for side in sides for row in side.rows):
            told = [number for first, last in row.names.numbers for number in range(first, last + 1)]
            numbers: list[int | None] = [*told] or [None]
            for layer, number in zip(row.names.layers(), numbers, strict=True):
                self._number.setdefault(layer, (row.names.pattern, number))

    def pattern(self, layer: str) -> str:
        """Equal for layers that are alike."""
        return self._number.get(layer, (layer, None))[0]

    def folded(self, layers: Sequence[str]) -> str:
        """One name for layers of one pattern."""
        told = [self._number.get(layer, (layer, None))[1] for layer in layers]
        numbers = [number for number in told if number is not None]
        return shown(self.pattern(layers[0]), numbers) if len(numbers) > 1 else layers[0]


def outside(limit: Limit, now: Range, before: Range) -> tuple[float, float] | None:
    """(before, now) where all of the run is beyond what is fine: the nearer ends of both; else None."""
    if now[0] > limit.most:
        return before[1], now[0]
    if now[1] < limit.least:
        return before[0], now[1]
    return None


def relative(before: Range, slack: float) -> Limit:
    """A range with a share of it beyond."""
    return Limit(before[1] * (1 + slack), before[0] * (1 - slack))


def absolute(before: Range, slack: float) -> Limit:
    """A range with so much beyond."""
    return Limit(before[1] + slack, before[0] - slack)


def events_limit(before: Range) -> Limit:
    """Exact where every step had as many; else what a step had on average may differ."""
    even = all(float(value).is_integer() for value in before)
    return absolute(before, 0.0) if even else relative(before, UNEVEN_SLACK)


def check_of(name: str, rows: Iterable[Row]) -> GuardCheck:
    """The check that found `rows`, the largest change first."""
    rows = sorted(rows, key=_weight)
    worse = tuple(row.finding for row in rows if row.worse and not row.follows)
    better = tuple(row.finding for row in rows if not row.worse)
    follows = tuple(row.finding for row in rows if row.worse and row.follows)
    status: Status = "regression" if worse else "improved" if better else "ok"
    return GuardCheck(name=name, status=status, regressions=worse, improvements=better, consequences=follows)


def _weight(row: Row) -> float:
    """The largest change first; what is of the whole step before all."""
    finding = row.finding
    if not finding.layer and finding.phase is None:
        return float("-inf")
    return -abs((finding.after or 0.0) - (finding.before or 0.0)) * row.members


def count_text(value: float) -> str:
    """`12`, `2.5`."""
    return f"{value:g}"


def flops_text(value: float) -> str:
    """`1.25 GFLOP`."""
    return f"{value / 1e9:.4g} GFLOP"


def mib_text(value: float) -> str:
    """`32 MiB`."""
    return f"{value / (1 << 20):.4g} MiB"


def change_text(before: float, after: float) -> str:
    """`+6.9 %`; `new` where there was none."""
    return f"{100 * (after / before - 1):+.3g} %" if before else "new"
