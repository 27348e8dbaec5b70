"""Every block of memory of a recording: how big, from when to when, who made it, what it is for, and whose it is.

What a block is for, its category: the first rule that applies counts.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.place.names import FORWARD_PHASES, PHASES, Phase
from profiler_wrapper.place.optimizer_calls import optimizer_calls
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import NODES, Role, role_of
from profiler_wrapper.tables.memory.events import NEVER, DeviceMemory, EventsByAddress, freed_at
from profiler_wrapper.tables.model import (
    BEFORE_PROFILING,
    CATEGORIES,
    MemoryCategory,
    MemoryMoment,
    MemoryTimeline,
    Owner,
)
from profiler_wrapper.trace.arrays import at, in_order, marked, sum_by_key
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest
from profiler_wrapper.trace.recording import Bool, Category, Int8, Int32, Int64, Recording

_NODE_PREFIX = "autograd::engine::evaluate_function: "
# Ops that allocate for another: `aten::zeros` says more than the `aten::empty` inside it.
_ALLOCATOR = re.compile(r"aten::(new_)?empty(_strided|_like|_quantized\w*)?$|aten::_?resize_(output_?)?$")
# Ops that a library registered, and autograd's own nodes; all else (compiled code, a user's Function,
# a checkpoint) holds many ops, which are what allocates.
_ONE_OP = re.compile(r"\w+::|\w*Backward\d+$")
_FSDP_COLLECTIVE = re.compile(r"FSDP::(all_gather|reduce_scatter|all_reduce|broadcast|post_backward_reduce)")
_PASSES: tuple[Phase, ...] = (*FORWARD_PHASES, "recompute", "backward", "accumulate_grad")
_CODE: dict[MemoryCategory, int] = {category: i for i, category in enumerate(CATEGORIES)}
_OTHER = _CODE["other"]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of one device: those made in the recording, in order, then those that were there before."""

    address: Int64
    size_bytes: Int64
    made: Int64  # index of the event that allocated it; -1: it was there before
    freed: Int64  # index of the event that freed it; the number of events: it stays
    span: Int32  # the innermost CPU event around its making; -1 for none
    place: Int32  # index into Attribution.places; -1 for what was there before
    op: Int32  # index into `ops`
    maker: Int32  # the CPU event of that op; -1 for none
    ops: tuple[str, ...]
    events: int

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def before(self) -> Bool:
        """True for what was there before the recording."""
        return self.made < 0

    def alive_after(self, event: int) -> Int64:
        """The blocks that are alive after an event."""
        return np.flatnonzero((self.made <= event) & (self.freed > event))


@dataclass(frozen=True, slots=True, eq=False)
class OpTree:
    """What CPU events are to an allocation inside them, per span."""

    is_border: Bool  # layer marks, modules, annotations and autograd nodes: what ops lie in
    outermost_op: Int32  # the op around (or itself) that lies in no other; -1 for none
    maker: Int32  # whose name says what made an allocation: the op around that does not merely allocate; -1: none


def op_tree(recording: Recording, nesting: Nesting, tree: LayerTree) -> OpTree:
    """The borders, and what lies between them and an event."""
    spans, parent = recording.spans, nesting.parent
    node = recording.named(lambda name: role_of(name) in NODES)
    border = (spans.category != Category.CPU_OP) | node
    border[list(tree.layer_of_span)] = True
    holds_ops = border | ~recording.named(_ONE_OP.match)
    outermost = nearest(parent, holds_ops | at(holds_ops, parent, True))
    outermost[at(holds_ops, outermost, False)] = -1
    maker = nearest(parent, ~recording.named(_ALLOCATOR.match) | border)
    maker[(maker < 0) | (border & ~node)[maker]] = -1
    return OpTree(border, outermost, maker)


def _find_blocks(placed: Placed, ops: OpTree, memory: DeviceMemory) -> Blocks:
    """The table of blocks. Zero bytes are none."""
    recording, attribution, before = placed.recording, placed.attribution, memory.before
    count = len(memory.time_ns)
    made = np.flatnonzero(memory.size_bytes > 0)
    made_ns = memory.time_ns[made]
    span = innermost_around(placed.nesting, recording.spans, memory.lane[made], made_ns, made_ns)
    maker = at(ops.maker, span, -1)
    maker = np.where((maker < 0) & ~at(ops.is_border, span, True), span, maker)
    index: dict[str, int] = {}  # of distinct names without the wrapper of autograd's engine
    op_of_name = [index.setdefault(name.removeprefix(_NODE_PREFIX), len(index)) for name in recording.names]
    op = at(np.array(op_of_name, dtype=np.int32), at(recording.spans.name, maker, -1), len(index) + 1)
    nothing = np.full(len(before), -1, dtype=np.int32)
    return Blocks(
        address=np.concatenate([memory.address[made], before.address]),
        size_bytes=np.concatenate([memory.size_bytes[made], before.size_bytes]),
        made=np.concatenate([made, nothing]),
        freed=np.minimum(np.concatenate([freed_at(memory)[made], before.freed]), count),
        span=np.concatenate([span, nothing]),
        place=np.concatenate([at(attribution.place_of, span, attribution.outside), nothing]),
        op=np.concatenate([op, np.full_like(nothing, len(index))]),
        maker=np.concatenate([maker, nothing]),
        ops=(*index, BEFORE_PROFILING, ""),
        events=count,
    )


# --- What each block is for ---


def _categorise(placed: Placed, ops: OpTree, memory: DeviceMemory, blocks: Blocks) -> tuple[Int8, Int32]:
    """(category, name) of every block, by the rules above; as indices into CATEGORIES and `KnownTensors.names`."""
    rules = _Rules(placed, ops, memory, blocks)
    listed, name = _listed(memory, blocks)
    in_optimizer = rules.phase_is("optimizer")
    grads = rules.phase_is("backward", "accumulate_grad") & (rules.freed_ns > rules.end_of_backward())
    if len(memory.known):
        of_a_parameter = np.isin(blocks.size_bytes, blocks.size_bytes[listed == _CODE["params"]])
        grads &= rules.freed_by_zero_grad() | rules.similar(listed == _CODE["grads"]) | of_a_parameter
        # The last moment lists all that is held: what is alive then and not in it is somebody else's.
        alive_then = (blocks.freed == blocks.events) & (rules.made_ns < memory.known.moment_ns[-1])
        refuted = alive_then & ~_held_at_end(memory, blocks)
        grads, in_optimizer = grads & ~refuted, in_optimizer & ~refuted
    by_rule: dict[MemoryCategory, Bool] = {
        "communication": rules.in_collective(),
        "workspace": rules.is_workspace(),
        "os_state": in_optimizer,
        "grads": grads,
        "activation": rules.phase_is(*_PASSES) | (rules.phase_is("other") & rules.is_followed_by_autograd()),
    }
    category = np.select([listed >= 0, *by_rule.values()], [listed, *(_CODE[one] for one in by_rule)], _OTHER)
    return category.astype(np.int8), name


def _listed(memory: DeviceMemory, blocks: Blocks) -> tuple[Int8, Int32]:
    """Per block (category, name) as the inventory lists it at some moment of its life; -1 where it does not."""
    category = np.full(len(blocks), -1, dtype=np.int8)
    name = np.full(len(blocks), -1, dtype=np.int32)
    was_there, known = blocks.before, memory.known
    category[was_there], name[was_there] = memory.before.category, memory.before.name
    if not len(known):
        return category, name
    block_of_event = np.full(len(memory.time_ns), -1, dtype=np.int64)
    block_of_event[blocks.made[~was_there]] = np.flatnonzero(~was_there)
    seen = np.searchsorted(memory.time_ns, known.time_ns, side="right")
    block = at(block_of_event, EventsByAddress(memory.address).last_before(known.address, seen), -1)
    fits = (block >= 0) & (known.size_bytes <= blocks.size_bytes[block])
    listed, first = np.unique(block[fits], return_index=True)
    category[listed] = known.category[fits][first]
    name[listed] = known.name[fits][first]
    return category, name


def _held_at_end(memory: DeviceMemory, blocks: Blocks) -> Bool:
    """Per block: alive at the end, and listed at the last moment as held by the model or an optimizer."""
    known = memory.known
    last = known.address[known.moment == known.moment.max(initial=0)]
    held: Bool = (blocks.freed == blocks.events) & np.isin(blocks.address, last)
    return held


class _Rules:
    """What can be said of blocks made in the recording. Every answer is per block, False for those before."""

    def __init__(self, placed: Placed, ops: OpTree, memory: DeviceMemory, blocks: Blocks) -> None:
        self.recording, self.parent, self.tree = placed.recording, placed.nesting.parent, placed.tree
        self.attribution, self.ops, self.blocks = placed.attribution, ops, blocks
        self.ends = placed.recording.spans.end_ns
        # same (0 -> -1): what was there before has a listed category
        self.made_ns, self.freed_ns = at(memory.time_ns, blocks.made, 0), np.append(memory.time_ns, NEVER)[blocks.freed]

    def phase_is(self, *phases: Phase) -> Bool:
        """Made in one of these phases."""
        # same: what was there before has a listed category
        return at(self.attribution.in_phases(*phases), self.blocks.place, False)

    def in_collective(self) -> Bool:
        """Made inside a collective, or by DistributedDataParallel's own forward and kept beyond it: its buckets."""
        collective = self._around(self.recording.named(_is_collective)) >= 0
        own = self.recording.named(lambda name: name == "DistributedDataParallel.forward")
        if not own.any():
            return collective
        around = self._around(self.ops.is_border)
        return collective | (at(own, around, False) & (self.freed_ns > self.ends[around]))

    def is_workspace(self) -> Bool:
        """Gone before the outermost op around it ended, or within the optimizer's step that made it."""
        steps = marked(len(self.recording.spans), optimizer_calls(self.recording, "step"))
        by_optimizer = self.phase_is("optimizer")  # not by the forward and backward of its closure
        step = np.where(by_optimizer, self._around(steps), -1)
        op = at(self.ops.outermost_op, self.blocks.span, -1)
        gone: Bool = (op >= 0) & (self.freed_ns <= self.ends[op])
        return gone | ((step >= 0) & (self.freed_ns <= self.ends[step]))

    def is_followed_by_autograd(self) -> Bool:
        """Made inside an op that has a number of autograd's."""
        return self._around(self.recording.spans.sequence >= 0) >= 0

    def freed_by_zero_grad(self) -> Bool:
        """Freed inside of `Optimizer.zero_grad`."""
        calls = optimizer_calls(self.recording, "zero_grad")
        last = np.searchsorted(self.recording.spans.start_ns[calls], self.freed_ns, side="right") - 1
        return (at(self.ends[calls], last, -NEVER) >= self.freed_ns) & ~self.blocks.before

    def similar(self, those: Bool) -> Bool:
        """Of the same place, op and size as some of those, which were made in the recording."""
        blocks = self.blocks
        sizes, size = np.unique(blocks.size_bytes, return_inverse=True)
        kind = (blocks.place.astype(np.int64) * len(blocks.ops) + blocks.op) * len(sizes) + size
        return np.isin(kind, kind[those & ~blocks.before]) & ~blocks.before

    def end_of_backward(self) -> Int64:
        """Per block: when the run of backward ended that its making is in, or that came last; its making before all.

        A run ends where the engine starts anew, or where a layer, an optimizer or a step begins outside of it.
        """
        spans, node_of = self.recording.spans, self.attribution.node_of
        nodes = in_order(np.flatnonzero(self.attribution.is_node), spans.start_ns)
        ended = np.maximum.accumulate(spans.end_ns[nodes])
        outside = self.recording.named(lambda name: name.startswith(("Optimizer.", "ProfilerStep#")))
        outside[list(self.tree.layer_of_span)] = True
        borders = np.unique(spans.start_ns[outside & (node_of < 0)])
        following = np.append(borders, NEVER)[np.searchsorted(borders, self.made_ns, side="right")]
        last = np.searchsorted(spans.start_ns[nodes], following) - 1
        end_ns: Int64 = np.maximum(at(ended, last, -NEVER), self.made_ns)
        return end_ns

    def _around(self, chosen: Bool) -> Int32:
        """Per block the innermost of the chosen spans around it; -1 for none."""
        if not chosen.any():
            return np.full(len(self.blocks), -1, dtype=np.int32)
        return at(nearest(self.parent, chosen), self.blocks.span, -1)


def _is_collective(name: str) -> bool:
    if role_of(name) == Role.FSDP:
        return _FSDP_COLLECTIVE.match(name) is not None
    return role_of(name) == Role.COLLECTIVE or classes.class_of_op(name) == "communication"


# --- Whose each block is, and what they add up to at any moment ---


@dataclass(frozen=True, slots=True, eq=False)
class OwnedMemory:
    """Every block with its category and owner: what all of `MemoryUse` is made from."""

    memory: DeviceMemory
    blocks: Blocks
    category: Int8  # per block: index into CATEGORIES
    name: Int32  # per block: index into KnownTensors.names; -1 for what has none
    layer: Int32  # per block: index into `layers`
    layers: tuple[str, ...]  # full names; the last is "", for what has none
    phases: tuple[Phase | None, ...]  # by Attribution.places; the last is that of what was there before
    paths: tuple[tuple[str, ...], ...]  # likewise, see `Owner`
    timeline: MemoryTimeline
    at_start: Int64  # shape (categories,): what is held before the first event
    lost_bytes: int  # by which, at most, the blocks that seem alive exceed what the allocator has given out

    @property
    def held_at_end(self) -> Bool:
        """Per block: listed as held when the recording ended."""
        return _held_at_end(self.memory, self.blocks)

    def moment(self, label: str, step: int | None, time_ns: int, event: int) -> MemoryMoment:
        """What is held after an event; -1 for what was held before the first."""
        timeline = self.timeline
        held = timeline.bytes_by_category[:, event] if event >= 0 else self.at_start
        return MemoryMoment(
            label=label,
            step=step,
            time_ns=time_ns,
            total_bytes=int(timeline.total_bytes[event]) if event >= 0 else self.memory.allocated_at_start,
            reserved_bytes=None if timeline.reserved_bytes is None else int(timeline.reserved_bytes[max(event, 0)]),
            categories=dict(zip(CATEGORIES, held.tolist(), strict=True)),
        )

    def owners(self, event: int) -> tuple[Owner, ...]:
        """Who holds what after an event, the largest first; adds up to the total.

        By call, but for what has a name and gradients: they are the module's, whoever calls it.
        """
        blocks, alive = self.blocks, self.blocks.alive_after(event)
        keys = np.column_stack([self.category, self.layer, self.name, blocks.op, blocks.place])[alive]
        rows, row_of, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        sizes = sum_by_key(row_of.reshape(-1), blocks.size_bytes[alive], len(rows))
        names = (*self.memory.known.names, "")
        summed: dict[tuple[MemoryCategory, str, str, str, Phase | None, tuple[str, ...]], list[int]] = {}
        for row, size, count in zip(rows.tolist(), sizes.tolist(), counts.tolist(), strict=True):
            category, layer, name, op, place = row
            path = () if names[name] or category == _CODE["grads"] else self.paths[place]
            key = (CATEGORIES[category], self.layers[layer], names[name], blocks.ops[op], self.phases[place])
            entry = summed.setdefault((*key, path), [0, 0])
            entry[0] += size
            entry[1] += count
        held = self.timeline.bytes_by_category[:, event].tolist()
        for category_name, size in zip(CATEGORIES, held, strict=True):
            _cut([entry for key, entry in summed.items() if key[0] == category_name], size)
        # What the allocator has given out that no block accounts for: from the start, and since.
        unexplained = max(0, held[_OTHER] - self._other_bytes(alive))
        from_start = min(
            unexplained, max(0, int(self.at_start[_OTHER]) - self._other_bytes(np.flatnonzero(blocks.before)))
        )
        for op_name, size in ((BEFORE_PROFILING, from_start), ("", unexplained - from_start)):
            entry = summed.setdefault(("other", "", "", op_name, None, ()), [0, 0])
            entry[0] += size
            entry[1] += 1
        owners = [
            Owner(category=c, layer=layer, name=name, op=op, phase=phase, size_bytes=size, count=count, call_path=path)
            for (c, layer, name, op, phase, path), (size, count) in summed.items()
            if size
        ]
        return tuple(sorted(owners, key=lambda owner: -owner.size_bytes))

    def _other_bytes(self, blocks: Int64) -> int:
        """Of these blocks, what those of the category `other` take."""
        return int(self.blocks.size_bytes[blocks[self.category[blocks] == _OTHER]].sum())


def owned_memory(placed: Placed, memory: DeviceMemory) -> OwnedMemory:
    """Every block of the device that `memory` is about, with its category and owner."""
    attribution = placed.attribution
    ops = op_tree(placed.recording, placed.nesting, placed.tree)
    blocks = _find_blocks(placed, ops, memory)
    category, name = _categorise(placed, ops, memory, blocks)
    held, lost_bytes = _held(memory, blocks, category)
    layers = (*(layer.name for layer in placed.tree.layers), *placed.tree.not_entered, "")
    nowhere = len(layers) - 1
    made_in = at(np.maximum(attribution.layer_of_place, -1), blocks.place, -1)
    named = at(np.array(_layers_of_names(placed.tree, memory.known.names), dtype=np.int64), name, -1)
    layer = np.where(named >= 0, named, np.where(made_in >= 0, made_in, nowhere))
    timeline = MemoryTimeline(
        time_ns=memory.time_ns,
        bytes_by_category=held[:, 1:],
        total_bytes=memory.allocated,
        reserved_bytes=None if memory.device == "cpu" else memory.reserved,
        phase_starts=_phase_starts(placed),
    )
    tree, phases = placed.tree, (*(place.phase for place in attribution.places), None)
    chains = (one.chain if one.layer >= 0 else () for one in attribution.places)
    paths = (*(tree.path(one) if one and one != tree.layers[one[0]].ancestors else () for one in chains), ())
    return OwnedMemory(
        memory, blocks, category, name, layer.astype(np.int32), layers, phases, paths, timeline, held[:, 0], lost_bytes
    )


def _held(memory: DeviceMemory, blocks: Blocks, category: Int8) -> tuple[Int64, int]:
    """Bytes by category before the first event and after each, and by how much they were too many at most.

    What no block accounts for is `other`. Where the blocks are more than the allocator has given out (the
    trace lost their frees), the largest categories are cut. So none is negative and they make the total.
    """
    held = np.zeros((len(CATEGORIES), blocks.events + 2), dtype=np.int64)
    np.add.at(held, (category, blocks.made + 1), blocks.size_bytes)
    np.add.at(held, (category, blocks.freed + 1), -blocks.size_bytes)
    held = np.cumsum(held, axis=1, out=held)[:, : blocks.events + 1]
    missing = memory.held - held.sum(axis=0)
    held[_OTHER] += np.maximum(missing, 0)
    too_many = np.flatnonzero(missing < 0)
    if not len(too_many):
        return held, 0
    order = np.argsort(-held[:, too_many], axis=0, kind="stable")
    sizes = np.take_along_axis(held[:, too_many], order, axis=0)
    cut = np.clip(-missing[too_many] - (np.cumsum(sizes, axis=0) - sizes), 0, sizes)
    left = np.empty_like(sizes)
    np.put_along_axis(left, order, sizes - cut, axis=0)
    held[:, too_many] = left
    return held, int(-missing.min())


def _cut(entries: list[list[int]], size_bytes: int) -> None:
    """Makes entries (bytes, count) no more than `size_bytes` in all, the largest first."""
    excess = sum(size for size, _ in entries) - size_bytes
    for entry in sorted(entries, key=lambda entry: -entry[0]):
        if excess <= 0:
            return
        cut = min(excess, entry[0])
        entry[0] -= cut
        excess -= cut


def _layers_of_names(tree: LayerTree, names: Sequence[str]) -> list[int]:
    """Per tensor's name the deepest layer that holds it, entered or not; -1 where there is none."""
    by_name = {**{layer.raw_name: i for i, layer in enumerate(tree.layers)}, **tree.by_name()}
    by_name |= {name: len(tree.layers) + i for i, name in enumerate(tree.not_entered) if name not in by_name}
    roots = [i for i, layer in enumerate(tree.layers) if layer.parent < 0]
    found = []
    for name in names:
        path, layer = name.rpartition(" of ")[2], -1
        while layer < 0 and "." in path:
            path = path.rpartition(".")[0]
            layer = by_name.get(path, -1)
        found.append(roots[0] if layer < 0 and len(roots) == 1 else layer)
    return found


def _phase_starts(placed: Placed) -> tuple[tuple[int, Phase], ...]:
    """When phases begin, ascending in time; what lies between two belongs to the one before.

    Forward begins with an outermost layer, backward with a node of autograd, the optimizer with its step or where
    the backward of its closure ends, and `other` when the step has ended.
    """
    spans, attribution = placed.recording.spans, placed.attribution
    entries, nodes = placed.calls.outermost, np.flatnonzero(attribution.is_node)
    steps = optimizer_calls(placed.recording, "step")
    step_ns, stepped_ns = spans.start_ns[steps], spans.end_ns[steps]
    borders = np.sort(np.concatenate([spans.start_ns[entries], step_ns, stepped_ns]))
    run = np.searchsorted(borders, spans.start_ns[nodes])
    ends = np.zeros(len(borders) + 1, dtype=np.int64)
    np.maximum.at(ends, run, spans.end_ns[nodes])
    ends = ends[np.unique(run)]  # of each run of backward
    resumed = ends[ends < at(stepped_ns, np.searchsorted(step_ns, ends, side="right") - 1, -NEVER)]
    begins: list[tuple[Int64, Int64 | int]] = [
        (spans.start_ns[entries], attribution.phase_of_place[attribution.place_of[entries]]),
        (spans.start_ns[nodes], PHASES.index("backward")),
        (np.append(step_ns, resumed), PHASES.index("optimizer")),
        (stepped_ns, PHASES.index("other")),
    ]
    times = np.concatenate([time_ns for time_ns, _ in begins])
    phases = np.concatenate([np.broadcast_to(phase, len(time_ns)) for time_ns, phase in begins])
    order = np.argsort(times, kind="stable")
    times, phases = times[order], phases[order]
    changes = np.append(True, phases[1:] != phases[:-1])[: len(phases)]
    return tuple(zip(times[changes].tolist(), (PHASES[i] for i in phases[changes].tolist()), strict=True))
