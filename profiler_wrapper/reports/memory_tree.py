"""Who holds memory as a tree: below each category the model's names, and at the end a tensor's name or an op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from profiler_wrapper.analysis.memory_model import MemoryCategory, MemoryUse, Owner
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.phase import Phase

NO_OP = "(op not known)"
OUTSIDE = "(outside of layers)"
NAMED: tuple[MemoryCategory, ...] = ("params", "grads", "os_params", "os_state")  # whose leaves are tensors, not ops


@dataclass(eq=False)
class MemoryNode:
    """A name and what is held under it."""

    label: str
    own_bytes: int = 0
    total_bytes: int = 0  # with everything below
    count: int = 0  # allocations, with everything below
    is_op: bool = False
    phases: dict[Phase, int] = field(default_factory=dict)  # bytes by the phase in which they were allocated
    children: dict[str, MemoryNode] = field(default_factory=dict)

    def add(self, path: Iterable[str], owner: Owner, *, ends_in_op: bool) -> None:
        """Count an owner here and in each node along `path`."""
        node = self
        node._count(owner)
        for label in path:
            node = node.children.setdefault(label, MemoryNode(label))
            node._count(owner)
        node.own_bytes += owner.size_bytes
        node.is_op = node.is_op or ends_in_op

    def _count(self, owner: Owner) -> None:
        self.total_bytes += owner.size_bytes
        self.count += owner.count
        if owner.phase is not None:
            self.phases[owner.phase] = self.phases.get(owner.phase, 0) + owner.size_bytes


@dataclass(frozen=True)
class PlacedNode:
    """A node and where it is in its tree."""

    node: MemoryNode
    path: tuple[str, ...]  # labels from the root, which is left out, to this


def category_tree(owners: Iterable[Owner], category: MemoryCategory, label: str) -> MemoryNode:
    """All that one category holds. Sums are exact: each node's total is its own plus its children's."""
    root = MemoryNode(label)
    for owner in owners:
        if owner.category == category and owner.size_bytes > 0:
            root.add(owner_path(owner), owner, ends_in_op=not is_named(owner))
    return root


def owner_path(owner: Owner) -> tuple[str, ...]:
    """`("lm_head", "weight", "exp_avg")` of an optimizer's state; `("layers", "0", "aten::mm")` of an activation."""
    if is_named(owner):
        what, of, parameter = owner.name.partition(" of ")
        return (*parameter.split("."), what) if of else tuple(owner.name.split("."))
    if owner.layer:
        return (*owner.layer.split("."), owner.op or NO_OP)
    outside = () if owner.phase is None else (OUTSIDE if owner.phase == "other" else f"({owner.phase})",)
    return (*outside, owner.op or NO_OP)


def is_named(owner: Owner) -> bool:
    """Whether it is told by a tensor's name, not by an op."""
    return bool(owner.name) and owner.category in NAMED


def walk(root: MemoryNode, layers: Mapping[str, int], *, above: int = 0) -> Iterator[PlacedNode]:
    """The root and all below it, parents before children; layers as in the model, ops by what they hold.

    `layers` gives each layer its place in the model; their names begin `above` labels below the root.
    """
    stack = [PlacedNode(root, ())]
    while stack:
        placed = stack.pop()
        yield placed
        below = [PlacedNode(node, (*placed.path, label)) for label, node in placed.node.children.items()]
        stack += sorted(below, key=lambda child: _rank(child, layers, above), reverse=True)


def _rank(
    placed: PlacedNode, layers: Mapping[str, int], above: int
) -> tuple[bool, float, int, list[tuple[bool, int, str]]]:
    order = layers.get(".".join(placed.path[above:]), inf)
    by_size = -placed.node.total_bytes if placed.node.is_op else 0
    return placed.node.is_op, order, by_size, _natural(placed.path[-1])


def _natural(label: str) -> list[tuple[bool, int, str]]:
    """So that 2 comes before 10."""
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+|[0-9]+)", label)
    return [(not number, int(number or 0), text) for number, text in parts]


def layer_order(analysis: Analysis) -> dict[str, int]:
    """Each layer's place in the model; names that are no rows (`model.layers`) have that of their first layer."""
    order: dict[str, int] = {}
    for row in sorted(analysis.layers, key=lambda row: row.order):
        parts = row.layer.split(".")
        for end in range(1, len(parts) + 1):
            order.setdefault(".".join(parts[:end]), row.order)
    return order


def moment_in_words(use: MemoryUse) -> str:
    """When the peak was: `"in backward of step 3"`; `""` where that is not known."""
    phase = use.timeline.phase_at(use.peak.time_ns)
    step = None if use.peak.step is None else f"step {use.peak.step}"
    where = f"{phase} of {step}" if phase and step else phase or step
    return f"in {where}" if where else ""


def why_no_memory_use(analysis: Analysis) -> str:
    """Why it is not known who holds memory, as a clause: from the warnings where one says it."""
    for warning in analysis.warnings:
        what, because, reason = warning.partition(", because ")
        if because and "memory" in what.lower():
            return reason.rstrip(". ")
    if analysis.memory and not analysis.calls:
        return "a result that is read from its file holds no allocations; the trace does"
    return "the trace holds no allocation events (profile_memory=True records them)"
