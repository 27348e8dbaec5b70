"""A training that is killed keeps its log, and what the log could not be given at the end is made afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monitor_runs import json_lines, only, open_sinks, record, strict_json
from profiler_wrapper.__main__ import main
from programs import run_script

KILLS = 20

# Each child writes steps until it is killed, and says of each when it was told that the step is written.
KILLED = """
import os, random, signal
from pathlib import Path
from monitor_runs import open_sinks, record

random.seed(int(sys.argv[2]))
for kill in range(int(sys.argv[3])):
    directory = Path(sys.argv[1]) / str(kill)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sinks = open_sinks(directory, interval=3)
        step = 0
        while True:
            step += 1
            sinks.write(record(step, step_time_s=0.1 + 0.001 * (step % 17), loss=1 / step))
            os.write(writing, b"%d\\n" % step)
    os.close(writing)
    told = b""
    enough = random.randrange(1, 120)
    while told.count(b"\\n") < enough:
        told += os.read(reading, 1 << 16)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reading, 1 << 16):
        told += piece
    os.close(reading)
    print(told.split()[-1].decode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_twenty_kills_lose_no_step_that_was_written_and_the_summary_is_rebuilt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [int(line) for line in run_script(KILLED, tmp_path, 0, KILLS).split()]
    assert len(told) == KILLS
    assert main(["monitor", str(tmp_path)]) == 0
    capsys.readouterr()
    for kill, last_told in enumerate(told):
        directory = tmp_path / str(kill)
        steps = _whole_lines(only(directory, "perf_steps_*.jsonl"))
        assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1))
        assert len(steps) >= last_told
        _check_summary(strict_json(only(directory, "perf_summary_*.json")), steps)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The steps, of which the last may be torn."""
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b"\n") + 1])
    return json_lines(path)[1:]


def _check_summary(summary: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """Against sums over the steps."""
    times_s = np.array([step["step_time_ms"] for step in steps]) / 1e3
    statistics = summary["final_statistics"]
    assert summary["session_info"]["total_iterations"] == len(steps)
    assert statistics["avg_tflops_per_gpu"] == pytest.approx(2.0 * len(steps) / times_s.sum())
    assert statistics["max_tflops_per_gpu"] == pytest.approx(2.0 / times_s.min())
    assert statistics["min_tflops_per_gpu"] == pytest.approx(2.0 / times_s.max())
    assert statistics["avg_throughput_tokens"] == pytest.approx(10.0 * len(steps) / times_s.sum())
    assert statistics["avg_mfu"] == pytest.approx(0.5 * len(steps) / times_s.sum())
    assert statistics["peak_memory_gb"] == 2.0
    for percent in (50, 95, 99):
        true_ms = 1e3 * np.percentile(times_s, percent, method="inverted_cdf")
        assert statistics[f"step_time_ms_p{percent}"] == pytest.approx(true_ms, rel=0.0051)
    ends = [*range(3, len(steps) + 1, 3), *([len(steps)] if len(steps) % 3 else [])]
    assert [row["iteration"] for row in summary["iteration_logs"]] == ends
    for row, first in zip(summary["iteration_logs"], [0, *ends], strict=False):
        inside = times_s[first : row["iteration"]]
        assert row["step_time_ms"] == pytest.approx(1e3 * inside.mean())
        assert row["tokens_per_sec"] == pytest.approx(10 * len(inside) / inside.sum())


def test_a_rebuilt_summary_is_the_one_that_was_written(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, interval=4, world_size=2)
    for step in range(1, 31):
        sinks.write(record(step, world_size=2, profiled=step == 7, loss=1.5))
    sinks.close()
    path = only(tmp_path, "perf_summary_*.json")
    written = strict_json(path)
    path.unlink()
    assert main(["monitor", str(only(tmp_path, "perf_steps_*.jsonl"))]) == 0
    assert _rounded(strict_json(path)) == _rounded(written)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value
