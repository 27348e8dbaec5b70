"""The page that `ProfilerWrapper` writes: where, by which rank, and that its failure takes nothing with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import models
from models import Case
from page_files import page_data, trace_href
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.errors import ProfilerWrapperWarning
from profiler_wrapper.run import files
from profiler_wrapper.tables.timeline_columns import NO_TRACE
from profiling import directory_of

pytestmark = pytest.mark.full


def profiled(case: Case, output_dir: Path, *, train: int = 6, **options: Any) -> ProfilerWrapper:
    options = {"files": ("trace", "result", "report"), "enable_print_summary": False} | options
    with ProfilerWrapper(case.model, output_dir=output_dir, **options) as prof:
        models.train(case, steps=train)
    return prof


def pages(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("report.html"))


def test_the_first_windows_page_is_the_runs_and_a_later_one_lies_beside_its_files(case: Case, tmp_path: Path) -> None:
    prof = profiled(case, tmp_path, train=8, run_name="job", steps="2-3,6")
    assert pages(tmp_path / "job") == ["rank0/steps_6-6/report.html", "report.html"]
    first, later = tmp_path / "job" / "report.html", directory_of(prof) / "steps_6-6" / "report.html"
    assert trace_href(first) == "rank0/profile_trace.json"
    assert trace_href(later) == "profile_trace.json"
    assert page_data(first)["run"]["timed_steps"] == [2, 3]
    assert page_data(later)["run"]["timed_steps"] == [6]
    for page in (first, later):
        href = trace_href(page)
        assert href is not None
        assert (page.parent / href).is_file()


def test_without_a_trace_there_is_no_link(case: Case, tmp_path: Path) -> None:
    profiled(case, tmp_path, run_name="job", files=("report",))
    assert trace_href(tmp_path / "job" / "report.html") is None


def test_a_run_that_keeps_no_trace_has_a_timeline(case: Case, tmp_path: Path) -> None:
    prof = profiled(case, tmp_path, run_name="job", trace=False, files="auto")
    made = page_data(tmp_path / "job" / "report.html")["views"]["timeline"]
    assert [step["number"] for step in made["steps"]] == page_data(tmp_path / "job" / "report.html")["run"][
        "timed_steps"
    ]
    assert not list((tmp_path / "job").rglob("*trace*"))
    assert prof.result is not None
    assert prof.result.timeline == NO_TRACE  # it is in the page alone


def test_a_page_made_beside_the_training_has_a_timeline(case: Case, tmp_path: Path) -> None:
    profiled(case, tmp_path, train=8, run_name="job", steps="2-3,6")
    for page in pages(tmp_path / "job"):
        assert page_data(tmp_path / "job" / page)["views"]["timeline"]["why"] is None


def test_a_gzipped_trace_is_linked_by_its_name(case: Case, tmp_path: Path) -> None:
    profiled(case, tmp_path, run_name="job", trace="json.gz")
    assert trace_href(tmp_path / "job" / "report.html") == "rank0/profile_trace.json.gz"


@pytest.mark.parametrize(("environment", "written"), [("", []), ("ranks=1-2", ["report.html"]), ("ranks=0-1", [])])
def test_one_rank_writes_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, written: list[str]
) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", environment)
    prof = profiled(case, tmp_path, run_name="job", rank=1)
    assert (directory_of(prof) / "result.json").is_file()
    assert pages(tmp_path / "job") == written


def test_a_restarted_job_leaves_the_page_of_the_first_attempt(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "report.html").write_text("of the first attempt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    profiled(case, tmp_path, run_name="job")
    assert pages(tmp_path) == ["job/attempt2/report.html", "job/report.html"]
    assert (tmp_path / "job" / "report.html").read_text() == "of the first attempt"


def test_a_page_that_fails_is_one_warning(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no page today")

    monkeypatch.setattr(files, "write_page", fail)
    with pytest.warns(ProfilerWrapperWarning) as told:
        prof = profiled(case, tmp_path, run_name="job")
    assert [str(one.message) for one in told if "page" in str(one.message)] == [
        "the page could not be written: RuntimeError: no page today"
    ]
    assert json.loads((directory_of(prof) / "run.json").read_bytes())["complete"] is False
    assert (directory_of(prof) / "result.json").is_file()
    assert pages(tmp_path) == []
    assert [path.name for path in (tmp_path / "job").glob(".*")] == [".launch.json"]
