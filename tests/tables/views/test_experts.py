"""Mixtures of experts of Transformers' own models: tokens, FLOPs and time of each expert, by whatever computes them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import profiler_wrapper as pw
from profiler_wrapper import ProfileResult, ProfilerWrapper
from profiler_wrapper.tables.call_rows import ExpertRow
from shared_traces import TRACES, needs_traces
from ticks import by_ticks

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.full

HIDDEN, WIDTH, EXPERTS, CHOSEN, PREFERRED = 32, 48, 4, 2, 2
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 64, "intermediate_size": WIDTH, "use_cache": False}
FLOPS = 2 * 3 * HIDDEN * WIDTH  # of one token in one expert: gate, up and down


def mixtral(implementation: str, *, preferred: int | None = PREFERRED, **sizes: Any) -> nn.Module:
    """A Mixtral; its router always chooses one expert first: what it looks at is positive for each token."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **{**SIZES, **sizes}, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        experts_implementation=implementation,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    if preferred is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 0.1
            for layer in model.model.layers:
                layer.mlp.gate.weight[:, 0] = 0.0
                layer.mlp.gate.weight[preferred, 0] = 10.0
    return model


def qwen(implementation: str) -> nn.Module:
    """A Qwen2-MoE, which has an expert that all tokens go through too."""
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **SIZES, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH, experts_implementation=implementation,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


class Counted:
    """The tokens that the experts of a model are given, call by call of its forward; backward calls none."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens: dict[str, list[list[int]]] = defaultdict(list)
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, args, name=name: self._count(name, args[1]))

    def _count(self, name: str, chosen: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.tokens[name].append([int((chosen == number).sum()) for number in range(EXPERTS)])


def train(model: nn.Module, out: Path, *, tokens: int = 24, **options: Any) -> tuple[ProfileResult, list[torch.Tensor]]:
    """The result, with all files but those of pictures, and the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    generator = torch.Generator().manual_seed(0)
    options = {"files": ("result",), **options}
    with ProfilerWrapper(model, output_dir=out, enable_print_summary=False, **options) as prof:
        for _ in range(6):
            ids = torch.randint(0, 64, (2, tokens), generator=generator)
            losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert prof.result is not None
    return prof.result, losses


def by_layer(rows: tuple[ExpertRow, ...]) -> dict[str, list[ExpertRow]]:
    found: dict[str, list[ExpertRow]] = defaultdict(list)
    for row in rows:
        found[row.layer].append(row)
    return found


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("make", [mixtral, qwen])
def test_tokens_and_flops_are_those_that_the_router_chose(make: Any, implementation: str, tmp_path: Path) -> None:
    model = make(implementation)
    counted = Counted(model)
    result, _ = train(model, tmp_path)
    found = by_layer(result.experts)
    assert list(found) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    steps = result.run["full_steps"]
    for name, rows in found.items():
        assert [row.expert for row in rows] == list(range(EXPERTS))
        tokens = [[counted.tokens[name][step][row.expert] for step in steps] for row in rows]
        assert [list(row.step_tokens) for row in rows] == tokens
        assert [row.tokens_per_step for row in rows] == [sum(own) / len(steps) for own in tokens]
        # Backward multiplies twice for each product of the forward.
        assert [row.flops_per_step for row in rows] == [round(3 * FLOPS * sum(own) / len(steps)) for own in tokens]
        (flops,) = {sum(row.flops_per_step or 0 for row in rows)}
        assert flops == sum(row.flops_per_step or 0 for row in result.layer(name))
        assert sum(row.share or 0 for row in rows) == pytest.approx(1)
    for layer in result.expert_layers:
        assert layer.method == {"eager": "loop"}.get(implementation, implementation)
        assert layer.router == layer.layer.replace("experts", "gate") and layer.router_time_ns
        assert layer.experts == EXPERTS and layer.tokens_per_step == 2 * 24 * CHOSEN
        own = zip(*(row.step_tokens for row in found[layer.layer]), strict=True)
        assert layer.step_balance == tuple(max(tokens) * EXPERTS / sum(tokens) for tokens in own)
        assert (layer.shared_time_ns is not None) == (make is qwen)
    alone = all(row.time_per_step_ns is not None for row in result.experts)
    assert alone == (implementation == "eager")
    text = result.table()
    assert ("model.layers.1.mlp.shared_expert" in text) == (make is qwen)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_preferred_expert_is_named_with_what_it_costs(implementation: str, tmp_path: Path) -> None:
    """By a clock that goes by the size of what ops are given, which is all that an expert's time depends on."""
    model = mixtral(implementation, hidden_size=128, intermediate_size=512)
    train(model, tmp_path, tokens=256, files=("trace", "result"), run_name="run", record_shapes=True)
    result = by_ticks(tmp_path / "run" / "rank0", tmp_path / "ticks", by_size=True)
    above = 0.0
    for layer in result.expert_layers:
        rows = [row for row in result.experts if row.layer == layer.layer]
        every = sum(row.time_per_step_ns or 0 for row in rows)
        if implementation == "grouped_mm":  # the time of one is not known: half of all tokens, half of the time
            every = layer.experts_time_ns / len(result.run["timed_steps"])
        own = rows[PREFERRED].time_per_step_ns if implementation == "eager" else every / 2
        assert own is not None and own > every / EXPERTS
        assert implementation == "grouped_mm" or own == max(row.time_per_step_ns or 0 for row in rows)
        above += own - every / EXPERTS
    (finding,) = [one for one in result.summary["findings"] if one["id"] == "preferred-expert"]
    assert f"expert {PREFERRED} of model.layers." in finding["title"] and "50 % of the tokens" in finding["title"]
    assert finding["saves_at_most_us"] == pytest.approx(above / 1000, rel=1e-3)
    assert f"to expert {PREFERRED}" in str(result)


def test_even_experts_get_no_advice(tmp_path: Path) -> None:
    result, _ = train(qwen("eager"), tmp_path)
    assert result.experts and not [one for one in result.summary["findings"] if one["id"] == "preferred-expert"]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_what_backward_recomputes_is_work_but_no_tokens(implementation: str, tmp_path: Path) -> None:
    model = mixtral(implementation)
    model.gradient_checkpointing_enable()
    model.train()
    counted = Counted(model)
    result, _ = train(model, tmp_path)
    for name, rows in by_layer(result.experts).items():
        for row in rows:
            tokens = [counted.tokens[name][step][row.expert] for step in result.run["full_steps"]]
            assert list(row.step_tokens) == tokens
            # The recomputation may stop before the last product, of which backward needs no result.
            whole, stopped = 4 * FLOPS * sum(tokens), (4 * FLOPS - FLOPS // 3) * sum(tokens)
            assert round(stopped / len(tokens)) <= (row.flops_per_step or 0) <= round(whole / len(tokens))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_training_is_bit_identical(implementation: str, tmp_path: Path) -> None:
    losses = []
    for options in ({}, {"steps": "all", "record_shapes": True}, {"steps": "0"}):
        torch.manual_seed(1)
        losses.append(train(mixtral(implementation), tmp_path, **options)[1])
    model = mixtral(implementation)
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(0)
    for step in range(6):
        ids = torch.randint(0, 64, (2, 24), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(loss, other[step]) for other in losses)


STEPS = 9


def test_time_of_each_expert_is_that_of_the_ops_of_its_turn(tmp_path: Path) -> None:
    """The same ops of the same trace, found another way: each turn of the loop is a span with the expert's number."""

    def told(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The eager loop of Transformers."""
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number in mask.sum((-1, -2)).nonzero().flatten().tolist():
            with torch.profiler.record_function(f"turn {number}"):
                place, token = torch.where(mask[number])
                gate, up = nn.functional.linear(x[token], self.gate_up_proj[number]).chunk(2, dim=-1)
                one = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[number])
                out.index_add_(0, token, one * weights[token, place, None])
        return out

    model = mixtral("eager", hidden_size=128, intermediate_size=512, num_hidden_layers=1).eval().model.layers[0].mlp
    model.experts.forward = MethodType(told, model.experts)
    x = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 2.0
    options = {"output_dir": tmp_path, "files": ("result", "trace"), "steps": "all", "record_shapes": True}
    with torch.no_grad(), ProfilerWrapper(model, enable_print_summary=False, **options) as prof:
        for _ in range(STEPS):
            model(x)
            prof.step()
    rows = prof.result.experts
    (path,) = tmp_path.rglob("profile_trace.json*")
    found = [[ns / 1000 for ns in times] for times in zip(*(row.step_times_ns for row in rows), strict=True)]
    assert len(rows) == EXPERTS and len(found) == STEPS
    # What only chooses or cuts a tensor may count or not.
    for of_step in zip(turns(path, COMPUTE), found, turns(path), strict=True):
        assert all(low - 0.01 <= one <= high + 0.01 for low, one, high in zip(*of_step, strict=True)), of_step


COMPUTE = ("aten::mm", "aten::index", "aten::silu", "aten::index_add_")  # none of them is inside another


def turns(path: Path, names: Collection[str] | None = None) -> list[list[float]]:
    """Step by step, what the ops of each turn take together, in microseconds: those of these names, or all."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    spans = sorted((one for one in events if str(one.get("name")).startswith("turn ")), key=lambda one: one["ts"])
    ops = sorted((one for one in events if one.get("cat") == "cpu_op"), key=lambda one: (one["ts"], -one["dur"]))
    found: list[list[float]] = []
    for at, span in enumerate(spans):
        if at % EXPERTS == 0:
            found.append([0.0] * EXPERTS)
        begin, end = span["ts"], span["ts"] + span["dur"]
        for op in ops:
            if begin <= op["ts"] < end and (names is None or op["name"] in names):
                found[-1][int(span["name"].split()[1])] += op["dur"]
                begin = op["ts"] + op["dur"]
    return found


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """A module for each expert, called only where it gets a token; the last one never does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x)[:, :-1].max(-1)
        self.seen.append([int((chosen == number).sum()) for number in range(EXPERTS)])
        out = x
        for number, expert in enumerate(self.experts):
            (token,) = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * scores[token, None])
        return out


def test_experts_that_are_modules_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Experts())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ProfilerWrapper(model, output_dir=tmp_path, files=("result",), enable_print_summary=False) as prof:
        for _ in range(6):
            model(torch.randn(96, HIDDEN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    result, seen = prof.result, model[1].seen
    steps = result.run["full_steps"]
    for row in result.experts:
        tokens = [seen[step][row.expert] for step in steps]
        assert (row.layer, list(row.step_tokens)) == ("1.experts", tokens)
        assert row.flops_per_step == round(3 * 2 * 2 * HIDDEN * WIDTH * sum(tokens) / len(steps))
    assert [row.expert for row in result.experts] == list(range(EXPERTS))
    (layer,) = result.expert_layers
    assert (layer.method, layer.router, layer.tokens_per_step) == ("modules", "1.gate", 96)
    inside = sum(row.time_ns for i in range(EXPERTS - 1) for row in result.layer(f"1.experts.{i}")
                 if row.phase in ("forward", "backward"))  # fmt: skip
    assert layer.experts_time_ns == inside


def test_tokens_are_not_known_where_no_shapes_are_recorded(tmp_path: Path) -> None:
    result, _ = train(mixtral("grouped_mm"), tmp_path, record_shapes=False)
    assert result.experts == ()
    assert all(layer.method == "grouped_mm" and layer.tokens_unknown for layer in result.expert_layers)


@needs_traces
def test_the_fused_experts_of_a_server_are_called_so() -> None:
    """GPT-OSS on a B200 by vLLM: over half of the device's time."""
    result = pw.load(TRACES / "b200_vllm_eager_inference.json.gz")
    assert {layer.method for layer in result.expert_layers} == {"fused_moe"}
    blocks = [row.layer for row in result.layers if row.kind == "block"]
    assert len(result.expert_layers) == len(set(blocks)) == 36
    assert all(layer.tokens_unknown and layer.kernels for layer in result.expert_layers)
    total = sum(row.time_ns for row in result.layers if row.class_name == "FusedMoE")
    assert 0.75 * total < sum(layer.experts_time_ns for layer in result.expert_layers) <= total


def test_adapters_beside_what_they_adapt(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    result, _ = train(model, tmp_path)
    rows = {row.layer: row for row in result.adapters}
    adapted = ("self_attn.q_proj", "mlp.down_proj")
    assert list(rows) == [f"model.layers.{i}.{name}" for i in range(2) for name in adapted]
    row, tokens = rows["model.layers.1.mlp.down_proj"], 2 * 24
    # Frozen: forward, and the gradient of its input. Of the adapters' two products also those of their weights.
    assert row.base_flops_per_step == 2 * 2 * tokens * HIDDEN * WIDTH
    assert row.adapter_flops_per_step == 3 * 2 * tokens * 4 * (HIDDEN + WIDTH)
    assert {name.rpartition(".down_proj.")[2] for name in row.adapters} == {"lora_A.default", "lora_B.default"}
    for row in rows.values():
        whole, base = (
            sum(one.time_ns for one in result.layer(name) if one.phase in ("forward", "backward"))
            for name in (row.layer, f"{row.layer}.base_layer")
        )
        assert (row.base_time_ns, row.adapter_time_ns) == (base, whole - base) and row.adapter_time_ns > 0
    assert "adapters:" in str(result)
