"""Tiny models with one peculiarity each, and their hand-derived nodes.

`made_by[node name]` lists the layers that make the nodes of that name in one forward, in order; the
loss (`SumBackward0`) is made outside. Nodes are named as autograd does on this version of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """A Linear and a tanh."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Plain(nn.Module):
    """Two blocks in a list, then a product of the root's own."""

    made_by = {  # noqa: RUF012
        "AddmmBackward0": ["layers.0.linear", "layers.1.linear"],
        "TanhBackward0": ["layers.0", "layers.1"],
        "MulBackward0": ["Plain"],
        "SumBackward0": [""],
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * x


class Shared(nn.Module):
    """One instance under two names: it goes by the first."""

    made_by = {  # noqa: RUF012
        "AddmmBackward0": ["first.linear", "first.linear"],
        "TanhBackward0": ["first", "first"],
        "SumBackward0": [""],
    }

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class CalledTwice(nn.Module):
    """One module called twice, with work of the root between."""

    made_by = {  # noqa: RUF012
        "AddmmBackward0": ["layer.linear", "layer.linear"],
        "TanhBackward0": ["layer", "layer"],
        "ExpBackward0": ["CalledTwice"],
        "SumBackward0": [""],
    }

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.exp(self.layer(x)))


class Cube(torch.autograd.Function):
    """x³, by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


class CubeLayer(nn.Module):
    """A module whose forward is the custom function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x)


class CustomFunction(nn.Module):
    """A custom autograd.Function in a module of its own, between two layers."""

    made_by = {  # noqa: RUF012
        "AddmmBackward0": ["before.linear", "after.linear"],
        "TanhBackward0": ["before", "after"],
        "CubeBackward": ["cube"],
        "SumBackward0": [""],
    }

    def __init__(self) -> None:
        super().__init__()
        self.before = Layer()
        self.cube = CubeLayer()
        self.after = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.cube(self.before(x)))


class InPlaceLayer(nn.Module):
    """Changes its own result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(2).add_(1)


class InPlace(nn.Module):
    """In-place changes within a layer, and of one layer's result by the root."""

    made_by = {  # noqa: RUF012
        "AddmmBackward0": ["first.linear", "second.linear"],
        "MulBackward0": ["first", "second"],
        "AddBackward0": ["first", "second"],
        "NegBackward0": ["InPlace"],
        "SumBackward0": [""],
    }

    def __init__(self) -> None:
        super().__init__()
        self.first = InPlaceLayer()
        self.second = InPlaceLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.neg_()
        return self.second(x)


class Checkpointed(nn.Module):
    """Two blocks, each through `torch.utils.checkpoint`."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


SMALL_MODELS = (Plain, Shared, CalledTwice, CustomFunction, InPlace)


def backward_of(model: nn.Module, *, steps: int = 1) -> None:
    """`steps` forwards and backwards on the same small input, which requires its gradient."""
    for _ in range(steps):
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        model(x).sum().backward()
