"""What is recorded when: what happens in a loop, and what is done about it, as a table. No torch runs here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from profiler_wrapper.capture.loop import Do, Effects, LoopState, Now
from profiler_wrapper.capture.records import RecordedTrace, Window
from profiler_wrapper.capture.steps import AutoPlan, Mode, OpenPlan, Plan, StepCounter, make_plan

HOME, OTHER, THIRD = (1, 1), (1, 2), (1, 3)
Event = Callable[[LoopState], Effects]
NOW = Now()


def call(
    label: str = "net", phase: str = "forward", *, grad: bool = True, training: bool = True, in_request: bool = False
) -> Any:
    return SimpleNamespace(
        label=label, phase=phase, grad_enabled=grad, training=training, in_request=in_request, samples=False
    )


def called(one: Any, now: Now = NOW, *, updated: bool = False) -> Event:
    return lambda state: chain(state.root_enters(one, now, updated=updated), state.heard(one))


def stepped(now: Now = NOW) -> Event:
    return lambda state: state.optimizer_stepped("sgd", now)


def user_stepped(state: LoopState) -> Effects:
    return state.user_stepped(NOW)


def begins(state: LoopState) -> Effects:
    return state.begin(NOW, waits=False)


def waits(state: LoopState) -> Effects:
    return state.begin(NOW, waits=True)


def on(thread: tuple[int, int]) -> Event:
    return lambda state: state.called_on(thread)


def thread_ends(state: LoopState) -> Effects:
    return state.thread_ended(NOW)


def comes_home(state: LoopState) -> Effects:
    return state.came_home(NOW)


def owes(state: LoopState) -> Effects:
    state.owes_step = True
    return iter(())


def held_open(state: LoopState) -> Effects:
    state.held_open()
    return iter(())


TRAIN, INFER = called(call()), called(call(grad=False, training=False))
REQUESTED = called(call(grad=False, training=False, in_request=True))
STEP, LEAVE, ANOTHER = stepped(), LoopState.left, LoopState.other_profiler


def request(state: LoopState) -> Effects:
    yield from state.request_begins("generate", NOW)
    yield from REQUESTED(state)
    yield from state.request_ends(NOW, may_train=False)


def spelled(effects: Effects) -> str:
    """`"END_STEP 1 True, STOP, START TIMED 2"`; what is noted and how a window is accounted for is asked elsewhere."""
    quiet = {Do.NOTE, Do.CLOSE}
    return ", ".join(
        " ".join([do.name, *(one.name if isinstance(one, Enum) else str(one) for one in given if do not in quiet)])
        for do, *given in effects
    )


SWITCH = "END_STEP 1 True, RESTART_GROWTH, STOP, START TIMED 2"
END = "STOP, CLOSE, TAKE_DOWN, HAND_OVER"
ENDS = "NOTE, STOP, CLOSE, TAKE_DOWN, HAND_OVER"
PART = "END_SCOPE part"
CASES: dict[str, tuple[Plan, list[tuple[Event, str]]]] = {
    "two steps in full, three timed": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (TRAIN, PART),
            (STEP, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1"),
            (STEP, SWITCH),
            (STEP, "END_STEP 2 True, BEGIN_STEP 3"),
            (STEP, "END_STEP 3 True, BEGIN_STEP 4"),
            (STEP, f"END_STEP 4 True, {END}"),
        ],
    ),
    "two windows by number": (
        make_plan("1,3"),
        [
            (begins, "START FULL 0"),
            (STEP, "END_STEP 0 True, RESTART_GROWTH, STOP, START TIMED 1"),
            (STEP, "END_STEP 1 True, RESTART_GROWTH, STOP, CLOSE, START FULL 2, HAND_OVER"),
            (STEP, "END_STEP 2 True, STOP, START TIMED 3"),
            (STEP, f"END_STEP 3 True, {END}"),
        ],
    ),
    "nothing of the first steps, marks only while calls count them": (
        make_plan("4", record_shapes=False),
        [
            (begins, "MARK True"),
            (INFER, PART),
            (INFER, "END_STEP 0 True, BEGIN_STEP 1, END_SCOPE part"),
            (STEP, "DISCARD, MARK False"),
            (STEP, "END_STEP 1 True, BEGIN_STEP 2"),
        ],
    ),
    "what were taken for steps were none": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (INFER, PART),
            (INFER, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1, END_SCOPE part"),
            (STEP, "DISCARD, START FULL 1"),
        ],
    ),
    "requests are steps, and what lies between them belongs to none": (
        make_plan("all", record_shapes=False),
        [
            (begins, "START TIMED 0"),
            (request, "BEGIN_SCOPE part request: generate, END_STEP 0 True, RESTART_GROWTH"),
            (request, "BEGIN_STEP 1, BEGIN_SCOPE part request: generate, END_STEP 1 True, RESTART_GROWTH"),
            (user_stepped, "DISCARD, START TIMED 1"),
            (user_stepped, "END_STEP 1 True, RESTART_GROWTH, BEGIN_STEP 2"),
        ],
    ),
    "the first prof.step() belongs to the request before it": (
        make_plan("all", record_shapes=False),
        [
            (begins, "START TIMED 0"),
            (lambda state: state.request_ends(NOW, may_train=False), "END_STEP 0 True, RESTART_GROWTH"),
            (user_stepped, "BEGIN_STEP 1"),
        ],
    ),
    "a step with an evaluation does not count": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (TRAIN, PART),
            (STEP, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1"),
            (INFER, "BEGIN_SCOPE part request: evaluation"),
            (INFER, ""),
            (TRAIN, PART),
            (STEP, "END_STEP 1 False, RESTART_GROWTH, BEGIN_STEP 2"),
            (TRAIN, PART),
            (STEP, "END_STEP 2 True, STOP, START TIMED 3"),
        ],
    ),
    "it grows in a call": (
        make_plan(),
        [(begins, "START FULL 0"), (called(call(), Now(grew="it grew")), f"{ENDS}, {PART}")],
    ),
    "it grows by a step; in the first steps gradients come": (
        make_plan("all", record_shapes=False),
        [
            (begins, "START TIMED 0"),
            (stepped(Now(grew="it grew")), "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1"),
            (stepped(Now(grew="it grew")), "END_STEP 1 True, RESTART_GROWTH, BEGIN_STEP 2"),
            (stepped(Now(grew="it grew")), f"END_STEP 2 True, {ENDS}"),
        ],
    ),
    "torch.compile works in a timed step": (
        make_plan("all", record_shapes=False),
        [
            (begins, "START TIMED 0"),
            (stepped(Now(compilations=1)), "END_STEP 0 True, NOTE, RESTART_GROWTH, BEGIN_STEP 1"),
            (stepped(Now(compilations=1)), "END_STEP 1 True, RESTART_GROWTH, BEGIN_STEP 2"),
        ],
    ),
    "another profiler comes": (
        make_plan(),
        [(begins, "START FULL 0"), (ANOTHER, "NOTE, STOP, CLOSE, TAKE_DOWN True"), (LEAVE, "TAKE_DOWN")],
    ),
    "something of ours fails": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (lambda state: state.failed("a call", ValueError()), "NOTE, CLOSE, TAKE_DOWN"),
            (LEAVE, "TAKE_DOWN"),
        ],
    ),
    "the block ends before its first step": (
        make_plan(),
        [(begins, "START FULL 0"), (LEAVE, "END_STEP 0 True, STOP, CLOSE, TAKE_DOWN")],
    ),
    "the block ends between the steps of an optimizer, which that is none of": (
        make_plan("0-9"),
        [
            (begins, "START TIMED 0"),
            (STEP, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1"),
            (LEAVE, "NOTE, STOP, CLOSE, TAKE_DOWN"),
        ],
    ),
    "the block ended where its thread could end nothing": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (
                lambda state: state.left("inside of backward or an op"),
                "NOTE, END_STEP 0 True, STOP, CLOSE, TAKE_DOWN, HAND_OVER",
            ),
        ],
    ),
    "an entry that may be one of many ends with the next step": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (lambda state: state.entered(0), "BEGIN_SCOPE block iteration#0"),
            (held_open, ""),
            (STEP, f"END_STEP 0 True, RESTART_GROWTH, {END}"),
        ],
    ),
    "a block that is entered again goes on without end": (
        OpenPlan(),
        [
            (begins, "START FULL 0"),
            (lambda state: state.entered(1), "BEGIN_SCOPE block iteration#1"),
            *[(INFER, PART)] * 3,  # no calls count
            (STEP, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1"),
            (STEP, "END_STEP 1 True, RESTART_GROWTH, BEGIN_STEP 2"),
        ],
    ),
    "a thread that may call starts before any call": (
        make_plan(),
        [
            (begins, "START FULL 0"),
            (LoopState.thread_may_call, "DISCARD, MARK True"),
            (on(OTHER), "START FULL 0"),
            (on(HOME), ""),
        ],
    ),
    "each thread is a window of the same plan": (
        make_plan(),
        [
            (waits, "MARK True"),
            (on(OTHER), "START FULL 0"),
            (INFER, PART),
            (thread_ends, "END_STEP 0 True, RESTART_GROWTH, BEGIN_STEP 1, STOP, CLOSE, WATCH_THREADS, HAND_OVER"),
            (STEP, ""),  # nothing is recorded that it could end
            (on(THIRD), "START FULL 2"),
        ],
    ),
    "a step that was owed ends with its thread, and no session begins on it": (
        make_plan("0", record_shapes=False),
        [
            (waits, "MARK True"),
            (on(OTHER), "START TIMED 0"),
            (owes, ""),
            (thread_ends, "END_STEP 0 True, RESTART_GROWTH, STOP, CLOSE, DISCARD, MARK True, HAND_OVER"),
        ],
    ),
    "the plan of another thread is over: wait for the block's own": (
        make_plan("0", record_shapes=False),
        [
            (waits, "MARK True"),
            (on(OTHER), "START TIMED 0"),
            (STEP, "END_STEP 0 True, RESTART_GROWTH, STOP, CLOSE, DISCARD, MARK True, HAND_OVER"),
            (on(OTHER), ""),
            (LEAVE, "TAKE_DOWN"),
        ],
    ),
    "the block's own thread goes before the one that called first": (
        make_plan(),
        [
            (waits, "MARK True"),
            (on(OTHER), "START FULL 0"),
            (INFER, PART),
            (comes_home, "DISCARD, MARK True"),
            (on(OTHER), ""),
            (on(HOME), "START FULL 0"),
        ],
    ),
}  # fmt: skip


def state_of(plan: Plan) -> LoopState:
    return LoopState(plan=plan, counter=StepCounter(optimizer_may_come=lambda: False), home=HOME, owner=HOME)


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_about_what_happens(case: str) -> None:
    plan, events = CASES[case]
    state = state_of(plan)
    assert [spelled(event(state)) for event, _ in events] == [done for _, done in events]


TRACE: Any = RecordedTrace(path=None, steps=(0,), shapes=False)  # type: ignore[arg-type]


def closed(state: LoopState, *events: Event, timed: bool = True) -> tuple[Window, list[str]]:
    """The last window that these events end, and what they note."""
    windows, notes = [], []
    for event in events:
        for do, *given in event(state):
            if do is Do.NOTE:
                notes.append(given[0])
            if do is Do.CLOSE:
                windows.append(Window(timed=TRACE) if timed else Window(full=TRACE))
                state.complete(windows[-1])
    return windows[-1], notes


def test_a_window_is_accounted_for_as_it_was_when_it_ended() -> None:
    """Whatever has begun since."""
    state = state_of(make_plan("0", record_shapes=False))
    window, _ = closed(state, waits, on(OTHER), called(call(phase="decode", grad=False, training=False)), INFER)
    assert window.step_source == "root calls" and window.frees_unseen
    moved, by_hand = window.warnings
    assert "on another thread than the block's" in moved and "each call of net was taken for a step" in by_hand
    assert state.counter.source == "nothing yet" and not state.moved


def test_calls_on_other_threads_are_said_once() -> None:
    state = state_of(make_plan("0,2"))
    state.calls_elsewhere = True
    window, _ = closed(state, begins, STEP)
    assert window.frees_unseen and len(window.warnings) == 1 and "on other threads too" in window.warnings[0]
    window, _ = closed(state, STEP, STEP)
    assert not window.frees_unseen and window.warnings == [] and window.step_source == "optimizer"


def test_what_is_left_out_is_counted_with_its_time() -> None:
    def left_out(plan: Plan, *events: Event, timed: bool = True) -> dict[str, tuple[int, float]]:
        rows = closed(state_of(plan), begins, *events, timed=timed)[0].left_out
        return {row["what"]: (row["count"], row["time_us"]) for row in rows}

    steps = [stepped(Now(time_s=second)) for second in range(1, 6)]
    assert left_out(make_plan(), *steps) == {"steps of warm-up": (2, 2e6)}
    assert left_out(make_plan(), *steps, timed=False) == {}, "they are what is reported"
    before = [called(call(grad=False, training=False), Now(time_s=second)) for second in (1, 2)]
    assert left_out(make_plan("2"), *before, *(stepped(Now(time_s=n)) for n in (4, 5, 6))) == {
        "before the first step of an optimizer": (2, 4e6),
        "steps of warm-up": (1, 1e6),
    }


@pytest.mark.parametrize(
    ("plan", "events", "notes"),
    [
        ("2-9", (STEP, STEP, LEAVE), ["of the steps asked for, 2-9 never came: the block ended after 2 steps"]),
        (
            "auto",
            (lambda state: state.left("on another thread"),),
            ["the block was left on another thread; recording ended with the next call or step on its own"],
        ),
        (
            "auto",
            (lambda state: state.failed("a call", ValueError("no")),),
            ["recording ended, because a call failed: no"],
        ),
        ("auto", (lambda state: state.grew("it grew"),), ["recording ended in step 0, because it grew"]),
        (
            "auto",
            (REQUESTED, lambda state: state.grew("it grew")),
            ['recording ended in step 0, because it grew. With steps="all" what torch holds is written out in between'],
        ),
        ("all", (REQUESTED, lambda state: state.grew("it grew")), ["recording ended in step 0, because it grew"]),
        (
            "auto",
            (STEP, ANOTHER),
            [
                "another torch profiler took over in step 1, and torch runs one at a time: "
                "ours ended there, and nothing after it is in this result"
            ],
        ),
    ],
)
def test_why_a_recording_ended(plan: str, events: tuple[Event, ...], notes: list[str]) -> None:
    assert closed(state_of(make_plan(plan)), begins, *events)[1] == notes


@pytest.mark.parametrize(
    ("plan", "grad", "events", "may"),
    [
        ("all", False, (REQUESTED,), True),
        ("3-4", False, (REQUESTED,), False),  # nothing is recorded yet
        ("0-4", False, (REQUESTED,), True),
        ("auto", False, (REQUESTED,), False),  # nobody asked for these steps
        ("all", False, (), False),  # no request runs
        ("all", True, (REQUESTED,), False),
        ("all", False, (TRAIN, REQUESTED), False),  # its backward may come
        ("all", False, (REQUESTED, lambda state: state.request_begins("generate", NOW)), False),
    ],
)
def test_when_what_torch_holds_is_written(plan: str, grad: bool, events: tuple[Event, ...], may: bool) -> None:
    state = state_of(make_plan(plan))
    for event in (begins, *events):
        list(event(state))
    assert state.may_write_out(call(grad=grad, training=False, in_request=True)) is may


def test_why_nothing_was_timed() -> None:
    generation = [called(call(phase=phase, grad=False, training=False)) for phase in ("prefill", *["decode"] * 5)]
    assert closed(state_of(make_plan()), begins, *generation)[0].why_full == "a prefill comes once"
    endless: Plan = AutoPlan(timed_steps=None)
    assert closed(state_of(endless), begins, LEAVE)[0].why_full == "of inference all is recorded alike"
    assert closed(state_of(OpenPlan()), begins, LEAVE)[0].why_full == "the block is entered again and again"
    assert closed(state_of(make_plan()), begins, LEAVE)[0].why_full == "recording ended before a timed step did"


def test_a_plan_that_ends_is_told_from_one_that_was_ended() -> None:
    state = state_of(make_plan("0", record_shapes=False))
    for event in (begins, STEP):
        list(event(state))
    assert state.over and state.over_as_planned and state.mode is Mode.OVER
    for event in (ANOTHER, LEAVE, LoopState.lost):
        state = state_of(make_plan())
        for each in (begins, event):
            list(each(state))
        assert state.over and not state.over_as_planned and not state.running


def test_no_torch_is_imported() -> None:
    code = "import sys, profiler_wrapper.capture.loop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
