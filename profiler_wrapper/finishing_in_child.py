"""Analyses a recording in a child process, where this one has hardly any memory left.

A library that gets no memory may end the process (OpenBLAS does), and a training that came through must
not end so. A limit on the address space holds for each process alone, so a child has room.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.capture.growth import free_bytes_below_own_limit
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.notices import tell
from profiler_wrapper.out_of_memory import answer
from profiler_wrapper.recording.store import RunDirectory
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.result import as_result, attribute_trace, flops_of_trace, run_beside, trace_with_shapes

_ENOUGH_BYTES = 1 << 30
_PATIENCE_S = 300


def has_little_memory() -> bool:
    """Whether this process is close to a limit of its own."""
    free_bytes = free_bytes_below_own_limit()
    return free_bytes is not None and free_bytes < _ENOUGH_BYTES


def finish_in_child(directory: RunDirectory, trace: Path, reports: Iterable[str], failure: OutOfMemory | None) -> bool:
    """Have a child analyse `trace`, write `reports` into `directory`, and answer the failure that ended it.

    Returns:
        Whether it did.
    """
    task = {
        "directory": asdict(directory) | {"root": str(directory.root)},
        "trace": str(trace),
        "reports": sorted(reports),
        "failure": None if failure is None else asdict(failure),
    }
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError, MemoryError) as error:
        tell(f"what was recorded could not be analysed: {type(error).__name__}: {error}")
        return False
    sys.stderr.write(done.stderr)
    sys.stderr.flush()
    return done.returncode == 0


def _main(task: Mapping[str, Any]) -> None:
    trace = Path(task["trace"])
    run = run_beside(trace) or {}
    found = attribute_trace(trace, run=run)
    full = trace_with_shapes(trace, run)
    result = as_result(tables(found, run=run, flops=None if full is None else flops_of_trace(full, run=run)))
    directory = RunDirectory(**task["directory"] | {"root": Path(task["directory"]["root"])})
    if task["failure"] is not None:
        answer(OutOfMemory(**task["failure"]), result, found=found, trace=trace, directory=directory.directory)
    for name, report in REPORTS.items():
        if name in task["reports"] and report.applies(result):
            for file in report.files:
                directory.write_with(file.name, partial(file.write, result))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
