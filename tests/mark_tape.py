"""A tape in the place of the trace, and the small models whose marks are written on it."""

from __future__ import annotations

import torch
from torch import nn

from profiler_wrapper.trace.marks import parse_mark

PLAIN_CALL = nn.Module.__call__
X = torch.ones(1, 2)


class Tape:
    """Writes "+path" and "-path" where the trace would get a range's begin and end."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.events: list[str] = []

    def __call__(self, name: str) -> _TapeRange:
        self.names.append(name)
        return _TapeRange(self, name)

    @property
    def entered(self) -> list[str]:
        return [event[1:] for event in self.events if event[0] == "+"]

    @property
    def roots(self) -> list[str]:
        return [mark.root for name in self.names if (mark := parse_mark(name)) and mark.path == "."]

    @property
    def flags(self) -> list[tuple[str, ...]]:
        return [mark.flags for name in self.names if (mark := parse_mark(name))]


class _TapeRange:
    def __init__(self, tape: Tape, name: str) -> None:
        mark = parse_mark(name)
        assert mark is not None
        self.tape, self.path = tape, mark.path

    def __enter__(self) -> None:
        self.tape.events.append("+" + self.path)

    def __exit__(self, *exc_info: object) -> None:
        self.tape.events.append("-" + self.path)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
