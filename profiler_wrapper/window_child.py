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
from dataclasses import replace
from pathlib import Path
from typing import IO

from profiler_wrapper.capture.growth import control_group_free_bytes
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.low_priority import import_places, is_python, step_back
from profiler_wrapper.notices import say, tell
from profiler_wrapper.units import file_size
from profiler_wrapper.window_report import FinishedWindow, WindowTask, drop_parts, finish_window, keep_traces

_PATIENCE_S = 300  # with a child that works because this process has no memory for it
# With one that began while the training went on: three times what it takes on an idle machine.
_LEAST_PATIENCE_S = 10.0
_PATIENCE_S_PER_BYTE = 0.5e-6
_CHILD_BYTES = 500_000_000  # that one needs, besides the size of the traces
_BEGUN = b"begun "
_TOO_OLD = -getattr(signal, "SIGALRM", 0)  # how it ends that got no time to run for an hour (see low_priority)
_CHILD = f"from {__name__} import finish_for_parent; finish_for_parent()"
_POLITELY = f"from {step_back.__module__} import step_back, take_turn; step_back(); take_turn(); "  # before the rest
# A child has one thread and no device, and says what it has to say in its answer.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""),
    "MPLBACKEND": "Agg",
    "PYTHONWARNINGS": "ignore",
}


def finish_window_in_child(task: WindowTask) -> FinishedWindow:
    """As `finish_window`, by a child process. Where it fails, the traces are kept, and that is told."""
    try:
        child = Child(task)
        finished, problem = child.finished(_PATIENCE_S), child.problem
    except Exception as error:
        finished, problem = None, f"{type(error).__name__}: {error}"
    if finished is not None:
        return finished
    return keep_traces(task, f"hardly any memory is left, and what was recorded could not be analysed ({problem})")


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

    Args:
        task: the window.
        beside_training: at the lowest priority, in its turn, and on when this process has ended.

    Raises:
        OSError: no process can be started, or what it needs cannot be written.
        Exception: the window cannot be pickled.
    """

    def __init__(self, task: WindowTask, *, beside_training: bool = False) -> None:
        if not is_python(sys.executable):
            raise OSError(f"{sys.executable!r} is no Python interpreter")
        self.problem = ""  # why nothing came of it
        self.was_killed = False  # by somebody else: by the system for want of memory, most likely
        self._ended_by_us = False  # for want of time; asked again where Ctrl-C came before it was gone
        self._task = task
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:
            pickle.dump(_portable(task), given)
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(beside_training)],
                stdin=given,
                stdout=self._answer,
                stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=beside_training,  # Ctrl-C is not for it
            )

    @property
    def process(self) -> int:
        """The number of its process."""
        return self._process.pid

    def patience_s(self) -> float:
        """How long to wait for it: not at all before it has begun, since whoever waits can do the same at once."""
        if os.fstat(self._answer.fileno()).st_size == 0:
            return 0.0
        sizes = (part.stat().st_size for part in self._task.parts if part.exists())
        return _LEAST_PATIENCE_S + _PATIENCE_S_PER_BYTE * sum(sizes)

    def finished(self, patience_s: float) -> FinishedWindow | None:
        """What came of the window, once it has ended, which it has to in time; None: `problem` says why nothing did.

        To be asked until it has been answered, which Ctrl-C may prevent.
        """
        self._hurry()
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._ended_by_us = True
            self._process.kill()
            code = self._process.wait()
        with self._errors, self._answer:
            self._errors.seek(0)
            say(self._errors.read().decode(errors="replace"), on="stderr")
            self._answer.seek(len(_BEGUN))
            try:
                messages, finished = pickle.load(self._answer)
            except Exception:  # it was not written to its end
                self.problem = f"the process that was to analyse it ended with {code}"
                self.was_killed = not self._ended_by_us and code < 0 and code != _TOO_OLD
                _drop_half_written(self._task, self.process)
                return None
        for message in messages:
            tell(message)
        assert isinstance(finished, FinishedWindow)
        return finished

    def _hurry(self) -> None:
        """Somebody waits for it now: give its session a whole share again, where there are such shares."""
        with suppress(OSError):
            Path(f"/proc/{self.process}/autogroup").write_text("0", encoding="ascii")


def _program(beside_training: bool) -> str:
    return f"import sys; sys.path[:] = {import_places()!a}; {_POLITELY if beside_training else ''}{_CHILD}"


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
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ProfilerWrapperWarning)
        finished = finish_window(task)
    messages = tuple(str(one.message) for one in told if issubclass(one.category, ProfilerWrapperWarning))
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
