"""Where one process's part of a run goes: its directory, a node's own disk before it, and the traces on their way."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.capture.allocator_history import snapshot_name
from profiler_wrapper.capture.compiled import graph_breaks
from profiler_wrapper.capture.records import RecordedTrace, RunInfo, Window
from profiler_wrapper.errors import attempt, warn
from profiler_wrapper.run.options import Options
from profiler_wrapper.trace.owned import holdings_to_list
from profiler_wrapper.trace.run_directory import RunDirectory, open_run, remove_empty

# --------------------------------------------------------------------------------------------------
# What run.json says of a recorded window, and which of its traces are reported.

Describe = Callable[[], Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Describes the windows of one process."""

    options: Options
    info: RunInfo
    describe: Describe  # the layers
    describe_compiled: Callable[[], dict[str, Any]]  # the compiled code
    describe_settings: Callable[[], dict[str, Any]]  # how the run is set up

    def begun(self, *, local_dir: str | None, begin_ns: int) -> dict[str, Any]:
        """While a window is recorded, and of one that never came to its end."""
        return {**self._of_ranks(begin_ns, None), "local_dir": local_dir, "prefix": self.options.prefix}

    def of_window(
        self, window: Window, main: RecordedTrace, full: RecordedTrace | None, notes: list[str]
    ) -> dict[str, Any]:
        """Of one that has ended; `notes` get what could not be found out."""
        nothing: dict[str, Any] = {}
        steps = {}
        if main.steps is not None:
            with_shapes = full if full is not None else main if main.shapes else None
            full_steps = list(with_shapes.steps or ()) if with_shapes is not None else []
            steps = {"timed_steps": list(main.steps), "full_steps": full_steps}
        return {
            **self._of_ranks(window.begin_ns, window.end_ns),
            **attempt("how the run is set up is", self.describe_settings, nothing, notes),
            "prefix": self.options.prefix,
            **steps,
            "complete": window.complete,
            "warnings": notes,
            "layers": list(self.describe()),
            "compiled": attempt("the layers inside compiled code are", self.describe_compiled, nothing, notes),
            "held": holdings_to_list(main.held),
            "graph_breaks": attempt("graph breaks are", graph_breaks, None, notes),
            "cpu_frees_unsure": main.cpu_frees_unsure,
        }

    def _of_ranks(self, begin_ns: int | None, end_ns: int | None) -> dict[str, Any]:
        """What a reader of all ranks goes by."""
        ranks = self.options.ranks
        return {
            **self.info.to_dict(),
            "recorded_ranks": None if ranks is None else sorted(rank for rank in ranks if rank < self.info.world_size),
            "window_begin_ns": begin_ns,
            "window_end_ns": end_ns,
        }


def choose(window: Window) -> tuple[RecordedTrace | None, RecordedTrace | None]:
    """The trace whose times are reported, and beside it the one in full, if that says more."""
    timed, full = window.timed, window.full
    if timed is None or (not timed.steps and full is not None and full.steps):
        return full, None
    return timed, full if full is not None and full.shapes and not timed.shapes else None


def notes_of(window: Window, main: RecordedTrace) -> Iterator[str]:
    """What the result of a window has to say."""
    yield from window.warnings
    if main is window.full:
        cost = " with shapes (about +10 % where launch-bound)" if main.shapes else ""
        yield f"times are of warm-up steps{cost}: {window.why_full}"
    if main.steps == () and not window.warnings:
        yield "no step was recorded from its begin to its end"


_MOST_TRIES = 100


class RunPlace:
    """Opened when something is to be written; where nothing can be, `notes` say so."""

    def __init__(self, options: Options, info: RunInfo, record: RunRecord) -> None:
        self.notes: list[str] = []
        self.run: RunDirectory | None = None  # None: not opened yet, or no files can be written
        self._options, self._info, self._record = options, info, record
        self._local: RunDirectory | None = None
        self._fallback: tempfile.TemporaryDirectory[str] | None = None
        self._parts: list[Path] = []
        self._windows: set[str] = set()
        self._begun: dict[str, Any] = {}  # what run.json says until the first window is finished

    def open(self) -> Path:
        """Make the run's directory, unless that was done; where traces are exported to."""
        if self.run is None and self._fallback is None:
            try:
                self._open()
            except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
                self._fallback = tempfile.TemporaryDirectory(prefix="profiler_wrapper_")
                self._note(f"no files were written, because {self._options.output_dir} cannot be used: {error}")
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
        self._local = self._local_of(run)
        local_dir = None if self._local is None else str(self._local.root)
        self._begun = self._record.begun(local_dir=local_dir, begin_ns=time.time_ns())
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
            self._note(f"files are written to {run.root} at once, because local_dir cannot be used: {error}")
            return None
        return local

    def _note(self, message: str) -> None:
        self.notes.append(message)
        warn(message)

    # -- traces on their way ----------------------------------------------------------------------

    def part_path(self, name: str) -> Path:
        """Where to export a session for now: beside its later place, or where that cannot be, a temporary one."""
        path = self.open() / f".{self._options.prefix}_part{name}_{secrets.token_hex(8)}_trace.json"
        self._parts.append(path)
        if self._local is not None:  # whoever has taken the files of an earlier window away removes what is empty
            for _ in range(_MOST_TRIES):
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    path.touch()
                    break
        return path

    def hand_over(self, parts: Iterable[Path]) -> None:
        """Somebody else takes care of these."""
        handed = set(parts)
        self._parts = [part for part in self._parts if part not in handed]

    def drop_parts(self, parts: Iterable[Path] | None = None) -> None:
        """Remove what is still where it was exported to; without `parts`, all of it."""
        dropped = list(self._parts) if parts is None else list(parts)
        self.hand_over(dropped)
        for part in dropped:
            with suppress(OSError):
                part.unlink(missing_ok=True)
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
            directory = self.run.for_window(first, last)
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
