"""Products and attention by their sizes, of real runs: the FLOPs are those counted, the inputs those given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import gpu_traces
import profiler_wrapper as pw
from profiler_wrapper.analyse import tables
from profiler_wrapper.place.attention_ops import ENTRY
from profiler_wrapper.result import attribute_trace
from profiler_wrapper.tables.model import Analysis, AttentionCallRow, AttentionRow, ProductRow
from profiler_wrapper.tables.views.products import product_rows, shape_rows
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.trace.recording import OpShapes
from profiling import result_of
from recordings import Trace
from shaped_trace import analysed
from shared_traces import needs_traces
from torch_versions import TORCH
from trained_models import trained

STEPS = 5  # two with shapes, three timed
WITH_SHAPES = (
    "b200_vllm_eager_inference",
    "h100_bert_small_inference",
    "h100_qwen1.5_0.5b_inference",
    "h100_timesformer_inference",
    "h100_vit_inference",
    "mi300_resnet_checkpointing_training",
    "mi300_torch_compile",
)


def flops(products: tuple[ProductRow, ...]) -> Fraction:
    """Of all products of a step."""
    return sum((2 * row.m * row.n * row.k * row.batch * Fraction(row.calls_per_step) for row in products), Fraction())


def counted_flops(result: Analysis, *classes: str) -> int:
    """Of ops of these classes, as they are counted."""
    return sum(row.flops_per_step for row in result.flops if row.class_name in classes)


# With dropout, which GPT-2 and BERT have, attention on a CPU is made of products.
@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama", ("gemm",)),
        pytest.param("mixtral", ("gemm",), marks=pytest.mark.full),
        pytest.param("gpt2", ("gemm", "attention"), marks=pytest.mark.full),
        pytest.param("bert", ("gemm", "attention"), marks=pytest.mark.full),
    ],
)
def test_products_of_a_training_have_the_flops_that_are_counted(name: str, classes: tuple[str, ...]) -> None:
    result = trained(name).result
    assert all(counted_flops(result, name_of_class) > 0 for name_of_class in classes)
    assert flops(result.products) == counted_flops(result, *classes)
    assert result.products[0].time_per_step_ns >= result.products[-1].time_per_step_ns > 0


@needs_traces
@pytest.mark.parametrize("name", WITH_SHAPES)
def test_products_of_a_recorded_trace_have_the_flops_that_are_counted(name: str) -> None:
    found = gpu_traces.attributed_trace(f"{name}.json.gz")
    assert found.shapes is not None
    result = tables(found, run={})
    every = product_rows(found, found.shapes, FlopOps(found, found.shapes), most=10**9)
    assert flops(every) == counted_flops(result, "gemm")
    assert result.products == every[:200]


@needs_traces
def test_without_shapes_there_are_no_rows() -> None:
    result = gpu_traces.result("alexnet_forward.pt.trace.json.gz")
    assert result.products == result.attention_calls == ()


@needs_traces
def test_a_gpus_attention_is_told_by_its_sizes() -> None:
    rows = gpu_traces.result("h100_qwen1.5_0.5b_inference.json.gz").attention_calls
    assert len(rows) == 24  # one for each layer
    assert {(row.backend, row.dtype, row.query_shape, row.causal, row.mask, row.calls_per_step) for row in rows} == {
        ("flash", "bfloat16", (16, 16, 559, 64), True, False, 1.0)
    }


# --- attention that is not torch's scaled_dot_product_attention -----------------------------------


@torch.library.custom_op("shape_rows::flash_attn_forward", mutates_args=())
def of_a_library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class AttendsBy(nn.Module):
    """What is given, as attention, in a layer of its own."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(64, 192), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return self.attend(*(part.unflatten(-1, (4, 16)).transpose(1, 2).contiguous() for part in parts))


def attending() -> nn.ModuleDict:
    torch.compiler.reset()
    return nn.ModuleDict(
        {
            "library": AttendsBy(of_a_library),
            "flex": AttendsBy(flex_attention),
            "compiled": AttendsBy(torch.compile(flex_attention)),
            "heads": nn.MultiheadAttention(64, 4, batch_first=True),
            "encoder": nn.TransformerEncoderLayer(64, 4, 64, batch_first=True),
        }
    ).eval()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attention_by_another_name_is_told_by_its_backend(tmp_path: Path) -> None:
    from torch._inductor import config

    models, x = attending(), torch.randn(1, 128, 64)
    if TORCH < (2, 11):
        del models["compiled"]  # torch's own kernel for a CPU corrupts the heap
    if TORCH >= (2, 15):
        del models["library"]  # without gradients it writes no event for a custom op that is called directly
    with (
        config.patch(cpp_cache_precompile_headers=False),  # they are for many kernels
        torch.no_grad(),
        pw.ProfilerWrapper(models, output_dir=tmp_path, files=("result",), steps="3-4") as prof,
    ):
        for _ in range(5):
            for name, model in models.items():
                model(*[x] * (3 if name == "heads" else 1))
            prof.step()
    result = result_of(prof)
    backends = {(row.layer, row.backend) for row in result.attention}
    expected = {"library": "external", "flex": "flex", "compiled": "flex", "heads": "math", "encoder": "math"}
    assert backends == {(name, backend) for name, backend in expected.items() if name in models}
    # Two products of 128 x 128 and 16, in four heads; beside them the projections.
    attention = {row.layer: row.flops_per_step for row in result.flops if row.class_name == "attention"}
    assert attention == dict.fromkeys(models.keys() - {"compiled"}, 2 * 2 * 4 * 128 * 128 * 16)
    products = {row.layer: row.flops_per_step for row in result.flops if row.class_name == "gemm"}
    assert products.pop("library.qkv", None) == (2 * 128 * 64 * 192 if "library" in models else None)
    assert products.pop("compiled.qkv", None) == (2 * 128 * 64 * 192 if "compiled" in models else None)
    assert products == {
        "flex.qkv": 2 * 128 * 64 * 192,
        "heads": 2 * 128 * 64 * (192 + 64),
        "encoder": 2 * 128 * 64 * (192 + 64 + 2 * 64),
    }
    assert not [finding for finding in result.summary["findings"] if finding["id"] == "attention-fallback"]


# --- what attention was given -------------------------------------------------------------------


class Attends(nn.Module):
    """One projection, and attention as its arguments say."""

    def __init__(self, backend: SDPBackend | None = None, *, key_heads: int = 4, **arguments: object) -> None:
        super().__init__()
        self.query = nn.Linear(8, 4 * 8)
        self.key = nn.Linear(8, key_heads * 8)
        self.backend, self.key_heads, self.arguments = backend, key_heads, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.key_heads, 8)).transpose(1, 2)
        if self.backend is None:
            return scaled_dot_product_attention(query, key, key, **self.arguments)
        with sdpa_kernel(self.backend):
            return scaled_dot_product_attention(query, key, key, **self.arguments)


def calls_of(model: nn.Module, directory: Path) -> dict[str, AttentionCallRow]:
    """By phase, what a training of the model says of its attention."""
    with pw.ProfilerWrapper(model, output_dir=directory, files=("result",), enable_print_summary=False) as prof:
        for _ in range(STEPS):
            model(torch.ones(2, 16, 8)).square().mean().backward()
            prof.step()
    rows = result_of(prof).attention_calls
    assert len(rows) == len({row.phase for row in rows})
    return {row.phase: row for row in rows}


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH], ids=["flash", "math"])
def test_forward_and_backward_of_attention_are_told_by_what_it_was_given(
    backend: SDPBackend | None, tmp_path: Path
) -> None:
    rows = calls_of(Attends(backend, is_causal=True), tmp_path)
    assert set(rows) == {"forward", "backward"}
    for row in rows.values():
        assert row.layer == "Attends"
        assert row.backend == ("flash" if backend is None else "math")
        assert (row.dtype, row.calls_per_step) == ("float32", 1.0)
        assert row.query_shape == row.key_shape == row.value_shape == (2, 4, 16, 8)
        assert (row.mask, row.causal, row.dropout, row.grouped, row.strided) == (False, True, 0.0, False, False)
        assert row.time_per_step_ns > 0


@pytest.mark.full
def test_dropout_a_mask_and_grouped_heads_are_told(tmp_path: Path) -> None:
    dropped = calls_of(Attends(dropout_p=0.25), tmp_path / "dropout")["forward"]
    assert (dropped.backend, dropped.dropout, dropped.mask) == ("math", 0.25, False)
    masked = calls_of(Attends(attn_mask=torch.ones(16, 16, dtype=torch.bool)), tmp_path / "mask")["forward"]
    assert (masked.backend, masked.mask, masked.causal) == ("flash", True, False)
    grouped = calls_of(Attends(key_heads=2, enable_gqa=True), tmp_path / "grouped")["forward"]
    assert (grouped.backend, grouped.grouped, grouped.key_shape) == ("flash", True, (2, 2, 16, 8))


def by_place(rows: Iterable[AttentionCallRow | AttentionRow], steps: int = 1) -> dict[tuple[str, str, str], int]:
    """Time of a step by layer, phase and backend."""
    times: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        spent = row.time_per_step_ns if isinstance(row, AttentionCallRow) else row.time_ns / steps
        times[row.layer, row.phase, row.backend] += round(spent)
    return dict(times)


def test_the_time_of_calls_is_that_of_attention_everywhere_else() -> None:
    """What torch's dispatch of a call takes itself is no attention in any table."""
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    sizes = [2, 4, 16, 64]
    inputs = OpShapes(dims=(sizes,) * 3, types=("float",) * 3, concrete=("",) * 3)
    by_hand = Trace().mark("attention", 0, 100).op(ENTRY, 10, 60).op(name, 20, 50).op("aten::empty", 30, 35)
    told = analysed(by_hand, {ENTRY: inputs})
    (row,) = told.attention_calls
    assert row.time_per_step_ns == 30
    assert by_place(told.attention_calls) == by_place(told.attention) == {("attention", "forward", "flash"): 30}


@needs_traces
@pytest.mark.parametrize("name", ["h100_qwen1.5_0.5b_inference", "h100_vit_inference", "h100_bert_small_inference"])
def test_calls_of_a_recorded_trace_add_up_to_its_attention(name: str) -> None:
    result = gpu_traces.result(f"{name}.json.gz")
    steps = max(1, len([row for row in result.steps if row.step is not None]))
    calls, rows = by_place(result.attention_calls), by_place(result.attention, steps)
    assert calls.keys() == rows.keys()
    assert all(calls[place] == pytest.approx(rows[place], abs=steps) for place in rows)


def test_without_the_call_that_was_made_the_backends_own_op_tells_what_it_was_given() -> None:
    """As in compiled code, where torch decides when it compiles."""
    name, sizes = "aten::_scaled_dot_product_attention_math", [2, 4, 16, 64]
    inputs = OpShapes(
        dims=(sizes, sizes, sizes, [16, 16], [], []),
        types=("float", "float", "float", "bool", "Scalar", "Scalar"),
        concrete=("", "", "", "", "0.5", "False"),
        strides=([1, 2, 3, 4], [1, 2, 3, 1], [1, 2, 3, 1], [16, 1], [], []),
    )
    by_hand = Trace().mark("attention", 0, 100).op(name, 10, 60)
    (row,) = analysed(by_hand, {name: inputs}).attention_calls
    assert (row.layer, row.backend, row.dtype) == ("attention", "math", "float32")
    assert (row.mask, row.mask_shape, row.dropout, row.causal) == (True, (16, 16), 0.5, False)
    assert row.strided  # queries are not dense in their last dimension
    assert row.time_per_step_ns == 50


def test_the_shapes_of_an_op_are_told_as_text_the_most_frequent_first(tmp_path: Path) -> None:
    """Three layers of one size and one of another, called with a batch of 4."""
    layers = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    options = {"output_dir": tmp_path, "files": ("trace",), "enable_print_summary": False}
    with pw.ProfilerWrapper(layers, steps="0-1", record_shapes=True, **options) as prof, torch.no_grad():
        for _ in range(2):
            layers(torch.ones(4, 8))
            prof.step()
    assert prof.directory is not None
    found = attribute_trace(prof.directory / "profile_trace.json")
    assert found.shapes is not None
    assert shape_rows(found, found.shapes, FlopOps(found, found.shapes)).shapes_of_op["aten::addmm"] == (
        "float32[6], float32[4, 6], float32[6, 6]",
        "float32[6], float32[4, 8], float32[8, 6]",
    )
