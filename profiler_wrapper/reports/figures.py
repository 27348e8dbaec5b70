"""How our figures look: colours, sizes, layer names on an axis, and saving. Nothing of what they show.

Figures are made without pyplot, so nothing of the user's own plotting changes.
"""

from __future__ import annotations

import math
import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.model import MemoryCategory
from profiler_wrapper.analysis.statistics import split_number
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The colours of classes of events, parts of a step, phases, kinds of layers and categories of memory: one for each in
# every picture and page.
#
# Chosen to be distinct on white and on dark paper and with any colour vision; those that Okabe and Ito ("Color
# Universal Design", 2008) have are theirs.

CLASS_COLORS: Mapping[str, str] = {
    "gemm": "#0072B2",
    "attention": "#D55E00",
    "norm": "#009E73",
    "softmax": "#CC79A7",
    "elementwise": "#56B4E9",
    "reduction": "#B5A300",
    "embedding": "#A05195",
    "copy": "#8C6D31",
    "communication": "#E69F00",
    "optimizer": "#7B6FD0",
    "other": "#999999",
}
# Of each part of a step's wall time: its colour, its name where a device does the work, and where the CPU does.
_SPLIT = {
    "kernel": ("#0072B2", "Kernels", "Kernels"),
    "communication": ("#E69F00", "Exposed communication", "Communication"),
    "memcpy": ("#8C6D31", "Copies", "Copies"),
    "memset": ("#CC79A7", "Sets", "Sets"),
    "runtime": ("#D55E00", "Idle: CPU in runtime calls", "Runtime calls"),
    "dataloader": ("#882255", "Idle: waiting for data", "Waiting for data"),
    "cpu": ("#009E73", "Idle: CPU in ops", "In ops"),
    "other": ("#999999", "Idle: Python between ops", "Between ops"),
}
SPLIT_COLORS: Mapping[str, str] = {part: color for part, (color, _, _) in _SPLIT.items()}
SPLIT_NAMES: Mapping[str, tuple[str, str]] = {
    part: (on_device, on_cpu) for part, (_, on_device, on_cpu) in _SPLIT.items()
}
PHASE_COLORS: Mapping[str, str] = {
    "forward": "#0072B2",
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "verify": "#882255",
    "backward": "#E69F00",
    "recompute": "#009E73",
    "accumulate_grad": "#EBCBDD",  # pale, as beside the optimizer
    "optimizer": "#CC79A7",
    "other": "#999999",
}
KIND_COLORS: Mapping[str, str] = {
    "attention": "#D55E00",
    "mlp": "#0072B2",
    "expert": "#0072B2",
    "router": "#56B4E9",
    "norm": "#009E73",
    "embedding": "#CC79A7",
    "head": "#E69F00",
    "block": "#332288",
    "conv": "#882255",
}
OTHER_KIND = "#777777"
CATEGORY_COLORS: Mapping[MemoryCategory, str] = {
    "params": "#0072B2",
    "grads": "#E69F00",
    "os_params": "#CC79A7",
    "os_state": "#D55E00",
    "activation": "#009E73",
    "communication": "#F0E442",
    "workspace": "#56B4E9",
    "other": "#999999",
}
INK = "#1a1a1a"
ATTENTION_COLORS = (INK, "#D55E00", "#882255", "#117733", "#666666", "#332288")
GRID = "#d9d9d9"

DPI = 110
NARROWEST_IN, WIDEST_IN = 10.0, 22.0
FONT_SIZE = 10
_LABEL_IN = 0.155  # the width that one label standing upright takes
_MANY, _NUMBERS_IN = 60, 0.5  # among more layers, numbers stand further apart
_LONGEST_LABEL = 26
_LEAST_BESIDE = 0.035  # of the axis: room for the number of a bar beside the layers
_MESSAGE_LETTERS, _MESSAGE_LINES = 90, 6
_LETTERS_PER_IN = 8.2  # of a figure's title
_FEW = 60  # up to here lines carry large marks


def new_figure(bars: int, *, height_in: float) -> Figure:
    """Return an empty figure wide enough for `bars` bars beside one another."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08, hspace=0.05)
    width = min(WIDEST_IN, max(NARROWEST_IN, 3.5 + 0.14 * bars))
    return Figure(figsize=(width, height_in), dpi=DPI, layout=layout, facecolor="white")


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a PNG of the figure's own size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a box stands for it
        canvas.print_png(os.fspath(path), metadata={"Software": None})  # type: ignore[no-untyped-call]


@contextmanager
def own_style() -> Iterator[None]:
    """Have text set by matplotlib itself, whatever the user's settings, in the user's font."""
    import matplotlib

    with matplotlib.rc_context({"text.usetex": False, "axes.formatter.use_mathtext": False}):
        yield


def say(path: str | os.PathLike[str], title: str, message: str) -> None:
    """Draw a picture that says why there is nothing to draw."""
    wrapped = "\n".join(textwrap.fill(line, _MESSAGE_LETTERS) for line in message.split("\n")[:_MESSAGE_LINES])
    figure = new_figure(0, height_in=1.0 + 0.25 * (wrapped.count("\n") + 1))
    head(figure, title)
    figure.text(0.5, 0.4, literal(wrapped), ha="center", va="center", fontsize=FONT_SIZE + 1)
    save(figure, path)


def head(figure: Figure, title: str) -> None:
    """Set the title of a whole figure, smaller where it is long."""
    fitting = _LETTERS_PER_IN * figure.get_figwidth() / max(1, len(title))
    figure.suptitle(literal(title), fontsize=(FONT_SIZE + 3) * min(1.0, fitting), fontweight="bold")


def foot(figure: Figure, text: str, *, size: int = FONT_SIZE) -> None:
    """Set the text below a whole figure, if there is any."""
    if text:
        figure.supxlabel(literal(text), fontsize=size)


def literal(text: str) -> str:
    """Return `text` as it stands: on one line, and no part of it read as a formula."""
    return "\n".join(clean(line, unicode=True) for line in text.split("\n")).replace("$", r"\$")


def prepare(axes: Axes, *, ylabel: str) -> None:
    """Give axes the plain look of all our figures."""
    axes.set_ylabel(ylabel, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_bars(
    axes: Axes, heights: Sequence[float], bottom: Sequence[float] | None = None, *, color: str, label: str | None = None
) -> None:
    """Draw bars side by side as one shape: a rectangle each takes half a millisecond, and models have thousands."""
    from matplotlib.collections import PolyCollection

    corners = np.empty((len(heights), 4, 2))
    corners[:, :, 0] = np.arange(len(heights))[:, None] + np.array([-0.4, -0.4, 0.4, 0.4])
    corners[:, :, 1] = 0.0 if bottom is None else np.asarray(bottom)[:, None]
    corners[:, 1:3, 1] += np.asarray(heights)[:, None]
    axes.add_collection(PolyCollection(list(corners), facecolors=color, linewidths=0, label=label))
    axes.autoscale_view()


def from_zero(axes: Axes) -> None:
    """Begin the vertical axis at 0 (or the least value below it), with room for the marks at the top."""
    axes.margins(y=0.0)
    least, most = axes.get_ylim()
    least = min(0.0, least)
    axes.set_ylim(least, most + 0.07 * ((most - least) or 1.0))


def entitle(axes: Axes, title: str, *, pad: float = 8) -> None:
    """Set the title of `axes`, at the left."""
    axes.set_title(literal(title), loc="left", fontsize=FONT_SIZE + 1, fontweight="bold", pad=pad)


def legend_above(axes: Axes, title: str) -> None:
    """Set the title of `axes` and below it the legend, lines after bars, both clear of the data."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        entitle(axes, title)
        return
    lines_last = sorted(zip(handles, labels, strict=True), key=lambda entry: isinstance(entry[0], Line2D))
    width_in = axes.figure.get_figwidth()  # type: ignore[union-attr]
    columns = max(1, int((width_in - 1.2) / (0.6 + 0.075 * max(map(len, labels)))))
    axes.legend(*zip(*lines_last, strict=True), loc="lower left", bbox_to_anchor=(-0.005, 1.0),
                ncols=min(len(labels), columns), frameon=False, fontsize=FONT_SIZE - 1, borderaxespad=0.2,
                columnspacing=1.4)  # fmt: skip
    rows = -(-len(labels) // columns)
    entitle(axes, title, pad=8 + 16 * rows)


def mark_size(points: int) -> float:
    """Return the size of the marks on a line of so many."""
    return 4.5 if points <= _FEW else 2.5


def name_layers(axes: Axes, layers: Sequence[str], width_in: float, *, beside: Sequence[str] = ()) -> list[float]:
    """Write names below the bars 0, 1, ...: of each first in a row of like layers, then numbers, as many as fit.

    Returns where the bars of those `beside` the layers go, at the right.
    """
    room_in = width_in - 1.3
    per_label = len(layers) / max(2, int(room_in / _LABEL_IN))
    per_number = len(layers) * _NUMBERS_IN / room_in if len(layers) > _MANY else per_label
    positions, texts = layer_ticks(layers, apart=math.ceil(per_label), numbers_apart=math.ceil(per_number))
    apart = max(1.0, _LEAST_BESIDE * len(layers))
    places = [len(layers) - 0.5 + apart * (i + 1) for i in range(len(beside))]
    kept = [(at, text) for at, text in zip(positions, texts, strict=True) if not places or places[0] - at >= per_label]
    ticks = [*kept, *zip(places, beside, strict=True)]
    labels = [literal(text) for _, text in ticks]
    axes.set_xticks([at for at, _ in ticks], labels, rotation=90, fontsize=FONT_SIZE - 2)
    axes.set_xlim(-0.8, (places[-1] + 0.5 * apart if places else len(layers) - 0.5) + 0.3)
    return places


def layer_ticks(layers: Sequence[str], *, apart: int, numbers_apart: int) -> tuple[list[int], list[str]]:
    """Return where ticks go and what they say: names come before numbers, and `apart` bars lie between two.

    Numbers that stay are multiples of 1, 2, 5, 10, ...: of the least that is `numbers_apart`.
    """
    names, numbers = short_names(layers), layer_numbers(layers)
    every = next(
        step for scale in count() for step in (round(part * 10.0**scale) for part in (1, 2, 5)) if step >= numbers_apart
    )
    taken: list[int] = []
    for i in sorted(range(len(layers)), key=lambda i: numbers[i] is not None):  # names first
        if (numbers[i] or 0) % every == 0 and all(abs(i - other) >= apart for other in taken):
            taken.append(i)
    taken.sort()
    texts = [names[i] if numbers[i] is None else str(numbers[i]) for i in taken]
    return taken, [shorten(clean(text, unicode=True), _LONGEST_LABEL) for text in texts]


def layer_numbers(layers: Sequence[str]) -> list[int | None]:
    """Return the number of each layer that differs only in it from the layer before; None for the others.

    `["embed", "layers.0", "layers.1", "norm"]` gives `[None, None, 1, None]`.
    """
    split = [split_number(layer) for layer in layers]
    before = [None, *(pattern for pattern, _ in split)]
    return [number if pattern == other else None for (pattern, number), other in zip(split, before, strict=False)]


def short_names(layers: Sequence[str]) -> list[str]:
    """Return the last part of each name, with the part before it for a number; whole where short ones are equal."""
    short = [_last_parts(layer) for layer in layers]
    counts = Counter(zip(short, layers, strict=True))
    seen = Counter(name for name, _ in counts)
    return [name if seen[name] == 1 else layer for name, layer in zip(short, layers, strict=True)]


def _last_parts(layer: str) -> str:
    before, _, last = layer.rpartition(".")
    return ".".join([*before.rpartition(".")[2:], last]) if last.isdigit() and before else last


# The colours of the rings of a sunburst.

PLAIN = "#c3c8cf"  # of a name that only holds others
ROLE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#8c6bb1")
_LIGHTER, _OTHER = 0.16, 0.22  # of a ring against the one inside it; of every other sector
_WHITE = 255


def ring_colors(
    parents: Sequence[int | None], labels: Sequence[str], sizes: Sequence[int], fixed: Mapping[int, str]
) -> list[str]:
    """Return a colour for each sector of a sunburst; parents stand before their children.

    Names that only lead to numbered layers, and these, are plain. Below them like names have like
    colours, the largest the first ones, and each ring is lighter than the one inside it. `fixed`
    gives sectors that have their colour already.
    """
    leads = [label.isdecimal() for label in labels]  # to a number, or is one
    for i in range(len(parents) - 1, 0, -1):
        parent = parents[i]
        if parent is not None:
            leads[parent] = leads[parent] or leads[i]
    roles: list[str] = []  # "": plain
    by_role: Counter[str] = Counter()
    for i, parent in enumerate(parents):
        above = "" if parent is None else roles[parent]
        plain = i not in fixed and not above and (parent is None or leads[i])
        roles.append(above or ("" if plain else labels[i]))
        if not above and not plain and i not in fixed:
            by_role[labels[i]] += sizes[i]
    colors = {name: ROLE_COLORS[i % len(ROLE_COLORS)] for i, (name, _) in enumerate(by_role.most_common())}
    found: list[str] = []
    for i, parent in enumerate(parents):
        if i in fixed:
            color = fixed[i]
        elif not roles[i] or parent is None:
            color = PLAIN
        else:
            color = mixed(found[parent], _LIGHTER) if roles[parent] else colors[roles[i]]
        uneven = labels[i].isdecimal() and int(labels[i][-1]) % 2 == 1
        found.append(mixed(color, _OTHER) if uneven else color)
    return found


def mixed(color: str, share: float) -> str:
    """Mix `color` (`#rrggbb`) with a share of white, 0 to 1."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (_WHITE - part) * share):02x}" for part in parts)


def ink_on(color: str) -> str:
    """Return black or white, whichever is read more easily on `color`: the contrast is at least 4.5."""
    red, green, blue = ((int(color[i : i + 2], 16) / _WHITE) ** 2.2 for i in (1, 3, 5))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"
