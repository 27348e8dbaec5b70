"""Which layer and phase every CPU event belongs to; a device event belongs where it was launched.

The rules, each for the innermost of what encloses an event on its thread:

- inside a layer mark: that layer, forward; recompute where an autograd node encloses the mark, or backward where
  that is a named block which makes no nodes itself;
- inside an autograd node: the layer whose forward created the node (see `forward_ops`); backward;
- `AccumulateGrad` has no number: the layer of the node that finished last on its thread;
- inside a backward node, an op that creates nodes itself next to a mark, straight below
  `CheckpointFunctionBackward`, or in a node whose own last op creates none: recompute;
- `FSDP::... (name)`: the layer it names; `Optimizer.*`: the optimizer, but for the forward of its closure; else
  code between calls, which a server's step tells the phase of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from profiler_wrapper.place.forward_ops import NODE_OF_A_VIEW, ForwardOps
from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.place.names import GENERATING_PHASES, NO_FORWARD_LINK, NO_LAYERS, PHASES, Phase
from profiler_wrapper.place.optimizer_calls import closure_ops
from profiler_wrapper.place.roles import NODES, OPS_OF_SAVING, Role, role_of
from profiler_wrapper.trace.arrays import in_order, marked
from profiler_wrapper.trace.marks import phase_of_server_step
from profiler_wrapper.trace.nesting import Nesting, nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

# --------------------------------------------------------------------------------------------------
# The layers that FSDP2's annotations name: `FSDP::all_gather (layers.0)`, `... prefetch for layers.1`.

_MODULES = re.compile(r"\((?P<held>[^()]+)\)|prefetch for (?P<prefetched>.+)")
_BACKWARD = re.compile(r"FSDP::\w*(post_backward|pre_backward|backward_prefetch)")
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def layer_of_module(module: str, layer_by_name: Mapping[str, int]) -> int:
    """The layer of a module's name as FSDP knows it, or the nearest above it; -1 for none.

    What wrappers put before the name is not in a layer's, and a root's prefix is not in FSDP's.
    """
    parts = [part for part in module.split(".") if part not in _WRAPPERS]
    for dropped in range(len(parts)):
        for kept in range(len(parts), dropped, -1):
            if (layer := layer_by_name.get(".".join(parts[dropped:kept]), -1)) >= 0:
                return layer
    for kept in range(len(parts), 0, -1):
        ending = "." + ".".join(parts[:kept])
        below_root = [layer for full, layer in layer_by_name.items() if full.endswith(ending)]
        if len(below_root) == 1:
            return below_root[0]
    return -1


NO_LAYER = -1  # by nature: the optimizer, data loading, collectives of several layers, code between calls
UNKNOWN = -2  # should have a layer; `Place.reason` says why it has none


class Place(NamedTuple):
    """Where an event belongs."""

    layer: int  # index into LayerTree.layers, NO_LAYER or UNKNOWN
    phase: Phase
    reason: str = ""
    chain: tuple[int, ...] = ()  # the layer and what called it, up to the root; () where there is none


_PHASE_WITHOUT_LAYER: dict[int, Phase] = {Role.OPTIMIZER: "optimizer", Role.DATA_LOADING: "other"}
_FSDP, _COLLECTIVE = int(Role.FSDP), int(Role.COLLECTIVE)  # asked of every op: members of an enum are slow to get


@dataclass(slots=True)
class Attribution:
    """The place of every CPU span of a recording."""

    places: list[Place]
    place_of: Int32  # per span: index into places; -1 for device spans
    node_of: Int32  # per span: the innermost autograd node around it (or itself), -1 outside backward
    forward_op: Int32  # per span that is an autograd node: the op whose forward made it; -1 for none, or not known
    outside: int  # the place of what nothing encloses

    @property
    def layer_of_place(self) -> Int64:
        """Per place its layer, NO_LAYER or UNKNOWN."""
        return np.array([place.layer for place in self.places], dtype=np.int64)

    @property
    def phase_of_place(self) -> Int64:
        """Per place the index of its phase in PHASES."""
        return np.array([PHASES.index(place.phase) for place in self.places], dtype=np.int64)

    def in_phases(self, *phases: Phase) -> Bool:
        """Per place whether its phase is one of these."""
        return np.array([place.phase in phases for place in self.places], dtype=np.bool_)

    @property
    def is_node(self) -> Bool:
        """True for the spans that are autograd nodes."""
        mask: Bool = self.node_of == np.arange(len(self.node_of))
        return mask

    def place(self, span: int) -> Place:
        """The place of CPU span `span`."""
        return self.places[int(self.place_of[span])]

    def index_of(self, place: Place) -> int:
        """The index of `place`, which is added where it is new."""
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)


def attribute(recording: Recording, nesting: Nesting, tree: LayerTree) -> Attribution:
    """Give every CPU span a place."""
    return _Walk(recording, nesting, tree).run()


class _Walk:
    """One walk over the CPU spans in the order they started, enclosing ones first.

    Only spans that may change the place are visited: nodes, marks, what `Role` knows, and ops that
    may be recomputed. All others are where the nearest visited one around them is.
    """

    def __init__(self, recording: Recording, nesting: Nesting, tree: LayerTree) -> None:
        spans = recording.spans
        self.recording, self.tree, self.parent = recording, tree, nesting.parent
        roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)
        # same (0 -> 1): refused before without events
        self.role = roles[spans.name] if len(spans) else np.empty(0, dtype=np.int8)
        self.role[spans.category > Category.RUNTIME] = Role.PLAIN
        self.node_of = nearest(self.parent, np.isin(self.role, NODES))
        visited: Bool = (self.role != Role.PLAIN) & (spans.category < Category.RUNTIME)
        visited |= (spans.sequence >= 0) & (spans.forward_thread <= 0) & (self.node_of >= 0)
        visited[list(tree.layer_of_span)] = True
        self.near = nearest(self.parent, visited)
        self.order = in_order(nesting.order[visited[nesting.order]], spans.start_ns)  # an enclosing one comes first
        self.around = nearest_above(self.parent[self.order], self.near)
        self.accumulating = frozenset(np.flatnonzero(self.role == Role.ACCUMULATE).tolist())
        self.numbered_child = self._numbered_children()
        self.recomputing = self._recomputing_nodes()
        self.recomputed = self._recomputed_calls()
        entered: dict[int, set[int]] = defaultdict(set)
        for span in self.recomputed:
            entered[int(self.node_of[span])].add(tree.layer_of_span[span])
        self.entered = dict(entered)
        # Per node that encloses marks: the deepest layer above all of them.
        self.common_layer = {node: tree.common_ancestor(layers) for node, layers in entered.items()}
        self.forward_ops = ForwardOps(recording)
        self.of_view = recording.named(NODE_OF_A_VIEW.search)
        self.layer_of_module = cache(partial(layer_of_module, layer_by_name=tree.by_name()))
        held = {layer.parent for layer in tree.layers}
        self.roots_with_layers = [i for i, layer in enumerate(tree.layers) if layer.parent < 0 and i in held]
        self.places: list[Place] = []
        self.index: dict[Place, int] = {}
        self.outside = self._intern(self._without_layer("other"))
        # same: filled before it is read
        self.place_of = np.full(len(spans), -1, dtype=np.int32)  # of visited spans, until the walk ends
        self.forward_op = np.full(len(spans), -1, dtype=np.int32)
        self.open_nodes: dict[int, list[tuple[int, int]]] = defaultdict(list)  # per lane: (end, place)
        self.last_finished: dict[int, int] = {}  # per lane: the place of the node that finished last

    def run(self) -> Attribution:
        spans, place_of = self.recording.spans, self.place_of
        columns = (self.order, self.around, self.role[self.order], self.parent[self.order], self.node_of[self.order])
        for span, around, role, above, node in zip(*(c.tolist() for c in columns), strict=True):
            if role in NODES:
                place_of[span] = self._node(span, role)
            else:
                around_place = self.places[place_of[around] if around >= 0 else self.outside]
                place_of[span] = self._intern(self._special(span, role, around_place, above, node))
        on_cpu = spans.category <= Category.RUNTIME
        found = np.where(self.near >= 0, place_of[self.near], np.int32(self.outside))
        optimizing = np.array([place.phase == "optimizer" for place in self.places], dtype=np.bool_)
        made = self.forward_op[self.forward_op >= 0]
        found[closure_ops(self.recording, self.parent, on_cpu & optimizing[found], made)] = self.outside
        place_of = np.where(on_cpu, found, np.int32(-1))
        return Attribution(self.places, place_of, self.node_of, self.forward_op, self.outside)

    def _intern(self, place: Place) -> int:
        index = self.index.setdefault(place, len(self.places))
        if index == len(self.places):
            self.places.append(place)
        return index

    def _without_layer(self, phase: Phase) -> Place:
        """Code outside of all layers; nothing can be said of it in a trace that has none."""
        return Place(UNKNOWN, phase, NO_LAYERS) if self.tree.source == "none" else Place(NO_LAYER, phase)

    def _recomputed_calls(self) -> set[int]:
        """Calls of layers in backward. A block with a name is one only where it makes nodes in a recomputation:

        a backward of the user's own may name its parts too.
        """
        calls = {span for span in self.tree.layer_of_span if self.node_of[span] >= 0}
        if self.tree.source != "named blocks" or not calls:
            return calls
        spans = self.recording.spans
        makes_nodes = (spans.category == Category.CPU_OP) & (spans.sequence >= 0) & (spans.forward_thread <= 0)
        called = nearest(self.parent, marked(len(spans), calls))
        recomputed: set[int] = set()
        for op in np.flatnonzero(makes_nodes & (called >= 0)).tolist():
            call, node = int(called[op]), int(self.node_of[op])
            while call >= 0 and call not in recomputed and self.node_of[call] == node:
                above = int(self.parent[call])
                if node in self.recomputing or self.role[above] == Role.CHECKPOINT_BACKWARD:
                    recomputed.add(call)
                call = int(called[above])
        return recomputed

    def _recomputing_nodes(self) -> set[int]:
        """Nodes in which gradients were switched on for a while, as non-reentrant checkpointing does.

        The engine runs all of a node's own ops with gradients (a double backward: all have numbers) or without. So a
        node whose last op has no number computed what has one with gradients switched on: it ran a forward again.
        """
        spans = self.recording.spans
        is_op = (spans.category == Category.CPU_OP) & (self.role == Role.PLAIN) & (self.node_of >= 0)
        is_op &= spans.forward_thread <= 0
        is_op[list(self.tree.layer_of_span)] = False
        numbered = is_op & (spans.sequence >= 0)  # same (0 -> -1): who asks has an op with a number inside
        if not numbered.any():
            return set()
        saving = self.recording.named(lambda name: name in OPS_OF_SAVING)
        above = nearest_above(self.parent, nearest(self.parent, is_op))
        own = np.flatnonzero(is_op & ~saving & ((above < 0) | (self.node_of[above] != self.node_of)))
        own = own[np.lexsort((spans.start_ns[own], self.node_of[own]))]
        node = self.node_of[own]
        last = own[np.append(node[1:] != node[:-1], True)]
        without = self.node_of[last[spans.sequence[last] < 0]]
        return {*without.tolist()} & {*self.node_of[numbered].tolist()}

    def _numbered_children(self) -> dict[int, int]:
        """Per node: its direct child of the node's own name, which has the number if the node has none."""
        spans, names = self.recording.spans, self.recording.names
        candidates = np.flatnonzero((spans.forward_thread > 0) & (self.parent >= 0))
        candidates = in_order(candidates[self.role[self.parent[candidates]] == Role.NODE], spans.start_ns)
        nodes = self.parent[candidates]
        columns = (candidates, nodes, spans.name[candidates], spans.name[nodes])
        children: dict[int, int] = {}
        for span, node, name, node_name in zip(*(c.tolist() for c in columns), strict=True):
            if names[node_name].endswith(names[name]):
                children.setdefault(node, span)
        return children

    def _node(self, span: int, role: int) -> int:
        spans = self.recording.spans
        lane, start = int(spans.lane[span]), int(spans.start_ns[span])
        lane_nodes = self.open_nodes[lane]
        while lane_nodes and lane_nodes[-1][0] <= start:
            self.last_finished[lane] = lane_nodes.pop()[1]
        if role == Role.ACCUMULATE:
            owner = self.last_finished.get(lane)
            return self._intern(self._owned_by(None if owner is None else self.places[owner], "accumulate_grad"))
        place = self._intern(self._without_layer("backward") if role == Role.GRAPH_ROOT else self._linked(span))
        lane_nodes.append((start + int(spans.duration_ns[span]), place))
        return place

    def _linked(self, span: int) -> Place:
        spans = self.recording.spans
        child = self.numbered_child.get(span, -1)
        numbered = span if spans.sequence[span] >= 0 else child
        if numbered < 0 or spans.sequence[numbered] < 0:
            return self._owned_by(None, "backward")
        number, thread = int(spans.sequence[numbered]), int(spans.forward_thread[numbered])
        events = (span,) if child < 0 else (span, child)
        ends = tuple((int(spans.lane[e]), int(spans.start_ns[e])) for e in events)
        forward_op = self.forward_ops.find(number, thread, ends, of_view=bool(self.of_view[span]))
        self.forward_op[span] = forward_op
        if forward_op < 0:
            return self._owned_by(None, "backward")
        near = self.near[forward_op]  # the walk has passed it
        return self._owned_by(self.places[self.place_of[near] if near >= 0 else self.outside], "backward")

    def _owned_by(self, owner: Place | None, phase: Phase) -> Place:
        if owner is None:
            return Place(UNKNOWN, phase, NO_LAYERS if self.tree.source == "none" else NO_FORWARD_LINK)
        return owner._replace(phase=phase)

    def _called(self, layer: int, phase: Phase, around: Place, node: int) -> Place:
        """The place of a call. What is recomputed was called by what called the outermost layer that runs again."""
        callers = self._callers(around, node) if node >= 0 and around.phase == "backward" else around.chain
        return Place(layer, phase, chain=self.tree.called_by(layer, callers))

    def _callers(self, around: Place, node: int) -> tuple[int, ...]:
        """What called the outermost layer that runs again in a node."""
        again, callers = self.entered.get(node, set()), around.chain
        return callers[max((i + 1 for i, above in enumerate(callers) if above in again), default=0) :]

    def _special(self, span: int, role: int, around: Place, above: int, node: int) -> Place:
        """The place of a mark, of what role gives one, or of an op that may be recomputed."""
        if (layer := self.tree.layer_of_span.get(span)) is not None:
            if node < 0:
                inherited: Phase = around.phase if around.phase in GENERATING_PHASES else "forward"
                return self._called(layer, self.tree.phase_of_span.get(span, inherited), around, node)
            recomputed = span in self.recomputed or around.phase == "recompute"
            return self._called(layer, "recompute" if recomputed else "backward", around, node)
        if role in _PHASE_WITHOUT_LAYER:
            return Place(NO_LAYER, _PHASE_WITHOUT_LAYER[role])
        if role == _FSDP:
            return self._fsdp(span, around)
        if role == Role.SERVER_STEP:
            return around._replace(phase=phase_of_server_step(self.recording.name_of(span)) or around.phase)
        if role == _COLLECTIVE:
            if node in self.accumulating:
                return Place(NO_LAYER, "backward")
            return around if above >= 0 else Place(NO_LAYER, "other")
        spans = self.recording.spans
        creates_nodes = node >= 0 and spans.sequence[span] >= 0 and spans.forward_thread[span] <= 0
        if creates_nodes and around.phase == "backward":
            if node in self.common_layer:
                common, callers = self.common_layer[node], self._callers(around, node)
                if callers and any(self.tree.layers[layer].shared for layer in self.entered[node]):
                    return Place(callers[0], "recompute", chain=callers)  # names may tell of other callers
                again = around._replace(phase="recompute")
                return self._called(common, "recompute", around, node) if common >= 0 else again
            if self.role[above] == Role.CHECKPOINT_BACKWARD or node in self.recomputing:
                return around._replace(phase="recompute")
        return around

    def _fsdp(self, span: int, around: Place) -> Place:
        """FSDP names the layer whose parameters it moves; without a name it is the root."""
        name = self.recording.name_of(span)
        if self.node_of[span] >= 0 and around.phase == "recompute":
            phase: Phase = "recompute"
        elif self.node_of[span] >= 0 or around.phase == "backward" or _BACKWARD.match(name):
            phase = "backward"
        else:
            phase = around.phase if around.phase in GENERATING_PHASES else "forward"
        if self.tree.source == "none":
            return Place(UNKNOWN, phase, NO_LAYERS)
        above = self.parent[span]
        match = _MODULES.search(name)
        modules = (match["held"] or match["prefetched"]).split(", ") if match else []  # none: the root
        if not modules and above >= 0 and self.role[above] == Role.FSDP:
            return around._replace(phase=phase)
        layers = [layer for layer in map(self.layer_of_module, modules) if layer >= 0]
        if layers:  # one group of parameters may be that of several modules
            layer = self.tree.common_ancestor(layers)
        elif around.layer >= 0:
            layer = around.chain[-1]
        else:
            layer = self.roots_with_layers[0] if len(self.roots_with_layers) == 1 else NO_LAYER
        own = self.tree.layers[layer].ancestors if layer >= 0 else ()
        at_work = layer in around.chain  # else it is fetched ahead
        return Place(layer, phase, chain=around.chain[around.chain.index(layer) :] if at_work else own)
