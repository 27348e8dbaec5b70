"""What workers of a pool do in tests: reduce a trace, or die of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from profiler_wrapper.ranks.reduce import Reduced, Task, reduce_trace


def dies_of_deadly(task: Task) -> Reduced:
    """A trace called deadly kills its worker, one called flaky does so once."""
    trace = Path(task.trace)
    died = trace.with_suffix(".died")
    if "deadly" in trace.name or ("flaky" in trace.name and not died.exists()):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return reduce_trace(task)


def says_who_and_sleeps(task: Task) -> Reduced:
    """A trace called slow takes a minute; beside each trace lies the number of the process that reduces it."""
    trace = Path(task.trace)
    trace.with_suffix(".pid").write_text(str(os.getpid()), encoding="ascii")
    if "slow" in trace.name:
        time.sleep(60)
        trace.with_suffix(".slept").touch()
    return Reduced(task.trace, "", task.rank)


def raises(task: Task) -> Reduced:
    """A mistake of ours, or no memory."""
    raise MemoryError if "large" in task.trace else RuntimeError("a mistake")
