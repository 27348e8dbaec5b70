"""Has a recorded step counted, in a process of its own where that can be."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.utilization import StepWork
from profiler_wrapper.live.count_step import arguments, count_step, read_answer
from profiler_wrapper.low_priority import is_python

_LOOK_EVERY_S = 0.005


class Counting:
    """The counting of one trace, which is deleted in the end.

    Args:
        run: what is known of its layers and compiled code, as plain data.

    Raises:
        ProfilerWrapperError: no process could be started, and the trace holds no step.
    """

    def __init__(self, trace: Path, run: Mapping[str, Any], *, in_process: bool | None = None) -> None:
        self._files = trace, trace.with_suffix(".run.json")
        self._work: StepWork | None = None
        self._process: subprocess.Popen[str] | None = None
        if not (in_process if in_process is not None else not is_python(sys.executable)):
            with contextlib.suppress(OSError):  # no process may be started: then it is counted here
                self._files[1].write_text(json.dumps(run), encoding="utf-8")
                self._process = _start(*self._files)
        if self._process is None:
            try:
                self._work = count_step(trace, run)
            finally:
                self.cancel()

    def result(self, *, wait_s: float = 0.0) -> StepWork | None:
        """The work of the step; None while it is not known.

        Raises:
            ValueError: the trace could not be counted.
        """
        if self._process is None:
            return self._work
        until = time.monotonic() + wait_s
        while self._process.poll() is None:
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK_EVERY_S)
        assert self._process.stdout is not None
        answer = self._process.stdout.read()
        self.cancel()
        self._work = read_answer(answer or "{}")
        return self._work

    def cancel(self) -> None:
        """Leave it; a second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for path in self._files:
            with contextlib.suppress(OSError):
                path.unlink()


def _start(trace: Path, run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments(trace, run)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the training
    )
