"""Calls of compiled graphs in pieces: which of their events, and of the gaps between, is which kernel.

A call of a graph is an event, `## Call CompiledFxGraph <key> ##`; what it calls lies directly in it, in
the order in which the code was generated. That order, with the modules of every kernel, is known from
the run (`compiled` of run.json). A call is joined with it entirely or not at all.

On a CPU generated kernels are no events: the time between two events is that of the kernels that are
known to lie there, and becomes an event of their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.place.layers import LayerTree, paths_above
from profiler_wrapper.place.names import Phase
from profiler_wrapper.place.phases import Attribution, Place
from profiler_wrapper.place.timed_events import TimedEvents
from profiler_wrapper.trace.arrays import grouped, in_order
from profiler_wrapper.trace.marks import ALL_GRAPHS, Mark, parse_mark
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Category, Int32, Recording, Spans

# --------------------------------------------------------------------------------------------------
# What a run says of its compiled graphs, by Inductor's cache key: the kernels of each in order, and where it may run.
# A module without a kernel ran as well, but nothing of it is left. Instead of a graph, why its kernels are not known.

_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##")
_LIBRARY = re.compile(r"(?:torch\.ops\.)?(?P<space>\w+)\.(?P<op>\w+)(\.\w+)?")
_GENERATED_FOR_CPU = "cpp_"
# Calls of a library under a name of Inductor's own.
_CALLED_AS = {"aten::bias_addmm": "aten::addmm"}

DAMAGED = "what the run says of them is damaged"


class Kernel(NamedTuple):
    """One call of a kernel in a graph."""

    name: str
    event: str  # what its event is called
    silent: bool  # on a CPU it may have no event
    phase: str
    modules: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One compiled graph, as the run describes it."""

    kernels: tuple[Kernel, ...]
    inside: Mapping[tuple[str, str], Sequence[str]]  # (root, path) of a layer it may run in -> names of modules
    callers: Mapping[int, Sequence[int]]  # by module: those that called it, the innermost first; older runs do not tell


def only_called(compiled: Mapping[str, Any], recording: Recording) -> dict[str, Any]:
    """Of what a run says of its compiled graphs, what concerns those that `recording` calls."""
    called = graph_keys(recording.names) | {ALL_GRAPHS}
    return {key: graph for key, graph in compiled.items() if key in called}


def graph_key(name: str) -> str | None:
    """The cache key of the graph whose call has this name; None for other events."""
    match = _CALL.fullmatch(name)
    return match[1] if match else None


def graph_keys(names: Iterable[str]) -> set[str]:
    """The cache keys of the graphs whose calls have these names."""
    return {key for name in names if (key := graph_key(name)) is not None}


def read_graphs(compiled: object) -> dict[str, Graph | str] | None:
    """What a run says of its compiled graphs, by cache key; None if it says nothing of any.

    A text says why nothing is known of a graph, under `ALL_GRAPHS` why of any that is not listed.
    """
    if not isinstance(compiled, Mapping):
        return None
    return {key: graph if isinstance(graph, str) else _read_graph(graph) for key, graph in compiled.items()}


def _read_graph(described: Mapping[str, Any]) -> Graph | str:
    try:
        kernels = tuple(_read_kernel(*kernel) for kernel in described["kernels"])
        inside = {(str(root), str(path)): [str(name) for name in names] for root, path, names in described["inside"]}
        callers = {i: [int(number) for number in above] for i, above in enumerate(described.get("callers", ()))}
        numbers = {number for one in (*(kernel.modules for kernel in kernels), *callers.values()) for number in one}
        nameless = any(not 0 <= number < len(names) for names in inside.values() for number in numbers)
    except (KeyError, TypeError, ValueError):
        return DAMAGED
    return DAMAGED if nameless else Graph(kernels, inside, callers)


def _read_kernel(name: str, is_extern: bool, phase: str, modules: Iterable[int]) -> Kernel:
    event = _event_of_library(name) if is_extern else name
    return Kernel(name, event, not is_extern and name.startswith(_GENERATED_FOR_CPU), phase, tuple(modules))


def _event_of_library(name: str) -> str:
    """`extern_kernels.mm` -> `aten::mm`, `torch.ops.aten.cumsum.default` -> `aten::cumsum`."""
    match = _LIBRARY.fullmatch(name)
    if match is None:
        return name
    space = "aten" if match["space"] == "extern_kernels" else match["space"]
    event = f"{space}::{match['op']}"
    return _CALLED_AS.get(event, event)


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
    inside = np.isin(parent, list(calls)) & (spans.category < Category.MODULE)
    chosen = in_order(np.flatnonzero(inside), spans.start_ns)
    return grouped(zip(parent[chosen].tolist(), chosen.tolist(), strict=True))


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
        # Gap i lies before member i, the last one behind them all; members that do no work cut a gap.
        starts = [int(spans.start_ns[call]), *spans.end_ns[list(members)].tolist()]
        ends = [*spans.start_ns[list(members)].tolist(), int(spans.end_ns[call])]
        pieces = []
        for silent, run in groupby(range(len(event_of)), key=lambda place: event_of[place] < 0):
            places = list(run)
            if not silent:
                continue
            kernels = graph.kernels[places[0] : places[-1] + 1]
            name = self._names.setdefault(" + ".join(kernel.name for kernel in kernels), len(self._names))
            first_gap = event_of[places[0] - 1] + 1 if places[0] else 0
            last_gap = [*event_of, len(members)][places[-1] + 1]
            for gap in range(first_gap, last_gap + 1):
                if starts[gap] < ends[gap]:
                    pieces.append(Piece(len(spans) + len(self._new), call, graph, kernels))
                    self._new.append((call, name, starts[gap], ends[gap]))
        return pieces

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


# --------------------------------------------------------------------------------------------------
# From the modules of compiled graphs to layers: which layers ran in compiled code, and what each took part in.
#
# A kernel that works for several layers is charged to the deepest layer that holds them all and is never
# split: how the time divides is not known. Each of those layers says how much time it shares so.

NO_LAYER_AROUND = "the layer they ran in is not the one they were compiled for"


def layers_without_marks(
    recording: Recording, graphs: Mapping[str, Graph | str] | None, described: Iterable[Mapping[str, Any]]
) -> list[Mark]:
    """The described layers inside compiled code that was called: they run, but never through a mark."""
    if not graphs:
        return []
    marks = {(m.root, m.path): m for name in recording.names if (m := parse_mark(name)) is not None}
    called = graph_keys(recording.names)
    known = [graph for key, graph in graphs.items() if key in called and isinstance(graph, Graph)]
    around = {place for graph in known for place in graph.inside} & set(marks)
    found = []
    for layer in described:
        root, path = str(layer.get("root")), str(layer.get("path"))
        if (root, path) not in marks and any((root, above) in around for above in paths_above(path)):
            flags = ("compiled", "shared") if layer.get("shared") else ("compiled",)
            found.append(Mark(path, str(layer.get("class_name", "")), str(layer.get("kind", "other")), root, flags))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SharedKernels:
    """The pieces of compiled code whose kernels several layers have in common."""

    ran: frozenset[tuple[int, Phase]]  # layers inside compiled code, also those of which no kernel is left
    piece_of: Int32  # per span: the piece that it belongs to, -1 for none; empty without pieces
    sharers: Mapping[int, frozenset[int]]  # by the span of a piece: the layers below the one it is charged to

    def time_ns(self, charges: TimedEvents, attribution: Attribution) -> dict[tuple[int, Phase], int]:
        """For every layer inside compiled code, per phase: the time of kernels that it shares with others."""
        if not self.sharers:
            return dict.fromkeys(self.ran, 0)
        piece = np.where(charges.cpu_span >= 0, self.piece_of[charges.cpu_span], -1)
        of_piece: Counter[tuple[int, Phase]] = Counter()
        chosen = np.flatnonzero(np.isin(piece, list(self.sharers)))
        for i in chosen.tolist():
            of_piece[int(piece[i]), attribution.places[charges.place[i]].phase] += int(charges.time_ns[i])
        time_ns = Counter(dict.fromkeys(self.ran, 0))
        for (span, phase), spent_ns in of_piece.items():
            for layer in self.sharers[span]:
                time_ns[layer, phase] += spent_ns
        return dict(time_ns)


def place_regions(regions: Regions, parent: Int32, tree: LayerTree, attribution: Attribution) -> SharedKernels:
    """Put every piece, with what it calls, where the modules of its kernels are; else it stays where it is."""
    if not regions.pieces:
        return SharedKernels(frozenset(), np.empty(0, np.int32), {})
    new_place = np.full(len(parent), -1, dtype=np.int32)  # of the pieces
    old_place = np.full(len(parent), -1, dtype=np.int32)
    chains_of = cache(partial(_chains_of_modules, tree))
    ran: set[tuple[int, Phase]] = set()
    sharers = {}
    placed, joined, unplaced = [], set(), set()
    for piece in regions.pieces:
        if not any(kernel.modules for kernel in piece.graph.kernels):
            continue  # a compiled function
        around = attribution.place(piece.call)
        chains = chains_of(piece.graph, around.chain)
        if chains is None:
            unplaced.add(piece.call)
            continue
        placed.append(piece)
        if piece.call not in joined:
            joined.add(piece.call)
            ran |= _ran(piece.graph, chains, around)
        served = [chains[module] for kernel in piece.kernels for module in kernel.modules] or [around.chain]
        chain = tuple(layer for layer in served[0] if all(layer in other for other in served))
        if below := {layer for one in served for layer in one}.difference(chain):
            sharers[piece.span] = frozenset(below)
        phase = _phase(piece.kernels, around)
        new_place[piece.span] = attribution.index_of(Place(chain[0], phase, around.reason, chain))
        old_place[piece.span] = attribution.place_of[piece.call]
    regions.pieces = placed
    if unplaced:
        regions.missing[NO_LAYER_AROUND] += len(unplaced)
    near = nearest(parent, new_place >= 0)
    moves = (near >= 0) & (attribution.place_of == old_place[near])
    attribution.place_of[moves] = new_place[near[moves]]
    return SharedKernels(frozenset(ran), np.where(moves, near, -1).astype(np.int32), sharers)


def _phase(kernels: Sequence[Kernel], around: Place) -> Phase:
    return "recompute" if all(kernel.phase == "recompute" for kernel in kernels) else around.phase


def _chains_of_modules(tree: LayerTree, graph: Graph, around: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """By number of module its layer, the innermost that is known, and what called that, up to the root.

    None where the graph was not made for the layer that it ran in.
    """
    of_mark = tree.layer_of_mark
    mark = next((mark for mark, marked in of_mark.items() if marked in around[:1]), None)
    names = graph.inside.get(mark) if mark is not None else None
    if mark is None or names is None:
        return None
    holders = ([(mark[0], path) for path in (name, *paths_above(name))] for name in names)
    layers = [next((of_mark[key] for key in keys if key in of_mark), around[0]) for keys in holders]
    chains = []
    for module in range(len(layers)):
        chain = around
        for layer in (layers[one] for one in (*reversed(graph.callers.get(module, ())), module)):
            chain = chain if layer in chain else tree.called_by(layer, chain)
        chains.append(chain)
    return chains


def _ran(graph: Graph, chains: Sequence[tuple[int, ...]], around: Place) -> set[tuple[int, Phase]]:
    """The layers inside a call of `graph` in the place `around`, and in which phase; `chains`: of its modules."""
    at_work = {(module, _phase((kernel,), around)) for kernel in graph.kernels for module in kernel.modules}
    idle = set(range(len(chains))).difference(module for module, _ in at_work)
    return {
        (layer, phase)
        for module, phase in at_work.union((module, around.phase) for module in idle)
        for layer in chains[module]
        if layer not in around.chain
    }
