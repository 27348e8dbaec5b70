"""Reading what a command is about: its path and peaks among the arguments, and a bar while a large trace is read."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler_wrapper.recording.json_stream import Progress
    from profiler_wrapper.result import ProfileResult

DELAY_S = 1.0  # what takes no longer needs no bar
_TRACE_SUFFIXES = (".gz", ".json", ".trace", ".pt")


def add_path(command: argparse.ArgumentParser) -> None:
    """The trace or run that the command is about."""
    command.add_argument("path", metavar="TRACE_OR_RUNDIR", help="a trace (.json, .json.gz), or the directory of a run")


def add_peaks(command: argparse.ArgumentParser) -> None:
    """What the device can do."""
    command.add_argument(
        "--peaks",
        metavar="VALUE",
        help="of the device: dense TFLOP/s (989), bfloat16=989,bandwidth=3350 (GB/s), or a file of `peaks --measure`",
    )


def add_rank(command: argparse.ArgumentParser) -> None:
    """Which rank of a run."""
    command.add_argument("--rank", type=int, metavar="R", help="of a run with several ranks (default: the first)")


def read_result(path: Path, *, peaks: str | None = None, rank: int | None = None) -> ProfileResult:
    """As `load`, with a bar on a terminal while it takes long."""
    from profiler_wrapper.result import load

    with reading_bar(f"reading {path.name}") as progress:
        return load(path, peaks=peaks, rank=rank, progress=progress)


def find_source(path: Path, *, peaks: str | None = None, rank: int | None = None) -> Path:
    """The file that `read_result` reads for `path`."""
    from profiler_wrapper.analysis.peaks import VARIABLE
    from profiler_wrapper.run_files import find_result

    return find_result(path, rank=rank, with_trace=bool(peaks or os.environ.get(VARIABLE)))


def trace_of(source: Path, result: ProfileResult) -> Path | None:
    """The trace of a result, which was read from it or from what was written beside it; None where it is gone."""
    from profiler_wrapper.recording.store import RESULT_FILE
    from profiler_wrapper.run_files import trace_beside

    return trace_beside(source.parent, result.run) if source.name == RESULT_FILE else source


def trace_href(source: Path, result: ProfileResult, page: Path) -> str | None:
    """The link from a page to the trace of its result."""
    from profiler_wrapper.run_files import href

    trace = trace_of(source, result)
    return None if trace is None else href(trace, page=page)


def trace_stem(path: Path) -> str:
    """`"runs/h100.pt.trace.json.gz"` -> `"h100"`."""
    trace = path.resolve()
    while trace.suffix in _TRACE_SUFFIXES:
        trace = trace.with_suffix("")
    return trace.name


@contextmanager
def reading_bar(what: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress | None]:
    """A bar on stderr for `load(progress=...)`, from the second second on; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(what, clock)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    """Shows how far the reading of one file after another has come, and that the analysis goes on after it."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._shows_from_s = clock() + DELAY_S
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes have been read."""
        doing = "analysing" if done >= total else self._what
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_description(doing)
        elif self._clock() >= self._shows_from_s:
            from tqdm import tqdm

            size: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            self._bar = tqdm(desc=doing, total=total, initial=done, leave=False, file=sys.stderr, **size)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
