"""Which ops of a recording count, where their FLOPs go, and what stays unknown."""

from __future__ import annotations

import pytest

import shaped_trace
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.recording import OpShapes
from recordings import Trace, analyse


def square(size: int) -> OpShapes:
    dims = [size, size]
    return OpShapes(dims=(dims, dims), types=("c10::BFloat16",) * 2, concrete=("", ""))


def result(trace: Trace, **shapes_of: OpShapes) -> Analysis:
    """The analysis; `shapes_of` by the name of an op without `aten::`."""
    shapes = shaped_trace.shapes_of(trace, {f"aten::{name}": inputs for name, inputs in shapes_of.items()})
    return analyse(trace.recording(), shapes=shapes)


def own(found: Analysis) -> dict[tuple[str, str], int | None]:
    return {(row.layer, row.phase): row.self_flops_per_step for row in found.layers}


def test_of_ops_around_one_another_the_innermost_counts() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 90)
    trace.op("aten::linear", 20, 80).op("aten::matmul", 30, 70).op("aten::mm", 40, 60)
    found = result(trace, linear=square(2), matmul=square(2), mm=square(2))
    assert own(found)["a", "forward"] == 2 * 2**3


def test_a_composite_op_counts_where_nothing_in_it_does() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::linear", 20, 80).op("aten::copy_", 30, 70)
    assert own(result(trace, linear=square(2))) == {("Net", "forward"): 16}


def test_flops_of_steps_of_different_size_add_up_to_their_mean() -> None:
    trace = Trace()
    for step, sizes in enumerate(((1, 2), (2, 1), (1, 1))):
        start = 100 * step
        trace.annotation(f"ProfilerStep#{step}", start, start + 100).mark(".", start, start + 90)
        for place, size in enumerate(sizes):
            at = start + 40 * place
            trace.mark("ab"[place], at, at + 30).op(f"aten::{'mm' if size == 1 else 'bmm'}", at + 5, at + 25)
    found = result(trace, mm=square(1), bmm=square(2))
    # 2 + 16 + 2 FLOPs in each of two layers: 6.67 a step, 13.33 in all
    assert sorted(flops for flops in own(found).values() if flops) == [6, 7]


def test_ops_outside_of_whole_steps_do_not_count() -> None:
    trace = Trace().op("aten::mm", 0, 5).annotation("ProfilerStep#3", 10, 50).op("aten::mm", 20, 30)
    assert sum(row.flops_per_step for row in result(trace, mm=square(2)).flops) == 16


def test_what_a_compiler_traces_does_not_count() -> None:
    trace = Trace().mark(".", 0, 100).annotation("bytecode_tracing (dynamo_timed)", 5, 40).op("aten::mm", 10, 30)
    assert own(result(trace, mm=square(2))) == {("Net", "forward"): 0}


def test_an_op_whose_shapes_do_not_tell_leaves_the_layers_around_it_unknown() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 40).op("aten::mm", 20, 30)
    trace.mark("b", 50, 90).op("aten::bmm", 60, 80)
    nothing = OpShapes(dims=([], []), types=("", ""), concrete=("", ""))
    found = result(trace, mm=square(2), bmm=nothing)
    assert own(found) == {("Net", "forward"): 0, ("a", "forward"): 16, ("b", "forward"): None}
    assert {row.layer: row.flops_per_step for row in found.layers} == {"Net": None, "a": 16, "b": None}
    (row,) = found.uncounted
    assert (row.op, row.layers, row.count, row.time_per_step_ns) == ("aten::bmm", ("b",), 1, 20)
    assert [row.flops_per_step for row in found.classes if row.class_name == "gemm"] == [None]


def test_a_kernel_of_a_product_that_no_op_launched_is_unknown() -> None:
    trace = Trace().mark(".", 0, 100).op("custom::thing", 10, 30).kernel("my_gemm_kernel", 40, 70, launched=12)
    trace.op("aten::mm", 50, 60).kernel("cutlass_gemm", 70, 90, launched=52)
    for one in (trace, *trace.rotations()):
        found = result(one, mm=square(2))
        assert [(row.op, row.class_name, row.time_per_step_ns) for row in found.uncounted] == [
            ("my_gemm_kernel", "gemm", 30)
        ]
        assert sum(row.flops_per_step for row in found.flops) == 16


@pytest.mark.parametrize(("ran", "recomputed"), [(False, 0), (True, 16)])
def test_the_op_at_which_a_recomputation_stopped_does_not_count(ran: bool, recomputed: int) -> None:
    """It is the last one recomputed, and made nothing: what it would have saved ended it."""
    trace = Trace().mark("a", 0, 100).op("aten::mm", 10, 40, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 200, 300, number=1).op("aten::mul", 210, 220, thread=2, sequence=30, forward_thread=0)
    trace.op("aten::mm", 230, 240, thread=2, sequence=31, forward_thread=0).op("aten::mm", 250, 280, thread=2)
    if ran:
        trace.memory(235, 8, address=1, thread=2)
    found = {(row.layer, row.phase): row.flops_per_step for row in result(trace, mm=square(2)).flops}
    assert (found["a", "forward"], found["a", "backward"], found.get(("a", "recompute"), 0)) == (16, 16, recomputed)


def known(found: Analysis) -> dict[tuple[str, str], tuple[int | None, int | None]]:
    return {(row.layer, row.phase): (row.flops_per_step, row.known_flops_per_step) for row in found.layers}


def test_an_op_of_a_library_that_works_itself_is_unknown_on_a_cpu() -> None:
    trace = Trace().mark(".", 0, 200).mark("a", 10, 90).op("lib::product", 20, 80).op("aten::detach", 30, 40)
    trace.mark("b", 100, 190).op("aten::mm", 110, 180)
    found = result(trace, mm=square(2))
    assert [(row.op, row.class_name, row.layers) for row in found.uncounted] == [("lib::product", "other", ("a",))]
    assert known(found) == {
        ("Net", "forward"): (None, 16), ("a", "forward"): (None, 0), ("b", "forward"): (16, 16)
    }  # fmt: skip
    assert found.utilization is not None
    assert found.utilization.hardware_flops_per_step is None
    table = console_table(found, width=120)
    assert ">=" in next(line for line in table.split("\n") if line.startswith("Net ") and " on " not in line)
    assert "≥" in console_table(found, width=120, unicode=True)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("lib::attend", "aten::mm"),  # leaves its product to torch
        ("lib::glue", "aten::mul"),  # and all that is not one
        ("lib::rms_norm", "aten::detach"),
        ("c10d::allreduce_", "aten::detach"),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "aten::detach"),
        ("aten::gelu", "aten::detach"),
        ("mkldnn::_reorder", "aten::detach"),
        ("MyFunction", "aten::detach"),
    ],
)
def test_an_op_that_multiplies_nothing_itself_is_known(name: str, inside: str) -> None:
    end = 70 if inside == "aten::mul" else 30
    found = result(Trace().mark(".", 0, 100).op(name, 10, 80).op(inside, 20, end), mm=square(2))
    assert found.uncounted == ()
    assert own(found)["Net", "forward"] == (16 if inside == "aten::mm" else 0)


@pytest.mark.parametrize(
    ("op", "kernel", "unknown"),
    [
        ("lib::scan", "lib_mixing", ("lib::scan", "other")),
        ("lib::norm", "void rms_norm_kernel<float>()", None),
        ("MyFunction", "_selective_scan_fwd", ("_selective_scan_fwd", "other")),  # Triton, by no op
        ("MyFunction", "flash_fwd_kernel<bf16>", ("flash_fwd_kernel<bf16>", "attention")),  # its name tells its work
        ("MyFunction", "void mine::kernel<float>(float*)", None),  # of C++: who knows, but no Triton kernel
        ("MyFunction", "triton_poi_fused_add_0", None),
        ("MyFunction", "triton_red_fused_mean_1", None),
        ("aten::add", "_whatever", None),
        ("Optimizer.step#Adam.step", "_fused_step", None),
    ],
)
def test_kernels_of_libraries_and_of_triton(op: str, kernel: str, unknown: tuple[str, str] | None) -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 90).op(op, 20, 80)
    trace.launch(30, 31, correlation=1).kernel(kernel, 40, 60, correlation=1)
    found = result(trace)
    assert [(row.op, row.class_name) for row in found.uncounted] == ([unknown] if unknown else [])


def test_compiled_code_of_which_no_kernel_is_known_is_unknown_on_a_cpu() -> None:
    call = "## Call CompiledFxGraph abc ##"
    alone = result(Trace().mark(".", 0, 100).op(call, 10, 90), mm=square(2))
    assert own(alone) == {("Net", "forward"): None}
    with_product = result(Trace().mark(".", 0, 100).op(call, 10, 90).op("aten::mm", 20, 30), mm=square(2))
    assert own(with_product) == {("Net", "forward"): 16}


def test_the_call_of_compiled_code_may_be_an_annotation() -> None:
    call = "## Call CompiledFxGraph abc ##"
    alone = Trace().mark(".", 0, 100).annotation(call, 10, 90).op("aten::empty", 20, 30)
    assert own(result(alone, mm=square(2))) == {("Net", "forward"): None}
    generated = Trace().mark(".", 0, 100).annotation(call, 10, 90).op("cpp_fused_add_0", 20, 30)
    assert own(result(generated, mm=square(2))) == {("Net", "forward"): 0}
    trace = Trace().mark(".", 0, 50).op("aten::mm", 10, 20)
    in_optimizer = trace.annotation("Optimizer.step#AdamW.step", 60, 100).annotation(call, 70, 90)
    assert result(in_optimizer, mm=square(2)).uncounted == ()


def test_flops_without_a_layer_are_among_what_is_unattributed() -> None:
    trace = Trace().mark(".", 0, 10).node("MmBackward0", 20, 90, number=77).op("aten::mm", 30, 60, thread=2)
    found = result(trace, mm=square(2))
    assert [(row.reason, row.flops_per_step) for row in found.unattributed] == [("no forward link", 16)]
    assert [row.layer for row in found.flops] == [None]
