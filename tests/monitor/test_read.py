"""`profiler-wrapper monitor`: what it reads, says and draws."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monitor_runs import EXAMPLE, GB, only, open_sinks, record, write_run
from profiler_wrapper.__main__ import main
from profiler_wrapper.monitor import reports as monitor_plots
from profiler_wrapper.monitor.read import PARTS, BrokenLog, MonitorRun, find_log, monitor_run, read_log
from profiler_wrapper.monitor.reports import draw_monitor, groups, monitor_text
from profiler_wrapper.monitor.steps import IN_PROCESS, ON_DEVICE
from profiler_wrapper.reports import figures
from profiler_wrapper.timer.steps import PARTS as LIVE_PARTS

# As FlagScale's monitor writes it; NaN is what Python's json makes of one.
FOREIGN_SUMMARY = """{
  "session_info": {"start_time": "20240129_103000", "end_time": "2024-01-29T11:30:00", "total_iterations": 30},
  "final_statistics": {"avg_tflops_per_gpu": 127.5, "max_tflops_per_gpu": 135.2},
  "iteration_logs": [
    {"iteration": 10, "timestamp": "2024-01-29T10:30:15", "TFLOPS_per_GPU": 125.34, "TFLOPS_total": 1002.72,
     "samples_per_sec": 512.0, "tokens_per_sec": 1048576, "step_time_ms": 235.5, "memory_GB": 42.5, "other": [1]},
    {"iteration": 20, "timestamp": "2024-01-29T10:30:30", "TFLOPS_per_GPU": NaN, "step_time_ms": 230.2}
  ]
}"""


def run_of(directory: Path, *records: Any, interval: int = 10) -> MonitorRun:
    write_run(directory, list(records), interval=interval)
    return monitor_run(read_log(only(directory, "perf_steps_*.jsonl")))


def test_a_text_log_of_anybody_is_read(tmp_path: Path) -> None:
    path = tmp_path / "perf_metrics_20240129_103000.log"
    path.write_text(
        EXAMPLE + "2024-01-29 10:30:45  30       -            -          -            -            -          -\n"
    )
    log = read_log(path)
    assert log.session == {"start_time": "2024-01-29 10:30:00"}
    assert log.columns["iteration"].tolist() == [10, 20, 30]
    assert log.columns["TFLOPS_per_GPU"].tolist()[:2] == [125.34, 128.12]
    assert log.columns["TFLOPS_total"].tolist()[:2] == [1002.72, 1024.96]
    assert log.columns["samples_per_sec"].tolist()[:2] == [512.0, 520.0]
    assert log.columns["tokens_per_sec"].tolist()[:2] == [1048576, 1064960]
    assert log.columns["step_time_ms"].tolist()[:2] == [235.5, 230.2]
    assert log.columns["memory_GB"].tolist()[:2] == [42.5, 42.75]
    assert math.isnan(log.columns["step_time_ms"][2])
    assert (log.first_time, log.last_time) == ("2024-01-29 10:30:15", "2024-01-29 10:30:45")


def test_a_summary_of_anybody_is_read(tmp_path: Path) -> None:
    path = tmp_path / "perf_summary_20240129_103000.json"
    path.write_text(FOREIGN_SUMMARY)
    run = monitor_run(read_log(path))
    assert (run.first_step, run.last_step) == (10, 20)
    assert run.spreads["TFLOPS_per_GPU"]["mean"] == 125.34
    assert run.spreads["step_time_ms"]["max"] == 235.5
    assert "mfu" not in run.spreads


def test_lines_that_are_torn_are_left_out_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, [record(step) for step in range(1, 5)])
    path = only(tmp_path, "perf_steps_*.jsonl")
    head, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + lines[0] + b"\0" * 50 + b"\n\xff\xfe\n" + lines[1] + lines[2][:40])
    log = read_log(path)
    assert log.columns["iteration"].tolist() == [1, 2]
    assert log.warnings == ("3 of 5 lines could not be read; they are left out",)


def test_means_are_all_work_over_all_time_and_profiled_steps_are_left_out(tmp_path: Path) -> None:
    steps = [record(1, step_time_s=1.0), record(2, step_time_s=3.0), record(3, step_time_s=50.0, profiled=True)]
    run = run_of(tmp_path, *steps)
    assert run.spreads["TFLOPS_total"]["mean"] == pytest.approx(4 / 4)
    assert run.spreads["tokens_per_sec"]["mean"] == pytest.approx(20 / 4)
    assert run.spreads["mfu"]["mean"] == pytest.approx(1 / 4)
    assert run.spreads["step_time_ms"]["mean"] == 2000.0
    times = run.spreads["step_time_ms"]
    assert [times[name] for name in ("p5", "p50", "p95", "p99")] == [1000.0, 1000.0, 3000.0, 3000.0]
    assert run.profiled == 1


def test_rows_weigh_as_many_steps_as_they_have(tmp_path: Path) -> None:
    steps = [record(step, step_time_s=1.0 if step <= 10 else 4.0) for step in range(1, 16)]
    write_run(tmp_path, steps)
    run = monitor_run(read_log(only(tmp_path, "perf_summary_*.json")))
    assert run.spreads["tokens_per_sec"]["mean"] == pytest.approx(150 / (10 + 20))
    assert run.spreads["step_time_ms"]["mean"] == pytest.approx(1000 * 30 / 15)


def test_a_slow_stretch_and_memory_that_grows_are_found(tmp_path: Path) -> None:
    steps = [
        record(step, step_time_s=0.2 if 61 <= step <= 90 else 0.1, memory_bytes=(100 + step) * GB // 10)
        for step in range(1, 151)
    ]
    run = run_of(tmp_path, *steps)
    (stretch,) = run.slow
    assert (stretch.first, stretch.last) == (61, 90)
    assert stretch.factor == pytest.approx(2.0)
    assert run.memory_growth_gb == pytest.approx(14.7, abs=0.1)
    text = monitor_text(run)
    assert "slow: steps 61 to 90 took 2.00 times the median" in text
    assert "memory grew all the way, by 14.70 GB" in text


@pytest.mark.parametrize(
    "memory_gb",
    [
        lambda step: 12 if step // 20 % 2 else 10,  # up and down
        lambda step: 12 if step > 5 else 10,  # an optimizer's state
        lambda step: 10 + step / 1000,  # next to nothing
    ],
)
def test_not_all_memory_that_is_higher_at_the_end_grew_throughout(
    tmp_path: Path, memory_gb: Callable[[int], float]
) -> None:
    steps = [record(step, memory_bytes=int(memory_gb(step) * GB)) for step in range(1, 120)]
    run = run_of(tmp_path, *steps)
    assert run.log.columns["memory_GB"][-1] > run.log.columns["memory_GB"][0]
    assert run.memory_growth_gb is None


def test_a_steady_run_has_no_remarks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    steps = [
        record(step, step_time_s=0.1 * float(rng.lognormal(0, 0.03)), memory_bytes=GB + int(rng.integers(1 << 20)),
               model_time_at_peak_s=0.04)
        for step in range(1, 301)
    ]  # fmt: skip
    run = run_of(tmp_path, *steps)
    assert (run.slow, run.memory_growth_gb) == ((), None)
    assert monitor_text(run).splitlines()[-2].startswith("peak memory")


def test_the_text_says_what_is_odd_and_fits_the_terminal(tmp_path: Path) -> None:
    steps = [record(step, step_time_s=0.1, model_time_at_peak_s=0.2, loss=1.0) for step in range(1, 31)]
    steps[0] = record(1, step_time_s=30.0)
    steps[6] = record(7, step_time_s=0.1, loss=math.nan)
    steps[8] = record(9, step_time_s=0.1, loss=math.inf)
    text = monitor_text(run_of(tmp_path, *steps))
    assert "slowest: step 1 took 300.0 times the median" in text
    assert "loss was NaN or infinite in 2 steps, first in step 7" in text
    assert max(map(len, text.splitlines())) <= 100


def test_an_mfu_over_one_is_told_as_it_is_with_its_likely_causes(tmp_path: Path) -> None:
    steps = [record(step, step_time_s=0.1, model_time_at_peak_s=0.2) for step in range(1, 31)]
    run = run_of(tmp_path, *steps)
    assert run.spreads["mfu"]["mean"] == pytest.approx(2.0)
    assert "MFU is over 100 %" in monitor_text(run)


def test_of_a_directory_the_newest_run_is_shown(tmp_path: Path) -> None:
    for age, name in ((0, "new"), (100, "old")):
        directory = tmp_path / "runs" / name / "perf_monitor"
        write_run(directory, [record(1)])
        for path in directory.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    assert find_log(tmp_path).parent.parent.name == "new"
    assert find_log(tmp_path).suffix == ".jsonl"


def test_a_run_that_has_not_begun_does_not_hide_the_one_before(tmp_path: Path) -> None:
    write_run(tmp_path, [record(1)])
    (tmp_path / "perf_steps_20300101_000000.jsonl").write_text('{"session": {}}\n')
    assert find_log(tmp_path).name == "perf_steps_20240129_103000.jsonl"


def test_a_run_that_goes_on_is_shown_as_far_as_it_is_and_given_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = open_sinks(tmp_path)
    for step in range(1, 6):
        sinks.write(record(step))
    assert main(["monitor", str(tmp_path)]) == 0
    assert "steps 1 to 5" in capsys.readouterr().out
    assert not list(tmp_path.glob("perf_summary_*"))
    sinks.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ""),
        ("a.jsonl", '{"session": {}}\n'),
        ("a.jsonl", "\x00\x01\n"),
        ("a.json", "{}"),
        ("a.json", '{"iteration_logs": []}'),
        ("a.json", "[" * 100_000),
        ("a.json", '{"iteration_logs": 3'),
        ("a.log", "nothing of the kind\n"),
        ("a.txt", EXAMPLE),
    ],
)
def test_what_is_no_log_is_said_in_one_line(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BrokenLog, match=name):
        read_log(path)
    assert main(["monitor", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_without_logs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(tmp_path)]) == 1
    assert "no log of a monitor" in capsys.readouterr().err
    assert main(["monitor", str(tmp_path / "missing")]) == 1


def test_json_is_the_same_in_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [record(step, step_time_s=0.5) for step in range(1, 21)])
    assert main(["monitor", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["entries"] == told["last_iteration"] == 20
    assert told["session"]["start_time"] == "20240129_103000"
    assert told["statistics"]["step_time_ms"]["p99"] == 500.0
    assert told["statistics"]["mfu"]["mean"] == 1.0


def test_pictures_and_texts_are_written_and_only_overwritten_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "logs", [record(step) for step in range(1, 21)])
    out = tmp_path / "out"
    assert main(["monitor", str(tmp_path / "logs"), "-o", f"{out}/"]) == 0
    assert sorted(path.suffix for path in out.iterdir()) == [".png", ".txt"]
    picture = only(out, "*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["monitor", str(tmp_path / "logs"), "-o", str(picture)]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["monitor", str(tmp_path / "logs"), "-o", str(picture), "--force"]) == 0


@pytest.mark.parametrize("count", [1, 2, 1200, 1201, 5000])
def test_a_course_has_every_extreme(count: int) -> None:
    steps, values = np.arange(count, dtype=float), np.random.default_rng(0).normal(size=count)
    values[count // 2] = 99.0
    points = groups(values)
    assert len(groups(steps)) == len(points) <= 1200
    assert np.nanmin(points) == values.min()
    assert np.nanmax(points) == 99.0
    assert np.isfinite(points).sum() == count


def test_a_course_has_gaps_where_nothing_is_known() -> None:
    values = np.full(5000, np.nan)
    values[4000:] = 1.0
    points = groups(values)
    assert np.isnan(points[:750]).all()
    assert (points[-200:-1] == 1.0).all()


@pytest.mark.parametrize(
    "steps",
    [
        [record(1)],
        [record(1, step_time_s=None, memory_bytes=None, peak_memory_bytes=None, model_flops=None)],
        [record(step, step_time_s=None) for step in (5, 6, 1, 2, 3)],
        [record(step, profiled=True, loss=math.nan) for step in range(1, 4)],
        [record(step, step_time_s=1e-9 * step, model_flops=1.0) for step in range(1, 60)],
    ],
)
def test_whatever_is_known_is_drawn_and_told(tmp_path: Path, steps: list[Any]) -> None:
    run = run_of(tmp_path, *steps)
    draw_monitor(run, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert str(steps[0].step) in monitor_text(run)
    json.dumps(run.to_dict(), allow_nan=False)


def test_pictures_go_from_the_first_step_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    draw_monitor(run_of(tmp_path, *(record(step, loss=1.0) for step in range(5, 26))), tmp_path / "a.png")
    limits = {axes.get_xlim() for axes in drawn[0].axes if axes.lines}
    assert limits == {(5.0, 25.0)}


def test_a_slow_stretch_holds_no_normal_steps_at_its_ends_and_none_that_was_profiled(tmp_path: Path) -> None:
    slow = {*range(62, 75), *range(76, 90)}
    steps = [record(step, step_time_s=0.2 if step in slow else 0.1, profiled=step == 70) for step in range(1, 151)]
    run = run_of(tmp_path, *steps)
    assert [(one.first, one.last, one.slow, one.timed) for one in run.slow] == [(62, 89, 26, 27)]
    assert "slow: 26 of steps 62 to 89 took 2.00 times the median" in monitor_text(run)
    assert "1 step was profiled, and is in no time or rate" in monitor_text(run)


def test_a_slow_first_step_is_no_stretch_with_those_after_it(tmp_path: Path) -> None:
    steps = [record(step, step_time_s=9.0 if step == 0 else 0.1, profiled=step == 1) for step in range(150)]
    run = run_of(tmp_path, *steps)
    assert run.slow == ()
    assert run.slowest_step == 0


def test_the_tails_of_a_few_steps_are_not_told(tmp_path: Path) -> None:
    few = monitor_text(run_of(tmp_path / "few", *(record(step) for step in range(1, 20))))
    many = monitor_text(run_of(tmp_path / "many", *(record(step) for step in range(1, 21))))
    (few_line,) = (line for line in few.splitlines() if line.startswith("step time"))
    (many_line,) = (line for line in many.splitlines() if line.startswith("step time"))
    assert few_line.split()[3:] == ["10000.0", "1000.0", "-", "10000.0", "-", "-", "19000.0"]
    assert many_line.split()[3:] == ["10500.0", "1000.0", "1000.0", "10000.0", "19000.0", "20000.0", "20000.0"]


def broken_down(step: int, **more: Any) -> Any:
    parts = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.0}
    return record(step, step_time_s=0.1, breakdown_s=parts, **more)


def test_the_parts_of_a_step_are_told_and_drawn(tmp_path: Path) -> None:
    steps = [broken_down(step, profiled=step == 3) for step in range(1, 6)]
    steps[4] = record(5, step_time_s=7.0)  # its parts are not known
    run = run_of(tmp_path, *steps)
    assert {name: part["mean_ms"] for name, part in run.breakdown.items()} == pytest.approx(
        {"data": 10, "forward": 30, "backward": 50, "optimizer": 10, "other": 0}
    )
    assert sum(part["share"] for part in run.breakdown.values()) == pytest.approx(1)
    assert run.breakdown["backward"]["share"] == pytest.approx(0.5)
    assert ["backward", "50.000", "50.0"] in [line.split() for line in monitor_text(run).splitlines()]
    assert run.to_dict()["breakdown"]["forward"]["mean_ms"] == pytest.approx(30)
    draw_monitor(run, tmp_path / "a.png")


def test_the_parts_are_those_that_a_monitor_measures() -> None:
    assert PARTS == LIVE_PARTS


def test_without_parts_none_are_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, record(1))
    assert run.breakdown == {}
    assert "part of a step" not in monitor_text(run)


@pytest.mark.parametrize(("count", "most"), [(3, 10), (10, 10), (25, 10)])
def test_the_stacked_parts_add_up_to_the_mean_of_their_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, most: int
) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(monitor_plots, "MOST_POINTS", most)
    steps = [
        record(step, step_time_s=float(step), breakdown_s={"forward": 0.25 * step, "backward": 0.75 * step})
        for step in range(1, count + 1)
    ]
    axes = Figure().subplots()
    run = run_of(tmp_path, *steps)
    monitor_plots._draw_parts(axes, run, run.log.columns["iteration"])
    top = axes.patches[-1].get_data()  # type: ignore[attr-defined]
    bounds = [*range(0, count, math.ceil(count / most)), count]
    expected = [1000 * np.mean(range(first + 1, end + 1)) for first, end in pairwise(bounds)]
    assert top.values.tolist() == pytest.approx(expected)
    assert (np.diff(top.edges) > 0).all()


def labels_of_memory(run: MonitorRun) -> tuple[str, str]:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    monitor_plots._draw_memory(axes, run, run.log.columns["iteration"])
    return axes.get_title(loc="left"), axes.get_legend_handles_labels()[1][0]


def test_memory_is_called_what_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, record(1))
    of_process = replace(run, log=replace(run.log, session={"memory_kind": IN_PROCESS}))
    assert labels_of_memory(of_process) == ("Memory (resident memory of the process)", "now, at most 1")
    on_device = replace(run, log=replace(run.log, session={"memory_kind": ON_DEVICE}))
    assert labels_of_memory(on_device) == ("Memory", "allocated, at most 1")


def test_a_path_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nope", "nope.jsonl"):
        assert main(["monitor", str(tmp_path / name)]) == 1
        assert "No such file or directory" in capsys.readouterr().err


def test_the_training_log_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "training_log.json"
    steps = [record(step, loss=0.5 * step) for step in range(1, 5)]
    write_run(tmp_path / "logs", [*steps, record(5, step_time_s=90.0, profiled=True)], training_log=path)
    run = monitor_run(read_log(path))
    assert run.spreads["step_time_ms"]["mean"] == 2500.0
    assert run.spreads["tokens_per_sec"]["mean"] == pytest.approx(40 / 10)
    assert run.spreads["loss"]["max"] == 2.0
    assert run.profiled == 1
    others = tmp_path / "others" / "training_log.json"
    others.parent.mkdir()
    others.write_text(path.read_text().replace(',"profiled":false', "").replace(',"profiled":true', ""))
    text = monitor_text(monitor_run(read_log(others))).replace("\n  ", " ")
    assert "does not tell which steps were profiled" in text
    assert find_log(tmp_path).suffix == ".jsonl"  # it tells more
    path.rename(tmp_path / "logs" / "training_log.json")
    for other in (tmp_path / "logs").glob("perf_*"):
        other.unlink()
    assert find_log(tmp_path / "logs").name == "training_log.json"


def test_what_can_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"epochs": []}')
    assert main(["monitor", str(path)]) == 1
    told = capsys.readouterr().err
    assert all(name in told for name in ("perf_steps_*.jsonl", "perf_summary_*.json", "training_log.json"))
