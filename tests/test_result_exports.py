"""Results as CSV, as data frames and in notebooks: every number, and names that mean harm."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from invariants import broken
from profiler_wrapper.__main__ import main
from profiler_wrapper.errors import MissingPackage, ProfilerWrapperError, WrongUse
from profiler_wrapper.reports.page import result_html
from profiler_wrapper.reports.result_json import LISTS, csv_text, to_dict
from profiler_wrapper.result import as_result
from profiler_wrapper.tables.model import Analysis
from recordings import Trace, analyse
from sample_results import llama
from sample_work import worked

AWKWARD = ["=cmd|' /C calc'!A0", "+1", "-1+2", "@SUM(A1)", "\tx", "\rx", "</script><b>", 'a"b,c;d', "emoji 🚀", "a\nb"]


def awkward(name: str) -> Analysis:
    """A result with one layer of this name."""
    rows = tuple(replace(row, layer=name, raw_name=name, class_name=name) for row in llama(1).layers[:1])
    return replace(llama(1), layers=rows)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


# --- CSV ---


def test_every_list_is_the_one_of_result_json() -> None:
    analysis = worked(llama(2, unattributed_us={"no launch found": 3.0}))
    assert broken(analysis, ["csv_is_json", "layers_make_the_total"]) == []


@pytest.mark.parametrize("name", AWKWARD)
def test_no_name_is_a_formula_and_all_come_back(name: str) -> None:
    (row,) = read(csv_text(awkward(name)))
    assert not row["layer"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert row["layer"].removeprefix("'") == name


def test_negative_numbers_stay_numbers() -> None:
    (row,) = read(csv_text(replace(awkward("a"), layers=(replace(awkward("a").layers[0], order=-1),))))
    assert row["order"] == "-1"


def test_a_list_in_a_cell_that_begins_with_a_formula_is_none() -> None:
    analysis = llama(1)
    attention = tuple(replace(row, kernels=("=1+1", "b")) for row in analysis.attention[:1])
    (row,) = read(csv_text(replace(analysis, attention=attention), "attention"))
    assert row["kernels"] == "'=1+1; b"


def test_a_file_or_every_list(tmp_path: Path) -> None:
    result = as_result(worked(llama(2)))
    assert result.to_csv(tmp_path / "mine.csv", "classes") == (tmp_path / "mine.csv",)
    assert (tmp_path / "mine.csv").read_text().startswith("class,phase,time_us,")
    written = result.to_csv(tmp_path / "all")
    assert {path.stem for path in written} == {name for name in LISTS if getattr(result, name)}
    assert len(read((tmp_path / "all" / "layers.csv").read_text())) == len(result.layers)
    with pytest.raises(WrongUse, match="no such list"):
        result.to_csv(tmp_path / "x.csv", "nothing")
    assert not (tmp_path / "x.csv").exists()


def test_a_lone_surrogate_is_no_error(tmp_path: Path) -> None:
    result = as_result(analyse(Trace().mark(".", 0, 90).mark("a\ud800", 1, 80).op("aten::mm", 2, 50).recording()))
    result.to_csv(tmp_path / "a.csv")
    assert "a\\ud800" in (tmp_path / "a.csv").read_text()


def test_the_command_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace().mark(".", 0, 9000).mark("=layers", 10, 8000).op("aten::mm", 20, 80).op("aten::add", 90, 95)
    path = str(trace.write(tmp_path / "x.json"))
    assert main(["analyze", path, "--format", "csv", "--select", "operators", "--top", "1"]) == 0
    assert [row["op"] for row in read(capsys.readouterr().out)] == ["aten::mm"]
    assert main(["analyze", path, "-o", str(tmp_path / "layers.csv")]) == 0
    assert [row["layer"] for row in read((tmp_path / "layers.csv").read_text())][-1] == "'=layers"
    assert main(["analyze", path, "--format", "csv", "-o", f"{tmp_path}/lists/"]) == 0
    assert {"layers.csv", "operators.csv"} <= {file.name for file in (tmp_path / "lists").iterdir()}
    capsys.readouterr()
    assert main(["analyze", path, "--format", "csv", "-o", f"{tmp_path}/lists/"]) == 1
    assert "without --force" in capsys.readouterr().err


# --- pandas ---


@pytest.mark.parametrize("name", LISTS)
def test_a_frame_has_the_rows_of_result_json(name: str) -> None:
    pandas = pytest.importorskip("pandas")
    analysis = worked(llama(2, unattributed_us={"no launch found": 3.0}))
    frame = as_result(analysis).to_pandas(name)
    rows = to_dict(analysis)[name]
    assert len(frame) == len(rows)
    for index, row in enumerate(rows):
        for key, value in row.items():
            cell = frame[key].iloc[index]
            if isinstance(value, (list, dict)):
                assert cell == value
            else:
                assert pandas.isna(cell) if value is None else cell == value


def test_columns_have_types_that_count() -> None:
    pytest.importorskip("pandas")
    frame = as_result(llama(2)).to_pandas()
    dtypes = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert {name: dtypes[name] for name in ("time_us", "idle_us", "calls", "depth", "shared", "retained_bytes")} == {
        "time_us": "float64",
        "idle_us": "float64",
        "calls": "Int64",
        "depth": "int64",
        "shared": "bool",
        "retained_bytes": "float64",
    }
    assert frame.groupby("phase")["self_time_us"].sum()["optimizer"] == 270
    assert math.isclose(frame["self_time_us"].sum(), llama(2).time.total_ns / 1000)
    assert as_result(llama(2)).to_pandas("collectives").empty


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="pip install pandas") as caught:
        as_result(llama(1)).to_pandas()
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ProfilerWrapperError)


# --- notebooks ---


class _Parsed(HTMLParser):
    """Elements, attributes and text of a fragment."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


_TAGS = {"div", "style", "p", "ul", "li", "b", "br", "span", "pre"}


def summary(title: str = "slow", **more: object) -> Mapping[str, Any]:
    finding = {"title": title, "fix": "do it", "saves_at_most_us": 1500.0, "saves_at_most_bytes": 3 << 20}
    return {"verdict": "All is well.", "findings": [finding | more], "comparable": {}}


def test_a_notebook_shows_the_verdict_the_findings_and_the_table() -> None:
    found = _Parsed(as_result(replace(llama(4, odd=2), summary=summary("mlp is slow")))._repr_html_())
    assert found.open == []
    assert set(found.tags) <= _TAGS
    for text in ("All is well.", "mlp is slow", "do it", "saves at most 1.5 ms a step and 3 MiB", "NVIDIA H200"):
        assert text in found.text
    assert "layers.{0..3}" in found.text
    assert found.text.index("All is well.") < found.text.index("mlp is slow") < found.text.index("TOTAL")


@pytest.mark.parametrize(
    "name", [*AWKWARD, "<img src=x onerror=alert(1)>", "' onmouseover='alert(1)", "\u202eabc", "x" * 10**6]
)
def test_no_name_becomes_markup(name: str) -> None:
    analysis = replace(awkward(name), summary=summary(name, fix=name), warnings=(name,), run={"device": name})
    html = result_html(analysis)
    found = _Parsed(html)
    assert found.open == []
    assert set(found.tags) <= _TAGS
    assert {attribute for attribute, _ in found.attributes} <= {"class", "style"}
    assert "\u202e" not in html
    assert len(html) < 60_000


def test_a_notebook_shows_where_a_step_went() -> None:
    """By hand: two steps of 1 ms, of which a kernel runs for 0.6 and 0.4 ms, while the CPU is in an op throughout."""
    trace = Trace()
    for number, busy in ((0, 600), (1, 400)):
        at = number * 1_000_000
        trace.annotation(f"ProfilerStep#{number}", at, at + 1_000_000)
        trace.op("aten::mm", at, at + 1_000_000)
        trace.kernel("gemm", at + 10_000, at + (10 + busy) * 1000, launched=at + 5000)
    html = result_html(analyse(trace.recording()))
    text = _Parsed(html).text
    assert "Where a step went, 1.000 ms: Kernels 0.500 ms 50.0 % Idle: CPU in ops 0.500 ms 50.0 %" in " ".join(
        text.split()
    )
    widths = [float(part) for part in re.findall(r"flex: ([\d.]+)", html)]
    assert widths == [0.5, 0.5]


def test_nothing_known_is_still_a_table() -> None:
    recording = Trace().op("aten::mm", 0, 10).recording()
    assert "TOTAL" in _Parsed(as_result(analyse(recording))._repr_html_()).text


def test_a_notebook_loads_and_runs_nothing() -> None:
    html = as_result(llama(2))._repr_html_()
    assert "http" not in html
    assert "url(" not in html
    assert "<script" not in html
