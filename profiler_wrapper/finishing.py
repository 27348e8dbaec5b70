"""From what was recorded to what is on disk: analyse a window, write its files, print its table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from profiler_wrapper.background import Background
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.capture.rank import RunInfo
from profiler_wrapper.capture.session import safe_name
from profiler_wrapper.capture.snapshot import AllocatorHistory, SnapshotUnavailable
from profiler_wrapper.capture.window import RecordedTrace, Window
from profiler_wrapper.notices import say, tell
from profiler_wrapper.options import Options
from profiler_wrapper.out_of_memory import answer
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.run_place import RunPlace
from profiler_wrapper.run_record import Describe, RunRecord, choose, notes_of
from profiler_wrapper.terminal import unicode_terminal
from profiler_wrapper.window_child import Child, finish_window_in_child
from profiler_wrapper.window_report import FinishedWindow, WindowTask, finish_window, has_little_memory, keep_traces

_COMMAND = "python -m profiler_wrapper snapshot"
_PATIENCE_S = 300.0  # with windows that are still being finished, when somebody asks for results
_NO_OP = "no op of torch ran in the block, on the thread that entered it"
_NO_FUNCTIONS = "with several ranks another process finishes a window. Give background=False for them"


class Finisher:
    """Writes one process's part of a run, window by window: at once, or where nobody may wait, beside the training."""

    def __init__(
        self,
        options: Options,
        info: RunInfo,
        describe: Describe,
        describe_compiled: Callable[[], dict[str, Any]] = dict,
        describe_settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.windows = 0  # that ended, results of which may still be on their way
        self._answered: OutOfMemory | None = None
        self._options, self._info = options, info
        self._record = RunRecord(options, info, describe, describe_compiled, describe_settings)
        self._place = RunPlace(options, info, self._record)
        self._followed: dict[str, None] = {}  # names of blocks, in the order they came
        self._history: AllocatorHistory | None = None
        self._notes: list[str] = list(info.warnings)  # said once, in the first result
        self._results: list[ProfileResult] = []
        self._background = Background(self._child_has_ended)
        self._children: list[Child] = []  # whose results nobody has asked for

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._info.rank

    @property
    def world_size(self) -> int:
        """The ranks of the job."""
        return self._info.world_size

    @property
    def directory(self) -> Path | None:
        """Where this rank's files are; None before there are any, or where none can be."""
        return self._place.run.directory if self._place.run is not None else None

    @property
    def results(self) -> tuple[ProfileResult, ...]:
        """Of the windows that are finished by now."""
        while self._children and self._children[0].ended:
            child = self._children.pop(0)
            self._keep(child.finished())
        return tuple(self._results)

    def wait(self) -> None:
        """For windows that are still being finished, but not for ever."""
        if not self._background.wait(_PATIENCE_S):
            numbers = ", ".join(str(child.process) for child in self._background.busy)
            tell(f"a result is not there yet: process {numbers} still works on it. Ask again later, or load the run")

    def follow(self, name: str) -> None:
        """A named block was run: its time becomes a series."""
        self._followed[safe_name(name)] = None

    def begin(self) -> None:
        """Recording begins. Where there are several ranks, the run's directory says so from now on."""
        if self._info.world_size > 1:
            self._place.open()

    def part_path(self, name: str) -> Path:
        """Where to export a session for now."""
        return self._place.part_path(name)

    # -- the allocator's history ------------------------------------------------------------------

    def begin_history(self) -> None:
        """Record the allocator's history, if that was asked for."""
        if not self._options.enabled_record_memory_pickle or self._history is not None:
            return
        history = AllocatorHistory(failure_path=partial(self._place.history_path, "oom"))
        try:
            history.start()
        except SnapshotUnavailable as reason:
            self._notes.append(str(reason))
            tell(str(reason))
        self._history = history

    def end_history(self) -> None:
        """Dump what was recorded of it, and end recording."""
        history, self._history = self._history, None
        if history is None or not history.running:
            return
        said = [f"an allocation failed; who held memory then: {_COMMAND} {path}" for path in history.failures]
        said += history.problems
        try:
            history.dump(self._place.history_path("mem"))
        except (SnapshotUnavailable, OSError) as reason:
            said.append(str(reason))
        finally:
            history.stop()
        for message in said:
            self._notes.append(message)
            tell(message)

    # -- a window ---------------------------------------------------------------------------------

    def write(self, window: Window, *, failure: OutOfMemory | None = None) -> None:
        """Analyse a window, write its files, print its table; nothing of it, if nothing was recorded.

        With several ranks a child process does all that, and this returns at once.

        `failure`: an out-of-memory that ended the window, which is answered.
        """
        main, full = choose(window)
        parts = {trace.path for trace in (window.full, window.timed) if trace is not None}
        try:
            if main is None:
                self._tell_nothing("; ".join(window.warnings) or "the block ended before its first step")
                return
            task = self._task(window, main, full, failure)
            if self._options.in_background(self._info):
                self._finish_in_background(task)
                parts -= set(task.parts)
            else:
                self._finish(task)
        finally:
            self._place.drop_parts(parts)

    def _task(
        self, window: Window, main: RecordedTrace, full: RecordedTrace | None, failure: OutOfMemory | None
    ) -> WindowTask:
        notes = [*self._notes, *self._place.notes, *notes_of(window, main)]
        self._notes, self._place.notes = [], []
        directory, target = self._place.of_window(main, self.windows)
        return WindowTask(
            options=self._options,
            info=self._info,
            directory=directory,
            target=target,
            run=self._record.of_window(window, main, full, notes),
            main=main,
            full=full.path if full is not None else None,
            followed=tuple(self._followed),
            failure=failure,
            why_nothing="; ".join(window.warnings) or _NO_OP,
            prints=self._options.enable_print_summary and self._options.is_first(self._info),  # one rank prints
            unicode=unicode_terminal(),
        )

    def _finish(self, task: WindowTask) -> None:
        finished = finish_window_in_child(task) if has_little_memory() else finish_window(task)
        if finished.nothing_recorded:
            self._tell_nothing(task.why_nothing)
        if finished.answered:
            self._answered = task.failure
        self.windows += finished.result is not None
        self._keep(finished)
        say(finished.text)

    def _finish_in_background(self, task: WindowTask) -> None:
        try:
            child = Child(task, without_functions=_NO_FUNCTIONS, background=True)
        except Exception as error:
            keep_traces(task, f"what was recorded could not be handed over ({type(error).__name__}: {error})")
            return
        self._place.hand_over(task.parts)
        if task.failure is not None:
            self._answered = task.failure  # by the child
        self.windows += 1
        self._children.append(child)
        self._background.run(child)

    def _child_has_ended(self, child: Child) -> None:
        """On a thread of its own: say what it said, and clean up after it."""
        try:
            child.tell()
            if child.said is None:
                keep_traces(child.task, f"what was recorded could not be analysed ({child.problem})")
            elif child.said.nothing_recorded:
                self._tell_nothing(child.task.why_nothing)
            else:
                say(child.said.text)
            failure = child.task.failure
            if failure is not None and (child.said is None or not child.said.answered):
                self._answered = None
                self.answer(failure)
        finally:
            self._place.drop_parts(child.task.parts)
            child.ended = True

    def _keep(self, finished: FinishedWindow | None) -> None:
        if finished is not None and finished.result is not None:
            self._results.append(finished.result)

    def answer(self, failure: OutOfMemory) -> None:
        """Answer an out-of-memory that ended no recording, or one that could not be analysed; once."""
        if self._answered is failure:
            return
        self._answered = failure
        try:
            answer(failure, self._results[-1] if self._results else None, directory=self.directory)
        except Exception as error:
            tell(f"the out-of-memory could not be explained: {type(error).__name__}: {error}")

    def _tell_nothing(self, why: str) -> None:
        tell(f"nothing {'more ' if self._results else ''}was recorded: {why}")

    def give_up(self) -> None:
        """Something of ours failed: keep what is whole, remove what is half written."""
        self._place.drop_parts()
        if not self.windows:
            self._place.mark_incomplete()
