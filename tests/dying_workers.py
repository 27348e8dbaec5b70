"""What workers of a pool do in tests: reduce a trace, or die of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from profiler_wrapper.analysis.ranks.reduce import Reduced, Task, reduce_trace


def dies_of_deadly(task: Task) -> Reduced:
    """A trace called deadly kills its worker, one called flaky does so once."""
    trace = Path(task.trace)
    died = trace.with_suffix(".died")
    if "deadly" in trace.name or ("flaky" in trace.name and not died.exists()):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return reduce_trace(task)
