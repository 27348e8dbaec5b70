"""A measurement is used for steps whose batch is another one: in proportion, or not at all."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monitoring import CountedHere, monitoring
from profiler_wrapper.errors import Notices, ProfilerWrapperWarning
from profiler_wrapper.monitor import flop_probe
from profiler_wrapper.monitor.flop_probe import Counting, FlopProbe
from profiler_wrapper.monitor.work import Measurement, Parallelism, Roof, Shapes, StepWorks
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.tables.work.roofline import StepWork

MEASURED = StepWork(
    model_flops_by_dtype={"bfloat16": 800},
    hardware_flops_by_dtype={"bfloat16": 1200},
    causal_model_flops_by_dtype={"bfloat16": 600},
    causal_hardware_flops_by_dtype={"bfloat16": 900},
)

NOTHING = StepWork(
    model_flops_by_dtype={},
    hardware_flops_by_dtype={},
    causal_model_flops_by_dtype={},
    causal_hardware_flops_by_dtype={},
)


def works(shapes: Shapes, **options: Any) -> StepWorks:
    roof = Roof(
        Peaks(device="", flops_per_s={"bfloat16": 100.0}, bandwidth_bytes_per_s=None, source="given"), Notices()
    )
    sizes = Parallelism(world_size=1, data_parallel=1)
    found = StepWorks(roof=roof, sizes=sizes, convention="full", notices=Notices(), **{"dtype": "bfloat16", **options})
    found.take(Measurement(7, MEASURED), shapes)
    return found


@pytest.mark.parametrize(
    ("then", "now", "times"),
    [
        (((4, 16),), ((4, 16),), 1),
        (((4, 16),), ((1, 16),), 0.25),
        (((4, 16),), ((2, 16), (6, 16)), 2),  # two micro-batches
        (((4, 16), (2, 8)), ((1, 8), (2, 16)), 0.5),
        (((4, 16),), (), 1),  # not known: as it was
        ((), ((4, 16),), 1),
        (((4, None),), ((8, None),), 2),  # images
        (((4, 16),), ((8, None),), 2),
    ],
)
def test_flops_are_in_proportion_to_sequences_of_a_length(then: Shapes, now: Shapes, times: float) -> None:
    work = works(then).of(now)
    assert work is not None
    assert (work.model_flops, work.hardware_flops) == (800 * times, 1200 * times)
    assert (work.model_time_at_peak_s, work.hardware_time_at_peak_s) == (8 * times, 12 * times)
    assert (work.flops_source, work.flops_step) == ("measured", 7)


@pytest.mark.parametrize("now", [((4, 32),), ((8, 8),), ((4, 16), (2, 8)), ((4, 8), (2, 16))])
def test_for_other_lengths_a_measurement_does_not_hold(now: Shapes) -> None:
    then: Shapes = ((4, 16),) if len(now) == 1 else ((4, 16), (4, 8))
    found = works(then)
    with pytest.warns(ProfilerWrapperWarning, match=r"measured in step 7 on 4 x 16") as told:
        assert (found.of(now), found.of(now)) == (None, None)
    assert len(told) == 1
    assert found.of(then) is not None


def test_an_earlier_measurement_of_the_same_batch_holds_still() -> None:
    found = works(((4, 16),))
    twice = {name: {"bfloat16": 2000} for name in StepWork.__dataclass_fields__ if name.endswith("_by_dtype")}
    found.take(Measurement(9, StepWork(**twice)), ((4, 32),))  # type: ignore[arg-type]
    first, second = found.of(((4, 16),)), found.of(((4, 32),))
    assert first is not None and second is not None
    assert (first.model_flops, first.flops_step, second.model_flops, second.flops_step) == (800, 7, 2000, 9)


def test_for_other_lengths_there_is_the_formula() -> None:
    found = works(((4, 16),), formula=lambda sequences, length: float(sequences * (length or 0) ** 2))
    work = found.of(((2, 32),))
    assert work is not None
    assert (work.model_flops, work.flops_source) == (2048, "config")


def test_a_batch_that_is_larger_than_the_measured_one_has_more_flops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flop_probe, "Counting", CountedHere)
    model = torch.nn.Linear(64, 32)
    with monitoring(tmp_path, flops_profile_freq=100) as (monitor, records):
        for size in (4, 32, 2):
            with monitor.step(samples=size):
                model(torch.ones(size, 64)).sum().backward()
    # Forward and the gradient of the weights: nothing asks for that of the input.
    assert [record.model_flops for record in records] == [2 * 2 * size * 64 * 32 for size in (4, 32, 2)]


class Hangs:
    """A process that counts and never comes to an end."""

    def __init__(self, trace: Path, run: Any) -> None:
        self.cancelled = False
        trace.unlink()

    def wait(self, most_s: float) -> bool:
        return False

    def result(self) -> None:
        return None

    def cancel(self) -> None:
        self.cancelled = True


def test_a_counting_that_hangs_is_told_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_probe, "Counting", Hangs)
    probe = FlopProbe(1, Notices())
    assert probe.begin(0)
    with pytest.warns(ProfilerWrapperWarning, match="step 0 were not counted within 10 s"):
        probe.end()
    assert probe.finished() is None
    assert not probe.begin(1)
    now = time.monotonic()
    monkeypatch.setattr(flop_probe.time, "monotonic", lambda: now + flop_probe.COUNTING_MOST_S + 1)
    with pytest.warns(ProfilerWrapperWarning, match="took more than 600 s"):
        assert probe.finished() is None
    assert probe.begin(2)
    probe.close()


def test_a_process_whose_pipe_another_one_holds_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    holder = f"""
import os, sys
if os.fork():
    os._exit(0)
os.read({reading}, 1)  # for as long as the test wants
"""
    monkeypatch.setattr(flop_probe, "PROGRAM", holder)
    monkeypatch.setattr(flop_probe, "_ANSWER_S", 0.1)
    trace = tmp_path / "counted" / "trace.json"
    trace.parent.mkdir()
    start = subprocess.Popen
    monkeypatch.setattr(flop_probe.subprocess, "Popen", lambda *a, **o: start(*a, **{**o, "pass_fds": (reading,)}))
    counting = Counting(trace, {})
    os.close(reading)
    assert counting.wait(100)
    with pytest.raises(ValueError, match="gave no answer"):  # though that other one goes on until the test has ended
        counting.result()
    os.close(writing)
    assert not trace.parent.exists()


def test_a_trace_that_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_probe.tempfile, "tempdir", str(tmp_path))

    def half(self: Any, path: Path) -> None:
        path.with_name(f"{path.name}.tmp").write_text("{")
        raise OSError("no space left on device")

    monkeypatch.setattr(flop_probe.Session, "export", half)
    probe = FlopProbe(1, Notices())
    assert probe.begin(0)
    with pytest.warns(ProfilerWrapperWarning, match="no space left"):
        probe.end()
    assert list(tmp_path.iterdir()) == []


def test_a_step_without_ops_is_said_to_have_run_elsewhere() -> None:
    found = works(((4, 16),))
    with pytest.warns(ProfilerWrapperWarning, match="no op with FLOPs ran on the thread that the step began on"):
        found.take(Measurement(8, NOTHING))
