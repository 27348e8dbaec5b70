"""Bytes moved on real profiles, against the tensors that each op was given and gave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import models
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.work.bytes import has_rule
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.tables.work.traffic import Traffic
from profiler_wrapper.trace.reader import read_with_shapes
from shared_traces import TRACES, needs_traces
from traffic_truth import Call, calls_of


def of_training(name: str, path: Path) -> list[Call]:
    """Every op of a step: forward, backward, AdamW."""
    case = models.build(name, layers=1)
    optimizer = models.optimizer_of(case.model)
    models.train_step(case, case.model, optimizer)
    return calls_of(lambda: models.train_step(case, case.model, optimizer), path)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("bert", "vit", "qwen2"))]
)
def test_every_op_of_a_step_moves_what_its_tensors_hold(name: str, tmp_path: Path) -> None:
    calls = of_training(name, tmp_path / "trace.json")
    assert sum(call.really > 0 for call in calls) > 150
    assert [call for call in calls if call.told != call.really] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("gpt2", {"aten::scalar_tensor"}),  # a Python number that becomes a tensor
        # Ops made of others, which count one by one; and a copy that autograd takes inside an op in place.
        ("mixtral", {"aten::index_put", "aten::histc", "aten::clone"}),
    ],
)
def test_what_differs_is_made_of_other_ops(name: str, others: set[str], tmp_path: Path) -> None:
    calls = of_training(name, tmp_path / "trace.json")
    assert {call.op for call in calls if call.told != call.really} <= others
    assert {call.op for call in calls if call.told == call.really and call.really} > {"aten::mm", "aten::add_"}


def test_types_promote_as_tensors_do(tmp_path: Path) -> None:
    x, half, whole = torch.randn(8, 16), torch.randn(8, 16).bfloat16(), torch.arange(128).reshape(8, 16)
    truth, number = x > 0, torch.tensor(3.0)

    def run() -> None:
        for one in (x, half, whole, truth):
            for other in (x, half, whole, 2, 2.5, number):
                torch.add(one, other), torch.mul(one, other), torch.eq(one, other), torch.true_divide(one, other)
            one.sum(), one.sum(0), one.cumsum(1), one.sort(), one.amax(1), one.max(1)
        for one in (half, whole):
            (
                one.cos(),
                one.neg(),
                one.pow(2),
                one.to(torch.float64),
                one.t().contiguous(),
                torch.where(truth, one, number),
            )
        x.expand(3, 8, 16).sum(), x[:, :4] + 1, torch.cat([half[:1].expand(8, 16), half]), half.softmax(-1)
        x[whole[0, :5]], x[truth], x[:, whole[0, :5]], x.gather(1, whole[:, :3] % 16)

    calls = calls_of(run, tmp_path / "trace.json")
    assert [call for call in calls if call.told != call.really] == []


@needs_traces
@pytest.mark.parametrize(
    "name",
    [
        "h100_bert_small_inference.json.gz",
        "h100_qwen1.5_0.5b_inference.json.gz",
        "h100_timesformer_inference.json.gz",
        "h100_vit_inference.json.gz",
        "mi300_resnet_checkpointing_training.json.gz",
        "mi300_torch_compile.json.gz",
    ],
)
def test_nearly_all_time_of_a_real_trace_is_told_and_no_op_beats_the_memory(name: str) -> None:
    recording, shapes = read_with_shapes(TRACES / name, has_rule)
    found = place_events(recording, shapes=shapes)
    ops = FlopOps(found, shapes)
    traffic = Traffic(found, shapes, ops)
    time_ns = found.charges.time_ns
    assert time_ns[traffic.counts & traffic.has_bytes].sum() > 0.9999 * time_ns[traffic.counts].sum()
    assert (traffic.unit_of[ops.is_counted] >= 0).all()
    peak = 5300 if name.startswith("mi300") else 3350  # bytes a nanosecond: makers' data sheets
    unit = traffic.unit_of[found.charges.cpu_span]
    for span, moved in zip(traffic.units.tolist(), traffic.bytes_moved.tolist(), strict=True):
        if moved > 1e8:  # beyond what a cache holds
            assert moved <= peak * found.charges.time_ns[unit == span].sum()
