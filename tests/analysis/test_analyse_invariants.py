"""What holds of any result is asked of recorded traces and runs; of live ones in `tests/test_wrapper_invariants.py`."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import gpu_traces
import profiler_wrapper as pw
from invariants import INVARIANTS, broken
from recordings import Trace, analyse
from shared_traces import TRACES, needs_traces

RUNS = Path(__file__).parents[1] / "data" / "llama_runs.tar.xz"
OLD = TRACES.parent / "repro" / "inputs" / "torch18_resnet50_step.json.gz"

TWICE = "no_time_is_claimed_twice"
BASE = "every_share_says_of_what"
# Laws that do not hold yet, by trace. What mends one takes it from here: an xfail that passes is an error.
BROKEN = {
    "b200_vllm_eager_inference.json.gz": {TWICE: "75.8 ms of gaps are claimed as 75.8, 63.4 and 20.8 ms"},
    "ddp_training_with_memory.pt.trace.json.gz": {
        TWICE: "147 ms of gaps are claimed as 131 and 38.0 ms",
        BASE: "41 % is matrix products, of what is not said",
    },
    "h100_bert_small_inference.json.gz": {TWICE: "4.12 ms of gaps are claimed as 4.12 and 4.05 ms"},
    "h100_timesformer_inference.json.gz": {TWICE: "224 ms of gaps are claimed as 224 and, by waits, 130 ms"},
    "h100_vit_inference.json.gz": {TWICE: "6.67 ms of gaps are claimed as 6.67 and 6.57 ms"},
    "mi300_sglang_qwen3_8b_decode_graph_replay.json.gz": {BASE: "59 % is matrix products, of what is not said"},
    "mi300_torch_compile.json.gz": {BASE: "64 % is matrix products, of what is not said"},
    OLD.name: {BASE: "68 % is matrix products, of what is not said"},
}


def _result(name: str) -> pw.ProfileResult:
    return pw.load(OLD) if name == OLD.name else gpu_traces.result(name)


def _all_traces() -> list[object]:
    old = pytest.param(OLD.name, marks=pytest.mark.skipif(not OLD.is_file(), reason=f"{OLD} is not here"))
    return [*gpu_traces.names_of_traces(largest=pytest.mark.full), old]


def _all_broken() -> list[object]:
    def marks(name: str, why: str) -> list[pytest.MarkDecorator]:
        not_yet = pytest.mark.xfail(strict=True, reason=why)
        return [not_yet, pytest.mark.full] if name == gpu_traces.LARGEST else [not_yet]

    return [
        pytest.param(name, law, marks=marks(name, why))
        for name, laws in BROKEN.items()
        if name != OLD.name or OLD.is_file()
        for law, why in laws.items()
    ]


@needs_traces
@pytest.mark.parametrize("name", _all_traces())
def test_recorded_traces_of_gpus(name: str) -> None:
    assert broken(_result(name), [law for law in INVARIANTS if law not in BROKEN.get(name, {})]) == []


@needs_traces
@pytest.mark.parametrize(("name", "law"), _all_broken())
def test_what_does_not_hold_yet(name: str, law: str) -> None:
    assert broken(_result(name), [law]) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["before", "after"])
def test_recorded_runs(name: str, tmp_path: Path) -> None:
    with tarfile.open(RUNS) as file:
        file.extractall(tmp_path, filter="data")
    assert broken(pw.load(tmp_path / name)) == []


@pytest.mark.xfail(strict=True, reason="names below a root do not begin with its own: _attn, or its own code")
def test_the_largest_part_of_a_root_that_is_a_block() -> None:
    """`nn.TransformerEncoderLayer` as the model: its attention takes most, not its own code."""
    trace = Trace().annotation("ProfilerStep#1", 0, 1000).mark(".", 0, 900, kind="block").op("aten::add", 10, 60)
    trace.mark("self_attn", 100, 800, kind="attention").op("aten::mm", 110, 790)
    assert broken(analyse(trace.recording()), ["the_verdict_is_that_of_the_tables"]) == []


@pytest.mark.xfail(strict=True, reason="a warning says that idle time is not known, the verdict how much it is")
def test_a_device_that_still_works_when_the_trace_begins() -> None:
    """Its first kernel runs long after its launch: something else ran till then. There are two steps."""
    trace = Trace().mark(".", 10, 900)
    for step in range(2):
        t = 10_000_000 * step
        trace.annotation(f"ProfilerStep#{step}", t, t + 9_000_000).op("aten::mm", t + 20, t + 60)
        trace.kernel("gemm", t + 5_000_000, t + 5_100_000, launched=t + 30)
    assert broken(analyse(trace.recording()), ["busy_and_idle_are_known_together"]) == []
