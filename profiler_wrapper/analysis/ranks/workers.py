"""Processes that reduce traces, each a new program: nothing of the script that wants them runs a second time.

A process of `multiprocessing` that is spawned imports the script it was started from, and a training without
`if __name__ == "__main__":` around it would train again. What is started here knows nothing of that script: a function
comes in by its name, a task as plain data, and what came of it goes back.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any

from profiler_wrapper.analysis.ranks.reduce import Reduced, Task
from profiler_wrapper.low_priority import import_places

Reduce = Callable[[Task], Reduced]
DIES = "the process that reduced it was killed, twice: is there enough memory for it?"
_NO_MEMORY = "there is not enough memory for it"
_SERVE = f"from {__name__} import serve; serve()"
# A worker computes on one core: there is one for each.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_alone = threading.Lock()  # where this process has to do it, a trace at a time
_GONE = (EOFError, OSError, ValueError, pickle.UnpicklingError)  # what talking to a process that has ended raises


def reduce_in_workers(tasks: Sequence[Task], count: int, reduce: Reduce) -> Iterator[tuple[int, Reduced]]:
    """Each task's place and what became of it, as they end, by `count` processes.

    A process that dies is replaced, and its task done again: only a task that kills two has a failure.
    """
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers = [_Worker() for _ in range(count)]
    for worker in workers:
        idle.put(worker)

    def run(task: Task) -> Reduced:
        worker = idle.get()
        try:
            return worker.run(reduce, task)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(count, thread_name_prefix="profiler_wrapper")
    try:
        futures = {threads.submit(run, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    finally:  # also where somebody pressed Ctrl-C
        for worker in workers:
            worker.close()
        threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.let_go()


class _Worker:
    """One process at a time, from the first task on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._began = False  # it has said that it is there
        self._closed = False
        self._lock = threading.Lock()  # so that none is started once all are to end

    def run(self, reduce: Reduce, task: Task) -> Reduced:
        """What a process says of a task, or why none does; where none can be started, what this one says."""
        why = ""
        for _ in range(2):
            try:
                process = self._started()
            except OSError:
                with _alone:
                    return _reduced(reduce, task)
            if process is None:
                break
            try:
                return self._ask(process, reduce, task)
            except _GONE:
                code = self._end()
                why = DIES if self._began else f"the process that should reduce it ended with {code} before it began"
        return Reduced(task.trace, "", task.rank, failure=why or "nobody waits for it any more")

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The process; None once all are to end. Raises OSError: the system gives none."""
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                self._began = False
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"import sys; sys.path[:] = {import_places()!a}; {_SERVE}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **_ENVIRONMENT},
                )
            return self._process

    def _ask(self, process: subprocess.Popen[bytes], reduce: Reduce, task: Task) -> Reduced:
        assert process.stdin is not None and process.stdout is not None
        if not self._began:
            self._began = pickle.load(process.stdout) is True
        process.stdin.write(pickle.dumps((reduce, task)))
        process.stdin.flush()
        reduced: Reduced = pickle.load(process.stdout)
        return reduced

    def _end(self) -> int | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:  # `close` was quicker
            return None
        process.kill()
        with suppress(OSError):  # what it did not read cannot be written any more
            process.communicate()
        return process.wait()

    def close(self) -> None:
        """Ends the process, whatever it does."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def let_go(self) -> None:
        """After `close`, once nobody talks to the process."""
        self._end()


def serve() -> None:
    """What a worker does: reduces the traces it is told of, until nobody tells of another one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it, which ends this one
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    sys.stdout = sys.stderr
    _answer(out, True)
    while True:
        try:
            reduce, task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _answer(out, _reduced(reduce, task))


def _reduced(reduce: Reduce, task: Task) -> Reduced:
    try:
        return reduce(task)
    except MemoryError:
        return Reduced(task.trace, "", task.rank, failure=_NO_MEMORY)
    except Exception as error:
        return Reduced(task.trace, "", task.rank, failure=f"{type(error).__name__}: {error}")


def _answer(out: IO[bytes], value: Any) -> None:
    try:
        pickle.dump(value, out)
        out.flush()
    except BrokenPipeError:  # whoever asked has gone
        os._exit(0)
