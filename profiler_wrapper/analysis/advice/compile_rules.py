"""Advice on torch.compile: graph breaks that cut compiled code in pieces."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import count, duration, where
from profiler_wrapper.analysis.attribution import UNKNOWN
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Category

_REGION = "Torch-Compiled Region"
_GRAPH = "## Call CompiledFxGraph"
_NOT_FUSED = ("gemm", "attention", "communication")
_MOST_REASONS = 2


def graph_break(facts: Facts) -> Iterator[Finding]:
    """Several compiled regions in one call of a layer: Dynamo broke the graph between them."""
    known = facts.analysis.run.get("graph_breaks")
    if known is not None and not known:
        return  # what has several regions is then compiled in several
    regions = _regions_by_call(facts)
    told = [entry for entry in known or () if isinstance(entry, Mapping)]
    broken = {call: members for call, members in regions.items() if len(members) > 1}
    if not broken:
        return
    tree = facts.found.tree
    layer_of = {call: tree.layer_of_span[call] for call in broken}
    layers = tuple(tree.layers[i].name for i in sorted(set(layer_of.values()), key=lambda i: tree.layers[i].order))
    breaks = sum(len(members) - 1 for members in broken.values()) / facts.steps
    between = _between(facts, list(broken.values()))
    fusable, all_time = _work_of(facts, set(layer_of.values()))
    calls = Counter(layer_of.values())
    per_call = max(len(members) for members in broken.values())
    evidence = [
        f"up to {per_call} compiled regions in one call of {where(layers)}, in "
        f"{count(sum(calls.values()) / facts.steps, 'call')} a step",
        f"{duration(between)} a step between the compiled graphs of these calls (wall time), {duration(fusable)} in "
        f"kernels that could be fused ({facts.time_name}); at most: none of both",
        *_reasons(told),
    ]
    sources = [str(entry["source"]) for entry in told if entry.get("source")]
    yield Finding(
        id="graph-break",
        title=f"{count(round(breaks, 1), 'graph break')} a step in {where(layers)}" + _because(told),
        layer=where(layers),
        phase="forward",
        share=facts.share_of_work(all_time),
        saves_at_most_us=facts.saves_us(between + fusable),
        saves_at_most_bytes=None,
        evidence=tuple(evidence),
        confidence="medium" if told else "low",
        fix="take what breaks the graph out of the compiled code (torch.compile(..., fullgraph=True) names it)",
        source=sources[0] if sources else None,
        layers=layers,
        details={"breaks": breaks, "between_us": between / 1000},
    )


def _because(told: Sequence[Mapping[str, Any]]) -> str:
    if not told:
        return ""
    more = len(told) - 1
    return f": {str(told[0].get('reason'))[:90]}" + (f", and {count(more, 'other reason')}" if more else "")


def _reasons(told: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{str(entry.get('reason'))[:120]}{_at(entry.get('source'))}" for entry in told[:_MOST_REASONS]]


def _at(source: object) -> str:
    return f" ({str(source)[-90:]})" if source else ""


def _regions_by_call(facts: Facts) -> dict[int, list[int]]:
    """Spans of the compiled regions in forward, in order, by the span of the innermost layer call around them."""
    found = facts.found
    recording, spans = found.recording, found.recording.spans
    named = np.array([name.startswith(_REGION) for name in recording.names], dtype=np.bool_)
    is_region = named[spans.name] & (spans.category <= Category.ANNOTATION)
    if not is_region.any():
        return {}
    is_call = np.zeros(len(spans), dtype=np.bool_)
    is_call[list(found.tree.layer_of_span)] = True
    regions = np.flatnonzero(is_region)
    holder = nearest(found.nesting.parent, is_call)[regions]  # what goes on after a break lies in the region before
    forward = found.attribution.node_of[regions] < 0
    by_call: dict[int, list[int]] = defaultdict(list)
    for region, call in zip(regions[forward].tolist(), holder[forward].tolist(), strict=True):
        if call >= 0:
            by_call[call].append(region)
    return {call: sorted(members, key=lambda i: int(spans.start_ns[i])) for call, members in by_call.items()}


def _between(facts: Facts, groups: Sequence[Sequence[int]]) -> float:
    """Per step, wall time from the begin of the first region of a call to the end of its last, outside of graphs."""
    recording = facts.found.recording
    spans = recording.spans
    named = np.array([name.startswith(_GRAPH) for name in recording.names], dtype=np.bool_)[spans.name]
    named &= spans.category <= Category.ANNOTATION
    if not named.any():
        named[[region for members in groups for region in members]] = True
    graphs = union(spans.start_ns[named], spans.end_ns[named])
    start = np.array([min(int(spans.start_ns[i]) for i in members) for members in groups], dtype=np.int64)
    end = np.array([max(int(spans.end_ns[i]) for i in members) for members in groups], dtype=np.int64)
    return facts.per_step_ns(int((end - start - graphs.overlap(start, end)).sum()))


def _work_of(facts: Facts, layers: set[int]) -> tuple[float, float]:
    """Per step, in these layers and below: (time of what could be fused, all time)."""
    found = facts.found
    inside = np.array(
        [
            place.layer != UNKNOWN
            and place.layer >= 0
            and not layers.isdisjoint(found.tree.layers[place.layer].ancestors)
            for place in found.attribution.places
        ],
        dtype=np.bool_,
    )[found.charges.place]
    kept = np.isin(found.charges.work, [classes.CLASSES.index(name) for name in _NOT_FUSED])
    times = found.charges.time_ns
    return facts.per_step_ns(int(times[inside & ~kept].sum())), facts.per_step_ns(int(times[inside].sum()))


RULES: tuple[Rule, ...] = (graph_break,)
