"""Pictures of many ranks: what is drawn where, and that files are pictures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from matplotlib.axes import Axes
from matplotlib.image import imread
from test_ranks_text import report as simulated_report

from profiler_wrapper.analysis.ranks.model import RanksReport
from profiler_wrapper.ranks import open_ranks
from profiler_wrapper.recording.span_database import Database
from profiler_wrapper.reports.ranks_figures import draw_heat_map, heat_map_figure
from profiler_wrapper.reports.ranks_spans import drawn_steps, lane_spans, merged
from profiler_wrapper.reports.ranks_timeline import draw_timeline, timeline_figure
from profiler_wrapper.reports.ranks_trace import ranks_trace, write_ranks_trace
from simulated_jobs import QUIET, simulated
from small_rank_jobs import HOSTILE, MS, START_NS, STEPS, write_job

Job = tuple[Database, RanksReport]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    table = write_job(tmp_path_factory.mktemp("job") / "spans.csv")
    with open_ranks(table, spans=table) as (loaded, report):
        yield loaded.database, report


def is_a_picture(path: Path) -> bool:
    pixels = imread(path)
    return bool(pixels.shape[0] > 100 and pixels.shape[1] > 500 and pixels[..., :3].std() > 0.02)


def bars(axes: Axes, kind: str) -> list[tuple[float, float, float]]:
    """(middle of the lane, start, end) of each bar of a kind, in ms."""
    found = []
    for collection in axes.collections:
        if collection.get_gid() == kind:
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)  # type: ignore[union-attr]
                found.append((round((low + high) / 2), round(left, 3), round(right, 3)))
    return sorted(found)


def test_timeline_lanes(job: Job) -> None:
    database, report = job
    steps = drawn_steps(report)
    spans = lane_spans(database, [0, 1, 2, 3], steps, layer=report.verdict.layer)
    (axes,) = timeline_figure(report, spans, [0, 1, 2, 3], steps).axes
    forward = bars(axes, "forward")
    assert len(forward) == 4 * 3
    assert [bar for bar in forward if bar[0] == 0] == [(0, 2.0, 12.0), (0, 102.0, 112.0), (0, 202.0, 212.0)]
    assert next(bar for bar in forward if bar[0] == 2) == (2, 2.0, 62.0)
    assert next(bar for bar in bars(axes, "communication") if bar[0] == 1) == (1, 12.0, 80.0)
    assert bars(axes, "layer") == [(2, 7.0, 62.0), (2, 107.0, 162.0), (2, 207.0, 262.0)]
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [label.get_color() != labels[0].get_color() for label in labels] == [False, False, True, False]


def test_heat_map_cells(job: Job) -> None:
    _, report = job
    kinds, blocks = [axes for axes in heat_map_figure(report).axes if axes.images and axes.get_xlabel() == "rank"]
    cells = np.asarray(kinds.images[0].get_array())
    names = [label.get_text() for label in kinds.get_yticklabels()]
    assert cells[names.index("forward")].tolist() == pytest.approx([0, 0, 50, 0])
    assert np.count_nonzero(np.abs(cells) > 1e-6) == 1
    cells = np.asarray(blocks.images[0].get_array())
    assert cells.tolist() == pytest.approx(np.array([[0, 0, 0, 0], [0, 0, 50, 0]]))
    (marks,) = [line for line in kinds.lines if line.get_gid() == "culprit"]
    assert list(marks.get_xdata()) == [2]


def test_files_are_pictures(job: Job, tmp_path: Path) -> None:
    database, report = job
    draw_heat_map(report, tmp_path / "heat_map.png")
    draw_timeline(report, database, tmp_path / "timeline.png", ranks=[0, 2], steps=[1])
    assert is_a_picture(tmp_path / "heat_map.png") and is_a_picture(tmp_path / "timeline.png")
    draw_timeline(report, database, tmp_path / "none.png", steps=[999])
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_a_thousand_ranks_stay_legible() -> None:
    report = simulated_report(simulated("forward", seed=0, ranks=1024, rank=700, steps=10, noise=QUIET))
    figure = heat_map_figure(report)
    (kinds, *_) = [axes for axes in figure.axes if axes.images and axes.get_xlabel() == "rank"]
    cells = np.asarray(kinds.images[0].get_array())
    row = [label.get_text() for label in kinds.get_yticklabels()].index("forward")
    assert cells.shape[1] == 256 and int(cells[row].argmax()) == 175 and cells[row, 175] > 55
    assert "700" in [label.get_text() for label in kinds.get_xticklabels()]
    assert len(kinds.get_xticklabels()) <= 40 and figure.get_figwidth() <= 22.01


def test_merged_intervals() -> None:
    start, end = merged(np.array([0, 10, 12, 50]), np.array([5, 40, 20, 60]), 6.0)
    assert start.tolist() == [0, 50] and end.tolist() == [40, 60]
    start, end = merged(np.array([0, 10]), np.array([5, 20]), 4.0)
    assert start.tolist() == [0, 10] and end.tolist() == [5, 20]


# --- the trace ---


def test_trace_times_and_places(job: Job, tmp_path: Path) -> None:
    database, report = job
    path = tmp_path / "timeline_trace.json.gz"
    write_ranks_trace(report, database, path)
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    assert data["baseTimeNanoseconds"] == START_NS
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 4 * STEPS * 7 == report.spans
    forward = [one for one in spans if one["name"] == "forward" and one["pid"] == 2 and one["args"]["step"] == 3]
    assert [(one["ts"], one["dur"]) for one in forward] == [(302_000.0, 60_000.0)]
    reduce = next(one for one in spans if one["cat"] == "communication" and one["pid"] == 0)
    assert reduce["args"]["bytes"] == 1 << 20 and reduce["args"]["group"] == "world"
    names = {one["pid"]: one["args"]["name"] for one in data["traceEvents"] if one["name"] == "process_name"}
    order = {
        one["pid"]: one["args"]["sort_index"] for one in data["traceEvents"] if one["name"] == "process_sort_index"
    }
    assert names == {rank: f"rank {rank}" for rank in range(4)} and order == {rank: rank for rank in range(4)}
    labels = [one for one in data["traceEvents"] if one["name"] == "process_labels"]
    assert [(one["pid"], one["args"]["labels"]) for one in labels] == [(2, "named by the verdict")]
    nests(spans)


def nests(spans: list[dict[str, Any]]) -> None:
    """Spans of a lane lie within one another or apart."""
    for lane in {(one["pid"], one["tid"]) for one in spans}:
        mine = sorted((one["ts"], -one["dur"]) for one in spans if (one["pid"], one["tid"]) == lane)
        ends: list[float] = []
        for start, negative in mine:
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 1e-6
            ends.append(start - negative)


def test_a_large_trace_holds_few_steps(job: Job) -> None:
    database, report = job
    data = ranks_trace(report, database, most=100)
    steps = {one["args"]["step"] for one in data["traceEvents"] if one["ph"] == "X"}
    assert steps == set(drawn_steps(report)) and "all steps but" in data["metadata"]["left_out"]
    data = ranks_trace(report, database, most=30)
    assert len([one for one in data["traceEvents"] if one["ph"] == "X"]) == 4 * 7


def test_clocks_are_aligned(tmp_path: Path) -> None:
    """A rank on another host whose clock is 30 ms ahead: its all-reduces end with the others' nevertheless."""
    table = write_job(tmp_path / "spans.csv", ahead_ns={1: 30 * MS})
    with open_ranks(table, spans=table) as (loaded, report):
        data = ranks_trace(report, loaded.database)
        spans = lane_spans(loaded.database, [0, 1], [3])
    ends: dict[int, dict[int, float]] = {}
    for one in data["traceEvents"]:
        if one["ph"] == "X" and one["cat"] == "communication":
            ends.setdefault(one["args"]["step"], {})[one["pid"]] = one["ts"] + one["dur"]
    assert len(ends) == STEPS
    assert all(max(of_step.values()) - min(of_step.values()) < 10 for of_step in ends.values())  # microseconds
    begins = [int(spans.of_rank(rank).start_ns.min()) for rank in (0, 1)]
    assert abs(begins[1] - begins[0]) < 10_000


def test_hostile_names_are_drawn_and_written(tmp_path: Path) -> None:
    table = write_job(tmp_path / "spans.csv", layer="blocks.1" + HOSTILE, group=HOSTILE)
    with open_ranks(table, spans=table) as (loaded, report):
        draw_heat_map(report, tmp_path / "heat_map.png")
        draw_timeline(report, loaded.database, tmp_path / "timeline.png")
        data = ranks_trace(report, loaded.database)
    assert is_a_picture(tmp_path / "heat_map.png") and is_a_picture(tmp_path / "timeline.png")
    assert any(one["name"] == "blocks.1" + HOSTILE for one in data["traceEvents"])
