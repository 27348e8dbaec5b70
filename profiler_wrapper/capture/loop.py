"""Decide what is recorded when: what happens in a loop goes in, what to do about it comes out. Imports no torch.

`LoopState` is all that a recording remembers. Each of its events is a method that changes nothing but that state and
yields effects, `(Do.START, Mode.FULL, 0)`: what to do and with what, before it goes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from profiler_wrapper.capture.records import Window
from profiler_wrapper.capture.steps import (
    AutoPlan,
    Ended,
    Mode,
    OpenPlan,
    Plan,
    SchedulePlan,
    StepCounter,
    StepFacts,
)
from profiler_wrapper.trace.marks import EVALUATION, REQUEST

if TYPE_CHECKING:
    from profiler_wrapper.capture.scopes import RootCall

_UNITS = {"requests": "requests", "root calls": "calls"}  # what steps are called by what ends them
_FIRST = {"prof.step()": "prof.step()", "requests": "request"}
_SETTLING_STEPS = 2  # gradients and the optimizer's state come in these, and stay

Thread: TypeAlias = tuple[int, int]  # process and thread


class Do(IntEnum):
    """What to do, and with what."""

    START = auto()  # (mode, step): record a session; step None: before the next begins
    STOP = auto()  # end the session and keep its trace
    DISCARD = auto()  # end the session and forget the window
    BEGIN_STEP = auto()  # (step)
    END_STEP = auto()  # (step, counts): a step in which a model was evaluated does not
    BEGIN_SCOPE = auto()  # (scope, name)
    END_SCOPE = auto()  # (scope)
    RESTART_GROWTH = auto()  # count it from now on
    NOTE = auto()  # (message), or (message, True): so that the result is incomplete
    CLOSE = auto()  # the window is whole, but for what `complete` adds
    HAND_OVER = auto()  # finish the windows that are whole, while the loop goes on
    MARK = auto()  # (wanted): whether layers are marked
    WATCH_THREADS = auto()  # that start
    TAKE_DOWN = auto()  # () or (True), which leaves the marks: take all away, whatever state it is in


Effects: TypeAlias = Iterator[tuple[Any, ...]]  # each a `Do` and with what


class Now(NamedTuple):
    """What can be seen when something happens."""

    time_s: float = 0.0
    compilations: int = 0  # of torch.compile so far
    grew: str | None = None  # why the process, which records, has grown too much


@dataclass(slots=True, kw_only=True)
class LoopState:
    """What a recording of one loop on one thread remembers.

    That is the thread that begins it. Where another one may call the model, it waits for the first call and records
    the caller's thread from then on; when that ends, it waits for the next. The block's own thread goes before all
    others: with its first call what was recorded of another one ends, and counting begins anew.
    """

    plan: Plan
    counter: StepCounter
    home: Thread = (0, 0)  # the block's
    owner: Thread = (0, 0)  # the one recorded
    mode: Mode = Mode.IDLE
    running: bool = False  # a session is
    waits: bool = False  # for the first call of a model, on whichever thread
    stays: bool = False  # at home, for good
    has_moved: bool = False  # another thread than the block's is recorded, or was
    over: bool = False  # nothing more will be recorded
    over_as_planned: bool = False  # and not by a failure or for another profiler
    owes_step: bool = False  # prof.step() was called where no step can end
    calls_elsewhere: bool = False
    # The running step.
    began_s: float = 0.0
    compilations: int = 0
    phases: set[str] = field(default_factory=set)  # of calls by hand
    trains: bool = False  # it made gradients
    evaluations: int = 0  # calls in evaluation mode of what has trained
    request_calls: int = 0  # in the running request
    # The loop so far.
    root_calls: int = 0
    trained: set[str] = field(default_factory=set)  # roots that were called with gradients
    by_hand: str | None = None  # a root of which an image or a text takes several calls
    left_out: dict[str, tuple[int, float]] = field(default_factory=dict)  # what, how often, seconds
    counted: int = 0  # steps
    counted_s: float = 0.0  # how long they took

    @property
    def moved(self) -> bool:
        """Another thread than the block's is recorded."""
        return self.owner != self.home

    @property
    def asked_for(self) -> bool:
        """The user said which steps."""
        plan = self.plan
        return isinstance(plan, SchedulePlan) or (isinstance(plan, AutoPlan) and plan.timed_steps is None)

    # -- the block --------------------------------------------------------------------------------

    def begin(self, now: Now, *, waits: bool) -> Effects:
        """The block was entered; `waits`: another thread may call the model."""
        self.began_s, self.compilations, self.waits = now.time_s, now.compilations, waits
        yield from self._switch(self.plan.begin(self.counter.ended))

    def entered(self, entry: int) -> Effects:
        """The block was entered, for the first time if `entry` is 0."""
        if isinstance(self.plan, OpenPlan):
            self.plan.entered_again |= entry > 0
            self.counter.count_root_calls = False
        yield Do.BEGIN_SCOPE, "block", f"iteration#{entry}"

    def held_open(self) -> None:
        """The block was left, and may be entered again."""
        self.plan = OpenPlan(self.mode)
        self.counter.count_root_calls = False

    def left(self, where: str = "") -> Effects:
        """The block has ended; or it has some time ago, `where` its thread could end nothing, which now can."""
        if where and not self.moved:
            yield Do.NOTE, f"the block was left {where}; recording ended with the next call or step on its own"
        if not self.over and (self.running or not self.stays):
            steps = self.counter.ended
            if self.counter.last_step_counts():
                yield Do.END_STEP, steps, True
            if isinstance(self.plan, SchedulePlan) and (missed := self.plan.missed(steps)):
                yield Do.NOTE, f"of the steps asked for, {missed} never came: the block ended after {steps} steps"
            yield from self._stop(closes=True)
        yield from self._end()
        if where:
            yield (Do.HAND_OVER,)

    # -- what happens in the loop -----------------------------------------------------------------

    def user_stepped(self, now: Now) -> Effects:
        """`prof.step()` was called."""
        self.owes_step = False
        after_request = self.counter.source == "requests"
        ended = self.counter.user_step()
        if after_request and ended is Ended.NO:  # from now on steps follow one another
            return iter([(Do.BEGIN_STEP, self.counter.ended)])
        return self._count(ended, now)

    def optimizer_stepped(self, optimizer: Hashable, now: Now) -> Effects:
        """An optimizer that may train the model has made a step, or left it out."""
        return self._count(self.counter.optimizer_step(optimizer), now)

    def root_enters(self, call: RootCall, now: Now, *, updated: bool) -> Effects:
        """A model is about to be called; `updated`: its parameters have changed since the last call."""
        if now.grew is not None:
            return self.grew(now.grew)
        ended = self.counter.root_enters(
            call.label, gradients=call.grad_enabled, updated=updated, in_request=call.in_request
        )
        return self._count(ended, now)

    def heard(self, call: RootCall) -> Effects:
        """It is called now, be it where no step can end."""
        self.root_calls += 1
        self.trains |= call.grad_enabled
        if call.grad_enabled:
            self.trained.add(call.label)
        self.request_calls = self.request_calls + 1 if call.in_request else 0
        if call.in_request:
            return
        self.phases.add(call.phase)
        if call.samples or call.phase == "decode":
            self.by_hand = call.label
        if call.grad_enabled or call.training or call.label not in self.trained:
            yield Do.END_SCOPE, "part"
            return
        self.evaluations += 1
        if self.evaluations == 1:
            yield Do.BEGIN_SCOPE, "part", EVALUATION

    def may_write_out(self, call: RootCall) -> bool:
        """What torch holds may be written before this call, and recorded on.

        Between two calls of a request where nothing trains: no backward may belong to what was written. And not where
        nobody asked for these steps: fewer do, and each pause costs.
        """
        return bool(self.running and self.request_calls and self.asked_for) and not (call.grad_enabled or self.trained)

    def request_begins(self, name: str, now: Now) -> Effects:
        """A `generate` or a pipeline is about to run."""
        self.request_calls = 0
        if self.counter.source == "requests":
            self.began_s = now.time_s
            yield Do.BEGIN_STEP, self.counter.ended
        yield Do.BEGIN_SCOPE, "part", f"{REQUEST}{name}"

    def request_ends(self, now: Now, *, may_train: bool) -> Effects:
        """It has returned, or raised."""
        return self._count(self.counter.request_ends(may_train=may_train), now)

    def grew(self, reason: str) -> Effects:
        """The process, or the trace, has grown too much."""
        if self.request_calls and not (self.trained or self.asked_for):
            reason += '. With steps="all" what torch holds is written out in between'
        yield Do.NOTE, f"recording ended in step {self.counter.ended}, because {reason}", True
        yield from self.lost()

    def lost(self) -> Effects:
        """Nothing more can be recorded while the loop runs on."""
        yield from self._stop(closes=True)
        yield from self._end()
        yield (Do.HAND_OVER,)

    def failed(self, what: str, error: Exception) -> Effects:
        """Something of ours did."""
        yield Do.NOTE, f"recording ended, because {what} failed: {error}", True
        yield (Do.CLOSE,)
        yield from self._end()

    def other_profiler(self) -> Effects:
        """Somebody else's profiler is about to start: torch has room for one. The marks are of use in its trace."""
        took_over = f"another torch profiler took over in step {self.counter.ended}, and torch runs one at a time"
        yield Do.NOTE, f"{took_over}: ours ended there, and nothing after it is in this result", True
        yield from self._stop(closes=True)
        self.mode, self.over = Mode.OVER, True
        yield Do.TAKE_DOWN, True

    # -- the thread that calls the model ------------------------------------------------------------

    def thread_may_call(self) -> Effects:
        """A thread starts that may call the model, which nobody has done yet: wait for the first call."""
        yield from self._stop(Do.DISCARD)
        self.waits = True
        yield from self._switch(self.mode)

    def called_on(self, thread: Thread) -> Effects:
        """A model is about to be called on a thread; where that was waited for, it is recorded."""
        if self.waits and (not self.stays or thread == self.home):
            self.waits, self.owner = False, thread
            self.has_moved |= self.moved
            yield from self._switch(self.mode)

    def came_home(self, now: Now) -> Effects:
        """The block's own thread calls the model: what was recorded of another one ends, and this one stays."""
        yield from self._stop(Do.DISCARD)
        self.owner, self.waits, self.stays = self.home, True, True
        self.counter.begin_anew()
        self._facts(now)
        self.trained.clear()
        self.left_out, self.counted, self.counted_s = {}, 0, 0.0
        yield from self._switch(self.plan.begin(self.counter.ended))

    def thread_ended(self, now: Now) -> Effects:
        """The thread recorded has: the next call, on whichever thread, is another window of the same plan."""
        self.waits = True
        if self.owes_step:
            yield from self.user_stepped(now)
        if self.moved and self.counter.last_step_counts():
            yield from self._count(self.counter.end(), now)
        if self.over or not self.moved:  # with that step the plan was
            return
        yield from self._stop(closes=True)
        self.owner = self.home
        yield (Do.WATCH_THREADS,)
        yield (Do.HAND_OVER,)

    # -- steps and windows ------------------------------------------------------------------------

    def _count(self, ended: Ended, now: Now) -> Effects:
        if ended is Ended.NO or (self.waits and not self.running and isinstance(self.plan, AutoPlan)):
            return
        step, source = self.counter.ended - 1, self.counter.source
        facts = self._facts(now)
        took_s, self.began_s = now.time_s - self.began_s, now.time_s
        self.counted += 1
        self.counted_s += took_s
        if ended is Ended.RESTART:
            first = _FIRST.get(source, "step of an optimizer")
            self.left_out = {f"before the first {first}": (self.counted, self.counted_s)}
            yield from self._stop(Do.DISCARD)
            yield from self._switch(self.plan.begin(step + 1))
            return
        if facts.evaluated or self.mode is not Mode.TIMED:
            why = "with an evaluation" if facts.evaluated else "of warm-up" if self.mode is Mode.FULL else "before"
            count, seconds = self.left_out.get(what := f"{_UNITS.get(source, 'steps')} {why}", (0, 0.0))
            self.left_out[what] = count + 1, seconds + took_s
        yield Do.END_STEP, step, not facts.evaluated
        if facts.compiled and self.mode is Mode.TIMED:
            yield Do.NOTE, f"torch.compile was still compiling in the timed step {step}"
        if self.running and step < _SETTLING_STEPS:
            yield (Do.RESTART_GROWTH,)
        elif now.grew is not None:
            yield from self.grew(now.grew)
            return
        decision = self.plan.after(step, facts)
        if decision.mode is not self.mode or decision.ends_window:
            yield from self._stop(closes=decision.ends_window)
            yield from self._switch(decision.mode)
            if decision.ends_window:
                yield (Do.HAND_OVER,)
        elif source != "requests":  # the next begins with the next request
            yield Do.BEGIN_STEP, self.counter.ended

    def _facts(self, now: Now) -> StepFacts:
        """What happened in the step that has ended."""
        of_optimizer = self.counter.source in ("optimizer", "updates")
        facts = StepFacts(
            compiled=now.compilations != self.compilations,
            phases=frozenset(self.phases & {"prefill", "decode"}),
            trains=self.trains or of_optimizer,
            evaluated=of_optimizer and self.evaluations > 0,
        )
        self.phases.clear()
        self.trains, self.evaluations, self.compilations = False, 0, now.compilations
        return facts

    def _switch(self, mode: Mode) -> Effects:
        self.mode = mode
        if mode is Mode.OVER and self.moved:
            yield from self.came_home(Now(compilations=self.compilations))
        elif mode is Mode.OVER:
            self.over_as_planned = True
            yield from self._end()
        elif mode is Mode.IDLE or self.waits:
            # Calls of the model are what counts steps until something better does.
            yield Do.MARK, self.waits or self.counter.source not in ("prof.step()", "optimizer")
        else:
            self.running = True
            yield Do.START, mode, None if self.counter.source == "requests" else self.counter.ended

    def _stop(self, how: Do = Do.STOP, *, closes: bool = False) -> Effects:
        yield (how,)
        self.running = False
        if closes:
            yield (Do.CLOSE,)

    def _end(self) -> Effects:
        self.running, self.over = False, True
        yield (Do.TAKE_DOWN,)

    def complete(self, window: Window) -> None:
        """Write into a window what is known of its steps, now that it ends."""
        window.frees_unseen = self.moved or self.calls_elsewhere
        if self.calls_elsewhere:
            self.calls_elsewhere = False
            window.warn("the model was called on other threads too: torch.profiler does not record what runs there")
        if self.moved and not window.empty:
            window.warn(
                "the model was called on another thread than the block's: the result is that thread's, from there on"
            )
        plan, source = self.plan, self.counter.source
        window.step_source = None if source == "nothing yet" else source
        window.left_out = [
            {"what": what, "count": count, "time_us": round(1e6 * seconds, 3)}
            for what, (count, seconds) in self.left_out.items()
            if window.timed is not None or not what.endswith("of warm-up")  # else they are what is reported
        ]
        self.left_out = {}
        if source == "root calls" and self.by_hand is not None:
            window.warn(
                f"each call of {self.by_hand} was taken for a step, though an image or a text takes several: "
                "call prof.step() after each image or text"
            )
        if isinstance(plan, AutoPlan) and plan.is_generation:
            window.why_full = "a prefill comes once"
        elif isinstance(plan, AutoPlan) and plan.timed_steps is None:
            window.why_full = "of inference all is recorded alike"
        elif isinstance(plan, OpenPlan):
            window.why_full = "the block is entered again and again"
