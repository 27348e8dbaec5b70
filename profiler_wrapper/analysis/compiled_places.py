"""From the modules of compiled graphs to layers: which layers ran in compiled code, and what each took part in.

A kernel that works for several layers is charged to the deepest layer that holds them all and is never
split: how the time divides is not known. Each of those layers says how much time it shares so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution, Place
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.compiled_graphs import Graph, Kernel, graph_keys
from profiler_wrapper.analysis.compiled_regions import Regions
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.recording.marks import ROOT_PATH, Mark, parse_mark
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Int32, Recording

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
        if (root, path) not in marks and any((root, above) in around for above in _above(path)):
            flags = ("compiled", "shared") if layer.get("shared") else ("compiled",)
            found.append(Mark(path, str(layer.get("class_name", "")), str(layer.get("kind", "other")), root, flags))
    return found


def _above(path: str) -> list[str]:
    """The paths of what may hold a layer, the innermost first."""
    steps = path.split(".")
    return [*(".".join(steps[:n]) for n in range(len(steps) - 1, 0, -1)), ROOT_PATH]


@dataclass(frozen=True, slots=True, eq=False)
class SharedKernels:
    """The pieces of compiled code whose kernels several layers have in common."""

    ran: frozenset[tuple[int, Phase]]  # layers inside compiled code, also those of which no kernel is left
    piece_of: Int32  # per span: the piece that it belongs to, -1 for none
    sharers: Mapping[int, frozenset[int]]  # by the span of a piece: the layers below the one it is charged to

    def time_ns(self, charges: Charges, attribution: Attribution) -> dict[tuple[int, Phase], int]:
        """For every layer inside compiled code, per phase: the time of kernels that it shares with others."""
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
    new_place = np.full(len(parent), -1, dtype=np.int32)  # of the pieces
    old_place = np.full(len(parent), -1, dtype=np.int32)
    layers_of = _LayersOfModules(tree)
    ran: set[tuple[int, Phase]] = set()
    sharers = {}
    placed, joined, unplaced = [], set(), set()
    for piece in regions.pieces:
        if not any(kernel.modules for kernel in piece.graph.kernels):
            continue  # a compiled function
        around = attribution.place(piece.call)
        layers = layers_of.modules(piece.graph, around.layer)
        if layers is None:
            unplaced.add(piece.call)
            continue
        placed.append(piece)
        if piece.call not in joined:
            joined.add(piece.call)
            ran |= layers_of.ran(piece.graph, around)
        served = {layers[module] for kernel in piece.kernels for module in kernel.modules}
        common = tree.common_ancestor(served)
        charged = common if common >= 0 else around.layer
        below = {layer for one in served for layer in tree.layers[one].ancestors}
        if below := below.difference(tree.layers[charged].ancestors):
            sharers[piece.span] = frozenset(below)
        place = Place(charged, _phase(piece.kernels, around), around.reason)
        new_place[piece.span] = attribution.index_of(place)
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


class _LayersOfModules:
    """Which layer each module of a graph is in, where the graph runs in a given layer."""

    def __init__(self, tree: LayerTree) -> None:
        self._tree = tree
        self._mark_of = {layer: mark for mark, layer in tree.layer_of_mark.items()}
        self._known: dict[tuple[int, int], list[int] | None] = {}

    def modules(self, graph: Graph, layer: int) -> list[int] | None:
        """Layer by number of module; None where the graph was not made for this layer."""
        key = (id(graph), layer)
        if key not in self._known:
            self._known[key] = self._find(graph, layer)
        return self._known[key]

    def ran(self, graph: Graph, around: Place) -> set[tuple[int, Phase]]:
        """The layers inside a call of `graph` in the place `around`, and in which phase."""
        layers = self.modules(graph, around.layer) or []
        at_work = {(module, _phase((kernel,), around)) for kernel in graph.kernels for module in kernel.modules}
        idle = set(range(len(layers))).difference(module for module, _ in at_work)
        above = self._tree.layers[around.layer].ancestors
        return {
            (layer, phase)
            for module, phase in at_work.union((module, around.phase) for module in idle)
            for layer in self._tree.layers[layers[module]].ancestors
            if layer not in above
        }

    def _find(self, graph: Graph, layer: int) -> list[int] | None:
        mark = self._mark_of.get(layer)
        names = graph.inside.get(mark) if mark is not None else None
        if mark is None or names is None:
            return None
        return [self._nearest(mark[0], name, layer) for name in names]

    def _nearest(self, root: str, name: str, layer: int) -> int:
        """The layer of this name, or the innermost above it."""
        for path in (name, *_above(name)):
            if (root, path) in self._tree.layer_of_mark:
                return self._tree.layer_of_mark[root, path]
        return layer
