"""How our figures look: colours, sizes, layer names on an axis, and saving. Nothing of what they show.

Figures are made without pyplot, so nothing of the user's own plotting changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from profiler_wrapper.reports.plot_rows import layer_numbers, short_names
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
NARROWEST_IN, WIDEST_IN = 10.0, 22.0
FONT_SIZE = 10
_LABEL_IN = 0.155  # the width that one label standing upright takes
_LONGEST_LABEL = 26
_STEPS = (1, 2, 5)

# Okabe and Ito, "Color Universal Design" (2008): told apart with any colour vision.
PHASE_COLORS: Mapping[str, str] = {
    "forward": "#0072B2",
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "backward": "#E69F00",
    "recompute": "#009E73",
    "accumulate_grad": "#CC79A7",
    "optimizer": "#CC79A7",
    "other": "#999999",
}
INK = "#1a1a1a"
ATTENTION_COLORS = (INK, "#D55E00", "#882255", "#117733", "#666666", "#332288")
GRID = "#d9d9d9"


def new_figure(bars: int, *, height_in: float) -> Figure:
    """An empty figure wide enough for `bars` bars beside one another."""
    from matplotlib.figure import Figure

    width = min(WIDEST_IN, max(NARROWEST_IN, 3.5 + 0.14 * bars))
    figure = Figure(figsize=(width, height_in), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08, hspace=0.05)  # type: ignore[union-attr]
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(os.fspath(path), metadata={"Software": None})


def say(path: str | os.PathLike[str], title: str, message: str) -> None:
    """A picture that says why there is nothing to draw."""
    figure = new_figure(0, height_in=3.0)
    figure.suptitle(literal(title), fontsize=FONT_SIZE + 3, fontweight="bold")
    figure.text(0.5, 0.45, literal(message), ha="center", va="center", fontsize=FONT_SIZE + 1, wrap=True)
    save(figure, path)


def literal(text: str) -> str:
    """`text` as it stands: on one line, and no part of it read as a formula."""
    return "\n".join(clean(line, unicode=True) for line in text.split("\n")).replace("$", r"\$")


def prepare(axes: Axes, *, ylabel: str) -> None:
    """The plain look of all our axes."""
    axes.set_ylabel(ylabel, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_above(axes: Axes, title: str) -> None:
    """The title of `axes` and below it the legend, lines after bars, both clear of the data."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        axes.set_title(literal(title), loc="left", fontsize=FONT_SIZE + 1, fontweight="bold", pad=8)
        return
    entries = sorted(zip(handles, labels, strict=True), key=lambda entry: isinstance(entry[0], Line2D))
    width_in = axes.figure.get_figwidth()  # type: ignore[union-attr]
    columns = max(1, int((width_in - 1.2) / (0.6 + 0.075 * max(map(len, labels)))))
    axes.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="lower left",
        bbox_to_anchor=(-0.005, 1.0),
        ncols=min(len(labels), columns),
        frameon=False,
        fontsize=FONT_SIZE - 1,
        borderaxespad=0.2,
        columnspacing=1.4,
    )
    rows = -(-len(labels) // columns)
    axes.set_title(literal(title), loc="left", fontsize=FONT_SIZE + 1, fontweight="bold", pad=8 + 16 * rows)


def name_layers(axes: Axes, layers: Sequence[str], width_in: float) -> None:
    """Names below the bars 0, 1, ...: of each first in a row of like layers, then numbers, as many as fit."""
    positions, texts = layer_ticks(layers, most=max(2, int((width_in - 1.3) / _LABEL_IN)))
    axes.set_xticks(positions, [literal(text) for text in texts], rotation=90, fontsize=FONT_SIZE - 2)
    axes.set_xlim(-0.8, len(layers) - 0.2)


def layer_ticks(layers: Sequence[str], *, most: int) -> tuple[list[int], list[str]]:
    """Where ticks go and what they say: at most `most`, with room for each.

    Names come before numbers; numbers that stay are multiples of 1, 2, 5, 10, ...
    """
    labels = list(zip(short_names(layers), layer_numbers(layers), strict=True))
    apart = max(1, -(-len(layers) // most))  # bars from one label to the next
    named = [i for i, (_, number) in enumerate(labels) if number is None]
    taken: list[int] = []
    for i in named:
        if not taken or i - taken[-1] >= apart:
            taken.append(i)
    every = _nice_step(apart)
    for i, (_, number) in enumerate(labels):
        if number is not None and number % every == 0 and all(abs(i - other) >= apart for other in _near(taken, i)):
            taken.append(i)
            taken.sort()
    texts = [labels[i][0] if labels[i][1] is None else str(labels[i][1]) for i in taken]
    return taken, [shorten(clean(text, unicode=True), _LONGEST_LABEL) for text in texts]


def _near(taken: Sequence[int], position: int) -> list[int]:
    """The ticks on either side of `position`."""
    from bisect import bisect

    at = bisect(taken, position)
    return list(taken[max(0, at - 1) : at + 1])


def _nice_step(at_least: int) -> int:
    scale = 1
    while True:
        for step in _STEPS:
            if step * scale >= at_least:
                return step * scale
        scale *= 10
