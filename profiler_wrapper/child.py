"""Starts child processes: new Python programs that import only this package, beside a training at a low priority.

Imports next to nothing: what a child imports after it has lowered its priority is in nobody's way.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_wrapper.errors import shown

if TYPE_CHECKING:
    import subprocess

_LONGEST_LIFE_S = 600  # its turn come or not, its parent there or not
_NICENESS = 10  # at 19, or with SCHED_IDLE, a process on a busy machine gets hardly any time and does not end
_AUTOGROUP = Path("/proc/self/autogroup")
_MOST_TRIES = 100


# A child computes on one core.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BESIDE_TRAINING = f"from {__name__} import lower_priority, wait_for_turn; lower_priority(); wait_for_turn(); "


def start_child(
    program: str,
    *arguments: str,
    beside_training: bool = False,
    environment: Mapping[str, str] | None = None,
    **of_popen: Any,
) -> subprocess.Popen[Any]:
    """A new Python process that runs `program` and finds the packages that this one finds.

    Nothing of the script that this process runs is run again, as `multiprocessing` would: a training without
    `if __name__ == "__main__":` around it would train again.

    Args:
        program: text of the program; `arguments` are `sys.argv[1:]` there.
        beside_training: in a session of its own, at a low priority, one at a time on a machine, for at most 10 minutes.
        environment: variables besides those of this process.
        of_popen: of `subprocess.Popen`.

    Raises:
        OSError: no process can be started.
    """
    import subprocess

    # A program that holds an interpreter is none: started once more it could do anything.
    if not Path(sys.executable or "").name.lower().startswith(("python", "pypy")):
        raise OSError(f"{shown(sys.executable)} is no Python interpreter")
    # Also where the working directory has changed; Python imports from texts alone.
    places = [*(place for place in sys.path if isinstance(place, str)), str(Path(__file__).resolve().parent.parent)]
    before = _BESIDE_TRAINING if beside_training else ""
    if beside_training:
        of_popen["start_new_session"] = True  # Ctrl-C is not for it
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {places!a}; {before}{program}", *arguments],
        env={**os.environ, **_ENVIRONMENT, **(environment or {})},
        **of_popen,
    )


def lower_priority() -> None:
    """Lower this process's priority, and end it after 10 minutes."""
    if hasattr(signal, "alarm"):
        signal.alarm(_LONGEST_LIFE_S)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    if hasattr(os, "SCHED_BATCH"):  # interrupts nobody who runs
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        _lower_session_priority()
    with suppress(OSError):  # where memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _lower_session_priority() -> None:
    """Linux may divide the processors among sessions first (autogroup), and then this one has a share of its own."""
    for _ in range(_MOST_TRIES):
        try:
            _AUTOGROUP.write_text(str(_NICENESS), encoding="ascii")
            return
        except BlockingIOError:  # other ranks' children do so at the same moment
            time.sleep(0.11)
        except OSError:  # not on this system
            return


def raise_priority(process: int) -> None:
    """Somebody waits for a child beside a training: give its session a whole share again, where there are such."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text("0", encoding="ascii")


def wait_for_turn() -> None:
    """Wait until no other process of this user has its turn on this machine; it ends with the process."""
    with suppress(ImportError, AttributeError, OSError):  # no such locks here, or no place for one: nobody waits
        import fcntl

        path = Path(tempfile.gettempdir(), f"profiler_wrapper-{os.getuid()}.lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
