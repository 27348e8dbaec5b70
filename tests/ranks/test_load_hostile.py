"""Runs that nobody would make on purpose: what is missing is said, the rest is read, and no traceback ends it."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from profiler_wrapper.__main__ import main
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.text import ranks_text
from programs import run_script
from rank_spans import job, write_logs
from rank_traces import write_trace
from span_tables import EPOCH_NS, write_parquet

Row = dict[str, Any]
Rows = list[Row]


def missing(report: RanksReport) -> dict[str, str]:
    return {gap.what: gap.reason for gap in report.missing}


def every(rows: Rows, when: Callable[[Row], bool] = lambda row: True, **more: Any) -> Rows:
    """The rows, some of them otherwise."""
    return [{**row, **more} if when(row) else row for row in rows]


# --- logs of timers ---


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ("a clock that stands at 1970", job(slow=2, ahead_ns={1: -EPOCH_NS})),
        ("a clock an hour ahead", job(slow=2, ahead_ns={3: 3_600_000_000_000})),
        ("huge numbers of steps", [{**row, "step": row["step"] * 10**15} for row in job(slow=2)]),
        (
            "steps that count down to the greatest number",
            [{**row, "step": 2**63 - 1 - row["step"]} for row in job(slow=2)],
        ),
        ("negative steps", [{**row, "step": row["step"] - 6} for row in job(slow=2)]),
        ("huge counts of bytes", every(job(slow=2), bytes=2**62)),
        (
            "a number of a collective as great as it can be",
            every(job(slow=2), lambda row: row["group"] == "all", sequence=2**31 - 1),
        ),
        (
            "names in other scripts",
            every(job(slow=2), lambda row: row["group"] == "all", group="g'\"; DROP TABLE spans; --\u202e"),
        ),
    ],
)
def test_odd_numbers_and_names_hide_no_straggler(how: str, rows: Rows, tmp_path: Path) -> None:
    write_logs(tmp_path / "läufe 火 *?[x]", rows)
    report = load_ranks(tmp_path / "läufe 火 *?[x]")
    assert (report.verdict.verdict, report.verdict.rank, report.verdict.cause) == ("rank", 2, "forward"), how
    assert missing(report) == {}, how


@pytest.mark.parametrize("told", [10**9, 2**31, 10**30, -3, "many", [4], None])
def test_any_number_of_ranks_may_be_told(told: object, tmp_path: Path) -> None:
    logs = write_logs(tmp_path, job())
    for path in logs.values():
        path.write_text(path.read_text().replace('"world_size": 4', f'"world_size": {json.dumps(told)}'))
    report = load_ranks(tmp_path)
    if told == 10**9:
        assert missing(report) == {"999999996 ranks: 4-999999999": "no file of theirs is there"}
    else:
        assert (missing(report), report.world_size) == ({}, None)


def test_logs_that_say_less_than_they_should(tmp_path: Path) -> None:
    logs = write_logs(tmp_path, job(ranks=7), ranks=7)
    whole = logs[0].read_bytes()
    logs[1].write_bytes(b"")
    logs[2].write_bytes(b"\0" * 5000)
    logs[3].write_bytes(logs[3].read_bytes()[:-17] + b" " * 900)  # torn, and what its process had reserved
    logs[4].unlink()
    logs[4].mkdir()
    with logs[6].open("a", encoding="utf-8") as log:
        log.write('{"header":{"clock":{}}}\n{"header":{"lost_lines":7}}\n')
    report = load_ranks(tmp_path)
    assert missing(report) == {
        "header of timer_rank2.jsonl": "its first line is not what a timer writes",
        "spans of rank 1": f"{logs[1]}: is empty",
        "spans of rank 2": f"{logs[2]}: no line of it is a span",
        "a line of rank 3": f"{logs[3]}: torn, or no span",
        "end of rank 3": "its log is not closed: its process runs, or was killed",
        "spans of rank 4": f"{logs[4]}: Is a directory",
        "7 spans of rank 6": f"{logs[6]}: its timer could not write them",
    }
    assert report.own.ranks.tolist() == [0, 3, 5, 6]
    assert report.spans == len(job(ranks=4)) - 1
    assert logs[0].read_bytes() == whole


def test_lines_that_are_no_spans_are_counted(tmp_path: Path) -> None:
    rows = every(job(), lambda row: row["step"] == 3, duration_ns=-5)
    rows = every(rows, lambda row: row["step"] == 5, duration_ns=2**62)
    logs = write_logs(tmp_path, every(rows, lambda row: row["step"] == 7, kind=None))
    report = load_ranks(tmp_path)
    assert missing(report) == {f"15 lines of rank {rank}": f"{logs[rank]}: torn, or no span" for rank in range(4)}
    assert report.own.steps.tolist() == [0, 1, 2, 4, 6, 8, 9, 10, 11]


def test_spans_that_take_no_time(tmp_path: Path) -> None:
    write_logs(tmp_path, every(job(), duration_ns=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_ranks(tmp_path)
        assert "No straggler" in ranks_text(report)
    assert report.verdict.verdict == "none"


def test_a_job_recorded_twice_in_one_table_is_read(tmp_path: Path) -> None:
    """Several operations have one number, so nothing tells which of them meet."""
    rows = job(slow=2)
    report = load_ranks(write_parquet([*rows, *rows], tmp_path / "spans.parquet"))
    assert report.own.ranks.tolist() == [0, 1, 2, 3]
    assert report.verdict.sentence.startswith("Rank 2 is the straggler: its forward takes longer;")
    assert report.verdict.confidence == "medium" and "waiting is estimated" in " ".join(report.verdict.evidence)


def test_collectives_that_wait_for_one_another_are_no_order(tmp_path: Path) -> None:
    """Rank 1 is said to reduce before it gathers, the others after."""
    rows = job(slow=2)
    meets = [row for row in rows if row["kind"] == "communication"]
    rows += [{**row, "name": "all_gather", "start_ns": row["start_ns"] + (-1) ** row["rank"]} for row in meets]
    report = load_ranks(write_parquet(rows, tmp_path / "spans.parquet"))
    assert report.verdict.sentence.startswith("Most likely: Rank 2 is the straggler: its forward takes longer;")
    assert any("depend on one another in a circle" in note for note in report.verdict.evidence), report.verdict


# --- tables beside, or in the place of traces ---


def test_tables_that_are_broken_cost_only_their_rank(tmp_path: Path) -> None:
    rows = job(ranks=4)
    tables = {}
    for rank in range(4):
        of_rank = [row for row in rows if row["rank"] == rank]
        tables[rank] = write_parquet(of_rank, tmp_path / f"rank{rank}" / "spans.parquet")
    tables[0].write_bytes(b"PAR1 torn")
    whole = tables[1].read_bytes()
    tables[1].write_bytes(whole[:200] + b"\0" * 300 + whole[500:])
    report = load_ranks(tmp_path)
    assert report.own.ranks.tolist() == [2, 3]
    told = missing(report)
    assert "is no table with the columns" in told["spans of rank 0"]
    assert str(tables[1]) in told["spans of rank 1"]


@pytest.mark.parametrize("kind", ["logs", "tables"])
def test_a_run_below_a_folder_that_is_named_like_a_column_is_read_as_elsewhere(tmp_path: Path, kind: str) -> None:
    verdicts, rows = [], job(slow=2)
    for folder in (tmp_path / "plain", tmp_path / "rank=7" / "step=1000" / "kind=x" / "depth=1"):
        if kind == "logs":
            write_logs(folder, rows)
        else:
            for rank in range(4):
                of_rank = [row for row in rows if row["rank"] == rank]
                write_parquet(of_rank, folder / f"rank{rank}" / "spans.parquet")
        report = load_ranks(folder)
        verdicts.append((report.verdict.sentence, report.own.ranks.tolist(), missing(report)))
    assert verdicts[0] == verdicts[1]
    assert "Rank 2 is the straggler" in verdicts[0][0]


@pytest.mark.full
def test_a_torn_table_beside_its_trace_is_made_anew(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        write_trace(tmp_path / f"rank{rank}" / "profile_trace.json", rank)
    (tmp_path / "rank0" / "spans.parquet").write_bytes(b"PAR1 torn")
    report = load_ranks(tmp_path)
    assert (report.own.ranks.tolist(), missing(report)) == ([0, 1], {})


@pytest.mark.full
@pytest.mark.parametrize(
    "told", [{"rank": -2, "world_size": 2}, {"rank": "1", "world_size": "x"}, {"rank": 2**40, "world_size": 2**40}, [7]]
)
def test_a_trace_that_says_nonsense_of_its_rank(told: object, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        path = write_trace(tmp_path / f"rank{rank}" / "profile_trace.json", rank)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "distributedInfo": told, "baseTimeNanoseconds": 2**63}))
    (path.parent / "run.json").write_text(json.dumps({"coordinates": [1], "stage": "z", "host": 3, "layers": 7}))
    report = load_ranks(tmp_path)
    assert (report.own.ranks.tolist(), missing(report)) == ([0, 1], {})


# --- what cannot be read at all: one line, and the exit code that the README promises ---


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("empty directories", 1, "no trace and no timer's log of any rank in it"),
        ("empty logs", 1, "spans of rank 3: {run}/timers/timer_rank3.jsonl: is empty"),
        ("headers alone", 1, "timer_rank0.jsonl: no line of it is a span"),
        ("a link to itself", 1, "no trace and no timer's log of any rank in it"),
        ("two runs", 1, "2 runs are in it; name one: a, b"),
        ("unknown ranks", 2, "no spans of ranks 77; there are those of 0-3"),
    ],
)
def test_what_cannot_be_read(
    name: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    more = []
    if name == "empty directories":
        (run / "rank0").mkdir(parents=True)
    elif name == "empty logs":
        for path in write_logs(run, []).values():
            path.write_bytes(b"")
    elif name == "headers alone":
        write_logs(run, [])
    elif name == "a link to itself":
        (run / "rank0").mkdir(parents=True)
        (run / "attempt1").symlink_to(run)
    elif name == "two runs":
        write_logs(run / "a", job())
        write_logs(run / "b", job())
    else:
        write_logs(run, job())
        more = ["--ranks", "77"]
    assert main(["ranks", str(run), *more]) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert message.format(run=run) in told


def test_millions_of_ranks_may_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_logs(tmp_path, job(slow=2))
    assert main(["ranks", str(tmp_path), "--ranks", "0-2,4-1000000", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in told["ranks"]] == [0, 1, 2]
    assert [gap["what"] for gap in told["missing"]] == ["999997 ranks: 4-1000000"]


READS_AS_NOBODY = """
    import json, os, sys
    import pyarrow.parquet
    from profiler_wrapper.ranks.load import load_ranks
    load_ranks(sys.argv[1])  # with all that it imports, which nobody else may read
    os.setuid(65534)
    print(json.dumps([sorted(gap.what for gap in load_ranks(path).missing) for path in sys.argv[2:]]))
    """


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "setuid") or os.getuid() != 0, reason="needs to become somebody else")
def test_what_may_not_be_read_costs_only_its_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        root = Path(folder)
        root.chmod(0o755)
        write_logs(root / "whole", job())
        write_logs(root / "logs", job())[1].chmod(0)
        for rank in range(3):
            (root / "traces" / f"rank{rank}").mkdir(parents=True)
            write_trace(root / "traces" / f"rank{rank}" / "profile_trace.json", rank, world_size=3)
        (root / "traces" / "rank1").chmod(0)
        (root / "traces" / "rank2" / "profile_trace.json").chmod(0)
        told = run_script(READS_AS_NOBODY, *(root / name for name in ("whole", "logs", "traces")))
    assert json.loads(told) == [["spans of rank 1"], ["files of rank 1", "rank 1", "spans of rank 2"]]
