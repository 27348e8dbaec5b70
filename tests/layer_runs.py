"""Models whose blocks take the time that a test says, and what a layer timer wrote of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monitoring import Device
from profiler_wrapper.timer import layer_spans, layer_timer
from profiler_wrapper.timer.device_events import StepClock
from profiler_wrapper.timer.layer_timer import LayerTimer


class Time:
    """Nanoseconds that a test moves; with a device also its work."""

    def __init__(self, device: Device | None = None) -> None:
        self.now_ns = 1_000_000_000
        self.device = device

    def spend(self, milliseconds: float) -> None:
        self.now_ns += round(milliseconds * 1e6)
        if self.device is not None:
            self.device.work(2 * milliseconds)  # so that the two clocks can be told apart


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, time: Time, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.time, ctx.backward_ms = time, backward_ms
        time.spend(forward_ms)
        ctx.save_for_backward(x)  # a checkpoint computes again what is needed
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        ctx.time.spend(ctx.backward_ms)
        return grads[0], None, None, None


class Block(nn.Module):
    """Takes `forward_ms` and `backward_ms`."""

    def __init__(self, time: Time, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.time, self.forward_ms, self.backward_ms = time, forward_ms, backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return Spend.apply(y, self.time, self.forward_ms, self.backward_ms)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """An embedding (1 and 10 ms), blocks (2, 3, ... and 20, 30, ... ms), a head (0.5 and 5 ms)."""

    def __init__(self, time: Time, blocks: int = 3, *, make: Any = Block) -> None:
        super().__init__()
        self.embed = Block(time, 1.0, 10.0)
        self.layers = nn.ModuleList(make(time, 2.0 + index, 20.0 + 10 * index) for index in range(blocks))
        self.head = Block(time, 0.5, 5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


EXPECTED = {
    ("embed", "forward"): 1.0,
    ("layers.0", "forward"): 2.0,
    ("layers.1", "forward"): 3.0,
    ("layers.2", "forward"): 4.0,
    ("head", "forward"): 0.5,
    ("head", "backward"): 5.0,
    ("layers.2", "backward"): 40.0,
    ("layers.1", "backward"): 30.0,
    ("layers.0", "backward"): 20.0,
    ("embed", "backward"): 10.0,
}


@contextmanager
def timing(model: nn.Module, directory: Path, time: Time | None = None, **options: Any) -> Iterator[LayerTimer]:
    """A layer timer on the test's clock."""
    with pytest.MonkeyPatch.context() as patch:
        if time is not None:
            there = time
            patch.setattr(layer_spans, "perf_counter_ns", lambda: there.now_ns)
            patch.setattr(layer_timer, "StepClock", lambda device: StepClock(device, host_clock=lambda: there.now_ns))
            patch.setattr(layer_timer, "find_accelerator", lambda _: there.device)
        with LayerTimer(model, directory, **options) as layers:
            yield layers


def rows_of(directory: Path, *, rank: int = 0) -> list[dict[str, Any]]:
    """The spans that were written."""
    files = sorted(directory.rglob(f"timers/timer_rank{rank}.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "name" in line]


def milliseconds(
    rows: Sequence[dict[str, Any]], *, step: int | None = None, field: str = "duration_ns"
) -> dict[tuple[str, str], float]:
    """By layer and kind, summed."""
    sums: dict[tuple[str, str], float] = {}
    for row in rows:
        if "layer" in row and (step is None or row["step"] == step):
            key = row["layer"], row["kind"]
            sums[key] = sums.get(key, 0.0) + row[field] / 1e6
    return {key: round(value, 4) for key, value in sums.items()}
