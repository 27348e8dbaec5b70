"""Other profilers, threads and processes: who records, and what is said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiling import profiler, result_of
from programs import LONGEST_S, TESTS, warned
from torch_versions import since_torch
from unchanged import CPU, names_in, nothing_left

# --- other profilers ----------------------------------------------------------------------------


def test_inside_another_profiler_ours_only_marks(case: Case, tmp_path: Path) -> None:
    with (
        nothing_left(case),
        torch.profiler.profile(activities=CPU) as theirs,
        pytest.warns(pw.ProfilerWrapperWarning, match="records nothing"),
        profiler(case, tmp_path) as prof,
    ):
        models.train(case, steps=1)
    assert prof.result is None
    assert any(name.startswith("layer: model.layers.1 ") for name in names_in(theirs, tmp_path))


@pytest.mark.full
def test_inside_one_that_is_only_warming_up(case: Case, tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    found: list[list[str]] = []
    with (
        torch.profiler.profile(
            activities=CPU, schedule=schedule, on_trace_ready=lambda theirs: found.append(names_in(theirs, tmp_path))
        ) as theirs,
        pytest.warns(pw.ProfilerWrapperWarning, match="records nothing"),
        profiler(case, tmp_path) as prof,
    ):
        models.train(case, steps=1)
        theirs.step()
        models.train(case, steps=1)
        theirs.step()
    assert prof.result is None
    assert any(name.startswith("layer: ") for name in found[0])


@pytest.mark.full
def test_another_profiler_inside_ours_gets_its_trace_and_ours_says_what_it_missed(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
        with torch.profiler.profile(activities=CPU) as theirs:
            models.train(case, steps=1)
        models.train(case, steps=4)
    assert sum(name.startswith("layer: . ") for name in names_in(theirs, tmp_path)) == 1
    result = result_of(prof)
    assert not result.complete
    assert any("another torch profiler took over in step 1" in warning for warning in result.warnings)
    assert result.run["timed_steps"] == [0]


@pytest.mark.full
def test_another_with_a_schedule_inside_ours(case: Case, tmp_path: Path) -> None:
    found: list[list[str]] = []
    optimizer = models.optimizer_of(case.model)
    with (
        nothing_left(case),
        profiler(case, tmp_path) as prof,
        torch.profiler.profile(
            activities=CPU,
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda theirs: found.append(names_in(theirs, tmp_path)),
        ) as theirs,
    ):
        for step in range(5):
            models.train_step(case, case.model, optimizer, seed=step)
            theirs.step()
    assert sum(name.startswith("layer: . ") for name in found[0]) == 1
    assert any("another torch profiler took over" in warning for warning in result_of(prof).warnings)


def test_ours_inside_ours(case: Case, tmp_path: Path) -> None:
    with (
        nothing_left(case),
        profiler(case, tmp_path) as outer,
        pytest.warns(pw.ProfilerWrapperWarning, match="records nothing"),
        profiler(case, tmp_path) as inner,
    ):
        models.train(case, steps=1)
    assert inner.result is None
    assert {row.calls for row in result_of(outer).rows("model.layers.0") if row.phase == "forward"} == {1}


@pytest.mark.full
def test_one_after_the_other(case: Case, tmp_path: Path) -> None:
    for _ in range(2):
        with profiler(case, tmp_path) as prof:
            models.train(case, steps=6)
        assert result_of(prof).complete
    assert len(list(tmp_path.iterdir())) == 2


# --- threads and processes ----------------------------------------------------------------------


@pytest.mark.full
def test_calls_on_other_threads_disturb_nothing(case: Case, tmp_path: Path) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(10):
                case.model(**case.batch(0))

    with nothing_left(case), profiler(case, tmp_path) as prof:
        thread = threading.Thread(target=evaluate)
        thread.start()
        models.train(case, steps=8)
        thread.join()
    # The first step is in no result where the other thread called first.
    assert result_of(prof).run["timed_steps"] in ([2, 3, 4], [3, 4, 5])
    assert result_of(prof).run["step_source"] == "optimizer"


@pytest.mark.full
def test_forked_workers_disturb_nothing(case: Case, tmp_path: Path) -> None:
    class Words(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return nn.Identity()(torch.full((16,), index))

    loader = torch.utils.data.DataLoader(Words(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    optimizer = models.optimizer_of(case.model)
    with profiler(case, tmp_path) as prof:
        for ids in loader:
            case.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert result_of(prof).run["timed_steps"] == [2, 3]
    assert result_of(prof).complete


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.full
@pytest.mark.parametrize("then", ["call", "optimizer", "step", "result"])
def test_left_on_another_thread_its_own_thread_ends_it(case: Case, tmp_path: Path, then: str) -> None:
    prof, optimizer = profiler(case, tmp_path), models.optimizer_of(case.model)
    prof.__enter__()
    models.train_step(case, case.model, optimizer)
    said = warned(lambda: on_a_thread(lambda: prof.__exit__(None, None, None)))
    assert len(said) == 1 and "on its own thread only" in said[0]
    assert profiler_is_on()
    if then == "call":
        case.model(**case.batch(0))
    elif then == "optimizer":
        optimizer.step()
    elif then == "step":
        prof.step()
    else:
        assert prof.result is not None
    assert not profiler_is_on()
    result = result_of(prof)
    assert result.run["full_steps"] == [0]
    assert any("left on another thread" in warning for warning in result.warnings) == (then != "result")
    with nothing_left(case):
        models.train_step(case, case.model, optimizer)


@pytest.mark.full
def test_a_generator_closed_on_another_thread(case: Case, tmp_path: Path) -> None:
    prof, optimizer = profiler(case, tmp_path), models.optimizer_of(case.model)

    def steps() -> Iterator[None]:
        with prof:
            while True:
                models.train_step(case, case.model, optimizer)
                yield

    loop = steps()
    next(loop)
    next(loop)
    warned(lambda: on_a_thread(loop.close))
    models.train_step(case, case.model, optimizer)
    assert not profiler_is_on()
    assert result_of(prof).run["full_steps"] == [0, 1]


@pytest.mark.full
@since_torch(2, 11, "after a profiler whose thread has ended none can be started")
def test_a_thread_that_ended_within_the_block_is_lost(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path)
    with nothing_left(case):
        on_a_thread(prof.__enter__)
        said = warned(lambda: prof.__exit__(None, None, None))
    assert any("the thread that it recorded has ended" in message for message in said)
    assert prof.result is None
    with profiler(case, tmp_path) as following:
        models.train(case, steps=3)
    assert following.result is not None


@pytest.mark.full
def test_one_thread_is_profiled_at_a_time(case: Case, tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()
    first = profiler(case, tmp_path / "first")

    def work() -> None:
        with first:
            models.train(case, steps=1)
            entered.set()
            go_on.wait(LONGEST_S)
            models.train(case, steps=6)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(LONGEST_S)
    other = models.build("llama")
    with profiler(other, tmp_path / "second") as second:
        said = warned(lambda: second.__exit__(None, None, None) or second.__enter__())
        models.train(other, steps=2)
    go_on.set()
    thread.join()
    assert second.result is None
    assert said == []  # once is enough
    assert result_of(first).run["timed_steps"] == [2, 3, 4]


@pytest.mark.full
def test_a_profiler_on_another_thread_waits_for_ours_to_end(case: Case, tmp_path: Path) -> None:
    theirs: list[int] = []

    def profile() -> None:
        with torch.profiler.profile(activities=CPU) as other:
            torch.ones(3) + 1
        theirs.append(len(other.events()))

    thread = threading.Thread(target=profile)
    with profiler(case, tmp_path, steps="all") as prof:
        models.train(case, steps=3)
        thread.start()
        while thread.is_alive():
            models.train(case, steps=1)
    assert theirs[0] > 0
    assert not result_of(prof).complete
    assert any("another torch profiler took over" in warning for warning in result_of(prof).warnings)


# Each ending in a process of its own; they are forked from one that has imported everything and recorded nothing.
ENDS = """
import os, sys, threading
import torch, torch._dynamo
from profiler_wrapper import ProfilerWrapper

def end(how):
    model = torch.nn.Linear(2, 2)
    prof = ProfilerWrapper(model, output_dir=f"{sys.argv[1]}/{how}", run_name="run", files=("result",))
    entered, never = threading.Event(), threading.Event()

    def enter():
        prof.__enter__()
        model(torch.ones(1, 2))
        entered.set()
        if how == "thread goes on":
            never.wait()

    if how == "exits":
        with prof:
            model(torch.ones(1, 2)).sum().backward()
            sys.exit(7)
    if "thread" in how:
        threading.Thread(target=enter, daemon=True).start()
        entered.wait()
    else:
        enter()
    if how == "left elsewhere":
        thread = threading.Thread(target=prof.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    globals().update(locals())  # as a program's own: what lives until the process ends

for how in sys.argv[2:]:
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(f"{sys.argv[1]}/{how}.txt", os.O_WRONLY | os.O_CREAT), 2)
        end(how)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.full
def test_a_process_that_ends_within_the_block_ends_well(tmp_path: Path) -> None:
    ends = ("never left", "left elsewhere", "thread ended", "thread goes on", "exits")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", ENDS, str(tmp_path), *ends]  # how interpreters end
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    ended = done.stdout.split()
    said = [(tmp_path / f"{how}.txt").read_text() for how in ends]
    assert ended == ["0", "0", "0", "0", "7"], said
    results = [[*(tmp_path / how).glob("run/rank0/result.json")] for how in ends]
    assert [len(found) for found in results] == [1, 1, 0, 0, 1]
    assert ["nothing was recorded" in text for text in said] == [False, False, True, True, False]


@pytest.mark.full
def test_what_only_emits_ranges_starts_inside_ours(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
        with torch.autograd.profiler.emit_itt():
            models.train(case, steps=1)
    assert any("another torch profiler took over" in warning for warning in result_of(prof).warnings)
