"""Windows that a child process finishes: results come later, and whatever becomes of the child is told."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper import background, finishing, window_child
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.recording.store import read_run
from profiling import directory_of, profiler, result_of


@pytest.fixture
def case() -> Case:
    return models.build("llama", layers=1, hidden=16)


def sleeps(seconds: float) -> str:
    return f"import time; time.sleep({seconds}); {window_child._CHILD}"


def answers_of(case: Case, folder: Path, **options: Any) -> pw.ProfilerWrapper:
    with profiler(case, folder, run_name="job", background=True, **options) as prof:
        models.train(case, steps=5)
    return prof


def test_a_later_result_is_the_one_that_comes_at_once(case: Case, tmp_path: Path) -> None:
    prof = answers_of(case, tmp_path)
    result, directory = result_of(prof), directory_of(prof)
    assert pw.load(directory).layers == result.layers
    assert result.run["timed_steps"] == [2, 3, 4] and result.complete
    assert pw.load(directory / "profile_trace.json").time == result.time
    assert not list(directory.glob(".*"))
    assert not [thread for thread in threading.enumerate() if thread.name == "profiler_wrapper"]


def test_windows_are_finished_in_order_and_the_loop_runs_on(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_child, "_CHILD", sleeps(1.0))
    with profiler(case, tmp_path, run_name="job", background=True, steps="1,3", files=("result",)) as prof:
        models.train(case, steps=6)
        assert prof._profiling.finisher is not None and prof._profiling.finisher.results == ()
    results = prof.results
    assert [result.run["timed_steps"] for result in results] == [[1], [3]]
    directory = directory_of(prof)
    assert read_run(directory)["complete"] and read_run(directory / "steps_3-3")["complete"]


@pytest.mark.parametrize(
    ("code", "reason"), [("raise SystemExit(3)", "ended with 3"), ("import os; os.kill(os.getpid(), 9)", "with -9")]
)
def test_a_child_that_fails_is_one_warning_and_costs_no_trace(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr(window_child, "_CHILD", code)
    with pytest.warns(ProfilerWrapperWarning, match=reason) as told:
        prof = answers_of(case, tmp_path)
        assert prof.result is None
    assert len([one for one in told if issubclass(one.category, ProfilerWrapperWarning)]) == 1
    directory = directory_of(prof)
    assert read_run(directory)["complete"] is False
    assert sorted(path.name for path in directory.iterdir()) == [
        "profile_full_trace.json",
        "profile_trace.json",
        "run.json",
    ]
    assert pw.load(directory).layers


def test_a_child_that_takes_too_long_is_waited_for_no_longer(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_child, "_CHILD", sleeps(2.0))
    monkeypatch.setattr(finishing, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(background, "_EXIT_PATIENCE_S", 0.1)
    prof = answers_of(case, tmp_path, files=("result",))
    with pytest.warns(ProfilerWrapperWarning, match="not there yet: process [0-9]+"):
        assert prof.result is None
    assert prof._profiling.finisher is not None
    with pytest.warns(ProfilerWrapperWarning, match=r"still finishes a window.*job/rank0"):
        prof._profiling.finisher._background._end()
    monkeypatch.setattr(finishing, "_PATIENCE_S", 60.0)
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


def test_a_child_inherits_nothing_and_steps_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen.json"
    look = (
        "import json, os, sys; "
        "told = {'nice': os.nice(0), 'session': os.getsid(0) == os.getpid(), 'torch': 'torch' in sys.modules, "
        "'group': open('/proc/self/autogroup').read() if os.path.exists('/proc/self/autogroup') else 'nice 19', "
        "'device': os.environ['CUDA_VISIBLE_DEVICES'], 'threads': os.environ['OMP_NUM_THREADS'], "
        "'files': [os.readlink('/proc/self/fd/' + name) for name in os.listdir('/proc/self/fd') if int(name) < 99 "
        "and os.path.exists('/proc/self/fd/' + name)]}; "
        f"open({str(seen)!r}, 'w').write(json.dumps(told))"
    )
    monkeypatch.setattr(window_child, "_CHILD", f"{window_child._CHILD}; {look}")
    monkeypatch.setattr(window_child.Child, "hurry", lambda child: None)
    with open(tmp_path / "of_the_training", "w") as file:
        os.set_inheritable(file.fileno(), True)
        result_of(answers_of(case, tmp_path, files=("result",)))
    told = json.loads(seen.read_text())
    assert (told["nice"], told["session"], told["torch"], told["device"], told["threads"]) == (19, True, False, "", "1")
    assert told["group"].split()[-2:] == ["nice", "19"]
    assert not [name for name in told["files"] if "of_the_training" in name]


def test_functions_cannot_be_handed_over_and_that_is_told(case: Case, tmp_path: Path) -> None:
    result = result_of(answers_of(case, tmp_path, files=("result",), track=lambda events: 1.0))
    assert any("background=False" in warning for warning in result.run["warnings"])


def test_what_cannot_be_handed_over_costs_no_trace(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(window_child.tempfile, "TemporaryFile", full)
    with pytest.warns(ProfilerWrapperWarning, match="handed over .*No space left"):
        prof = answers_of(case, tmp_path)
    assert (directory_of(prof) / "profile_trace.json").is_file()
    assert read_run(directory_of(prof))["complete"] is False


# --- the node's own disk --------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_files_are_written_on_the_node_and_taken_to_the_run(case: Case, tmp_path: Path, in_background: bool) -> None:
    node = tmp_path / "node"
    files = ("trace", "full_trace", "result", "report", "memory_text")
    options = {"run_name": "job", "background": in_background, "steps": "1,3", "local_dir": node, "files": files}
    with profiler(case, tmp_path / "out", **options) as prof:
        models.train(case, steps=5)
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3]]
    directory = directory_of(prof)
    assert directory == tmp_path / "out" / "job" / "rank0"
    names = {str(path.relative_to(tmp_path / "out" / "job")) for path in directory.parent.rglob("*") if path.is_file()}
    assert {
        "report.html",
        "rank0/profile_trace.json",
        "rank0/profile_full_trace.json",
        "rank0/result.json",
        "rank0/run.json",
        "rank0/profile_memory_usage.txt",
        "rank0/steps_3-3/result.json",
        "rank0/steps_3-3/report.html",
    } <= names
    assert read_run(directory)["complete"] and read_run(directory / "steps_3-3")["complete"]
    assert pw.load(directory.parent).layers == prof.results[0].layers
    assert list(node.iterdir()) == []


def test_what_cannot_be_taken_there_stays_and_that_is_told(case: Case, tmp_path: Path) -> None:
    def in_the_way(directory: Path) -> None:
        (directory / "result.json").mkdir()
        (directory / "result.json" / "x").touch()

    node = tmp_path / "node"
    with (
        pytest.warns(ProfilerWrapperWarning, match=r"1 of 3 files could not be copied .*They stay in .*: result.json"),
        profiler(case, tmp_path / "out", run_name="job", local_dir=node) as prof,
    ):
        models.train(case, steps=3)
        in_the_way(directory_of(prof))
        models.train(case, steps=3)
    assert result_of(prof).complete
    (left,) = node.rglob("result.json")
    assert pw.load(left.parent).layers == result_of(prof).layers
    assert read_run(directory_of(prof))["complete"] is False
    assert (directory_of(prof) / "profile_trace.json").is_file()


def test_a_node_without_such_a_disk(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(ProfilerWrapperWarning, match="at once, because local_dir cannot be used"),
        profiler(case, tmp_path, run_name="job", local_dir=tmp_path / "file") as prof,
    ):
        models.train(case, steps=5)
    assert (directory_of(prof) / "result.json").is_file()


# --- chosen ranks ---------------------------------------------------------------------------------


def test_a_rank_that_was_not_chosen_does_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with profiler(case, tmp_path, ranks="0,2-3") as prof:
        models.train(case, steps=5)
    assert prof.result is None and not list(tmp_path.iterdir())


def test_the_first_of_the_chosen_ranks_writes_the_page_and_all_know_who_records(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "64")
    options = {"ranks": [2, 9], "run_name": "job", "files": "auto", "background": False}
    with profiler(case, tmp_path, **options, enable_print_summary=True) as prof:
        models.train(case, steps=5)
    assert (tmp_path / "job" / "report.html").is_file()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"All ranks side by side: profiler-wrapper ranks {tmp_path / 'job'}",
        f"The page: {tmp_path / 'job' / 'report.html'}",
    ]
    assert read_run(directory_of(prof))["recorded_ranks"] == [2, 9]


def test_ranks_that_are_not_there(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with (
        pytest.warns(ProfilerWrapperWarning, match="none of the ranks asked for is among the 4"),
        profiler(case, tmp_path, ranks="8-15"),
    ):
        models.train(case, steps=2)


def test_a_window_with_nothing_in_it_is_told(tmp_path: Path) -> None:
    with pytest.warns(ProfilerWrapperWarning, match="nothing was recorded: no op of torch ran"):
        with profiler(None, tmp_path, background=True) as prof:
            for _ in range(4):
                prof.step()
        assert prof.result is None
