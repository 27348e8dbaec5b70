"""A window finished by a child process. Imports no torch.

A child where the training goes on meanwhile; and where this process has hardly any memory left: a library that gets
none may end the process (OpenBLAS does), and a training that came through must not end so. A limit on the address space
holds for each process alone, so a child has room.

The child is a new program: it inherits no memory, no open file, no device and no process group. What it needs comes in
a file that has no name any more, what came of it goes into another one, so that neither waits for the other, whichever
of the two is killed. It leaves the traces that it works on as they are, so that at any moment it can be ended and
somebody else begin again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import IO

from profiler_wrapper.analyse import tables
from profiler_wrapper.capture.growth import control_group_free_bytes, free_bytes_below_own_limit
from profiler_wrapper.child import raise_priority, start_child
from profiler_wrapper.errors import EmptyRecording, ProfilerWrapperWarning, in_a_line, say, warn
from profiler_wrapper.place.compiled import only_called
from profiler_wrapper.reports.table import NARROWEST, console_table
from profiler_wrapper.result import ProfileResult, as_result, attribute_trace, work_of_trace
from profiler_wrapper.run.files import WindowFiles, WindowTask
from profiler_wrapper.run.out_of_memory import explain_oom
from profiler_wrapper.tables.timeline_columns import NO_TRACE
from profiler_wrapper.trace.atomic import remove_empty
from profiler_wrapper.trace.events import no_garbage_collection
from profiler_wrapper.units import file_size

# --- One recorded window becomes a result and files, in this process or in a child. No torch here ---

PRINTED_ROWS = 25  # with the lines that say where the files are
_ENOUGH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedWindow:
    """What came of it."""

    result: ProfileResult | None  # None: nothing was recorded, or it could not be analysed
    nothing_recorded: bool = False
    explained: bool = False  # the failure was
    text: str = ""  # the table and where the files are, to be printed


@no_garbage_collection()
def finish_window(task: WindowTask) -> FinishedWindow:
    """Analyse the trace, write the files, explain the failure. What fails is a warning; the traces are kept."""
    files, run = WindowFiles(task), task.run
    try:
        found = attribute_trace(task.main.path, run=run, shapes=task.main.shapes)
        work = None if task.full is None else work_of_trace(task.full, run=run, timed=found)
        run["compiled"] = only_called(run["compiled"], found.recording)
        track = (*task.options.track, *task.followed)
        page = files.directory is not None and "report" in files.wanted()
        result = as_result(tables(found, run=run, track=track, work=work, peaks=task.options.peaks, timeline=page))
        if task.options.peaks is not None and result.utilization is not None and result.utilization.peaks is not None:
            run["peaks"] = asdict(result.utilization.peaks)
    except EmptyRecording:
        return FinishedWindow(result=None, nothing_recorded=True)
    except BaseException as error:  # Ctrl-C too; the traces are whole, and moving them takes no time
        kept = keep_traces(task, f"what was recorded could not be analysed ({in_a_line(error)})")
        if isinstance(error, Exception):
            return kept
        raise
    files.write(result, found)
    result = replace(result, timeline=NO_TRACE)  # a training may have thousands of windows
    failure = task.failure
    explained = failure is not None and explain_oom(failure, result, found=found, directory=files.directory)
    text = ""
    if task.prints:
        summary = files.summary()
        rows = PRINTED_ROWS - len(summary.splitlines())
        width = max(NARROWEST, task.width)
        table = console_table(result, rows=rows, width=width, unicode=task.unicode, styled=task.styled)
        text = f"{table}\n{summary}\n"
    return FinishedWindow(result=result, explained=explained, text=text)


def keep_traces(task: WindowTask, problem: str) -> FinishedWindow:
    """Nothing came of a window: put its traces in place as they are, and say so."""
    files = WindowFiles(task, only_traces=True)
    files.write()
    trace = files.trace_path
    hint = "" if trace is None else f". To make the reports from the trace: profiler-wrapper analyze {trace}"
    warn(f"{problem}; {files.summary()}{hint}")
    return FinishedWindow(result=None)


def drop_parts(task: WindowTask) -> None:
    """Remove the traces where they were exported to, once nobody can want to begin again."""
    for part in task.parts:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    if task.target is not None and task.directory is not None:
        remove_empty(task.directory.root)


_PATIENCE_S = 300  # with a child that works because this process has no memory for it
# With one that began while the training went on: three times what it takes on an idle machine.
_LEAST_PATIENCE_S = 10.0
_PATIENCE_S_PER_BYTE = 0.5e-6
_CHILD_BYTES = 500_000_000  # that one needs, besides the size of the traces
_BEGUN = b"begun "
_TOO_OLD = -getattr(signal, "SIGALRM", 0)  # how it ends that has not finished in 10 minutes (see lower_priority)
_CHILD = f"from {__name__} import finish_for_parent; finish_for_parent()"
# A child has no device, and says what it has to say in its answer.
_ENVIRONMENT = {
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""),
    "MPLBACKEND": "Agg",
    "PYTHONWARNINGS": "ignore",
}


def finish(task: WindowTask, child: Child | None = None) -> FinishedWindow:
    """Finish a window which nobody has begun, or which `child` did not finish, now that somebody waits.

    In this process; where that has hardly any memory left, in a child. Where nothing comes of it the traces are kept.
    """
    free_bytes = free_bytes_below_own_limit()
    if child is not None and child.was_killed:
        problem = f"what was recorded could not be analysed ({child.problem})"
    elif free_bytes is None or free_bytes >= _ENOUGH_BYTES:
        return finish_window(task)
    else:
        try:
            child = Child(task)
            if (finished := child.finished(_PATIENCE_S)) is not None:
                return finished
            reason = child.problem
        except Exception as error:
            reason = in_a_line(error)
        problem = f"hardly any memory is left, and what was recorded could not be analysed ({reason})"
    return keep_traces(task, problem)


def lack_of_memory(task: WindowTask) -> str:
    """Why a child might be killed for memory, and take the training along; "" if it would not."""
    free_bytes = control_group_free_bytes()
    needed_bytes = _CHILD_BYTES + sum(part.stat().st_size for part in task.parts)
    if free_bytes is None or free_bytes >= needed_bytes:
        return ""
    return (
        f"no reports were made, because the control group (cgroup) of this process has {file_size(free_bytes)} of "
        f"memory left, and a process that makes them may need {file_size(needed_bytes)}"
    )


class Child:
    """One window, finished by a process of its own, which begins at once.

    `beside_training`: at a low priority, in its turn, and on when this process has ended, for 10 minutes at most.

    Raises:
        OSError: no process can be started, or what it needs cannot be written.
        Exception: the window cannot be pickled.
    """

    def __init__(self, task: WindowTask, *, beside_training: bool = False) -> None:
        self.problem = ""  # why nothing came of it
        self.was_killed = False  # by somebody else: by the system for want of memory, most likely
        self._ended_by_us = False  # for want of time; asked again where Ctrl-C came before it was gone
        self._task = task
        self._files: tuple[IO[bytes], ...] = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115
        self._said: list[bytes] = []  # what was in these when it had ended: its answer, and its errors
        with tempfile.TemporaryFile() as given:
            pickle.dump(_portable(task), given)
            given.seek(0)
            self._process = start_child(
                _CHILD,
                beside_training=beside_training,
                environment=_ENVIRONMENT,
                stdin=given,
                stdout=self._files[0],
                stderr=self._files[1],
            )
        self.process = self._process.pid

    def has_ended(self) -> bool:
        """Whether it has. Then it holds no open file any more: a training may have thousands of windows."""
        if self._process.poll() is None:
            return False
        files, self._files = self._files, ()
        for file in files:
            with file:
                file.seek(0)
                self._said.append(file.read())
        return True

    def patience_s(self) -> float:
        """How long to wait for it: not at all before it has begun, since whoever waits can do the same at once."""
        if self.has_ended() or os.fstat(self._files[0].fileno()).st_size == 0:
            return 0.0
        sizes = (part.stat().st_size for part in self._task.parts if part.exists())
        return _LEAST_PATIENCE_S + _PATIENCE_S_PER_BYTE * sum(sizes)

    def finished(self, patience_s: float) -> FinishedWindow | None:
        """What came of the window, once it has ended, which it has to in time; None: `problem` says why nothing did.

        To be asked until it has been explained, which Ctrl-C may prevent.
        """
        raise_priority(self.process)
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._ended_by_us = True
            self._process.kill()
            code = self._process.wait()
        self.has_ended()
        answer, errors = self._said
        say(errors.decode(errors="replace"), on="stderr")
        try:
            messages, finished = pickle.loads(answer[len(_BEGUN) :])
        except Exception:  # it was not written to its end
            self.problem = f"the process that was to analyse it ended with {code}"
            self.was_killed = not self._ended_by_us and code < 0 and code != _TOO_OLD
            _drop_half_written(self._task, self.process)
            return None
        for message in messages:
            warn(message)
        assert isinstance(finished, FinishedWindow)
        return finished


def _drop_half_written(task: WindowTask, process: int) -> None:
    """What a killed process left beside the files that it wrote."""
    for directory in (task.directory, task.target):
        if directory is not None:
            folders = (directory.directory, directory.directory / "memory", directory.page.parent)
            for folder in {*folders, task.options.log_dir or directory.directory}:
                for path in folder.glob(f".{process}-*"):
                    path.unlink(missing_ok=True)


def finish_for_parent() -> None:
    """What the child does: a task comes in, what came of it goes out."""
    task: WindowTask = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    out.write(_BEGUN)
    out.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ProfilerWrapperWarning)
        finished = finish_window(task)
    messages = tuple(str(one.message) for one in caught if issubclass(one.category, ProfilerWrapperWarning))
    pickle.dump((messages, finished), out)
    out.flush()
    drop_parts(task)


def _portable(task: WindowTask) -> WindowTask:
    """Without what belongs to this process alone, and what finishing does not need."""
    names = tuple(item for item in task.options.track if not callable(item))
    run = task.run
    if len(names) < len(task.options.track):
        reason = "the series of functions are not available, because hardly any memory was left to work them out"
        run = {**run, "warnings": [*run.get("warnings", ()), reason]}
    options = replace(
        task.options, track=names, steps="auto", schedule=None, activities=None, device_mesh=None, layers="auto"
    )
    return replace(task, options=options, run=run)
