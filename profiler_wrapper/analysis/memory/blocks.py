"""Every block of memory of a recording: how big, from when to when, and who made it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution, Role, role_of
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.events import DeviceMemory, freed_at, frees_of_unknown
from profiler_wrapper.analysis.model import BEFORE_PROFILING
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

_NODE_PREFIX = "autograd::engine::evaluate_function: "
# Ops that allocate for another: `aten::zeros` says more than the `aten::empty` inside it.
_ALLOCATOR = re.compile(r"aten::(new_)?empty(_strided|_like|_quantized\w*)?$|aten::_?resize_(output_?)?$")
# Ops that a library registered, and autograd's own nodes; all else (compiled code, a user's Function,
# a checkpoint) holds many ops, which are what allocates.
_ONE_OP = re.compile(r"\w+::|\w*Backward\d+$")
_NODES = (Role.NODE, Role.ACCUMULATE, Role.GRAPH_ROOT)


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
    ops: tuple[str, ...]
    maker: Int32  # the CPU event of that op; -1 for none
    events: int

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def before(self) -> Bool:
        """True for what was there before the recording."""
        mask: Bool = self.made < 0
        return mask

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
    node = recording.named(lambda name: role_of(name) in _NODES)
    border = (spans.category != Category.CPU_OP) | node
    border[list(tree.layer_of_span)] = True
    one_op = recording.named(_ONE_OP.match)
    holds_ops = border | ~one_op
    outermost = nearest(parent, holds_ops | np.where(parent >= 0, holds_ops[parent], True))
    outermost[(outermost >= 0) & holds_ops[outermost]] = -1
    allocator = recording.named(_ALLOCATOR.match)
    maker = nearest(parent, ~allocator | border)
    useless = (maker < 0) | (border[maker] & ~node[maker])
    return OpTree(border, outermost, np.where(useless, np.int32(-1), maker))


def find_blocks(
    recording: Recording, nesting: Nesting, attribution: Attribution, ops: OpTree, memory: DeviceMemory
) -> Blocks:
    """The table of blocks. Zero bytes are none."""
    count = len(memory.time_ns)
    made = np.flatnonzero(memory.size_bytes > 0)
    freed = np.minimum(freed_at(memory)[made], count)
    made_ns = memory.time_ns[made]
    span = innermost_around(nesting, recording.spans, memory.lane[made], made_ns, made_ns)
    known = span >= 0
    place = np.where(known, attribution.place_of[np.where(known, span, 0)], attribution.outside).astype(np.int32)
    names, op_of_name = _op_names(recording)
    before_op, no_op = len(names), len(names) + 1
    around = np.where(known, span, 0)
    maker = np.where(ops.maker[around] >= 0, ops.maker[around], around)
    an_op = known & ((ops.maker[around] >= 0) | ~ops.is_border[around])
    op = np.where(an_op, op_of_name[recording.spans.name[maker]], no_op).astype(np.int32)
    before = memory.before
    nothing = np.full(len(before), -1, dtype=np.int32)
    return Blocks(
        np.concatenate([memory.address[made], before.address]),
        np.concatenate([memory.size_bytes[made], before.size_bytes]),
        np.concatenate([made, nothing.astype(np.int64)]),
        np.concatenate([freed, _before_freed(memory)]),
        np.concatenate([span, nothing]),
        np.concatenate([place, nothing]),
        np.concatenate([op, np.full(len(before), before_op, dtype=np.int32)]),
        (*names, BEFORE_PROFILING, ""),
        np.concatenate([np.where(an_op, maker, np.int32(-1)).astype(np.int32), nothing]),
        count,
    )


def _op_names(recording: Recording) -> tuple[list[str], Int32]:
    """Distinct names without the wrapper of autograd's engine, and the index of each of the recording's names."""
    index: dict[str, int] = {}
    places = [index.setdefault(name.removeprefix(_NODE_PREFIX), len(index)) for name in recording.names]
    return list(index), np.array(places, dtype=np.int32)


def _before_freed(memory: DeviceMemory) -> Int64:
    """Per block that was there: the event that freed it; the number of events where it stays.

    A free of what no event allocated is that of a block that was there. Of several at one address the
    first is that of the first block, and so on.
    """
    count = len(memory.time_ns)
    freed = np.full(len(memory.before), count, dtype=np.int64)
    frees = frees_of_unknown(memory.address, memory.size_bytes)
    frees = frees[np.argsort(memory.address[frees], kind="stable")]
    blocks = np.argsort(memory.before.address, kind="stable")
    free_key = _numbered(memory.address[frees])
    block_key = _numbered(memory.before.address[blocks])
    free_of = dict(zip(free_key, frees.tolist(), strict=True))
    for key, block in zip(block_key, blocks.tolist(), strict=True):
        freed[block] = free_of.get(key, count)
    if memory.device != "cpu":  # where an address is allocated again, what was there had gone
        staying = np.flatnonzero(freed == count)
        made = np.flatnonzero(memory.size_bytes > 0)
        addresses, first = np.unique(memory.address[made], return_index=True)
        again = np.isin(memory.before.address[staying], addresses)
        place = np.searchsorted(addresses, memory.before.address[staying[again]])
        freed[staying[again]] = made[first[place]]
    return freed


def _numbered(ascending: Int64) -> list[tuple[int, int]]:
    """(value, how many equal ones came before it)."""
    number = np.arange(len(ascending)) - np.searchsorted(ascending, ascending)
    return list(zip(ascending.tolist(), number.tolist(), strict=True))


def held_at_end(memory: DeviceMemory, blocks: Blocks) -> Bool:
    """Per block: alive at the end, and listed at the last moment as held by the model or an optimizer."""
    known = memory.known
    last = known.address[known.moment == known.moment.max()] if len(known) else known.address
    held: Bool = (blocks.freed == blocks.events) & np.isin(blocks.address, last)
    return held
