"""The memory text, and writing all reports of a rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.reports.memory_text import average_slope_mib, memory_usage_text
from profiler_wrapper.reports.plot_rows import layer_bars
from profiler_wrapper.reports.result_json import from_dict
from profiler_wrapper.reports.write import REPORTS, write_reports
from sample_results import llama

GOLDEN = Path(__file__).parents[1] / "golden"

FILES = [
    "cogvideo_cuda_time_plot.png",
    "cogvideo_memory_usage.txt",
    "cogvideo_memory_usage_line_chart.png",
    "cogvideo_rank_3.log",
    "result.json",
]


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
    assert "on a CPU only what was allocated while profiling counts" in text


def test_says_why_there_is_none() -> None:
    reason = "memory is not available, because profile_memory was off"
    text = memory_usage_text(llama(1, memory=False, warnings=("else", reason)))
    assert "average_slope: not available, because profile_memory was off\n" in text


def test_all_reports_are_written(tmp_path: Path) -> None:
    written = write_reports(llama(2), tmp_path / "run" / "rank3", prefix="cogvideo", rank=3)
    assert written.failures == []
    assert sorted(path.name for path in written.paths) == FILES
    assert sorted(path.name for path in (tmp_path / "run" / "rank3").iterdir()) == FILES
    data = json.loads((tmp_path / "run" / "rank3" / "result.json").read_text(encoding="utf-8"))
    assert from_dict(data).layers == llama(2).layers


def test_only_the_named_ones_and_the_log_elsewhere(tmp_path: Path) -> None:
    files = {"log", "result", "trace"}
    written = write_reports(llama(1), tmp_path / "a", prefix="p", rank=0, files=files, log_directory=tmp_path / "logs")
    assert written.paths == [tmp_path / "a" / "result.json", tmp_path / "logs" / "p_rank_0.log"]


def test_a_report_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(analysis: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise MemoryError("no room")

    monkeypatch.setattr("profiler_wrapper.reports.plots.draw_time", broken)
    written = write_reports(llama(2), tmp_path, prefix="cogvideo", rank=3)
    assert [(failure.report, str(failure.error)) for failure in written.failures] == [("time_plot", "no room")]
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[1:]


def test_a_directory_that_cannot_be_made_fails_each_report(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    written = write_reports(llama(1), tmp_path / "file", prefix="p", rank=0)
    assert written.paths == []
    assert {failure.report for failure in written.failures} == set(REPORTS)


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("old")
    write_reports(llama(1), tmp_path, prefix="p", rank=0, files=["result"])
    assert json.loads((tmp_path / "result.json").read_text())["schema_version"] == 1


@pytest.mark.parametrize("prefix", ["", "../x", "a/b", "/tmp/x"])
def test_a_prefix_is_no_path(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse):
        write_reports(llama(1), tmp_path, prefix=prefix, rank=0)
