"""Roots: named by their user, or found when they are called."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mark_tape import Block, Net, Tape, X
from profiler_wrapper.capture import torch_state
from profiler_wrapper.capture.scopes import FirstCall, RootCall


def test_the_callback_comes_before_outermost_calls(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach(
        [model, model.layers[0]],
        layers=0,
        on_root_enter=lambda call: tape.events.append(f"enter {call.label}"),
    )
    model(X)
    model.layers[0](X)
    assert tape.events == [
        "enter Net#0", "+.", "+.", "-.", "-.", "enter Block#0", "+.", "-.",
    ]  # fmt: skip


def test_the_first_module_called_stays_the_first_while_other_threads_call() -> None:
    first, modules = FirstCall(), [nn.Linear(1, 1), nn.Linear(1, 1)]
    for module in modules:  # the second call had begun when the first one ended the listening
        first.open_call(module, (), {})
    assert first.module() is modules[0]


def test_a_wrapper_that_comes_later_is_the_model_that_it_holds(tape: Tape, attach: Any) -> None:
    model = Net(1)
    scopes = attach(model, layers=0)
    model(X)
    nn.DataParallel(model)(X)
    assert tape.entered == [".", "."] and tape.roots == ["Net#0", "Net#0"]
    assert not scopes.warnings


def test_a_session_of_another_thread_has_the_recorder() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def record() -> None:
        torch_state.claim_recorder()
        begun.set()
        go_on.wait(30)
        torch_state.release_recorder()

    thread = threading.Thread(target=record)
    thread.start()
    begun.wait(30)
    assert torch_state.recorder_is_taken() and torch_state.records_elsewhere() and not torch_state.records_here()
    with pytest.raises(RuntimeError, match="another thread"):
        torch_state.claim_recorder()
    go_on.set()
    thread.join()
    assert not torch_state.recorder_is_taken()


def test_a_recomputed_root_is_no_call_of_its_own(tape: Tape, attach: Any) -> None:
    calls: list[RootCall] = []
    model = Net(1)
    attach(model, on_root_enter=calls.append)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert tape.entered.count(".") == 2
    assert calls == [RootCall("Net#0", "forward", True, training=True)]
    assert tape.events.count("+layers.0") == tape.events.count("-layers.0") == 2


def test_prefill_and_decode_are_flags_of_the_root(tape: Tape, attach: Any) -> None:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            return self.inner(x)

    phases = []
    attach(model := Generates(), on_root_enter=lambda call: phases.append(call.phase))
    with torch.no_grad():
        model(torch.ones(1, 5), use_cache=True)
        model(torch.ones(1, 1), use_cache=True)
    model(torch.ones(1, 1), use_cache=True)
    assert phases == ["prefill", "decode", "forward"]
    assert tape.flags == [("prefill",), (), ("decode",), (), (), ()]


def test_without_a_model_the_outermost_modules_called_are_roots(tape: Tape, attach: Any) -> None:
    blocks = [Block() for _ in range(42)]
    one = attach()
    for _ in range(2):
        for block in blocks:
            block(X)
    assert tape.roots == [f"Block#{k}" for k in range(42)] * 2
    assert tape.entered[:3] == [".", "norm", "linear"]
    assert {row["kind"] for row in one.describe() if row["path"] == "."} == {"block"}


def test_a_root_found_late_takes_over_what_it_contains(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach()
    model.layers[0](X)
    model(X)
    model.layers[0](X)
    assert tape.roots == ["Block#0", "Net#0"]
    assert tape.entered[-3:] == ["layers.0", "layers.0.norm", "layers.0.linear"]


def test_a_loss_made_anew_for_each_step_is_one_root(tape: Tape, attach: Any) -> None:
    one = attach()
    for _ in range(5):
        nn.MSELoss()(X, X)
    assert tape.roots == ["MSELoss#0"] * 5
    assert len(one.describe()) == 1


def test_models_are_held_weakly(tape: Tape, attach: Any) -> None:
    one = attach()
    model = Net()
    model(X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(one.describe()) == 7


def test_a_layer_called_alone_is_marked_without_a_root(tape: Tape, attach: Any) -> None:
    calls: list[RootCall] = []
    model = Net(1)
    attach(model, on_root_enter=calls.append)
    model.layers[0](X)
    assert tape.entered == ["layers.0", "layers.0.norm", "layers.0.linear"]
    assert not calls


def test_what_two_roots_share_goes_by_its_name_in_the_first(tape: Tape, attach: Any) -> None:
    backbone = Net(1)
    actor, critic = nn.Sequential(backbone, nn.ReLU()), nn.Sequential(backbone, nn.Tanh())
    one = attach({"actor": actor, "critic": critic})
    critic(X)
    assert tape.roots == ["critic"]
    assert tape.entered == [
        ".",
        "actor.0",
        "actor.0.layers.0",
        *(f"actor.0.layers.0.{x}" for x in ("norm", "linear")),
        "critic.1",
    ]
    assert len({(row["root"], row["path"]) for row in one.describe()}) == len(one.describe()) == 8


def test_copies_by_data_parallel_are_no_roots(tape: Tape, attach: Any) -> None:
    attach()
    nn.ReLU()._replicate_for_data_parallel()(X)
    assert tape.events == []
