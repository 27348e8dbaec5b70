"""Writes the reports of one rank; one that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.atomic import json_bytes, replacing
from profiler_wrapper.reports import plots
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.memory_text import memory_usage_text
from profiler_wrapper.reports.result_json import to_dict

REPORTS = ("result", "log", "time_plot", "memory_plot", "memory_text")

_Draw = Callable[[Path], None]


class Failure(NamedTuple):
    """A report that could not be written, and why."""

    report: str
    path: Path
    error: Exception


class Written(NamedTuple):
    """What `write_reports` did."""

    paths: list[Path]
    failures: list[Failure]


def write_reports(
    analysis: Analysis,
    directory: Path,
    *,
    prefix: str,
    rank: int,
    files: Collection[str] = REPORTS,
    log_directory: Path | None = None,
) -> Written:
    """Writes each report that `files` names (of `REPORTS`; other names are not ours and are passed over).

    Directories are made. A file appears whole or not at all, in the place of an older one. The log
    goes to `log_directory` where that is given.

    Raises:
        WrongUse: `prefix` is not the start of a file name.
    """
    if not prefix or Path(prefix).name != prefix:
        raise WrongUse(f"prefix={prefix!r} is not the start of a file name. Give a name without slashes.")
    written = Written([], [])
    for report, path, draw in _reports(analysis, directory, log_directory or directory, prefix, rank):
        if report not in files:
            continue
        try:
            with replacing(path) as beside:
                draw(beside)
        except Exception as error:  # whatever it is, the other reports and the training go on
            written.failures.append(Failure(report, path, error))
        else:
            written.paths.append(path)
    return written


def _reports(
    analysis: Analysis, directory: Path, log_directory: Path, prefix: str, rank: int
) -> list[tuple[str, Path, _Draw]]:
    """Name, place and writer of every report, the most important first."""

    def text(make: Callable[[Analysis], str]) -> _Draw:
        return lambda path: _write_text(path, make(analysis))

    return [
        ("result", directory / "result.json", lambda path: _write_json(path, analysis)),
        ("log", log_directory / f"{prefix}_rank_{rank}.log", text(full_table)),
        ("memory_text", directory / f"{prefix}_memory_usage.txt", text(memory_usage_text)),
        ("time_plot", directory / f"{prefix}_cuda_time_plot.png", lambda path: plots.draw_time(analysis, path)),
        (
            "memory_plot",
            directory / f"{prefix}_memory_usage_line_chart.png",
            lambda path: plots.draw_memory(analysis, path),
        ),
    ]


def _write_json(path: Path, analysis: Analysis) -> None:
    path.write_bytes(json_bytes(to_dict(analysis)))


def _write_text(path: Path, text: str) -> None:
    """UTF-8 on every system; what UTF-8 cannot hold is escaped."""
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
