"""One recorded window becomes a result and files, in this process or in a child (see window_child). No torch here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.compiled_graphs import only_called
from profiler_wrapper.capture.growth import free_bytes_below_own_limit
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.capture.rank import RunInfo
from profiler_wrapper.capture.window import RecordedTrace
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.files import WindowFiles
from profiler_wrapper.notices import tell
from profiler_wrapper.options import Options
from profiler_wrapper.out_of_memory import answer
from profiler_wrapper.recording.carry import remove_empty
from profiler_wrapper.recording.json_stream import no_garbage_collection
from profiler_wrapper.recording.store import RunDirectory
from profiler_wrapper.reports.tables import console_table
from profiler_wrapper.result import ProfileResult, as_result, attribute_trace, work_of_trace

PRINTED_ROWS = 25  # with the lines that say where the files are
_PRINTED_WIDTH = 100
_ENOUGH_BYTES = 1 << 30


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
    unicode: bool = False  # it may have other characters than ASCII

    @property
    def parts(self) -> tuple[Path, ...]:
        """The traces where they were exported to."""
        return (self.main.path,) if self.full is None else (self.main.path, self.full)

    def files(self) -> WindowFiles:
        """What writes them; `run` is told where the traces go."""
        files = WindowFiles(self.options, self.info, self.directory, self.run, target=self.target)
        self.run.update(files.trace_names(full=self.full is not None))
        return files


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedWindow:
    """What came of it."""

    result: ProfileResult | None  # None: nothing was recorded, or it could not be analysed
    files: str  # where they are and how big
    nothing_recorded: bool = False
    answered: bool = False  # the failure was
    text: str = ""  # the table and where the files are, to be printed


def has_little_memory() -> bool:
    """Whether this process is close to a limit of its own."""
    free_bytes = free_bytes_below_own_limit()
    return free_bytes is not None and free_bytes < _ENOUGH_BYTES


@no_garbage_collection()
def finish_window(task: WindowTask) -> FinishedWindow:
    """Analyse the trace, write the files, answer the failure. What fails is told; the traces are kept."""
    files, run = task.files(), task.run
    try:
        found = attribute_trace(task.main.path, run=run, shapes=task.main.shapes)
        work = None if task.full is None else work_of_trace(task.full, run=run, timed=found)
        run["compiled"] = only_called(run["compiled"], found.recording)
        track = (*task.options.track, *task.followed)
        result = as_result(tables(found, run=run, track=track, work=work, peaks=task.options.peaks))
        if task.options.peaks is not None and result.utilization is not None and result.utilization.peaks is not None:
            run["peaks"] = asdict(result.utilization.peaks)
    except EmptyRecording:
        return FinishedWindow(result=None, files="", nothing_recorded=True)
    except Exception as error:
        files.write_traces(main=task.main.path, full=task.full)
        tell(f"what was recorded could not be analysed ({type(error).__name__}: {error}); {files.summary()}")
        return FinishedWindow(result=None, files=files.summary())
    except BaseException:  # Ctrl-C; the traces are whole, and moving them takes no time
        files.write_traces(main=task.main.path, full=task.full)
        raise
    files.write(result, found, main=task.main.path, full=task.full)
    answered = task.failure is not None and _answered(task, task.failure, result, found, files)
    summary = files.summary()
    return FinishedWindow(result=result, files=summary, answered=answered, text=_text(task, result, summary))


def _text(task: WindowTask, result: ProfileResult, files: str) -> str:
    if not task.prints:
        return ""
    rows = PRINTED_ROWS - len(files.splitlines())
    table = console_table(result, rows=rows, width=_PRINTED_WIDTH, order="cost", unicode=task.unicode)
    return f"{table}\n{files}\n"


def _answered(
    task: WindowTask, failure: OutOfMemory, result: ProfileResult, found: Attributed, files: WindowFiles
) -> bool:
    trace = files.trace_path if files.trace_path is not None else task.main.path
    try:
        answer(failure, result, found=found, trace=trace if task.main.shapes else None, directory=files.directory)
    except Exception as error:
        tell(f"the out-of-memory could not be explained: {type(error).__name__}: {error}")
        return False
    return True


def keep_traces(task: WindowTask, problem: str) -> FinishedWindow:
    """Nothing came of a window: put its traces in place as they are, and say so."""
    files = task.files()
    files.only_traces()
    task.run.update(files.trace_names(full=task.full is not None))
    files.write_traces(main=task.main.path, full=task.full if task.full is not None and task.full.exists() else None)
    trace = files.trace_path
    hint = "" if trace is None else f". To make the reports from the trace: python -m profiler_wrapper analyze {trace}"
    tell(f"{problem}; {files.summary()}{hint}")
    return FinishedWindow(result=None, files=files.summary())


def drop_parts(task: WindowTask) -> None:
    """Remove the traces where they were exported to, once nobody can want to begin again."""
    for part in task.parts:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    if task.target is not None and task.directory is not None:
        remove_empty(task.directory.root)
