"""Windows that child processes finish while the training goes on: one after the other, waited for at the exit."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable

from profiler_wrapper.notices import tell
from profiler_wrapper.window_child import Child

_EXIT_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.5  # whether the child that works now hurries


class Background:
    """Runs children, each on a thread that does nothing but wait for it.

    Args:
        done: is told of each child that has ended, on that thread.
    """

    def __init__(self, done: Callable[[Child], None]) -> None:
        self._done = done
        self._home = os.getpid()
        self._children: list[Child] = []  # that have not ended
        self._last: threading.Thread | None = None
        self._waits_at_exit = False

    @property
    def busy(self) -> tuple[Child, ...]:
        """The children that have not ended, in order."""
        return tuple(self._children) if self._home == os.getpid() else ()

    def run(self, child: Child) -> None:
        """Begin with `child` as soon as the one before it has ended."""
        if not self._waits_at_exit:
            self._waits_at_exit = True
            _at_exit(self._end)
        if not self._children:
            child.start()  # here, so that it is there whatever becomes of this process
        self._children.append(child)
        before = self._last
        thread = threading.Thread(target=self._run, args=(child, before), name="profiler_wrapper", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down, and nothing else goes on
            self._run(child, before)
        else:
            self._last = thread

    def _run(self, child: Child, before: threading.Thread | None) -> None:
        try:
            if before is not None:
                before.join()
            child.run()
            self._done(child)
        except Exception as error:
            tell(f"what became of a recorded window could not be told: {type(error).__name__}: {error}")
        finally:
            self._children.remove(child)

    def wait(self, patience_s: float) -> bool:
        """Until all have ended, but no longer; whether they have. They hurry meanwhile."""
        end = time.monotonic() + patience_s
        last = self._last
        while last is not None and last is not threading.current_thread() and (busy := self.busy):
            busy[0].hurry()
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            last.join(min(left_s, _LOOK_EVERY_S))
        return not self.busy

    def _end(self) -> None:
        try:
            whole = self.wait(_EXIT_PATIENCE_S)
        except KeyboardInterrupt:
            whole = not self.busy
        for child in self.busy if not whole else ():
            where = child.task.target or child.task.directory
            tell(
                f"process {child.process} still finishes a window; when it has ended, run.json in "
                f"{where.directory if where is not None else 'no directory'} says complete"
            )


def _at_exit(action: Callable[[], None]) -> None:
    """Processes that multiprocessing forks end without what `atexit` knows."""
    if multiprocessing.parent_process() is None:
        atexit.register(action)
    else:
        multiprocessing.util.Finalize(None, action, exitpriority=0)
