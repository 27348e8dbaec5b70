"""One session after the other, and the window that they fill."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from profiler_wrapper.capture.holdings import HeldMemory
from profiler_wrapper.capture.others import Watch
from profiler_wrapper.capture.session import Annotation, Session, SessionLost
from profiler_wrapper.capture.steps import Mode, describe_steps
from profiler_wrapper.capture.window import RecordedTrace, Window
from profiler_wrapper.recording.owned import Holding


class NamedBlock:
    """A block that the user named: an annotation in the trace while it runs.

    Where a session ends in the midst of it, its annotation ends too, and begins again in the next session.

    Args:
        on_begin: told the name when some of the block is recorded.
    """

    def __init__(self, name: str, on_begin: Callable[[str], None]) -> None:
        self._name, self._on_begin = name, on_begin
        self._annotation: Annotation | None = None

    def begin(self) -> None:
        """It runs, or goes on, while something records."""
        if self._annotation is None:
            self._annotation = Annotation(self._name)
            self._on_begin(self._name)

    def end(self) -> None:
        """It is left, or interrupted; a second call does nothing."""
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.end()


class Tape:
    """Records sessions into windows.

    Args:
        new_session: makes the session for a mode.
        part_path: where to export one for now.
        before_another: called just before somebody else's profiler takes the recorder from a session of ours.
        held: is told when a session begins and ends.
    """

    def __init__(
        self,
        *,
        new_session: Callable[[Mode], Session],
        part_path: Callable[[str], Path],
        before_another: Callable[[], None],
        held: HeldMemory,
    ) -> None:
        self.window = Window()
        self.mode = Mode.IDLE  # of the running session, or of the last one
        self._new_session, self._part_path, self._held = new_session, part_path, held
        self._watch = Watch(is_another=self._is_another, before_another=before_another)
        self._session: Session | None = None
        self._steps: list[int] = []
        self._block: Annotation | None = None
        self._named: list[NamedBlock] = []  # those that run, outermost first
        self._parts = 0
        self._frees_unsure = False

    @property
    def running(self) -> bool:
        """A session is being recorded."""
        return self._session is not None

    def start(self, mode: Mode, step: int) -> None:
        """Begin a session with this step. Raises what torch raises."""
        session = self._new_session(mode)
        if self.window.full is None:  # else this session follows that one without a gap
            self._frees_unsure = _sessions_ended > 0
        self._held.begin()
        if self.window.begin_ns is None:
            self.window.begin_ns = time.time_ns()
        session.start()
        self.mode, self._session, self._steps = mode, session, []
        self._watch.install()
        session.begin_step(step)
        for block in self._named:
            block.begin()

    def begin_step(self, step: int) -> None:
        """The next step of the running session."""
        if self._session is not None:
            self._session.begin_step(step)

    def end_step(self, step: int) -> None:
        """That step was recorded from begin to end."""
        if self._session is not None:
            self._session.end_step()
            self._steps.append(step)

    def begin_block(self, name: str) -> None:
        """Name what is recorded from now on, until `end_block` or the session's end."""
        self.end_block()
        if self._session is not None:
            self._block = Annotation(name)

    def end_block(self) -> None:
        """End it; a second call does nothing."""
        block, self._block = self._block, None
        if block is not None:
            block.end()

    def enter_named(self, block: NamedBlock) -> None:
        """It begins, recorded or not."""
        self._named.append(block)
        if self._session is not None:
            block.begin()

    def leave_named(self, block: NamedBlock) -> None:
        """It has ended."""
        block.end()
        if block in self._named:
            self._named.remove(block)

    def stop(self) -> None:
        """End the running session and keep its trace in the window."""
        session = self._let_go()
        if session is None:
            return
        try:
            held = self._held.end()
            self.window.end_ns = time.time_ns()
            session.stop()
            trace = self._export(session, held)
        except SessionLost as lost:
            what = f"steps {describe_steps(self._steps)}" if self._steps else "an unfinished step"
            self.window.warn(f"the recording of {what} is lost: {lost}", incomplete=True)
            return
        finally:
            _count_ended()
            session.close()
        if session.problem is not None:
            self.window.warn(session.problem, incomplete=True)
        if self._held.problem is not None:
            self.window.warn(self._held.problem)
        if self.mode is Mode.FULL:
            self.window.full = trace
        else:
            self.window.timed = trace

    def discard(self) -> None:
        """End the running session and forget the window."""
        session = self._let_go()
        self._held.forget()
        for trace in (self.window.full, self.window.timed):
            if trace is not None:
                trace.path.unlink(missing_ok=True)
        self.window = Window()
        if session is not None:
            try:
                session.stop()
            finally:
                _count_ended()
                session.close()

    def take_window(self) -> Window:
        """The window so far; the next begins."""
        window, self.window = self.window, Window()
        return window

    def _let_go(self) -> Session | None:
        self._watch.remove()
        session, self._session = self._session, None
        for block in reversed(self._named):
            block.end()
        self.end_block()
        return session

    def _export(self, session: Session, held: tuple[Holding, ...]) -> RecordedTrace:
        self._parts += 1
        path = self._part_path(f"{self._parts}_{self.mode.name.lower()}")
        try:
            session.export(path)
        except BaseException:
            for torn in (path, path.with_name(f"{path.name}.tmp")):  # torch writes to the second first
                with suppress(OSError):
                    torn.unlink(missing_ok=True)
            raise
        return RecordedTrace(path, tuple(self._steps), session.record_shapes, held, self._frees_unsure)

    def _is_another(self, profiler: object) -> bool:
        return self._session is not None and self._session.is_taken_by(profiler)


_sessions_ended = 0  # in this process


def _count_ended() -> None:
    global _sessions_ended
    _sessions_ended += 1
