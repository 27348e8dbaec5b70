"""Recordings written by hand, with the shapes of their ops: for FLOPs, bytes and the roof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.tables.work.flops import flops_of_recording
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.tables.work.roofline import StepWork, work_of_count
from profiler_wrapper.trace.recording import OpShapes, Shapes
from recordings import Trace, analyse

# A product of two 8 x 8 matrices is 1024 FLOPs and, of 4 bytes a number, 768 bytes: 100 ns and 50 ns here.
PEAKS = Peaks(
    device="",
    flops_per_s={"float32": 1.024e10, "tfloat32": 4.096e10, "bfloat16": 2.048e10, "int8": 4.096e10},
    bandwidth_bytes_per_s=1.536e10,
    source="by hand",
)


def matrices(*types: str, size: int = 8) -> OpShapes:
    """Of square matrices, one of each type."""
    return OpShapes(dims=([size, size],) * len(types), types=types, concrete=("",) * len(types))


def product(dtype: str = "float", *, size: int = 8) -> OpShapes:
    """What `aten::mm` is called with: 2 * size^3 FLOPs."""
    return matrices(dtype, dtype, size=size)


def addition(size: int = 8) -> OpShapes:
    """What `aten::add` is called with: it reads two and writes one."""
    dims = [size, size]
    return OpShapes(dims=(dims, dims, []), types=("float", "float", "Scalar"), concrete=("", "", "1"))


def shapes_of(trace: Trace, by_name: Mapping[str, OpShapes]) -> Shapes:
    """Shapes by the name of an op; an op with none of them here was recorded without."""
    recording = trace.recording()
    distinct = list(by_name)
    numbers = [distinct.index(name) if name in distinct else -1 for name in recording.names]
    return Shapes(np.array(numbers, np.int32)[recording.spans.name], tuple(by_name.values()))


def analysed(
    trace: Trace,
    by_name: Mapping[str, OpShapes],
    *,
    peaks: Peaks | None = PEAKS,
    run: Mapping[str, Any] | None = None,
) -> Analysis:
    """The analysis of a trace, with these peaks; None: with those that the run or a table tells."""
    return analyse(trace.recording(), shapes=shapes_of(trace, by_name), peaks=peaks, run=run)


def work_of(found: Placed) -> StepWork:
    """The work of a step of a recording that has shapes."""
    count = flops_of_recording(found)
    assert not isinstance(count, str), count
    return work_of_count(count)
