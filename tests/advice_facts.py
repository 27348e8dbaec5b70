"""Facts for rules of advice, from recordings made by hand, traces and training runs; and what rules find in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import profiler_wrapper as pw
from gpu_traces import attributed_trace
from profiler_wrapper.advice.facts import Facts, Rule
from profiler_wrapper.analyse import tables
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.result import attribute_trace, work_of_trace
from profiler_wrapper.tables.model import Finding
from profiler_wrapper.tables.work.peaks import Given
from profiler_wrapper.trace.recording import Recording, Shapes
from profiler_wrapper.trace.run_file import trace_with_shapes
from profiling import result_of
from shared_traces import TRACES


def facts_of(
    recording: Recording,
    *,
    run: Mapping[str, Any] | None = None,
    shapes: Shapes | None = None,
    peaks: Given | None = None,
    **changes: Any,
) -> Facts:
    """Of a recording made by hand; `changes`: rows of its analysis to put in the place of those that it has."""
    found = place_events(recording, run=run, shapes=shapes)
    return Facts(analysis=replace(tables(found, run=run or {}, peaks=peaks), **changes), found=found)


def facts_of_gpu(name: str) -> Facts:
    """Of a trace that was recorded on a GPU; skips the test where it is not here."""
    if not (TRACES / f"{name}.json.gz").is_file():
        pytest.skip("the recorded traces are not here")
    return _facts_of_gpu(f"{name}.json.gz")


@cache
def _facts_of_gpu(name: str) -> Facts:
    found = attributed_trace(name)
    return Facts(analysis=tables(found, run={}), found=found)


def facts_of_trace(path: Path, **changes: Any) -> Facts:
    """Of a trace file, with the run.json and the trace with shapes beside it if there are any; `changes`: as above."""
    beside = path.parent / "run.json"
    run = json.loads(beside.read_text()) if beside.is_file() else {}
    found = attribute_trace(path, run=run)
    full = trace_with_shapes(path, run)
    work = None if full is None else work_of_trace(full, timed=found, run=run)
    return Facts(analysis=replace(tables(found, run=run, work=work), **changes), found=found)


def findings(rule: Rule, facts: Facts) -> list[Finding]:
    """What one rule says."""
    return list(rule(facts))


def the_finding(rule: Rule, facts: Facts) -> Finding:
    """The only one, which there has to be."""
    (finding,) = rule(facts)
    return finding


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
