"""What rules of advice find in a recording, a trace of a GPU, or a training run here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import profiler_wrapper as pw
from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.analysis.attributed import attributed
from profiler_wrapper.analysis.peaks import Given
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.columns import Recording
from profiler_wrapper.recording.shapes import Shapes
from profiler_wrapper.result import attribute_trace
from profiling import result_of
from shared_traces import TRACES

Rules = Callable[[Facts], Iterable[Finding]]


def facts_of_gpu(name: str, *, run: Mapping[str, Any] | None = None) -> Facts:
    """Of a trace that was recorded on a GPU; skips the test where it is not here."""
    path = TRACES / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip("the recorded traces are not here")
    found = attribute_trace(path, run=run)
    return Facts(analysis=tables(found, run=run or {}), found=found)


def facts_of(
    recording: Recording,
    *,
    run: Mapping[str, Any] | None = None,
    shapes: Shapes | None = None,
    peaks: Given | None = None,
    **changes: Any,
) -> Facts:
    """Of a recording made by hand; `changes`: rows of its analysis to put in the place of those that it has."""
    found = attributed(recording, run=run, shapes=shapes)
    return Facts(analysis=replace(tables(found, run=run or {}, peaks=peaks), **changes), found=found)


def findings_of_training(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    directory: Path,
) -> dict[str, Mapping[str, Any]]:
    """By rule, what the summary of a training run of five steps says."""
    with pw.ProfilerWrapper(model, output_dir=directory, files=("result",), enable_print_summary=False) as prof:
        for _ in range(5):
            output = model(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return {finding["id"]: finding for finding in result_of(prof).summary["findings"]}
