"""Slope and leaks, from steps written by hand."""

from __future__ import annotations

import pytest

from advice_facts import facts_of
from memory_recordings import use_of
from profiler_wrapper.advice.memory import memory_leak
from profiler_wrapper.tables.memory.use import student_quantile
from recordings import AUTOGRAD, Trace

# Two-sided 95 % quantiles of Student's t, from a printed table.
TABLE = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@pytest.mark.parametrize(("degrees_of_freedom", "quantile"), TABLE.items())
def test_quantiles_are_those_of_the_table(degrees_of_freedom: int, quantile: float) -> None:
    assert student_quantile(degrees_of_freedom) == pytest.approx(quantile, rel=1.5e-3)


def steps(count: int) -> Trace:
    """Steps of 100, each with a layer from 10 to 50 whose 4096 bytes live from 20 to 60."""
    trace = Trace()
    for step in range(count):
        t = 100 * step
        trace.annotation(f"ProfilerStep#{step}", t, t + 100).mark("a", t + 10, t + 50).op("aten::mm", t + 15, t + 25)
        trace.memory(t + 20, 4096, address=1).memory(t + 60, -4096, address=1)
    return trace


def leaking(count: int, *, size: int = 2048, first: int = 0, last: int | None = None) -> Trace:
    """From step `first` to before `last`, a layer's op makes a tensor that stays."""
    trace = steps(count)
    for step in range(first, count if last is None else last):
        t = 100 * step
        trace.op("aten::relu", t + 30, t + 40).memory(t + 35, size, address=10_000 * (step + 1))
    return trace


def test_a_steady_loop_has_no_slope_and_no_leak() -> None:
    use = use_of(steps(20))
    assert use.slope is not None
    assert (use.slope.bytes_per_step, use.slope.error_bytes_per_step, use.slope.steps) == (0, 0, 19)
    assert use.leaks == ()


def test_nothing_is_said_of_growth_where_other_threads_may_have_freed() -> None:
    use = use_of(leaking(20), frees_unseen=True)
    assert (use.slope, use.leaks) == (None, None)
    assert [note for note in use.notes if note.startswith("whether memory grows from step to step is not known")]
    found = facts_of(leaking(20).recording(), run={"frees_unseen": True})
    assert list(memory_leak(found)) == []


def test_a_tensor_a_step_is_a_slope_and_a_leak_with_its_op_and_layer() -> None:
    use = use_of(leaking(20))
    assert use.slope is not None
    assert use.slope.bytes_per_step == pytest.approx(2048)
    assert use.slope.error_bytes_per_step == pytest.approx(0, abs=1e-6)
    (leak,) = use.leaks
    assert (leak.layer, leak.op, leak.phase, leak.category) == ("a", "aten::relu", "forward", "activation")
    assert (leak.bytes_per_step, leak.count_per_step, leak.steps) == (2048, 1, 18)


def test_of_four_steps_a_leak_is_in_every_one_but_the_last() -> None:
    assert len(use_of(leaking(4)).leaks) == 1
    assert use_of(leaking(4, first=1)).leaks == ()
    assert len(use_of(leaking(5, first=2)).leaks) == 1  # of five the first does not count, and some may be without


def test_three_steps_are_enough_and_two_are_not() -> None:
    assert len(use_of(leaking(5)).leaks) == 1
    assert len(use_of(leaking(3)).leaks) == 1
    assert use_of(leaking(2)).leaks == ()


def test_what_is_made_in_a_few_steps_only_is_no_leak() -> None:
    assert use_of(leaking(10, last=1)).leaks == ()  # state that the first step makes
    assert use_of(leaking(10, first=9)).leaks == ()  # what the last step leaves
    assert use_of(leaking(10, first=7)).leaks == ()  # in too few
    assert len(use_of(leaking(10, first=4)).leaks) == 1  # from some step on, to the end


def test_a_step_may_be_without_it() -> None:
    trace = leaking(12, first=2)  # nine of the ten steps in the middle
    (leak,) = use_of(trace).leaks
    assert leak.count_per_step == pytest.approx(0.9)


def test_what_is_freed_some_steps_later_is_no_leak() -> None:
    trace = steps(12)
    for step in range(12):
        trace.op("aten::relu", 100 * step + 30, 100 * step + 40)
        trace.memory(100 * step + 35, 2048, address=10_000 * (step + 1))
        if step >= 3:
            trace.memory(100 * step + 70, -2048, address=10_000 * (step - 2))
    assert use_of(trace).leaks == ()


def test_the_first_step_is_no_part_of_a_slope() -> None:
    trace = steps(6).memory(5, 10**6, address=10**7).memory(150, -(10**6), address=10**7)
    slope = use_of(trace).slope
    assert slope is not None
    assert (slope.bytes_per_step, slope.steps) == (0, 5)


def test_what_an_optimizer_is_told_to_hold_is_no_leak() -> None:
    history = [(10_000 * (step + 1), 2048, "os_state", f"old_dirs.{step} of a.weight") for step in range(20)]
    use = use_of(leaking(20), (5000, history))
    assert use.leaks == ()
    assert use.slope is not None
    assert use.slope.bytes_per_step == pytest.approx(2048)


def test_a_list_of_losses_is_no_leak() -> None:
    assert use_of(leaking(20, size=4)).leaks == ()
    assert use_of(leaking(20, size=1020)).leaks == ()
    assert len(use_of(leaking(20, size=1024)).leaks) == 1


def test_leaks_of_two_layers_are_two_the_larger_first() -> None:
    trace = leaking(8)
    for step in range(8):
        t = 100 * step
        trace.mark("b", t + 70, t + 90).op("aten::cat", t + 75, t + 85)
        trace.memory(t + 76, 5000, address=10**7 + 10_000 * step).memory(t + 77, 5000, address=10**8 + 10_000 * step)
    leaks = use_of(trace).leaks
    assert [(leak.layer, leak.op, leak.bytes_per_step, leak.count_per_step) for leak in leaks] == [
        ("b", "aten::cat", 10_000, 2),
        ("a", "aten::relu", 2048, 1),
    ]


def test_a_leak_in_backward_is_told_as_such() -> None:
    trace = steps(8)
    for step in range(8):
        t = 100 * step
        trace.op("aten::mul", t + 30, t + 32, sequence=step, forward_thread=0)
        trace.node("MulBackward0", t + 70, t + 90, number=step)
        trace.memory(t + 75, 4096, address=10**7 + 10_000 * step, thread=AUTOGRAD)
    (leak,) = use_of(trace).leaks
    assert (leak.layer, leak.op, leak.phase) == ("a", "MulBackward0", "backward")


def test_the_slope_of_a_few_steps() -> None:
    assert use_of(steps(1)).slope is None
    two = use_of(leaking(2)).slope
    assert two is not None
    assert (two.bytes_per_step, two.error_bytes_per_step) == (2048, None)


def test_the_slope_has_the_uncertainty_of_a_textbook() -> None:
    # y = 1, 2, 4 at x = 0, 1, 2: slope 3/2; residuals 1/6, -2/6, 1/6 (in 1000 bytes);
    # standard error sqrt((1/36 + 4/36 + 1/36) / 1 / 2) = 0.288675; times 12.7062 for one degree of freedom.
    trace = Trace()
    for step, size in enumerate((1000, 1000, 2000)):
        trace.annotation(f"ProfilerStep#{step}", 100 * step, 100 * step + 100).memory(
            100 * step + 50, size, address=10_000 * (step + 1)
        )
    slope = use_of(trace).slope
    assert slope is not None
    assert slope.bytes_per_step == pytest.approx(1500)
    assert slope.error_bytes_per_step == pytest.approx(1000 * 0.288675 * 12.7062, rel=1e-5)


def test_advice_names_op_and_layer_of_a_leak() -> None:
    (found,) = memory_leak(facts_of(leaking(20).recording()))
    assert "aten::relu in a (forward)" in found.title and "2.0 KiB" in found.title
    assert (found.layers, found.confidence) == (("a",), "high")
    assert found.details == {"bytes_per_step": 2048, "leaks": 1}
    assert found.saves_at_most_bytes is None  # how long it goes on is not known
    (early,) = memory_leak(facts_of(leaking(4).recording()))
    assert early.confidence == "medium"
    assert list(memory_leak(facts_of(steps(20).recording()))) == []
