"""`analyze --select --top`: parts of a result, by hand-made data, and as the command prints them."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.__main__ import main
from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.reports.result_json import LISTS, rows_where, selected, short_summary, to_dict
from recordings import Trace
from sample_results import llama
from shared_traces import TRACES, needs_traces

DATA: dict[str, Any] = {
    "summary": {"verdict": "v", "findings": [{"id": "a"}, {"id": "b"}, {"id": "c"}]},
    "layers": [
        {"layer": "root", "self_time_us": 1.0, "time_us": 9.0},
        {"layer": "b", "self_time_us": 5.0, "time_us": 5.0},
        {"layer": "c", "self_time_us": 3.0, "time_us": 3.0},
    ],
    "steps": [{"step": 2, "time_us": 1.0}, {"step": 3, "time_us": 7.0}, {"step": None, "time_us": 8.0}],
    "classes": [{"class": "gemm", "time_us": 1.0}, {"class": "norm", "time_us": 2.0}],
    "series": {"a": [1.0, 2.0, 3.0]},
    "utilization": None,
}


def test_nothing_asked_for_is_all() -> None:
    assert selected(DATA) == DATA


def test_keys_in_the_order_they_are_asked_for() -> None:
    assert list(selected(DATA, select=["steps", "summary"]).items()) == [
        ("steps", DATA["steps"]),
        ("summary", DATA["summary"]),
    ]


def test_parts_of_rows_and_of_objects() -> None:
    assert selected(DATA, select=["summary.verdict", "classes.class", "utilization.mfu"]) == {
        "summary": {"verdict": "v"},
        "classes": [{"class": "gemm"}, {"class": "norm"}],
        "utilization": None,
    }


@pytest.mark.parametrize("names", [["summary", "summary.verdict"], ["summary.verdict", "summary"]])
def test_all_of_a_key_is_more_than_a_part(names: list[str]) -> None:
    assert selected(DATA, select=names) == {"summary": DATA["summary"]}


def test_the_dearest_rows_by_their_own_time_and_how_many_are_missing() -> None:
    found = selected(DATA, top=2)
    assert [row["layer"] for row in found["layers"]] == ["b", "c"]
    assert [row["class"] for row in found["classes"]] == ["norm", "gemm"]
    assert [row["step"] for row in found["steps"]] == [2, 3]
    assert [row["id"] for row in found["summary"]["findings"]] == ["a", "b"]
    assert found["series"] == DATA["series"]
    assert found["rows_left_out"] == {"summary.findings": 1, "layers": 1, "steps": 1}


def test_rows_are_ranked_by_what_is_not_selected_too() -> None:
    assert selected(DATA, select=["layers.layer"], top=1) == {
        "layers": [{"layer": "b"}],
        "rows_left_out": {"layers": 2},
    }


@pytest.mark.parametrize("name", ["layer", "layers.speed", "series.b", "steps.step.x", ""])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(WrongUse, match="It has: "):
        selected(DATA, select=[name])


def test_of_every_list_the_dearest_are_first() -> None:
    data = selected(to_dict(llama(8)), top=5)
    assert set(LISTS) <= set(data)
    assert all(len(data[name]) <= 5 for name in LISTS)
    assert {row["layer"] for row in data["layers"]} == {f"model.layers.{i}.mlp" for i in range(5)}


# --- the command ---


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = Trace().mark(".", 0, 90_000)
    for i in range(20):
        made.mark(f"layers.{i}", 1000 + 4000 * i, 4900 + 4000 * i, kind="block")
        made.op("aten::mm", 2000 + 4000 * i, 2000 + 4000 * i + 100 * (i + 1))
    return made.write(tmp_path / "blocks.json")


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["analyze", *arguments]) == 0
    return capsys.readouterr().out


def test_json_of_parts_is_short(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trace), "--format", "json", "--select", "time.total_us,layers.layer", "--top", "2"]
    assert printed(arguments, capsys) == (
        '{"time":{"total_us":21.0},"layers":[{"layer":"layers.19"},{"layer":"layers.18"}],"rows_left_out":{"layers":19}}\n'
    )


def test_of_the_memory_curve_the_highest_points_in_their_order() -> None:
    curve = {
        "start_ns": 7,
        "events": 9,
        "time_us": [1.0, 2.0, 3.0, 4.0],
        "allocated_bytes": [5, 9, 1, 6],
        "reserved_bytes": None,
        "categories": {"params": [5, 5, 0, 5], "other": [0, 4, 1, 1]},
        "steps": [{"step": 0, "start_us": 0.0}, {"step": 1, "start_us": 2.5}, {"step": 2, "start_us": 4.5}],
    }
    found = selected({"memory": {"peak": {"bytes": 9}, "curve": curve}}, top=2)
    assert found["memory"]["curve"] == {
        "start_ns": 7,
        "events": 9,
        "time_us": [2.0, 4.0],
        "allocated_bytes": [9, 6],
        "reserved_bytes": None,
        "categories": {"params": [5, 5], "other": [4, 1]},
        "steps": curve["steps"][:2],
    }
    assert found["rows_left_out"] == {"memory.curve": 2, "memory.curve.steps": 1}
    assert selected({"memory": {"curve": curve}}, top=4) == {"memory": {"curve": curve}}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("layer=a.1", ["x", "z"]),  # and what is below it, not a.10
        ("layer=a.1*", ["x", "y", "z"]),
        ("layer=", ["w"]),
        ("phase=forward", ["x", "y"]),
        ("layer=b", ["v"]),
        ("calls=3", ["y"]),
        ("nothing=3", []),
    ],
)
def test_rows_where_a_key_says_so(condition: str, expected: list[str]) -> None:
    rows = [
        {"id": "x", "layer": "a.1", "phase": "forward"},
        {"id": "y", "layer": "a.10", "phase": "forward", "calls": 3},
        {"id": "z", "layer": "a.1.mlp", "phase": "backward"},
        {"id": "w", "layer": "", "phase": "optimizer", "calls": None},
        {"id": "v", "layers": ["a.2", "b.1"]},
    ]
    assert [row["id"] for row in rows_where(rows, condition)] == expected


@pytest.mark.parametrize("condition", ["layer", "=3", ""])
def test_a_condition_without_a_key_or_value_is_wrong_use(condition: str) -> None:
    with pytest.raises(WrongUse, match="KEY=VALUE"):
        rows_where([], condition)


def test_conditions_hold_for_lists_in_json_and_csv(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conditions = ["--where", "layer=Net", "--where", "phase=forward"]
    found = json.loads(printed([str(trace), "--format", "json", "--select", "layers,time", *conditions], capsys))
    assert {(row["layer"].split(".")[0], row["phase"]) for row in found["layers"]} == {("Net", "forward")}
    assert found["time"]["total_us"] > 0
    lines = printed([str(trace), "--format", "csv", *conditions], capsys).splitlines()
    assert len(lines) == 1 + len(found["layers"])


def many_findings(count: int, letter: str = "x") -> dict[str, Any]:
    finding = {"id": "odd-block", "title": letter * 200, "layer": letter * 120, "fix": letter * 200}
    finding |= {"saves_at_most_us": 12345.6, "saves_at_most_bytes": None}
    finding |= {"next": f"profiler-wrapper analyze RUN --format json --select layers --where layer={letter * 30}"}
    return {"summary": {"verdict": letter * 600, "findings": [finding] * count}, "memory": {"changes": [1]}}


@pytest.mark.parametrize("count", [0, 1, 3, 10])
@pytest.mark.parametrize("letter", ["x", "\u00b5", "\U0001f9e0"])
@pytest.mark.parametrize("path", ["run", "/a b/" + "long" * 30, "\U0001f9e0" * 50, "/long" * 800])
def test_a_short_summary_is_under_two_kib(count: int, letter: str, path: str) -> None:
    data = many_findings(count, letter)
    short = short_summary(data, path, ranks=path)
    assert len(json.dumps({"summary": short}, separators=(",", ":")).encode()) + 1 < 2048
    assert len(short["findings"]) + short.get("findings_left_out", 0) == count
    assert {"rest", "memory", "ranks"} <= short.keys()
    if letter == "x" and len(path) < 150:
        assert len(short["findings"]) >= min(count, 2)
        assert short["findings"] == [] or short["findings"][0]["fix"]


def test_next_commands_name_the_run_as_a_shell_takes_it() -> None:
    short = short_summary(many_findings(1), "my run/$x", ranks="all ranks")
    assert shlex.split(short["findings"][0]["next"])[:3] == ["profiler-wrapper", "analyze", "my run/$x"]
    assert shlex.split(short["rest"])[2] == "my run/$x"
    assert shlex.split(short["ranks"]) == ["profiler-wrapper", "ranks", "all ranks"]
    assert "ranks" not in short_summary(many_findings(1), "run")


@needs_traces
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.split(".")[0])
def test_the_summary_of_a_recorded_trace_is_under_two_kib_and_says_what_to_run(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "read_result", cache(common.read_result))  # one trace, many questions
    text = printed([str(path), "--format", "json", "--select", "summary"], capsys)
    assert len(text.encode()) < 2048
    summary = json.loads(text)["summary"]
    assert summary["verdict"]
    commands = [*(finding["next"] for finding in summary["findings"]), summary["rest"], summary.get("memory")]
    for command in filter(None, commands):
        program, name, *arguments = shlex.split(command)
        assert (program, name, arguments[0]) == ("profiler-wrapper", "analyze", str(path))
        shown = json.loads(printed(arguments, capsys))
        assert any(shown.values()), command


def test_text_has_as_many_layers_as_asked_for(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([str(trace), "--top", "1"], capsys).splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[heading + 2 : heading + 4]] == ["Net", "TOTAL"]
    assert any("smaller layers not shown" in line for line in lines)
    more = printed([str(trace), "--top", "40"], capsys).splitlines()
    assert not any("not shown" in line for line in more)


@pytest.mark.parametrize("columns", [60, 80, 150])
def test_a_table_fits_the_terminal(
    trace: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed([str(trace)], capsys).splitlines()
    assert max(map(len, lines)) <= columns
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, printed([str(trace)], capsys).splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["--select", "summary"],
        ["--where", "phase=forward"],
        ["--format", "json", "--where", "phase"],
        ["--top", "0"],
        ["--top", "0", "--format", "json"],
        ["--format", "json", "--select", "nothing"],
        ["--format", "csv", "--select", "layers,steps"],
        ["--format", "csv", "--select", "time"],
    ],
)
def test_wrong_use_is_2(trace: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace), *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
