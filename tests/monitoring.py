"""A device, clocks and a sink for tests of the monitor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_wrapper.monitor import monitor as monitor_module
from profiler_wrapper.monitor import sinks as sinks_module
from profiler_wrapper.monitor import steps as steps_module
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord
from profiler_wrapper.monitor.sinks import Sink
from profiler_wrapper.monitor.work import count_step
from profiler_wrapper.tables.work.roofline import StepWork
from profiler_wrapper.timer.device_events import StepClock


class Kept(Sink):
    """Keeps what it is given."""

    name = "kept"
    every_step = True
    waited_for = True

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.session: Any = None
        self.closed = 0

    def open(self, session: Any) -> None:
        self.session = session

    def write(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self, statistics: Any) -> None:
        self.closed += 1


class CountedHere:
    """In the place of a process that counts a step: it is counted in this one, so that the next step knows."""

    def __init__(self, trace: Path, run: Any) -> None:
        self._directory, self._work = trace.parent, count_step(trace, run)
        self.cancel()

    def wait(self, most_s: float) -> bool:
        return True

    def result(self) -> StepWork:
        return self._work

    def cancel(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Device:
    """An accelerator that is given work by the millisecond, and does it when the test lets it.

    As a real one it refuses to tell the time of an event that it did not come to.
    """

    def __init__(self) -> None:
        self.given_ms = 0.0  # all the work it was given
        self.done_ms = 0.0  # what it has done of it
        self.in_use = True
        self.bytes: tuple[int | None, int | None] = (3 << 30, 5 << 30)
        self.events = 0

    def work(self, milliseconds: float) -> None:
        self.given_ms += milliseconds

    def catch_up(self, milliseconds: float | None = None) -> None:
        self.done_ms = self.given_ms if milliseconds is None else self.done_ms + milliseconds

    def ready(self) -> bool:
        return self.in_use

    def event(self) -> DeviceEvent:
        self.events += 1
        return DeviceEvent(self)

    def memory(self) -> tuple[int | None, int | None]:
        return self.bytes

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.Tensor.detach(tensor.as_subclass(torch.Tensor)).as_subclass(HostCopy)
        copy.on, copy.at_ms = self, self.given_ms
        return copy


class HostCopy(torch.Tensor):
    """Memory that holds the number only when the device has come to the copy."""

    on: Device
    at_ms: float

    def item(self) -> Any:
        assert self.at_ms <= self.on.done_ms, "read before it was there"
        return super().item()


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms = device, float("nan")

    def record(self) -> None:
        self.at_ms = self.device.given_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.done_ms

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        return end_event.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("the monitor waits for the device")


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and cannot be read without waiting."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def item(self) -> Any:
        raise AssertionError("the monitor waits for a number")


def on_device(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(OnDevice)


@contextmanager
def monitoring(
    directory: Path, *, device: Device | None = None, clock: Clock | None = None, **options: Any
) -> Iterator[tuple[TrainingMonitor, list[StepRecord]]]:
    """A monitor with a fake device or a fake clock, and what it wrote."""
    sink = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor_module, "find_accelerator", lambda _: device)
        for patience in ("WAIT_S", "CLOSING_S"):  # the machine may be busy
            patch.setattr(sinks_module, patience, 100.0)
        if clock is not None:
            patch.setattr(
                steps_module, "StepClock", lambda device: StepClock(device, host_clock=lambda: round(clock() * 1e9))
            )
        options = {"flops_profile_freq": 0, "sinks": [sink], "peaks": 1.0, **options}
        with TrainingMonitor(directory, **options) as monitor:
            yield monitor, sink.records
