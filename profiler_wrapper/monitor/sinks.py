"""Hands steps to where they are written, and lets nothing of that reach the training.

Each sink works in a thread of its own behind a bounded queue. The training waits a second in all for a slow one to
write its steps, and where it is hundreds late, a moment to let it catch up. One that raises, hangs or is far too late
is dropped, which is said once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import weakref
from collections.abc import Collection, Iterable
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, TypeAlias

from profiler_wrapper.errors import in_a_line, warn
from profiler_wrapper.monitor.records import GB, Interval, Row, RunStatistics, Session, StepRecord, times

WAIT_S = 1.0  # what the training waits in all for a sink to write its steps
CLOSING_S = 10.0  # what `close` takes at most
LATE = 500  # jobs: with so many, the training waits a moment for the sink to catch up
CATCHING_UP_S = 1.0  # that moment; a sink that does not catch up in it gets the next when its queue has run empty
QUEUE_LENGTH = 10_000  # jobs: one so late is dropped

_USUAL_WAIT_S = 0.001  # a wait that does not count

_Job: TypeAlias = "Session | tuple[StepRecord | None, Row | None] | RunStatistics | None"


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
    """

    def __init__(self, sinks: Iterable[Sink], session: Session) -> None:
        self.session = session  # what the sinks were opened with
        self.statistics = RunStatistics()  # of all steps so far
        self._interval = Interval(session.log_interval)
        self._pid = os.getpid()
        self._workers = [_Worker(sink, session) for sink in sinks]
        self._finish = weakref.finalize(self, _close, self._workers, self._interval, self.statistics, self._pid)

    def write(self, record: StepRecord, *, skip: Collection[str] = frozenset()) -> None:
        """One step, in the order of the loop; `skip`: names of sinks that do not get it.

        When this returns, what sinks with `waited_for` write is with the operating system, unless they were slow.
        """
        if not self._finish.alive or os.getpid() != self._pid:
            return
        self.statistics.add(record)
        row = self._interval.add(record)
        workers = [worker for worker in self._workers if worker.sink.name not in skip]
        for worker in workers:
            if worker.sink.every_step or row is not None:
                worker.hand_over((record if worker.sink.every_step else None, row))
        for worker in workers:
            worker.wait_for_step()
        _drop(self._workers)

    def close(self) -> None:
        """Lets all sinks finish, for a few seconds at most; a second call does nothing."""
        self._finish()


def _close(workers: list[_Worker], interval: Interval, statistics: RunStatistics, pid: int) -> None:
    if os.getpid() != pid:
        return
    until = time.monotonic() + CLOSING_S
    row = interval.rest()
    for worker in workers:
        if row is not None:
            worker.hand_over((None, row))
        worker.hand_over(statistics)
    for worker in workers:
        if not worker.is_done(until - time.monotonic()):
            worker.trouble = f"did not finish in {CLOSING_S:g} s"
    _drop(workers)
    workers.clear()


def _drop(workers: list[_Worker]) -> None:
    """Takes out those that failed, and says so."""
    for worker in tuple(workers):
        if worker.trouble is not None:
            workers.remove(worker)
            worker.hand_over(None)
            warn(f"the monitor goes on without {worker.sink.name}: it {worker.trouble}")


class _Worker:
    """A sink and its thread, which is a daemon: one of an executor would hold up the end of the process."""

    def __init__(self, sink: Sink, session: Session) -> None:
        self.sink = sink
        self.trouble: str | None = None  # why the sink is to be dropped, in words: its jobs are done no more
        self._wait_s = WAIT_S if sink.waited_for else 0.0
        self._may_catch_up = True
        # No `Queue`: the garbage collector may close the sinks while this very thread holds that queue's lock.
        self._jobs: SimpleQueue[tuple[_Job, Event]] = SimpleQueue()
        self._last_done: Event
        self.hand_over(session)
        self._thread = Thread(target=self._run, name=f"profiler_wrapper {sink.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # there may be no more threads
            self._fail(error)

    def hand_over(self, job: _Job) -> None:
        """Do it after the others; None: be done.

        A loop that does nothing but log is quicker than any sink: it waits for one that can catch up.
        """
        late = self._jobs.qsize()
        if late >= QUEUE_LENGTH:
            self.trouble = self.trouble or f"is {QUEUE_LENGTH} steps late"
        elif late >= LATE and self._may_catch_up:
            self._may_catch_up = self.is_done(CATCHING_UP_S)
        elif not late:
            self._may_catch_up = True
        self._last_done = Event()
        self._jobs.put((job, self._last_done))

    def wait_for_step(self) -> None:
        """Until what was handed over is written, where that matters and patience is left."""
        if self._wait_s > 0:
            before = time.monotonic()
            self.is_done(self._wait_s)
            self._wait_s -= max(0.0, time.monotonic() - before - _USUAL_WAIT_S)

    def is_done(self, wait_s: float) -> bool:
        """Whether all is done that was handed over, within so long; its own thread does not wait for itself."""
        is_over = self.trouble is not None or self._thread is current_thread()
        return is_over or self._last_done.wait(max(0.0, wait_s))

    def _run(self) -> None:
        job: _Job = (None, None)
        while job is not None and not isinstance(job, RunStatistics):
            job, done = self._jobs.get()
            try:
                if self.trouble is None:
                    self._do(job)
            except BaseException as error:
                self._fail(error)
            done.set()

    def _do(self, job: _Job) -> None:
        if isinstance(job, Session):
            self.sink.open(job)
        elif isinstance(job, RunStatistics):
            self.sink.flush()
            self.sink.close(job)
        elif job is not None:
            record, row = job
            if record is not None:
                self.sink.write(record)
            if row is not None:
                self.sink.write_row(row)
                self.sink.flush()

    def _fail(self, error: BaseException) -> None:
        self.trouble = f"raised {in_a_line(error)}"


# --- Rows to the console, to TensorBoard and to W&B ---


def tagged(row: Row) -> dict[str, float]:
    """What is known of a row, by the tags of TensorBoard and W&B: those of FlagScale's monitor, and `perf/`.

    GB are 2^30 bytes, times seconds.
    """
    record, step_time_s = row.record, row.step_time_s
    values = {
        "performance/tflops_per_gpu": row.tflops_per_gpu,
        "performance/tflops_total": row.tflops_total,
        "performance/samples_per_second": row.samples_per_s,
        "performance/tokens_per_second": row.tokens_per_s,
        "memory/current_gb": times(record.memory_bytes, 1 / GB),
        "memory/peak_gb": times(record.peak_memory_bytes, 1 / GB),
        "perf/mfu": row.mfu,
        "perf/mfu_percent": times(row.mfu, 100),
        "perf/hfu": row.hfu,
        "perf/step_time": step_time_s,
        "perf/steps_per_second": 1 / step_time_s if step_time_s else None,
        "perf/tokens_per_second": row.tokens_per_s,
        "perf/samples_per_second": row.samples_per_s,
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.learning_rate,
        "train/epoch": record.epoch,
        **{f"breakdown/{part}": time_s for part, time_s in (row.breakdown_s or {}).items()},
    }
    return {tag: value for tag, value in values.items() if value is not None}


class Console(Sink):
    """A line on stdout for each row."""

    name = "console"

    def write_row(self, row: Row) -> None:
        numbers = (
            (times(row.step_time_s, 1e3), "{:.1f} ms"),
            (row.tokens_per_s, "{:.0f} tokens/s"),
            (row.samples_per_s, "{:.1f} samples/s"),
            (row.tflops_per_gpu, "{:.2f} TFLOPS/GPU"),
            (times(row.mfu, 100), "MFU {:.1f} %"),
            (times(row.record.memory_bytes, 1 / GB), "{:.2f} GB"),
            (row.record.loss, "loss {:.4g}"),
        )
        known = (text.format(value) for value, text in numbers if value is not None)
        print("  ".join([f"step {row.record.step}", *known]), file=sys.stdout, flush=True)


class Tracker(Sink):
    """A sink that needs a package, which is imported when it is made: seconds of importing slow a training's steps."""

    def __init__(self, module: str) -> None:
        self._package: Any = None
        try:
            self._package = importlib.import_module(module)
        except Exception as error:  # a broken installation raises anything
            self._missing = error

    def open(self, session: Session) -> None:
        """Raises ImportError: there is no such package; the message says what to install: what the sink is called."""
        if self._package is None:
            raise ImportError(f"pip install {self.name} ({self._missing})") from self._missing


class TensorBoard(Tracker):
    """Scalars of each row, in an event file of their own."""

    name = "tensorboard"

    def __init__(self, directory: str) -> None:
        super().__init__("torch.utils.tensorboard")
        self._directory = directory
        self._writer: Any = None

    def open(self, session: Session) -> None:
        super().open(session)
        self._writer = self._package.SummaryWriter(self._directory)

    def write_row(self, row: Row) -> None:
        for tag, value in tagged(row).items():
            self._writer.add_scalar(tag, value, global_step=row.record.step, walltime=row.record.timestamp)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, statistics: RunStatistics) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Each row to the run that is active, else to one of its own, in the mode that `WANDB_MODE` or the settings tell.

    The step is that of the loop. If the active run has gone beyond it, the values go to the step that it is at.
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__("wandb")
        self._run: Any = None
        self._own = False

    def open(self, session: Session) -> None:
        super().open(session)
        if self._package.run is None:
            self._package.init(config=session.to_dict())
            self._own = True
        self._run = self._package.run

    def write_row(self, row: Row) -> None:
        values = tagged(row)
        if self._run.step > row.record.step:
            self._run.log(values, commit=False)
        else:
            self._run.log(values, step=row.record.step)

    def close(self, statistics: RunStatistics) -> None:
        if self._own:
            self._run.finish()
