"""Models that somebody traces, scripts or exports: what comes of it is as without us, in whatever records."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import profiler_wrapper as pw
from mark_tape import Net, Tape, X
from profiler_wrapper.capture.torch_state import is_tracing
from profiling import profiler, result_of


def _by_jit(model: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit is deprecated
        graph = str(torch.jit.trace(model, X).graph)
    return re.sub(r"%\d+", "%n", re.sub(r"___torch_mangle_\d+\.", "", graph))


def _by_script(model: nn.Module) -> str:
    def scale(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("scale"):
            return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(torch.jit.script(scale).graph)  # type: ignore[attr-defined]


def _step_by_make_fx(model: nn.Module) -> str:
    """Forward, backward and the optimizer's step as one graph."""
    names = [name for name, _ in model.named_parameters()]

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        parameters = [nn.Parameter(value) for value in values]
        loss = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), X).sum()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        torch.optim.SGD(parameters, 0.1).step()
        return [parameter.detach() for parameter in parameters]

    return str(make_fx(step)(*(parameter.detach().clone() for parameter in model.parameters())).graph)


TRACERS: dict[str, Callable[[nn.Module], str]] = {
    "jit.trace": _by_jit,
    "jit.script": _by_script,
    "fx.symbolic_trace": lambda model: str(torch.fx.symbolic_trace(model).graph),
    "make_fx": lambda model: str(make_fx(model)(X).graph),
    "make_fx, pre-dispatch": lambda model: str(make_fx(model, pre_dispatch=True)(X).graph),
    "make_fx of a step": _step_by_make_fx,
    "export": lambda model: str(torch.export.export(model, (X,)).graph),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_nothing_is_marked_in_what_is_traced(tracer: str, tape: Tape, attach: Any) -> None:
    model = Net(1)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append((is_tracing(), list(tape.events))))
    plain = TRACERS[tracer](model)
    attach(model)
    assert TRACERS[tracer](model) == plain
    assert not [events for traced, events in seen if traced and events]
    assert not is_tracing()
    before = len(tape.events)
    model(X)
    assert len(tape.events) > before


@pytest.mark.parametrize("tracer", TRACERS)
def test_tracing_in_a_block_is_as_outside_of_it(tracer: str, tmp_path: Path) -> None:
    def train(model: nn.Module, step: Callable[[], object]) -> list[str]:
        graphs = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            model.train()
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(TRACERS[tracer](model.eval()))
            step()
        return graphs

    plain = train(Net(1), lambda: None)
    model = Net(1)
    with pw.mark(model), profiler(None, tmp_path, steps="1-3") as prof:
        assert train(model, prof.step) == plain
    result = result_of(prof)
    assert (result.run["timed_steps"], result.complete) == ([1, 2, 3], True)
    forwards = {row.layer: row.calls for row in result.layers if row.phase == "forward"}
    assert forwards["layers.0"] >= 3
    model = Net(1)
    options: dict[str, Any] = {"layers": True, "breakdown": True, "flops_profile_freq": 0, "peaks": 1.0}
    with pw.TrainingMonitor(tmp_path / "monitor", model=model, **options) as monitor:
        assert train(model, monitor.end_step) == plain
        assert monitor.active
    model = Net(1)
    with pw.LayerTimer(model, tmp_path / "timer") as timer:
        assert train(model, timer.step) == plain


def test_named_blocks_and_steps_in_traced_code_wait_until_it_is_traced(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with prof.record_function("a block of the user's"):
                x = self.linear(x)
            prof.step()
            return x

    model = Named()
    prof = profiler(None, tmp_path, steps="all")
    plain = _by_jit(nn.Sequential(nn.Linear(2, 2)))
    with prof:
        for _ in range(3):
            assert _by_jit(model).count("aten::linear") == plain.count("aten::linear")
            model(X).sum().backward()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert result_of(prof).complete
