"""The files of one window of one rank: each on its own, so that one that fails takes no other with it."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from profiler_wrapper.capture.records import FULL_SET_WORLD_SIZE, OutOfMemory, RecordedTrace, RunInfo
from profiler_wrapper.errors import in_a_line, warn
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.write import REPORTS, ReportFile
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.run.options import FILES, Options
from profiler_wrapper.tables.layer_lanes import layer_lanes
from profiler_wrapper.terminal import WIDTH_OF_FILES, Stream
from profiler_wrapper.trace.atomic import move, replacing
from profiler_wrapper.trace.lanes import LaneSpan, splice_lanes
from profiler_wrapper.trace.run_directory import RunDirectory, href
from profiler_wrapper.units import file_size

SMALL_SET = frozenset({"result"})
TRACES = frozenset({"trace", "full_trace"})
_MOST_NAMES = 8  # of files that stay where they are


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTask:
    """Everything that is needed to finish one window."""

    options: Options
    info: RunInfo
    directory: RunDirectory | None  # None: no files can be written
    run: dict[str, Any]  # what run.json says
    main: RecordedTrace
    full: Path | None  # a second trace, with shapes
    followed: tuple[str, ...]  # named blocks
    failure: OutOfMemory | None  # it ended the window
    target: RunDirectory | None = None  # where the files go in the end, if `directory` is on a node's own disk
    why_nothing: str = ""  # what to say if nothing is in the trace
    prints: bool = False  # a table is wanted
    on: Stream = "stdout"
    unicode: bool = False  # it may have other characters than ASCII
    styled: bool = False  # and colours
    width: int = WIDTH_OF_FILES

    @property
    def parts(self) -> tuple[Path, ...]:
        """The traces where they were exported to."""
        return (self.main.path,) if self.full is None else (self.main.path, self.full)


class WindowFiles:
    """Writes what `files=` asks for; a file that cannot be written is one warning.

    `only_traces`: they are all there is, so they are written whatever was asked for; plainly, which takes no time.
    """

    def __init__(self, task: WindowTask, *, only_traces: bool = False) -> None:
        self._task, self._options, self._info, self._run = task, task.options, task.info, task.run
        self._directory = task.directory
        self._written: list[Path] = []
        self._whole = True
        self._only_traces = only_traces
        trace = task.options.trace
        large = trace is None and task.info.world_size > FULL_SET_WORLD_SIZE
        self._zipped = not only_traces and (trace == "json.gz" or large)
        # What run.json says of where they go.
        paths = {name: self._trace_file(name) for name in ("trace", "full_trace")[: len(task.parts)]}
        self._run.update({"trace": None} | {name: path.name for name, path in paths.items() if path is not None})

    def write(self, result: ProfileResult | None = None, found: Placed | None = None) -> None:
        """Everything that can be made of the main trace, or the traces alone where nothing could.

        The traces stay where they are: who is interrupted here can begin again.
        """
        directory = self._directory
        if directory is None:
            return
        lanes = None if result is None or found is None else partial(layer_lanes, found, result.calls)
        self._write_trace("trace", self._task.main.path, lanes)
        self._write_trace("full_trace", self._task.full)
        wanted = self.wanted()
        for name, report in REPORTS.items():
            if result is not None and name in wanted and report.applies(result):
                for file in report.files:
                    self._attempt(
                        "the page" if name == "report" else name.replace("_", " "),
                        partial(self._report, name, file, result),
                    )
        self._finish(directory, complete=result is not None and bool(self._run.get("complete", True)))

    def _finish(self, directory: RunDirectory, *, complete: bool) -> None:
        """What `run.json` calls complete is where it has to be, so it comes last."""
        if self._task.target is not None:
            self._take_away(directory, self._task.target)
            directory = self._task.target
        complete = complete and self._whole
        self._attempt("run.json", lambda: self._written.append(directory.write_run(self._run, complete=complete)))

    def _take_away(self, source: RunDirectory, target: RunDirectory) -> None:
        """What this window wrote, to where the run is kept; what cannot be taken there stays, with a warning."""
        local = [path for path in self._written if path.is_relative_to(source.root)]
        self._written = [path for path in self._written if path not in local]
        self._directory = target
        left: dict[Path, str] = {}  # why
        for path in local:  # no others: another window may be writing them
            copy = target.root / path.relative_to(source.root)
            try:
                move(path, copy)
            except OSError as error:
                left[path] = in_a_line(error)
            else:
                self._written.append(copy)
        if left:
            self._whole = False
            self._attempt("run.json beside them", lambda: source.write_run(self._run, complete=False))
            named = ", ".join(path.name for path in [*left][:_MOST_NAMES])
            warn(
                f"{len(left)} of {len(local)} files could not be copied to {target.root} "
                f"({next(iter(left.values()))}). They stay in {source.root} on {self._info.host}: {named}"
            )

    def _write_trace(
        self, name: str, source: Path | None, lanes: Callable[[], Sequence[LaneSpan]] | None = None
    ) -> None:
        path = self._trace_file(name)
        if path is None or source is None or not source.exists():
            return
        spliced = lanes is not None and self._attempt("the layer lanes", lambda: splice_lanes(source, lanes(), path))
        what = "the trace" if name == "trace" else "the trace with shapes"
        if spliced or self._attempt(what, partial(_put, source, path)):
            self._written.append(path)

    def _trace_file(self, name: str) -> Path | None:
        """Where a trace goes; None if it is not kept."""
        if self._directory is None or name not in self.wanted():
            return None
        path = self._directory.path(FILES[name])
        return path.with_name(f"{path.name}.gz") if self._zipped else path

    def wanted(self) -> frozenset[str]:
        """Keys of `FILES` that this rank writes. One rank writes the page, which is the run's."""
        options = self._options
        left_out = set() if options.is_first(self._info) else {"report"}
        if self._only_traces:
            return TRACES
        if options.files == "all":
            return frozenset(FILES) - left_out
        if options.files != "auto":
            return options.files - left_out
        if not options.writes_everything(self._info):
            return SMALL_SET
        left_out |= {name for name, one in REPORTS.items() if one.option and not getattr(options, one.option)}
        if options.trace is False:
            left_out |= TRACES
        return frozenset(FILES) - left_out

    @property
    def directory(self) -> Path | None:
        """Where the files go; None where they go nowhere."""
        return self._directory.directory if self._directory is not None else None

    @property
    def trace_path(self) -> Path | None:
        """Where the timed trace is; None if it was not moved into place."""
        path = self._trace_file("trace")
        return path if path in self._written else None

    def summary(self) -> str:
        """Where the files are and how big; a line of its own for the page."""
        if not self._written or self._directory is None:
            return "no files were written"
        here = [path for path in self._written if path.is_relative_to(self._directory.directory)]
        size = sum(path.stat().st_size for path in here if path.exists())
        page = f"\nThe page: {self._directory.page}" if self._directory.page in self._written else ""
        if page and self._options.of_several(self._info):
            page = f"\nAll ranks side by side: profiler-wrapper ranks {self._directory.root}{page}"
        files = "1 file" if len(here) == 1 else f"{len(here)} files"
        return f"{files}, {file_size(size)}, in {self._directory.directory}{page}"

    def _report(self, name: str, file: ReportFile, result: ProfileResult) -> None:
        directory = self._directory
        assert directory is not None
        path = directory.page if name == "report" else directory.path(file.name)
        if name == "log" and self._options.log_dir is not None:
            path = self._options.log_dir / (f"{directory.window}_{path.name}" if directory.window else path.name)
        with replacing(path) as beside:
            if name == "report":
                trace = self.trace_path
                write_page(result, beside, trace_href=None if trace is None else href(trace, page=path))
            else:
                file.write(result, beside)
        self._written.append(path)

    def _attempt(self, what: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except Exception as error:
            self._whole = False
            warn(f"{what} could not be written: {in_a_line(error)}")
            return False
        return True


def _put(source: Path, target: Path) -> None:
    """The same file under another name, or where its name says so zipped."""
    with replacing(target) as beside:
        if target.suffix == ".gz":  # level 1: a third larger than torch's own level 9, and a tenth of its time
            with source.open("rb") as plain, gzip.open(beside, "wb", compresslevel=1) as packed:
                shutil.copyfileobj(plain, packed, 1 << 20)
            return
        try:
            os.link(source, beside)
        except OSError:  # a file system without links: then it is moved
            os.replace(source, beside)
