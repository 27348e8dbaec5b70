"""The plots: the numbers they are drawn from, their labels, and that a picture comes out."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.figures import DPI, layer_ticks, short_names
from profiler_wrapper.reports.folding import layer_bars, rest_bars
from profiler_wrapper.reports.plots import (
    StepLines,
    averages,
    caption,
    draw_memory,
    draw_steps,
    draw_time,
    step_lines,
    why_retained,
)
from profiler_wrapper.tables.model import Analysis
from sample_results import Layer, analysis_of, llama


def test_bars_are_the_blocks_and_what_stands_beside_them_in_model_order() -> None:
    bars = layer_bars(llama(3))
    assert [bar.layer for bar in bars] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]
    assert [bar.block for bar in bars] == [False, True, True, True, False, False]


def test_bars_are_ms_per_step() -> None:
    bar = layer_bars(llama(3, steps=5, recompute=True))[1]
    assert bar.times_ms == pytest.approx({"forward": 0.313, "backward": 0.626, "recompute": 0.313})
    assert bar.attention_ms == pytest.approx({"flash": 0.4})
    assert (bar.entry_mib, bar.exit_mib, bar.reserved_mib) == (1008, 1062, 1562)
    assert bar.retained_mib == 54


def test_bars_and_what_is_beside_them_are_the_total() -> None:
    analysis = llama(3, unattributed_us={"no forward link": 30.0})
    bars = layer_bars(analysis)
    rest = rest_bars(analysis, bars)
    # other: root 5, model 4 us forward and twice that backward, and 10 us a step that have no layer
    assert rest == pytest.approx({"optimizer": 0.090, "outside these layers": 0.037})
    assert sum(bar.time_ms for bar in bars) + sum(rest.values()) == pytest.approx(analysis.time.total_ns / 3e6)


def test_nothing_beside_the_layers_is_no_bar() -> None:
    analysis = analysis_of([Layer("M", "M"), Layer("M.a", "A", "block", {"forward": 5.0})])
    assert rest_bars(analysis, layer_bars(analysis)) == {}


def test_without_blocks_the_first_layers_that_are_several() -> None:
    layers = [Layer("M", "M"), Layer("net", "Net")]
    layers += [Layer(f"net.{name}", "Linear", self_us={"forward": 1.0}) for name in ("a", "b", "c")]
    assert [bar.layer for bar in layer_bars(analysis_of(layers))] == ["net.a", "net.b", "net.c"]


def test_nested_blocks_are_part_of_the_outer_one() -> None:
    layers = [Layer("M", "M")]
    for i in range(2):
        layers.append(Layer(f"down.{i}", "Down", "block"))
        layers += [Layer(f"down.{i}.resnets.{k}", "Res", "block", {"forward": 2.0}) for k in range(2)]
    bars = layer_bars(analysis_of(layers))
    assert [(bar.layer, bar.time_ms) for bar in bars] == [("down.0", 0.004), ("down.1", 0.004)]


def test_averages_are_over_the_blocks() -> None:
    analysis = llama(4, steps=3)
    numbers = averages(analysis, layer_bars(analysis))
    assert (numbers.layers, numbers.what, numbers.flash) == (4, "block", ("flash",))
    assert numbers.average_ms == pytest.approx(0.939)
    assert numbers.attention_ms == pytest.approx(0.3)
    assert numbers.ratio == pytest.approx(0.3 / 0.939)


def test_caption_has_the_words_of_the_seed() -> None:
    analysis = llama(4)
    text = caption(analysis, layer_bars(analysis))
    assert "Average Time: 0.939 ms     FA Average Time: 0.300 ms     FA / Average Time Ratio: 0.319" in text


def test_on_a_cpu_the_caption_is_in_plain_words() -> None:
    analysis = replace(llama(4), time_basis="cpu")
    head, what = caption(analysis, layer_bars(analysis)).split("\n")
    assert head == "attention 0.300 ms of 0.939 ms"
    assert what.startswith("per block (mean of 4), ") and what.endswith("; attention by flash")


def test_averages_are_over_blocks_that_are_alike() -> None:
    layers = [Layer("M", "M")]
    layers += [Layer(f"encoder.{i}", "E", "block", {"forward": 1000.0}) for i in range(6)]
    layers += [Layer(f"decoder.{i}", "D", "block", {"forward": 4000.0}, "flash") for i in range(3)]
    analysis = analysis_of(layers)
    text = caption(analysis, layer_bars(analysis))
    assert "Average Time: 4.000 ms" in text
    assert "per block of decoder.* (mean of 3)" in text


def test_layers_that_are_not_alike_have_no_ratio() -> None:
    layers = [Layer("M", "M"), Layer("a", "A", self_us={"forward": 1000.0}, attention="flash"), Layer("b", "B")]
    analysis = analysis_of(layers)
    text = caption(analysis, layer_bars(analysis))
    assert "FA Average Time: 0.500 ms" in text
    assert "per layer (mean of 2)" in text
    assert "Ratio" not in text


def test_caption_names_the_backend_where_it_is_not_flash() -> None:
    analysis = llama(4, backend="math")
    text = caption(analysis, layer_bars(analysis))
    assert "Attention Average Time: 0.300 ms" in text
    assert "no FA: attention is math" in text


def test_fa_is_flash_attention_alone() -> None:
    layers = [Layer("M", "M"), Layer("b.0", "B", "block", {"forward": 1000.0}, "flash")]
    layers += [Layer("b.1", "B", "block", {"forward": 3000.0}, "math")]
    analysis = analysis_of(layers)
    numbers = averages(analysis, layer_bars(analysis))
    assert (numbers.attention_ms, numbers.average_ms, numbers.others) == (0.5, 2.0, ("math",))
    assert "FA: attention by flash, without math" in caption(analysis, layer_bars(analysis))


@pytest.mark.parametrize(("kernel", "flash"), [("flash_fwd_kernel<128>", ("external",)), ("fmha_cutlassF", ())])
def test_an_external_backend_is_flash_if_its_kernels_are(kernel: str, flash: tuple[str, ...]) -> None:
    analysis = llama(2, backend="external")
    analysis = replace(analysis, attention=tuple(replace(row, kernels=(kernel,)) for row in analysis.attention))
    numbers = averages(analysis, layer_bars(analysis))
    assert numbers.flash == flash


def test_step_lines() -> None:
    lines = step_lines(llama(1, steps=3))
    assert lines.steps == (2, 3, 4)
    assert lines.total_ms == pytest.approx((1.575, 1.575, 1.575))
    assert lines.phases_ms["backward"] == pytest.approx((0.99, 0.99, 0.99))
    assert lines.attention_ms == pytest.approx((0.3, 0.3, 0.3))


def test_reserved_0_is_not_known() -> None:
    analysis = llama(1)
    analysis = replace(analysis, layers=tuple(replace(row, reserved_bytes=0.0) for row in analysis.layers))
    assert layer_bars(analysis)[0].reserved_mib is None


# ---- labels -----------------------------------------------------------------------------------


def test_short_names_stay_apart() -> None:
    assert short_names(["vae.layers.0", "dit.layers.0", "a.norm", "lm_head"]) == [
        "vae.layers.0", "dit.layers.0", "norm", "lm_head",
    ]  # fmt: skip


def test_all_labels_where_there_is_room() -> None:
    layers = ["m.embed", *(f"m.layers.{i}" for i in range(3)), "m.norm"]
    assert layer_ticks(layers, apart=1, numbers_apart=1) == ([0, 1, 2, 3, 4], ["embed", "layers.0", "1", "2", "norm"])


def test_fewer_labels_where_there_is_none() -> None:
    layers = ["m.embed", *(f"m.layers.{i}" for i in range(1000)), "m.norm"]
    positions, texts = layer_ticks(layers, apart=8, numbers_apart=70)
    assert texts[:2] == ["embed", "100"]
    assert all(after - before >= 8 for before, after in pairwise(positions))
    assert len(texts) <= 12


# ---- pictures ---------------------------------------------------------------------------------

CASES = {
    "one_layer": llama(1, steps=1),
    "small": llama(2, series={"aten::mm": (1.0, None, 2.0)}),
    "followed": llama(2, series={"aten::mm": (1.0, None, 2.0), "ratio[model.layers.0]": (0.5, 0.4, None)}),
    "much_beside": llama(2, outside_us={"optimizer": 90000.0, "other": 9.0}),
    "n12": llama(12, recompute=True, odd=5),
    "n126": llama(126, steps=12),
    "inference": llama(12, phases=("prefill", "decode"), outside_us={}),
    "from_file": replace(llama(4), calls=(), time_basis="cpu"),
    "names": analysis_of(
        [Layer("$M_{x}$\n\x1b", "M"), Layer("層" * 80, "L", "block", {"forward": 1.0}, "back$end"), Layer("b", "B")],
        series={"$x$" * 60: (1.0,)},
    ),
    "no_time": analysis_of([Layer("M", "M")]),
    "no_layers": analysis_of([], unattributed_us={"a trace without layers": 500.0}, memory=False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("draw", [draw_time, draw_memory])
def test_a_picture_comes_out(name: str, draw: object, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw(CASES[name], path)  # type: ignore[operator]
    with Image.open(path) as image:
        image.load()
        width, height = image.size
    assert 10 * DPI <= width <= 22 * DPI
    assert height <= 12 * DPI
    assert image.format == "PNG"


def test_more_layers_make_a_wider_picture(tmp_path: Path) -> None:
    widths = []
    for blocks in (12, 126):
        draw_time(llama(blocks), tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as image:
            widths.append(image.size[0])
    assert widths == [round(10 * DPI), pytest.approx((3.5 + 0.14 * 129) * DPI, abs=1)]


def test_what_only_gives_a_reason_is_a_small_picture(tmp_path: Path) -> None:
    heights = []
    for memory in (True, False):
        draw_memory(llama(2, memory=memory), tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as image:
            heights.append(image.size[1])
    assert heights[1] < heights[0] / 3


def test_steps_of_a_generation_stand_on_zero() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    lines = StepLines(
        steps=(1, 2, 30),
        total_ms=(5.0, 1.0, 1.0),
        phases_ms={"prefill": (5.0, 0.0, 0.0), "decode": (0.0, 1.0, 1.0)},
        attention_ms=(0.0, 0.5, 0.5),
    )
    draw_steps(axes, lines)
    heights = {bars.get_label(): [path.vertices[:, 1].max() for path in bars.get_paths()] for bars in axes.collections}
    assert heights == {"prefill": [5.0, 0.0, 0.0], "decode": [5.0, 1.0, 1.0]}
    attention = next(line for line in axes.lines if line.get_label() == "attention")
    assert list(attention.get_ydata()) == pytest.approx([math.nan, 0.5, 0.5], nan_ok=True)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "30"]


@pytest.mark.parametrize(
    ("phases", "why"), [(("forward",), "alive after the forward"), (("forward", "backward"), "kept")]
)
def test_retained_is_for_backward_only_where_there_is_one(phases: tuple[Phase, ...], why: str) -> None:
    assert why_retained(llama(2, phases=phases)).startswith(why)


def test_says_why_there_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("profiler_wrapper.reports.figures.say", lambda path, title, message: said.append(message))
    reason = "memory is not available, because the trace has no allocation events (profile_memory=True)"
    draw_memory(llama(2, memory=False, warnings=(reason,)), tmp_path / "plot.png")
    assert said == [
        "Memory by layer is not available, because the trace has no allocation events (profile_memory=True)."
    ]


def test_no_line_leads_from_a_layer_to_the_next_in_model_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's rotary_emb stands behind its norm and runs first: memory does not fall there."""
    drawn: list[Any] = []
    monkeypatch.setattr("profiler_wrapper.reports.figures.save", lambda figure, path: drawn.append(figure))
    draw_memory(llama(2), tmp_path / "plot.png")
    sizes = list(drawn[0].axes[0].lines[0].get_ydata())
    assert len(sizes) >= 6 and [math.isnan(size) for size in sizes] == [False, False, True] * (len(sizes) // 3)


def test_leaves_the_users_pyplot_alone(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from sample_results import llama; from profiler_wrapper.reports.plots import draw_time;"
        "assert 'matplotlib' not in sys.modules;"
        "draw_time(llama(2), sys.argv[2]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(tests), str(tmp_path / "p.png")], check=True, cwd=tests.parent)


def test_mathtext_is_not_read(tmp_path: Path) -> None:
    broken: Analysis = analysis_of([Layer("$\\frac{$", "M"), Layer("$\\x$.0", "B", "block", {"forward": 1.0}, "$\\q$")])
    draw_time(broken, tmp_path / "plot.png")
    draw_memory(broken, tmp_path / "plot.png")
