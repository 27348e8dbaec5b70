"""From what was recorded to what is on disk: analyse a window, write its files, print its table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiler_wrapper.capture.recorder import RecordedTrace, Window
from profiler_wrapper.capture.runinfo import RunInfo
from profiler_wrapper.capture.session import safe_name
from profiler_wrapper.capture.snapshot import AllocatorHistory, SnapshotUnavailable, snapshot_name
from profiler_wrapper.capture.steps import describe_steps
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.notices import tell
from profiler_wrapper.options import Options
from profiler_wrapper.result import ProfileResult, analyse_trace

Describe = Callable[[], Sequence[dict[str, Any]]]


class Finisher:
    """Writes one process's part of a run, window by window."""

    def __init__(self, options: Options, info: RunInfo, describe: Describe) -> None:
        self.results: list[ProfileResult] = []
        self._options, self._info, self._describe = options, info, describe
        self._followed: dict[str, None] = {}  # names of blocks, in the order they came
        self._history: AllocatorHistory | None = None
        self._parts: list[Path] = []

    @property
    def rank(self) -> int:
        return self._info.rank

    def follow(self, name: str) -> None:
        """A named block was run: its time becomes a series."""
        self._followed[safe_name(name)] = None
