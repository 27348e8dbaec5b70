"""Hands steps to where they are written, and lets nothing of that reach the training.

Each sink works in a thread of its own behind a bounded queue. A sink that raises is dropped; one that hangs is left
behind; either is said once.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Collection, Iterable
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import TypeAlias

from profiler_wrapper.live.records import StepRecord
from profiler_wrapper.live.rows import Interval, Row
from profiler_wrapper.live.session import Session
from profiler_wrapper.live.statistics import RunStatistics
from profiler_wrapper.notices import tell

PATIENCE_S = 1.0  # what the training waits in all for sinks that are slow ...
PATIENCE_SHARE = 0.01  # ... and this share of the time since
HANGS_AFTER_S = 120.0  # a sink that is so long in one call is given up; a client may take 90 s to find no network
CLOSING_S = 10.0  # what `close` takes at most
LATE = 500  # jobs: more, and a sink gets a moment to catch up, in which the training waits
CATCHING_UP_S = 1.0  # that moment; who does not make use of it gets no other
QUEUE_LENGTH = 10_000  # jobs that a sink may be late

_USUAL_WAIT_S = 0.001  # a wait that takes no patience

_Job: TypeAlias = "tuple[StepRecord | None, Row | None] | RunStatistics"


class Sink:
    """Where steps go. All methods are called in one thread, which is not the training's, `open` first.

    They may raise: then the sink is dropped with a warning, and nothing more is called.

    Attributes:
        name: for warnings, and for `skip`.
        every_step: `write` is called, with every step; else there are only rows.
        waited_for: `Sinks.write` returns when this sink has written, so that a process killed later loses nothing.
    """

    name: str = "sink"
    every_step: bool = False
    waited_for: bool = False

    def open(self, session: Session) -> None:
        """Called once, before the first step."""

    def write(self, record: StepRecord) -> None:
        """One step."""

    def write_row(self, row: Row) -> None:
        """What is to be shown of the steps since the last row; after `write` of the step that ends it."""

    def flush(self) -> None:
        """Called after each row, and before `close`."""

    def close(self, statistics: RunStatistics) -> None:
        """Called once, after the last step."""


class Sinks:
    """All sinks of one run. Nothing here raises into the training.

    In a forked child (a worker of a data loader) all methods do nothing. What is still open when the process ends, or
    the object goes, is closed then.

    Attributes:
        session: what the sinks were opened with.
        statistics: of all steps so far.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        session: Session,
        *,
        patience_s: float = PATIENCE_S,
        hangs_after_s: float = HANGS_AFTER_S,
        closing_s: float = CLOSING_S,
    ) -> None:
        self.session = session
        self.statistics = RunStatistics()
        self._interval = Interval(session.log_interval)
        self._patience = _Patience(patience_s)
        self._hangs_after_s = hangs_after_s
        self._pid = os.getpid()
        self._workers = [_Worker(sink, session) for sink in sinks]
        self._finish = weakref.finalize(
            self, _close, self._workers, self._interval, self.statistics, self._pid, hangs_after_s, closing_s
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sinks that have not been dropped."""
        return tuple(worker.sink.name for worker in self._workers)

    def write(self, record: StepRecord, *, skip: Collection[str] = frozenset()) -> None:
        """One step, in the order of the loop.

        When this returns, what sinks with `waited_for` write is with the operating system, unless they were slow.

        Args:
            skip: names of sinks that do not get it.
        """
        if not self._finish.alive or os.getpid() != self._pid:
            return
        self.statistics.add(record)
        row = self._interval.add(record)
        waited_for: list[Lock] = []
        for worker in tuple(self._workers):
            sink = worker.sink
            if sink.name in skip or not (sink.every_step or row is not None):
                continue
            done = worker.hand_over((record if sink.every_step else None, row))
            worker.catch_up(done)
            if sink.waited_for:
                waited_for.append(done)
        for done in waited_for:
            self._patience.wait(done)
        _drop(self._workers, self._hangs_after_s)

    def close(self) -> None:
        """Lets all sinks finish, for a few seconds at most; a second call does nothing."""
        self._finish()


def _close(
    workers: list[_Worker],
    interval: Interval,
    statistics: RunStatistics,
    pid: int,
    hangs_after_s: float,
    closing_s: float,
) -> None:
    if os.getpid() != pid:
        return
    until = time.monotonic() + closing_s
    _drop(workers, hangs_after_s)
    row = interval.rest()
    if row is not None:
        for worker in workers:
            worker.hand_over((None, row))
    for worker, closed in [(worker, worker.hand_over(statistics)) for worker in workers]:
        if not worker.is_current() and not closed.acquire(timeout=max(0.0, until - time.monotonic())):
            worker.trouble = worker.trouble or f"did not finish in {closing_s:g} s"
    _drop(workers, hangs_after_s)
    workers.clear()


def _drop(workers: list[_Worker], hangs_after_s: float) -> None:
    """Takes out those that failed, and says so."""
    for worker in tuple(workers):
        trouble = worker.trouble or worker.hanging(hangs_after_s)
        if trouble is not None:
            workers.remove(worker)
            worker.abandon()
            tell(f"the monitor goes on without {worker.sink.name}: it {trouble}")


class _Patience:
    """How long the training still waits for sinks that are slow: bounded in all, and then a share of its time."""

    def __init__(self, most_s: float) -> None:
        self._most_s = self._left_s = most_s
        self._since = time.monotonic()

    def wait(self, done: Lock) -> None:
        if done.acquire(blocking=False):
            return
        before = time.monotonic()
        left_s = min(self._most_s, self._left_s + PATIENCE_SHARE * (before - self._since))
        if left_s > _USUAL_WAIT_S:
            done.acquire(timeout=left_s)
        self._since = time.monotonic()
        self._left_s = left_s - max(0.0, self._since - before - _USUAL_WAIT_S)


class _Worker:
    """A sink and its thread.

    Attributes:
        trouble: why the sink is to be dropped, in words.
    """

    def __init__(self, sink: Sink, session: Session) -> None:
        self.sink = sink
        self.trouble: str | None = None
        self._queue: SimpleQueue[tuple[_Job, Lock] | None] = SimpleQueue()
        self._busy_since: float | None = time.monotonic()
        self._abandoned = False
        self._may_catch_up = True
        self._thread = Thread(target=self._run, args=(session,), name=f"profiler_wrapper {sink.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # there may be no more threads
            self._fail(error)

    def hand_over(self, job: _Job) -> Lock:
        """Gives a lock that can be had when the job is done, or will not be."""
        done = Lock()
        if self._queue.qsize() >= QUEUE_LENGTH:
            self.trouble = self.trouble or f"is {QUEUE_LENGTH} steps late"
        if self._has_failed():
            return done
        done.acquire()
        self._queue.put((job, done))
        if self._has_failed():  # meanwhile, and may not see this one
            _free(done)
        return done

    def catch_up(self, done: Lock) -> None:
        """Waits for a job that was handed over, if there are many before it.

        A loop that does nothing but log is quicker than any sink, and would leave all of them behind.
        """
        if self._may_catch_up and self._queue.qsize() >= LATE:
            self._may_catch_up = done.acquire(timeout=CATCHING_UP_S)
            if self._may_catch_up:
                done.release()

    def _has_failed(self) -> bool:
        return self.trouble is not None

    def hanging(self, after_s: float) -> str | None:
        """In words, if one call takes that long."""
        since = self._busy_since
        if since is None or time.monotonic() - since < after_s:
            return None
        return f"did not answer for {after_s:g} s"

    def abandon(self) -> None:
        """Ends the thread as soon as its sink returns."""
        self._abandoned = True
        self._queue.put(None)

    def is_current(self) -> bool:
        """Whether this is called in the sink's own thread, where waiting for it would be in vain."""
        return self._thread is current_thread()

    def _run(self, session: Session) -> None:
        try:
            self.sink.open(session)
            while self._next():
                pass
        except BaseException as error:
            self._fail(error)
        self._busy_since = None
        while not self._queue.empty():  # nobody waits for what will not be done
            taken = self._queue.get()
            if taken is not None:
                _free(taken[1])

    def _next(self) -> bool:
        """One job; whether more may follow."""
        self._busy_since = None
        taken = self._queue.get()
        if taken is None or self._abandoned:
            return False
        self._busy_since = time.monotonic()
        job, done = taken
        try:
            self._do(job)
        except BaseException as error:  # known before anybody who waits goes on
            self._fail(error)
            return False
        finally:
            _free(done)
        return not isinstance(job, RunStatistics)

    def _do(self, job: _Job) -> None:
        if isinstance(job, RunStatistics):
            self.sink.flush()
            self.sink.close(job)
            return
        record, row = job
        if record is not None:
            self.sink.write(record)
        if row is not None:
            self.sink.write_row(row)
            self.sink.flush()

    def _fail(self, error: BaseException) -> None:
        self.trouble = f"raised {type(error).__name__}: {error}"


def _free(lock: Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it is free
        lock.release()
