"""The truths that other tests rely on, against answers derived by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import variants
from module_stack import OUTSIDE, layer_names, nearest
from processes import run_in_processes
from small_models import SMALL_MODELS, Checkpointed, Plain, backward_of
from truths import (
    Node,
    NodeTruth,
    cpu_total_ns,
    device_total_ns,
    next_number,
    numbered_backward_events,
)


def layers_by_name(truth: NodeTruth) -> dict[str, list[str]]:
    """Node name -> the layers that made the nodes of that name, in the order they were made."""
    found: dict[str, list[str]] = {}
    for node, layer in sorted(truth.nodes.items()):
        found.setdefault(node.name, []).append(layer)
    return found


@pytest.mark.parametrize("small_model", SMALL_MODELS, ids=lambda model: model.__name__)
def test_nodes_of_small_models(small_model: type[nn.Module]) -> None:
    model = small_model()
    with NodeTruth(model) as truth:
        backward_of(model)
    found = layers_by_name(truth)
    found.pop("TBackward0", None)
    assert found == small_model.made_by


def test_nodes_of_every_micro_batch_are_kept() -> None:
    model = Plain()
    with NodeTruth(model) as truth:
        backward_of(model, steps=3)
    assert layers_by_name(truth)["TanhBackward0"] == ["layers.0", "layers.1"] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_nodes_of_checkpointed_layers(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    with NodeTruth(model) as truth:
        backward_of(model)
    found = layers_by_name(truth)
    # Reentrant: only the recomputed nodes run, the last layer's first.
    assert found["TanhBackward0"] == (["layers.1", "layers.0"] if reentrant else ["layers.0", "layers.1"])
    assert found.get("CheckpointFunctionBackward") == (["Checkpointed"] * 2 if reentrant else None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_blocks_own_nodes_are_the_blocks_when_its_forward_is_checkpointed(reentrant: bool) -> None:
    case = models.build("llama")
    plain, wrapped = [], []
    for model, into in ((case.model, plain), (variants.gradient_checkpointing(case, reentrant=reentrant), wrapped)):
        with NodeTruth(model) as truth:
            models.train(case, steps=1)
        into.append(Counter(layer for node, layer in truth.nodes.items() if node.name == "AddBackward0"))
    residuals = {f"model.layers.{i}": plain[0][f"model.layers.{i}"] for i in range(2)}
    assert residuals == {"model.layers.0": 2, "model.layers.1": 2}
    assert {name: wrapped[0][name] for name in residuals} == residuals


def test_numbers_count_from_the_beginning_so_that_two_runs_agree() -> None:
    truths = []
    for _ in range(2):
        model = Plain()
        with NodeTruth(model) as truth:
            backward_of(model)
        truths.append(truth)
    assert truths[0].begin != truths[1].begin
    assert truths[0].nodes == truths[1].nodes


def test_nothing_is_left_on_the_model() -> None:
    model = Checkpointed(reentrant=False)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with NodeTruth(model):
        backward_of(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_every_numbered_op_of_a_bare_profile_is_a_known_node(tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        backward_of(model, steps=2)

    model = Plain()
    with NodeTruth(model) as truth:
        run(model)
    begin = next_number()
    with torch.profiler.profile() as profiler:
        run(model)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = numbered_backward_events(tmp_path / "trace.json")
    ran = {Node(event.number - begin, event.name) for event in events if event.name.endswith("Backward0")}
    assert ran == set(truth.nodes)


def fsdp2_nodes() -> dict[Node, str]:
    case = models.build("llama")
    names = layer_names(case.model)
    model = variants.fsdp2(case)
    with NodeTruth(model, names) as truth:
        models.train(case, steps=1, model=model)
    return truth.nodes


@pytest.mark.full
def test_nodes_under_fsdp2_on_two_processes() -> None:
    first, second = run_in_processes(fsdp2_nodes)
    assert first == second
    blocks = Counter(layer for node, layer in first.items() if node.name == "AddBackward0")
    assert blocks["model.layers.0"] == blocks["model.layers.1"] == 2


def test_nearest_row() -> None:
    rows = {"model.layers.0", "model.layers.0.self_attn", "Llama"}
    assert nearest("model.layers.0.self_attn.q_proj", rows, "Llama") == "model.layers.0.self_attn"
    assert nearest("lm_head", rows, "Llama") == "Llama"
    assert nearest("model.norm", rows, "Llama") == "Llama"
    assert nearest("Llama", rows, "Llama") == "Llama"
    assert nearest(OUTSIDE, rows, "Llama") == OUTSIDE


def op(name: str, start: float, duration: float, *, cat: str = "cpu_op", tid: int = 1) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration}


def test_totals_of_a_trace_written_by_hand(tmp_path: Path) -> None:
    events = [
        op("layer: . [Net other @Net#0]", 0, 1000),  # a mark has no time of its own
        op("aten::linear", 10, 5.25),
        op("aten::addmm", 11, 2),  # inside: the union counts it once
        op("aten::mul", 15.25, 1.001),  # touches
        op("aten::add", 12, 4, tid=2),  # another thread counts beside the first
        op("Optimizer.step#SGD.step", 0, 500, cat="user_annotation"),
        op("gemm", 20, 7.125, cat="kernel", tid=7),
        op("gemm", 21, 7.125, cat="kernel", tid=8),  # overlaps on another stream: counts twice
        op("Memset", 30, 0.5, cat="gpu_memset", tid=7),
        op("gemm", 20, 8, cat="gpu_user_annotation", tid=7),
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert cpu_total_ns(path) == 5250 + 1001 + 4000
    assert device_total_ns(path) == 7125 * 2 + 500


def test_times_beyond_what_a_float_holds_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1,'
        ' "ts": 1712195495505582.988, "dur": 0.012}, {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1,'
        ' "ts": 1712195495505583.000, "dur": 0.001}]}'
    )
    assert cpu_total_ns(path) == 13


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.full) for name in models.BUILDERS]
)
def test_a_model_trains_the_same_each_time(name: str) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        return models.train(models.build(name), steps=2)

    assert losses() == losses()
