"""Attention that a faster kernel could have done: found where it ran, with torch's own reason, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from advice_facts import facts_of, facts_of_gpu, findings_of_training
from models import build, optimizer_of
from profiler_wrapper.advice.attention import attention_fallback, attention_unfused
from profiler_wrapper.trace.recording import OpShapes
from recordings import Trace
from shaped_trace import shapes_of

ID = "attention-fallback"


def of_model(name: str, directory: Path, **changes: Any) -> Mapping[str, Any] | None:
    """What is said of attention in a training run of a real model."""
    case = build(name, tokens=64, **changes)
    return findings_of_training(case.model, case.batch(0), optimizer_of(case.model), directory).get(ID)


@pytest.mark.full
def test_eager_attention_is_found_and_sdpa_is_not(tmp_path: Path) -> None:
    eager = of_model("llama", tmp_path / "eager", attention="eager")
    assert eager is not None
    assert eager["layers"] == ["model.layers.{0,1}.self_attn"]
    assert eager["fix"] == 'attn_implementation="sdpa" when the model is made'
    assert eager["confidence"] == "high"
    assert eager["details"]["calls_per_step"] == 2
    assert eager["saves_at_most_us"] > eager["details"]["softmax_us"] > 0
    assert eager["saves_at_most_bytes"] > 0
    assert of_model("llama", tmp_path / "sdpa") is None


@pytest.mark.full
def test_dropout_on_a_cpu_is_why_attention_fell_back(tmp_path: Path) -> None:
    found = of_model("bert", tmp_path)
    assert found is not None
    assert "dropout of 0.1" in found["title"]
    assert found["details"]["backend"] == "math"
    assert found["layers"] == ["bert.encoder.layer.{0,1}.attention"]


class Router(nn.Module):
    """A softmax before a batched product that is no attention: experts mixed by two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.second = nn.Linear(32, 4), nn.Linear(32, 4)
        self.experts = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1) + self.second(x).softmax(-1)
        return (torch.bmm(x.expand(4, -1, -1), self.experts) * share.T[:, :, None]).square().mean()


def test_a_router_is_no_attention(tmp_path: Path) -> None:
    model = Router()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert ID not in findings_of_training(model, {"x": torch.randn(64, 32)}, optimizer, tmp_path)


class Attends(nn.Module):
    def __init__(self, backend: SDPBackend | None) -> None:
        super().__init__()
        self.project, self.backend = nn.Linear(32, 32), backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x).unflatten(-1, (4, 8)).transpose(1, 2)
        with sdpa_kernel(self.backend or SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, q, q).square().mean()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, None], ids=["math", "flash"])
def test_a_backend_that_its_inputs_do_not_explain_is_told_as_such(backend: SDPBackend | None, tmp_path: Path) -> None:
    model = Attends(backend)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = findings_of_training(model, {"x": torch.randn(2, 64, 32)}, optimizer, tmp_path).get(ID)
    assert (found is None) == (backend is None)
    if found is not None:
        assert "its inputs meet all conditions" in found["title"]
        assert "sdpa_kernel" in found["fix"]
        assert found["confidence"] == "medium"


# --- on a GPU -----------------------------------------------------------------------------------


def test_unfused_attention_of_a_real_gpu_is_found_with_its_kernels() -> None:
    """TimeSformer attends in space and time in each of 12 layers, by hand."""
    facts = facts_of_gpu("h100_timesformer_inference")
    (found,) = attention_unfused(facts)
    assert found.details["calls_per_step"] == 24
    assert len(found.layers) == 24
    spans, names = facts.found.recording.spans, facts.found.recording.names
    kernels = {names[name] for name in spans.name[facts.found.recording.device_mask].tolist()}
    softmax = [i for i, name in enumerate(names) if name in kernels and "softmax" in name.lower()]
    by_hand_ns = sum(int(spans.duration_ns[spans.name == name].sum()) for name in softmax)
    assert found.details["softmax_us"] == pytest.approx(by_hand_ns / 1e3)
    assert found.details["softmax_us"] > 0.4 * facts.work_ns / 1e3  # as the trace viewer shows: almost half
    assert found.saves_at_most_us is not None
    assert found.details["time_us"] < found.saves_at_most_us < facts.step_ns / 1e3


@pytest.mark.parametrize("name", ["h100_qwen1.5_0.5b_inference", "h100_bert_small_inference", "h100_vit_inference"])
def test_flash_attention_of_a_real_gpu_needs_no_advice(name: str) -> None:
    facts = facts_of_gpu(name)
    assert any(row.backend == "flash" for row in facts.analysis.attention)
    assert [*attention_fallback(facts), *attention_unfused(facts)] == []


def test_what_vanishes_with_unfused_attention_is_what_stands_around_its_softmax() -> None:
    """CPU time by hand: the projection stays, and so does its backward; the dropout between the products goes."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).mark("attention", 0, 400, kind="attention")
    trace.op("aten::linear", 0, 100).op("aten::addmm", 10, 90, sequence=1)
    trace.op("aten::bmm", 110, 150, sequence=2)
    trace.op("aten::_softmax", 160, 190, sequence=3)
    trace.mark("attention.dropout", 200, 240).op("aten::native_dropout", 210, 230, sequence=4)
    trace.op("aten::bmm", 250, 290, sequence=5)
    trace.op("aten::clone", 300, 330, sequence=6)
    backward = {6: "CloneBackward0", 5: "BmmBackward0", 4: "NativeDropoutBackward0", 3: "SoftmaxBackward0"}
    backward |= {2: "BmmBackward0", 1: "AddmmBackward0"}
    for i, (number, name) in enumerate(backward.items()):
        start = 500 + 50 * i
        trace.node(name, start, start + 40, number=number, thread=1).op("aten::work", start + 10, start + 30)
    for number, start in zip(backward, range(500, 800, 50), strict=True):
        made = {6: 300, 5: 250, 4: 210, 3: 160, 2: 110, 1: 10}[number]
        trace.arrow(made, start, backward_thread=1)
    (found,) = attention_unfused(facts_of(trace.recording()))
    assert found.layers == ("attention",)
    # Forward: products 40 + 40, softmax 30, dropout 20, copy 30. Backward: five nodes of 40.
    assert found.details["time_us"] == pytest.approx(0.160 + 0.200)
    assert found.details["softmax_us"] == pytest.approx(0.030 + 0.040)
    assert found.details["products_us"] == pytest.approx(0.080 + 0.080)
    # And on the wall the layer's own code: 400 without linear (100), of it 140 in what is counted already, but for
    # the 20 of the dropout layer's own code, which lies between the products.
    assert found.saves_at_most_us == pytest.approx(0.300 + 0.200)


def attention_on_a_gpu(dtype: str, *, mask: bool = False, backend: str = "efficient") -> Any:
    """One call that takes 600 ns of a device, launched by 100 ns of CPU; a step is 1000 ns."""
    name = f"aten::_scaled_dot_product_{backend}_attention"
    entry = "aten::scaled_dot_product_attention"
    sizes = [2, 4, 16, 64]
    inputs = OpShapes(
        dims=(sizes, sizes, sizes, [16, 16] if mask else [], [], []),
        types=(dtype, dtype, dtype, dtype if mask else "", "Scalar", "Scalar"),
        concrete=("", "", "", "", "0.", "False"),
    )
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).mark("attention", 0, 200, kind="attention")
    trace.op(entry, 10, 110).op(name, 20, 100).kernel("fmha", 100, 700, launched=30)
    shapes = shapes_of(trace, {entry: inputs})
    metadata = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0}]}
    return facts_of(trace.recording(metadata=metadata), shapes=shapes)


def test_a_gpus_fallback_has_its_reason_and_an_upper_bound() -> None:
    (in_float32,) = attention_fallback(attention_on_a_gpu("float"))
    assert in_float32.details["causes"] == ["dtype"]
    assert "bfloat16" in in_float32.fix
    # Without it the CPU's 100 ns and the device's 600 ns are gone, but no more than these and what the device idled.
    assert in_float32.saves_at_most_us == pytest.approx(0.7)
    (masked,) = attention_fallback(attention_on_a_gpu("c10::BFloat16", mask=True))
    assert masked.details["causes"] == ["mask"]
    assert list(attention_fallback(attention_on_a_gpu("c10::BFloat16", backend="flash"))) == []


def test_a_fallback_takes_what_the_table_of_attention_says() -> None:
    """The own time of `scaled_dot_product_attention`, 20 of 100, is spent with any backend."""
    trace = Trace().annotation("ProfilerStep#0", 0, 1000).mark("attention", 0, 200, kind="attention")
    trace.op("aten::scaled_dot_product_attention", 10, 110).op("aten::_scaled_dot_product_attention_math", 20, 100)
    facts = facts_of(trace.recording())
    (found,), (row,) = attention_fallback(facts), facts.analysis.attention
    assert found.details["time_us"] == found.saves_at_most_us == row.time_ns / 1000 == 0.080
