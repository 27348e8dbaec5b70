"""The overview against answers derived by hand, against instants counted one by one, and against plain JSON."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_traces import attributed_trace, exact_events, names_of_traces
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.place.step_windows import step_windows
from profiler_wrapper.tables.model import Overview, StepSplit
from profiler_wrapper.tables.views.overview import overview
from profiler_wrapper.trace.recording import Category
from recordings import AUTOGRAD, Trace, analyse
from shared_traces import needs_traces

PARTS = (
    "kernel_ns", "communication_ns", "memcpy_ns", "memset_ns", "runtime_ns", "dataloader_ns", "cpu_ns", "other_ns",
)  # fmt: skip
V100 = "v100_ddp_resnet.pt.trace.json.gz"
DEVICES = [
    {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 * 10**9, "computeMajor": 9, "computeMinor": 0,
     "numSms": 132, "warpSize": 32},
    {"id": 1, "name": "Tesla V100-SXM2-32GB", "computeMajor": 7, "computeMinor": 0, "numSms": 80},
]  # fmt: skip


def found_in(trace: Trace) -> Placed:
    return place_events(trace.recording(metadata={"deviceProperties": DEVICES}))


def overview_of(trace: Trace) -> Overview:
    found = overview(found_in(trace))
    assert found is not None
    return found


def split(step: StepSplit) -> dict[str, int]:
    """The parts that are not zero."""
    return {name.removesuffix("_ns"): getattr(step, name) for name in PARTS if getattr(step, name)}


# --- the split ---


def test_every_instant_is_the_first_of_its_kinds() -> None:
    """Kernel, communication, memcpy, memset, runtime, data loader, CPU, other; whatever runs beside."""
    trace = Trace().annotation("ProfilerStep#4", 0, 1000)
    trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 110).op("aten::stack", 50, 90)
    trace.op("aten::mm", 200, 400).launch(250, 300, correlation=1)
    trace.kernel("gemm", 350, 500, correlation=1)
    trace.kernel("Memcpy HtoD", 450, 760, launched=390, category=Category.MEMCPY, stream=9)
    trace.kernel("Memset", 740, 780, launched=391, category=Category.MEMSET, stream=10)
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING", 480, 700, launched=395, stream=11)
    trace.op("aten::add", 600, 800)
    step = overview_of(trace).steps[0]
    assert step.step == 4
    assert split(step) == {
        "kernel": 150,  # 350 to 500
        "communication": 200,  # 500 to 700: copies beside it compute nothing
        "runtime": 50,  # 250 to 300; the calls at 390 lie under the kernel
        "dataloader": 100,  # 10 to 110, with an op inside
        "memcpy": 60,  # 700 to 760
        "memset": 20,  # 760 to 780
        "cpu": 50 + 50 + 20,  # 200 to 250, 300 to 350, 780 to 800
        "other": 10 + 90 + 200,
    }
    assert step.span_ns == 1000


def test_a_step_ends_with_its_last_kernel_and_the_next_begins_there() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).annotation("ProfilerStep#1", 100, 200)
    trace.op("aten::mm", 0, 20).kernel("gemm", 30, 150, launched=10)
    trace.op("aten::mm", 110, 120).kernel("gemm", 150, 180, launched=115)
    found = overview_of(trace)
    assert [(step.step, step.span_ns, split(step)) for step in found.steps] == [
        (0, 150, {"kernel": 120, "runtime": 1, "cpu": 19, "other": 10}),  # what the CPU does from 100 is the kernel's
        (1, 50, {"kernel": 30, "other": 20}),
    ]
    assert found.utilization == 150 / 200
    assert found.gaps_ns == 50


def test_what_was_launched_before_the_first_step_is_not_its_time() -> None:
    trace = Trace().annotation("ProfilerStep#0", 100, 300)
    trace.kernel("gemm", 50, 140, launched=None)
    trace.op("aten::mm", 110, 130).kernel("gemm", 200, 250, launched=120)
    found = overview_of(trace)
    assert found.steps[0].span_ns == 160  # 140 to 300
    assert split(found.steps[0]) == {"kernel": 50, "other": 110}
    assert found.kernels == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_a_device_that_was_at_work_when_the_trace_began(steps: int) -> None:
    """Its first kernel begins 5 ms after its launch, and nothing shows why: till then nothing is known of it."""
    ms = 1_000_000
    trace = Trace().annotation("ProfilerStep#0", 0, 6 * ms).op("aten::mm", 0, 100).kernel("gemm", 20, 30, launched=10)
    trace.kernel("gemm", 5 * ms, 6 * ms, launched=40, stream=8).kernel("gemm", 6 * ms, 7 * ms, launched=50, stream=8)
    if steps == 2:
        trace.annotation("ProfilerStep#1", 6 * ms, 10 * ms).kernel("gemm", 8 * ms, 9 * ms, launched=7 * ms, stream=8)
    result, told = analyse(trace.recording()), overview_of(trace)
    assert result.time.busy_ns is None and all(row.idle_ns is None for row in result.layers)
    assert any("when the trace began" in warning for warning in result.warnings)
    assert [step.span_ns for step in told.steps] == [2 * ms, 3 * ms][:steps]  # from when it got to the first step
    expected = (None, None) if steps == 1 else (3 / 5, 2 * ms)
    assert (told.utilization, told.gaps_ns) == expected
    assert not any(finding["id"] == "low-utilization" for finding in result.summary["findings"])


@pytest.mark.parametrize(("begins", "unseen"), [(1_000_011, None), (1_000_012, 1_000_012)])
def test_a_kernel_may_begin_a_millisecond_after_its_launch(begins: int, unseen: int | None) -> None:
    """The launch, the first event of the file, ends at 11."""
    trace = Trace().kernel("gemm", begins, 2_000_000, launched=10).op("aten::mm", 0, 100)
    assert found_in(trace).unseen_until_ns == unseen


def test_a_stream_that_waits_for_another_is_no_sign_of_what_is_not_seen() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 10**7).kernel("gemm", 100, 9 * 10**6, launched=10)
    trace.kernel("gemm", 9 * 10**6 + 10, 95 * 10**5, launched=20, stream=8)
    assert found_in(trace).unseen_until_ns is None


def test_a_trace_without_steps_is_one() -> None:
    trace = Trace().op("aten::mm", 100, 140).kernel("gemm", 150, 250, launched=110).op("aten::add", 160, 200)
    (step,) = overview_of(trace).steps
    assert (step.step, step.span_ns) == (None, 150)
    assert split(step) == {"kernel": 100, "runtime": 1, "cpu": 39, "other": 10}


def test_without_device_events_only_the_cpu_is_told() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).mark("net", 0, 100)
    trace.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 30)
    trace.op("aten::mm", 40, 60).op("gloo:all_reduce", 50, 80, thread=AUTOGRAD)
    found = overview_of(trace)
    assert split(found.steps[0]) == {"dataloader": 30, "communication": 30, "cpu": 10, "other": 30}
    assert found.kernels == 0
    told = (found.utilization, found.sm_efficiency, found.occupancy, found.tensor_core_share, found.gaps_ns)
    assert (*told, found.device, found.launches_per_s) == (None,) * 7


def test_on_a_device_only_kernels_communicate() -> None:
    """What the CPU does around the launch of a collective is an op's time, or none."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000)
    trace.op("c10d::allreduce_", 100, 300).annotation("nccl:all_reduce", 120, 500)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 600, 700, launched=200)
    assert split(overview_of(trace).steps[0]) == {"communication": 100, "runtime": 1, "cpu": 199, "other": 700}


def test_names_given_by_the_user_and_marks_are_no_time() -> None:
    bare = Trace().annotation("ProfilerStep#0", 0, 100).op("aten::mm", 40, 60)
    named = Trace().annotation("ProfilerStep#0", 0, 100).mark("net", 5, 95).annotation("mine", 10, 90)
    named.op("aten::mm", 40, 60)
    assert split(overview_of(bare).steps[0]) == split(overview_of(named).steps[0]) == {"cpu": 20, "other": 80}


KINDS: dict[str, tuple[int, Callable[[Trace, int, int], Trace]]] = {
    "kernel": (0, lambda t, a, b: t.kernel("gemm", a, b, stream=a % 3)),
    "memcpy": (2, lambda t, a, b: t.kernel("Memcpy DtoD", a, b, category=Category.MEMCPY)),
    "memset": (3, lambda t, a, b: t.kernel("Memset", a, b, category=Category.MEMSET)),
    "nccl": (1, lambda t, a, b: t.kernel("ncclDevKernel_AllGather", a, b, stream=20)),
    "runtime": (4, lambda t, a, b: t.launch(a, b)),
    "loader": (5, lambda t, a, b: t.annotation("enumerate(DataLoader)#Iter.__next__", a, b, thread=5)),
    "op": (6, lambda t, a, b: t.op("aten::mm", a, b, thread=6)),
}
SOMETHING = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 120), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SOMETHING, min_size=1, max_size=15),
    st.lists(st.integers(0, 120), min_size=2, max_size=5, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120), st.integers(0, 40)), max_size=4),
)
def test_parts_are_the_instants_counted_one_by_one(
    events: list[tuple[str, int, int]], cuts: list[int], launched: list[tuple[int, int, int]]
) -> None:
    trace = Trace()
    kind_of_instant: dict[int, int] = {}

    def covers(kind: int, start: int, end: int) -> None:
        for instant in range(start, end):
            kind_of_instant[instant] = min(kind, kind_of_instant.get(instant, 7))

    for number, (start, end) in enumerate(pairwise(cuts)):
        trace.annotation(f"ProfilerStep#{number}", start, end)
    for name, start, length in events:
        kind, add = KINDS[name]
        add(trace, start, start + length)
        covers(kind, start, start + length)
    for at, start, length in launched:  # kernels of a step, that may end it later than the CPU does
        trace.kernel("gemm", start, start + length, launched=at)
        covers(0, start, start + length)
        covers(4, at, at + 1)
    try:
        found = found_in(trace)
    except EmptyRecording:
        return
    windows = step_windows(found)
    assert len(windows.step_times_ns) == len(windows.number) - (windows.number == (None,))
    assert (windows.start_ns[1:] >= windows.end_ns[:-1]).all()  # no instant is of two steps
    told = overview(found)
    assert (told is None) == (not windows.number)
    for step, start, end in zip(told.steps if told else (), windows.start_ns, windows.end_ns, strict=True):
        counted = np.bincount([kind_of_instant.get(i, 7) for i in range(int(start), int(end))], minlength=8)
        assert [getattr(step, name) for name in PARTS] == counted.tolist()
        assert sum(counted) == step.span_ns


# --- the device ---


def test_kernels_beside_one_another_fill_the_device_once() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).op("aten::mm", 0, 10)
    trace.kernel("gemm", 100, 300, launched=1, stream=7).told(blocks_per_sm=0.5)
    trace.kernel("gemm", 200, 400, launched=2, stream=8).told(blocks_per_sm=0.75)
    trace.kernel("gemm", 500, 600, launched=3, stream=7).told(blocks_per_sm=12.5)
    found = overview_of(trace)
    assert found.utilization == (300 + 100) / 1000
    # 100 ns at 0.5, 100 ns full (1.25), 100 ns at 0.75, 100 ns full
    assert found.sm_efficiency == pytest.approx((50 + 100 + 75 + 100) / 1000, abs=1e-12)
    assert found.gaps_ns == 600
    assert (found.kernels, found.launches_per_s) == (3, 3e6)


def test_many_full_kernels_are_never_more_than_the_device() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).op("aten::mm", 0, 10)
    for stream in range(9):
        trace.kernel("gemm", 10, 90, launched=stream, stream=stream).told(blocks_per_sm=1 / 3)
    found = overview_of(trace)
    assert found.utilization == 0.8
    assert found.sm_efficiency == pytest.approx(0.8, abs=1e-9)
    assert found.sm_efficiency is not None and found.sm_efficiency <= found.utilization


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=8))
def test_efficiency_is_the_mean_over_instants(kernels: list[tuple[int, int, int]]) -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 200).op("aten::mm", 0, 50)
    taken = [Fraction(0)] * 200
    for at, (start, length, percent) in enumerate(kernels):
        trace.kernel("gemm", start, start + length, launched=at, stream=at).told(blocks_per_sm=percent / 100)
        for instant in range(start, start + length):
            taken[instant] += Fraction(percent, 100)
    expected = sum(min(share, Fraction(1)) for share in taken) / 200
    assert overview_of(trace).sm_efficiency == pytest.approx(float(expected), abs=1e-9)


def test_efficiency_is_not_told_where_a_kernel_does_not_tell() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).op("aten::mm", 0, 10)
    trace.kernel("gemm", 10, 20, launched=1).told(blocks_per_sm=1.0).kernel("gemm", 20, 30, launched=2)
    assert overview_of(trace).sm_efficiency is None


def test_occupancy_is_by_time_within_the_steps_and_what_cannot_be_is_left_out() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).op("aten::mm", 0, 10)
    trace.kernel("a", 100, 400, launched=1).told(occupancy_percent=50)
    trace.kernel("b", 400, 500, launched=2).told(occupancy_percent=90)
    trace.kernel("c", 500, 600, launched=3)  # tells none
    # 4 warps for every multiprocessor occupy 4/64 of it at least
    trace.kernel("d", 600, 900, launched=4).told(occupancy_percent=0, blocks_per_sm=1.0, block=(128, 1, 1))
    assert overview_of(trace).occupancy == pytest.approx((300 * 0.5 + 100 * 0.9) / 400)


def test_tensor_cores_by_time_of_all_kernels() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).op("aten::mm", 0, 10)
    trace.kernel("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_nn", 0, 100, launched=1)
    trace.kernel("ampere_sgemm_128x64_nn", 100, 250, launched=2)
    trace.kernel("triton_tem_fused_mm_0", 250, 300, launched=3)  # does not tell
    assert overview_of(trace).tensor_core_share == 100 / 300


def test_the_device_with_most_kernel_time_is_told() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).op("aten::mm", 0, 10)
    trace.kernel("gemm", 100, 200, launched=1, device=0)
    trace.kernel("gemm", 150, 450, launched=2, device=1)
    found = overview_of(trace)
    assert (found.device, found.compute_capability, found.multiprocessors) == ("Tesla V100-SXM2-32GB", "7.0", 80)
    assert found.device_memory_bytes is None
    assert (found.utilization, found.gaps_ns, found.kernels) == (0.3, 700, 1)
    assert split(found.steps[0])["kernel"] == 350  # of either device


# --- a recorded run, against plain JSON ---


def _sweep(intervals: list[tuple[int, int, int]], start: int, end: int) -> list[int]:
    """Per kind (0 is the first to count) its time in [start, end); the last is for none. One pass over the edges."""
    edges = sorted({start, end, *(t for a, b, _ in intervals for t in (a, b) if start < t < end)})
    begins = sorted((max(a, start), kind) for a, b, kind in intervals if a < end and b > start)
    stops = sorted((min(b, end), kind) for a, b, kind in intervals if a < end and b > start)
    running, times, i, j = [0] * 7, [0] * 8, 0, 0
    for left, right in pairwise(edges):
        while i < len(begins) and begins[i][0] <= left:
            running[begins[i][1]] += 1
            i += 1
        while j < len(stops) and stops[j][0] <= left:
            running[stops[j][1]] -= 1
            j += 1
        times[next((kind for kind in range(7) if running[kind] > 0), 7)] += right - left
    return times


@needs_traces
def test_the_v100_trace_against_plain_json() -> None:
    events = [event for event in exact_events(V100) if event["ph"] == "X"]

    def interval(event: dict[str, Any]) -> tuple[int, int]:
        start = int(event["ts"] * 1000)
        return start, start + int(event["dur"] * 1000)

    def kind_of(event: dict[str, Any]) -> int | None:
        name, cat = event["name"], event.get("cat")
        if cat in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime"):
            return {"kernel": 0, "gpu_memcpy": 2, "gpu_memset": 3, "cuda_runtime": 4}[cat]
        if cat in ("cpu_op", "user_annotation") and name.startswith("enumerate(DataLoader)#"):
            return 5
        return 6 if cat == "cpu_op" else None

    launch = {e["args"]["correlation"]: interval(e)[0] for e in events if e.get("cat") == "cuda_runtime"}
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    intervals = [(*interval(e), kind) for e in events if (kind := kind_of(e)) is not None]
    steps = sorted(
        (*interval(e), int(e["name"][13:]))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    )
    told = overview(attributed_trace(V100))
    assert told is not None
    before, wall, busy = 0, 0, 0
    for (start, end, number), step in zip(steps, told.steps, strict=True):
        last = max(interval(e)[1] for e in device if start <= launch.get(e["args"]["correlation"], -1) < end)
        start, end = max(start, before), max(end, last)
        assert [getattr(step, name) for name in PARTS] == _sweep(intervals, start, end)
        assert (step.step, step.span_ns) == (number, end - start)
        kernels = [(*interval(e), 0) for e in device if e["cat"] == "kernel"]
        busy += _sweep(kernels, start, end)[0]
        wall += end - start
        before = end
    assert told.utilization == busy / wall
    weights = [(e["dur"], e["args"]["est. achieved occupancy %"]) for e in device if e["cat"] == "kernel"]
    mean = float(sum(dur * percent for dur, percent in weights) / sum(dur for dur, _ in weights)) / 100
    assert told.occupancy == pytest.approx(mean, rel=0.01)  # but for zeros that cannot be
    assert told.tensor_core_share == 0  # float32 on a V100
    assert (told.device, told.compute_capability, told.multiprocessors) == ("Tesla V100-SXM2-32GB", "7.0", 80)


@needs_traces
@pytest.mark.parametrize("name", names_of_traces(largest=pytest.mark.full))
def test_on_every_trace_steps_are_those_of_the_windows(name: str) -> None:
    found = attributed_trace(name)
    told = overview(found)
    assert told is not None and told.steps
    assert step_windows(found).step_times_ns == tuple(step.span_ns for step in told.steps if step.step is not None)
    if found.unseen_until_ns is not None:
        assert (told.utilization, told.gaps_ns, told.sm_efficiency, told.launches_per_s) == (None,) * 4
        return
    assert told.utilization is not None and 0 < told.utilization <= 1
    assert told.sm_efficiency is None or 0 <= told.sm_efficiency <= told.utilization + 1e-12
