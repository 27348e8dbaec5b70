"""The files that a result is written to: their names, and what writes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.recording.atomic import json_bytes
from profiler_wrapper.reports import plots
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.memory_text import memory_usage_text
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.reports.tables import console_table


class Report(NamedTuple):
    """One kind of file. In its name `<prefix>` and `<r>` stand for the prefix and the rank."""

    file_name: str
    write: Callable[[Analysis, Path], None]


def _write_json(analysis: Analysis, path: Path) -> None:
    path.write_bytes(json_bytes(to_dict(analysis)))


def _write_log(analysis: Analysis, path: Path) -> None:
    _write_text(f"{console_table(analysis)}\n\n{full_table(analysis)}\n", path)


def _write_memory_text(analysis: Analysis, path: Path) -> None:
    _write_text(memory_usage_text(analysis), path)


def _write_text(text: str, path: Path) -> None:
    """UTF-8 on every system; what UTF-8 cannot hold is escaped."""
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


# By the name that `files=` knows them by, the most important first.
REPORTS: Mapping[str, Report] = {
    "result": Report("result.json", _write_json),
    "log": Report("<prefix>_rank_<r>.log", _write_log),
    "memory_text": Report("<prefix>_memory_usage.txt", _write_memory_text),
    "time_plot": Report("<prefix>_cuda_time_plot.png", plots.draw_time),
    "memory_plot": Report("<prefix>_memory_usage_line_chart.png", plots.draw_memory),
}
