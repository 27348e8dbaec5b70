"""Other profilers, threads and processes: who records, and what is said."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiling import profiler, result_of
from unchanged import CPU, names_in, nothing_left


@pytest.fixture
def case() -> Case:
    return models.build("llama")


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


def test_one_after_the_other(case: Case, tmp_path: Path) -> None:
    for _ in range(2):
        with profiler(case, tmp_path) as prof:
            models.train(case, steps=6)
        assert result_of(prof).complete
    assert len(list(tmp_path.iterdir())) == 2


# --- threads and processes ----------------------------------------------------------------------


def test_calls_on_other_threads_disturb_nothing(case: Case, tmp_path: Path) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(10):
                case.model(**case.batch(0))

    with nothing_left(case), profiler(case, tmp_path) as prof:
        thread = threading.Thread(target=evaluate)
        thread.start()
        models.train(case, steps=6)
        thread.join()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


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


def test_left_on_another_thread(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path)
    prof.__enter__()
    models.train(case, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=prof.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    if torch._C._autograd._profiler_enabled():  # nobody else can end it there
        torch.autograd._disable_profiler()
    assert prof.result is None or not prof.result.complete


def test_what_only_emits_ranges_starts_inside_ours(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
        with torch.autograd.profiler.emit_itt():
            models.train(case, steps=1)
    assert any("another torch profiler took over" in warning for warning in result_of(prof).warnings)
