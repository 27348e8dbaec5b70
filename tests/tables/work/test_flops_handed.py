"""Ops that torch hands to a mode or to a subclass of Tensor: what ran counts, once."""

from __future__ import annotations

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.work.flops import FlopOps, count_of_ops
from profiler_wrapper.tables.work.roofline import StepWork, work_of_count
from profiler_wrapper.tables.work.traffic import Traffic
from recordings import Trace
from shaped_trace import addition, product, shapes_of

SUBCLASS, MODE = "PythonSubclass", "PythonDispatchMode"
MM, LOCAL = product(size=8), product(size=4)  # 1024 and 128 FLOPs; 3 * 256 and 3 * 64 bytes
SHAPES = {"aten::mm": MM, "aten::linear": MM, "aten::bmm": LOCAL, "aten::add": addition()}


def counted(trace: Trace) -> tuple[FlopOps, Traffic]:
    shapes = shapes_of(trace, SHAPES)
    found = place_events(trace.recording(), shapes=shapes)
    ops = FlopOps(found, shapes)
    return ops, Traffic(found, shapes, ops)


def work(trace: Trace) -> StepWork:
    shapes = shapes_of(trace, SHAPES)
    return work_of_count(count_of_ops(found := place_events(trace.recording(), shapes=shapes), FlopOps(found, shapes)))


def sums(trace: Trace) -> tuple[int, int]:
    """FLOPs and bytes, which are the same in whatever order a file has the events."""
    found = set()
    for one in (trace, *trace.rotations()):
        ops, traffic = counted(one)
        assert ops.uncounted() == []
        found.add((sum(flops.flops for _, flops in ops.counted()), int(traffic.bytes_moved.sum())))
    (only,) = found
    return only


def test_of_an_op_of_a_subclass_the_ops_that_its_handler_calls_count() -> None:
    """The product of the whole, 8 x 8, is a local one here, 4 x 4."""
    trace = Trace().mark(".", 0, 100).op("aten::linear", 5, 90).op("aten::mm", 10, 80).op(SUBCLASS, 11, 79)
    trace.op("aten::bmm", 20, 70)
    assert sums(trace) == (128, 192)


def test_what_a_subclass_runs_on_tensors_without_data_is_no_work() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 90).op(SUBCLASS, 11, 89)
    trace.op("aten::mm", 12, 40).op(MODE, 13, 39).op("aten::mm", 14, 30).op("aten::new_empty", 15, 20)
    trace.op("aten::bmm", 50, 80)
    assert sums(trace) == (128, 192)


def test_without_data_nothing_runs_where_the_answer_is_known_already() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 90).op(SUBCLASS, 11, 89)
    trace.op("aten::linear", 11, 41).op("aten::mm", 12, 40).op(MODE, 13, 39).op("aten::empty_strided", 14, 20)
    trace.op("aten::bmm", 50, 80)
    assert sums(trace) == (128, 192)


def test_a_mode_inside_a_subclass_that_launched_something_is_work() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 90).op(SUBCLASS, 11, 89)
    trace.op("aten::mm", 12, 40).op(MODE, 13, 39).op("aten::mm", 14, 30).kernel("gemm", 200, 300, launched=20)
    assert sums(trace) == (1024, 768)


def test_what_a_mode_runs_counts_once() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 40).op(MODE, 11, 39).op("aten::mm", 12, 30)
    trace.op("aten::add", 50, 90).op(MODE, 51, 89).op("aten::add", 52, 80)
    assert sums(trace) == (1024, 768 + 768)
    _, traffic = counted(trace)
    assert traffic.unknown(1) == ()


def test_what_a_mode_answers_without_computing_is_no_work() -> None:
    """As selective checkpointing answers with what it saved; saving inputs comes before."""
    trace = Trace().mark(".", 0, 100).op("aten::linear", 5, 45).op("aten::mm", 10, 40)
    trace.op("aten::detach", 11, 18).op(MODE, 12, 17).op("aten::detach", 13, 16)
    trace.op(MODE, 20, 39).op("aten::add", 50, 90).op(MODE, 51, 89)
    assert sums(trace) == (0, 0)


def test_an_answer_that_is_copied_back_was_not_computed() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 40).op(MODE, 20, 39).op("aten::copy_", 25, 35)
    assert sums(trace)[0] == 0


def test_an_op_counts_by_its_shapes_where_its_handler_calls_an_unknown_one() -> None:
    for handler in (SUBCLASS, MODE):
        trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 40).op(handler, 20, 39).op("mine::product", 25, 35)
        assert sums(trace) == (1024, 768)


def test_an_op_counts_by_its_shapes_where_its_handler_launches_a_kernel_itself() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 40).op(SUBCLASS, 20, 39).kernel("mine", 50, 70, launched=30)
    assert sums(trace) == (1024, 768)


# --- the optimizer ------------------------------------------------------------------------------


def test_what_an_optimizer_multiplies_is_no_work_of_the_model() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 40).op("aten::mm", 102, 106)
    trace.annotation("Optimizer.step#Muon.step", 110, 200).op("aten::mm", 120, 130).op("aten::mm", 140, 150)
    found = work(trace)
    assert (found.model_flops, found.hardware_flops) == (2 * 1024, 4 * 1024)  # the second is outside all layers
    causal = (found.causal_model_flops_by_dtype, found.causal_hardware_flops_by_dtype)
    assert tuple(sum(flops.values()) for flops in causal) == (2 * 1024, 4 * 1024)


def test_the_forward_and_backward_of_an_optimizers_closure_are_work_of_the_model() -> None:
    """A loss outside all layers makes node 7; what the optimizer computes with gradients on makes none."""
    for launching in (False, True):
        trace = Trace().annotation("Optimizer.step#LBFGS.step", 0, 900)
        trace.mark(".", 10, 100).op("aten::mm", 20, 40, sequence=5, forward_thread=0)
        trace.op("aten::linear", 120, 180, sequence=7, forward_thread=0).op("aten::mm", 130, 170)
        trace.node("MmBackward0", 300, 400, number=7).op("aten::mm", 310, 390, thread=2)
        trace.op("aten::mm", 500, 600, sequence=8, forward_thread=0)
        if launching:
            for number, at in enumerate((25, 135, 505)):
                trace.kernel("gemm", 1000 + number, 1001 + number, launched=at)
        found = work(trace)
        assert (found.model_flops, found.hardware_flops) == (3 * 1024, 4 * 1024)
        recording = trace.recording()
        charges = place_events(recording, shapes=shapes_of(trace, SHAPES))
        if launching:
            phases = [charges.attribution.places[place].phase for place in charges.charges.place.tolist()]
            assert phases == ["forward", "other", "optimizer"]
