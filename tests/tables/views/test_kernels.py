"""Rows of kernels by hand, and sums against all device events."""

from __future__ import annotations

from collections import Counter

import pytest

from gpu_traces import attributed_trace, names_of_traces
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.model import KernelRow
from profiler_wrapper.tables.time_rows import class_rows
from profiler_wrapper.tables.views.kernels import OTHERS, kernel_rows
from profiler_wrapper.trace.recording import Category
from recordings import Trace
from shared_traces import needs_traces

SMALL = {"grid": (8, 1, 1), "block": (128, 1, 1), "registers": 32, "shared_memory": 0}


def test_one_row_per_launch_configuration() -> None:
    trace = Trace().mark("layers.0", 0, 50).op("aten::mm", 0, 40).op("aten::add", 60, 90)
    trace.kernel("volta_sgemm_128x64_nn", 100, 150, launched=10).told(**SMALL, blocks_per_sm=0.1, occupancy_percent=10)
    trace.kernel("volta_sgemm_128x64_nn", 150, 180, launched=11).told(**SMALL, blocks_per_sm=0.1, occupancy_percent=30)
    large = SMALL | {"grid": (64, 2, 1)}
    trace.kernel("volta_sgemm_128x64_nn", 200, 300, launched=70).told(**large, blocks_per_sm=1.6, occupancy_percent=50)
    trace.kernel("Memcpy HtoD", 300, 310, launched=71, category=Category.MEMCPY).told(copied_bytes=1000)
    trace.kernel("Memcpy HtoD", 310, 315, launched=72, category=Category.MEMCPY).told(copied_bytes=24)
    rows = kernel_rows(place_events(trace.recording()))
    assert rows == (
        KernelRow(
            name="volta_sgemm_128x64_nn", class_name="elementwise", count=1, time_ns=100, min_ns=100, max_ns=100,
            grid=(64, 2, 1), block=(128, 1, 1), registers_per_thread=32, shared_memory_bytes=0, blocks_per_sm=1.6,
            occupancy=0.5, tensor_cores=False, ops=("aten::add",),
            layer_count=0,
        ),
        KernelRow(
            name="volta_sgemm_128x64_nn", class_name="gemm", count=2, time_ns=80, min_ns=30, max_ns=50,
            grid=(8, 1, 1), block=(128, 1, 1), registers_per_thread=32, shared_memory_bytes=0, blocks_per_sm=0.1,
            occupancy=pytest.approx((50 * 0.1 + 30 * 0.3) / 80), tensor_cores=False, ops=("aten::mm",),
            layers=("layers.0",),
            layer_count=1,
        ),
        KernelRow(
            name="Memcpy HtoD", class_name="copy", count=2, time_ns=15, min_ns=5, max_ns=10, tensor_cores=False,
            ops=("aten::add",), copied_bytes=1024,
            layer_count=0,
        ),
    )  # fmt: skip


def test_a_kernel_that_several_kinds_of_work_launch_has_a_row_for_each() -> None:
    """So that rows by class are what the classes are."""
    trace = Trace().op("aten::mul", 0, 40).op("aten::layer_norm", 60, 90)
    trace.kernel("vectorized_elementwise_kernel", 100, 150, launched=10).told(**SMALL)
    trace.kernel("vectorized_elementwise_kernel", 200, 230, launched=70).told(**SMALL)
    rows = kernel_rows(place_events(trace.recording()))
    assert [(row.class_name, row.time_ns, row.count) for row in rows] == [("elementwise", 50, 1), ("norm", 30, 1)]


def test_what_is_not_told_is_none() -> None:
    trace = Trace().op("aten::mm", 0, 10)
    trace.kernel("_mine", 10, 30, launched=1).told(grid=(3, 1, 1))
    trace.kernel("_mine", 30, 40, launched=2)
    trace.kernel("Memset", 40, 41, launched=3, category=Category.MEMSET).told(copied_bytes=8)
    trace.kernel("Memset", 41, 42, launched=3, category=Category.MEMSET)
    told, untold, copy = kernel_rows(place_events(trace.recording()))
    assert (told.grid, told.block, told.registers_per_thread, told.occupancy) == ((3, 1, 1), None, None, None)
    assert (told.tensor_cores, told.blocks_per_sm) == (None, None)
    assert (untold.grid, untold.time_ns) == (None, 10)
    assert (copy.copied_bytes, copy.count) == (None, 2)  # one of the two does not tell


def test_the_dearest_ops_and_layers_come_first_and_at_most_three() -> None:
    trace = Trace()
    for i in range(5):
        trace.mark(f"layers.{i}", 100 * i, 100 * i + 50).op(f"my::op{i}", 100 * i, 100 * i + 40)
        trace.kernel("_mine", 1000 + 100 * i, 1010 + 100 * i + 10 * i, launched=100 * i + 1)
    (row,) = kernel_rows(place_events(trace.recording()))
    assert row.ops == ("my::op4", "my::op3", "my::op2")
    assert row.layers == ("layers.4", "layers.3", "layers.2")


def test_past_a_thousand_rows_the_rest_is_one() -> None:
    trace = Trace().op("aten::mm", 0, 10)
    for i in range(1200):
        trace.kernel(f"kernel_{i}", 10_000 * i, 10_000 * i + 2000 - i, launched=5)
    rows = kernel_rows(place_events(trace.recording()))
    assert len(rows) == 1000
    assert [row.name for row in rows[:2]] == ["kernel_0", "kernel_1"]
    rest = rows[-1]
    assert (rest.name, rest.count) == (OTHERS, 201)
    assert rest.time_ns == sum(2000 - i for i in range(999, 1200))
    assert (rest.min_ns, rest.max_ns, rest.grid, rest.occupancy) == (801, 1001, None, None)
    assert sum(row.time_ns for row in rows) == sum(2000 - i for i in range(1200))


def test_without_device_events_there_are_none() -> None:
    assert kernel_rows(place_events(Trace().op("aten::mm", 0, 10).recording())) == ()


@needs_traces
@pytest.mark.parametrize("name", names_of_traces(largest=pytest.mark.full))
def test_rows_add_up_to_all_device_events(name: str) -> None:
    found = attributed_trace(name)
    recording = found.recording
    rows = kernel_rows(found)
    device = recording.device_mask
    assert sum(row.time_ns for row in rows) == recording.spans.duration_ns[device].sum()
    assert sum(row.count for row in rows) == device.sum()
    launched = {(r.name, r.class_name, r.grid, r.block, r.registers_per_thread, r.shared_memory_bytes) for r in rows}
    assert len(launched) == len(rows)
    if rows[-1].name != OTHERS:
        by_class: Counter[str] = Counter()
        for row in class_rows(found):
            by_class[row.class_name] += row.time_ns
        assert by_class == Counter({name: sum(r.time_ns for r in rows if r.class_name == name) for name in by_class})
    assert all(row.min_ns * row.count <= row.time_ns <= row.max_ns * row.count for row in rows)
    assert [row.time_ns for row in rows] == sorted((row.time_ns for row in rows), reverse=True)
