"""When a step has ended, and what to record of which: pure decisions, without torch.

Steps are numbered from 0, as `torch.profiler` numbers them.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from profiler_wrapper.errors import WrongUse, in_a_line, shown

WARM_UP_STEPS = 2
MOST_WARM_UP_STEPS = 10  # while torch.compile is still compiling
TIMED_STEPS = 3
GENERATION_CALLS = WARM_UP_STEPS + TIMED_STEPS
MOST_EVALUATIONS = 3  # one after the other are left out: in a loop that evaluates in every step they are part of it

_ACTIONS = ("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE")  # torch.profiler.ProfilerAction

Shapes = bool | Literal["auto"]


class Mode(Enum):
    """What is recorded of a step."""

    IDLE = "nothing yet"
    FULL = "in full: a warm-up step, with shapes where they are recorded at all"
    TIMED = "a step whose times are reported"
    OVER = "nothing, ever again"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What happened in a step that has ended."""

    compiled: bool = False  # torch.compile compiled something
    phases: frozenset[str] = frozenset()  # of calls by hand: "prefill", "decode"
    trains: bool = True  # an optimizer's, or it made gradients
    evaluated: bool = False  # a model that learns was evaluated in it


class Decision(NamedTuple):
    """What is recorded of the step after one that has ended."""

    mode: Mode
    ends_window: bool = False  # what was recorded so far is one result


# Each plan says what is recorded of a step: of the first by `begin`, called again where what was counted before turned
# out to be none, and of the next by `after`, with what happened in the one that has ended.


@dataclass(slots=True)
class AutoPlan:
    """A few warm-up steps in full, then the timed ones, then nothing.

    Generation by hand stays in one window in full: its prefill comes once, and a table needs it beside the decoding.
    So does inference without an end: no call of it is a warm-up.
    """

    timed_steps: int | None = TIMED_STEPS  # None: no end
    warms_up: bool = True
    _recorded: int = 0
    _evaluated: int = 0  # steps with an evaluation, one after the other
    _mode: Mode = Mode.FULL
    _phases: set[str] = field(default_factory=set)

    def begin(self, step: int) -> Mode:
        self._recorded = self._evaluated = 0
        self._phases.clear()
        self._mode = Mode.FULL if self.warms_up else Mode.TIMED
        return self._mode

    def after(self, step: int, facts: StepFacts) -> Decision:
        self._evaluated = self._evaluated + 1 if facts.evaluated else 0
        if 0 < self._evaluated <= MOST_EVALUATIONS:
            return Decision(self._mode)
        self._recorded += 1
        if len(facts.phases) == 1:  # else it is a whole request
            self._phases |= facts.phases
        if self.is_generation:
            goes_on = self.timed_steps is None or self._recorded < GENERATION_CALLS
        elif self.timed_steps is None and not facts.trains:
            goes_on = True
        else:
            goes_on = self._recorded < (MOST_WARM_UP_STEPS if facts.compiled else WARM_UP_STEPS)
        if self._mode is Mode.FULL and goes_on:
            return Decision(Mode.FULL)
        if self._mode is Mode.FULL and not self.is_generation:
            self._mode, self._recorded = Mode.TIMED, 0
        elif self._mode is Mode.FULL or self._recorded == self.timed_steps:
            self._mode = Mode.OVER
        return Decision(self._mode, ends_window=self._mode is Mode.OVER)

    @property
    def is_generation(self) -> bool:
        """A prefill and then decoding was seen in the calls recorded in full."""
        return {"prefill", "decode"} <= self._phases


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Each cycle of a `torch.profiler.schedule(...)` is a window; with shapes, the step before it is in full."""

    action: Callable[[int], str]  # name of the torch.profiler.ProfilerAction of a step
    full_step_before: bool
    windows: tuple[range, ...] = ()  # that the schedule stands for; empty: it has no end

    def begin(self, step: int) -> Mode:
        return self._mode(step)

    def after(self, step: int, facts: StepFacts) -> Decision:
        return Decision(self._mode(step + 1), ends_window=self.action(step) == "RECORD_AND_SAVE")

    def missed(self, steps: int) -> str:
        """Which of the steps asked for were not among the first `steps`: `"20-22, 500"`; "" if all were."""
        left = [(max(window[0], steps), window[-1]) for window in self.windows if window[-1] >= steps]
        return ", ".join(str(last) if first == last else f"{first}-{last}" for first, last in left)

    def _mode(self, step: int) -> Mode:
        if self.windows and step > self.windows[-1][-1]:
            return Mode.OVER
        if self.action(step).startswith("RECORD"):
            return Mode.TIMED
        if self.full_step_before and self.action(step + 1).startswith("RECORD"):
            return Mode.FULL
        return Mode.IDLE


@dataclass(slots=True)
class OpenPlan:
    """Everything until it is ended from outside: the block is entered again and again.

    Until it has been entered a second time, nobody knows that it will be, so the first step ends it.
    """

    mode: Mode = Mode.FULL
    entered_again: bool = False

    def begin(self, step: int) -> Mode:
        return self.mode

    def after(self, step: int, facts: StepFacts) -> Decision:
        return Decision(self.mode) if self.entered_again else Decision(Mode.OVER, ends_window=True)


Plan: TypeAlias = AutoPlan | SchedulePlan | OpenPlan


def make_plan(
    steps: str | int | range = "auto", *, schedule: Callable[[int], Any] | None = None, record_shapes: Shapes = "auto"
) -> Plan:
    """The plan for what a user asked for.

    Args:
        steps: `"auto"`, `"all"`, `"20-22"`, `"20-22,500"`; a number or a range of numbers.
        schedule: a `torch.profiler.schedule(...)`, instead of `steps`.
        record_shapes: `"auto"` records shapes in warm-up steps only, so there have to be some.

    Raises WrongUse: `steps` is nothing of that, or `schedule` comes with `steps` or cannot be called.
    """
    full_step_before = record_shapes == "auto"
    if schedule is not None:
        if not (isinstance(steps, str) and steps == "auto"):
            raise WrongUse(f"steps={shown(steps)} and a schedule were given. Give one of them.")
        try:
            made = schedule(0)  # as torch.profiler asks too when it is made
        except Exception as error:
            raise _no_schedule(schedule, f"asked for step 0 it raises {in_a_line(error)}") from error
        if getattr(made, "name", None) not in _ACTIONS:
            raise _no_schedule(schedule, f"asked for step 0 it gives {shown(made)}, which is no ProfilerAction")
        return SchedulePlan(lambda step: str(getattr(schedule(step), "name", "")), full_step_before)
    if isinstance(steps, str) and steps == "auto":
        return AutoPlan()
    if isinstance(steps, str) and steps == "all":
        return AutoPlan(timed_steps=None, warms_up=record_shapes == "auto")
    windows = parse_windows(steps)

    def action(step: int) -> str:
        window = next((window for window in windows if step in window), None)
        return "NONE" if window is None else "RECORD_AND_SAVE" if step == window[-1] else "RECORD"

    return SchedulePlan(action, full_step_before, windows)


def _no_schedule(schedule: object, why: str) -> WrongUse:
    return WrongUse(f"schedule={shown(schedule)} is no torch.profiler.schedule(...): {why}. Give one or steps='20-22'.")


def parse_windows(steps: str | int | range) -> tuple[range, ...]:
    """`"20-22,500"` -> `(range(20, 23), range(500, 501))`, in order. Raises WrongUse: no such text, or they overlap."""
    if isinstance(steps, range) and len(steps) and steps.step == 1 and steps.start >= 0:
        return (steps,)
    if isinstance(steps, bool) or not isinstance(steps, (str, int)):
        raise _not_steps(steps)
    parts = str(steps).split(",")
    windows = sorted((_parse_window(part.strip(), steps) for part in parts), key=lambda window: window.start)
    for earlier, later in pairwise(windows):
        if later.start < earlier.stop:
            raise WrongUse(f"steps={shown(steps)} asks for step {later.start} twice. Give windows that do not overlap.")
    return tuple(windows)


def _parse_window(part: str, steps: object) -> range:
    match = re.fullmatch(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?", part)
    if match is None:
        raise _not_steps(steps)
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise WrongUse(f"steps={shown(steps)}: the window {part} ends before it begins. Write {last}-{first}.")
    return range(first, last + 1)


def _not_steps(steps: object) -> WrongUse:
    return WrongUse(f"steps={shown(steps)} means nothing here. Give 'auto', 'all', or step numbers like '20-22,500'.")


# --------------------------------------------------------------------------------------------------
# When a step has ended: by what the user says, what the optimizer does, what is called. Without torch.

# Calls with gradients while an optimizer may come: micro-batches, until there are too many of them.
MOST_MICRO_BATCHES = 64
# Steps of another optimizer while the first makes none: then that one has taken over.
MOST_OTHER_STEPS = 16


class Ended(Enum):
    """What an event means for the step that is running."""

    NO = "it goes on"
    YES = "it has ended"
    RESTART = "it has ended, and what was taken for steps before it was none"


StepSource = Literal["nothing yet", "prof.step()", "optimizer", "updates", "requests", "root calls"]


@dataclass(slots=True)
class StepCounter:
    """Says when a step has ended, by the first rule that applies; a higher rule discards what a lower one counted.

    1. A step is what `prof.step()` ends.
    2. Without it, one step of the first optimizer seen that may train a root, or of the next one once that is no more
       or has made none for `MOST_OTHER_STEPS` steps of another; of one that calls no hook (compiled, not torch's, or
       made inside of backward), what changes the parameters between two calls.
    3. Without that, one request: the outermost running `generate` or pipeline.
    4. Without that, one outermost call of a root and the backward after it. Another root joins the step; when one is
       called that was already called in it, the next begins. Parts of a known model are no roots.

    While an optimizer that may step is alive, requests and calls of what trains are micro-batches or rollouts, until
    there are `MOST_MICRO_BATCHES` of them.

    Args:
        first: the number of the step in which counting begins.
        optimizer_may_come: whether an optimizer is alive that holds a parameter of a root; asked once, at the first
            call for which it matters.
    """

    first: int = 0
    source: StepSource = "nothing yet"
    count_root_calls: bool = True
    optimizer_may_come: Callable[[], bool] = lambda: True
    ended: int = field(init=False)
    _optimizer: Hashable | None = None
    _others: Counter[Hashable] = field(default_factory=Counter)  # their steps since the first one's last
    _roots: set[Hashable] = field(default_factory=set)  # called in the running step
    _trained: bool = False  # a root was called with gradients in the running step
    _micro_batches: int = 0  # calls with gradients that may have been some
    _waits_for_optimizer: bool | None = None  # not asked yet

    def __post_init__(self) -> None:
        self.ended = self.first

    def user_step(self) -> Ended:
        """`prof.step()` was called: from now on nothing else counts."""
        before, self.source = self.source, "prof.step()"
        if before in ("prof.step()", "nothing yet"):
            return self.end()
        # What was counted just before the first prof.step() was the same step.
        called = self._trained if before == "optimizer" else bool(self._roots)
        return Ended.NO if self.ended == self.first + 1 and not called else self._restart()

    def optimizer_step(self, optimizer: Hashable) -> Ended:
        """An optimizer, or what a weak reference to it refers to, has made a step, or a gradient scaler left it out."""
        self._others[optimizer] += 1
        first = self._optimizer() if isinstance(self._optimizer, weakref.ref) else self._optimizer
        if first is None or self._others[optimizer] > MOST_OTHER_STEPS:
            self._optimizer = optimizer
        if optimizer == self._optimizer:
            self._others.clear()
        if self.source == "prof.step()" or optimizer != self._optimizer:
            return Ended.NO
        before, self.source = self.source, "optimizer"
        return self._restart() if before in ("requests", "root calls") else self.end()

    def request_ends(self, *, may_train: bool) -> Ended:
        """The outermost `generate` or pipeline has returned; `may_train`: of a model in training mode, as a rollout."""
        if self.source in ("prof.step()", "optimizer", "updates") or not self.count_root_calls:
            return Ended.NO
        if may_train and self._is_micro_batch():
            return Ended.NO
        before, self.source = self.source, "requests"
        return self._restart() if before == "root calls" else self.end()

    def root_enters(self, root: Hashable, *, gradients: bool, updated: bool = False, in_request: bool = False) -> Ended:
        """A root is about to be called; YES: the step before ended. `updated`: parameters have changed since then."""
        again = root in self._roots
        self._roots.add(root)
        self._trained |= gradients
        if self.source in ("prof.step()", "optimizer") or not again or not self.count_root_calls:
            return Ended.NO
        were_none = False
        if updated:
            were_none = self.source == "requests" or (self.source == "root calls" and self._micro_batches > 0)
            self.source = "updates"
        elif in_request or self.source in ("updates", "requests") or (gradients and self._is_micro_batch()):
            return Ended.NO
        else:
            self.source = "root calls"
        ended = self._restart() if were_none else self.end()
        self._roots.add(root)
        self._trained = gradients
        return ended

    def _is_micro_batch(self) -> bool:
        """Whether this call, after another one, may belong to the same step of an optimizer."""
        self._micro_batches += 1
        if self._waits_for_optimizer is None:
            self._waits_for_optimizer = self.optimizer_may_come()
        return self._waits_for_optimizer and self._micro_batches < MOST_MICRO_BATCHES

    def begin_anew(self) -> None:
        """What was counted were steps of another thread."""
        self.end()
        self.source, self.ended, self._micro_batches = "nothing yet", self.first, 0

    def last_step_counts(self) -> bool:
        """The recording ends now: is what runs a step of its own, not just what follows the last one?"""
        return self.source == "nothing yet" or (self.source in ("updates", "root calls") and bool(self._roots))

    def end(self) -> Ended:
        """The running step has ended, whatever counts."""
        self.ended += 1
        self._roots.clear()
        self._trained = False
        return Ended.YES

    def _restart(self) -> Ended:
        """This was the first step; those before it were none."""
        self.ended = self.first
        self.end()
        return Ended.RESTART


# --------------------------------------------------------------------------------------------------
# PROFILER_WRAPPER in the environment, as far as it turns everything off. Imports no torch: it is asked at import.

SWITCH = "PROFILER_WRAPPER"


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns the package off."""
    return environment.get(SWITCH, "").strip().lower() in ("off", "0")
