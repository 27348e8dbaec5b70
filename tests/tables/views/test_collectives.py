"""Collectives by hand: count, bytes, time, what is exposed, bandwidth; names of libraries; the laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from any_traces import training_step, wild_traces
from invariants import OF_TIME, broken
from profiler_wrapper.advice.communication import exposed_communication
from profiler_wrapper.advice.facts import Facts
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.model import Analysis, CollectiveRow
from profiler_wrapper.tables.views.collectives import bus_factor, collective_of, element_bytes, type_in_kernel
from profiler_wrapper.trace.recording import Category, CollectiveDetails, Recording
from recordings import AUTOGRAD, Trace, analyse


def telling(trace: Trace, *told: CollectiveDetails) -> Recording:
    """The recording, with what its events tell of collectives; `span` counts the spans as they were written."""
    return replace(trace.recording(), collectives=told)


def span_named(trace: Trace, name: str, *, which: int = 0) -> int:
    recording = trace.recording()
    return [i for i in range(len(recording.spans)) if recording.name_of(i) == name][which]


def one(result: Analysis) -> CollectiveRow:
    (row,) = result.collectives
    return row


KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_an_all_reduce_by_hand() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 1000).mark("fc", 0, 400)
    trace.op("aten::mm", 10, 20).kernel("gemm", 100, 200, launched=12)
    trace.op("c10d::allreduce_", 30, 60).kernel(KERNEL, 150, 650, launched=40, stream=20)
    details = CollectiveDetails(span_named(trace, KERNEL), "allreduce", 1000, 1000, "BFloat16", 8, "dp")
    row = one(analyse(telling(trace, details)))
    assert (row.collective, row.group, row.group_size, row.dtype) == ("all_reduce", "dp", 8, "BFloat16")
    assert (row.layer, row.phase, row.count, row.payload_bytes) == ("fc", "forward", 1, 2000)
    assert (row.time_ns, row.exposed_ns, row.overlapped_ns) == (500, 450, 50)
    assert row.bandwidth_bytes_per_s == 4e9  # 2,000 bytes in 500 ns
    assert row.bus_bandwidth_bytes_per_s == 7e9  # 2 (8 - 1) / 8


def test_the_larger_side_is_the_payload() -> None:
    trace = Trace().op("c10d::_allgather_base_", 0, 20)
    trace.kernel("ncclDevKernel_AllGather_RING_LL(x)", 30, 70, launched=5)
    trace.op("c10d::_reduce_scatter_base_", 100, 120).kernel("ncclDevKernel_ReduceScatter_x", 130, 170, launched=105)
    gather = CollectiveDetails(2, "_allgather_base", 10, 40, "Float", 4, "0")
    scatter = CollectiveDetails(5, "_reduce_scatter_base", 40, 10, "Float", 4, "0")
    rows = {row.collective: row for row in analyse(telling(trace, gather, scatter)).collectives}
    assert [row.payload_bytes for row in rows.values()] == [160, 160]
    assert {row.bus_bandwidth_bytes_per_s for row in rows.values()} == {160 / 40e-9 * 0.75}


def test_what_an_op_tells_holds_for_the_kernel_that_it_launches() -> None:
    """As on ROCm, whose kernels are all named alike."""
    trace, told = Trace(), []
    for i, (name, elements) in enumerate((("allreduce", 64), ("broadcast", 16), ("allreduce", 32))):
        begin = 100 * i
        trace.op("c10d::op", begin, begin + 50).op("record_param_comms", begin + 5, begin + 45)
        trace.kernel("ncclDevKernel_Generic", 1000 + begin, 1010 + begin, launched=begin + 10)
        told.append(CollectiveDetails(4 * i + 1, name, elements, elements, "Float", 2, "0"))
    rows = {row.collective: row for row in analyse(telling(trace, *told)).collectives}
    assert {name: (row.count, row.payload_bytes, row.time_ns) for name, row in rows.items()} == {
        "all_reduce": (2, 4 * 96, 20),
        "broadcast": (1, 64, 10),
    }


def test_kernels_of_one_call_are_one_collective() -> None:
    trace = Trace().op("record_param_comms", 0, 50)
    trace.kernel("ncclDevKernel_Broadcast_a", 100, 110, launched=5)
    trace.kernel("ncclDevKernel_Broadcast_a", 110, 130, launched=15)
    row = one(analyse(telling(trace, CollectiveDetails(0, "allgather", 5, 10, "Long", 2, "0"))))
    assert (row.collective, row.count, row.payload_bytes, row.time_ns) == ("all_gather", 1, 80, 30)


def test_without_a_word_names_tell() -> None:
    trace = Trace().op("c10d::allreduce_", 0, 50).op("record_param_comms", 5, 45)
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 100, 120, launched=10)
    row = one(analyse(trace.recording()))
    assert (row.collective, row.group, row.group_size, row.dtype) == ("all_reduce", "", None, "Float")
    assert (row.count, row.payload_bytes) == (1, None)
    assert (row.bandwidth_bytes_per_s, row.bus_bandwidth_bytes_per_s) == (None, None)


def test_a_kernel_that_nothing_names_is_other() -> None:
    row = one(analyse(Trace().mark("a", 0, 9).kernel("ncclDevKernel_Generic", 20, 30, correlation=9).recording()))
    assert (row.collective, row.layer, row.count, row.payload_bytes) == ("other", None, 1, None)


def test_one_unknown_payload_makes_the_sum_unknown() -> None:
    trace = Trace().kernel(KERNEL, 100, 120, launched=10).kernel(KERNEL, 120, 140, launched=30)
    told = CollectiveDetails(1, "allreduce", 8, 8, "BFloat16", 2, "0")
    known = one(analyse(telling(trace, told, told._replace(span=3))))
    assert (known.count, known.payload_bytes) == (2, 32)
    row = one(analyse(telling(trace, told, told._replace(span=3, in_elements=None, out_elements=None))))
    assert (row.count, row.payload_bytes, row.bandwidth_bytes_per_s) == (2, None, None)


def test_ddp_buckets_have_no_layer() -> None:
    trace = training_step().node("torch::autograd::AccumulateGrad", 705, 790)
    trace.op("c10d::allreduce_", 710, 780, thread=AUTOGRAD)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4000, 4100, launched=720, thread=AUTOGRAD)
    rows = {(row.layer, row.phase): row.time_ns for row in analyse(trace.recording()).collectives}
    assert rows == {("", "backward"): 100, ("mlp", "backward"): 300}


def test_on_a_cpu_calls_are_counted_where_they_are_made() -> None:
    """gloo works on a thread of its own, in an annotation; its few ops are time, not calls."""
    trace = Trace().mark("fc", 0, 100).op("aten::mm", 5, 15).op("c10d::_allgather_base_", 20, 60)
    trace.op("aten::chunk", 30, 40)
    trace.annotation("gloo:all_gather", 40, 90, thread=9).op("aten::select", 50, 55, thread=9)
    result = analyse(trace.recording())
    rows = {(row.layer, row.count): row for row in result.collectives}
    assert {key: (row.collective, row.time_ns) for key, row in rows.items()} == {
        ("fc", 1): ("all_gather", 40),
        ("", 0): ("all_gather", 5),
    }
    for row in rows.values():
        assert (row.exposed_ns, row.overlapped_ns, row.payload_bytes, row.bandwidth_bytes_per_s) == (None,) * 4
    assert broken(result, ["collectives_make_the_communication"]) == []


def test_bytes_count_where_the_call_does() -> None:
    trace = Trace().op("c10d::allreduce_", 0, 10).annotation("gloo:all_reduce", 5, 50, thread=9)
    trace.op("aten::view", 10, 20, thread=9)
    told = CollectiveDetails(1, "allreduce", 4, 4, "Float", 2, "0")
    rows = analyse(telling(trace, told)).collectives
    assert [(row.count, row.payload_bytes, row.time_ns) for row in rows] == [(1, None, 10), (0, None, 10)]


def test_on_a_cpu_what_is_told_within_a_call_counts_once() -> None:
    trace = Trace().op("c10d::allgather_into_tensor_coalesced_", 0, 100).op("record_param_comms", 10, 30)
    trace.op("record_param_comms", 40, 60)
    told = CollectiveDetails(1, "_allgather_base", 4, 8, "Half", 2, "0")
    row = one(analyse(telling(trace, told, told._replace(span=2))))
    assert (row.collective, row.count, row.payload_bytes, row.time_ns, row.group) == ("all_gather", 1, 32, 100, "0")


# --- names ---


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("_c10d_functional::all_to_all_single", "all_to_all"),
        ("c10d::broadcast_", "broadcast"),
        ("_broadcast_oop", "broadcast"),
        ("c10d::reduce_", "reduce"),
        ("nccl:_reduce_oop", "reduce"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("nccl:send 0->1", "send"),
        ("c10d::recv_", "recv"),
        ("c10d::barrier", "barrier"),
        ("c10d::gather_", "gather"),
        ("c10d::scatter_", "scatter"),
        ("_c10d_functional::wait_tensor", "wait"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16>", "all_reduce"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("record_param_comms", ""),
    ],
)
def test_names_of_collectives(name: str, collective: str) -> None:
    assert collective_of(name) == collective


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (KERNEL, "BFloat16"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "Float"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)", "Half"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", ""),  # bytes of any type
        ("ncclDevKernel_AllReduce_Sum_f8e4m3_RING_LL", "Float8_e4m3fn"),
        ("ncclDevKernel_AllReduce_Sum_u64_RING_LL", "UInt64"),
        ("ncclDevKernel_SendRecv", ""),
    ],
)
def test_types_in_names_of_kernels(kernel: str, dtype: str) -> None:
    assert type_in_kernel(kernel) == dtype


def test_sizes_of_types_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    by_c10 = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16"}
    by_c10 |= {"Float": "float32", "Double": "float64", "BFloat16": "bfloat16", "Bool": "bool"}
    by_c10 |= {"Float8_e4m3fn": "float8_e4m3fn", "ComplexFloat": "complex64", "ComplexDouble": "complex128"}
    for name, dtype in by_c10.items():
        assert element_bytes(name) == getattr(torch, dtype).itemsize
    assert element_bytes("") is None
    assert element_bytes("Undefined") is None


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", None) == bus_factor("reduce", 4) == bus_factor("send", 2) == 1.0
    assert bus_factor("all_reduce", None) is None
    assert bus_factor("barrier", 4) is None


# --- laws ---


@settings(max_examples=100, deadline=None)
@given(wild_traces())
def test_collectives_that_wild_traces_tell_add_up(trace: Trace) -> None:
    """Those that they do not tell, but by names, do so in test_layer_time.py."""
    recording = trace.op("aten::mm", 0, 1, thread=4).recording()
    told = tuple(CollectiveDetails(i, "allreduce", 2, 2, "Float", 2, "g") for i in range(0, len(recording.spans), 2))
    assert broken(analyse(replace(recording, collectives=told)), OF_TIME) == []


def test_copies_hide_no_communication() -> None:
    """Neither a layer's, nor a collective's, nor the whole, and not for the advice either."""
    trace = Trace().annotation("ProfilerStep#1", 0, 1000).mark("fc", 0, 400)
    trace.op("aten::mm", 10, 20).kernel("gemm", 100, 200, launched=12)
    trace.op("c10d::allreduce_", 30, 60).kernel(KERNEL, 150, 650, launched=40, stream=20)
    trace.kernel("Memcpy DtoH", 200, 500, launched=70, stream=9, category=Category.MEMCPY)
    trace.kernel("Memset", 500, 700, launched=75, stream=10, category=Category.MEMSET)
    result = analyse(trace.recording())
    assert (one(result).exposed_ns, one(result).overlapped_ns) == (450, 50)
    assert result.time.exposed_communication_ns == 450
    assert [row.exposed_communication_ns for row in result.layers] == [450]
    assert result.overview is not None and result.overview.steps[0].communication_ns == 450
    found = place_events(trace.recording())
    (told,) = exposed_communication(Facts(analysis=result, found=found))
    assert told.details["exposed_us"] == 0.45


def test_where_collectives_do_not_overlap_exposed_is_that_of_the_whole() -> None:
    trace = training_step().kernel("ncclDevKernel_AllReduce", 5000, 5100, launched=820)
    result = analyse(trace.recording())
    assert sum(row.exposed_ns or 0 for row in result.collectives) == result.time.exposed_communication_ns == 300


def test_what_runs_while_a_send_goes_on_is_no_communication() -> None:
    """Gloo's annotation of a send begins in the call and lasts until the other side has it."""
    trace = Trace().op("c10d::send", 0, 20).annotation("gloo:send", 15, 200)
    trace.mark("fc", 40, 100).op("aten::copy_", 50, 60).op("aten::frobnicate", 60, 90)
    trace.op("c10d::recv_", 110, 140)
    result = analyse(trace.recording())
    assert {row.class_name: row.time_ns for row in result.classes} == {"communication": 50, "copy": 10, "other": 30}
    assert [(row.collective, row.layer, row.count, row.time_ns) for row in result.collectives] == [
        ("recv", "", 1, 30),
        ("send", "", 1, 20),
    ]
