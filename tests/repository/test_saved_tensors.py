"""The truth of what backward keeps, against answers derived by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from module_stack import OUTSIDE, layer_names
from saved_tensors import Call, Kept, SavedTensorTruth, leaf_output_bytes

GENERATOR_STATE = torch.get_rng_state().nbytes


class Squares(nn.Module):
    """Keeps x for backward once, though two of its ops save it, and its own 2·x·y."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)  # tanh keeps its result: 4 floats of inner
        z = y * self.weight  # keeps y again, and a parameter, which does not count
        return z * z.view(z.shape)  # keeps z: 4 floats of the root, one storage


def test_saved_tensors_are_counted_once_and_belong_to_who_allocated_them() -> None:
    model = Squares()
    x = torch.ones(4, requires_grad=True)
    with SavedTensorTruth(model) as truth:
        model(x)
    assert truth.self_bytes() == {"inner": 16, "Squares": 16}
    assert truth.mean_bytes("Squares") == 32
    assert truth.mean_bytes("inner") == 16


def test_saved_inputs_are_outside() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with SavedTensorTruth(model) as truth:
        model(torch.ones(2, 4))
    assert truth.self_bytes() == {OUTSIDE: 32}


def test_each_call_has_what_it_keeps() -> None:
    model = Squares()
    with SavedTensorTruth(model) as truth:
        model(torch.ones(3, 4, requires_grad=True))
        model.inner(torch.ones(5, requires_grad=True))
        model(torch.ones(4, requires_grad=True))
    assert truth.bytes_of_calls("Squares") == [48 + 48, 16 + 16]
    assert truth.bytes_of_calls("inner") == [48, 20, 16]
    assert truth.mean_bytes("inner") == 28
    assert Kept(20, (Call("inner", 1),)) in truth.kept


class Checkpoints(nn.Module):
    """Gives its checkpointed tanh an input and a factor, both made by itself."""

    def __init__(self, *, reentrant: bool, preserve_rng_state: bool) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.options = {"use_reentrant": reentrant, "preserve_rng_state": preserve_rng_state}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y, factor: self.inner(y) * factor, x + 1, x.detach() + 1, **self.options)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_a_checkpoint_keeps_its_inputs_and_the_state_of_the_generator(reentrant: bool, preserve: bool) -> None:
    model = Checkpoints(reentrant=reentrant, preserve_rng_state=preserve)
    with SavedTensorTruth(model) as truth:
        loss = model(torch.ones(4, requires_grad=True)).sum()
    del loss
    assert truth.self_bytes() == {"Checkpoints": 16 + 16 + preserve * GENERATOR_STATE}


def test_a_generator_state_that_nobody_keeps_does_not_count() -> None:
    model = Squares()
    with SavedTensorTruth(model) as truth:
        model(torch.ones(4, requires_grad=True))
        torch.get_rng_state()
    assert sum(kept.size_bytes for kept in truth.kept) == 32
    assert torch.get_rng_state.__module__ == "torch.random"


def test_the_estimate_that_others_make() -> None:
    model = nn.Sequential(Squares(), nn.Linear(4, 2))
    with leaf_output_bytes(model, layer_names(model)) as estimate:
        model(torch.ones(1, 4))
    assert estimate == {"0.inner": 16, "0": 16, "1": 8, "Sequential": 24}
