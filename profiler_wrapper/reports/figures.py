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
from itertools import count, cycle, pairwise
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.tables.model import MemoryCategory
from profiler_wrapper.tables.statistics import split_number
from profiler_wrapper.trace.recording import Float64, Int64
from profiler_wrapper.units import MIB

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
_LAST_HELD, _ABOVE_HELD = 0.01, 1.1  # of the width and the height of memory over time
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
    """Let matplotlib itself set text, whatever the user's settings, in the user's font."""
    import matplotlib

    with matplotlib.rc_context({"text.usetex": False, "axes.formatter.use_mathtext": False}):
        yield


@contextmanager
def picture(
    path: str | os.PathLike[str],
    title: str,
    *,
    height_in: float,
    bars: int = 0,
    ratios: Sequence[float] = (1,),
    share_x: bool = False,
    foot: str = "",
) -> Iterator[list[Axes]]:
    """Give axes below one another, whose heights are as `ratios`, in a new figure; write it as a PNG at the end."""
    with own_style():
        figure = new_figure(bars, height_in=height_in)
        head(figure, title)
        figure.supxlabel(literal(foot), fontsize=FONT_SIZE)
        yield list(figure.subplots(len(ratios), 1, squeeze=False, sharex=share_x, height_ratios=ratios)[:, 0])
        save(figure, path)


def say(path: str | os.PathLike[str], title: str, message: str) -> None:
    """Write a picture that says why there is nothing to draw."""
    lines = message.split("\n")[:_MESSAGE_LINES]
    wrapped = "\n".join(textwrap.fill(line, _MESSAGE_LETTERS) for line in lines)
    with picture(path, title, height_in=1.0 + 0.25 * (wrapped.count("\n") + 1)) as (axes,):
        axes.set_axis_off()
        axes.text(0.5, 0.5, literal(wrapped), ha="center", va="center", fontsize=FONT_SIZE + 1)


def head(figure: Figure, title: str) -> None:
    """Write the title of a whole figure, smaller where it is long."""
    fitting = _LETTERS_PER_IN * figure.get_figwidth() / max(1, len(title))
    figure.suptitle(literal(title), fontsize=(FONT_SIZE + 3) * min(1.0, fitting), fontweight="bold")


def literal(text: str) -> str:
    """Return `text` as it stands: no part of it is read as a formula, and each line is printable."""
    return "\n".join(clean(line, unicode=True) for line in text.split("\n")).replace("$", r"\$")


def prepare(axes: Axes, *, ylabel: str, xlabel: str = "") -> None:
    """Give axes the plain look of all our pictures."""
    axes.set_ylabel(ylabel, fontsize=FONT_SIZE)
    axes.set_xlabel(xlabel, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE - 1)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_held(
    axes: Axes,
    x: Sequence[float] | Float64,
    bands: Sequence[tuple[str, str, Int64]],
    *,
    reserved_bytes: Int64 | None,
    peak: tuple[float, int],
) -> None:
    """Stack what is held in MiB, with what is reserved and the peak (its x and bytes).

    Bands are a name, a colour, and bytes from each `x` to the next; the last are held so long that they can be seen.
    """
    x = np.append(x, x[-1] + (_LAST_HELD * (x[-1] - x[0]) or 1.0))
    held = np.zeros(len(x))
    for name, color, sizes in bands:
        above = held + np.append(sizes, sizes[-1]) / MIB
        axes.fill_between(x, held, above, step="post", color=color, linewidth=0, label=literal(shorten(name, 100)))
        held = above
    if reserved_bytes is not None:
        held = np.append(reserved_bytes, reserved_bytes[-1]) / MIB
        axes.plot(x, held, "--", color=INK, linewidth=1.2, drawstyle="steps-post", label="reserved")
    axes.plot(peak[0], peak[1] / MIB, "v", color=INK, markersize=8, clip_on=False, zorder=5, label="peak")
    axes.set_xlim(x[0], x[-1])
    from_zero(axes)
    axes.set_ylim(top=axes.get_ylim()[1] * _ABOVE_HELD)


def draw_bars(
    axes: Axes, heights: Sequence[float], bottom: Float64 | None = None, *, color: str, label: str | None = None
) -> None:
    """Draw bars as one shape: a rectangle for each takes half a millisecond, and models have thousands."""
    from matplotlib.collections import PolyCollection

    corners = np.empty((len(heights), 4, 2))
    corners[:, :, 0] = np.arange(len(heights))[:, None] + np.array([-0.4, -0.4, 0.4, 0.4])
    corners[:, :, 1] = 0.0 if bottom is None else bottom[:, None]
    corners[:, 1:3, 1] += np.asarray(heights)[:, None]
    axes.add_collection(PolyCollection(list(corners), facecolors=color, linewidths=0, label=label))
    axes.autoscale_view()


def from_zero(axes: Axes) -> None:
    """Let the vertical axis begin at 0 (or the least value below it), with room for the marks at the top."""
    axes.margins(y=0.0)
    least, most = axes.get_ylim()
    least = min(0.0, least)
    axes.set_ylim(least, most + 0.07 * ((most - least) or 1.0))


def entitle(axes: Axes, title: str, *, pad: float = 8) -> None:
    """Write the title of `axes`, at the left."""
    axes.set_title(literal(title), loc="left", fontsize=FONT_SIZE + 1, fontweight="bold", pad=pad)


def legend_above(axes: Axes, title: str) -> None:
    """Write the title of `axes` and below it the legend, lines after bars, both clear of the data."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        entitle(axes, title)
        return
    lines_last = sorted(zip(handles, labels, strict=True), key=lambda entry: isinstance(entry[0], Line2D))
    columns = max(1, int((figure_of(axes).get_figwidth() - 1.2) / (0.6 + 0.075 * max(map(len, labels)))))
    axes.legend(*zip(*lines_last, strict=True), loc="lower left", bbox_to_anchor=(-0.005, 1.0),
                ncols=min(len(labels), columns), frameon=False, fontsize=FONT_SIZE - 1, borderaxespad=0.2,
                columnspacing=1.4)  # fmt: skip
    rows = -(-len(labels) // columns)
    entitle(axes, title, pad=8 + 16 * rows)


def figure_of(axes: Axes) -> Figure:
    """Return the whole figure that `axes` are in."""
    return axes.figure  # type: ignore[return-value]


def mark_size(points: int) -> float:
    """Return the size of the marks on a line of so many."""
    return 4.5 if points <= _FEW else 2.5


def name_layers(axes: Axes, layers: Sequence[str], *, beside: Sequence[str] = ()) -> list[float]:
    """Write names below the bars 0, 1, ...: of each first in a row of like layers, then numbers, as many as fit.

    Returns where the bars of those `beside` the layers go, at the right.
    """
    room_in = figure_of(axes).get_figwidth() - 1.3
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

    A layer that differs from the one before in a number alone is that number. Numbers that stay are multiples of 1, 2,
    5, 10, ...: of the least that is `numbers_apart`.
    """
    split = [("", None), *map(split_number, layers)]
    numbers = [number if pattern == before else None for (before, _), (pattern, number) in pairwise(split)]
    every = next(step for scale in count() for step in np.array([1, 2, 5]) * 10**scale if step >= numbers_apart)
    taken: list[int] = []
    for i in sorted(range(len(layers)), key=lambda i: numbers[i] is not None):  # names first
        if (numbers[i] or 0) % every == 0 and all(abs(i - other) >= apart for other in taken):
            taken.append(i)
    taken.sort()
    names = short_names(layers)
    texts = [names[i] if numbers[i] is None else str(numbers[i]) for i in taken]
    return taken, [shorten(clean(text, unicode=True), _LONGEST_LABEL) for text in texts]


def short_names(layers: Sequence[str]) -> list[str]:
    """Return the last part of each name, two if it is a number; whole names where short ones are equal."""
    split = [layer.split(".") for layer in layers]
    short = [".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) for parts in split]
    seen = Counter(name for name, _ in set(zip(short, layers, strict=True)))
    return [name if seen[name] == 1 else layer for name, layer in zip(short, layers, strict=True)]


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
    leads = {i for i, label in enumerate(labels) if label.isdecimal()}  # to a number, or is one
    for i in range(len(parents) - 1, 0, -1):
        if i in leads:
            leads.add(parents[i] or 0)
    tops: list[int | None] = []  # the outermost sector around each that has a colour; None: plain
    by_label = Counter[str]()
    for i, parent in enumerate(parents):
        plain = i not in fixed and (parent is None or i in leads)
        above = None if parent is None else tops[parent]
        tops.append(above if above is not None else None if plain else i)
        if tops[i] == i and i not in fixed:
            by_label[labels[i]] += sizes[i]
    colors = dict(zip((label for label, _ in by_label.most_common()), cycle(ROLE_COLORS), strict=False))
    found: list[str] = []
    for i, parent in enumerate(parents):
        if i in fixed:
            color = fixed[i]
        elif tops[i] is None:
            color = PLAIN
        else:
            color = colors[labels[i]] if tops[i] == i else mixed(found[parent or 0], _LIGHTER)
        uneven = labels[i].isdecimal() and int(labels[i][-1]) % 2 == 1
        found.append(mixed(color, _OTHER) if uneven else color)
    return found


def mixed(color: str, share: float) -> str:
    """Mix so much white into `color` (`#rrggbb`): 0 none, 1 all."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (_WHITE - part) * share):02x}" for part in parts)


def ink_on(color: str) -> str:
    """Return black or white, whichever is read more easily on `color`: the contrast is at least 4.5."""
    red, green, blue = ((int(color[i : i + 2], 16) / _WHITE) ** 2.2 for i in (1, 3, 5))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"
