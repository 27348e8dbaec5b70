"""Lanes of layers: forward call by call, backward in stretches that no forward interrupts."""

from __future__ import annotations

from profiler_wrapper.analyse import tables
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.layer_lanes import layer_lanes
from recordings import Trace


def bars(trace: Trace) -> list[tuple[str, str, int, int]]:
    """(lane, layer, begin, end) of every bar, in time order."""
    found = place_events(trace.recording())
    spans = layer_lanes(found, tables(found, run={}).calls)
    return sorted((s.lane, s.name, s.start_ns, s.start_ns + s.duration_ns) for s in spans)


def two_micro_batches() -> Trace:
    """Forward and backward of two layers, twice; thread 2 runs backward."""
    trace = Trace()
    for base, number in ((0, 10), (1000, 20)):
        trace.mark(".", base, base + 100)
        trace.mark("a", base + 10, base + 40).op("aten::mm", base + 20, base + 30, sequence=number, forward_thread=0)
        trace.mark("b", base + 50, base + 90)
        trace.op("aten::mm", base + 60, base + 70, sequence=number + 1, forward_thread=0)
        trace.node("MmBackward0", base + 200, base + 250, number=number + 1)
        trace.op("aten::mm", base + 210, base + 240, thread=2)
        trace.node("MmBackward0", base + 260, base + 300, number=number)
        trace.op("aten::mm", base + 270, base + 280, thread=2)
    return trace


def test_on_a_cpu_bars_are_the_time_on_the_thread() -> None:
    assert bars(two_micro_batches()) == [
        ("backward", "Net", 200, 300),
        ("backward", "Net", 1200, 1300),
        ("backward", "a", 260, 300),
        ("backward", "a", 1260, 1300),
        ("backward", "b", 200, 250),
        ("backward", "b", 1200, 1250),
        ("forward", "Net", 0, 100),
        ("forward", "Net", 1000, 1100),
        ("forward", "a", 10, 40),
        ("forward", "a", 1010, 1040),
        ("forward", "b", 50, 90),
        ("forward", "b", 1050, 1090),
    ]


def test_on_a_device_bars_are_the_time_of_what_was_launched() -> None:
    trace = two_micro_batches()
    trace.kernel("gemm", 500, 550, launched=22).kernel("gemm", 550, 580, launched=62)
    trace.kernel("gemm", 600, 650, launched=212, thread=2).kernel("gemm", 660, 700, launched=272, thread=2)
    assert [bar for bar in bars(trace) if bar[2] < 1000] == [
        ("backward", "Net", 600, 700),
        ("backward", "a", 660, 700),
        ("backward", "b", 600, 650),
        ("forward", "Net", 500, 580),
        ("forward", "a", 500, 550),
        ("forward", "b", 550, 580),
    ]


def test_backward_is_drawn_from_the_stream_that_works_for_layers() -> None:
    """Not from that of a collective of several layers, however long it takes."""
    trace = two_micro_batches()
    trace.kernel("gemm", 500, 550, launched=22).kernel("gemm", 550, 580, launched=62)
    trace.kernel("gemm", 600, 650, launched=212, thread=2).kernel("gemm", 660, 700, launched=272, thread=2)
    trace.node("torch::autograd::AccumulateGrad", 301, 320).op("c10d::allreduce_", 302, 310, thread=2)
    trace.kernel("ncclDevKernel_AllReduce_Sum", 600, 990, launched=305, thread=2, stream=9)
    backward = [bar for bar in bars(trace) if bar[0] == "backward"]
    assert ("backward", "a", 660, 700) in backward and ("backward", "b", 600, 650) in backward
