"""The roofline plot: the points it is drawn from, its labels, and that a picture comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from profiler_wrapper.reports import figures
from profiler_wrapper.reports.roofline import HOW_TO_GET_PEAKS, Point, applies, draw_roofline, not_shown, roofline
from profiler_wrapper.tables.model import LayerRow, UncountedRow
from sample_results import Layer, analysis_of, llama
from sample_work import GIGA, MEGA, worked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def points(blocks: int = 4) -> dict[tuple[str, str], Point]:
    return {(point.name, point.phase): point for point in roofline(worked(llama(blocks))).points}


def test_like_parts_of_all_blocks_are_one_point_a_phase() -> None:
    found = points(100)
    assert {name for name, _ in found} == {
        "self_attn",
        "mlp",
        "input_layernorm",
        "LlamaDecoderLayer itself",
    }  # others are under 0.4 % of the time
    assert {phase for name, phase in found if name == "mlp"} == {"forward", "backward"}
    assert found["mlp", "backward"].time_ns == 100 * 400_000


def test_a_point_is_at_its_flops_a_byte_and_a_second() -> None:
    attention = points()["self_attn", "forward"]
    assert (attention.flops, attention.bytes_moved) == (4 * 40 * GIGA, 4 * 100 * MEGA)  # 40 of 50 G are not masked
    assert attention.flops_per_byte == 400
    assert attention.flops_per_s == pytest.approx(40 * GIGA / 100e-6)
    assert (attention.of_roof, attention.bound, attention.kind) == (pytest.approx(0.4), "compute", "attention")


def test_what_has_no_flops_has_a_time_at_the_roof() -> None:
    norm = points()["input_layernorm", "backward"]
    assert (norm.flops_per_byte, norm.flops_per_s) == (None, None)
    assert (norm.of_roof, norm.bound) == (pytest.approx(2 / 3), "memory")
    assert points()["optimizer", "optimizer"].of_roof == pytest.approx(60 / 90)


def test_the_roofs_are_those_of_types_that_were_used() -> None:
    what = roofline(worked(llama(2)))
    assert what.flops_per_s == {"bfloat16": 1e15}
    assert what.bytes_per_s == 4e12
    assert what.source == "a document of the maker"
    none = roofline(worked(llama(2), peaks=None))
    assert (none.flops_per_s, none.bytes_per_s) == ({}, None)


def test_layers_in_a_part_are_points_and_the_part_itself_is_one() -> None:
    layers = [Layer("M", "M")]
    for i in range(3):
        layers += [
            Layer(f"layers.{i}", "Block", "block"),
            Layer(f"layers.{i}.norm", "Norm", "norm", {"forward": 10.0}),
            Layer(f"layers.{i}.attn", "Attn", "attention", {"forward": 100.0}),
            Layer(f"layers.{i}.attn.q_proj", "Linear", "other", {"forward": 20.0}),
            Layer(f"layers.{i}.attn.k_proj", "Linear", "other", {"forward": 20.0}),
            Layer(f"layers.{i}.attn.rope", "Rope", "other", {"forward": 5.0}),
        ]
    found = {point.name: point for point in roofline(worked(analysis_of(layers))).points}
    assert set(found) == {"norm", "attn itself", "attn: 2 Linear", "attn.rope"}
    assert found["attn itself"].flops == 3 * 40 * GIGA
    assert found["attn: 2 Linear"].time_ns == 3 * 40_000
    assert found["attn: 2 Linear"].kind == "attention"


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, **more: object) -> Figure:
    """The figure that is written."""
    kept: list[Figure] = []
    save = figures.save
    monkeypatch.setattr(figures, "save", lambda figure, to: (kept.append(figure), save(figure, to)))
    draw_roofline(worked(llama(40), **more), path)  # type: ignore[arg-type]
    (figure,) = kept
    return figure


def labels(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_names_lie_on_nothing_and_the_roofs_have_their_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = drawn(monkeypatch, tmp_path / "roofline.png")
    top = figure.axes[0]
    assert {"1000 TFLOP/s bfloat16", "4000 GB/s", "mlp", "self_attn", "lm_head"} <= set(labels(top))
    boxes = [text.get_window_extent() for text in top.texts]
    legend = top.get_legend()
    assert legend is not None
    boxes.append(legend.get_window_extent())
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    assert "a document of the maker" in figure.get_supxlabel()
    assert "NVIDIA H200" in figure.get_suptitle()
    assert " 75 % of the roof, bound by compute" in labels(figure.axes[1])


def test_without_peaks_points_are_drawn_and_how_to_get_roofs_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = drawn(monkeypatch, tmp_path / "roofline.png", peaks=None)
    (top,) = figure.axes
    assert "mlp" in labels(top)
    assert figure.get_supxlabel().replace("\n", " ") == HOW_TO_GET_PEAKS
    assert not top.get_lines()


def test_what_has_no_place_under_the_roof_is_said_with_its_share() -> None:
    analysis = worked(llama(2))
    assert not_shown(roofline(analysis), analysis) == ""

    def unknown(row: LayerRow) -> LayerRow:
        if row.kind != "mlp" or row.phase != "forward":
            return row
        return replace(row, self_bytes_moved_per_step=None, self_roof_time_per_step_ns=None)

    untold = UncountedRow(op="aten::histc", class_name="other", phase="forward", layers=(), count=1, time_per_step_ns=1)
    part = replace(analysis, layers=tuple(map(unknown, analysis.layers)), untold_bytes=(untold,))
    (mlp,) = (p for p in roofline(analysis).points if (p.name, p.phase) == ("mlp", "forward"))
    share = 100 * mlp.time_ns * len(analysis.steps) / analysis.time.total_ns
    assert not_shown(roofline(part), part) == (
        f"not shown: mlp (forward), {share:.1f} % of the time, bytes not known (no rule for aten::histc)"
    )


def test_a_picture_comes_out(tmp_path: Path) -> None:
    draw_roofline(worked(llama(2)), tmp_path / "roofline.png")
    from PIL import Image

    with Image.open(tmp_path / "roofline.png") as image:
        assert image.width == round(12.04 * figures.DPI)


def test_without_flops_there_is_no_plot() -> None:
    assert applies(worked(llama(2)))
    assert not applies(llama(2))


def test_what_cannot_be_placed_is_said(tmp_path: Path) -> None:
    analysis = worked(llama(2))
    unknown = replace(analysis, layers=tuple(replace(row, self_bytes_moved_per_step=None) for row in analysis.layers))
    draw_roofline(unknown, tmp_path / "roofline.png")
    from PIL import Image

    with Image.open(tmp_path / "roofline.png") as image:
        assert image.height < 300
