"""Whether the process, or its trace, has grown too much while recording."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from profiler_wrapper.units import file_size

MOST_GROWTH_BYTES = 4 << 30
SHARE_OF_FREE = 0.25
# So many calls of layers, and what grew are torch's events: when it stops they take up to eight times as much (measured
# on torch 2.13: 24 layers that generate 190 tokens, 0.5 GiB while recording, 4.2 when stopped).
MANY_CALLS = 10_000
CALLS_WRITTEN_OUT = 2_500  # together, where they can be: a quarter of a gigabyte when torch stops
GROWS_AT_STOP = 8
LOOK_EVERY_S = 0.2
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_GROUP_FILES = {  # by version: the limit, what is used, and what the names in memory.stat begin with
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_NO_LIMIT_BYTES = 1 << 60  # version 1 says "none" by a number near 2^63


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return peak_resident_bytes()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """The most it has been, None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes() -> int | None:
    """Memory that can still be had: of the machine, the container, or below the process's own limit."""
    sizes = (_machine_free_bytes(), control_group_free_bytes(), free_bytes_below_own_limit())
    return min((size for size in sizes if size is not None), default=None)


def free_bytes_below_own_limit() -> int | None:
    """What a limit on the address space of this process (`ulimit -v`) leaves; None without one."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError, ValueError):  # not on this system
        return None
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _machine_free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError):
        return None


def control_group_free_bytes() -> int | None:
    """What the limits on this process's control group and those around it leave; None without one.

    Of version 1 or 2. Cached file pages count as free: the system gives them up before it ends a process.
    """
    sizes = (_free_bytes_of_group(group, version) for group, version in _control_groups())
    return min((size for size in sizes if size is not None), default=None)


def _control_groups() -> Iterator[tuple[Path, int]]:
    """The directories of this process's groups for memory, innermost first, and which version they are of."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # not on this system
        return
    for line in lines:
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        root = _GROUPS / "memory" if controllers else _GROUPS
        place = root / group.lstrip("/")
        while place != root:
            yield place, version
            place = place.parent
        yield root, version  # in a container this is its own group, whatever name it has outside


def _free_bytes_of_group(group: Path, version: int) -> int | None:
    limit_file, used_file, prefix = _GROUP_FILES[version]
    try:
        limit = int((group / limit_file).read_text(encoding="ascii"))
        used = int((group / used_file).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # no limit reads "max", and a group that is not there has none
        return None
    if limit >= _NO_LIMIT_BYTES:
        return None
    cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return max(0, limit - max(0, used - cached))


def too_large(trace: Path) -> str | None:
    """Why a trace that grows may grow no more, or None."""
    size = trace.stat().st_size
    bound = min(MOST_GROWTH_BYTES, int((shutil.disk_usage(trace.parent).free + size) * SHARE_OF_FREE))
    if size <= bound:
        return None
    return f"its trace has {file_size(size)} (the bound is {file_size(bound)}: 4 GiB, or a quarter of the free disk)"


class GrowthBound:
    """Looks now and then how much the process has grown since `restart()`; `calls`: of layers, recorded so far."""

    def __init__(
        self,
        *,
        calls: Callable[[], int] = int,
        resident: Callable[[], int | None] = resident_bytes,
        free: Callable[[], int | None] = free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self._resident, self._free, self._clock = calls, resident, free, clock
        self.bound_bytes = MOST_GROWTH_BYTES
        self._start_calls = 0
        self._start_bytes: int | None = None
        self._next_look_s = 0.0

    def restart(self) -> None:
        """Count growth from now on."""
        free = self._free()
        self.bound_bytes = min(MOST_GROWTH_BYTES, MOST_GROWTH_BYTES if free is None else int(free * SHARE_OF_FREE))
        self._start_bytes, self._start_calls = self._resident(), self._calls()
        self._next_look_s = self._clock() + LOOK_EVERY_S

    @property
    def recorded_calls(self) -> int:
        """Calls of layers since then, which torch holds."""
        return self._calls() - self._start_calls

    def exceeded(self) -> str | None:
        """Why recording has to end, or None. Looks at most every 0.2 s."""
        now_s = self._clock()
        if now_s < self._next_look_s or self._start_bytes is None:
            return None
        self._next_look_s = now_s + LOOK_EVERY_S
        resident = self._resident()
        bound, why = self.bound_bytes, "4 GiB, or a quarter of the free memory"
        if self.recorded_calls > MANY_CALLS:
            bound, why = bound // GROWS_AT_STOP, f"torch takes {GROWS_AT_STOP} times as much when it stops"
        if resident is None or (grown := resident - self._start_bytes) <= bound:
            return None
        return f"the process grew by {file_size(grown)} while recording (the bound is {file_size(bound)}: {why})"
