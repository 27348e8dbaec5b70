"""FLOPs of real steps, measured while they run: right, and nothing of the training is changed by it."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import Case, build, optimizer_of, train_step
from monitoring import CountedHere, Kept, monitoring
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.monitor import flop_probe
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord
from profiler_wrapper.tables.model import FlopRow
from profiler_wrapper.tables.work.flops import FlopCount
from profiler_wrapper.tables.work.roofline import hides_recompute
from programs import LONGEST_S
from unchanged import CPU, fails, hooks_of, ours_in_the_way
from variants import gradient_checkpointing

# Forward and backward of the Llama of the tests on 2 x 16 tokens: 2 layers, 64 wide, 4 heads, 2 of keys, 128 words.
LAYER = 2 * (2 * 16) * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
HEAD = 2 * (2 * 16) * 64 * 128
SCORES = 2 * (2 * 16 * 16 * 64)  # of one of the two products of attention
MODEL = 3 * (2 * LAYER + HEAD) + 3 * 2 * 2 * SCORES
LAST_PRODUCT = 2 * (2 * 16) * 64 * 128  # of a layer, whose result backward does not need: recomputing stops before it
SCORES_AGAIN = 2 * SCORES  # fused attention makes them again in its backward


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to count a step."""
    monkeypatch.setattr(flop_probe, "FIRST_WAIT_S", LONGEST_S)
    monkeypatch.setattr(flop_probe, "_ANSWER_S", LONGEST_S)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted in this process, so that the next one knows."""
    monkeypatch.setattr(flop_probe, "Counting", CountedHere)


def run(
    directory: Path, case: Case, *, steps: int = 4, train: Callable[..., float] = train_step, **options: Any
) -> list[StepRecord]:
    optimizer = optimizer_of(case.model)
    with monitoring(directory, model=case.model, **options) as (monitor, records):
        for step in range(steps):
            with monitor.step(samples=2, tokens=32):
                train(case, case.model, optimizer, seed=step)
    return records


@pytest.mark.usefixtures("at_once")
def test_measured_flops_are_those_by_hand_and_by_the_config(tmp_path: Path) -> None:
    case = build("llama")
    measured = run(tmp_path, case, flops_profile_freq=2)
    by_config = run(tmp_path, case, flops_profile_freq=0)
    assert {record.model_flops for record in (*measured, *by_config)} == {MODEL}
    assert {record.hardware_flops for record in measured} == {MODEL + SCORES_AGAIN}
    assert [(record.flops_source, record.flops_step, record.profiled) for record in measured] == [
        ("measured", 0, True),
        ("measured", 0, False),
        ("measured", 2, True),
        ("measured", 2, False),
    ]
    assert {(record.flops_source, record.flops_step, record.profiled) for record in by_config} == {
        ("config", None, False)
    }


@pytest.mark.usefixtures("at_once")
def test_the_causal_convention_leaves_out_half_of_attention(tmp_path: Path) -> None:
    case = build("llama")
    measured = run(tmp_path, case, steps=1, flops_profile_freq=2, convention="causal")
    by_config = run(tmp_path, case, steps=1, flops_profile_freq=0, convention="causal")
    assert measured[0].model_flops == by_config[0].model_flops == MODEL - 3 * 2 * SCORES
    assert measured[0].convention == "causal"


@pytest.mark.usefixtures("at_once")
def test_recomputed_forwards_are_hardware_flops(tmp_path: Path) -> None:
    case = build("llama")
    gradient_checkpointing(case.model)
    record = run(tmp_path, case, steps=1, flops_profile_freq=1)[0]
    assert record.model_flops == MODEL
    assert record.hardware_flops is not None
    assert record.hardware_flops == MODEL + SCORES_AGAIN + 2 * (LAYER + 2 * SCORES - LAST_PRODUCT)


@pytest.mark.usefixtures("at_once")
def test_frozen_layers_and_micro_batches_are_as_they_ran(tmp_path: Path) -> None:
    case = build("llama")

    def accumulate(*args: Any, **options: Any) -> float:
        return train_step(*args, **options, accumulate=3)

    assert run(tmp_path, case, steps=1, flops_profile_freq=1, train=accumulate)[0].model_flops == 3 * MODEL
    case.model.model.requires_grad_(False)  # no gradient of what is below the head, nor of what comes into it
    with pytest.warns(ProfilerWrapperWarning, match="not trained"):
        record = run(tmp_path, case, steps=1, flops_profile_freq=1)[0]
    assert record.model_flops == 2 * LAYER + 2 * 2 * SCORES + 2 * HEAD


def test_a_step_is_counted_by_another_process(tmp_path: Path) -> None:
    case = build("llama")
    first = run(tmp_path, case, steps=2, flops_profile_freq=500)
    assert [record.model_flops for record in first] == [MODEL, MODEL]


@pytest.mark.full
def test_what_another_process_counted_is_found_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_probe, "FIRST_WAIT_S", 0.0)
    until = time.monotonic() + LONGEST_S
    with (
        monitoring(tmp_path, model=torch.nn.Linear(4, 4), flops_profile_freq=500) as (monitor, records),
        pytest.warns(ProfilerWrapperWarning, match="were not counted within"),
    ):
        while time.monotonic() < until and not (records and records[-1].flops_source == "measured"):
            with monitor.step(samples=2):
                monitor._watch._args.model(torch.ones(2, 4)).sum().backward()  # type: ignore[misc]
            time.sleep(0.05)
    assert (records[-1].flops_source, records[-1].model_flops) == ("measured", 2 * 2 * 2 * 4 * 4)


@pytest.mark.full
def test_traces_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run(tmp_path, build("llama"), steps=3, flops_profile_freq=1)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("accelerate", ["plain", "dropout"])
def test_training_is_the_same_bit_for_bit(tmp_path: Path, accelerate: str) -> None:
    def trained(frequency: int) -> list[Any]:
        case = build("gpt2" if accelerate == "dropout" else "llama")
        optimizer = optimizer_of(case.model)
        torch.manual_seed(3)
        case.model.get_submodule(case.blocks)[0].eval()
        modes = [module.training for module in case.model.modules()]
        hooks, ours = hooks_of(case.model), ours_in_the_way()
        losses = []
        with monitoring(tmp_path, model=case.model, flops_profile_freq=frequency, breakdown=True) as (monitor, _):
            for step in range(4):
                with monitor.step(samples=2, tokens=32) as block:
                    optimizer.zero_grad()
                    loss = case.loss(case.model, case.batch(step))
                    loss.backward()
                    optimizer.step()
                    block.log(loss=loss)
                losses.append(loss.item())
                assert [module.training for module in case.model.modules()] == modes
        assert (hooks_of(case.model), ours_in_the_way()) == (hooks, ours)
        gradients = [parameter.grad for parameter in case.model.parameters()]
        return [losses, torch.get_rng_state(), *case.model.state_dict().values(), *gradients]

    for one, other in zip(trained(0), trained(2), strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("model_is_given", [True, False])
def test_a_loop_that_only_logs_is_measured_from_its_second_step_on(tmp_path: Path, model_is_given: bool) -> None:
    """Without a model too: it is the real step that is measured."""
    case = build("llama")
    optimizer = optimizer_of(case.model)
    config = {"monitoring": {"flops_profile_freq": 500}}
    sink = Kept()
    more = {"model": case.model} if model_is_given else {}
    monitor = TrainingMonitor(tmp_path, config, flops_profile_freq=500, peaks=1.0, sinks=[sink], **more)  # type: ignore[arg-type]
    for step in range(3):
        loss = train_step(case, case.model, optimizer)
        monitor.log_step(step, 0, loss, 1.0, 1e-3, torch.ones(2, 16, dtype=torch.long))
    monitor.close()
    assert [record.model_flops for record in sink.records] == [MODEL if model_is_given else None, MODEL, MODEL]
    first = "config" if model_is_given else None
    assert [record.flops_source for record in sink.records] == [first, "measured", "measured"]
    assert [record.tokens for record in sink.records] == [32] * 3


@pytest.mark.full
def test_under_another_profiler_nothing_is_measured_and_nothing_is_taken_from_it(tmp_path: Path) -> None:
    case = build("llama")
    said = pytest.warns(ProfilerWrapperWarning, match="another torch profiler is on")
    with torch.profiler.profile(activities=CPU) as theirs, said:
        records = run(tmp_path, case, steps=2, flops_profile_freq=1)
    assert len(theirs.events()) > 100
    assert [record.flops_source for record in records] == ["config", "config"]


def test_a_profiler_that_begins_within_a_measured_step_gets_its_recording(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    with monitoring(tmp_path, model=case.model, flops_profile_freq=1) as (monitor, records):
        monitor.start_step()
        with (
            pytest.warns(ProfilerWrapperWarning, match="began within it"),
            torch.profiler.profile(activities=CPU) as theirs,
        ):
            train_step(case, case.model, optimizer)
        monitor.end_step(samples=2, tokens=32)
    assert len(theirs.events()) > 100
    assert records[0].flops_source == "config"


def test_a_recording_left_on_another_thread_ends_with_the_next_call_where_it_began(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with monitoring(tmp_path, flops_profile_freq=1) as (monitor, records):
        monitor.start_step()
        ending = threading.Thread(target=monitor.end_step)
        with pytest.warns(ProfilerWrapperWarning, match="ended on another thread"):
            ending.start()
            ending.join()
        assert torch._C._autograd._profiler_enabled()
        model(torch.ones(4))
        assert not torch._C._autograd._profiler_enabled()
        with monitor.step(samples=4):
            model(torch.ones(4)).sum().backward()
        assert monitor.active
    assert [record.flops_step for record in records] == [None, 1]


@pytest.mark.parametrize("what", ["start", "export"])
def test_a_profiler_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(flop_probe.Session, what, fails)
    with pytest.warns(ProfilerWrapperWarning, match="could not be measured") as told:
        records = run(tmp_path, build("llama"), steps=3, flops_profile_freq=1)
    assert len(told) == 1
    assert [record.flops_source for record in records] == ["config"] * 3


def test_where_no_process_can_be_started_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: Any, **options: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(flop_probe.subprocess, "Popen", no_process)
    with pytest.warns(ProfilerWrapperWarning, match="could not be measured: OSError: no more processes"):
        assert run(tmp_path, build("llama"), steps=1, flops_profile_freq=1)[0].flops_source == "config"


@pytest.mark.full
def test_a_process_that_dies_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    started = []

    def dies(command: list[str], **options: Any) -> Any:
        started.append(command)
        return start([command[0], "-c", "raise SystemExit(3)"], **options)

    monkeypatch.setattr(flop_probe.subprocess, "Popen", dies)
    with pytest.warns(ProfilerWrapperWarning, match="gave no answer") as told:
        records = run(tmp_path, build("llama"), steps=2, flops_profile_freq=1)
    assert len(told) == 1
    assert len(started) == 2
    assert [record.flops_source for record in records] == ["config", "config"]


def test_a_recording_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_probe.GrowthBound, "exceeded", lambda self: "the process grew too much")
    with pytest.warns(ProfilerWrapperWarning, match="were not measured, because the process grew too much"):
        records = run(tmp_path, build("llama"), steps=1, flops_profile_freq=1)
    assert records[0].flops_source == "config"


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
def test_compiled_models_are_measured_when_nothing_compiles_any_more(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    compiled = torch.compile(model, backend="aot_eager")
    with monitoring(tmp_path, flops_profile_freq=500) as (monitor, records):
        for _ in range(4):
            with monitor.step(samples=2):
                compiled(torch.ones(2, 8)).sum().backward()
    assert [record.flops_step for record in records] == [None, 1, 1, 1]
    assert [record.profiled for record in records] == [True, True, False, False]
    assert records[-1].model_flops == 2 * (2 * 2 * 8 * 8)


def test_a_forward_that_compiled_code_repeats_unseen_is_not_counted_as_the_models(tmp_path: Path) -> None:
    """Backward has twice the forward's FLOPs at most, so more was computed again."""

    def row(phase: Any, flops: int, repeated: int = 0) -> FlopRow:
        return FlopRow(
            layer="",
            phase=phase,
            class_name="gemm",
            dtype="float32",
            flops_per_step=flops,
            causal_flops_per_step=flops,
            repeated_flops_per_step=repeated,
            causal_repeated_flops_per_step=repeated,
            reason="",
        )

    def computes_again(*rows: FlopRow) -> bool:
        found: Any = SimpleNamespace(notes=("some code is not known",))
        return hides_recompute(found, FlopCount(steps=1, rows=rows, uncounted=()))

    assert not computes_again(row("forward", 10), row("backward", 21, repeated=1), row("recompute", 10))
    assert computes_again(row("forward", 10), row("backward", 30))
