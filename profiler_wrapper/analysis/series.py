"""Named things followed over the steps: ops, kernels, blocks somebody named, functions of events."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_tree import is_named_block
from profiler_wrapper.analysis.statistics import sum_by_key
from profiler_wrapper.analysis.steps import Steps, find_iterations
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

_MOST_NAMED_BLOCKS = 50


class LayerEvent(NamedTuple):
    """What a tracking function sees of one event."""

    name: str
    time_us: float
    phase: str
    class_name: str


TrackFunction = Callable[[Sequence[LayerEvent]], float]
Track = str | re.Pattern[str] | TrackFunction


def tracked_series(found: Attributed, track: Sequence[Track], notes: list[str]) -> dict[str, tuple[float | None, ...]]:
    """What is followed, per step, or per entry of a layer loop; `notes` gets what is not known, and why.

    Microseconds of each tracked name, and of every block that the trace names: `name`. What each tracked function
    makes of a block's events: `function[block]`.
    """
    iterations = find_iterations(found.recording)
    steps = iterations if len(iterations) > 1 else found.steps
    names = [item for item in track if not callable(item)]
    functions = [item for item in track if callable(item)]
    return _named_series(found, steps, names, notes) | _function_series(found, steps, functions, notes)


def _named_series(
    found: Attributed, steps: Steps, track: Iterable[str | re.Pattern[str]], notes: list[str]
) -> dict[str, tuple[float | None, ...]]:
    """Microseconds per step of each tracked name, and of every block that the trace names.

    A name is matched exactly; where nothing has it, as a regular expression anywhere in a name (as it
    stands, if it is none). An event inside another one that matches counts once. A tracked name that
    nothing has is no number, and `notes` says so.
    """
    recording, charges = found.recording, found.charges
    wanted: dict[str, set[int]] = {}
    for item in track:
        pattern = _pattern(item)
        exact = {i for i, name in enumerate(recording.names) if name == item}
        matching = exact or {i for i, name in enumerate(recording.names) if pattern.search(name)}
        wanted[pattern.pattern if isinstance(item, re.Pattern) else item] = matching
    used = np.unique(recording.spans.name[recording.spans.category == Category.ANNOTATION]).tolist()
    blocks = [i for i in used if is_named_block(recording.names[i])]
    for i in blocks[:_MOST_NAMED_BLOCKS]:
        wanted.setdefault(recording.names[i], {i})
    place = steps.place_of(charges.launch_ns) if len(steps) else np.zeros(len(charges), dtype=np.int64)
    count = max(len(steps), 1)
    series: dict[str, tuple[float | None, ...]] = {}
    for name, ids in wanted.items():
        if not ids:
            series[name] = (None,) * count
            notes.append(f"the tracked {name!r} is the name of nothing in the timed trace")
            continue
        chosen = _inside(recording, found.enclosing, charges, ids) & (place >= 0)
        series[name] = tuple(ns / 1000 for ns in sum_by_key(place[chosen], charges.time_ns[chosen], count).tolist())
    return series


def _pattern(item: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(item)
    except re.error:
        return re.compile(re.escape(str(item)))


def _inside(recording: Recording, parent: Int32, charges: Charges, ids: set[int]) -> Bool:
    """Per charge: it, or an event around its launch, has one of these names."""
    chosen = np.isin(recording.spans.name, list(ids))
    inside = nearest(parent, chosen) >= 0
    launched = charges.cpu_span >= 0
    found: Bool = (launched & inside[charges.cpu_span]) | chosen[charges.span]
    blocks = {i for i in ids if is_named_block(recording.names[i])}
    return found | (launched & _begins_in_block(recording, charges.cpu_span, blocks)) if blocks else found


def _begins_in_block(recording: Recording, members: Int64, names: set[int]) -> Bool:
    """Per member: it begins while a named block of these names runs on its thread.

    Such a block may cross what else encloses a member: a step that ends where a model is called within the block, or
    an optimizer's step in whose midst it was cut off with the recording.
    """
    spans = recording.spans
    blocks = np.flatnonzero((spans.category == Category.ANNOTATION) & np.isin(spans.name, list(names)))
    within = np.zeros(len(members), dtype=np.bool_)
    for lane in np.unique(spans.lane[blocks]).tolist():
        here = blocks[spans.lane[blocks] == lane]
        here = here[np.argsort(spans.start_ns[here], kind="stable")]
        starts = spans.start_ns[members]
        begun = np.searchsorted(spans.start_ns[here], starts, side="right")
        ends = np.append(0, np.maximum.accumulate(spans.end_ns[here]))  # the last one of those that have begun
        within |= (spans.lane[members] == lane) & (begun > 0) & (starts < ends[begun])
    return within


def _function_series(
    found: Attributed, steps: Steps, functions: Sequence[TrackFunction], notes: list[str]
) -> dict[str, tuple[float | None, ...]]:
    """Per step, what each function makes of a block's events.

    Where the model has no blocks, a root's events are given. A function that raises has no number
    there, and `notes` gets its first reason.
    """
    if not functions:
        return {}
    groups = _events_by_block(found, steps)
    series: dict[str, tuple[float | None, ...]] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        for block in dict.fromkeys(block for block, _ in groups):
            values = [groups.get((block, step)) for step in range(max(len(steps), 1))]
            series[f"{name}[{block}]"] = tuple(_number(function, name, events, notes) for events in values)
    return series


def _number(function: TrackFunction, name: str, events: list[LayerEvent] | None, notes: list[str]) -> float | None:
    if events is None:
        return None
    try:
        return float(function(events))
    except Exception as error:
        note = f"the tracked {name} has gaps, because it raised {type(error).__name__}: {error}"
        if not any(before.startswith(f"the tracked {name} has gaps") for before in notes):
            notes.append(note)
        return None


def _events_by_block(found: Attributed, steps: Steps) -> dict[tuple[str, int], list[LayerEvent]]:
    recording, layers, charges = found.recording, found.tree.layers, found.charges
    step = steps.place_of(charges.launch_ns)
    groups: dict[tuple[str, int], list[LayerEvent]] = defaultdict(list)
    for i in range(len(charges)):
        place = found.attribution.places[charges.place[i]]
        if place.layer < 0:
            continue
        layer = layers[place.layer]
        block = layers[layer.block if layer.block >= 0 else layer.ancestors[-1]]
        event = LayerEvent(
            recording.name_of(int(charges.span[i])),
            int(charges.time_ns[i]) / 1000,
            place.phase,
            classes.CLASSES[charges.work[i]],
        )
        groups[block.name, max(int(step[i]), 0)].append(event)
    return groups
