"""What is recorded of which step, and when a step has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from profiler_wrapper.capture.steps import (
    MOST_MICRO_BATCHES,
    MOST_OTHER_STEPS,
    AutoPlan,
    Ended,
    Mode,
    OpenPlan,
    Plan,
    SchedulePlan,
    StepCounter,
    StepFacts,
    make_plan,
    parse_windows,
)
from profiler_wrapper.errors import WrongUse

FULL, TIMED, IDLE, OVER = Mode.FULL, Mode.TIMED, Mode.IDLE, Mode.OVER
COMPILED = StepFacts(compiled=True)
PREFILL = StepFacts(phases=frozenset({"prefill"}))
DECODE = StepFacts(phases=frozenset({"decode"}))


def modes(plan: Plan, facts: list[StepFacts]) -> list[Mode]:
    """What is recorded of step 0 and of each step after one that went as in `facts`."""
    return [plan.begin(0), *(plan.after(step, fact).mode for step, fact in enumerate(facts))]


def window_ends(plan: Plan, steps: int) -> list[int]:
    return [step for step in range(steps) if plan.after(step, StepFacts()).ends_window]


def test_auto_records_two_steps_in_full_three_timed_and_stops() -> None:
    assert modes(AutoPlan(), [StepFacts()] * 5) == [FULL, FULL, TIMED, TIMED, TIMED, OVER]
    assert window_ends(AutoPlan(), 5) == [4]


def test_auto_waits_for_the_compiler() -> None:
    facts = [COMPILED, COMPILED, COMPILED, StepFacts(), StepFacts()]
    assert modes(AutoPlan(), facts) == [FULL, FULL, FULL, FULL, TIMED, TIMED]


def test_auto_waits_for_the_compiler_ten_steps_and_no_longer() -> None:
    assert modes(AutoPlan(), [COMPILED] * 13) == [FULL] * 10 + [TIMED] * 3 + [OVER]


def test_generation_is_one_window_of_five_calls_in_full() -> None:
    plan = AutoPlan()
    assert modes(plan, [PREFILL] + [DECODE] * 4) == [FULL] * 5 + [OVER]
    assert plan.is_generation


def test_calls_that_are_all_prefill_are_no_generation() -> None:
    assert modes(AutoPlan(), [PREFILL] * 5) == [FULL, FULL, TIMED, TIMED, TIMED, OVER]


def test_auto_begins_again_when_its_steps_turn_out_to_be_none() -> None:
    plan = AutoPlan()
    modes(plan, [StepFacts()] * 3)
    assert plan.begin(1) is FULL
    assert [plan.after(step, StepFacts()).mode for step in range(1, 6)] == [FULL, TIMED, TIMED, TIMED, OVER]


def test_all_goes_on_without_end() -> None:
    assert modes(make_plan("all"), [StepFacts()] * 100) == [FULL, FULL] + [TIMED] * 99
    assert modes(make_plan("all", record_shapes=True), [StepFacts()] * 3) == [TIMED] * 4


def test_windows_come_with_a_full_step_before_each() -> None:
    plan = make_plan("2-3,6")
    assert modes(plan, [StepFacts()] * 7) == [IDLE, FULL, TIMED, TIMED, IDLE, FULL, TIMED, OVER]
    assert window_ends(plan, 7) == [3, 6]


def test_a_window_from_step_0_has_no_step_before_it() -> None:
    assert modes(make_plan("0-1"), [StepFacts()] * 2) == [TIMED, TIMED, OVER]


def test_no_full_step_where_all_steps_are_recorded_alike() -> None:
    assert modes(make_plan("2", record_shapes=False), [StepFacts()] * 3) == [IDLE, IDLE, TIMED, OVER]


def test_a_schedule_is_followed_cycle_by_cycle() -> None:
    # wait=1, warmup=1, active=2, repeat=2
    names = ["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"] * 2
    plan = make_plan(schedule=lambda step: SimpleNamespace(name=names[step] if step < 8 else "NONE"))
    assert modes(plan, [StepFacts()] * 8) == [IDLE, FULL, TIMED, TIMED] * 2 + [IDLE]
    assert window_ends(plan, 8) == [3, 7]


def test_an_open_plan_ends_with_a_step_unless_entered_again() -> None:
    assert OpenPlan().after(0, StepFacts()).mode is OVER
    assert OpenPlan(entered_again=True).after(0, StepFacts()).mode is FULL


@pytest.mark.parametrize(
    ("steps", "windows"),
    [
        ("20-22", (range(20, 23),)),
        ("500, 20 - 22", (range(20, 23), range(500, 501))),
        ("7", (range(7, 8),)),
        (7, (range(7, 8),)),
        (range(3, 5), (range(3, 5),)),
        ("1-2,3", (range(1, 3), range(3, 4))),
    ],
)
def test_windows_are_read(steps: str | int | range, windows: tuple[range, ...]) -> None:
    assert parse_windows(steps) == windows


@pytest.mark.parametrize("steps", ["", "sometimes", "-3", "5-", "3-1", "1-5,4", 1.5, -1, True, range(0), None])
def test_steps_that_mean_nothing_are_refused_with_what_was_found(steps: object) -> None:
    with pytest.raises(WrongUse) as refused:
        make_plan(steps)  # type: ignore[arg-type]
    assert repr(steps) in str(refused.value)


def test_steps_and_a_schedule_are_too_much() -> None:
    with pytest.raises(WrongUse, match="Give one of them"):
        make_plan("3", schedule=lambda step: None)


class Loop:
    """Plays a loop into a counter; `ended` has what each event meant."""

    def __init__(self, optimizer_may_come: bool = True) -> None:
        self.asked = 0
        self.counter = StepCounter(optimizer_may_come=self._ask)
        self._may_come = optimizer_may_come

    def _ask(self) -> bool:
        self.asked += 1
        return self._may_come

    def train(self, root: str = "model") -> Ended:
        return self.counter.root_enters(root, gradients=True)

    def train_after_update(self) -> Ended:
        return self.counter.root_enters("model", gradients=True, updated=True)

    def infer(self, root: str = "model") -> Ended:
        return self.counter.root_enters(root, gradients=False)

    def optimizer(self, name: str = "first") -> Ended:
        return self.counter.optimizer_step(name)


def test_accumulating_eight_micro_batches_is_one_step() -> None:
    loop = Loop()
    for _ in range(3):
        assert {loop.train() for _ in range(8)} == {Ended.NO}
        assert loop.optimizer() is Ended.YES
    assert loop.counter.ended == 3


def test_only_the_first_optimizer_counts() -> None:
    loop = Loop()
    for _ in range(2):
        loop.train("discriminator")
        loop.optimizer("discriminator")
        loop.train("generator")
        assert loop.optimizer("generator") is Ended.NO
    assert loop.counter.ended == 2


def test_the_users_step_right_after_the_optimizers_is_the_same() -> None:
    loop = Loop()
    for _ in range(3):
        loop.train()
        loop.optimizer()
        loop.infer()  # an evaluation in between does not make it another
        loop.counter.user_step()
    assert loop.counter.ended == 3
    assert loop.counter.source == "prof.step()"


def test_with_the_users_steps_the_optimizers_no_longer_count() -> None:
    loop = Loop()
    for _ in range(2):
        for _ in range(4):
            loop.train()
            loop.optimizer()
        loop.counter.user_step()
    assert loop.optimizer() is Ended.NO


def test_a_call_of_the_root_is_a_step_where_nothing_learns() -> None:
    loop = Loop()
    assert [loop.infer() for _ in range(4)] == [Ended.NO, Ended.YES, Ended.YES, Ended.YES]
    assert loop.counter.last_step_counts()


def test_several_roots_in_turn_are_one_step() -> None:
    loop = Loop()
    sweep = ["text_encoder", "transformer", "vae"]
    assert [loop.infer(root) for root in sweep] == [Ended.NO] * 3
    assert loop.infer("text_encoder") is Ended.YES
    assert loop.infer("transformer") is Ended.NO


def test_the_users_step_after_a_call_is_that_call() -> None:
    loop = Loop()
    for _ in range(3):
        loop.infer()
        assert loop.counter.user_step() is Ended.YES
    assert loop.counter.ended == 3


def test_calls_with_gradients_wait_for_an_optimizer_for_a_while() -> None:
    loop = Loop()
    ended = [loop.train() for _ in range(MOST_MICRO_BATCHES + 3)]
    assert ended.index(Ended.YES) == MOST_MICRO_BATCHES
    assert ended[MOST_MICRO_BATCHES:] == [Ended.YES] * 3


def test_a_call_with_gradients_is_a_step_where_no_optimizer_is_alive() -> None:
    loop = Loop(optimizer_may_come=False)
    assert [loop.train() for _ in range(4)] == [Ended.NO, Ended.YES, Ended.YES, Ended.YES]
    assert loop.counter.last_step_counts()
    assert loop.asked == 1


def test_steps_that_an_optimizer_shows_to_be_micro_batches_are_none() -> None:
    for update in ("optimizer", "train_after_update"):
        loop = Loop(optimizer_may_come=False)
        for _ in range(3):
            loop.train()
        assert getattr(loop, update)() is Ended.RESTART
        assert {loop.train() for _ in range(3)} == {Ended.NO}
        assert getattr(loop, update)() is Ended.YES


def test_nobody_is_asked_for_optimizers_where_it_does_not_matter() -> None:
    loop = Loop()
    for _ in range(3):
        loop.train()
        loop.optimizer()
    for _ in range(3):
        loop.infer()
    assert loop.asked == 0


def test_an_optimizer_that_tells_nobody_is_seen_by_what_it_changed() -> None:
    loop = Loop()
    for step in range(3):
        told = (Ended.NO, Ended.RESTART, Ended.YES)  # 64 calls without any were taken for steps
        assert (loop.train_after_update() if step else loop.train()) is told[step]
        assert {loop.train() for _ in range(100)} == {Ended.NO} or step == 0
    assert loop.counter.last_step_counts()


def test_an_evaluation_before_training_was_no_step() -> None:
    loop = Loop()
    for _ in range(3):
        loop.infer()
    loop.train()
    assert loop.optimizer() is Ended.RESTART
    loop.train()
    assert loop.optimizer() is Ended.YES


def test_what_follows_the_last_step_is_no_step() -> None:
    loop = Loop()
    assert loop.counter.last_step_counts()  # a block that ends no step is one
    loop.train()
    loop.optimizer()
    loop.infer()
    assert not loop.counter.last_step_counts()


def test_an_optimizer_takes_over_from_one_that_steps_no_more() -> None:
    loop = Loop()
    loop.optimizer("first")
    ended = [loop.optimizer("second") for _ in range(MOST_OTHER_STEPS + 2)]
    assert ended == [Ended.NO] * MOST_OTHER_STEPS + [Ended.YES] * 2


def test_many_optimizers_in_turn_are_one_step() -> None:
    loop = Loop()
    for _ in range(3):
        for number in range(2 * MOST_OTHER_STEPS):
            loop.optimizer(str(number))
    assert loop.counter.ended == 3


def test_windows_that_were_not_reached() -> None:
    plan = make_plan("3-6,20")
    assert isinstance(plan, SchedulePlan)
    assert [plan.missed(steps) for steps in (0, 5, 7, 21)] == ["3-6, 20", "5-6, 20", "20", ""]
