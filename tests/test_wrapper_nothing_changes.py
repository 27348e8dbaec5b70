"""Profiling changes nothing: numbers, random state, modes, hooks, exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
from models import Case
from profiler_wrapper.capture import session
from profiling import directory_of, profiler, result_of
from unchanged import Boom, hooks_of, nothing_left, ours_in_the_way


def run_with_dropout(profiled: bool, tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    case = models.build("llama")
    dropout = nn.Dropout(0.1)
    model = nn.Sequential(nn.Linear(16, 16), dropout, nn.Linear(16, 16))
    case.model.get_submodule("model.layers.1").eval()
    optimizer = models.optimizer_of(case.model)
    gradients: list[torch.Tensor] = []
    prof = profiler(case, tmp_path) if profiled else None
    losses = []
    if prof is not None:
        prof.__enter__()
    for step in range(8):
        losses.append(models.train_step(case, case.model, optimizer, seed=step))
        loss = model(torch.randn(2, 16)).sum()
        loss.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    if prof is not None:
        prof.__exit__(None, None, None)
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": [parameter.detach().clone() for parameter in case.model.parameters()],
        "random": torch.get_rng_state(),
        "modes": [module.training for module in case.model.modules()],
        "keys": list(case.model.state_dict()),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_numbers_random_state_and_modes_are_bit_for_bit_the_same(tmp_path: Path) -> None:
    plain, profiled = run_with_dropout(False, tmp_path), run_with_dropout(True, tmp_path)
    assert [name for name in plain if not same(plain[name], profiled[name])] == []


def test_every_hook_is_gone_as_soon_as_recording_is_over(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    models.train_step(case, case.model, optimizer)
    before, hooks = ours_in_the_way(), hooks_of(case.model)
    with profiler(case, tmp_path):
        during = []
        for step in range(8):
            during.append(ours_in_the_way() == before)
            models.train_step(case, case.model, optimizer, seed=step)
        assert during == [False] * 5 + [True] * 3
        assert hooks_of(case.model) == hooks


# --- exceptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, SystemExit, GeneratorExit, torch.OutOfMemoryError])
def test_an_exception_passes_through_with_what_was_recorded_written(
    case: Case, tmp_path: Path, kind: type[BaseException]
) -> None:
    raised = kind("mine")
    with nothing_left(case), pytest.raises(kind) as caught, profiler(case, tmp_path) as prof:
        models.train(case, steps=3)
        raise raised
    assert caught.value is raised
    result = result_of(prof)
    assert not result.complete
    assert any(kind.__name__ in warning for warning in result.warnings)
    assert result.run["timed_steps"] == [2]
    assert json.loads((directory_of(prof) / "run.json").read_text())["complete"] is False


def test_an_exception_in_a_forward(case: Case, tmp_path: Path) -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise Boom

    models.train(case, steps=1)
    handle = case.model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
    with nothing_left(case), pytest.raises(Boom), profiler(case, tmp_path) as prof:
        models.train(case, steps=1)
    handle.remove()
    result = result_of(prof)
    assert [row.calls for row in result.rows("model.layers.0") if row.phase == "forward"] == [1]
    assert not result.complete


def test_an_exception_in_backward(case: Case, tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise Boom

    with nothing_left(case), pytest.raises(Boom), profiler(case, tmp_path) as prof:
        Fails.apply(case.loss(case.model, case.batch(0))).backward()  # type: ignore[no-untyped-call]
    assert not result_of(prof).complete


@pytest.mark.parametrize("in_block", [True, False])
def test_ctrl_c_in_our_export(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_block: bool) -> None:
    def interrupted(self: session.Session, path: Path) -> None:
        path.write_text("{")
        raise KeyboardInterrupt("second")

    monkeypatch.setattr(session.Session, "export", interrupted)
    first = KeyboardInterrupt("first")
    with nothing_left(case), pytest.raises(KeyboardInterrupt) as caught, profiler(case, tmp_path):
        models.train(case, steps=1)
        if in_block:
            raise first
    assert str(caught.value) == ("first" if in_block else "second")
    assert not list(tmp_path.rglob("*trace*"))
    assert [json.loads(run.read_text())["complete"] for run in tmp_path.rglob("run.json")] == [False]


def test_leaving_twice_and_leaving_without_entering(case: Case, tmp_path: Path) -> None:
    with nothing_left(case):
        prof = profiler(case, tmp_path)
        prof.__exit__(None, None, None)
        prof.leave()
        assert prof.result is None
        prof.__enter__()
        models.train(case, steps=1)
        prof.__exit__(None, None, None)
        prof.__exit__(None, None, None)
        prof.leave()
        assert len(prof.results) == 1


def test_entered_in_itself(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path)
    with nothing_left(case), prof:
        with prof:
            models.train(case, steps=1)
        assert torch._C._autograd._profiler_enabled()
    assert result_of(prof).run["timed_steps"] == [0]
