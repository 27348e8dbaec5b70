"""Kernels, copies and sets, one row per launch configuration and class."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.classes import main_classes, tensor_core_kernels
from profiler_wrapper.analysis.model import KernelRow
from profiler_wrapper.analysis.ops import find_ops
from profiler_wrapper.analysis.statistics import at, largest_names, sum_by_key
from profiler_wrapper.trace.recording import Bool, Category, Configurations, Float64, Int64

# --- What the launches of kernels tell: which are equal, and how full they make a device ---

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
    return np.where(impossible, np.nan, details.occupancy)


OTHERS = "(others)"
_MOST_ROWS = 1000  # the last of them for all that do not fit
_MOST = 3  # ops and layers of a row


def kernel_rows(attributed: Attributed) -> tuple[KernelRow, ...]:
    """The kernels of an attributed recording, the most expensive first.

    A row is a name with a grid, a block, registers and shared memory, and one class: what several kinds of work
    launch (copies made for attention, and others) has a row for each, so that rows by class add up to `classes`.
    Copies and sets are rows by name. Times and counts add up to those of all device events exactly: past 1,000
    rows the rest are one last row, `(others)`, under the class of most of its time. Without device events there
    are none.
    """
    if attributed.charges.basis != "device" or not len(attributed.charges):
        return ()
    return _Table(attributed).rows()


class _Table:
    """Sums per key: a name, a launch configuration and a class. Keys are in order of time, the most expensive first."""

    def __init__(self, attributed: Attributed) -> None:
        self.attributed = attributed
        charges, recording = attributed.charges, attributed.recording
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
        self.first, self.count = first[order], min(len(order), _MOST_ROWS)
        self.has_others = len(order) > _MOST_ROWS
        self.key = np.minimum(rank[key], self.count - 1)
        self.time_ns = sum_by_key(self.key, charges.time_ns, self.count)

    def rows(self) -> tuple[KernelRow, ...]:
        attributed, charges = self.attributed, self.attributed.charges
        recording = attributed.recording
        details = recording.details.configurations
        counts = np.bincount(self.key, minlength=self.count)
        shortest = np.full(self.count, np.iinfo(np.int64).max)
        np.minimum.at(shortest, self.key, charges.time_ns)
        longest = np.zeros(self.count, dtype=np.int64)
        np.maximum.at(longest, self.key, charges.time_ns)
        work = main_classes(self.count, (self.key, charges.work, charges.time_ns), (self.key, charges.work, 1))
        cores = self._tensor_cores()
        occupancy, blocks = self._mean(occupancy_of(details)), self._mean(details.blocks_per_sm)
        copied = self._copied_bytes(details)
        op_of = find_ops(recording, attributed.nesting.parent, attributed.tree)
        op = at(recording.spans.name, at(op_of.span, at(op_of.op_of, charges.cpu_span, -1), -1), -1)
        ops = largest_names(recording.names, self.key, op, charges.time_ns, _MOST)
        layer = attributed.attribution.layer_of_place[charges.place]
        names = [one.name for one in attributed.tree.layers]
        layers = largest_names(names, self.key, layer, charges.time_ns, len(names))
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
                    layers=layers.get(i, ())[:_MOST],
                    layer_count=len(layers.get(i, ())),
                    copied_bytes=copied[i],
                )
            )
        return tuple(rows)

    def _tensor_cores(self) -> list[bool | None]:
        """Per key what its kernels do, where all of them do the same."""
        uses = tensor_core_kernels(self.attributed.recording, self.attributed.charges.span)
        least, most = np.full(self.count, 1), np.full(self.count, -1)
        np.minimum.at(least, self.key, uses)
        np.maximum.at(most, self.key, uses)
        return [
            bool(low) if low == high >= 0 else None for low, high in zip(least.tolist(), most.tolist(), strict=True)
        ]

    def _mean(self, values: Float64) -> list[float | None]:
        """Per key the mean by time of what the configurations of its kernels tell."""
        value = at(values, self.configuration, np.nan)
        known = ~np.isnan(value) & self.is_kernel
        weight = np.maximum(self.attributed.charges.time_ns[known], 1).astype(np.float64)
        total = np.bincount(self.key[known], weight, minlength=self.count)
        summed = np.bincount(self.key[known], weight * value[known], minlength=self.count)
        return [float(s / t) if t else None for s, t in zip(summed.tolist(), total.tolist(), strict=True)]

    def _copied_bytes(self, details: Configurations) -> list[int | None]:
        """Per key of copies and sets: bytes in all, where every one of them tells."""
        size = np.where(self.is_kernel, -1, at(details.copied_bytes, self.configuration, -1))
        least = np.zeros(self.count, dtype=np.int64)
        np.minimum.at(least, self.key, size)
        total = sum_by_key(self.key, size, self.count)
        return [moved if low == 0 else None for moved, low in zip(total.tolist(), least.tolist(), strict=True)]


def _sizes(sizes: Int64, configuration: int) -> tuple[int, ...] | None:
    if configuration < 0 or sizes[configuration, 0] < 0:
        return None
    return tuple(sizes[configuration].tolist())


def _at(values: Int64, configuration: int) -> int | None:
    return int(values[configuration]) if configuration >= 0 and values[configuration] >= 0 else None
