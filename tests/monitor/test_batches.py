"""A monitor that is switched off by the environment, copied, used by two threads, or given odd numbers and paths."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monitoring import Device, Kept, monitoring, on_device
from profiler_wrapper.errors import ProfilerWrapperWarning, WrongUse
from profiler_wrapper.monitor.batches import BatchCounter
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.steps import Job


@pytest.mark.parametrize("word", ["off", " OFF ", "0"])
def test_the_environment_switches_the_monitor_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", word)
    with monitoring(tmp_path, flops_profile_freq=1) as (monitor, records):
        monitor.start_step()
        assert not torch._C._autograd._profiler_enabled()
        monitor.end_step(tokens=1)
        assert not monitor.active
    assert records == []
    assert list(tmp_path.iterdir()) == []


def _pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled, _saved])
def test_the_copy_of_a_model_that_holds_its_monitor_holds_one_that_is_off(tmp_path: Path, copied: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with monitoring(tmp_path, model=model) as (monitor, records):
        model.monitor = monitor  # type: ignore[assignment]
        monitor.log_step(0)
        other = copied(model)
        other = copied(monitor) if copied is copy.copy else other.monitor
        assert isinstance(other, TrainingMonitor)
        other.log_step(1)
        other.close()
        assert (other.active, monitor.active) == (False, True)
        monitor.log_step(2)
    assert [record.step for record in records] == [0, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_the_copy_of_a_model_whose_batches_are_counted_can_be_called(copied: Any) -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    counter = BatchCounter(model)
    counter.start()
    model(x)
    assert len(counter.take()) == 1
    copied(model)(x)
    model(x)
    assert len(counter.take()) == 1
    counter.stop()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"perf_log_dir": 5}},
        {"config": {"tensorboard_dir": 3}},
        {"log_file": 5},
    ],
)
def test_a_path_that_is_none_is_told_when_the_monitor_is_made(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongUse, match="give a path"):
        TrainingMonitor(tmp_path, **wrong)


@pytest.mark.parametrize("loss", [torch.tensor(1 + 2j), on_device(1 + 2j), 1j])
def test_complex_numbers_are_left_out(tmp_path: Path, loss: Any) -> None:
    with monitoring(tmp_path, device=Device()) as (monitor, records):
        with pytest.warns(ProfilerWrapperWarning, match="leaves out loss: it is"):
            monitor.end_step(loss=loss)
        assert monitor.active
    assert [record.loss for record in records] == [None]


def test_two_threads_that_end_the_first_step_have_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, opened = threading.Barrier(2, timeout=0.3), []
    really_open = Job.open

    def slowly(self: Job, *about: Any) -> None:
        opened.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # until the other thread is here too, if it comes
        really_open(self, *about)

    monkeypatch.setattr(Job, "open", slowly)
    sink = Kept()
    with monitoring(tmp_path, sinks=[sink]) as (monitor, _):
        threads = [threading.Thread(target=monitor.end_step, kwargs={"step": step}) for step in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert monitor.active
    assert len(opened) == 1
    assert sorted(record.step for record in sink.records) == [1, 2]


@pytest.mark.parametrize("name", ["tokens", "samples", "loss", "epoch", "step"])
def test_numbers_that_are_too_large_are_left_out(tmp_path: Path, name: str) -> None:
    with monitoring(tmp_path) as (monitor, records):
        with pytest.warns(ProfilerWrapperWarning, match=f"leaves out {name}: it is too large"):
            monitor.end_step(**{name: 10**400})  # type: ignore[arg-type]
        assert monitor.active
    assert [record.step for record in records] == [0]
