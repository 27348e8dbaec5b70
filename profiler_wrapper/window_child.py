"""A window finished by a child process. Imports no torch.

A child where there are several ranks, so that none waits for another one's tables and plots; and where this process
has hardly any memory left: a library that gets none may end the process (OpenBLAS does), and a training that came
through must not end so. A limit on the address space holds for each process alone, so a child has room.

The child is a new program: it inherits no memory, no open file, no device and no process group. What it needs comes in
a file that has no name any more, what came of it goes into another one, so that neither waits for the other, whichever
of the two is killed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.low_priority import import_places, step_back
from profiler_wrapper.notices import say, tell
from profiler_wrapper.window_report import FinishedWindow, WindowTask, finish_window, keep_traces

_PATIENCE_S = 300  # with a child that somebody waits for
_CHILD = f"from {__name__} import finish_for_parent; finish_for_parent()"
_STEP_BACK = f"from {step_back.__module__} import step_back; step_back(); "  # before the imports of the rest
# A child has one thread and no device, and says what it has to say in its answer.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""),
    "MPLBACKEND": "Agg",
    "PYTHONWARNINGS": "ignore",
}


def finish_window_in_child(task: WindowTask) -> FinishedWindow:
    """As `finish_window`, by a child process. Where it fails, the traces are kept, and that is told."""
    child = Child(task, without_functions="hardly any memory was left to work them out")
    child.run(patience_s=_PATIENCE_S)
    child.tell()
    finished = child.finished()
    if finished is not None:
        return finished
    return keep_traces(
        task, f"hardly any memory is left, and what was recorded could not be analysed ({child.problem})"
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """What a child has to say at once; its result is long, and comes after it."""

    warnings: tuple[str, ...]
    text: str
    nothing_recorded: bool
    answered: bool


class Child:
    """One window, finished by a process of its own.

    Args:
        task: the window.
        without_functions: why series of functions, which cannot be handed over, are not available.
        background: at the lowest priority, and on when this process has ended.
    """

    def __init__(self, task: WindowTask, *, without_functions: str, background: bool = False) -> None:
        self.task = task
        self.problem = ""  # why nothing came of it
        self.said: _Said | None = None
        self.ended = False  # and what it said was told
        self._background = background
        self._task: bytes = pickle.dumps(_portable(task, without_functions))
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def process(self) -> int | None:
        """The number of its process; None before it has one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Begin, unless that was done. Raises nothing: `problem` says what failed."""
        if self._process is None and not self.problem:
            self._attempt(self._start)

    def run(self, *, patience_s: float | None = None) -> None:
        """Start it and wait until it has ended. Raises nothing: `problem` says what failed."""
        self.start()
        if self._process is not None:
            self._attempt(lambda: self._wait(patience_s))

    def hurry(self) -> None:
        """Somebody waits for it now: give its session a whole share again, where there are such shares."""
        if self._process is not None:
            with suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_text("0", encoding="ascii")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _start(self) -> None:
        with tempfile.TemporaryFile() as task:
            task.write(self._task)
            task.seek(0)
            self._task = b""
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._program()],
                stdin=task,
                stdout=self._answer,
                stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=self._background,  # Ctrl-C is not for it
            )

    def _program(self) -> str:
        back = _STEP_BACK if self._background else ""
        return f"import sys; sys.path[:] = {import_places()!a}; {back}{_CHILD}"

    def _wait(self, patience_s: float | None) -> None:
        assert self._process is not None
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        if code != 0:
            self.problem = f"the process that was to analyse it ended with {code}"
            return
        self._answer.seek(0)
        self.said = pickle.load(self._answer)

    def tell(self) -> None:
        """Say here what the child had to say."""
        with self._errors:
            self._errors.seek(0)
            say(self._errors.read().decode(errors="replace"), on="stderr")
        for message in self.said.warnings if self.said is not None else ():
            tell(message)

    def finished(self) -> FinishedWindow | None:
        """What came of the window; None if nothing did. To be asked once."""
        with self._answer:
            if self.said is None:
                return None
            finished: FinishedWindow = pickle.load(self._answer)
            return finished


def finish_for_parent() -> None:
    """What the child does: a task comes in, what came of it goes out."""
    task: WindowTask = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ProfilerWrapperWarning)
        finished = finish_window(task)
    for part in task.parts:
        part.unlink(missing_ok=True)
    messages = tuple(str(one.message) for one in told if issubclass(one.category, ProfilerWrapperWarning))
    pickle.dump(_Said(messages, finished.text, finished.nothing_recorded, finished.answered), out)
    pickle.dump(finished, out)
    out.flush()


def _portable(task: WindowTask, without_functions: str) -> WindowTask:
    """Without what belongs to this process alone, and what finishing does not need."""
    names = tuple(item for item in task.options.track if not callable(item))
    run = task.run
    if len(names) < len(task.options.track):
        reason = f"the series of functions are not available, because {without_functions}"
        run = {**run, "warnings": [*run.get("warnings", ()), reason]}
    options = replace(task.options, track=names, schedule=None, activities=None, device_mesh=None, layers="auto")
    return replace(task, options=options, run=run)
