"""Times of steps: those of the device, read when it is done, and never waited for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monitoring import Clock, Device, Kept, OnDevice, monitoring, on_device
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.monitor import steps as steps_module
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.timer.device_events import Accelerator


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "CLOSING_WAIT_S", 0.01)


def test_on_a_cpu_a_step_lasts_from_start_to_end(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        for seconds in (0.5, 0.25):
            monitor.start_step()
            clock.now_s += seconds
            monitor.end_step()
            clock.now_s += 10.0
        assert [record.step_time_s for record in records] == [0.5, 0.25]
        assert [record.step for record in records] == [0, 1]


def test_with_log_step_a_step_lasts_since_the_one_before(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        for step in range(3):
            clock.now_s += 0.5
            monitor.log_step(step, 0, 1.0, 2.0, 1e-3)
        assert [record.step_time_s for record in records] == [None, 0.5, 0.5]
        assert (records[1].loss, records[1].grad_norm, records[1].learning_rate) == (1.0, 2.0, 1e-3)


def test_with_log_step_what_logging_takes_is_part_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        end_step = monitor.end_step

        def write(**numbers: Any) -> None:
            end_step(**numbers)
            clock.now_s += 0.25

        monkeypatch.setattr(monitor, "end_step", write)
        for step in range(3):
            clock.now_s += 0.5
            monitor.log_step(step)
        assert [record.step_time_s for record in records] == [None, 0.75, 0.75]


def test_a_step_is_told_when_the_device_has_come_to_its_end_and_in_order(tmp_path: Path) -> None:
    device, clock = Device(), Clock()
    with monitoring(tmp_path, device=device, clock=clock) as (monitor, records):
        for milliseconds in (30.0, 20.0, 10.0):
            monitor.start_step()
            device.work(milliseconds)
            clock.now_s += 0.001  # the host is far ahead
            monitor.end_step(samples=1)
        assert records == []
        device.catch_up(30.0)
        monitor.start_step()
        assert [record.step_time_s for record in records] == [0.030]
        device.catch_up(25.0)
        monitor.end_step(samples=1)
        assert [record.step_time_s for record in records] == [0.030, 0.020]
        device.catch_up()
    assert [record.step_time_s for record in records] == pytest.approx([0.030, 0.020, 0.010, 0.0])
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert records[0].memory_bytes == 3 << 30
    assert records[0].peak_memory_bytes == 5 << 30


def test_closing_waits_a_moment_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "CLOSING_WAIT_S", 300.0)
    device = Device()
    with monitoring(tmp_path, device=device) as (monitor, records):
        monitor.start_step()
        device.work(30.0)
        monitor.end_step()
        threading.Timer(0.05, device.catch_up).start()
        monitor.close()
        assert [record.step_time_s for record in records] == [0.030]


def test_numbers_on_the_device_are_read_when_they_are_there(tmp_path: Path) -> None:
    device = Device()
    with monitoring(tmp_path, device=device) as (monitor, records):
        monitor.start_step()
        device.work(5.0)
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        monitor.end_step(loss=on_device(2.5), grad_norm=on_device([0.5]), attention_mask=on_device(mask))
        assert records == []
        device.catch_up()
    assert (records[0].loss, records[0].grad_norm) == (2.5, 0.5)
    assert (records[0].samples, records[0].tokens) == (2, 3)


def test_masks_on_two_accelerators_are_not_added(tmp_path: Path) -> None:
    class OnAnother(OnDevice):
        device = torch.device("cuda:1")  # type: ignore[assignment]

    device = Device()
    masks = [on_device(torch.ones(2, 3)), torch.ones(2, 3).as_subclass(OnAnother)]
    several = pytest.warns(ProfilerWrapperWarning, match="several accelerators")
    with several as told, monitoring(tmp_path, device=device) as (monitor, records):
        for _ in range(2):
            monitor.start_step()
            monitor.end_step(attention_mask=masks)
    assert len(told) == 1
    assert [(record.samples, record.tokens) for record in records] == [(4, None)] * 2


def test_steps_a_device_never_comes_to_are_told_without_their_time(tmp_path: Path, quick_end: None) -> None:
    device = Device()
    with monitoring(tmp_path, device=device) as (monitor, records), pytest.warns(ProfilerWrapperWarning) as told:
        monitor.start_step()
        device.work(5.0)
        monitor.end_step(loss=on_device(2.5), samples=4)
        monitor.close()
    assert (records[0].step_time_s, records[0].loss, records[0].samples) == (None, None, None)
    assert "did not come to its end" in str(told[0].message)


def test_no_more_than_a_bounded_number_of_steps_is_pending(tmp_path: Path, quick_end: None) -> None:
    device = Device()
    with monitoring(tmp_path, device=device) as (monitor, records):
        with pytest.warns(ProfilerWrapperWarning, match="did not come to its end"):
            for _ in range(1030):
                monitor.start_step()
                device.work(1.0)
                monitor.end_step()
        assert [record.step for record in records] == list(range(1030 - 1024))
        assert all(record.step_time_s is None for record in records)
        device.catch_up()
    assert [record.step for record in records] == list(range(1030))
    assert records[-1].step_time_s == pytest.approx(1e-3)


def test_a_clock_that_runs_backwards_gives_no_time(tmp_path: Path) -> None:
    clock = Clock()
    with monitoring(tmp_path, clock=clock) as (monitor, records):
        monitor.start_step()
        clock.now_s -= 1.0
        with pytest.warns(ProfilerWrapperWarning, match="ran backwards"):
            monitor.end_step(samples=1)
        monitor.start_step()
        clock.now_s += 1.0
        monitor.end_step(samples=1)
    assert [record.step_time_s for record in records] == [None, 1.0]
    assert records[0].samples_per_s is None


def test_a_device_that_is_not_in_use_yet_is_left_alone(tmp_path: Path) -> None:
    device, clock = Device(), Clock()
    device.in_use = False
    with monitoring(tmp_path, device=device, clock=clock) as (monitor, records):
        monitor.start_step()
        clock.now_s += 0.5
        monitor.end_step()
        assert device.events == 0
        assert records[0].step_time_s == 0.5
        assert records[0].memory_bytes is None


class _CudaEvent:
    """Reached at once, 40 ms after the one before."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        type(self).made += 1
        self.at_ms = 40.0 * self.made

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return float(end.at_ms - self.at_ms)


def _waits(*args: object, **options: object) -> None:
    raise AssertionError("the monitor waits for the device")


def test_on_cuda_events_and_the_allocators_own_counts_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"allocated_bytes": {"all": {"current": 7, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", _CudaEvent)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: statistics)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, _waits)
    sink = Kept()
    with TrainingMonitor(
        tmp_path, device="cuda", sinks=[sink], flops_per_step=2e9, peaks=1.0, dtype="float32"
    ) as monitor:
        for _ in range(2):
            with monitor.step(tokens=8):
                pass
        assert monitor.active
    assert [record.step_time_s for record in sink.records] == [0.040, 0.040]
    assert (sink.records[0].memory_bytes, sink.records[0].peak_memory_bytes) == (7, 9)
    assert sink.records[0].mfu == pytest.approx(2e9 / 0.040 / 1e12)


def test_a_device_without_pinned_memory_copies_too() -> None:
    tensor = torch.tensor(2.5)
    assert Accelerator("cuda").copy(tensor).item() == 2.5  # there is none here, so nothing can be pinned


def test_nothing_is_recorded_on_a_stream_that_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", _waits)
    sink = Kept()
    with TrainingMonitor(tmp_path, device="cuda", sinks=[sink], flops_profile_freq=0, peaks=1.0) as monitor:
        with monitor.step():
            pass
        assert monitor.active
    assert sink.records[0].step_time_s is not None
