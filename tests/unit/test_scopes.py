"""Marks of layers: which, in what order, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.scopes import LayerScopes, RootCall
from profiler_wrapper.recording.marks import parse_mark

PLAIN_CALL = nn.Module.__call__


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


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    tape = Tape()
    monkeypatch.setattr(scopes, "_Range", tape)
    yield tape
    assert nn.Module.__call__ is PLAIN_CALL


@pytest.fixture
def attach() -> Iterator[Any]:
    """Attaches scopes and takes them away at the end of the test."""
    attached: list[LayerScopes] = []

    def attach(model: object = None, **options: Any) -> LayerScopes:
        attached.append(LayerScopes(model, **options))
        attached[-1].attach()
        return attached[-1]

    yield attach
    for one in attached:
        one.detach()


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


X = torch.ones(1, 2)


def test_marks_bracket_each_call_in_order(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach(model)
    model(X)
    assert tape.events == [
        "+.", "+layers.0", "+layers.0.norm", "-layers.0.norm", "+layers.0.linear", "-layers.0.linear", "-layers.0", "-.",
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


def test_unwind_closes_what_a_generator_left_open(tape: Tape, attach: Any) -> None:
    model = Net(1)
    one = attach(model)
    opened = one.open_call(model, (X,), {})
    one.open_call(model.layers[0], (X,), {})
    one.unwind()
    assert tape.events == ["+.", "+layers.0", "-layers.0", "-."]
    one.close_call(opened)
    model(X)
    assert tape.events[-1] == "-."


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


# --- roots --------------------------------------------------------------------------------------


def test_callbacks_lie_around_outermost_calls(tape: Tape, attach: Any) -> None:
    model = Net(1)
    attach(
        [model, model.layers[0]],
        layers=0,
        on_root_enter=lambda call: tape.events.append(f"enter {call.label}"),
        on_root_exit=lambda call: tape.events.append(f"exit {call.label}"),
    )
    model(X)
    model.layers[0](X)
    assert tape.events == [
        "enter Net#0", "+.", "+.", "-.", "-.", "exit Net#0", "enter Block#0", "+.", "-.", "exit Block#0",
    ]  # fmt: skip


def test_a_recomputed_root_is_no_call_of_its_own(tape: Tape, attach: Any) -> None:
    calls: list[RootCall] = []
    model = Net(1)
    attach(model, on_root_enter=calls.append, on_root_exit=calls.append)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert tape.entered.count(".") == 2
    assert calls == [RootCall("Net#0", "forward", True)] * 2
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


# --- nothing changes ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("callback", ["on_root_enter", "on_root_exit"])
def test_a_callback_that_fails(tape: Tape, attach: Any, callback: str) -> None:
    model = Net(1)
    one = attach(model, **{callback: lambda call: 1 / 0})
    model(X)
    model(X)
    assert len(one.warnings) == 1
    assert tape.events.count("+.") == tape.events.count("-.") < 2


@pytest.mark.parametrize("callback", ["on_root_enter", "on_root_exit"])
def test_detach_in_a_callback(tape: Tape, attach: Any, callback: str) -> None:
    model = Net(1)
    one = attach(model, **{callback: lambda call: one.detach()})
    model(X)
    model(X)
    assert tape.events.count("+.") == tape.events.count("-.") == (0 if callback == "on_root_enter" else 1)
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
