"""How a timed process can end, or begin: killed, forked, on a full disk, without a place to write."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from profiler_wrapper.timer.timer import Timer
from programs import TESTS, run_program, run_script, warned
from timed_runs import LINE, files_of, span_rows, text_rows


def whole_lines(path: Path) -> tuple[int, int]:
    """How many spans the text and the JSON lines have; whatever else there is must be a torn line at the end."""
    *lines, last = path.read_text().split("\n")
    assert all(LINE.fullmatch(line) for line in lines)
    assert not last or "[RANK 0]".startswith(last[:8])
    return len(lines), len(span_rows(path, tolerant=True))


def in_a_child(body: Callable[[], object]) -> int:
    """Call it in a forked process, which then ends without another word; its status, as `os.waitpid` tells it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def kill(process: int | None = None) -> None:
    os.kill(process or os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_its_last_line_at_most(tmp_path: Path) -> None:
    """It says how many spans have ended, and is killed in the middle of them."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            timer = Timer(tmp_path, rank=0, device="cpu")
            for ended in itertools.count(2000, 2000):
                for _ in range(1000):
                    with timer("outer"), timer("inner"):
                        pass
                os.write(writing, b"%d\n" % ended)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as told:
        said = [int(told.readline()) for _ in range(5)]
        kill(child)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        said += [int(line) for line in told.read().splitlines()]
    (path,) = files_of(tmp_path)
    text, lines = whole_lines(path)
    assert text >= said[-1] and lines >= said[-1]
    assert abs(text - lines) <= 1


def test_a_process_that_kills_itself_has_told_everything(tmp_path: Path) -> None:

    def train() -> None:
        timer = Timer(tmp_path, rank=0, device="cpu")
        for _ in range(321):
            with timer("x"):
                pass
        kill()

    assert os.WTERMSIG(in_a_child(train)) == signal.SIGKILL
    (path,) = files_of(tmp_path)
    assert whole_lines(path) == (321, 321)


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "told"),
    [("os.kill(os.getpid(), 9)", "not closed"), ("raise KeyboardInterrupt", "KeyboardInterrupt"), ("pass", None)],
)
def test_a_report_says_of_a_program_that_it_did_not_end_well(end: str, told: str | None, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    from profiler_wrapper.ranks.load import load_ranks

    program = f"""
import os, sys
from profiler_wrapper import Timer
timer = Timer(sys.argv[1], run_name="run", device="cpu", rank=0, world_size=1)
for _ in range(12):
    with timer("forward"):
        pass
    timer.step()
{end}
"""
    run_program("-c", program, tmp_path, environment={"PYTHONPATH": str(TESTS.parent)})
    missing = load_ranks(tmp_path / "run").missing
    assert [row.what for row in missing] == (["end of rank 0"] if told else []), missing
    assert all(str(told) in row.reason for row in missing), missing


def test_importing_it_writes_nothing_and_the_end_of_the_process_ends_its_files(tmp_path: Path) -> None:
    run_script(
        """
        import os, sys
        os.chdir(sys.argv[1])
        from profiler_wrapper.timer.timer import global_timer
        assert global_timer.dump() is None
        assert os.listdir() == []
        with global_timer("x"):
            pass
        """,
        tmp_path,
    )
    (path,) = files_of(tmp_path / "outputs")
    assert path.read_bytes().endswith(b"nanms\n")
    assert path.with_suffix(".jsonl").read_bytes().endswith(b"}}\n")
    assert len(text_rows(path)) == len(span_rows(path)) == 1


def test_a_forked_child_writes_its_own_files(tmp_path: Path) -> None:
    timer = Timer(tmp_path, run_name="job", device="cpu", rank=5)
    timer.start("around the fork")
    with timer("parent"):
        pass

    def work() -> None:
        for _ in range(500):
            with timer("child"):
                pass
        timer.dump()

    assert in_a_child(work) == 0
    for _ in range(500):
        with timer("parent"):
            pass
    timer.stop("around the fork")
    timer.close()
    (path,) = files_of(tmp_path)
    assert [span["name"] for span in span_rows(path)] == ["parent"] * 501 + ["around the fork"]
    (other,) = files_of(tmp_path, "worker*_of_rank5.log")
    assert [(span["name"], span["depth"]) for span in span_rows(other)] == [("child", 0)] * 500
    assert len(text_rows(other)) == 500


def time_something(timer: Timer) -> None:
    with timer("something"):
        pass


def test_a_process_that_was_given_no_rank_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    timer = Timer(tmp_path, run_name="job", device="cpu")
    process = multiprocessing.get_context("fork").Process(target=time_something, args=(timer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    timer.close()
    (path,) = files_of(tmp_path, "*.log")
    assert path.match("worker*_of_rank1.log")
    assert path.read_bytes().endswith(b"nanms\n")
    assert len(span_rows(path)) == 1


class Data(torch.utils.data.Dataset[int]):
    """Its items are timed where they are loaded."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> int:
        with self.timer("decode"):
            return place


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_processes_that_load_data_write_beside_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    timer = Timer(tmp_path, run_name="job", device="cpu")
    with timer("forward"):
        pass
    workers = 2 if method == "fork" else 1
    loader = torch.utils.data.DataLoader(Data(timer), num_workers=workers, multiprocessing_context=method)
    for _ in loader:
        with timer("forward"):
            pass
    timer.close()
    (path,) = files_of(tmp_path)
    assert path.name == "timer_rank3.log"
    assert {span["name"] for span in span_rows(path)} == {"forward"}
    found = files_of(tmp_path, "worker*_of_rank3.log")
    assert len(found) == workers
    assert sum(len(span_rows(worker)) for worker in found) == 8
    assert sum(len(text_rows(worker)) for worker in found) == 8


def test_a_full_disk_is_one_warning_and_whole_lines(tmp_path: Path) -> None:
    """The system refuses to let any file grow beyond 256 KiB."""

    def fill() -> None:
        timer = Timer(tmp_path, rank=0, device="cpu")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

        def train() -> None:
            for _ in range(5000):
                with timer("forward"):
                    pass
            timer.dump()

        assert len(warned(train)) == 1
        assert timer._recorder.log.lost > 0
        timer.close()

    assert in_a_child(fill) == 0
    (path,) = files_of(tmp_path)
    assert 1000 < len(span_rows(path)) < 5000
    assert 1000 < len(text_rows(path)) <= 5000


def test_without_a_place_to_write_there_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def train() -> None:
        timer = Timer(tmp_path / "file" / "outputs", device="cpu")
        for _ in range(3):
            with timer("x"):
                pass
            timer.step()
        timer.dump()
        timer.close()

    (message,) = warned(train)
    assert "file" in message and "training goes on" in message


def test_files_that_are_removed_while_they_are_written(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu")

    def train() -> None:
        for number in range(3):
            with timer("x"):
                pass
            if number == 0:
                for path in files_of(tmp_path, "*"):
                    path.unlink()
            timer.dump()
        timer.close()

    (message,) = warned(train)
    assert "removed" in message
