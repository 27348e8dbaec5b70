"""FLOPs of whole models, by layer: what is summed from the rows is what torch counts, or what follows by hand."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gpu_traces
import profiler_wrapper as pw
from models import Case, Size, build, optimizer_of, train_step
from profiler_wrapper.tables.model import Analysis
from profiling import profiler, result_of
from shared_traces import needs_traces
from trained_models import train_in_profiler, trained
from variants import gradient_checkpointing, gradient_checkpointing_reentrant

LAYERS, HIDDEN, HEADS, BATCH, TOKENS, VOCABULARY = 2, 64, 4, 2, 16, 128
ATTENTION = BATCH * TOKENS * TOKENS * HIDDEN * 2 * 2 * LAYERS  # forward: two products, two FLOPs a multiply-add
EXPERTS = LAYERS * 2 * (2 * BATCH * TOKENS) * HIDDEN * (3 * 2 * HIDDEN)  # two of the experts for every token


# torch 2.15 counts it, older torch does not; here it is by hand.
CPU_ATTENTION = dict.fromkeys(
    (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
    lambda *_, **__: 0,
)


def by_torch(case: Case, model: nn.Module | None = None) -> int:
    """FLOPs of one training step by FlopCounterMode, without attention on a CPU."""
    model = case.model if model is None else model
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as mode:
        train_step(case, model, optimizer_of(model))
    return int(mode.get_total_flops())


def own_flops(result: Analysis) -> Counter[str]:
    """FLOPs by phase, summed over the rows of layers; none may be unknown, and none without a layer."""
    flops: Counter[str] = Counter()
    for row in result.layers:
        assert row.self_flops_per_step is not None, row.layer
        flops[row.phase] += row.self_flops_per_step
    assert not any(row.flops_per_step for row in result.unattributed)
    return +flops


def check_sums(result: Analysis) -> None:
    """All tables tell the same total, and a row holds what is below it."""
    total = sum(own_flops(result).values())
    assert sum(row.flops_per_step for row in result.flops) == total
    assert sum(row.flops_per_step or 0 for row in result.classes) == total
    below: Counter[tuple[str, str]] = Counter()
    for row in result.layers:
        if row.parent is not None:
            below[row.parent, row.phase] += row.flops_per_step or 0
    for row in result.layers:
        if row.layer:
            assert row.flops_per_step == (row.self_flops_per_step or 0) + below[row.layer, row.phase], row.layer


# What torch's counter leaves out: attention on a CPU, forward and backward, and Mixtral's grouped products.
MODELS = {
    "llama": 7 * ATTENTION // 2,
    "gpt2": 0,  # dropout has attention done in pieces, which torch counts
    "bert": 0,
    "vit": 7 * BATCH * 17 * 17 * HIDDEN * 2 * LAYERS,  # 16 patches and a class token
    "mixtral": 7 * ATTENTION // 2 + 3 * EXPERTS,
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in MODELS if name != "llama")]
)
def test_rows_add_up_to_what_torch_counts(name: str) -> None:
    expected = by_torch(build(name)) + MODELS[name]
    result = trained(name).result
    phases = own_flops(result)
    assert sum(phases.values()) == expected
    assert set(phases) == {"forward", "backward"}
    assert not any(warning.startswith("FLOPs") for warning in result.warnings)
    check_sums(result)


def test_a_llama_block_has_the_flops_of_its_matrices() -> None:
    """Grouped queries (half as many heads of keys and values), and three matrices of the MLP, twice as wide."""
    result = trained("llama").result
    projections, mlp = HIDDEN * HIDDEN * (2 + 2 * 0.5), 3 * HIDDEN * 2 * HIDDEN
    matrices = int(2 * BATCH * TOKENS * (projections + mlp))
    attention = ATTENTION // LAYERS
    blocks = [row for row in result.layers if row.kind == "block" and row.flops_per_step]
    assert [(row.phase, row.flops_per_step) for row in blocks] == [
        ("forward", matrices + attention),
        ("backward", 2 * matrices + 5 * attention // 2),
    ] * LAYERS
    assert [(row.phase, row.causal_flops_per_step) for row in blocks] == [
        ("forward", matrices + attention // 2),
        ("backward", 2 * matrices + 5 * attention // 4),
    ] * LAYERS
    classes = {(row.class_name, row.phase): row for row in result.classes}
    assert classes["attention", "backward"].flops_per_step == LAYERS * 5 * attention // 2
    assert classes["attention", "backward"].causal_flops_per_step == LAYERS * 5 * attention // 4
    head = 2 * BATCH * TOKENS * HIDDEN * VOCABULARY
    assert [row.flops_per_step for row in result.rows("lm_head")][:2] == [head, 2 * head]


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [gradient_checkpointing, gradient_checkpointing_reentrant])
def test_recompute_is_apart(checkpointing: Callable[[Case], nn.Module], tmp_path: Path) -> None:
    plain = own_flops(trained("llama").result)
    case = build("llama")
    checkpointing(case)
    expected = by_torch(case) + 9 * ATTENTION // 2  # two forwards and a backward of attention
    result = train_in_profiler(case, tmp_path / "checkpointed").result
    phases = own_flops(result)
    assert sum(phases.values()) == expected
    assert (phases["forward"], phases["backward"]) == (plain["forward"], plain["backward"])
    head = 2 * BATCH * TOKENS * HIDDEN * VOCABULARY
    # The blocks once more; but for each block's last product, of which torch only needs the inputs, unless reentrant.
    last = LAYERS * 2 * BATCH * TOKENS * 2 * HIDDEN * HIDDEN
    assert phases["recompute"] == plain["forward"] - head - (last if checkpointing is gradient_checkpointing else 0)
    check_sums(result)


class Checkpointed(nn.Module):
    """A layer whose recompute enters no layer below; its last op is a product, or fused attention."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.last, self.weights = last, nn.ParameterList(torch.randn(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight for weight in self.weights)
        if self.last == "attention":
            return nn.functional.scaled_dot_product_attention(*(part[None, None] for part in (q, k, v)))[0, 0]
        return (q + k + v).relu() @ self.weights[0]


@pytest.mark.full
@pytest.mark.parametrize("last", ["product", "attention"])
def test_recompute_of_a_layer_without_layers(last: str, tmp_path: Path) -> None:
    """It ends at the last product, which is called and never runs; fused attention saves what it computed."""
    model, x = nn.Sequential(Checkpointed(last)), torch.randn(8, 16, requires_grad=True)
    with pw.ProfilerWrapper(model, output_dir=tmp_path, files=("result",), profile_memory=False) as prof:
        for _ in range(5):
            model(x).sum().backward()
            prof.step()
    product, attention = 2 * 8 * 16 * 16, 2 * (2 * 8 * 8 * 16)
    work = (4 * product, 8 * product, 3 * product)
    if last == "attention":
        work = (3 * product + attention, 6 * product + 5 * attention // 2, 3 * product + attention)
    rows = prof.result.rows("0")
    assert {row.phase: row.flops_per_step for row in rows if row.flops_per_step} == dict(
        zip(("forward", "backward", "recompute"), work, strict=True)
    )


@pytest.mark.full
@pytest.mark.parametrize("first_step", [1, 2])
def test_a_model_that_is_not_called_in_every_step_with_shapes(first_step: int, tmp_path: Path) -> None:
    """As a UNet after a text encoder: FLOPs are those of the timed steps; without a call with shapes not known."""
    models = nn.ModuleDict({"text": nn.Linear(4, 4), "net": nn.Linear(16, 16)})
    with torch.no_grad(), pw.ProfilerWrapper(dict(models), output_dir=tmp_path, files=("result",)) as prof:
        for step in range(5):
            models["text"](torch.ones(2, 4))
            if step >= first_step:
                models["net"](torch.ones(8, 16))
            prof.step()
    result = prof.result
    assert (result.run["full_steps"], result.run["timed_steps"]) == ([0, 1], [2, 3, 4])
    (text,), (net,) = result.rows("text"), result.rows("net")
    assert (text.flops_per_step, text.known_flops_per_step) == (2 * 2 * 4 * 4, 2 * 2 * 4 * 4)
    by_hand = 2 * 8 * 16 * 16 if first_step == 1 else None
    assert (net.flops_per_step, net.known_flops_per_step) == (by_hand, by_hand or 0)


@pytest.mark.full
def test_compiling_adds_nothing(tmp_path: Path) -> None:
    case = build("llama")
    expected = by_torch(case) + MODELS["llama"]
    for block in case.model.get_submodule("model.layers"):
        block.compile(backend="aot_eager")
    result = train_in_profiler(case, tmp_path, steps="all", record_shapes=True).result
    assert sum(row.flops_per_step for row in result.flops) == expected


@pytest.mark.full
def test_frozen_layers_have_no_gradients_of_weights(tmp_path: Path) -> None:
    case = build("llama")
    for parameter in case.model.get_submodule("model.layers.0").parameters():
        parameter.requires_grad_(False)
    case.model.get_submodule("model.embed_tokens").requires_grad_(False)
    expected = by_torch(case)
    result = train_in_profiler(case, tmp_path).result
    backward = {row.layer: row.flops_per_step for row in result.layers if row.phase == "backward"}
    assert "model.layers.0" not in backward or backward["model.layers.0"] == 0
    # attention: forward of both blocks, backward of the second alone
    assert sum(own_flops(result).values()) == expected + ATTENTION + 5 * ATTENTION // 4


def test_flops_of_the_timed_steps_come_from_the_steps_with_shapes() -> None:
    result, directory = trained("llama").result, trained("llama").directory
    assert result.run["full_steps"] == [0, 1]
    assert [row.step for row in result.steps if row.step is not None] == [2, 3, 4]
    timed = pw.load(directory / "profile_trace.json")
    assert timed.layers == result.layers
    assert timed.flops == result.flops
    full = pw.load(directory / "profile_full_trace.json")
    assert full.flops == result.flops
    assert pw.load(directory).flops == result.flops
    written = json.loads((directory / "result.json").read_text())
    assert {"layer", "phase", "class", "dtype", "flops_per_step", "causal_flops_per_step"} <= written["flops"][0].keys()


@pytest.mark.full
def test_without_shapes_flops_are_not_known(tmp_path: Path) -> None:
    result = train_in_profiler(build("llama"), tmp_path, record_shapes=False).result
    assert all(row.flops_per_step is None and row.self_flops_per_step is None for row in result.layers)
    assert all(row.flops_per_step is None for row in result.classes)
    assert [w for w in result.warnings if "FLOP" in w] == [
        "FLOPs and bytes moved are not available, because the shapes of ops were not recorded (record_shapes=True)"
    ]


def test_the_trace_with_shapes_may_be_missing(tmp_path: Path) -> None:
    for file in ("run.json", "profile_trace.json"):
        shutil.copy(trained("llama").directory / file, tmp_path)
    alone = pw.load(tmp_path / "profile_trace.json")
    assert all(row.flops_per_step is None for row in alone.layers)
    assert any(warning.startswith("FLOPs and bytes moved are not available") for warning in alone.warnings)


class Recurrent(nn.Module):
    """A layer whose FLOPs nothing tells beside one whose are known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.recurrent = nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.linear(x))[0]


def test_what_no_formula_is_for_is_unknown_and_listed(tmp_path: Path) -> None:
    model = Recurrent()
    with profiler(None, tmp_path, files=("result",)) as prof:
        for _ in range(5):
            model(torch.randn(5, 2, 8)).sum().backward()
            prof.step()
    result = result_of(prof)
    flops = {(row.layer, row.phase): (row.self_flops_per_step, row.flops_per_step) for row in result.layers}
    assert flops["linear", "forward"] == (2 * 10 * 8 * 8,) * 2
    assert flops["recurrent", "forward"] == (None, None)
    assert flops["Recurrent", "forward"] == (0, None)
    assert {(row.op, row.phase, row.count) for row in result.uncounted} == {
        ("aten::mkldnn_rnn_layer", "forward", 2),
        ("aten::mkldnn_rnn_layer_backward", "backward", 2),
    }
    assert all(row.time_per_step_ns > 0 for row in result.uncounted)
    assert any(w.startswith("FLOPs of layers with aten::mkldnn_rnn_layer") for w in result.warnings)
    assert "aten::mkldnn_rnn_layer" in result.table()


@pytest.mark.full
def test_tables_show_flops(tmp_path: Path) -> None:
    result = train_in_profiler(build("llama", Size(hidden=128)), tmp_path).result
    assert "GFLOP/s" in result.table(order="cost", width=120)
    assert "self GFLOP" in result.table()


# --- recorded on GPUs ---------------------------------------------------------------------------


def flops_of_trace(name: str) -> Counter[tuple[str, str]]:
    """By class and type; whatever is in a result of `load` is summed from these rows."""
    result = gpu_traces.result(name)
    found: Counter[tuple[str, str]] = Counter()
    for row in result.flops:
        found[row.class_name, row.dtype] += row.flops_per_step
    return found


@needs_traces
def test_qwen_has_two_flops_a_token_and_parameter_and_its_attention() -> None:
    """Qwen1.5-0.5B without its head: 24 layers, 1024 wide, MLP of 2816, 16 heads; 16 sequences of 559 tokens."""
    parameters = 24 * (4 * 1024 * 1024 + 3 * 1024 * 2816)
    assert flops_of_trace("h100_qwen1.5_0.5b_inference.json.gz") == {
        ("gemm", "bfloat16"): 2 * 16 * 559 * parameters,
        ("attention", "bfloat16"): 24 * 2 * 2 * 16 * 559 * 559 * 1024,
        ("gemm", "float32"): 2 * 32 * 559,  # the rotary angles, as a product
    }


@needs_traces
def test_vit_and_bert_have_theirs() -> None:
    """ViT-B/16, 4 images: 197 tokens, patches by a convolution, a pooler of its class token. BERT-small: 141 tokens."""
    tokens, wide = 4 * 197, 768
    vit = 12 * tokens * 12 * wide * wide + 4 * 196 * 3 * 16 * 16 * wide + 4 * wide * wide
    assert flops_of_trace("h100_vit_inference.json.gz") == {
        ("gemm", "bfloat16"): 2 * vit,
        ("attention", "bfloat16"): 12 * 2 * 2 * 4 * 197 * 197 * wide,
    }
    bert = 4 * 12 * 512 * 512 + 512 * 512 + 512 * 30522  # blocks, and the head: a layer and the vocabulary
    assert flops_of_trace("h100_bert_small_inference.json.gz") == {
        ("gemm", "bfloat16"): 2 * 141 * bert,
        ("attention", "bfloat16"): 4 * 2 * 2 * 141 * 141 * 512,
    }


@needs_traces
def test_resnet_counts_what_is_recomputed_apart() -> None:
    """Of 20 convolutions all but the first gives a gradient of its input; 10 images of 224 pixels, ResNet-18."""
    result = gpu_traces.result("mi300_resnet_checkpointing_training.json.gz")
    phases = own_flops(result)
    stem, head = 2 * 10 * 112 * 112 * 64 * 3 * 49, 2 * 10 * 512 * 1000
    assert phases["backward"] == 2 * phases["forward"] - stem
    assert 0 < phases["recompute"] <= phases["forward"] - head
    assert phases["forward"] == 10 * 2 * 1_814_073_344  # multiply-adds of ResNet-18, as published: 1.81 G


@needs_traces
def test_unknown_kernels_of_experts_and_attention_leave_their_layers_unknown() -> None:
    result = gpu_traces.result("b200_vllm_eager_inference.json.gz")
    assert "vllm::unified_attention_with_output" in {row.op for row in result.uncounted}
    experts = [row for row in result.layers if row.class_name == "FusedMoE"]
    assert experts
    assert all(row.self_flops_per_step is None for row in experts)
    projections = [row for row in result.layers if row.class_name == "RowParallelLinear"]
    assert all(row.flops_per_step == 2 * 888 * 4096 // 8 * 2880 for row in projections[:1])
