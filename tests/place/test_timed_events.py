"""What each device event costs and where it belongs, in hand-written recordings."""

from __future__ import annotations

import pytest

from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.place import classes
from profiler_wrapper.place.names import LAUNCHED_BEFORE, NO_LAUNCH, NO_LAYERS
from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.trace.recording import Category
from recordings import AUTOGRAD, Trace, analyse


def charged(found: Placed, name: str) -> tuple[str, str, str, str]:
    """(layer or reason, phase, class, attention backend) of the first charge of this name."""
    charges = found.charges
    for i in range(len(charges)):
        if found.recording.name_of(int(charges.span[i])) == name:
            place = found.attribution.places[charges.place[i]]
            layer = found.tree.layers[place.layer].name if place.layer >= 0 else place.reason
            backend = classes.BACKENDS[charges.backend[i]] if charges.backend[i] >= 0 else ""
            return layer, place.phase, classes.CLASSES[charges.work[i]], backend
    raise AssertionError(f"nothing is charged for {name}")


def found_in(trace: Trace) -> Placed:
    """What is found, which is the same in whatever order a file has the events."""
    found = place_events(trace.recording())
    names = [found.recording.name_of(int(span)) for span in found.charges.span]
    for other in trace.rotations():
        rotated = place_events(other.recording())
        assert [charged(rotated, name) for name in names] == [charged(found, name) for name in names]
        assert sorted(rotated.charges.time_ns) == sorted(found.charges.time_ns)
        assert rotated.captured_kernels == found.captured_kernels
    return found


# --- which launch ---


def test_a_kernel_is_where_it_was_launched_not_where_it_ran() -> None:
    trace = Trace().mark("a", 0, 50).op("aten::mm", 10, 40).kernel("gemm", 70, 90, launched=20)
    found = found_in(trace.mark("b", 60, 100).op("aten::mul", 65, 95))
    assert charged(found, "gemm") == ("a", "forward", "gemm", "")
    assert found.charges.time_ns.tolist() == [20]
    assert found.charges.launch_ns.tolist() == [20]


def test_kernels_ahead_of_all_launched_ones_were_launched_before_the_trace() -> None:
    trace = (
        Trace()
        .mark("a", 0, 50)
        .kernel("early", 5, 9, correlation=960)
        .kernel("gemm", 70, 90, launched=20, correlation=901)
    )
    found = found_in(trace.kernel("late", 95, 99, correlation=950))
    assert charged(found, "early")[:2] == (LAUNCHED_BEFORE, "other")
    assert charged(found, "late")[:2] == (NO_LAUNCH, "other")


def test_a_lower_correlation_than_any_launch_has_was_launched_before_on_any_stream() -> None:
    trace = Trace().mark("a", 0, 50).kernel("gemm", 70, 90, launched=20, correlation=500)
    found = found_in(trace.kernel("other stream", 95, 99, correlation=499, stream=9))
    assert charged(found, "other stream")[0] == LAUNCHED_BEFORE


def test_a_kernel_of_no_correlation_tells_not_when_it_was_launched() -> None:
    trace = Trace().mark("a", 0, 50).kernel("gemm", 70, 90, launched=20)
    assert charged(found_in(trace.kernel("no number", 95, 99, correlation=-1)), "no number")[0] == NO_LAUNCH


@pytest.mark.parametrize(
    ("known_id", "launched", "ids_agree"),
    [(1, 12, True), (1, 10, True), (1, 20, True), (1, 9, False), (1, 21, False), (2, 12, False)],
)
def test_external_ids_join_only_where_they_agree_with_correlations(
    known_id: int, launched: int, ids_agree: bool
) -> None:
    """They agree where the launch lies in the op of the id; times of whole microseconds touch."""
    trace = (
        Trace()
        .mark("a", 0, 50)
        .op("aten::mm", 10, 20, external_id=1)
        .kernel("known", 100, 110, launched=launched, external_id=known_id)
        .mark("b", 50, 90)
        .op("aten::mul", 60, 70, external_id=2)
        .kernel("unknown", 120, 130, correlation=999, external_id=2)
    )
    assert charged(found_in(trace), "unknown")[0] == ("b" if ids_agree else NO_LAUNCH)


def test_kernels_alone() -> None:
    trace = Trace().kernel("gemm", 0, 10).kernel("softmax_kernel", 10, 25)
    result = analyse(trace.recording())
    assert (result.time_basis, result.time.total_ns, result.time.unattributed_ns) == ("device", 25, 25)
    assert [(row.reason, row.time_ns, row.count) for row in result.unattributed] == [(NO_LAUNCH, 25, 2)]
    assert result.layers == ()
    assert {row.class_name: row.time_ns for row in result.classes} == {"softmax": 15, "gemm": 10}


def test_kernels_and_launches_without_ops() -> None:
    result = analyse(Trace().kernel("gemm", 5, 10, launched=1).recording())
    assert [(row.reason, row.time_ns) for row in result.unattributed] == [(NO_LAYERS, 5)]


def test_streams_and_devices_count_each() -> None:
    trace = Trace().mark("a", 0, 99)
    trace.kernel("x", 100, 200, launched=1).kernel("y", 100, 200, launched=2, stream=8)
    trace.kernel("z", 100, 200, launched=3, device=1)
    result = analyse(trace.recording())
    assert result.time.total_ns == 300
    assert result.time.busy_ns == 200  # two streams of one device at once, and the other device


def test_kernels_of_a_replayed_graph_are_where_the_replay_was_launched() -> None:
    trace = Trace().mark(".", 0, 90).mark("a", 10, 50).launch(20, 25, correlation=5)
    for i in range(3):
        trace.kernel("gemm", 100 + 10 * i, 110 + 10 * i, correlation=5, graph=True)
    result = analyse(trace.kernel("eager", 140, 150, launched=60).recording())
    rows = {row.layer: row for row in result.layers}
    assert (rows["a"].self_time_ns, rows["a"].graph) == (30, True)
    assert (rows["Net"].self_time_ns, rows["Net"].graph) == (10, False)


@pytest.mark.parametrize("launcher", ["cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch", "cudaGraphLaunch_v10000"])
def test_a_graph_replayed_outside_all_layers_is_not_attributed(launcher: str) -> None:
    """Known by the name of its launch: on ROCm its kernels do not say that they are of a graph."""
    trace = Trace().mark("a", 10, 50).launch(20, 25, correlation=5, name=launcher)
    trace.launch(60, 65, correlation=6, name=launcher).kernel("eager", 140, 150, launched=70)
    for i, correlation in enumerate((5, 6, 6)):
        trace.kernel("gemm", 100 + 10 * i, 110 + 10 * i, correlation=correlation)
    result = analyse(trace.recording())
    assert {row.layer: (row.self_time_ns, row.graph) for row in result.layers} == {"a": (10, True), "": (10, False)}
    assert [(row.reason, row.time_ns, row.count, row.flops_per_step) for row in result.unattributed] == [
        ("graph replay", 20, 2, None)
    ]
    assert any("replayed outside all layers" in warning for warning in result.warnings)


def test_a_graph_is_replayed_by_an_optimizer_and_without_layers() -> None:
    trace = Trace().annotation("Optimizer.step#Adam.step", 0, 50).launch(20, 25, correlation=5, name="cudaGraphLaunch")
    trace.kernel("adam", 100, 130, correlation=5).launch(60, 65, correlation=6, name="cudaGraphLaunch")
    trace.kernel("gemm", 140, 150, correlation=6).kernel("eager", 160, 165, launched=70)
    result = analyse(trace.recording())
    assert [(row.phase, row.self_time_ns) for row in result.layers] == [("optimizer", 30)]
    assert [(row.reason, row.time_ns) for row in result.unattributed] == [
        ("graph replay", 10),
        ("a trace without layers", 5),
    ]


def test_the_op_around_a_replay_is_not_that_of_its_kernels() -> None:
    trace = Trace().op("aten::add", 0, 50).launch(20, 25, correlation=5, name="cudaGraphLaunch")
    trace.kernel("sm90_xmma_gemm_bf16", 100, 130, correlation=5)
    assert [row.class_name for row in analyse(trace.recording()).classes] == ["gemm"]


CAPTURE = [("cudaStreamBeginCapture", "cudaStreamEndCapture"), ("hipStreamBeginCapture", "hipStreamEndCapture")]


@pytest.mark.parametrize(("begin", "end"), CAPTURE)
def test_kernels_that_are_captured_do_not_run(begin: str, end: str) -> None:
    trace = Trace().mark("a", 0, 900).kernel("eager", 20, 30, launched=10)
    trace.launch(100, 101, name=begin)
    for i in range(40):
        trace.launch(110 + 10 * i, 112 + 10 * i, correlation=1000 + i, thread=1 + i % 2)
    trace.launch(600, 601, name=end).launch(700, 701, correlation=3000)  # this one was lost, not captured
    result = analyse(trace.recording())
    assert result.time.total_ns == 10
    assert (result.utilization, {row.flops_per_step for row in result.layers}) == (None, {None})
    assert any("40 kernels were captured" in warning for warning in result.warnings)
    assert "capture of a graph" in result.summary["verdict"]
    assert result.summary["findings"] == []


def test_only_what_is_launched_between_begin_and_end_of_a_capture_is_captured() -> None:
    trace = Trace().kernel("eager", 20, 30, launched=10).launch(50, 51, correlation=900)  # its kernel was lost
    for begin in (100, 300):  # two captures of two kernels each
        trace.launch(begin, begin + 5, name="cudaStreamBeginCapture")
        trace.launch(begin + 5, begin + 9, correlation=1000 + begin)
        trace.launch(begin + 50, begin + 52, correlation=1001 + begin, thread=2)
        trace.launch(begin + 90, begin + 95, name="cudaStreamEndCapture")
    trace.kernel("between", 500, 510, launched=250).launch(490, 491, correlation=3000)
    trace.kernel("beside", 520, 530, launched=120, thread=3)  # by a thread that a capture leaves alone: it ran
    assert found_in(trace).captured_kernels == 4


def test_a_capture_may_begin_before_the_trace_or_end_after_it() -> None:
    trace = Trace().kernel("eager", 20, 30, launched=15).launch(5, 6, correlation=100)
    trace.launch(10, 11, name="cudaStreamEndCapture").launch(50, 51, name="cudaStreamBeginCapture")
    trace.launch(60, 61, correlation=101)
    found = found_in(trace)
    assert (found.captured_kernels, len(found.lost_launches)) == (2, 0)


# --- kernels that were lost ---

LAUNCH_NAMES = [
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernelEx", "cudaGraphLaunch",
    "hipLaunchKernel", "hipExtModuleLaunchKernel", "hipGraphLaunch",
]  # fmt: skip


@pytest.mark.parametrize("name", LAUNCH_NAMES)
def test_a_launch_without_a_kernel_is_one_that_was_lost(name: str) -> None:
    trace = Trace().mark("a", 0, 50).mark("a.b", 10, 20).launch(12, 13, correlation=100, name=name)
    trace.mark("c", 60, 90).kernel("gemm", 100, 130, launched=70)
    result = analyse(trace.recording())
    assert {row.layer: row.lost_launches for row in result.layers} == {"a": 1, "a.b": 1, "c": 0}
    assert [(row.lost_launches, row.time_ns) for row in result.steps] == [(1, 30)]
    assert (result.complete, result.time.total_ns, result.time.busy_ns) == (False, 30, 30)
    assert {row.idle_ns for row in result.layers} == {None}
    (said,) = (warning for warning in result.warnings if "lower bounds" in warning)
    assert said.startswith("1 of 2 launches have no kernel in the trace, of a.b (1)")


@pytest.mark.parametrize(
    "name", ["cudaMemsetAsync", "hipMemsetAsync", "cudaMemcpyAsync", "cudaLaunchHostFunc", "cudaEventRecord"]
)
def test_other_calls_need_no_event(name: str) -> None:
    trace = Trace().mark("a", 0, 50).launch(12, 13, correlation=100, name=name).kernel("gemm", 100, 130, launched=20)
    result = analyse(trace.recording())
    assert result.complete
    assert [row.lost_launches for row in (*result.layers, *result.steps)] == [0, 0]


def test_lost_launches_are_those_of_their_steps_and_add_up() -> None:
    trace = Trace()
    for step in range(3):
        begin = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 900).mark("a", begin + 10, begin + 100)
        for i in range(3):
            number = 10 * step + i + 1
            trace.launch(begin + 20 + i, begin + 21 + i, correlation=number)
            if (step, i) not in ((0, 0), (0, 1), (2, 2)):
                trace.kernel("gemm", begin + 200 + 10 * i, begin + 205 + 10 * i, correlation=number)
    trace.launch(2950, 2951, correlation=99)  # in no step
    for rotated in trace.rotations():
        result = analyse(rotated.recording())
        assert [(row.step, row.lost_launches, row.time_ns) for row in result.steps] == [
            (0, 2, 5), (1, 0, 15), (2, 1, 10), (None, 1, 0),
        ]  # fmt: skip
        assert {row.layer: row.lost_launches for row in result.layers} == {"a": 3, "": 1}
        assert result.lost_launches == 4
        (said,) = (warning for warning in result.warnings if "lower bounds" in warning)
        assert "4 of 10 launches have no kernel in the trace, of a (3), code outside of all layers (1)" in said
        assert "in step 0, 2: " in said


def test_a_step_that_does_not_count_has_lost_nothing() -> None:
    trace = Trace()
    for step in range(2):
        begin = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 900).kernel(
            "gemm", begin + 50, begin + 60, launched=begin
        )
    trace.launch(1100, 1101, correlation=99)
    assert analyse(trace.recording(), run={"timed_steps": [0]}).complete
    assert not analyse(trace.recording(), run={"timed_steps": [0, 1]}).complete


def test_without_any_device_event_times_are_those_of_the_cpu_and_none_is_a_lower_bound() -> None:
    result = analyse(Trace().mark("a", 0, 50).op("aten::mm", 10, 40).launch(12, 13, correlation=100).recording())
    assert (result.time_basis, result.lost_launches) == ("cpu", 0)
    assert any(warning.startswith("times are those of the CPU") for warning in result.warnings)


def test_two_kernels_under_the_number_of_one_launch_make_up_for_the_other() -> None:
    trace = Trace().mark("a", 0, 50).launch(12, 13, correlation=1, name="hipLaunchKernel")
    trace.launch(22, 23, correlation=2, name="hipLaunchKernel").kernel("gemm", 100, 130, correlation=1)
    assert analyse(trace.recording()).lost_launches == 1
    assert analyse(trace.kernel("gemm", 100, 130, correlation=1, stream=8).recording()).lost_launches == 0
    assert analyse(trace.launch(32, 33, correlation=3, name="hipGraphLaunch").recording()).lost_launches == 1


def test_an_empty_recording() -> None:
    with pytest.raises(EmptyRecording, match="stopped before the first step"):
        analyse(Trace().annotation("ProfilerStep#1", 0, 10).recording())


# --- what kind of work ---


def test_the_op_tells_the_class_and_the_kernel_where_it_does_not() -> None:
    trace = Trace().op("aten::layer_norm", 0, 10).kernel("elementwise_kernel", 100, 110, launched=5)
    trace.op("my::op", 20, 30).kernel("softmax_warp", 110, 120, launched=25)
    trace.op("my::op", 40, 50).kernel("unheard_of", 120, 130, launched=45)
    found = found_in(trace)
    assert [charged(found, name)[2] for name in ("elementwise_kernel", "softmax_warp", "unheard_of")] == [
        "norm",
        "softmax",
        "other",
    ]


def test_an_op_within_another_tells_for_itself() -> None:
    trace = Trace().op("aten::linear", 0, 50).op("aten::copy_", 5, 10).kernel("k", 100, 110, launched=6)
    assert charged(found_in(trace.op("aten::t", 20, 30).kernel("l", 110, 120, launched=25)), "k")[2] == "copy"
    assert charged(found_in(trace), "l")[2] == "gemm"


def test_a_layer_inside_an_op_does_not_inherit_its_class() -> None:
    trace = (
        Trace().op("aten::layer_norm", 0, 50).mark("a", 10, 40).op("my::op", 20, 30).kernel("k", 100, 110, launched=25)
    )
    assert charged(found_in(trace), "k") == ("a", "forward", "other", "")


def test_attention_is_known_by_its_op() -> None:
    trace = Trace().op("aten::_scaled_dot_product_flash_attention", 0, 90).op("aten::_flash_attention_forward", 10, 80)
    trace.kernel("strange_name", 100, 150, launched=20).op("aten::fill_", 30, 40).kernel("fill", 150, 155, launched=35)
    found = found_in(trace)
    assert charged(found, "strange_name")[2:] == ("attention", "flash")
    assert charged(found, "fill")[2:] == ("attention", "flash")  # part of it


def test_an_attention_backend_is_the_outermost_that_tells() -> None:
    trace = Trace().op("aten::_scaled_dot_product_attention_math", 0, 90).op("aten::bmm", 10, 20)
    assert charged(found_in(trace.kernel("gemm", 100, 150, launched=15)), "gemm")[2:] == ("attention", "math")


def test_another_backend_inside_of_one_is_part_of_it() -> None:
    trace = Trace().op("aten::_scaled_dot_product_flash_attention", 0, 90).op("flash_attn_3::fwd", 10, 80)
    assert charged(found_in(trace.kernel("k", 100, 150, launched=15)), "k")[3] == "flash"


def test_attention_is_known_by_its_kernel_where_the_op_says_nothing() -> None:
    trace = Trace().op("my::op", 0, 90).kernel("fmha_cutlassF_bf16", 100, 150, launched=15)
    assert charged(found_in(trace), "fmha_cutlassF_bf16")[2:] == ("attention", "mem_efficient")


def test_copies_are_copies_whatever_launched_them() -> None:
    trace = Trace().op("aten::mm", 0, 90).kernel("Memcpy HtoD", 100, 150, launched=15, category=Category.MEMCPY)
    assert charged(found_in(trace), "Memcpy HtoD")[2] == "copy"


def test_a_change_of_layout_is_a_copy_whatever_needs_it() -> None:
    trace = Trace().op("aten::miopen_convolution", 0, 50)
    trace.kernel("batched_transpose_16x32_half", 100, 110, launched=10)
    trace.kernel("igemm_fwd_gtcx3_nhwc_bf16_bx0", 110, 140, launched=20)
    assert {row.class_name: row.time_ns for row in analyse(trace.recording()).classes} == {"gemm": 30, "copy": 10}


def test_ops_that_are_views_and_allocations_compute_nothing() -> None:
    trace = Trace().op("aten::linear", 0, 100).op("aten::t", 0, 20).op("aten::transpose", 5, 15)
    trace.op("aten::addmm", 20, 100).op("aten::empty", 30, 40)
    result = analyse(trace.recording())
    assert {row.class_name: row.time_ns for row in result.classes} == {"gemm": 100}  # it is what they are for
    assert {row.op: row.class_name for row in result.operators} == {
        "aten::linear": "gemm", "aten::t": "other", "aten::transpose": "other", "aten::addmm": "gemm",
        "aten::empty": "other",
    }  # fmt: skip


def test_kernels_without_an_op_are_no_one_class() -> None:
    trace = Trace().kernel("at::native::vectorized_elementwise_kernel", 100, 130, launched=10)
    result = analyse(trace.kernel("ampere_sgemm_128x64_tn", 130, 150, launched=20).recording())
    assert [(row.op, row.class_name) for row in result.operators] == [("(no op)", "other")]
    assert {row.class_name: row.time_ns for row in result.classes} == {"elementwise": 30, "gemm": 20}


def test_a_collectives_own_kernel_communicates_and_its_helpers_do_not() -> None:
    trace = Trace().op("c10d::allreduce_", 0, 90).kernel("ncclDevKernel_AllReduce", 100, 150, launched=15)
    found = found_in(trace.kernel("void at::native::elementwise_kernel", 150, 160, launched=30))
    assert charged(found, "ncclDevKernel_AllReduce")[2] == "communication"
    assert charged(found, "void at::native::elementwise_kernel")[2] == "elementwise"


def test_what_the_optimizer_launches() -> None:
    trace = Trace().mark("a", 0, 5).annotation("Optimizer.step#AdamW.step", 10, 90).op("aten::_foreach_add_", 20, 30)
    trace.kernel("multi_tensor_apply", 100, 130, launched=25).kernel("ncclDevKernel", 130, 140, launched=50)
    found = found_in(trace)
    assert charged(found, "multi_tensor_apply")[1:3] == ("optimizer", "optimizer")
    assert charged(found, "ncclDevKernel")[1:3] == ("optimizer", "communication")


def test_a_collective_launched_bare_where_gradients_accumulate_has_no_layer() -> None:
    trace = Trace().mark("fc", 0, 50).op("aten::mm", 10, 20, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 100, 150, number=1).node("torch::autograd::AccumulateGrad", 160, 200)
    trace.kernel("ncclKernel_AllReduce", 300, 400, launched=170, thread=AUTOGRAD)
    trace.kernel("add", 400, 410, launched=180, thread=AUTOGRAD)
    found = found_in(trace)
    assert charged(found, "ncclKernel_AllReduce")[:3] == ("", "backward", "communication")
    assert charged(found, "add")[:2] == ("fc", "accumulate_grad")


# --- CPU-only traces ---


def test_own_time_of_ops_on_a_cpu() -> None:
    trace = Trace().mark(".", 0, 1000).mark("fc", 100, 300).op("aten::linear", 110, 290).op("aten::addmm", 150, 250)
    result = analyse(trace.op("aten::relu", 400, 450).annotation("named", 0, 900).recording())
    assert result.time_basis == "cpu"
    assert {row.layer: row.self_time_ns for row in result.layers} == {"Net": 50, "fc": 180}
    assert {row.layer: row.time_ns for row in result.layers} == {"Net": 230, "fc": 180}
    assert result.time.busy_ns is None
    assert all(row.idle_ns is None and row.exposed_communication_ns is None for row in result.layers)


def test_an_op_that_only_calls_another_is_not_counted() -> None:
    result = analyse(Trace().op("aten::linear", 0, 10).op("aten::addmm", 0, 10).recording())
    assert [(row.reason, row.time_ns, row.count) for row in result.unattributed] == [(NO_LAYERS, 10, 1)]


def test_a_layer_recomputed_inside_a_node_takes_the_nodes_time() -> None:
    # The node [200, 400] is an op; the mark [220, 300] inside it has an op [240, 250].
    trace = Trace().mark("fc", 0, 100).op("aten::mm", 10, 60, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 200, 400, number=1).mark("fc", 220, 300, thread=AUTOGRAD)
    result = analyse(trace.op("aten::mm", 240, 250, thread=AUTOGRAD).recording())
    assert {(row.phase, row.self_time_ns) for row in result.rows("fc")} == {
        ("forward", 50),
        ("recompute", 80),
        ("backward", 120),
    }
    assert result.time.total_ns == 250


def test_the_backward_of_attention_made_of_plain_ops_is_attention_too() -> None:
    trace = Trace().mark("attn", 0, 90).op("aten::_scaled_dot_product_attention_math", 10, 80)
    trace.op("aten::bmm", 20, 30, sequence=1, forward_thread=0).op("aten::mm", 82, 88, sequence=2, forward_thread=0)
    trace.node("MmBackward0", 100, 150, number=2).kernel("projection", 300, 310, launched=110, thread=AUTOGRAD)
    trace.node("BmmBackward0", 200, 290, number=1).kernel("scores", 310, 320, launched=210, thread=AUTOGRAD)
    trace.mark("attn", 220, 280, thread=AUTOGRAD).kernel("recomputed", 320, 330, launched=230, thread=AUTOGRAD)
    found = found_in(trace)
    assert charged(found, "scores") == ("attn", "backward", "attention", "math")
    assert charged(found, "projection")[3] == ""
    assert charged(found, "recomputed")[1:] == ("recompute", "other", "")


def test_a_trace_that_lost_its_device_says_so_and_has_no_speeds() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 1000).mark("a", 0, 900).op("aten::mm", 100, 800)
    alone = analyse(trace.recording())
    torn = analyse(trace.launch(700, 710, correlation=3).recording())
    lost = "kernels were launched, and no event of the device that ran them is in the trace"
    assert torn.time_basis == alone.time_basis == "cpu"
    assert f"times are those of the CPU: {lost}" in torn.warnings
    assert f"FLOPs and bytes moved are not available, because {lost}" in torn.warnings
    assert not any(lost in warning for warning in alone.warnings)
