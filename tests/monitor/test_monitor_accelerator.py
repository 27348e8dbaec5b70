"""The monitor on a real accelerator: right times and FLOPs, and no synchronisation. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from monitoring import Kept
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import StepRecord

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")

ROWS, WIDTH, STEPS = 64, 256, 6
FORWARD = 2 * ROWS * WIDTH * WIDTH


def train(directory: Path, *, errors: str, **options: object) -> list[StepRecord]:
    """Steps of one layer; with `errors` torch raises where something waits for the device."""
    model = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, mask = torch.ones(ROWS, WIDTH, device="cuda"), torch.ones(4, 16, device="cuda")
    sink = Kept()
    with TrainingMonitor(
        directory,
        model=model,
        sinks=[sink],
        peaks=1000.0,
        breakdown=True,
        **options,  # type: ignore[arg-type]
    ) as monitor:
        torch.cuda.set_sync_debug_mode(errors)
        try:
            for _ in range(STEPS):
                monitor.start_step()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                monitor.end_step(loss=loss, attention_mask=mask)
                assert monitor.active
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sink.records


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    records = train(tmp_path, errors="error", flops_per_step=1e6)
    assert [record.step for record in records] == list(range(STEPS))
    for record in records:
        assert record.step_time_s is not None
        assert record.breakdown_s is not None
        assert sum(record.breakdown_s.values()) == pytest.approx(record.step_time_s, abs=1e-9)
        assert record.loss is not None
        assert (record.tokens, record.samples) == (64, 4)
        assert record.memory_bytes is not None
        assert 0 < record.memory_bytes <= (record.peak_memory_bytes or 0)


def test_measured_flops_are_those_by_hand(tmp_path: Path) -> None:
    records = train(tmp_path, errors="default", flops_profile_freq=4)
    assert [record.model_flops for record in records] == [2 * FORWARD] * STEPS  # no gradient of the input
    assert [record.profiled for record in records] == [True, False, False, False, True, False]
