"""Loops that are not the usual forward, backward, step: nothing changes, and what is missing is said."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture.owned_tensors import may_come
from profiler_wrapper.capture.session import Session
from profiler_wrapper.run import recorder, window
from profiling import directory_of, profiler, result_of
from unchanged import nothing_left


def forward_calls(prof: pw.ProfilerWrapper, layer: str) -> int | None:
    return next(row.calls for row in result_of(prof).rows(layer) if row.phase == "forward")


def train_with_an_optimizer_in_backward(case: Case, steps: int) -> list[float]:
    optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in case.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in case.model.parameters()]
    losses = []
    for step in range(steps):
        loss = case.loss(case.model, case.batch(step))
        loss.backward()
        losses.append(float(loss.detach()))
    for hook in hooks:
        hook.remove()
    return losses


def test_an_optimizer_that_steps_inside_of_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = train_with_an_optimizer_in_backward(models.build("llama"), 8)
    torch.manual_seed(0)
    case = models.build("llama")
    with nothing_left(case), profiler(case, tmp_path) as prof:
        assert train_with_an_optimizer_in_backward(case, 8) == plain
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]
    assert forward_calls(prof, "model.layers.0") == 3


@pytest.mark.parametrize("left_out", [{0}, {1, 4}, set(range(8))])
def test_a_step_that_a_scaler_leaves_out_is_one(tmp_path: Path, left_out: set[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    case = Case("scaled", model, lambda seed: {}, lambda model, batch: torch.zeros(()), "")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    step_of_torch = torch.amp.GradScaler.step
    with nothing_left(case), profiler(case, tmp_path) as prof:
        for step in range(8):
            for _ in range(2):
                loss = model(torch.ones(2, 4)).sum() * (float("inf") if step in left_out else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.amp.GradScaler.step is step_of_torch
    result = result_of(prof)
    assert (result.run["timed_steps"], result.run["step_source"]) == ([2, 3, 4], "optimizer")
    assert forward_calls(prof, "0") == 6


@pytest.mark.full
def test_nothing_begins_or_ends_while_a_cuda_graph_is_captured(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, seen = False, []

    def noting(name: str) -> None:
        method = getattr(Session, name)

        def noted(self: Session, *args: Any) -> Any:
            seen.append((name, capture))
            return method(self, *args)

        monkeypatch.setattr(Session, name, noted)

    noting("start")
    noting("stop")
    monkeypatch.setattr(recorder, "capturing", lambda: capture)
    optimizer = models.optimizer_of(case.model)
    with profiler(case, tmp_path) as prof:
        for step in range(12):
            capture = step in (1, 4)  # at whose end sessions would be switched
            models.train_step(case, case.model, optimizer, seed=step)
            capture = False
    assert len(seen) >= 2
    assert not [name for name, captured in seen if captured]
    assert result_of(prof).steps


def test_without_an_optimizer_a_step_is_a_call_and_its_backward(case: Case, tmp_path: Path) -> None:
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)  # of nothing that is called
    with profiler(case, tmp_path) as prof:
        for step in range(8):
            prof.record_function("block", lambda seed=step: case.loss(case.model, case.batch(seed))).backward()  # type: ignore[misc]
    result = result_of(prof)
    assert result.run["full_steps"] == [0, 1]
    assert result.run["timed_steps"] == [2, 3, 4]
    assert forward_calls(prof, "LlamaForCausalLM") == 3
    for phase in ("forward", "backward"):
        assert sum(row.time_ns for row in result.layers if row.phase == phase) > 0
    assert all(result.series["block"])
    del optimizer


@pytest.mark.full
def test_micro_batches_before_an_optimizer_is_made_are_recorded_anew(case: Case, tmp_path: Path) -> None:
    optimizer = None
    with profiler(case, tmp_path) as prof:
        for step in range(12):
            case.loss(case.model, case.batch(step)).backward()
            if step % 2:
                optimizer = optimizer or torch.optim.SGD(case.model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert len(result_of(prof).run["timed_steps"]) == 3
    assert forward_calls(prof, "LlamaForCausalLM") == 6


@pytest.mark.full
def test_the_step_of_another_model_s_optimizer_is_none(case: Case, tmp_path: Path) -> None:
    """As of a critic, which learns three times where the policy that was given does once."""
    critic = nn.Linear(4, 1)
    optimizer, of_critic = torch.optim.SGD(case.model.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    with nothing_left(case), profiler(case, tmp_path) as prof:
        for step in range(8):
            for _ in range(3):
                critic(torch.ones(2, 4)).sum().backward()
                of_critic.step()
            models.train_step(case, case.model, optimizer, seed=step)
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]
    assert result_of(prof).run["step_source"] == "optimizer"
    assert forward_calls(prof, "LlamaForCausalLM") == 3


def test_optimizers_that_may_step() -> None:
    gc.collect()  # those of other tests
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = list(model.parameters())
    unrelated = torch.optim.SGD(other.parameters(), 0.1)
    assert not may_come(parameters)
    optimizer = torch.optim.SGD([{"params": [model.bias]}], 0.1)
    assert may_come(parameters)
    del optimizer
    assert not may_come(parameters)
    of_copies = torch.optim.SGD([model.weight.detach().clone()], 0.1)
    assert may_come(parameters)
    assert may_come(parameters, of_copies) and not may_come(parameters, unrelated)
    of_gone = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    del of_copies
    assert not may_come(parameters)
    assert may_come(parameters, of_gone)  # but it steps
    unfinished = torch.optim.SGD.__new__(torch.optim.SGD)
    assert may_come(parameters)
    del unfinished, unrelated, of_gone


@pytest.mark.full
def test_a_step_said_inside_of_backward_ends_when_backward_has(case: Case, tmp_path: Path) -> None:
    with nothing_left(case), profiler(case, tmp_path) as prof:
        for step in range(8):
            loss = case.loss(case.model, case.batch(step))
            loss.register_hook(lambda gradient: prof.step())
            loss.backward()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


@pytest.mark.full
def test_a_new_optimizer_takes_over_from_one_that_is_no_more(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path) as prof:
        for _ in range(4):
            models.train(case, steps=2)
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


@pytest.mark.full
def test_calls_on_other_threads_are_said_to_be_missing(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
        thread = threading.Thread(target=lambda: case.loss(case.model, case.batch(0)))
        thread.start()
        thread.join()
        models.train(case, steps=1)
    assert any("on other threads" in warning for warning in result_of(prof).warnings)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_block_without_any_op_leaves_no_file_behind(tmp_path: Path, steps: int) -> None:
    with pytest.warns(pw.ProfilerWrapperWarning, match="no op of torch ran"), profiler(None, tmp_path) as prof:
        for _ in range(steps):
            prof.step()
    assert prof.result is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run.json"]


@pytest.mark.full
def test_steps_that_never_came_are_named(case: Case, tmp_path: Path) -> None:
    with (
        pytest.warns(pw.ProfilerWrapperWarning, match="20-22, 500 never came: the block ended after 2 steps"),
        profiler(case, tmp_path, steps="20-22,500") as prof,
    ):
        models.train(case, steps=2)
    assert prof.result is None
    with profiler(case, tmp_path, steps="1-9") as prof:
        models.train(case, steps=3)
    assert any("3-9 never came" in warning for warning in result_of(prof).warnings)


@pytest.mark.full
def test_parameters_that_are_no_leaves_draw_no_warning_of_torchs(case: Case, tmp_path: Path) -> None:
    plain = dict(case.model.named_parameters())
    with warnings.catch_warnings(), profiler(case, tmp_path):
        warnings.simplefilter("error", UserWarning)
        doubled = {name: parameter * 1.0 for name, parameter in plain.items()}
        torch.func.functional_call(case.model, doubled, (), case.batch(0)).loss.backward()


@pytest.mark.full
def test_a_model_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        case = models.build("llama")
        with profiler(case, tmp_path) as prof:
            for step in range(6):
                case.loss(case.model, case.batch(step))
    assert forward_calls(prof, "model.layers.1") == 3


@pytest.mark.full
def test_a_scripted_model(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pw.ProfilerWrapper(model, output_dir=tmp_path, files="result", enable_print_summary=False) as prof:
        model(torch.ones(1, 4))
    assert any(row.phase == "forward" and row.time_ns for row in result_of(prof).layers)


@pytest.mark.full
@pytest.mark.parametrize("marked_before", [True, False])
def test_marks_of_the_users_beside_ours_count_no_call_twice(case: Case, tmp_path: Path, marked_before: bool) -> None:
    before = pw.mark() if marked_before else None
    with profiler(case, tmp_path) as prof:
        inside = None if marked_before else pw.mark(case.model)
        models.train(case, steps=6)
        if inside is not None:
            inside.remove()
    if before is not None:
        before.remove()
    assert forward_calls(prof, "model.layers.0.mlp") == 3


@pytest.mark.full
def test_ctrl_c_in_our_analysis_keeps_the_traces(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(window, "tables", interrupted)
    prof = profiler(case, tmp_path)
    with nothing_left(case), pytest.raises(KeyboardInterrupt), prof:
        models.train(case, steps=3)
    names = {path.name for path in directory_of(prof).iterdir()}
    assert names == {"profile_trace.json", "profile_full_trace.json", "run.json"}


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_with_inside_of_what_is_checkpointed(tmp_path: Path, reentrant: bool) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
    case = Case("blocks", blocks, lambda seed: {}, lambda model, batch: torch.zeros(()), "")
    prof = pw.ProfilerWrapper(output_dir=tmp_path, files="result", enable_print_summary=False)

    def called(block: nn.Module, hidden: torch.Tensor) -> Any:
        with prof:
            return block(hidden)

    with nothing_left(case):
        for _ in range(3):
            hidden = torch.ones(2, 8, requires_grad=True)
            for block in blocks:
                hidden = torch.utils.checkpoint.checkpoint(called, block, hidden, use_reentrant=reentrant)
            hidden.sum().backward()
            optimizer.step()
        prof.leave()
    result = result_of(prof)
    assert result.complete
    calls = {(row.phase, row.calls) for row in result.layers if row.kind == "block" or row.class_name == "Sequential"}
    assert {("forward", 3), ("recompute", 3)} <= calls


@pytest.mark.full
def test_a_block_left_inside_of_backward(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path)
    with nothing_left(case):
        prof.__enter__()
        loss = case.loss(case.model, case.batch(0))
        loss.register_hook(lambda gradient: prof.__exit__(None, None, None))
        loss.backward()
        prof.leave()
    assert any(row.phase == "backward" and row.time_ns for row in result_of(prof).layers)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_sessions_that_change_inside_of_scopes_write_to_no_freed_memory() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "freed_memory.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bare: signal" in done.stdout  # it would find them
