"""Models that are looked at and never called: names, blocks and kinds of their layers are known by hand."""

from __future__ import annotations

from typing import Any

from torch import nn


class Runs(nn.Module):
    """Has a forward, so it is no mere container."""

    def forward(self, x: Any) -> Any:
        return x


class Mlp(Runs):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)


class TinyBlock(Runs):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.mlp = Mlp()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))


class OtherBlock(TinyBlock):
    pass


class Net(Runs):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = blocks
        self.head = nn.Linear(2, 4)
