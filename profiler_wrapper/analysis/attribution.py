"""Which layer and phase every CPU event belongs to; a device event belongs where it was launched.

The rules, each for the innermost of what encloses an event on its thread:

- inside a layer mark: that layer, forward; recompute where an autograd node encloses the mark;
- inside an autograd node: the layer whose forward created the node (see `forward_ops`); backward;
- `AccumulateGrad` has no number: the layer of the node that finished last on its thread;
- inside a backward node, an op that creates nodes itself next to a mark, or straight below
  `CheckpointFunctionBackward`: recompute;
- `FSDP::... (name)`: the layer it names; `Optimizer.*`: the optimizer; else code between calls.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.forward_ops import ForwardOps
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import NO_FORWARD_LINK, NO_LAYERS, Phase
from profiler_wrapper.recording.columns import Category, Recording
from profiler_wrapper.recording.nesting import Nesting

NO_LAYER = -1  # by nature: the optimizer, data loading, collectives of several layers, code between calls
UNKNOWN = -2  # should have a layer; `Place.reason` says why it has none


class Place(NamedTuple):
    """Where an event belongs."""

    layer: int  # index into LayerTree.layers, NO_LAYER or UNKNOWN
    phase: Phase
    reason: str = ""


class Role(IntEnum):
    """What an event means to attribution, by its name."""

    PLAIN = 0
    NODE = 1  # autograd::engine::evaluate_function: X
    ACCUMULATE = 2  # ... AccumulateGrad
    GRAPH_ROOT = 3
    CHECKPOINT_BACKWARD = 4
    FSDP = 5
    OPTIMIZER = 6
    COLLECTIVE = 7
    DATA_LOADING = 8


_NODES = (Role.NODE, Role.ACCUMULATE, Role.GRAPH_ROOT)
_NODE_PREFIX = "autograd::engine::evaluate_function: "
_COLLECTIVE = re.compile(
    r"(nccl|gloo|mpi|ucc|xccl|hccl|mccl|c10d|c10d_functional|_c10d_functional):|record_param_comms"
)
_FSDP_NAME = re.compile(r"\((?P<held>[^()\s]+)\)|prefetch for (?P<prefetched>\S+)")
_FSDP_BACKWARD = re.compile(r"FSDP::\w*(post_backward|pre_backward|backward_prefetch)")


def role_of(name: str) -> Role:
    """The role of an event of this name."""
    if name.startswith(_NODE_PREFIX):
        if name.endswith("AccumulateGrad"):
            return Role.ACCUMULATE
        return Role.GRAPH_ROOT if name.endswith("GraphRoot") else Role.NODE
    if name == "CheckpointFunctionBackward":
        return Role.CHECKPOINT_BACKWARD
    if name.startswith("FSDP::"):
        return Role.FSDP
    if name.startswith("Optimizer."):
        return Role.OPTIMIZER
    if name.startswith("enumerate("):
        return Role.DATA_LOADING
    return Role.COLLECTIVE if _COLLECTIVE.match(name) else Role.PLAIN


class NodeLink(NamedTuple):
    """One executed autograd node with a number, and the forward op that made it."""

    node: int  # span
    number: int
    forward_op: int  # span; -1 where it cannot be told


@dataclass(slots=True)
class Attribution:
    """The place of every CPU span of a recording."""

    places: list[Place]
    place_of: list[int]  # per span: index into places; -1 for device spans
    node_of: list[int]  # per span: the innermost autograd node around it (or itself), -1 outside backward
    links: list[NodeLink]
    outside: int  # the place of what nothing encloses

    def place(self, span: int) -> Place:
        """The place of CPU span `span`."""
        return self.places[self.place_of[span]]

    def index_of(self, place: Place) -> int:
        """The index of `place`, which is added where it is new."""
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)


def attribute(recording: Recording, nesting: Nesting, tree: LayerTree) -> Attribution:
    """Give every CPU span a place."""
    return _Walk(recording, nesting, tree).run()


class _Walk:
    """One walk over the CPU spans in the order they started, enclosing ones first."""

    def __init__(self, recording: Recording, nesting: Nesting, tree: LayerTree) -> None:
        spans = recording.spans
        self.recording, self.tree = recording, tree
        roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)
        self.role: list[int] = roles[spans.name].tolist() if len(spans) else []
        self.parent: list[int] = nesting.parent.tolist()
        self.lane: list[int] = spans.lane.tolist()
        self.start: list[int] = spans.start_ns.tolist()
        self.end: list[int] = spans.end_ns.tolist()
        self.number: list[int] = spans.sequence.tolist()
        self.forward_thread: list[int] = spans.forward_thread.tolist()
        self.order = _start_order(recording, nesting)
        self.node_of = self._innermost_nodes()
        self.common_layer = self._layers_entered_in_nodes()
        self.numbered_child = self._numbered_children()
        self.forward_ops = ForwardOps(recording)
        self.layer_by_name = tree.by_name()
        self.places: list[Place] = []
        self.index: dict[Place, int] = {}
        self.outside = self._intern(self._without_layer("other"))
        self.place_of = [-1] * len(spans)
        self.links: list[NodeLink] = []
        self.open_nodes: dict[int, list[int]] = defaultdict(list)  # per lane
        self.last_finished: dict[int, int] = {}  # per lane: the place of the node that finished last

    def run(self) -> Attribution:
        parent, role, place_of = self.parent, self.role, self.place_of
        number, mark_of = self.number, self.tree.layer_of_span
        for span in self.order:
            if role[span] == Role.PLAIN and number[span] < 0 and span not in mark_of:
                above = parent[span]
                place_of[span] = place_of[above] if above >= 0 else self.outside
            elif role[span] in _NODES:
                place_of[span] = self._node(span)
            else:
                place_of[span] = self._intern(self._special(span))
        return Attribution(self.places, place_of, self.node_of, self.links, self.outside)

    def _intern(self, place: Place) -> int:
        index = self.index.setdefault(place, len(self.places))
        if index == len(self.places):
            self.places.append(place)
        return index

    def _without_layer(self, phase: Phase) -> Place:
        """Code outside of all layers; nothing can be said of it in a trace that has none."""
        return Place(UNKNOWN, phase, NO_LAYERS) if self.tree.source == "none" else Place(NO_LAYER, phase)

    def _innermost_nodes(self) -> list[int]:
        node_of = [-1] * len(self.parent)
        for span in self.order:
            above = self.parent[span]
            node_of[span] = span if self.role[span] in _NODES else (node_of[above] if above >= 0 else -1)
        return node_of

    def _layers_entered_in_nodes(self) -> dict[int, int]:
        """Per node that encloses marks: the deepest layer above all of them."""
        found: dict[int, set[int]] = defaultdict(set)
        for span, layer in self.tree.layer_of_span.items():
            if self.node_of[span] >= 0:
                found[self.node_of[span]].add(layer)
        return {node: self.tree.common_ancestor(layers) for node, layers in found.items()}

    def _numbered_children(self) -> dict[int, int]:
        """Per node: its direct child of the node's own name, which has the number if the node has none."""
        names, name_id = self.recording.names, self.recording.spans.name
        children: dict[int, int] = {}
        for span in self.order:
            above = self.parent[span]
            numbered = above >= 0 and self.forward_thread[span] > 0 and self.role[above] == Role.NODE
            if numbered and names[name_id[above]].endswith(names[name_id[span]]):
                children.setdefault(above, span)
        return children

    def _node(self, span: int) -> int:
        lane = self.lane[span]
        lane_nodes = self.open_nodes[lane]
        while lane_nodes and self.end[lane_nodes[-1]] <= self.start[span]:
            self.last_finished[lane] = self.place_of[lane_nodes.pop()]
        if self.role[span] == Role.ACCUMULATE:
            owner = self.last_finished.get(lane)
            return self._intern(self._owned_by(None if owner is None else self.places[owner], "accumulate_grad"))
        lane_nodes.append(span)
        if self.role[span] == Role.GRAPH_ROOT:
            return self._intern(self._without_layer("backward"))
        return self._intern(self._linked(span))

    def _linked(self, span: int) -> Place:
        child = self.numbered_child.get(span, -1)
        numbered = span if self.number[span] >= 0 else child
        if numbered < 0 or self.number[numbered] < 0:
            return self._owned_by(None, "backward")
        events = (span,) if child < 0 else (span, child)
        forward_op = self.forward_ops.find(
            self.number[numbered], self.forward_thread[numbered], tuple((self.lane[e], self.start[e]) for e in events)
        )
        self.links.append(NodeLink(span, self.number[numbered], forward_op))
        return self._owned_by(None if forward_op < 0 else self.places[self.place_of[forward_op]], "backward")

    def _owned_by(self, owner: Place | None, phase: Phase) -> Place:
        if owner is None:
            return Place(UNKNOWN, phase, NO_LAYERS if self.tree.source == "none" else NO_FORWARD_LINK)
        return Place(owner.layer, phase, owner.reason)

    def _special(self, span: int) -> Place:
        """The place of a mark, of what role gives one, or of an op that may be recomputed."""
        above = self.parent[span]
        around = self.places[self.place_of[above] if above >= 0 else self.outside]
        role, node = self.role[span], self.node_of[span]
        layer = self.tree.layer_of_span.get(span)
        if layer is not None:
            return Place(layer, "recompute" if node >= 0 else self._forward_phase(span, around))
        if role == Role.OPTIMIZER:
            return Place(NO_LAYER, "optimizer")
        if role == Role.DATA_LOADING:
            return Place(NO_LAYER, "other")
        if role == Role.FSDP:
            return self._fsdp(span, around)
        if role == Role.COLLECTIVE:
            return self._collective(around, above, node)
        if self.number[span] >= 0 and self.forward_thread[span] <= 0 and around.phase == "backward" and node >= 0:
            if node in self.common_layer:
                common = self.common_layer[node]
                return Place(common, "recompute") if common >= 0 else around._replace(phase="recompute")
            if self.role[above] == Role.CHECKPOINT_BACKWARD:
                return around._replace(phase="recompute")
        return around

    def _forward_phase(self, span: int, around: Place) -> Phase:
        flags = self.tree.flags_of_span.get(span, ())
        if "decode" in flags:
            return "decode"
        if "prefill" in flags:
            return "prefill"
        return around.phase if around.phase in ("prefill", "decode") else "forward"

    def _collective(self, around: Place, above: int, node: int) -> Place:
        if node >= 0 and self.role[node] == Role.ACCUMULATE:
            return Place(NO_LAYER, "backward")
        return around if above >= 0 else Place(NO_LAYER, "other")

    def _fsdp(self, span: int, around: Place) -> Place:
        """FSDP names the layer whose parameters it moves; without a name it is the root."""
        name = self.recording.name_of(span)
        if self.node_of[span] >= 0 and around.phase == "recompute":
            phase: Phase = "recompute"
        elif self.node_of[span] >= 0 or around.phase == "backward" or _FSDP_BACKWARD.match(name):
            phase = "backward"
        else:
            phase = around.phase if around.phase in ("prefill", "decode") else "forward"
        if self.tree.source == "none":
            return Place(UNKNOWN, phase, NO_LAYERS)
        above = self.parent[span]
        match = _FSDP_NAME.search(name)
        if match is None and above >= 0 and self.role[above] == Role.FSDP:
            return around._replace(phase=phase)
        return Place(self._layer_by_fsdp_name(match.group("held") or match.group("prefetched") if match else ""), phase)

    def _layer_by_fsdp_name(self, name: str) -> int:
        """The layer of a module's name as FSDP knows it: the same, or what is left below wrappers."""
        while name:
            if name in self.layer_by_name:
                return self.layer_by_name[name]
            shorter = [full for full in self.layer_by_name if full.endswith(f".{name}") or name.endswith(f".{full}")]
            if len(shorter) == 1:
                return self.layer_by_name[shorter[0]]
            name = name.rpartition(".")[0]
        roots = [i for i, layer in enumerate(self.tree.layers) if layer.parent < 0]
        return roots[0] if len(roots) == 1 else NO_LAYER


def _start_order(recording: Recording, nesting: Nesting) -> list[int]:
    """CPU spans of all threads by start, an enclosing one before what it encloses."""
    spans = recording.spans
    rank = np.empty(len(spans), dtype=np.int64)
    rank[nesting.order] = np.arange(len(nesting.order))
    cpu = np.flatnonzero(spans.category <= Category.RUNTIME)
    order: list[int] = cpu[np.lexsort((rank[cpu], spans.start_ns[cpu]))].tolist()
    return order
