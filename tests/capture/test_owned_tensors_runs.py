"""What run.json says of the memory that model and optimizers hold, over whole profiles of real models."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

import profiler_wrapper as pw
from models import Case, build, optimizer_of, train_step
from profiler_wrapper.capture import owned_tensors as holdings_module
from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.trace.run_file import HeldTensor, Holding, read_holdings, run_beside
from profiling import QUICK, directory_of, profiler, result_of
from unchanged import fails, nothing_left
from variants import ddp, fsdp2, lora

ONE_SESSION: dict[str, Any] = {"steps": "all", "record_shapes": False}


def told(prof: pw.ProfilerWrapper) -> tuple[Holding, ...]:
    """What run.json says."""
    return read_holdings(json.loads((directory_of(prof) / "run.json").read_text())["held"])


def sums(holding: Holding, device: str = "cpu") -> dict[str, int]:
    """Bytes by category."""
    tensors = holding.tensors.get(device, ())
    return {
        name: sum(one.size_bytes for one in tensors if one.category == name) for name in {t.category for t in tensors}
    }


def of(holding: Holding, category: str) -> dict[str, HeldTensor]:
    return {one.name: one for one in holding.tensors.get("cpu", ()) if one.category == category}


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages, local ones of distributed tensors."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # type: ignore[operator]
    storages = [one.detach().untyped_storage() for one in local]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for entries in optimizer.state.values() for value in entries.values()]


def steps(case: Case, optimizer: torch.optim.Optimizer, count: int, *, model: nn.Module | None = None) -> None:
    for step in range(count):
        train_step(case, model or case.model, optimizer, seed=step)


def test_adamw_from_the_first_step_on(tmp_path: Path) -> None:
    case = build("llama")
    parameters = bytes_of([*case.model.parameters()])
    buffers = bytes_of([*case.model.buffers()])
    with profiler(case, tmp_path, **ONE_SESSION) as prof:
        optimizer = optimizer_of(case.model)
        steps(case, optimizer, 3)
    begin, *between, end = told(prof)
    assert sums(begin) == {"params": parameters + buffers}
    state = 2 * parameters + 4 * len([*case.model.parameters()])
    assert [sums(one) for one in between] == [{"grads": parameters}, {"os_state": state}, *[{"grads": parameters}] * 2]
    assert sums(end) == {"params": parameters + buffers, "os_state": state}
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = case.model.get_parameter(name)
    assert of(begin, "params")[name][:2] == (parameter.data_ptr(), parameter.nbytes)
    kept = optimizer.state[parameter]["exp_avg_sq"]
    assert of(end, "os_state")[f"exp_avg_sq of {name}"][:2] == (kept.data_ptr(), kept.nbytes)


@pytest.mark.full
def test_by_default_it_is_of_the_timed_steps(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    with profiler(case, tmp_path) as prof:
        steps(case, optimizer, 7)
    parameters = bytes_of([*case.model.parameters()])
    moments = told(prof)
    assert [{*sums(one)} for one in moments] == [
        {"params", "grads", "os_state"},  # what begins within an optimizer's step finds gradients there
        {"grads"},
        {"grads"},
        {"grads"},
        {"params", "grads", "os_state"},
    ]
    assert {sums(one)["grads"] for one in moments} == {parameters}


@pytest.mark.full
def test_moments_are_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    with profiler(case, tmp_path, **ONE_SESSION) as prof:
        steps(case, optimizer, 2)
    (path,) = directory_of(prof).glob("*_trace.json")
    trace = json.loads(path.read_text())
    base = int(trace["baseTimeNanoseconds"])
    begin, *between, end = [one.time_ns - base for one in told(prof)]
    first, second = sorted(
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in trace["traceEvents"]
        if str(event.get("name")).startswith("Optimizer.step#")
    )
    before, after, before_second = between
    memory = [round(event["ts"] * 1000) for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    assert begin < min(memory) and max(memory) < end
    assert first[0] < before < after < first[1] < second[0] < before_second < second[1]
    in_first = [time for time in memory if first[0] < time < first[1]]
    assert in_first and before < min(in_first) and max(in_first) < after


@pytest.mark.full
def test_every_allocation_of_gradients_and_state_is_at_an_address_that_is_told(tmp_path: Path) -> None:
    case = build("llama")
    with profiler(case, tmp_path, **ONE_SESSION) as prof:
        optimizer = optimizer_of(case.model)
        steps(case, optimizer, 1)
    (path,) = directory_of(prof).glob("*_trace.json")
    arguments = [
        event["args"] for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"
    ]
    allocated = {(one["Addr"], one["Bytes"]) for one in arguments}
    _, gradients, state, _ = told(prof)
    for moment in (gradients, state):
        assert {one[:2] for one in moment.tensors["cpu"]} <= allocated


@pytest.mark.full
def test_without_a_model_the_one_that_is_called_is_known_from_the_first_step_on(tmp_path: Path) -> None:
    case = build("gpt2")
    optimizer = optimizer_of(case.model)
    with profiler(None, tmp_path, **ONE_SESSION) as prof:
        steps(case, optimizer, 2)
    begin, *_, end = told(prof)
    assert sums(begin) == {}
    assert of(end, "params")["transformer.wte.weight"].address == case.model.get_parameter("lm_head.weight").data_ptr()
    assert "lm_head.weight" not in of(end, "params")
    assert sums(end)["params"] == bytes_of([*case.model.parameters(), *case.model.buffers()])


@pytest.mark.full
@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_wrapped_models_hold_what_an_independent_count_says(
    wrap: Callable[[Case], nn.Module], process_group: None, tmp_path: Path
) -> None:
    case = build("llama")
    model = wrap(case)
    optimizer = optimizer_of(model)
    parameters = [*case.model.parameters()]
    gradients: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(bytes_of([p.grad for p in parameters])))  # type: ignore[misc]
    with pw.ProfilerWrapper(
        model, **ONE_SESSION, output_dir=tmp_path, files=("trace",), enable_print_summary=False
    ) as prof:
        steps(case, optimizer, 2, model=model)
    begin, *between, end = told(prof)
    assert sums(begin)["params"] == sums(end)["params"] == bytes_of([*parameters, *case.model.buffers()])
    assert [sums(one)["grads"] for one in between if "grads" in sums(one)] == gradients
    assert sums(end)["os_state"] == bytes_of(state_of(optimizer))
    # FSDP2 has the gradients of a group of parameters in one storage, which goes by the first.
    assert {*of(between[0], "grads")} <= {name for name, _ in case.model.named_parameters()}
    assert "os_params" not in sums(end)


@pytest.mark.full
def test_adapters_alone_have_gradients_and_state(tmp_path: Path) -> None:
    case = build("llama")
    model = lora(case)
    optimizer = optimizer_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pw.ProfilerWrapper(model, **ONE_SESSION, output_dir=tmp_path, files=(), enable_print_summary=False) as prof:
        steps(case, optimizer, 2, model=model)
    _, gradients, *_, end = told(prof)
    assert sums(gradients) == {"grads": bytes_of(trained)}
    assert all("lora_" in name and not name.startswith("base_model") for name in of(gradients, "grads"))
    assert sums(end)["os_state"] == bytes_of(state_of(optimizer))


@pytest.mark.full
def test_optimizers_that_step_within_backward(tmp_path: Path) -> None:
    case = build("llama")
    optimizers = {p: torch.optim.AdamW([p]) for p in case.model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
    with profiler(case, tmp_path, **ONE_SESSION) as prof:
        for seed in range(2):
            case.loss(case.model, case.batch(seed)).backward()
            prof.step()
    _, *between, end = told(prof)
    assert sum(len(of(one, "grads")) for one in between) == 2 * len(optimizers)
    assert all(len(of(one, "grads")) <= 1 for one in between)
    assert sums(end)["os_state"] == bytes_of([one for optimizer in optimizers.values() for one in state_of(optimizer)])
    for hook in hooks:  # else the optimizers live on: torch holds what the hooks hold, out of sight of the collector
        hook.remove()


class HandMade:
    """Momentum as a library of its own might have it: no optimizer of torch's."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            kept = self.state.setdefault(parameter, {"velocity": torch.zeros_like(parameter)})["velocity"]
            kept.mul_(0.9).add_(parameter.grad)
            parameter -= 0.01 * kept
            parameter.grad = None


@pytest.mark.full
def test_an_optimizer_that_torch_does_not_know_can_be_given(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = HandMade(case.model.parameters())
    with profiler(case, tmp_path, **ONE_SESSION, optimizer=[SimpleNamespace(optimizer=optimizer)]) as prof:
        for seed in range(2):
            case.loss(case.model, case.batch(seed)).backward()
            optimizer.step()
            prof.step()
    parameters = bytes_of([*case.model.parameters()])
    begin, *_, end = told(prof)
    assert {*sums(begin)} == {"params"}
    assert sums(end)["os_state"] == parameters
    assert "velocity of lm_head.weight" in of(end, "os_state")
    with pytest.raises(pw.WrongUse, match="no param_groups"):
        profiler(case, tmp_path, optimizer=case.model)


@pytest.mark.full
@pytest.mark.parametrize("says_step", [True, False])
def test_the_state_of_such_an_optimizer_is_told_when_the_step_ends_that_made_it(
    tmp_path: Path, says_step: bool
) -> None:
    case = build("llama")
    optimizer = HandMade(case.model.parameters())
    with profiler(case, tmp_path, **ONE_SESSION, optimizer=optimizer) as prof:
        for seed in range(4):
            case.loss(case.model, case.batch(seed)).backward()
            optimizer.step()
            if says_step:
                prof.step()
    parameters = bytes_of([*case.model.parameters()])
    begin, state, end = told(prof)
    assert {*sums(begin)} == {"params"}
    assert sums(state) == {"os_state": parameters}
    assert sums(end)["os_state"] == parameters
    (path,) = directory_of(prof).glob("*_trace.json")
    trace = json.loads(path.read_text())
    starts = {event["name"]: event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert begin.time_ns < state.time_ns
    assert (state.time_ns - int(trace["baseTimeNanoseconds"])) / 1000 < starts["ProfilerStep#1"]


class KeepsGradients(HandMade):
    """The same, but it leaves gradients to the loop, which sets them to zero."""

    @torch.no_grad()
    def step(self) -> None:
        gradients = [parameter.grad for parameter in self.param_groups[0]["params"]]
        super().step()
        for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient.zero_()


@pytest.mark.full
def test_gradients_of_such_an_optimizer_are_told_where_they_are_still_there(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = KeepsGradients(case.model.parameters())
    with profiler(case, tmp_path, **ONE_SESSION, optimizer=optimizer) as prof:
        for seed in range(2):
            case.loss(case.model, case.batch(seed)).backward()
            optimizer.step()
            prof.step()
    parameters = bytes_of([*case.model.parameters()])
    _, *between, _ = told(prof)
    assert [sums(one) for one in between] == [{"grads": parameters}, {"os_state": parameters}, {"grads": parameters}]


@pytest.mark.full
def test_state_from_before_is_told_at_once_if_the_optimizer_is_given(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    steps(case, optimizer, 1)
    with profiler(case, tmp_path, **ONE_SESSION, optimizer=optimizer) as prof:
        steps(case, optimizer, 1)
    begin, *_ = told(prof)
    assert sums(begin)["os_state"] == bytes_of(state_of(optimizer))


@pytest.mark.full
def test_training_is_the_same_bit_for_bit_and_nothing_is_left(tmp_path: Path) -> None:
    def trained(profiled: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        case = build("llama")
        optimizer = optimizer_of(case.model)
        torch.manual_seed(1)
        hooks = dict(optimizer_module._global_optimizer_pre_hooks)
        if not profiled:
            losses = [train_step(case, case.model, optimizer, seed=step) for step in range(6)]
        else:
            with nothing_left(case), profiler(case, tmp_path, optimizer=optimizer):
                losses = [train_step(case, case.model, optimizer, seed=step) for step in range(6)]
        assert dict(optimizer_module._global_optimizer_pre_hooks) == hooks
        return losses, case.model.state_dict(), torch.get_rng_state()

    (losses, weights, generator), (plain_losses, plain_weights, plain_generator) = trained(True), trained(False)
    assert losses == plain_losses
    assert torch.equal(generator, plain_generator)
    assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    with profiler(None, tmp_path, **ONE_SESSION, optimizer=optimizer) as prof:
        steps(case, optimizer, 2)
        state = weakref.ref(state_of(optimizer)[0])
        references = [weakref.ref(optimizer), weakref.ref(case.model), state]
        del optimizer, case
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
    assert result_of(prof).complete


@pytest.mark.parametrize(
    "case",
    [
        "recorded",
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in ("never recorded", "left by an exception", "entered twice", "listed")
        ),
    ],
)
def test_a_finished_wrapper_holds_no_model(case: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    options = {"steps": "90"} if case == "never recorded" else ONE_SESSION
    prof = pw.ProfilerWrapper([model] if case == "listed" else model, output_dir=tmp_path, files=QUICK, **options)
    ends = pytest.raises(ZeroDivisionError) if case == "left by an exception" else contextlib.nullcontext()
    said = pytest.warns(pw.ProfilerWrapperWarning) if case == "never recorded" else contextlib.nullcontext()
    for _ in range(2 if case == "entered twice" else 1):
        with ends, said, prof:
            model(torch.ones(1, 4)).sum().backward()
            prof.step()
            assert case != "left by an exception" or 1 // 0
    prof.leave()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()  # not even for a while, as a part of a cycle
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert (prof.result is None) == (case == "never recorded")


@pytest.mark.full
def test_a_failure_is_a_warning_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "Listing", fails)
    case = build("llama")
    with profiler(case, tmp_path, **ONE_SESSION) as prof:
        steps(case, optimizer_of(case.model), 2)
    assert told(prof) == ()
    assert result_of(prof).complete
    assert (
        "what the model and its optimizers hold is not known, because listing it failed: RuntimeError: ours"
        in result_of(prof).warnings
    )


@pytest.mark.full
def test_a_run_directory_gives_the_same_memory_back(tmp_path: Path) -> None:
    case = build("llama")
    optimizer = optimizer_of(case.model)
    with profiler(case, tmp_path, files=("trace", "full_trace")) as prof:
        steps(case, optimizer, 6)
    live, loaded = result_of(prof), pw.load(directory_of(prof))
    assert "held" not in live.run
    assert loaded.to_dict()["memory"] == live.to_dict()["memory"]


@pytest.mark.full
def test_what_was_held_is_of_the_timed_trace_only(tmp_path: Path) -> None:
    case = build("llama")
    with profiler(case, tmp_path, trace="json.gz") as prof:
        steps(case, optimizer_of(case.model), 6)
    run_file = directory_of(prof) / "run.json"
    assert "held" in (run_beside(run_file.parent / "profile_trace.json.gz") or {})
    assert "held" in (run_beside(run_file.parent / "profile_trace.json") or {})
    assert "held" not in (run_beside(run_file.parent / "profile_full_trace.json.gz") or {})


@pytest.mark.parametrize("damaged", [3, [{"time_ns": 1}], [{"time_ns": 1, "tensors": {"cpu": [["x", 1, "", ""]]}}]])
def test_a_damaged_list_is_a_broken_trace(tmp_path: Path, damaged: object) -> None:
    trace = tmp_path / "a_trace.json"
    trace.write_text('{"traceEvents": []}')
    (tmp_path / "run.json").write_text(json.dumps({"held": damaged}))
    with pytest.raises(BrokenTrace, match=r"run\.json: not what was written: .*Delete it"):
        pw.load(trace)
