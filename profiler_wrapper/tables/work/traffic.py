"""Bytes that the ops of a recording move: which ops count, and how much of the time is theirs.

A unit of work is the outermost op with a rule of its own (`bytes.has_rule`): what it calls inside is part of
it, so nothing counts twice, and a temporary that it makes is not compulsory. What only calls others (`linear`,
`cross_entropy_loss`, `reshape`) is none; `linear` and `matmul` are where their FLOPs count. Nor is an op that
torch handed to Python, where that called ops with a rule: a `DTensor` has the shape of the whole. On a trace of
a device only ops that launched something count: others work on the host.

An op whose FLOPs are counted lies in one unit, or is it: `unit_of[span]`. A device event belongs to
`unit_of[charges.cpu_span]`. Communication is left out: the network limits it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from math import prod

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.tables.model import UncountedRow
from profiler_wrapper.tables.work.bytes import (
    CALLERS,
    INDEXING,
    SHOWS_INDICES,
    SIZE_OF_TYPE,
    Moved,
    calls_known_ops,
    has_rule,
    indexed,
    moved_by,
    moves_nothing,
)
from profiler_wrapper.tables.work.flops import FlopOps, UnknownCall, ancestors_of, unknown_rows
from profiler_wrapper.trace.arrays import at, marked
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, OpShapes, Recording, Shapes

_SIZES = 32  # more than an element has bytes
_NODE = re.compile(r"\w+|torch::autograd::\w+")
# What `torch.vmap` calls in their place.
_OF_A_BATCH = {"aten::mm": "aten::bmm", "aten::addmm": "aten::baddbmm", "aten::relu": "aten::clamp_min"}
_FROM_HOST, _TO_HOST = re.compile("HtoD|HostToDevice"), re.compile("DtoH|DeviceToHost")


class Traffic:
    """Bytes of every unit of work, in all steps that count.

    Attributes:
        units: their spans, in file order.
        read_bytes, written_bytes, bytes_moved: one entry per unit. Of a copy over the bus, the device's side alone.
        unit_of: per span of the recording, the span of the unit that it is or lies in; -1 for none.
        counts: per charge, whether it is that of an op that ran; events whose launch is not in the trace are nobody's.
        has_bytes: per charge, whether it went to a unit, or to an op that moves nothing itself.
    """

    def __init__(self, found: Placed, shapes: Shapes, ops: FlopOps) -> None:
        """`shapes`: of the ops that `bytes.has_rule` at least; `ops` tells which really ran."""
        self._found, self._shapes, self._ran, self._handlers = found, shapes, ops.ran, ops.handlers
        self._recording = found.recording
        self._parent = found.nesting.parent
        spans = found.recording.spans
        self._is_op: Bool = spans.category == Category.CPU_OP
        self._is_mark = marked(len(spans), found.tree.layer_of_span if found.tree.source == "marks" else ())
        self._read = np.zeros(len(spans), dtype=np.int64)
        self._written = np.zeros(len(spans), dtype=np.int64)
        is_unit = self._find_units(ops)
        if found.charges.basis == "device":
            self._leave_out_the_host(is_unit)
        self._is_unit = is_unit
        self.units: Int64 = np.flatnonzero(is_unit)
        self.unit_of: Int32 = nearest(self._parent, is_unit)
        self.read_bytes, self.written_bytes = self._read[self.units], self._written[self.units]
        self.bytes_moved = self.read_bytes + self.written_bytes
        self.counts, self.has_bytes = self._coverage()

    def _find_units(self, ops: FlopOps) -> Bool:
        has_flops, known = ops.is_counted, self._evaluate() & ~ops.of_other_layout
        units: Bool = known & (has_flops | ~self._named(CALLERS.__contains__))
        if self._handlers.any():
            units &= has_flops | ~self._handing(units)
        while len(batched := self._batched(units)):
            units[batched] = False
        units &= nearest_above(self._parent, nearest(self._parent, units)) < 0
        charges = self._found.charges
        if charges.basis == "device":
            units &= marked(len(units), at(nearest(self._parent, units), charges.cpu_span, -1))
        return units

    def _named(self, chosen: Callable[[str], bool]) -> Bool:
        """Return True for ops that ran and whose name is chosen."""
        return self._is_op & self._ran & self._recording.named(chosen)

    def _batched(self, units: Bool) -> Int64:
        """Find ops that `torch.vmap` runs for a whole batch: the same op in them has the batch, and writes more."""
        above = nearest_above(self._parent, nearest(self._parent, units))
        inner = np.flatnonzero(units & (above >= 0))
        outer = above[inner]
        named, name, written = self._recording.named, self._recording.spans.name, self._written
        same = name[inner] == name[outer]
        for single, batched in _OF_A_BATCH.items():
            same |= named(single.__eq__)[outer] & named(batched.__eq__)[inner]
        found: Int64 = outer[same & (written[inner] > written[outer])].astype(np.int64)
        return found

    def _handing(self, chosen: Bool) -> Bool:
        """Return True for ops around a handler that a chosen op lies in."""
        return ancestors_of(self._parent, self._handlers & ancestors_of(self._parent, chosen))

    def _evaluate(self) -> Bool:
        """Work out the bytes of all ops with a rule, each different call once; True for those that are known."""
        names, spans = self._recording.names, self._recording.spans
        known = np.zeros(len(spans), dtype=np.bool_)
        span, number = self._shapes.arrays()
        chosen = self._named(has_rule)[span]
        span, number = span[chosen], number[chosen]
        name, size = spans.name[span].astype(np.int64), self._element_sizes(span)
        call = (name * (int(number.max(initial=0)) + 1) + number) * _SIZES + size
        _, first, which = np.unique(call, return_index=True, return_inverse=True)
        moved = [
            moved_by(names[name[i]], self._shapes.numbered(int(number[i])), element_size=int(size[i]) or None)
            for i in first.tolist()
        ]
        known[span] = np.array([one is not None for one in moved], dtype=np.bool_)[which]
        values = np.array([one or Moved(0, 0) for one in moved], dtype=np.int64).reshape(-1, 2)
        self._read[span], self._written[span] = values[which].T
        self._evaluate_indexing(known)
        return known

    def _evaluate_indexing(self, known: Bool) -> None:
        """Work out ops that index by tensors, from the ops that they call."""
        indexing = self._named(INDEXING.__contains__)
        telling = np.flatnonzero(self._named(SHOWS_INDICES.__contains__) & (self._parent >= 0))
        telling = telling[indexing[self._parent[telling]]]
        inside: dict[int, list[tuple[str, OpShapes]]] = defaultdict(list)
        for span, caller in zip(telling.tolist(), self._parent[telling].tolist(), strict=True):
            if span in self._shapes:
                inside[caller].append((self._recording.name_of(span), self._shapes[span]))
        for span, calls in inside.items():
            if span not in self._shapes:
                continue
            if (moved := indexed(self._recording.name_of(span), self._shapes[span], calls)) is not None:
                known[span] = True
                self._read[span], self._written[span] = moved

    def _element_sizes(self, span: Int64) -> Int64:
        """Return per op the element size of the tensors in its lists, whose types are not recorded; 0: not known.

        The kernel that an op launched names the type that it works on, where all of its kernels agree; an op that
        gives one new tensor allocates it; states of a fused optimizer are of their parameters' type.
        """
        recording, charges = self._recording, self._found.charges
        size = np.zeros(len(span), dtype=np.int64)
        among = np.flatnonzero(recording.named(_TAKES_LISTS.match)[span])
        by_kernel: dict[int, set[int]] = defaultdict(set)
        if charges.basis == "device" and len(among):
            op = at(nearest(self._parent, marked(len(self._parent), span[among])), charges.cpu_span, -1)
            kernel = recording.spans.name[charges.span[op >= 0]]
            size_of = {name: element_size_of_kernel(recording.names[name]) for name in set(kernel.tolist())}
            for one, name in zip(op[op >= 0].tolist(), kernel.tolist(), strict=True):
                by_kernel[one].add(size_of[name] or 0)
        for place, one in zip(among.tolist(), span[among].tolist(), strict=True):
            sizes = by_kernel[one] - {0} or {_size_by_allocation(recording, one, self._shapes[one])}
            size[place] = sizes.pop() if len(sizes) == 1 else 0
            if not size[place] and recording.name_of(one).startswith("aten::_fused_"):
                size[place] = self._found.parameter_element_bytes
        return size

    def _leave_out_the_host(self, is_unit: Bool) -> None:
        """Leave out the host's side of copies: they use the memory of the device on one side only."""
        charges, spans = self._found.charges, self._recording.spans
        unit = at(nearest(self._parent, is_unit), charges.cpu_span, -1)
        is_copy = (unit >= 0) & (spans.category[charges.span] == Category.MEMCPY)
        for pattern, moved in ((_FROM_HOST, self._read), (_TO_HOST, self._written)):
            moved[unit[is_copy & self._recording.named(pattern.search)[charges.span]]] = 0

    def _coverage(self) -> tuple[Bool, Bool]:
        """Return per charge whether it counts, and whether its bytes are known."""
        charges = self._found.charges
        counts: Bool = at(self._ran, charges.cpu_span, False) & (charges.work != classes.COMMUNICATION)
        known: Bool = at(self.unit_of, charges.cpu_span, -1) >= 0
        if charges.basis == "cpu":
            known |= self._moves_nothing()[charges.cpu_span]
        return counts, known

    def _moves_nothing(self) -> Bool:
        """Find ops whose self time on a CPU is no work on memory: views, autograd nodes, ops that only call others.

        Not the call of a compiled graph, whose generated kernels are no events, nor an unknown op that calls known
        ones: it may do work beside.
        """
        recording, parent = self._recording, self._parent
        is_node = recording.named(lambda name: role_of(name) in (Role.NODE, Role.ACCUMULATE))
        in_node = is_node[parent] & (parent >= 0) & recording.named(_NODE.fullmatch)  # `MulBackward0` in its function
        result = recording.named(lambda name: moves_nothing(name) or role_of(name) != Role.PLAIN)
        result |= self._is_mark | in_node
        result |= recording.named(calls_known_ops) & ancestors_of(parent, self._is_unit)
        if self._handlers.any():
            handing = self._handing(self._is_unit)
            result |= handing & self._named(has_rule)
            in_view = result[parent] & (parent >= 0)
            result |= self._handlers & (in_view | ancestors_of(parent, self._is_unit))
        return result

    def unknown(self, steps: int) -> tuple[UncountedRow, ...]:
        """Return ops (or kernels that no op launched) that took time and whose bytes are unknown, the longest first."""
        found, charges, spans = self._found, self._found.charges, self._recording.spans
        missing = np.flatnonzero(self.counts & ~self.has_bytes)
        op = nearest(self._parent, self._is_op & ~self._is_mark)[charges.cpu_span[missing]]
        name = spans.name[np.where(op >= 0, op, charges.span[missing])]
        calls = [
            UnknownCall(
                self._recording.names[text],
                classes.CLASSES[int(charges.work[one])],
                int(charges.place[one]),
                int(charges.time_ns[one]),
            )
            for one, text in zip(missing.tolist(), name.tolist(), strict=True)
        ]
        return unknown_rows(found, calls, steps)


_TAKES_LISTS = re.compile(r"aten::(cat$|_foreach_|_fused_|_amp_foreach_)")
_OPAQUE = re.compile(r"CatArrayBatchedCopy\w*<[^<]*OpaqueType<(\d+)u?>")
_CAT = re.compile(r"CatArrayBatchedCopy\w*<(?P<type>[\w:]+(<\w+>)?),")
_FUNCTOR = re.compile(r"multi_tensor_apply_kernel<.*?\b\w*Functor\w*<(?P<type>[\w:]+(<\w+>)?)\b")
_ROUNDED_TO = 512  # bytes, by the allocator of a device
_CPU = 0


def element_size_of_kernel(name: str) -> int | None:
    """Return the element size by the name of a kernel over lists; None where the name has no type."""
    if (opaque := _OPAQUE.search(name)) is not None:
        return int(opaque[1])
    known = _FUNCTOR.search(name) or _CAT.search(name)
    return None if known is None else SIZE_OF_TYPE.get(known["type"])


def _size_by_allocation(recording: Recording, span: int, inputs: OpShapes) -> int:
    """Return the element size of a `cat` that allocated its output, and nothing else; 0 for others."""
    joined = recording.name_of(span) == "aten::cat" and inputs.types[:1] == ("TensorList",)
    sizes_of_list = inputs.dims[0] if joined and inputs.dims else []
    if not all(isinstance(size, list) for size in sizes_of_list):  # a trace may say anything
        return 0
    elements = sum(map(prod, sizes_of_list))
    memory, spans = recording.memory, recording.spans
    first, last = np.searchsorted(memory.time_ns, [spans.start_ns[span], spans.end_ns[span]])
    here = np.flatnonzero(memory.lane[first:last] == spans.lane[span]) + first
    if len(here) != 1 or elements < 1:
        return 0
    given = int(memory.size_bytes[here[0]])
    slack = 0 if memory.device_type[here[0]] == _CPU else _ROUNDED_TO - 1
    fitting = [size for size in (1, 2, 4, 8, 16) if given - slack <= elements * size <= given]
    return fitting[0] if len(fitting) == 1 else 0
