"""Names beside the points of a plot that lie on nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.reports import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_POINTS_PER_IN = 72
_GAP = 4.0  # points between a mark and its name
_ALONG_LINE = 4.0  # pixels between the boxes that stand for a line


class Named(NamedTuple):
    """A mark: where it is in the data, its radius in points, and its name."""

    x: float
    y: float
    radius: float
    name: str


class _Box(NamedTuple):
    """In pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: _Box) -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def lies_in(self, other: _Box) -> bool:
        return self.x0 >= other.x0 and self.x1 <= other.x1 and self.y0 >= other.y0 and self.y1 <= other.y1


def name_points(axes: Axes, points: Sequence[Named]) -> None:
    """Names by the order of the points; one that would lie on another, a mark or a line is moved, or left out.

    A name that is there once is written again only right beside its mark. The figure must have been laid out, and
    must not be laid out again.
    """
    pixels = axes.figure.dpi / _POINTS_PER_IN
    centres = [tuple(axes.transData.transform((point.x, point.y)).tolist()) for point in points]
    taken = [
        _Box(x - point.radius * pixels, y - point.radius * pixels, x + point.radius * pixels, y + point.radius * pixels)
        for (x, y), point in zip(centres, points, strict=True)
    ]
    legend = axes.get_legend()
    taken += [_box(text.get_window_extent()) for text in axes.texts]
    taken += [] if legend is None else [_box(legend.get_window_extent())]
    taken += _boxes_along_lines(axes)
    inside = _box(axes.get_window_extent())
    written: set[str] = set()
    for (x, y), point in zip(centres, points, strict=True):
        text = axes.text(0.5, 0.5, point.name, fontsize=figures.FONT_SIZE - 1, transform=axes.transAxes)
        extent = text.get_window_extent()
        text.remove()
        for away, across, up in _places(point.radius):
            if away and point.name in written:
                break
            box = _at(x + across * pixels, y + up * pixels, extent.width, extent.height, across, up)
            if box.lies_in(inside) and not any(box.overlaps(other) for other in taken):
                _write(axes, point, across, up, away=away)
                taken.append(box)
                written.add(point.name)
                break


def _places(radius: float) -> list[tuple[bool, float, float]]:
    """Where a name may stand, in points from its mark, the nearest first; and whether a line leads there."""
    beside = radius + _GAP
    near = [(False, beside, 0.0), (False, -beside, 0.0), (False, 0.0, beside), (False, 0.0, -beside)]
    heights = (22.0, -22.0, 40.0, -40.0, 60.0, -60.0, 85.0, -85.0)
    return near + [(True, sign * across, up) for up in heights for across in (16.0, 34.0) for sign in (1, -1)]


def _at(x: float, y: float, width: float, height: float, across: float, up: float) -> _Box:
    """A text that stands to the right or left of an anchor, or above or below it."""
    x0 = x if across > 0 else x - width if across < 0 else x - width / 2
    y0 = y - height / 2 if across else y if up > 0 else y - height
    return _Box(x0, y0, x0 + width, y0 + height)


def _write(axes: Axes, point: Named, across: float, up: float, *, away: bool) -> None:
    axes.annotate(
        point.name,
        (point.x, point.y),
        (across, up),
        textcoords="offset points",
        ha="left" if across > 0 else "right" if across < 0 else "center",
        va="center" if across else "bottom" if up > 0 else "top",
        fontsize=figures.FONT_SIZE - 1,
        zorder=4,
        arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.7} if away else None,
    )


def _box(box: Bbox) -> _Box:
    return _Box(box.x0, box.y0, box.x1, box.y1)


def _boxes_along_lines(axes: Axes) -> list[_Box]:
    """What the straight lines cover."""
    boxes = []
    for line in axes.get_lines():
        across, up = (np.asarray(values, dtype=np.float64) for values in line.get_data())
        (x0, y0), (x1, y1) = axes.transData.transform(np.stack([across, up], axis=1)[[0, -1]]).tolist()
        pieces = max(1, round(math.hypot(x1 - x0, y1 - y0) / _ALONG_LINE))
        for piece in range(pieces + 1):
            x, y = x0 + (x1 - x0) * piece / pieces, y0 + (y1 - y0) * piece / pieces
            boxes.append(_Box(x - 2, y - 2, x + 2, y + 2))
    return boxes
