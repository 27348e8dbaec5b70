"""Profiles for tests: small, quiet, in a directory of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import profiler_wrapper as pw
from models import Case

QUICK = ("trace", "full_trace", "result")  # no plots: they take most of the time


def profiler(case: Case | None, output_dir: Path, **options: Any) -> pw.ProfilerWrapper:
    """A wrapper around the case's model, or around none, that prints and draws nothing and starts no process."""
    quiet = {"files": QUICK, "enable_print_summary": False, "background": False}
    options = {"output_dir": output_dir, **quiet, **options}
    return pw.ProfilerWrapper(case.model if case is not None else None, **options)


def result_of(prof: pw.ProfilerWrapper) -> pw.ProfileResult:
    """Its result, which there has to be."""
    assert prof.result is not None
    return prof.result


def directory_of(prof: pw.ProfilerWrapper) -> Path:
    """Where its files are, which there have to be."""
    assert prof.directory is not None
    return prof.directory


def read_run(directory: Path) -> dict[str, Any]:
    """What run.json in a rank's directory says."""
    run: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return run


def rows_with_time(result: pw.ProfileResult, phase: str, kind: str = "block") -> list[str]:
    """The layers of that kind that took time in that phase."""
    return [row.layer for row in result.layers if row.phase == phase and row.kind == kind and row.time_ns]


def event_names(path: Path, category: str) -> list[str]:
    """Names of the events of one category, in file order."""
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == category]


def blocks_with_time(result: pw.ProfileResult) -> set[str]:
    """The blocks that took time in any phase."""
    return {row.layer for row in result.layers if row.kind == "block" and row.time_ns}


def files_below(directory: Path) -> list[str]:
    """The names of all files in it and its folders, the hidden ones too."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
