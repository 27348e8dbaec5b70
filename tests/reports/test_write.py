"""The registry of report files: each writes a whole file under the name that users know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiler_wrapper.reports.result_json import from_dict
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.run.options import FILES
from sample_memory import llama_memory
from sample_results import llama
from sample_work import worked


def test_names_are_those_users_know() -> None:
    assert {name: [file.name for file in report.files] for name, report in REPORTS.items()} == {
        "result": ["result.json"],
        "report": ["report.html"],
        "log": ["<prefix>_rank_<r>.log"],
        "memory_text": ["<prefix>_memory_usage.txt"],
        "time_plot": ["<prefix>_cuda_time_plot.png"],
        "roofline_plot": ["<prefix>_roofline_plot.png"],
        "memory_plot": ["<prefix>_memory_usage_line_chart.png"],
        "categories_plot": ["<prefix>_memory_categories_plot.png"],
        "memory_log": ["memory/memory.log"],
        "sunbursts": [
            "memory/params_memory_sunburst.html",
            "memory/grads_memory_sunburst.html",
            "memory/os_memory_sunburst.html",
            "memory/activation_memory_sunburst.html",
            "memory/summary_sunburst.html",
        ],
    }
    assert set(FILES) == {*REPORTS, "trace", "full_trace"}


BEGINS = {
    "json": b"{",
    "png": b"\x89PNG",
    "txt": b"device: ",
    "html": b"<!DOCTYPE html>",
    "memory.log": b"# Memory of cuda:0",
    "log": b"LlamaForCausalLM on ",
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_writes_its_files(name: str, tmp_path: Path) -> None:
    analysis = replace(worked(llama(2)), memory_use=llama_memory(2))
    assert REPORTS[name].applies(analysis)
    for file in REPORTS[name].files:
        path = tmp_path / file.name.rpartition("/")[2].replace("<", "").replace(">", "")
        file.write(analysis, path)
        assert path.read_bytes().startswith(BEGINS.get(path.name) or BEGINS[path.suffix[1:]])


def test_without_allocations_nothing_is_written_of_who_holds_memory() -> None:
    applying = {name for name, report in REPORTS.items() if report.applies(llama(2))}
    assert applying == {"result", "report", "log", "memory_text", "time_plot", "memory_plot"}


def test_the_result_reads_back(tmp_path: Path) -> None:
    REPORTS["result"].files[0].write(llama(2), tmp_path / "result.json")
    assert from_dict(json.loads((tmp_path / "result.json").read_bytes())).layers == llama(2).layers
