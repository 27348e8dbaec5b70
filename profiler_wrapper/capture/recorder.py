"""Records a running loop: follows its steps, switches sessions as the plan says, keeps what they recorded."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from profiler_wrapper.capture.growth import GrowthBound
from profiler_wrapper.capture.others import Watch, profiler_is_on, profiler_is_waiting
from profiler_wrapper.capture.session import Annotation, Session, SessionLost
from profiler_wrapper.capture.steps import Decision, Ended, Mode, OpenPlan, Plan, StepCounter, StepFacts, describe_steps


class LayerMarks(Protocol):
    """What marks the layers: `LayerScopes`."""

    def attach(self) -> object: ...

    def detach(self) -> object: ...


class RootCall(Protocol):
    """An outermost call of a model."""

    @property
    def label(self) -> str: ...

    @property
    def phase(self) -> str: ...

    @property
    def grad_enabled(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """One exported session."""

    path: Path
    steps: tuple[int, ...]  # those that were recorded from begin to end
    shapes: bool


@dataclass(slots=True)
class Window:
    """What became of one stretch of recording: at most one trace in full and one timed."""

    full: RecordedTrace | None = None
    timed: RecordedTrace | None = None
    complete: bool = True
    warnings: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing of it was recorded."""
        return self.full is None and self.timed is None

    def warn(self, message: str, *, incomplete: bool = False) -> None:
        """Keep a message for the result."""
        if message not in self.warnings:
            self.warnings.append(message)
        self.complete = self.complete and not incomplete


class Recorder:
    """From `start()` to `stop()`, one loop on one thread.

    Methods called by hooks never raise: what fails ends the recording, and `on_failure` is told why.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        new_session: Callable[[Mode], Session],
        part_path: Callable[[str], Path],
        on_failure: Callable[[str, Exception], None],
        on_over: Callable[[], None] = lambda: None,
        growth: GrowthBound | None = None,
    ) -> None:
        self.windows: list[Window] = []
        self.counter = StepCounter()
        self.marks: LayerMarks | None = None
        self._plan, self._new_session, self._part_path, self._on_failure = plan, new_session, part_path, on_failure
        self._on_over = on_over
        self._growth = growth or GrowthBound()
        self._window = Window()
        self._mode = Mode.IDLE
        self._session: Session | None = None
        self._watch = Watch(is_another=self._is_another_profiler, before_another=self._before_another)
        self._steps_hook: Any = None
        self._recorded_steps: list[int] = []
        self._phases: set[str] = set()
        self._compilations = 0
        self._attached = False
        self._iteration: Annotation | None = None
        self._parts = 0
        self._over = False
        self._home = (os.getpid(), threading.get_ident())

    # -- the life of it ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """No further step will be recorded, and nothing of ours is in the user's way."""
        return self._over

    @property
    def at_home(self) -> bool:
        """On the process and thread that started it; forked workers and other threads are not."""
        return self._home == (os.getpid(), threading.get_ident())

    def start(self) -> None:
        """Attach everything and begin. Raises what torch raises, with nothing left behind."""
        self._home = (os.getpid(), threading.get_ident())
        try:
            self._steps_hook = _count_optimizer_steps(self)
            self._compilations = compilations()
            self._switch_to(self._plan.first())
        except BaseException:
            self._take_down()
            raise

    def stop(self) -> None:
        """The block has ended: end the session, close the window, take everything away."""
        try:
            if self.at_home:
                self._finish_last_step()
                self._close_session()
                self._close_window()
            elif self._session is not None:
                self._window.warn("it was ended on another thread or process than it began on", incomplete=True)
        finally:
            self._take_down()

    def hold_open(self) -> None:
        """Go on recording after the block: it may be entered again."""
        self._plan = OpenPlan(self._mode)
        self.counter.count_root_calls = False

    def enter_again(self, iteration: int) -> None:
        """The block has been entered once more."""
        if isinstance(self._plan, OpenPlan):
            self._plan.entered_again |= iteration > 0
        self.leave_again()
        if self._session is not None:
            self._iteration = Annotation(f"iteration#{iteration}")

    def leave_again(self) -> None:
        """The block has been left; recording goes on."""
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.end()

    def note(self, message: str, *, incomplete: bool = False) -> None:
        """Something the result has to say."""
        window = self.windows[-1] if self._over and self.windows else self._window
        window.warn(message, incomplete=incomplete)

    # -- what happens in the loop -----------------------------------------------------------------

    def user_step(self) -> None:
        """`prof.step()`."""
        self._safely("prof.step()", lambda: self._count(self.counter.user_step()))

    def optimizer_stepped(self, optimizer: object) -> None:
        """Some optimizer has made a step."""
        self._safely("the optimizer's step", lambda: self._count(self.counter.optimizer_step(optimizer)))

    def root_enters(self, call: RootCall) -> None:
        """A model is about to be called."""
        self._safely("a call of the model", lambda: self._root_enters(call))

    def _root_enters(self, call: RootCall) -> None:
        reason = self._growth.exceeded() if self._session is not None else None
        if reason is not None:
            self._end_early(reason)
            return
        self._count(self.counter.root_enters(call.label, gradients=call.grad_enabled))
        self._phases.add(call.phase)

    def _count(self, ended: Ended) -> None:
        if ended is Ended.NO:
            return
        step = self.counter.ended - 1
        restart = self._plan.restart(step) if ended is Ended.RESTART else None
        if restart is not None:
            self._discard_session()
            self._window = Window()
            self._step_facts()
            self._switch_to(restart)
            return
        if self._session is not None:
            self._recorded_steps.append(step)
        facts = self._step_facts()
        if facts.compiled and self._mode is Mode.TIMED:
            self._window.warn(f"torch.compile was still compiling in the timed step {step}")
        reason = self._bound_reached(step)
        if reason is not None:
            self._end_early(reason)
            return
        self._follow(self._plan.after(step, facts))

    def _step_facts(self) -> StepFacts:
        before, self._compilations = self._compilations, compilations()
        facts = StepFacts(compiled=self._compilations != before, phases=frozenset(self._phases))
        self._phases.clear()
        return facts

    def _bound_reached(self, step: int) -> str | None:
        if self._session is None:
            return None
        if step < 2:  # gradients and the optimizer's state come in the first steps, and stay
            self._growth.restart()
            return None
        return self._growth.exceeded()

    def _follow(self, decision: Decision) -> None:
        if decision.mode is self._mode and not decision.ends_window:
            self._begin_step()
            return
        self._close_session()
        if decision.ends_window:
            self._close_window()
        self._switch_to(decision.mode)

    # -- sessions ---------------------------------------------------------------------------------

    def _switch_to(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.OVER:
            self._take_down()
            return
        recording = mode is not Mode.IDLE
        if recording and (profiler_is_on() or profiler_is_waiting()):
            self._make_room()
            return
        self._mark_layers(recording or self.counter.source in ("nothing yet", "root calls"))
        if recording:
            session = self._new_session(mode)
            session.start()
            self._session = session
            self._recorded_steps = []
            self._watch.install()
            self._growth.restart()
            self._begin_step()

    def _begin_step(self) -> None:
        if self._session is not None:
            self._session.begin_step(self.counter.ended)

    def _close_session(self) -> None:
        """End the running session and keep its trace in the window."""
        self.leave_again()
        session, self._session = self._session, None
        if session is None:
            return
        self._watch.remove()
        try:
            session.stop()
            trace = self._export(session)
        except SessionLost as lost:
            steps = describe_steps(self._recorded_steps or [self.counter.ended])
            self._window.warn(f"the recording of step {steps} is lost: {lost}", incomplete=True)
            return
        finally:
            session.close()
        if session.problem is not None:
            self._window.warn(session.problem, incomplete=True)
        if self._mode is Mode.FULL:
            self._window.full = trace
        else:
            self._window.timed = trace

    def _export(self, session: Session) -> RecordedTrace:
        self._parts += 1
        path = self._part_path(f"{self._parts}_{self._mode.name.lower()}")
        try:
            session.export(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return RecordedTrace(path, tuple(self._recorded_steps), session.record_shapes)

    def _discard_session(self) -> None:
        session, self._session = self._session, None
        self._watch.remove()
        for trace in (self._window.full, self._window.timed):
            if trace is not None:
                trace.path.unlink(missing_ok=True)
        if session is not None:
            session.stop()
            session.close()

    def _close_window(self) -> None:
        window, self._window = self._window, Window()
        if not window.empty or window.warnings:
            self.windows.append(window)

    def _finish_last_step(self) -> None:
        """The step that was running when the block ended."""
        if self._session is not None and self.counter.last_step_counts():
            self._recorded_steps.append(self.counter.ended)
            self._phases.clear()

    def _end_early(self, reason: str) -> None:
        self._window.warn(f"recording ended in step {self.counter.ended}, because {reason}", incomplete=True)
        self._close_session()
        self._close_window()
        self._switch_to(Mode.OVER)

    # -- other profilers --------------------------------------------------------------------------

    def _is_another_profiler(self, profiler: object) -> bool:
        return self.at_home and self._session is not None and self._session.is_taken_by(profiler)

    def _before_another(self) -> None:
        """Somebody else's profiler is about to start: torch has room for one, so ours ends first."""
        self._safely("making room for another profiler", self._make_room)

    def _make_room(self) -> None:
        self._window.warn(
            f"another torch profiler took over in step {self.counter.ended}, and torch runs one at a time: "
            "ours ended there, and nothing after it is in this result",
            incomplete=True,
        )
        self._close_session()
        self._close_window()
        self._remove_hooks()
        # The marks stay until the block ends: the other trace has use for them.
        self._mode = Mode.OVER
        self._set_over()

    # -- hooks ------------------------------------------------------------------------------------

    def _mark_layers(self, wanted: bool) -> None:
        if self.marks is None or wanted == self._attached:
            return
        self._attached = wanted
        if wanted:
            self.marks.attach()
        else:
            self.marks.detach()

    def _remove_hooks(self) -> None:
        hook, self._steps_hook = self._steps_hook, None
        if hook is not None:
            hook.remove()
        self._watch.remove()

    def _take_down(self) -> None:
        """Everything of ours goes, whatever state it is in."""
        session, self._session = self._session, None
        problems: list[BaseException] = []
        actions: list[Callable[[], object]] = [self._remove_hooks, self.leave_again, lambda: self._mark_layers(False)]
        if session is not None and self.at_home:
            actions[:0] = [session.stop, session.close]
        for action in actions:
            try:
                action()
            except Exception as error:
                problems.append(error)
        for problem in problems:
            self._window.warn(f"while taking the hooks away: {problem}", incomplete=True)
        self._set_over()

    def _set_over(self) -> None:
        if not self._over:
            self._over = True
            self._on_over()

    def _safely(self, what: str, action: Callable[[], None]) -> None:
        if self._over or not self.at_home:
            return
        try:
            action()
        except Exception as error:
            self._window.warn(f"recording ended, because {what} failed: {error}", incomplete=True)
            self._close_window()
            self._take_down()
            self._on_failure(what, error)


def _count_optimizer_steps(recorder: Recorder) -> Any:
    """Tell `recorder` of each optimizer's steps; the handle's `remove()` ends that."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # The optimizer is known by an object of ours: its id could be given to another one.
    known: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()

    def after_step(optimizer: Any, args: Sequence[Any], kwargs: Any) -> None:
        recorder.optimizer_stepped(known.setdefault(optimizer, object()))

    return register_optimizer_step_post_hook(after_step)


def compilations() -> int:
    """How much torch.compile has compiled so far; 0 where nobody has used it."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if not counters:
        return 0
    return int(counters["stats"]["unique_graphs"]) + int(counters["frames"]["total"])
