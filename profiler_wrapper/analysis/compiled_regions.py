"""Calls of compiled graphs in pieces: which of their events, and of the gaps between, is which kernel.

A call of a graph is an event, `## Call CompiledFxGraph <key> ##`; what it calls lies directly in it, in
the order in which the code was generated. That order, with the modules of every kernel, is known from
the run (`compiled` of run.json). A call is joined with it entirely or not at all.

On a CPU generated kernels are no events: the time between two events is that of the kernels that are
known to lie there, and becomes an event of their names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.compiled_graphs import Graph, Kernel, graph_key
from profiler_wrapper.recording.owned import ALL_GRAPHS
from profiler_wrapper.recording.recording import Category, Int32, Recording, Spans

# These look at memory or allocate it: what Inductor calls may do so first, in an event of its own.
_NO_WORK = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_strided", "empty_like", "resize_", "as_strided", "view", "_unsafe_view", "select", "slice",
        "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "alias", "detach",
    )
)  # fmt: skip

NOT_REMEMBERED = "they were compiled before profiler_wrapper was imported"
WITHOUT_KEY = "without Inductor's cache their graphs have no names"
OTHER_CALLS = "the trace shows other calls than were generated"
_SHARED_KERNELS = (
    "in compiled code a kernel that serves several layers is charged to the layer that holds them all, "
    "as how it divides is not known: fused_us of each of them is the time of such kernels, not in its time_us"
)


class Piece(NamedTuple):
    """Some of what a call of a graph ran: one event, and the kernels that it stands for."""

    span: int
    call: int  # the span of the call
    graph: Graph
    kernels: tuple[Kernel, ...]


@dataclass(slots=True)
class Regions:
    """The calls of compiled graphs in a recording, joined with what is known of the graphs."""

    recording: Recording  # with an event more for each gap in which generated kernels ran
    pieces: list[Piece] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)  # why a call was not joined -> calls

    def notes(self) -> list[str]:
        """What is not known, and why."""
        notes = [
            f"the layers inside compiled code have no rows in {count} of its calls, because {reason}"
            for reason, count in self.missing.most_common()
        ]
        return [*notes, _SHARED_KERNELS] if self.pieces else notes


# -- joining calls with what was generated -----------------------------------------------------------


def join_calls(recording: Recording, parent: Int32, graphs: Mapping[str, Graph | str] | None) -> Regions:
    """The calls of compiled graphs in pieces, as far as the run knows the graphs."""
    regions = Regions(recording)
    if graphs is None:
        return regions
    key_of_name = {i: key for i, name in enumerate(recording.names) if (key := graph_key(name)) is not None}
    on_cpu = recording.spans.category < Category.MODULE
    calls = np.flatnonzero(np.isin(recording.spans.name, list(key_of_name)) & on_cpu)
    children = _children(recording, parent, calls.tolist())
    gaps = _Gaps(recording)
    only_cpu = not recording.device_mask.any()
    for call in calls.tolist():
        key = key_of_name[int(recording.spans.name[call])]
        graph = graphs.get(key) or graphs.get(ALL_GRAPHS, WITHOUT_KEY if key == "None" else NOT_REMEMBERED)
        if isinstance(graph, str):
            regions.missing[graph] += 1
            continue
        members = children.get(call, [])
        event_of = _match(graph.kernels, [recording.name_of(span) for span in members])
        if event_of is None:
            regions.missing[OTHER_CALLS] += 1
            continue
        for place, kernel in zip(event_of, graph.kernels, strict=True):
            if place >= 0:
                regions.pieces.append(Piece(members[place], call, graph, (kernel,)))
        if only_cpu:
            regions.pieces += gaps.fill(call, graph, members, event_of)
    regions.recording = gaps.recording_with_them()
    return regions


def _children(recording: Recording, parent: Int32, calls: Sequence[int]) -> dict[int, list[int]]:
    """Per call the ops directly in it, in order of time."""
    spans = recording.spans
    chosen = np.flatnonzero(np.isin(parent, list(calls)) & (spans.category < Category.MODULE))
    chosen = chosen[np.argsort(spans.start_ns[chosen], kind="stable")]
    found: dict[int, list[int]] = defaultdict(list)
    for span, call in zip(chosen.tolist(), parent[chosen].tolist(), strict=True):
        found[call].append(span)
    return found


def _match(kernels: Sequence[Kernel], events: Sequence[str]) -> list[int] | None:
    """Per kernel which event it is, -1 for a kernel without one; None where the events are others."""
    found = []
    place = 0
    for kernel in kernels:
        while place < len(events) and events[place] in _NO_WORK and not _is_event_of(kernel, events[place]):
            place += 1
        if place < len(events) and _is_event_of(kernel, events[place]):
            found.append(place)
            place += 1
        elif kernel.silent:
            found.append(-1)
        else:
            return None
    return found if all(event in _NO_WORK for event in events[place:]) else None


def _is_event_of(kernel: Kernel, event: str) -> bool:
    return event == kernel.event or (kernel.silent and re.sub(r"^graph_\d+_", "", event) == kernel.event)


class _Gaps:
    """Time in calls of graphs between their events, made events themselves."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._names = {name: i for i, name in enumerate(recording.names)}
        self._new: list[tuple[int, int, int, int]] = []  # call, name, start, end

    def fill(self, call: int, graph: Graph, members: Sequence[int], event_of: Sequence[int]) -> list[Piece]:
        """The pieces of one call that generated kernels without events ran in."""
        spans = self._recording.spans
        pieces = []
        first = 0
        while first < len(event_of):
            if event_of[first] >= 0:
                first += 1
                continue
            last = first
            while last < len(event_of) and event_of[last] < 0:
                last += 1
            before = event_of[first - 1] if first else -1
            after = event_of[last] if last < len(event_of) else len(members)
            edges = [int(spans.end_ns[members[before]]) if before >= 0 else int(spans.start_ns[call])]
            for member in members[before + 1 : after]:  # what does no work cuts the gap
                edges += [int(spans.start_ns[member]), int(spans.end_ns[member])]
            edges.append(int(spans.start_ns[members[after]] if after < len(members) else spans.end_ns[call]))
            kernels = graph.kernels[first:last]
            name = self._name(" + ".join(kernel.name for kernel in kernels))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                if start < end:
                    pieces.append(Piece(len(spans) + len(self._new), call, graph, kernels))
                    self._new.append((call, name, start, end))
            first = last
        return pieces

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def recording_with_them(self) -> Recording:
        """The recording with the new events after all others."""
        if not self._new:
            return self._recording
        call, name, start, end = np.array(self._new, dtype=np.int64).T
        spans = self._recording.spans
        unknown = np.full(len(call), -1)
        new = {
            "category": np.full(len(call), Category.CPU_OP),
            "name": name,
            "lane": spans.lane[call],
            "start_ns": start,
            "duration_ns": end - start,
            "graph": np.zeros(len(call)),
        }
        columns = {
            column: np.concatenate([values, new.get(column, unknown).astype(values.dtype)])
            for column in Spans.__dataclass_fields__
            if (values := getattr(spans, column)) is not None
        }
        return replace(self._recording, names=tuple(self._names), spans=Spans(**columns))
