"""From what was recorded to what is on disk: analyse a window, write its files, print its table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.capture.graph_breaks import graph_breaks
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.capture.runinfo import RunInfo
from profiler_wrapper.capture.session import safe_name
from profiler_wrapper.capture.snapshot import AllocatorHistory, SnapshotUnavailable, snapshot_name
from profiler_wrapper.capture.window import RecordedTrace, Window
from profiler_wrapper.notices import tell
from profiler_wrapper.options import Options
from profiler_wrapper.out_of_memory import answer
from profiler_wrapper.recording.holdings import holdings_to_list
from profiler_wrapper.recording.store import RunDirectory, open_run
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.window_report import WindowTask, finish_window, finish_window_in_child, has_little_memory

_COMMAND = "python -m profiler_wrapper snapshot"
PRINTED_ROWS = 25  # with the lines that say where the files are

Describe = Callable[[], Sequence[dict[str, Any]]]


class Finisher:
    """Writes one process's part of a run, window by window."""

    def __init__(
        self,
        options: Options,
        info: RunInfo,
        describe: Describe,
        describe_compiled: Callable[[], dict[str, Any]] = dict,
        describe_settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.results: list[ProfileResult] = []
        self._answered: OutOfMemory | None = None
        self._options, self._info, self._describe = options, info, describe
        self._describe_compiled, self._describe_settings = describe_compiled, describe_settings
        self._followed: dict[str, None] = {}  # names of blocks, in the order they came
        self._history: AllocatorHistory | None = None
        self._run: RunDirectory | None = None
        self._fallback: tempfile.TemporaryDirectory[str] | None = None
        self._parts: list[Path] = []
        self._notes: list[str] = list(info.warnings)  # said once, in the first result

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._info.rank

    @property
    def directory(self) -> Path | None:
        """Where this rank's files are; None before there are any, or where none can be."""
        return self._run.directory if self._run is not None else None

    def follow(self, name: str) -> None:
        """A named block was run: its time becomes a series."""
        self._followed[safe_name(name)] = None

    def part_path(self, name: str) -> Path:
        """Where to export a session for now: beside its later place, or where that cannot be, a temporary one."""
        path = self._parts_directory() / f".{self._options.prefix}_part{name}_trace.json"
        self._parts.append(path)
        return path

    def _parts_directory(self) -> Path:
        if self._run is None and self._fallback is None:
            try:
                self._run = self._open_run()
                self._run.write_run(self._info.to_dict(), complete=False)
            except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
                self._fallback = tempfile.TemporaryDirectory(prefix="profiler_wrapper_")
                self._notes.append(f"no files were written, because {self._options.output_dir} cannot be used: {error}")
                tell(self._notes[-1])
        return self._run.directory if self._run is not None else Path(self._fallback.name)  # type: ignore[union-attr]

    def _open_run(self) -> RunDirectory:
        return open_run(
            self._options.output_dir,
            prefix=self._options.prefix,
            rank=self._info.rank,
            rank_name=self._info.directory_name,
            world_size=self._info.world_size,
            run_name=self._options.run_name,
        )

    # -- the allocator's history ------------------------------------------------------------------

    def begin_history(self) -> None:
        """Record the allocator's history, if that was asked for."""
        if not self._options.enabled_record_memory_pickle or self._history is not None:
            return
        history = AllocatorHistory(failure_path=partial(self._history_path, "oom"))
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
            history.dump(self._history_path("mem"))
        except (SnapshotUnavailable, OSError) as reason:
            said.append(str(reason))
        finally:
            history.stop()
        for message in said:
            self._notes.append(message)
            tell(message)

    def _history_path(self, what: Literal["mem", "oom"]) -> Path:
        options = self._options
        if options.mem_dir is None:
            return self._parts_directory() / "memory" / snapshot_name(options.prefix, what=what)
        prefix = f"{options.prefix}_rank_{self.rank}" if self._info.world_size > 1 else options.prefix
        return options.mem_dir / snapshot_name(prefix, what=what)

    # -- a window ---------------------------------------------------------------------------------

    def write(self, window: Window, *, failure: OutOfMemory | None = None) -> None:
        """Analyse a window, write its files, print its table; nothing of it, if nothing was recorded.

        `failure`: an out-of-memory that ended the window, which is answered.
        """
        main, full = _choose(window)
        try:
            if main is None:
                self._tell_nothing(window, "the block ended before its first step")
            else:
                self._write(window, main, full, failure)
        finally:
            self._drop_parts({trace.path for trace in (window.full, window.timed) if trace is not None})

    def answer(self, failure: OutOfMemory) -> None:
        """Answer an out-of-memory that ended no recording, or one that could not be analysed; once."""
        if self._answered is failure:
            return
        self._answered = failure
        try:
            answer(failure, self.results[-1] if self.results else None, directory=self.directory)
        except Exception as error:
            tell(f"the out-of-memory could not be explained: {type(error).__name__}: {error}")

    def _tell_nothing(self, window: Window, reason: str) -> None:
        more = "more " if self.results else ""
        tell(f"nothing {more}was recorded: {'; '.join(window.warnings) or reason}")

    def _write(
        self, window: Window, main: RecordedTrace, full: RecordedTrace | None, failure: OutOfMemory | None
    ) -> None:
        notes = [*self._notes, *_notes(window, main)]
        self._notes = []
        task = WindowTask(
            options=self._options,
            info=self._info,
            directory=self._run_directory(main),
            run=self._describe_run(main, full, notes, complete=window.complete),
            main=main,
            full=full.path if full is not None else None,
            followed=tuple(self._followed),
            failure=failure,
        )
        finished = finish_window_in_child(task) if has_little_memory() else finish_window(task)
        if finished.nothing_recorded:
            self._tell_nothing(window, "no op of torch ran in the block, on the thread that entered it")
        if finished.answered:
            self._answered = failure
        if finished.result is None:
            return
        self.results.append(finished.result)
        if self._options.enable_print_summary and self._prints:
            rows = PRINTED_ROWS - len(finished.files.splitlines())
            sys.stdout.write(f"{finished.result.table(order='cost', rows=rows)}\n{finished.files}\n")
            sys.stdout.flush()

    @property
    def _prints(self) -> bool:
        """One rank prints."""
        return self._options.is_first(self.rank)

    def _run_directory(self, main: RecordedTrace) -> RunDirectory | None:
        """The rank's own directory, and for each later window one in it."""
        if self._run is None or not self.results:
            return self._run
        first, last = (main.steps[0], main.steps[-1]) if main.steps else (len(self.results), len(self.results))
        directory = self._run.for_window(first, last)
        if directory.directory.exists():
            directory = replace(directory, window=f"{directory.window}_{len(self.results)}")
        return directory

    def _describe_run(
        self, main: RecordedTrace, full: RecordedTrace | None, notes: list[str], *, complete: bool
    ) -> dict[str, Any]:
        """What run.json says."""
        steps = {} if main.steps is None else {"timed_steps": list(main.steps), "full_steps": _full_steps(main, full)}
        return {
            **self._info.to_dict(),
            **self._settings(notes),
            "prefix": self._options.prefix,
            **steps,
            "complete": complete,
            "warnings": notes,
            "layers": list(self._describe()),
            "compiled": self._compiled(notes),
            "held": holdings_to_list(main.held),
            "graph_breaks": _graph_breaks(notes),
            "cpu_frees_unsure": main.cpu_frees_unsure,
        }

    def _settings(self, notes: list[str]) -> dict[str, Any]:
        """How the run is set up, as advice and comparisons ask."""
        try:
            return self._describe_settings()
        except Exception as error:
            notes.append(f"how the run is set up is not known, because {type(error).__name__}: {error}")
            return {}

    def _compiled(self, notes: list[str]) -> dict[str, Any]:
        """What is known of compiled code; without it, its layers have no rows."""
        try:
            return self._describe_compiled()
        except Exception as error:
            notes.append(f"the layers inside compiled code have no rows, because {type(error).__name__}: {error}")
            return {}

    def _drop_parts(self, parts: set[Path]) -> None:
        """Remove what is still where it was exported to."""
        self._parts = [part for part in self._parts if part not in parts]
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Something of ours failed: keep what is whole, mark the run incomplete, remove what is half written."""
        self._drop_parts(set(self._parts))
        if self._run is not None:
            with suppress(OSError):
                self._run.write_run(self._info.to_dict(), complete=False)


def _graph_breaks(notes: list[str]) -> list[dict[str, Any]] | None:
    """Those of torch.compile so far; None where they are not known."""
    try:
        return graph_breaks()
    except Exception as error:
        notes.append(f"graph breaks are not available, because {type(error).__name__}: {error}")
        return None


def _choose(window: Window) -> tuple[RecordedTrace | None, RecordedTrace | None]:
    """The trace whose times are reported, and beside it the one in full, if that says more."""
    timed, full = window.timed, window.full
    if timed is None or (not timed.steps and full is not None and full.steps):
        return full, None
    return timed, full if full is not None and full.shapes and not timed.shapes else None


def _full_steps(main: RecordedTrace, full: RecordedTrace | None) -> list[int]:
    """Steps whose shapes were recorded."""
    if full is not None:
        return list(full.steps or ())
    return list(main.steps or ()) if main.shapes else []


def _notes(window: Window, main: RecordedTrace) -> Iterator[str]:
    yield from window.warnings
    if main is window.full:
        cost = " with shapes (about +10 % where launch-bound)" if main.shapes else ""
        yield f"times are of warm-up steps{cost}: {window.why_full}"
    if main.steps == () and not window.warnings:
        yield "no step was recorded from its begin to its end"
