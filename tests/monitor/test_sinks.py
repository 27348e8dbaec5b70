"""A sink that raises, hangs or cannot write: the training goes on, and it is said once."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monitor_runs import json_lines, only, open_sinks, record, strict_json
from profiler_wrapper.errors import in_a_line
from profiler_wrapper.monitor import sinks as sinks_module
from profiler_wrapper.monitor.records import Row, RunStatistics, Session, StepRecord
from profiler_wrapper.monitor.sinks import Sink, Sinks
from profiler_wrapper.timer.line_file import LineFile
from programs import TESTS, run_script, warned


class Kept(Sink):
    """Keeps what it is given."""

    name = "kept"
    every_step = True
    waited_for = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self, session: Session) -> None:
        self.calls.append("open")

    def write(self, record: StepRecord) -> None:
        self.calls.append(f"write {record.step}")

    def write_row(self, row: Row) -> None:
        self.calls.append(f"row {row.record.step}")

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self, statistics: RunStatistics) -> None:
        self.calls.append(f"close {statistics.steps}")


class Slow(Kept):
    """Takes so long for each step, by the clock of `SimulatedTime`."""

    def __init__(self, write_s: float, *, waited_for: bool = False) -> None:
        super().__init__()
        self.write_s, self.waited_for = write_s, waited_for
        self.may_write = threading.Semaphore(0)

    def write(self, record: StepRecord) -> None:
        self.may_write.acquire()
        super().write(record)


class Boom(BaseException):
    """What nobody catches."""


class Raising(Kept):
    """Raises in the method of that name."""

    name = "raising"

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self._where, self._error = where, error

    def __getattribute__(self, name: str) -> Any:
        if name in ("open", "write", "write_row", "flush", "close") and name == self._where:
            return self._raise
        return super().__getattribute__(name)

    def _raise(self, *_: object) -> None:
        raise self._error


class Hanging(Sink):
    """Waits in `write_row` until it is let go."""

    name = "hanging"

    def __init__(self, *, waited_for: bool = False) -> None:
        self.waited_for = waited_for
        self.let_go = threading.Event()

    def write_row(self, row: Row) -> None:
        self.let_go.wait()


class SimulatedTime:
    """What the training waits for sinks takes time of this clock: `Slow` ones theirs, `Hanging` ones all that they get.

    Attributes:
        waited_s: by the training, in all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.waited_s = 100.0, 0.0
        self._due: list[JobDone] = []  # of slow sinks, in their order
        hand_over = sinks_module._Worker.hand_over

        def handed_over(worker: Any, job: Any) -> None:
            hand_over(worker, job)
            self._plan(worker._last_done, worker.sink, job)

        monkeypatch.setattr(sinks_module._Worker, "hand_over", handed_over)
        monkeypatch.setattr(sinks_module, "Event", lambda: JobDone(self))
        monkeypatch.setattr(sinks_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def _plan(self, done: JobDone, sink: Sink, job: Any) -> None:
        done.is_never = isinstance(sink, Hanging)
        if isinstance(sink, Slow):
            done.sink, done.writes = sink, isinstance(job, tuple) and job[0] is not None
            before_s = max((other.at_s for other in self._due if other.sink is sink), default=0.0)
            done.at_s = max(before_s, self.now_s) + sink.write_s * done.writes
            self._due.append(done)

    def wait(self, done: JobDone, most_s: float) -> bool:
        begin_s = self.now_s
        self.now_s = begin_s + most_s if done.is_never else max(begin_s, min(done.at_s, begin_s + most_s))
        self.waited_s += self.now_s - begin_s
        for other in [other for other in self._due if other.at_s <= self.now_s]:
            self._due.remove(other)
            if other.writes:
                other.sink.may_write.release()
            assert other.really_wait()
        return not done.is_never and done.at_s <= self.now_s and done.really_wait()


class JobDone(threading.Event):
    """A sink has done a job: at once, at a time of the clock, or never."""

    sink: Any = None
    at_s, writes, is_never = 0.0, False, False

    def __init__(self, simulated: SimulatedTime) -> None:
        super().__init__()
        self._simulated = simulated

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        return self._simulated.wait(self, timeout)

    def really_wait(self) -> bool:
        return super().wait(100)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    return SimulatedTime(monkeypatch)


@pytest.fixture
def hanging() -> Iterator[Callable[..., Hanging]]:
    made: list[Hanging] = []

    def make(**options: bool) -> Hanging:
        made.append(Hanging(**options))
        return made[-1]

    yield make
    for sink in made:
        sink.let_go.set()


def write_and_close(sinks: Sinks, first: int = 1, last: int = 5) -> None:
    write_steps(sinks, first, last)
    sinks.close()


def write_steps(sinks: Sinks, first: int = 1, last: int = 5) -> None:
    for step in range(first, last + 1):
        sinks.write(record(step))


def test_a_sink_gets_every_step_in_order_and_rows_after_their_last_step() -> None:
    kept = Kept()
    sinks = Sinks([kept], Session(log_interval=2))
    write_steps(sinks)
    sinks.close()
    sinks.close()
    sinks.write(record(6))
    assert kept.calls == [
        *("open", "write 1", "write 2", "row 2", "flush", "write 3", "write 4", "row 4", "flush", "write 5"),
        *("row 5", "flush", "flush", "close 5"),
    ]  # fmt: skip


def test_a_step_is_written_when_write_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "WAIT_S", 100)  # the machine may be busy
    kept = Kept()
    sinks = Sinks([kept], Session())
    for step in range(1, 200):
        sinks.write(record(step))
        assert f"write {step}" in kept.calls[-3:]
    sinks.close()


def test_a_step_can_be_kept_from_a_sink() -> None:
    kept = Kept()
    sinks = Sinks([kept], Session())
    sinks.write(record(1), skip={"kept"})
    sinks.write(record(2))
    sinks.close()
    assert "write 1" not in kept.calls
    assert "close 2" in kept.calls


@pytest.mark.parametrize("error", [ValueError("no"), Boom("no"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["open", "write", "write_row", "flush", "close"])
def test_a_sink_that_raises_is_dropped_with_one_warning(where: str, error: BaseException) -> None:
    kept, raising = Kept(), Raising(where, error)

    def run() -> None:
        sinks = Sinks([raising, kept], Session(log_interval=2))
        write_steps(sinks, last=9)
        sinks.close()

    (message,) = warned(run)
    assert message == f"the monitor goes on without raising: it raised {in_a_line(error)}"
    assert kept.calls.count("close 9") == 1
    assert sum(call.startswith("write") for call in kept.calls) == 9


def test_warnings_as_errors_do_not_end_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks = Sinks([Raising("write", ValueError("no"))], Session())
        write_steps(sinks)
        sinks.close()
    assert "goes on without raising" in capsys.readouterr().err


def test_a_sink_that_hangs_is_waited_for_once_and_said_once(
    hanging: Callable[..., Hanging], simulated: SimulatedTime
) -> None:
    kept = Kept()

    def run() -> None:
        sinks = Sinks([hanging(waited_for=True), kept], Session(log_interval=1))
        for step in range(1, 50):
            sinks.write(record(step))
        sinks.close()

    (message,) = warned(run)
    of_steps_s = sinks_module.WAIT_S + 48 * sinks_module._USUAL_WAIT_S
    assert simulated.waited_s == pytest.approx(of_steps_s + sinks_module.CLOSING_S)
    assert message == "the monitor goes on without hanging: it did not finish in 10 s"
    assert "close 49" in kept.calls


def test_a_sink_that_is_slow_with_every_step_is_waited_for_a_bounded_time_in_all(simulated: SimulatedTime) -> None:
    sinks = Sinks([Slow(0.4, waited_for=True)], Session())
    write_steps(sinks, last=15)
    assert simulated.waited_s == pytest.approx(sinks_module.WAIT_S + 15 * sinks_module._USUAL_WAIT_S, abs=0.01)
    assert warned(sinks.close) == []
    assert simulated.waited_s == pytest.approx(15 * 0.4)


def test_a_sink_that_is_late_with_every_row_is_waited_for_a_bounded_time_in_all(
    simulated: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks_module, "QUEUE_LENGTH", 30)
    monkeypatch.setattr(sinks_module, "LATE", 10)
    slow = Slow(0.5)
    sinks = Sinks([slow], Session())
    messages = warned(lambda: write_steps(sinks, last=60))
    assert simulated.waited_s == sinks_module.CATCHING_UP_S
    assert messages == ["the monitor goes on without kept: it is 30 steps late"]
    sinks.close()
    slow.may_write.release(60)  # its thread ends


def test_a_sink_that_is_too_late_is_dropped_so_that_its_queue_is_bounded(
    hanging: Callable[..., Hanging], simulated: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks_module, "QUEUE_LENGTH", 20)
    monkeypatch.setattr(sinks_module, "LATE", 10)
    sinks = Sinks([hanging()], Session(log_interval=1))
    messages = warned(lambda: write_steps(sinks, last=100))
    assert messages == ["the monitor goes on without hanging: it is 20 steps late"]
    assert simulated.waited_s == sinks_module.CATCHING_UP_S
    sinks.close()


def test_a_sink_that_is_late_but_works_gets_time_to_catch_up(
    simulated: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks_module, "LATE", 10)
    monkeypatch.setattr(sinks_module, "QUEUE_LENGTH", 20)

    slow = Slow(0.05)
    sinks = Sinks([slow], Session())
    assert warned(lambda: write_and_close(sinks, last=100)) == []
    assert sum(call.startswith("write") for call in slow.calls) == 100
    assert simulated.waited_s == pytest.approx(100 * 0.05)


def test_a_full_disk_drops_the_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LineFile, lines: bytes) -> None:
        if b'"iteration":3,' in lines:
            plain(self, lines[:20])  # what still fitted
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(self, lines)

    plain = LineFile.append
    monkeypatch.setattr(LineFile, "append", full)
    sinks = open_sinks(tmp_path, interval=2)
    messages = warned(lambda: write_and_close(sinks))
    assert messages == ["the monitor goes on without json: it raised OSError: [Errno 28] No space left on device"]
    assert len(only(tmp_path, "perf_metrics_*.log").read_text().splitlines()) == 5 + 3


def test_a_directory_that_cannot_be_made_is_a_warning_for_each_sink(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sinks = open_sinks(tmp_path / "file" / "logs")
    messages = warned(lambda: write_and_close(sinks))
    assert len(messages) == 3
    assert {message.split(":")[0].rpartition(" ")[2] for message in messages} == {"text", "realtime", "json"}


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_must_not_be_written_is_a_warning_for_each_sink(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    sinks = open_sinks(tmp_path)
    assert len(warned(lambda: write_and_close(sinks))) == 3
    tmp_path.chmod(0o700)


def test_a_directory_that_is_removed_is_noticed_and_not_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    sinks = open_sinks(directory, interval=1)
    sinks.write(record(1))
    deadline = time.monotonic() + 100
    while len(list(directory.glob("*"))) < 3 and time.monotonic() < deadline:  # not all are waited for
        time.sleep(0.01)
    shutil.rmtree(directory)
    messages = warned(lambda: write_and_close(sinks, first=2))
    assert len(messages) == 3
    assert all("was removed" in message for message in messages)
    assert not directory.exists()


def test_a_thread_that_cannot_be_started_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sinks = Sinks([Kept()], Session())
    messages = warned(lambda: write_and_close(sinks))
    assert messages == ["the monitor goes on without kept: it raised RuntimeError: can't start new thread"]


def test_sinks_that_are_forgotten_are_closed() -> None:
    kept = Kept()
    sinks = Sinks([kept], Session())
    sinks.write(record(1))
    del sinks
    gc.collect()
    assert kept.calls[-1] == "close 1"
    deadline = time.monotonic() + 100
    while any("kept" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any("kept" in thread.name for thread in threading.enumerate())


def test_many_steps_take_no_more_memory_than_few(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, interval=5, training_log=tmp_path / "training_log.json")
    write_steps(sinks, last=200)
    tracemalloc.start()
    write_steps(sinks, first=201, last=400)
    assert all(worker.is_done(100) for worker in sinks._workers)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    write_steps(sinks, first=401, last=1400)
    assert all(worker.is_done(100) for worker in sinks._workers)  # what waits in a queue is not kept
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sinks.close()
    assert after - before < 100_000  # 1,000 steps alone would be over 300 kB
    assert len(strict_json(tmp_path / "training_log.json")["step_logs"]) == 1400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_worker_writes_nothing_and_does_not_wait(tmp_path: Path) -> None:
    run_script(
        """
        import os, warnings
        from pathlib import Path
        from monitor_runs import open_sinks, record
        from profiler_wrapper.monitor.sinks import _Worker
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads, as a data loader's is
        sinks = open_sinks(Path(sys.argv[1]), interval=2, training_log=Path(sys.argv[1]) / "training_log.json")
        for step in (1, 2, 3):
            sinks.write(record(step))
        child = os.fork()
        if child == 0:
            _Worker.is_done = lambda *_: os._exit(1)  # it would wait
            sinks.write(record(100))
            sinks.close()
            sys.exit()  # and not os._exit: what is left open is cleaned up
        assert os.waitpid(child, 0)[1] == 0
        sinks.write(record(4))
        sinks.close()
        """,
        tmp_path,
    )
    assert [line["iteration"] for line in json_lines(only(tmp_path, "perf_steps_*.jsonl"))[1:]] == [1, 2, 3, 4]
    assert len(only(tmp_path, "perf_metrics_*.log").read_text().splitlines()) == 7
    assert strict_json(only(tmp_path, "perf_summary_*.json"))["session_info"]["total_iterations"] == 4
    assert len(strict_json(tmp_path / "training_log.json")["step_logs"]) == 4


def test_a_program_that_ends_without_closing_has_its_summary(tmp_path: Path) -> None:
    run_script(
        """
        from pathlib import Path
        from monitor_runs import open_sinks, record
        sinks = open_sinks(Path(sys.argv[1]))
        for step in range(1, 26):
            sinks.write(record(step))
        """,
        tmp_path,
    )
    assert strict_json(only(tmp_path, "perf_summary_*.json"))["session_info"]["total_iterations"] == 25


def test_logging_needs_no_torch(tmp_path: Path) -> None:
    program = """
import json, sys
from pathlib import Path
from monitor_runs import record, write_run
write_run(Path(sys.argv[1]), [record(10)])
print(json.dumps([name for name in ("torch", "matplotlib", "wandb", "tensorboard") if name in sys.modules]))
"""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
