"""Pictures of many ranks: what is drawn where, and that files are pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("duckdb")


from page_files import page_data
from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.figures import (
    NAMED_COLOR,
    PIXELS,
    draw_heat_map,
    draw_timeline,
    heat_map_figure,
    lane_in,
    timeline_figure,
    write_ranks_page,
)
from profiler_wrapper.ranks.load import open_ranks
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.timeline import drawn_steps, read_timeline
from simulated_jobs import QUIET, report_of, simulated
from small_rank_jobs import HOSTILE, write_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Job = tuple[Database, RanksReport]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    table = write_job(tmp_path_factory.mktemp("job") / "spans.csv")
    with open_ranks(table) as (loaded, report):
        yield loaded.database, report


def is_a_picture(path: Path) -> bool:
    from matplotlib.image import imread

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
    (axes,) = timeline_figure(report, read_timeline(report, database, [0, 1, 2, 3], pixels=PIXELS)).axes
    forward = bars(axes, "forward")
    assert len(forward) == 4 * 3
    assert [bar for bar in forward if bar[0] == 0] == [(0, 2.0, 12.0), (0, 102.0, 112.0), (0, 202.0, 212.0)]
    assert next(bar for bar in forward if bar[0] == 2) == (2, 2.0, 62.0)
    # Rank 2 comes last, at 62 ms, so 18 ms are the transfer; what others have before it is waiting.
    assert next(bar for bar in bars(axes, "communication") if bar[0] == 1) == (1, 62.0, 80.0)
    assert next(bar for bar in bars(axes, "waiting") if bar[0] == 1) == (1, 12.0, 62.0)
    assert not [bar for bar in bars(axes, "waiting") if bar[0] == 2]
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
    assert [label.get_color() == NAMED_COLOR for label in kinds.get_xticklabels()] == [False, False, True, False]


def test_files_are_pictures(job: Job, tmp_path: Path) -> None:
    database, report = job
    draw_heat_map(report, tmp_path / "heat_map.png")
    draw_timeline(report, database, tmp_path / "timeline.png", ranks=[0, 2])
    assert is_a_picture(tmp_path / "heat_map.png") and is_a_picture(tmp_path / "timeline.png")
    draw_timeline(report, database, tmp_path / "none.png", ranks=[999])
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_a_thousand_ranks_stay_legible() -> None:
    report = report_of(simulated("forward", seed=0, ranks=1024, rank=700, steps=10, noise=QUIET))
    figure = heat_map_figure(report)
    (kinds, *_) = [axes for axes in figure.axes if axes.images and axes.get_xlabel() == "rank"]
    cells = np.asarray(kinds.images[0].get_array())
    row = [label.get_text() for label in kinds.get_yticklabels()].index("forward")
    assert cells.shape[1] == 256 and int(cells[row].argmax()) == 175 and cells[row, 175] > 55
    assert "700" in [label.get_text() for label in kinds.get_xticklabels()]
    assert len(kinds.get_xticklabels()) <= 40 and figure.get_figwidth() <= 22.01


def test_what_lies_close_together_is_one_bar(job: Job) -> None:
    database, report = job
    for pixels, bars_of_forward in ((1000, 3), (2, 1)):  # of 280 ms, in each 100 ms another
        drawn = read_timeline(report, database, [0], pixels=pixels)
        (forward,) = [one for one in drawn.bars if one.kind == "forward"]
        assert len(forward.starts_us) == bars_of_forward
        assert (forward.starts_us[0], forward.starts_us[-1] + forward.lengths_us[-1]) == (2_000, 212_000)


def test_the_page_has_the_bars_of_all_steps(job: Job, tmp_path: Path) -> None:
    database, report = job
    write_ranks_page(report, database, tmp_path / "report.html")
    timeline = page_data(tmp_path / "report.html")["timeline"]
    assert timeline["steps"] == report.own.steps.tolist() and timeline["opens_at"] == drawn_steps(report)
    (forward,) = [one for one in timeline["bars"] if one["kind"] == "forward"]
    of_rank = [length for lane, length in zip(forward["lanes"], forward["lengths_us"], strict=True) if lane == 2]
    assert of_rank == [60_000] * len(report.own.steps)


def test_without_transfers_communication_is_one_bar(tmp_path: Path) -> None:
    """Each rank in a group of its own: nobody else tells of its collectives."""
    import csv

    table = write_job(tmp_path / "spans.csv")
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["group"] = f"alone {row['rank']}" if row["group"] else ""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with open_ranks(table) as (loaded, report):
        drawn = read_timeline(report, loaded.database, [0, 1], pixels=PIXELS)
        (axes,) = timeline_figure(report, drawn).axes
    assert not bars(axes, "waiting")
    assert bars(axes, "communication")[0] == (0, 12.0, 80.0)
    legend = axes.get_legend()
    assert legend is not None
    assert "communication, with waiting" in [text.get_text() for text in legend.get_texts()]


def test_lanes_of_a_thousand_ranks_are_one_picture() -> None:
    assert lane_in(4) > lane_in(64) > lane_in(1024) > 0
    assert 1024 * lane_in(1024) <= 30 and 64 * lane_in(64) >= 10


def test_memory_and_mfu_of_ranks() -> None:
    report = report_of(simulated("forward", seed=0, rank=3, noise=QUIET))
    peak, mfu = np.full(8, 60.0 * 2**30), np.full(8, 0.4)
    peak[5], mfu[3], mfu[6] = 70.0 * 2**30, 0.3, np.nan
    figure = heat_map_figure(replace(report, peak_bytes=peak, mfu=mfu))
    memory, used = [axes for axes in figure.axes if axes.get_ylabel() in ("GiB", "%")]
    heights = [bar.get_height() for bar in memory.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([60, 60, 60, 60, 60, 70, 60, 60]) and "GiB: median 60" in memory.get_title(
        loc="left"
    )
    heights = [bar.get_height() for bar in used.patches]  # type: ignore[attr-defined]
    assert heights[:6] == pytest.approx([40, 40, 40, 30, 40, 40]) and np.isnan(heights[6])
    red = [bar.get_facecolor()[0] > 0.7 and bar.get_facecolor()[1] < 0.1 for bar in used.patches]
    assert red == [rank == 3 for rank in range(8)], "the one that uses less than the others"
    figure = heat_map_figure(replace(report, peak_bytes=np.full(8, 60.0 * 2**30)))
    (memory,) = [axes for axes in figure.axes if axes.get_ylabel() == "GiB"]
    assert len({bar.get_facecolor() for bar in memory.patches}) == 1, "all hold as much, whomever the verdict names"
    marked = [label.get_text() for label in memory.get_xticklabels() if label.get_color() == NAMED_COLOR]
    assert marked == ["3"], f"{NAMED_COLOR} below the axis is the named rank's alone"


def test_of_a_slow_stage_the_cells_of_the_mesh_are_framed() -> None:
    report = report_of(simulated("stage", seed=0, ranks=8, stages=4, stage=3, noise=QUIET))
    (mesh,) = [axes for axes in heat_map_figure(report).axes if axes.get_xlabel() == "pipeline stage"]
    framed = sorted(patch.get_xy() for patch in mesh.patches if patch.get_gid() == "named")  # type: ignore[attr-defined]
    assert framed == [(2.5, -0.5), (2.5, 0.5)]


def test_hostile_names_are_drawn(tmp_path: Path) -> None:
    table = write_job(tmp_path / "spans.csv", layer="blocks.1" + HOSTILE, group=HOSTILE)
    with open_ranks(table) as (loaded, report):
        draw_heat_map(report, tmp_path / "heat_map.png")
        draw_timeline(report, loaded.database, tmp_path / "timeline.png")
    assert is_a_picture(tmp_path / "heat_map.png") and is_a_picture(tmp_path / "timeline.png")


def test_drawn_steps_follow_one_another() -> None:
    """Steps that were recorded apart would be mostly the pause between them."""
    report = report_of(simulated("forward", seed=0, rank=3, steps=6, noise=QUIET))
    numbers = np.array([1, 2, 300, 301, 302, 600])
    assert drawn_steps(replace(report, own=replace(report.own, steps=numbers))) == [300, 301, 302]
    assert len(drawn_steps(replace(report, own=replace(report.own, steps=100 * numbers)))) == 1
