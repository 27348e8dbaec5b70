"""The callbacks of the Hugging Face Trainer in real trainings on a CPU."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from processes import run_in_processes
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.config_flops.model_flops import model_flops
from profiler_wrapper.errors import ProfilerWrapperWarning, WrongUse
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord
from profiling import blocks_with_time
from trainers import (
    FLOPS_OF_SEQUENCE,
    REAL_TOKENS,
    TOKENS,
    Sequences,
    equal,
    logged_steps,
    scalars,
    wandb_rows,
    weights,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
from profiler_wrapper.integrations.transformers import (  # noqa: E402
    MonitorCallback,
    ProfilerCallback,
    _rates,
)

pytestmark = pytest.mark.full

PEAK_TFLOPS = 0.5


def trainer(tmp_path: Path, *callbacks: Any, model: str = "llama", seed: int = 0, **options: Any) -> Any:
    """A Trainer of 6 steps of 2 sequences, that logs every 2 steps and writes no checkpoint."""
    options = {
        "output_dir": str(tmp_path),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 2,
        "save_strategy": "no",
        "seed": seed,
        **options,
    }
    made = transformers.Trainer(
        model=models.build(model).model,
        args=transformers.TrainingArguments(**options),
        train_dataset=Sequences(),
        eval_dataset=Sequences(4),
        callbacks=list(callbacks),
    )
    made.remove_callback(transformers.trainer_callback.PrinterCallback)
    return made


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def listen(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Has `start_step` and `end_step` of the monitor told in `events`."""
    for name in ("start_step", "end_step"):
        original = getattr(TrainingMonitor, name)

        def told(self: Any, *args: Any, original: Any = original, name: str = name, **others: Any) -> None:
            events.append(name)
            original(self, *args, **others)

        monkeypatch.setattr(TrainingMonitor, name, told)


# --- the monitor ----------------------------------------------------------------------------------


def test_throughput_mfu_and_memory_of_every_step(tmp_path: Path) -> None:
    callback = MonitorCallback(peaks=PEAK_TFLOPS)
    made = trainer(tmp_path, callback)
    made.train()
    (steps,) = logged_steps(tmp_path)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        seconds = step["step_time_ms"] / 1e3
        assert (step["samples"], step["tokens"]) == (2, 2 * REAL_TOKENS)
        assert step["model_flops"] == 2 * FLOPS_OF_SEQUENCE
        assert step["samples_per_sec"] == pytest.approx(2 / seconds, rel=1e-6)
        assert step["tokens_per_sec"] == pytest.approx(2 * REAL_TOKENS / seconds, rel=1e-6)
        assert step["mfu"] == pytest.approx(2 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds, rel=1e-6)
        assert step["memory_GB"] > 0 and step["peak_memory_GB"] > 0
        assert step["epoch"] == 0
    assert list((tmp_path / "logs/perf_monitor").glob("perf_summary_*.json"))
    assert callback.monitor is not None and not callback.monitor.active
    assert hooks(made.model) == 0


def test_loss_norm_and_rate_are_those_that_the_trainer_logs(tmp_path: Path) -> None:
    made = trainer(tmp_path, MonitorCallback())
    made.train()
    (steps,) = logged_steps(tmp_path)
    logged = {entry["step"]: entry for entry in made.state.log_history if "loss" in entry}
    assert sorted(logged) == [2, 4, 6]
    for step in steps:
        entry = logged.get(step["iteration"])
        if entry is None:
            assert step["loss"] is None
        else:
            assert step["loss"] == pytest.approx(entry["loss"])
            assert step["grad_norm"] == pytest.approx(entry["grad_norm"])
            assert step["learning_rate"] == pytest.approx(entry["learning_rate"])
    assert all(step["learning_rate"] for step in steps)


def test_tensorboard_and_the_trainers_own_run_of_wandb(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(silent=True)
    wandb.init(dir=tmp_path, mode="offline", project="x", settings=settings)  # the Trainer takes it for its own
    made = trainer(tmp_path, MonitorCallback(peaks=PEAK_TFLOPS), report_to=["tensorboard", "wandb"])
    try:
        made.train()
    finally:
        wandb.finish()
    (steps,) = logged_steps(tmp_path)
    tags = scalars(tmp_path / "runs/perf_monitor")
    for tag in ("performance/tokens_per_second", "perf/mfu", "memory/peak_gb", "performance/tflops_per_gpu"):
        assert sorted(tags[tag]) == [2, 4, 6]
    two = steps[2:4]
    seconds = sum(step["step_time_ms"] for step in two) / 1e3
    assert tags["perf/mfu"][4] == pytest.approx(4 * FLOPS_OF_SEQUENCE / (PEAK_TFLOPS * 1e12) / seconds, rel=1e-4)
    (rows,) = wandb_rows(tmp_path)  # one run, not two
    ours = {row["train/global_step"]: row for row in rows if "perf/mfu" in row}
    assert sorted(ours) == [2, 4, 6]
    assert ours[4]["perf/mfu"] == pytest.approx(tags["perf/mfu"][4], rel=1e-4)
    assert ours[4]["memory/peak_gb"] == pytest.approx(tags["memory/peak_gb"][4], rel=1e-4)
    theirs = [row["train/loss"] for row in rows if "train/loss" in row]
    assert theirs == [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    trainer(tmp_path, MonitorCallback(), gradient_accumulation_steps=3, max_steps=4).train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"], step["tokens"]) for step in steps] == [
        (number, 6, 6 * REAL_TOKENS) for number in (1, 2, 3, 4)
    ]
    assert all(step["model_flops"] == 6 * FLOPS_OF_SEQUENCE for step in steps)


@pytest.mark.parametrize("masked", [True, False])
def test_micro_batches_padded_to_unlike_lengths_have_the_flops_of_each(tmp_path: Path, masked: bool) -> None:
    shapes: list[tuple[int, int]] = []
    lengths: list[int] = []

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        real = [1 + int(item["input_ids"][0]) % TOKENS for item in items]
        shapes.append((len(real), max(real)))
        lengths.append(sum(real))
        ids = torch.stack([item["input_ids"][: max(real)] for item in items])
        mask = torch.stack([(torch.arange(max(real)) < length).long() for length in real])
        batch = {"input_ids": ids, "labels": torch.where(mask == 0, -100, ids)}
        return {**batch, "attention_mask": mask} if masked else batch

    made = trainer(tmp_path, MonitorCallback(), gradient_accumulation_steps=3, max_steps=4)
    made.data_collator = collate
    made.train()
    (steps,) = logged_steps(tmp_path)
    for step, first in zip(steps, range(0, 12, 3), strict=True):
        micro = shapes[first : first + 3]
        assert len(set(micro)) > 1
        assert step["model_flops"] == sum(model_flops(made.model, *shape).total for shape in micro)
        padded = sum(rows * length for rows, length in micro)
        assert (step["samples"], step["tokens"]) == (6, sum(lengths[first : first + 3]) if masked else padded)


def test_a_last_batch_that_is_smaller(tmp_path: Path) -> None:
    made = trainer(tmp_path, MonitorCallback(), max_steps=-1, num_train_epochs=2)
    made.train_dataset = Sequences(5)
    made.train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["samples"], step["epoch"]) for step in steps] == [(2, 0), (2, 0), (1, 0), (2, 1), (2, 1), (1, 1)]


def test_evaluating_and_saving_are_no_steps_and_no_part_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    listen(monkeypatch, events)

    class Tells(transformers.TrainerCallback):
        def on_evaluate(self, *args: Any, **others: Any) -> None:
            events.append("evaluate")

        def on_save(self, *args: Any, **others: Any) -> None:
            events.append("save")

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    made = trainer(tmp_path, Tells(), MonitorCallback(), **options)
    made.train()
    made.evaluate()
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(number, 2) for number in range(1, 7)]
    assert events.count("evaluate") == 4 and events.count("save") == 2
    assert events.count("end_step") == 6
    for at, event in enumerate(events[:-1]):
        if event in ("evaluate", "save"):  # the next step begins after it
            assert events[at + 1] == "start_step"


def test_a_loss_that_the_trainer_is_kept_from_logging(tmp_path: Path) -> None:
    class Keeps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
            control.should_log = False
            return control

    trainer(tmp_path, MonitorCallback(), Keeps()).train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(number, 2) for number in range(1, 7)]


def test_a_loss_computed_from_parts_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, MonitorCallback(), gradient_accumulation_steps=2)

    def compute_loss(model: Any, inputs: Any, **others: Any) -> torch.Tensor:
        return model.lm_head(model.model(input_ids=inputs["input_ids"]).last_hidden_state).square().mean()

    monkeypatch.setattr(made, "compute_loss", compute_loss)
    made.train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["samples"], step["tokens"]) for step in steps] == [(4, None)] * 6


def test_resuming_goes_on_with_the_step_and_training_twice_writes_two_logs(tmp_path: Path) -> None:
    callback = MonitorCallback()
    made = trainer(tmp_path, callback, save_strategy="steps", save_steps=4)
    made.train()
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    runs = logged_steps(tmp_path)
    numbers = [[step["iteration"] for step in run] for run in runs]
    assert sorted(numbers) == [[1, 2, 3, 4, 5, 6], [5, 6]]
    assert not callback.failed


def test_the_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> tuple[list[torch.Tensor], list[float]]:
        made = trainer(tmp_path, *callbacks, model="gpt2", gradient_accumulation_steps=2)  # GPT-2 drops out
        made.train()
        return weights(made.model), [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    plain = trained()
    profiler = ProfilerCallback(steps="3-4", output_dir=tmp_path, files=("result",), enable_print_summary=False)
    monitor = MonitorCallback(peaks=1.0, flops_profile_freq=6, breakdown=True)
    both = trained(monitor, profiler)
    assert both[1] == plain[1]
    assert equal(both[0], plain[0])
    assert not profiler.failed and not monitor.failed and profiler.result is not None


def test_what_is_logged_has_the_last_steps_numbers(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reads(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            seen.append(dict(logs))

    trainer(tmp_path, MonitorCallback(peaks=PEAK_TFLOPS), Reads()).train()
    (steps,) = logged_steps(tmp_path)
    assert [log.get("mfu") for log in seen[:3]] == [pytest.approx(step["mfu"]) for step in steps[1::2]]
    assert "mfu" not in seen[-1]  # the summary of the training
    seen.clear()
    trainer(tmp_path, MonitorCallback(peaks=PEAK_TFLOPS, add_to_logs=False), Reads()).train()
    assert not any("mfu" in log for log in seen)


@pytest.mark.parametrize("method", ["__init__", "start_step", "end_step", "close"])
def test_a_failure_inside_is_one_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    callback = MonitorCallback()
    made = trainer(tmp_path, callback)

    broken = [True]

    def fails(*args: Any, **others: Any) -> None:
        if broken:
            raise RuntimeError("ours")

    monkeypatch.setattr(TrainingMonitor, method, fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.train()
    broken.clear()  # it is called once more when the process ends
    assert made.state.global_step == 6
    ours = [
        str(one.message)
        for one in said
        if one.category is ProfilerWrapperWarning and "RuntimeError" in str(one.message)
    ]
    assert len(ours) == 1 and "MonitorCallback is off" in ours[0]
    assert callback.failed
    assert hooks(made.model) == 0


def test_a_training_that_fails_can_be_followed_by_another(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        on = True

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.on and state.global_step == 3:
                raise ValueError("the user's")

    theirs, callback = Fails(), MonitorCallback()
    made = trainer(tmp_path, callback, theirs)
    with pytest.raises(ValueError, match="the user's"):
        made.train()
    theirs.on = False
    made.train()
    assert sorted(len(run) for run in logged_steps(tmp_path)) == [3, 6]
    assert hooks(made.model) == 0


def test_a_model_can_be_copied_and_pickled_meanwhile(tmp_path: Path) -> None:
    class Copies(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            twin = copy.deepcopy(model)
            twin.train()(input_ids=torch.ones(1, 4, dtype=torch.long))
            pickle.loads(pickle.dumps(model))(input_ids=torch.ones(1, 4, dtype=torch.long))

    trainer(tmp_path, Copies(), MonitorCallback()).train()
    (steps,) = logged_steps(tmp_path)
    assert {step["samples"] for step in steps} == {2}  # none of the copies counted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_callback_can_be_copied_before_and_meanwhile(tmp_path: Path, copied: Any) -> None:
    twins: list[Any] = []

    class Copies(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **others: Any) -> None:
            twins.append([copied(callback) for callback in callbacks])

    options = {"output_dir": tmp_path / "profile", "files": ("result",), "enable_print_summary": False}
    callbacks = [copied(MonitorCallback(tmp_path / "first", peaks=PEAK_TFLOPS)), copied(ProfilerCallback(**options))]
    trainer(tmp_path, *callbacks, Copies()).train()
    assert not any(callback.failed for callback in callbacks)
    monitor, profiler = twins[3]
    assert monitor.monitor is None and profiler.profiler is None and profiler.result is None
    trainer(tmp_path, monitor, profiler, max_steps=5).train()
    assert sorted(len(run) for run in logged_steps(tmp_path / "first")) == [5, 6]
    assert profiler.result is not None and profiler.result.complete
    assert not monitor.failed and not profiler.failed


def test_options_of_the_config_reach_the_files(tmp_path: Path) -> None:
    callback = MonitorCallback(perf_log_format="json", perf_log_interval=1)
    trainer(tmp_path, callback, max_steps=2).train()
    assert not list((tmp_path / "logs/perf_monitor").glob("perf_metrics_*.log"))
    assert callback.monitor is not None and callback.monitor.config.perf_log_interval == 1


def test_a_step_in_which_a_callback_of_the_user_evaluates_has_its_counts_and_no_time(tmp_path: Path) -> None:
    class Evaluates(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 3:
                made.evaluate()

    made = trainer(tmp_path, MonitorCallback(), Evaluates(), gradient_accumulation_steps=2)
    made.train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["iteration"], step["samples"]) for step in steps] == [(number, 4) for number in range(1, 7)]
    assert [step["iteration"] for step in steps if step["step_time_ms"] is None] == [4]


def test_a_compiled_model_is_counted(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3}
    made = trainer(tmp_path, MonitorCallback(), **options)
    made.train()
    (steps,) = logged_steps(tmp_path)
    assert [(step["samples"], step["tokens"]) for step in steps] == [(2, 2 * REAL_TOKENS)] * 3


def test_wrong_options_are_told_when_the_callback_is_made() -> None:
    with pytest.raises(WrongUse):
        MonitorCallback(config={"perf_log_interval": 0})
    with pytest.raises(WrongUse):
        MonitorCallback(peaks="bfloat17=3")
    with pytest.raises((TypeError, WrongUse)):
        MonitorCallback(no_such_option=1)
    with pytest.raises(WrongUse):
        ProfilerCallback(steps="b-a")


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "profiler_wrapper.integrations.transformers")
    with pytest.raises(ImportError, match="pip install"):
        import profiler_wrapper.integrations.transformers  # noqa: F401


# --- the profile ----------------------------------------------------------------------------------


def test_a_with_block_around_train_has_the_layers(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with ProfilerWrapper(made.model, output_dir=tmp_path, files=("result",), enable_print_summary=False) as prof:
        made.train()
    assert prof.result is not None
    assert blocks_with_time(prof.result) == {"model.layers.0", "model.layers.1"}
    assert len([step for step in prof.result.steps if step.step is not None]) == 3
    phases = {row.phase for row in prof.result.layers}
    assert {"forward", "backward", "optimizer"} <= phases


def test_the_callback_profiles_steps_and_not_micro_batches(tmp_path: Path) -> None:
    callback = ProfilerCallback(output_dir=tmp_path, files=("result",), enable_print_summary=False)
    made = trainer(tmp_path, callback, gradient_accumulation_steps=2)
    made.train()
    result = callback.result
    assert result is not None and result.complete
    assert [step.step for step in result.steps if step.step is not None] == [2, 3, 4]
    assert blocks_with_time(result) == {"model.layers.0", "model.layers.1"}
    root = next(row for row in result.layers if row.layer == "LlamaForCausalLM" and row.phase == "forward")
    assert root.calls == 3 * 2
    made.train()  # again
    assert callback.result is not result and not callback.failed


def test_a_profile_that_fails_lets_the_training_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ProfilerCallback(output_dir=tmp_path, files=("result",), enable_print_summary=False)
    made = trainer(tmp_path, callback)

    def fails(self: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(ProfilerWrapper, "step", fails)
    with pytest.warns(ProfilerWrapperWarning, match="ProfilerCallback is off"):
        made.train()
    assert made.state.global_step == 6


# --- two ranks ------------------------------------------------------------------------------------


def train_one_rank(output_dir: str) -> tuple[int, int, int | None, int | None, float | None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")  # asked for, and not used
    callback = MonitorCallback()
    made = trainer(Path(output_dir), callback, gradient_accumulation_steps=2, max_steps=4)
    made.train()
    assert callback.monitor is not None and callback.monitor.last is not None
    last = callback.monitor.last
    return made.args.process_index, made.args.world_size, last.samples, last.tokens, last.model_flops


def test_two_ranks_have_one_log_with_the_jobs_totals(tmp_path: Path) -> None:
    answers = run_in_processes(train_one_rank, str(tmp_path))
    sequences = 2 * 2 * 2  # of a batch, a step and both ranks
    assert answers == [
        (rank, 2, sequences, sequences * REAL_TOKENS, sequences * FLOPS_OF_SEQUENCE) for rank in range(2)
    ]
    (steps,) = logged_steps(tmp_path)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["TFLOPS_total"] == pytest.approx(2 * step["TFLOPS_per_GPU"])


def test_rates_of_a_profiled_step_stay_out_of_the_trainers_logs() -> None:
    record = StepRecord(step=1, timestamp=0.0, step_time_s=2.0, tokens=10)
    assert _rates(record) == {"tokens_per_second": 5.0}
    assert _rates(replace(record, profiled=True)) == {}
