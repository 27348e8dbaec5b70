"""Ops, one row per op and phase.

A device event belongs to the innermost op around its launch. CPU time is that of `charges.cpu_time`: what
a layer's mark inside an op takes, the op takes. What lies in no op is the row `NO_OP`, so that the rows add up:
`self_time_ns` to the total time, `self_cpu_time_ns` to all CPU time, on a CPU-only trace both to the same.

A row has one class, that of most of its time, so sums by class are only near those of `Analysis.classes`:
`aten::copy_` is a copy, a cast within an attention and an optimizer's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.calls import OpSpans, called_by_same_key, find_ops, with_called
from profiler_wrapper.analysis.charges import optimizer_work
from profiler_wrapper.analysis.classes import tensor_core_eligible, tensor_core_kernels
from profiler_wrapper.analysis.memory.use import begin_of
from profiler_wrapper.analysis.model import CATEGORIES, PHASES, AllocationRow, OperatorRow, OpMemoryRow
from profiler_wrapper.analysis.statistics import largest_by_key, sum_by_key
from profiler_wrapper.analysis.views.sources import PythonSources
from profiler_wrapper.trace.recording import Int32, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.memory.blocks import OwnedMemory


# --------------------------------------------------------------------------------------------------
# The largest allocations, and what each op allocates.

_MOST_ALLOCATIONS = 500
_NEVER = np.iinfo(np.int64).max


def allocation_rows(found: Attributed, owned: OwnedMemory | None) -> tuple[AllocationRow, ...]:
    """The 500 largest allocations of the recording, the largest first, of equal ones the earliest."""
    if owned is None:
        return ()
    blocks, memory = owned.blocks, owned.memory
    begin_ns = begin_of(found.recording)
    made = np.flatnonzero(~blocks.before)  # in order of time
    largest = made[np.argsort(-blocks.size_bytes[made], kind="stable")[:_MOST_ALLOCATIONS]]
    freed_ns = np.append(memory.time_ns, -1)[blocks.freed[largest]]
    return tuple(
        AllocationRow(
            size_bytes=int(blocks.size_bytes[block]),
            allocated_ns=int(memory.time_ns[blocks.made[block]]) - begin_ns,
            released_ns=released - begin_ns if blocks.freed[block] < blocks.events else None,
            layer=owned.layers[owned.layer[block]],
            op=blocks.ops[blocks.op[block]],
            phase=owned.phases[blocks.place[block]],
            category=CATEGORIES[owned.category[block]],
        )
        for block, released in zip(largest.tolist(), freed_ns.tolist(), strict=True)
    )


def op_memory_rows(found: Attributed, owned: OwnedMemory | None) -> tuple[OpMemoryRow, ...]:
    """What each op allocated, most bytes first; the sums over them are those of all allocation events."""
    if owned is None:
        return ()
    blocks = owned.blocks
    made = np.flatnonzero(~blocks.before)
    op, sizes = blocks.op[made], blocks.size_bytes[made]
    freed_ns = np.append(owned.memory.time_ns, _NEVER)[blocks.freed[made]]
    ends_ns = np.append(found.recording.spans.end_ns, _NEVER)  # the last for what no op made
    kept = freed_ns > ends_ns[blocks.maker[made]]
    count = np.bincount(op, minlength=len(blocks.ops))
    allocated, kept_bytes, largest = (np.zeros(len(blocks.ops), dtype=np.int64) for _ in range(3))
    np.add.at(allocated, op, sizes)
    np.add.at(kept_bytes, op[kept], sizes[kept])
    np.maximum.at(largest, op, sizes)
    rows = [
        OpMemoryRow(
            op=blocks.ops[i],
            allocations=int(count[i]),
            allocated_bytes=int(allocated[i]),
            kept_bytes=int(kept_bytes[i]) if blocks.ops[i] else None,
            largest_bytes=int(largest[i]),
        )
        for i in np.flatnonzero(count).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allocated_bytes, row.op)))


NO_OP = "(no op)"
_MOST = 5  # layers and sources of a row


def operator_rows(found: Attributed, shapes_of_op: Mapping[str, tuple[str, ...]]) -> tuple[OperatorRow, ...]:
    """The ops of an attributed recording, the most expensive first; `shapes_of_op`: the most frequent of each."""
    return _Table(found).rows(shapes_of_op)


class _Table:
    """Sums per key. A key is a name and a phase; behind those of the ops there is one a phase for `NO_OP`."""

    def __init__(self, found: Attributed) -> None:
        self.found = found
        recording, attribution = found.recording, found.attribution
        # A large trace has millions of ops: numbers of 32 bits, and no column longer than it is needed.
        self.ops = find_ops(recording, found.nesting.parent, found.tree)
        phase_of_place = attribution.phase_of_place.astype(np.int32)
        phase = phase_of_place[attribution.place_of[self.ops.span]]
        self.keys, self.key_of_op = _numbered(recording.spans.name[self.ops.span] * np.int64(len(PHASES)) + phase)
        self.count = len(self.keys) + len(PHASES)
        self.outermost = ~called_by_same_key(self.ops, self.key_of_op)
        charges, cpu = found.charges, found.cpu
        self.op_of_charge = _op_of(self.ops, charges.cpu_span)
        self.key_of_charge = self._keys(self.op_of_charge, phase_of_place[charges.place])
        op_of_time = self.ops.op_of[cpu.span]
        key_of_time = self._keys(op_of_time, phase_of_place[attribution.place_of[cpu.span]])
        self.self_cpu_ns = sum_by_key(key_of_time, cpu.time_ns, self.count)
        self.op_cpu_ns = self._with_called(op_of_time, cpu.time_ns)
        del op_of_time, key_of_time
        self.cpu_ns = self._inclusive(self.op_cpu_ns, self.self_cpu_ns)
        self.on_device = charges.basis == "device"
        if self.on_device:
            self.self_ns = sum_by_key(self.key_of_charge, charges.time_ns, self.count)
            self.op_ns = self._with_called(self.op_of_charge, charges.time_ns)
            self.ns = self._inclusive(self.op_ns, self.self_ns)
        else:
            self.self_ns, self.op_ns, self.ns = self.self_cpu_ns, self.op_cpu_ns, self.cpu_ns

    def rows(self, shapes_of_op: Mapping[str, tuple[str, ...]]) -> tuple[OperatorRow, ...]:
        names = self.found.recording.names
        calls = np.bincount(self.key_of_op, minlength=self.count)
        launched = np.bincount(self.key_of_charge, minlength=self.count) if self.on_device else np.zeros_like(calls)
        work, multiplied = self._class_of_key(), self._tensor_core_ns()
        layers, sources = self._layers(), self._sources()
        named = [(names[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in self.keys.tolist()]
        named += [(NO_OP, phase) for phase in PHASES]
        rows = []
        for key in np.flatnonzero((calls > 0) | (self.self_ns > 0) | (self.self_cpu_ns > 0) | (launched > 0)).tolist():
            name, phase = named[key]
            rows.append(
                OperatorRow(
                    op=name,
                    class_name=classes.CLASSES[work[key]],
                    phase=phase,
                    calls=int(calls[key]),
                    self_time_ns=int(self.self_ns[key]),
                    time_ns=int(self.ns[key]),
                    self_cpu_time_ns=int(self.self_cpu_ns[key]),
                    cpu_time_ns=int(self.cpu_ns[key]),
                    device_events=int(launched[key]),
                    tensor_core_eligible=tensor_core_eligible(name),
                    tensor_core_time_ns=multiplied.get(key),
                    layers=layers.get(key, ()),
                    shapes=shapes_of_op.get(name, ()),
                    sources=sources.get(key, ()),
                )
            )
        rows.sort(key=lambda row: (-row.self_time_ns, -row.self_cpu_time_ns, -row.time_ns, row.op, row.phase))
        return tuple(rows)

    def _keys(self, op: Int32, phase: Int32) -> Int32:
        """Per entry the key of its op; of what has none, that of `NO_OP` in its phase."""
        no_op: Int32 = phase + np.int32(len(self.keys))
        return np.where(op >= 0, self.key_of_op[op], no_op) if len(self.ops) else no_op

    def _with_called(self, op: Int32, values: Int64) -> Int64:
        """Per op the sum over it and all that it calls; `op`: of each value the op, -1 for none."""
        own = op >= 0
        return with_called(self.ops, sum_by_key(op[own], values[own], len(self.ops)))

    def _inclusive(self, per_op: Int64, own: Int64) -> Int64:
        """Sums of whole ops; an op that is called by one of the same key is part of that one."""
        sums = sum_by_key(self.key_of_op[self.outermost], per_op[self.outermost], self.count)
        sums[len(self.keys) :] = own[len(self.keys) :]
        return sums

    def _class_of_key(self) -> list[int]:
        """The class of most of a key's own time; without any, that of most of its calls.

        What has no op has none, and views and allocations compute nothing, whatever they are made for.
        """
        found, charges = self.found, self.found.charges
        work, _ = found.work_of.ops(self.ops.span)
        work = optimizer_work(found.attribution, found.attribution.place_of[self.ops.span], work)
        table = np.zeros((2, self.count, len(classes.CLASSES)), dtype=np.int64)
        np.add.at(table[0], (self.key_of_op, work), 1)
        np.add.at(table[1], (self.key_of_charge, charges.work), charges.time_ns)
        timed = table[1].any(axis=1)
        best = np.where(timed, table[1].argmax(axis=1), table[0].argmax(axis=1))
        names = [self.found.recording.names[key // len(PHASES)] for key in self.keys.tolist()]
        computes_nothing = [classes.class_of_op(name) == "other" for name in names]
        best[[*computes_nothing, *[True] * len(PHASES)]] = classes.CLASSES.index("other")
        found_classes: list[int] = best.tolist()
        return found_classes

    def _tensor_core_ns(self) -> dict[int, int]:
        """Of the keys whose kernels tell: the time in those that use tensor cores."""
        if not self.on_device:
            return {}
        charges = self.found.charges
        uses_cores = tensor_core_kernels(self.found.recording, charges.span)  # 1, 0, -1 for "its name does not tell"
        known, uses = uses_cores >= 0, uses_cores == 1
        spent = sum_by_key(self.key_of_charge[uses], charges.time_ns[uses], self.count)
        return {key: int(spent[key]) for key in np.unique(self.key_of_charge[known]).tolist()}

    def _layers(self) -> dict[int, tuple[str, ...]]:
        attribution = self.found.attribution
        layer = attribution.layer_of_place[attribution.place_of[self.ops.span]]
        names = [item.name for item in self.found.tree.layers]
        return {key: tuple(names[i] for i in chosen) for key, chosen in self._largest(layer).items()}

    def _sources(self) -> dict[int, tuple[str, ...]]:
        sources = PythonSources(self.found.recording, self.found.attribution)
        if not sources:
            return {}
        lines = sources.of(self.ops.span)
        user, library = self._largest(lines.user), self._largest(lines.library)
        return {key: sources.most_expensive(user.get(key, ()), library.get(key, ())) for key in {*user, *library}}

    def _largest(self, value: Int32 | Int64) -> dict[int, tuple[int, ...]]:
        """Per key the values (of ops, -1 for none) with most of its time; without device time, of CPU time."""
        weight = np.where(self.ns[self.key_of_op] > 0, self.op_ns, self.op_cpu_ns)
        return largest_by_key(self.key_of_op, np.where(self.outermost, value, -1), weight, _MOST)


def _numbered(keys: Int64) -> tuple[Int64, Int32]:
    """The distinct keys, and per entry which of them it has."""
    distinct = np.flatnonzero(np.bincount(keys))
    return distinct, np.searchsorted(distinct, keys).astype(np.int32)


def _op_of(ops: OpSpans, cpu_span: Int64) -> Int32:
    """Per charge the innermost op around its launch; -1 for none."""
    return np.where(cpu_span >= 0, ops.op_of[np.maximum(cpu_span, 0)], np.int32(-1))
