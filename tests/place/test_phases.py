"""Which layer and phase each event of hand-written recordings gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from profiler_wrapper.place.names import NO_FORWARD_LINK, NO_LAYERS
from profiler_wrapper.place.placed import Placed, place_events
from recordings import AUTOGRAD, MAIN, NODE, Trace


def found_in(trace: Trace) -> Placed:
    """What is found, which is the same in whatever order a file has the events."""
    found = place_events(trace.recording())
    for other in trace.rotations():
        assert all_places(place_events(other.recording())) == all_places(found)
    return found


def all_places(found: Placed) -> dict[tuple[str, int, int], tuple[str, str, str]]:
    """(layer, phase, reason) per event, by its name, thread and start."""
    spans, places = found.recording.spans, {}
    for span in np.flatnonzero(found.attribution.place_of >= 0).tolist():
        layer, phase, reason, _ = found.attribution.place(span)
        name = found.tree.layers[layer].name if layer >= 0 else ""
        places[found.recording.name_of(span), int(spans.lane[span]), int(spans.start_ns[span])] = name, phase, reason
    return places


def place(found: Placed, name: str, occurrence: int = 0) -> tuple[str, str]:
    """(layer, phase) of a span by its name; for what has no layer its reason in brackets."""
    spans = [i for i in range(len(found.recording.spans)) if found.recording.name_of(i) == name]
    where = found.attribution.place(spans[occurrence])
    if where.layer >= 0:
        return found.tree.layers[where.layer].name, where.phase
    return f"[{where.reason}]" if where.reason else "", where.phase


def trained(**node: Any) -> Trace:
    """One layer with one numbered op, and its node in backward on another thread."""
    return (
        Trace()
        .mark(".", 0, 100)
        .mark("fc", 10, 50)
        .op("aten::linear", 20, 40, sequence=5, forward_thread=0)
        .op("aten::addmm", 25, 35, sequence=5, forward_thread=0)
        .op("loss", 60, 70)
        .node("AddmmBackward0", 200, 260, number=5, **node)
        .op("aten::mm", 210, 220, thread=AUTOGRAD)
    )


# --- forward ---


def test_an_op_is_in_the_innermost_layer_around_it() -> None:
    trace = Trace().op("before", 0, 5).mark(".", 10, 100).op("own", 11, 12).mark("a", 20, 80).mark("a.b", 30, 40)
    found = found_in(trace.op("inner", 31, 32).op("after_inner", 50, 51).op("after", 110, 120))
    assert place(found, "own") == ("Net", "forward")
    assert place(found, "inner") == ("a.b", "forward")
    assert place(found, "after_inner") == ("a", "forward")
    assert place(found, "before") == place(found, "after") == ("", "other")


def test_a_layer_on_one_thread_is_not_around_another_thread() -> None:
    found = found_in(Trace().mark("a", 0, 100).op("mine", 10, 20).op("other", 10, 20, thread=9))
    assert place(found, "mine") == ("a", "forward")
    assert place(found, "other") == ("", "other")


def test_each_thread_has_layers_of_its_own() -> None:
    trace = Trace().mark("a", 0, 100).mark("b", 0, 100, thread=9).op("x", 10, 20).op("y", 10, 20, thread=9)
    found = found_in(trace)
    assert (place(found, "x"), place(found, "y")) == (("a", "forward"), ("b", "forward"))


def test_prefill_and_decode_hold_for_all_layers_below() -> None:
    trace = Trace().mark(".", 0, 100, flags=("prefill",)).mark("a", 10, 20).op("first", 11, 12)
    found = found_in(trace.mark(".", 200, 300, flags=("decode",)).mark("a", 210, 220).op("next", 211, 212))
    assert place(found, "first") == ("a", "prefill")
    assert place(found, "next") == ("a", "decode")


def test_an_annotation_that_crosses_a_layer_hides_it_from_nothing() -> None:
    # Begun inside the module, ended after it: the op lies in both.
    trace = Trace().module("Net_0", 0, 100).annotation("block", 50, 150).op("aten::mm", 60, 70)
    found = found_in(trace)
    assert place(found, "aten::mm") == ("Net", "forward")
    assert found.enclosing[2] == 1  # the named block still has it


def test_a_zero_long_op_at_a_boundary_of_whole_microseconds() -> None:
    trace = Trace().mark("a", 0, 5000).mark("b", 5000, 9000).op("aten::t", 5000, 5000).op("aten::mm", 6000, 7000)
    assert place(found_in(trace), "aten::t") == ("b", "forward")


# --- backward ---


def the_forward_op(found: Placed) -> int:
    """The one forward op whose node ran."""
    (op,) = found.attribution.forward_op[found.attribution.forward_op >= 0].tolist()
    return int(op)


def test_a_node_belongs_to_the_layer_of_its_forward_op_by_arrow() -> None:
    found = found_in(trained().arrow(25, 200))
    assert place(found, NODE + "AddmmBackward0") == ("fc", "backward")
    assert place(found, "aten::mm") == ("fc", "backward")
    assert found.recording.name_of(the_forward_op(found)) == "aten::addmm"


def test_a_node_belongs_to_the_layer_of_its_forward_op_by_number() -> None:
    assert place(found_in(trained()), "aten::mm") == ("fc", "backward")


@pytest.mark.parametrize("arrow", [False, True])
def test_the_first_node_of_a_process_has_the_number_0(arrow: bool) -> None:
    trace = Trace().mark("fc", 10, 50).op("aten::linear", 20, 40, sequence=0, forward_thread=0)
    trace.node("AddmmBackward0", 200, 260, number=0).op("aten::mm", 210, 220, thread=AUTOGRAD)
    assert place(found_in(trace.arrow(20, 200) if arrow else trace), "aten::mm") == ("fc", "backward")


@pytest.mark.parametrize("begins", [200, 310])
def test_a_forward_op_that_begins_with_the_node_or_after_it_did_not_make_it(begins: int) -> None:
    trace = trained().mark("later", begins, 400).op("aten::addmm", begins, 320, sequence=5, forward_thread=0)
    found = found_in(trace)
    assert place(found, "aten::mm") == ("fc", "backward")
    assert found.recording.spans.start_ns[the_forward_op(found)] == 25


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("torch::autograd::CopySlices", "writes"),
        ("CopySlices", "writes"),
        ("AsStridedBackward0", "writes"),
        ("MulBackward0", f"[{NO_FORWARD_LINK}]"),  # made by nothing that is seen
    ],
)
@pytest.mark.parametrize("arrow", [False, True])
def test_the_nodes_of_a_view_are_made_in_the_last_op_before_their_number(name: str, layer: str, arrow: bool) -> None:
    trace = trained().mark("writes", 110, 150).op("aten::copy_", 120, 140, sequence=6, forward_thread=0)
    trace.mark("later", 160, 190).op("aten::mul", 170, 180, sequence=10, forward_thread=0)
    trace.node(name, 300, 400, number=9).op("inside", 310, 320, thread=AUTOGRAD)
    found = found_in(trace.arrow(25, 200) if arrow else trace)
    assert place(found, "inside") == (layer, "backward")


def test_a_node_of_a_view_made_before_all_ops_is_of_no_known_layer() -> None:
    trace = trained().node("torch::autograd::CopySlices", 300, 400, number=4).op("inside", 310, 320, thread=AUTOGRAD)
    assert place(found_in(trace), "inside") == (f"[{NO_FORWARD_LINK}]", "backward")


def test_a_node_that_only_a_later_op_has_the_number_of_is_of_no_known_layer() -> None:
    trace = Trace().mark("fc", 10, 50).node("AddmmBackward0", 200, 260, number=5).op("x", 210, 220, thread=AUTOGRAD)
    trace.mark("later", 300, 400).op("aten::addmm", 310, 320, sequence=5, forward_thread=0)
    assert place(found_in(trace), "x") == (f"[{NO_FORWARD_LINK}]", "backward")


def test_numbers_count_per_thread_and_the_arrow_tells_which() -> None:
    trace = (
        trained().mark("elsewhere", 0, 100, thread=9).op("aten::mul", 30, 40, thread=9, sequence=5, forward_thread=0)
    )
    assert place(found_in(trace), "aten::mm") == (f"[{NO_FORWARD_LINK}]", "backward")
    assert place(found_in(trace.arrow(25, 200)), "aten::mm") == ("fc", "backward")


def test_another_arrow_of_the_same_thread_tells_the_thread() -> None:
    # retain_graph: the second run of a node has no arrow.
    trace = (
        trained()
        .arrow(25, 200)
        .mark("elsewhere", 0, 100, thread=9)
        .op("aten::mul", 30, 40, thread=9, sequence=5, forward_thread=0)
        .node("AddmmBackward0", 300, 360, number=5)
        .op("second run", 310, 320, thread=AUTOGRAD)
    )
    assert place(found_in(trace), "second run") == ("fc", "backward")


def test_an_arrow_counts_more_than_the_profilers_number_of_the_thread() -> None:
    # Two threads, one after the other, went by one number.
    trace = trained().arrow(25, 200)
    trace.mark("elsewhere", 0, 100, thread=9).op("aten::mul", 30, 40, thread=9, sequence=5, forward_thread=0)
    trace.node("MulBackward0", 300, 360, number=5).op("theirs", 310, 320, thread=AUTOGRAD)
    found = found_in(trace.arrow(30, 300, forward_thread=9))
    assert place(found, "aten::mm") == ("fc", "backward")
    assert place(found, "theirs") == ("elsewhere", "backward")


def test_the_node_inside_an_unnumbered_wrapper_has_the_number() -> None:
    trace = trained()
    trace.node("MulBackward0", 300, 400).op("hook", 301, 310, thread=AUTOGRAD)
    trace.op("MulBackward0", 320, 390, thread=AUTOGRAD, sequence=5, forward_thread=1).op("x", 330, 340, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "hook") == place(found, "x") == ("fc", "backward")


def test_a_number_of_another_op_inside_a_wrapper_says_nothing() -> None:
    trace = trained().node("MulBackward0", 300, 400)
    trace.op("OtherBackward0", 320, 390, thread=AUTOGRAD, sequence=5, forward_thread=1)
    assert place(found_in(trace), "OtherBackward0") == (f"[{NO_FORWARD_LINK}]", "backward")


def test_a_node_of_the_loss_is_outside_of_all_layers() -> None:
    trace = trained().op("aten::sum", 80, 90, thread=7, sequence=8, forward_thread=0)
    found = found_in(trace.node("SumBackward0", 190, 195, number=8))
    assert place(found, NODE + "SumBackward0") == ("", "backward")


def test_gradients_are_accumulated_for_the_owner_of_the_node_that_finished_last() -> None:
    accumulate = "torch::autograd::AccumulateGrad"
    trace = trained().mark("b", 101, 120).op("aten::mul", 102, 110, sequence=6, forward_thread=0)
    trace.node("MulBackward0", 150, 160, number=6).node(accumulate, 161, 170)
    found = found_in(trace.node(accumulate, 270, 280).node(accumulate, 281, 290))
    phases = [place(found, NODE + accumulate, i) for i in range(3)]
    assert phases == [("b", "accumulate_grad"), ("fc", "accumulate_grad"), ("fc", "accumulate_grad")]


def test_gradients_are_accumulated_at_the_very_end_of_the_node() -> None:
    accumulate = "torch::autograd::AccumulateGrad"
    assert place(found_in(trained().node(accumulate, 260, 270)), NODE + accumulate) == ("fc", "accumulate_grad")


def test_gradients_accumulated_inside_a_node_that_still_runs_are_not_its_own() -> None:
    # Reentrant checkpointing: all of the block's backward runs within one node.
    trace = Trace().mark("h.0", 0, 100).op("CheckpointFunction", 10, 90, sequence=4, forward_thread=0)
    trace.mark("head", 110, 120).op("aten::mm", 112, 118, sequence=8, forward_thread=0)
    trace.node("MmBackward0", 150, 190, number=8).node("CheckpointFunctionBackward", 200, 500, number=4)
    trace.node("torch::autograd::AccumulateGrad", 202, 204)  # of the node before, late
    trace.mark("h.0.mlp", 210, 250, thread=AUTOGRAD).op("aten::mul", 220, 230, thread=AUTOGRAD, sequence=30)
    trace.node("MulBackward0", 300, 350, number=30, forward_thread=2).arrow(220, 300, forward_thread=AUTOGRAD)
    trace.node("torch::autograd::AccumulateGrad", 360, 370)
    found = found_in(trace)
    owners = [place(found, NODE + "torch::autograd::AccumulateGrad", i) for i in range(2)]
    assert owners == [("head", "accumulate_grad"), ("h.0.mlp", "accumulate_grad")]


def test_gradients_accumulated_before_any_node_have_no_known_layer() -> None:
    trace = Trace().mark("fc", 0, 100).node("torch::autograd::AccumulateGrad", 200, 210)
    found = found_in(trace)
    assert place(found, NODE + "torch::autograd::AccumulateGrad") == (f"[{NO_FORWARD_LINK}]", "accumulate_grad")


def test_a_collective_launched_where_gradients_accumulate_belongs_to_no_layer() -> None:
    trace = trained().node("torch::autograd::AccumulateGrad", 270, 400)
    trace.op("c10d::allreduce_", 300, 350, thread=AUTOGRAD).kernel("ncclDevKernel_AllReduce", 500, 600, launched=310)
    trace.op("aten::div_", 360, 370, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "c10d::allreduce_") == ("", "backward")
    assert place(found, "aten::div_") == ("fc", "accumulate_grad")


def test_the_graph_root_is_outside() -> None:
    found = found_in(trained().node("torch::autograd::GraphRoot", 150, 160).op("g", 151, 155, thread=AUTOGRAD))
    assert place(found, "g") == ("", "backward")


# --- recompute ---


def test_a_mark_inside_a_node_is_recomputed() -> None:
    trace = trained().mark("fc", 230, 250, thread=AUTOGRAD).op("again", 235, 240, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "again") == ("fc", "recompute")
    assert place(found, "aten::mm") == ("fc", "backward")


def test_the_blocks_own_recomputed_ops_go_to_what_the_marks_beside_them_have_in_common() -> None:
    # Transformers checkpoints forward inside the hooks: the block's own mark does not fire again.
    trace = Trace().mark("h.0", 0, 100).mark("h.0.attn", 10, 20).mark("h.0.mlp", 30, 40)
    trace.op("aten::add", 50, 60, sequence=9, forward_thread=0)
    trace.node("AddBackward0", 200, 400, number=9)
    trace.mark("h.0.attn", 210, 220, thread=AUTOGRAD).mark("h.0.mlp", 240, 250, thread=AUTOGRAD)
    trace.op("residual", 230, 235, thread=AUTOGRAD, sequence=20, forward_thread=0).op("sub", 231, 232, thread=AUTOGRAD)
    trace.op("gradient", 300, 310, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "residual") == place(found, "sub") == ("h.0", "recompute")
    assert place(found, "gradient") == ("h.0", "backward")


@pytest.mark.parametrize(("recomputes", "phase"), [(False, "backward"), (True, "recompute")])
def test_a_named_block_in_a_node_is_recomputed_where_it_makes_nodes_itself(recomputes: bool, phase: str) -> None:
    fields = {"sequence": 30, "forward_thread": 0} if recomputes else {}
    trace = Trace().annotation("experts", 0, 50).op("aten::mm", 10, 40, sequence=5, forward_thread=0)
    trace.node("ExpertsBackward", 200, 300, number=5).annotation("exchange", 210, 240, thread=AUTOGRAD)
    trace.op("copy", 215, 220, thread=AUTOGRAD, **fields).op("aten::mul", 250, 290, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "copy") == ("exchange", phase)
    assert place(found, "aten::mul") == ("experts", "backward")


def test_a_named_block_in_a_backward_that_is_differentiated_itself_is_not_recomputed() -> None:
    # create_graph: all ops of backward make nodes, those of a block that it names too.
    trace = Trace().annotation("experts", 0, 50).op("aten::mm", 10, 40, sequence=5, forward_thread=0)
    trace.node("ExpertsBackward", 200, 300, number=5).annotation("exchange", 210, 240, thread=AUTOGRAD)
    trace.op("copy", 215, 220, thread=AUTOGRAD, sequence=30, forward_thread=0)
    trace.op("aten::mul", 250, 290, thread=AUTOGRAD, sequence=31, forward_thread=0)
    found = found_in(trace)
    assert place(found, "copy") == ("exchange", "backward")
    assert place(found, "aten::mul") == ("experts", "backward")


@pytest.mark.parametrize(("second", "layer"), [("h.0.mlp", "h.0"), ("other", "h.0.mlp")])
def test_what_recomputed_marks_have_in_common_counts_more_than_the_node(second: str, layer: str) -> None:
    """The node is that of the block's last op; where the marks have no layer in common, it is all there is."""
    trace = Trace().mark("h.0", 0, 100).mark("h.0.attn", 10, 20).mark("h.0.mlp", 30, 60)
    trace.op("aten::add", 40, 50, sequence=9, forward_thread=0).mark("other", 110, 120)
    trace.node("AddBackward0", 200, 400, number=9)
    trace.mark("h.0.attn", 210, 220, thread=AUTOGRAD).mark(second, 240, 250, thread=AUTOGRAD)
    trace.op("residual", 230, 235, thread=AUTOGRAD, sequence=20, forward_thread=0)
    assert place(found_in(trace), "residual") == (layer, "recompute")


def test_ops_with_gradients_in_a_node_that_runs_without_are_recomputed() -> None:
    trace = trained().op("again", 202, 206, thread=AUTOGRAD, sequence=30, forward_thread=0)
    trace.op("inside", 203, 204, thread=AUTOGRAD).op("aten::detach", 222, 223, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "again") == place(found, "inside") == ("fc", "recompute")
    assert place(found, "aten::mm") == ("fc", "backward")


def test_reentrant_checkpointing_recomputes_and_runs_backward_inside_one_node() -> None:
    trace = Trace().mark("h.0", 0, 100).op("CheckpointFunction", 10, 90, sequence=4, forward_thread=0)
    trace.node("CheckpointFunctionBackward", 200, 500, number=4)
    trace.op("CheckpointFunctionBackward", 201, 499, thread=AUTOGRAD, sequence=4, forward_thread=1)
    trace.op("aten::mul", 210, 220, thread=AUTOGRAD, sequence=30, forward_thread=0)
    trace.node("MulBackward0", 300, 400, number=30).op("gradient", 310, 320, thread=AUTOGRAD)
    trace.op("copy", 450, 460, thread=AUTOGRAD)
    found = found_in(trace)
    assert place(found, "aten::mul") == ("h.0", "recompute")
    assert place(found, "gradient") == ("h.0", "backward")
    assert place(found, "copy") == ("h.0", "backward")


def test_nodes_made_in_backward_inherit_the_layer() -> None:
    trace = trained()  # create_graph: backward's own op 240 makes node 12, run later
    trace.op("aten::mul", 240, 250, thread=AUTOGRAD, sequence=12, forward_thread=0)
    trace.node("MulBackward0", 300, 330, number=12, forward_thread=2).op("second", 310, 320, thread=AUTOGRAD)
    found = found_in(trace.arrow(25, 200).arrow(240, 300, forward_thread=AUTOGRAD))
    assert place(found, "aten::mul") == place(found, "second") == ("fc", "backward")


# --- what has no layer ---


def test_optimizer_data_loading_and_gloo_threads() -> None:
    trace = trained().annotation("Optimizer.step#SGD.step", 400, 500).op("aten::add_", 410, 420)
    trace.annotation("enumerate(DataLoader)#x.__next__", 500, 600).op("aten::stack", 510, 520)
    trace.op("gloo:all_gather", 10, 90, thread=77).op("aten::cat", 20, 30, thread=77)
    found = found_in(trace)
    assert place(found, "aten::add_") == ("", "optimizer")
    assert place(found, "aten::stack") == ("", "other")
    assert place(found, "aten::cat") == ("", "other")


def test_the_forward_of_an_optimizers_closure_is_no_optimizer() -> None:
    # LBFGS runs its closure in step(): that forward makes node 7. What the optimizer computes makes no node; it has
    # no number, or that of the next node, which here the next step's closure makes.
    trace = Trace().mark("fc", 0, 10).annotation("Optimizer.step#LBFGS.step", 400, 600)
    trace.op("loss 1", 410, 420, sequence=7, forward_thread=0).op("part of loss 1", 412, 415)
    trace.node("MseLossBackward0", 430, 450, number=7).op("add", 500, 510)
    trace.op("dot", 520, 530, sequence=8, forward_thread=0)
    trace.annotation("Optimizer.step#LBFGS.step", 700, 900).op("loss 2", 710, 720, sequence=8, forward_thread=0)
    found = found_in(trace.node("MseLossBackward0", 730, 750, number=8).op("dot 2", 800, 810))
    assert {name: place(found, name) for name in ("loss 1", "part of loss 1", "loss 2")} == {
        "loss 1": ("", "other"), "part of loss 1": ("", "other"), "loss 2": ("", "other"),
    }  # fmt: skip
    assert [place(found, name) for name in ("add", "dot", "dot 2")] == [("", "optimizer")] * 3


def test_a_trace_without_layers_says_so() -> None:
    trace = Trace().op("aten::mm", 0, 10, sequence=1, forward_thread=0).node("MmBackward0", 20, 30, number=1)
    trace.annotation("Optimizer.step#SGD.step", 40, 60).op("aten::add_", 45, 50)
    trace.annotation("enumerate(DataLoader)#x.__next__", 70, 80).op("aten::stack", 71, 72).op("nccl:all_reduce", 90, 95)
    found = found_in(trace)
    assert place(found, "aten::mm") == (f"[{NO_LAYERS}]", "other")
    assert place(found, NODE + "MmBackward0") == (f"[{NO_LAYERS}]", "backward")
    assert place(found, "aten::add_") == ("", "optimizer")
    assert place(found, "aten::stack") == place(found, "nccl:all_reduce") == ("", "other")  # not of a layer anywhere


# --- FSDP ---


def sharded(annotation: str, *, thread: int = MAIN, root: str = "Net#0", prefix: str = "") -> tuple[str, str]:
    """The place of an op in an annotation of FSDP between two blocks of a model."""
    trace = Trace().mark(".", 0, 1000, root=root)
    for path in ("layers.0", "layers.0.attn", "layers.1", "norm"):
        trace.mark(prefix + path, 10, 20, root=root)
    trace.annotation(annotation, 100, 200, thread=thread).op("aten::copy_", 110, 120, thread=thread)
    return place(found_in(trace), "aten::copy_")


@pytest.mark.parametrize(
    ("annotation", "layer"),
    [
        ("FSDP::all_gather (layers.1)", "layers.1"),
        ("FSDP::all_gather (layers.0.attn.norm)", "layers.0.attn"),  # not the model's own norm
        ("FSDP::all_gather (layers.0._checkpoint_wrapped_module.attn)", "layers.0.attn"),
        ("FSDP::all_gather (base_model.model.layers.1)", "layers.1"),
        ("FSDP::all_gather (layers.0, layers.0.attn)", "layers.0"),
        ("FSDP::all_gather (layers.0, norm)", "Net"),
        ("FSDP::forward_prefetch for layers.1", "layers.1"),
        ("FSDP::forward_prefetch for None", "Net"),
        ("FSDP::root_pre_forward", "Net"),
        ("FSDP::all_gather", "Net"),
    ],
)
def test_fsdp_names_the_layer(annotation: str, layer: str) -> None:
    assert sharded(annotation) == (layer, "forward")


@pytest.mark.parametrize("layer", ["layers.0", "layers.1"])
def test_fsdp_names_a_layer_that_no_root_is_around(layer: str) -> None:
    trace = Trace().mark("layers.0", 10, 20).mark("layers.1", 30, 40)
    trace.annotation(f"FSDP::post_forward ({layer})", 100, 200).op("aten::copy_", 110, 120)
    assert place(found_in(trace), "aten::copy_") == (layer, "forward")


@pytest.mark.parametrize("root", ["Net", "Vae"])
def test_nameless_fsdp_is_of_the_root_that_runs(root: str) -> None:
    trace = Trace()
    for start, name in ((0, "Net#0"), (1000, "Vae#0")):
        trace.mark(".", start, start + 900, root=name).mark("a", start + 10, start + 20, root=name)
    at = 100 if root == "Net" else 1100
    trace.annotation("FSDP::root_pre_forward", at, at + 50).op("aten::copy_", at + 10, at + 20)
    trace.annotation("FSDP::root_pre_forward", 2000, 2050).op("aten::cat", 2010, 2020)
    found = found_in(trace)
    assert place(found, "aten::copy_") == (root, "forward")
    assert place(found, "aten::cat") == ("", "forward")  # of one of two roots: nobody knows which


def test_fsdp_names_no_root_where_several_have_one() -> None:
    assert sharded("FSDP::all_gather (layers.1)", root="dit", prefix="dit.") == ("dit.layers.1", "forward")


@pytest.mark.parametrize("event", ["post_backward_reduce", "pre_backward", "backward_prefetch for", "post_backward"])
def test_fsdp_in_backward(event: str) -> None:
    name = f"FSDP::{event} layers.0" if event.endswith("for") else f"FSDP::{event} (layers.0)"
    assert sharded(name, thread=AUTOGRAD) == ("layers.0", "backward")


def test_a_nameless_part_of_fsdp_is_in_the_layer_around_it() -> None:
    trace = Trace().mark(".", 0, 100).mark("layers.0", 10, 20).mark("layers.1", 21, 22)
    trace.annotation("FSDP::pre_forward (layers.0)", 30, 60).annotation("FSDP::copy_in", 35, 50).op("x", 40, 45)
    assert place(found_in(trace), "x") == ("layers.0", "forward")
