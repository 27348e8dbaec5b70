"""Marking changes nothing else, and a failure of ours stays ours."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from mark_tape import PLAIN_CALL, Block, Net, Tape, X
from profiler_wrapper.capture import scopes


def test_results_gradients_and_randomness_are_the_same(tape: Tape, attach: Any) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Dropout(0.5))
        loss = model(torch.rand(4, 2)).sum()
        loss.backward()
        return loss, *(parameter.grad for parameter in model.parameters()), torch.get_rng_state()

    plain = run()
    attach()
    assert all(torch.equal(one, other) for one, other in zip(plain, run(), strict=True))


def test_a_copy_made_while_attached_is_free_of_us(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model)
    twin = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    twin(X)
    pickled(X)
    assert not tape.events
    one.detach()
    assert torch.equal(twin(X), model(X))


def test_jit_and_fx_are_as_ever(tape: Tape, attach: Any) -> None:
    def graphs() -> tuple[str, str]:
        traced = re.sub(r"___torch_mangle_\d+\.", "", str(torch.jit.trace(model, X).graph))
        return re.sub(r"%\d+", "%n", traced), str(torch.fx.symbolic_trace(model).graph)

    model = Net(1)
    plain = graphs()
    attach(model)
    assert graphs() == plain
    scripted = torch.jit.script(nn.Linear(2, 2))
    attach(nn.ModuleDict({"scripted": scripted}))
    scripted(X)
    assert tape.roots[-1] == "scripted"


def test_a_mark_that_fails_stops_marking_and_nothing_else(
    tape: Tape, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(1)
    one = attach(model)
    expected = model(X)
    monkeypatch.setattr(scopes, "_Range", lambda name: 1 / 0)
    assert torch.equal(model(X), expected)
    model(X)
    assert one.warnings == [
        "layers are no longer marked, since marking one failed: ZeroDivisionError: division by zero"
    ]


def test_a_callback_that_fails(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model, on_root_enter=lambda call: 1 / 0)
    model(X)
    model(X)
    assert len(one.warnings) == 1
    assert tape.events == []


def test_detach_in_a_callback(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model, on_root_enter=lambda call: one.detach())
    model(X)
    model(X)
    assert tape.events == []
    assert not one.warnings


def test_two_at_once_and_gone_in_any_order(tape: Tape, attach: Any) -> None:
    first_model, second_model = Net(1), Block()
    first, second = attach(first_model), attach(second_model)
    first_model(X)
    second_model(X)
    assert tape.roots == ["Net#0", "Block#0"]
    first.detach()
    first_model(X)
    second_model(X)
    assert tape.roots == ["Net#0", "Block#0", "Block#0"]
    second.detach()
    assert nn.Module.__call__ is PLAIN_CALL


def test_somebody_patches_the_call_after_us(tape: Tape, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(1)
    one = attach(model)
    ours, seen = nn.Module.__call__, []

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return ours(module, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        model(X)
        one.detach()
        model(X)
        assert nn.Module.__call__ is theirs
        one.attach()
        model(X)
    finally:
        nn.Module.__call__ = ours  # type: ignore[method-assign]
    assert len(seen) == 12
    assert tape.events.count("+.") == 2
    one.detach()
    assert nn.Module.__call__ is PLAIN_CALL


def test_somebody_patched_the_call_before_us(tape: Tape, attach: Any) -> None:
    seen = []

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return PLAIN_CALL(module, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        model = Net(1)
        one = attach(model)
        model(X)
        one.detach()
        assert nn.Module.__call__ is theirs
    finally:
        nn.Module.__call__ = PLAIN_CALL  # type: ignore[method-assign]
    assert len(seen) == 4
    assert tape.entered[0] == "."


def test_a_module_added_while_attached_belongs_to_the_layer_above(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach(model)
    model.layers.append(Block())
    model(X)
    assert tape.entered == [".", "layers.0", "layers.0.norm", "layers.0.linear"]


def test_somebody_puts_the_original_call_back_while_ours_is_in_place(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model)
    nn.Module.__call__ = PLAIN_CALL  # type: ignore[method-assign]
    one.detach()
    one.attach()
    model(X)
    assert tape.events.count("+.") == 1
    one.detach()
    assert nn.Module.__call__ is PLAIN_CALL
