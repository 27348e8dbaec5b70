"""Marks Python's collections of garbage in the trace: their pauses belong to nobody's layer, and may hold all ranks up.

torch.profiler tells of them only where it records stacks.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

import torch

from profiler_wrapper.capture.calls import keep_dynamo_off
from profiler_wrapper.recording.marks import GARBAGE

_Range = torch._C._profiler._RecordFunctionFast
_YOUNGEST = 0  # such collections are short, and there may be thousands of them a second


class GarbageMarks:
    """Marks each collection of the older generations, on the thread that has it, while installed."""

    def __init__(self) -> None:
        self._open: Any = None  # Python collects once at a time
        self._process = os.getpid()

    def install(self) -> None:
        """From now on. Again: nothing more."""
        if self._heard not in gc.callbacks:
            self._process = os.getpid()
            gc.callbacks.append(self._heard)

    def remove(self) -> None:
        """No longer; a second call does nothing."""
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)
        self._close()

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        """What Python calls; what it raises Python prints and goes on."""
        if phase != "start":
            self._close()
        elif info["generation"] > _YOUNGEST and os.getpid() == self._process:  # not in a fork, which records nothing
            self._open = _Range(GARBAGE)
            self._open.__enter__()

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with suppress(RuntimeError):  # it began on a thread that is not recorded
                opened.__exit__(None, None, None)


keep_dynamo_off(GarbageMarks._heard, and_below=True)
