"""The memory text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profiler_wrapper.reports.folding import layer_bars
from profiler_wrapper.reports.memory import average_slope_mib, memory_usage_text
from sample_results import llama

GOLDEN = Path(__file__).parents[1] / "golden"


def test_memory_text() -> None:
    assert memory_usage_text(llama(3)) == (GOLDEN / "memory_usage.txt").read_text(encoding="utf-8")


def test_average_slope_is_the_increase_of_one_block() -> None:
    assert average_slope_mib(layer_bars(llama(3))) == 54  # 4 + 16 + 32 + 2


def test_values_can_be_read_back() -> None:
    lines = memory_usage_text(llama(3)).splitlines()
    start = lines.index("allocated (MiB, at exit, mean over the calls of 3 steps (2..4)):")
    values = [float(line.split()[0]) for line in lines[start + 1 : start + 7]]
    assert values == [1008, 1062, 1116, 1170, 1172, 1236]


def test_a_cpu_has_no_reserved_memory_and_says_so() -> None:
    analysis = llama(1, time_basis="cpu")
    analysis = replace(analysis, layers=tuple(replace(row, reserved_bytes=0.0) for row in analysis.layers))
    text = memory_usage_text(analysis)
    assert "reserved (MiB, at exit): not available on this device" in text
    assert "on a CPU, of what was there before only what model and optimizers held counts" in text


def test_says_why_there_is_none() -> None:
    reason = "memory is not available, because profile_memory was off"
    text = memory_usage_text(llama(1, memory=False, warnings=("else", reason)))
    assert "average_slope: not available, because profile_memory was off\n" in text
