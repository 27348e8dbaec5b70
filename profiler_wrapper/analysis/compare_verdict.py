"""A comparison in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler_wrapper.analysis.compare_differences import HARMLESS
from profiler_wrapper.analysis.compare_model import ComparedTotal, Culprit, Difference
from profiler_wrapper.analysis.compare_times import LEAST_SHARED, TimeChanges

_MOST_DIFFERENCES = 3
_MANY_TIMES = 2  # as much more
CLOCK = "step on the clock"
_NEAR = 0.01  # FLOPs that are nearer are as good as equal
SURE = 0.05  # standard error of the change of a step: with more, no difference is found where there may be one
MOST_OF_IT = 0.5  # of a change: with less in single layers, it is told of all
LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"
_LONGEST = 40  # characters of a value


def verdict_of(
    differences: Sequence[Difference],
    totals: Sequence[ComparedTotal],
    changes: TimeChanges,
    culprits: Sequence[Culprit],
    backend_changes: Sequence[tuple[str, str, str]],
    time_basis: str,
) -> str:
    """What is not alike, then what changed, then where. `totals`: the time of a step first."""
    total, work = totals[0], _other_work(totals)
    like_load = not work and _like_load(culprits, changes, total)
    parts = [_unlike(differences), _of_total(total, like_load, time_basis)]
    if total.decision in ("slower", "faster"):
        parts.append(work)
        if not like_load:
            parts.append(_where(culprits, total, work))
        elif culprits:
            parts.append(f"besides, {_alone(culprits)}")
    elif culprits:
        parts.append("but " + _alone(culprits))
    said = ", ".join(part for part in parts[1:] if part)
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in backend_changes[:1])
    return f"{parts[0]}{said}{_on_the_clock(totals)}{attention}"


def _unlike(differences: Sequence[Difference]) -> str:
    told = [one for one in differences if one.what not in HARMLESS]
    if not told:
        return ""
    words = [f"{one.what} {one.a[:_LONGEST]} -> {one.b[:_LONGEST]}" for one in told[:_MOST_DIFFERENCES]]
    more = f" and {len(told) - _MOST_DIFFERENCES} more" if len(told) > _MOST_DIFFERENCES else ""
    return f"not alike ({'; '.join(words)}{more}): "


def explained(culprits: Sequence[Culprit], total: ComparedTotal) -> float:
    """Share of the change of a step that is in layers which changed otherwise than the rest."""
    return sum(one.share or 0.0 for one in culprits if (one.change_ns > 0) == (total.decision == "slower"))


def _like_load(culprits: Sequence[Culprit], changes: TimeChanges, total: ComparedTotal) -> bool:
    """Load and clock of a machine change from run to run, and no step of a run shows it: on a CPU, by any amount."""
    if total.decision not in ("slower", "faster") or explained(culprits, total) >= MOST_OF_IT:
        return False
    if changes.common_beyond_noise or changes.shared < LEAST_SHARED:
        return changes.common_beyond_noise
    alone = not culprits and total.change is not None and changes.common / total.change >= MOST_OF_IT
    return changes.on_cpu or alone


def _other_work(totals: Sequence[ComparedTotal]) -> str:
    """How many FLOPs more or fewer, where both sides tell."""
    change = next((one.change for one in totals if one.name == "FLOPs"), None)
    if change is None or abs(change) <= _NEAR:
        return ""
    return f"with {100 * abs(change):.3g} % {'more' if change > 0 else 'fewer'} FLOPs"


def _on_the_clock(totals: Sequence[ComparedTotal]) -> str:
    """Where a step took longer or shorter and its work did not."""
    wall = next((one for one in totals if one.name == CLOCK), None)
    if wall is None or wall.decision not in ("slower", "faster") or wall.decision == totals[0].decision:
        return ""
    word = "longer" if wall.decision == "slower" else "shorter"
    times = f"{(wall.a or 0.0) / 1e6:.3f} -> {(wall.b or 0.0) / 1e6:.3f} ms"
    return f"; on the clock a step took {100 * abs(wall.change or 0.0):.0f} % {word} ({times}): waits, data, other load"


def _of_total(total: ComparedTotal, like_load: bool, time_basis: str) -> str:
    if total.a is None or total.b is None or not total.a or not total.b:
        return "the time of a step is not known on both sides"
    times = (
        f"{total.a / 1e6:.3f} -> {total.b / 1e6:.3f} ms of {'device' if time_basis == 'device' else 'CPU'} time a step"
    )
    if total.decision == "not judged":
        return f"not judged, because one side marks no steps ({times})"
    if total.decision == "no difference":
        change = percent(total.change, total.error)
        if total.error is None:
            return f"no difference ({times})"
        return f"no difference {'in all' if total.error <= SURE else 'beyond the noise'} ({change}; {times})"
    more = abs(total.change or 0.0)
    if like_load:
        word = "longer" if total.decision == "slower" else "shorter"
        return f"b took {100 * more:.0f} % {word}, {LIKE_LOAD} ({times})"
    if total.decision == "slower" and more >= _MANY_TIMES:
        return f"b takes {1 + more:.1f} times as long ({times})"
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {100 * more:.1f} % {error} {total.decision} ({times})"


def _where(culprits: Sequence[Culprit], total: ComparedTotal, work: str) -> str:
    same_way = [one for one in culprits if (one.change_ns > 0) == (total.decision == "slower")]
    if not same_way:
        return "" if work else "and no layer stands out"
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
