"""A comparison in words: what makes two results hard to compare, and the verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from profiler_wrapper.analysis.advice.advise import input_shapes
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.comparison.model import ChangedLayer, ComparedTotal, Difference, WorkChange
from profiler_wrapper.comparison.noise import LEAST_CHANGE
from profiler_wrapper.comparison.times import LEAST_SHARED, TimeChanges
from profiler_wrapper.units import MIB

# --------------------------------------------------------------------------------------------------
# What makes two results hard to compare, from the `comparable` of each, or where that is missing from its run.

BASIS = "time basis"
SIZES = "sizes of linear layers' products"  # told by digests
_SAME_COVERAGE = 0.02  # coverages that are nearer are as good as equal


class _Trait(NamedTuple):
    key: str
    words: str
    of_time_only: bool = False


# In the order in which they are told. What is not known on a side is no difference.
_TRAITS = (
    _Trait("time_basis", BASIS, True),
    _Trait("model", "model"),
    _Trait("layers", "layers"),
    _Trait("blocks", "blocks"),
    _Trait("parameters", "parameters"),
    _Trait("shapes", SIZES),
    _Trait("attention_shape", "attention shape"),
    _Trait("dtypes", "types of numbers"),
    _Trait("phases", "phases"),
    _Trait("device", "device", True),
    _Trait("device_count", "devices", True),
    _Trait("cpu_name", "CPU", True),
    _Trait("world_size", "world size"),
    _Trait("torch", "torch"),
    _Trait("python", "Python", True),
    _Trait("steps", "timed steps", True),
    _Trait("shapes_in_timed_steps", "shapes in the timed steps", True),
    _Trait("memory_in_timed_steps", "allocations in the timed steps", True),
    _Trait("complete", "complete"),
    _Trait("coverage", "coverage", True),
)
HARMLESS = frozenset({"timed steps"})  # to be told, but no reason not to judge
OF_MACHINE = frozenset({"device", "devices", "CPU", "world size", "torch", "Python", BASIS})


def traits(analysis: Analysis) -> dict[str, Any]:
    """What makes a result comparable: as it says itself, else as its run and rows tell."""
    run, versions = analysis.run, analysis.run.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    roots = [row.class_name or row.layer for row in analysis.layers if row.layer and row.parent is None]
    own: dict[str, Any] = {
        "model": ", ".join(dict.fromkeys(roots)) or None,
        "layers": len({row.layer for row in analysis.layers if row.layer}),
        "blocks": len({row.layer for row in analysis.layers if row.kind == "block"}),
        "phases": sorted({row.phase for row in analysis.layers if row.time_ns}),
        "time_basis": analysis.time_basis,
        "device": run.get("device"),
        "cpu_name": run.get("cpu_name"),
        "world_size": run.get("world_size"),
        "torch": versions.get("torch"),
        "python": versions.get("python"),
        "steps": sum(row.step is not None for row in analysis.steps),
        "complete": analysis.complete,
        "coverage": analysis.time.coverage,
        "memory_in_timed_steps": any(
            peak is not None
            for peak in (*(row.peak_bytes for row in analysis.steps), *(row.peak_bytes for row in analysis.layers))
        ),
        "shapes_in_timed_steps": not set(_numbers(run.get("timed_steps"))).isdisjoint(_numbers(run.get("full_steps"))),
    }
    comparable = analysis.summary.get("comparable")
    known = own | (dict(comparable) if isinstance(comparable, Mapping) else {})
    known["time_basis"] = analysis.time_basis
    known["shapes"] = input_shapes(analysis) or known.get("shapes")
    return {key: value for key, value in known.items() if value is not None}


def _numbers(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Where two results' traits differ: the work first, then the machine, then how it was recorded."""
    found = []
    for trait in _TRAITS:
        one, other = a.get(trait.key), b.get(trait.key)
        if one is None or other is None or one == other:
            continue
        if trait.key == "coverage" and abs(float(one) - float(other)) <= _SAME_COVERAGE:
            continue
        if trait.key == "cpu_name" and a.get("time_basis") == b.get("time_basis") == "device":
            continue
        words_a, words_b = (_words(trait.key, value) for value in (one, other))
        found.append(Difference(what=trait.words, a=words_a, b=words_b, of_time_only=trait.of_time_only))
    return tuple(found)


def _words(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "coverage" and isinstance(value, (int, float)):
        return f"{100 * value:.1f} %"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


# --------------------------------------------------------------------------------------------------
# A comparison in one sentence.

_MOST_DIFFERENCES = 3
_MANY_TIMES = 2  # as much more
CLOCK = "step on the clock"
PEAK = "peak memory"
NO_BACKEND = "no attention kernel"  # single ops, where there is attention
_SAME_FLOPS = 0.01  # FLOPs that are nearer are as good as equal
SURE = 0.05  # standard error of the change of a step: with more, no difference is found where there may be one
MOST_OF_IT = 0.5  # of a change: with less in single layers, it is told of all
_LEAST_PART = 0.2  # of a change: what explains less is not where it is
LIKE_LOAD = "all layers alike (as under other load or clock; low confidence)"
BY_LOAD = "within what load and clock do on a CPU"
_MOST_WORK = 2  # layers
_LEAST_MEMORY_BYTES = 64 << 10
_LONGEST = 40  # characters of a value


def verdict_of(
    differences: Sequence[Difference],
    totals: Sequence[ComparedTotal],
    changes: TimeChanges,
    changed: Sequence[ChangedLayer],
    work: Sequence[WorkChange],
    backend_changes: Sequence[tuple[str, str, str]],
    bases: tuple[str, str],
) -> str:
    """What is not alike, then what changed, then where. `totals`: the time of a step first; `bases` of time: a, b.

    The largest certain difference comes first: of the time of a step, else of its peak memory, else of its FLOPs.
    """
    total, flops = totals[0], _other_flops(totals)
    like_load = not flops and _like_load(changed, changes, total)
    alone = bool(changes.units) and changes.shared >= LEAST_SHARED and not changed
    certain = total.decision in ("slower", "faster")
    time = [_of_total(total, like_load, bases, alone and changes.on_cpu)]
    if certain and not like_load:
        time += [flops, _where(changed, total, flops)]
    elif changed:
        time.append(f"{'besides,' if certain else 'but'} {_alone(changed, changes.left_out)}")
    memory = _of_memory(totals)
    parts = [*time, memory] if certain and not like_load else [memory or (flops and f"b runs {flops}"), *time]
    said = ", ".join(part for part in parts if part)
    attention = "".join(f"; attention of {layer}: {a} -> {b}" for layer, a, b in backend_changes[:1])
    return f"{_unlike(differences)}{said}{_on_the_clock(totals)}{attention}{_work(work, bases[1])}"


def _work(work: Sequence[WorkChange], basis: str) -> str:
    """The layers with most other work; exact, so it is said whatever the noise."""
    if not work:
        return ""
    more = f" and {len(work) - _MOST_WORK} more" if len(work) > _MOST_WORK else ""
    layers = "; ".join(f"{place_of(one.layer, one.phase)} {work_words(one, basis)}" for one in work[:_MOST_WORK])
    signs = {
        delta > 0 for one in work for delta in (one.delta("flops"), one.delta("events"), one.delta("calls")) if delta
    }
    word = "other" if len(signs) != 1 else "more" if signs == {True} else "less"
    return f"; {word} work: {layers}{more}"


def work_words(one: WorkChange, basis: str) -> str:
    """`+12.5 % FLOPs, +12 ops`: what differs a step; `basis`: what events are."""
    words = []
    if one.delta("flops"):
        flops = one.delta("flops") / one.flops_a if one.flops_a else 0.0
        words.append(f"{100 * flops:+.1f} % FLOPs" if one.flops_a else f"{one.delta('flops') / 1e9:+.3f} GFLOP")
    if (one.flops_a is None) != (one.flops_b is None):
        words.append(f"FLOPs not known in {'a' if one.flops_a is None else 'b'}")
    if abs(one.delta("events")) >= 1:
        words.append(f"{one.delta('events'):+.0f} {'ops' if basis == 'cpu' else 'device events'}")
    if one.delta("calls"):
        words.append(f"{one.delta('calls'):+g} calls")
    if abs(one.delta("retained")) >= _LEAST_MEMORY_BYTES:
        words.append(f"{one.delta('retained') / MIB:+.1f} MiB kept")
    return ", ".join(words) or "a little otherwise"


def _unlike(differences: Sequence[Difference]) -> str:
    named = [one for one in differences if one.what not in HARMLESS]
    if not named:
        return ""
    words = [
        f"other {one.what}" if one.what == SIZES else f"{one.what} {one.a[:_LONGEST]} -> {one.b[:_LONGEST]}"
        for one in named[:_MOST_DIFFERENCES]
    ]
    more = f" and {len(named) - _MOST_DIFFERENCES} more" if len(named) > _MOST_DIFFERENCES else ""
    return f"not alike ({'; '.join(words)}{more}): "


def explained(changed: Sequence[ChangedLayer], total: ComparedTotal) -> float:
    """Share of the change of a step that is in layers which changed otherwise than the rest."""
    return sum(one.share or 0.0 for one in changed if (one.change_ns > 0) == (total.decision == "slower"))


def _like_load(changed: Sequence[ChangedLayer], changes: TimeChanges, total: ComparedTotal) -> bool:
    """Load and clock of a machine change from run to run, and no step of a run shows it: on a CPU, by any amount."""
    if total.decision not in ("slower", "faster") or explained(changed, total) >= MOST_OF_IT:
        return False
    if changes.common_beyond_noise or changes.shared < LEAST_SHARED:
        return changes.common_beyond_noise
    alone = not changed and total.change is not None and changes.common / total.change >= MOST_OF_IT
    return changes.on_cpu or alone


def _other_flops(totals: Sequence[ComparedTotal]) -> str:
    """How many FLOPs more or fewer, where both sides tell."""
    change = next((one.change for one in totals if one.unit == "flops" and one.change is not None), None)
    if change is None or abs(change) <= _SAME_FLOPS:
        return ""
    return f"with {100 * abs(change):.3g} % {'more' if change > 0 else 'fewer'} FLOPs"


def _of_memory(totals: Sequence[ComparedTotal]) -> str:
    """The peak, where it is another."""
    peak = next((one for one in totals if one.name == PEAK), None)
    if peak is None or peak.change is None or abs(peak.change) < LEAST_CHANGE or not peak.a or peak.b is None:
        return ""
    if abs(peak.b - peak.a) < _LEAST_MEMORY_BYTES:
        return ""
    word = "more" if peak.change > 0 else "less"
    sizes = f"{peak.a / MIB:.1f} -> {peak.b / MIB:.1f} MiB"
    return f"b needs {100 * abs(peak.change):.1f} % {word} memory at its peak ({sizes})"


def _on_the_clock(totals: Sequence[ComparedTotal]) -> str:
    """Where a step took longer or shorter and its work did not."""
    wall = next((one for one in totals if one.name == CLOCK), None)
    if wall is None or wall.decision not in ("slower", "faster") or wall.decision == totals[0].decision:
        return ""
    word = "more" if wall.decision == "slower" else "less"
    more = f"{100 * abs(wall.change or 0.0):.0f} % {word} time"
    times = f"{(wall.a or 0.0) / 1e6:.3f} -> {(wall.b or 0.0) / 1e6:.3f} ms"
    return f"; on the clock a step took {more} ({times}): waits, data, other load"


def _of_total(total: ComparedTotal, like_load: bool, bases: tuple[str, str], common_on_cpu: bool) -> str:
    if total.a is None or total.b is None or not total.a or not total.b:
        return "the time of a step is not known on both sides"
    a, b = (f"{value / 1e6:.3f}" for value in (total.a, total.b))
    of_a, of_b = (f"ms of {'device' if basis == 'device' else 'CPU'} time" for basis in bases)
    if of_a != of_b:
        return f"times are not judged, because they are of a CPU and of a device (a {a} {of_a} a step, b {b} {of_b})"
    times = f"{a} -> {b} {of_b} a step"
    if total.decision == "not judged":
        return f"not judged, because one side marks no steps ({times})"
    more = abs(total.change or 0.0)
    if total.decision == "no difference":
        return _no_difference(total, times, common_on_cpu)
    if like_load:
        word = "more" if total.decision == "slower" else "less"
        return f"b took {100 * more:.0f} % {word} time, {LIKE_LOAD} ({times})"
    if total.decision == "slower" and more >= _MANY_TIMES:
        return f"b takes {1 + more:.1f} times as long ({times})"
    error = f"(±{100 * total.error:.1f})" if total.error is not None else "(noise not known)"
    return f"b is {100 * more:.1f} % {error} {total.decision} ({times})"


def decision_words(total: ComparedTotal) -> str:
    """`"slower"`; `"not certain"` where noise may hide a difference, or may have made the one that is shown."""
    if total.decision == "not judged":
        return ""
    uncertain = abs(total.change or 0.0) >= LEAST_CHANGE or (total.error is not None and total.error > SURE)
    return "not certain" if total.decision == "no difference" and uncertain else total.decision


def _no_difference(total: ComparedTotal, times: str, common_on_cpu: bool) -> str:
    """Of a change that may be noise, that it is not certain: the numbers beside it may differ by much."""
    change = percent(total.change, total.error)
    if decision_words(total) == "no difference":
        return f"no difference in all ({change}; {times})"
    unknown = ", noise not known" if total.error is None else ""
    by_load = f", {BY_LOAD}" if common_on_cpu and not unknown and abs(total.change or 0.0) >= LEAST_CHANGE else ""
    return f"no certain difference of the whole step{by_load} ({change}{unknown}; {times})"


def _where(changed: Sequence[ChangedLayer], total: ComparedTotal, work: str) -> str:
    same_way = [one for one in changed if (one.change_ns > 0) == (total.decision == "slower")]
    if not same_way:
        return "" if work else "and no layer stands out"
    first = same_way[0]
    share = min(first.share or 0.0, 1.0)
    if share < _LEAST_PART:
        return f"and no layer explains much of it (most, {100 * share:.0f} %: {place(first)})"
    return f"{100 * share:.0f} % of it in {place(first)}"


def _alone(changed: Sequence[ChangedLayer], common: float) -> str:
    """The first of them, and how many more; where it moved with all others, and less than they, with their change."""
    first = changed[0]
    more = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
    if first.change is None:
        return f"{place(first)} is only in {'b' if first.change_ns > 0 else 'a'}{more}"
    word = "slower" if first.change_ns > 0 else "faster"
    error = f" (±{100 * first.error:.1f})" if first.error is not None else ""
    amount = f"{100 * abs(first.change):.1f} %{error}"
    if first.change * first.change_ns < 0:
        less = "more" if first.change > 0 else "less"
        return f"{place(first)} took {amount} {less} time, the rest {100 * abs(common):.1f} % {less}{more}"
    return f"{place(first)} is {amount} {word}{more}"


def place(one: ChangedLayer) -> str:
    """`layers.7.mlp backward`; what has no module goes by its phase."""
    return place_of(one.layer, one.phase)


def place_of(layer: str, phase: str | None) -> str:
    """The same of a layer's name and a phase."""
    return f"{layer} {(phase or '').replace('_', ' ')}".strip() or "code between calls"


def percent(change: float | None, error: float | None) -> str:
    """`+8.2 % ±1.1`; a change that is not known is `-`."""
    if change is None or not math.isfinite(change):
        return "-"
    return f"{100 * change:+.1f} %" + (f" ±{100 * error:.1f}" if error is not None else "")
