"""Layers that learn and are never called: their forward is called directly, which no mark sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from profiling import profiler, result_of


class Net(nn.Module):
    def __init__(self, how: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.how(layer, x)
        output: torch.Tensor = self.head(x)
        return output


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda layer, x: layer.forward(x), ["layers.0, layers.1"]),
        (lambda layer, x: nn.functional.linear(x, layer.weight), ["layers.0, layers.1"]),
        (lambda layer, x: layer(x), []),
    ],
    ids=["forward", "parameters", "call"],
)
def test_layers_whose_forward_is_called_directly_are_named(
    how: Callable[[nn.Module, torch.Tensor], torch.Tensor], said: list[str], tmp_path: Path
) -> None:
    model = Net(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profiler(None, tmp_path) as prof:
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    begin = "never called, though their parameters have gradients: "
    warnings = [one.removeprefix(begin).partition(". ")[0] for one in result_of(prof).warnings if one.startswith(begin)]
    assert warnings == said
