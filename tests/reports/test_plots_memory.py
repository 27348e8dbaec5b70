"""The plot of the categories over time: the numbers it is drawn from, and that a picture comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.figures import CATEGORY_COLORS, DPI, ink_on, mixed, ring_colors
from profiler_wrapper.reports.memory import moment_in_words
from profiler_wrapper.reports.plots import draw_categories, peak_text
from profiler_wrapper.tables.memory.use import memory_curve
from profiler_wrapper.tables.model import CATEGORIES, MemoryTimeline, MemoryUse
from sample_memory import MIB, leaking_memory, llama_memory, memory_at_peak, owner
from sample_results import llama


def timeline_of(times: list[int], totals: list[int], *, reserved: list[int] | None = None) -> MemoryTimeline:
    """All of it activations."""
    total = np.array(totals, dtype=np.int64)
    by_category = np.zeros((len(CATEGORIES), len(times)), dtype=np.int64)
    by_category[CATEGORIES.index("activation")] = total
    return MemoryTimeline(
        time_ns=np.array(times, dtype=np.int64),
        bytes_by_category=by_category,
        total_bytes=total,
        reserved_bytes=None if reserved is None else np.array(reserved, dtype=np.int64),
    )


def many_events(events: int) -> MemoryTimeline:
    """Waves with one high peak of a single event."""
    rng = np.random.default_rng(7)
    totals = (100 * MIB * (2 + np.sin(np.arange(events) / 3000))).astype(np.int64) + rng.integers(0, MIB, events)
    totals[events // 3] = 900 * MIB
    return timeline_of(np.arange(events).tolist(), totals.tolist(), reserved=np.maximum.accumulate(totals).tolist())


def test_the_text_names_the_largest_and_counts_the_others() -> None:
    use = llama_memory(12)
    lines = peak_text(use).splitlines()
    assert lines[0] == (
        "Peak in backward of step 3: 711.1 MiB allocated, 720.0 MiB reserved (8.9 MiB of it free). Held by:"
    )
    assert lines[1] == "activation: aten::silu in model.layers.{0..11}.mlp, 36.0 MiB"
    named = sum(float(line.rpartition(", ")[2].removesuffix(" MiB")) for line in lines[1:4])
    rest = float(lines[4].rpartition(": ")[2].removesuffix(" MiB"))
    assert named + rest == pytest.approx(use.peak.total_bytes / MIB, abs=0.3)


@pytest.mark.parametrize(
    ("step", "starts", "words"),
    [
        (3, ((0, "forward"),), "in forward of step 3"),
        (None, ((0, "forward"),), "in forward"),
        (3, (), "in step 3"),
        (None, (), ""),
    ],
)
def test_when_the_peak_was(step: int | None, starts: tuple[tuple[int, Phase], ...], words: str) -> None:
    use = llama_memory(2)
    peak = replace(use.peak, step=step)
    assert moment_in_words(replace(use, peak=peak, timeline=replace(use.timeline, phase_starts=starts))) == words


def million() -> MemoryUse:
    use = llama_memory(2)
    peak = replace(use.peak, time_ns=1_000_000 // 3, total_bytes=900 * MIB)
    return replace(use, timeline=many_events(1_000_000), peak=peak, moments=())


CASES: dict[str, Callable[[], MemoryUse | None]] = {
    "training": lambda: llama_memory(12),
    "cpu": lambda: llama_memory(12, device="cpu"),
    "many_steps": lambda: leaking_memory(2, steps=30),
    "one_allocation": lambda: memory_at_peak((owner("params", MIB, name="w"),)),
    "awkward_names": lambda: memory_at_peak((owner("params", MIB, name="$\\frac{$\n\ud800" * 30),)),
    "nothing_held": lambda: memory_at_peak((owner("params", 0, name="w"),)),
    "million": million,
    "unknown": lambda: None,
}


@pytest.mark.parametrize("name", CASES)
def test_a_picture_comes_out(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw_categories(replace(llama(2), memory_use=CASES[name]()), path)
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        width, height = image.size
    assert 10 * DPI <= width <= 22 * DPI
    assert height <= 12 * DPI
    if name == "training":
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24) or ()}
        held = ("params", "grads", "os_state", "activation", "other")
        expected = {tuple(bytes.fromhex(CATEGORY_COLORS[category][1:])) for category in held}  # type: ignore[index]
        assert expected <= colors


def test_its_times_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr("profiler_wrapper.reports.figures.save", lambda figure, path: saved.append(figure))
    use = llama_memory(2)
    begin_ns, ((_, phase), *later) = use.begin_ns - 2_000_000, use.timeline.phase_starts
    use = replace(use, begin_ns=begin_ns, timeline=replace(use.timeline, phase_starts=((begin_ns, phase), *later)))
    draw_categories(replace(llama(2), memory_use=use), "plot.png")
    axes, strip = saved[0].axes
    drawn = next(line for line in axes.lines if line.get_label() == "peak").get_xdata()
    assert drawn[0] == pytest.approx((use.peak.time_ns - memory_curve(use)["start_ns"]) / 1e6)
    assert strip.get_xlabel() == "ms since the recording began"
    first_ms = (use.timeline.time_ns[0] - use.begin_ns) / 1e6
    assert first_ms >= 2 and axes.get_xlim()[0] == pytest.approx(first_ms), "nothing is drawn before it is known"
    drawn_ms = [path.vertices[:, 0].min() for bars in strip.collections for path in bars.get_paths()]
    assert min(drawn_ms) >= first_ms, "nor is a phase, whose name would stand where nobody sees it"


def test_it_says_why_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("profiler_wrapper.reports.figures.say", lambda path, title, message: said.append(message))
    draw_categories(replace(llama(2), warnings=("memory is not available, because of the moon.",)), tmp_path / "p.png")
    assert said == ["Memory by category is not available, because of the moon."]


# ---- colours ----------------------------------------------------------------------------------


def test_every_category_has_its_own_colour() -> None:
    assert set(CATEGORY_COLORS) == set(CATEGORIES)
    assert len(set(CATEGORY_COLORS.values())) == len(CATEGORIES)


def test_like_names_have_like_colours_and_rings_get_lighter() -> None:
    parents = [None, 0, 1, 2, 2, 1, 5, 0]
    labels = ["root", "layers", "0", "mlp", "attn", "1", "mlp", "head"]
    colors = ring_colors(parents, labels, [8, 7, 4, 3, 1, 3, 3, 1], {})
    assert colors[3] == colors[6]  # mlp of both blocks
    assert len({colors[3], colors[4], colors[7]}) == 3
    assert colors[0] == colors[1] == colors[2] != colors[5]  # 1 is told from 0 beside it
    assert ring_colors([None, 0], ["a", "b"], [1, 1], {0: "#000000"})[1] == mixed("#000000", 0.16) == "#292929"


@pytest.mark.parametrize(
    ("color", "ink"),
    [("#0072B2", "#ffffff"), ("#F0E442", "#000000"), ("#c3c8cf", "#000000"), ("#009E73", "#000000")],
)
def test_text_is_readable_on_its_sector(color: str, ink: str) -> None:
    assert ink_on(color) == ink


def test_the_ink_on_any_color_has_contrast() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for color in (f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in product(range(0, 256, 15), repeat=3)):
        low, high = sorted((luminance(color), luminance(ink_on(color))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, color
