"""Layer spans of steps that are none, or never end: they go on, and nothing grows."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from layer_runs import Block, Stack, Time, rows_of, timing
from profiler_wrapper import TrainingMonitor
from profiler_wrapper.timer import layer_spans
from profiler_wrapper.timer import steps as breakdown
from profiler_wrapper.timer.layer_timer import LayerTimer
from programs import warned

X = torch.ones(2, 4)


def train(model: nn.Module) -> None:
    model(X).sum().backward()


def layer_kinds(directory: Path, step: int) -> dict[str, int]:
    kinds = [row["kind"] for row in rows_of(directory) if row["step"] == step and "layer" in row]
    return {kind: kinds.count(kind) for kind in ("forward", "backward")}


EVERY = {"forward": 5, "backward": 5}  # an embedding, three blocks, a head


def test_a_step_in_which_the_model_was_not_called(tmp_path: Path) -> None:
    time = Time()
    model = Stack(time)

    def steps() -> None:
        with timing(model, tmp_path, time) as layers:
            layers.step()  # nothing at all
            nn.Linear(4, 4)(X).sum().backward()  # another model
            layers.step()
            train(model)
            layers.step()

    said = warned(steps)
    assert not [message for message in said if "failed" in message], said
    assert layer_kinds(tmp_path, 2) == EVERY
    assert [row["step"] for row in rows_of(tmp_path) if row["name"] == "step"] == [0, 1, 2]


def test_a_step_that_ends_before_its_first_block_says_nothing_of_blocks(tmp_path: Path) -> None:
    model = Stack(Time())

    def steps() -> None:
        with TrainingMonitor(tmp_path, model=model, layers=True, flops_per_step=1.0) as monitor:
            model.register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError), monitor.step():
                train(model)

    assert warned(steps) == []


def test_the_monitors_steps_without_the_model(tmp_path: Path) -> None:
    model = Stack(Time())

    def steps() -> None:
        with TrainingMonitor(tmp_path, model=model, layers=True, breakdown=True, flops_per_step=1.0) as monitor:
            for _ in range(2):
                with monitor.step():
                    nn.Linear(4, 4)(X).sum().backward()
            with monitor.step():
                train(model)
            assert monitor.active

    assert not [message for message in warned(steps) if "failed" in message]
    assert layer_kinds(tmp_path, 2) == EVERY


def test_a_process_group_that_was_destroyed(tmp_path: Path) -> None:
    """A model is evaluated after the job has ended its communication."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Stack(Time())
    parallel = nn.parallel.DistributedDataParallel(model)

    def steps() -> None:
        layers.step()
        torch.distributed.destroy_process_group()
        parallel.eval()
        with torch.no_grad():
            parallel(X)
        layers.step()

    with LayerTimer(parallel, tmp_path, device="cpu") as layers:
        train(parallel)
        assert warned(steps) == []
    assert layer_kinds(tmp_path, 1) == {"forward": 5, "backward": 0}


def test_a_view_that_autograd_has_given_up(tmp_path: Path) -> None:
    """Asking what made it raises, and nobody has to ask."""

    class Split(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.parts = tuple((y * 1.0).unbind(0))
            with torch.no_grad():
                self.parts[0].add_(1)
            return y

    class Given(nn.Module):
        def __init__(self, time: Time) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Split(time, 1.0, 1.0), Takes(time, 1.0, 1.0)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return self.layers[1](x, self.layers[0].parts)  # type: ignore[no-any-return]

    class Takes(Block):
        def forward(self, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return super().forward(x) + parts[0].shape[0]

    time = Time()
    model = Given(time)
    with timing(model, tmp_path, time) as layers:
        train(model)
        with pytest.raises(RuntimeError, match="modified inplace"):
            _ = model.layers[0].parts[0].grad_fn
        assert warned(layers.step) == []
    assert layer_kinds(tmp_path, 0) == {"forward": 2, "backward": 2}


def test_a_graph_that_is_run_any_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_spans, "MOST_NOTED", 30)
    time = Time()
    model = Stack(time, blocks=1)
    with timing(model, tmp_path, time) as layers:
        loss = model(X).sum()
        for _ in range(50):
            loss.backward(retain_graph=True)
        spans = layers._watch
        kept = sum(len(run.records) for run in spans._runs)
        assert kept <= 60 and len(spans._runs) <= 30 and len(spans._ends) <= 30, "they grow with each run"
        layers.step()
        train(model)
        layers.step()
    assert layer_kinds(tmp_path, 1) == {"forward": 3, "backward": 3}


def test_a_loop_that_never_says_that_a_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "MOST_BOUNDARIES", 20)
    time = Time()
    model = Stack(time, blocks=1)
    with timing(model, tmp_path, time) as layers:

        def forget() -> None:
            for _ in range(50):
                train(model)
                assert len(layers._watch._boundaries) <= 22, "it grows with each step"

        (said,) = warned(forget)
        assert "told where its steps end" in said
        layers.step()
        train(model)
        layers.step()
    parts = [row["name"] for row in rows_of(tmp_path) if row["step"] == 1 and row["depth"] == 0]
    assert {"step", "forward", "backward"} <= set(parts), "the next step is not whole"
