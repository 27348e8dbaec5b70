"""The allocator's history, dumped as a pickle that pytorch.org/memory_viz opens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MOST_ENTRIES = 100_000  # a few hundred bytes each; without a bound the history grows for ever


class SnapshotUnavailable(RuntimeError):
    """No history can be recorded or written here; the message says why."""


class AllocatorHistory:
    """Records every allocation on the GPU with its Python stack, between `start()` and `stop()`.

    `stacks="all"` would add the C++ frames: dumping those took 461 s where Python's took 4.
    """

    def __init__(self, *, most_entries: int = MOST_ENTRIES) -> None:
        self._most_entries = most_entries
        self._started = False  # by us
        self.running = False

    def start(self) -> None:
        """Begin to record.

        Raises:
            SnapshotUnavailable: this machine or this torch has no such history.
        """
        if not torch.cuda.is_available():
            raise SnapshotUnavailable(
                "the memory snapshot is not available, because it is the history of torch's CUDA allocator "
                "and no CUDA or ROCm device is here"
            )
        self.running = True
        if _somebody_records():
            return  # the user's own history: we dump it, and leave it on
        try:
            torch.cuda.memory._record_memory_history(
                enabled="all", context="all", stacks="python", max_entries=self._most_entries
            )
        except Exception as error:
            self.running = False
            raise SnapshotUnavailable(f"the memory snapshot is not available, because torch said: {error}") from error
        self._started = True

    def dump(self, path: Path) -> None:
        """Write what there is.

        Raises:
            SnapshotUnavailable: it could not be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            dump: Any = torch.cuda.memory._dump_snapshot
            dump(str(part))
            part.replace(path)
        except Exception as error:
            raise SnapshotUnavailable(f"the memory snapshot was not written: {error}") from error

    def stop(self) -> None:
        """End recording; a second call does nothing."""
        self.running = False
        if self._started:
            self._started = False
            torch.cuda.memory._record_memory_history(enabled=None)


def _somebody_records() -> bool:
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(enabled()) if enabled is not None else False


def snapshot_name(prefix: str, *, clock: Callable[[], float] = time.time) -> str:
    """`"<prefix>_mem_20261121_143005.pickle"`, in local time."""
    return f"{prefix}_mem_{time.strftime('%Y%m%d_%H%M%S', time.localtime(clock()))}.pickle"
