"""A module whose `forward` is called, not the module: it has no row, and is named. Nothing else is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiler_wrapper.capture.scopes import LayerScopes

X, LEARNS = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)


class Net(nn.Module):
    """`how` gets its decoder, and tells how that is run."""

    def __init__(self, how: Callable[[Any, torch.Tensor], Any] = lambda decoder, x: decoder(x)) -> None:
        super().__init__()
        self.how = how
        self.decoder = Decoder()

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self.decoder, x)

    def encode(self, x: torch.Tensor) -> Any:
        return self.how(self.decoder, x)


class Decoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)

    def run(self, x: torch.Tensor) -> Any:
        return self[1](self[0](x))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Decoder() for _ in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class Around(nn.Module):
    """Its forward is that of what it holds, as PEFT's is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model.forward(x)


class Recomputed(torch.autograd.Function):
    """Has a `forward` that is no module's."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, run: nn.Module) -> Any:
        return run(x)


def named_by(model: nn.Module, call: Callable[[Any], object], *, given: bool = True, layers: int = 9) -> str:
    """Whose forward was called, as it is said once; "" where nothing is said."""
    scopes = LayerScopes(model if given else None, layers=layers)
    scopes.attach()
    for _ in range(2):
        call(model)
    scopes.detach()
    said = [one for one in scopes.said() if one.startswith("forward of ")]
    assert len(said) < 2
    return said[0].removeprefix("forward of ").partition(" was called directly")[0] if said else ""


def by_forward(module: nn.Module, x: torch.Tensor) -> Any:
    return module.forward(x)


@pytest.mark.parametrize("learns", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("model", "call", "said", "said_of_any"),
    [
        (Net(by_forward), lambda net: net(X), "decoder", "decoder"),
        (Net(), lambda net: net.forward(X), "Net", "Net"),
        (Net(by_forward), lambda net: net.forward(X), "Net, decoder", "Net, Decoder"),
        (
            Net(lambda decoder, x: checkpoint(decoder.forward, x, use_reentrant=False)),
            lambda net: net(X),
            *["decoder"] * 2,
        ),
        (Around(Net()), lambda net: net(X), "model", "model"),
    ],
    ids=["container", "root", "both", "checkpoint of forward", "around"],
)
def test_whose_forward_is_called_is_named(
    model: nn.Module, call: Callable[[Any], object], said: str, said_of_any: str, learns: bool
) -> None:
    with torch.set_grad_enabled(learns):
        assert named_by(model, call) == said
        assert named_by(model, call, given=False) == said_of_any


@pytest.mark.parametrize("given", [True, False], ids=["model", "any"])
@pytest.mark.parametrize(
    ("model", "call"),
    [
        (Net(), lambda net: net(X)),
        (Net(lambda decoder, x: decoder.run(x)), lambda net: net(X)),
        (Net(lambda decoder, x: decoder[1](decoder[0](x))), lambda net: net(X)),
        (Net(), lambda net: net.encode(X)),
        (Net(lambda decoder, x: Recomputed.apply(x, decoder)), lambda net: net(X)),
        (Net(lambda decoder, x: checkpoint(decoder, x, use_reentrant=False)), lambda net: net(X).sum().backward()),
        (Net(lambda decoder, x: checkpoint(decoder, x, use_reentrant=True)), lambda net: net(LEARNS).sum().backward()),
    ],
    ids=["called", "by a method", "by hand", "a method of the root", "function", "checkpoint", "reentrant"],
)
def test_what_is_called_or_has_no_forward_running_is_not(
    model: nn.Module, call: Callable[[Any], object], given: bool
) -> None:
    assert named_by(model, call, given=given) == ""


def test_a_module_that_is_no_layer_is_not_named_and_its_children_name_a_layer() -> None:
    deep = nn.Sequential(Net(by_forward))
    assert named_by(deep, lambda net: net(X), layers=1) == ""
    assert named_by(deep, lambda net: by_forward(net[0], X), layers=1) == "0"


def test_of_many_three_are_named() -> None:
    names = named_by(Loop(), lambda net: net(X))
    assert names == "layers.0, layers.1, layers.2 and 2 more"


def test_recording_that_begins_within_a_call_names_no_call_that_was_open() -> None:
    scopes = LayerScopes(None)

    def begins(decoder: nn.Module, x: torch.Tensor) -> Any:
        scopes.attach()
        return decoder(x)

    Net(begins)(X)
    scopes.detach()
    assert scopes.said() == []


@pytest.mark.parametrize("uses_locals", [False, True])
def test_looking_keeps_no_tensor_alive_and_takes_nothing_away(uses_locals: bool) -> None:
    alive = []

    class Frees(Decoder):
        def forward(self, x: torch.Tensor) -> Any:
            given = locals() if uses_locals else {"x": 0}
            x = x + 1
            freed = weakref.ref(x)
            x = self[0](x)  # here frames are looked at
            alive.append(freed() is not None)
            assert "x" in given
            return x

    assert named_by(Net(by_forward), lambda net: net(X)) == "decoder"
    net = Net(by_forward)
    net.decoder = Frees()
    with torch.no_grad():
        assert named_by(net, lambda net: net(X)) == "decoder"
    assert uses_locals or alive == [False, False]
