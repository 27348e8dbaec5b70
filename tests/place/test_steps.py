"""Where steps begin and end, found in hand-written recordings."""

from __future__ import annotations

import numpy as np
import pytest

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.place.step_windows import step_windows
from profiler_wrapper.place.steps import Steps, find_iterations
from recordings import AUTOGRAD, Trace, analyse


def steps_of(trace: Trace) -> Steps:
    return place_events(trace.op("aten::mm", 0, 1).recording()).steps


def intervals(steps: Steps) -> list[tuple[int, int, int]]:
    return list(zip(steps.number, steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True))


FOREVER = np.iinfo(np.int64).max


def test_profiler_steps_by_their_number() -> None:
    trace = Trace().annotation("ProfilerStep#8", 200, 300).annotation("ProfilerStep#7", 50, 200)
    trace.annotation("Optimizer.step#SGD.step", 150, 160).mark(".", 60, 100)
    steps = steps_of(trace)
    assert intervals(steps) == [(7, 50, 200), (8, 200, 300)]
    assert steps.place_of(np.array([49, 50, 199, 200, 299, 300])).tolist() == [-1, 0, 0, 1, 1, -1]


def test_steps_that_overlap_end_where_the_next_begins() -> None:
    assert intervals(steps_of(Trace().annotation("ProfilerStep#1", 0, 120).annotation("ProfilerStep#2", 100, 200))) == [
        (1, 0, 100),
        (2, 100, 200),
    ]


def test_a_step_seen_on_two_threads_is_one() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 100).annotation("ProfilerStep#1", 2, 98, thread=AUTOGRAD)
    trace.annotation("ProfilerStep#2", 100, 200)
    assert intervals(steps_of(trace)) == [(1, 0, 100), (2, 100, 200)]


def test_what_no_step_launched_is_of_no_window() -> None:
    trace = Trace().annotation("ProfilerStep#0", 100, 300).kernel("early", 110, 115, launched=50)
    trace.kernel("lost", 130, 140).kernel("mine", 150, 160, launched=120).kernel("late", 400, 410, launched=350)
    windows = step_windows(place_events(trace.recording()))
    assert windows.launched_in.tolist() == [-1, -1, 0, -1]  # in order of start
    assert (windows.start_ns.tolist(), windows.end_ns.tolist()) == ([140], [300])


def test_without_them_steps_of_the_first_optimizer() -> None:
    trace = Trace()
    for start in (0, 1000):
        for micro in range(8):
            trace.mark(".", start + 100 * micro, start + 100 * micro + 50)
        trace.annotation("Optimizer.step#SGD.step", start + 900, start + 950)
        trace.annotation("Optimizer.step#Adam.step", start + 960, start + 970)
    assert intervals(steps_of(trace)) == [(0, 0, 950), (1, 950, 1950)]


class Loop(Trace):
    """A training loop as a trace tells it, a call of `passes` and what optimizers do after another."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._number = 10, 0

    def passes(self, *, root: str = "Net#0", within: str = "") -> Loop:
        """A forward and a backward of 100; `within`: an optimizer that steps in the backward, at each parameter."""
        now, self._number = self.now, self._number + 1
        self.mark(".", now, now + 30, root=root).op(
            "aten::mm", now + 5, now + 20, sequence=self._number, forward_thread=0
        )
        self.node("MmBackward0", now + 40, now + 50, number=self._number)
        for begin in (now + 50, now + 70):
            self.node("torch::autograd::AccumulateGrad", begin, begin + 20)
            if within:
                self.annotation(f"Optimizer.step#{within}.step", begin + 5, begin + 15, thread=AUTOGRAD)
        self.node("torch::autograd::AccumulateGrad", now + 90, now + 95)
        self.now += 100
        return self

    def bare(self, *ops: str, learn: int, frozen: int = 0) -> Loop:
        """Ops of 10 in no layer, `frozen` without a node, a backward of 10 to so many parameters, a step of 10."""
        numbers = range(self._number + 1, self._number + 1 + len(ops))
        self._number, backward = numbers[-1], self.now + 10 * len(ops)
        for place, (op, number) in enumerate(zip(ops, numbers, strict=True)):
            begin = self.now + 10 * place
            self.op(f"aten::{op}", begin, begin + 9, sequence=number, forward_thread=0)
            if place >= frozen:
                self.node("MmBackward0", backward + place, backward + place + 1, number=number)
        for place in range(5, 5 + learn):
            self.node("torch::autograd::AccumulateGrad", backward + place, backward + place + 1)
        self.now = backward + 10
        return self.steps("Adam")

    def steps(self, *names: str) -> Loop:
        """Steps of optimizers, of 10 each, or updates of a scaler."""
        for name in names:
            if name == "update":
                self.op("aten::_amp_update_scale_", self.now, self.now + 10)
            else:
                self.annotation(f"Optimizer.step#{name}.step", self.now, self.now + 10)
            self.now += 10
        return self

    def ends(self) -> list[int]:
        found = steps_of(self)
        assert all(intervals(steps_of(one)) == intervals(found) for one in self.rotations())
        assert found.start_ns.tolist()[1:] == found.end_ns.tolist()[:-1]
        return found.end_ns.tolist()


def test_optimizers_that_step_one_after_the_other_end_one_step() -> None:
    loop = Loop().passes().steps("Adam", "Adam").passes().passes().steps("Adam", "Adam")
    assert loop.ends() == [120, 340]


def test_an_optimizer_that_steps_inside_of_backward_ends_the_step_with_the_backward() -> None:
    assert Loop().passes(within="SGD").passes(within="SGD").ends() == [105, 205]
    assert Loop().passes(within="SGD").steps("Adam").passes(within="SGD").steps("Adam").ends() == [120, 230]


def test_the_update_of_a_scaler_ends_a_step_whose_optimizer_was_left_out() -> None:
    loop = Loop().passes().steps("update").passes().steps("Adam", "update").passes().passes().steps("update")
    assert loop.ends() == [120, 230, 450]
    assert Loop().passes().steps("update").passes().steps("update").ends() == [120, 230]


def test_the_second_of_two_optimizers_with_a_backward_of_its_own_ends_no_step() -> None:
    loop = Loop()
    for _ in range(3):
        loop.passes(root="D#0").steps("Adam").passes(root="D#0").passes(root="G#0").steps("Adam")
    assert loop.ends() == [120, 440, 760]
    assert [text for text in analyse(loop.recording()).warnings if "unlike" in text] == []


def turns(trace: Trace) -> list[str]:
    return [text for text in analyse(trace.recording()).warnings if "take turns" in text]


def test_without_layers_two_optimizers_of_one_class_are_told_by_what_they_compute_and_train_in_turn() -> None:
    gan, wasserstein = Loop(), Loop()
    for _ in range(3):
        gan.bare("mm", "sub", learn=2).bare("mm", "neg", learn=4)
        wasserstein.bare("mm", "sub", learn=2).bare("mm", "sub", learn=2).bare("mm", "neg", learn=4)
    assert gan.ends() == [50, 130, 210]
    assert turns(gan) == [
        "optimizer steps of 2 kinds take turns, and count as those of 2 optimizers, of which only the first ends "
        "a step: prof.step() would tell"
    ]
    assert wasserstein.ends() == [50, 90, 170, 210, 290, 330]


def test_what_may_be_one_optimizer_counts_as_one_and_is_said() -> None:
    """Another loss every other time, or other parameters (each is of one optimizer too)."""
    for first, second in ((("mm", "sub"), 2), (("mm", "neg"), 2)), ((("mm", "sub"), 2), (("mm", "sub"), 4)):
        loop = Loop()
        for _ in range(2):
            loop.bare(*first[0], learn=first[1]).bare(*second[0], learn=second[1])
        assert loop.ends() == [50, 90, 130, 170]
        assert [text.partition(", and ")[2] for text in turns(loop)] == [
            "count as those of one optimizer: prof.step() would tell"
        ]


def test_parameters_that_are_frozen_every_other_time_are_of_one_optimizer() -> None:
    loop = Loop()
    for _ in range(3):
        loop.bare("conv2d", "mm", learn=4).bare("conv2d", "mm", learn=2, frozen=1)
    assert len(loop.ends()) == 6
    assert "count as those of one optimizer" in turns(loop)[0]


def test_steps_that_are_alike_or_unlike_without_order_are_each_a_step() -> None:
    alike, drops = Loop(), Loop()
    for learn in (2, 4, 4, 2, 2, 2, 4):
        alike.bare("mm", "sub", learn=3)
        drops.bare("mm", *(["relu"] if learn > 2 else []), learn=learn)
    for loop in (alike, drops):
        assert len(loop.ends()) == 7
        assert turns(loop) == []


def test_a_step_of_which_the_trace_has_no_forward_is_none() -> None:
    loop = Loop().steps("SGD").passes().steps("SGD").passes().steps("SGD")
    assert intervals(steps_of(loop)) == [(0, 20, 130), (1, 130, 240)]


def test_a_closure_is_of_the_step_that_calls_it() -> None:
    loop = Loop()
    for _ in range(2):
        begin = loop.now
        loop.passes().passes().annotation("Optimizer.step#LBFGS.step", begin - 1, loop.now + 5)
        loop.annotation("Optimizer.step#Inner.step", loop.now, loop.now + 4)
        loop.now += 20
    assert loop.ends() == [215, 435]


def test_steps_that_call_the_model_more_or_less_often_are_said_to_be_unlike() -> None:
    loop = Loop().passes().steps("SGD").passes().passes().steps("SGD")
    loop.mark("layer", 11, 12)
    (said,) = [text for text in analyse(loop.recording()).warnings if "unlike" in text]
    assert "calls of Net were 1 in step 0, 2 in step 1" in said


def test_without_an_optimizer_calls_of_the_first_root() -> None:
    trace = Trace().mark(".", 10, 90, flags=("prefill",))
    for i in range(1, 4):
        trace.mark(".", 100 * i, 100 * i + 90, flags=("decode",))
        trace.mark(".", 100 * i + 92, 100 * i + 95, root="Sampler#0")
    assert intervals(steps_of(trace)) == [(0, 10, 100), (1, 100, 200), (2, 200, 300), (3, 300, FOREVER)]
    assert step_windows(place_events(trace.recording())).step_times_ns == (
        90,
        100,
        100,
    )  # the last one's end is unknown


def test_a_root_recomputed_in_backward_starts_no_step() -> None:
    trace = Trace().mark(".", 0, 90).op("aten::mul", 10, 20, sequence=1, forward_thread=0)
    trace.node("MulBackward0", 100, 200, number=1).mark(".", 110, 150, thread=AUTOGRAD)
    for one in (trace, *trace.rotations()):
        assert intervals(steps_of(one)) == [(0, 0, FOREVER)]


def test_a_loop_over_blocks_is_a_step_each_time_round() -> None:
    trace = Trace()
    for turn in range(3):
        for i in range(4):
            trace.mark(".", 1000 * turn + 100 * i, 1000 * turn + 100 * i + 90, root=f"Block#{i}")
    assert [start for _, start, _ in intervals(steps_of(trace))] == [0, 1000, 2000]


def test_no_steps_at_all() -> None:
    steps = steps_of(Trace())
    assert len(steps) == 0
    assert steps.place_of(np.array([5])).tolist() == [-1]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("execute_32_context_0(sq0sk0)_generation_32(sq32sk32785)", "decode"),
        ("execute_context_1(888_788544)_generation_0(0)", "prefill"),
        ("gpu_execute_context_2(64)_generation_0(0)", "prefill"),
        ("execute_context_1(64)_generation_3(3)", None),
        ("execute_new_1_cached_3", None),
        ("step[DECODE bs=32]", "decode"),
        ("step[EXTEND bs=1 toks=512]", "prefill"),
        ("step[MIXED bs=4]", None),
    ],
)
def test_a_server_tells_its_steps(name: str, phase: str | None) -> None:
    """The time of a step is that of what it launched, also where that runs after it."""
    trace = Trace().annotation(name, 0, 100).annotation("step[IDLE bs=0]", 20, 90)
    trace.module("Sampler_0", 30, 60).annotation(name, 200, 300).module("Sampler_0", 230, 260)
    trace.kernel("gemm", 400, 450, launched=40).kernel("copy_kernel", 450, 470, launched=70)
    trace.kernel("gemm", 500, 530, launched=240)
    result = analyse(trace.recording())
    assert [(row.step, row.time_ns, row.span_ns) for row in result.steps] == [(0, 70, 100), (1, 30, 100)]
    inside, outside = phase or "forward", phase or "other"
    assert {(row.layer, row.phase): row.self_time_ns for row in result.layers if row.self_time_ns} == {
        ("Sampler", inside): 80,
        ("", outside): 20,
    }
    assert not result.series  # the steps tell


def test_only_a_server_has_steps_of_that_name() -> None:
    trace = Trace().annotation("execute_query", 0, 40).annotation("step", 50, 60).mark("a", 0, 100)
    assert analyse(trace.op("aten::mm", 10, 20).recording()).steps[0].phases_ns == {"forward": 10}


def test_entries_of_a_block_are_iterations() -> None:
    trace = Trace().op("aten::mm", 0, 5)
    for number, (start, end) in enumerate([(10, 20), (30, 40), (50, 60)]):
        trace.annotation(f"iteration#{number}", start, end)
    iterations = find_iterations(trace.recording())
    assert iterations.number == (0, 1, 2)
    assert iterations.place_of(np.array([5, 10, 25, 35, 59, 60])).tolist() == [-1, 0, -1, 1, 2, -1]


def test_series_of_entries_have_a_value_per_entry() -> None:
    trace = Trace()
    for number in range(3):
        base = 100 * number
        trace.annotation(f"iteration#{number}", base, base + 50).annotation("vae", base + 1, base + 40)
        trace.op("aten::mm", base + 10, base + 20 + number)
    trace.annotation("ProfilerStep#0", 0, 1000)
    assert analyse(trace.recording()).series == {"vae": (0.010, 0.011, 0.012)}
