"""The memory that a training uses: the accelerator's, or without one the process's."""

from __future__ import annotations

import contextlib
import os
import sys

from profiler_wrapper.live.device_events import Accelerator

ON_DEVICE = "allocated on the accelerator, as torch's allocator counts"
IN_PROCESS = "resident memory of the process"


class Memory:
    """Reads current and peak bytes; resets nothing."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._statm: int | None = None  # kept open, which makes reading it cheap
        self._page = 0
        self._peak: int | None = None

    @property
    def kind(self) -> str:
        """What is counted."""
        return IN_PROCESS if self._accelerator is None else ON_DEVICE

    def read(self) -> tuple[int | None, int | None]:
        """Bytes now, and the most since the process began or the user last reset it; None where not known."""
        if self._accelerator is not None:
            return self._accelerator.memory() if self._accelerator.ready() else (None, None)
        if not self._page:
            self._page = os.sysconf("SC_PAGE_SIZE")
            with contextlib.suppress(OSError):  # no such file on this system
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        current = int(os.pread(self._statm, 128, 0).split()[1]) * self._page if self._statm is not None else None
        known = [size for size in (current, _peak_resident_bytes(), self._peak) if size is not None]
        self._peak = max(known, default=None)  # the system's two counts are not of the same instant
        return current, self._peak

    def close(self) -> None:
        """Let go of the file."""
        statm, self._statm = self._statm, None
        if statm is not None:
            os.close(statm)


def _peak_resident_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not on this system
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
