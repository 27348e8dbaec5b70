"""What holds of any result is asked of recorded traces and runs; of live ones in `tests/test_wrapper_invariants.py`."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import gpu_traces
import profiler_wrapper as pw
from invariants import broken
from recordings import Trace, analyse
from shared_traces import TRACES, needs_traces

RUNS = Path(__file__).parent / "data" / "llama_runs.tar.xz"
OLD = TRACES.parent / "repro" / "inputs" / "torch18_resnet50_step.json.gz"


def _result(name: str) -> pw.ProfileResult:
    return pw.load(OLD) if name == OLD.name else gpu_traces.result(name)


def _all_traces() -> list[object]:
    old = pytest.param(OLD.name, marks=pytest.mark.skipif(not OLD.is_file(), reason=f"{OLD} is not here"))
    return [*gpu_traces.names_of_traces(largest=pytest.mark.full), old]


@needs_traces
@pytest.mark.parametrize("name", _all_traces())
def test_recorded_traces_of_gpus(name: str) -> None:
    assert broken(_result(name)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["before", "after"])
def test_recorded_runs(name: str, tmp_path: Path) -> None:
    with tarfile.open(RUNS) as file:
        file.extractall(tmp_path, filter="data")
    assert broken(pw.load(tmp_path / name)) == []


def test_the_largest_part_of_a_root_that_is_a_block() -> None:
    """`nn.TransformerEncoderLayer` as the model: its attention takes most, not its own code."""
    trace = Trace().annotation("ProfilerStep#1", 0, 1000).mark(".", 0, 900, kind="block").op("aten::add", 10, 60)
    trace.mark("self_attn", 100, 800, kind="attention").op("aten::mm", 110, 790)
    assert broken(analyse(trace.recording()), ["the_verdict_is_that_of_the_tables"]) == []


def test_a_call_that_goes_on_after_its_step() -> None:
    """`prof.step()` within a call of the model: each step has the time of its own ops."""
    trace = Trace().annotation("ProfilerStep#1", 0, 100).annotation("ProfilerStep#2", 100, 200).mark(".", 50, 150)
    trace.op("aten::mm", 60, 80).op("aten::add", 110, 120)
    result = analyse(trace.recording())
    assert broken(result, ["parts_make_their_step"]) == []
    assert [(row.step, row.part, row.time_ns) for row in result.parts] == [(1, "Net", 20), (2, "other", 10)]
