"""Which files of a run are whose, and who is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.trace.rank_files import find_result, find_sources, rank_in_name
from profiler_wrapper.trace.spans import absent_ranks, parse_ranks, ranges


def timer(run: Path, rank: int, world_size: int = 2, **more: Any) -> Path:
    path = run / "timers" / f"timer_rank{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"rank": rank, "world_size": world_size, "coordinates": {"dp": rank, "pp": 1}, "host": "a", **more}
    path.write_text(json.dumps({"header": header}) + "\n", encoding="utf-8")
    return path


def traced(run: Path, name: str, *, trace: bool = True, **told: Any) -> Path:
    directory = run / name
    directory.mkdir(parents=True)
    rank = int(name.removeprefix("rank").split("_")[0])
    described = {"rank": rank, "world_size": 2, "complete": True, "trace": "profile_trace.json", **told}
    (directory / "run.json").write_text(json.dumps(described), encoding="utf-8")
    (directory / "result.json").write_text("{}", encoding="utf-8")
    if trace:
        (directory / "profile_trace.json").write_text("{}", encoding="utf-8")
        (directory / "profile_full_trace.json").write_text("{}", encoding="utf-8")
    return directory


def test_logs_of_timers(tmp_path: Path) -> None:
    timer(tmp_path, 1)
    timer(tmp_path, 0)
    (tmp_path / "timers" / "worker0_of_rank0.jsonl").write_text("", encoding="utf-8")
    found = find_sources(tmp_path)
    assert [log.rank for log in found.logs] == [0, 1]
    assert found.uses == "timers"
    assert found.ranks[1] == {"rank": 1, "world_size": 2, "dp": 1, "pp": 1, "stage": 1, "host": "a", "attempt": 0}
    assert found.missing == []


@pytest.mark.parametrize(
    ("header", "end", "is_open"),
    [
        ({}, "\n", False),
        ({}, "\n" + " " * 8, True),  # of earlier versions
        ({"closing_line": True}, "\n", True),
        ({"closing_line": True}, '\n{"header":{"clock":{}}}\n', False),
    ],
)
def test_a_log_that_is_not_closed_is_said(header: dict[str, Any], end: str, is_open: bool, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    row = {"rank": 0, "step": 0, "name": "step", "kind": "step", "start_ns": 0, "duration_ns": 7}
    lines = [json.dumps(line, separators=(",", ":")) for line in ({"header": {"rank": 0, **header}}, row)]
    (tmp_path / "timers").mkdir()
    (tmp_path / "timers" / "timer_rank0.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
    assert [gap.what for gap in load_ranks(tmp_path).missing] == ["end of rank 0"] * is_open


def test_the_directory_of_the_logs_alone(tmp_path: Path) -> None:
    timer(tmp_path, 1)
    timer(tmp_path, 0)
    assert [log.rank for log in find_sources(tmp_path / "timers").logs] == [0, 1]


def test_the_timed_trace_of_each_rank_and_of_later_windows(tmp_path: Path) -> None:
    traced(tmp_path, "rank0_dp0_tp1_pp0")
    last = traced(tmp_path, "rank10_dp1_tp0_pp1", coordinates={"dp": 1, "tp": 0, "pp": 1})
    window = traced(last, "rank10_steps").rename(last / "steps_500-502")
    found = find_sources(tmp_path)
    assert [trace.path.parent.name for trace in found.traces] == ["rank0_dp0_tp1_pp0", last.name, window.name]
    assert {trace.path.name for trace in found.traces} == {"profile_trace.json"}
    assert found.traces[0].reduced == tmp_path / "rank0_dp0_tp1_pp0" / "spans.parquet"
    assert found.ranks[10]["stage"] == 1
    assert found.uses == "traces"


def test_a_gzipped_trace_takes_the_place_of_the_plain_one(tmp_path: Path) -> None:
    directory = traced(tmp_path, "rank0", trace=False)
    (directory / "profile_trace.json.gz").write_bytes(b"")
    assert find_sources(tmp_path).traces[0].path.name == "profile_trace.json.gz"


def test_a_packed_timed_trace_comes_before_a_plain_one_with_shapes(tmp_path: Path) -> None:
    directory = traced(tmp_path, "rank0", trace=False)
    for name in ("profile_full_trace.json", "profile_trace.json.gz", "profile_timeline_trace.json"):
        (directory / name).write_bytes(b"")
    assert find_result(tmp_path, with_trace=True).name == "profile_trace.json.gz"
    assert find_result(tmp_path) == directory / "result.json"


def test_runs_below_one_directory_must_be_named(tmp_path: Path) -> None:
    traced(tmp_path / "job" / "a", "rank0")
    assert find_result(tmp_path, rank=0) == tmp_path / "job" / "a" / "rank0" / "result.json"
    traced(tmp_path / "job" / "b" / "attempt1", "rank0")
    with pytest.raises(BrokenTrace, match="2 runs are in it; name one: job/a, job/b"):
        find_result(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    traced(tmp_path, "rank0", complete=False)
    traced(tmp_path, "rank1", trace=False)
    found = find_sources(tmp_path)
    told = {(gap.what, gap.rank) for gap in found.missing}
    assert told == {("end of rank 0", 0), ("trace of rank 1", 1)}


def test_a_reduced_trace_may_be_all_that_is_left(tmp_path: Path) -> None:
    directory = traced(tmp_path, "rank0", trace=False)
    (directory / "spans.parquet").write_bytes(b"")
    (trace,) = find_sources(tmp_path).traces
    assert (trace.path.name, trace.has_trace) == ("spans.parquet", False)


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    timer(tmp_path, 0)
    timer(tmp_path / "attempt2", 0)
    timer(tmp_path / "attempt10", 0)
    found = find_sources(tmp_path)
    assert found.root.name == "attempt10"
    assert found.ranks[0]["attempt"] == 10
    assert [gap.what for gap in found.missing] == ["attempt 0, 2"]


def test_a_directory_of_one_run_and_of_several(tmp_path: Path) -> None:
    timer(tmp_path / "outputs" / "a", 0)
    assert find_sources(tmp_path / "outputs").root.name == "a"
    timer(tmp_path / "outputs" / "b", 0)
    with pytest.raises(BrokenTrace, match="2 runs are in it; name one: a, b"):
        find_sources(tmp_path / "outputs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenTrace, match="no rank's files in it"):
        find_sources(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        find_sources(tmp_path / "nowhere")


def test_traces_side_by_side(tmp_path: Path) -> None:
    for name in ("trace_rank-3.json.gz", "host.rank_12.pt.trace.json", "other.json", "result.json", ".hidden.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    found = {trace.path.name: trace for trace in find_sources(tmp_path).traces}
    assert {name: trace.rank for name, trace in found.items()} == {
        "trace_rank-3.json.gz": 3,
        "host.rank_12.pt.trace.json": 12,
        "other.json": None,
    }
    assert found["other.json"].reduced.name == "other_spans.parquet"


def test_damaged_descriptions_are_said(tmp_path: Path) -> None:
    (traced(tmp_path, "rank0") / "run.json").write_text("{", encoding="utf-8")
    timer(tmp_path, 0).write_text("{", encoding="utf-8")
    timer(tmp_path, 1).write_text("", encoding="utf-8")  # said where spans are read
    told = {gap.what for gap in find_sources(tmp_path).missing}
    assert told == {"description of rank 0", "header of timer_rank0.jsonl"}


def test_who_is_absent() -> None:
    assert [gap.rank for gap in absent_ranks({0, 2}, 4)] == [1, 3]
    (gap,) = absent_ranks(range(8), 1024)
    assert gap.what == "1016 ranks: 8-1023"
    assert absent_ranks({0, 1}, 2) == []
    (gap,) = absent_ranks({0, 2}, 10**12)
    assert gap.what == "999999999998 ranks: 1, 3-999999999999"
    both = absent_ranks({3}, 20, ranks=range(10, 15))
    assert [gap.what for gap in both] == ["14 ranks: 0-2, 4-9, 15-19", "5 ranks: 10-14"]
    assert "only its description" in absent_ranks({0}, 2, ranks=[1])[0].reason


def test_ranges_and_lists_of_ranks() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2, 5"
    assert parse_ranks("0-2, 5,5") == (0, 1, 2, 5)
    for wrong in ("", "a", "3-1", "-1", "1-"):
        with pytest.raises(WrongUse, match="--ranks"):
            parse_ranks(wrong)


@pytest.mark.parametrize(
    ("name", "rank"), [("rank3.json", 3), ("a-rank_07.json", 7), ("frank3.json", None), ("x", None)]
)
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank
