"""The files of a rank's spans: in files that others touch, and from several threads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monitoring import Device
from profiler_wrapper.errors import Notices
from profiler_wrapper.timer import log as span_log
from profiler_wrapper.timer import spans as recording
from profiler_wrapper.timer.log import PENDING_END, SpanLog, SpanPlace
from profiler_wrapper.timer.timer import Timer
from programs import warned
from timed_runs import span_rows


@pytest.fixture
def log(tmp_path: Path) -> SpanLog:
    log = SpanLog(SpanPlace(output_dir=tmp_path), Notices())
    log.look(time.perf_counter_ns())
    return log


def lines_of(directory: Path) -> Path:
    (path,) = directory.rglob("*.jsonl")
    return path


def test_device_times_are_filled_in_where_their_lines_are(log: SpanLog, tmp_path: Path) -> None:
    lines = [b'{"name":"x","number":%d,' % number + PENDING_END for number in range(3000)]
    ends = [log.write((), (line,), pending=True, is_header=True) for line in lines]
    for number in range(0, 3000, 777):
        log.fill_in(ends[number], lines[number], 10**9 + number)
    rows = span_rows(lines_of(tmp_path))
    assert {row["number"]: row["device_ns"] for row in rows if row["device_ns"] is not None} == {
        number: 10**9 + number for number in range(0, 3000, 777)
    }
    assert len(rows) == 3000
    log.release()


def test_a_file_that_somebody_cut_goes_on_and_holds_whole_lines(log: SpanLog, tmp_path: Path) -> None:
    line = b'{"name":"x",' + PENDING_END
    ends = [log.write((), (line + line,), pending=True, is_header=True) for _ in range(3)]
    lines_of(tmp_path).write_bytes(b"")
    log.write((), (b'{"name":"y"}\n',), is_header=True)
    log.fill_in(ends[0], line, 7)
    log.release()
    assert [json.loads(one)["name"] for one in lines_of(tmp_path).read_text().splitlines()[:1]] == ["y"]
    assert "7 " not in lines_of(tmp_path).read_text()


def test_a_thread_that_hangs_in_a_write_holds_up_no_other(
    log: SpanLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_log, "_LOCK_S", 0.05)
    line = b'{"name":"x",' + PENDING_END
    end = log.write((), (line,), pending=True, is_header=True)
    held, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        with log._lock:
            held.set()
            go_on.wait(300)

    thread = threading.Thread(target=hang)
    thread.start()
    held.wait()
    (said,) = warned(lambda: log.write((), (line,)))
    log.fill_in(end, line, 7)
    log.number_lines(0)
    log.set_place(SpanPlace(output_dir=tmp_path, rank=1, world_size=2))
    log.release()
    assert thread.is_alive() and not go_on.is_set(), "it was waited for who hangs"
    go_on.set()
    thread.join()
    assert "loses spans" in said and "another thread has been writing for 0.05 s" in said
    assert log.lost == 1 or log.closed
    assert json.loads(lines_of(tmp_path).read_text().splitlines()[-1])["device_ns"] is None


def test_device_times_of_the_spans_before_the_first_step_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lines are given a step while the device is still behind."""
    device = Device()
    monkeypatch.setattr(recording, "find_accelerator", lambda _: device)
    timer = Timer(tmp_path)
    with timer("forward"):
        device.work(5.0)
    timer.step()
    device.catch_up()
    timer.close()
    rows = [(row["name"], row["step"], row["device_ns"]) for row in span_rows(lines_of(tmp_path))]
    assert rows == [("forward", 0, 5_000_000), ("step", 0, None)]


def test_threads_that_do_nothing_but_time_lose_nothing(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu")
    over = threading.Event()
    counts = [0, 0, 0]

    def work(number: int) -> None:
        while not over.is_set():
            with timer("outer"), timer("inner"):
                pass
            counts[number] += 2

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for most in (200, 400, 600, 800, 1000):
        while sum(counts) < most:
            time.sleep(0.001)
        timer.dump()  # does not wait for threads that never let go
    over.set()
    for thread in threads:
        thread.join()
    lost = timer._recorder.log.lost
    timer.close()
    rows: list[dict[str, Any]] = span_rows(lines_of(tmp_path))
    assert (lost, len(rows)) == (0, sum(counts))
