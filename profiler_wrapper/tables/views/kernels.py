"""Kernels, copies and sets, one row per launch configuration and class."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.classes import main_classes, tensor_core_kernels
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.model import KernelRow
from profiler_wrapper.tables.ops import find_ops
from profiler_wrapper.tables.statistics import largest_names
from profiler_wrapper.trace.arrays import at, sum_by_key
from profiler_wrapper.trace.recording import Bool, Category, Configurations, Float64, Int8, Int64

# --- What the launches of kernels tell: which are equal, and how full they make a device ---

_THREADS_OF_A_WARP = 32


def configuration_groups(details: Configurations) -> Int64:
    """Number configurations: equal numbers where grid, block, registers and shared memory are equal.

    The last one, at index -1, is for "not known": 0.
    """
    if not len(details):
        return np.zeros(1, dtype=np.int64)
    columns = [details.grid, details.block, details.registers[:, None], details.shared_memory_bytes[:, None]]
    _, number = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    return np.append(number.reshape(-1) + 1, 0).astype(np.int64)


def occupancy_of(details: Configurations) -> Float64:
    """Return estimated achieved occupancy per configuration, 0 to 1; NaN where it is not known, or impossible.

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


def kernel_rows(placed: Placed) -> tuple[KernelRow, ...]:
    """Return the kernels of an attributed recording, the most expensive first.

    A row is a name with a grid, a block, registers and shared memory, and one class: what several kinds of work
    launch (copies made for attention, and others) has a row for each, so that rows by class add up to `classes`.
    Copies and sets are rows by name. Times and counts add up to those of all device events exactly: past 1,000
    rows the rest are one last row, `(others)`, under the class of most of its time. Without device events there
    are none.
    """
    charges, recording = placed.charges, placed.recording
    if charges.basis != "device" or not len(charges):
        return ()
    is_kernel: Bool = recording.spans.category[charges.span] == Category.KERNEL
    configuration = recording.details.configuration_of(charges.span)
    details = recording.details.configurations
    first, key = _keys(placed, np.where(is_kernel, configuration_groups(details)[configuration], 0), is_kernel)
    count, has_others = min(len(first), _MOST_ROWS), len(first) > _MOST_ROWS
    key = np.minimum(key, count - 1)
    by_key = np.argsort(key, kind="stable")
    begins = np.searchsorted(key[by_key], np.arange(count))

    def per_key(values: Int64 | Int8, *reduce: np.ufunc) -> list[list[int]]:
        return [one.reduceat(values[by_key], begins).tolist() for one in reduce]

    time_ns, shortest, longest = per_key(charges.time_ns, np.add, np.minimum, np.maximum)
    least_cores, most_cores = per_key(tensor_core_kernels(recording, charges.span), np.minimum, np.maximum)
    copied_bytes = np.where(is_kernel, -1, at(details.copied_bytes, configuration, -1))  # -1: it does not tell
    least_copied, copied = per_key(copied_bytes, np.minimum, np.add)
    of_kernel = np.where(is_kernel, configuration, -1)
    occupancy, blocks = (
        _means(key, at(values, of_kernel, np.nan), charges.time_ns, count)
        for values in (occupancy_of(details), details.blocks_per_sm)
    )
    work = main_classes(count, (key, charges.work, charges.time_ns), (key, charges.work, 1))
    counts = np.bincount(key).tolist()
    op_of = find_ops(recording, placed.nesting.parent, placed.tree)
    op = at(recording.spans.name, at(op_of.span, at(op_of.op_of, charges.cpu_span, -1), -1), -1)
    ops = largest_names(recording.names, key, op, charges.time_ns, _MOST)
    names = [one.name for one in placed.tree.layers]
    layer = placed.attribution.layer_of_place[charges.place]
    layers = largest_names(names, key, layer, charges.time_ns, len(names))
    rows = []
    for i, event in enumerate(first[:count].tolist()):
        is_rest = has_others and i == count - 1
        launch = -1 if is_rest else int(of_kernel[event])
        rows.append(
            KernelRow(
                name=OTHERS if is_rest else recording.name_of(int(charges.span[event])),
                class_name=classes.CLASSES[work[i]],
                count=counts[i],
                time_ns=time_ns[i],
                min_ns=shortest[i],
                max_ns=longest[i],
                grid=_sizes(details.grid, launch),
                block=_sizes(details.block, launch),
                registers_per_thread=_at(details.registers, launch),
                shared_memory_bytes=_at(details.shared_memory_bytes, launch),
                blocks_per_sm=None if is_rest else blocks[i],
                occupancy=None if is_rest else occupancy[i],
                tensor_cores=bool(least_cores[i]) if least_cores[i] == most_cores[i] >= 0 else None,
                ops=ops.get(i, ()),
                layers=layers.get(i, ())[:_MOST],
                layer_count=len(layers.get(i, ())),
                copied_bytes=copied[i] if least_copied[i] >= 0 else None,
            )
        )
    return tuple(rows)


def _keys(placed: Placed, launch: Int64, is_kernel: Bool) -> tuple[Int64, Int64]:
    """Group events by name, launch and class: each key's first event, each event's key; key 0 is the most expensive."""
    charges, recording = placed.charges, placed.recording
    columns = (recording.spans.name[charges.span], is_kernel, launch, charges.work)
    widths = (len(recording.names), 2, int(launch.max()) + 1, len(classes.CLASSES))
    _, first, key = np.unique(np.ravel_multi_index(columns, widths), return_index=True, return_inverse=True)
    order = np.lexsort((first, -sum_by_key(key, charges.time_ns, len(first))))
    return first[order], np.argsort(order)[key]


def _means(key: Int64, values: Float64, time_ns: Int64, count: int) -> list[float | None]:
    """Return per key the mean by time of the values that are not NaN."""
    known = ~np.isnan(values)
    weight = np.maximum(time_ns[known], 1).astype(np.float64)
    total = np.bincount(key[known], weight, minlength=count)
    summed = np.bincount(key[known], weight * values[known], minlength=count)
    return [float(s / t) if t else None for s, t in zip(summed.tolist(), total.tolist(), strict=True)]


def _sizes(sizes: Int64, configuration: int) -> tuple[int, ...] | None:
    if configuration < 0 or sizes[configuration, 0] < 0:
        return None
    return tuple(sizes[configuration].tolist())


def _at(values: Int64, configuration: int) -> int | None:
    return int(values[configuration]) if configuration >= 0 and values[configuration] >= 0 else None
