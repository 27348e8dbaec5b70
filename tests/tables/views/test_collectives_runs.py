"""Collectives of two real processes that talk by gloo: how many, of which kind, where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import profiler_wrapper as pw
from processes import run_in_processes
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.reader import read
from recordings import analyse

pytestmark = pytest.mark.full
_WARM_UP, _STEPS = 2, 2  # DDP settles its buckets after the first step, by broadcasts


class Net(nn.Module):
    """Two layers, each sharded by itself where there is sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def train_both(folder: str) -> None:
    for kind in ("ddp", "fsdp"):
        train(kind, f"{folder}/{kind}.json")


def train(kind: str, path: str) -> None:
    """Recorded steps of one rank; each ends with a mean of the loss over the ranks."""
    torch.manual_seed(0)
    plain = Net()
    if kind == "fsdp":
        for module in (plain.first, plain.second, plain):
            fully_shard(module)
    model = DistributedDataParallel(plain) if kind == "ddp" else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            dist.barrier()
            prof = profile(activities=[ProfilerActivity.CPU])
            prof.start()
            mark = pw.mark(plain)
            mark.__enter__()
        loss = model(torch.randn(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
    mark.__exit__(None, None, None)
    prof.stop()
    if dist.get_rank() == 0:
        prof.export_chrome_trace(path)


def calls(result: Analysis) -> Counter[tuple[str, str | None, str]]:
    counts: Counter[tuple[str, str | None, str]] = Counter()
    for row in result.collectives:
        counts[row.collective, row.layer, row.phase] += row.count
    return +counts


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gloo")
    run_in_processes(train_both, str(folder))
    return folder


def checked(path: Path) -> Analysis:
    result = analyse(read(path))
    assert result.time_basis == "cpu"
    communication = sum(row.time_ns for row in result.classes if row.class_name == "communication")
    assert sum(row.time_ns for row in result.collectives) == communication > 0
    assert all(row.exposed_ns is None and row.bandwidth_bytes_per_s is None for row in result.collectives)
    return result


def test_ddp_reduces_its_gradients_once_a_step(traces: Path) -> None:
    assert calls(checked(traces / "ddp.json")) == {
        ("all_reduce", "", "backward"): _STEPS,  # one bucket, of no one layer
        ("all_reduce", "", "other"): _STEPS,  # of the loss
    }


def test_fsdp_gathers_and_scatters_each_layer(traces: Path) -> None:
    found = calls(checked(traces / "fsdp.json"))
    assert found.pop(("all_reduce", "", "other")) == _STEPS
    assert found == {
        ("all_gather", "first", "forward"): _STEPS,
        ("all_gather", "second", "forward"): _STEPS,
        ("all_gather", "first", "backward"): _STEPS,
        ("all_gather", "second", "backward"): _STEPS,
        ("reduce_scatter", "first", "backward"): _STEPS,
        ("reduce_scatter", "second", "backward"): _STEPS,
    }
