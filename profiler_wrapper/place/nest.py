"""Nest the CPU events of a recording."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.trace.marks import parse_mark
from profiler_wrapper.trace.nesting import Nesting, crossed, nest_chosen
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording


def nest_cpu(recording: Recording, launch: Int64, lost: Int64) -> tuple[Nesting, Int32]:
    """Nesting of the CPU events that matter: of calls into the runtime those that launched something, `lost` or not.

    An annotation that begins in one layer and ends in another would hide the layers around what lies
    in both, so it is left out of the first answer; and so is one of a collective that goes on after the call
    that began it has returned (a send of gloo's): what runs meanwhile is none of it. The second answer gives the
    parents with them.
    """
    spans = recording.spans
    chosen = spans.category < Category.RUNTIME
    launched = np.unique(launch[launch >= 0])
    chosen[launched[spans.category[launched] == Category.RUNTIME]] = True
    chosen[lost] = True
    everything = nest_chosen(spans, chosen)
    hiding = _hiding_annotations(recording, everything)
    if not hiding.any():
        return everything, everything.parent
    return nest_chosen(spans, chosen & ~hiding), everything.parent


def _hiding_annotations(recording: Recording, nesting: Nesting) -> Bool:
    """Annotations that cross what they hide: a collective the call that begins it, any other a layer or a node."""
    spans = recording.spans
    hiding = np.zeros(len(spans), dtype=np.bool_)
    if not nesting.crossing_lanes:
        return hiding
    marks = recording.named(parse_mark)
    layers = marks | (spans.category == Category.MODULE)
    collective = recording.named(lambda name: role_of(name) == Role.COLLECTIVE)
    plain = recording.named(lambda name: role_of(name) in (Role.PLAIN, Role.SERVER_STEP))
    annotation = spans.category == Category.ANNOTATION
    bearing = (spans.category <= Category.MODULE) & (layers | ~plain)
    pairs = [(annotation & collective, (spans.category == Category.CPU_OP) & collective)]
    if layers.any():  # else annotations are the layers
        pairs.append((annotation & plain & ~marks, bearing))
    for lane in nesting.crossing_lanes:
        for doubtful, others in pairs:
            chosen, around = (np.flatnonzero(mask & (spans.lane == lane)) for mask in (doubtful, others))
            hiding[chosen] = crossed(
                spans.start_ns[chosen], spans.end_ns[chosen], spans.start_ns[around], spans.end_ns[around]
            )
    return hiding
