"""The allocator's history, dumped as a pickle that `profiler-wrapper snapshot` reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from profiler_wrapper.trace.atomic import replacing

MOST_ENTRIES = 100_000  # a few hundred bytes each; without a bound the history grows for ever
MOST_FAILURES = 3  # snapshots of failed allocations: a search for the largest batch fails again and again


class SnapshotUnavailable(RuntimeError):
    """No history can be recorded or written here; the message says why."""


class AllocatorHistory:
    """Records every allocation on the GPU with its Python stack, between `start()` and `stop()`.

    `stacks="all"` would add the C++ frames: dumping those took 461 s where Python's took 4.

    Args:
        failure_path: where a snapshot goes when an allocation cannot be met. It is taken at that moment, before
            torch raises: afterwards the stack is unwound and what it held is free. Without a path none is taken.

    Attributes:
        failures: the snapshots of failed allocations that were written.
        problems: why others were not.
    """

    def __init__(self, *, failure_path: Callable[[], Path] | None = None) -> None:
        self._failure_path = failure_path
        self._started = False  # by us
        self._tries, self._dumping = 0, False
        self.running = False
        self.failures: list[Path] = []
        self.problems: list[str] = []

    def start(self) -> None:
        """Begin to record. Raises SnapshotUnavailable: this machine or this torch has no such history."""
        if not torch.cuda.is_available():
            raise SnapshotUnavailable(
                "the memory snapshot is not available, because it is the history of torch's CUDA allocator "
                "and no CUDA or ROCm device is here"
            )
        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if enabled is None or not enabled():  # else it is the user's own history: we dump it, and leave it on
            try:
                torch.cuda.memory._record_memory_history(
                    enabled="all", context="all", stacks="python", max_entries=MOST_ENTRIES
                )
            except Exception as error:
                message = f"the memory snapshot is not available, because torch said: {error}"
                raise SnapshotUnavailable(message) from error
            self._started = True
        self.running = True
        if self._failure_path is not None and _listen():
            _watching.append(self)

    def dump(self, path: Path) -> None:
        """Write what there is. Raises SnapshotUnavailable: it could not be written."""
        try:
            dump: Any = torch.cuda.memory._dump_snapshot
            with replacing(path) as beside:
                dump(str(beside))
        except Exception as error:
            raise SnapshotUnavailable(f"the memory snapshot was not written: {error}") from error

    def stop(self) -> None:
        """End recording; a second call does nothing."""
        self.running = False
        if self in _watching:
            _watching.remove(self)
        if self._started:
            self._started = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _allocation_failed(self) -> None:
        """What is raised here would be raised in the place of torch's own error."""
        if self._failure_path is None or self._dumping or self._tries >= MOST_FAILURES:
            return
        self._tries, self._dumping = self._tries + 1, True
        try:
            path = self._failure_path()
            self.dump(path)
            if path not in self.failures:
                self.failures.append(path)
        except Exception as error:
            self.problems.append(str(error))
        finally:
            self._dumping = False


_watching: list[AllocatorHistory] = []
_listening = False


def _listen() -> bool:
    """Hear of failed allocations; False where this torch does not tell.

    torch has a list of such observers and no way to take one away, so ours is put there once. Those of the user
    stay, and are called too.
    """
    global _listening
    if not _listening:
        with suppress(Exception):  # then there is a snapshot at the end only
            torch._C._cuda_attach_out_of_memory_observer(_observe)  # type: ignore[attr-defined]
            _listening = True
    return _listening


def _observe(device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """torch calls this when it has given up and holds no lock."""
    for history in list(_watching):
        history._allocation_failed()


def snapshot_name(prefix: str, *, what: str = "mem", clock: Callable[[], float] = time.time) -> str:
    """`"<prefix>_mem_20261121_143005.pickle"`, in local time; `what="oom"` for a failed allocation."""
    return f"{prefix}_{what}_{time.strftime('%Y%m%d_%H%M%S', time.localtime(clock()))}.pickle"
