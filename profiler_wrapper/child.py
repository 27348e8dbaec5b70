"""A process beside a training: what it may import, how it steps back and waits for its turn.

Imports next to nothing, so that what such a process imports after stepping back is in nobody's way.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_LONGEST_LIFE_S = 3600  # be its parent there or not
_LOWEST_PRIORITY = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_MOST_TRIES = 100


def import_places() -> list[str]:
    """Where another interpreter finds what this one imports, this package also if the working directory has changed."""
    ours = str(Path(__file__).resolve().parent.parent)
    return [*(place for place in sys.path if isinstance(place, str)), ours]  # Python imports from texts alone


def is_python(executable: str | None) -> bool:
    """An interpreter, and not a program that holds one: starting that once more could do anything."""
    return bool(executable) and Path(str(executable)).name.lower().startswith(("python", "pypy"))


def step_back() -> None:
    """Be in nobody's way, and not for ever."""
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):  # runs where nobody else wants to
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        _lower_session()
    with suppress(OSError):  # where memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if hasattr(signal, "alarm"):
        signal.alarm(_LONGEST_LIFE_S)


def _lower_session() -> None:
    """Linux may divide the processors among sessions first (autogroup), and then this one has a share of its own."""
    for _ in range(_MOST_TRIES):
        try:
            _AUTOGROUP.write_text(str(_LOWEST_PRIORITY), encoding="ascii")
        except BlockingIOError:  # other ranks' children do so at the same moment
            time.sleep(0.11)
        except OSError:  # not on this system
            return
        else:
            return


def take_turn() -> None:
    """Wait until no other process of this user has its turn on this machine; it ends with the process."""
    with suppress(ImportError, AttributeError, OSError):  # no such locks here, or no place for one: nobody waits
        import fcntl

        path = Path(tempfile.gettempdir(), f"profiler_wrapper-{os.getuid()}.lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
