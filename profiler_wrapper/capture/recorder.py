"""Records a running loop: follows its steps, and switches sessions as the plan says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from profiler_wrapper.capture.growth import CALLS_WRITTEN_OUT, GrowthBound, too_large
from profiler_wrapper.capture.kv_cache import keep_largest
from profiler_wrapper.capture.owned_tensors import OwnedTensors, may_come
from profiler_wrapper.capture.records import Window
from profiler_wrapper.capture.requests import Request
from profiler_wrapper.capture.scopes import LayerScopes, RootCall
from profiler_wrapper.capture.session import Session, SessionSequence
from profiler_wrapper.capture.steps import AutoPlan, Ended, Mode, OpenPlan, Plan, SchedulePlan, StepCounter, StepFacts
from profiler_wrapper.capture.torch_state import (
    OptimizerSteps,
    ThreadStarts,
    capturing,
    compilations,
    free_recorder,
    in_backward,
    in_op,
    is_alive,
    is_tracing,
    may_call,
    profiler_is_on_somewhere,
    wait_until,
)
from profiler_wrapper.trace.marks import EVALUATION, REQUEST

_UNITS = {"requests": "requests", "root calls": "calls"}  # what steps are called by what ends them
_FIRST = {"prof.step()": "prof.step()", "requests": "request"}
_SETTLING_STEPS = 2  # gradients and the optimizer's state come in these, and stay


class Recorder:
    """From `start()` to `stop()`, one loop on one thread.

    That is the thread that starts it. Where another one may call the model, the recording waits for the first call
    and is the caller's thread's from then on; when that ends, it waits for the next. The block's own thread goes before
    all others: with its first call what was recorded of another one ends, and counting begins anew.

    Methods called from inside the loop never raise: what fails ends the recording and goes to `on_failure`.

    Args:
        new_session, part_path, held: see `SessionSequence`.
        on_over: called once when nothing more will be recorded.
        on_window: called when a window has ended while the loop runs on.
        counter: says when a step has ended.
        alone: no other rank waits for this one while it writes out what was recorded, in the midst of a step.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        marks: LayerScopes,
        new_session: Callable[[Mode], Session],
        part_path: Callable[[str], Path],
        held: OwnedTensors,
        on_failure: Callable[[str, Exception], None],
        on_over: Callable[[], None] = lambda: None,
        on_window: Callable[[], None] = lambda: None,
        counter: StepCounter,
        alone: bool = True,
    ) -> None:
        self.windows: list[Window] = []
        self.counter = counter
        self._plan, self._marks, self._on_failure = plan, marks, on_failure
        self._on_over, self._on_window, self._alone = on_over, on_window, alone
        self._growth = GrowthBound(calls=lambda: marks.calls)
        self._held = held
        self.sessions = SessionSequence(
            new_session=new_session, part_path=part_path, before_another=self.before_another, held=held
        )
        self._mode = Mode.IDLE
        self._steps_hook: OptimizerSteps | None = None
        self._phases: set[str] = set()  # of calls by hand in the running step
        self._trains = False  # the running step made gradients
        self._request_calls = 0  # in the running request
        self._trained: set[str] = set()  # roots that were called with gradients
        self._answers: dict[tuple[Any, int], bool] = {}  # whether an optimizer may train one of so many roots
        self._evaluations = 0  # calls of these, in the running step, in evaluation mode
        self._left_out: dict[str, tuple[int, float]] = {}  # what, how often, seconds
        self._step_began_s = time.perf_counter()
        self._counted, self._all_s = 0, 0.0  # steps so far, and how long they took
        self._by_hand: str | None = None  # a root of which an image or a text takes several calls
        self._owes_step = False  # prof.step() was called inside of backward
        self._calls_elsewhere = False
        self._threads = ThreadStarts(
            before=self._thread_starts, at_end=lambda: self._safely("the end of the thread", self._end_with_its_thread)
        )
        self._waits = False  # for the first call of a model, on whichever thread
        self._stays = False  # on the block's thread, for good
        self.has_moved = False  # another thread than the block's is recorded, or was
        self._lock = threading.RLock()  # the block's thread may leave while the one recorded is at work here
        self._next: Callable[[], None] | None = None  # what the next call or step on its own thread has to do instead
        self._compilations = compilations()
        self.over_as_planned = False  # and not by a failure or for another profiler
        self.over = False  # nothing more will be recorded, and nothing of ours is in the user's way
        self._home = self._owner = (os.getpid(), threading.get_ident())  # the block's thread, and the one recorded

    @property
    def on_owner_thread(self) -> bool:
        """On the process and thread that started it; forked workers and other threads are not."""
        return self._owner == (os.getpid(), threading.get_ident())

    @property
    def is_same_process(self) -> bool:
        """Not in a fork of the process that started it."""
        return self._owner[0] == os.getpid()

    @property
    def moved(self) -> bool:
        """Another thread than the block's is recorded."""
        return self._owner != self._home

    @property
    def _is_home(self) -> bool:
        return self._home == (os.getpid(), threading.get_ident())

    @property
    def _is_another_thread(self) -> bool:
        return self.is_same_process and not self.on_owner_thread

    # -- from outside the loop --------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Raises what torch raises, with nothing left behind."""
        try:
            self._steps_hook = OptimizerSteps(
                before=self.optimizer_steps, after=self.optimizer_stepped, skipped=self.optimizer_stepped
            )
            first = self._plan.begin(self.counter.ended)
            others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
            self._waits = any(map(self._may_call, others))
            self._switch_to(first)
            if not self.over:
                self._threads.install()
        except BaseException:
            self._take_down()
            raise

    def ends_later(self) -> str:
        """The block has ended where torch cannot stop its profiler, and why; the next call or step ends the session.

        "" where `stop()` can do it, or the thread recorded has ended.
        """
        with self._lock:
            self._waits = False
        if self.sessions.running and self.on_owner_thread and self._nothing_ends_here():
            self._next = partial(self._end_left, "inside of backward or an op")
            return "the block was left inside of backward or an op, where torch cannot stop a profiler"
        if not self._ask_its_thread(partial(self._end_left, "on another thread")):
            return ""
        if self.moved:
            wait_until(lambda: self.over)
        with self._lock:  # it may be writing
            if self.over:
                return ""
        whose = "the block was left on another thread than it was entered on"
        whose = "the model is called on a thread that runs on" if self.moved else whose
        return f"{whose}, and torch stops a profiler on its own thread only"

    @property
    def is_ending(self) -> bool:
        """It ends with the next call or step."""
        return self._next is not None and not self.over

    def _ask_its_thread(self, action: Callable[[], None]) -> bool:
        if not (self._is_another_thread and self.sessions.running and is_alive(self._owner[1])):
            return False
        self._next = action
        return True

    def stop(self) -> None:
        """The block has ended: end the session, close the window, take everything away."""
        try:
            if not self.is_same_process:
                self.note("it was ended in another process than it began in", incomplete=True)
            else:
                with self._lock:
                    self._settle_step()
                    if not self.over and (self.sessions.running or not self._stays):
                        self._end_loop()
        finally:
            self._take_down()

    def _end_left(self, where: str) -> None:
        if not self.moved:
            self.note(f"the block was left {where}; recording ended with the next call or step on its own")
        self._end_loop()
        self._take_down()
        self._on_window()

    def _end_loop(self) -> None:
        if self.counter.last_step_counts():
            self.sessions.end_step(self.counter.ended)
        if (missed := self._plan.missed(self.counter.ended)) is not None:
            self.note(f"of the steps asked for, {missed} never came: the block ended after {self.counter.ended} steps")
        self.sessions.stop()
        self._close_window()

    def hold_open(self) -> None:
        """Go on recording after the block: it may be entered again."""
        self._plan = OpenPlan(self._mode)
        self.counter.count_root_calls = False

    def begin_entry(self, entry: int) -> None:
        """The block has been entered, for the first time if `entry` is 0."""
        if isinstance(self._plan, OpenPlan):
            self._plan.entered_again |= entry > 0
            self.counter.count_root_calls = False
        self.sessions.begin_scope("block", f"iteration#{entry}")

    def note(self, message: str, *, incomplete: bool = False) -> None:
        """Something the result has to say."""
        window = self.windows[-1] if self.over and self.windows else self.sessions.window
        window.warn(message, incomplete=incomplete)

    # -- what happens in the loop -----------------------------------------------------------------

    def user_step(self) -> None:
        """`prof.step()`."""
        if self._nothing_ends_here() or (self.moved and self._is_another_thread):
            self._owes_step = True
        else:
            self._safely("prof.step()", self._user_step)

    def _user_step(self) -> None:
        after_request = self.counter.source == "requests"
        ended = self.counter.user_step()
        if after_request and ended is Ended.NO:  # from now on steps follow one another
            self.sessions.begin_step(self.counter.ended)
        self._count(ended)

    def optimizer_steps(self, optimizer: Callable[[], Any]) -> None:
        """Some optimizer is about to make a step; on a thread of the engine, if it is in a hook of backward."""
        if self.sessions.running and self.is_same_process:
            self._held.before_step(optimizer)

    def optimizer_stepped(self, optimizer: Callable[[], Any]) -> None:
        """Some optimizer has made a step, or left it out; where nothing may end now, what it changed is seen later."""
        if self._is_home:
            self._record_here()  # and of the model nothing may be heard
        if self.sessions.running and self.is_same_process:
            self._held.after_step(optimizer)
        if not self._nothing_ends_here():
            self._safely("the optimizer's step", lambda: self._optimizer_stepped(optimizer))

    def _optimizer_stepped(self, optimizer: Callable[[], Any]) -> None:
        """It counts where it may train the model: the step of another model's optimizer is none."""
        asked = optimizer, len(self._marks.roots())
        if asked not in self._answers:
            parameters = self._marks.parameters()
            self._answers[asked] = not parameters or may_come(parameters, optimizer())
        if self._answers[asked]:
            self._count(self.counter.optimizer_step(optimizer))

    def root_enters(self, call: RootCall, *, updated: bool = False) -> None:
        """A model is about to be called; `updated`: its parameters have changed since the last call."""
        if self.moved and self._is_home:
            self._next = self._come_home
        self._record_here()
        self._calls_elsewhere |= self.sessions.running and self._is_another_thread
        if self.on_owner_thread:
            self._threads.remove()
        self._settle_step()
        if not self._nothing_ends_here():
            self._safely("a call of the model", lambda: self._root_enters(call, updated))
        if self.on_owner_thread:
            self._heard(call)

    def _heard(self, call: RootCall) -> None:
        self._trains |= call.grad_enabled
        if call.grad_enabled:
            self._trained.add(call.label)
        evaluates = call.label in self._trained and not (call.grad_enabled or call.training or call.in_request)
        if evaluates and not self._evaluations:
            self.sessions.begin_scope("part", EVALUATION)
        elif not evaluates and not call.in_request:
            self.sessions.end_scope("part")
        self._evaluations += evaluates
        self._request_calls = self._request_calls + 1 if call.in_request else 0
        if not call.in_request:
            self._phases.add(call.phase)
            if call.samples or call.phase == "decode":
                self._by_hand = call.label

    def request_begins(self, request: Request) -> None:
        """A `generate` or a pipeline is about to run."""
        self._record_here()
        self._settle_step()
        self._request_calls = 0
        if not self._nothing_ends_here():
            self._safely("a request", lambda: self._request_begins(request))

    def _request_begins(self, request: Request) -> None:
        if self.counter.source == "requests":
            self._step_began_s = time.perf_counter()
            self.sessions.begin_step(self.counter.ended)
        self.sessions.begin_scope("part", f"{REQUEST}{request.name}")

    def request_ends(self, request: Request) -> None:
        """It has returned, or raised."""
        if self.on_owner_thread:
            self.sessions.end_scope("part")
        if not self._nothing_ends_here():
            self._safely("a request", lambda: self._request_ends(request))

    def _request_ends(self, request: Request) -> None:
        if self.sessions.running:
            keep_largest(self.sessions.window.kv_cache, request.caches.describe(request.beams))
        self._count(self.counter.request_ends(may_train=request.may_train))

    # -- the thread that calls the model ------------------------------------------------------------

    def _may_call(self, thread: threading.Thread) -> bool:
        return may_call(thread, [root.module for root in self._marks.roots()])

    def _thread_starts(self, thread: threading.Thread) -> bool:
        """It is about to, and no model was called yet; whether its end is of interest."""
        try:
            if self.over or not self.is_same_process or not self._may_call(thread):
                return False
        except Exception as error:  # it looks at objects of anybody's
            self._on_failure("looking at what a thread will run", error)
            return False
        if not self._waits and not self._nothing_ends_here():
            self._safely("waiting for a thread", self._wait_for_call)
        return self._waits

    def _wait_for_call(self) -> None:
        self.sessions.discard()
        self._waits = True
        self._switch_to(self._mode)

    def _record_here(self) -> None:
        """A model is about to be called on this thread; where the recording waits for that, it begins."""
        waits = self._waits
        if not waits or not self.is_same_process or self._nothing_ends_here():
            return
        with self._lock:
            here = os.getpid(), threading.get_ident()
            if not self._waits or (self._stays and here != self._home):
                return
            self._waits, self._owner = False, here
            self.has_moved |= self.moved
            self._safely("a call of the model", lambda: self._switch_to(self._mode))

    def _come_home(self) -> None:
        """The recording waits for the next call on the block's thread, and leaves that no more."""
        self._next = None
        self.sessions.discard()
        self._owner, self._waits, self._stays = self._home, True, True
        self.counter.begin_anew()
        self._facts()
        self._trained.clear()
        self._left_out, self._counted, self._all_s = {}, 0, 0.0
        self._switch_to(self._plan.begin(self.counter.ended))

    def _end_with_its_thread(self) -> None:
        """The recording waits for the next call, on whichever thread: that is another window of the same plan."""
        self._waits = True
        self._settle_step()
        if not self.over and self.counter.last_step_counts():
            self._count(self.counter.end())
        if self.over:
            return
        self.sessions.stop()
        self._close_window()
        self._owner = self._home
        self._threads.install()
        self._on_window()

    def _settle_step(self) -> None:
        if self._owes_step and not self._nothing_ends_here():
            self._owes_step = False
            self.user_step()

    def _nothing_ends_here(self) -> bool:
        """Inside of backward the engine puts torch's state of a profiler back as it was when backward began.

        Inside of an op, torch would write the op's end into a trace that it has freed.
        """
        return in_backward() or capturing() or is_tracing() or (self.sessions.running and in_op())

    def _root_enters(self, call: RootCall, updated: bool) -> None:
        if not self._has_grown():
            ended = self.counter.root_enters(
                call.label, gradients=call.grad_enabled, updated=updated, in_request=call.in_request
            )
            self._count(ended)
            if self.sessions.running and self._request_calls and not (call.grad_enabled or self._trained):
                self._write_out()

    @property
    def _asked_for(self) -> bool:
        """The user said which steps."""
        plan = self._plan
        return isinstance(plan, SchedulePlan) or (isinstance(plan, AutoPlan) and plan.timed_steps is None)

    def _write_out(self) -> None:
        """Where torch holds the events of many calls, have them written, and record on.

        Between two calls of a request where nothing trains: no backward may belong to what was written. And not where
        nobody asked for these steps: fewer do, and each pause costs.
        """
        wanted = self._alone and self._asked_for and self._growth.recorded_calls >= CALLS_WRITTEN_OUT
        if not wanted or self._marks.any_open:
            return
        begin_s = time.perf_counter()
        trace = self.sessions.write_out()
        self._step_began_s += time.perf_counter() - begin_s
        if not self.sessions.running:
            self._end()
        elif trace is not None and not self._ends_because(too_large(trace)):
            self._growth.restart()

    def _count(self, ended: Ended) -> None:
        if ended is Ended.NO or (self._waits and not self.sessions.running and isinstance(self._plan, AutoPlan)):
            return
        step = self.counter.ended - 1
        facts, now_s = self._facts(), time.perf_counter()
        took_s, self._step_began_s = now_s - self._step_began_s, now_s
        self._counted += 1
        if ended is Ended.RESTART:
            first = _FIRST.get(self.counter.source, "step of an optimizer")
            self._left_out = {f"before the first {first}": (self._counted, self._all_s + took_s)}
            self.sessions.discard()
            self._switch_to(self._plan.begin(step + 1))
            return
        self._all_s += took_s
        unit = _UNITS.get(self.counter.source, "steps")
        if facts.evaluated or self._mode is not Mode.TIMED:
            why = "with an evaluation" if facts.evaluated else "of warm-up" if self._mode is Mode.FULL else "before"
            count, seconds = self._left_out.get(what := f"{unit} {why}", (0, 0.0))
            self._left_out[what] = count + 1, seconds + took_s
        if facts.evaluated:
            self.sessions.window.evaluated_steps.append(step)
        self._held.step_ended()
        self.sessions.end_step(step, counts=not facts.evaluated)
        if facts.compiled and self._mode is Mode.TIMED:
            self.sessions.window.warn(f"torch.compile was still compiling in the timed step {step}")
        if self.sessions.running and step < _SETTLING_STEPS:
            self._growth.restart()
        elif self._has_grown():
            return
        decision = self._plan.after(step, facts)
        if decision.mode is self._mode and not decision.ends_window:
            if self.counter.source != "requests":  # the next begins with the next request
                self.sessions.begin_step(self.counter.ended)
            return
        self.sessions.stop()
        if decision.ends_window:
            self._close_window()
        self._switch_to(decision.mode)
        if decision.ends_window:
            self._on_window()

    def _facts(self) -> StepFacts:
        """What happened in the step that has ended."""
        before, self._compilations = self._compilations, compilations()
        of_optimizer = self.counter.source in ("optimizer", "updates")
        facts = StepFacts(
            compiled=self._compilations != before,
            phases=frozenset(self._phases & {"prefill", "decode"}),
            trains=self._trains or of_optimizer,
            evaluated=of_optimizer and self._evaluations > 0,
        )
        self._phases.clear()
        self._trains, self._evaluations = False, 0
        return facts

    def _has_grown(self) -> bool:
        """The process has grown too much, so that recording has ended."""
        reason = self._growth.exceeded() if self.sessions.running else None
        if reason is not None and self._request_calls and not (self._trained or self._asked_for):
            reason += '. With steps="all" what torch holds is written out in between'
        return self._ends_because(reason)

    def _ends_because(self, reason: str | None) -> bool:
        if reason is not None:
            step = self.counter.ended
            self.sessions.window.warn(f"recording ended in step {step}, because {reason}", incomplete=True)
            self._end()
        return reason is not None

    def _switch_to(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.OVER and self.moved:
            self._come_home()
            return
        if mode is Mode.OVER:
            self.over_as_planned = True
            self._take_down()
            return
        recording = mode is not Mode.IDLE and not self._waits
        if recording and (not free_recorder() or (self.moved and profiler_is_on_somewhere())):
            self._make_room()
            return
        # Calls of the model are what counts steps until something better does.
        wants_marks = recording or self._waits or self.counter.source not in ("prof.step()", "optimizer")
        (self._marks.attach if wants_marks else self._marks.detach)()
        if recording:
            self.sessions.start(mode, None if self.counter.source == "requests" else self.counter.ended)
            self._growth.restart()

    def _end(self) -> None:
        """Nothing more is recorded while the loop runs on."""
        self.sessions.stop()
        self._close_window()
        self._take_down()
        self._on_window()

    def _close_window(self) -> None:
        window = self.sessions.take_window()
        window.frees_unseen = self.moved or self._calls_elsewhere
        if self._calls_elsewhere:
            self._calls_elsewhere = False
            window.warn("the model was called on other threads too: torch.profiler does not record what runs there")
        if self.moved and not window.empty:
            window.warn(
                "the model was called on another thread than the block's: the result is that thread's, from there on"
            )
        source, by_hand = self.counter.source, self._by_hand
        window.step_source = None if source == "nothing yet" else source
        left_out, self._left_out = self._left_out, {}
        window.left_out = [
            {"what": what, "count": count, "time_us": round(1e6 * seconds, 3)}
            for what, (count, seconds) in left_out.items()
            if window.timed is not None or not what.endswith("of warm-up")  # else they are what is reported
        ]
        if source == "root calls" and by_hand is not None:
            window.warn(
                f"each call of {by_hand} was taken for a step, though an image or a text takes several: "
                "call prof.step() after each image or text"
            )
        if isinstance(self._plan, AutoPlan) and self._plan.is_generation:
            window.why_full = "a prefill comes once"
        elif isinstance(self._plan, AutoPlan) and self._plan.timed_steps is None:
            window.why_full = "of inference all is recorded alike"
        elif isinstance(self._plan, OpenPlan):
            window.why_full = "the block is entered again and again"
        if not window.empty or window.warnings:
            self.windows.append(window)

    # -- other profilers --------------------------------------------------------------------------

    def before_another(self) -> None:
        """Somebody else's profiler is about to start: torch has room for one, so ours ends first."""
        if self._ask_its_thread(self._make_room):
            wait_until(lambda: not self.sessions.running)
        with self._lock:  # that thread may be in the midst of it
            self._safely("making room for another profiler", self._make_room)

    def _make_room(self) -> None:
        self.sessions.window.warn(
            f"another torch profiler took over in step {self.counter.ended}, and torch runs one at a time: "
            "ours ended there, and nothing after it is in this result",
            incomplete=True,
        )
        self.sessions.stop()
        self._close_window()
        if self._steps_hook is not None:
            self._steps_hook.remove()
        # The marks stay until the block ends: the other trace has use for them.
        self._mode = Mode.OVER
        self._set_over()

    # -- the end ----------------------------------------------------------------------------------

    def _take_down(self) -> None:
        """Everything of ours goes, whatever state it is in."""
        actions: list[Callable[[], object]] = [self._marks.detach]
        if self.is_same_process:
            actions.insert(0, self.sessions.discard)  # before the marks: it ends those that are open
        if self._steps_hook is not None:
            actions.insert(0, self._steps_hook.remove)  # same (0 -> 1): each action is for itself
        actions.append(self._threads.remove)
        for action in actions:
            try:
                action()
            except Exception as error:
                self._on_failure("taking the marks away", error)
        self._set_over()

    def _set_over(self) -> None:
        if not self.over:
            self.over = True
            self._on_over()

    def _safely(self, what: str, action: Callable[[], None]) -> None:
        if not self.on_owner_thread:
            return
        with self._lock:
            if self.over:
                return
            try:
                (self._next or action)()
            except Exception as error:
                self.sessions.window.warn(f"recording ended, because {what} failed: {error}", incomplete=True)
                self._close_window()
                self._take_down()
                self._on_failure(what, error)
