"""From what was recorded to what is on disk: analyse a window, write its files, print its table.

While the loop goes on a child process does it, and whoever leaves the block, asks for the result or ends the process
waits for that. Who waits also applies the functions in `track`, which no other process can have, prints the tables, and
finishes what a child did not begin, or gets no time for.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from profiler_wrapper.capture.allocator_history import AllocatorHistory, SnapshotUnavailable
from profiler_wrapper.capture.records import OutOfMemory, RecordedTrace, RunInfo, Window
from profiler_wrapper.capture.session import safe_name
from profiler_wrapper.errors import say, warn
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.run.options import Options
from profiler_wrapper.run.out_of_memory import explain_oom
from profiler_wrapper.run.place import Describe, RunPlace, RunRecord, choose, notes_of
from profiler_wrapper.run.window import (
    Child,
    FinishedWindow,
    WindowTask,
    finish_window,
    finish_window_in_child,
    has_little_memory,
    keep_traces,
    lack_of_memory,
)
from profiler_wrapper.units import unicode_terminal

_COMMAND = "python -m profiler_wrapper snapshot"
_NO_OP = "no op of torch ran in the block, on the thread that entered it"
_unfinished: list[Finisher] = []  # with windows that the end of the process waits for


class Finisher:
    """Writes one process's part of a run, window by window: at once, or while the loop goes on, beside it."""

    def __init__(
        self,
        options: Options,
        info: RunInfo,
        describe: Describe,
        describe_compiled: Callable[[], dict[str, Any]] = dict,
        describe_settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.windows = 0  # that ended, results of which may still be on their way
        self._explained: OutOfMemory | None = None
        self.info = info
        self._options = options
        self._record = RunRecord(options, info, describe, describe_compiled, describe_settings)
        self._place = RunPlace(options, info, self._record)
        self._followed: dict[str, None] = {}  # names of blocks, in the order they came
        self._history: AllocatorHistory | None = None
        self._notes: list[str] = list(info.warnings)  # said once, in the first result
        self._results: list[ProfileResult] = []
        self._later: list[tuple[WindowTask, Child | None]] = []  # windows that are to be waited for
        self._waiting = threading.RLock()
        self._home = os.getpid()

    @property
    def directory(self) -> Path | None:
        """Where this rank's files are; None before there are any, or where none can be."""
        return self._place.run.directory if self._place.run is not None else None

    @property
    def results(self) -> tuple[ProfileResult, ...]:
        """Of the windows that are finished by now."""
        return tuple(self._results)

    def wait(self) -> None:
        """Until all windows are finished. A process that the user forked waits for none of its parent's."""
        if self._home != os.getpid():
            return
        with self._waiting:
            while self._later:
                task, child = self._later[0]
                finished = child.finished(child.patience_s()) if child is not None else None
                self._later.pop(0)  # only now: after Ctrl-C somebody else may wait for it
                try:
                    if finished is not None:
                        self._take(task, finished)
                    elif child is not None and child.was_killed:
                        keep_traces(task, f"what was recorded could not be analysed ({child.problem})")
                    else:
                        self._finish(task)
                finally:
                    self._place.drop_parts(task.parts)
            if self in _unfinished:
                _unfinished.remove(self)

    def follow(self, name: str) -> None:
        """A named block was run: its time becomes a series."""
        self._followed[safe_name(name)] = None

    def begin(self) -> None:
        """Recording begins. Where there are several ranks, the run's directory says so from now on."""
        if self.info.world_size > 1:
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
            warn(str(reason))
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
            warn(message)

    # -- a window ---------------------------------------------------------------------------------

    def write(self, window: Window, *, failure: OutOfMemory | None = None, loop_goes_on: bool = False) -> None:
        """Analyse a window, write its files, print its table; nothing of it, if nothing was recorded.

        Args:
            failure: an out-of-memory that ended the window, which is explained.
            loop_goes_on: nobody should wait, so it is left to a child process; see `wait`.
        """
        main, full = choose(window)
        parts = {trace.path for trace in (window.full, window.timed) if trace is not None}
        try:
            if main is None:
                self._warn_of_nothing("; ".join(window.warnings) or "the block ended before its first step")
                return
            task = self._task(window, main, full, failure)
            if loop_goes_on and self._options.background:
                if self._finish_later(task):
                    parts -= set(task.parts)
                self.windows += 1
            else:
                self.wait()
                self.windows += self._finish(task)
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
            info=self.info,
            directory=directory,
            target=target,
            run=self._record.of_window(window, main, full, notes),
            main=main,
            full=full.path if full is not None else None,
            followed=tuple(self._followed),
            failure=failure,
            why_nothing="; ".join(window.warnings) or _NO_OP,
            prints=self._options.enable_print_summary and self._options.is_first(self.info),  # one rank prints
            unicode=unicode_terminal(),
        )

    def _finish_later(self, task: WindowTask) -> bool:
        """Whether it is left to a child, or to who waits: the traces are still needed."""
        child = None
        if not any(callable(item) for item in task.options.track):
            lack = lack_of_memory(task)
            if lack:
                keep_traces(task, lack)
                return False
            try:
                child = Child(task, beside_training=True)
            except Exception as error:
                task.run["warnings"].append(
                    f"no process could be started to make the reports ({type(error).__name__}: {error}), so they were "
                    "made when the block was left"
                )
        self._place.hand_over(task.parts)
        if self._home != os.getpid():
            self._home, self._later = os.getpid(), []
        self._later.append((task, child))
        if self not in _unfinished:
            _unfinished.append(self)
        _wait_at_exit(os.getpid())
        return True

    def _finish(self, task: WindowTask) -> bool:
        """Whether there is a result."""
        finished = finish_window_in_child(task) if has_little_memory() else finish_window(task)
        self._take(task, finished)
        return finished.result is not None

    def _take(self, task: WindowTask, finished: FinishedWindow) -> None:
        if finished.nothing_recorded:
            self._warn_of_nothing(task.why_nothing)
        if finished.explained:
            self._explained = task.failure
        if finished.result is not None:
            self._results.append(finished.result)
        say(finished.text)

    def explain_oom(self, failure: OutOfMemory) -> None:
        """Explain an out-of-memory that ended no recording, or one that could not be analysed; once."""
        if self._explained is not failure:
            self._explained = failure
            explain_oom(failure, self._results[-1] if self._results else None, directory=self.directory)

    def _warn_of_nothing(self, why: str) -> None:
        warn(f"nothing {'more ' if self._results else ''}was recorded: {why}")

    def give_up(self) -> None:
        """Something of ours failed: keep what is whole, remove what is half written."""
        self._place.drop_parts()
        if not self.windows:
            self._place.mark_incomplete()

    def warn_of_what_goes_on(self) -> None:
        """Somebody waits no longer."""
        for task, child in self._later:
            where = task.target or task.directory
            if child is not None and where is not None:
                warn(
                    f"process {child.process} still finishes a window; when it has ended, run.json in "
                    f"{where.directory} says complete"
                )


@cache
def _wait_at_exit(process: int) -> None:
    """Once in each process. Those that multiprocessing starts end without what `atexit` knows."""
    if multiprocessing.parent_process() is None:
        atexit.register(_finish_all)
    else:
        multiprocessing.util.Finalize(None, _finish_all, exitpriority=0)


def _finish_all() -> None:
    for finisher in list(_unfinished):
        try:
            finisher.wait()
        except KeyboardInterrupt:
            finisher.warn_of_what_goes_on()
        except Exception as error:
            warn(f"a recorded window could not be finished: {type(error).__name__}: {error}")
