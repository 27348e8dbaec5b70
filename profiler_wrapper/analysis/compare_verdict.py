"""A comparison in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler_wrapper.analysis.compare_differences import HARMLESS
from profiler_wrapper.analysis.compare_model import ComparedTotal, Culprit, Difference
from profiler_wrapper.analysis.compare_times import TimeChanges

_MOST_DIFFERENCES = 3
_MANY_TIMES = 2  # as much more
_LONGEST = 40  # characters of a value


def verdict_of(
    differences: Sequence[Difference],
    total: ComparedTotal,
    changes: TimeChanges,
    culprits: Sequence[Culprit],
    backend_changes: Sequence[tuple[str, str, str]],
    time_basis: str,
) -> str:
    """What is not alike, then what changed, then where."""
    parts = [_unlike(differences), _of_total(total, changes, time_basis)]
    if total.decision in ("slower", "faster"):
        parts.append(_where(culprits, changes, total))
    elif culprits:
        parts.append("but " + _alone(culprits))
    said = ", ".join(part for part in parts[1:] if part)
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in backend_changes[:1])
    return f"{parts[0]}{said}{attention}"


def _unlike(differences: Sequence[Difference]) -> str:
    told = [one for one in differences if one.what not in HARMLESS]
    if not told:
        return ""
    words = [f"{one.what} {one.a[:_LONGEST]} -> {one.b[:_LONGEST]}" for one in told[:_MOST_DIFFERENCES]]
    more = f" and {len(told) - _MOST_DIFFERENCES} more" if len(told) > _MOST_DIFFERENCES else ""
    return f"not alike ({'; '.join(words)}{more}): "


def _of_total(total: ComparedTotal, changes: TimeChanges, time_basis: str) -> str:
    if total.a is None or total.b is None or not total.a or not total.b:
        return "the time of a step is not known on both sides"
    times = (
        f"{total.a / 1e6:.3f} -> {total.b / 1e6:.3f} ms of {'device' if time_basis == 'device' else 'CPU'} time a step"
    )
    if total.decision == "no difference":
        change = percent(total.change, total.error)
        return f"no difference in all ({change}; {times})" if total.error is not None else f"no difference ({times})"
    more = abs(total.change or 0.0)
    if total.decision == "slower" and more >= _MANY_TIMES:
        return f"b takes {1 + more:.1f} times as long ({times})"
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {100 * more:.1f} % {error} {total.decision} ({times})"


def _where(culprits: Sequence[Culprit], changes: TimeChanges, total: ComparedTotal) -> str:
    same_way = [one for one in culprits if (one.change_ns > 0) == (total.decision == "slower")]
    if changes.common_beyond_noise and (changes.common > 0) == (total.decision == "slower"):
        besides = f"; besides, {_alone(same_way)}" if same_way else ""
        return f"all layers alike{besides}"
    if not same_way:
        return "and no layer stands out"
    first = same_way[0]
    share = min(first.share or 0.0, 1.0)
    return f"{100 * share:.0f} % of it in {place(first)}"


def _alone(culprits: Sequence[Culprit]) -> str:
    first = culprits[0]
    more = f", and {len(culprits) - 1} more changed" if len(culprits) > 1 else ""
    if first.change is None:
        return f"{place(first)} is only in {'b' if first.change_ns > 0 else 'a'}{more}"
    word = "slower" if first.change_ns > 0 else "faster"
    error = f" (±{100 * first.error:.1f})" if first.error is not None else ""
    return f"{place(first)} is {100 * abs(first.change):.1f} %{error} {word}{more}"


def place(culprit: Culprit) -> str:
    """`layers.7.mlp backward`; what has no module goes by its phase."""
    phase = (culprit.phase or "").replace("_", " ")
    return f"{culprit.layer} {phase}".strip() or "code between calls"


def percent(change: float | None, error: float | None) -> str:
    """`+8.2 % ±1.1`; a change that is not known is `-`."""
    if change is None or not math.isfinite(change):
        return "-"
    return f"{100 * change:+.1f} %" + (f" ±{100 * error:.1f}" if error is not None else "")
