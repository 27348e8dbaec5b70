"""Steps that a profiler disturbs are marked, and are in no mean; all others are not marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import build, optimizer_of, train_step
from monitoring import monitoring
from profiler_wrapper import ProfilerWrapper, ProfilerWrapperWarning
from profiler_wrapper.capture.session import Session
from profiler_wrapper.monitor import flop_probe
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord
from programs import LONGEST_S
from unchanged import CPU

STEPS = 9
Loop = Callable[[TrainingMonitor, Callable[[int], None], Callable[[], object]], None]


def between_steps(monitor: TrainingMonitor, work: Callable[[int], None], profiler_step: Callable[[], object]) -> None:
    for number in range(STEPS):
        with monitor.step():
            work(number)
        profiler_step()


def within_steps(monitor: TrainingMonitor, work: Callable[[int], None], profiler_step: Callable[[], object]) -> None:
    for number in range(STEPS):
        monitor.start_step()
        work(number)
        profiler_step()
        monitor.end_step()


def after_the_log(monitor: TrainingMonitor, work: Callable[[int], None], profiler_step: Callable[[], object]) -> None:
    for number in range(STEPS):
        work(number)
        monitor.log_step(number)
        profiler_step()


def without_begins(monitor: TrainingMonitor, work: Callable[[int], None], profiler_step: Callable[[], object]) -> None:
    for number in range(STEPS):
        work(number)
        profiler_step()
        monitor.end_step()


def check(monitor: TrainingMonitor, records: list[StepRecord], disturbed: set[int]) -> None:
    assert {record.step for record in records if record.profiled} == disturbed
    times = [record.step_time_s for record in records if not record.profiled and record.step_time_s is not None]
    assert monitor.statistics is not None
    assert monitor.statistics.rates.step_time_s == pytest.approx(sum(times) / len(times))
    assert monitor.statistics.profiled_steps == len(disturbed)


@pytest.mark.parametrize("loop", [None, after_the_log])
def test_steps_that_are_profiled_by_layer_are_marked(
    loop: Loop | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where recording begins to where it has ended and been analysed, whichever step that falls into."""
    case = build("llama")
    optimizer = optimizer_of(case.model)
    disturbed: set[int] = set()
    recording = [False]
    now = [0]

    def spy(name: str, on: bool) -> None:
        original = getattr(Session, name)

        def spied(self: Any) -> Any:
            disturbed.add(now[0])
            recording[0] = on
            return original(self)

        monkeypatch.setattr(Session, name, spied)

    spy("start", True)
    spy("stop", False)

    def work(number: int) -> None:
        now[0] = number
        train_step(case, case.model, optimizer)
        if recording[0]:
            disturbed.add(number)

    def step(profiler: ProfilerWrapper) -> None:
        now[0] += loop is after_the_log  # the next one has begun
        profiler.step()

    with monitoring(tmp_path) as (monitor, records):
        options: dict[str, Any] = {"files": (), "enable_print_summary": False, "background": False}
        with ProfilerWrapper(case.model, output_dir=tmp_path, steps="4-5", **options) as profiler:
            if loop is None:  # the optimizer's steps are the steps
                between_steps(monitor, work, int)
            else:
                loop(monitor, work, lambda: step(profiler))
        check(monitor, records, disturbed)
    assert {4, 5} <= disturbed
    assert profiler.result is not None


@pytest.mark.full
@pytest.mark.parametrize("wrapper_first", [False, True])
def test_the_measured_step_gives_way_to_a_profile_that_was_asked_for(
    wrapper_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the block is entered in the step that the monitor records, or its next window begins there."""
    monkeypatch.setattr(flop_probe, "FIRST_WAIT_S", LONGEST_S)  # a busy machine may take long to count a step
    monkeypatch.setattr(flop_probe, "_ANSWER_S", LONGEST_S)
    model = torch.nn.Linear(4, 4)
    steps = iter(range(100))
    monitor = TrainingMonitor(tmp_path / "monitor", model=model)

    def train(count: int, profiler: ProfilerWrapper | None) -> None:
        for _ in range(count):
            model(torch.ones(2, 4)).sum().backward()
            if profiler is not None:
                profiler.step()
            monitor.log_step(next(steps))

    train(0 if wrapper_first else 1, None)
    with (
        pytest.warns(ProfilerWrapperWarning, match="another torch profiler began within it"),
        ProfilerWrapper(
            model, output_dir=tmp_path, steps="1,4", files=(), enable_print_summary=False, background=False
        ) as profiler,
    ):
        train(8, profiler)
    train(4, None)
    monitor.close()
    assert [result.run["timed_steps"] for result in profiler.results] == [[1], [4]]
    [log] = (tmp_path / "monitor").rglob("perf_steps_*.jsonl")
    assert '"model_flops":128' in log.read_text()


@pytest.mark.parametrize(
    ("loop", "disturbed"),
    [
        (between_steps, {3, 4}),
        (within_steps, {2, 3, 4}),
        (after_the_log, {3, 4, 5}),
        (without_begins, {2, 3, 4}),
    ],
)
def test_steps_under_a_torch_profiler_with_a_schedule_are_marked(
    loop: Loop, disturbed: set[int], tmp_path: Path
) -> None:
    """It records from its third step's end to its fifth's, where it writes."""
    model = torch.nn.Linear(4, 4)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    written: list[Any] = []
    with monitoring(tmp_path) as (monitor, records):
        with torch.profiler.profile(activities=CPU, schedule=schedule, on_trace_ready=written.append) as theirs:
            loop(monitor, lambda _: model(torch.ones(2, 4)).sum().backward(), theirs.step)
        check(monitor, records, disturbed)
    assert len(written) == 1
