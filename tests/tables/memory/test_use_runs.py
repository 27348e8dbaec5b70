"""Whose bytes, why and when: real models, and a recorded trace, against counts of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gpu_traces
import models
import variants
from memory_recordings import assert_adds_up, stated_totals
from profiler_wrapper.result import load
from profiler_wrapper.tables.model import BEFORE_PROFILING, MemoryMoment, MemoryUse
from profiler_wrapper.trace.reader import read
from profiling import profiler, result_of
from shared_traces import needs_traces
from trained_models import trained

WITH_MEMORY = "ddp_training_with_memory.pt.trace.json.gz"


def use_of(prof: object) -> MemoryUse:
    use = result_of(prof).memory_use  # type: ignore[arg-type]
    assert use is not None
    assert_adds_up(use)
    return use


def storage_bytes(model: nn.Module) -> int:
    """Parameters and buffers, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def labelled(use: MemoryUse, label: str) -> list[MemoryMoment]:
    found = [moment for moment in use.moments if moment.label == label]
    assert found
    return found


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_training_with_adamw_adds_up_and_every_category_is_what_it_must_be(name: str) -> None:
    run = trained(name)
    case, state, use = run.case, run.optimizer_bytes, run.result.memory_use
    assert use is not None
    assert_adds_up(use)
    assert use.known_owners

    parameters = [p for p in case.model.parameters() if p.requires_grad]
    gradients = sum(4 * p.numel() for p in parameters)
    assert state == 2 * gradients + 4 * len(parameters)  # two moments in fp32, and a step each
    for moment in use.moments:
        assert moment.categories["params"] == storage_bytes(case.model)
        assert moment.categories["os_state"] == state
        assert moment.categories["os_params"] == 0
    assert {moment.categories["grads"] for moment in labelled(use, "after forward")} == {0}  # zero_grad let go of them
    assert {moment.categories["grads"] for moment in labelled(use, "after backward")} == {gradients}
    assert {moment.categories["grads"] for moment in labelled(use, "after optimizer")} == {gradients}
    assert use.timeline.bytes_by_category[1].max() == gradients
    assert use.peak.categories["other"] <= 0.02 * use.peak.total_bytes
    assert use.timeline.bytes_by_category.min() >= 0
    assert use.leaks == ()
    assert use.slope is not None
    assert use.slope.bytes_per_step == 0

    (trace,) = run.directory.glob("*profile_trace.json")
    recording = read(trace)
    running = np.cumsum(recording.memory.size_bytes) + storage_bytes(case.model) + state
    assert use.timeline.total_bytes.tolist() == running.tolist()
    names = {owner.name for owner in use.peak_owners if owner.category == "params"}
    assert names <= {name for name, _ in [*case.model.named_parameters(), *case.model.named_buffers()]}


@pytest.mark.full
def test_the_first_step_of_all_is_told_too(tmp_path: Path) -> None:
    case = models.build("llama")
    optimizer = models.optimizer_of(case.model)
    prof = profiler(case, tmp_path, record_shapes=True, steps="all")
    with prof:
        for step in range(2):
            models.train_step(case, case.model, optimizer, seed=step)
            prof.step()
    use = use_of(prof)
    gradients = sum(4 * p.numel() for p in case.model.parameters())
    assert [m.categories["grads"] for m in labelled(use, "after forward")] == [0, 0]
    assert next(m.categories["os_state"] for m in labelled(use, "after forward")) == 0
    assert [m.categories["os_state"] for m in labelled(use, "after optimizer")] == 2 * [
        2 * gradients + 4 * len(list(case.model.parameters()))
    ]


@pytest.mark.full
@pytest.mark.parametrize("when", ["end of the step", "begin of the step", "by hand"])
def test_gradients_that_were_there_go_when_they_go(when: str, tmp_path: Path) -> None:
    case = models.build("llama")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    gradients = sum(4 * p.numel() for p in case.model.parameters())

    def step(seed: int) -> None:
        if when == "begin of the step":
            optimizer.zero_grad()
        case.loss(case.model, case.batch(seed)).backward()
        optimizer.step()
        if when == "end of the step":
            optimizer.zero_grad()
        if when == "by hand":
            for parameter in case.model.parameters():
                parameter.grad = None

    step(0)
    prof = profiler(case, tmp_path, record_shapes=True)
    with prof:
        for seed in range(5):
            step(seed)
            prof.step()
    use = use_of(prof)
    assert {m.categories["grads"] for m in labelled(use, "after forward")} == {0}
    assert {m.categories["grads"] for m in labelled(use, "after backward")} == {gradients}
    assert {m.categories["os_state"] for m in use.moments} == {0}  # plain SGD has none


class Hoarder(nn.Module):
    """A layer that keeps what it makes: one large buffer in its first call, or a tensor in every call."""

    def __init__(self, *, every_call: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.every_call = every_call
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.every_call:
            self.kept.append(torch.cos(x.detach()))
        elif not self.kept:
            self.kept.append(torch.zeros(1 << 18))
        return self.linear(x)


def train(model: nn.Module, prof: object, *, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        prof.step()  # type: ignore[attr-defined]


def test_a_leak_of_one_tensor_a_step_is_named_within_twenty_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Hoarder(every_call=True), nn.Linear(16, 1))
    prof = profiler(None, tmp_path, steps="all")
    with prof:
        train(model, prof, steps=20)
    use = use_of(prof)
    (leak,) = use.leaks
    assert (leak.layer, leak.op, leak.phase) == ("1", "aten::cos", "forward")
    assert (leak.bytes_per_step, leak.count_per_step) == (64 * 16 * 4, 1)
    assert use.slope is not None
    assert use.slope.bytes_per_step == pytest.approx(64 * 16 * 4, rel=0.05)
    assert any(change.kind == "leak" and change.layers == ("1",) for change in use.changes)


def test_a_large_buffer_that_a_layer_keeps_is_the_first_owner_at_the_peak(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Hoarder(every_call=False), nn.Linear(16, 1))
    prof = profiler(None, tmp_path, steps="all", record_shapes=True)
    with prof:
        train(model, prof, steps=3)
    use = use_of(prof)
    owner = use.peak_owners[0]
    assert (owner.category, owner.layer, owner.op, owner.size_bytes) == ("activation", "1", "aten::zeros", 1 << 20)
    assert use.leaks == ()


def test_a_registered_buffer_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    model[0].register_buffer("table", torch.zeros(1 << 18))
    prof = profiler(None, tmp_path)
    with prof:
        train(model, prof, steps=5)
    owner = use_of(prof).peak_owners[0]
    assert (owner.category, owner.layer, owner.name, owner.op) == ("params", "0", "0.table", BEFORE_PROFILING)
    assert owner.size_bytes == 1 << 20


def steady_steps(kind: str, case: models.Case, optimizer: torch.optim.Optimizer, seed: int) -> None:
    if kind == "accumulation":
        models.train_step(case, case.model, optimizer, seed=seed, accumulate=2)
    elif kind == "variable length":
        batch = {name: ids[:, : 6 + seed % 5] for name, ids in case.batch(seed).items()}
        case.loss(case.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            case.model.generate(  # type: ignore[operator]
                case.batch(seed)["input_ids"], max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0
            )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["accumulation", "variable length", "key-value cache"])
def test_a_steady_loop_leaks_nothing(kind: str, tmp_path: Path) -> None:
    case = models.build("llama")
    optimizer = models.optimizer_of(case.model)
    prof = profiler(case, tmp_path, steps="all")
    with prof:
        for step in range(9):
            steady_steps(kind, case, optimizer, step)
            prof.step()
    use = use_of(prof)
    assert use.leaks == ()
    assert all(change.kind != "leak" for change in use.changes)


def test_the_file_says_the_same() -> None:
    use = trained("llama").result.memory_use
    assert use is not None
    memory = json.loads((trained("llama").directory / "result.json").read_text())["memory"]
    assert memory["categories"] == dict(use.peak.categories)
    assert memory["peak"]["allocated_bytes"] == use.peak.total_bytes
    assert len(memory["moments"]) == len(use.moments)


@pytest.mark.full
@needs_traces
def test_a_recorded_trace_adds_up_to_what_its_allocator_states() -> None:
    recording = gpu_traces.recording(WITH_MEMORY)
    use = gpu_traces.result(WITH_MEMORY).memory_use
    assert use is not None
    assert use.device == "cuda:1"
    assert use.timeline.bytes_by_category.sum(axis=0).tolist() == stated_totals(recording, 1, 1)
    assert_adds_up(use)
    assert not use.known_owners
    assert use.timeline.bytes_by_category.min() >= 0
    assert use.reserved_peak is not None
    assert use.reserved_peak.reserved_bytes == recording.memory.total_reserved_bytes.max()
    assert [moment.step for moment in labelled(use, "after backward")] == [2, 3, 4, 5, 6]
    assert use.leaks == ()


def peak_with(tmp_path: Path, name: str, *, batch: int = 4, checkpointed: bool = False) -> MemoryUse:
    case = models.build(name, layers=6, tokens=64, batch=batch)
    if checkpointed:
        variants.gradient_checkpointing(case)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    prof = profiler(case, tmp_path / f"{batch}{checkpointed}")
    with prof:
        for step in range(5):
            models.train_step(case, case.model, optimizer, seed=step)
            prof.step()
    return use_of(prof)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_changes_save_what_they_say_when_they_are_made(name: str, tmp_path: Path) -> None:
    use = peak_with(tmp_path, name)
    changes = {change.kind: change for change in use.changes}
    checkpointed = peak_with(tmp_path, name, checkpointed=True)
    halved = peak_with(tmp_path, name, batch=2)
    saved = {"checkpoint": checkpointed, "smaller_batch": halved}
    for kind, after in saved.items():
        measured = use.peak.total_bytes - after.peak.total_bytes
        assert changes[kind].saves_bytes == pytest.approx(measured, rel=0.05)
    assert len(changes["checkpoint"].layers) == 6
    assert changes["checkpoint"].costs_ns
    assert "checkpoint" not in {change.kind for change in checkpointed.changes}


def test_a_result_from_its_file_prints_what_the_live_one_prints() -> None:
    live, again = trained("llama").result, load(trained("llama").directory)
    assert str(again) == str(live)
    assert "\nmemory: peak " in str(again)
    assert again._repr_html_() == live._repr_html_()
