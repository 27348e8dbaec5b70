"""Loops that use the monitor wrongly, failures of its own, and processes it was not made in: training goes on."""

from __future__ import annotations

import math
import os
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

from monitoring import Clock, Device, Kept, monitoring, on_device
from profiler_wrapper.errors import ProfilerWrapperWarning, WrongUse
from profiler_wrapper.monitor.monitor import TrainingMonitor
from unchanged import Boom, fails, ours_in_the_way


def test_an_end_without_a_start_lasts_since_the_one_before(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        monitor.end_step()
        clock.now_s += 2.0
        monitor.end_step()
    assert [record.step_time_s for record in records] == [None, 2.0]


def test_of_two_starts_the_later_one_counts(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        monitor.start_step()
        clock.now_s += 2.0
        monitor.start_step()
        clock.now_s += 1.0
        monitor.end_step()
    assert [record.step_time_s for record in records] == [1.0]


def test_an_exception_of_the_user_passes_through_and_the_step_is_none(tmp_path: Path) -> None:
    with monitoring(tmp_path) as (monitor, records):
        with pytest.raises(Boom), monitor.step(tokens=1):
            raise Boom
        with monitor.step(tokens=1) as step:
            step.log(loss=0.5)
    assert [(record.step, record.loss) for record in records] == [(0, 0.5)]


def test_losses_are_told_as_they_are(tmp_path: Path) -> None:
    with monitoring(tmp_path) as (monitor, records):
        for loss in (-1.5, math.nan, math.inf, torch.tensor(2.5, requires_grad=True)):
            monitor.end_step(loss=loss)
    assert [record.loss for record in records[::3]] == [-1.5, 2.5]
    assert math.isnan(records[1].loss or 0.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tokens": -3}, "-3 is no number of tokens"),
        ({"tokens": math.nan}, "nan is no number of tokens"),
        ({"samples": "many"}, "it is a str, no number"),
        ({"loss": torch.zeros(3)}, r"tensor of shape \(3,\)"),
        ({"attention_mask": torch.zeros(2, 1, 4, 4)}, "shape"),
        ({"step": on_device(3)}, "reading it would wait"),
    ],
)
def test_what_is_no_number_is_left_out_with_one_warning(tmp_path: Path, given: dict[str, object], why: str) -> None:
    with monitoring(tmp_path, device=Device()) as (monitor, records):
        with pytest.warns(ProfilerWrapperWarning, match=why) as told:
            monitor.end_step(**given)  # type: ignore[arg-type]
            monitor.end_step(**given)  # type: ignore[arg-type]
        assert len(told) == 1
    assert (records[0].tokens, records[0].samples, records[0].loss) == (None, None, None)
    assert [record.step for record in records] == [0, 1]


def test_a_failure_of_ours_is_one_warning_and_the_end_of_the_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ours_in_the_way()
    with monitoring(tmp_path, breakdown=True) as (monitor, records):
        with monitor.step():
            pass
        monkeypatch.setattr("profiler_wrapper.monitor.steps.PendingStep.record", fails)
        with pytest.warns(ProfilerWrapperWarning, match=r"monitor is off, because end_step\(\) failed.*ours") as told:
            for _ in range(3):
                with monitor.step():
                    pass
        assert not monitor.active
    assert len(told) == 1
    assert len(records) == 1
    assert ours_in_the_way() == before


def test_a_failure_is_no_exception_where_warnings_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler_wrapper.monitor.steps.run_info", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monitoring(tmp_path) as (monitor, records), monitor.step():
            pass
    assert records == []


def test_a_monitor_that_is_switched_off_does_nothing(tmp_path: Path) -> None:
    for config in ({"enable_perf_monitor": False}, {"train": {"system": {"enable_perf_monitor": False}}}):
        with monitoring(tmp_path, config=config) as (monitor, records):
            with monitor.step(tokens=1):
                pass
            monitor.log_step(0, 0, 1.0, 1.0, 1.0)
            assert not monitor.active
        assert records == []
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_and_going_on_afterwards_does_nothing(tmp_path: Path) -> None:
    sink = Kept()
    monitor = TrainingMonitor(tmp_path, sinks=[sink], flops_profile_freq=0, peaks=1.0)
    monitor.log_step(0)
    monitor.close()
    monitor.close()
    monitor.log_step(1)
    assert (len(sink.records), sink.closed) == (1, 1)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    with monitoring(tmp_path, breakdown=True) as (monitor, records):
        monitor.start_step()
        child = os.fork()
        if child == 0:
            try:
                torch.nn.Linear(1, 1)(torch.zeros(1, 1))
                monitor.end_step(tokens=1)
                monitor.close()
            finally:
                os._exit(len(records))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        monitor.end_step(tokens=2)
    assert [record.tokens for record in records] == [2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": 3},
        {"batch_size": 0},
        {"seq_length": 1.5},
        {"flops_per_step": -1.0},
        {"dtype": "bfloat17"},
        {"counts": "all"},
        {"world_size": 0},
        {"world_size": 6, "tensor_parallel": 4},
        {"peaks": "nothing"},
        {"convention": "half"},
        {"flops_profile_freq": -1},
        {"config": 3},
        {"config": {"perf_log_intervall": 3}},
        {"log_rank": "first"},
        {"optimizer": 3},
    ],
)
def test_a_wrong_argument_is_told_when_the_monitor_is_made(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(WrongUse):
        TrainingMonitor(tmp_path, **wrong)  # type: ignore[arg-type]


def test_memory_stays_flat_over_many_steps(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock, sinks=[], flops_per_step=1.0, dtype="bfloat16") as (monitor, _):
        sizes = []
        for round_ in range(3):
            for _ in range(1_000):
                clock.now_s += 1.0
                monitor.log_step(monitor.last.step + 1 if monitor.last else 0, 0, 1.0, 1.0, 1e-3)
            if round_ == 0:
                tracemalloc.start()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[2] - sizes[1] < 4096
