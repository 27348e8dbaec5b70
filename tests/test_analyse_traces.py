"""Recorded traces of GPUs, read and analysed whole."""

from __future__ import annotations

from collections import Counter

import pytest

from gpu_traces import LARGEST, result
from profiler_wrapper.place.names import LAUNCHED_BEFORE
from shared_traces import needs_traces

pytestmark = needs_traces
QWEN = "h100_qwen1.5_0.5b_inference.json.gz"
TIMESFORMER = "h100_timesformer_inference.json.gz"
REPLAYED = "mi300_sglang_qwen3_8b_decode_graph_replay.json.gz"
CAPTURED = "mi300_sglang_qwen3_8b_graph_capture.json.gz"
CHECKPOINTED = "mi300_resnet_checkpointing_training.json.gz"


def unattributed(name: str) -> dict[str, int]:
    return {row.reason: row.time_ns for row in result(name).unattributed}


def test_each_block_of_qwen_has_flash_attention() -> None:
    found = result(QWEN)
    blocks = {row.layer: row for row in found.layers if row.kind == "block" and row.phase == "forward"}
    assert set(blocks) == {f"Qwen2Model.Qwen2DecoderLayer_{i}" for i in range(24)}
    # What was launched before the trace (30 % of the time) is not guessed: the first blocks lost most of theirs.
    flash = {row.layer.rpartition(".")[0] for row in found.attention if row.backend == "flash"}
    assert flash == set(blocks)
    assert all(0 < row.attention_ns < row.time_ns for row in blocks.values())


def test_each_layer_of_timesformer_has_two_attentions() -> None:
    attention: Counter[str] = Counter()
    for row in result(TIMESFORMER).layers:
        if row.class_name == "TimesformerSelfAttention":
            assert row.kind == "attention"
            assert row.time_ns > 0
            attention[row.block or ""] += 1
    assert len(attention) == 12
    assert set(attention.values()) == {2}


def test_recompute_is_a_phase_where_activations_are_checkpointed() -> None:
    phases: Counter[str] = Counter()
    for row in result(CHECKPOINTED).layers:
        phases[row.phase] += row.self_time_ns
    assert {"forward", "backward", "recompute", "accumulate_grad", "optimizer"} <= set(phases)
    assert phases["backward"] > phases["recompute"] > 0
    recomputed = {row.layer for row in result(CHECKPOINTED).layers if row.phase == "recompute" and row.calls}
    assert any("CheckpointWrapper" in layer for layer in recomputed)


def test_collectives_of_several_layers_have_no_layer() -> None:
    found = result(CHECKPOINTED)
    moved = {(row.layer, row.phase): row.communication_ns for row in found.layers if row.communication_ns}
    # All-reduces of gradients launched while some layer's gradient was accumulated; DDP's own broadcast of buffers.
    assert set(moved) == {("", "backward"), ("DistributedDataParallel", "forward")}
    assert round(moved["", "backward"] / found.time.total_ns, 2) == 0.47


@pytest.mark.parametrize(("name", "microseconds"), [(QWEN, 13741.827), (CHECKPOINTED, 31834.405)])
def test_what_was_launched_before_the_trace_is_said(name: str, microseconds: float) -> None:
    assert unattributed(name) == {LAUNCHED_BEFORE: round(microseconds * 1000)}


@pytest.mark.parametrize(
    "name",
    [
        "h100_bert_small_inference.json.gz",
        "h100_vit_inference.json.gz",
        TIMESFORMER,
        QWEN,
        "b200_vllm_eager_inference.json.gz",
    ],
)
def test_all_that_was_launched_in_a_foreign_trace_is_in_a_module(name: str) -> None:
    found = result(name)
    forward = sum(row.self_time_ns for row in found.layers if row.layer)
    launched = found.time.total_ns - found.time.unattributed_ns
    assert forward >= 0.97 * launched


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(LARGEST, [2, 3, 4, 5, 6], marks=pytest.mark.full),
        ("v100_ddp_resnet.pt.trace.json.gz", [101, 102, 103, 104, 105]),
        (CHECKPOINTED, [15, 16, 17]),
    ],
)
def test_steps_of_traces_that_number_them(name: str, steps: list[int]) -> None:
    assert [row.step for row in result(name).steps if row.step is not None] == steps


@pytest.mark.full
def test_memory_of_the_trace_that_has_it() -> None:
    found = result(LARGEST)
    assert found.memory["device"].startswith("cuda")
    assert all(row.peak_bytes is not None and row.peak_bytes > 0 for row in found.steps)


def test_a_servers_decoding_by_the_replay_of_a_graph() -> None:
    """One launch of 544 kernels outside all modules, in a trace that begins while the device is at work."""
    found = result(REPLAYED)
    assert [(row.reason, row.time_ns, row.count) for row in found.unattributed] == [("graph replay", 9_656_404, 544)]
    assert [(row.step, row.time_ns, dict(row.phases_ns)) for row in found.steps] == [
        (0, 9_778_614, {"decode": 9_778_614})
    ]
    assert {(row.layer, row.phase): row.self_time_ns for row in found.layers} == {
        ("Sampler", "decode"): 53_840,
        ("", "decode"): 68_370,
    }
    assert found.time.busy_ns is None and found.overview is not None and found.overview.gaps_ns is None
    assert all(row.idle_ns is None for row in found.layers)
    # From when the device is done with what the trace does not show, to the last copy.
    assert [step.span_ns for step in found.overview.steps] == [10_450_292]
    assert "graph replay" in found.summary["verdict"]


def test_a_capture_claims_no_speed() -> None:
    found = result(CAPTURED)
    assert "544 kernels" in found.summary["verdict"] and found.summary["findings"] == []
    assert any("544 kernels were captured" in warning for warning in found.warnings)
    assert found.utilization is None and all(row.flops_per_step is None for row in found.layers)
    assert "TFLOP/s" not in str(result(CAPTURED))
