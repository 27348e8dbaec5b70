"""Text and JSON of a monitored run: field by field as the layout of FlagScale's performance monitor has them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monitor_runs import EXAMPLE, GB, START, json_lines, only, open_sinks, record, strict_json, write_run

# Its script, with the glob filled in and without the window it opens.
SCRIPT = """
import glob
import json
import pandas as pd

with open(glob.glob(pattern)[0]) as f:
    data = json.load(f)
df = pd.DataFrame(data['iteration_logs'])
x, y = list(df['iteration']), list(df['TFLOPS_per_GPU'])
average = f"Average TFLOPS: {df['TFLOPS_per_GPU'].mean():.2f}"
peak = f"Peak TFLOPS: {df['TFLOPS_per_GPU'].max():.2f}"
throughput = f"Throughput: {df['tokens_per_sec'].mean():.0f} tokens/s"
"""

STEP_FIELDS = {
    "iteration": int,
    "timestamp": str,
    "TFLOPS_per_GPU": float,
    "TFLOPS_total": float,
    "samples_per_sec": float,
    "tokens_per_sec": float,
    "step_time_ms": float,
    "memory_GB": float,
    "peak_memory_GB": float,
}


def of_example(step: int, after_s: int, tflops: float, samples: float, tokens: int, ms: float, gb: float) -> Any:
    """The step that the example's line tells of."""
    seconds = ms / 1e3
    return record(
        step,
        timestamp=START + after_s,
        step_time_s=seconds,
        model_flops=tflops * 1e12 * seconds,
        samples=samples * seconds,
        tokens=tokens * seconds,
        memory_bytes=int(gb * GB),
        world_size=8,
    )


def test_the_text_is_the_example_to_the_letter(tmp_path: Path) -> None:
    steps = [
        of_example(10, 15, 1002.72, 512.0, 1048576, 235.5, 42.5),
        of_example(20, 30, 1024.96, 520.0, 1064960, 230.2, 42.75),
    ]
    write_run(tmp_path, steps, world_size=8)
    assert only(tmp_path, "perf_metrics_20240129_103000.log").read_text() == EXAMPLE
    assert only(tmp_path, "perf_realtime.log").read_text() == EXAMPLE


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    write_run(tmp_path, [record(10, model_flops=None, tokens=None, memory_bytes=None)])
    line = only(tmp_path, "perf_metrics_*.log").read_text().splitlines()[5]
    assert line.split() == ["2024-01-29", "10:30:10", "10", "-", "-", "0.2", "-", "10000.0", "-"]


def test_a_row_is_the_mean_of_its_interval_and_a_line_of_json_its_own_step(tmp_path: Path) -> None:
    write_run(tmp_path, [record(step) for step in range(1, 21)])
    rows = [line.split() for line in only(tmp_path, "perf_metrics_*.log").read_text().splitlines()[5:]]
    # 10 steps of 1 s .. 10 s: 20 TFLOP, 20 samples and 100 tokens in 55 s; then 11 s .. 20 s: in 155 s.
    assert rows[0][2:] == ["10", "0.36", "0.36", "0.4", "2", "5500.0", "1.00"]
    assert rows[1][2:] == ["20", "0.13", "0.13", "0.1", "1", "15500.0", "1.00"]
    head, *lines = json_lines(only(tmp_path, "perf_steps_*.jsonl"))
    assert head["session"]["start_time"] == "20240129_103000"
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert [line["step_time_ms"] for line in lines] == [1000.0 * step for step in range(1, 21)]
    assert [line["TFLOPS_total"] for line in lines] == pytest.approx([2.0 / step for step in range(1, 21)])


def test_the_parts_in_a_row_add_up_to_its_step(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        [
            record(step, tokens=10 * step, breakdown_s={"data": float(step) - 0.5, "forward": 0.5})
            for step in range(1, 11)
        ],
    )
    (row,) = strict_json(only(tmp_path, "perf_summary_*.json"))["iteration_logs"]
    assert (row["step_time_ms"], row["breakdown_ms"]) == (5500.0, {"data": 5000.0, "forward": 500.0})
    assert (row["tokens"], row["tokens_per_sec"]) == (55, 10.0)
    assert json_lines(only(tmp_path, "perf_steps_*.jsonl"))[10]["breakdown_ms"] == {"data": 9500.0, "forward": 500.0}


def test_the_summary_has_every_field_of_the_example(tmp_path: Path) -> None:
    write_run(tmp_path, [record(step, world_size=2) for step in range(1, 21)], world_size=2)
    summary = strict_json(only(tmp_path, "perf_summary_20240129_103000.json"))
    assert list(summary) == ["session_info", "final_statistics", "iteration_logs"]
    assert summary["session_info"] == {
        "start_time": "20240129_103000",
        "end_time": "2024-01-29T10:30:20",
        "total_iterations": 20,
    }
    statistics = summary["final_statistics"]  # 40 TFLOP, 200 tokens, 40 samples in 210 s on two ranks
    assert statistics["avg_tflops_per_gpu"] == pytest.approx(40 / 210 / 2)
    assert statistics["max_tflops_per_gpu"] == 1.0
    assert statistics["min_tflops_per_gpu"] == 0.05
    assert statistics["avg_throughput_tokens"] == pytest.approx(200 / 210)
    assert statistics["peak_memory_gb"] == 2.0
    assert statistics["avg_mfu"] == pytest.approx(10 / 210)
    assert [entry["iteration"] for entry in summary["iteration_logs"]] == [10, 20]
    for entry in summary["iteration_logs"]:
        assert {name: type(entry[name]) for name in STEP_FIELDS} == STEP_FIELDS


def test_the_end_of_a_run_that_is_no_multiple_of_the_interval_is_shown_too(tmp_path: Path) -> None:
    write_run(tmp_path, [record(step) for step in range(1, 13)])
    assert [row["iteration"] for row in strict_json(only(tmp_path, "perf_summary_*.json"))["iteration_logs"]] == [
        10,
        12,
    ]
    assert len(only(tmp_path, "perf_metrics_*.log").read_text().splitlines()) == 7
    assert len(json_lines(only(tmp_path, "perf_steps_*.jsonl"))) == 13


def test_pandas_reads_the_summary(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the documented script needs pandas")
    write_run(tmp_path, [record(step, step_time_s=2.0) for step in range(1, 31)])
    names: dict[str, Any] = {"pattern": str(tmp_path / "perf_summary_*.json")}
    exec(SCRIPT, names)
    assert (names["x"], names["y"]) == ([10, 20, 30], [1.0, 1.0, 1.0])
    assert names["average"] == "Average TFLOPS: 1.00"
    assert names["peak"] == "Peak TFLOPS: 1.00"
    assert names["throughput"] == "Throughput: 5 tokens/s"


def test_pandas_reads_a_summary_of_which_no_rate_is_known(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the documented script needs pandas")
    write_run(tmp_path, [record(step, step_time_s=None) for step in range(1, 31)])
    names: dict[str, Any] = {"pattern": str(tmp_path / "perf_summary_*.json")}
    exec(SCRIPT, names)
    assert names["average"] == "Average TFLOPS: nan"


def test_a_profiled_step_is_in_no_mean_and_marked_as_such(tmp_path: Path) -> None:
    steps = [record(step, step_time_s=1.0) for step in range(1, 11)]
    steps[4] = record(5, step_time_s=100.0, profiled=True)
    write_run(tmp_path, steps)
    summary = strict_json(only(tmp_path, "perf_summary_*.json"))
    assert summary["final_statistics"]["avg_tflops_per_gpu"] == 2.0
    assert summary["final_statistics"]["profiled_iterations"] == 1
    assert summary["iteration_logs"][0]["step_time_ms"] == 1000.0
    line = json_lines(only(tmp_path, "perf_steps_*.jsonl"))[5]
    assert (line["profiled"], line["step_time_ms"]) == (True, 100_000.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_valid_json_and_still_told(tmp_path: Path, loss: float) -> None:
    write_run(tmp_path, [record(10, loss=loss, grad_norm=1.0, epoch=0)], training_log=tmp_path / "training_log.json")
    line = json_lines(only(tmp_path, "perf_steps_*.jsonl"))[1]
    assert line["loss"] is None
    assert line["not_finite"] == {"loss": str(loss)}
    assert strict_json(only(tmp_path, "perf_summary_*.json"))["iteration_logs"][0]["loss"] is None
    assert strict_json(tmp_path / "training_log.json")["step_logs"][0]["loss"] is None


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    odd = record(10, tokens=np.int64(7), loss=np.float32(0.5), grad_norm=np.float64("nan"), epoch=np.int32(1))
    write_run(tmp_path, [odd], training_log=tmp_path / "training_log.json")
    line = json_lines(only(tmp_path, "perf_steps_*.jsonl"))[1]
    assert (line["tokens"], line["loss"], line["grad_norm"], line["epoch"]) == (7, 0.5, None, 1)
    assert strict_json(only(tmp_path, "perf_summary_*.json"))["final_statistics"]["total_tokens"] == 7
    assert strict_json(tmp_path / "training_log.json")["step_logs"][0]["loss"] == 0.5


@pytest.mark.parametrize(
    ("chosen", "patterns"),
    [
        ("text", {"perf_metrics_*.log", "perf_realtime.log"}),
        ("json", {"perf_steps_*.jsonl", "perf_summary_*.json"}),
        ("both", {"perf_metrics_*.log", "perf_realtime.log", "perf_steps_*.jsonl", "perf_summary_*.json"}),
    ],
)
def test_the_format_chooses_the_files(tmp_path: Path, chosen: str, patterns: set[str]) -> None:
    write_run(tmp_path, [record(10)], perf_log_format=chosen)
    assert {re.sub(r"\d{8}_\d{6}", "*", path.name) for path in tmp_path.iterdir()} == patterns


def test_two_runs_in_the_same_second_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = open_sinks(tmp_path), open_sinks(tmp_path)
    first.write(record(10))
    second.write(record(20))
    first.close()
    second.close()
    summaries = [strict_json(path) for path in sorted(tmp_path.glob("perf_summary_*.json"))]
    assert sorted(entry["iteration"] for summary in summaries for entry in summary["iteration_logs"]) == [10, 20]
    assert len(list(tmp_path.glob("perf_metrics_*.log"))) == len(list(tmp_path.glob("perf_steps_*.jsonl"))) == 2


def test_the_realtime_log_begins_again_before_it_gets_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler_wrapper.monitor.logs.REALTIME_BYTES", 4000)
    write_run(tmp_path, [record(step) for step in range(1, 201)], interval=1)
    text = (tmp_path / "perf_realtime.log").read_text()
    assert len(text) <= 4000
    assert text.startswith(EXAMPLE[:240])
    rows = [int(line.split()[2]) for line in text.splitlines()[5:]]
    assert rows == list(range(rows[0], 201))
    assert len(rows) >= 20
    assert len(only(tmp_path, "perf_metrics_*.log").read_text().splitlines()) == 205


def test_only_the_newest_files_of_each_kind_stay(tmp_path: Path) -> None:
    for day in range(10, 15):
        for name in ("perf_metrics_{}.log", "perf_steps_{}.jsonl", "perf_summary_{}.json"):
            (tmp_path / name.format(f"202301{day}_000000")).write_text("{}\n")
    (tmp_path / "notes.log").write_text("the user's")
    write_run(tmp_path, [record(10)], perf_max_log_files=3)
    for pattern in ("perf_metrics_*.log", "perf_steps_*.jsonl", "perf_summary_*.json"):
        stamps = sorted(path.name.split("_", 2)[2].split(".")[0] for path in tmp_path.glob(pattern))
        assert stamps == ["20230113_000000", "20230114_000000", "20240129_103000"]
    assert (tmp_path / "notes.log").exists()
    assert (tmp_path / "perf_realtime.log").exists()


def test_without_a_limit_all_files_stay(tmp_path: Path) -> None:
    for day in range(10, 31):
        (tmp_path / f"perf_metrics_202301{day}_000000.log").write_text("")
    write_run(tmp_path, [record(10)], perf_max_log_files=0)
    assert len(list(tmp_path.glob("perf_metrics_*.log"))) == 22


def test_the_files_of_a_run_that_goes_on_are_not_removed(tmp_path: Path) -> None:
    going_on = open_sinks(tmp_path)
    going_on.write(record(10))
    for _ in range(3):
        write_run(tmp_path, [record(10)], perf_max_log_files=1)
    assert (tmp_path / "perf_steps_20240129_103000.jsonl").exists()
    going_on.close()
    assert (tmp_path / "perf_summary_20240129_103000.json").exists()


def test_the_training_log_is_whole_after_each_row_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    sinks = open_sinks(tmp_path, training_log=path)
    for step in range(1, 26):
        sinks.write(record(step, epoch=step // 10, loss=float(step), grad_norm=0.5, learning_rate=1e-4))
    sinks.close()
    log = strict_json(path)
    assert list(log) == ["step_logs", "epoch_logs", "total_training_time"]
    assert [(entry["step"], entry["epoch"], entry["loss"]) for entry in log["step_logs"]] == [
        (step, step // 10, float(step)) for step in range(1, 26)
    ]
    assert log["step_logs"][3]["step_time"] == 4.0
    assert log["step_logs"][3]["tokens_per_second"] == 2.5
    assert log["step_logs"][3]["mfu"] == 0.125
    assert [(epoch["epoch"], epoch["steps"], epoch["avg_loss"]) for epoch in log["epoch_logs"]] == [
        (0, 9, 5.0),
        (1, 10, 14.5),
        (2, 6, 22.5),
    ]
    assert [(epoch["samples"], epoch["tokens"]) for epoch in log["epoch_logs"]] == [(18, 90), (20, 100), (12, 60)]
    assert log["total_training_time"] == 325.0


def test_a_training_log_of_before_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    path.write_text('{"step_logs": [1]}')
    write_run(tmp_path, [record(10)], training_log=path)
    assert len(strict_json(path)["step_logs"]) == 1
    aside = only(tmp_path, "training_log_*.json")
    assert json.loads(aside.read_text()) == {"step_logs": [1]}


def test_the_console_gets_a_line_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [record(10, loss=2.5), record(20)], perf_log_format="json", perf_console_output=True)
    assert capsys.readouterr().out.splitlines() == [
        "step 10  10000.0 ms  1 tokens/s  0.2 samples/s  0.20 TFLOPS/GPU  MFU 5.0 %  1.00 GB  loss 2.5",
        "step 20  20000.0 ms  0 tokens/s  0.1 samples/s  0.10 TFLOPS/GPU  MFU 2.5 %  1.00 GB",
    ]
