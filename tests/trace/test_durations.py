"""Durations of device events against the order of their stream: hand-made files."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler_wrapper.result import load
from profiler_wrapper.trace.reader import read
from profiler_wrapper.trace.recording import Category
from recordings import Trace

US = 1000
CUT = "1 device events ran over later ones of their stream: their durations were cut there"
LEFT_OUT = "1 device events with an impossible duration, far beyond the end of all others, were left out"


def five_kernels(long: int, length_us: int, **fields: int) -> Trace:
    """Kernels of 100 us, one every 200 us, launched at once in an annotation of 1 ms; the `long`th claims another."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000 * US)
    for i in range(5):
        begin = (20 + 200 * i) * US
        trace.op("aten::mm", (1 + i) * US, (2 + i) * US)
        length = (length_us if i == long else 100) * US
        trace.kernel("gemm", begin, begin + length, launched=(1 + i) * US, **(fields if i == long else {}))
    return trace


def durations_us(trace: Trace, tmp_path: Path) -> tuple[list[float], tuple[str, ...]]:
    recording = read(trace.write(tmp_path / "trace.json"))
    return (recording.spans.duration_ns[recording.device_mask] / US).tolist(), recording.warnings


@pytest.mark.parametrize("length_us", [251, 2_000, 3_400_000])
@pytest.mark.parametrize("long", [0, 2, 3])
def test_what_runs_over_the_next_start_of_its_stream_is_cut_there(tmp_path: Path, long: int, length_us: int) -> None:
    found, warnings = durations_us(five_kernels(long, length_us), tmp_path)
    assert found == [200 if i == long else 100 for i in range(5)]
    assert warnings == (CUT,)


@pytest.mark.parametrize("length_us", [200, 204, 250])
def test_launches_of_one_stream_may_overlap_a_little(tmp_path: Path, length_us: int) -> None:
    found, warnings = durations_us(five_kernels(2, length_us), tmp_path)
    assert found == [100, 100, length_us, 100, 100]
    assert not warnings


@pytest.mark.parametrize("fields", [{"stream": 8}, {"device": 1}])
def test_another_stream_and_another_device_run_beside_it(tmp_path: Path, fields: dict[str, int]) -> None:
    found, warnings = durations_us(five_kernels(2, 900, **fields), tmp_path)
    assert found == [100, 100, 900, 100, 100]
    assert not warnings


@pytest.mark.parametrize("category", [Category.MEMCPY, Category.MEMSET])
def test_copies_and_sets_are_checked_alike(tmp_path: Path, category: Category) -> None:
    found, warnings = durations_us(five_kernels(1, 5_000, category=category), tmp_path)
    assert found == [100, 200, 100, 100, 100]
    assert warnings == (CUT,)


def test_the_last_one_of_a_stream_is_left_out_where_it_outlasts_all_else_by_far(tmp_path: Path) -> None:
    for length_us in (5_000, 3_400_000):
        found, warnings = durations_us(five_kernels(4, length_us), tmp_path)
        assert found == [100] * 4
        assert warnings == (LEFT_OUT,)
    found, warnings = durations_us(five_kernels(4, 1_000), tmp_path)  # nobody waited for it
    assert found == [100, 100, 100, 100, 1_000]
    assert not warnings


def test_two_streams_may_each_end_with_an_impossible_one(tmp_path: Path) -> None:
    trace = five_kernels(4, 3_400_000).kernel("nccl", 500 * US, 3_000_000 * US, launched=6 * US, stream=8)
    found, warnings = durations_us(trace, tmp_path)
    assert found == [100] * 4
    assert warnings == (LEFT_OUT.replace("1 ", "2 ", 1),)


def test_kernels_of_one_graph_run_side_by_side_until_the_next_launch(tmp_path: Path) -> None:
    trace = Trace().launch(0, US, correlation=1, name="cudaGraphLaunch").launch(2 * US, 3 * US, correlation=2)
    for begin, end in ((10, 400), (100, 150), (200, 9_000)):
        trace.kernel("gemm", begin * US, end * US, correlation=1, graph=True)
    trace.kernel("gemm", 500 * US, 600 * US, correlation=2)
    found, warnings = durations_us(trace, tmp_path)
    assert found == [390, 50, 300, 100]
    assert warnings == (CUT,)


def test_kernels_without_time_are_counted(tmp_path: Path) -> None:
    found, warnings = durations_us(five_kernels(2, 0), tmp_path)
    assert found == [100, 100, 0, 100, 100]
    assert warnings == (
        "1 kernels have a duration of 0, not measured or below the trace's clock: their time is in no figure",
    )


def test_the_total_is_that_of_the_stream(tmp_path: Path) -> None:
    result = load(five_kernels(2, 3_400_000).write(tmp_path / "trace.json"))
    assert result.time.total_ns == 600 * US
    assert result.time.busy_ns == 600 * US
    assert CUT in result.warnings
