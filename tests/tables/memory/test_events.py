"""Why memory is there: each rule on allocations written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from memory_recordings import category_at
from memory_recordings import use_in_any_order as use_of
from profiler_wrapper.tables.memory.events import EventsByAddress
from recordings import AUTOGRAD, NODE, Trace

OPTIMIZER = "Optimizer.step#AdamW.step"
ZERO_GRAD = "Optimizer.zero_grad#AdamW.zero_grad"


def test_what_is_told_at_one_moment_has_its_category_for_its_whole_life() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::mm", 10, 20).memory(15, 64, address=7)
    use = use_of(trace.memory(300, -64, address=7).memory(310, 8, address=8), (200, [(7, 64, "grads", "a.weight")]))
    assert category_at(use, 15) == {"grads": 64}
    assert category_at(use, 300) == {}
    (owner,) = use.peak_owners
    assert (owner.category, owner.layer, owner.name, owner.op) == ("grads", "a", "a.weight", "aten::mm")


def test_what_is_told_holds_for_the_allocation_that_was_alive_then() -> None:
    trace = Trace().mark("a", 0, 400)
    for start in (10, 110, 210):  # three lives of one address
        trace.op("aten::mm", start, start + 10).memory(start + 5, 64, address=7).memory(start + 50, -64, address=7)
    use = use_of(trace, (130, [(7, 64, "os_state", "exp_avg of a.weight")]))
    assert [category_at(use, time) for time in (15, 115, 215)] == [
        {"activation": 64},
        {"os_state": 64},
        {"activation": 64},
    ]


@pytest.mark.parametrize(
    ("address", "event", "first", "last_before"),
    [
        (7, 0, 0, -1), (7, 1, 0, 0), (7, 3, 0, 2), (7, 4, 0, 3), (7, 5, 0, 3),
        (9, 0, 1, -1), (9, 1, 1, -1), (9, 2, 1, 1), (9, 5, 1, 4),
        (6, 5, -1, -1), (8, 0, -1, -1), (10, 5, -1, -1),
    ],
)  # fmt: skip
def test_the_events_at_an_address(address: int, event: int, first: int, last_before: int) -> None:
    index = EventsByAddress(np.array([7, 9, 7, 7, 9]))
    assert index.first(np.array([address])).tolist() == [first]
    assert index.last_before(np.array([address]), np.array([event])).tolist() == [last_before]


def test_what_is_told_where_everything_has_been_freed_is_of_another_allocator() -> None:
    trace = Trace().mark("a", 0, 400).op("aten::mm", 10, 20).memory(15, 64, address=7)
    trace.op("aten::mm", 30, 40).memory(35, 64, address=9).memory(90, -64, address=9)
    assert category_at(use_of(trace, (130, [(9, 64, "grads", "w")])), 35) == {"activation": 128}


def test_a_block_smaller_than_what_is_told_is_another() -> None:
    trace = Trace().mark("a", 0, 400).op("aten::mm", 10, 20).memory(15, 64, address=7)
    assert category_at(use_of(trace, (130, [(7, 65, "grads", "w")])), 15) == {"activation": 64}


@pytest.mark.parametrize(
    "name", ["c10d::allreduce_", "nccl:all_reduce", "FSDP::all_gather (layers.0)", "FSDP::post_backward_reduce"]
)
def test_what_a_collective_makes_is_communication(name: str) -> None:
    trace = Trace().mark("a", 0, 100).annotation(name, 10, 40).op("aten::empty", 20, 22).memory(21, 64, address=7)
    assert category_at(use_of(trace), 21) == {"communication": 64}


def test_fsdp_around_a_forward_is_no_collective() -> None:
    trace = Trace().mark("a", 0, 100).annotation("FSDP::pre_forward", 10, 40).op("aten::mul", 20, 22)
    assert category_at(use_of(trace.memory(21, 64, address=7)), 21) == {"activation": 64}


def test_buckets_that_ddp_makes_and_keeps_are_communication() -> None:
    trace = Trace().annotation("DistributedDataParallel.forward", 0, 100).mark("a", 20, 80)
    trace.op("aten::empty", 10, 12).memory(11, 512, address=1)  # kept: a bucket
    trace.op("aten::empty", 13, 15).memory(14, 32, address=2).memory(90, -32, address=2)  # gone
    trace.op("aten::mul", 30, 32).memory(31, 64, address=3)  # the model's
    assert category_at(use_of(trace), 31) == {"communication": 512, "activation": 64, "other": 32}


def test_what_is_gone_before_the_outermost_op_around_it_ends_is_workspace() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::linear", 10, 60).op("aten::clone", 12, 20).op("aten::mm", 25, 50)
    trace.memory(15, 64, address=1).memory(55, -64, address=1)  # alive after the clone, gone within the linear
    trace.memory(30, 8, address=2).memory(70, -8, address=2)
    assert category_at(use_of(trace), 30) == {"workspace": 64, "activation": 8}


def test_an_op_includes_its_last_instant() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::mm", 10, 20).memory(20, 64, address=1).memory(20, 8, address=2)
    use = use_of(trace.memory(20, -8, address=2))
    assert {(owner.category, owner.op) for owner in use.peak_owners} == {
        ("activation", "aten::mm"),
        ("workspace", "aten::mm"),
    }


def test_compiled_code_and_functions_of_a_user_are_no_single_op() -> None:
    for name in ("CompiledFunction", "Torch-Compiled Region: 0/0", "MyFunction"):
        trace = Trace().mark("a", 0, 100).op(name, 10, 60).op("aten::mm", 12, 20)
        trace.memory(15, 64, address=1).memory(55, -64, address=1).memory(16, 8, address=2).memory(19, -8, address=2)
        assert category_at(use_of(trace), 16) == {"activation": 64, "workspace": 8}


def test_a_node_of_autograd_is_an_op() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::pow", 10, 20, sequence=1, forward_thread=0)
    trace.node("PowBackward0", 200, 300, number=1).op("PowBackward0", 210, 290, thread=AUTOGRAD)
    trace.op("aten::mul", 220, 230, thread=AUTOGRAD)
    trace.memory(225, 64, address=1, thread=AUTOGRAD).memory(280, -64, address=1, thread=AUTOGRAD)
    assert category_at(use_of(trace), 225) == {"workspace": 64}


def test_what_an_optimizer_makes_and_frees_in_one_step_is_workspace_and_what_stays_its_state() -> None:
    trace = Trace().annotation(OPTIMIZER, 0, 100)
    trace.op("aten::sqrt", 10, 20).memory(15, 64, address=1).memory(90, -64, address=1)
    trace.op("aten::zeros_like", 30, 40).memory(35, 32, address=2)
    use = use_of(trace)
    assert category_at(use, 35) == {"workspace": 64, "os_state": 32}
    assert [(o.layer, o.op, o.phase) for o in use.peak_owners] == [
        ("", "aten::sqrt", "optimizer"),
        ("", "aten::zeros_like", "optimizer"),
    ]


def backward() -> Trace:
    """One run of backward, until 300: it makes a gradient (1) and what is gone when it ends (2)."""
    trace = Trace().mark("a", 0, 100).op("aten::linear", 10, 20, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 200, 250, number=1).op("aten::mm", 210, 240, thread=AUTOGRAD)
    trace.op(NODE + "torch::autograd::AccumulateGrad", 260, 300, thread=AUTOGRAD)
    trace.memory(220, 64, address=1, thread=AUTOGRAD).memory(230, 8, address=2, thread=AUTOGRAD)
    return trace.memory(270, -8, address=2, thread=AUTOGRAD)


def test_where_nothing_is_told_what_outlives_its_run_of_backward_is_a_gradient() -> None:
    use = use_of(backward().memory(500, -64, address=1))
    assert category_at(use, 230) == {"grads": 64, "activation": 8}
    assert not use.known_owners
    assert any("not known" in note for note in use.notes)


@pytest.mark.parametrize(
    ("freed", "held"),
    [(299, {"activation": 72}), (300, {"activation": 72}), (301, {"grads": 64, "activation": 8})],
)
def test_a_gradient_is_there_when_its_run_of_backward_has_ended(freed: int, held: dict[str, int]) -> None:
    trace = backward().memory(freed, -64, address=1, thread=AUTOGRAD)
    assert category_at(use_of(trace), 230) == held


@pytest.mark.parametrize(
    ("freed", "category"),
    [(399, "activation"), (400, "grads"), (450, "grads"), (500, "grads"), (501, "activation"), (900, "activation")],
)
def test_only_what_zero_grad_itself_frees_was_a_gradient(freed: int, category: str) -> None:
    trace = backward().annotation(ZERO_GRAD, 10, 15).annotation(ZERO_GRAD, 400, 500).memory(freed, -64, address=1)
    use = use_of(trace.memory(950, 1, address=3), (0, [(99, 16, "params", "w")]))
    assert category_at(use, 220) == {category: 64, "params": 16}


def test_a_run_of_backward_ends_where_a_layer_begins() -> None:
    trace = backward().mark("a", 310, 400).op("aten::linear", 320, 330, sequence=2, forward_thread=0)
    trace.memory(325, -64, address=1).node("MmBackward0", 500, 600, number=2)
    assert category_at(use_of(trace), 220) == {"grads": 64}


def test_where_it_is_told_what_is_held_what_outlives_backward_is_a_gradient_only_by_witness() -> None:
    told = (0, [(99, 16, "params", "w")])
    assert category_at(use_of(backward(), told), 220) == {"activation": 64, "params": 16}
    freed = backward().annotation(ZERO_GRAD, 400, 500).memory(450, -64, address=1)
    assert category_at(use_of(freed, told), 220) == {"grads": 64, "params": 16}
    as_big = (0, [(99, 64, "params", "w")])
    assert category_at(use_of(backward(), as_big), 220) == {"grads": 64, "params": 64}


def test_what_is_alive_at_the_end_and_not_told_then_is_neither_gradient_nor_state() -> None:
    told = [(99, 64, "params", "w")]
    assert category_at(use_of(backward(), (0, told), (900, told)), 220) == {"activation": 64, "params": 64}

    def stepped() -> Trace:
        return Trace().annotation(OPTIMIZER, 0, 100).op("aten::zeros_like", 30, 40).memory(35, 32, address=2)

    assert category_at(use_of(stepped(), (0, told)), 35) == {"os_state": 32, "params": 64}
    assert category_at(use_of(stepped(), (0, told), (900, told)), 35) == {"other": 32, "params": 64}


def test_a_gradient_that_was_told_once_is_known_again_by_place_op_and_size() -> None:
    trace = backward().memory(310, -64, address=1).mark("a", 1000, 1100)
    trace.op("aten::linear", 1010, 1020, sequence=2, forward_thread=0)
    trace.node("MmBackward0", 1200, 1250, number=2).op("aten::mm", 1210, 1240, thread=AUTOGRAD)
    trace.memory(1220, 64, address=5, thread=AUTOGRAD)
    use = use_of(trace, (305, [(1, 64, "grads", "w")]))
    assert category_at(use, 1220) == {"grads": 64}


@pytest.mark.parametrize("flag", ["prefill", "decode"])
def test_generation_makes_activation(flag: str) -> None:
    trace = Trace().mark("a", 0, 100, flags=(flag,)).op("aten::cat", 10, 20).memory(15, 64, address=1)
    use = use_of(trace)
    assert category_at(use, 15) == {"activation": 64}
    assert use.peak_owners[0].phase == flag


@pytest.mark.parametrize("number", [0, 3])
def test_a_loss_outside_of_all_layers_is_activation_and_other_code_is_other(number: int) -> None:
    trace = Trace().mark("a", 0, 50).op("aten::cross_entropy_loss", 60, 90)
    trace.op("aten::_log_softmax", 65, 75, sequence=number, forward_thread=0).memory(70, 64, address=1)
    trace.op("aten::randint", 100, 110).memory(105, 8, address=2)
    assert category_at(use_of(trace), 105) == {"activation": 64, "other": 8}


def test_the_op_is_the_innermost_that_does_not_merely_allocate() -> None:
    trace = Trace().mark("a", 0, 100)
    trace.op("aten::zeros", 10, 20).op("aten::empty", 12, 14).memory(13, 1, address=1)
    trace.op("aten::clone", 30, 40).op("aten::empty_like", 31, 39).op("aten::empty_strided", 32, 38)
    trace.memory(35, 2, address=2)
    trace.op("aten::empty", 50, 60).memory(55, 4, address=3)  # called by the layer itself
    trace.memory(70, 8, address=4)  # by no op
    trace.node("MulBackward0", 200, 300).memory(250, 16, address=5, thread=AUTOGRAD)
    use = use_of(trace)
    assert {owner.size_bytes: owner.op for owner in use.peak_owners} == {
        1: "aten::zeros",
        2: "aten::clone",
        4: "aten::empty",
        8: "",
        16: "MulBackward0",
    }


def test_a_recording_that_only_frees_ends_with_its_last_free() -> None:
    use = use_of(Trace().mark("a", 0, 100).memory(30, -64, address=1).memory(40, -8, address=2))
    assert (use.peak.total_bytes, use.peak.time_ns) == (8, 30)
    assert (use.last.total_bytes, use.last.time_ns) == (0, 40)


def test_an_allocation_of_no_bytes_is_none() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::mm", 10, 20).memory(15, 64, address=1).memory(16, 0, address=2)
    use = use_of(trace)
    (owner,) = use.peak_owners
    assert (owner.size_bytes, owner.count) == (64, 1)
    assert use.last.time_ns == 15


def test_memory_that_no_thread_of_the_trace_made_is_other() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::mm", 0, 90).op("c10d::allreduce_", 92, 95)
    trace.memory(50, 64, address=1, thread=77).memory(60, 8, address=2, thread=77)
    use = use_of(trace.memory(70, -8, address=2, thread=77))
    assert category_at(use, 60) == {"other": 72}
