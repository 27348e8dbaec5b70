"""Retained memory of layers against what autograd saves, as its own hooks tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import models
from profiling import profiler, result_of
from truths import SavedTensorTruth

LARGEST_DIFFERENCE = 0.02  # of what a layer keeps


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_retained_is_what_autograd_saves(name: str, autocast: torch.dtype | None, tmp_path: Path) -> None:
    case = models.build(name)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return case.loss(case.model, case.batch(0))

    with SavedTensorTruth(case.model) as truth:
        loss()
    with profiler(case, tmp_path, steps="all") as prof:
        loss().backward()
        prof.step()
    rows = [row for row in result_of(prof).layers if row.phase == "forward" and (row.block or row.depth == 0)]
    assert sum(row.kind == "block" for row in rows) >= 2
    for row in rows:
        saved = truth.bytes_inside(row.layer)
        assert row.retained_bytes == pytest.approx(saved, rel=LARGEST_DIFFERENCE, abs=64), row.layer
        assert row.peak_bytes is not None
        assert row.retained_bytes is not None
        assert row.peak_bytes >= row.retained_bytes
