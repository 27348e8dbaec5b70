"""The registry of report files: each writes a whole file under the name that users know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler_wrapper.options import FILES
from profiler_wrapper.reports.result_json import from_dict
from profiler_wrapper.reports.write import REPORTS
from sample_results import llama


def test_names_are_those_users_know() -> None:
    assert {name: report.file_name for name, report in REPORTS.items()} == {
        "result": "result.json",
        "log": "<prefix>_rank_<r>.log",
        "memory_text": "<prefix>_memory_usage.txt",
        "time_plot": "<prefix>_cuda_time_plot.png",
        "memory_plot": "<prefix>_memory_usage_line_chart.png",
    }
    assert set(FILES) == {*REPORTS, "trace", "full_trace"}


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_writes_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / REPORTS[name].file_name.strip("<>")
    REPORTS[name].write(llama(2), path)
    begins = {"result": b"{", "time_plot": b"\x89PNG", "memory_plot": b"\x89PNG", "memory_text": b"device: "}
    assert path.read_bytes().startswith(begins.get(name, b"LlamaForCausalLM on "))


def test_the_result_reads_back(tmp_path: Path) -> None:
    REPORTS["result"].write(llama(2), tmp_path / "result.json")
    assert from_dict(json.loads((tmp_path / "result.json").read_bytes())).layers == llama(2).layers
