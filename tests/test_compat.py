"""The names of other tools: what their users type works, and writes what their pages list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import models
from profiler_wrapper.compat import SimpleMemoryProfiler
from profiler_wrapper.errors import WrongUse

FILES = {
    "memory.log",
    "params_memory_sunburst.html",
    "grads_memory_sunburst.html",
    "os_memory_sunburst.html",
    "activation_memory_sunburst.html",
    "summary_sunburst.html",
}
SUMMARY = re.compile(r"(\w+)_memory: (\d+\.\d\d) MB")


def states(log: str) -> list[tuple[str, dict[str, float]]]:
    """(the comment above, MB by category) of each state."""
    found = []
    for part in log.split("Memory State:")[1:]:
        found.append({name: float(size) for name, size in SUMMARY.findall(part.split("---Layout---")[0])})
    titles = [above.strip().splitlines()[-1] for above in log.split("Memory State:")[:-1]]
    return list(zip(titles, found, strict=True))


def test_internlm_memory_profiler(tmp_path: Path) -> None:
    case = models.build("llama", layers=2, hidden=64)
    optimizer = torch.optim.AdamW(case.model.parameters())
    memory = SimpleMemoryProfiler(case.model, optimizer, tmp_path / "memory_trace" / "rank0_dp0_tp0", total_steps=2)
    for seed in range(4):  # two more than are asked for
        loss = case.loss(case.model, case.batch(seed))
        memory.point("with the loss", with_options="all", create=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        memory.step()
    folder = tmp_path / "memory_trace" / "rank0_dp0_tp0"
    assert {path.name for path in folder.iterdir()} == FILES
    log = (folder / "memory.log").read_text()
    points = [sizes for title, sizes in states(log) if "with the loss" in title]
    assert len(points) == 2
    params_mib = sum(p.numel() * p.element_size() for p in case.model.parameters()) / 2**20
    for sizes in points:
        parts = sum(size for name, size in sizes.items() if name != "total")
        assert parts == pytest.approx(sizes["total"], abs=0.05)
        assert sizes["params"] == pytest.approx(params_mib, abs=0.02)
        assert sizes["grads"] == 0 and sizes["activation"] > 0
    assert points[0]["os_state"] == 0
    assert points[1]["os_state"] == pytest.approx(2 * params_mib, abs=0.02)
    assert "layer: param_mem.model.layers.0.mlp.up_proj.weight" in log
    assert memory.result is not None and memory.result.memory_use is not None


def test_it_asks_for_at_least_one_step(tmp_path: Path) -> None:
    case = models.build("llama", layers=1, hidden=32)
    with pytest.raises(WrongUse):
        SimpleMemoryProfiler(case.model, torch.optim.SGD(case.model.parameters(), lr=0.1), tmp_path, total_steps=0)
