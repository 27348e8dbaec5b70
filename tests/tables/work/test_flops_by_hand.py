"""FLOPs of whole models worked out on paper: forward, backward, what is computed again, and with frozen parts.

All have 2 layers, 64 wide, 4 heads, and see 2 sequences of 16 tokens. A product of (tokens, k) with (k, n) is
2 * tokens * k * n; its backward is two more, one where either side needs no gradient.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from models import Case, build, optimizer_of, train_step
from profiler_wrapper import ProfileResult
from profiling import profiler, result_of
from variants import gradient_checkpointing, gradient_checkpointing_reentrant, lora

LAYERS, H, BATCH, VOCABULARY, RANK = 2, 64, 2, 128, 4
TOKENS = BATCH * 16
PATCHES = BATCH * 17  # 16 and a class token


def products(rows: int, weights: float) -> int:
    return int(2 * rows * weights)


def attention(length: int) -> int:
    """Of all layers: queries with keys, and what that gives with values."""
    return LAYERS * 2 * (2 * BATCH * length * length * H)


HEAD = products(TOKENS, H * VOCABULARY)
LLAMA = products(TOKENS, LAYERS * (3 * H * H + 3 * H * 2 * H)) + HEAD  # keys and values are half as wide
EXPERTS = products(2 * TOKENS, LAYERS * 3 * H * 2 * H)  # two experts for each token
MIXTRAL = products(TOKENS, LAYERS * (3 * H * H + H * 4)) + EXPERTS + HEAD
GPT2 = products(TOKENS, LAYERS * 12 * H * H) + HEAD
BERT = products(TOKENS, LAYERS * 8 * H * H) + products(BATCH, H * H + 3 * H)
PATCHING = products(BATCH * 16, 3 * 4 * 4 * H)
VIT = products(PATCHES, LAYERS * 8 * H * H) + products(BATCH, 3 * H)

# Forward and backward. Fused attention has five products backward for two forward, that in pieces (dropout) four.
BY_HAND: dict[str, tuple[int, int]] = {
    "llama": (LLAMA + attention(16), 2 * LLAMA + 5 * attention(16) // 2),
    "mixtral": (MIXTRAL + attention(16), 2 * MIXTRAL + 5 * attention(16) // 2),
    "gpt2": (GPT2 + attention(16), 2 * GPT2 + 2 * attention(16)),
    "bert": (BERT + attention(16), 2 * BERT + 2 * attention(16)),
    "vit": (VIT + PATCHING + attention(17), 2 * VIT + PATCHING + 5 * attention(17) // 2),  # pixels have no gradient
}
SCORES = attention(16) // 2  # one of the two products, which a fused backward computes again


def profile(case: Case, directory: Path, model: nn.Module | None = None) -> ProfileResult:
    """Two steps, with shapes."""
    model = case.model if model is None else model
    optimizer = optimizer_of(model)
    options = {"steps": "all", "record_shapes": True, "files": ("result",), "peaks": "float32=1,bandwidth=100"}
    with profiler(case, directory, **options) as prof:
        for _ in range(2):
            train_step(case, model, optimizer)
            prof.step()
    return result_of(prof)


def by_phase(result: ProfileResult) -> dict[str, int]:
    assert not result.uncounted
    flops: Counter[str] = Counter()
    for row in result.flops:
        flops[row.phase] += row.flops_per_step
    return dict(+flops)


def model_and_hardware_flops(result: ProfileResult) -> tuple[int | None, int | None]:
    assert result.utilization is not None
    return result.utilization.model_flops_per_step, result.utilization.hardware_flops_per_step


@cache
def plain(name: str) -> ProfileResult:
    with tempfile.TemporaryDirectory() as directory:
        return profile(build(name), Path(directory))


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.full) for name in BY_HAND if name != "gpt2")]
)
def test_forward_and_backward(name: str) -> None:
    result = plain(name)
    forward, backward = BY_HAND[name]
    assert by_phase(result) == {"forward": forward, "backward": backward}
    repeated = 0 if name in ("gpt2", "bert") else attention(17 if name == "vit" else 16) // 2
    assert model_and_hardware_flops(result) == (forward + backward - repeated, forward + backward)


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [gradient_checkpointing, gradient_checkpointing_reentrant])
def test_hfu_is_over_mfu_by_what_is_computed_again(checkpointing: Callable[[Case], nn.Module], tmp_path: Path) -> None:
    case = build("llama")
    checkpointing(case)
    result = profile(case, tmp_path)
    forward, backward = BY_HAND["llama"]
    # The blocks once more; but for each block's last product, of which torch only needs the inputs, unless reentrant.
    last = products(TOKENS, LAYERS * 2 * H * H) if checkpointing is gradient_checkpointing else 0
    again = LLAMA - HEAD + attention(16) - last
    assert by_phase(result) == {"forward": forward, "backward": backward, "recompute": again}
    model, hardware = forward + backward - SCORES, forward + backward + again
    assert model_and_hardware_flops(result) == (model, hardware)
    use = result.utilization
    assert use is not None
    assert use.step_time_ns is not None
    assert use.mfu == pytest.approx(model / 1e12 / (use.step_time_ns / 1e9), rel=1e-12)
    assert use.hfu == pytest.approx(hardware / 1e12 / (use.step_time_ns / 1e9), rel=1e-12)


@pytest.mark.full
def test_a_frozen_backbone_has_no_backward(tmp_path: Path) -> None:
    case = build("llama")
    case.model.requires_grad_(False)
    case.model.get_submodule("lm_head").requires_grad_(True)
    result = profile(case, tmp_path)
    assert by_phase(result) == {"forward": BY_HAND["llama"][0], "backward": HEAD}  # its weight's gradient alone


@pytest.mark.full
def test_adapters_train_by_gradients_of_inputs_alone(tmp_path: Path) -> None:
    """LoRA of queries and values: two narrow products beside each; nothing below the first block has a gradient."""
    case = build("llama")
    model = lora(case)
    narrow_in, narrow_out = 2 * H * RANK, RANK * H + RANK * H // 2
    forward = BY_HAND["llama"][0] + products(TOKENS, LAYERS * (narrow_in + narrow_out))
    output_and_mlp = H * H + 3 * H * 2 * H
    first = output_and_mlp + narrow_in + 2 * narrow_out
    second = output_and_mlp + 2 * H * H + 2 * (narrow_in + narrow_out)
    backward = products(TOKENS, first + second) + HEAD + 5 * attention(16) // 2
    assert by_phase(profile(case, tmp_path, model)) == {"forward": forward, "backward": backward}


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_bytes_and_the_time_at_the_roof_add_up(name: str) -> None:
    result = plain(name)
    assert not [row.op for row in result.untold_bytes]
    roots = [row for row in result.layers if row.parent is None]
    for own, whole in (
        ("self_bytes_moved_per_step", "bytes_moved_per_step"),
        ("self_roof_time_per_step_ns", "roof_time_per_step_ns"),
        ("self_memory_roof_time_per_step_ns", "memory_roof_time_per_step_ns"),
    ):
        total = sum(getattr(row, own) for row in result.layers)
        assert total == sum(getattr(row, whole) for row in roots)
        assert total > 0
    assert not any(row.bytes_moved_per_step for row in result.unattributed)


@pytest.mark.full
def test_a_linear_layer_reads_its_inputs_once_and_writes_its_output_once() -> None:
    """The head: in the backward both gradients read that of the output, and one of the two others each."""
    result = plain("llama")
    head = {row.phase: row.bytes_moved_per_step for row in result.rows("lm_head")}
    x, weight, out = 4 * TOKENS * H, 4 * H * VOCABULARY, 4 * TOKENS * VOCABULARY
    assert head["forward"] == x + weight + out
    assert head["backward"] == (out + weight + x) + (out + x + weight)
