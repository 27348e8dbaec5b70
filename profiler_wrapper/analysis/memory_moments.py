"""The moments of a step at which memory is worth a look, and when phases begin."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.layer_calls import CallTree
from profiler_wrapper.analysis.memory_model import MemoryMoment
from profiler_wrapper.analysis.memory_owned import OwnedMemory
from profiler_wrapper.analysis.optimizer_calls import optimizer_calls
from profiler_wrapper.analysis.phase import PHASES, Phase
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.marks import MEMORY_POINT
from profiler_wrapper.recording.recording import Category, Int64, Recording


def phase_starts(recording: Recording, attribution: Attribution, calls: CallTree) -> tuple[tuple[int, Phase], ...]:
    """When phases begin, ascending in time; what lies between two belongs to the one before.

    Forward begins with an outermost layer, backward with a node of autograd, the optimizer with its step or where
    the backward of its closure ends, and `other` when the step has ended.
    """
    spans = recording.spans
    entries = _outermost_calls(attribution, calls)
    nodes = np.flatnonzero(attribution.is_node)
    steps = optimizer_calls(recording, "step")
    borders = np.sort(np.concatenate([spans.start_ns[entries], spans.start_ns[steps], spans.end_ns[steps]]))
    run = np.searchsorted(borders, spans.start_ns[nodes])
    ends = np.zeros(len(borders) + 1, dtype=np.int64)
    np.maximum.at(ends, run, spans.end_ns[nodes])
    ends = ends[np.unique(run)]  # of each run of backward
    last = np.searchsorted(spans.start_ns[steps], ends, side="right") - 1
    resumed = ends[(last >= 0) & (ends < spans.end_ns[steps[last]])] if len(steps) else ends[:0]
    phase_of_place = np.array([PHASES.index(place.phase) for place in attribution.places], dtype=np.int64)
    times = np.concatenate(
        [spans.start_ns[entries], spans.start_ns[nodes], spans.start_ns[steps], resumed, spans.end_ns[steps]]
    )
    phases = np.concatenate(
        [
            phase_of_place[attribution.place_of[entries]],
            np.full(len(nodes), PHASES.index("backward")),
            np.full(len(steps) + len(resumed), PHASES.index("optimizer")),
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
    nodes = _InOrder(recording, np.flatnonzero(attribution.is_node))
    entries = _InOrder(recording, _outermost_calls(attribution, calls))
    optimizer = _InOrder(recording, optimizer_calls(recording, "step"))
    found: list[MemoryMoment] = []

    def add(label: str, step: int | None, time_ns: int) -> None:
        event = int(np.searchsorted(owned.memory.time_ns, time_ns, side="right")) - 1
        found.append(owned.moment(label, step, time_ns, event))

    for number, start, end in zip(steps.number, steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True):
        backward = nodes.begun(start, end)
        forward = entries.begun(start, end)
        stepped = optimizer.begun(start, end)
        if backward is not None:
            add("after forward", number, backward[0] - 1)
            add("after backward", number, backward[1])
        elif forward is not None:
            add("after forward", number, forward[1])
        if stepped is not None:
            add("after optimizer", number, stepped[1])
    points = np.flatnonzero([name.startswith(MEMORY_POINT) for name in recording.names])
    asked = np.flatnonzero(np.isin(spans.name, points) & (spans.category <= Category.ANNOTATION))
    for point, place in zip(asked.tolist(), steps.place_of(spans.start_ns[asked]).tolist(), strict=True):
        label = recording.name_of(point).removeprefix(MEMORY_POINT)
        add(label, steps.number[place] if place >= 0 else None, int(spans.start_ns[point]))
    return tuple(sorted(found, key=lambda moment: moment.time_ns))


class _InOrder:
    """Spans in the order in which they begin."""

    def __init__(self, recording: Recording, chosen: Int64) -> None:
        chosen = chosen[np.argsort(recording.spans.start_ns[chosen], kind="stable")]
        self._start_ns, self._end_ns = recording.spans.start_ns[chosen], recording.spans.end_ns[chosen]

    def begun(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The first start and the last end of those that begin within an interval; None where none does."""
        first, last = np.searchsorted(self._start_ns, [start_ns, end_ns]).tolist()
        return (int(self._start_ns[first]), int(self._end_ns[first:last].max())) if first < last else None


def _outermost_calls(attribution: Attribution, calls: CallTree) -> Int64:
    """Spans that enter a layer outside of all others, and outside of backward."""
    return calls.span[(calls.parent < 0) & (attribution.node_of[calls.span] < 0)]
