"""An optimizer that updates its parameters one by one: found by what ran, with what it has instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advice_facts import facts_of, facts_of_gpu, findings_of_training
from profiler_wrapper.advice.blocks import slow_optimizer
from recordings import AUTOGRAD, Trace

ID = "slow-optimizer"


class Stack(nn.Module):
    """Eight layers: sixteen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def of_training(optimizer_class: type[torch.optim.Optimizer], directory: Path, **options: Any) -> Mapping[str, Any]:
    """What is said of this optimizer; empty where nothing is."""
    model = Stack()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    return findings_of_training(model, {"x": torch.randn(4, 16)}, optimizer, directory).get(ID, {})


def test_one_by_one_is_found_and_its_ops_are_counted(tmp_path: Path) -> None:
    found = of_training(torch.optim.AdamW, tmp_path, foreach=False)
    assert found["phase"] == "optimizer"
    assert found["details"]["parameters"] == 16
    # AdamW of one parameter: a step counted, weight decay, two means, a root, two divisions, an addition, an update.
    assert 8 * 16 <= found["details"]["ops_per_step"] <= 12 * 16
    assert found["fix"] == "AdamW(..., fused=True)"
    assert found["evidence"][1] == "fused=None, foreach=False as it was made"
    assert found["saves_at_most_us"] == pytest.approx(found["details"]["cpu_us"], rel=0.01)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_fused_and_foreach_are_silent(options: dict[str, bool], tmp_path: Path) -> None:
    assert not of_training(torch.optim.AdamW, tmp_path, **options)


def test_what_has_no_fused_kernels_is_told_of_what_it_can_do(tmp_path: Path) -> None:
    found = of_training(torch.optim.NAdam, tmp_path)
    assert "torch.compile around NAdam's step" in found["fix"]  # on a CPU, foreach is no faster


@pytest.mark.full
def test_an_optimizer_of_a_real_gpu_that_adds_one_by_one() -> None:
    """SGD of 404 parameters: one addition each, as the trace viewer shows."""
    (found,) = slow_optimizer(facts_of_gpu("ddp_training_with_memory.pt.trace"))
    assert found.details["ops_per_step"] == found.details["parameters"] == 404
    assert found.fix == "SGD(..., fused=True)"
    assert found.confidence == "medium"  # nobody said how it was made


@pytest.mark.parametrize("name", ["mi300_resnet_checkpointing_training", "v100_ddp_resnet.pt.trace"])
def test_optimizers_of_real_gpus_that_take_all_parameters_at_once_are_silent(name: str) -> None:
    assert list(slow_optimizer(facts_of_gpu(name))) == []


def test_the_bound_is_cpu_time_or_device_time_whichever_a_step_waits_for() -> None:
    """Ten updates, launched in 10 ns each by an optimizer that takes 120 ns; the device takes 5 ns for each."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).annotation("Optimizer.step#AdamW.step", 800, 920)
    for i in range(10):
        start = 810 + 10 * i
        trace.op("aten::add_", start, start + 10).kernel("k", start + 5, start + 10, launched=start + 2)
    (found,) = slow_optimizer(facts_of(trace.recording()))
    assert found.details["cpu_us"] == pytest.approx(0.12)
    assert found.details["time_us"] == pytest.approx(0.05)
    # Path: the CPU up to the last launch (800 to 912; the optimizer and its ops), then the last update. All else idles.
    assert 0.120 <= (found.saves_at_most_us or 0) <= 0.125


def test_what_an_optimizer_inside_another_does_is_its_own() -> None:
    """A wrapper, such as ZeroRedundancyOptimizer or Lookahead, steps an Adam: its ops are no ops of the wrapper."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).annotation("Optimizer.step#Wrapper.step", 700, 950)
    trace.annotation("Optimizer.step#Adam.step", 750, 900)
    for i in range(10):
        trace.op("aten::add_", 760 + 10 * i, 770 + 10 * i)
    (found,) = slow_optimizer(facts_of(trace.recording()))
    assert found.title == "Adam updates its parameters one by one: 10 small ops a step"


@pytest.mark.parametrize("on_device", [False, True])
def test_forward_and_backward_of_a_closure_are_no_time_of_the_optimizer(on_device: bool) -> None:
    """A step of 1000 ns: forward from 10, backward on the engine's thread until 700, then ten updates of 10 ns."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1010).annotation("Optimizer.step#AdamW.step", 0, 1000)
    trace.mark(".", 10, 300).op("aten::mm", 20, 290, sequence=0, forward_thread=0)
    trace.node("MmBackward0", 350, 700, number=0).op("aten::mm", 360, 690, thread=AUTOGRAD)
    for i in range(10):
        start = 810 + 10 * i
        trace.op("aten::add_", start, start + 10)
        if on_device:
            trace.kernel("k", start + 5, start + 10, launched=start + 2)
    (found,) = slow_optimizer(facts_of(trace.recording()))
    assert found.details["ops_per_step"] == 10
    assert found.details["cpu_us"] == pytest.approx(0.3)  # from 700
    assert found.details["time_us"] == pytest.approx(0.05 if on_device else 0.1)
    assert found.saves_at_most_us == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("waits_at", ["begin", "middle", "end"])
def test_a_wait_inside_a_step_is_no_work_of_the_optimizer(waits_at: str) -> None:
    """Ten updates of 10 us, 20 us apart; before, between or behind them 30 ms in which nothing of it runs."""
    us, wait_us = 1000, 30_000
    before = {"begin": 0, "middle": 5, "end": 10}[waits_at]
    trace = Trace().annotation("ProfilerStep#0", 0, 40_000 * us)
    trace.annotation("Optimizer.step#SGD.step", 0, (wait_us + 10 * 30) * us)
    for i in range(10):
        start = 30 * i + (wait_us if i >= before else 0)
        trace.op("aten::add_", start * us, (start + 10) * us)
    (found,) = slow_optimizer(facts_of(trace.recording()))
    told = 300 - (20 if waits_at == "middle" else 20 if waits_at == "end" else 0)  # the gap that the wait is in goes
    assert found.saves_at_most_us == found.details["cpu_us"] == pytest.approx(told)
    assert found.evidence[0] == f"10 parameters; its ops, and Python between them, take {told} µs a step"
