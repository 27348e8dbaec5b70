"""The parts of a step, on a clock that the test moves: they add up, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monitoring import Clock, Device, monitoring
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.timer import steps
from profiler_wrapper.timer.steps import _NAMES as _ENGINE
from unchanged import Boom, hooks_of

pytestmark = pytest.mark.usefixtures("nothing_in_the_way")


class Timed(nn.Module):
    """Takes one unit in its forward and ten in its backward."""

    def __init__(self, clock: Clock | Device) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spend(self.clock, 1.0)
        y: torch.Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda _: spend(self.clock, 10.0))
        return y


class Slow(torch.optim.SGD):
    """Takes a hundred units in its step."""

    clock: Clock | Device

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        spend(self.clock, 60.0)
        if callable(closure):
            closure()
        spend(self.clock, 40.0)


def spend(clock: Clock | Device, units: float) -> None:
    if isinstance(clock, Device):
        clock.work(units * 1e3)
    else:
        clock.now_s += units


def optimizer_of(model: Timed) -> Slow:
    optimizer = Slow(model.parameters(), lr=0.1)
    optimizer.clock = model.clock
    return optimizer


@pytest.fixture(params=["host", "device"])
def clock(request: pytest.FixtureRequest) -> Clock | Device:
    return Clock() if request.param == "host" else Device()


def watched(tmp_path: Path, clock: Clock | Device, **options: object):  # type: ignore[no-untyped-def]
    which = {"device": clock} if isinstance(clock, Device) else {"clock": clock}
    return monitoring(tmp_path, breakdown=True, **which, **options)  # type: ignore[arg-type]


def parts(records: list, clock: Clock | Device) -> dict[str, float]:  # type: ignore[type-arg]
    breakdown = records[-1].breakdown_s
    assert breakdown is not None
    assert sum(breakdown.values()) == pytest.approx(records[-1].step_time_s, abs=1e-9)
    return {name: round(seconds, 6) for name, seconds in breakdown.items()}


@pytest.mark.parametrize("model_is_told", [True, False])
def test_each_part_is_what_it_took(tmp_path: Path, clock: Clock | Device, model_is_told: bool) -> None:
    model = Timed(clock)
    optimizer = optimizer_of(model)
    hooks = hooks_of(model)
    with watched(tmp_path, clock, model=model if model_is_told else None) as (monitor, records):
        with monitor.step():
            spend(clock, 3.0)
            loss = model(torch.ones(1, 2)).sum()
            spend(clock, 0.5)
            loss.backward()
            optimizer.step()
            spend(clock, 0.25)
        if isinstance(clock, Device):
            clock.catch_up()
    assert hooks_of(model) == hooks
    assert parts(records, clock) == {
        "data": 3.0,
        "forward": 1.0,
        "backward": 10.0,
        "optimizer": 100.0,
        "other": 0.75,
    }


def test_a_step_whose_begin_nobody_saw_has_no_parts(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)
    with watched(tmp_path, clock, model=model) as (monitor, records):
        for number in range(2):
            model(torch.ones(1, 2)).sum().backward()
            monitor.log_step(number)
        for number in range(2):
            model(torch.ones(1, 2)).sum().backward()
            monitor.end_step(step=2 + number)
    assert [record.breakdown_s is None for record in records] == [True, False, False, True]
    assert records[3].step_time_s == pytest.approx(11.0)


def test_micro_batches_add_up(tmp_path: Path, clock: Clock | Device) -> None:
    model = Timed(clock)
    optimizer = optimizer_of(model)
    with watched(tmp_path, clock, model=model) as (monitor, records):
        monitor.log_step(0)
        for _ in range(3):
            spend(clock, 2.0)
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        monitor.log_step(1)
        if isinstance(clock, Device):
            clock.catch_up()
    assert parts(records, clock) == {"data": 2.0, "forward": 3.0, "backward": 30.0, "optimizer": 100.0, "other": 4.0}


def test_an_optimizer_that_calls_the_model_takes_its_own_time_only(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)
    with watched(tmp_path, clock, model=model) as (monitor, records), monitor.step():
        optimizer_of(model).step(lambda: model(torch.ones(1, 2)).sum().backward())
    assert parts(records, clock) == {"data": 0.0, "forward": 1.0, "backward": 10.0, "optimizer": 100.0, "other": 0.0}


def test_a_recomputed_forward_is_backward(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)
    outer = nn.Sequential(model)
    with watched(tmp_path, clock) as (monitor, records), monitor.step():
        for reentrant in (True, False):
            x = torch.ones(1, 2, requires_grad=True)
            checkpoint(outer, x, use_reentrant=reentrant).sum().backward()
    assert parts(records, clock)["forward"] == 2.0
    assert parts(records, clock)["backward"] == 2.0 + 20.0


def test_only_the_optimizer_that_was_given_counts(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)
    mine, other = optimizer_of(model), optimizer_of(model)
    with watched(tmp_path, clock, optimizer=mine) as (monitor, records), monitor.step():
        model(torch.ones(1, 2)).sum().backward()
        other.step()
        mine.step()
    assert parts(records, clock) == {"data": 0.0, "forward": 1.0, "backward": 10.0, "optimizer": 100.0, "other": 100.0}
    assert records[0].learning_rate == 0.1


def test_only_the_model_that_was_given_counts(tmp_path: Path) -> None:
    clock = Clock()
    model, teacher = Timed(clock), Timed(clock)
    with watched(tmp_path, clock, model=model) as (monitor, records), monitor.step():
        teacher(torch.ones(1, 2))
        torch.nn.DataParallel(model)(torch.ones(1, 2))
    assert parts(records, clock) == {"data": 1.0, "forward": 1.0, "backward": 0.0, "optimizer": 0.0, "other": 0.0}


def test_an_exception_in_any_part_leaves_the_next_step_whole(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)

    def raises(module: nn.Module, args: object) -> None:
        raise Boom

    with watched(tmp_path, clock) as (monitor, records):
        handle = model.register_forward_pre_hook(raises)
        with pytest.raises(Boom), monitor.step():
            model(torch.ones(1, 2))
        handle.remove()
        with monitor.step():
            model(torch.ones(1, 2)).sum().backward()
    assert len(records) == 1
    assert parts(records, clock) == {"data": 0.0, "forward": 1.0, "backward": 10.0, "optimizer": 0.0, "other": 0.0}


class System(nn.Module):
    """As a LightningModule: the loop calls what is in it."""

    def __init__(self, clock: Clock | Device) -> None:
        super().__init__()
        self.net = nn.Sequential(Timed(clock))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y.sum()


def test_calls_of_modules_in_the_model_are_forward(tmp_path: Path) -> None:
    clock = Clock()
    system, teacher = System(clock), Timed(clock)
    compiled = torch.compile(system.net, backend="eager")
    with watched(tmp_path, clock, model=system) as (monitor, records):
        for loss in (system.loss, lambda x: nn.DataParallel(system.net)(x).sum(), lambda x: compiled(x).sum()):
            with monitor.step():
                spend(clock, 3.0)
                teacher(torch.ones(1, 2))
                loss(torch.ones(1, 2)).backward()
            expected = {"data": 4.0, "forward": 1.0, "backward": 10.0, "optimizer": 0.0, "other": 0.0}
            assert parts(records, clock) == expected
        system.net = nn.Sequential(Timed(clock), Timed(clock))  # as when a stage is added
        with monitor.step():
            system.loss(torch.ones(1, 2)).backward()
        assert parts(records, clock)["forward"] == 2.0


def test_the_model_is_looked_through_once_and_not_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    system, teacher = System(clock), nn.Sequential(Timed(clock), Timed(clock))
    looks = []
    all_modules = steps.all_modules

    def counted(module: nn.Module) -> Iterator[nn.Module]:
        looks.extend([1] if module is system else [])
        return all_modules(module)

    with watched(tmp_path, clock, model=system) as (monitor, records):
        with monitor.step():
            system.loss(torch.ones(1, 2)).backward()
        monkeypatch.setattr(steps, "all_modules", counted)
        for _ in range(5):
            with monitor.step():
                teacher(torch.ones(1, 2))
                system.loss(torch.ones(1, 2)).backward()
            expected = {"data": 2.0, "forward": 1.0, "backward": 10.0, "optimizer": 0.0, "other": 0.0}
            assert parts(records, clock) == expected
    assert len(looks) == 1


def test_the_modules_that_a_call_of_forward_calls_are_seen(tmp_path: Path) -> None:
    clock = Clock()
    model = nn.Sequential(Timed(clock))
    with watched(tmp_path, clock, model=model) as (monitor, records), monitor.step():
        spend(clock, 3.0)
        model.forward(torch.ones(1, 2)).sum().backward()
    assert parts(records, clock) == {"data": 3.0, "forward": 1.0, "backward": 10.0, "optimizer": 0.0, "other": 0.0}


class NoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("model_is_told", [True, False])
def test_without_a_forward_no_part_is_known_and_one_warning_says_why(tmp_path: Path, model_is_told: bool) -> None:
    model = NoModules()
    clock = Clock()
    with (
        pytest.warns(ProfilerWrapperWarning, match=r"parts of a step are not known: no module.*was called") as said,
        watched(tmp_path, clock, model=model if model_is_told else None) as (monitor, records),
    ):
        for _ in range(3):
            with monitor.step():
                model.forward(torch.ones(2)).sum().backward()
                spend(clock, 2.0)
    assert len(said) == 1
    assert [(record.step_time_s, record.breakdown_s) for record in records] == [(2.0, None)] * 3


def test_a_step_in_which_nothing_was_seen_has_no_parts(tmp_path: Path) -> None:
    clock = Clock()
    with watched(tmp_path, clock) as (monitor, records):
        monitor.start_step()
        with monitor.step():
            spend(clock, 2.0)
    assert [(record.step_time_s, record.breakdown_s) for record in records] == [(2.0, None)]


def test_backward_is_seen_where_its_function_was_imported_before(tmp_path: Path) -> None:
    clock = Clock()
    model = Timed(clock)
    backward, grad = torch.autograd.backward, torch.autograd.grad
    with watched(tmp_path, clock, model=model) as (monitor, records), monitor.step():
        backward(model(torch.ones(1, 2)).sum())
        grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
    assert parts(records, clock) == {"data": 0.0, "forward": 2.0, "backward": 20.0, "optimizer": 0.0, "other": 0.0}


def test_an_optimizers_step_without_a_backward_that_was_seen_leaves_the_parts_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    model = Timed(clock)
    original = dict(vars(torch.autograd))
    with (
        pytest.warns(ProfilerWrapperWarning, match="no backward was seen") as said,
        watched(tmp_path, clock, model=model) as (monitor, records),
    ):
        for _ in range(2):
            with monitor.step():
                with monkeypatch.context() as other:  # somebody puts the original in the place of ours
                    for name in _ENGINE:
                        other.setattr(torch.autograd, name, original[name])
                    model(torch.ones(1, 2)).sum().backward()
                optimizer_of(model).step()
    assert len(said) == 1
    assert [(record.step_time_s, record.breakdown_s) for record in records] == [(111.0, None)] * 2


def test_compiled_models_have_the_same_graphs(tmp_path: Path) -> None:
    """A backend that only counts: no graph more, no recompilation, and the call is forward."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    compiled = torch.compile(model, backend=counting)
    compiled(torch.ones(1, 2)).sum().backward()
    with monitoring(tmp_path, breakdown=True, model=model) as (monitor, records):
        for _ in range(2):
            with monitor.step():
                compiled(torch.ones(1, 2)).sum().backward()
        later = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend=counting)
        with monitor.step():
            later(torch.ones(1, 2)).sum().backward()
    compiled(torch.ones(1, 2)).sum().backward()
    later(torch.ones(1, 2)).sum().backward()
    assert len(graphs) == 2
    breakdown = records[0].breakdown_s
    assert breakdown is not None
    assert breakdown["forward"] > 0
    assert breakdown["backward"] > 0
