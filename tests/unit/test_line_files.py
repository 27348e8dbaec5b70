"""Lines of several threads: each goes on with its own work, and one that is too fast waits a bit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.live import line_files
from profiler_wrapper.live.kept_lines import KeptLines
from profiler_wrapper.live.line_files import LineFiles
from profiler_wrapper.live.timer import Timer


class Told(KeptLines):
    """Tells of each line that another thread left."""

    def __init__(self, path: Path, tell: Callable[[], None]) -> None:
        super().__init__(path, mapping=False)
        self.tell = tell

    def append(self, line: bytes) -> int:
        self.tell()
        return super().append(line)


def files_in(directory: Path, tell: Callable[[], None] = lambda: None) -> LineFiles:
    files = LineFiles()
    for name in ("text", "lines"):
        (directory / name).touch()
    files.text, files.lines = KeptLines(directory / "text"), Told(directory / "lines", tell)
    return files


def test_a_thread_that_writes_for_others_gets_back_to_its_work(tmp_path: Path) -> None:
    """While it writes their lines, they go on and leave more."""
    written = 0

    def leave_another() -> None:
        nonlocal written
        written += 1
        assert written < 5_000, "a thread does nothing but write what others leave"
        files._late.append((b"", b"{}\n", None))

    files = files_in(tmp_path, leave_another)
    files._late.append((b"", b"{}\n", None))
    files.write(b"", b"{}\n")
    assert files._late, "nothing was left meanwhile, so this says nothing"


def test_what_is_too_much_waits_for_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    monkeypatch.setattr(line_files, "MOST_LATE", 3)
    pauses: list[float] = []

    def pause(seconds: float) -> None:  # in which the other thread ends its line
        pauses.append(seconds)
        files._release()

    monkeypatch.setattr(line_files.time, "sleep", pause)
    files._acquire(False)
    for number in range(4):
        files.write(b"", b"%d\n" % number)
    assert (files.lost, len(pauses)) == (0, 1) and pauses[0] < 1e-3
    assert files.lines.read() == b"0\n1\n2\n3\n"


def test_where_nobody_gets_on_lines_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    monkeypatch.setattr(line_files, "MOST_LATE", 3)
    files._acquire(False)  # as a handler of a signal finds it, on the very thread that writes
    for _ in range(5):
        files.write(b"", b"{}\n")
    assert files.lost == 2


def test_threads_that_do_nothing_but_time_lose_next_to_nothing(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu")
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with timer("outer"), timer("inner"):
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    longest_s = 0.0
    for _ in range(5):
        time.sleep(0.02)
        began = time.perf_counter()
        timer.dump()
        longest_s = max(longest_s, time.perf_counter() - began)
    over.set()
    for thread in threads:
        thread.join()
    lost = timer._recorder.log.lost
    timer.close()
    (path,) = tmp_path.rglob("*.jsonl")
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    spans = sum("name" in row for row in rows)
    assert spans > 1_000
    assert lost < spans / 20, f"{lost} of {spans} are lost"
    assert longest_s < 1.5, "a dump waits for threads that never let go"
