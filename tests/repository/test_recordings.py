"""The builder of recordings tells the same by hand as through a file and the reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from profiler_wrapper.trace.reader import read
from profiler_wrapper.trace.recording import Category
from recordings import Trace


def test_a_built_recording_equals_the_one_read_from_its_file(tmp_path: Path) -> None:
    trace = (
        Trace()
        .mark("layers.0", 0, 900)
        .op("aten::mm", 10, 20, sequence=3, forward_thread=0, external_id=5)
        .kernel("gemm", 30, 1071, launched=12)
        .kernel("Memcpy DtoH", 1080, 1090, launched=21, category=Category.MEMCPY, device=1, stream=3)
        .kernel("replayed", 1100, 1200, launched=22, graph=True)
        .annotation("ProfilerStep#3", 0, 1000)
        .module("Linear_0", 40, 50)
        .node("MmBackward0", 2000, 2100, number=3)
        .arrow(10, 2000)
        .memory(15, 512, address=64)
        .memory(2050, -512, address=64)
    )
    built, found = trace.recording(), read(trace.write(tmp_path / "trace.json"))
    assert [built.name_of(i) for i in range(len(built.spans))] == [found.name_of(i) for i in range(len(found.spans))]
    assert built.lanes == found.lanes
    for part in ("spans", "memory", "flows"):
        for column in getattr(built, part).__slots__:
            expected, read_back = getattr(getattr(built, part), column), getattr(getattr(found, part), column)
            if column != "name":
                assert np.array_equal(expected, read_back), f"{part}.{column}"
