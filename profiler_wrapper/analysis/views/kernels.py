"""Kernels, copies and sets, one row per launch configuration and class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.calls import find_ops
from profiler_wrapper.analysis.classes import tensor_core_kernels
from profiler_wrapper.analysis.model import KernelRow
from profiler_wrapper.analysis.statistics import largest_by_key, sum_by_key
from profiler_wrapper.trace.recording import Bool, Category, Configurations, Float64, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


# --------------------------------------------------------------------------------------------------
# What the launches of kernels tell: which are equal, and how full they make a device.

_THREADS_OF_A_WARP = 32


def configuration_groups(details: Configurations) -> Int64:
    """Per configuration a number, equal where grid, block, registers and shared memory are.

    The last one, at index -1, is for "not known": 0.
    """
    if not len(details):
        return np.zeros(1, dtype=np.int64)
    columns = [details.grid, details.block, details.registers[:, None], details.shared_memory_bytes[:, None]]
    _, number = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    return np.append(number.reshape(-1) + 1, 0).astype(np.int64)


def occupancy_of(details: Configurations) -> Float64:
    """Estimated achieved occupancy per configuration, 0 to 1; NaN where it is not known, or impossible.

    Kineto tells 0 for kernels with more shared memory than a launch has by default. A kernel with a warp or more
    for every multiprocessor occupies 1/64 of it at least, which no rounding to whole percents makes 0.
    """
    threads = details.block.prod(axis=1)
    warps_per_sm = details.blocks_per_sm * np.where(details.block[:, 0] > 0, threads, 0) / _THREADS_OF_A_WARP
    impossible = (details.occupancy == 0) & (warps_per_sm >= 1)
    occupancy: Float64 = np.where(impossible, np.nan, details.occupancy)
    return occupancy


OTHERS = "(others)"
_MOST_ROWS = 1000  # the last of them for all that do not fit
_MOST = 3  # ops and layers of a row


def kernel_rows(found: Attributed) -> tuple[KernelRow, ...]:
    """The kernels of an attributed recording, the most expensive first.

    A row is a name with a grid, a block, registers and shared memory, and one class: what several kinds of work
    launch (copies made for attention, and others) has a row for each, so that rows by class add up to `classes`.
    Copies and sets are rows by name. Times and counts add up to those of all device events exactly: past 1,000
    rows the rest are one last row, `(others)`, under the class of most of its time. Without device events there
    are none.
    """
    if found.charges.basis != "device" or not len(found.charges):
        return ()
    return _Table(found).rows()


class _Table:
    """Sums per key: a name, a launch configuration and a class. Keys are in order of time, the most expensive first."""

    def __init__(self, found: Attributed) -> None:
        self.found = found
        charges, recording = found.charges, found.recording
        self.is_kernel: Bool = recording.spans.category[charges.span] == Category.KERNEL
        self.configuration = recording.details.configuration_of(charges.span)
        launch = configuration_groups(recording.details.configurations)[self.configuration]
        launch = np.where(self.is_kernel, launch, 0)
        name = recording.spans.name[charges.span].astype(np.int64)
        keys = (name * 2 + self.is_kernel) * (launch.max(initial=0) + 1) + launch
        keys = keys * len(classes.CLASSES) + charges.work
        _, first, key = np.unique(keys, return_index=True, return_inverse=True)
        time_ns = sum_by_key(key, charges.time_ns, len(first))
        order = np.lexsort((first, -time_ns))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        self.key, self.first, self.time_ns = rank[key], first[order], time_ns[order]
        self.count = len(order)
        if self.count > _MOST_ROWS:
            self.count = _MOST_ROWS
            self.key = np.minimum(self.key, _MOST_ROWS - 1)
            self.time_ns = sum_by_key(self.key, charges.time_ns, self.count)
            self.has_others = True
        else:
            self.has_others = False

    def rows(self) -> tuple[KernelRow, ...]:
        found, charges = self.found, self.found.charges
        recording = found.recording
        details = recording.details.configurations
        counts = np.bincount(self.key, minlength=self.count)
        shortest = np.full(self.count, np.iinfo(np.int64).max)
        np.minimum.at(shortest, self.key, charges.time_ns)
        longest = np.zeros(self.count, dtype=np.int64)
        np.maximum.at(longest, self.key, charges.time_ns)
        work = self._classes()
        cores = self._tensor_cores()
        occupancy, blocks = self._mean(occupancy_of(details)), self._mean(details.blocks_per_sm)
        copied = self._copied_bytes(details)
        ops, layers = self._ops(), self._layers()
        rows = []
        for i in range(self.count):
            is_rest = self.has_others and i == self.count - 1
            event = int(self.first[i])
            launch = int(self.configuration[event]) if self.is_kernel[event] and not is_rest else -1
            rows.append(
                KernelRow(
                    name=OTHERS if is_rest else recording.name_of(int(charges.span[event])),
                    class_name=classes.CLASSES[work[i]],
                    count=int(counts[i]),
                    time_ns=int(self.time_ns[i]),
                    min_ns=int(shortest[i]),
                    max_ns=int(longest[i]),
                    grid=_sizes(details.grid, launch),
                    block=_sizes(details.block, launch),
                    registers_per_thread=_at(details.registers, launch),
                    shared_memory_bytes=_at(details.shared_memory_bytes, launch),
                    blocks_per_sm=None if is_rest else blocks[i],
                    occupancy=None if is_rest else occupancy[i],
                    tensor_cores=cores[i],
                    ops=ops.get(i, ()),
                    layers=layers.get(i, ()),
                    copied_bytes=copied[i],
                )
            )
        return tuple(rows)

    def _classes(self) -> list[int]:
        """Per key the class with most of its time, or of its events where none took time."""
        spent = np.zeros((2, self.count, len(classes.CLASSES)), dtype=np.int64)
        np.add.at(spent[0], (self.key, self.found.charges.work), self.found.charges.time_ns)
        np.add.at(spent[1], (self.key, self.found.charges.work), 1)
        timed = spent[0].any(axis=1)
        best: list[int] = np.where(timed, spent[0].argmax(axis=1), spent[1].argmax(axis=1)).tolist()
        return best

    def _tensor_cores(self) -> list[bool | None]:
        """Per key what its kernels do, where all of them do the same."""
        uses = tensor_core_kernels(self.found.recording, self.found.charges.span)
        least, most = np.full(self.count, 1), np.full(self.count, -1)
        np.minimum.at(least, self.key, uses)
        np.maximum.at(most, self.key, uses)
        return [
            bool(low) if low == high >= 0 else None for low, high in zip(least.tolist(), most.tolist(), strict=True)
        ]

    def _mean(self, values: Float64) -> list[float | None]:
        """Per key the mean by time of what the configurations of its kernels tell."""
        if not len(values):
            return [None] * self.count
        value = np.where(self.configuration >= 0, values[self.configuration], np.nan)
        known = ~np.isnan(value) & self.is_kernel
        weight = np.maximum(self.found.charges.time_ns[known], 1).astype(np.float64)
        total = np.bincount(self.key[known], weight, minlength=self.count)
        summed = np.bincount(self.key[known], weight * value[known], minlength=self.count)
        return [float(s / t) if t else None for s, t in zip(summed.tolist(), total.tolist(), strict=True)]

    def _copied_bytes(self, details: Configurations) -> list[int | None]:
        """Per key of copies and sets: bytes in all, where every one of them tells."""
        moves = ~self.is_kernel
        if not moves.any():
            return [None] * self.count
        size = np.full(len(self.key), -1, dtype=np.int64)
        if len(details):
            size = np.where(self.configuration >= 0, details.copied_bytes[self.configuration], size)
        total = sum_by_key(self.key[moves], size[moves], self.count)
        unknown = np.zeros(self.count, dtype=np.bool_)
        unknown[self.key[moves & (size < 0)]] = True
        copies_only = np.ones(self.count, dtype=np.bool_)
        copies_only[self.key[self.is_kernel]] = False
        known = copies_only & ~unknown
        return [int(bytes_) if tells else None for bytes_, tells in zip(total.tolist(), known.tolist(), strict=True)]

    def _ops(self) -> dict[int, tuple[str, ...]]:
        found, recording = self.found, self.found.recording
        ops = find_ops(recording, found.nesting.parent, found.tree)
        launch = found.charges.cpu_span
        op = np.where(launch >= 0, ops.op_of[np.maximum(launch, 0)], -1)
        name = np.where(op >= 0, recording.spans.name[ops.span[np.maximum(op, 0)]] if len(ops) else -1, -1)
        return self._named(recording.names, name)

    def _layers(self) -> dict[int, tuple[str, ...]]:
        names = [layer.name for layer in self.found.tree.layers]
        return self._named(names, self.found.attribution.layer_of_place[self.found.charges.place])

    def _named(self, names: Sequence[str], value: Int64) -> dict[int, tuple[str, ...]]:
        """Per key the names, given by their index, with most of its time."""
        largest = largest_by_key(self.key, value, self.found.charges.time_ns, _MOST)
        return {key: tuple(names[i] for i in chosen) for key, chosen in largest.items()}


def _sizes(sizes: Int64, configuration: int) -> tuple[int, ...] | None:
    if configuration < 0 or sizes[configuration, 0] < 0:
        return None
    return tuple(sizes[configuration].tolist())


def _at(values: Int64, configuration: int) -> int | None:
    return int(values[configuration]) if configuration >= 0 and values[configuration] >= 0 else None
