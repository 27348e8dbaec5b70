"""A recording with a place for every event: what all tables are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.place import compiled
from profiler_wrapper.place.calls import CallTree, find_calls
from profiler_wrapper.place.launches import launches, missing_kernels
from profiler_wrapper.place.layers import LayerTree, find_layers
from profiler_wrapper.place.nest import nest_cpu
from profiler_wrapper.place.phases import UNKNOWN, Attribution, Place, attribute
from profiler_wrapper.place.steps import Steps, find_steps
from profiler_wrapper.place.timed_events import (
    TimedEvents,
    WorkOfOps,
    cpu_charges,
    cpu_time,
    device_charges,
    unseen_until_ns,
    work_of_ops,
)
from profiler_wrapper.trace.nesting import Nesting
from profiler_wrapper.trace.recording import Bool, Int32, Int64, Recording, Shapes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A recording with a place for every event: what all tables and the layer lanes are made from."""

    recording: Recording
    nesting: Nesting
    enclosing: Int32  # as `nesting.parent`, but with the annotations that cross layers
    tree: LayerTree
    attribution: Attribution
    cpu_ns: Int64  # per span, see `cpu_time`
    charges: TimedEvents
    calls: CallTree
    steps: Steps
    shared_kernels: compiled.SharedKernels
    work_of: WorkOfOps
    lost_launches: Int64  # calls that launched kernels which are not in the trace
    shapes: Shapes | None = None  # of the ops that have a formula for FLOPs or a rule for bytes
    notes: tuple[str, ...] = ()  # what is not known of it, and why
    captured_kernels: int = 0  # launched into a graph, and never run
    unseen_until_ns: int | None = None  # till then a device did work from before the trace, which is not in it
    left_out: Bool | None = None  # per span, whether it is of a step that does not count; None: all count
    parameter_element_bytes: int = 0  # of one element of any parameter; 0: not known, or several types
    fast_float32: bool = False  # torch was told to multiply float32 in a smaller type where the device has one

    def layer_name(self, place: Place) -> str | None:
        """The name of a place's layer; "" where there is none by nature, None where it is not known."""
        if place.layer == UNKNOWN:
            return None
        return self.tree.layers[place.layer].name if place.layer >= 0 else ""

    def names_of(self, place: Place) -> tuple[str, ...]:
        """The names of a place's layer and of what called it; ("",) where there is none by nature, () if not known."""
        return tuple(self.tree.layers[i].name for i in place.chain) or ("",) * (place.layer != UNKNOWN)


def place_events(recording: Recording, *, run: Mapping[str, Any] | None = None, shapes: Shapes | None = None) -> Placed:
    """Attribute every event of `recording`.

    `run`: what is known of the run (run.json): its `layers`, see `find_layers`, and which steps were
    recorded whole (`timed_steps`, `full_steps`): what others did, which an exception ended or which held an
    evaluation (`evaluated_steps`), counts nowhere; how float32 is multiplied (`float32_matmul_precision`).

    Raises:
        EmptyRecording: no event carries time, or another profiler wrote them.
    """
    run = run or {}
    launch = launches(recording)
    missing = missing_kernels(recording, launch)
    nesting, enclosing = nest_cpu(recording, launch, missing.lost)
    graphs = compiled.read_graphs(run.get("compiled"))
    regions = compiled.join_calls(recording, nesting.parent, graphs)
    if regions.recording is not recording:
        recording = regions.recording
        launch = launches(recording)
        missing = missing_kernels(recording, launch)
        nesting, enclosing = nest_cpu(recording, launch, missing.lost)
    spans = recording.spans
    described = run.get("layers") or ()
    unmarked = compiled.layers_without_marks(recording, graphs, described)
    tree = find_layers(recording, nesting.parent, described, unmarked)
    attribution = attribute(recording, nesting, tree)
    shared_kernels = compiled.place_regions(regions, nesting.parent, tree, attribution)
    cpu_ns = cpu_time(recording, nesting, tree)
    work_of = work_of_ops(recording, nesting.parent, tree, attribution)
    if recording.device_mask.any():
        charges = device_charges(recording, attribution, launch, work_of)
    else:
        charges = cpu_charges(recording, attribution, cpu_ns, work_of)
    if recording.no_profile or not len(charges):
        empty = (
            f"{len(spans)} events, but no kernel, copy or CPU op among them. "
            "Was the profiler stopped before the first step, or its schedule still waiting?"
        )
        raise EmptyRecording(f"{recording.path or 'the recording'}: {recording.no_profile or empty}")
    calls = find_calls(tree, nesting, spans.start_ns, attribution.node_of)
    all_steps = find_steps(recording, tree, attribution, calls.outermost)
    steps = all_steps.only({*(run.get("timed_steps") or ()), *(run.get("full_steps") or ())})
    notes, left_out = list(regions.notes()), None
    if 0 < len(steps) < len(all_steps):
        left_out = (all_steps.place_of(spans.start_ns) >= 0) & (steps.place_of(spans.start_ns) < 0)
        in_charges = np.where(charges.cpu_span >= 0, left_out[charges.cpu_span], False)
        charges, cpu_ns = charges.only(~in_charges), np.where(left_out, 0, cpu_ns)
        missing = missing._replace(lost=missing.lost[~left_out[missing.lost]])
        if lost := sorted({*all_steps.number} - {*steps.number} - {*(run.get("evaluated_steps") or ())}):
            notes.append(f"step {', '.join(map(str, lost))} did not end: what it did counts in no time and no call")
    return Placed(
        recording=recording,
        nesting=nesting,
        enclosing=enclosing,
        tree=tree,
        attribution=attribution,
        cpu_ns=cpu_ns,
        charges=charges,
        calls=calls,
        steps=steps,
        shared_kernels=shared_kernels,
        work_of=work_of,
        shapes=shapes,
        notes=tuple(notes),
        left_out=left_out,
        captured_kernels=len(missing.captured),
        lost_launches=missing.lost,
        unseen_until_ns=unseen_until_ns(recording, charges),
        parameter_element_bytes=_element_bytes(run.get("parameters")),
        fast_float32=run.get("float32_matmul_precision") in ("high", "medium"),
    )


def _element_bytes(parameters: object) -> int:
    """Of parameters that are all of one type."""
    known = parameters if isinstance(parameters, Mapping) else {}
    sizes, elements = known.get("bytes_by_dtype"), known.get("elements")
    return sum(sizes.values()) // elements if isinstance(sizes, Mapping) and len(sizes) == 1 and elements else 0
