"""What the launches of kernels tell: which are alike, and how full they make a device."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.recording.recording import Configurations, Float64, Int64

_THREADS_OF_A_WARP = 32


def launches_alike(details: Configurations) -> Int64:
    """Per configuration a number, equal where grid, block, registers and shared memory are.

    The last one, at index -1, is for "not told": 0.
    """
    if not len(details):
        return np.zeros(1, dtype=np.int64)
    columns = [details.grid, details.block, details.registers[:, None], details.shared_memory_bytes[:, None]]
    _, number = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    return np.append(number.reshape(-1) + 1, 0).astype(np.int64)


def occupancy_of(details: Configurations) -> Float64:
    """Estimated achieved occupancy per configuration, 0 to 1; NaN where it is not told, or cannot be.

    Kineto tells 0 for kernels with more shared memory than a launch has by default. A kernel with a warp or more
    for every multiprocessor occupies 1/64 of it at least, which no rounding to whole percents makes 0.
    """
    threads = details.block.prod(axis=1)
    warps_per_sm = details.blocks_per_sm * np.where(details.block[:, 0] > 0, threads, 0) / _THREADS_OF_A_WARP
    impossible = (details.occupancy == 0) & (warps_per_sm >= 1)
    occupancy: Float64 = np.where(impossible, np.nan, details.occupancy)
    return occupancy
