"""The moments of a step at which memory is worth a look, and when phases begin."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.layer_calls import CallTree
from profiler_wrapper.analysis.memory_model import MemoryMoment
from profiler_wrapper.analysis.memory_owned import OwnedMemory
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.columns import Category, Int64, Recording
from profiler_wrapper.recording.marks import MEMORY_POINT


def phase_starts(recording: Recording, attribution: Attribution, calls: CallTree) -> tuple[tuple[int, Phase], ...]:
    """When phases begin, ascending in time; what lies between two belongs to the one before.

    Forward begins with an outermost layer, backward with a node of autograd, the optimizer with its step,
    and `other` when that has ended.
    """
    spans = recording.spans
    entries = _outermost_calls(attribution, calls)
    nodes = np.flatnonzero(attribution.is_node)
    steps = _optimizer_steps(recording)
    phase_of_place = np.array([PHASES.index(place.phase) for place in attribution.places], dtype=np.int64)
    times = np.concatenate([spans.start_ns[entries], spans.start_ns[nodes], spans.start_ns[steps], spans.end_ns[steps]])
    phases = np.concatenate(
        [
            phase_of_place[attribution.place_of[entries]],
            np.full(len(nodes), PHASES.index("backward")),
            np.full(len(steps), PHASES.index("optimizer")),
            np.full(len(steps), PHASES.index("other")),
        ]
    )
    order = np.argsort(times, kind="stable")
    times, phases = times[order], phases[order]
    begins = np.append(True, phases[1:] != phases[:-1])[: len(phases)]
    return tuple(zip(times[begins].tolist(), (PHASES[i] for i in phases[begins].tolist()), strict=True))


def find_moments(
    recording: Recording, attribution: Attribution, calls: CallTree, steps: Steps, owned: OwnedMemory
) -> tuple[MemoryMoment, ...]:
    """The moments of each step, as far as it has them, and those that somebody asked for, in order of time.

    "after forward": where backward begins, without one where the last outermost layer ends; "after backward":
    where the last node of autograd ends; "after optimizer": where the last step of an optimizer ends. Moments
    that the loop asks for have the name it gives them.
    """
    spans = recording.spans
    nodes = np.flatnonzero(attribution.is_node)
    entries, optimizer = _outermost_calls(attribution, calls), _optimizer_steps(recording)
    found: list[MemoryMoment] = []

    def add(label: str, step: int | None, time_ns: int) -> None:
        event = int(np.searchsorted(owned.memory.time_ns, time_ns, side="right")) - 1
        found.append(owned.moment(label, step, time_ns, event))

    for number, start, end in zip(steps.number, steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True):
        inside = _begun(spans.start_ns, nodes, start, end)
        forward = _begun(spans.start_ns, entries, start, end)
        stepped = _begun(spans.start_ns, optimizer, start, end)
        if len(inside):
            add("after forward", number, int(spans.start_ns[inside].min()) - 1)
            add("after backward", number, int(spans.end_ns[inside].max()))
        elif len(forward):
            add("after forward", number, int(spans.end_ns[forward].max()))
        if len(stepped):
            add("after optimizer", number, int(spans.end_ns[stepped].max()))
    points = np.flatnonzero([name.startswith(MEMORY_POINT) for name in recording.names])
    asked = np.flatnonzero(np.isin(spans.name, points) & (spans.category <= Category.ANNOTATION))
    for point, place in zip(asked.tolist(), steps.place_of(spans.start_ns[asked]).tolist(), strict=True):
        label = recording.name_of(point).removeprefix(MEMORY_POINT)
        add(label, steps.number[place] if place >= 0 else None, int(spans.start_ns[point]))
    return tuple(sorted(found, key=lambda moment: moment.time_ns))


def _begun(start_ns: Int64, spans: Int64, start: int, end: int) -> Int64:
    """Of `spans` those that begin within an interval."""
    return spans[(start_ns[spans] >= start) & (start_ns[spans] < end)]


def _outermost_calls(attribution: Attribution, calls: CallTree) -> Int64:
    """Spans that enter a layer outside of all others, and outside of backward."""
    return calls.span[(calls.parent < 0) & (attribution.node_of[calls.span] < 0)]


def _optimizer_steps(recording: Recording) -> Int64:
    spans = recording.spans
    names = [i for i, name in enumerate(recording.names) if name.startswith("Optimizer.step#")]
    return np.flatnonzero(np.isin(spans.name, names) & (spans.category <= Category.ANNOTATION))
