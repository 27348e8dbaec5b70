"""What is told of the memory that models and optimizers hold: which storages, under which names, at which moments."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from profiler_wrapper.capture import owned_tensors as holdings_module
from profiler_wrapper.capture.layers import find_roots
from profiler_wrapper.capture.owned_tensors import Listing, OwnedTensors, find_optimizers
from profiler_wrapper.capture.torch_state import OptimizerSteps
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.trace.run_file import HeldTensor, Holding, read_holdings

WIDTH = 4
WEIGHT_BYTES, BIAS_BYTES = WIDTH * WIDTH * 4, WIDTH * 4


class Net(nn.Module):
    """Two linears, a buffer, and the first's weight again under another name."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.second(self.first(x))) * self.scale[0]


def held_memory(model: Any, *optimizers: object) -> OwnedTensors:
    roots = find_roots(model)
    return OwnedTensors(lambda: roots, find_optimizers(list(optimizers)))


def everything(held: OwnedTensors) -> tuple[HeldTensor, ...]:
    """What is told when a session begins."""
    held.begin()
    moments = held.end()
    assert held.problem is None
    assert [sorted(moment.tensors) for moment in moments] in ([["cpu"]] * 2, [])
    return tuple(moments[0].tensors["cpu"]) if moments else ()


def named(tensors: tuple[HeldTensor, ...], category: str) -> dict[str, int]:
    return {one.name: one.size_bytes for one in tensors if one.category == category}


def backward(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()


@pytest.fixture
def watched() -> Iterator[Any]:
    """Tells a `OwnedTensors` of the steps of all optimizers, until the test ends."""
    watches: list[OptimizerSteps] = []

    def watch(held: OwnedTensors) -> None:
        watches.append(OptimizerSteps(before=held.before_step, after=held.after_step))

    yield watch
    for one in watches:
        one.remove()


def test_parameters_and_buffers_have_full_names_and_tied_weights_count_once() -> None:
    model = Net()
    tensors = everything(held_memory(model))
    assert named(tensors, "params") == {
        "first.weight": WEIGHT_BYTES,
        "first.bias": BIAS_BYTES,
        "second.weight": WEIGHT_BYTES,
        "second.bias": BIAS_BYTES,
        "scale": 12,
    }
    addresses = {one.name: one.address for one in tensors}
    assert addresses == {name: tensor.data_ptr() for name, tensor in model.state_dict().items() if "tied" not in name}


def test_names_of_a_model_with_a_name_begin_with_it_and_wrappers_add_nothing() -> None:
    compiled = torch.compile(Net(), backend="eager")
    tensors = everything(held_memory({"dit": compiled, "vae": nn.Linear(2, 2)}))
    assert [*named(tensors, "params")] == [
        "dit.first.weight",
        "dit.first.bias",
        "dit.second.weight",
        "dit.second.bias",
        "vae.weight",
        "vae.bias",
        "dit.scale",
    ]


def test_views_of_one_flat_buffer_are_one_storage_under_the_first_name() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    flat = torch.zeros(WEIGHT_BYTES + BIAS_BYTES)
    model.bias.data = flat[:WIDTH]
    model.weight.data = flat[WIDTH : WIDTH + WIDTH * WIDTH].view(WIDTH, WIDTH)
    (only,) = everything(held_memory(model))
    assert only == (flat.data_ptr(), flat.nbytes, "params", "weight")


def test_gradients_are_what_grad_holds() -> None:
    model = Net()
    held = held_memory(model)
    assert named(everything(held), "grads") == {}
    backward(model)
    tensors = [one for one in everything(held) if one.category == "grads"]
    assert {one.name: one.address for one in tensors} == {
        name: parameter.grad.data_ptr() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    assert len(tensors) == 4
    model.zero_grad(set_to_none=True)
    assert named(everything(held), "grads") == {}


def test_a_training_on_another_thread_is_not_looked_at(watched: Any) -> None:
    """torch writes its gradients without Python's lock."""
    model, theirs = Net(), Net()
    optimizer = torch.optim.Adam(theirs.parameters())
    held = held_memory(model)
    watched(held)
    held.begin()
    backward(theirs)
    another = threading.Thread(target=optimizer.step)
    another.start()
    another.join()
    assert held.optimizers() == []
    optimizer.step()
    assert held.optimizers() == [optimizer]


@pytest.mark.filterwarnings("error")
def test_what_is_no_leaf_is_asked_for_no_gradient_unless_it_keeps_it() -> None:
    weight, bias = torch.ones(WIDTH, WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)
    model = nn.Linear(WIDTH, WIDTH)
    del model.weight, model.bias
    model._parameters["weight"], model._parameters["bias"] = weight * 2, bias * 2  # type: ignore[assignment]
    model.bias.retain_grad()
    backward(model)
    optimizer = SimpleNamespace(param_groups=[{"params": [model.weight, model.bias]}], state={})
    for held in (held_memory(model), held_memory(model, optimizer)):
        assert named(everything(held), "grads") == {"bias": BIAS_BYTES}


def test_copies_on_write_stay_uncopied_and_are_left_out(watched: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    held = held_memory(model, optimizer)
    lazy = torch._lazy_clone(model.scale)
    model.scale = lazy
    gradient = model.first.weight.grad
    another = torch._lazy_clone(gradient)  # type: ignore[arg-type]
    held.begin()
    held.before_step(weakref.ref(optimizer))
    held.after_step(weakref.ref(optimizer))
    moments = held.end()
    assert held.problem is None
    assert all(torch._C._is_cow_tensor(one) for one in (lazy, another, gradient))  # type: ignore[attr-defined]
    for moment in moments:
        assert "scale" not in {one.name for one in moment.tensors["cpu"]}
        assert "first.weight" not in named(tuple(moment.tensors["cpu"]), "grads")
        assert "second.weight" in named(tuple(moment.tensors["cpu"]), "grads")


@pytest.mark.parametrize(("momentum", "states"), [(0.0, 0), (0.9, 1)])
def test_sgd_has_state_only_with_momentum(momentum: float, states: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    held = held_memory(model, optimizer)
    backward(model)
    optimizer.step()
    state = named(everything(held), "os_state")
    assert sum(state.values()) == states * 2 * (WEIGHT_BYTES + BIAS_BYTES)
    assert [*state] == [f"momentum_buffer of {name}" for name, _ in model.named_parameters()] * states


def test_the_state_of_adamw_is_twice_the_parameters_and_its_step_counts(watched: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    held = held_memory(model)
    watched(held)
    held.begin()
    backward(model)
    optimizer.step()
    begin, before, after, end = held.end()
    assert {one.category for one in begin.tensors["cpu"]} == {"params"}
    assert {one.category for one in before.tensors["cpu"]} == {"grads"}
    state = named(after.tensors["cpu"], "os_state")  # type: ignore[arg-type]
    assert sum(state.values()) == 2 * 2 * (WEIGHT_BYTES + BIAS_BYTES) + 4 * 4
    assert {"exp_avg of first.weight", "exp_avg_sq of second.bias", "step of first.bias"} <= set(state)
    assert not any(one.category == "os_params" for one in end.tensors["cpu"])
    assert {one.category for one in end.tensors["cpu"]} == {"params", "grads", "os_state"}


def test_state_from_before_the_session_is_told_before_the_first_step(watched: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    held = held_memory(model)
    watched(held)
    held.begin()
    optimizer.step()
    begin, before, end = held.end()
    assert {one.category for one in begin.tensors["cpu"]} == {"params", "grads"}
    assert {one.category for one in before.tensors["cpu"]} == {"grads", "os_state"}
    assert len(named(tuple(end.tensors["cpu"]), "os_state")) == 3 * 4


class MasterWeights(torch.optim.Optimizer):
    """Plain gradient descent on fp32 copies of a model of lower precision."""

    def __init__(self, parameters: Any, *, as_parameters: bool = False) -> None:
        self.model_parameters = list(parameters)
        copies = [parameter.detach().float().requires_grad_() for parameter in self.model_parameters]
        super().__init__([nn.Parameter(copy) for copy in copies] if as_parameters else copies, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for copy, parameter in zip(self.param_groups[0]["params"], self.model_parameters, strict=True):
                copy -= 0.1 * parameter.grad.float()
                parameter.copy_(copy)


@pytest.mark.parametrize("as_parameters", [False, True])
def test_copies_of_parameters_are_os_params_named_by_order_and_shape(watched: Any, as_parameters: bool) -> None:
    model = Net(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), as_parameters=as_parameters)
    held = held_memory(model)
    watched(held)
    held.begin()
    backward(model, torch.bfloat16)
    optimizer.step()
    end = tuple(held.end()[-1].tensors["cpu"])
    copies = {one.name: one.address for one in end if one.category == "os_params"}
    expected = optimizer.param_groups[0]["params"]
    assert copies == {
        f"master of {name}": copy.data_ptr() for (name, _), copy in zip(model.named_parameters(), expected, strict=True)
    }
    assert sum(named(end, "os_params").values()) == 2 * 2 * (WEIGHT_BYTES // 2 + BIAS_BYTES // 2)
    assert named(end, "os_state") == {}


def test_copies_that_match_no_shape_have_a_number() -> None:
    model = Net(torch.bfloat16)
    flat = torch.zeros(40, requires_grad=True)
    optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)
    optimizer.state[flat] = {"momentum_buffer": torch.zeros(40), "master_param": torch.zeros(7)}
    tensors = everything(held_memory(model, optimizer))
    assert named(tensors, "os_params") == {"master 0": 160, "master of master 0": 28}
    assert named(tensors, "os_state") == {"momentum_buffer of master 0": 160}


def test_parameters_of_a_module_that_nobody_told_of_are_no_copies() -> None:
    model, other = Net(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    tensors = everything(held_memory(model, optimizer))
    assert named(tensors, "os_params") == {}
    assert named(tensors, "params")["parameter 0 of AdamW"] == WEIGHT_BYTES


def test_state_in_nested_containers_is_found() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = SimpleNamespace(
        param_groups=[{"params": list(model.parameters())}, "not a group"],
        state={
            model.weight: {"step": 3, "factors": [torch.zeros(2), {"inner": torch.zeros(3)}]},
            "global": torch.zeros(4),
        },
    )
    tensors = everything(held_memory(model, optimizer))
    assert named(tensors, "os_state") == {
        "factors.0 of weight": 8,
        "factors.1.inner of weight": 12,
        "state of global": 16,
    }


def test_lbfgs_keeps_its_history_in_lists(watched: Any) -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    held = held_memory(model)
    watched(held)
    held.begin()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(WIDTH)) - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    state = named(tuple(held.end()[-1].tensors["cpu"]), "os_state")
    kept = optimizer.state[model.weight]
    assert held.problem is None
    tensors = [one for value in kept.values() for one in (value if isinstance(value, list) else [value])]
    expected = [one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor)]
    assert state["old_dirs.0 of weight"] == (WIDTH + 1) * 4
    assert sum(state.values()) == sum({one.data_ptr(): one.nbytes() for one in expected}.values())


class Wrapping(torch.Tensor):
    """A subclass with its data in an inner tensor, as quantized and distributed ones have."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run")


def test_a_subclass_has_the_memory_of_what_it_wraps_and_no_op_runs() -> None:
    inner = torch.zeros(5)
    listing = Listing()
    listing.add(Wrapping(inner), "params", "weight")
    assert listing.holding().tensors == {"cpu": ((inner.data_ptr(), 20, "params", "weight"),)}
    assert [listing.name_of(one) for one in (inner, Wrapping(inner), torch.zeros(5))] == ["weight", "weight", None]
    assert listing.name_of(Wrapping(Wrapping(Wrapping(Wrapping(inner))))) == "weight"


def test_without_an_optimizer_none_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    objects: list[object] = [model]
    monkeypatch.setattr(gc, "get_objects", lambda: objects)
    assert not holdings_module.may_come(model.parameters())
    objects.append(torch.optim.SGD(model.parameters(), lr=0.1))
    assert holdings_module.may_come(model.parameters())


def test_hooks_that_are_removed_within_a_step_are_silent_at_once() -> None:
    told: list[str] = []
    steps = OptimizerSteps(before=lambda _: told.append("before"), after=lambda _: told.append("after"))

    class Removes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.remove()
            return super().step(closure)

    optimizer = Removes(Net().parameters(), lr=0.1)
    optimizer.step()
    steps.remove()
    assert told == ["before"]


def test_what_has_no_memory_is_left_out() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    emptied = torch.zeros(4)
    emptied.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.zeros(4)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (4,), check_invariants=True)
    listing = Listing()
    for tensor in (torch.zeros(4, device="meta"), torch.zeros(0), emptied, fake, nn.Parameter(fake), sparse):
        listing.add(tensor, "params", "weight")
    assert len(listing) == 0


def test_state_that_moves_without_new_tensors_is_told_again(watched: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    held = held_memory(model, optimizer)
    watched(held)
    held.begin()
    optimizer.step()
    moved = [entries["momentum_buffer"] for entries in optimizer.state.values()]
    for tensor in moved:
        tensor.data = tensor.data.clone()
    optimizer.step()
    _, _, gradients, state, _ = held.end()
    assert {one.category for one in gradients.tensors["cpu"]} == {"grads"}
    assert [one.address for one in state.tensors["cpu"]] == [tensor.data_ptr() for tensor in moved]


def test_an_optimizer_with_the_id_of_one_that_is_no_more_is_another() -> None:
    class Own:
        def __init__(self) -> None:
            self.param_groups = [{"params": list(model.parameters())}]
            self.state = {"own": torch.zeros(WIDTH)}

    model = Net()
    first = Own()
    held = held_memory(model, first)
    held.begin()
    before, others = id(first), []
    del first
    while id(second := Own()) != before:
        others.append(second)
        assert len(others) < 10_000
    held.before_step(weakref.ref(second))
    _, own, end = held.end()
    for moment in (own, end):
        (state,) = (one for one in moment.tensors["cpu"] if one.category == "os_state")
        assert state[:2] == (second.state["own"].data_ptr(), WIDTH * 4)


def test_sparse_gradients_and_lazy_modules_are_no_problem() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    model[0](torch.tensor([1])).sum().backward()
    assert [one.name for one in everything(held_memory(model))] == ["0.weight"]


def test_a_view_that_begins_in_the_middle_is_listed_by_its_storage() -> None:
    base = torch.zeros(16)
    listing = Listing()
    listing.add(base[8:], "params", "weight")
    assert listing.holding().tensors == {"cpu": ((base.data_ptr(), 64, "params", "weight"),)}


def test_nothing_is_kept_alive() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    found: list[Any] = [*find_roots(model)]
    held = OwnedTensors(lambda: tuple(found), [optimizer])
    held.begin()
    backward(model)
    held.before_step(weakref.ref(optimizer))
    optimizer.step()
    held.after_step(weakref.ref(optimizer))
    references = [weakref.ref(one) for one in (model, optimizer, model.first.weight, model.first.weight.grad)]
    found.clear()
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert held.end()[-1].tensors == {}
    assert held.problem is None


def test_a_failure_is_a_problem_and_nothing_is_told() -> None:
    model = Net()

    class Odd:
        state: Mapping[Any, Any] = {}
        asked = 0

        @property
        def param_groups(self) -> list[Any]:
            self.asked += 1
            if self.asked > 1:
                raise OSError("gone")
            return []

    odd = Odd()
    held = held_memory(model, odd)
    held.begin()
    assert held.problem is not None and held.problem.endswith("because listing it failed: OSError: gone")
    held.step_ended()
    assert held.end() == ()


def test_outside_of_a_session_nothing_happens() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    held = held_memory(model, optimizer)
    held.before_step(weakref.ref(optimizer))
    held.after_step(weakref.ref(optimizer))
    held.step_ended()
    assert held.end() == ()
    held.begin()
    held.forget()
    assert held.end() == ()


def test_optimizers_are_found_inside_of_what_wraps_them() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    zero = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer, param_groups=[]))
    assert find_optimizers(zero) == (optimizer,)
    assert find_optimizers({"a": zero, "b": optimizer}) == (optimizer, optimizer)
    assert find_optimizers(None) == ()
    with pytest.raises(WrongUse, match="optimizer=list has no param_groups"):
        find_optimizers([[optimizer]])
    with pytest.raises(WrongUse, match="optimizer=int"):
        find_optimizers(3)


def test_an_optimizer_that_tells_nobody_of_its_steps_is_told_of_at_each_step_of_the_loop() -> None:
    model = Net()
    optimizer = SimpleNamespace(param_groups=[{"params": list(model.parameters())}], state={})
    held = held_memory(model, optimizer)
    held.begin()
    backward(model)
    optimizer.state[model.first.weight] = {"momentum": torch.zeros(3)}
    held.step_ended()
    _, gradients, state, _ = held.end()
    assert {one.category for one in gradients.tensors["cpu"]} == {"grads"}
    assert named(tuple(state.tensors["cpu"]), "os_state") == {"momentum of first.weight": 12}


def run_steps(held: OwnedTensors, model: nn.Module, steps: int, *, keep: list[Any]) -> list[int]:
    """As many steps whose gradients lie elsewhere each time; the address of one gradient at each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addresses = []
    for _ in range(steps):
        backward(model)
        keep.extend(parameter.grad for parameter in model.parameters())
        addresses.append(next(model.parameters()).grad.data_ptr())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return addresses


def test_a_long_session_tells_places_once_and_the_last_moment_in_full(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings_module, "MOST_TENSORS", 42)  # 2 parameters, then 2 gradients a step
    model = nn.Linear(WIDTH, WIDTH)
    held = held_memory(model)
    watched(held)
    held.begin()
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    moments = held.end()
    told = [moment for moment in moments if {one.category for one in moment.tensors["cpu"]} == {"grads"}]
    assert len(told) == 20 + 1
    assert {len(moment.tensors["cpu"]) for moment in told} == {2}
    assert [moment.time_ns for moment in moments] == sorted(moment.time_ns for moment in moments)


def test_a_long_session_tells_new_places_until_there_are_too_many(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings_module, "MOST_TENSORS", 20)
    model = nn.Linear(WIDTH, WIDTH)
    held = held_memory(model)
    watched(held)
    held.begin()
    keep: list[Any] = []
    addresses = run_steps(held, model, 100, keep=keep)
    moments = held.end()
    told = [one.address for moment in moments for one in moment.tensors["cpu"] if one.name == "weight"]
    told_gradients = [address for address in told if address != model.weight.data_ptr()]
    assert told_gradients == [*addresses[:19], addresses[-1]]  # 2 parameters, then 2 gradients a step up to 40


def test_what_was_written_is_read() -> None:
    told = (Holding(7, {"cpu": (HeldTensor(1, 2, "params", 'a "weight"'),), "cuda:0": ()}), Holding(8, {}))
    assert read_holdings(json.loads(msgspec.json.encode(told))) == told
    assert read_holdings(None) == ()


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        "x",
        [1],
        [{}],
        [{"time_ns": 1}],
        [{"time_ns": "1", "tensors": {}}],
        [{"time_ns": 1, "tensors": []}],
        [{"time_ns": 1, "tensors": {"cpu": [[1, 2, "params"]]}}],
        [{"time_ns": 1, "tensors": {"cpu": [[1, 2.5, "params", "x"]]}}],
        [{"time_ns": 1, "tensors": {"cpu": [[1 << 70, 2, "params", "x"]]}}],
        [{"time_ns": 1, "tensors": {"cpu": 3}}],
    ],
)
def test_what_was_not_written_so_is_an_error(damaged: object) -> None:
    with pytest.raises(ValueError, match="held"):
        read_holdings(damaged)
