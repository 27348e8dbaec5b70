"""A part of the analysis that fails is one warning; times, memory and the other parts stay."""

from __future__ import annotations

import sys

import pytest

from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.recording import OpShapes
from recordings import Trace, analyse
from shaped_trace import shapes_of
from unchanged import fails

ANALYSE = sys.modules["profiler_wrapper.analyse"]  # the package has a function of that name
PRODUCT = OpShapes(([2, 3], [3, 4]), ("float", "float"), ("", ""))


def result() -> Analysis:
    """Of one product in one layer, with its shapes."""
    trace = Trace().mark(".", 0, 100, class_name="Net").op("aten::mm", 10, 20).memory(15, 32, address=1)
    return analyse(trace.recording(), shapes=shapes_of(trace, {"aten::mm": PRODUCT}))


@pytest.mark.parametrize(
    ("part", "told", "empty"),
    [
        ("overview", "the overview is", "overview"),
        ("operator_rows", "operators are", "operators"),
        ("kernel_rows", "kernels are", "kernels"),
        ("collective_rows", "collectives are", "collectives"),
        ("synchronisation_rows", "waits for the device are", "synchronisations"),
        ("allocation_rows", "allocations are", "allocations"),
        ("op_memory_rows", "memory of ops is", "op_memory"),
        ("summary_of", "the summary is", "summary"),
        ("work_of_recording", "FLOPs and bytes moved are", "flops"),
    ],
)
def test_a_part_that_fails_is_one_warning(monkeypatch: pytest.MonkeyPatch, part: str, told: str, empty: str) -> None:
    whole = result()
    assert whole.flops and whole.summary and whole.operators and whole.allocations
    monkeypatch.setattr(ANALYSE, part, fails)
    rest = result()
    (warning,) = set(rest.warnings) - set(whole.warnings)
    assert warning.startswith(f"{told} not available")
    assert "RuntimeError: ours" in warning
    assert not getattr(rest, empty)
    assert rest.time == whole.time
    assert rest.memory == whole.memory
    assert [row.self_time_ns for row in rest.layers] == [row.self_time_ns for row in whole.layers]
