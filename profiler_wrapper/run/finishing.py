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
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from profiler_wrapper.capture.compiled import graph_breaks
from profiler_wrapper.capture.records import OutOfMemory, RecordedTrace, RunInfo, Window
from profiler_wrapper.capture.session import safe_name
from profiler_wrapper.errors import attempt, in_a_line, occupy_closed_streams, say, warn
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.run.allocator_history import AllocatorHistory, SnapshotUnavailable, snapshot_name
from profiler_wrapper.run.files import WindowTask
from profiler_wrapper.run.options import Options
from profiler_wrapper.run.out_of_memory import explain_oom
from profiler_wrapper.run.window import (
    Child,
    FinishedWindow,
    drop_parts,
    finish,
    keep_traces,
    lack_of_memory,
)
from profiler_wrapper.terminal import WIDTH_OF_FILES, Stream, styled_terminal, terminal_width, unicode_terminal
from profiler_wrapper.trace import run_directory
from profiler_wrapper.trace.atomic import remove_empty
from profiler_wrapper.trace.run_directory import RunDirectory, open_run

_COMMAND = "profiler-wrapper snapshot"
_NO_OP = "no op of torch ran in the block, on the thread that entered it"
_OVERLOAD = 0.2  # of the timed steps, in which a thread waits for a core: their times are then those of the machine
_MOST_CHILDREN = 8  # at once, of which one has its turn; further windows are left to who waits
_MOST_TRIES = 100  # to make a file in a directory that somebody else removes


def ranks_of_run(options: Options, info: RunInfo, begin_ns: int | None, end_ns: int | None) -> dict[str, Any]:
    """What a reader of all ranks goes by, as run.json has it."""
    ranks = options.ranks
    return {
        **info.to_dict(),
        "recorded_ranks": None if ranks is None else sorted(rank for rank in ranks if rank < info.world_size),
        "window_begin_ns": begin_ns,
        "window_end_ns": end_ns,
    }


def choose(window: Window) -> tuple[RecordedTrace | None, RecordedTrace | None]:
    """The trace whose times are reported, and beside it the one in full, if that says more."""
    timed, full = window.timed, window.full
    if timed is None or (not timed.steps and full is not None and full.steps):
        return full, None
    return timed, full if full is not None and full.shapes and not timed.shapes else None


class RunPlace:
    """Where one process's part of a run goes: its directory, a node's own disk before it, and traces on their way.

    Opened when something is to be written; where nothing can be, `notes` say so.
    """

    def __init__(self, options: Options, info: RunInfo) -> None:
        self.notes = list(info.warnings)  # said once, in the first result
        self.run: RunDirectory | None = None  # None: not opened yet, or no files can be written
        self._options, self._info = options, info
        self._local: RunDirectory | None = None
        self._fallback: tempfile.TemporaryDirectory[str] | None = None
        self._windows: set[str] = set()
        self._begun: dict[str, Any] = {}  # what run.json says until the first window is finished

    def open(self) -> Path:
        """Make the run's directory, unless that was done; where traces are exported to."""
        if self.run is None and self._fallback is None:
            try:
                occupy_closed_streams()
                self._open()
            except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
                self._fallback = tempfile.TemporaryDirectory(prefix="profiler_wrapper_")
                self.note(f"no files were written, because {self._options.output_dir} cannot be used: {error}")
        here = self._local or self.run
        return here.directory if here is not None else Path(self._fallback.name)  # type: ignore[union-attr]

    def _open(self) -> None:
        options, info = self._options, self._info
        run = open_run(
            options.output_dir,
            prefix=options.prefix,
            rank=info.rank,
            rank_name=info.directory_name,
            world_size=info.world_size,
            run_name=options.run_name,
        )
        wanted = run_directory.safe_name(options.run_name or "", "")
        for name in (run.root.name, run.root.parent.name):  # the run's, or that of an attempt in it
            if wanted and not info.rank and re.fullmatch(rf"{re.escape(wanted)}-\d+", name):
                say(f"profiler_wrapper: the run {wanted} is there already, so this one is {name}\n", on="stderr")
        self._local = self._local_of(run)
        local_dir = None if self._local is None else str(self._local.root)
        begun = {"local_dir": local_dir, "prefix": options.prefix}
        self._begun = {**ranks_of_run(options, info, time.time_ns(), None), **begun}
        run.write_run(self._begun, complete=False)
        self.run = run

    def _local_of(self, run: RunDirectory) -> RunDirectory | None:
        """The same on the node's own disk, if there is one to use: a directory that nobody else has."""
        if self._options.local_dir is None:
            return None
        try:
            self._options.local_dir.mkdir(parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix=f"{run.root.name}-rank{run.rank}-", dir=self._options.local_dir)
            local = replace(run, root=Path(own))
            local.directory.mkdir()
        except (OSError, ValueError) as error:
            self.note(f"files are written to {run.root} at once, because local_dir cannot be used: {error}")
            return None
        return local

    def note(self, message: str) -> None:
        """Warn of it now, and in the next result."""
        self.notes.append(message)
        warn(message)

    # -- traces on their way ----------------------------------------------------------------------

    def part_path(self, name: str) -> Path:
        """Where to export a session for now: beside its later place, or where that cannot be, a temporary one."""
        path = self.open() / f".{self._options.prefix}_part{name}_{secrets.token_hex(8)}_trace.json"
        if self._local is not None:  # whoever has taken the files of an earlier window away removes what is empty
            for _ in range(_MOST_TRIES):
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    path.touch()
                    break
        return path

    def remove_empty(self) -> None:
        """Take away what is empty on the node's own disk."""
        if self._local is not None:
            remove_empty(self._local.root)

    # -- windows ----------------------------------------------------------------------------------

    def of_window(self, main: RecordedTrace, number: int) -> tuple[RunDirectory | None, RunDirectory | None]:
        """Where the files of a window are written, and where they are taken then, if that is another place.

        Of the first window (`number` 0) the rank's own directory, of each later one a directory in it.
        """
        if self.run is None:
            return None, None
        directory = self.run
        if number:
            first, last = (main.steps[0], main.steps[-1]) if main.steps else (number, number)
            directory = replace(self.run, window=f"steps_{first}-{last}")
            if directory.window in self._windows or directory.directory.exists():
                directory = replace(directory, window=f"{directory.window}_{number}")
            self._windows.add(directory.window)
        if self._local is None:
            return directory, None
        return replace(self._local, window=directory.window), directory

    def history_path(self, what: Literal["mem", "oom"]) -> Path:
        """Where the allocator's history goes: not over the node's own disk, since it is written at any time."""
        options = self._options
        if options.mem_dir is None:
            parts = self.open()
            directory = parts if self.run is None else self.run.directory
            return directory / "memory" / snapshot_name(options.prefix, what=what)
        prefix = f"{options.prefix}_rank_{self._info.rank}" if self._info.world_size > 1 else options.prefix
        return options.mem_dir / snapshot_name(prefix, what=what)

    def mark_incomplete(self) -> None:
        """What is there is not all that should be."""
        if self.run is not None:
            with suppress(OSError):
                self.run.write_run(self._begun, complete=False)


class Finisher:
    """Writes one process's part of a run, window by window: at once, or while the loop goes on, beside it."""

    def __init__(
        self,
        options: Options,
        info: RunInfo,
        describe: Callable[[], Sequence[dict[str, Any]]],
        describe_compiled: Callable[[], dict[str, Any]] = dict,
        describe_settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.windows = 0  # that ended, results of which may still be on their way
        self.reported = False  # a window was, be it empty
        self._explained: OutOfMemory | None = None
        self.info = info
        self._options = options
        self._describe, self._describe_compiled = describe, describe_compiled
        self._describe_settings = describe_settings
        self.place = RunPlace(options, info)
        self._followed: dict[str, None] = {}  # names of blocks, in the order they came
        self._history: AllocatorHistory | None = None
        self.results: tuple[ProfileResult, ...] = ()  # of the windows that are finished by now
        self._later: list[tuple[WindowTask, Child | None]] = []  # windows that are to be waited for
        self._waiting = threading.RLock()
        self._home = os.getpid()
        self._forget_exit: Callable[[], object] | None = None  # while the end of the process waits for them

    @property
    def directory(self) -> Path | None:
        """Where this rank's files are; None before there are any, or where none can be."""
        return self.place.run.directory if self.place.run is not None else None

    def wait(self) -> None:
        """Until all windows are finished. A process that the user forked waits for none of its parent's."""
        if self._home != os.getpid():
            return
        with self._waiting:
            while self._later:
                task, child = self._later[0]
                if child is None or not child.has_ended():
                    self._say_wait(task)
                finished = child.finished(child.patience_s()) if child is not None else None
                self._later.pop(0)  # only now: after Ctrl-C somebody else may wait for it
                try:
                    self._take(task, finished or finish(task, child))
                finally:
                    drop_parts(task)
            if self._forget_exit is not None:
                self._forget_exit()
                self._forget_exit = None

    def _wait_at_exit(self) -> None:
        try:
            self.wait()
        except KeyboardInterrupt:
            for task, child in self._later:
                where = task.target or task.directory
                if child is not None and where is not None:
                    goes_on = f"process {child.process} still finishes a window; when it has ended, run.json in"
                    warn(f"{goes_on} {where.directory} says complete")
        except Exception as error:
            warn(f"a recorded window could not be finished: {in_a_line(error)}")

    def _remember_exit(self) -> None:
        """Have the end of the process wait. Those that multiprocessing starts end without what `atexit` knows."""
        if self._forget_exit is not None:
            return
        if multiprocessing.parent_process() is None:
            atexit.register(self._wait_at_exit)
            self._forget_exit = partial(atexit.unregister, self._wait_at_exit)
        else:
            self._forget_exit = multiprocessing.util.Finalize(None, self._wait_at_exit, exitpriority=0).cancel

    def follow(self, name: str) -> None:
        """A named block was run: its time becomes a series."""
        self._followed[safe_name(name)] = None

    # -- the allocator's history ------------------------------------------------------------------

    def begin_history(self) -> None:
        """Record the allocator's history, if that was asked for."""
        if not self._options.enabled_record_memory_pickle or self._history is not None:
            return
        history = AllocatorHistory(failure_path=partial(self.place.history_path, "oom"))
        try:
            history.start()
        except SnapshotUnavailable as reason:
            self.place.note(str(reason))
        self._history = history

    def end_history(self) -> None:
        """Dump what was recorded of it, and end recording."""
        history, self._history = self._history, None
        if history is None or not history.running:
            return
        for path in history.failures:
            self.place.note(f"an allocation failed; who held memory then: {_COMMAND} {path}")
        for problem in history.problems:
            self.place.note(problem)
        try:
            history.dump(self.place.history_path("mem"))
        except (SnapshotUnavailable, OSError) as reason:
            self.place.note(str(reason))
        finally:
            history.stop()

    # -- a window ---------------------------------------------------------------------------------

    def write(self, window: Window, *, failure: OutOfMemory | None = None, loop_goes_on: bool = False) -> None:
        """Analyse a window, write its files, print its table; nothing of it, if nothing was recorded.

        Args:
            failure: an out-of-memory that ended the window, which is explained.
            loop_goes_on: nobody should wait, so it is left to a child process; see `wait`.
        """
        if self._home != os.getpid():
            self._home, self._later, self._forget_exit = os.getpid(), [], None
        main, full = choose(window)
        kept: tuple[Path, ...] = ()
        try:
            if main is None:
                self._warn_of_nothing("; ".join(window.warnings) or "the block ended before its first step")
                return
            task = self._task(window, main, full, failure)
            beside = loop_goes_on and self._options.background
            at_work = sum(child is not None and not child.has_ended() for _, child in self._later)
            by_child = beside and at_work < _MOST_CHILDREN and not any(map(callable, self._options.track))
            if by_child and (lack := lack_of_memory(task)):
                keep_traces(task, lack)
                self.windows += 1
                return
            if not beside:
                self.wait()
            before = len(self.results)
            self._later.append((task, self._start_child(task) if by_child else None))
            kept = task.parts
            (self._remember_exit if beside else self.wait)()
            self.windows += beside or len(self.results) > before
        finally:
            window.drop_traces(but=kept)
            self.place.remove_empty()

    def _task(
        self, window: Window, main: RecordedTrace, full: RecordedTrace | None, failure: OutOfMemory | None
    ) -> WindowTask:
        notes, self.place.notes = [*self.place.notes, *window.warnings], []
        if main is window.full:
            cost = " with shapes (about +10 % where launch-bound)" if main.shapes else ""
            notes.append(f"times are of warm-up steps{cost}: {window.why_full}")
        if main.steps == () and not window.warnings:
            notes.append("no step was recorded from its begin to its end")
        directory, target = self.place.of_window(main, self.windows)
        on: Stream = "stderr" if self._options.from_outside else "stdout"
        styled = styled_terminal(on)
        return WindowTask(
            options=self._options,
            info=self.info,
            directory=directory,
            target=target,
            run=self._run(window, main, full, notes),
            main=main,
            full=full.path if full is not None else None,
            followed=tuple(self._followed),
            failure=failure,
            why_nothing="; ".join(window.warnings) or _NO_OP,
            prints=self._options.enable_print_summary and self._options.is_first(self.info),  # one rank prints
            on=on,
            unicode=unicode_terminal(),
            styled=styled,
            width=terminal_width(on) if styled else WIDTH_OF_FILES,
        )

    def _run(self, window: Window, main: RecordedTrace, full: RecordedTrace | None, notes: list[str]) -> dict[str, Any]:
        """What run.json says of a window; `notes` get what could not be found out."""
        nothing: dict[str, Any] = {}
        steps = {}
        if overloaded := main.core_wait_share > _OVERLOAD:
            notes.append(
                f"a thread waited for a CPU core for {100 * main.core_wait_share:.0f} % of the timed steps: lower "
                "OMP_NUM_THREADS, or run less beside it; times hold these waits"
            )
        if main.steps is not None:
            with_shapes = full if full is not None else main if main.shapes else None
            full_steps = list(with_shapes.steps or ()) if with_shapes is not None else []
            steps = {"timed_steps": list(main.steps), "full_steps": full_steps}
        return {
            **ranks_of_run(self._options, self.info, window.begin_ns, window.end_ns),
            **attempt("how the run is set up is", self._describe_settings, nothing, notes),
            "prefix": self._options.prefix,
            **steps,
            "step_source": window.step_source,
            "left_out": window.left_out,
            "kv_cache": window.kv_cache,
            "evaluated_steps": window.evaluated_steps,
            "complete": window.complete,
            "warnings": notes,
            "layers": list(self._describe()),
            "compiled": attempt("the layers inside compiled code are", self._describe_compiled, nothing, notes),
            "held": msgspec.to_builtins(list(main.held)),
            "graph_breaks": attempt("graph breaks are", graph_breaks, None, notes),
            "cpu_frees_unsure": main.cpu_frees_unsure,
            "frees_unseen": window.frees_unseen,
            "overloaded": overloaded,
        }

    def _start_child(self, task: WindowTask) -> Child | None:
        """None: none can be started, so it is left to who waits."""
        try:
            return Child(task, beside_training=True)
        except Exception as error:
            task.run["warnings"].append(
                f"no process could be started to make the reports ({in_a_line(error)}), so they were "
                "made when the block was left"
            )
            return None

    def _say_wait(self, task: WindowTask) -> None:
        """Whoever waits for a table sees what for."""
        steps = len(task.main.steps or ())
        of = f" of {steps} step{'s' if steps > 1 else ''}" if steps else ""
        dots = "…" if task.unicode else "..."
        if task.prints:
            say(f"profiler_wrapper: making the result{of} {dots} Ctrl-C keeps the trace\n", on="stderr")

    def _take(self, task: WindowTask, finished: FinishedWindow) -> None:
        if finished.nothing_recorded:
            self._warn_of_nothing(task.why_nothing)
        if finished.explained:
            self._explained = task.failure
        if finished.result is not None:
            self.results = (*self.results, finished.result)
        say(finished.text, on=task.on)

    def explain_oom(self, failure: OutOfMemory) -> None:
        """Explain an out-of-memory that ended no recording, or one that could not be analysed; once."""
        if self._explained is not failure:
            self._explained = failure
            explain_oom(failure, self.results[-1] if self.results else None, directory=self.directory)

    def _warn_of_nothing(self, why: str) -> None:
        warn(f"nothing {'more ' if self.results else ''}was recorded: {why}")

    def give_up(self) -> None:
        """Something of ours failed: keep what is whole, remove what is half written."""
        self.place.remove_empty()
        if not self.windows:
            self.place.mark_incomplete()
