"""Why each block of memory is there.

The first rule that applies counts:

1. the inventory of the run (`held`) lists it: params, grads, os_params, os_state;
2. made inside a collective, or as a bucket of DistributedDataParallel: communication;
3. gone before the outermost op around its making ended, or made by an optimizer's step and freed within it: workspace;
4. made by an optimizer's step and alive after it: os_state;
5. made in backward and alive after the run of backward ended: grads; where it is known what the model holds,
   only what is like a listed gradient (same place, op and size), what `zero_grad` freed, or what is as
   big as a parameter;
   4 and 5 not where it is known what is held at the end, and this is alive then and not in it;
6. made by a pass through the model, or outside of it by an op that autograd follows: activation;
7. else other.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Attribution, Role, role_of
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.blocks import Blocks, OpTree, held_at_end
from profiler_wrapper.analysis.memory.events import DeviceMemory, EventsByAddress
from profiler_wrapper.analysis.model import CATEGORIES, MemoryCategory, Phase
from profiler_wrapper.analysis.steps import optimizer_calls
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Int8, Int32, Int64, Recording

_CODE: dict[MemoryCategory, int] = {category: i for i, category in enumerate(CATEGORIES)}
_PASSES: tuple[Phase, ...] = ("forward", "prefill", "decode", "recompute", "backward", "accumulate_grad")
_FSDP_COLLECTIVE = re.compile(r"FSDP::(all_gather|reduce_scatter|all_reduce|broadcast|post_backward_reduce)")
_DDP_FORWARD = "DistributedDataParallel.forward"
_NEVER = np.iinfo(np.int64).max


class Categories(NamedTuple):
    """Per block."""

    category: Int8  # index into CATEGORIES
    name: Int32  # index into KnownTensors.names; -1 for what has none


def categorise(found: Attributed, ops: OpTree, memory: DeviceMemory, blocks: Blocks) -> Categories:
    """The category of every block, by the rules above."""
    rules = _Rules(found, ops, memory, blocks)
    listed, name = _listed(memory, blocks)
    known_owners = len(memory.known) > 0
    in_optimizer = rules.phase_is("optimizer")
    survives_backward = rules.phase_is("backward", "accumulate_grad") & rules.outlives(rules.end_of_backward())
    if known_owners:
        of_a_parameter = np.isin(blocks.size_bytes, blocks.size_bytes[listed == _CODE["params"]])
        grads = survives_backward & (
            rules.freed_by_zero_grad() | rules.similar(listed == _CODE["grads"]) | of_a_parameter
        )
        # The last moment lists all that is held: what is alive then and not in it is somebody else's.
        alive_then = (blocks.freed == blocks.events) & (rules.made_ns < memory.known.moment_ns[-1])
        refuted = alive_then & ~held_at_end(memory, blocks)
        grads, in_optimizer = grads & ~refuted, in_optimizer & ~refuted
    else:
        grads = survives_backward
    category = np.select(
        [
            listed >= 0,
            rules.in_collective(),
            rules.is_workspace(),
            in_optimizer,
            grads,
            rules.phase_is(*_PASSES) | (rules.phase_is("other") & rules.is_followed_by_autograd()),
        ],
        [listed, _CODE["communication"], _CODE["workspace"], _CODE["os_state"], _CODE["grads"], _CODE["activation"]],
        _CODE["other"],
    )
    return Categories(category.astype(np.int8), name)


def _listed(memory: DeviceMemory, blocks: Blocks) -> tuple[Int8, Int32]:
    """Per block (category, name) as the inventory lists it at some moment of its life; -1 where it does not."""
    category = np.full(len(blocks), -1, dtype=np.int8)
    name = np.full(len(blocks), -1, dtype=np.int32)
    was_there = blocks.before
    category[was_there], name[was_there] = memory.before.category, memory.before.name
    known = memory.known
    if not len(known):
        return category, name
    block_of_event = np.full(len(memory.time_ns), -1, dtype=np.int64)
    block_of_event[blocks.made[~was_there]] = np.flatnonzero(~was_there)
    seen = np.searchsorted(memory.time_ns, known.time_ns, side="right")
    last = EventsByAddress(memory.address).last_before(known.address, seen)
    block = np.where(last >= 0, block_of_event[last], -1)
    fits = (block >= 0) & (known.size_bytes <= blocks.size_bytes[block])
    found, first = np.unique(block[fits], return_index=True)
    category[found] = known.category[fits][first]
    name[found] = known.name[fits][first]
    return category, name


class _Rules:
    """What can be said of blocks made in the recording. Every answer is per block, False for those before."""

    def __init__(self, found: Attributed, ops: OpTree, memory: DeviceMemory, blocks: Blocks) -> None:
        self.recording, self.parent, self.tree = found.recording, found.nesting.parent, found.tree
        self.attribution, self.ops, self.memory, self.blocks = found.attribution, ops, memory, blocks
        self.ends = found.recording.spans.end_ns
        self.made_ns = np.append(memory.time_ns, 0)[blocks.made]
        self.freed_ns = np.append(memory.time_ns, _NEVER)[blocks.freed]

    def phase_is(self, *phases: Phase) -> Bool:
        """Made in one of these phases."""
        mask: Bool = np.append(self.attribution.in_phases(*phases), False)[self.blocks.place]
        return mask

    def outlives(self, end_ns: Int64) -> Bool:
        """Alive after an instant, per block."""
        mask: Bool = self.freed_ns > end_ns
        return mask

    def in_collective(self) -> Bool:
        """Made inside a collective, or by DistributedDataParallel's own forward and kept beyond it: its buckets."""
        collective = self._around(self.recording.named(_is_collective)) >= 0
        own = self.recording.named(lambda name: name == _DDP_FORWARD)
        if not own.any():
            return collective
        border = nearest(self.parent, self.ops.is_border)
        around = self._of_span(border, -1)
        bucket = (around >= 0) & own[around] & self.outlives(self.ends[around])
        return collective | bucket

    def is_workspace(self) -> Bool:
        """Gone before the outermost op around it ended, or within the optimizer's step that made it."""
        steps = np.zeros(len(self.recording.spans), dtype=np.bool_)
        steps[optimizer_calls(self.recording, "step")] = True
        gone = np.zeros(len(self.blocks), dtype=np.bool_)
        by_optimizer = self.phase_is("optimizer")  # not by the forward and backward of its closure
        step = np.where(by_optimizer, self._around(steps), -1)
        for around in (self._of_span(self.ops.outermost_op, -1), step):
            gone |= (around >= 0) & ~self.outlives(self.ends[around])
        return gone

    def is_followed_by_autograd(self) -> Bool:
        """Made inside an op that has a number of autograd's."""
        near = nearest(self.parent, self.recording.spans.sequence >= 0)
        return self._of_span(near, -1) >= 0

    def freed_by_zero_grad(self) -> Bool:
        """Freed inside of `Optimizer.zero_grad`."""
        spans = self.recording.spans
        calls = optimizer_calls(self.recording, "zero_grad")
        if not len(calls):
            return np.zeros(len(self.blocks), dtype=np.bool_)
        last = np.searchsorted(spans.start_ns[calls], self.freed_ns, side="right") - 1
        return (last >= 0) & (self.ends[calls[last]] >= self.freed_ns) & ~self.blocks.before

    def similar(self, those: Bool) -> Bool:
        """Of the same place, op and size as some of those, which were made in the recording."""
        blocks = self.blocks
        sizes, size = np.unique(blocks.size_bytes, return_inverse=True)
        kind = (blocks.place.astype(np.int64) * len(blocks.ops) + blocks.op) * len(sizes) + size
        same: Bool = np.isin(kind, kind[those & ~blocks.before]) & ~blocks.before
        return same

    def end_of_backward(self) -> Int64:
        """Per block: when the run of backward around its making ended.

        A run ends where the engine starts anew, or where a layer, an optimizer or a step begins outside of it.
        """
        return ends_of_backward(self.recording, self.tree, self.attribution, self.made_ns)

    def _around(self, chosen: Bool) -> Int32:
        """Per block the innermost of the chosen spans around it; -1 for none."""
        if not chosen.any():
            return np.full(len(self.blocks), -1, dtype=np.int32)
        return self._of_span(nearest(self.parent, chosen), -1)

    def _of_span(self, values: Int32, without: int) -> Int32:
        span = self.blocks.span
        return np.where(span >= 0, values[np.where(span >= 0, span, 0)], np.int32(without))


def _is_collective(name: str) -> bool:
    if role_of(name) == Role.FSDP:
        return _FSDP_COLLECTIVE.match(name) is not None
    return role_of(name) == Role.COLLECTIVE or classes.class_of_op(name) == "communication"


def ends_of_backward(recording: Recording, tree: LayerTree, attribution: Attribution, time_ns: Int64) -> Int64:
    """Per instant: when the run of backward that it is in, or that came last, ended; the instant itself before all."""
    spans, node_of = recording.spans, attribution.node_of
    nodes = np.flatnonzero(attribution.is_node)
    if not len(nodes):
        return time_ns
    nodes = nodes[np.argsort(spans.start_ns[nodes], kind="stable")]
    ended = np.maximum.accumulate(spans.end_ns[nodes])
    entries = np.fromiter(tree.layer_of_span, dtype=np.int64, count=len(tree.layer_of_span))
    others = recording.named(lambda name: name.startswith(("Optimizer.", "ProfilerStep#")))
    outside = np.concatenate([entries, np.flatnonzero(others)])
    borders = np.unique(spans.start_ns[outside[node_of[outside] < 0]])
    following = np.append(borders, _NEVER)[np.searchsorted(borders, time_ns, side="right")]
    last = np.searchsorted(spans.start_ns[nodes], following) - 1
    return np.where(last >= 0, np.maximum(ended[last], time_ns), time_ns)
