"""Tables of other tools: which column is which, in which unit; what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.ranks.database import Column, find_columns, open_database, parse_mapping, read_table, to_rows
from profiler_wrapper.trace.spans import group_of_span, kind_of_span, receives, sends_forward
from shared_traces import TRACES

STRAGGLERS = TRACES.parent / "stragglers" / "trace-ST.parquet"


def read(path: Path, **mapping: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], tuple[str, ...]]:
    """(spans, ranks, notes), spans by rank, step and start."""
    with open_database(memory_bytes=100 << 20, threads=1) as database:
        notes = read_table(database, path, mapping).notes
        spans = to_rows(database, "SELECT * FROM spans ORDER BY rank, step, start_ns")
        return spans, to_rows(database, "SELECT * FROM ranks"), notes


def write_csv(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_mapping_is_read() -> None:
    assert parse_mapping(["took=duration_ms, worker=rank", "when=start_s"]) == {
        "took": "duration_ms",
        "worker": "rank",
        "when": "start_s",
    }
    for wrong in ("took", "took=", "=rank", "took=speed", "took=duration_h", "took=duration"):
        with pytest.raises(WrongUse, match="--columns"):
            parse_mapping([wrong])


def test_units_are_those_of_ours_then_theirs() -> None:
    names = ["worker", "begin_ms", "took", "step", "op", "dur"]
    found = find_columns(names, {"worker": "rank", "begin_ms": "start_ms", "took": "duration_us"}, table="t")
    assert found["start"] == Column("begin_ms", 10**6)
    assert found["duration"] == Column("took", 10**3)
    assert found["name"] == Column("op")
    assert find_columns(["rank", "step", "optype", "start_ts", "duration"], {}, table="t")["start"].unit_ns == 10**9
    assert find_columns(["RANK", "Step", "name", "ts", "dur"], {}, table="t")["duration"] == Column("dur", 10**3)


def test_a_table_without_what_is_needed_says_what_it_has(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", "worker,when,took", "0,1,2")
    with pytest.raises(WrongUse) as raised:
        read(path)
    message = str(raised.value)
    assert "a.csv" in message
    assert "no column for rank, step, start, name, duration" in message
    assert "It has: 'worker', 'when', 'took'" in message
    with pytest.raises(WrongUse, match=r"no column 'took2', .*There are: 'worker', 'when', 'took'"):
        read(path, took2="duration_ms")


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"no parquet")
    with pytest.raises(WrongUse, match=r"a\.parquet: cannot be read as a table"):
        read(broken)
    with pytest.raises(WrongUse, match="a table of spans ends in"):
        read(write_csv(tmp_path / "a.xlsx", "a"))
    empty = write_csv(tmp_path / "b.csv", "rank,step,name,start_s,duration_s", "x,y,z,w,v")
    with pytest.raises(WrongUse, match="1 rows, and none has a rank"):
        read(empty)


def test_columns_of_another_tool_in_milliseconds(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "job.csv",
        "worker,iteration,op,begin,took,pp_rank",
        "0,3,forward,1000.5,2,0",
        "1,3,fwd,1001,2.25,1",
        "1,3,all_reduce,1003.5,1,1",
        "2,3,forward,,2,1",
        "2,3,forward,1,-2,1",
    )
    spans, ranks, notes = read(path, worker="rank", begin="start_ms", took="duration_ms")
    assert [(row["rank"], row["name"], row["kind"], row["start_ns"], row["duration_ns"]) for row in spans] == [
        (0, "forward", "forward", 1_000_500_000, 2_000_000),
        (1, "fwd", "forward", 1_001_000_000, 2_250_000),
        (1, "all_reduce", "communication", 1_003_500_000, 1_000_000),
    ]
    assert [(row["rank"], row["stage"], row["pp"]) for row in ranks] == [(0, 0, 0), (1, 1, 1)]
    assert spans[2]["group"] == "stage 1"
    assert any("2 of 5 rows left out" in note for note in notes)


def test_a_name_of_two_kinds_is_of_the_kind_of_its_row(tmp_path: Path) -> None:
    """A layer's forward and backward have its name."""
    path = write_csv(
        tmp_path / "job.csv",
        "rank,step,name,kind,start_ns,duration_ns,layer",
        "0,3,model.layers.0,forward,0,20,model.layers.0",
        "0,3,model.layers.0,backward,20,40,model.layers.0",
        "0,3,forward,,60,5,",
    )
    spans, _, _ = read(path)
    assert [row["kind"] for row in spans] == ["forward", "backward", "forward"]


def test_json_lines_with_a_torn_end(tmp_path: Path) -> None:
    rows = [{"rank": 0, "step": step, "name": "forward", "start_ns": step * 100, "duration_ns": 7} for step in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"rank": 0, "st', encoding="utf-8")
    spans, _, _ = read(path)
    assert [(row["step"], row["start_ns"], row["duration_ns"]) for row in spans] == [
        (0, 0, 7),
        (1, 100, 7),
        (2, 200, 7),
    ]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "ndjson", "json", "parquet", "pq"])
@pytest.mark.parametrize("more", [{}, {"kind": "forward", "depth": 0}], ids=["theirs", "ours"])
def test_folders_that_are_named_like_columns_say_nothing(tmp_path: Path, ending: str, more: dict[str, object]) -> None:
    columns = {"rank": "1", "step": "4", "name": "'forward'", "start_ns": "100", "duration_ns": "7"}
    columns |= {name: f"'{value}'" if isinstance(value, str) else str(value) for name, value in more.items()}
    path = tmp_path / "rank=7" / "step=1000" / "name=x" / "duration_ns=9" / "depth=3" / f"spans.{ending}"
    path.parent.mkdir(parents=True)
    how = {"c": "csv, header", "t": "csv, header, delimiter '\t'", "p": "parquet"}.get(ending[0], "json")
    how += ", array" if ending == "json" else ""
    with open_database(memory_bytes=100 << 20, threads=1) as database:
        row = ", ".join(f"{value} AS {name}" for name, value in columns.items())
        database.execute(f"COPY (SELECT {row}) TO '{path}' (FORMAT {how})")
    (span,), _, _ = read(path)
    assert {name: span[name] for name in ("rank", "step", "name", "duration_ns", "depth")} == {
        "rank": 1,
        "step": 4,
        "name": "forward",
        "duration_ns": 7,
        "depth": 0,
    }


def test_headers_of_a_timers_log_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "timer_rank0.jsonl"
    row = {"rank": 0, "step": 0, "name": "forward", "start_ns": 0, "duration_ns": 7}
    path.write_text("\n".join(map(json.dumps, ({"header": {"rank": 0}}, row, {"header": {"clock": {}}}))), "utf-8")
    spans, _, notes = read(path)
    assert (len(spans), notes) == (1, ())


def test_ranks_in_several_stages_are_said(tmp_path: Path) -> None:
    rows = [f"{rank},{step},forward,{step},1,{min(rank, step)}" for rank in range(2) for step in range(3)]
    _, ranks, notes = read(write_csv(tmp_path / "a.csv", "rank,step,name,start_s,duration_s,stage", *rows))
    assert [row["stage"] for row in ranks] == [0, 0]
    assert notes == ("1 ranks are said to be in several stages: each is taken to be in its first",)


def test_starts_that_begin_anew_in_each_step_are_laid_end_to_end(tmp_path: Path) -> None:
    rows = [f"{rank},{step},forward,{0.1 + rank / 100},{1 + step}" for rank in range(2) for step in range(4)]
    path = write_csv(tmp_path / "a.csv", "rank,step,optype,start_ts,duration", *rows)
    spans, _, notes = read(path)
    of_rank_0 = [row["start_ns"] for row in spans if row["rank"] == 0]
    # A step is from the first start to the last end over ranks: 1.01 s, 2.01 s, 3.01 s.
    assert of_rank_0 == [100_000_000, 1_110_000_000, 3_120_000_000, 6_130_000_000]
    assert any("laid end to end" in note for note in notes)


@pytest.mark.parametrize("ahead_ns", [3_000_000_000, -1_790_000_000_000_000_000])
def test_a_clock_far_ahead_is_none_that_begins_anew(ahead_ns: int, tmp_path: Path) -> None:
    """Steps of 100 ms, and the clock of one rank 3 s ahead, or at 1970: each rank's starts go on over its steps."""
    rows = [(rank, step, rank * ahead_ns + step * 100_000_000) for rank in range(3) for step in range(20)]
    path = write_csv(
        tmp_path / "a.csv",
        "rank,step,name,start_ns,duration_ns",
        *[f"{rank},{step},forward,{start},80000000" for rank, step, start in rows],
    )
    spans, _, notes = read(path)
    assert notes == ()
    assert [(row["rank"], row["step"], row["start_ns"]) for row in spans] == rows


def test_starts_begin_anew_also_where_clocks_differ(tmp_path: Path) -> None:
    """By the clock of rank 1 each step begins at 5 s, by that of rank 0 at 0: a step is as long as both."""
    rows = [f"{rank},{step},forward,{5 * rank},1" for rank in range(2) for step in range(3)]
    spans, _, notes = read(write_csv(tmp_path / "a.csv", "rank,step,name,start_s,duration_s", *rows))
    assert any("laid end to end" in note for note in notes)
    seconds = [(row["rank"], row["start_ns"] // 10**9) for row in spans]
    assert seconds == [(0, 0), (0, 6), (0, 12), (1, 5), (1, 11), (1, 17)]


def test_places_that_are_no_numbers_are_not_known(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv",
        "rank,step,name,start_ns,duration_ns,stage,microbatch,dp,world_size",
        "0,0,forward,1,2,first,-1,99999999999,1e40",
    )
    spans, ranks, _ = read(path)
    assert [row["microbatch"] for row in spans] == [None]
    assert [(row["stage"], row["dp"], row["world_size"]) for row in ranks] == [(0, None, None)]


def test_the_job_has_as_many_ranks_as_any_row_says(tmp_path: Path) -> None:
    rows = ["0,0,forward,1,2,", "1,0,forward,1,2,4"]
    path = write_csv(tmp_path / "a.csv", "rank,step,name,start_ns,duration_ns,world_size", *rows)
    with open_database(memory_bytes=100 << 20, threads=1) as database:
        assert [gap.rank for gap in read_table(database, path, {}).missing] == [2, 3]


def test_what_lies_within_another_span_has_a_depth(tmp_path: Path) -> None:
    rows = ["0,0,step,0,100", "0,0,forward,0,50", "0,0,mlp_forward,10,20", "0,0,backward,50,50", "0,0,gc,50,0"]
    path = write_csv(tmp_path / "a.csv", "rank,step,name,start_ns,duration_ns", *rows)
    spans, _, _ = read(path)
    assert {row["name"]: row["depth"] for row in spans} == {
        "step": 0,
        "forward": 0,
        "mlp_forward": 1,
        "backward": 0,
        "gc": 0,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward-compute", "forward"),
        ("backward-compute", "backward"),
        ("forward-send", "communication"),
        ("backward_recv", "communication"),
        ("ForwardRecv", "communication"),
        ("params-all-gather", "communication"),
        ("grads-reduce-scatter", "communication"),
        ("optimizer-clip-main-grad", "communication"),
        ("ncclDevKernel_AllReduce_Sum", "communication"),
        ("optimizer", "optimizer"),
        ("batch-generator", "data"),
        ("gc", "gc"),
        ("save_checkpoint", "checkpoint"),
        ("recompute", "recompute"),
        ("train_step", "step"),
        ("step", "step"),
        ("something", "other"),
        ("database", "other"),
        ("scatter_plot", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of_span(name) == kind


def test_directions_of_sends() -> None:
    assert (sends_forward("forward-recv"), receives("forward-recv")) == (True, True)
    assert (sends_forward("backward-send"), receives("backward-send")) == (False, False)
    assert sends_forward("p2p send") is None


@pytest.mark.parametrize(
    ("name", "stage", "tp", "group"),
    [
        ("forward-send", 1, None, "dp1 stage 1-2"),
        ("forward-recv", 2, None, "dp1 stage 1-2"),
        ("backward-send", 2, None, "dp1 stage 1-2"),
        ("backward-recv", 1, 0, "dp1 tp0 stage 1-2"),
        ("forward-recv", 0, None, "dp1 stage 3-0"),  # of virtual stages
        ("optimizer-clip-main-grad", 1, 0, "all"),
        ("embedding-grads-all-reduce", 1, 3, "embedding dp1 tp3"),
        ("layernorm-grads-all-reduce", 1, None, "rank 5"),
        ("grads-reduce-scatter", None, None, "stage 0"),
        ("params-all-gather", 3, 1, "stage 3 tp1"),
    ],
)
def test_groups_by_name(name: str, stage: int | None, tp: int | None, group: str) -> None:
    assert group_of_span(name, 5, 1, stage, tp, stages=4) == group


@pytest.mark.skipif(not STRAGGLERS.is_file(), reason=f"no recorded job at {STRAGGLERS}")
def test_the_recorded_job_needs_no_mapping() -> None:
    spans, ranks, _ = read(STRAGGLERS)
    assert len(spans) == 6784
    assert [(row["rank"], row["dp"], row["stage"]) for row in ranks] == [(i, i % 2, i // 2) for i in range(8)]
    sends = {row["group"] for row in spans if row["name"] == "forward-send" and row["rank"] == 2}
    receives_there = {row["group"] for row in spans if row["name"] == "forward-recv" and row["rank"] == 4}
    assert sends == receives_there == {"dp0 stage 1-2"}
    assert {row["microbatch"] for row in spans if row["name"] == "forward-compute"} == {0, 1, 2, 3}
    assert {row["microbatch"] for row in spans if row["name"] == "forward-send"} == {None}
