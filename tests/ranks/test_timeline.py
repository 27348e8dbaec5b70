"""The Chrome trace of many ranks: times, places, arrows, and what is left out of a large one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

import rank_spans
from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.load import open_ranks
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.timeline import drawn_steps, read_timeline, write_ranks_trace
from small_rank_jobs import HOSTILE, MS, START_NS, STEPS, write_job
from span_tables import span

Job = tuple[Database, RanksReport]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with open_ranks(write_job(tmp_path_factory.mktemp("job") / "spans.csv")) as (loaded, report):
        yield loaded.database, report


def written(report: RanksReport, database: Database, folder: Path, **about: Any) -> dict[str, Any]:
    path = folder / "timeline_trace.json.gz"
    write_ranks_trace(report, database, path, **about)
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def spans_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in data["traceEvents"] if one["ph"] == "X"]


def told(data: dict[str, Any], what: str, key: str) -> dict[int, Any]:
    return {one["pid"]: one["args"][key] for one in data["traceEvents"] if one["name"] == what}


def test_trace_times_and_places(job: Job, tmp_path: Path) -> None:
    database, report = job
    data = written(report, database, tmp_path)
    assert data["baseTimeNanoseconds"] == START_NS
    spans = spans_of(data)
    assert len(spans) == 4 * STEPS * 7 == report.spans
    forward = [one for one in spans if one["name"] == "forward" and one["pid"] == 2 and one["args"]["step"] == 3]
    assert [(one["ts"], one["dur"]) for one in forward] == [(302_000.0, 60_000.0)]
    reduce = next(one for one in spans if one["cat"] == "communication" and one["pid"] == 0)
    assert reduce["args"]["bytes"] == 1 << 20 and reduce["args"]["group"] == "world"
    names, order = told(data, "process_name", "name"), told(data, "process_sort_index", "sort_index")
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    assert order == {0: 0, 1: 1, 2: 2, 3: 3}
    assert told(data, "process_labels", "labels") == {2: "named by the verdict"}
    assert data["metadata"]["verdict"] == report.verdict.sentence and data["metadata"]["left_out"] == ""
    nests(spans)


def test_as_the_format_wants_it(job: Job, tmp_path: Path) -> None:
    """ "Trace Event Format": what each kind of event must have, and numbers, not texts."""
    database, report = job
    events = written(report, database, tmp_path)["traceEvents"]
    needed = {"X": {"ts", "dur", "cat"}, "M": {"args"}, "s": {"ts", "id", "cat"}, "f": {"ts", "id", "cat", "bp"}}
    threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    for one in events:
        assert needed[one["ph"]] | {"name", "pid", "tid"} <= one.keys(), one
        assert all(isinstance(one[key], (int, float)) for key in ("pid", "tid", "ts", "dur") if key in one), one
        assert one.get("dur", 0) >= 0 and (one["ph"] == "M" or (one["pid"], one["tid"]) in threads), one


def nests(spans: list[dict[str, Any]]) -> None:
    """Spans of a lane lie within one another or apart."""
    for lane in {(one["pid"], one["tid"]) for one in spans}:
        mine = sorted((one["ts"], -one["dur"]) for one in spans if (one["pid"], one["tid"]) == lane)
        ends: list[float] = []
        for start, negative in mine:
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 1e-6, f"spans of lane {lane} cross"
            ends.append(start - negative)


def test_arrows_lead_from_the_late_rank_to_those_that_waited(job: Job, tmp_path: Path) -> None:
    database, report = job
    data = written(report, database, tmp_path)
    starts = {one["id"]: one for one in data["traceEvents"] if one["ph"] == "s"}
    ends = {one["id"]: one for one in data["traceEvents"] if one["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 3 * STEPS
    reduces = [one for one in spans_of(data) if one["cat"] == "communication"]
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] == 2 and end["pid"] != 2
        for arrow in (start, end):
            assert [
                one
                for one in reduces
                if (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"])
                and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
            ], "an arrow binds to a span around its instant"


def test_a_large_trace_holds_less_and_says_what(job: Job, tmp_path: Path) -> None:
    database, report = job
    steps = drawn_steps(report)
    data = written(report, database, tmp_path, most=100)
    assert {one["args"]["step"] for one in spans_of(data)} == set(steps)
    assert data["metadata"]["left_out"] == f"all steps but {steps[0]}-{steps[-1]}"
    assert len(spans_of(written(report, database, tmp_path, most=30))) == 4 * 7
    assert len(spans_of(written(report, database, tmp_path, most=21))) == 4 * 5, "without spans within others"


def test_only_chosen_ranks(job: Job, tmp_path: Path) -> None:
    database, report = job
    data = written(report, database, tmp_path, ranks=[0, 2])
    assert {one["pid"] for one in spans_of(data)} == {0, 2}
    assert data["metadata"]["left_out"] == "all ranks but 0, 2"


def test_clocks_are_aligned(tmp_path: Path) -> None:
    """A rank on another host whose clock is 30 ms ahead: its all-reduces end with the others' nevertheless."""
    with open_ranks(write_job(tmp_path / "spans.csv", ahead_ns={1: 30 * MS})) as (loaded, report):
        data = written(report, loaded.database, tmp_path)
        drawn = read_timeline(report, loaded.database, [0, 1], pixels=3000)
    ends: dict[int, dict[int, float]] = {}
    for one in spans_of(data):
        if one["cat"] == "communication":
            ends.setdefault(one["args"]["step"], {})[one["pid"]] = one["ts"] + one["dur"]
    assert len(ends) == STEPS
    assert all(np.ptp(list(of_step.values())) < 10 for of_step in ends.values()), "in microseconds"
    begins = [min(float(bars.starts_us[bars.lanes == lane].min(initial=1e6)) for bars in drawn.bars) for lane in (0, 1)]
    assert abs(begins[1] - begins[0]) < 10


def test_what_overlaps_within_another_has_a_lane_of_its_own(tmp_path: Path) -> None:
    rows = rank_spans.job(ranks=2, steps=4)
    for name, start_ms in (("early", 1), ("late", 3)):
        rows += [span(rank, 1, "other", rank_spans.STEP_NS + start_ms * MS, 4 * MS, name=name) for rank in range(2)]
    rank_spans.write_logs(tmp_path, rows, ranks=2)
    with open_ranks(tmp_path) as (loaded, report):
        spans = spans_of(written(report, loaded.database, tmp_path))
    nests(spans)
    lanes = {one["name"]: one["tid"] for one in spans if one["pid"] == 0}
    assert lanes["late"] not in (lanes["early"], lanes["forward"])


def test_hostile_names_are_written(tmp_path: Path) -> None:
    table = write_job(tmp_path / "spans.csv", layer="blocks.1" + HOSTILE, group=HOSTILE)
    with open_ranks(table) as (loaded, report):
        data = written(report, loaded.database, tmp_path)
    assert any(one["name"] == "blocks.1" + HOSTILE for one in data["traceEvents"])


def test_the_same_spans_are_the_same_file(job: Job, tmp_path: Path) -> None:
    database, report = job
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_ranks_trace(report, database, tmp_path / name)
    first = (tmp_path / "a.json.gz").read_bytes()
    assert first == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(first) == (tmp_path / "c.json").read_bytes()
