"""Windows that a child process finishes: results come later, and whatever becomes of the child is told."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.child import _BESIDE_TRAINING, start_child
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.run import finishing, window
from profiler_wrapper.trace.atomic import replacing
from profiling import directory_of, files_below, profiler, read_run, result_of
from programs import LONGEST_S, TESTS, run_program

ALL = ["profile_full_trace.json", "profile_trace.json", "result.json", "run.json"]
BEGINS = "import sys, time; sys.stdout.buffer.write(b'begun '); sys.stdout.flush(); "


POLITELY = _BESIDE_TRAINING


@pytest.fixture(autouse=True)
def _impolite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests a process of a low priority would take minutes."""
    monkeypatch.setattr("profiler_wrapper.child._BESIDE_TRAINING", "")


@pytest.fixture
def case() -> Case:
    return models.build("llama", layers=1, hidden=16)


def answers_of(case: Case, folder: Path, *, steps: int = 6, **options: Any) -> pw.ProfilerWrapper:
    with profiler(case, folder, run_name="job", background=True, **options) as prof:
        models.train(case, steps=steps)
    return prof


def wait_for_children(prof: pw.ProfilerWrapper) -> None:
    """Until they have ended, as beside a loop that runs on."""
    assert prof._profiling.finisher is not None
    for _, child in prof._profiling.finisher._later:
        assert child is not None
        child._process.wait(LONGEST_S)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_window_that_a_child_finishes_is_as_one_finished_at_once(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with profiler(case, tmp_path, run_name="job", background=True, enable_print_summary=True, track="mm") as prof:
        models.train(case, steps=6)
        wait_for_children(prof)
        directory = directory_of(prof)
        assert files_below(directory) == ALL and read_run(directory)["complete"], "before anybody waits for it"
        assert capsys.readouterr().out == "", "the table comes with the end of the block"
    said = capsys.readouterr()
    assert "self_attn" in said.out and "making the result" not in said.err, "nobody had to wait"
    result = result_of(prof)
    assert pw.load(directory).layers == result.layers and "mm" in result.series
    assert result.run["timed_steps"] == [2, 3, 4] and result.complete
    assert pw.load(directory / "profile_trace.json").time == result.time
    assert not [thread for thread in threading.enumerate() if thread.name == "profiler_wrapper"]


@pytest.mark.full
def test_windows_are_finished_in_order_and_the_loop_runs_on(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_CHILD", f"import time; time.sleep(600); {window._CHILD}")
    with profiler(case, tmp_path, run_name="job", background=True, steps="1,3", files=("result",)) as prof:
        models.train(case, steps=6)
        assert prof._profiling.finisher is not None and prof._profiling.finisher.results == ()
        children = [child for _, child in prof._profiling.finisher._later if child is not None]
    assert [child._process.returncode for child in children] == [-9, -9], "what had not begun is done by who waits"
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3]]
    directory = directory_of(prof)
    assert read_run(directory)["complete"] and read_run(directory / "steps_3-3")["complete"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (f"{BEGINS}time.sleep(600)", ""),  # gets nowhere
        ("raise SystemExit(3)", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGALRM)", ""),  # was given no time for 10 minutes
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
        (f"{BEGINS}import os; os.kill(os.getpid(), 9)", "ended with -9"),
        (  # all is written but what says so
            f"from profiler_wrapper.run import files, window; import time; "
            f"files.WindowFiles._finish = lambda *_, **__: time.sleep(600); {window._CHILD}",
            "",
        ),
    ],
)
def test_what_a_child_does_not_finish_is_finished_by_who_waits(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(window, "_CHILD", program)
    monkeypatch.setattr(window, "_LEAST_PATIENCE_S", 0.5)
    told: list[str] = []
    monkeypatch.setattr("profiler_wrapper.run.window.warn", told.append)
    with profiler(case, tmp_path, run_name="job", background=True) as prof:
        models.train(case, steps=6)
        assert prof._profiling.finisher is not None
        ((_, child),) = prof._profiling.finisher._later
        directory = directory_of(prof)
        sleeps, writes = "sleep" in program, "WindowFiles._finish" in program
        wait_until(
            lambda: (
                child._process.poll() is not None
                or bool(sleeps and child.patience_s() and (not writes or (directory / "result.json").exists()))
            )
        )
    assert child._process.poll() is not None
    if not reason:
        assert result_of(prof).run["timed_steps"] == [2, 3, 4]
        assert files_below(directory) == ALL and read_run(directory)["complete"] is True and told == []
        assert (directory / "profile_trace.json").read_text().count("layers on the CPU") == 1
        return
    (message,) = told  # most likely for want of memory: the training is not to share that
    trace = directory / "profile_trace.json"
    assert reason in message and f"profiler-wrapper analyze {trace}" in message
    assert files_below(directory) == ["profile_full_trace.json", "profile_trace.json", "run.json"]
    assert prof.result is None and read_run(directory)["complete"] is False and pw.load(trace).layers


@pytest.mark.full
def test_without_memory_for_a_child_the_trace_alone_is_kept(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "control_group_free_bytes", lambda: 500_000_001)
    with pytest.warns(ProfilerWrapperWarning, match="control group .*analyze /.*profile_trace.json") as told:
        prof = answers_of(case, tmp_path, files=("result",), trace=False)
    assert len(told) == 1 and prof.result is None
    assert files_below(directory_of(prof)) == ["profile_full_trace.json", "profile_trace.json", "run.json"]
    assert read_run(directory_of(prof))["complete"] is False
    monkeypatch.setattr(window, "control_group_free_bytes", lambda: 1 << 30)
    assert answers_of(case, tmp_path, files=("result",)).result is not None


@pytest.mark.parametrize("what", ["subprocess.Popen", "tempfile.TemporaryFile"])
def test_where_no_process_can_be_started_who_waits_does_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(f"profiler_wrapper.run.window.{what}", refused)
    prof = answers_of(case, tmp_path)
    assert any("no process could be started" in note for note in result_of(prof).warnings)
    assert files_below(directory_of(prof)) == ALL and read_run(directory_of(prof))["complete"] is True


@pytest.mark.full
def test_functions_are_applied_by_who_waits(case: Case, tmp_path: Path) -> None:
    kept: list[object] = []

    def calls(events: Any) -> float:
        kept.append(events)  # what no other process could do
        return 1.0

    prof = answers_of(case, tmp_path, track=(calls, "mm"), files=("result",))
    series = result_of(prof).series
    assert kept and any(name.startswith("calls[") for name in series) and "mm" in series
    assert pw.load(directory_of(prof)).series.keys() == series.keys()
    assert files_below(directory_of(prof)) == ["result.json", "run.json"]


@pytest.mark.full
def test_children_take_turns(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no turn has not begun, and nobody waits for it."""
    monkeypatch.setattr("profiler_wrapper.child._BESIDE_TRAINING", POLITELY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with (tmp_path / f"profiler_wrapper-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with profiler(case, tmp_path, run_name="job", background=True, files=("result",)) as prof:
            models.train(case, steps=6)
            assert prof._profiling.finisher is not None
            ((_, child),) = prof._profiling.finisher._later
            assert child is not None
            opened = Path(f"/proc/{child.process}/fd")
            wait_until(lambda: turn.name in [os.path.realpath(file) for file in opened.iterdir()])
            assert child.patience_s() == 0 and child._process.poll() is None
    assert result_of(prof).complete and child._process.poll() is not None


@pytest.mark.full
def test_windows_that_come_faster_than_they_are_finished_start_few_children(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler_wrapper.child._BESIDE_TRAINING", POLITELY)
    monkeypatch.setattr(finishing, "_MOST_CHILDREN", 2)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with (tmp_path / f"profiler_wrapper-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with profiler(case, tmp_path, run_name="job", background=True, files=("result",), steps="1,3,5,7") as prof:
            models.train(case, steps=8)
            assert prof._profiling.finisher is not None
            started = [child is not None for _, child in prof._profiling.finisher._later]
    assert started == [True, True, False, False]
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3], [5], [7]]


@pytest.mark.full
def test_ctrl_c_ends_one_wait_and_a_forked_process_waits_for_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = window.Child.finished

    def interrupted(child: window.Child, patience_s: float) -> Any:
        monkeypatch.setattr(window.Child, "finished", finished)
        raise KeyboardInterrupt

    monkeypatch.setattr(window.Child, "finished", interrupted)
    prof = profiler(case, tmp_path, run_name="job", background=True, files=("result",))
    with pytest.raises(KeyboardInterrupt), prof:
        models.train(case, steps=6)
    forked = os.fork()
    if not forked:
        os._exit(0 if prof.results == () else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert result_of(prof).run["timed_steps"] == [2, 3, 4] and prof._profiling.finisher._later == []


@pytest.mark.full
def test_a_child_that_has_ended_holds_nothing_of_a_loop_that_goes_on(case: Case, tmp_path: Path) -> None:
    """A schedule may have thousands of windows."""
    held, of_thread = [], Path(f"/proc/self/task/{threading.get_native_id()}/children")
    others = set(of_thread.read_text().split())  # what other tests started
    with profiler(case, tmp_path, run_name="job", background=True, files=("result",), steps="1,3,5,7") as prof:
        for _ in range(4):
            models.train(case, steps=2)
            children = set(of_thread.read_text().split()) - others
            for child in children:
                os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)
            held.append((len(children), len(list(Path("/proc/self/fd").iterdir()))))
    assert len(set(held[1:])) == 1, held
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3], [5], [7]]


ENDS = """
import os, sys, torch, profiler_wrapper as pw
from profiler_wrapper import child
child._BESIDE_TRAINING = ""
model = torch.nn.Linear(4, 4)
prof = pw.ProfilerWrapper(model, output_dir=sys.argv[1], run_name="job", files=("result",))
prof.__enter__()
for _ in range(7):
    model(torch.ones(2, 4)).sum().backward()
    prof.step()
if sys.argv[2] == "at once":
    os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["at once", "as usual"])
def test_the_end_of_the_process_waits_and_without_one_the_child_goes_on(tmp_path: Path, how: str) -> None:
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
    if how == "as usual":  # how an interpreter ends
        program = [sys.executable, "-W", "error::ResourceWarning", "-c", ENDS, str(tmp_path), how]
        done: Any = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True)
    else:
        done = run_program("-c", ENDS, tmp_path, how, environment=environment)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "job" / "rank0"

    def is_whole() -> bool:
        return files_below(directory) == ["result.json", "run.json"] and read_run(directory)["complete"] is True

    if how == "at once":
        wait_until(is_whole)
    assert is_whole()
    assert ("TOTAL" in done.stdout) is (how == "as usual")


@pytest.mark.full
def test_a_child_that_waits_for_its_turn_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and the turn never comes."""
    shortly = "from profiler_wrapper import child; child._LONGEST_LIFE_S = 1; "
    monkeypatch.setattr("profiler_wrapper.child._BESIDE_TRAINING", shortly + POLITELY)
    with (tmp_path / f"profiler_wrapper-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        child = start_child("print('turn')", beside_training=True, environment={"TMPDIR": str(tmp_path)})
        assert child.wait(LONGEST_S) == -signal.SIGALRM


@pytest.mark.full
def test_a_child_inherits_nothing_and_steps_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen.json"
    look = (
        "import json, os, signal, sys; "
        "told = {'left_s': signal.alarm(0), 'policy': os.sched_getscheduler(0), 'nice': os.nice(0), "
        "'session': os.getsid(0) == os.getpid(), 'torch': 'torch' in sys.modules, "
        "'group': open('/proc/self/autogroup').read() if os.path.exists('/proc/self/autogroup') else 'nice 10', "
        "'device': os.environ['CUDA_VISIBLE_DEVICES'], 'threads': os.environ['OMP_NUM_THREADS'], "
        "'files': [os.readlink('/proc/self/fd/' + name) for name in os.listdir('/proc/self/fd') if int(name) < 99 "
        "and os.path.exists('/proc/self/fd/' + name)]}; "
        f"open({str(seen)!r}, 'w').write(json.dumps(told))"
    )
    monkeypatch.setattr(window, "_CHILD", f"{window._CHILD}; {POLITELY}{look}")
    with open(tmp_path / "of_the_training", "w") as file:
        os.set_inheritable(file.fileno(), True)
        with profiler(case, tmp_path, background=True, files=("result",)) as prof:
            models.train(case, steps=6)
            wait_for_children(prof)
    told = json.loads(seen.read_text())
    assert (told["nice"], told["session"], told["torch"], told["device"], told["threads"]) == (10, True, False, "", "1")
    assert told["group"].split()[-2:] == ["nice", "10"]
    assert told["policy"] == os.SCHED_BATCH, "SCHED_IDLE gets no time on a busy machine"
    assert 0 < told["left_s"] <= 600, "the documentation says 10 minutes"
    assert not [name for name in told["files"] if "of_the_training" in name]


# --- the node's own disk --------------------------------------------------------------------------


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_a_window_with_nothing_in_it_is_told(tmp_path: Path) -> None:
    with (
        pytest.warns(ProfilerWrapperWarning, match="nothing was recorded: no op of torch ran"),
        profiler(None, tmp_path, background=True) as prof,
    ):
        for _ in range(6):
            prof.step()
    assert prof.result is None


class KilledSlowly:
    """A process that was killed for want of time, and Ctrl-C came before it was gone."""

    pid = 2**22 + 1  # nobody's

    def __init__(self) -> None:
        self.answers: list[int | BaseException] = [subprocess.TimeoutExpired("", 0), KeyboardInterrupt(), -9]

    def wait(self, patience_s: float | None = None) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def poll(self) -> int:
        return -9

    def kill(self) -> None:
        pass


def test_a_child_that_we_killed_was_not_killed_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_portable", lambda task: task)
    monkeypatch.setattr(window.subprocess, "Popen", lambda *_, **__: KilledSlowly())
    child = window.Child(SimpleNamespace(directory=None, target=None))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        child.finished(0.0)
    assert child.finished(0.0) is None
    assert not child.was_killed


def test_what_a_killed_process_left_half_written_is_known_by_its_number(tmp_path: Path) -> None:
    place = SimpleNamespace(directory=tmp_path, page=tmp_path / "report.html")
    task = SimpleNamespace(directory=place, target=None, options=SimpleNamespace(log_dir=None))
    writing = replacing(tmp_path / "result.json")
    beside = writing.__enter__()
    beside.write_text("{")
    window._drop_half_written(task, os.getpid())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("calls", "of"), [(5, " of 3 steps"), (3, " of 1 step")])
def test_who_waits_for_the_table_sees_what_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: int, of: str
) -> None:
    """Not so where no table comes."""
    model = torch.nn.Linear(4, 4)

    def said(**options: Any) -> str:
        with pw.ProfilerWrapper(model, output_dir=tmp_path, files=("result",), steps="all", **options) as prof:
            for _ in range(calls):
                model(torch.ones(2, 4))
                prof.step()
        assert prof.result is not None
        return capsys.readouterr().err

    line = f"profiler_wrapper: making the result{of} ... Ctrl-C keeps the trace\n"
    assert said().count(line) == 1
    assert "making the result" not in said(enable_print_summary=False)
