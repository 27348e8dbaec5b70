"""Layer marks and reports where somebody else owns the profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiling import QUICK, rows_with_time


@pytest.fixture
def case() -> Case:
    return models.build("llama")


# --- somebody else's profiler -------------------------------------------------------------------


def test_marks_and_reports_in_a_profiler_of_the_users(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    marks = pw.mark(case.model)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=pw.trace_handler(tmp_path, files=QUICK, print_summary=False),
    ) as theirs:
        for step in range(8):
            models.train_step(case, case.model, optimizer, seed=step)
            theirs.step()
    marks.remove()
    found = [pw.load(path.parent) for path in sorted(tmp_path.rglob("result.json"))]
    assert len(found) == 2
    for result in found:
        assert (
            rows_with_time(result, "forward")
            == rows_with_time(result, "backward")
            == ["model.layers.0", "model.layers.1"]
        )
        assert result.time.unattributed_ns == 0


def test_marks_in_a_with(case: Case) -> None:
    call = nn.Module.__call__
    with pw.mark(case.model):
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call


def test_a_handler_that_fails_warns_and_does_not_raise(tmp_path: Path) -> None:
    class Broken:
        def export_chrome_trace(self, path: str) -> None:
            raise RuntimeError("Trace is already saved")

    handler = pw.trace_handler(tmp_path)
    with pytest.warns(pw.ProfilerWrapperWarning, match="Trace is already saved"):
        handler(Broken())
