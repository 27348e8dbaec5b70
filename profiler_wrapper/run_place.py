"""Where one process's part of a run goes: its directory, a node's own disk before it, and the traces on their way."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.capture.rank import RunInfo
from profiler_wrapper.capture.snapshot import snapshot_name
from profiler_wrapper.capture.window import RecordedTrace
from profiler_wrapper.notices import tell
from profiler_wrapper.options import Options
from profiler_wrapper.recording.carry import remove_empty
from profiler_wrapper.recording.store import RunDirectory, open_run
from profiler_wrapper.run_record import RunRecord

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
                self._without_run(error)
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

    def _without_run(self, error: Exception) -> None:
        self._fallback = tempfile.TemporaryDirectory(prefix="profiler_wrapper_")
        self._note(f"no files were written, because {self._options.output_dir} cannot be used: {error}")

    def _note(self, message: str) -> None:
        self.notes.append(message)
        tell(message)

    # -- traces on their way ----------------------------------------------------------------------

    def part_path(self, name: str) -> Path:
        """Where to export a session for now: beside its later place, or where that cannot be, a temporary one."""
        path = self.open() / f".{self._options.prefix}_part{name}_{secrets.token_hex(8)}_trace.json"
        self._parts.append(path)
        if self._local is not None:
            _keep_directory(path)
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
        directory = self.run if number == 0 else self._later(self.run, main, number)
        if self._local is None:
            return directory, None
        return replace(self._local, window=directory.window), directory

    def _later(self, run: RunDirectory, main: RecordedTrace, number: int) -> RunDirectory:
        first, last = (main.steps[0], main.steps[-1]) if main.steps else (number, number)
        directory = run.for_window(first, last)
        if directory.window in self._windows or directory.directory.exists():
            directory = replace(directory, window=f"{directory.window}_{number}")
        self._windows.add(directory.window)
        return directory

    def history_path(self, what: Literal["mem", "oom"]) -> Path:
        """Where the allocator's history goes: not over the node's own disk, since it is written at any time."""
        options = self._options
        if options.mem_dir is None:
            parts = self.open()
            return (
                (parts if self.run is None else self.run.directory)
                / "memory"
                / snapshot_name(options.prefix, what=what)
            )
        prefix = f"{options.prefix}_rank_{self._info.rank}" if self._info.world_size > 1 else options.prefix
        return options.mem_dir / snapshot_name(prefix, what=what)

    def mark_incomplete(self) -> None:
        """What is there is not all that should be."""
        if self.run is not None:
            with suppress(OSError):
                self.run.write_run(self._begun, complete=False)


def _keep_directory(path: Path) -> None:
    """Leave a file at `path`: whoever has taken the files of an earlier window away removes what is empty."""
    for _ in range(_MOST_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.touch()
            return
