"""The bar while a trace is read: what it is told, when it shows, and that nobody pays for it elsewhere."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from profiler_wrapper.__main__ import main
from profiler_wrapper.commands import common
from profiler_wrapper.commands.common import reading_bar
from profiler_wrapper.result import load
from profiler_wrapper.trace.reader import read, read_with_shapes
from recordings import Trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more than two slices."""
    made = Trace().mark(".", 0, 10**9)
    for i in range(80_000):
        made.op("aten::mm", 10 * i, 10 * i + 5)
    path = made.write(tmp_path_factory.mktemp("trace") / "large.json")
    assert path.stat().st_size > 8 << 20
    return path


class Terminal(io.StringIO):
    """A stderr that people look at."""

    def isatty(self) -> bool:
        return True


def test_reading_tells_how_far_it_has_come(trace: Path) -> None:
    told: list[tuple[int, int]] = []
    read(trace, progress=lambda done, total: told.append((done, total)))
    size = trace.stat().st_size
    assert {total for _, total in told} == {size}
    done = [count for count, _ in told]
    assert done == sorted(done)
    assert done[-1] == size
    assert len({count for count in done if count < size}) >= 2
    again: list[tuple[int, int]] = []
    read_with_shapes(trace, progress=lambda done, total: again.append((done, total)))
    assert again == told


def test_of_a_gzipped_file_its_own_bytes_count(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "large.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes(), 1))
    told: list[tuple[int, int]] = []
    load(packed, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (packed.stat().st_size, packed.stat().st_size)
    assert all(done <= total for done, total in told)


def test_what_progress_raises_ends_the_reading_as_an_interrupt_does(trace: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(trace, progress=stop)


def test_there_is_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with reading_bar("reading a") as progress:
        assert progress is None


def test_the_bar_comes_after_a_second_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(common, "DELAY_S", 0.5)
    now_s = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now_s[0])
    with reading_bar("reading a") as progress:
        assert progress is not None
        progress(1 << 20, 4 << 20)
        progress(2 << 20, 4 << 20)
        assert terminal.getvalue() == ""
        now_s[0] += 0.6
        progress(3 << 20, 4 << 20)
        assert "reading a" in terminal.getvalue()
        assert "75%" in terminal.getvalue()
        progress(4 << 20, 4 << 20)
        assert "analysing" in terminal.getvalue().rpartition("\r")[2]
        progress(1 << 20, 8 << 20)  # the trace with shapes
        assert "12%" in terminal.getvalue().rpartition("\r")[2]
    assert terminal.getvalue().endswith("\r")
    assert terminal.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""


def test_quick_work_on_a_terminal_shows_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("tqdm.std.time", lambda: 100.0)  # all of it takes no time
    monkeypatch.setattr(sys, "stderr", terminal)
    path = Trace().mark(".", 0, 90).op("aten::mm", 2, 50).write(tmp_path / "x.json")
    assert main(["analyze", str(path)]) == 0
    assert terminal.getvalue() == ""
    assert os.listdir(tmp_path) == ["x.json"]
