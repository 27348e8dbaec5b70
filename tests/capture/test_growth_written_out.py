"""A long recording, which torch cannot hold at once, is written out between two calls and goes on, with all in it."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import profiler_wrapper as pw
from profiler_wrapper.capture import growth
from profiler_wrapper.run import recorder
from profiler_wrapper.trace.joined import JoinedTrace
from profiling import result_of

pytestmark = pytest.mark.full

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
PAUSED = "recording paused"
COUNTED = (
    "layer", "class_name", "phase", "calls", "self_events", "flops_per_step", "self_causal_flops_per_step",
    "peak_bytes", "retained_bytes", "allocated_bytes",
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    return transformers.MixtralForCausalLM(config).eval()


def generate(model: Any, tokens: int = 12) -> torch.Tensor:
    ids = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.generate(input_ids=ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def profiler(model: Any, output_dir: Path, **options: Any) -> pw.ProfilerWrapper:
    quiet: dict[str, Any] = {"files": ("result", "trace"), "enable_print_summary": False, "background": False}
    return pw.ProfilerWrapper(model, output_dir=output_dir, steps="all", **quiet, **options)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After few calls."""
    monkeypatch.setattr(recorder, "CALLS_WRITTEN_OUT", 60)


def requests(model: Any, output_dir: Path, **options: Any) -> tuple[pw.ProfileResult, list[torch.Tensor]]:
    with profiler(model, output_dir, **options) as prof:
        said = [generate(model) for _ in range(3)]
    result = result_of(prof)
    for step in result.steps:
        assert sum(row.time_ns for row in result.parts if row.step == step.step) == step.time_ns
    return result, said


def numbers(result: pw.ProfileResult) -> list[int]:
    return [step.step for step in result.steps if step.step is not None]


def what_was_done(result: pw.ProfileResult) -> dict[str, Any]:
    """All that does not depend on time."""
    return {
        "layers": [tuple(getattr(row, name) for name in COUNTED) for row in result.layers],
        "operators": sorted((row.op, row.class_name, row.phase, row.calls) for row in result.operators),
        "parts": [(row.step, row.part, row.index, row.count) for row in result.parts],
        "experts": [(row.layer, row.expert, row.step_tokens, row.flops_per_step) for row in result.experts],
        "kv_cache": result.run["kv_cache"],
        "steps": [row.step for row in result.steps],
    }


@pytest.mark.parametrize("make", [llama, mixtral])
def test_a_result_in_pieces_is_that_of_one_piece(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    model = make()
    alone = generate(model)
    pieces, said = requests(model, tmp_path / "pieces")
    monkeypatch.undo()
    whole, _ = requests(make(), tmp_path / "whole")
    assert all(torch.equal(one, alone) for one in said)
    assert pieces.complete and any(PAUSED in warning for warning in pieces.run["warnings"])
    assert whole.complete and not any(PAUSED in warning for warning in whole.run["warnings"])
    assert what_was_done(pieces) == what_was_done(whole)


def steps_in(directory: Path) -> list[tuple[str, int, int]]:
    """Of the one trace that is there, the steps: name, begin and end in ns."""
    (path,) = directory.rglob("*trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["name"].startswith("ProfilerStep#") and event["ph"] == "X"]
    times = [(event["name"], round(1000 * event["ts"]), round(1000 * event["dur"])) for event in found]
    return sorted(((name, begin, begin + took) for name, begin, took in times), key=lambda step: step[1])


def test_the_trace_is_one_file_without_the_pauses(tmp_path: Path, soon: None) -> None:
    result, _ = requests(llama(), tmp_path)
    steps = steps_in(tmp_path)
    assert len(steps) > 6 and numbers(result) == [0, 1, 2]
    within = [(one[2], other[1]) for one, other in pairwise(steps) if one[0] == other[0]]
    assert all(0 <= begin - end < 1_000_000 for end, begin in within)  # the profiler's own last and first events
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_a_named_block_goes_on(tmp_path: Path, soon: None) -> None:
    model = llama()
    with profiler(model, tmp_path) as prof:
        prof.record_function("everything", lambda: [generate(model) for _ in range(2)])
    result = result_of(prof)
    assert any(PAUSED in warning for warning in result.run["warnings"])
    assert numbers(result) == [0, 1]


def test_within_a_scope_of_the_users_nothing_is_written_out(tmp_path: Path, soon: None) -> None:
    model = llama()
    with profiler(model, tmp_path) as prof:
        for _ in range(2):
            with torch.profiler.record_function("mine"):
                generate(model)
        generate(model)
    result = result_of(prof)
    assert result.complete
    steps = Counter(name for name, _, _ in steps_in(tmp_path))
    # Between the second request and the third nobody calls, so the third is the first that can be in two pieces.
    assert steps["ProfilerStep#0"] == steps["ProfilerStep#1"] == 1 < steps["ProfilerStep#2"]


def test_training_is_not_written_out_within_a_step(tmp_path: Path, soon: None) -> None:
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    with profiler(model, tmp_path) as prof:
        for _ in range(4):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    result = result_of(prof)
    assert result.complete and not any(PAUSED in warning for warning in result.run["warnings"])


def test_steps_that_nobody_asked_for_are_not_written_out(tmp_path: Path, soon: None) -> None:
    model = llama()
    with pw.ProfilerWrapper(model, output_dir=tmp_path, files=("result",), enable_print_summary=False) as prof:
        for _ in range(6):
            generate(model)
    assert not any(PAUSED in warning for warning in result_of(prof).run["warnings"])


def test_rollouts_after_training_are_not_written_out(tmp_path: Path, soon: None) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    with profiler(model, tmp_path) as prof:
        for _ in range(3):
            for _ in range(2):
                generate(model.eval())
            model.train()(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    result = result_of(prof)
    assert result.complete and not any(PAUSED in warning for warning in result.run["warnings"])
    rollouts = [(row.step, row.index, row.count) for row in result.parts if row.part == "rollout"]
    assert rollouts == [(step, index, 1) for step in numbers(result) for index in range(2)] and len(rollouts) >= 4


def test_what_is_held_when_training_follows_a_written_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def owners(calls: int) -> Any:
        monkeypatch.setattr(recorder, "CALLS_WRITTEN_OUT", calls)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
        with profiler(model, tmp_path / str(calls)) as prof:
            prof.step()  # from here on nothing else is a step
            generate(model)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                prof.step()
        result = result_of(prof)
        assert result.complete and any(PAUSED in one for one in result.run["warnings"]) == (calls < 1000)
        assert result.memory is not None
        return [(one["category"], one["name"], one["bytes"]) for one in result.memory["peak"]["owners"]]

    assert owners(60) == owners(100_000)


def test_within_a_marked_module_nothing_is_written_out(tmp_path: Path, soon: None) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self) -> torch.Tensor:
            return generate(self.inner)

    outer = Outer()
    with pw.mark(outer), profiler(outer.inner, tmp_path) as prof:
        for _ in range(3):
            outer()
    result = result_of(prof)
    assert result.complete and not any(PAUSED in warning for warning in result.run["warnings"])


def test_a_trace_that_grows_too_large_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    monkeypatch.setattr(growth, "MOST_GROWTH_BYTES", 1 << 20)
    monkeypatch.setattr(growth.GrowthBound, "exceeded", lambda self: None)
    result, _ = requests(llama(), tmp_path)
    assert not result.complete
    (why,) = [warning for warning in result.run["warnings"] if "recording ended" in warning]
    assert "its trace has" in why and "quarter of the free disk" in why


def test_what_was_written_before_the_last_join_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    def fails(whole: JoinedTrace, piece: Path, **when: int) -> None:
        raise MemoryError

    model = llama()
    with profiler(model, tmp_path) as prof:
        for _ in range(3):
            generate(model)
        monkeypatch.setattr(JoinedTrace, "add", fails)
    monkeypatch.undo()
    result = result_of(prof)
    assert not result.complete and numbers(result) == [0, 1]
    assert any("MemoryError" in warning for warning in result.run["warnings"])
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), KeyboardInterrupt()])
def test_what_was_written_before_a_pause_failed_is_kept(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    add, pieces = JoinedTrace.add, []

    def fails(whole: JoinedTrace, piece: Path, **when: int) -> None:
        pieces.append(piece)
        if len(pieces) == 6:
            raise error
        add(whole, piece, **when)

    monkeypatch.setattr(JoinedTrace, "add", fails)
    model, said = llama(), []
    with suppress(KeyboardInterrupt), profiler(model, tmp_path) as prof:
        for _ in range(3):
            said.append(generate(model))
    monkeypatch.undo()
    assert len(pieces) == 6 and len(said) == (2 if isinstance(error, KeyboardInterrupt) else 3)
    result = result_of(prof)
    assert not result.complete and numbers(result) == [0, 1]
    for step in numbers(result):
        tokens = [row.count for row in result.parts if (row.step, row.part) == (step, "token")]
        assert sum(tokens) == 11
    assert any("is lost" in warning for warning in result.run["warnings"])
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert torch.equal(generate(model), generate(llama()))
