"""The files that a result is written to: their names, and what writes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from profiler_wrapper.reports import plots, roofline, sunburst
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.memory import memory_log, memory_usage_text
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.plots import draw_categories
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.atomic import json_bytes
from profiler_wrapper.trace.run_directory import PAGE_FILE, RESULT_FILE


class ReportFile(NamedTuple):
    """One file. In its name `<prefix>` and `<r>` stand for the prefix and the rank."""

    name: str
    write: Callable[[Analysis, Path], object]


class Report(NamedTuple):
    """What one name in `files=` stands for."""

    files: tuple[ReportFile, ...]
    applies: Callable[[Analysis], bool] = lambda _: True  # whether the analysis has what this is about
    option: str | None = None  # of ProfilerWrapper: where it is off, `files="auto"` leaves this out


def _text(make: Callable[[Analysis], str]) -> Callable[[Analysis, Path], object]:
    """Writes UTF-8 on every system; what UTF-8 cannot hold is escaped."""
    return lambda analysis, path: path.write_bytes(make(analysis).encode("utf-8", "backslashreplace"))


def _log(analysis: Analysis) -> str:
    return f"{console_table(analysis)}\n\n{full_table(analysis)}\n"


def _write_json(analysis: Analysis, path: Path) -> None:
    path.write_bytes(json_bytes(to_dict(analysis)))


def _knows_owners(analysis: Analysis) -> bool:
    return analysis.memory_use is not None


def _sunburst(page: str) -> ReportFile:
    name = "summary_sunburst" if page == "summary" else f"{page}_memory_sunburst"
    return ReportFile(f"memory/{name}.html", partial(sunburst.write_page, page=page))


_IF_TIME, _IF_MEMORY = "enabled_record_cuda_average_time", "enable_record_cuda_mm"
# By the name that `files=` knows them by, the most important first.
REPORTS: Mapping[str, Report] = {
    "result": Report((ReportFile(RESULT_FILE, _write_json),)),
    "report": Report((ReportFile(PAGE_FILE, write_page),)),
    "log": Report((ReportFile("<prefix>_rank_<r>.log", _text(_log)),), option="enable_print_summary"),
    "memory_text": Report((ReportFile("<prefix>_memory_usage.txt", _text(memory_usage_text)),), option=_IF_MEMORY),
    "time_plot": Report((ReportFile("<prefix>_cuda_time_plot.png", plots.draw_time),), option=_IF_TIME),
    "roofline_plot": Report((ReportFile("<prefix>_roofline_plot.png", roofline.draw_roofline),), roofline.applies),
    "memory_plot": Report((ReportFile("<prefix>_memory_usage_line_chart.png", plots.draw_memory),), option=_IF_MEMORY),
    "categories_plot": Report(
        (ReportFile("<prefix>_memory_categories_plot.png", draw_categories),), _knows_owners, _IF_MEMORY
    ),
    "memory_log": Report((ReportFile("memory/memory.log", _text(memory_log)),), _knows_owners, _IF_MEMORY),
    "sunbursts": Report(tuple(map(_sunburst, sunburst.PAGES)), _knows_owners, _IF_MEMORY),
}
