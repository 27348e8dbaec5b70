"""`profiler-wrapper report`: which page is made of what, where it goes, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from page_files import page_data, trace_href
from profiler_wrapper.__main__ import main
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.tables.timeline_columns import NO_TRACE_BESIDE, OTHER_TRACE
from recordings import Trace, analyse


def trace(own_ns: int = 50_000) -> Trace:
    return Trace().mark(".", 0, 90_000).mark("layers.0", 1000, 80_000).op("aten::mm", 2000, 2000 + own_ns)


def total_us(page: Path) -> float:
    time_us: float = page_data(page)["time"]["total_us"]
    return time_us


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks, which took 10 us and 20 us."""
    for rank in range(2):
        directory = tmp_path / "run" / f"rank{rank}"
        directory.mkdir(parents=True)
        made = trace(10_000 * (rank + 1))
        made.write(directory / "x_trace.json")
        told = to_dict(analyse(made.recording(), run={"rank": rank, "trace": "x_trace.json"}))
        (directory / "result.json").write_text(json.dumps(told))
    return tmp_path / "run"


def test_the_page_of_a_trace_lies_beside_it_and_links_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace().write(tmp_path / "mine.pt.trace.json")
    assert main(["report", str(path)]) == 0
    page = tmp_path / "mine_report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert trace_href(page) == "mine.pt.trace.json"
    assert total_us(page) == 50
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.pt.trace.json", "mine_report.html"]


def test_the_page_of_a_run_is_the_first_ranks_and_lies_above_the_ranks(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    assert total_us(run / "report.html") == 10
    assert trace_href(run / "report.html") == "rank0/x_trace.json"


def test_a_run_is_found_in_the_directory_of_runs(run: Path) -> None:
    assert main(["report", str(run.parent)]) == 0
    assert (run / "report.html").is_file()


def test_a_rank_has_its_own_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--rank", "1", "--format", "json"]) == 0
    page = run / "rank1" / "report.html"
    assert json.loads(capsys.readouterr().out) == {"page": str(page), "trace": str(run / "rank1" / "x_trace.json")}
    assert total_us(page) == 20
    assert trace_href(page) == "x_trace.json"
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("given", ["rank1", "rank1/result.json"])
def test_what_is_one_ranks_gives_its_page(run: Path, given: str) -> None:
    assert main(["report", str(run / given)]) == 0
    assert total_us(run / "rank1" / "report.html") == 20


def test_without_its_trace_a_result_has_no_link(run: Path) -> None:
    (run / "rank0" / "x_trace.json").unlink()
    assert main(["report", str(run)]) == 0
    assert trace_href(run / "report.html") is None


def timeline(page: Path) -> dict[str, Any]:
    head: dict[str, Any] = page_data(page)["views"]["timeline"]
    return head


def test_a_trace_and_a_result_beside_its_trace_have_a_timeline(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    of_run = timeline(run / "report.html")
    assert main(["report", str(run / "rank0" / "x_trace.json")]) == 0
    assert of_run == timeline(run / "rank0" / "x_trace_report.html")
    assert of_run["names"] == ["aten::mm", "Net", "layers.0", "forward"]
    assert main(["analyze", str(run), "-o", f"{run.parent / 'all'}/"]) == 0
    assert timeline(run.parent / "all" / "report.html") == of_run


def test_a_result_without_its_trace_says_why_there_is_no_timeline(run: Path) -> None:
    (run / "rank0" / "x_trace.json").unlink()
    assert main(["report", str(run)]) == 0
    assert timeline(run / "report.html") == {"why": NO_TRACE_BESIDE}
    trace(11_000).write(run / "rank1" / "x_trace.json")
    assert main(["report", str(run), "--rank", "1"]) == 0
    assert timeline(run / "rank1" / "report.html") == {"why": OTHER_TRACE}
    (run / "rank1" / "x_trace.json").write_text("no trace")
    assert main(["report", str(run), "--rank", "1", "--force"]) == 0
    assert timeline(run / "rank1" / "report.html")["why"].startswith("The timeline could not be made: BrokenTrace")


def test_a_rank_that_is_not_there_is_wrong_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--rank", "7"]) == 2
    assert capsys.readouterr().err == f"error: {run}: nothing of rank 7 is in it; ranks: 0, 1\n"
    assert main(["report", str(run / "rank0" / "x_trace.json"), "--rank", "0"]) == 2


def test_a_page_is_overwritten_only_with_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").write_text("mine")
    assert main(["report", str(run)]) == 1
    assert "will not overwrite without --force" in capsys.readouterr().err
    assert (run / "report.html").read_text() == "mine"
    assert main(["report", str(run), "--force"]) == 0
    assert total_us(run / "report.html") == 10


@pytest.mark.parametrize(("output", "page"), [("new/p.html", "new/p.html"), ("", "report.html")])
def test_output_goes_where_it_is_asked_for(run: Path, tmp_path: Path, output: str, page: str) -> None:
    assert main(["report", str(run), "-o", str(tmp_path / output)]) == 0
    href = trace_href(tmp_path / page)
    assert href is not None
    assert ((tmp_path / page).parent / href).resolve() == (run / "rank0" / "x_trace.json").resolve()


def test_a_link_leads_to_any_name_and_is_no_script(tmp_path: Path) -> None:
    name = "javascript:alert(1) #50%?.json"
    assert main(["report", str(trace().write(tmp_path / name))]) == 0
    (page,) = tmp_path.glob("*.html")
    href = trace_href(page)
    assert href is not None
    assert unquote(href) == name
    assert not set(":#?% ") & set(href.replace("%", "", href.count("%")).replace("%", ""))


def test_where_nothing_may_be_written_the_page_goes_here_and_that_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run.chmod(0o555)
    try:
        assert main(["report", str(run)]) == 0
    finally:
        run.chmod(0o755)
    captured = capsys.readouterr()
    assert captured.out == "run_report.html\n"
    assert captured.err == f"nothing can be written to {run}, so the page goes to {here / 'run_report.html'}\n"
    assert trace_href(here / "run_report.html") == "../run/rank0/x_trace.json"


def test_what_is_no_trace_leaves_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("no trace")
    assert main(["report", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert os.listdir(tmp_path) == ["x.json"]


def test_peaks_need_the_trace(run: Path) -> None:
    assert main(["report", str(run), "--peaks", "float32=2"]) == 0
    assert total_us(run / "report.html") == 10
