"""One recorded window becomes a result and files, in this process or in a child.

A child where this process has hardly any memory left: a library that gets none may end the process
(OpenBLAS does), and a training that came through must not end so. A limit on the address space holds for
each process alone, so a child has room.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.compiled_graphs import only_called
from profiler_wrapper.capture.growth import free_bytes_below_own_limit
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.capture.runinfo import RunInfo
from profiler_wrapper.capture.window import RecordedTrace
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.files import WindowFiles
from profiler_wrapper.notices import tell
from profiler_wrapper.options import Options
from profiler_wrapper.out_of_memory import answer
from profiler_wrapper.recording.store import RunDirectory
from profiler_wrapper.result import ProfileResult, as_result, attribute_trace, work_of_trace

_ENOUGH_BYTES = 1 << 30
_PATIENCE_S = 300
_CHILD = f"from {__name__} import finish_for_parent; finish_for_parent()"


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

    def files(self) -> WindowFiles:
        """What writes them; `run` is told where the traces go."""
        files = WindowFiles(self.options, self.info, self.directory, self.run)
        self.run.update(files.trace_names(full=self.full is not None))
        return files


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedWindow:
    """What came of it."""

    result: ProfileResult | None  # None: nothing was recorded, or it could not be analysed
    files: str  # where they are and how big
    nothing_recorded: bool = False
    answered: bool = False  # the failure was


def has_little_memory() -> bool:
    """Whether this process is close to a limit of its own."""
    free_bytes = free_bytes_below_own_limit()
    return free_bytes is not None and free_bytes < _ENOUGH_BYTES


def finish_window(task: WindowTask) -> FinishedWindow:
    """Analyse the trace, write the files, answer the failure. What fails is told; the traces are kept."""
    files, run = task.files(), task.run
    try:
        found = attribute_trace(task.main.path, run=run, shapes=task.main.shapes)
        work = None if task.full is None else work_of_trace(task.full, run=run)
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
    return FinishedWindow(result=result, files=files.summary(), answered=answered)


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


def finish_window_in_child(task: WindowTask) -> FinishedWindow:
    """As `finish_window`, by a child process. Where it fails, the traces are kept, and that is told."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=pickle.dumps(_portable(task)),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        sys.stderr.write(done.stderr.decode(errors="replace"))
        sys.stderr.flush()
        if done.returncode == 0:
            finished: FinishedWindow = pickle.loads(done.stdout)
            return finished
        problem = f"the process that was to analyse it ended with {done.returncode}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    files = task.files()
    files.write_traces(main=task.main.path, full=task.full if task.full is not None and task.full.exists() else None)
    tell(f"hardly any memory is left, and what was recorded could not be analysed ({problem}); {files.summary()}")
    return FinishedWindow(result=None, files=files.summary())


def finish_for_parent() -> None:
    """What the child does: a task comes in, what came of it goes out."""
    task: WindowTask = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(finish_window(task)))


def _portable(task: WindowTask) -> WindowTask:
    """Without what belongs to this process alone, and what finishing does not need."""
    names = tuple(item for item in task.options.track if not callable(item))
    if len(names) < len(task.options.track):
        task.run["warnings"] = [
            *task.run.get("warnings", ()),
            "the series of functions are not available, because hardly any memory was left to work them out",
        ]
    options = replace(task.options, track=names, schedule=None, activities=None, device_mesh=None, layers="auto")
    return replace(task, options=options)
