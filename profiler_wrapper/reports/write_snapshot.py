"""The files that a memory snapshot is told in: their names, and what writes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from profiler_wrapper.analysis.allocator_model import AllocatorReport
from profiler_wrapper.recording.atomic import json_bytes
from profiler_wrapper.reports.snapshot_json import to_dict
from profiler_wrapper.reports.snapshot_plot import draw_snapshot
from profiler_wrapper.reports.snapshot_text import full_text


def snapshot_json(report: AllocatorReport) -> str:
    """As one text, without a newline at its end."""
    return json_bytes(to_dict(report)).decode().rstrip("\n")


def _write_text(report: AllocatorReport, path: Path) -> None:
    path.write_bytes(full_text(report).encode("utf-8", "backslashreplace"))


def _write_json(report: AllocatorReport, path: Path) -> None:
    path.write_bytes(json_bytes(to_dict(report)))


# By how the name of each ends, behind that of the snapshot.
SNAPSHOT_REPORTS: Mapping[str, Callable[[AllocatorReport, Path], None]] = {
    "_snapshot.txt": _write_text,
    "_snapshot.json": _write_json,
    "_snapshot.png": draw_snapshot,
}
