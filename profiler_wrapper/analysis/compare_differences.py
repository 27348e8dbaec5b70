"""What makes two results hard to compare, from the `comparable` of each, or where that is missing from its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from profiler_wrapper.analysis.advice.comparable import input_shapes
from profiler_wrapper.analysis.compare_model import Difference
from profiler_wrapper.analysis.model import Analysis

BASIS = "time basis"
SIZES = "sizes of linear layers' products"  # told by digests
_NEAR = 0.02  # coverages that are nearer are as good as equal


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
    told = analysis.summary.get("comparable")
    known = own | (dict(told) if isinstance(told, Mapping) else {})
    known["time_basis"] = analysis.time_basis
    known["shapes"] = input_shapes(analysis) or known.get("shapes")
    return {key: value for key, value in known.items() if value is not None}


def _numbers(told: object) -> list[object]:
    return list(told) if isinstance(told, (list, tuple)) else []


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Where two results' traits differ: the work first, then the machine, then how it was recorded."""
    found = []
    for trait in _TRAITS:
        one, other = a.get(trait.key), b.get(trait.key)
        if one is None or other is None or one == other:
            continue
        if trait.key == "coverage" and abs(float(one) - float(other)) <= _NEAR:
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
