"""Marks of layers: which, and in what order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler

from mark_tape import PLAIN_CALL, Net, Tape, X


def test_marks_bracket_each_call_in_order(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach(model)
    model(X)
    assert tape.events == [
        "+.", "+layers.0", "+layers.0.norm", "-layers.0.norm",
        "+layers.0.linear", "-layers.0.linear", "-layers.0", "-.",
    ]  # fmt: skip


def test_only_selected_layers_are_marked(tape: Tape, attach: Any) -> None:
    model = Net()
    attach(model, layers="layers.?")
    model(X)
    assert tape.entered == [".", "layers.0", "layers.1"]


def test_after_detach_nothing_is_left(tape: Tape, attach: Any) -> None:
    model = Net()
    before = [dict(vars(module)) for module in model.modules()]
    one = attach(model)
    one.attach()
    model(X)
    assert [dict(vars(module)) for module in model.modules()] == before
    one.detach()
    one.detach()
    assert nn.Module.__call__ is PLAIN_CALL
    entered = len(tape.entered)
    model(X)
    assert len(tape.entered) == entered


def test_what_is_patched_goes_with_the_last_that_listens(attach: Any) -> None:
    plain = autograd_profiler.profile.__exit__
    one, other = attach(Net(1)), attach(Net(1))
    one.detach()
    assert nn.Module.__call__ is not PLAIN_CALL and autograd_profiler.profile.__exit__ is not plain
    other.detach()
    assert nn.Module.__call__ is PLAIN_CALL and autograd_profiler.profile.__exit__ is plain


def test_attach_again(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model)
    one.detach()
    one.attach()
    model(X)
    assert len(tape.entered) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_closes_every_mark_and_goes_on(tape: Tape, attach: Any, error: type[BaseException]) -> None:
    model = Net(1)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    model.layers[0].linear.forward = fail
    one = attach(model)
    with pytest.raises(error):
        model(X)
    assert tape.events[-3:] == ["-layers.0.linear", "-layers.0", "-."]
    assert not one.warnings


def test_a_module_called_twice_and_within_itself(tape: Tape, attach: Any) -> None:
    class Recursive(nn.Module):
        def forward(self, depth: int) -> int:
            return self(depth - 1) if depth else 0

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recursive()

        def forward(self, depth: int) -> int:
            return self.inner(depth) + self.inner(0)

    attach(model := Twice())
    model(1)
    assert tape.events == ["+.", "+inner", "+inner", "-inner", "-inner", "+inner", "-inner", "-."]


def test_marks_of_threads_do_not_mix(tape: Tape, attach: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait(10)
            return x

    model = nn.ModuleDict({"slow": Waits(), "fast": nn.Identity()})
    attach(model)
    thread = threading.Thread(target=model["slow"], args=(X,))
    thread.start()
    inside.wait(10)
    model["fast"](X)
    go_on.set()
    thread.join(10)
    assert tape.roots == ["slow", "fast"]
    assert len(tape.events) == 4


@pytest.mark.parametrize("end", ["end_marks", "detach"])
def test_marks_that_are_open_end_with_the_recording(tape: Tape, attach: Any, end: str) -> None:
    model = Net(1)
    calls: list[Any] = []
    one = attach(model, on_root_enter=calls.append)
    outer = one.open_call(model, (X,), {})
    inner = one.open_call(model.layers[0], (X,), {})
    getattr(one, end)()
    assert tape.events == ["+.", "+layers.0", "-layers.0", "-."]
    one.attach()
    model(X)
    assert len(calls) == 1  # the first call goes on
    one.close_call(inner)
    one.close_call(outer)
    assert tape.events.count("-.") == 2
    assert one.warnings == []
    model(X)
    assert len(calls) == 2


def test_a_mark_left_open_is_closed_by_the_one_around_it(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model)
    outer = one.open_call(model, (X,), {})
    one.open_call(model.layers[0], (X,), {})
    one.close_call(outer)
    assert tape.events[:4] == ["+.", "+layers.0", "-layers.0", "-."]


def test_describe(tape: Tape, attach: Any) -> None:
    one = attach(nn.ModuleDict({"net": Net(1)}))
    assert one.describe()[:2] == [
        {
            "root": "net", "path": ".", "raw_name": "", "class_name": "Net", "kind": "other",
            "own_parameters": 0, "parameters": 10, "compiled": False, "shared": False,
        },
        {
            "root": "net", "path": "net.layers.0", "raw_name": "net.layers.0", "class_name": "Block", "kind": "block",
            "own_parameters": 0, "parameters": 10, "compiled": False, "shared": False,
        },
    ]  # fmt: skip


def test_a_selection_of_nothing_warns(tape: Tape, attach: Any) -> None:
    assert attach(Net(), layers="layer.*").warnings == ["layers='layer.*' selects no module below the root"]
    assert attach(Net()).warnings == []
