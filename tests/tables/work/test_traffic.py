"""Which ops of a recording count for the bytes they move, and how much of the time is told."""

from __future__ import annotations

from dataclasses import replace

import shaped_trace
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.tables.work.traffic import Traffic
from profiler_wrapper.trace.recording import Category, OpShapes
from recordings import Trace


def floats(*dims: list[int]) -> OpShapes:
    return OpShapes(dims=dims, types=("float",) * len(dims), concrete=("",) * len(dims))


def traffic(trace: Trace, **shapes_of: OpShapes) -> Traffic:
    """`shapes_of` by the name of an op without `aten::`."""
    shapes = shaped_trace.shapes_of(trace, {f"aten::{name}": inputs for name, inputs in shapes_of.items()})
    found = place_events(trace.recording(), shapes=shapes)
    return Traffic(found, shapes, FlopOps(found, shapes))


def told(found: Traffic) -> list[tuple[int, int]]:
    """Read and written of every unit."""
    return list(zip(found.read_bytes.tolist(), found.written_bytes.tolist(), strict=True))


def share(found: Traffic) -> tuple[int, int]:
    time_ns = found._found.charges.time_ns
    return int(time_ns[found.counts & found.has_bytes].sum()), int(time_ns[found.counts].sum())


ROW = floats([10])
COPY = OpShapes(([10], [10], []), ("float", "float", "Scalar"), ("", "", "False"))


def test_of_ops_around_one_another_the_outermost_with_a_rule_counts() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::contiguous", 5, 60).op("aten::clone", 10, 50).op("aten::copy_", 20, 40)
    found = traffic(trace, clone=ROW, copy_=COPY, contiguous=ROW)
    assert told(found) == [(40, 40)]
    assert found.unit_of.tolist() == [-1, -1, 2, 2]
    assert share(found) == (55, 55)  # what only calls others has nothing to move


def test_linear_counts_where_its_flops_do() -> None:
    square = floats([4, 4], [4, 4])
    around = Trace().mark(".", 0, 100).op("aten::linear", 10, 90).op("aten::clone", 15, 20).op("aten::mm", 30, 70)
    assert told(traffic(around, linear=square, clone=ROW, mm=square)) == [(40, 40), (128, 64)]
    alone = Trace().mark(".", 0, 100).op("aten::linear", 10, 90).op("aten::clone", 15, 20)
    assert told(traffic(alone, linear=square, clone=ROW)) == [(128, 64)]


def test_an_op_without_a_rule_is_not_told_with_its_time_and_layer() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 90).op("custom::op", 20, 50).op("aten::relu", 60, 80)
    found = traffic(trace, relu=ROW)
    assert share(found) == (20, 50)
    (row,) = found.unknown(1)
    assert (row.op, row.layers, row.count, row.time_per_step_ns, row.phase) == ("custom::op", ("a",), 1, 30, "forward")


def test_on_a_device_an_op_counts_that_launched_something() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::relu", 10, 20).op("aten::relu", 30, 40)
    trace.kernel("elementwise", 50, 90, launched=35).op("other::op", 42, 48).kernel("thing", 90, 97, launched=44)
    found = traffic(trace, relu=ROW)
    assert found.units.tolist() == [2]
    assert share(found) == (40, 47)
    assert [(row.op, row.time_per_step_ns) for row in found.unknown(1)] == [("other::op", 7)]


def test_of_a_copy_over_the_bus_the_side_of_the_device_counts() -> None:
    trace = Trace().mark(".", 0, 100)
    for start, name in ((10, "Memcpy HtoD (Pageable -> Device)"), (20, "Memcpy DtoH (Device -> Pinned)"), (30, "DtoD")):
        trace.op("aten::copy_", start, start + 8)
        trace.kernel(name, start + 50, start + 55, launched=start + 2, category=Category.MEMCPY)
    assert told(traffic(trace, copy_=COPY)) == [(0, 40), (40, 0), (40, 40)]


def test_communication_is_left_out() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::relu", 10, 20).kernel("elementwise", 50, 60, launched=15)
    trace.op("c10d::allreduce_", 30, 40).kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 90, launched=35)
    found = traffic(trace, relu=ROW)
    assert share(found) == (10, 10)
    assert found.unknown(1) == ()


def test_ops_outside_of_whole_steps_do_not_count() -> None:
    trace = Trace().op("aten::relu", 0, 5).annotation("ProfilerStep#3", 10, 50).op("aten::relu", 20, 30)
    assert told(traffic(trace, relu=ROW)) == [(40, 40)]


def test_of_a_batch_the_op_inside_has_the_shape() -> None:
    trace = Trace().op("aten::relu", 0, 50).op("aten::clamp_min", 10, 40)
    assert told(traffic(trace, relu=ROW, clamp_min=floats([8, *ROW.dims[0]]))) == [(8 * 40, 8 * 40)]
    assert told(traffic(trace, relu=ROW, clamp_min=ROW)) == [(40, 40)]


def test_the_call_of_a_compiled_graph_is_not_told_though_it_calls_ops_that_are() -> None:
    trace = Trace().mark(".", 0, 100).op("## Call CompiledFxGraph abc ##", 10, 90).op("aten::relu", 20, 30)
    assert share(traffic(trace, relu=ROW)) == (10, 80)


def test_on_a_cpu_an_unknown_op_that_calls_known_ones_may_do_work_beside() -> None:
    trace = Trace().mark(".", 0, 100).op("custom::op", 10, 50).op("aten::relu", 20, 30)
    found = traffic(trace, relu=ROW)
    assert share(found) == (10, 40)
    assert [row.op for row in found.unknown(1)] == ["custom::op"]


def test_autograd_nodes_and_views_have_nothing_to_move() -> None:
    trace = Trace().mark(".", 0, 10).op("aten::relu", 2, 8).node("ReluBackward0", 20, 90)
    trace.op("ReluBackward0", 25, 85, thread=2).op("aten::threshold_backward", 30, 60, thread=2)
    trace.op("aten::view", 65, 70, thread=2)
    gradient = OpShapes(([10], [10], []), ("float", "float", "Scalar"), ("", "", "0"))
    found = traffic(trace, relu=ROW, threshold_backward=gradient)
    assert told(found) == [(40, 40), (80, 40)]
    assert share(found) == (76, 76)


LISTS = OpShapes(([[2, 3], [5]], []), ("TensorList", "Scalar"), ("", "0"))


def test_the_type_of_joined_tensors_is_told_by_the_one_allocation() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::cat", 10, 20).memory(15, 22, address=1)
    assert told(traffic(trace, cat=LISTS)) == [(22, 22)]
    twice = Trace().mark(".", 0, 100).op("aten::cat", 10, 20).memory(12, 22, address=1).memory(15, 22, address=2)
    assert told(traffic(twice, cat=LISTS)) == []
    none = Trace().mark(".", 0, 100).op("aten::cat", 10, 20)
    assert [row.op for row in traffic(none, cat=LISTS).unknown(1)] == ["aten::cat"]


def test_a_fused_optimizer_on_a_cpu_has_the_type_of_all_parameters() -> None:
    """11 elements of 2 bytes: parameters, gradients and states are read, parameters and states written."""
    lists = OpShapes(([[2, 3], [5]],) * 4 + ([], []), ("TensorList",) * 6, ("",) * 6)
    trace = Trace().mark(".", 0, 100).op("aten::_fused_adamw_", 10, 20)
    shapes = shaped_trace.shapes_of(trace, {"aten::_fused_adamw_": lists})
    for sizes, moves in (({"bfloat16": 200}, [(88, 66)]), ({"bfloat16": 200, "float32": 400}, [])):
        found = place_events(
            trace.recording(), run={"parameters": {"elements": 100, "bytes_by_dtype": sizes}}, shapes=shapes
        )
        assert told(Traffic(found, shapes, FlopOps(found, shapes))) == moves


def test_a_list_without_its_sizes_tells_nothing() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::cat", 10, 20).memory(15, 22, address=1)
    for dims in ((), ([2, 3], [])):
        assert told(traffic(trace, cat=OpShapes(dims, ("TensorList", "Scalar"), ("", "0")))) == []


def test_an_allocation_of_a_device_that_fits_two_types_tells_none() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::cat", 10, 20).memory(15, 512, address=1, device=0)
    trace.kernel("copies", 30, 40, launched=16)
    assert told(traffic(trace, cat=LISTS)) == []


def test_the_type_of_tensors_in_lists_is_told_by_the_kernel() -> None:
    kernel = (
        "void CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 1, 64, 64>(at::native::OpaqueType<2u>*)"
    )
    trace = Trace().mark(".", 0, 100).op("aten::cat", 10, 20).kernel(kernel, 30, 40, launched=15)
    assert told(traffic(trace, cat=LISTS)) == [(22, 22)]


def test_indexing_is_told_by_what_it_calls() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::index", 10, 50)
    trace.op("aten::as_strided", 15, 20).op("aten::reshape", 25, 30)
    index = OpShapes(([8, 16], []), ("float", ""), ("", ""))
    viewed = OpShapes(([8, 16], [], []), ("float", "ScalarList", "ScalarList"), ("", "[5, 16]", "[0, 1]"))
    places = OpShapes(([5], []), ("long int", "ScalarList"), ("", "[5, 1]"))
    found = traffic(trace, index=index, as_strided=viewed, reshape=places)
    assert told(found) == [(320 + 40, 320)]
    whole = {"index": index, "as_strided": viewed}  # rows of a table of whole numbers, whose view names no places
    whole = {op: replace(shapes, types=("long int", *shapes.types[1:])) for op, shapes in whole.items()}
    assert told(traffic(trace, **whole, reshape=places)) == [(640 + 40, 640)]
    assert told(traffic(trace, index=index)) == []
