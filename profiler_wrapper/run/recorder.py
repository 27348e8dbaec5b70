"""Records a running loop: tells a `LoopState` what happens on which thread, and does what that answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from profiler_wrapper.capture.growth import CALLS_WRITTEN_OUT, GrowthBound, too_large
from profiler_wrapper.capture.kv_cache import keep_largest
from profiler_wrapper.capture.loop import Do, Effects, LoopState, Now, Thread
from profiler_wrapper.capture.owned_tensors import OwnedTensors, may_come
from profiler_wrapper.capture.records import OutOfMemory, Window
from profiler_wrapper.capture.requests import Request
from profiler_wrapper.capture.scopes import FirstCall, LayerScopes, RootCall, listen, stop_listening
from profiler_wrapper.capture.session import Session, SessionSequence, machine_activities
from profiler_wrapper.capture.steps import Mode, Plan, StepCounter
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
from profiler_wrapper.errors import Notices, in_a_line
from profiler_wrapper.run.finishing import Finisher
from profiler_wrapper.run.options import Options


def _here() -> Thread:
    return os.getpid(), threading.get_ident()


class Recorder:
    """Owns the state of one recording, from `start()` to `stop()`, and performs its effects.

    Methods called from inside the loop never raise: what fails ends the recording, and is a warning.

    Args:
        held: lists what is owned when a session begins and ends.
        finisher: gets the windows, and says where to export to.
        notices: says once that profiling has failed.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        counter: StepCounter,
        marks: LayerScopes,
        held: OwnedTensors,
        options: Options,
        finisher: Finisher,
        notices: Notices,
    ) -> None:
        self.state = LoopState(plan=plan, counter=counter, home=_here(), owner=_here())
        self.windows: list[Window] = []
        self.failed = False
        self._marks, self._held, self._options, self._finisher = marks, held, options, finisher
        self._notices = notices
        self._alone = finisher.info.world_size == 1  # no rank waits for this one while it writes in a step's midst
        self._growth = GrowthBound(calls=lambda: marks.calls)
        self.sessions = SessionSequence(
            new_session=self._new_session,
            part_path=finisher.place.part_path,
            before_another=self.before_another,
            held=held,
        )
        self.first_call = FirstCall()
        self._steps_hook: OptimizerSteps | None = None
        self._may_train: dict[tuple[Any, int], bool] = {}  # whether an optimizer may train one of so many roots
        self._threads = ThreadStarts(before=self._thread_starts, at_end=self._thread_ends)
        self._lock = threading.RLock()  # the block's thread may leave while the one recorded is at work here
        self._next: Callable[[], Effects] | None = None  # what the next call or step on its own thread is instead
        self._does: dict[Do, Callable[..., object]] = {
            Do.START: self._start_session,
            Do.STOP: self.sessions.stop,
            Do.DISCARD: self.sessions.discard,
            Do.BEGIN_STEP: self.sessions.begin_step,
            Do.END_STEP: self._end_step,
            Do.BEGIN_SCOPE: self.sessions.begin_scope,
            Do.END_SCOPE: self.sessions.end_scope,
            Do.RESTART_GROWTH: self._growth.restart,
            Do.NOTE: self.note,
            Do.CLOSE: self._close_window,
            Do.HAND_OVER: self._hand_over_in_the_loop,
            Do.MARK: lambda wanted: marks.attach() if wanted else marks.detach(),
            Do.WATCH_THREADS: self._threads.install,
            Do.TAKE_DOWN: self._take_down,
        }

    @property
    def over(self) -> bool:
        """Nothing more will be recorded, and nothing of ours is in the user's way."""
        return self.state.over

    @property
    def on_owner_thread(self) -> bool:
        """On the process and thread that is recorded; forked workers and other threads are not."""
        return self.state.owner == _here()

    @property
    def is_same_process(self) -> bool:
        """Not in a fork of the process that started it."""
        return self.state.home[0] == os.getpid()

    # -- from outside the loop --------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Raises what torch raises, with nothing left behind."""
        marks = self._marks
        marks.on_root_enter = self.root_enters
        marks.requests.on_begin, marks.requests.on_end = self.request_begins, self.request_ends
        try:
            listen(self.first_call)
            self._steps_hook = OptimizerSteps(
                before=self.optimizer_steps, after=self.optimizer_stepped, skipped=self.optimizer_stepped
            )
            others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
            self._perform(self.state.begin(self._now(), waits=any(map(self._may_call, others))))
            if not self.over:
                self._threads.install()
        except BaseException:
            self._take_down()
            raise

    def ends_later(self) -> str:
        """The block has ended where torch cannot stop its profiler, and why; the next call or step ends the session.

        "" where `stop()` can do it, or the thread recorded has ended.
        """
        moved = self.state.moved
        with self._lock:
            self.state.waits = False
        if self.sessions.running and self.on_owner_thread and self._nothing_ends_here():
            self._next = lambda: self.state.left("inside of backward or an op")
            return "the block was left inside of backward or an op, where torch cannot stop a profiler"
        if not self._ask_its_thread(lambda: self.state.left("on another thread")):
            return ""
        if moved:
            wait_until(lambda: self.over)
        with self._lock:  # it may be writing
            if self.over:
                return ""
        whose = "the block was left on another thread than it was entered on"
        whose = "the model is called on a thread that runs on" if moved else whose
        return f"{whose}, and torch stops a profiler on its own thread only"

    @property
    def is_ending(self) -> bool:
        """It ends with the next call or step."""
        return self._next is not None and not self.over

    def _ask_its_thread(self, event: Callable[[], Effects]) -> bool:
        elsewhere = self.is_same_process and not self.on_owner_thread
        if not (elsewhere and self.sessions.running and is_alive(self.state.owner[1])):
            return False
        self._next = event
        return True

    def stop(self) -> None:
        """The block has ended: end the session, close the window, take everything away."""
        try:
            if not self.is_same_process:
                self.note("it was ended in another process than it began in", incomplete=True)
            else:
                with self._lock:
                    self._settle_step()
                    self._perform(self.state.left())
        finally:
            self._take_down()

    def enter(self, entry: int) -> None:
        """The block has been entered, for the first time if `entry` is 0."""
        self._perform(self.state.entered(entry))

    def note(self, message: str, incomplete: bool = False) -> None:
        """Something the result has to say."""
        window = self.windows[-1] if self.over and self.windows else self.sessions.window
        window.warn(message, incomplete=incomplete)

    def hand_over(self, *, failure: OutOfMemory | None = None, loop_goes_on: bool = False) -> None:
        """Have the windows finished that have ended; `failure` ended the last of them."""
        while self.windows:
            window = self.windows.pop(0)
            self._finisher.reported = True
            for warning in self._marks.said():
                window.warn(warning)
            if not (window.empty and self.failed):
                last = not self.windows
                self._finisher.write(window, failure=failure if last else None, loop_goes_on=loop_goes_on)

    # -- what happens in the loop -----------------------------------------------------------------

    def user_step(self) -> None:
        """`prof.step()`."""
        if self._nothing_ends_here() or (self.state.moved and not self.on_owner_thread):
            self.state.owes_step = True
        else:
            self._happens("prof.step()", lambda: self.state.user_stepped(self._now()))

    def optimizer_steps(self, optimizer: Callable[[], Any]) -> None:
        """Some optimizer is about to make a step; on a thread of the engine, if it is in a hook of backward."""
        if self.sessions.running and self.is_same_process:
            self._held.before_step(optimizer)

    def optimizer_stepped(self, optimizer: Callable[[], Any]) -> None:
        """Some optimizer has made a step, or left it out; where nothing may end now, what it changed is seen later."""
        if self.state.home == _here():
            self._arrive()  # and of the model nothing may be heard
        if self.sessions.running and self.is_same_process:
            self._held.after_step(optimizer)
        if not self._nothing_ends_here():
            self._happens("the optimizer's step", lambda: self._optimizer_stepped(optimizer))

    def _optimizer_stepped(self, optimizer: Callable[[], Any]) -> Effects:
        # It counts where it may train the model: the step of another model's optimizer is none.
        asked = optimizer, len(self._marks.roots())
        if asked not in self._may_train:
            parameters = self._marks.parameters()
            self._may_train[asked] = not parameters or may_come(parameters, optimizer())
        return self.state.optimizer_stepped(optimizer, self._now()) if self._may_train[asked] else iter(())

    def root_enters(self, call: RootCall) -> None:
        """A model is about to be called."""
        state, updated = self.state, self.first_call.updated()
        if state.moved and state.home == _here():
            self._next = self._come_home
        self._arrive()
        if not self.on_owner_thread:
            state.calls_elsewhere |= self.sessions.running and self.is_same_process
            return
        self._threads.remove()
        self._settle_step()
        if not self._nothing_ends_here():
            self._happens("a call of the model", lambda: state.root_enters(call, self._now(), updated=updated))
            if state.may_write_out(call):
                self._happens("a call of the model", self._write_out)
        self._perform(state.heard(call))

    def _come_home(self) -> Effects:
        self._next = None
        return self.state.came_home(self._now())

    def request_begins(self, request: Request) -> None:
        """A `generate` or a pipeline is about to run."""
        self._arrive()
        self._settle_step()
        if not self._nothing_ends_here():
            self._happens("a request", lambda: self.state.request_begins(request.name, self._now()))

    def request_ends(self, request: Request) -> None:
        """It has returned, or raised."""
        if self.on_owner_thread:
            self.sessions.end_scope("part")
        if not self._nothing_ends_here():
            self._happens("a request", lambda: self._request_ends(request))

    def _request_ends(self, request: Request) -> Effects:
        if self.sessions.running:
            keep_largest(self.sessions.window.kv_cache, request.caches.describe(request.beams))
        return self.state.request_ends(self._now(), may_train=request.may_train)

    def _write_out(self) -> Effects:
        """Where torch holds the events of many calls, have them written, and record on."""
        if not self._alone or self._growth.recorded_calls < CALLS_WRITTEN_OUT or self._marks.any_open:
            return
        begin_s = time.perf_counter()
        trace = self.sessions.write_out()
        self.state.began_s += time.perf_counter() - begin_s
        if not self.sessions.running:
            yield from self.state.lost()
        elif trace is not None and (reason := too_large(trace)) is not None:
            yield from self.state.grew(reason)
        elif trace is not None:
            yield (Do.RESTART_GROWTH,)

    def _settle_step(self) -> None:
        if self.state.owes_step and not self._nothing_ends_here():
            self.state.owes_step = False
            self.user_step()

    def before_another(self) -> None:
        """Somebody else's profiler is about to start: torch has room for one, so ours ends first."""
        if self._ask_its_thread(self.state.other_profiler):
            wait_until(lambda: not self.sessions.running)
        with self._lock:  # that thread may be in the midst of it
            self._happens("making room for another profiler", self.state.other_profiler)

    def give_way(self) -> None:
        """A ProfilerWrapper of the script's own wants to record; it has marks of its own."""
        self.before_another()
        self._marks.detach()

    # -- the thread that calls the model ------------------------------------------------------------

    def _may_call(self, thread: threading.Thread) -> bool:
        return may_call(thread, [root.module for root in self._marks.roots()])

    def _thread_starts(self, thread: threading.Thread) -> bool:
        """It is about to, and no model was called yet; whether its end is of interest."""
        try:
            if self.over or not self.is_same_process or not self._may_call(thread):
                return False
        except Exception as error:  # it looks at objects of anybody's
            self._say_failure("looking at what a thread will run", error)
            return False
        if not self.state.waits and not self._nothing_ends_here():
            self._happens("waiting for a thread", self.state.thread_may_call)
        return self.state.waits

    def _thread_ends(self) -> None:
        self._happens("the end of the thread", lambda: self.state.thread_ended(self._now()))

    def _arrive(self) -> None:
        """A model is about to be called on this thread; where the recording waits for that, it begins."""
        if self.state.waits and self.is_same_process and not self._nothing_ends_here():
            self._happens("a call of the model", lambda: self.state.called_on(_here()), anywhere=True)

    def _nothing_ends_here(self) -> bool:
        """Inside of backward the engine puts torch's state of a profiler back as it was when backward began.

        Inside of an op, torch would write the op's end into a trace that it has freed.
        """
        return in_backward() or capturing() or is_tracing() or (self.sessions.running and in_op())

    # -- effects ----------------------------------------------------------------------------------

    def _happens(self, what: str, event: Callable[[], Effects], *, anywhere: bool = False) -> None:
        """Do what follows of an event on the thread that is recorded."""
        if not (anywhere or self.on_owner_thread):
            return
        with self._lock:
            if self.over:
                return
            try:
                self._perform((self._next or event)())
            except Exception as error:
                self._perform(self.state.failed(what, error))
                self._say_failure(what, error)

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            self._does[effect[0]](*effect[1:])

    def _now(self) -> Now:
        grew = self._growth.exceeded() if self.sessions.running else None
        return Now(time.perf_counter(), compilations(), grew)

    def _new_session(self, mode: Mode) -> Session:
        options = self._options
        if not self._alone:
            self._finisher.place.open()  # where others read from now on that this rank records
        return Session(
            activities=options.activities or machine_activities(),
            record_shapes=mode is Mode.FULL if options.record_shapes == "auto" else options.record_shapes,
            profile_memory=options.profile_memory,
            with_stack=options.with_stack,
            give_way=self.give_way if options.from_outside else None,
        )

    def _start_session(self, mode: Mode, step: int | None) -> None:
        if not free_recorder() or (self.state.moved and profiler_is_on_somewhere()):
            self._perform(self.state.other_profiler())
            return
        self._marks.attach()
        self.sessions.start(mode, step)
        self._growth.restart()

    def _end_step(self, step: int, counts: bool) -> None:
        if not counts:
            self.sessions.window.evaluated_steps.append(step)
        self._held.step_ended()
        self.sessions.end_step(step, counts=counts)

    def _close_window(self) -> None:
        window = self.sessions.take_window()
        self.state.complete(window)
        if not window.empty or window.warnings:
            self.windows.append(window)

    def _hand_over_in_the_loop(self) -> None:
        try:
            self.hand_over(loop_goes_on=True)
        except Exception as error:
            self.give_up()
            self._say_failure("writing the reports of the profile", error)

    def _hear_no_steps(self) -> None:
        stop_listening(self.first_call)
        if self._steps_hook is not None:
            self._steps_hook.remove()

    def _take_down(self, leaves_marks: bool = False) -> None:
        """Everything of ours goes, whatever state it is in."""
        self.state.over, self.state.running = True, False
        sessions = [self.sessions.discard] if self.is_same_process else []
        marks = [] if leaves_marks else [self._marks.detach]  # after sessions, which end those that are open
        self._take_away(self._hear_no_steps, *sessions, *marks, self._threads.remove, self._finisher.end_history)

    def give_up(self) -> None:
        """Something of ours failed: take everything away, and keep no window that was not finished."""
        self._take_away(self.stop)
        windows, self.windows = self.windows, []
        self._take_away(*(window.drop_traces for window in windows), self._finisher.give_up)

    def _take_away(self, *actions: Callable[[], object]) -> None:
        for action in actions:
            try:
                action()
            except Exception as error:
                self._say_failure("taking the profiler away", error)

    def _say_failure(self, what: str, error: Exception) -> None:
        self.failed = True
        self._notices.warn_once("failed", f"profiling ended, because {what} failed: {in_a_line(error)}")
